"""New weights in the middle of an answer: which token is of which weights, and what its log-prob is one of.

The update runs on a thread of its own. A listener holds the loop after a given token until the update waits at the
gate, so nothing here depends on time.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corelm import Backend, DynamicBatcher, probe_scores
from corelm.backend.prepared_call import prepare_generation
from corelm.errors import EngineError, InvalidRequestError, StaleWeightsError
from corelm.fleet.canary import watch
from corelm.spec import GenerateResult, TokenChunk
from helpers import oracle
from helpers.plain_forward import spoil_cache_after
from helpers.tiny_models import random_rows, tiny_model

Open = Callable[..., Backend]
PROMPTS = random_rows(7, 12, 7)
PATIENCE = 60.0
NEW, AT = 16, 5
LONG = {"max_new_tokens": NEW, "ignore_eos": True, "seed": 3}


class Updater:
    """Listens to the tokens of a call. Once row 0 has `AT` tokens, it begins an update and waits until that waits."""

    def __init__(self, backend: Backend, weights: Any, version: str | None = None, **options: Any) -> None:
        self._backend, self._weights, self._version = backend, weights, version
        self._options = {"when": "now", **options}
        self._seen = 0
        self._thread = threading.Thread(target=self._update)
        self.raised: BaseException | None = None

    def __call__(self, chunk: TokenChunk) -> None:
        self._seen += chunk.row == 0
        if chunk.row == 0 and self._seen == AT:
            self._thread.start()
            end = time.monotonic() + PATIENCE
            while not self._backend.engine.plugin.gate.waiting and self.raised is None:
                assert time.monotonic() < end, "the update does not wait at the gate"
                threading.Event().wait(0.001)

    def _update(self) -> None:
        try:
            self._backend.update_weights(self._weights, self._version, **self._options)
        except BaseException as error:
            self.raised = error

    def answers(self, prompts: Any = PROMPTS, sampling: Any = LONG, **options: Any) -> GenerateResult:
        """Return the answers in the middle of which the update came, once it has ended."""
        call = prepare_generation(self._backend.engine, prompts, sampling, on_tokens=self, **options)
        made = self._backend.run(call)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return made


def with_old_keys(old: nn.Module, new: nn.Module, prompt: list[int], answer: list[int]) -> Tensor:
    """Return the log-probs of the answer if its first `AT` tokens were sampled by `old`, and the cache goes on."""
    out = torch.zeros(len(answer))
    read, cache = torch.tensor([prompt]), None
    with torch.no_grad():
        for place, token in enumerate(answer):
            made = (old if place < AT else new)(input_ids=read, past_key_values=cache, use_cache=True)
            out[place] = made.logits[0, -1].float().log_softmax(-1)[token]
            read, cache = torch.tensor([[token]]), made.past_key_values
    return out


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "mixtral"])
@pytest.mark.parametrize("rereads", [True, False])
def test_each_token_has_the_log_prob_of_its_own_weights(
    open_model: Open, fast: bool, family: str, rereads: bool
) -> None:
    """Read again, a token's log-prob is that of a plain forward. With the cache kept, it is that of the sampler."""
    old, new = tiny_model(family), tiny_model(family, seed=1)
    backend = open_model(copy.deepcopy(old), fast=fast, recompute_kv_on_update=rereads)
    made = Updater(backend, new.state_dict(), "new").answers()
    assert made.version_runs == ((("0", 0), ("new", AT)),) * 3 and made.weight_versions == ("0",) * 3
    apart = 0.0
    assert made.logprobs is not None
    for prompt, answer, found in zip(PROMPTS, made.ids.tolist(), made.logprobs.split(), strict=True):
        by_old, by_new = (oracle.answer_logprobs(model, prompt, answer) for model in (old, new))
        torch.testing.assert_close(found[:AT], by_old[:AT], rtol=0, atol=1e-4)
        expected = by_new if rereads else with_old_keys(old, new, prompt, answer)
        torch.testing.assert_close(found[AT:], expected[AT:], rtol=0, atol=1e-4)
        apart = max(apart, float((expected - by_new)[AT:].abs().max()), float((by_old - by_new)[AT:].abs().max()))
    assert apart > 0.1, "the weights are too much alike for this test"
    later = backend.generate(PROMPTS, LONG)
    assert later.version_runs is None and later.weight_versions == ("new",) * 3
    for prompt, answer, found in zip(PROMPTS, later.ids.tolist(), later.logprobs.split(), strict=True):  # type: ignore[union-attr]
        torch.testing.assert_close(found, oracle.answer_logprobs(new, prompt, answer), rtol=0, atol=1e-4)


def test_rows_that_wait_or_come_later_are_of_the_weights_that_read_them(open_model: Open) -> None:
    """A batch takes two of the three prompts. The third is begun with the new weights and has no token of the old."""
    old, new = tiny_model(), tiny_model(seed=1)
    backend = open_model(copy.deepcopy(old), max_batch_tokens=60, recompute_kv_on_update=True)
    made = Updater(backend, new.state_dict(), "new").answers(random_rows(7, 7, 7))
    runs = made.version_runs
    assert runs is not None and runs[0] == (("0", 0), ("new", AT)) and (("new", 0),) in runs
    row = runs.index((("new", 0),))
    assert made.weight_versions is not None and made.weight_versions[row] == "new"
    found = made.logprobs.split()[row]  # type: ignore[union-attr]
    expected = oracle.answer_logprobs(new, random_rows(7, 7, 7)[row], made.ids.tolist()[row])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_batches_that_begin_after_the_update_are_compared_with_the_plain_forward(open_model: Open) -> None:
    """Cached steps are wrong beyond 24 columns. The batch of the update cannot be compared, the one after it can."""
    model = tiny_model("qwen2")
    spoil_cache_after(model, 24)
    backend, prompts = open_model(model, max_batch_tokens=28), random_rows(12, 10)
    with pytest.raises(EngineError, match="streamed log-probs turned out to be others"):
        Updater(backend, tiny_model("qwen2", seed=1).state_dict(), "new").answers(prompts)


def test_a_stream_that_breaks_off_leaves_its_tokens_a_label_that_none_had(open_model: Open) -> None:
    """Half of the tensors are new. What is sampled with that is of no version that anybody knows."""
    old, new = tiny_model(), tiny_model(seed=1)
    backend = open_model(copy.deepcopy(old))

    def half() -> Any:
        yield from list(new.state_dict().items())[:4]
        raise OSError("the disk is gone")

    updater = Updater(backend, half(), "new")
    made = updater.answers()
    assert isinstance(updater.raised, EngineError), updater.raised
    assert made.version_runs == ((("0", 0), ("1", AT)),) * 3 and backend.weight_version == "1"


def test_weights_that_do_not_fit_change_no_answer(open_model: Open) -> None:
    backend = open_model(tiny_model())
    expected = backend.generate(PROMPTS, LONG)
    updater = Updater(backend, {"no.such.parameter": torch.zeros(3)}, "new")
    made = updater.answers()
    assert isinstance(updater.raised, InvalidRequestError)
    assert made.version_runs is None and made.weight_versions == ("0",) * 3
    assert made.ids.tolist() == expected.ids.tolist() and torch.equal(made.logprobs.values, expected.logprobs.values)  # type: ignore[union-attr]


def test_the_canary_asks_between_two_steps(open_model: Open) -> None:
    old, new = tiny_model(), tiny_model(seed=1)
    backend = open_model(copy.deepcopy(old), recompute_kv_on_update=True)
    watch(backend)
    updater = Updater(backend, new.state_dict(), "new", expect=probe_scores(new))
    made = updater.answers()
    assert updater.raised is None
    runs = made.version_runs
    # It also asks before the update, and every question lets the loop take a step.
    assert runs is not None and all([version for version, _ in row] == ["0", "new"] for row in runs)
    for prompt, answer, found, row in zip(PROMPTS, made.ids.tolist(), made.logprobs.split(), runs, strict=True):  # type: ignore[union-attr]
        at = row[1][1]
        by_old, by_new = (oracle.answer_logprobs(model, prompt, answer) for model in (old, new))
        torch.testing.assert_close(found, torch.cat([by_old[:at], by_new[at:]]), rtol=0, atol=1e-4)
    backend.canary.look()  # type: ignore[union-attr]


def test_a_canary_that_disagrees_spoils_the_tokens_since_the_update(open_model: Open) -> None:
    old, new = tiny_model(), tiny_model(seed=1)
    backend = open_model(copy.deepcopy(old))
    watch(backend)
    updater = Updater(backend, new.state_dict(), "new", expect=probe_scores(tiny_model(seed=2)))
    made = updater.answers()
    assert isinstance(updater.raised, StaleWeightsError) and backend.weight_version == "1"
    assert made.version_runs is not None
    assert all([version for version, _ in row] == ["0", "1"] for row in made.version_runs)


def test_callers_of_a_batcher_each_get_the_runs_of_their_own_rows(open_model: Open) -> None:
    old, new = tiny_model(), tiny_model(seed=1)
    backend = DynamicBatcher(open_model(copy.deepcopy(old)))
    with backend:
        updater = Updater(backend, new.state_dict(), "new")
        assert updater.answers().version_runs == ((("0", 0), ("new", AT)),) * 3
        assert backend.generate(PROMPTS, LONG).weight_versions == ("new",) * 3


def test_the_provenance_has_the_runs(open_model: Open) -> None:
    backend = open_model(tiny_model())
    made = Updater(backend, tiny_model(seed=1).state_dict(), "new").answers()
    provenance = backend.provenance(made)
    assert not isinstance(provenance, tuple) and provenance.version_runs == (("0", 0), ("new", AT))
