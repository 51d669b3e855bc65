"""`TokenQuery`: what a request asks of some positions, `TokenScores`: the answer, and how full logits give it.

`scoring_result` builds the result of a call from the scores of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from corelm.spec import Provenance, Ragged, ScoreRequest, ScoreResult, TopIds
from corelm_engine_kit.sampling import NOT_NUMBERS
from corelm_engine_kit.transfer import to_device

#: Number of logits that are summed at a time on a CPU.
_CPU_ELEMENTS = 2**20


@dataclass(frozen=True, eq=False)
class TokenQuery:
    """What is asked of some positions.

    Attributes:
        targets: int64[n], the ids whose log-probs are wanted.
        temperature: what the logits are divided by.
        logits: whether the logits are wanted.
        argmax: whether the most probable ids of the whole vocabulary are wanted.
        sets: one row of ids for each target: those over which its log-prob is normalised, all of them if the row is
            empty; None if all rows are.
        top_k: how many of the most probable ids are wanted.
        top_ids: int64[n, k], the ids that are wanted instead of the most probable ones, or None; -1 stands for no id.
    """

    targets: Tensor
    temperature: float = 1.0
    logits: bool = False
    argmax: bool = False
    sets: Ragged | None = None
    top_k: int = 0
    top_ids: Tensor | None = None

    @classmethod
    def of(cls, request: ScoreRequest, targets: Tensor, index: Tensor) -> TokenQuery:
        """Return what `request` asks of these targets.

        Args:
            targets: int64[n], on the CPU.
            index: int64[n], where they stand in ``request.sequences.values``.
        """
        top_ids = request.top_ids
        return cls(
            targets,
            request.temperature,
            request.return_logits,
            request.return_argmax,
            None if request.support is None else request.support.ids.select(index),
            request.top_k,
            None if top_ids is None else top_ids.values[index.to(top_ids.values.device)],
        )

    @property
    def wants_top(self) -> bool:
        """Whether the log-probs of several ids are wanted at every position."""
        return self.top_k > 0 or self.top_ids is not None

    @property
    def depends_on_row(self) -> bool:
        """Whether rows that read the same ids may ask for different numbers of the same target."""
        return self.sets is not None or self.top_ids is not None or self.logits

    def to(self, device: torch.device) -> TokenQuery:
        return replace(
            self,
            targets=to_device(self.targets, device),
            sets=None if self.sets is None else self.sets.to(device),
            top_ids=None if self.top_ids is None else to_device(self.top_ids, device),
        )

    def select(self, indices: Tensor) -> TokenQuery:
        """Return what is asked of the targets at these indices, int64[m]."""
        targets = self.targets[indices.to(self.targets.device)]
        sets = None if self.sets is None else self.sets.select(indices.cpu())
        top_ids = None if self.top_ids is None else self.top_ids[indices.to(self.top_ids.device)]
        return replace(self, targets=targets, sets=sets, top_ids=top_ids)

    def split(self, size: int) -> Iterator[TokenQuery]:
        """Yield what is asked of `size` targets after another."""
        if len(self.targets) <= size:
            yield self
            return
        for indices in torch.arange(len(self.targets)).split(size):
            yield self.select(indices)


@dataclass(frozen=True, eq=False)
class TokenScores:
    """The answer to a `TokenQuery`.

    Attributes:
        logprobs: float32[n].
        logits: float32[m, vocab] in pieces, if they are wanted.
        argmax: int64[n], if wanted.
        top: the ids that are wanted, in their order or the most probable first, if any are.
    """

    logprobs: Tensor
    logits: Sequence[Tensor] = ()
    argmax: Tensor | None = None
    top: TopIds | None = None

    def to(self, device: torch.device) -> TokenScores:
        argmax = None if self.argmax is None else self.argmax.to(device)
        top = None if self.top is None else TopIds(*(column.to(device) for column in self.top.columns))
        return TokenScores(self.logprobs.to(device), [piece.to(device) for piece in self.logits], argmax, top)

    def select(self, indices: Tensor) -> TokenScores:
        """Return the scores of the targets at these indices, int64[m], without logits."""
        indices = indices.to(self.logprobs.device)
        argmax = None if self.argmax is None else self.argmax[indices]
        top = None if self.top is None else TopIds(*(column[indices] for column in self.top.columns))
        return TokenScores(self.logprobs[indices], (), argmax, top)

    @staticmethod
    def cat(parts: Sequence[TokenScores]) -> TokenScores:
        """Return the scores of all `parts`, which answer the same query, one after another."""
        if len(parts) == 1:
            return parts[0]
        best = [part.argmax for part in parts if part.argmax is not None]
        tops = [part.top for part in parts if part.top is not None]
        return TokenScores(
            torch.cat([part.logprobs for part in parts]),
            [piece for part in parts for piece in part.logits],
            torch.cat(best) if best else None,
            TopIds.cat(tops, 0) if tops else None,
        )


# From full logits -----------------------------------------------------------------------------------------------------


def scores_of_logits(logits: Tensor, query: TokenQuery) -> TokenScores:
    """Answer `query`, on the device of the logits, from ``float32[n, vocab]``."""
    tempered = logits if query.temperature == 1.0 else logits / query.temperature

    def whole(indices: Tensor | None, some: TokenQuery) -> Tensor:
        rows = tempered if indices is None else tempered[indices]
        # What `logsumexp` makes of a few rows stays in the caches of a CPU.
        few = max(1, _CPU_ELEMENTS // rows.shape[-1]) if rows.device.type == "cpu" else max(1, len(rows))
        normalizer = torch.cat([part.logsumexp(-1) for part in rows.split(few)])
        return rows.gather(-1, some.targets[:, None])[:, 0] - normalizer

    def within(indices: Tensor, some: TokenQuery) -> Tensor:
        assert some.sets is not None
        rows = indices[some.sets.row_index.to(indices.device)]
        return logprobs_in_sets(tempered[rows, some.sets.values], some.sets, some.targets)

    return TokenScores(
        logprobs_by_sets(query, whole, within),
        [logits] if query.logits else (),
        logits.argmax(-1) if query.argmax else None,
        _top_of(tempered, query) if query.wants_top else None,
    )


def logprobs_by_sets(
    query: TokenQuery,
    whole: Callable[[Tensor | None, TokenQuery], Tensor],
    within: Callable[[Tensor, TokenQuery], Tensor],
) -> Tensor:
    """Return float32[n]: the log-probs of the targets, of those with a set by `within`, of the others by `whole`.

    Args:
        query: what is asked.
        whole, within: given the indices of some targets, int64[m], and what is asked of these, return their log-probs.
            The indices are None if these are all.
    """
    if query.sets is None:
        return whole(None, query)
    given = query.sets.lengths > 0
    if not bool(given.any()):
        return whole(None, query)
    device, parts, order = query.targets.device, [], []
    for indices, log_probs in ((given.nonzero()[:, 0], within), ((~given).nonzero()[:, 0], whole)):
        if len(indices):
            parts.append(log_probs(indices.to(device), query.select(indices)))
            order.append(indices)
    return parts[0] if len(parts) == 1 else torch.cat(parts)[torch.cat(order).argsort().to(parts[0].device)]


def logprobs_in_sets(logits: Tensor, sets: Ragged, targets: Tensor) -> Tensor:
    """Return ``[n]``, like `logits`: the log-softmax, at each target, of the logits of the ids in its set.

    It is minus infinity for a target that is not in its set. Gradients flow to the logits.

    Args:
        logits: float32[total] over temperature, one for each value of `sets`.
        sets: n rows of ids, none of them empty.
        targets: int64[n].
    """
    rows, n = sets.row_index.to(logits.device), len(targets)
    largest = logits.new_full((n,), torch.finfo(logits.dtype).min)
    largest.scatter_reduce_(0, rows, logits.detach(), "amax")
    # One term is added after another here, so that float32 would lose digits of large sets.
    terms = (logits - largest[rows]).double().exp()
    normalizer = largest + terms.new_zeros(n).index_add(0, rows, terms).log().to(logits.dtype)
    found = (sets.values == targets[rows]).nonzero()[:, 0]
    return logits.new_full((n,), -torch.inf).index_put((rows[found],), logits[found]) - normalizer


def _top_of(tempered: Tensor, query: TokenQuery) -> TopIds:
    """Return the log-probs of the ids that are wanted, and of all others together.

    The others are summed by themselves. One minus the sum of the wanted ones would lose the digits of a small rest.
    """
    ids = tempered.detach().topk(query.top_k, -1).indices if query.top_ids is None else query.top_ids
    given = ids >= 0
    indices = ids.clamp_min(0)
    values = tempered.gather(-1, indices).masked_fill(~given, -torch.inf)
    # What stands for no id must not take anything out: it writes to a column that is cut off again.
    width = tempered.shape[-1]
    padded = torch.nn.functional.pad(tempered, (0, 1), value=-torch.inf)
    others = padded.scatter(-1, torch.where(given, indices, width), -torch.inf)
    normalizer = tempered.logsumexp(-1)
    if query.top_ids is None:
        # An id that the model rules out is not among the most probable ones.
        ids = ids.masked_fill(values == -torch.inf, -1)
    rest = others.logsumexp(-1)
    nothing = rest.detach() == -torch.inf
    if rest.requires_grad and bool(nothing.any()):
        # The derivative of the log of nothing is NaN, which would reach every weight.
        rest = others.masked_fill(nothing[:, None], 0.0).logsumexp(-1).masked_fill(nothing, -torch.inf)
    return TopIds(ids, values - normalizer[:, None], rest - normalizer)


# The result of a call ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """The scores of some tokens.

    Attributes:
        index: int64[n], where the tokens stand in ``request.sequences.values``.
        scores: what was asked of them.
    """

    index: Tensor
    scores: TokenScores

    def to(self, device: torch.device) -> ScoredTokens:
        return ScoredTokens(self.index.to(device), self.scores.to(device))


def scored_positions(request: ScoreRequest) -> Ragged:
    """Return bool, as long as the sequences: the positions from `score_from` on."""
    sequences = request.sequences
    return Ragged(sequences.positions >= request.score_from.cpu()[sequences.row_index], sequences.lengths)


def scoring_result(
    request: ScoreRequest,
    scored: Ragged,
    parts: Sequence[ScoredTokens],
    vocab_size: int,
    failed: Mapping[int, str] | None = None,
) -> ScoreResult:
    """Return the scores of all parts where their tokens stand, and 0.0 elsewhere; gradients flow to them.

    Args:
        scored: `scored_positions` of the request.
        failed: why a row could not be scored. Other rows that lack a score were aborted: their errors say so.
    """
    sequences = request.sequences
    device = request.device or sequences.values.device
    total = sequences.values.shape[0]
    index = torch.cat([torch.empty(0, dtype=torch.int64, device=device), *(part.index for part in parts)])
    logits = None
    if request.return_logits:
        pieces = [piece for part in parts for piece in part.scores.logits]
        logits = Ragged(_scattered(pieces, index, (total, vocab_size)), sequences.lengths)
    errors = [(failed or {}).get(row, "") for row in range(len(sequences))]
    # No token has two parts.
    if len(index) != int(scored.values.sum()):
        missing = scored.values.clone()
        missing[index.cpu()] = False
        for row in {*sequences.row_index[missing].tolist()}:
            errors[row] = errors[row] or "aborted before it was scored"
        scored = scored.with_values(scored.values & ~missing)
    argmax = None
    if request.return_argmax:
        found = torch.full((total,), -1, dtype=torch.int64, device=device)
        for part in parts:
            assert part.scores.argmax is not None
            found[part.index] = part.scores.argmax
        argmax = Ragged(found, sequences.lengths)
    result = ScoreResult(
        logprobs=Ragged(_scattered([part.scores.logprobs for part in parts], index, (total,)), sequences.lengths),
        scored=scored.to(device),
        logits=logits,
        errors=tuple(errors) if any(errors) else None,
        argmax=argmax,
        **_top_of_all(request, parts, index),
        **Provenance.label_of_scores(request.temperature, truncated=request.support is not None),
    )
    finite = result.logprobs.values.detach().isfinite()
    # Not with a graph: its gradients would be NaN for all rows.
    if request.grad or (result.errors is None and bool(finite.all())):
        return result
    return _without_scores(result, request, finite.cpu())


def _without_scores(result: ScoreResult, request: ScoreRequest, finite: Tensor) -> ScoreResult:
    """Return the result without scores of rows that have an error or a log-prob that is not finite."""
    sequences, errors = request.sequences, list(result.errors or ("",) * len(request.sequences))
    for at in (~finite).nonzero().flatten().tolist():
        row, position = int(sequences.row_index[at]), int(sequences.positions[at])
        if not errors[row]:
            excluded = f"position {position}: the model gives the id {int(sequences.values[at])} the probability 0"
            errors[row] = NOT_NUMBERS if bool(result.logprobs.values[at].isnan()) else excluded
    failed = torch.tensor([bool(error) for error in errors])[sequences.row_index].to(result.logprobs.values.device)
    fillers = {"logprobs": 0.0, "scored": False, "logits": 0.0, "argmax": -1}
    fillers |= {"top_ids": -1, "top_logprobs": 0.0, "tail_log_mass": 0.0}
    columns = {name: rows for name in fillers if (rows := getattr(result, name)) is not None}
    cleared = {
        name: rows.with_values(
            rows.values.masked_fill(failed.reshape(-1, *[1] * (rows.values.ndim - 1)), fillers[name])
        )
        for name, rows in columns.items()
    }
    return replace(result, **cleared, errors=tuple(errors))


def _top_of_all(request: ScoreRequest, parts: Sequence[ScoredTokens], index: Tensor) -> dict[str, Any]:
    """Return what is said of several ids at each position, where their tokens stand."""
    k = request.top_k if request.top_ids is None else request.top_ids.values.shape[1]
    if not request.top_k and request.top_ids is None:
        return {}
    sequences, tops = request.sequences, [part.scores.top for part in parts if part.scores.top is not None]
    total = sequences.values.shape[0]
    ids = torch.full((total, k), -1, dtype=torch.int64, device=index.device)
    if tops:
        ids[index] = torch.cat([top.ids for top in tops])
    values = {
        "top_ids": ids,
        "top_logprobs": _scattered([top.logprobs for top in tops], index, (total, k)),
        "tail_log_mass": _scattered([top.tail for top in tops], index, (total,)),
    }
    return {name: Ragged(each, sequences.lengths) for name, each in values.items()}


def _scattered(parts: Sequence[Tensor], index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return float32 zeros of `shape`, with the rows of `parts` at `index`."""
    out = torch.zeros(shape, device=index.device)
    return out.index_put((index,), torch.cat(list(parts))) if parts else out
