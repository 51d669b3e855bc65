"""Long replies are parsed without a Python loop over their tokens, with the results of a plain loop, written here.

Each defect is put into the middle of a reply that is right otherwise, next to rows that stay as they are.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Callable
from typing import Any

import torch

from corelm.spec import Capabilities, GenerateRequest, GenerateResult, ScoreRequest, ScoreResult
from corelm_engine_kit import decoded
from helpers.canned_replies import answering
from helpers.each import case
from helpers.requests import generation, scoring
from helpers.tiny_models import VOCAB, tiny_tokenizer
from sglang_backend import SGLangBackend
from sglang_backend.capabilities import ServerInfo as SGLangInfo
from vllm_backend.capabilities_http import ServerInfo as VLLMInfo
from vllm_backend.server import VLLMServer

COUNT, MIDDLE = 300, 150
CAPABILITIES = Capabilities(vocab_size=VOCAB, max_context=4 * COUNT)
VLLM = VLLMInfo(
    capabilities=CAPABILITIES,
    tokenizer=tiny_tokenizer(),
    model="a-model",
    name="a-model",
    routes=frozenset(),
    fields=None,
)
SGLANG = SGLangInfo(CAPABILITIES, tiny_tokenizer(), "a-model", weight_label="default")

Defect = Callable[[list[Any]], object]


def row_of(seed: int) -> tuple[list[int], list[float]]:
    """Return ids, without the last one of the vocabulary, and a log-prob for each. Some are whole numbers."""
    choose = random.Random(seed)
    values = [choose.choice([0.0, -1.0, -choose.expovariate(1.0), -choose.expovariate(1e6)]) for _ in range(COUNT)]
    return choose.choices(range(3, VOCAB - 1), k=COUNT), values


#: Ids and log-probs.
Rows = list[tuple[list[int], list[float]]]

ROWS: Rows = [row_of(seed) for seed in range(3)]


def scores(rows: Rows = ROWS) -> ScoreRequest:
    return scoring([ids for ids, _ in rows])


def generating(stop_ids: frozenset[int] = frozenset()) -> GenerateRequest:
    return generation([[5]] * len(ROWS), max_new_tokens=COUNT, stop_ids=stop_ids)


def sent(reply: Any) -> Any:
    """Return a reply as it arrives."""
    return decoded(json.dumps(reply).encode())


def put(value: Any, part: int | str | None = None) -> Defect:
    """Return what puts a value, or a part of one, into the middle of a list."""

    def change(entries: list[Any]) -> None:
        if part is None:
            entries[MIDDLE] = value
        else:
            entries[MIDDLE][part] = value

    return change


def check(
    result: GenerateResult | ScoreResult,
    lists: list[Any],
    plain: Callable[[list[int], list[Any]], Any],
    rows: Rows = ROWS,
) -> None:
    """Check each row of a result against what the plain loop makes of the row's list: numbers, or the error."""
    assert result.logprobs is not None
    errors = result.errors or ("",) * len(ROWS)
    for (ids, _), entries, found, error in zip(rows, lists, result.logprobs.tolist(), errors, strict=True):
        expected = plain(ids, entries)
        if isinstance(expected, str):
            assert expected in error and not any(found)
        else:
            numbers = torch.tensor(expected, dtype=torch.float64).to(torch.float32).tolist()
            assert error == "" and found[len(found) - len(numbers) :] == numbers


def number_problem(values: list[Any]) -> str | None:
    """Return what a result must say about the first value that is no log-prob."""
    for place, value in enumerate(values):
        if type(value) not in (int, float) or not -9999.0 < value <= 2.0**-10:
            return f"the log-prob at position {place} is {value!r}"
    return None


# vLLM -----------------------------------------------------------------------------------------------------------------


def vllm_plain(ids: list[int], positions: list[Any]) -> Any:
    if len(positions) != COUNT - 1:
        return "it does not have prompt_logprobs for every token of the prompt"
    values = []
    for token, candidates in zip(ids[1:-1], positions[1:], strict=True):
        if not isinstance(candidates, dict) or str(token) not in candidates:
            return f"its prompt_logprobs do not name id {token} where the prompt has it"
        if not isinstance(candidates[str(token)], dict):
            return "it is not built as expected"
        values.append(candidates[str(token)].get("logprob"))
    return number_problem(values) or [*values, -0.5]


PROMPT_DEFECTS: dict[str, Defect] = {
    "none": lambda positions: None,
    "null": put(None),
    "list": put([]),
    "text": put("x"),
    "other-id": put({"2": {"logprob": -1.0}}),
    "not-a-dict": lambda positions: positions[MIDDLE].update({key: [1] for key in positions[MIDDLE]}),
    "no-logprob": lambda positions: [entry.clear() for entry in positions[MIDDLE].values()],
    "short": lambda positions: positions.pop(),
    **{
        f"value-{value}": lambda positions, value=value: [
            entry.update(logprob=value) for entry in positions[MIDDLE].values()
        ]
        for value in (math.nan, -math.inf, -9999.0, 0.5, None, True, "-1.5", 0, -3)
    },
}


def test_vllm_scores_are_what_a_plain_loop_reads() -> None:
    for defect, ranked in itertools.product(PROMPT_DEFECTS, [False, True]):
        with case(defect, ranked):
            replies, lists = [], []
            for row, (ids, values) in enumerate(ROWS):
                positions: list[Any] = [None]
                for token, value in zip(ids[1:-1], values, strict=False):
                    best = {"1": {"logprob": -0.1, "rank": 1}} if ranked else {}
                    positions.append({str(token): {"logprob": value, "rank": 3}, **best})
                if row == 1:
                    PROMPT_DEFECTS[defect](positions)
                last = {
                    "tokens": [f"token_id:{ids[-1]}"],
                    "token_logprobs": [-0.5],
                    "top_logprobs": [{f"token_id:{ids[-1]}": -0.5, "token_id:7": -0.4}],
                }
                choice = {"finish_reason": "length", "token_ids": ids[-1:], "logprobs": last}
                replies.append(sent({"choices": [{**choice, "prompt_logprobs": positions}]}))
                lists.append(sent(positions))
            check(answering(VLLMServer, VLLM, *replies).score_logprobs(scores()), lists, vllm_plain)


LABEL_DEFECTS: dict[str, Defect] = {
    "none": lambda tokens: None,
    "text": put(" the"),
    "other-id": put("token_id:2"),
    "padded": lambda tokens: tokens.__setitem__(MIDDLE, tokens[MIDDLE].replace(":", ":0")),
    "number": put(7),
    "null": put(None),
    "joined": lambda tokens: tokens.__setitem__(slice(MIDDLE, MIDDLE + 2), ["\n".join(tokens[MIDDLE : MIDDLE + 2])]),
    "short": lambda tokens: tokens.pop(),
    "long": lambda tokens: tokens.append("token_id:5"),
    "empty": lambda tokens: tokens.clear(),
}


def test_vllm_labels_are_compared_with_every_id() -> None:
    for defect in LABEL_DEFECTS:
        with case(defect):
            replies, lists = [], []
            for row, (ids, values) in enumerate(ROWS):
                tokens = [f"token_id:{token}" for token in ids]
                if row == 1:
                    LABEL_DEFECTS[defect](tokens)
                logprobs = {"tokens": tokens, "token_logprobs": values}
                replies.append(sent({"choices": [{"finish_reason": "length", "token_ids": ids, "logprobs": logprobs}]}))
                lists.append((tokens, values))

            def plain(ids: list[int], entry: Any) -> Any:
                right = entry[0] == [f"token_id:{token}" for token in ids]
                return entry[1] if right else "its log-probs are not labelled with the ids of its tokens"

            check(answering(VLLMServer, VLLM, *replies).generate(generating()), lists, plain)


def test_vllm_names_the_first_stop_id_that_an_answer_goes_on_after() -> None:
    ids = ROWS[1][0]
    stop_ids = frozenset({ids[MIDDLE], ids[MIDDLE + 20]})
    first = next(token for token in ids if token in stop_ids)
    reply = {"choices": [{"finish_reason": "length", "token_ids": ids, "logprobs": None}]}
    result = answering(VLLMServer, VLLM, *[reply] * 3).generate(generating(stop_ids))
    assert result.errors is not None and f"after the stop id {first}" in result.errors[1]


# SGLang ---------------------------------------------------------------------------------------------------------------

ENTRY_DEFECTS: dict[str, Defect] = {
    "none": lambda entries: None,
    "null": put(None),
    "number": put(7),
    "dict": put({"0": -1.0, "1": 5}),
    "text": put("ab"),
    "empty": put([]),
    "alone": put([-1.0]),
    "other-id": put(2, 1),
    "text-id": put("5", 1),
    "null-id": put(None, 1),
    "last-id-as-0": put(0, 1),
    "no-text": lambda entries: entries[MIDDLE].pop(),
    "more": lambda entries: entries[MIDDLE].append(9),
    "short": lambda entries: entries.pop(),
    **{f"value-{value}": put(value, 0) for value in (math.nan, -math.inf, -9999.0, 0.5, None, True, "-1.5", 0, -3)},
}


def sglang_plain(name: str, first: int) -> Callable[[list[int], list[Any]], Any]:
    """Return the loop for the list called `name`, whose first log-probs do not count."""

    def plain(ids: list[int], entries: list[Any]) -> Any:
        if len(entries) != len(ids):
            return f"{name} has {len(entries)} entries for {len(ids)} tokens"
        try:
            for position, ((_, echoed, *_), token) in enumerate(zip(entries, ids, strict=True)):
                if echoed != token and not (echoed == 0 and token == VOCAB - 1):
                    return f"{name} is about id {echoed} at position {position}, expected {token}"
        except (TypeError, ValueError) as error:
            return f"it is not built as expected ({type(error).__name__}: {error})"
        values = [value for value, *_ in entries[first:]]
        return number_problem(values) or values

    return plain


def test_sglang_entries_are_what_a_plain_loop_reads() -> None:
    for work, defect, last in itertools.product(["generating", "scoring"], ENTRY_DEFECTS, [False, True]):
        with case(work, defect, last):
            rows = copy.deepcopy(ROWS)
            if last:
                # Its prompts have this id as 0, so that the quick comparison fails for a row that is right.
                rows[1][0][MIDDLE + 3] = VOCAB - 1
            replies, lists = [], []
            for row, (ids, values) in enumerate(rows):
                entries: list[Any] = [
                    [value, token % (VOCAB - 1), None] for value, token in zip(values, ids, strict=True)
                ]
                if work == "scoring":
                    entries[0][0] = None
                if row == 1:
                    ENTRY_DEFECTS[defect](entries)
                meta = {"finish_reason": {"type": "length"}, "weight_version": "default"}
                name = "output_token_logprobs" if work == "generating" else "input_token_logprobs"
                replies.append(sent({"output_ids": ids, "meta_info": {**meta, name: entries}}))
                lists.append(sent(entries))
            if work == "generating":
                result: Any = answering(SGLangBackend, SGLANG, *replies).generate(generating())
                plain = sglang_plain("output_token_logprobs", 0)
            else:
                result = answering(SGLangBackend, SGLANG, *replies).score_logprobs(scores(rows))
                plain = sglang_plain("input_token_logprobs", 1)
            check(result, lists, plain, rows)
