"""The conformance kit on a real `transformers serve`: it takes text, returns text, and knows no log-probs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tensordict import TensorDict
from torch import nn

import corelm
from corelm import Backend, History, LLMPolicy
from corelm.errors import CapabilityError, EngineError
from corelm_testing import BackendConformance
from helpers import oracle
from helpers.letters import EOS, letter_model, letter_tokenizer, letters
from helpers.oracle_kit import OracleKit
from helpers.transformers_server import ENDLESS, SAMPLES, TransformersServer


@pytest.mark.nightly
class TestTransformersServe(OracleKit, BackendConformance):
    """Nothing ends an answer here, so that the kit can ask for answers of every length."""

    model: ClassVar[nn.Module] = letter_model(ends=False)
    # Each answer is an HTTP request of its own.
    draws = 300

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls, folders: dict[bool, Path], transformers_server: TransformersServer) -> Callable[[], Backend]:
        options: dict[str, Any] = {"base_url": transformers_server.url, "tokenizer": folders[False]}
        options |= {"extra_body": ENDLESS, "eos_token_ids": (), "max_context": 512}
        return partial(corelm.get_backend, "openai", str(folders[False]), **options)

    def rows(self, backend: Backend, *lengths: int, seed: int = 0) -> list[list[int]]:
        """Return rows of letters: the server takes text, so no row may hold a part of a character."""
        generator = random.Random(seed)
        return [generator.choices(letters(), k=length) for length in lengths]

    @pytest.mark.xfail(reason="the server does not say which ids it has sampled, so none can end an answer")
    def test_an_answer_ends_with_its_stop_id_and_keeps_it(self, backend: Backend) -> None:
        super().test_an_answer_ends_with_its_stop_id_and_keeps_it(backend)

    @pytest.mark.xfail(reason="no id ends an answer here, and the test uses one")
    def test_a_special_token_in_plain_text_is_not_parsed(self, backend: Backend) -> None:
        super().test_a_special_token_in_plain_text_is_not_parsed(backend)

    @pytest.mark.xfail(reason="no id ends an answer here, and the test uses one")
    def test_markup_in_a_message_stays_text(self, backend: Backend) -> None:
        super().test_markup_in_a_message_stays_text(backend)


@pytest.fixture(scope="module")
def ending(folders: dict[bool, Path], transformers_server: TransformersServer) -> Iterator[Backend]:
    """The backend on a model that ends its answers."""
    options = {"base_url": transformers_server.url, "tokenizer": folders[True], "extra_body": SAMPLES}
    with corelm.get_backend("openai", str(folders[True]), **options) as backend:
        yield backend


NOT_KNOWN = (
    "the server's reply does not fit the request: its text is encoded to {} tokens, but the server sampled {}: "
    "which ones is not known"
)
PROMPTS = [letters()[5:20], letters()[40:44], letters()[60:61]]


def test_what_the_server_can_be_trusted_with(ending):
    found = ending.capabilities
    assert found.sampling.keys() == {"temperature", "top_p", "stop"}
    assert not found.generation_modes and not found.score and not found.per_answer_seeds
    for ask in (lambda: ending.generate(PROMPTS), lambda: ending.score_logprobs(PROMPTS)):
        with pytest.raises(CapabilityError):
            ask()


def test_greedy_ids_are_those_of_a_plain_forward_pass(ending):
    batch = ending.generate(PROMPTS, {"temperature": 0.0, "max_new_tokens": 12}, logprobs="none")
    model = letter_model()
    for prompt, ids in zip(PROMPTS, batch.ids.tolist(), strict=True):
        best = oracle.next_logits(model, [*prompt, *ids])[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert ids == best


def test_an_answer_ends_with_eos_and_keeps_it(ending):
    batch = ending.generate(PROMPTS * 8, {"max_new_tokens": 24}, logprobs="none", on_error="skip")
    # The server says of an EOS that comes with the last token that the answer has reached its limit, and hides it.
    assert {*(batch.errors or ())} <= {"", NOT_KNOWN.format(23, 24)}
    reasons = dict(zip(map(tuple, batch.ids.tolist()), batch.finish_reasons, strict=True))
    assert {*batch.finish_reasons} >= {"stop"}
    reasons.pop((), None)
    for ids, reason in reasons.items():
        assert (reason == "stop") == (ids[-1] == EOS) and EOS not in ids[:-1]


def test_an_eos_cannot_be_ignored(ending):
    with pytest.raises(CapabilityError) as caught:
        ending.generate(PROMPTS, {"ignore_eos": True, "max_new_tokens": 4}, logprobs="none")
    assert caught.value.capability == "ignore_eos"


def test_a_server_that_does_not_sample_is_only_asked_for_greedy_answers(folders, transformers_server):
    # By default the server follows the model's generation config, which does not sample, whatever the temperature.
    options = {"base_url": transformers_server.url, "tokenizer": folders[True]}
    with corelm.get_backend("openai", str(folders[True]), **options) as backend:
        assert backend.capabilities.sampling["temperature"] == (0.0, 0.0)
        with pytest.raises(CapabilityError, match="answers greedily at every temperature") as caught:
            backend.generate(PROMPTS, {"max_new_tokens": 4}, logprobs="none")
        assert caught.value.capability == "temperature"


def test_a_prompt_that_no_text_stands_for_fails_alone(ending):
    half = letter_tokenizer()("é")["input_ids"][:1]
    batch = ending.generate(
        [PROMPTS[0], half], {"temperature": 0.0, "max_new_tokens": 4}, logprobs="none", on_error="skip"
    )
    assert not batch.errors[0] and "no text is encoded to the ids of this prompt" in batch.errors[1]


def test_special_tokens_of_a_prompt_are_read_as_such(ending):
    prompt, model = [1, *PROMPTS[0], EOS], letter_model()
    (ids,) = ending.generate([prompt], {"temperature": 0.0, "max_new_tokens": 4}, logprobs="none").ids.tolist()
    assert ids == oracle.next_logits(model, [*prompt, *ids])[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_a_special_token_in_an_answers_text_was_written_letter_by_letter(ending):
    ids = ending.engine.plugin.info.vocabulary.answer_ids("a<|im_end|>")
    assert len(ids) == len("a<|im_end|>") and EOS not in ids


def test_a_conversation_goes_on_with_the_ids_that_were_rendered(ending):
    policy = LLMPolicy(ending, sampling_params={"max_new_tokens": 8}, return_log_probs=False)
    result = policy(TensorDict(history=History.from_chats([[{"role": "user", "content": "Who?"}]])))
    rendered = ending.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who?"}], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    assert corelm.ragged(result, ("tokens", "prompt")).tolist() == [rendered]


def test_an_unknown_model_is_refused_with_the_servers_words(transformers_server, folders):
    with pytest.raises((EngineError, ValueError), match="no-such-model"):
        corelm.get_backend(
            "openai", "no-such-model", base_url=transformers_server.url, tokenizer=folders[True], max_retries=0
        )
