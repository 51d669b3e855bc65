"""New weights in the middle of an answer: which token is of which weights, and what its log-prob is one of."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corelm import Backend, DynamicBatcher
from corelm.errors import EngineError, InvalidRequestError, StaleWeightsError
from corelm.spec import GenerateResult
from helpers import oracle
from helpers.mid_answer import MidAnswer
from helpers.plain_forward import Open, assert_answers, spoil_cache_after
from helpers.tiny_models import random_rows, tiny_model

PROMPTS = random_rows(7, 12, 7)
LONG = {"max_new_tokens": 60, "ignore_eos": True, "seed": 3}


class Updated:
    """A backend that is given other weights while it answers."""

    def __init__(self, open_model: Open, model: nn.Module, **options: Any) -> None:
        own = copy.deepcopy(model)
        self._middle = MidAnswer(own)
        self.backend: Backend = open_model(own, **options)

    @property
    def raised(self) -> BaseException | None:
        return self._middle.raised

    def answers(
        self, weights: Any, prompts: Any = PROMPTS, ask: Backend | DynamicBatcher | None = None, **options: Any
    ) -> GenerateResult:
        """Return the answers in the middle of which the weights came."""
        # The model is tried before its first answer.
        self.backend.generate(prompts, {"max_new_tokens": 2})
        return self._middle.run(
            lambda: self.backend.update_weights(weights, "new", when="now", **options),
            lambda: (ask or self.backend).generate(prompts, LONG),
        )


@pytest.fixture
def watch() -> Any:
    """Return what gives a backend a canary; skip the test where there is none."""
    return pytest.importorskip("corelm_fleet.canary").watch


@pytest.fixture
def probe_scores() -> Any:
    return pytest.importorskip("corelm_fleet").probe_scores


def place(made: GenerateResult, version: str = "new") -> int:
    """Return the first token that all rows have of the new weights."""
    assert made.version_runs is not None
    ((first, second),) = {*made.version_runs}
    assert first == ("0", 0) and second[0] == version and 0 < second[1] < 60
    return second[1]


def with_old_keys(old: nn.Module, new: nn.Module, prompt: list[int], answer: list[int], at: int) -> Tensor:
    """Return the log-probs of the answer if its first `at` tokens were sampled by `old`, and the cache goes on."""
    out = torch.zeros(len(answer))
    read, cache = torch.tensor([prompt]), None
    with torch.no_grad():
        for step, token in enumerate(answer):
            made = (old if step < at else new)(input_ids=read, past_key_values=cache, use_cache=True)
            out[step] = made.logits[0, -1].float().log_softmax(-1)[token]
            read, cache = torch.tensor([[token]]), made.past_key_values
    return out


@pytest.mark.parametrize(
    ("family", "fast", "rereads"),
    [
        ("qwen2", True, True),
        ("qwen2", False, False),
        ("mixtral", True, False),
        pytest.param("mixtral", False, True, marks=pytest.mark.nightly),
        pytest.param("gpt2", True, True, marks=pytest.mark.nightly),
        pytest.param("gpt2", True, False, marks=pytest.mark.nightly),
    ],
)
def test_each_token_has_the_log_prob_of_its_own_weights(
    open_model: Open, fast: bool, family: str, rereads: bool
) -> None:
    """Read again, a token's log-prob is that of a plain forward. With the cache kept, it is that of the sampler."""
    old, new = tiny_model(family), tiny_model(family, seed=1)
    updated = Updated(open_model, old, fast=fast, recompute_kv_on_update=rereads)
    made = updated.answers(new.state_dict())
    at, apart = place(made), 0.0
    assert made.weight_versions == ("0",) * 3 and made.logprobs is not None
    for prompt, answer, found in zip(PROMPTS, made.ids.tolist(), made.logprobs.split(), strict=True):
        by_old, by_new = (oracle.answer_logprobs(model, prompt, answer) for model in (old, new))
        torch.testing.assert_close(found[:at], by_old[:at], rtol=0, atol=1e-4)
        expected = by_new if rereads else with_old_keys(old, new, prompt, answer, at)
        torch.testing.assert_close(found[at:], expected[at:], rtol=0, atol=1e-4)
        apart = max(apart, float((expected - by_new)[at:].abs().max()), float((by_old - by_new)[at:].abs().max()))
    assert apart > 0.1, "the weights are too much alike for this test"
    later = updated.backend.generate(PROMPTS, {**LONG, "max_new_tokens": 12})
    assert later.version_runs is None and later.weight_versions == ("new",) * 3
    assert_answers(later, new, PROMPTS, atol=1e-4)
    provenance = updated.backend.provenance(made)
    assert not isinstance(provenance, tuple) and provenance.version_runs == (("0", 0), ("new", at))


def test_rows_that_wait_or_come_later_are_of_the_weights_that_read_them(open_model: Open) -> None:
    """A batch takes two of the three prompts. The third is begun with the new weights and has no token of the old."""
    old, new, prompts = tiny_model(), tiny_model(seed=1), random_rows(7, 7, 7)
    updated = Updated(open_model, old, max_batch_tokens=140, recompute_kv_on_update=True)
    made = updated.answers(new.state_dict(), prompts)
    runs = made.version_runs
    assert runs is not None and sorted(map(len, runs)) == [1, 2, 2] and (("new", 0),) in runs
    row = runs.index((("new", 0),))
    assert made.weight_versions is not None and made.weight_versions[row] == "new"
    found = made.logprobs.split()[row]  # type: ignore[union-attr]
    expected = oracle.answer_logprobs(new, prompts[row], made.ids.tolist()[row])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_batches_that_begin_after_the_update_are_compared_with_the_plain_forward(open_model: Open) -> None:
    """Cached steps are wrong beyond 24 columns. The batch of the update cannot be compared, the one after it can."""
    model, new = tiny_model("qwen2"), tiny_model("qwen2", seed=1)
    spoil_cache_after(model, 24)
    middle = MidAnswer(model)
    backend, prompts = open_model(model, max_batch_tokens=72), random_rows(12, 10)
    backend.generate(prompts, {"max_new_tokens": 2})

    def stream() -> None:
        with pytest.raises(EngineError, match="streamed log-probs turned out to be others"):
            list(backend.stream(prompts, LONG))

    middle.run(lambda: backend.update_weights(new.state_dict(), "new", when="now"), stream)


def test_a_stream_that_breaks_off_leaves_its_tokens_a_label_that_none_had(open_model: Open) -> None:
    """Half of the tensors are new: what is sampled with that is of a version of its own."""
    new = tiny_model(seed=1)

    def half() -> Iterator[tuple[str, Tensor]]:
        yield from list(new.state_dict().items())[:4]
        raise OSError("the disk is gone")

    updated = Updated(open_model, tiny_model())
    made = updated.answers(half())
    assert isinstance(updated.raised, EngineError), updated.raised
    assert place(made, "1") and updated.backend.weight_version == "1"


def test_weights_that_do_not_fit_change_no_answer(open_model: Open) -> None:
    updated = Updated(open_model, tiny_model())
    expected = updated.backend.generate(PROMPTS, LONG)
    made = updated.answers({"no.such.parameter": torch.zeros(3)})
    assert isinstance(updated.raised, InvalidRequestError)
    assert made.version_runs is None and made.weight_versions == ("0",) * 3
    assert made.ids.tolist() == expected.ids.tolist() and torch.equal(made.logprobs.values, expected.logprobs.values)  # type: ignore[union-attr]


def test_the_canary_asks_between_two_steps(open_model: Open, watch: Any, probe_scores: Any) -> None:
    old, new = tiny_model(), tiny_model(seed=1)
    updated = Updated(open_model, old, recompute_kv_on_update=True)
    canary = watch(updated.backend)
    made = updated.answers(new.state_dict(), expect=probe_scores(new))
    assert updated.raised is None
    at = place(made)
    for prompt, answer, found in zip(PROMPTS, made.ids.tolist(), made.logprobs.split(), strict=True):  # type: ignore[union-attr]
        by_old, by_new = (oracle.answer_logprobs(model, prompt, answer) for model in (old, new))
        torch.testing.assert_close(found, torch.cat([by_old[:at], by_new[at:]]), rtol=0, atol=1e-4)
    canary.look()


def test_a_canary_that_disagrees_spoils_the_tokens_since_the_update(
    open_model: Open, watch: Any, probe_scores: Any
) -> None:
    updated = Updated(open_model, tiny_model())
    watch(updated.backend)
    made = updated.answers(tiny_model(seed=1).state_dict(), expect=probe_scores(tiny_model(seed=2)))
    assert isinstance(updated.raised, StaleWeightsError) and updated.backend.weight_version == "1"
    assert place(made, "1")


def test_callers_of_a_batcher_each_get_the_runs_of_their_own_rows(open_model: Open) -> None:
    updated = Updated(open_model, tiny_model())
    with DynamicBatcher(updated.backend) as batcher:
        assert place(updated.answers(tiny_model(seed=1).state_dict(), ask=batcher))
        assert batcher.generate(PROMPTS, LONG).weight_versions == ("new",) * 3


def test_weights_of_nan_in_the_middle_of_an_answer_are_errors_of_its_rows(open_model: Open) -> None:
    updated = Updated(open_model, tiny_model())
    broken = {name: torch.full_like(each, float("nan")) for name, each in tiny_model().state_dict().items()}
    with pytest.raises(EngineError, match="NaN in the weights") as caught:
        updated.answers(broken)
    assert caught.value.rows == (0, 1, 2) and caught.value.usable
    updated.backend.update_weights(tiny_model().state_dict())
    assert_answers(updated.backend.generate(PROMPTS, {**LONG, "max_new_tokens": 4}), tiny_model(), PROMPTS)


def test_new_weights_are_used_where_the_caller_autocasts(open_model: Open) -> None:
    """PyTorch keeps the weights that it has cast until autocast ends."""
    model, new = tiny_model().requires_grad_(True), tiny_model(seed=1)
    backend = open_model(model)
    with torch.autocast("cpu", torch.bfloat16):
        backend.generate(PROMPTS, LONG)
        backend.update_weights(new.state_dict(), "new")
        found = backend.generate(PROMPTS, LONG), backend.score_logprobs(PROMPTS)
    with torch.autocast("cpu", torch.bfloat16):
        expected = backend.generate(PROMPTS, LONG), backend.score_logprobs(PROMPTS)
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        torch.testing.assert_close(one.logprobs.values, other.logprobs.values)
