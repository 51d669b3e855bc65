"""`repad` and `collate`: from rows of their own length to dense tensors and back, exactly."""

import functools
import importlib
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch.utils.data import DataLoader

import corelm
from corelm import History, LLMPolicy
from corelm.containers import Masks, PerToken, Tokens, ragged
from corelm.containers.assemble import assemble
from corelm.errors import InvalidRequestError
from corelm.spec.records import ContainerRequest, Parts
from corelm.tensors.ragged import Ragged
from helpers.each import each, examples
from helpers.four_rows import HOT, LEFT, PROMPTS, RAW, RESPONSES, RIGHT, TEXTS, assert_holds, batch, both_layouts, plain
from helpers.refusals import refused
from helpers.toy_prompts import QUESTIONS, SAMPLING, chat


def per_token(lengths: tuple[int, ...] = (4, 4, 2, 3)) -> PerToken:
    return lazy_stack([PerToken(full=torch.arange(float(n)) + 1, padded=False, batch_size=[]) for n in lengths])


@each("shape, rows", [((4,), [0, 1, 2, 3]), ((2, 2), [[0, 1], [2, 3]])])
@each("target", [False, True])
@both_layouts
def test_every_layout_from_every_layout(shape: tuple[int, ...], rows: Any, pad_output: bool, target: bool) -> None:
    made = corelm.repad(batch(shape, pad_output), pad_output=target)
    assert_holds(made, rows, target)
    assert made["finish_reason"] == batch(shape)["finish_reason"]


def test_the_result_of_a_policy_is_what_pad_output_gives() -> None:
    with corelm.get_backend("toy") as backend:
        policy = LLMPolicy(backend, sampling_params=SAMPLING, inplace=False)
        asked = TensorDict(history=History.from_chats([chat(q) for q in QUESTIONS]))
        rows, dense = policy(asked, seed=1), policy.replace(pad_output=True)(asked, seed=1)
        pad_id = backend.pad_id
    for made, wanted in (
        (corelm.repad(rows, pad_id=pad_id), dense),
        (corelm.repad(dense, pad_output=False), rows),
        (corelm.repad(dense, pad_id=pad_id), dense),
        (corelm.repad(corelm.repad(rows), pad_output=False), rows),
    ):
        assert set(made.keys(True)) == set(wanted.keys(True))
        for name in ("tokens", "masks", "log_probs"):
            for field in set(wanted[name].keys()) - {"padded", "provenance"}:
                assert plain_rows(getattr(made[name], field)) == plain_rows(getattr(wanted[name], field))
        assert made["log_probs"].provenance == wanted["log_probs"].provenance
        assert made["text"].response == wanted["text"].response
        assert made["history"].full.to_chats() == wanted["history"].full.to_chats()


def plain_rows(value: Any) -> Any:
    return plain(value) if isinstance(value, list) else value.tolist()


def test_a_slice_loses_the_columns_that_hold_only_pads() -> None:
    dense = batch((4,), True)
    narrow = corelm.repad(dense[2:], pad_id=99)
    assert narrow["tokens"].prompt.tolist() == [[5, 6], [99, 7]]
    assert narrow["tokens"].response.tolist() == [[99, 99], [12, 13]]
    assert narrow["tokens"].full.tolist() == [[5, 6, 99, 99], [99, 7, 12, 13]]
    assert narrow["masks"].all_attention_mask.tolist() == [[True, True, False, False], [False, True, True, True]]
    assert narrow["log_probs"].full.tolist() == [[0.0] * 4, [0.0, 0.0, -12.0, -13.0]]
    assert dense["tokens"].full.shape == (4, 6)


def rewarded(**under_next: Any) -> TensorDict:
    """Return dense tokens, ``. 1 | 2 .`` and ``5 6 | 7 8``, and what belongs to them under ``next``."""
    full, attention = torch.tensor([[0, 1, 2, 0], [5, 6, 7, 8]]), torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]]).bool()
    tokens = Tokens(full=full, prompt=full[:, :2], response=full[:, 2:], batch_size=[2])
    held = TensorDict(under_next, batch_size=[2])
    return TensorDict(
        tokens=tokens, masks=Masks(all_attention_mask=attention, batch_size=[2]), next=held, batch_size=[2]
    )


DENSE_REWARDS = {
    "rew": PerToken(full=torch.tensor([[1.0, 2.0, 0.0, 0.0], [3.0, 4.0, 5.0, 6.0]]), batch_size=[2]),
    "masks": Masks(all_attention_mask=torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool(), batch_size=[2]),
}
ROWS_OF_REWARDS = {
    "rew": PerToken.from_rows(full=[[1, 2], [3, 4, 5, 6]]),
    "masks": Masks.from_rows(all_attention_mask=[[1] * 2, [1] * 4]),
}


@each("given", [DENSE_REWARDS, ROWS_OF_REWARDS, {"rew": ROWS_OF_REWARDS["rew"]}])
def test_values_under_next_are_read_with_their_own_masks_and_laid_out_like_the_tokens(given: dict[str, Any]) -> None:
    dense, rows = (corelm.repad(rewarded(**given), pad_output=pad_output) for pad_output in (True, False))
    assert dense["tokens"].full.tolist() == [[0, 1, 2, 0], [5, 6, 7, 8]]
    assert dense["next", "rew"].tolist() == [[0, 1, 2, 0], [3, 4, 5, 6]]
    if "masks" in given:
        assert dense["next", "masks"].all_attention_mask.tolist() == [[0, 1, 1, 0], [1, 1, 1, 1]]
    assert ragged(rows, ("next", "rew", "full")).tolist() == [[1, 2], [3, 4, 5, 6]]


def test_a_plain_tensor_as_wide_as_the_dense_tokens_is_refused_next_to_rows() -> None:
    plain_tensor = torch.zeros(2, 4)
    with refused(InvalidRequestError, field="next.unnamed"):
        corelm.repad(rewarded(rew=ROWS_OF_REWARDS["rew"], unnamed=plain_tensor), pad_output=False)
    td = rewarded().exclude("next")
    td["tokens"], td["unnamed"] = Tokens.from_rows(full=[[1, 2], [5, 6, 7, 8]]), plain_tensor
    with refused(InvalidRequestError, field="unnamed"):
        corelm.repad(td, pad_output=False)


def test_a_token_that_equals_the_pad_id_is_kept() -> None:
    tokens = Ragged.from_list([[0, 0, 0], [1]])
    request = ContainerRequest(batch_size=(2,), fields=frozenset({"tokens", "masks"}), tokens=Parts(None, None, tokens))
    dense = corelm.repad(assemble(request))
    assert dense["tokens"].full.tolist() == [[0, 0, 0], [1, 0, 0]]
    assert plain(corelm.repad(dense, pad_output=False)["tokens"].full) == [[0, 0, 0], [1]]


def test_values_per_token_are_plain_tensors_when_dense_and_per_token_in_rows() -> None:
    td = batch()
    td["kl"] = per_token()
    dense = corelm.repad(td)
    assert dense["kl"].tolist() == [[1, 2, 3, 4, 0, 0], [0, 0, 1, 2, 3, 4], [0, 1, 2, 0, 0, 0], [0, 0, 1, 2, 3, 0]]
    with pytest.raises(
        InvalidRequestError, match=r"kl: it is as wide as the dense tokens. Pass per_token=\['kl'\]"
    ) as error:
        corelm.repad(dense, pad_output=False)
    assert error.value.field == "kl"
    back = corelm.repad(dense, pad_output=False, per_token=["kl"])
    assert ragged(back, ("kl", "full")).tolist() == ragged(td, ("kl", "full")).tolist()
    assert corelm.repad(dense[2:], per_token=["kl"])["kl"].tolist() == [[1, 2, 0, 0], [0, 1, 2, 3]]
    assert corelm.repad(dense[2:], per_token=[])["kl"].shape == (2, 6)
    assert torch.equal(corelm.repad(dense)["kl"], dense["kl"])  # nothing moves, so nothing is asked


@both_layouts
def test_gradients_flow_to_the_log_probs(pad_output: bool) -> None:
    full = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    tokens = Parts(*(Ragged.from_list(rows) for rows in (PROMPTS, RESPONSES, full)))
    leaf = (-tokens.full.values.float()).requires_grad_()
    request = ContainerRequest(
        batch_size=(4,),
        fields=frozenset({"tokens", "masks", "log_probs"}),
        tokens=tokens,
        logprobs=tokens.full.with_values(leaf),
        scored=Ragged.full(tokens.full.lengths, True, torch.bool),
        provenance=RAW,
        pad_output=pad_output,
    )
    made = corelm.repad(assemble(request), pad_output=not pad_output)
    ragged(made, ("log_probs", "response")).values.sum().backward()
    assert leaf.grad is not None and leaf.grad.sum() == sum(map(len, RESPONSES))


def test_other_entries_and_other_keys_come_along() -> None:
    td = batch((2, 2), provenance=(RAW, HOT, RAW, RAW))
    td["reward"] = torch.arange(4.0).reshape(2, 2)
    td["ref_log_probs"] = td["log_probs"].clone()
    nested = TensorDict({"next": td, "done": torch.zeros(2, 2, dtype=torch.bool)}, batch_size=[2, 2])
    dense = corelm.repad(nested)["next"]
    assert dense["ref_log_probs"].response.tolist() == dense["log_probs"].response.tolist()
    assert dense["reward"].tolist() == [[0, 1], [2, 3]]
    assert dense["log_probs"].provenance == (RAW, HOT)
    assert dense[0, 1]["log_probs"].provenance == HOT


def test_dense_tokens_without_masks_get_them() -> None:
    dense = corelm.repad(batch().select("tokens"))
    assert ragged(dense, ("tokens", "response")).tolist() == RESPONSES
    assert dense["masks"].all_response_mask.sum().item() == sum(map(len, RESPONSES))
    lengths = [len(prompt) + len(response) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    assert dense["masks"].all_attention_mask.sum(-1).tolist() == lengths


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5), st.data())
def test_there_and_back_changes_nothing(lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    draw = [[data.draw(st.integers(0, 9)) for _ in range(n)] for pair in lengths for n in pair]
    prompts, responses = draw[::2], draw[1::2]
    full = [p + r for p, r in zip(prompts, responses, strict=True)]
    request = ContainerRequest(
        batch_size=(len(full),),
        fields=frozenset({"tokens", "masks"}),
        tokens=Parts(*(Ragged.from_list(rows) for rows in (prompts, responses, full))),
    )
    td = corelm.repad(corelm.repad(assemble(request)), pad_output=False)
    for name, rows in (("prompt", prompts), ("response", responses), ("full", full)):
        assert plain(getattr(td["tokens"], name)) == rows


# Minibatches ---------------------------------------------------------------------------------------------------------


def wide_and_narrow() -> tuple[TensorDict, TensorDict]:
    """Two dense rollouts of different widths."""
    return batch((4,), True), corelm.repad(batch((4,), True)[2:])


def test_dense_rollouts_of_different_widths() -> None:
    wide, narrow = wide_and_narrow()
    with pytest.raises(RuntimeError):
        torch.stack([wide[:2], narrow])
    with refused(InvalidRequestError, field="full"):
        lazy_stack([wide[:2], narrow])["tokens"].full  # noqa: B018
    stacked = corelm.repad(lazy_stack([wide[:2], narrow]))
    assert stacked.batch_size == (2, 2) and stacked["tokens"].prompt.tolist() == [LEFT[:2], LEFT[2:]]
    joined = corelm.collate([*wide, *narrow])
    assert joined["tokens"].response.tolist() == [*RIGHT, *RIGHT[2:]]
    assert joined["text"].response == [*TEXTS, *TEXTS[2:]]


def test_values_per_token_of_different_widths() -> None:
    wide, narrow = wide_and_narrow()
    wide["advantage"], narrow["advantage"] = wide["tokens"].full.float(), narrow["tokens"].full.float()
    with pytest.raises(
        InvalidRequestError, match=r"advantage: its rows have different shapes.*per_token=\['advantage'\]"
    ):
        corelm.collate([*wide, *narrow])
    joined = corelm.collate([*wide, *narrow], per_token=["advantage"])
    assert torch.equal(joined["advantage"], joined["tokens"].full.float())


def test_a_stack_of_both_layouts_becomes_one() -> None:
    mixed = [batch((4,), row % 2 == 1)[row] for row in range(4)]
    assert_holds(corelm.collate(mixed), [0, 1, 2, 3], True)
    assert_holds(corelm.collate(mixed, pad_output=False), [0, 1, 2, 3], False)


@both_layouts
def test_a_dataloader(pad_output: bool) -> None:
    td = batch((4,), pad_output)
    loaded = list(DataLoader(td, batch_size=3, collate_fn=corelm.collate))
    assert_holds(loaded[0], [0, 1, 2], True)
    assert loaded[1]["tokens"].full.tolist() == [[7, 12, 13]]
    rows: Any = list(td)
    (shuffled,) = DataLoader(rows, batch_size=4, shuffle=True, collate_fn=functools.partial(corelm.collate, pad_id=99))
    order = [TEXTS.index(text) for text in shuffled["text"].response]
    assert ragged(shuffled, ("tokens", "response")).tolist() == [RESPONSES[row] for row in order]


def test_mistakes_name_the_row_and_the_field() -> None:
    with refused(InvalidRequestError, field="rows"):
        corelm.collate([])
    with refused(InvalidRequestError, field="rows"):
        corelm.collate([batch()[0], "text"])  # type: ignore[list-item]
    with refused(InvalidRequestError, field="rows"):
        corelm.collate([batch()[0], batch()[1].exclude("text")])
    with refused(InvalidRequestError, field="rows"):
        corelm.collate([batch()[0], batch()])
    with refused(InvalidRequestError, field="td"):
        corelm.repad(batch()["tokens"])
    with refused(InvalidRequestError, field="per_token"):
        corelm.repad(batch(), per_token=["nothing"])
    td = batch((4,), True)
    td["advantage"] = torch.zeros(4, 5)
    with refused(InvalidRequestError, field="per_token"):
        corelm.repad(td, per_token=["advantage"])
    uneven = batch()
    uneven["log_probs"].full = [torch.zeros(n) for n in (4, 4, 2, 9)]
    with refused(InvalidRequestError, field="log_probs.full", rows=(3,)):
        corelm.repad(uneven)
    with refused(InvalidRequestError, field="('masks',)"):
        corelm.repad(batch((4,), True).exclude("masks"))


# TorchRL -------------------------------------------------------------------------------------------------------------


def sampled(td: TensorDictBase) -> None:
    order = [TEXTS.index(text) for text in td["text"].response]
    assert ragged(td, ("tokens", "full")).tolist() == [PROMPTS[row] + RESPONSES[row] for row in order]
    assert td["tokens"].padded is True


@pytest.mark.skipif(find_spec("torchrl") is None, reason="TorchRL is not installed")
@both_layouts
@each("storage", ["ListStorage", "LazyStackStorage"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_replay_buffer_of_torchrl_for_rows_and_any_widths(pad_output: bool, storage: str) -> None:
    torchrl = importlib.import_module("torchrl.data")
    buffer = torchrl.ReplayBuffer(storage=getattr(torchrl, storage)(16), batch_size=3, collate_fn=corelm.collate)
    buffer.extend(batch((4,), pad_output))
    buffer.extend(corelm.repad(batch((4,), True)[2:], pad_output=pad_output))
    for _ in range(4):
        sampled(buffer.sample())
