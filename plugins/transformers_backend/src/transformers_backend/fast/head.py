"""`SplitForward`: a model's own forward, cut between its body and its head. `ScoringHead`: how this model's
log-probabilities can be made of its last hidden states, found out by trying.

tiled    one matrix product, at most scaled and capped: log-probabilities without logits (`tiles`)
sliced   the model's own forward turns hidden states into logits, a slice of positions at a time
whole    a slice gives other logits than the plain forward, so all logits are made at once

Between the body's last hidden states and the logits a model may scale, cap or shift. So the model's own forward runs
both halves: first with a head that sees one column only, then with a body that returns given hidden states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from corelm.spec import Ragged
from corelm_engine_kit.token_scores import TokenQuery, TokenScores, scores_of_logits
from transformers_backend.engine import CausalLM, is_device_failure
from transformers_backend.fast.tiles import TiledHead
from transformers_backend.scoring import HeadPath
from transformers_backend.self_test import SelfTest

_log = logging.getLogger(__name__)

#: Comparing the formula of a head of more than `_LARGE` weights takes a millisecond or more. For `_FEW` positions or
#: fewer, the model's own forward is cheaper.
_LARGE, _FEW = 2**21, 64
#: Largest logits of the hidden states with which a head is tried. A cap bends the last ones; a scale shows in all.
_MAGNITUDES = (1.0, 30.0, 1000.0)
#: Number of ids in a set that is tried, and of most probable ones, and the temperature.
_SOME, _TEMPERATURE = 8, 0.7
#: Number of positions tried at each magnitude.
_TRIED = 2
#: Where a module keeps the functions that run when it is called.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# The two halves of a forward ----------------------------------------------------------------------------------------


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast casts here; None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _is_bare(head: Any) -> bool:
    """Return whether `head` is torch's own linear layer, and calling it does nothing but a matrix product.

    An adapter, a quantized layer or one whose weights are offloaded is something else.
    """
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter or head.weight.device.type == "meta":
        return False
    own = vars(head)
    return "forward" not in own and not any(own.get(name) for name in _HOOKS)


class CannotSplit(Exception):
    """The model's forward is not one body followed by one head."""


class SplitForward:
    """Runs the two halves.

    Attributes:
        autocast: the dtype to which autocast cast inside the model's forward, in the latest call of `logits`; None
            without. The model may turn it on itself, as one that was prepared by accelerate does.
    """

    def __init__(self, engine: CausalLM) -> None:
        self.autocast: torch.dtype | None = None
        self._engine = engine
        self._output_class: Any = None

    def hidden(self, **inputs: Any) -> Tensor:
        """Return the body's last hidden states, ``[rows, width, hidden]``, for the inputs of `CausalLM.forward`.

        Raises:
            CannotSplit: the model has no body that can be told apart.
        """
        # The logits are thrown away, so the head gets one column only. A bare head takes none, and is not read.
        columns = 0 if _is_bare(self._engine.base.get_output_embeddings()) else 1
        with self._recorded(lambda out: type(out)(last_hidden_state=out.last_hidden_state[:, :columns])) as outputs:
            self._engine.forward(use_cache=False, **inputs)
        return self._states(outputs)

    def whole(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last hidden states ``[n, hidden]`` and the logits ``[n, vocab]`` of a row from one plain forward.

        Raises:
            CannotSplit: see `hidden`.
        """
        with self._recorded(lambda out: out) as outputs:
            logits = self._engine.plain_logits(ids)
        return self._states(outputs)[0], logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[n, vocab]`` of hidden states ``[n, hidden]``, which this object has returned."""
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=self._engine.device)

        def body(*args: Any, **kwargs: Any) -> Any:
            self.autocast = _autocast_dtype(self._engine.device)
            return self._output_class(last_hidden_state=hidden[None])

        with self._replaced(body):
            logits: Tensor = self._engine.forward(None, torch.zeros_like(ids), input_ids=ids, use_cache=False).logits
        return logits[0]

    def body(self) -> Any:
        """Return the module whose last hidden states the head turns into logits.

        Raises:
            CannotSplit: there is none.
        """
        base = self._engine.base
        body = base.get_decoder()
        # Some models call themselves, or a causal language model inside, their decoder.
        while body is not None and (body is base or body.get_output_embeddings() is not None):
            body = getattr(body, "model", None)
        if body is None:
            raise CannotSplit
        return body

    def _states(self, outputs: list[Any]) -> Tensor:
        if len(outputs) != 1:
            raise CannotSplit
        self._output_class = type(outputs[0])
        states: Tensor = outputs[0].last_hidden_state
        return states

    @contextmanager
    def _recorded(self, shown: Callable[[Any], Any]) -> Iterator[list[Any]]:
        """Yield what the body returns inside; the head sees what `shown` makes of it."""
        outputs: list[Any] = []
        read = self.body().forward

        def body(*args: Any, **kwargs: Any) -> Any:
            outputs.append(read(*args, **kwargs))
            return shown(outputs[-1])

        with self._replaced(body):
            yield outputs

    @contextmanager
    def _replaced(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Replace the body's forward inside. A `forward` set on the instance by someone else is restored afterwards."""
        own = vars(self.body())
        before = own.get("forward")
        own["forward"] = forward
        try:
            yield
        finally:
            del own["forward"]
            if before is not None:
                own["forward"] = before


# How logits are made ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HeadFormula:
    """How a model makes logits of its last hidden states.

    Attributes:
        path: see `transformers_backend.fast.head`; the other attributes are of use for "tiled" only.
        dtype: of the head's matrix product; under autocast, hidden states and weights are cast to it.
        scale: factor of the head's matrix product.
        cap: logits are ``cap · tanh(scaled / cap)``; None without one.
        witness: ``[1, hidden]``, a hidden state that shows the scale and bends at the cap.
    """

    path: HeadPath
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    cap: float | None = None
    witness: Tensor | None = None

    def head(self, module: nn.Linear) -> TiledHead:
        return TiledHead(module.weight, module.bias, self.scale, self.cap, self.dtype)


class ScoringHead:
    def __init__(self, engine: CausalLM, split: SplitForward, self_test: SelfTest) -> None:
        self._engine = engine
        self._split = split
        self._self_test = self_test

    def path(self, positions: int, *, grad: bool = False) -> HeadPath:
        """Return how to make the log-probabilities of so many positions now, with gradients if `grad` says so.

        A formula is compared with the model's own forward, on one state, at every call: since it was found, a scale may
        have been learned or a hook put on the body. That costs as much as two positions.
        """
        for _ in range(2):
            formula = self._formula()
            if formula.path != "tiled":
                return formula.path
            module = self._engine.base.get_output_embeddings()
            if not _is_bare(module):
                return "sliced"
            # Both ways must round alike: after a scale or a cap, the model rounds short floats once more.
            alike = formula.dtype.itemsize >= 4 or (formula.scale == 1.0 and formula.cap is None)
            if alike and positions <= _FEW and not grad and module.weight.numel() > _LARGE:
                return "sliced"
            if self._holds(formula, module, grad):
                return "tiled"
            self._self_test.now.formulas.clear()
        return "sliced"

    def tiled(self) -> TiledHead:
        """Return the head as one matrix product. Only for the path "tiled"."""
        return self._formula().head(self._engine.base.get_output_embeddings())

    def _holds(self, formula: HeadFormula, module: nn.Linear, grad: bool) -> bool:
        """Return whether tiles give what the model gives now; with `grad`, also whether gradients reach nothing but the
        hidden states and the head.
        """
        assert formula.witness is not None
        state = formula.witness.to(module.weight.device)
        with self._engine.evaluating(), self._without_cache():
            with torch.set_grad_enabled(grad):
                state = state.requires_grad_(grad)
                logits = self._split.logits(state)
            known = (state, module.weight, module.bias)
            if grad and not all(any(leaf is one for one in known) for leaf in _leaves(logits)):
                return False
            made = formula.head(module).logits(state.detach())
            return _equal_but_for_rounding(made.double(), logits.double(), formula.dtype)

    def _formula(self) -> HeadFormula:
        engine = self._engine
        known, head = self._self_test.now.formulas, engine.base.get_output_embeddings()
        weights = (getattr(head, name, None) for name in ("weight", "bias"))
        layouts = [(each.dtype, each.shape, each.stride()) for each in weights if isinstance(each, Tensor)]
        key = (_autocast_dtype(engine.device), *layouts)
        if key not in known:
            with engine.evaluating(), self._without_cache():
                known[key] = _probe(engine, self._split, head if _is_bare(head) else None, self._self_test.row)
        formula: HeadFormula = known[key]
        return formula

    def _without_cache(self) -> torch.autocast:
        """Keep the caller's autocast, but not the copies that it makes of weights here.

        They are made without gradients, and would stay in memory until the caller's autocast ends.
        """
        kind = self._engine.device.type
        return torch.autocast(
            kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
        )


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors in which the gradients of this one end."""
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [earlier for earlier, _ in node.next_functions]


# What is found out --------------------------------------------------------------------------------------------------


def _probe(engine: CausalLM, split: SplitForward, module: nn.Linear | None, row: Tensor) -> HeadFormula:
    """Return how this model's logits can be computed in parts, tried on a row of ids; `module` is a plain head."""
    hidden = _hidden_if_sliceable(engine, split, row)
    if hidden is None:
        return HeadFormula("whole")
    if module is None or module.weight.shape[1] != hidden.shape[1]:
        return HeadFormula("sliced")
    # The model's own forward brings the states to the head if its layers are on several devices.
    if module.weight.device != hidden.device:
        return HeadFormula("sliced")
    dtype = _product_dtype(hidden, module.weight, split.autocast)
    try:
        tiled = dtype and _tiled_formula(engine, split, module, hidden[:_TRIED], dtype)
    except Exception as error:
        if is_device_failure(error):
            raise
        # A kernel may fail in any way on a device on which it was not tried.
        _log.warning("the head is not used in tiles: %s: %s", type(error).__name__, error)
        tiled = None
    return tiled or HeadFormula("sliced")


def _product_dtype(hidden: Tensor, weight: Tensor, autocast: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which the model multiplies these two; None if it cannot. Autocast leaves float64 alone."""
    if autocast is not None and torch.float64 not in (hidden.dtype, weight.dtype):
        return autocast
    return hidden.dtype if hidden.dtype == weight.dtype else None


def _hidden_if_sliceable(engine: CausalLM, split: SplitForward, row: Tensor) -> Tensor | None:
    """Return the hidden states ``[n, hidden]`` of `row`, or None if slices of them give other logits than the whole."""
    try:
        hidden, whole = split.whole(row)
        parts, whole = torch.cat([split.logits(part).float() for part in hidden.split(5)]), whole.float()
    except Exception as error:
        if is_device_failure(error):
            raise
        # A forward that is not a body and a head may fail in any way when it is cut in two.
        return None
    eps = max(torch.finfo(dtype).eps for dtype in (engine.base.dtype, split.autocast) if dtype is not None)
    # Neither ids that the model rules out nor logits that are no numbers say how large a difference may be.
    finite = whole[whole.isfinite()].abs()
    tolerance = eps**0.5 * float(finite.max() if len(finite) else 0.0)
    return hidden if torch.allclose(parts, whole, rtol=0.0, atol=tolerance) else None


def _tiled_formula(
    engine: CausalLM, split: SplitForward, module: nn.Linear, hidden: Tensor, dtype: torch.dtype
) -> HeadFormula | None:
    """Return the scale and cap with which tiles give the model's own logits and answers, or None."""
    bare = TiledHead(module.weight, module.bias, dtype=dtype)
    largest = float(bare.logits(hidden).abs().max())
    if not 0.0 < largest < float("inf"):
        # If all products are zero, for example, every formula would fit.
        return None
    states = torch.cat([hidden * (magnitude / largest) for magnitude in _MAGNITUDES])
    products, logits = (each.double() for each in (bare.logits(states), split.logits(states)))
    if products.shape != logits.shape:
        # The model cuts its logits, for example to the vocabulary without padding.
        return None
    for cap in dict.fromkeys((_softcap(engine), None)):
        flat = logits[:_TRIED] if cap is None else torch.atanh(logits[:_TRIED] / cap) * cap
        scale = float((flat * products[:_TRIED]).sum() / products[:_TRIED].square().sum())
        scale = 1.0 if abs(scale - 1.0) < 1e-4 else scale
        formula = HeadFormula("tiled", dtype, scale, cap, witness=states[_TRIED : _TRIED + 1])
        if _agrees(formula.head(module), states, logits, dtype):
            return formula
    return None


def _softcap(engine: CausalLM) -> float | None:
    cap = getattr(engine.base.config.get_text_config(), "final_logit_softcapping", None)
    return float(cap) if cap else None


def _equal_but_for_rounding(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    # In float32 that is the rounding of sums, in anything shorter the rounding of one logit.
    steps = 64 if dtype.itemsize >= 4 else 4
    # If an id is ruled out by minus infinity, a tolerance taken from it would let everything pass.
    finite = found[found.isfinite()].abs()
    tolerance = steps * torch.finfo(dtype).eps * float(finite.max() if len(finite) else 0.0)
    return torch.allclose(found, wanted, rtol=0.0, atol=tolerance)


def _agrees(head: TiledHead, states: Tensor, logits: Tensor, dtype: torch.dtype) -> bool:
    """Return whether tiles give these logits of states of each magnitude, and answer as the logits do all that may be
    asked of a position: of a state with large logits and of one with small ones, three times each.
    """
    some = torch.tensor([_TRIED, 0] * 3, device=states.device)
    few = logits[some].float()
    pairs = zip(head.logits(states).double().split(_TRIED), logits.split(_TRIED), strict=True)
    if not all(_equal_but_for_rounding(made, wanted, dtype) for made, wanted in pairs):
        return False
    alike = all(_alike(head.scores(states[some], query), few, query, dtype) for query in _queries(few))
    if not alike:
        _log.warning("the head is not used in tiles: its numbers differ from the model's own")
    return alike


def _queries(logits: Tensor) -> Iterator[TokenQuery]:
    """Yield what is tried on two states, three times each: their most and least probable ids, and the ends."""
    vocab_size, two = logits.shape[1], logits[:2]
    ends = torch.tensor([0, vocab_size - 1], device=logits.device)
    spread = torch.arange(0, vocab_size, vocab_size // _SOME + 1)
    plain = TokenQuery(torch.cat([two.argmax(-1), two.argmin(-1), ends]), _TEMPERATURE)
    # An empty set stands for the whole vocabulary; the others have the ids that matter.
    some = torch.cat([spread, plain.targets.cpu()]).unique()
    sets = Ragged.from_list([some, some[1:], some, some[:0], some[:-1], some])
    ids = some.repeat(len(logits), 1)
    ids[1, 0] = -1
    # Most requests ask for no argmax, which has kernels of its own.
    yield plain
    marked = replace(plain, argmax=True)
    yield replace(marked, sets=sets.to(logits.device))
    yield replace(marked, top_k=len(spread))
    yield replace(marked, top_ids=ids.to(logits.device))


def _alike(found: TokenScores, logits: Tensor, query: TokenQuery, dtype: torch.dtype) -> bool:
    wanted = scores_of_logits(logits, query)
    pairs = [(found.logprobs, wanted.logprobs)]
    if found.argmax is not None:
        # Rounding may swap ids that are nearly as probable.
        pairs.append((logits.gather(1, found.argmax[:, None]), logits.amax(1)))
    if found.top is not None and wanted.top is not None:
        # So what is said of the ids that were found has to be right.
        own = scores_of_logits(logits, replace(query, top_k=0, top_ids=found.top.ids)).top
        assert own is not None
        pairs += [(found.top.logprobs, each.logprobs) for each in (wanted.top, own)] + [(found.top.tail, own.tail)]

    # The states with large logits, and those with small ones: what is rounded are the logits, so their size says by how
    # much.
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        finite = logits[rows][logits[rows].isfinite()] / query.temperature
        for one, other in pairs:
            made, expected = (torch.cat([each[rows].flatten(), finite.abs().max()[None]]) for each in (one, other))
            if not _equal_but_for_rounding(made, expected, dtype):
                return False
    return True
