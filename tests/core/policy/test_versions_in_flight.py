"""Answers of several weights in containers: the runs, what survives saving, and how old each token is."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

import corelm
from corelm import Backend, LLMPolicy, LogProbs, Masks, Provenance
from corelm.errors import InvalidRequestError
from corelm.kl import PerToken, mismatch_by_version, mismatch_report
from helpers.each import each
from helpers.fakes import fake
from helpers.refusals import refused
from helpers.stepping import LONG, PATIENCE, Stepping

RUNS = (("0", 0), ("1", 3))


def sampled(pad_output: bool) -> TensorDictBase:
    """Return two answers of 6 tokens to prompts of 2 and 1, with an update after 3 tokens."""
    engine = Stepping()
    backend = Backend.from_plugin(engine, "stepping")
    policy = LLMPolicy(
        backend,
        input_mode="tokens",
        sampling_params=LONG,
        pad_output=pad_output,
        return_text=False,
        return_history=False,
    )
    td = TensorDict(tokens=corelm.Tokens.from_rows(prompt=[[5, 6], [7]]), batch_size=[2])
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(policy, td)
        assert engine.in_the_middle.wait(PATIENCE)
        backend.update_weights({}, when="now")
        engine.go_on.set()
        return answer.result(PATIENCE)


@pytest.mark.parametrize("pad_output", [True, False])
def test_runs_survive_whatever_happens_to_containers(pad_output: bool, tmp_path: Path) -> None:
    td = sampled(pad_output)
    forms = {
        "as made": td,
        "a row": td[0],
        "a slice": td[:1],
        "stacked": torch.stack([td[0], td[1]]) if pad_output else td,
        "pickled": pickle.loads(pickle.dumps(td)),
        "saved": TensorDict.load_memmap(td.memmap(tmp_path / "td").saved_path) if pad_output else td,
    }
    for how, form in forms.items():
        found = form["log_probs"].provenance
        assert isinstance(found, Provenance), how
        assert found.version_runs == RUNS and found.weight_version == "0", how


@each("pad_output", [True, False])
def test_each_token_is_as_old_as_its_weights(pad_output: bool) -> None:
    td = sampled(pad_output)
    found = corelm.staleness(td, "2")
    rows = [[2, 2, 2, 1, 1, 1], [2, 2, 2, 1, 1, 1]]
    if pad_output:
        assert isinstance(found, torch.Tensor) and found.dtype == torch.int64
        assert found.tolist() == [[-1, -1, *rows[0]], [-1, -1, *rows[1]]]
        fresh = td["masks"].all_assistant_mask & (found <= 1)
        assert fresh.sum(-1).tolist() == [3, 3]
    else:
        assert isinstance(found, PerToken)
        assert [row.tolist() for row in found.full] == [[-1, -1, *rows[0]], [-1, *rows[1]]]


def labelled(**changes: Any) -> TensorDict:
    """Return one dense row of a prompt of 2 tokens, an answer of 4, and a pad."""
    values = {"weight_version": "3", "version_runs": (("3", 0), ("5", 1)), **changes}
    attention = torch.tensor([[True] * 6 + [False]])
    answer = torch.tensor([[False] * 2 + [True] * 4 + [False]])
    log_probs = LogProbs(full=torch.full((1, 7), -1.0), scored_mask=answer, batch_size=1)
    log_probs.provenance = Provenance("fake", "mine", **values)
    train = LogProbs(
        full=torch.full((1, 7), -1.0) + torch.tensor([0, 0, 0.1, 0.2, 0.3, 0.4, 0]), scored_mask=answer, batch_size=1
    )
    masks = Masks(all_attention_mask=attention, all_assistant_mask=answer, all_response_mask=answer, batch_size=1)
    return TensorDict(log_probs=log_probs, train_log_probs=train, masks=masks, batch_size=1)


@each(
    "changes, version, versions, expected",
    [
        ({}, "7", None, [4, 2, 2, 2]),
        ({"version_runs": ()}, "7", None, [4] * 4),
        ({"version_runs": (("a", 0), ("c", 2))}, "c", ["a", "b", "c"], [2, 2, 0, 0]),
        ({"version_runs": (("3+lora@1", 0), ("3+lora@4", 3))}, "4+lora@4", None, [4, 4, 4, 1]),
        ({"version_runs": (("3+none", 0), ("4+none", 3))}, "4", None, [1, 1, 1, 0]),
        ({"version_runs": (), "weight_version": "tuned"}, "tuned", None, [0] * 4),
        ({"version_runs": (("tuned", 0), ("tuned+2", 1), ("tuned+2+none", 3))}, "tuned+6", None, [6, 4, 4, 4]),
        ({"version_runs": (("a+1+lora@b", 0), ("a+1+lora@b+2", 2))}, "a+3+lora@b+4", None, [6, 6, 4, 4]),
    ],
)
def test_labels_of_every_kind(changes: Any, version: str, versions: Any, expected: list[int]) -> None:
    found = corelm.staleness(labelled(**changes), version, versions=versions)
    assert found.tolist() == [[-1, -1, *expected, -1]]  # type: ignore[union-attr]


@each("changes, version, versions, field", [
        ({}, "4", None, 'version'),
        ({"version_runs": (("5", 0), ("3", 2))}, "7", None, "('log_probs', 'full')"),
        ({"version_runs": (("3", 0), ("5", 0))}, "7", None, "('log_probs', 'full')"),
        ({"version_runs": (("3", 0), ("5", 4))}, "7", None, "('log_probs', 'full')"),
        ({"version_runs": (("3", 0), ("tuned", 2))}, "7", None, 'version'),
        ({}, "7", ["3", "7"], 'version'),
        ({}, "7", ["3", "3"], 'versions'),
        ({}, "7+lora@2", None, 'version'),
        ({"version_runs": (("a+2", 0), ("a+1", 2))}, "a+3", None, "('log_probs', 'full')"),
        ({"version_runs": (), "weight_version": "a+1"}, "b+1", None, 'version'),
        ({"version_runs": (), "weight_version": "a+2"}, "a+1", None, 'version'),
        ({"version_runs": (), "weight_version": "3+lora@a"}, "3+lora@b", None, 'version'),
    ])  # fmt: skip
def test_what_has_no_age_is_refused(changes: Any, version: str, versions: Any, field: str) -> None:
    with refused(InvalidRequestError, field=field):
        corelm.staleness(labelled(**changes), version, versions=versions)


def test_a_report_for_each_version() -> None:
    found = mismatch_by_version(labelled())
    assert [*found] == ["3", "5"] and [one.tokens for one in found.values()] == [1, 3]
    assert found["3"].mean_abs == pytest.approx(0.1) and found["5"].mean_abs == pytest.approx(0.3)
    assert mismatch_report(labelled()).tokens == 4
    whole = mismatch_by_version(labelled(version_runs=()))
    assert whole == {"3": mismatch_report(labelled())}


def test_turns_of_several_weights_say_which_tokens_are_whose() -> None:
    backend = fake()
    policy = LLMPolicy(backend, input_mode="tokens", sampling_params={"max_new_tokens": 2}, return_text=False)
    first = policy(TensorDict(tokens=corelm.Tokens.from_rows(prompt=[[5, 6]]), batch_size=[1]))
    backend.update_weights({})
    ids = [*first["tokens"].full[0].tolist(), 9]
    second = policy(TensorDict(tokens=corelm.Tokens.from_rows(prompt=[ids]), batch_size=[1]))
    merged = corelm.merge_turns([first, second])
    # Two tokens, one of the second prompt, and two more.
    assert merged["log_probs"].provenance.version_runs == (("0", 0), ("1", 3))
    ages = corelm.staleness(merged, "1")
    ages = ages if isinstance(ages, torch.Tensor) else ages.full[0]
    assert ages.flatten().tolist() == [-1, -1, 1, 1, -1, 0, 0]


@each(
    "answers, runs, ages",
    [
        ([[3, 4], []], (), [-1, -1, 1, 1, -1]),
        ([[], [3]], (), [-1, -1, -1, 0]),
        ([[3, 4], [], [6]], (("0", 0), ("2", 4)), [-1, -1, 2, 2, -1, -1, 0]),
    ],
)
def test_a_turn_that_sampled_nothing_is_of_no_weights(answers: Any, runs: Any, ages: list[int]) -> None:
    """An abort before the first token leaves such a turn."""
    turns, prompt = [], [1, 2]
    for version, answer in enumerate(answers):
        sampled = [*[False] * len(prompt), *[True] * len(answer)]
        log_probs = LogProbs.from_rows(
            full=[[-1.0 * on for on in sampled]], scored_mask=[sampled], provenance=Provenance("toy", "", str(version))
        )
        tokens = corelm.Tokens.from_rows(prompt=[prompt], response=[answer])
        turns.append(TensorDict(tokens=tokens, log_probs=log_probs, batch_size=[1]))
        prompt = [*prompt, *answer, 9]
    merged = corelm.merge_turns(turns)
    assert merged["log_probs"].provenance.version_runs == runs
    assert corelm.staleness(merged, str(len(answers) - 1)).full[0].tolist() == ages
