"""`SGLangBackend`: the hooks, and `open`, which launches a server or connects to one behind a URL."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from corelm.spec import (
    AbortRequest,
    Capabilities,
    CloseRequest,
    GenerateRequest,
    GenerateResult,
    HealthRequest,
    ScoreRequest,
    ScoreResult,
    SleepRequest,
    WakeRequest,
    WeightUpdate,
    hookimpl,
    opening_within,
)
from corelm_engine_kit import VISIBLE_DEVICES, HttpClient, WeightGroup, refuse_missing_path, visible_devices
from sglang_backend import weights
from sglang_backend.capabilities import DUMMY, MODEL_INFO, ModelHints, checkpoint_of, read_server
from sglang_backend.probing import modes_by_environment, probe_server
from sglang_backend.server import SGLangServer
from sglang_backend.signs import SIGN

if TYPE_CHECKING:
    from sglang_backend.launch import LaunchedServer

#: The environment variable that holds the key of a server behind a URL, if none is passed.
KEY_VARIABLE = "SGLANG_API_KEY"
#: Seconds that a launched server may take to start: loading a large model is slow.
STARTUP_TIMEOUT = 600.0
#: Seconds that reading and probing a server may take. The first request that a server gets may make it compile.
OPEN_TIMEOUT = 300.0


class SGLangBackend:
    """Samples from and scores with an SGLang server. It takes any number of calls at a time; the server batches them.

    Attributes:
        engine: the connection to the server.
        launched: the server's process, if this backend started it; None for a server behind a URL.
    """

    requires_api = ">=1,<2"

    def __init__(self, engine: SGLangServer, launched: LaunchedServer | None) -> None:
        self.engine = engine
        self.launched = launched

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

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
        max_in_flight: int | None = None,
        max_retries: int = 5,
        open_timeout: float = OPEN_TIMEOUT,
        weight_group: str | WeightGroup | None = None,
        startup_timeout: float = STARTUP_TIMEOUT,
        env: Mapping[str, str] | None = None,
        devices: int | str | Sequence[int] | None = None,
        progress: bool = True,
        **server_args: Any,
    ) -> SGLangBackend:
        """Launch a server for `model`, or connect to the one at `base_url`.

        Args:
            model: a folder or hub name.
            base_url: ``http(s)://host:port`` of a running server, instead of a model; ``/v1`` at the end is ignored.
            tokenizer: a tokenizer, or the folder or hub name of one; None for the model's own.
            vocab_size: ids are below it; None to read the model's configuration.
            max_context: the longest prompt + answer, in tokens; None to ask the server.
            eos_token_ids: the ids that end every answer; None to read the model's files.
            api_key: the key of a server behind a URL; None to take it from ``SGLANG_API_KEY``.
            headers: sent with every request to a server behind a URL.
            connect_timeout: seconds to make a connection.
            read_timeout: seconds without an answer or a sign of work, which ``/health_generate`` gives, after which the
                server counts as hung. An answer may take longer.
            max_in_flight: the most rows at the server at a time, over all threads; None is 4,096, or fewer if this
                process may not open as many connections.
            max_retries: how often a request is repeated after a failure that may pass.
            open_timeout: seconds for all requests that find out what the server can do.
            weight_group: the host by which a server behind a URL reaches this process, or that and a port. New weights
                can be tensors then: they are sent to the server, which joins this process at the first ones.
            startup_timeout: seconds that a launched server may take to start, before those requests.
            env: added to the environment of a launched server.
            devices: the numbers of the GPUs that a launched server uses, as torch counts them here; None for the first.
            progress: show on standard error how long a launched server has been starting.
            server_args: the launched server's own arguments in Python spelling: ``mem_fraction_static=0.3`` is
                ``--mem-fraction-static 0.3``, and True is a flag.

        Raises:
            InvalidRequestError: neither or both of model and base_url, an option of the other way to open, or a fact
                about the model that has to be passed because it cannot be read here.
            EngineError: the server ends while it starts (the message holds the end of its log), or what answers at
                `base_url` is not an SGLang server.
            CapabilityError: `weight_group` for a server that cannot be sent tensors.
            BackendTimeoutError: the server is not ready in time, or does not answer within `open_timeout`.
        """
        launching = {
            **server_args,
            "env": env,
            "devices": devices,
            "startup_timeout": None if startup_timeout == STARTUP_TIMEOUT else startup_timeout,
            "progress": None if progress else progress,
        }
        connecting = {"api_key": api_key, "headers": headers}
        _check_options(model, base_url, launching, connecting)
        group = WeightGroup.given(weight_group)
        if base_url is None:
            _refuse({"weight_group": group}, "only for a server behind base_url; a launched one takes tensors without")
        hints = ModelHints(
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_context=max_context,
            eos_token_ids=eos_token_ids,
            trust_remote_code=bool(server_args.get("trust_remote_code")),
        )
        # If anything fails from here on, no process and no thread is left behind.
        with ExitStack() as cleanup:
            launched = dummy = modes = None
            if base_url is None:
                # Imported here because `launch` needs a POSIX system, and a server behind a URL does not.
                from sglang_backend.launch import LaunchedServer

                refuse_missing_path("model", model)
                if server_args.get("load_format") == DUMMY:
                    dummy = checkpoint_of(
                        os.fspath(model),
                        hints.trust_remote_code,
                        option=f"load_format={DUMMY!r}",
                        capability="load_format",
                    )
                    modes = modes_by_environment({**os.environ, **(env or {})})
                chosen = {} if devices is None else {VISIBLE_DEVICES: visible_devices(devices)}
                launched = LaunchedServer(os.fspath(model), server_args, dict(env or {}) | chosen)
                cleanup.callback(launched.close)
                base_url, api_key = launched.base_url, launched.api_key
            client = HttpClient(
                base_url.rstrip("/").removesuffix("/v1") if isinstance(base_url, str) else base_url,
                api_key,
                key_variable=KEY_VARIABLE,
                headers=headers,
                connect_timeout=connect_timeout,
                read_timeout=read_timeout,
                sign=SIGN,
                max_in_flight=max_in_flight,
                max_retries=max_retries,
                ended=None if launched is None else launched.ended,
            )
            cleanup.callback(client.close)
            if launched is not None:
                launched.wait_until(lambda: client.answers(MODEL_INFO), startup_timeout, f"sglang, {model}", progress)
            with opening_within(open_timeout, client.base_url) as deadline, client.secrets.masking_errors():
                info = probe_server(client, read_server(client, hints, deadline), deadline, modes)
                info = replace(info, capabilities=replace(info.capabilities, without_weights=dummy is not None))
            if group is not None and info.no_group:
                raise CapabilityError(
                    f"weight_group: {info.no_group}, and SGLang can only send tensors to one replica in one stage; "
                    "leave weight_group out, save new weights where the server can read them, and pass "
                    "update_weights that path; or run one server for each replica",
                    capability="update_weights",
                )
            cleanup.pop_all()
        engine = SGLangServer(
            client,
            info,
            takes_state_dict=launched is not None,
            dummy=dummy,
            weight_group=group,
            group_timeout=read_timeout,
        )
        return cls(engine, launched)

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        self._require_running()
        return self.engine.generate(request)

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        self._require_running()
        return self.engine.score(request)

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        self._require_running()
        weights.load(self.engine, request)
        return True

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        self._require_running()
        self.engine.sleep(request)
        return True

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        self._require_running()
        self.engine.wake(request)
        return True

    @hookimpl
    def health(self, request: HealthRequest) -> bool:
        return (self.launched is None or self.launched.alive) and self.engine.health()

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        return self.engine.abort(request)

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        self.engine.close()
        if self.launched is not None:
            self.launched.close()
        return True

    def _require_running(self) -> None:
        """Send nothing to the port of a launched server that has ended: another process may listen there now."""
        if self.launched is not None and (why := self.launched.ended()):
            raise EngineError(why, usable=False)


def _check_options(
    model: Any, base_url: str | None, launching: Mapping[str, Any], connecting: Mapping[str, Any]
) -> None:
    """Refuse anything but one of `model` and `base_url`, and options that belong to the other one.

    Args:
        model: what `open` was given.
        base_url: likewise.
        launching: the options of a launched server; None for those that were not given.
        connecting: the options of a server behind a URL; None for those that were not given.
    """
    if base_url is None:
        if isinstance(model, (str, os.PathLike)):
            _refuse(connecting, "only for a server behind base_url; a launched server gets a random key")
            return
        _refuse(launching, "only for a launched server, and there is no model to launch one for")
        raise InvalidRequestError(
            f"model: expected a folder or hub name, or base_url= instead; got {type(model).__name__}", field="model"
        )
    if model is not None:
        raise InvalidRequestError(
            "model: the server behind base_url already has one; pass only base_url", field="model"
        )
    _refuse(launching, "only for a launched server; the one behind base_url already runs")


def _refuse(options: Mapping[str, Any], why: str) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise InvalidRequestError(f"{', '.join(given)}: {why}", field=given[0])
