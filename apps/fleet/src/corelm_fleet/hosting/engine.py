"""`HostedEngine`: an engine in another process, as this process sees it; `open_in_process` opens one."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from corelm import Ragged
from corelm.errors import BackendTimeoutError, CoreLMError, EngineError, InvalidRequestError, message
from corelm.spec import (
    CloseRequest,
    HealthRequest,
    ScoreRequest,
    ScoreResult,
    hookimpl,
)
from corelm.validate import invalid, shown
from corelm_fleet.hosting.channel import Call, Host, Kind
from corelm_fleet.hosting.packing import HostedError, HostTraceback, pack
from corelm_fleet.hosting.process import CLOSE_TIMEOUT, HostProcess
from corelm_fleet.hosting.server import Opened
from corelm_fleet.hosting.tokenizer import HostedTokenizer

#: Seconds after a request's timeout in which the host must say that the time is over. Then it counts as stuck.
_GRACE = 2.0
#: Seconds in which a host tokenizes, renders or decodes a batch. A template that loops is stopped earlier.
_TOKENIZING = 600.0
#: Seconds in which a host says whether its engine is healthy, and in which it aborts requests.
_QUICK = 10.0


def open_in_process(
    name: str,
    model: Any,
    python: str | os.PathLike[str],
    env: Mapping[str, str | None] | None,
    options: Mapping[str, Any],
) -> tuple[HostedEngine, str]:
    """Open an engine in a new process of another interpreter.

    Args:
        name: the backend's name, known to the interpreter's environment. This process need not know it.
        model: what the plugin opens: a path, a name or None.
        python: the interpreter: the path of an executable, or the folder of an environment.
        env: variables to add to the environment of the process; None as a value removes one.
        options: the engine's own options.

    Returns:
        The engine, and the distribution and version of its plugin.

    Raises:
        InvalidRequestError: see `HostProcess`; or the model or an option cannot leave this process.
        CoreLMError: what `get_backend` would raise there.
    """
    order = {"name": name, "model": portable_model(model), "options": dict(options)}
    for option, value in options.items():
        check_option(option, value)
    host = HostProcess(python, env)
    try:
        opened, label = host.connection.send(Kind.OPEN, order)
    except BaseException as error:
        # Many an engine says in its log alone why it did not open.
        end = host.last_lines() if isinstance(error, EngineError) else ""
        host.kill(keep_log=bool(end))
        if isinstance(error, CoreLMError):
            raise _in_environment(error, host, end) from error.__cause__
        raise
    return HostedEngine(host, name, opened), f"{label} of {host.python}"


def _asked(hook: str, limit: float | None = None) -> Callable[..., Any]:
    """Return a hook of the class `HostedEngine` that asks the host."""

    @hookimpl
    def ask(self: HostedEngine, request: Any) -> Any:
        return self._call(hook, request, limit)

    ask.__name__ = hook
    return ask


class HostedEngine:
    """An engine in another process. It implements the hooks, and asks the process that holds the engine.

    `weights_state` is not asked: no other code can change the weights there. `to_containers` is core's own here.
    Gradients cannot leave that process, so its capabilities here say that it gives none.

    Args:
        host: the process.
        name: the name that the engine was opened by.
        opened: what the process said of the engine.
    """

    def __init__(self, host: Host, name: str, opened: Opened) -> None:
        self.host = host
        self._name = name
        self._hooks = opened.hooks
        self.capabilities, self.reasons = opened.capabilities, opened.reasons
        self.tokenizer = HostedTokenizer(partial(_ask_tokenizer, host), opened.copied)
        # Also when the program ends: nothing is left running.
        self._kill = weakref.finalize(self, host.kill)

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        result: ScoreResult = self._call("score_logprobs", replace(request, device=None))
        return result if request.device is None else _on_device(result, request.device)

    generate = _asked("generate")
    update_weights = _asked("update_weights")
    sleep = _asked("sleep")
    wake = _asked("wake")
    abort = _asked("abort", _QUICK)

    @hookimpl
    def health(self, request: HealthRequest) -> bool:
        if self.host.lost:
            return False
        try:
            # Also asked of an engine without this hook: a process that was stopped does not reply.
            healthy = self._call("health", request, _QUICK)
            return healthy is None or bool(healthy)
        except (CoreLMError, TimeoutError):
            return False

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        try:
            if "close" in self._hooks and not self.host.lost:
                with suppress(TimeoutError):
                    self._call("close", request, CLOSE_TIMEOUT)
        finally:
            # Not if the program is a fork, in which the process belongs to the parent.
            if self._kill.detach() is not None:
                self.host.close()
        return True

    def _call(self, hook: str, request: Any, limit: float | None = None) -> Any:
        """Ask the host to call a hook.

        Args:
            limit: seconds to wait for it. None waits as long as the request says, if the engine ends its calls in time
                by itself; otherwise core waits no longer, and the host goes on.
        """
        if limit is None and self.capabilities.stops_at_timeout and getattr(request, "timeout", None) is not None:
            limit = request.timeout + _GRACE
        callbacks = {each.name: getattr(request, each.name) for each in fields(request)}
        callbacks = {name: value for name, value in callbacks.items() if callable(value)}
        if callbacks:
            request = replace(request, **dict.fromkeys(callbacks))
        try:
            return self.host.call(Call("hook", hook, (request,), None, tuple(callbacks)), limit, callbacks)
        except HostedError as error:
            raise EngineError(f"backend {self._name!r}, hook {hook}: {error}") from error.__cause__
        except InvalidRequestError as error:
            if not isinstance(error.__cause__, HostTraceback):
                if hook == "generate":
                    _check_portable("engine_kwargs", request.sampling.engine_kwargs)
                for name, tensor in (getattr(request, "state_dict", None) or {}).items():
                    _check_portable("weights", {name: tensor})
            raise


def _ask_tokenizer(host: Host, name: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return host.call(Call("tokenizer", name, args, kwargs), _TOKENIZING)
    except TimeoutError as error:
        raise BackendTimeoutError(f"the tokenizer of the process that holds the engine: {message(error)}") from error


def _on_device(result: ScoreResult, device: torch.device) -> ScoreResult:
    moved: dict[str, Any] = {
        each.name: value.with_values(value.values.to(device))
        for each in fields(result)
        if isinstance(value := getattr(result, each.name), Ragged)
    }
    return replace(result, **moved)


def portable_model(model: Any) -> str | None:
    """Return what another process opens for `model`.

    Raises:
        InvalidRequestError: it is neither a path, a name nor None.
    """
    if model is None:
        return None
    if isinstance(model, (str, os.PathLike)):
        return os.fspath(model)
    raise invalid(
        "model",
        f"a {type(model).__name__} cannot be opened in another process; save it, for example with "
        "model.save_pretrained(PATH) and tokenizer.save_pretrained(PATH), and give the path",
    )


def check_option(name: str, value: Any) -> None:
    """Refuse an option that cannot be sent to another process.

    Raises:
        InvalidRequestError: `field` is the option.
    """
    if name == "tokenizer" and not isinstance(value, (str, os.PathLike)):
        raise invalid(name, f"a {type(value).__name__} cannot leave this process; save it, and give the path")
    _check_portable(name, value)


def _check_portable(name: str, value: Any) -> None:
    """Refuse a value that cannot be sent to another process."""
    try:
        pack(value)
    except Exception as error:
        raise invalid(name, f"{shown(value)} cannot be sent to the process that holds the engine: {error}") from error


def _in_environment(error: CoreLMError, host: HostProcess, log: str) -> CoreLMError:
    """Return the error with a word on where it happened: what is missing there has to be installed there."""
    what = error.args[0]
    if str(host.log) in what:
        log = ""
    error.args = (f"in the environment of {host.python}: {what}{log}", *error.args[1:])
    return error
