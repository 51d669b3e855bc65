"""`Observer`: a wrapper that sees every call and changes none, and `ObservedCall`, which is what it sees."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from corelm.application import Arrival
from corelm.application import EngineCall as EngineCall
from corelm.application import Origin as Origin
from corelm.application import current_call as current_call
from corelm.errors import is_interrupt
from corelm.spec import GenerateRequest, GenerateResult, ScoreRequest, TokenizeRequest, hookimpl

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class ObservedCall:
    """One call of a hook. Times are those of `time.monotonic`, in seconds.

    Attributes:
        hook: the hook's name.
        request: its request. Do not modify it.
        engine: what core knows about the call apart from the request; None if the hook was called without core.
        began: when the engine was asked.
        ended: when it had answered; equal to `began` until then.
        result: what the engine returned, which core has not checked yet; None until then, and after a failure.
        error: what the hook raised; None if it raised nothing.
        note: what `Observer.began` returned.
    """

    hook: str
    request: Any
    engine: EngineCall | None = field(default_factory=current_call)
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    result: Any = None
    error: BaseException | None = None
    note: Any = None

    def __post_init__(self) -> None:
        self.ended = self.began

    @property
    def seconds(self) -> float:
        """How long the engine worked on it."""
        return self.ended - self.began

    @property
    def origins(self) -> Sequence[Origin]:
        """The users' calls that it serves: several if the batcher has merged them."""
        return () if self.engine is None else self.engine.origins

    @property
    def again(self) -> bool:
        """Whether the engine had been asked for it before: alone, or as a part of a shared call that failed."""
        return self.engine is not None and self.engine.attempt > 1

    @property
    def waits(self) -> list[float]:
        """The seconds that each user's call has waited for the batcher and the engine; [] for a call made again."""
        if self.engine is None or self.again:
            return []
        asked = [origin.asked for origin in self.origins] or [self.engine.asked]
        return [self.began - at for at in asked]

    @property
    def rows(self) -> int:
        """Number of prompts, sequences or texts; 0 for hooks that have none."""
        if isinstance(self.request, ScoreRequest):
            return len(self.request.sequences)
        if isinstance(self.request, GenerateRequest):
            return len(self.request.prompts)
        return len(self.request.texts) if isinstance(self.request, TokenizeRequest) else 0

    @property
    def given_tokens(self) -> int:
        """Number of ids in the prompts or sequences."""
        if isinstance(self.request, ScoreRequest):
            return self.request.sequences.values.shape[0]
        return self.request.prompts.values.shape[0] if isinstance(self.request, GenerateRequest) else 0

    @property
    def sampled_tokens(self) -> int:
        """Number of ids in the answers."""
        return self.result.ids.values.shape[0] if isinstance(self.result, GenerateResult) else 0

    def cached_tokens(self) -> tuple[int, int] | None:
        """Return how many ids the engine took from its prefix cache, and how many the prompts have of which it says so.

        None if it says so of no prompt.
        """
        cached = self.result.cached_tokens if isinstance(self.result, GenerateResult) else None
        if cached is None:
            return None
        lengths = self.request.prompts.lengths.tolist()
        said = [
            (count, lengths[row * len(lengths) // len(cached)]) for row, count in enumerate(cached) if count is not None
        ]
        return sum(count for count, _ in said), sum(length for _, length in said)

    @property
    def finish_reasons(self) -> Sequence[str]:
        """Why each answer ended."""
        return self.result.finish_reasons if isinstance(self.result, GenerateResult) else ()

    def first_tokens(self) -> list[float]:
        """Return the seconds from a user's call to the first token of each answer whose tokens came one by one."""
        return [arrival.first - origin.asked for origin, arrival in self._arrivals()]

    def token_intervals(self) -> list[float]:
        """Return the mean seconds between the tokens of each such answer, from its first token on."""
        return [(each.last - each.first) / each.later for _, each in self._arrivals() if each.later]

    def _arrivals(self) -> list[tuple[Origin, Arrival]]:
        # A copy of the values, made in one step: an engine may deliver on another thread.
        return [(origin, arrival) for origin in self.origins for arrival in list(origin.arrivals.values())]


def _watched(hook: str) -> Callable[..., Generator[None, Any, Any]]:
    @hookimpl(wrapper=True)
    def watch(self: Observer, request: Any) -> Generator[None, Any, Any]:
        call = ObservedCall(hook, request)
        call.note = self._safely(self.began, call)
        try:
            call.result = yield
        except BaseException as error:
            call.error = error
            raise
        finally:
            call.ended = time.monotonic()
            self._safely(self.ended, call)
        return call.result

    watch.__name__ = hook
    return watch


class Observer:
    """Sees every call of an engine and changes none. Pass it as ``get_backend(…, wrappers=[observer])``.

    A subclass overrides `began` and `ended`. Both run on the thread that calls the engine, so they should not take
    long. What they raise reaches no caller: it is logged, the first time as a WARNING. One observer may watch several
    engines, from several threads at once.

    It sees calls of the hooks `tokenize`, `generate`, `score_logprobs`, `to_containers`, `update_weights`, `sleep` and
    `wake`. A call that is made again is one more call. What core finds wrong with a result it does not see.
    """

    _told = False

    def began(self, call: ObservedCall) -> Any:
        """Take a call whose hook is called next. What this returns becomes ``call.note``."""

    def ended(self, call: ObservedCall) -> None:
        """Take a call that has a result or an error. Called on the thread that called `began`."""

    tokenize = _watched("tokenize")
    generate = _watched("generate")
    score_logprobs = _watched("score_logprobs")
    to_containers = _watched("to_containers")
    update_weights = _watched("update_weights")
    sleep = _watched("sleep")
    wake = _watched("wake")

    def _safely(self, function: Callable[[ObservedCall], Any], call: ObservedCall) -> Any:
        try:
            return function(call)
        except BaseException as error:
            if is_interrupt(error):
                raise
            level, self._told = (logging.DEBUG if self._told else logging.WARNING), True
            what = "%s: %s raised; the calls go on, and are not measured where it does"
            _log.log(level, what, type(self).__name__, function.__name__, exc_info=True)
            return None
