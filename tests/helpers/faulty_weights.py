"""Engines whose weights are not what they seem: the transformers plugin on a tiny model, with one fault each."""

import copy
from typing import Any

import torch

from corelm import Backend, Ragged, hookimpl
from corelm.spec import ScoreRequest, ScoreResult, WeightUpdate
from helpers.tiny_models import tiny_model, tiny_tokenizer
from transformers_backend import TransformersBackend

#: Tokens in a block of `PrefixCaching`.
BLOCK = 16


def open_faulty(plugin: type[TransformersBackend], dtype: torch.dtype = torch.float32, seed: int = 0) -> Backend:
    """Return a backend for a faulty plugin on a tiny model."""
    opened = plugin.open(tiny_model(seed=seed).to(dtype), tokenizer=tiny_tokenizer())
    return Backend.from_plugin(opened, "transformers")


class PrefixCaching(TransformersBackend):
    """Keeps the keys and values of the first blocks of what it scores, unless all tokens are to be scored.

    Attributes:
        keeps_stale: whether new weights leave the cache as it is: the fault.
        cache: keys and values by the ids of their prefix.
        hits: how many rows were scored with the cache.
    """

    keeps_stale = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cache: dict[tuple[int, ...], Any] = {}
        self.hits = 0

    @hookimpl
    @torch.no_grad()
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        if request.return_logits or bool((request.score_from < BLOCK).any()):
            return super().score_logprobs(request)
        rows, module = request.sequences.tolist(), self.engine.module
        found = []
        for ids, start in zip(rows, request.score_from.tolist(), strict=True):
            size = (start - 1) // BLOCK * BLOCK
            prefix = tuple(ids[:size])
            if prefix in self.cache:
                self.hits += 1
            else:
                self.cache[prefix] = module(torch.tensor([prefix]), use_cache=True).past_key_values
            kept = copy.deepcopy(self.cache[prefix])
            logits = module(torch.tensor([ids[size:]]), past_key_values=kept).logits[0, :-1].float()
            chosen = logits.log_softmax(-1).gather(-1, torch.tensor(ids[size + 1 :])[:, None])[:, 0]
            found.append(torch.cat([torch.zeros(size + 1), chosen]))
        sequences = request.sequences
        scored = sequences.positions >= request.score_from[sequences.row_index]
        values = torch.where(scored, torch.cat(found), 0.0)
        return ScoreResult(logprobs=Ragged(values, sequences.lengths), scored=Ragged(scored, sequences.lengths))

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        if not self.keeps_stale:
            self.cache.clear()
        return super().update_weights(request)


class StalePrefixes(PrefixCaching):
    keeps_stale = True


class Ignoring(TransformersBackend):
    """Says that it has loaded new weights, and keeps the old ones."""

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        return True


class Half(TransformersBackend):
    """Loads every other tensor."""

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        assert request.state_dict is not None
        own = self.engine.module.state_dict()
        mixed = dict(request.state_dict) | {name: own[name] for name in sorted(own)[::2]}
        return super().update_weights(WeightUpdate(version=request.version, when=request.when, state_dict=mixed))


class Restarting(TransformersBackend):
    """A server that a supervisor restarts behind its client's back. It does not say that its weights have changed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._first = copy.deepcopy(self.engine.module.state_dict())

    @hookimpl
    def weights_state(self, request: Any) -> None:
        return None

    def restart(self) -> None:
        self.engine.module.load_state_dict(self._first)
