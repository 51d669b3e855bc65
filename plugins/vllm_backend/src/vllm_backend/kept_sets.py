"""Inside vLLM's workers: truncate distributions, and remember which ids were left and how probable they were together.

vLLM loads `KeptSets` and `KeptSetsWorker` by their names, if the backend is opened with ``return_support=True``. vLLM's
own truncation is then switched off for the requests that want their sets, so the set that is remembered is the set that
is drawn from, no matter what vLLM's samplers round. Both belong to vLLM's V1 model runner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

import numpy
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from vllm_backend.kept_sets_protocol import ARGUMENT


@dataclass
class _Answer:
    """What `kept_sets_protocol.parameters` says of a request, and vLLM's own list of the tokens of its answer."""

    key: str
    top_k: int
    top_p: float
    min_p: float
    tokens: list[int] = field(default_factory=list)


#: For each request, for each token of its answer: the ids that were left, ascending, and the log of their probability.
_found: dict[str, dict[int, tuple[numpy.ndarray[Any, Any], float]]] = {}


class KeptSets(LogitsProcessor):
    """Truncates the rows of a step that want their sets. The logits have penalties and temperature by then."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._answers: dict[int, _Answer] = {}

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def answer(params: Any, prompt: Any, tokens: list[int]) -> _Answer | None:
            given = (params.extra_args or {}).get(ARGUMENT)
            return None if given is None else _Answer(**given, tokens=tokens)

        process_dict_updates(self._answers, batch_update, answer)

    def apply(self, logits: Tensor) -> Tensor:
        if not self._answers:
            return logits
        answers = [self._answers[row] for row in sorted(self._answers)]
        rows = torch.tensor(sorted(self._answers), device=logits.device)
        kept, log_mass = truncate(logits[rows], answers)
        logits[rows] = logits[rows].masked_fill(~kept, -torch.inf)
        positions, ids = kept.cpu().numpy().nonzero()
        sets = numpy.split(ids.astype(numpy.int32), numpy.flatnonzero(numpy.diff(positions)) + 1)
        for answer, left, mass in zip(answers, sets, log_mass.tolist(), strict=True):
            # A step that reads only a part of the prompt samples, too. The last entry for a token is the real one.
            _found.setdefault(answer.key, {})[len(answer.tokens)] = left, mass
        return logits


class KeptSetsWorker:
    """Methods that vLLM adds to its worker."""

    def core_take_kept_sets(self, keys: list[str]) -> list[tuple[bytes, list[int], list[float]]]:
        """Return and forget what was remembered of the requests with these keys, token after token.

        Returns:
            For each request the ids of all sets, int32, one after another; how many belong to each token; and the logs
            of their probabilities. Nothing for requests that this worker does not know.
        """
        taken = []
        for key in keys:
            found = _found.pop(key, {})
            # A set that is missing must not shift the later ones: the answer has too few sets then, and fails.
            sets = [found[number] for number in takewhile(found.__contains__, count())]
            ids = numpy.concatenate([numpy.zeros(0, numpy.int32), *(left for left, _ in sets)])
            taken.append((ids.tobytes(), [len(left) for left, _ in sets], [mass for _, mass in sets]))
        return taken


def truncate(logits: Tensor, answers: list[_Answer]) -> tuple[Tensor, Tensor]:
    """Return which ids top-k, top-p and min-p leave, in this order, and the log of their probability before.

    Args:
        logits: float32[rows, vocabulary], after penalties and temperature.
        answers: what to apply to each row.

    Returns:
        bool[rows, vocabulary] and float32[rows].
    """

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(answer, name) for answer in answers], device=logits.device).unsqueeze(1)

    logprobs, order = logits.float().sort(dim=-1, descending=True, stable=True)
    # On a CPU, log_softmax in float32 is off by up to 4e-5 over a large vocabulary.
    logprobs -= logprobs.logsumexp(-1, keepdim=True)
    top_k, top_p, min_p = column("top_k"), column("top_p").double(), column("min_p").double()
    ranks = torch.arange(logits.shape[1], device=logits.device)
    kept = (logprobs > -torch.inf) & ((ranks < top_k) | (top_k == 0))
    chances = logprobs.double().exp().masked_fill(~kept, 0.0)
    before = chances.cumsum(-1) - chances
    # Rounding must not take the least probable ids away where top-p is not in force.
    kept &= (before < top_p * chances.sum(-1, keepdim=True)) | (ranks == 0) | (top_p >= 1)
    kept &= chances >= min_p * chances[:, :1]
    log_mass = logprobs.double().masked_fill(~kept, -torch.inf).logsumexp(-1)
    return torch.zeros_like(kept).scatter(1, order, kept), log_mass.clamp(max=0.0).float()
