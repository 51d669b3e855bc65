"""Servers of different makes: what is found out by trying, and log-probs against a plain forward pass."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from huggingface_hub import constants

import corelm
from corelm import Backend
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from helpers import oracle
from helpers.fake_openai import MODEL, PENALTIES, PROTOCOL, FakeOpenAI
from helpers.http_server import FaultServer, json_reply
from helpers.letters import EOS, VOCAB, bos_tokenizer, letter_model, letter_tokenizer, letters
from helpers.processes import free_port

#: What servers of the named make do, as far as it matters here.
MAKES: dict[str, dict[str, Any]] = {
    "hosted": {"strict": True, "names": "text", "knows": PROTOCOL | PENALTIES, "says_eos": False},
    "llama.cpp": {"names": "content", "knows": (PROTOCOL | PENALTIES | {"ignore_eos"}) - {"stop"}},
    "entries": {"names": "entry", "mode": "processed", "echoes": 1},
    "scaled": {"states_ids": True, "names": "text", "mode": "scaled", "echoes": 0},
    "ids": {"states_ids": True, "names": "id", "knows": PROTOCOL | {"stop_token_ids", "ignore_eos"}, "echoes": 0},
}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8}
PROMPTS = [letters()[3:9], letters()[40:41], letters()[60:80]]


@contextmanager
def opened(fake: FakeOpenAI, **options: Any) -> Iterator[Backend]:
    with FaultServer(fake) as server:
        options = {"base_url": server.url, "tokenizer": letter_tokenizer(), **options}
        with corelm.get_backend("openai", **options) as backend:
            yield backend


@pytest.fixture(scope="module", params=MAKES)
def make(request: pytest.FixtureRequest) -> Iterator[tuple[str, Backend]]:
    with (
        FaultServer(FakeOpenAI(**MAKES[request.param])) as server,
        corelm.get_backend("openai", base_url=server.url, tokenizer=letter_tokenizer()) as backend,
    ):
        # Opening takes some two hundred short requests.
        sent = [each.body for each in server.requests if each.method == "POST"]
        assert len(sent) <= 300 and max(body["max_tokens"] for body in sent) <= 24
        yield request.param, backend


def test_what_a_server_does_is_found_out(make):
    name, backend = make
    found = backend.capabilities
    modes = {"entries": "processed", "scaled": "scaled"}
    assert found.generation_modes == {modes.get(name, "raw")}
    assert found.score == ("echoes" in MAKES[name])
    assert found.max_context == (255 if found.score else 256)
    assert found.per_answer_seeds and found.seeds_are_costly
    assert found.sampling.keys() >= {"temperature", "top_p", "stop"}
    # What the answers of a server that ends them early do not show is not declared either.
    assert name == "hosted" or (found.sampling.keys() >= PENALTIES) == (name == "llama.cpp")
    assert not found.update_weights and not found.streaming and not found.top_logprobs


#: What a make refuses, by the distribution that its log-probs have. They are those of the other one where temperature
#: and truncation leave the distribution as it is.
SAMPLINGS: dict[str, dict[str, float]] = {
    "neutral": {},
    "temperature": {"temperature": 0.6},
    "top_p": {"top_p": 0.8},
    "greedy": {"temperature": 0.0},
}
REFUSED = {
    "raw": {("processed", "temperature"), ("processed", "top_p"), ("processed", "greedy")},
    "processed": {("raw", "temperature"), ("raw", "top_p"), ("raw", "greedy")},
    "scaled": {("raw", "temperature"), ("processed", "top_p"), ("processed", "greedy")},
}


def test_log_probs_are_those_of_a_plain_forward_pass_or_refused(make):
    server, backend = make
    (own,) = backend.capabilities.generation_modes
    for mode, (name, sampling) in itertools.product(("raw", "processed"), SAMPLINGS.items()):
        # Some makes give no log-prob of EOS.
        ask = functools.partial(
            backend.generate, PROMPTS, {"max_new_tokens": 6, **sampling}, logprobs=mode, on_error="skip"
        )
        if (mode, name) in REFUSED[own]:
            with pytest.raises(CapabilityError) as caught:
                ask()
                pytest.fail(f"{mode} log-probs with {name} were not refused")
            assert caught.value.capability == "generation_modes", (mode, name)
            continue
        batch = ask()
        assert batch.mode == mode and (batch.errors is None or server == "hosted"), (mode, name)
        # With top_p, processed log-probs depend on what was cut; the conformance kit compares them.
        if (mode, name) == ("processed", "top_p"):
            continue
        for prompt, ids, found in zip(PROMPTS, batch.ids.tolist(), batch.logprobs.split(), strict=True):
            if (mode, name) == ("processed", "greedy"):
                expected = torch.zeros(len(ids))
            else:
                heat = 0.6 if mode == "processed" and sampling else 1.0
                expected = oracle.answer_logprobs(letter_model(), prompt, ids, heat)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4, msg=f"{mode} log-probs with {name}")


def test_scores_are_those_of_a_plain_forward_pass(make):
    _, backend = make
    rows = [*PROMPTS, [letters()[0], EOS, letters()[1], 0, 200]]
    if not backend.capabilities.score:
        with pytest.raises(CapabilityError):
            backend.score_logprobs(rows)
        return
    batch = backend.score_logprobs(rows)
    for row, found in zip(rows, batch.logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(letter_model(), row), rtol=0, atol=1e-4)


def test_scores_are_found_although_most_answers_hold_an_id_that_the_server_misnames():
    model, last = letter_model(ends=False), VOCAB - 1
    with torch.no_grad():
        # About every seventh token.
        model.lm_head.bias[last] = 3.0
    fake = FakeOpenAI(**MAKES["ids"] | {"mode": "scaled"}, model=model)

    def misname(body: Any, reply: dict[str, Any]) -> None:
        if body.get("echo"):
            told = reply["choices"][0]["logprobs"]
            told["tokens"] = [name if name != f"token_id:{last}" else "token_id:0" for name in told["tokens"]]

    fake.change = misname
    with opened(fake) as backend:
        assert backend.capabilities.score
        row = [*PROMPTS[0], last, *PROMPTS[1], last]
        (found,) = backend.score_logprobs([row]).logprobs.split()
    torch.testing.assert_close(found, oracle.logprobs(model, row), rtol=0, atol=1e-4)


def test_an_answer_ends_with_eos_and_keeps_it(make):
    name, backend = make
    batch = backend.generate(PROMPTS * 6, {"max_new_tokens": 16, "seed": 1}, logprobs="none")
    ended = [ids for ids, reason in zip(batch.ids.tolist(), batch.finish_reasons, strict=True) if reason == "stop"]
    assert ended and all(ids[-1] == EOS and EOS not in ids[:-1] for ids in ended)
    if name == "hosted":
        # It says nothing of EOS: such a row fails if log-probs are asked for.
        scored = backend.generate(PROMPTS * 6, {"max_new_tokens": 16, "seed": 1}, logprobs="raw", on_error="skip")
        failed = [error for error in scored.errors if error]
        assert failed and all("ended with EOS, of which it gives no log-prob" in error for error in failed)
        assert "length" in scored.finish_reasons
        return
    scored = backend.generate(PROMPTS, {"max_new_tokens": 16}, logprobs="raw")
    for prompt, ids, found in zip(PROMPTS, scored.ids.tolist(), scored.logprobs.split(), strict=True):
        expected = oracle.answer_logprobs(letter_model(), prompt, ids)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_an_eos_is_found_where_no_bias_can_show_how_it_is_reported():
    for says_eos in (True, False):
        with opened(FakeOpenAI(knows=PROTOCOL - {"logit_bias"}, says_eos=says_eos)) as backend:
            batch = backend.generate(PROMPTS * 6, {"max_new_tokens": 16, "seed": 1}, logprobs="none")
        for ids, reason in zip(batch.ids.tolist(), batch.finish_reasons, strict=True):
            assert (reason == "stop") == (ids[-1] == EOS) and EOS not in ids[:-1], says_eos
        assert "stop" in batch.finish_reasons, says_eos


def test_an_end_that_the_backend_does_not_know_fails_its_row():
    with opened(FakeOpenAI(states_ids=True), eos_token_ids=[1]) as backend:
        batch = backend.generate(PROMPTS * 6, {"max_new_tokens": 16, "seed": 1}, logprobs="none", on_error="skip")
    failed = [error for error in batch.errors if error]
    assert failed and all("may have stop ids that this backend does not know" in error for error in failed)


def test_a_server_that_takes_no_temperature_above_one():
    def refuse(body: Any, reply: dict[str, Any]) -> Any:
        return json_reply({"error": "temperature must be at most 1"}, 400) if body["temperature"] > 1 else None

    fake = FakeOpenAI(ends=False)
    fake.change = refuse
    with opened(fake) as backend:
        assert backend.capabilities.sampling["temperature"] == (0.0, 1.0)
        # One temperature does not show which log-probs these are, except where all are the same.
        assert backend.generate(PROMPTS, {"max_new_tokens": 3}).mode == "raw"
        with pytest.raises(CapabilityError, match="could not be found out"):
            backend.generate(PROMPTS, {"max_new_tokens": 3, "temperature": 0.5})


def test_stop_ids_and_an_ignored_eos(make):
    name, backend = make
    stop_ids = letters()[::2]
    batch = backend.generate(PROMPTS * 4, {"max_new_tokens": 12, "stop_token_ids": stop_ids}, logprobs="none")
    for ids, reason in zip(batch.ids.tolist(), batch.finish_reasons, strict=True):
        assert not {*ids[:-1]} & {*stop_ids, EOS}
        assert (reason == "stop") == (ids[-1] in {*stop_ids, EOS})
    if name in ("llama.cpp", "ids"):
        batch = backend.generate(PROMPTS * 3, {"max_new_tokens": 16, "ignore_eos": True}, logprobs="none")
        assert batch.ids.lengths.tolist() == [16] * 9
        assert any(EOS in ids for ids in batch.ids.tolist())
    else:
        with pytest.raises(CapabilityError, match="ignore_eos") as caught:
            backend.generate(PROMPTS, {"max_new_tokens": 4, "ignore_eos": True}, logprobs="none")
        assert caught.value.capability == "ignore_eos"


def test_a_stop_string_ends_text_and_ids_together(make):
    _, backend = make
    free = backend.generate(PROMPTS, GREEDY, logprobs="none").ids.tolist()
    stop = letter_tokenizer().decode(free[0][2:4])
    ids = backend.generate(PROMPTS[:1], {**GREEDY, "stop": [stop]}, logprobs="none").ids.tolist()[0]
    whole = letter_tokenizer().decode(free[0])
    assert ids == free[0][: whole.index(stop) + 2]


# What cannot be trusted is refused ------------------------------------------------------------------------------------


def test_a_server_that_only_chats_is_refused():
    with (
        pytest.raises(EngineError, match=r"does not answer /v1/completions for.* renders conversations by itself"),
        opened(FakeOpenAI(chats_only=True)),
    ):
        pass


def test_another_tokenizer_than_the_servers_is_refused():
    from helpers.tiny_models import tiny_tokenizer

    with (
        pytest.raises(EngineError, match="pass the server's own"),
        opened(FakeOpenAI(takes_ids=False), tokenizer=tiny_tokenizer()),
    ):
        pass


class Rotated:
    """A tokenizer that gives every letter the id of another one."""

    def __init__(self) -> None:
        self._own = letter_tokenizer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __len__(self) -> int:
        return len(self._own)

    def __call__(self, texts: list[str], **options: Any) -> dict[str, Any]:
        return {"input_ids": [[_moved(token, 1) for token in ids] for ids in self._own(texts, **options)["input_ids"]]}

    def decode(self, ids: list[int], **options: Any) -> str:
        return self._own.decode([_moved(token, -1) for token in ids], **options)


def _moved(token: int, by: int) -> int:
    places = letters()
    return places[(places.index(token) + by) % len(places)] if token in places else token


def test_ids_of_another_tokenizer_are_not_believed():
    for states_ids in (True, False):
        with (
            pytest.raises(EngineError, match=r"another tokenizer.*pass the server's own"),
            opened(FakeOpenAI(states_ids=states_ids), tokenizer=Rotated()),
        ):
            pytest.fail(f"believed with states_ids={states_ids}")


def test_a_parameter_that_is_ignored_is_not_declared():
    ignored = frozenset({"model", "prompt", "max_tokens", "logprobs"})
    with opened(FakeOpenAI(knows=ignored)) as backend:
        # It samples at temperature 1 whatever it is told: no number says otherwise.
        assert "top_p" not in backend.capabilities.sampling and not backend.capabilities.per_answer_seeds
        assert not PENALTIES & backend.capabilities.sampling.keys()


def test_a_penalty_that_is_in_raw_log_probs_is_not_declared():
    # As with SGLang's "original" log-probs: they are the model's own only until a penalty changes the logits.
    with opened(FakeOpenAI(names="content", mode="penalised", knows=PROTOCOL | PENALTIES)) as backend:
        assert backend.capabilities.generation_modes == {"raw"}
        assert not PENALTIES & backend.capabilities.sampling.keys()


def test_a_penalty_is_taken_next_to_processed_log_probs_only_if_it_is_in_them():
    for mode in ("processed", "unpenalised"):
        with opened(FakeOpenAI(names="content", mode=mode, knows=PROTOCOL | PENALTIES | {"ignore_eos"})) as backend:
            assert backend.capabilities.generation_modes == {"processed"}
            sampling = {"max_new_tokens": 12, "ignore_eos": True, "frequency_penalty": 1.5}
            backend.generate(PROMPTS, sampling, logprobs="none")
            if mode == "processed":
                batch = backend.generate(PROMPTS, sampling, logprobs="processed")
                for prompt, ids, found in zip(PROMPTS, batch.ids.tolist(), batch.logprobs.split(), strict=True):
                    torch.testing.assert_close(found, _with_penalty(prompt, ids, 1.5), rtol=0, atol=1e-4)
            else:
                with pytest.raises(CapabilityError, match="not known whether the server's log-probs include"):
                    backend.generate(PROMPTS, sampling, logprobs="processed")


def _with_penalty(prompt: list[int], ids: list[int], penalty: float) -> torch.Tensor:
    """Return the log-probs of an answer under a frequency penalty, by a plain forward pass."""
    logits = oracle.next_logits(letter_model(), [*prompt, *ids])[len(prompt) - 1 : -1].clone()
    for at in range(len(ids)):
        for token in ids[:at]:
            logits[at, token] -= penalty
    return logits.log_softmax(-1)[torch.arange(len(ids)), ids]


def test_log_probs_of_no_known_distribution_are_used_only_where_all_are_the_same():
    for mode in ("truncated", "divided"):
        with opened(FakeOpenAI(mode=mode)) as backend:
            batch = backend.generate(PROMPTS, {"max_new_tokens": 6})
            for prompt, ids, found in zip(PROMPTS, batch.ids.tolist(), batch.logprobs.split(), strict=True):
                expected = oracle.answer_logprobs(letter_model(), prompt, ids)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
            for sampling, logprobs in itertools.product(({"top_p": 0.8}, {"temperature": 0.5}), ("raw", "processed")):
                with pytest.raises(CapabilityError) as caught:
                    backend.generate(PROMPTS, {"max_new_tokens": 3, **sampling}, logprobs=logprobs)
                    pytest.fail(f"{mode}: {logprobs} log-probs with {sampling} were not refused")
                assert caught.value.capability == "generation_modes", (mode, sampling, logprobs)


def test_a_repetition_penalty_under_another_name_is_not_declared():
    with opened(FakeOpenAI(names="content", knows=PROTOCOL | PENALTIES, swaps_penalties=True)) as backend:
        assert not PENALTIES & backend.capabilities.sampling.keys()


def test_a_server_that_adds_bos_to_a_text_is_sent_the_text_without_it():
    tokenizer = bos_tokenizer()
    with opened(FakeOpenAI(takes_ids=False, tokenizer=tokenizer), tokenizer=tokenizer) as backend:
        rows = [[1, *PROMPTS[0]], PROMPTS[0]]
        batch = backend.generate(rows, GREEDY, logprobs="raw", on_error="skip")
        assert "adds its special tokens" in batch.errors[1] and not batch.errors[0]
        expected = oracle.answer_logprobs(letter_model(), rows[0], batch.ids.tolist()[0])
        torch.testing.assert_close(batch.logprobs.split()[0], expected, rtol=0, atol=1e-4)


def test_a_temperature_that_is_ignored_is_not_declared():
    fake = FakeOpenAI(knows=PROTOCOL - {"temperature"}, ends=False)
    with opened(fake) as backend, pytest.raises(CapabilityError, match="does not honour temperature"):
        backend.generate(PROMPTS, {"max_new_tokens": 4, "temperature": 0.5}, logprobs="none")


def test_raw_log_probs_with_a_penalty_nobody_tried_are_refused():
    with opened(FakeOpenAI(), model=MODEL, honours=["repetition_penalty"]) as backend:
        assert backend.model_name == MODEL
        backend.generate(PROMPTS, {**GREEDY, "repetition_penalty": 1.2}, logprobs="none")
        with pytest.raises(CapabilityError, match="not known whether the server's log-probs include"):
            backend.generate(PROMPTS, {**GREEDY, "repetition_penalty": 1.2})


def test_fields_of_the_caller_leave_raw_log_probs_only_if_they_do_not_change_them():
    for fake, extra, modes in (
        (FakeOpenAI(), {"user": "me"}, {"raw"}),
        (FakeOpenAI(mode="processed"), {"min_keep": 5}, set()),
        (FakeOpenAI(mode="scaled"), {"min_keep": 5}, set()),
        (FakeOpenAI(knows=PROTOCOL | {"even_ids_only"}), {"even_ids_only": True}, set()),
    ):
        with opened(fake, extra_body=extra) as backend:
            assert backend.capabilities.generation_modes == modes, (fake.mode, extra)
            assert len(backend.generate(PROMPTS, {"max_new_tokens": 3}, logprobs="none").ids) == 3


WRONG_OPTIONS: list[dict[str, Any]] = [
    {"base_url": None},
    {"model": 5},
    {"extra_body": {"n": 2}},
    {"honours": "topp"},
    {"honours": 3},
    {"model": ""},
    {"eos_token_ids": 2},
    {"eos_token_ids": ["</s>"]},
    {"eos_token_ids": [9999]},
    {"max_context": 1000},
    {"vocab_size": 0},
    {"tokenizer": "/no/such/folder"},
    {"tokenizer": None},
]


def test_a_wrong_option_is_refused_by_name():
    with FaultServer(FakeOpenAI()) as server:
        for wrong in WRONG_OPTIONS:
            options = {"base_url": server.url, "tokenizer": letter_tokenizer(), **wrong}
            with pytest.raises(InvalidRequestError) as caught:
                corelm.get_backend("openai", **options)
                pytest.fail(f"{wrong} was taken")
            assert [caught.value.field] == [*wrong]


def test_a_misspelt_model_is_refused_at_once_where_there_is_no_hub(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    said = rf"model: the server lists '{MODEL}', and not 'leters'; did you mean '{MODEL}'\?.*pass tokenizer="
    with pytest.raises(InvalidRequestError, match=said) as caught, opened(FakeOpenAI(), model="leters", tokenizer=None):
        pass
    assert caught.value.field == "model"


class _FewAnswers(FakeOpenAI):
    """Has two answers for all seeds. A server that ignores seeds may by chance look the same."""

    def _sampled(self, prompt: Sequence[int], body: Mapping[str, Any]) -> Any:
        return super()._sampled(prompt, {**body, "seed": 1 + body["seed"] % 2} if "seed" in body else body)


def test_seeds_are_not_declared_where_chance_may_explain_the_answers():
    # Those of all makes are declared.
    with opened(_FewAnswers(names="content")) as backend:
        assert not backend.capabilities.per_answer_seeds
