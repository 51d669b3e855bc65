"""`SGLangBackend`: the hooks, each one line long, and how a server is opened: ours, or one that is there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from corelm.errors import InvalidRequestError
from corelm.spec import (
    AbortRequest,
    Capabilities,
    CloseRequest,
    GenerateRequest,
    GenerateResult,
    HealthRequest,
    ScoreRequest,
    ScoreResult,
    WeightUpdate,
    hookimpl,
)
from corelm.support import HttpClient
from sglang_backend import probe, weights
from sglang_backend.probe import Given
from sglang_backend.server import ALIVE, Server

if TYPE_CHECKING:
    from sglang_backend.launch import LaunchedServer

#: Where the key of a server behind a URL is looked up if it is not given.
KEY_VARIABLE = "SGLANG_API_KEY"
#: Seconds a server of ours may take to start: loading a large model is slow.
STARTUP_TIMEOUT = 600.0


class SGLangBackend:
    """Samples from and scores with an SGLang server. Any number of calls at a time; the server batches them."""

    requires_api = ">=1,<2"

    def __init__(self, server: Server, model: str, launched: LaunchedServer | None) -> None:
        self.server = server
        self.model = model
        self.launched = launched

    @property
    def capabilities(self) -> Capabilities:
        return self.server.capabilities

    @property
    def tokenizer(self) -> Any:
        return self.server.tokenizer

    @classmethod
    def open(
        cls,
        model: Any = None,
        *,
        base_url: str | None = None,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        max_context: int | None = None,
        eos_token_ids: Iterable[int] | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        connect_timeout: float = 10.0,
        read_timeout: float = 600.0,
        max_in_flight: int = 128,
        max_retries: int = 5,
        startup_timeout: float = STARTUP_TIMEOUT,
        env: Mapping[str, str] | None = None,
        progress: bool = True,
        **server_args: Any,
    ) -> SGLangBackend:
        """Launch a server for `model`, or use the one at `base_url`.

        Args:
            model: a folder or hub name. base_url: ``http(s)://host:port`` in its place.
            tokenizer: a tokenizer, or a folder or hub name of one; None for the model's own.
            vocab_size, max_context, eos_token_ids: of the model; None to ask the server and its model's files.
            api_key, headers: for a server behind a URL; the key is else taken from ``SGLANG_API_KEY``.
            connect_timeout, read_timeout: seconds; the latter without a byte mean that the server hangs.
            max_in_flight: rows at the server at a time. max_retries: for failures that may pass.
            startup_timeout: seconds a launched server may take to start. progress: show how long it takes.
            env: added to the environment of a launched server.
            server_args: the launched server's own arguments in Python spelling: ``mem_fraction_static=0.3`` is
                ``--mem-fraction-static 0.3``, and True a flag.

        Raises:
            InvalidRequestError: nothing to open, options of one kind with the other kind, or something that has to be
                passed because the server does not tell.
            EngineError: the server does not start, with the end of its log, or is none of SGLang's.
            BackendTimeoutError: it is not ready in time.
        """
        launching = {
            **server_args,
            "env": env,
            "startup_timeout": None if startup_timeout == STARTUP_TIMEOUT else startup_timeout,
            "progress": None if progress else progress,
        }
        connecting = {"api_key": api_key, "headers": headers}
        _one_way(model, base_url, launching, connecting)
        given = Given(
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_context=max_context,
            eos_token_ids=eos_token_ids,
            trust_remote_code=bool(server_args.get("trust_remote_code")),
        )
        # Whatever fails from here on, no process and no thread is left behind.
        with ExitStack() as undo:
            launched = None
            if base_url is None:
                # Not above: processes are started and ended as on Linux, and a server elsewhere needs none.
                from sglang_backend.launch import LaunchedServer

                launched = LaunchedServer(os.fspath(model), server_args, env or {})
                undo.callback(launched.close)
                base_url, api_key = launched.base_url, launched.api_key
            client = HttpClient(
                base_url,
                api_key,
                key_variable=KEY_VARIABLE,
                headers=headers,
                connect_timeout=connect_timeout,
                read_timeout=read_timeout,
                max_in_flight=max_in_flight,
                max_retries=max_retries,
            )
            undo.callback(client.close)
            if launched is not None:
                launched.wait_until(lambda: client.answers(ALIVE), startup_timeout, f"sglang, {model}", progress)
            found = probe.look(client, given)
            undo.pop_all()
        server = Server(client, found.tokenizer, found.capabilities, found.label)
        return cls(server, found.model, launched)

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return self.server.generate(request)

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        return self.server.score(request)

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        weights.update(self.server, request, self.model, launched=self.launched is not None)
        return True

    @hookimpl
    def health(self, request: HealthRequest) -> bool:
        return (self.launched is None or self.launched.alive) and self.server.health()

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        return self.server.abort(request)

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        self.server.close()
        if self.launched is not None:
            self.launched.close()
        return True


def _one_way(model: Any, base_url: str | None, launching: Mapping[str, Any], connecting: Mapping[str, Any]) -> None:
    """Raises:
    InvalidRequestError: both ways to a server are given, or none, or an option of the other way.
    """
    if base_url is None:
        if isinstance(model, (str, os.PathLike)):
            _refuse(connecting, "said to a server behind a URL; the key of a launched one is random")
            return
        _refuse(launching, "said when a server is launched, but there is no model to launch one for")
        raise InvalidRequestError(
            f"model: expected a folder or hub name, or base_url= in its place; got {type(model).__name__}",
            field="model",
        )
    if model is not None:
        raise InvalidRequestError("model: the server behind base_url has one already; give one of them", field="model")
    _refuse(launching, "said when a server is launched; the one behind base_url is there already")


def _refuse(options: Mapping[str, Any], why: str) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise InvalidRequestError(f"{', '.join(given)}: {why}", field=given[0])
