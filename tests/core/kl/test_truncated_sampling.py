"""Truncated sampling with a real engine: the trainer's numbers over the sampler's ids, and the bias without them.

The oracle is the model's own forward, one row at a time, in float32.
"""

import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import LLMPolicy, token_sets
from corelm.kl import ImportanceCorrection, RetrieveLogProb
from helpers.kl_cases import LAYOUTS, rows_of
from helpers.tiny_models import tiny_model, tiny_tokenizer

HEAT = 0.7
TEXTS = ["Hello there, who are you?", "Hi", "What is it"]
CASES = pytest.mark.parametrize(
    "cut", [{"top_p": 0.8}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.02}], ids=lambda cut: "+".join(cut)
)


@pytest.fixture(scope="module")
def model():
    return tiny_model(seed=0)


@pytest.fixture(scope="module")
def backend(model):
    with corelm.get_backend("transformers", model, tokenizer=tiny_tokenizer()) as opened:
        yield opened


def rollout(backend, cut, pad=False, **changes):
    options = {"log_probs_mode": "processed", "return_support": True, "pad_output": pad, **changes}
    sampling = {"max_new_tokens": 12, "temperature": HEAT, **cut}
    return LLMPolicy(backend, input_mode="text", sampling_params=sampling, **options)(TensorDict(text=TEXTS), seed=1)


def whole(model, td):
    """Return float32[tokens, V]: the log-probs at the temperature that predict each sampled token, row after row."""
    prompts = corelm.ragged(td, ("tokens", "prompt")).lengths.tolist()
    made = []
    for start, ids in zip(prompts, corelm.ragged(td, ("tokens", "full")).tolist(), strict=True):
        with torch.no_grad():
            made.append((model(input_ids=torch.tensor([ids])).logits[0].float() / HEAT).log_softmax(-1)[start - 1 : -1])
    return torch.cat(made)


@LAYOUTS
@CASES
def test_weights_are_one_over_the_ids_of_the_sampler(model, backend, cut, pad):
    td = rollout(backend, cut, pad)
    RetrieveLogProb(LLMPolicy(backend, input_mode="text"), log_probs_key="train_log_probs")(td)
    ImportanceCorrection(high=None)(td)
    said = corelm.ragged(td, ("log_probs", "scored_mask"))
    weights = torch.cat(list(rows_of(td, "importance_weights")))
    torch.testing.assert_close(weights[said.values], torch.ones(int(said.values.sum())), atol=1e-4, rtol=0)
    # Both are the plain forward's numbers over these ids, and their mass is the one that was kept.
    predicted = whole(model, td)
    sets = [ids for ids, on in zip(token_sets(td).ids.tolist(), said.values.tolist(), strict=True) if on]
    mass = torch.stack([row[ids].logsumexp(-1) for row, ids in zip(predicted, sets, strict=True)])
    answer = corelm.ragged(td, ("tokens", "response")).values
    expected = predicted.gather(-1, answer[:, None])[:, 0] - mass
    for key, values in ((("log_probs", "kept_log_mass"), mass), *(((name, "full"), expected) for name in _SCORINGS)):
        torch.testing.assert_close(corelm.ragged(td, key).values[said.values], values, atol=5e-5, rtol=0)


_SCORINGS = ("log_probs", "train_log_probs")
