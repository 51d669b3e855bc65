"""`Sampler`: samples one token a row from logits, each row with its own stream of random numbers.

The order is penalties → temperature → top-k → top-p → min-p. Everything is float32 and vectorized over rows. Sums over
the vocabulary are made in float64, so that the far tail of a large vocabulary keeps its share.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from corelm.spec import Ragged, SamplingParams, TopIds
from corelm_engine_kit.columns import argmax, draw, numbers_for
from corelm_engine_kit.masses import KeptIds, kept_ids, log_softmax_at, log_total, most_probable
from corelm_engine_kit.softmax import Workspace

#: How many keys are drawn for an answer at a time. Fixed, because a stream must not depend on how long the answer gets.
_BLOCK = 64
#: Why a row has no answer.
NOT_NUMBERS = (
    "the logits are NaN or infinite, so that they say nothing about tokens; look for NaN in the weights, and if "
    "they overflow in half precision, load the model with dtype='float32'"
)
#: How many candidates top-p looks at before it sorts the whole vocabulary.
_SHORT_LIST = 1024


@dataclass(frozen=True, eq=False)
class Drawn:
    """One token a row.

    Attributes:
        ids: int64[rows].
        logprobs: float32[rows]; NaN where the scores are not numbers to choose by.
        read: the same as Python numbers, if they were asked for.
        kept: the ids that truncation left, if they were asked for.
        top: the most probable ids, if they were asked for.
    """

    ids: Tensor
    logprobs: Tensor
    read: tuple[list[int], list[float]] | None = None
    kept: KeptIds | None = None
    top: TopIds | None = None


class Sampler:
    """Samples for a set of rows, step after step. `keep` drops rows that have ended.

    Args:
        sampling: how to sample.
        prompts: ids that the repetition penalty counts in addition to the answer.
        seeds: int64[rows], one for each row's stream.
        banned: ids that are not sampled in the first ``sampling.min_new_tokens`` steps.
        vocab_size: width of the logits.
        device: of the logits.
        raw: whether to return the model's own log-probs; otherwise those of the distribution sampled from.
        support: whether to return the ids that truncation left.
        top: how many of the most probable ids to return, of the distribution of the log-probs.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompts: Ragged,
        seeds: Tensor,
        banned: frozenset[int],
        vocab_size: int,
        device: torch.device,
        raw: bool,
        *,
        support: bool = False,
        top: int = 0,
    ) -> None:
        self.sampling = sampling
        self.raw = raw
        self._support = support
        self._top = top
        self.step = 0
        untouched = sampling.temperature == 1.0 and not (
            sampling.truncates or sampling.penalties or sampling.min_new_tokens
        )
        self._reshapes = not untouched
        # If nothing else looks at the scores, they are divided by the temperature where their softmax is made.
        self._divides = sampling.temperature != 1.0 and bool(sampling.truncates or support or top)
        self._workspace = Workspace()
        self._banned = torch.tensor(sorted(banned), dtype=torch.int64, device=device)
        self._streams = None if sampling.greedy else ExponentialStreams(seeds, numbers_for(vocab_size), device)
        self._counts = self._seen = None
        shape = (len(prompts), vocab_size)
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = torch.zeros(shape, dtype=torch.float32, device=device)
        if sampling.repetition_penalty != 1.0:
            self._seen = torch.zeros(shape, dtype=torch.bool, device=device)
            self._seen[prompts.row_index.to(device), prompts.values.to(device)] = True

    def __call__(self, logits: Tensor, *, read: bool = False) -> Drawn:
        """Return one token for every row of float32[rows, V].

        Args:
            logits: the model's.
            read: also return Python numbers, which waits for the device. With top-p this is done in any case, and once
                only: whether the short list of candidates was enough is read together with what was sampled from it.
        """
        scores = self._penalised(logits)
        of_logits = log_total(logits, self._workspace) if self.raw and self._reshapes else None
        candidates: Tensor | None
        enough: Tensor | None
        if self._streams is None:
            ids = argmax(scores)
            best = scores.gather(-1, ids[:, None])[:, 0]
            # 0, or NaN if the best is not a finite number.
            logprobs, enough = best - best, None
            left, candidates = logprobs[:, None], ids[:, None]
        else:
            if self._divides:
                scores = scores / self.sampling.temperature
            exponentials = self._streams()
            left, candidates, enough = _cut(scores, self.sampling, short=True)
            ids, logprobs = self._chosen(scores, left, candidates, exponentials)
        drawn = self._drawn(logits, of_logits, ids, logprobs, enough, read)
        if drawn is None:
            left, candidates, _ = _cut(scores, self.sampling, short=False)
            ids, logprobs = self._chosen(scores, left, candidates, exponentials)
            drawn = self._drawn(logits, of_logits, ids, logprobs, None, read)
            assert drawn is not None
        self._count(drawn.ids)
        if self._support or self._top:
            drawn = self._with_sets(drawn, logits, of_logits, scores, left, candidates)
        return drawn

    def _chosen(
        self, scores: Tensor, left: Tensor, candidates: Tensor | None, exponentials: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the ids drawn of what is `left` of the scores, and their log-probs; see `truncated` and `draw`."""
        temperature = 1.0 if self._divides else self.sampling.temperature
        if candidates is not None:
            # In the order of ids, a token has the same random numbers whatever its rank.
            left = torch.full_like(scores, -math.inf).scatter_(-1, candidates, left)
        return draw(left, exponentials, temperature, self._workspace)

    def _drawn(
        self,
        logits: Tensor,
        of_logits: Tensor | None,
        ids: Tensor,
        logprobs: Tensor,
        enough: Tensor | None,
        read: bool,
    ) -> Drawn | None:
        """Return what was sampled; None if the candidates were not enough."""
        if of_logits is not None:
            logprobs = log_softmax_at(logits, ids, of_logits)
        if enough is None and not read:
            return Drawn(ids, logprobs)
        # float64 holds every id. One tensor is one wait.
        sure = ids.new_ones(()) if enough is None else enough
        *numbers, sure_of_all = torch.cat([ids.double(), logprobs.double(), sure.double()[None]]).tolist()
        if not sure_of_all:
            return None
        return Drawn(ids, logprobs, ([int(each) for each in numbers[: len(ids)]], numbers[len(ids) :]))

    def _with_sets(
        self,
        drawn: Drawn,
        logits: Tensor,
        of_logits: Tensor | None,
        scores: Tensor,
        left: Tensor,
        candidates: Tensor | None,
    ) -> Drawn:
        """Return what was drawn with the ids that belong to it.

        Args:
            logits: the model's.
            of_logits: their `log_total` if it is known.
            scores: the logits after penalties and temperature, before truncation.
            left, candidates: those after truncation, as `truncated` returns them.
        """
        kept = top = None
        if of_logits is None and (scores is logits or (self.raw and self._top)):
            of_logits = log_total(logits)
        if self._support:
            total = of_logits if scores is logits else None
            total = log_total(scores) if total is None else total
            kept = kept_ids(left, candidates, total, scores.shape[-1])
        if self._top and self.raw:
            assert of_logits is not None
            top = most_probable(logits, None, self._top, of_logits)
        elif self._top:
            top = most_probable(left, candidates, self._top, log_total(left))
        return replace(drawn, kept=kept, top=top)

    def of(self, rows: Tensor) -> Sampler:
        """Return the same for these rows only, int64[n] on the CPU. This one may go on with others."""
        other = copy(self)
        other._streams = copy(self._streams)
        other.keep(rows)
        return other

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, int64[n] on the CPU."""
        if self._streams is not None:
            self._streams.keep(rows)
        there = rows.to(self._banned.device)
        if self._counts is not None:
            self._counts = self._counts[there]
        if self._seen is not None:
            self._seen = self._seen[there]

    def _penalised(self, logits: Tensor) -> Tensor:
        sampling = self.sampling
        if self._seen is not None:
            penalty = sampling.repetition_penalty
            shrunk = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(self._seen, shrunk, logits)
        if self._counts is not None:
            logits = logits - sampling.frequency_penalty * self._counts - sampling.presence_penalty * (self._counts > 0)
        if self.step < sampling.min_new_tokens:
            logits = logits.index_fill(-1, self._banned, -math.inf)
        return logits

    def _count(self, ids: Tensor) -> None:
        self.step += 1
        if self._counts is not None:
            self._counts.scatter_add_(-1, ids[:, None], torch.ones_like(self._counts[:, :1]))
        if self._seen is not None:
            self._seen.scatter_(-1, ids[:, None], True)


class ExponentialStreams:
    """Returns float32[rows, count] at every call, exponentially distributed. Row i depends on ``seeds[i]`` only.

    A generator on the CPU gives each row a key for each token, and the device makes the numbers from it. They are the
    same on every device, except that its logarithm may round otherwise.
    """

    def __init__(self, seeds: Tensor, count: int, device: torch.device) -> None:
        self._streams = [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]
        self._counters = torch.arange(1, count + 1, device=device) * _GOLDEN
        self._block = torch.empty(len(seeds), 0, dtype=torch.int64, device=device)
        self._used = _BLOCK

    def __call__(self) -> Tensor:
        if self._used == _BLOCK:
            ends = torch.iinfo(torch.int64)
            block = [torch.randint(ends.min, ends.max, (_BLOCK,), generator=stream) for stream in self._streams]
            self._block, self._used = torch.stack(block).to(self._counters.device), 0
        self._used += 1
        return _exponentials(self._block[:, self._used - 1, None] + self._counters)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, int64[n] on the CPU."""
        self._streams = [self._streams[row] for row in rows.tolist()]
        self._block = self._block[rows.to(self._block.device)]


#: 2**64 over the golden ratio, and the two factors of SplitMix64, as int64.
_GOLDEN, _FACTORS = 0x9E3779B97F4A7C15 - 2**64, (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def _exponentials(states: Tensor) -> Tensor:
    """Return float32 numbers of mean 1 for states of SplitMix64, int64 (Steele, Lea and Flood 2014).

    In float64 their steps near 0 are less than the mass of any token. None is 0, which would beat every mass.
    """
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        states = (states ^ (states >> shift & 2 ** (64 - shift) - 1)) * factor
    uniforms = (states ^ (states >> 31 & 2**33 - 1)) >> 11 & 2**53 - 1
    return (uniforms.double() * -(2.0**-53)).log1p_().neg_().float().clamp_min_(torch.finfo(torch.float32).tiny)


def truncated(scores: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Apply top-k, then top-p, then min-p, each to what the one before has left. The most likely token always stays.

    Top-p keeps the smallest set whose mass reaches p.

    Args:
        scores: float32[rows, V], logits after penalties and temperature.
        sampling: the cuts.

    Returns:
        float32[rows, K] with -inf where a column is cut, and the token of each of the K columns, int64[rows, K]; None
        if the columns are the vocabulary itself.
    """
    cut, candidates, enough = _cut(scores, sampling, short=True)
    if enough is not None and not bool(enough):
        cut, candidates, _ = _cut(scores, sampling, short=False)
    return cut, candidates


def _cut(scores: Tensor, sampling: SamplingParams, short: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return what `truncated` returns, and whether that is right for all rows, bool[]; None if it certainly is.

    Args:
        short: whether top-p may look at a short list of the best columns. That costs a twentieth of a full sort.
    """
    candidates = enough = None
    if sampling.top_k is not None:
        scores, candidates = scores.topk(min(sampling.top_k, scores.shape[-1]))
    if sampling.top_p < 1.0:
        total = scores.logsumexp(-1, keepdim=True)
        if candidates is None and short and scores.shape[-1] > _SHORT_LIST:
            scores, candidates = scores.topk(_SHORT_LIST)
            enough = ((scores - total).exp().sum(-1) > sampling.top_p + 1e-5).all()
        elif candidates is None:
            scores, candidates = scores.topk(scores.shape[-1]) if short else scores.sort(descending=True, stable=True)
        mass = (scores - total).exp()
        before = mass.cumsum(-1, dtype=torch.float64) - mass
        # The first column is kept even if rounding has made its "before" more than zero.
        before[:, 0] = 0.0
        scores = scores.masked_fill(before >= sampling.top_p, -math.inf)
    if sampling.min_p > 0.0:
        floor = scores.amax(-1, keepdim=True) + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < floor, -math.inf)
    return scores, candidates, enough
