"""The requests that vLLM gets for each row, and rows that it refuses."""

from __future__ import annotations

import re

import pytest
import torch
from vllm import SamplingParams as TheirSamplingParams

from corelm import Backend, SamplingParams
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from helpers import oracle
from helpers.requests import scoring
from helpers.tiny_models import CONTEXT, VOCAB, random_rows, tiny_model
from vllm_backend.engine_async import AsyncEngine

MODEL = tiny_model(hidden_size=128)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=0, atol=1e-4)


# Refused by the engine ------------------------------------------------------------------------------------------------


def test_a_prompt_that_vllm_refuses_does_not_affect_the_others(shared: Backend) -> None:
    # The second prompt is valid, but leaves no room for min_new_tokens.
    # vLLM looks for stop strings in a prompt that ends in the middle of a character, as random ids may.
    letter = shared.tokenize(["a"]).ids.tolist()[0]
    prompts = [row + letter for row in random_rows(4, CONTEXT - 11, 6)]
    sampling = {"max_new_tokens": None, "min_new_tokens": 40, "stop": ["e"]}
    result = shared.generate(prompts, sampling, on_error="skip")
    assert result.errors is not None and [bool(text) for text in result.errors] == [False, True, False]
    assert "min_tokens" in result.errors[1] and result.finish_reasons[1] == "error"
    assert int(result.ids.lengths[1]) == 0 and bool((result.ids.lengths[[0, 2]] >= 40).all())
    assert result.logprobs is not None
    for prompt, answer, found in zip(prompts, result.ids.tolist(), result.logprobs.split(), strict=True):
        assert close(found, oracle.answer_logprobs(MODEL, prompt, answer))
    with pytest.raises(EngineError) as caught:
        shared.generate(prompts, sampling)
    assert caught.value.usable and caught.value.problems.keys() == {1}
    assert shared.health()


def test_a_sequence_that_vllm_refuses_does_not_affect_the_others(engine: AsyncEngine) -> None:
    # The plugin is called directly, since core would refuse the second sequence.
    rows = [*random_rows(5), [3, VOCAB + 7, 4], *random_rows(6, seed=1)]
    result = engine.score_logprobs(scoring(rows, [1, 1, 3]))
    assert result.errors is not None and [bool(text) for text in result.errors] == [False, True, False]
    found, scored = result.logprobs.split(), result.scored.split()
    assert not scored[1].any() and not found[1].any()
    assert scored[0].tolist() == [False] + [True] * 4 and scored[2].tolist() == [False] * 3 + [True] * 3
    assert close(found[0], oracle.logprobs(MODEL, rows[0]))
    assert close(found[2][3:], oracle.logprobs(MODEL, rows[2])[3:])


def test_raw_log_probs_are_refused_with_a_grammar(shared: Backend) -> None:
    with pytest.raises(CapabilityError, match="structured_outputs"):
        shared.generate([[5, 6]], {"max_new_tokens": 2, "engine_kwargs": {"structured_outputs": {"regex": "a*"}}})


def test_a_dict_stands_for_an_object_of_vllm(shared: Backend) -> None:
    """As in a request to a server. vLLM does not check its type, and the engine ended (0.32)."""
    prompts = random_rows(5, 9)
    for field, value in (("choice", ["ab", "ba"]), ("regex", "a[ab]")):
        sampling = {"max_new_tokens": 8, "engine_kwargs": {"structured_outputs": {field: value}}, "seed": 1}
        result = shared.generate(prompts, sampling, logprobs="none")
        assert {*shared.detokenize(result.ids)} <= {"ab", "ba", "aa"} and {*result.finish_reasons} == {"stop"}
    often = {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 3}
    repeat = {"allowed_token_ids": [7], "repetition_detection": often}
    result = shared.generate(prompts, {"max_new_tokens": 8, "engine_kwargs": repeat})
    assert result.ids.lengths.tolist() == [3, 3] and {*result.finish_reasons} == {"stop"}


def test_sampling_params_of_vllm_are_read_field_by_field() -> None:
    assert SamplingParams.make(TheirSamplingParams()) == SamplingParams(max_new_tokens=16)
    given = {"temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["x"], "seed": 3, "max_tokens": 4}
    assert SamplingParams.make(TheirSamplingParams(**given)) == SamplingParams.make(given)
    only_theirs = {"logit_bias": {1: 2.0}, "allowed_token_ids": [3]}
    assert SamplingParams.make(TheirSamplingParams(**only_theirs, detokenize=False)).engine_kwargs == only_theirs
    for name, value in {"logprobs": 3, "prompt_logprobs": 2, "include_stop_str_in_output": True}.items():
        with pytest.raises(InvalidRequestError, match="has no equal here") as caught:
            SamplingParams.make(TheirSamplingParams(**{name: value}))
        assert caught.value.field == name


@pytest.mark.parametrize(
    ("kwargs", "hint"),
    [
        ({"structured_outputs": {"regexp": "a"}}, "no field 'regexp'; did you mean 'regex'"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "vLLM refuses structured_outputs"),
        ({"structured_outputs": {"_backend": "x"}}, "has no field '_backend'"),
        ({"structured_outputs": "a"}, "expected structured_outputs as a dict"),
        ({"repetition_detection": {"max_size": 2}}, "RepetitionDetectionParams has no field 'max_size'"),
    ],
)
def test_a_dict_that_makes_no_object_of_vllm_is_refused(shared: Backend, kwargs: dict[str, object], hint: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(hint)) as caught:
        shared.generate([[5, 6]], {"engine_kwargs": kwargs}, logprobs="none")
    assert caught.value.field == "engine_kwargs" and shared.health()


@pytest.mark.parametrize(
    ("kwargs", "hint"),
    [
        ({"alowed_token_ids": [7]}, "allowed_token_ids"),
        ({"temperature": 0.5}, "give temperature=0.5 next to it"),
        ({"min_tokens": 3}, "give min_new_tokens=3 next to it"),
        ({"logprobs": 5}, "log_probs_mode"),
    ],
)
def test_engine_kwargs_that_vllm_does_not_know_or_corelm_sets_are_refused(
    shared: Backend, kwargs: dict[str, object], hint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=hint) as caught:
        shared.generate([[5, 6]], {"engine_kwargs": kwargs})
    assert caught.value.field == "engine_kwargs"


def test_an_ignored_eos_may_be_sampled_before_min_new_tokens(shared: Backend) -> None:
    (eos,) = shared.eos_token_ids
    prompts = random_rows(*[6] * 200, seed=5)
    chances = torch.stack([oracle.next_logits(MODEL, prompt)[-1].softmax(-1)[eos] for prompt in prompts])
    draws = int(20 / float(chances.max()))
    sampling = {
        "max_new_tokens": 2,
        "min_new_tokens": 2,
        "ignore_eos": True,
        "stop": ["never"],
        "num_samples": draws,
        "seed": 1,
    }
    result = shared.generate([prompts[int(chances.argmax())]], sampling, logprobs="none")
    first = torch.tensor(result.ids.tolist())[:, 0]
    assert draws < 5000 and 5 < int((first == eos).sum()) < 50
