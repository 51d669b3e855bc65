"""Scoring: the log-probability of every token that is asked for, without logits for the rest.

The body reads rows without padding, and a beginning that rows have in common once (`reading`); the head then sees only
the positions that are scored, and makes log-probabilities of them without their logits (`head`), where the model allows
it. What it does not allow falls back, one step at a time, to its plain forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from corelm.spec import Ragged, ScoreRequest, ScoreResult
from transformers_backend.head import Head, Way
from transformers_backend.model import CausalLM, Deadline, one_encoding
from transformers_backend.reading import Layout, Reader

#: Logits alive at a time, where logits are made: 128 MiB of float32.
_SLICE_ELEMENTS = 2**25


@dataclass(frozen=True)
class Taken:
    """How a call was computed. `head` and `layout`: see `Head` and `Reader`. `shared`: positions that were not read
    because another row has the same beginning.
    """

    head: Way
    layout: Layout
    shared: int


class Scorer:
    """Attributes:
    taken: how the latest call that ran the model was computed.
    """

    def __init__(self, model: CausalLM, max_batch_tokens: int) -> None:
        self.taken: Taken | None = None
        self._model = model
        self._head = Head(model)
        self._reader = Reader(model, self._head.split, max_batch_tokens)

    def forget(self) -> None:
        """Find out again, at the next call, what this model's head does: its weights are others now."""
        self._head.forget()

    def score(self, request: ScoreRequest) -> ScoreResult:
        """Score every position of every sequence from `score_from` on; with ``request.grad`` in the model's own mode.

        Raises:
            TimeoutError: the request's timeout has passed.
        """
        if request.grad:
            with torch.enable_grad():
                return self._score(request)
        with self._model.evaluating():
            return self._score(request)

    def _score(self, request: ScoreRequest) -> ScoreResult:
        sequences = request.sequences
        device = request.device or sequences.values.device
        scored = Ragged(sequences.positions >= request.score_from.cpu()[sequences.row_index], sequences.lengths)
        index, logprobs, logits = [torch.empty(0, dtype=torch.int64)], [], []
        for where, ours, theirs in self._parts(sequences, scored, request):
            index.append(where)
            logprobs.append(ours.to(device))
            logits += [piece.to(device) for piece in theirs]
        total, where = sequences.values.shape[0], torch.cat(index).to(device)
        return ScoreResult(
            logprobs=Ragged(_spread(logprobs, where, (total,)), sequences.lengths),
            scored=scored.to(device),
            logits=Ragged(_spread(logits, where, (total, self._model.vocab_size)), sequences.lengths)
            if request.return_logits
            else None,
            # At another temperature it is no longer the model's own distribution.
            mode="raw" if request.temperature == 1.0 else "processed",
            temperature=request.temperature,
        )

    def _parts(
        self, sequences: Ragged, scored: Ragged, request: ScoreRequest
    ) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Batch after batch: which values are scored, int64[n]; their log-probs, float32[n]; their logits if wanted."""
        wanted = sequences.row_index[scored.values].unique()
        if not len(wanted):
            return
        deadline, self.taken = Deadline(request.timeout), None
        for side in one_encoding(sequences.lengths[wanted] - 1, self._model.rope_switch):
            yield from self._of_rows(wanted[side], sequences, scored, request, deadline)

    def _of_rows(
        self, numbers: Tensor, sequences: Ragged, scored: Ragged, request: ScoreRequest, deadline: Deadline
    ) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """The parts of these rows, int64[k]."""
        shared = 0
        rows, wanted = sequences.select(numbers), scored.select(numbers)
        head = self._head.way(int(wanted.values.sum()), grad=request.grad)
        layout = "padded" if head == "whole" else self._reader.layout()
        head = "sliced" if head == "tiled" and request.return_logits else head
        # Nothing is predicted from a last token.
        read = rows.slice(torch.zeros_like(rows.lengths), rows.lengths - 1)
        for batch in self._reader.batches(read, layout):
            deadline.check()
            shared += batch.shared
            own, mask = rows.select(batch.rows), wanted.select(batch.rows).values
            row, position = own.row_index[mask], own.positions[mask]
            # A token is predicted from the position before it.
            slots = batch.index.values[batch.index.offsets[row] + position - 1]
            tokens = own.values[mask.to(own.values.device)].cpu()
            states = self._reader.logits(read, batch) if head == "whole" else self._reader.read(read, batch)
            where = sequences.offsets[numbers[batch.rows]][row] + position
            yield where, *self._predict(head, states, slots, tokens, request, once=batch.shared > 0)
        self.taken = Taken(head, layout, shared + (self.taken.shared if self.taken else 0))

    def _predict(
        self, head: Way, states: Tensor, slots: Tensor, tokens: Tensor, request: ScoreRequest, *, once: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Log-probs of `tokens` from ``states[slots]``, and the logits if wanted. `once`: some ask for the same."""
        device, inverse = self._model.device, None
        if once and not request.return_logits:
            pairs, inverse = (slots * self._model.vocab_size + tokens).unique(return_inverse=True)
            slots, tokens = pairs // self._model.vocab_size, pairs % self._model.vocab_size
        slots, tokens = slots.to(device), tokens.to(device)
        logits: list[Tensor] = []
        if head == "tiled":
            logprobs = self._head.linear().logprobs(states[slots], tokens, request.temperature).float()
        else:
            parts, size = [], max(1, _SLICE_ELEMENTS // self._model.vocab_size)
            for at, chosen in zip(slots.split(size), tokens.split(size), strict=True):
                sliced = (states[at] if head == "whole" else self._head.split.logits(states[at])).float()
                parts.append(_chosen(sliced, chosen, request.temperature))
                if request.return_logits:
                    logits.append(sliced)
            logprobs = torch.cat(parts)
        return logprobs if inverse is None else logprobs[inverse.to(device)], logits


def _chosen(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-softmax of ``float32[n, V] / temperature`` at int64[n]."""
    logits = logits if temperature == 1.0 else logits / temperature
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def _spread(parts: list[Tensor], index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """float32 zeros of `shape` with the rows of `parts` at `index`; gradients flow to the parts."""
    out = torch.zeros(shape, device=index.device)
    return out.index_put((index,), torch.cat(parts)) if parts else out
