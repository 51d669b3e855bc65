"""Behind a URL: the most probable ids in a server's replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from corelm.spec import GenerateRequest, TopIds
from corelm_engine_kit import RowError
from vllm_backend.replies import LABEL
from vllm_backend.top_ids import named_candidates, top_of_answer


def answer_top(
    choice: Mapping[str, Any], request: GenerateRequest, ids: Sequence[int], count: int, vocab_size: int
) -> TopIds | None:
    """Return the most probable ids at the first tokens of an answer; None if they were not asked for.

    Args:
        choice: the choice of the completion.
        request: the request.
        ids: the first tokens of the answer.
        count: how many candidates were asked for.
        vocab_size: ids are below it.

    Raises:
        RowError: the choice does not have them.
    """
    candidates = None
    if count:
        candidates = named_candidates(by_label(choice, len(ids)), count)
    return top_of_answer(request, ids, candidates, vocab_size)


def by_label(choice: Mapping[str, Any], count: int) -> list[Mapping[int, Any]]:
    """Return the log-probs by id at the first `count` sampled tokens of a choice.

    Raises:
        RowError: the choice does not have them.
    """
    positions = (choice.get("logprobs") or {}).get("top_logprobs")
    if not isinstance(positions, list) or len(positions) < count:
        raise RowError("it does not have the most probable ids of every token (top_logprobs)")
    return [{int(name.removeprefix(LABEL)): value for name, value in found.items()} for found in positions[:count]]


def by_id(positions: Sequence[Mapping[str, Any]]) -> list[Mapping[int, Any]]:
    """Return the log-probs by id at positions of a prompt, from a server's ``prompt_logprobs``.

    Raises:
        RowError: the most probable id of a position does not have the rank 1, since others were left out.
    """
    for found in positions:
        if max(found.values(), key=lambda each: each["logprob"]).get("rank") != 1:
            raise RowError("its prompt_logprobs lack the most probable ids; leave out return_argmax=True and top_k")
    return [{int(name): each["logprob"] for name, each in found.items()} for found in positions]
