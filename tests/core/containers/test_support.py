"""The ids that `LogProbs` names, kept and most probable ones, through every operation and in both layouts."""

import pickle
import tempfile
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack

import corelm
from corelm import LogProbs, Ragged, TokenSets, token_sets
from corelm.containers import SAFE_GLOBALS
from corelm.containers.assemble import assemble
from corelm.errors import InvalidRequestError, MissingKeyError
from corelm.spec.provenance import Provenance
from corelm.spec.records import ContainerRequest, Parts
from helpers.each import each
from helpers.refusals import refused

PROMPTS = [[1, 2, 3], [4], [5, 6]]
RESPONSES = [[7], [8, 9, 2], []]
FULL = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
SETS = [[[], [], [], [7, 9]], [[], [8], [1, 2, 9], []], [[], []]]
MASS = [[0.0, 0.0, 0.0, -0.25], [0.0, 0.0, -0.5, 0.0], [0.0, 0.0]]
NO, GONE = -1, -torch.inf
TOP_IDS = [[[NO, NO]] * 3 + [[7, 9]], [[NO, NO], [8, NO], [9, 2], [2, 4]], [[NO, NO]] * 2]
TOP = [[[0.0, 0.0]] * 3 + [[-0.5, -1.0]], [[0.0, 0.0], [0.0, GONE], [-0.5, -1.5], [-0.25, -2.0]], [[0.0, 0.0]] * 2]
TAIL = [[0.0, 0.0, 0.0, -2.0], [0.0, GONE, -1.75, -2.5], [0.0, 0.0]]
FIELDS = {"kept_log_mass": MASS, "top_ids": TOP_IDS, "top_log_probs": TOP, "tail_log_mass": TAIL}
TRUNCATED = Provenance("toy", "tiny", "0", "processed", 0.7, "truncated")


def flat(rows: Any, dtype: torch.dtype) -> Ragged:
    return Ragged(
        torch.tensor([value for row in rows for value in row], dtype=dtype), torch.tensor(list(map(len, rows)))
    )


def rollout(pad: bool = False, shape: tuple[int, ...] = (3,), rows: slice = slice(None), **changes: Any) -> TensorDict:
    prompts, responses, full = PROMPTS[rows], RESPONSES[rows], FULL[rows]
    answered = [[False] * len(p) + [True] * len(r) for p, r in zip(prompts, responses, strict=True)]
    given: dict[str, Any] = {
        "kept_ids": TokenSets.from_list(SETS[rows]),
        "kept_log_mass": flat(MASS[rows], torch.float32),
        "top_ids": flat(TOP_IDS[rows], torch.int64),
        "top_logprobs": flat(TOP[rows], torch.float32),
        "tail_log_mass": flat(TAIL[rows], torch.float32),
    }
    return assemble(
        ContainerRequest(
            batch_size=shape,
            fields=frozenset({"tokens", "masks", "log_probs"}),
            tokens=Parts(Ragged.from_list(prompts), Ragged.from_list(responses), Ragged.from_list(full)),
            logprobs=Ragged.from_list([[-0.5 * on for on in row] for row in answered], torch.float32),
            scored=Ragged.from_list(answered, torch.bool),
            assistant=Ragged.from_list(answered, torch.bool),
            provenance=TRUNCATED,
            pad_output=pad,
            **given | changes,
        )
    )


def read(td: TensorDict) -> dict[str, Any]:
    found = {name: corelm.ragged(td, ("log_probs", name)).tolist() for name in FIELDS}
    return {"kept_ids": token_sets(td).tolist(), **found}


def expected(rows: Any = (0, 1, 2)) -> dict[str, Any]:
    return {name: [values[row] for row in rows] for name, values in {"kept_ids": SETS, **FIELDS}.items()}


def mapped(td: TensorDict, tmp_path: Any) -> TensorDict:
    folder = tempfile.mkdtemp(dir=tmp_path)
    td.memmap(folder)
    return TensorDict.load_memmap(folder, allow_pickle=False)


def saved(td: TensorDict, tmp_path: Any) -> TensorDict:
    torch.save(td, tmp_path / "td.pt")
    with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
        return torch.load(tmp_path / "td.pt", weights_only=True)


OPERATIONS = {
    "nothing": (lambda td, path: td, (0, 1, 2)),
    "a slice": (lambda td, path: td[1:], (1, 2)),
    "indices": (lambda td, path: td[torch.tensor([2, 0])], (2, 0)),
    "a mask": (lambda td, path: td[torch.tensor([True, False, True])], (0, 2)),
    "one row": (lambda td, path: td[1], (1,)),
    "a stack": (lambda td, path: lazy_stack([td[2], td[1]]), (2, 1)),
    "cat": (lambda td, path: torch.cat([td[:2], td]), (0, 1, 0, 1, 2)),
    "stacked batches": (lambda td, path: torch.stack([td, td]), (0, 1, 2, 0, 1, 2)),
    "clone": (lambda td, path: td.clone(), (0, 1, 2)),
    "a pickle": (lambda td, path: pickle.loads(pickle.dumps(td)), (0, 1, 2)),
    "memmap": (mapped, (0, 1, 2)),
    "torch.save": (saved, (0, 1, 2)),
    "rows": (lambda td, path: corelm.repad(td, pad_output=False), (0, 1, 2)),
    "dense": (lambda td, path: corelm.repad(td), (0, 1, 2)),
    "dense and back": (lambda td, path: corelm.repad(corelm.repad(td[:2]), pad_output=False), (0, 1)),
    "collate": (lambda td, path: corelm.collate([td[2], td[0]]), (2, 0)),
    "select": (lambda td, path: td.select("tokens", "masks", "log_probs"), (0, 1, 2)),
    "a device": (lambda td, path: td.to("cpu"), (0, 1, 2)),
    "no row": (lambda td, path: td[:0], ()),
}


@each("pad", [False, True])
@each("name", OPERATIONS)
def test_ids_survive(name, pad, tmp_path):
    do, rows = OPERATIONS[name]
    assert read(do(rollout(pad), tmp_path)) == expected(rows)


@each("pad", [False, True])
@each("shape", [(3,), (3, 1), (1, 3)])
def test_ids_in_every_batch_shape(pad, shape):
    assert read(rollout(pad, shape)) == expected()


def test_dense_fields_are_padded_with_ids_that_do_not_exist():
    log_probs = rollout(True)["log_probs"]
    assert log_probs.kept_ids.tolist() == [[7, 9, -1, -1], [8, 1, 2, 9], [-1, -1, -1, -1]]
    assert log_probs.kept_counts.tolist() == [[0, 0, 0, 2, 0, 0], [0, 0, 0, 1, 3, 0], [0] * 6]
    assert log_probs.top_ids.shape == log_probs.top_log_probs.shape == (3, 6, 2)
    pads = ~rollout(True)["masks"].all_attention_mask
    assert log_probs.top_ids[pads].eq(-1).all()
    for values in (log_probs.top_log_probs, log_probs.tail_log_mass, log_probs.kept_log_mass):
        assert values[pads].eq(0.0).all() and values.dtype == torch.float32


@each("pad", [False, True])
def test_rows_with_different_numbers_of_most_probable_ids_are_refused(pad):
    one = {
        "top_ids": flat([[ids[:1] for ids in row] for row in TOP_IDS], torch.int64),
        "top_logprobs": flat([[values[:1] for values in row] for row in TOP], torch.float32),
    }
    both = [rollout(pad)[0], rollout(pad, **one)[1]]
    for name in ("top_ids", "top_log_probs"):
        with refused(InvalidRequestError, rows=(1,)):
            corelm.ragged(lazy_stack(both), ("log_probs", name))
    with refused(InvalidRequestError, field="('log_probs', 'top_ids')", rows=(1,)):
        corelm.collate(both, pad_output=pad)


def test_selecting_the_numbers_keeps_the_ids_over_which_they_were_normalised():
    td = rollout().select(("log_probs", "full"), "masks")
    assert token_sets(td).tolist() == SETS and td["log_probs"].top_ids is None


def test_what_was_not_scored_has_no_ids():
    full = flat([[[1]] * len(row) for row in FULL], torch.int64)
    td = rollout(
        kept_ids=TokenSets.from_list([[[1]] * len(row) for row in FULL]),
        kept_log_mass=full.with_values(full.values[:, 0] * -1.0),
        top_ids=full,
        top_logprobs=full.with_values(full.values * -1.0),
        tail_log_mass=full.with_values(full.values[:, 0] * -1.0),
    )
    counts = [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0]]
    assert corelm.ragged(td, ("log_probs", "kept_counts")).tolist() == counts
    assert token_sets(td).tolist() == [[[1] * n for n in row] for row in counts]
    assert corelm.ragged(td, ("log_probs", "top_ids")).tolist() == [[[1 if n else -1] for n in row] for row in counts]
    for name in ("kept_log_mass", "tail_log_mass"):
        assert corelm.ragged(td, ("log_probs", name)).tolist() == [[-1.0 * n for n in row] for row in counts]


@each("pad", [False, True])
@each("row, position, count", [(1, 2, 4), (0, 3, 1), (1, 2, -1)])
def test_counts_that_are_not_those_of_the_ids_are_refused_by_row(pad, row, position, count):
    td = rollout(pad)
    counts = td["log_probs"][row].kept_counts.clone()
    mask = td["masks"][row].all_attention_mask
    counts[mask.nonzero().flatten()[position]] = count
    if pad:
        td["log_probs"].kept_counts[row] = counts
    else:
        td["log_probs"][row].set("kept_counts", counts)
    with refused(InvalidRequestError, field="log_probs.kept_counts") as caught:
        token_sets(td)
    assert caught.value.rows == (row,)


@each("name", ["kept_ids", "kept_log_mass", "top_ids", "top_logprobs", "tail_log_mass"])
def test_a_request_with_ids_of_other_lengths(name):
    short = {
        "kept_ids": TokenSets.from_list([SETS[0], SETS[1][:-1], SETS[2]]),
        "kept_log_mass": flat([MASS[0], MASS[1][:-1], MASS[2]], torch.float32),
        "top_ids": flat([TOP_IDS[0], TOP_IDS[1][:-1], TOP_IDS[2]], torch.int64),
        "top_logprobs": flat([TOP[0], TOP[1][:-1], TOP[2]], torch.float32),
        "tail_log_mass": flat([TAIL[0], TAIL[1][:-1], TAIL[2]], torch.float32),
    }
    with refused(InvalidRequestError, field=name, rows=(1,)):
        rollout(**{name: short[name]})


def test_gradients_reach_the_most_probable_ids():
    values = flat(TOP, torch.float32).values.clamp_min(-9.0).requires_grad_()
    tail = flat(TAIL, torch.float32).values.clamp_min(-9.0).requires_grad_()
    full = Ragged.from_list(FULL)
    for pad in (False, True):
        td = rollout(pad, top_logprobs=full.with_values(values), tail_log_mass=full.with_values(tail))
        total = sum(corelm.ragged(td, ("log_probs", name)).values.sum() for name in ("top_log_probs", "tail_log_mass"))
        one, other = torch.autograd.grad(total, [values, tail])
        scored = corelm.ragged(td, ("log_probs", "scored_mask")).values.float()
        assert torch.equal(other, scored) and torch.equal(one, scored[:, None].expand(-1, 2))


# By hand -------------------------------------------------------------------------------------------------------------


def by_hand(**changes: Any) -> LogProbs:
    given: dict[str, Any] = {
        "full": [[-0.5] * len(row) for row in FULL],
        "kept_ids": TokenSets.from_list(SETS),
        "kept_log_mass": MASS,
        "top_ids": TOP_IDS,
        "top_log_probs": [torch.tensor(row) for row in TOP],
        "tail_log_mass": TAIL,
    }
    return LogProbs.from_rows(**given | changes)


def test_from_rows():
    log_probs = by_hand()
    assert read(TensorDict(log_probs=log_probs, batch_size=[3])) == expected()
    flat_ids = [[token for ids in row for token in ids] for row in SETS]
    again = by_hand(kept_ids=flat_ids, kept_counts=[[len(ids) for ids in row] for row in SETS])
    assert read(TensorDict(log_probs=again, batch_size=[3])) == expected()


@each(
    "changes, field",
    [
        ({"kept_ids": [[7]] * 3}, "kept_ids"),
        ({"kept_ids": None, "kept_counts": [[1]]}, "kept_ids"),
        ({"kept_ids": [[7, 9], [8], []], "kept_counts": [[0, 0, 0, 2], [0, 1, 3, 0], [0, 0]]}, "kept_ids"),
        ({"kept_ids": TokenSets.from_list([SETS[0], SETS[1][:2], SETS[2]])}, "kept_counts"),
        ({"top_ids": [TOP_IDS[0], TOP_IDS[1], [[1], [2]]]}, "top_ids"),
        ({"top_ids": [TOP_IDS[0], TOP_IDS[1][:1], TOP_IDS[2]]}, "top_ids"),
        ({"top_ids": [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2]]}, "top_ids"),
        ({"top_ids": TOP}, "top_ids"),
    ],
)
def test_from_rows_refuses(changes, field):
    with refused(InvalidRequestError, field=field):
        by_hand(**changes)


# What is shown -------------------------------------------------------------------------------------------------------


@each("pad", [False, True])
def test_records(pad):
    first, second, third = corelm.to_records(rollout(pad))
    assert first["kept_ids"] == [[7, 9]] and third["kept_ids"] == third["top_ids"] == []
    assert second["kept_ids"] == [[8], [1, 2, 9], []] and second["kept_log_mass"] == MASS[1][1:]
    assert second["top_ids"] == TOP_IDS[1][1:] and second["top_log_probs"] == TOP[1][1:]
    assert second["tail_log_mass"] == TAIL[1][1:]
    tokens = corelm.to_records(rollout(pad), by="token")
    assert [one["kept_ids"] for one in tokens[:5]] == [None, None, None, [7, 9], None]
    assert tokens[3]["top_ids"] == [7, 9] and tokens[3]["tail_log_mass"] == -2.0 and tokens[0]["top_ids"] is None
    elsewhere = rollout(pad).rename_key_("log_probs", "ref_log_probs")
    assert corelm.to_records(elsewhere)[0]["ref_log_probs_kept_ids"] == [[7, 9]]


# Several turns -------------------------------------------------------------------------------------------------------


def turn(prompt: list[int], response: list[int], first: int, k: int = 1, **changes: Any) -> TensorDict:
    """One conversation: each sampled token has the set [token, token + first], and other numbers made from `first`."""
    full = prompt + response
    said = [False] * len(prompt) + [True] * len(response)
    rows = Ragged.from_list([full])
    given: dict[str, Any] = {
        "kept_ids": TokenSets.from_list([[[t, t + first] if on else [] for t, on in zip(full, said, strict=True)]]),
        "kept_log_mass": rows.with_values(rows.values * -0.5 * first),
        "top_ids": rows.with_values(rows.values[:, None].expand(-1, k) + first),
        "top_logprobs": rows.with_values((rows.values * -0.25 * first)[:, None].expand(-1, k)),
        "tail_log_mass": rows.with_values(rows.values * -1.0 * first),
    }
    return assemble(
        ContainerRequest(
            batch_size=(1,),
            fields=frozenset({"tokens", "masks", "log_probs"}),
            tokens=Parts(Ragged.from_list([prompt]), Ragged.from_list([response]), rows),
            logprobs=rows.with_values(rows.values * -0.125),
            scored=rows.with_values(torch.tensor(said)),
            provenance=TRUNCATED,
            **given | changes,
        )
    )


@each("pad", [False, True])
def test_merged_turns_keep_their_own_ids(pad):
    merged = corelm.merge_turns([turn([1, 2], [3], 10), turn([1, 2, 3, 4], [5, 6], 20)], pad_output=pad)
    assert read(merged) == {
        "kept_ids": [[[], [], [3, 13], [], [5, 25], [6, 26]]],
        "kept_log_mass": [[0.0, 0.0, -15.0, 0.0, -50.0, -60.0]],
        "top_ids": [[[-1], [-1], [13], [-1], [25], [26]]],
        "top_log_probs": [[[0.0], [0.0], [-7.5], [0.0], [-25.0], [-30.0]]],
        "tail_log_mass": [[0.0, 0.0, -30.0, 0.0, -100.0, -120.0]],
    }


def test_turns_that_do_not_merge():
    later = [1, 2, 3, 4], [5, 6], 20
    with refused(MissingKeyError, field="log_probs.kept_ids"):
        corelm.merge_turns([turn([1, 2], [3], 10), turn(*later, kept_ids=None)])
    with refused(InvalidRequestError, field="log_probs.top_ids"):
        corelm.merge_turns([turn([1, 2], [3], 10, k=2), turn(*later)])
