"""Scoring: the log-probability of every token that is asked for, without logits for the rest.

The body reads right-padded rows of similar length; the head then sees only the positions that are scored, a slice at a
time, and each slice is reduced to log-probabilities in float32 before the next one is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corelm.messages import ScoreBatch, ScoreRequest
from corelm.rows import Ragged
from transformers_backend.model import CausalLM, Deadline, micro_batches

#: Logits alive at a time: 128 MiB of float32.
_SLICE_ELEMENTS = 2**25


def score(model: CausalLM, request: ScoreRequest, max_batch_tokens: int) -> ScoreBatch:
    """Score every position of every sequence from `score_from` on; with ``request.grad`` in the model's own mode.

    Raises:
        TimeoutError: the request's timeout has passed.
    """
    if request.grad:
        with torch.enable_grad():
            return _score(model, request, max_batch_tokens)
    with model.evaluating():
        return _score(model, request, max_batch_tokens)


def _score(model: CausalLM, request: ScoreRequest, max_batch_tokens: int) -> ScoreBatch:
    sequences = request.sequences
    device = request.device or sequences.values.device
    deadline = Deadline(request.timeout)
    scored = Ragged(sequences.positions >= request.score_from.cpu()[sequences.row_index], sequences.lengths)
    rows_scored = sequences.row_index[scored.values].unique()
    where, logprobs, logits = [], [], []
    for part in micro_batches(sequences.lengths[rows_scored], max_batch_tokens):
        deadline.check()
        rows = rows_scored[part]
        batch = sequences.select(rows)
        wanted = scored.select(rows).values
        # A token is predicted from the position before it.
        row, column = batch.row_index[wanted], batch.positions[wanted] - 1
        tokens = batch.values[wanted.to(batch.values.device)].to(model.device)
        predict = model.predictions(batch)
        for piece in torch.arange(len(tokens)).split(max(1, _SLICE_ELEMENTS // model.vocab_size)):
            sliced = predict(row[piece].to(model.device), column[piece].to(model.device))
            logprobs.append(_chosen(sliced, tokens[piece.to(tokens.device)], request.temperature).to(device))
            if request.return_logits:
                logits.append(sliced.to(device))
        where.append(sequences.offsets[rows][row] + column + 1)
    total = sequences.values.shape[0]
    index = torch.cat([torch.empty(0, dtype=torch.int64), *where]).to(device)
    return ScoreBatch(
        logprobs=Ragged(_spread(logprobs, index, (total,)), sequences.lengths),
        scored=scored.to(device),
        logits=Ragged(_spread(logits, index, (total, model.vocab_size)), sequences.lengths)
        if request.return_logits
        else None,
        # At another temperature it is no longer the model's own distribution.
        mode="raw" if request.temperature == 1.0 else "processed",
        temperature=request.temperature,
    )


def _chosen(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-softmax of ``float32[n, V] / temperature`` at int64[n]."""
    logits = logits if temperature == 1.0 else logits / temperature
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def _spread(parts: list[Tensor], index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """float32 zeros of `shape` with the rows of `parts` at `index`; gradients flow to the parts."""
    out = torch.zeros(shape, device=index.device)
    return out.index_put((index,), torch.cat(parts)) if parts else out
