"""`to_records`: what it holds for every layout and batch, and that the libraries it is for read it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

import corelm
from corelm import History, LLMPolicy
from corelm.containers import LogProbs, Masks, PerToken, Tokens
from corelm.errors import InvalidRequestError, MissingKeyError
from helpers.four_rows import HOT, PROMPTS, RAW, RESPONSES, batch, both_layouts
from helpers.refusals import refused
from helpers.toy_prompts import QUESTIONS, SAMPLING, TOKENIZER, chat


def rewarded(pad_output: bool = False, shape: tuple[int, ...] = (4,)) -> TensorDict:
    td = batch(shape, pad_output)
    td["reward"] = torch.arange(4.0).reshape(*shape, 1)
    td["advantage"] = torch.arange(8.0).reshape(*shape, 2)
    return td


@both_layouts
def test_a_row_is_a_plain_dict(pad_output: bool) -> None:
    record = corelm.to_records(rewarded(pad_output))[1]
    assert record == {
        "row": 1,
        "prompt": "b",
        "response": "b",
        "messages": [{"role": "user", "content": "b"}],
        "finish_reason": "length",
        "reward": 1.0,
        "advantage": [2.0, 3.0],
        "prompt_ids": [4],
        "prompt_length": 1,
        "response_ids": [9, 10, 11],
        "response_length": 3,
        "log_probs": [-9.0, -10.0, -11.0],
        "log_probs_sum": -30.0,
        "log_probs_mean": -10.0,
        **{name: value for name, value in RAW.to_dict().items() if name not in ("penalties", "version_runs")},
        "penalties": [],
        "version_runs": [],
    }
    assert record.pop("adapter") is None
    assert {type(value) for value in record.values()} <= {int, str, float, list}


@both_layouts
def test_rows_come_in_c_order_with_their_index(pad_output: bool) -> None:
    records = corelm.to_records(rewarded(pad_output, (2, 2)))
    assert [(one["row"], one["sample"]) for one in records] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [one["response_ids"] for one in records] == RESPONSES
    assert [one["prompt_ids"] for one in records] == PROMPTS
    assert [one["reward"] for one in records] == [0.0, 1.0, 2.0, 3.0]
    (alone,) = corelm.to_records(rewarded(pad_output)[2])
    assert alone == {**{key: value for key, value in records[2].items() if key != "sample"}, "row": 0}
    assert corelm.to_records(rewarded(pad_output)[:0]) == []


def test_rows_without_scored_tokens_have_no_mean_and_no_sum() -> None:
    empty = corelm.to_records(batch())[2]
    assert empty["log_probs"] == [] and empty["log_probs_sum"] is None and empty["log_probs_mean"] is None


@both_layouts
def test_log_probs_of_the_responses_alone_are_those_of_all_tokens(pad_output: bool) -> None:
    td = batch((4,), pad_output)
    whole = corelm.to_records(td)
    td["log_probs"] = td["log_probs"].select("response")
    assert corelm.to_records(td) == whole and "full" not in td["log_probs"].keys()
    assert corelm.to_records(td, by="token") == corelm.to_records(batch((4,), pad_output), by="token")


def test_a_policys_result_and_a_scoring_under_another_key() -> None:
    with corelm.get_backend("toy") as backend:
        policy = LLMPolicy(backend, sampling_params=SAMPLING, num_samples=2)
        result = policy(TensorDict(history=History.from_chats([chat(q) for q in QUESTIONS[:2]])), seed=3)
        scorer = LLMPolicy(
            backend, input_mode="tokens", generate=False, inplace=False, keys=corelm.Keys(log_probs="ref_log_probs")
        )
        result["ref_log_probs"] = scorer(result)["ref_log_probs"]
        records = corelm.to_records(result)
    assert len(records) == 4 and records[3]["row"] == records[3]["sample"] == 1
    for row, record in enumerate(records):
        one = result.flatten(0, 1)[row]
        assert record["response"] == one["text"].response and record["messages"] == one["history"].full.to_chats()
        assert record["response_ids"] == one["tokens"].response.tolist()
        assert record["finish_reason"] == one["finish_reason"] and record["errors"] == ""
        assert record["log_probs"] == one["log_probs"].response.tolist()
        assert record["log_probs_sum"] == pytest.approx(one["log_probs"].response.sum().item())
        # The reference scored the prompt as well, except its first token.
        assert record["ref_log_probs_prompt"][0] is None and len(record["ref_log_probs_prompt"]) > 1
        assert record["ref_log_probs"] == pytest.approx(record["log_probs"], abs=1e-5)
        assert record["backend"] == record["ref_log_probs_backend"] == "toy" and record["weight_version"] == "0"
        assert sum(record["assistant_mask"]) == record["response_length"]
    assert len({tuple(record) for record in records}) == 1


@both_layouts
def test_a_token_is_a_plain_dict(pad_output: bool) -> None:
    td = batch((2, 2), pad_output)
    records = corelm.to_records(td, by="token", tokenizer=TOKENIZER)
    assert len(records) == sum(map(len, PROMPTS)) + sum(map(len, RESPONSES))
    assert [one["id"] for one in records if (one["row"], one["sample"]) == (0, 1)] == [4, 9, 10, 11]
    assert records[3] == {
        "row": 0,
        "sample": 0,
        "position": 3,
        "part": "response",
        "id": 8,
        "token": TOKENIZER.decode([8]),
        "log_prob": -8.0,
        "scored": True,
    }
    assert records[0]["part"] == "prompt" and records[0]["log_prob"] is None and records[0]["scored"] is False
    assert corelm.to_records(td, by="token")[0].keys() == records[0].keys() - {"token"}


@both_layouts
def test_values_per_token_are_in_the_records(pad_output: bool) -> None:
    td = batch((4,), pad_output)
    td["masks"].all_assistant_mask = td["masks"].all_response_mask
    td["ref_log_probs"] = td["log_probs"].clone()
    rows = [PerToken(full=torch.arange(float(n)), padded=False, batch_size=[]) for n in (4, 4, 2, 3)]
    if not pad_output:
        td["kl"] = lazy_stack(rows)
        assert [one["kl"] for one in corelm.to_records(td, by="token")][:5] == [0.0, 1.0, 2.0, 3.0, 0.0]
        assert corelm.to_records(td)[3]["kl"] == [0.0, 1.0, 2.0]
    token = corelm.to_records(td, by="token")[3]
    assert token["assistant"] is True and token["ref_log_probs"] == -8.0 and token["ref_log_probs_scored"] is True


def test_rows_next_to_dense_tokens_are_in_the_records() -> None:
    dense, mixed = batch((4,), True), batch((4,), True)
    dense["value"] = batch((4,), True)["log_probs"].full
    mixed["log_probs"] = batch((4,), False)["log_probs"]
    mixed["value"] = PerToken.from_rows(full=mixed["log_probs"].full)
    records = corelm.to_records(mixed, by="token")
    assert [record.pop("value") for record in records] == corelm.ragged(dense, ("log_probs", "full")).values.tolist()
    assert records == corelm.to_records(dense, by="token")


def test_an_entry_that_is_called_like_a_column_keeps_its_name() -> None:
    td = batch()
    td.set("prompt", NonTensorData("mine", batch_size=[4]))
    record = corelm.to_records(td)[0]
    assert record["prompt"] == "mine" and record["text.prompt"] == "a" and record["response"] == "a"


def test_nested_entries_are_joined_with_dots() -> None:
    td = TensorDict({"next": rewarded(), "done": torch.zeros(4, 1, dtype=torch.bool)}, batch_size=[4])
    record = corelm.to_records(td)[3]
    assert record["next.reward"] == 3.0 and record["done"] is False
    assert record["next.text_response"] == "d" and record["next.tokens_response_ids"] == RESPONSES[3]


def test_rows_that_differ_keep_their_own_provenance() -> None:
    td = lazy_stack([batch()[0], batch(provenance=HOT)[1]])
    assert [one["mode"] for one in corelm.to_records(td)] == ["raw", "processed"]
    assert corelm.to_records(td)[1]["penalties"] == [["repetition_penalty", 1.2]]


def test_unsplit_rows_have_one_list_of_ids() -> None:
    td = TensorDict(
        tokens=Tokens(full=torch.tensor([[1, 2, 0], [3, 4, 5]]), batch_size=[2]),
        masks=Masks(all_attention_mask=torch.tensor([[True, True, False], [True, True, True]]), batch_size=[2]),
        log_probs=LogProbs(
            full=torch.tensor([[0.0, -1.0, 0.0], [0.0, -2.0, -4.0]]),
            scored_mask=torch.tensor([[False, True, False], [False, True, True]]),
            batch_size=[2],
        ),
        batch_size=[2],
    )
    first, second = corelm.to_records(td)
    assert first["ids"] == [1, 2] and first["length"] == 2 and first["log_probs"] == [None, -1.0]
    assert second["log_probs_mean"] == -3.0 and "backend" not in second


def test_mistakes_name_the_entry_and_say_what_to_type() -> None:
    td = batch((4,), True)
    with refused(InvalidRequestError, field="('masks',)"):
        corelm.to_records(td.exclude("masks"))
    with refused(InvalidRequestError, field="thing"):
        corelm.to_records(TensorDict(thing=NonTensorData(object(), batch_size=[4]), batch_size=[4]))
    for part, rows in (("prompt", (0, 1, 3)), ("response", (0, 1, 2, 3))):
        with refused(InvalidRequestError, field=f"tokens.{part}", rows=rows):
            td["tokens"] = batch((4,), True)["tokens"].select(part)
            corelm.to_records(td, by="token")
    with refused(InvalidRequestError, field="by"):
        corelm.to_records(td, by="rows")  # type: ignore[arg-type]
    with refused(InvalidRequestError, field="td"):
        corelm.to_records(td["tokens"])
    with refused(MissingKeyError, field="tokens"):
        corelm.to_records(td.select("text"), by="token")
    with refused(InvalidRequestError, field="reward"):
        corelm.to_records(TensorDict(reward=torch.zeros(2, device="meta"), batch_size=[2]))
    td["row"] = torch.zeros(4)
    with pytest.raises(InvalidRequestError, match=r"two entries give the key 'row'.*rename_key_"):
        corelm.to_records(td)


def everything() -> list[dict[str, Any]]:
    td = rewarded(False, (2, 2))
    td["errors"] = [["", "bad"], ["", ""]]
    return corelm.to_records(td)


def test_columns_of_parquet_become_containers(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    pandas.DataFrame(everything()).to_parquet(tmp_path / "result.parquet")
    table = pandas.read_parquet(tmp_path / "result.parquet")
    tokens = Tokens.from_rows(prompt=table["prompt_ids"], response=table["response_ids"])
    assert [row.tolist() for row in tokens.response] == RESPONSES
    chats = History.from_chats(table["messages"]).chats
    assert [[turn.content for turn in chat] for chat in chats] == [
        [turn["content"] for turn in record["messages"]] for record in everything()
    ]
