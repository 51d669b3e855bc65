"""Replies of ``/generate`` as results: where an answer is cut, and what an aborted row becomes.

Implausible replies are in `test_server`.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import pytest
import torch

from corelm.spec import Capabilities, GenerateResult
from corelm_engine_kit import PartialReply
from helpers.canned_replies import answering
from helpers.each import case
from helpers.requests import generation, scoring
from helpers.tiny_models import VOCAB, tiny_tokenizer
from sglang_backend import SGLangBackend
from sglang_backend.capabilities import ServerInfo
from sglang_backend.protocol import is_reply_to


@pytest.fixture
def info() -> ServerInfo:
    capabilities = Capabilities(vocab_size=VOCAB, max_context=64)
    return ServerInfo(capabilities, tiny_tokenizer(), model="a-model", weight_label="default")


def one_token_per_byte(text: str) -> list[int]:
    """Return more tokens than the tokenizer would write `text` in."""
    return [token for character in text for token in tiny_tokenizer().encode(character, add_special_tokens=False)]


def result_of(
    info: ServerInfo, entry: Any, stop_ids: frozenset[int] = frozenset(), max_new_tokens: int = 99, **sampling: Any
) -> GenerateResult:
    request = generation([[5]], max_new_tokens=max_new_tokens, **sampling, stop_ids=stop_ids, request_ids=("row",))
    return answering(SGLangBackend, info, entry).generate(request)


def reply(ids: list[int], reason: str = "length", label: str | None = "default") -> dict[str, Any]:
    """A reply in which the log-prob of the token at position p is -p."""
    meta = {
        "finish_reason": {"type": reason},
        "weight_version": label,
        "output_token_logprobs": [[-float(position), token, None] for position, token in enumerate(ids)],
    }
    return {"output_ids": ids, "meta_info": meta}


def answer_length(info: ServerInfo, ids: list[int], stop_ids: frozenset[int] = frozenset(), **sampling: Any) -> int:
    result = result_of(info, reply(ids), stop_ids, max_new_tokens=max(1, len(ids)), **sampling)
    length = int(result.ids.lengths)
    assert result.ids.tolist() == [ids[:length]]
    assert result.logprobs is not None and result.logprobs.tolist() == [[-float(p) for p in range(length)]]
    assert result.finish_reasons == ("stop" if length < len(ids) else "length",)
    return length


def test_an_answer_is_cut_after_its_first_stop_id(info):
    assert answer_length(info, [5, 9, 7, 8], frozenset({7, 8})) == 3


def test_the_earlier_of_stop_id_and_stop_string_ends_the_answer(info):
    ids = one_token_per_byte("abcde")
    assert answer_length(info, ids, frozenset({ids[1]}), stop=("cd",)) == 2
    assert answer_length(info, ids, frozenset({ids[3]}), stop=("bc",)) == 3


def test_a_row_aborted_before_it_ran_needs_no_weight_version(info):
    result = result_of(info, PartialReply(reply([], "abort", label=None)))
    assert result.finish_reasons == ("abort",) and not any(result.errors or ())
    assert result_of(info, PartialReply(reply([5], "abort", label=None))).finish_reasons == ("error",)


def test_an_abort_that_the_caller_did_not_ask_for_is_an_error(info):
    assert result_of(info, PartialReply(reply([5, 6], "abort"))).finish_reasons == ("abort",)
    result = result_of(info, reply([5, 6], "abort"))
    assert result.finish_reasons == ("error",) and "not by this client" in (result.errors or ("",))[0]


def test_an_answer_that_is_shorter_than_its_finish_reason_says_is_an_error(info):
    for ids in [[5, 6], [5], []]:
        with case(ids):
            assert result_of(info, reply(ids, "length"), max_new_tokens=3).finish_reasons == ("error",)
            assert result_of(info, reply(ids, "stop"), frozenset({9}), stop=("nowhere",)).finish_reasons == ("error",)


def test_an_answer_that_stops_before_min_new_tokens_is_an_error(info):
    stop = frozenset({9})
    assert result_of(info, reply([5, 9], "stop"), stop, min_new_tokens=2).finish_reasons == ("stop",)
    assert result_of(info, reply([5, 9], "stop"), stop, min_new_tokens=3).finish_reasons == ("error",)


def test_an_id_that_is_none_is_an_error(info):
    for token in [VOCAB, None]:
        with case(token):
            assert result_of(info, reply([5, token, 7]), max_new_tokens=3).finish_reasons == ("error",)


def test_more_tokens_than_were_asked_for_are_an_error(info):
    assert result_of(info, reply([5, 6, 7]), max_new_tokens=2).finish_reasons == ("error",)


def test_a_reply_that_does_not_name_its_request_is_not_the_answer_to_it():
    for other in ({"id": "theirs"}, {}, {"id": None}):
        assert not is_reply_to({"rid": "mine"}, {"meta_info": other})
    # What is not a reply of SGLang's at all is refused when it is parsed.
    for answer in ({"meta_info": {"id": "mine"}}, {}, [], {"meta_info": 7}):
        assert is_reply_to({"rid": "mine"}, answer)


# The most probable ids, as lists and as arrays ------------------------------------------------------------------------

ROW, BEST, VALUES = [5, 6, 7, 8], [9, 7, 8], [-0.25, -1.0, -0.125]


def scored(info: ServerInfo, **candidates: Any) -> Any:
    """Return what becomes of a row with these fields for its most probable ids."""
    request = scoring([ROW], request_ids=("row",), return_argmax=True)
    entries = [[None, 5, None], [-2.0, 6, None], [-1.0, 7, None], [-0.125, 8, None]]
    meta = {"finish_reason": {"type": "length"}, "weight_version": "default", "input_token_logprobs": entries}
    return answering(SGLangBackend, info, {"output_ids": [], "meta_info": meta | candidates}).score_logprobs(request)


def arrays(best: list[int] = BEST, values: list[float] = VALUES, **changes: Any) -> dict[str, Any]:
    """The fields of a server that knows ``return_flat_raw_top_logprobs_b64``."""
    parts = {"idx": torch.tensor(best, dtype=torch.int32), "val": torch.tensor(values, dtype=torch.float32)}
    fields: dict[str, Any] = {"input_top_logprobs_shape": [3, 1], "input_top_logprobs_null_prefix": 1}
    for part, found in parts.items():
        name = f"input_top_logprobs_{part}_flat_b64"
        fields[name] = base64.b64encode(found.numpy().tobytes()).decode()
        fields[f"{name}_dtype"] = str(found.dtype).removeprefix("torch.")
    return fields | {f"input_top_logprobs_{name}": value for name, value in changes.items()}


def test_arrays_that_do_not_fit_are_an_error_of_their_row(info):
    for fields, message in [
        (arrays(shape=[3, 2]), "leave out return_argmax=True"),
        (arrays(shape=[2, 1]), "leave out return_argmax=True"),
        (arrays(null_prefix=0), "leave out return_argmax=True"),
        (arrays(best=BEST[:2]), "leave out return_argmax=True"),
        (arrays(values=VALUES[:2]), "leave out return_argmax=True"),
        (arrays(best=[], values=[]), "leave out return_argmax=True"),
        (arrays(val_flat_b64="***"), "not built as expected"),
        (arrays(val_flat_b64="AAA="), "not built as expected"),
        (arrays(val_flat_b64_dtype="float64"), "not built as expected"),
        (arrays(best=[9, 7, VOCAB]), "outside the vocabulary"),
        (arrays(values=[math.nan, -1.0, -0.125]), "log-prob at position 0 is nan"),
        (arrays(values=[-3.0, -1.0, -0.125]), "names id 9 with the log-prob -3"),
    ]:
        with case(fields, message):
            result = scored(info, **fields)
            assert message in result.errors[0] and result.scored.tolist() == [[False] * 4]
