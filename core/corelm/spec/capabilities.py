"""`Capabilities`: what a backend can do. A plugin declares it when its engine opens; core refuses any other request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, get_args

from corelm.spec.records import SLEEP_LEVELS
from corelm.spec.sampling import EVERY_ENGINE, FIELDS, LARGEST
from corelm.validate import count, did_you_mean, flag, invalid, is_bool, positive, shown, token_ids

Range = tuple[float, float]
GenerationMode = Literal["raw", "processed", "scaled"]

#: Sampling parameters whose values are not numbers, so that they have no range.
_WITHOUT_RANGE = frozenset({"stop", "early_stopping", "engine_kwargs"})
#: Capability that is a number → the lowest one.
_COUNTS = {"vocab_size": 1, "score_top_k": 0, "top_logprobs": 0}
#: What `score_logprobs` can do in addition to scoring.
_OF_SCORES = ("score_temperature", "logits", "argmax", "gradients", "score_support", "score_top_k", "score_top_ids")
#: Capability → the one without which it means nothing.
_NEEDED = {
    **dict.fromkeys(_OF_SCORES, "score"),
    **dict.fromkeys(("weight_stream", "updates_in_flight", "without_weights"), "update_weights"),
    "top_logprobs": "generation_modes",
    "seeds_are_costly": "per_answer_seeds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of an engine. Every field defaults to "no"; a plugin sets what its engine supports.

    The values are checked when the object is made, and cannot change afterwards: use `dataclasses.replace`.

    Attributes:
        vocab_size: legal ids are in ``[0, vocab_size)``.
        max_context: the largest number of tokens in prompt and answer together; None if there is no limit.
        eos_token_ids: the ids that end an answer by themselves; None means the tokenizer's ``eos_token_id``.
        sampling: the `SamplingParams` fields that the engine honours, each with its legal inclusive range, or
            None for every value that `SamplingParams` allows. Greedy decoding needs a temperature range that
            includes 0. Leave out what every engine must honour or core handles itself, such as stop ids,
            `max_new_tokens` and `num_samples`.
        generation_modes: the log-probs that `generate` can return: `raw`, `processed` or `scaled`. `scaled` is
            for engines that divide the logits by the temperature (by 1 at temperature 0) and ignore truncation.
            Core asks such an engine for `raw` or `processed` if the scaled number equals it, and else refuses
            the request. One that declares `return_support` as well is also asked for `processed` ones together
            with the support: the scaled ones minus the log of the mass that truncation has left.
        score: `score_logprobs` works.
        score_temperature: `score_logprobs` works at temperatures other than 1.
        logits: `score_logprobs` can return full logits.
        argmax: `score_logprobs` can return the most probable id at every position.
        gradients: the results of `score_logprobs` can carry gradients to the model.
        score_support: `score_logprobs` can normalise over the ids of ``request.support``.
        score_top_k: the most ids for which `score_logprobs` can return the log-probs of the most probable
            ones at every position; 0 if it cannot.
        score_top_ids: `score_logprobs` can return the log-probs of the ids in ``request.top_ids``.
        return_support: `generate` can return the ids that each token was drawn from.
        top_logprobs: the most ids for which `generate` can return the log-probs of the most probable ones at
            every token; 0 if it cannot.
        empty_prompt: a prompt may have no tokens.
        per_answer_seeds: the same seed gives the same answer, independent of the other rows.
        seeds_are_costly: an answer with a seed takes longer than one without. Core then sends seeds only if
            the caller gave some; otherwise ``GenerateRequest.seeds`` is None and the engine chooses. If seeds
            are free, core always sends them and draws the seed of a call without one from torch's generator.
        concurrent_calls: hooks may be called from several threads at once.
        stops_at_timeout: soon after ``request.timeout`` seconds, `generate` and `score_logprobs` raise a
            `TimeoutError` and the engine stops working. Otherwise core ends the caller's wait, and the engine
            finishes the request while later calls wait.
        streaming: `generate` hands tokens to ``request.on_tokens`` as it samples them. Otherwise core hands
            over each answer when the call has ended.
        update_weights: the optional hook `update_weights` works.
        weight_stream: `update_weights` reads ``request.stream`` while it loads. Otherwise core collects the
            tensors of an iterator on the CPU and passes a state dict.
        updates_in_flight: `update_weights` may be called with ``when="now"`` while calls of `generate` are
            running. They go on with the new weights and say in `version_runs` from which token on. Before and
            after it, on the same thread, core may also score and generate, to check it. `generate` always
            returns `version_runs` or `weight_versions`.
        without_weights: the engine was opened without weights. Core refuses to generate and score until an
            update has loaded some.
        sleep_levels: the levels at which the optional hooks `sleep` and `wake` work: 1, 2 or both. See `SleepRequest`.
        adapters: requests may name an adapter (LoRA, for example), and the hook `update_weights` loads and unloads
            adapters, even if the capability `update_weights`, which is about the base weights, is not declared.
        abort: the optional hook `abort` works.
        precision: how far its log-probs of a row are from those of a float32 forward of the same weights, in
            nats a token on average. Comparisons and canaries treat smaller differences as rounding. None is
            the precision of the logits' dtype; an engine with quantized activations has to declare more.

    Raises:
        InvalidRequestError: an unknown name, a value of another type or out of range, or capabilities that
            contradict each other; `field` names the capability.
    """

    vocab_size: int
    max_context: int | None
    eos_token_ids: frozenset[int] | None = None
    sampling: Mapping[str, Range | None] = field(default_factory=dict)
    generation_modes: frozenset[GenerationMode] = frozenset()
    score: bool = False
    score_temperature: bool = False
    logits: bool = False
    argmax: bool = False
    gradients: bool = False
    score_support: bool = False
    score_top_k: int = 0
    score_top_ids: bool = False
    return_support: bool = False
    top_logprobs: int = 0
    empty_prompt: bool = False
    per_answer_seeds: bool = False
    seeds_are_costly: bool = False
    concurrent_calls: bool = False
    stops_at_timeout: bool = False
    streaming: bool = False
    update_weights: bool = False
    weight_stream: bool = False
    updates_in_flight: bool = False
    without_weights: bool = False
    sleep_levels: frozenset[int] = frozenset()
    adapters: bool = False
    abort: bool = False
    precision: float | None = None

    def __post_init__(self) -> None:
        given = {name: count(name, getattr(self, name), low, LARGEST) for name, low in _COUNTS.items()}
        values: dict[str, Any] = {**given, "sampling": _parameters(self.sampling)}
        if self.max_context is not None:
            values["max_context"] = count("max_context", self.max_context, 1, LARGEST)
        if self.precision is not None:
            values["precision"] = positive("precision", self.precision)
        if self.eos_token_ids is not None:
            ids = token_ids("eos_token_ids", tuple(_members("eos_token_ids", self.eos_token_ids, "a set of token ids")))
            if ids and max(ids) >= (size := given["vocab_size"]):
                raise invalid("eos_token_ids", f"expected ids from 0 to {size - 1}, got {shown(max(ids))}")
            values["eos_token_ids"] = frozenset(ids)
        for name, known in (("generation_modes", get_args(GenerationMode)), ("sleep_levels", SLEEP_LEVELS)):
            found = _members(name, getattr(self, name), f"a set, as in frozenset({{{known[0]!r}}})")
            if wrong := [each for each in found if each not in known or isinstance(each, (bool, float))]:
                raise invalid(name, f"unknown {shown(wrong[0])}; known: {', '.join(map(str, known))}")
            values[name] = frozenset(found)
        for name, value in values.items():
            object.__setattr__(self, name, value)
        for each in fields(self):
            if isinstance(each.default, bool):
                flag(each.name, getattr(self, each.name))
        for name, needed in _NEEDED.items():
            if getattr(self, name) and not getattr(self, needed):
                raise invalid(name, f"means nothing without {needed}; declare {needed} as well")
        for name in ("length_penalty", "early_stopping"):
            if name in self.sampling and "num_beams" not in self.sampling:
                raise invalid("sampling", f"{name} belongs to beam search; declare num_beams as well")
        if 2 in self.sleep_levels and not self.update_weights:
            raise invalid("sleep_levels", "the engine could never get weights; declare update_weights=True as well")

    def __reduce__(self) -> tuple[Callable[[], Capabilities], tuple[()]]:
        # A mappingproxy can be neither pickled nor copied.
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return partial(Capabilities, **{**values, "sampling": dict(self.sampling)}), ()


def _parameters(given: Any) -> Mapping[str, Range | None]:
    if not isinstance(given, Mapping):
        raise invalid("sampling", f"expected a mapping of names to ranges or None, got {shown(given)}")
    declarable = [name for name in FIELDS if name not in EVERY_ENGINE]
    for name, span in given.items():
        if name not in FIELDS:
            # Otherwise a misspelt name would be ignored, and the parameter refused at every request.
            raise invalid("sampling", f"SamplingParams has no field {name!r}{did_you_mean(name, declarable)}")
        if name in EVERY_ENGINE:
            raise invalid("sampling", f"leave out {name!r}: core handles it, or every engine must honour it")
        if span is not None and (name in _WITHOUT_RANGE or not _is_range(span)):
            expected = "None" if name in _WITHOUT_RANGE else "None or a pair of numbers (lowest, highest)"
            raise invalid("sampling", f"{name}: expected {expected}, got {shown(span)}")
    return MappingProxyType({name: None if span is None else (span[0], span[1]) for name, span in given.items()})


def _is_range(span: Any) -> bool:
    if not isinstance(span, (tuple, list)) or len(span) != 2 or any(map(is_bool, span)):
        return False
    # NaN fails the comparison, so it is refused here too.
    return all(isinstance(end, (int, float)) for end in span) and bool(span[0] <= span[1])


def _members(name: str, given: Any, expected: str) -> Collection[Any]:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Collection):
        raise invalid(name, f"expected {expected}, got {shown(given)}")
    return given
