"""`VLLMBackend`: the hooks, each one line long, and how an engine is opened or a server is found."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any, Literal

from corelm.errors import InvalidRequestError
from corelm.spec import (
    AbortRequest,
    CloseRequest,
    GenerateRequest,
    GenerateResult,
    HealthRequest,
    ScoreRequest,
    ScoreResult,
    WeightUpdate,
    hookimpl,
)
from vllm_backend.engine import AsyncEngine, Engine
from vllm_backend.model import check_arguments
from vllm_backend.server import Server
from vllm_backend.sync import SyncEngine


class VLLMBackend:
    """Samples from and scores with vLLM, in this process or behind a URL."""

    requires_api = ">=1,<2"

    def __init__(self, engine: Engine | Server) -> None:
        self.engine = engine
        self.capabilities = engine.capabilities
        self.tokenizer = engine.tokenizer

    @classmethod
    def open(
        cls,
        model: Any = None,
        *,
        tokenizer: Any = None,
        trust_remote_code: bool = False,
        logprobs_mode: str | None = None,
        engine: Literal["async", "sync"] | None = None,
        base_url: str | None = None,
        vocab_size: int | None = None,
        max_context: int | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        connect_timeout: float | None = None,
        read_timeout: float | None = None,
        max_in_flight: int | None = None,
        max_retries: int | None = None,
        **engine_args: Any,
    ) -> VLLMBackend:
        """Start vLLM on a model, or take the server at `base_url`.

        Args:
            model: a folder or hub name; with `base_url` the name of one of the server's models, or None.
            tokenizer: a folder or hub name, which vLLM uses as well; or a tokenizer, used beside vLLM's own.
            logprobs_mode: vLLM's "raw_logprobs" (its default) or "processed_logprobs"; with `base_url` "raw" or
                "processed", or None to find out.
            engine: "async" (the default) for many calls at once; "sync" for quick tests.
            base_url, vocab_size, max_context, api_key, headers, connect_timeout, read_timeout, max_in_flight,
                max_retries: see `Server.connect`; None for its default.
            engine_args: vLLM's own, passed on as they are.

        Raises:
            InvalidRequestError: nothing to open, an unknown option, or one that belongs to the other way of opening.
            CapabilityError: a `logprobs_mode` that returns no log-probs.
        """
        common = {"logprobs_mode": logprobs_mode, "trust_remote_code": trust_remote_code or None}
        server = {
            "vocab_size": vocab_size,
            "max_context": max_context,
            "api_key": api_key,
            "headers": headers,
            "connect_timeout": connect_timeout,
            "read_timeout": read_timeout,
            "max_in_flight": max_in_flight,
            "max_retries": max_retries,
        }
        if base_url is not None:
            _only_a_servers({"engine": engine, **engine_args}, known=server)
            return cls(Server.connect(base_url, model=model, tokenizer=tokenizer, **_given(common | server)))
        arguments = _given(common) | engine_args
        _check(arguments, _given(server), model)
        start = {"async": AsyncEngine.start, "sync": SyncEngine.start}.get(engine or "async")
        if start is None:
            raise InvalidRequestError(f"engine: expected 'async' or 'sync', got {engine!r}", field="engine")
        arguments = {"disable_log_stats": True, **_of_this_platform(), **arguments, "model": os.fspath(model)}
        if isinstance(tokenizer, (str, os.PathLike)):
            arguments["tokenizer"], tokenizer = os.fspath(tokenizer), None
        return cls(start(arguments, tokenizer))

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return self.engine.generate(request)

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        return self.engine.score(request)

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        return self.engine.update_weights(request)

    @hookimpl
    def health(self, request: HealthRequest) -> bool:
        return self.engine.health()

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        return self.engine.abort(request)

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        self.engine.close()
        return True


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _check(arguments: Mapping[str, Any], server: Mapping[str, Any], model: Any) -> None:
    """What is to be opened in this process, before it is."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    check_arguments(arguments, {field.name for field in dataclasses.fields(AsyncEngineArgs)})
    if server:
        name = next(iter(server))
        hint = "; vLLM calls it max_model_len" if name == "max_context" else ""
        raise InvalidRequestError(f"{name}: belongs to a server, and no base_url is given{hint}", field=name)
    if not isinstance(model, (str, os.PathLike)):
        raise InvalidRequestError(
            f"model: expected a folder or a hub name (or base_url=), got {type(model).__name__}", field="model"
        )


def _of_this_platform() -> dict[str, Any]:
    """Defaults that keep vLLM alive. On a CPU it dies where a prompt of a request with a seed is read in two steps."""
    from vllm.platforms import current_platform

    return {"enable_chunked_prefill": False} if current_platform.is_cpu() else {}


def _only_a_servers(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name in _given(given):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "it is set where the server is started"
        raise InvalidRequestError(f"{name}: no option of a server that is there already; {hint}", field=name)
