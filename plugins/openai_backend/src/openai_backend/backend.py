"""`OpenAIBackend`: the hooks, each one line long, and how a server is opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import partial
from typing import Any

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
    hookimpl,
    opening_within,
)
from corelm_engine_kit import HttpClient
from openai_backend.capabilities import ModelHints, read_server
from openai_backend.probing import probe_server
from openai_backend.server import OpenAIServer

#: The environment variable that holds the key, if none is passed. It is not OPENAI_API_KEY, which belongs to one
#: service: whoever has set it must not hand it to every server whose address is tried.
KEY_VARIABLE = "CORELM_OPENAI_API_KEY"
#: Asks a server of core not to record the requests by which it is tried out. Other servers ignore it.
NOT_RECORDED = {"X-Session-Record": "no"}
#: Seconds that reading and probing a server may take. The first request that a server gets may make it load a model.
OPEN_TIMEOUT = 300.0


class OpenAIBackend:
    """Samples from, and where possible scores with, a server of the OpenAI protocol.

    Attributes:
        engine: the connection to the server.
    """

    requires_api = ">=1,<2"

    def __init__(self, engine: OpenAIServer) -> None:
        self.engine = engine

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    @property
    def tokenizer(self) -> Any:
        return self.engine.info.tokenizer

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
        trust_remote_code: bool = False,
        honours: Iterable[str] = (),
        extra_body: Mapping[str, Any] | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        connect_timeout: float = 10.0,
        read_timeout: float = 600.0,
        max_in_flight: int | None = None,
        max_retries: int = 5,
        open_timeout: float = OPEN_TIMEOUT,
    ) -> OpenAIBackend:
        """Find out with short requests what the server at `base_url` can be trusted with.

        Args:
            model: the model's name in requests; None for the server's only model.
            base_url: ``http(s)://host:port``, with or without ``/v1`` at the end.
            tokenizer: the server's tokenizer, or the folder or hub name of one; None to read the one that the model's
                name leads to. What cannot be checked against it is not declared.
            vocab_size: ids are below it; None for the number of the tokenizer's entries, or of the model's outputs if
                the tokenizer's folder has the model's configuration and that says more.
            max_context: the longest prompt + answer, in tokens; None for what the server says, if it does.
            eos_token_ids: the ids with which the server ends every answer; None for those of the tokenizer.
            trust_remote_code: allow Python code that comes with the tokenizer that you name.
            honours: sampling parameters that you know the server to honour, where trying cannot show it:
                ``presence_penalty``, ``frequency_penalty``, ``repetition_penalty``, ``top_k``, ``min_p``,
                ``min_new_tokens``.
            extra_body: fields that every request carries. What they do to log-probs is not known, so that only raw
                ones are offered then, and only if they are the same without these fields.
            api_key: sent as a bearer token; None for the environment variable CORELM_OPENAI_API_KEY.
            headers: sent with every request.
            connect_timeout: seconds to make a connection.
            read_timeout: seconds without an answer after which the server counts as hanging. Servers send nothing
                before an answer is complete, so it has to be longer than the longest answer takes.
            max_in_flight: HTTP requests at a time; None is 4,096, or fewer if this process may not open as many.
            max_retries: how often a failed HTTP request is repeated.
            open_timeout: seconds for all requests that find out what the server can do.

        Raises:
            InvalidRequestError: an option is wrong, or one is missing that the server does not say; `field` names it.
            EngineError: no server answers, or it has no ``/v1/completions``, as servers that only chat.
            BackendTimeoutError: the server does not answer within `open_timeout`.
        """
        if base_url is None:
            raise InvalidRequestError("base_url: this backend needs the address of a server", field="base_url")
        if model is not None and not isinstance(model, str):
            raise InvalidRequestError(
                f"model: expected the model's name in requests, got {type(model).__name__}", field="model"
            )
        hints = ModelHints(
            name=model,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_context=max_context,
            eos_token_ids=eos_token_ids,
            trust_remote_code=trust_remote_code,
            honours=honours,
            extra_body=extra_body,
        )
        connected = partial(
            HttpClient,
            base_url.rstrip("/").removesuffix("/v1") if isinstance(base_url, str) else base_url,
            api_key,
            key_variable=KEY_VARIABLE,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            max_in_flight=max_in_flight,
            max_retries=max_retries,
        )
        with (
            closing(connected(headers={**(headers or {}), **NOT_RECORDED})) as client,
            opening_within(open_timeout, client.base_url) as deadline,
            client.secrets.masking_errors(),
        ):
            info = probe_server(client, read_server(client, hints, deadline), deadline)
        return cls(OpenAIServer(connected(headers=headers), info))

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return self.engine.generate(request)

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        return self.engine.score(request)

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
