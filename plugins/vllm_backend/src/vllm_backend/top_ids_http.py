"""Behind a URL: the most probable ids in a server's replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from corelm.spec import GenerateRequest, TopIds
from corelm_engine_kit import RowError
from vllm_backend.replies import LABEL
from vllm_backend.top_ids import named_candidates, top_ids, top_of_answer


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
        positions = (choice.get("logprobs") or {}).get("top_logprobs")
        if not isinstance(positions, list) or len(positions) < len(ids):
            raise RowError("it does not have the most probable ids of every token (top_logprobs)")
        by_id = [{int(name.removeprefix(LABEL)): value for name, value in found.items()} for found in positions]
        candidates = named_candidates(by_id[: len(ids)], count)
    return top_of_answer(request, ids, candidates, vocab_size)


def prompt_top(positions: Sequence[Mapping[str, Any]], k: int, vocab_size: int) -> TopIds:
    """Return the `k` most probable ids at positions of a prompt, from a server's ``prompt_logprobs``.

    Raises:
        RowError: a position has fewer.
    """
    by_id = [{int(name): value["logprob"] for name, value in found.items()} for found in positions]
    return top_ids(*named_candidates(by_id, k), k, vocab_size)


def most_probable(candidates: Mapping[str, Mapping[str, Any]]) -> tuple[int, Any]:
    """Return the most probable id of a position of the prompt, and its log-prob.

    Raises:
        RowError: the candidates do not name it.
    """
    first = [(int(token), found.get("logprob")) for token, found in candidates.items() if found.get("rank") == 1]
    if len(first) != 1:
        raise RowError("its prompt_logprobs do not say which id is the most probable one; leave out return_argmax=True")
    return first[0]
