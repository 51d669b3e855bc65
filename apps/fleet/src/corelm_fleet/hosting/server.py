"""`EngineServer`: an open engine that answers the calls of a `HostedEngine` in another process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from corelm.application import OUT_OF_TURN, Aborts, hooks_of, open_plugin, to_containers
from corelm.errors import CapabilityError, CoreLMError, InvalidRequestError, described
from corelm.spec import AbortRequest, Capabilities, CloseRequest
from corelm_fleet.hosting.channel import Call, Frame, Kind, Sender
from corelm_fleet.hosting.packing import Failure, pack
from corelm_fleet.hosting.tokenizer import TokenizerServer

#: Threads for calls that an engine computes in. Each is started when it is needed.
_MOST_CALLS = 4096
#: Threads for calls that are answered at any time, and as many for those of the tokenizer. Neither wait for a thread
#: that an engine computes in; where the system has no room for more, those that are idle are used again.
_MOST_QUICK_CALLS = 16


@dataclass(frozen=True, slots=True)
class Opened:
    """What a `HostedEngine` has to know of the engine.

    Attributes:
        capabilities: what the engine can do, gradients excepted.
        copied: attributes of its tokenizer.
        hooks: which of `health` and `close` it implements. The capabilities tell the other optional hooks.
        reasons: why it lacks capabilities, by their names.
    """

    capabilities: Capabilities
    copied: dict[str, Any]
    hooks: frozenset[str]
    reasons: dict[str, str]


#: Takes how a call ended: its result, or a `Failure`.
Answer = Callable[[Any], None]
#: Takes an argument for one of the callbacks of a call: the name of the field, and the arguments.
Tell = Callable[[str, tuple[Any, ...]], None]


class EngineServer:
    """Answers calls on threads of its own. An engine without `concurrent_calls` is entered by one of them at a time.

    Args:
        engine: what the plugin's ``open`` returned.
        name: the name that the engine was opened by.
        wrappers: objects with ``@hookimpl(wrapper=True)`` methods that observe or replace results.

    Raises:
        BackendIncompatibleError: the engine does not fit the hook specification.
        CapabilityError: the engine makes its own containers, which cannot leave its process.
    """

    def __init__(self, engine: Any, name: str, wrappers: Sequence[object] = ()) -> None:
        self._engine = engine
        self._hooks, by_core = hooks_of(engine, name, wrappers)
        capabilities = engine.capabilities
        if getattr(engine, "on_caller_threads", False):
            # Calls from another process come one after another, so that batchers there merge them.
            capabilities = replace(capabilities, concurrent_calls=False)
        if self._hooks["to_containers"] is not to_containers:
            raise CapabilityError(
                f"backend {name!r} makes its own containers, which cannot leave its process; open it without python=",
                capability="to_containers",
            )
        self._capabilities = capabilities
        self._tokenizer = TokenizerServer(engine.tokenizer, self._hooks["tokenize"])
        # An engine that takes updates in flight lets them, and their canary, in by itself.
        at_once = capabilities.concurrent_calls or capabilities.updates_in_flight
        self._turn: AbstractContextManager[object] = nullcontext() if at_once else threading.RLock()
        # Encoding changes the encoder's settings. An engine with its own `tokenize` is entered. Rendering and decoding
        # wait for nothing: a chat template may take seconds.
        encoding = threading.RLock()
        self._tokenizer_turns: dict[str, AbstractContextManager[object]] = {
            "encode": encoding if "tokenize" in by_core else self._turn,
            "method": encoding,
            "set": encoding,
        }
        self._calls = ThreadPoolExecutor(_MOST_CALLS, "corelm-host-call")
        self._quick_calls = ThreadPoolExecutor(_MOST_QUICK_CALLS, "corelm-host-quick-call")
        self._tokenizer_calls = ThreadPoolExecutor(_MOST_QUICK_CALLS, "corelm-host-tokenizer-call")
        #: The names of the requests of each call that has not ended.
        self._under_way: dict[Hashable, Sequence[str]] = {}
        self._forgotten: set[Hashable] = set()
        self._closed = False
        self._aborts = Aborts(self._abort, name)

    def opened(self) -> Opened:
        """Return what a `HostedEngine` has to know of the engine."""
        return Opened(
            capabilities=replace(self._capabilities, gradients=False, weight_stream=False),
            copied=self._tokenizer("copied_attributes"),
            hooks=frozenset(self._hooks.keys() & {"health", "close"}),
            reasons=dict(getattr(self._engine, "reasons", {})),
        )

    def start(self, number: Hashable, call: Call, answer: Answer, tell: Tell) -> None:
        """Begin to serve a call; return at once.

        Args:
            number: tells it from the other calls, for `forget`.
            answer: called with the result, or with a `Failure`.
            tell: called with the name of a callback of the request and its arguments.
        """
        request = call.args[0] if call.args else None
        self._under_way[number] = getattr(request, "request_ids", ()) if call.name not in OUT_OF_TURN else ()
        quick = self._quick_calls if call.name in OUT_OF_TURN else self._calls
        pool = self._tokenizer_calls if call.part == "tokenizer" else quick
        try:
            pool.submit(self._serve, number, call, answer, tell)
        except BaseException:
            self._under_way.pop(number, None)
            raise

    def forget(self, number: Hashable) -> None:
        """End a call whose caller has stopped waiting, if the engine can abort it; return at once."""
        self._forgotten.add(number)
        names = self._under_way.get(number)
        if names is None:
            self._forgotten.discard(number)
        elif names and self._capabilities.abort:
            self._aborts.add(names, lambda: number in self._under_way)

    def end(self) -> None:
        """Abort all calls and close the engine, for a caller that is gone."""
        for number in list(self._under_way):
            self.forget(number)
        if "close" in self._hooks and not self._closed:
            with self._turn, suppress(Exception):
                self._hooks["close"](CloseRequest())

    def _abort(self, names: tuple[str, ...]) -> None:
        # An abort that has failed is repeated, too, until the call has ended.
        with suppress(Exception):
            self._hooks["abort"](AbortRequest(request_ids=names))

    def _serve(self, number: Hashable, call: Call, answer: Answer, tell: Tell) -> None:
        try:
            if call.part == "hook":
                result = self._hook(number, call, tell)
            else:
                with self._tokenizer_turns.get(call.name, nullcontext()):
                    result = self._tokenizer(call.name, *call.args, **(call.kwargs or {}))
        except BaseException as error:  # an engine can raise SystemExit, too
            result = Failure.of(error)
        finally:
            self._under_way.pop(number, None)
            self._forgotten.discard(number)
        answer(result)

    def _hook(self, number: Hashable, call: Call, tell: Tell) -> Any:
        (request,) = call.args
        if call.callbacks:
            request = replace(request, **{name: _teller(tell, name) for name in call.callbacks})
        # Only `health` is asked of an engine without it: that it replies is the answer.
        hook = self._hooks.get(call.name, lambda request: None)
        if call.name in OUT_OF_TURN:
            return hook(request)
        with self._turn:
            if number in self._forgotten:
                raise TimeoutError("the caller has stopped waiting")
            self._closed = self._closed or call.name == "close"
            return hook(request)


def open_server(
    name: str, model: Any, options: Mapping[str, Any], wrappers: Sequence[object] = ()
) -> tuple[EngineServer, str]:
    """Open an engine in this process, to be served to others.

    Returns:
        The engine's server, and the distributions and versions of its plugin and engine.

    Raises:
        CoreLMError: see `open_plugin` and `EngineServer`.
    """
    engine, info = open_plugin(name, model, options)
    return EngineServer(engine, name, wrappers), info.software()


def _teller(tell: Tell, name: str) -> Callable[..., None]:
    return lambda *args: tell(name, args)


class Session:
    """Serves the frames of one caller. An engine may have several callers. The sender takes the answers."""

    def __init__(self, server: EngineServer, sender: Sender) -> None:
        self._server, self._sender = server, sender
        #: The numbers of the calls that have not ended. Two callers number their calls alike.
        self._under_way: set[int] = set()

    def handle(self, frame: Frame) -> None:
        """Begin what a frame asks for; return at once."""
        number = frame.call
        if frame.kind is Kind.FORGET:
            self._server.forget((self, number))
            return
        self._under_way.add(number)
        try:
            answer, tell = partial(self._answer, number), partial(self._tell, number)
            self._server.start((self, number), value_of(frame), answer, tell)
        except Exception as error:
            # The call cannot be read, or the system has no room for another thread.
            self._answer(number, Failure.of(error))

    def end(self) -> None:
        """Abort the calls of a caller that is gone."""
        for number in list(self._under_way):
            self._server.forget((self, number))

    def _answer(self, number: int, result: Any) -> None:
        self._under_way.discard(number)
        send_value(self._sender, Kind.ERROR if isinstance(result, Failure) else Kind.RESULT, number, result)

    def _tell(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        send_value(self._sender, Kind.EVENT, number, (name, args))


def send_value(sender: Sender, kind: Kind, number: int, value: Any) -> None:
    """Send a frame with a value. If the value cannot be packed, send the reason as an error."""
    try:
        packed = pack(value)
    except Exception as error:
        kind, packed = Kind.ERROR, pack(Failure.of(error))
    # If the caller has ended, the one who receives notices it.
    with suppress(OSError):
        sender.send_packed(kind, number, packed)


def value_of(frame: Frame) -> Any:
    """Return the value of a frame.

    Raises:
        InvalidRequestError: it cannot be read here.
    """
    try:
        return frame.value()
    except CoreLMError:
        raise
    except Exception as error:
        raise InvalidRequestError(
            f"the process that holds the engine cannot read what it was sent: {described(error)}. Functions and "
            "classes have to be importable there"
        ) from error
