"""`OpenAIBackend`: a server of the OpenAI protocol, of which trying shows what it can be trusted with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from corelm.spec import (
    GenerateRequest,
    GenerateResult,
    RowAnswer,
    RowScores,
    ScoreRequest,
    ScoreResult,
    StopStrings,
    generate_result,
    hookimpl,
    score_result,
)
from corelm.validate import invalid
from corelm_engine_kit import HttpClient, HttpEngine, HttpOptions, ModelHints, answer_limits, takes_http_options
from openai_backend import protocol
from openai_backend.probing import probe_server
from openai_backend.server_info import ServerInfo, read_server

#: The environment variable that holds the key, if none is passed.
KEY_VARIABLE = "CORELM_OPENAI_API_KEY"
#: The variables of OpenAI's own client. The key belongs to the server at that address: whoever has set it must not hand
#: it to every server whose address is tried.
THEIR_URL, THEIR_KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
#: Asks a server of core not to record the requests by which it is tried out. Other servers ignore it.
NOT_RECORDED = {"X-Session-Record": "no"}


class OpenAIBackend(HttpEngine):
    """Samples from, and where possible scores with, a server of the OpenAI protocol.

    The protocol has no field by which a client names its request: `protocol` checks what a reply says instead. It has
    no way to end a request but closing the connection, either.
    """

    requires_api = ">=1,<2"
    rows_path = "/v1/completions"
    info: ServerInfo

    def __init__(self, client: HttpClient, info: ServerInfo) -> None:
        super().__init__(client, info)
        self.health_path = info.health

    @classmethod
    @takes_http_options
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
        http: HttpOptions,
    ) -> OpenAIBackend:
        """Find out with short requests what the server at `base_url` can be trusted with.

        Args:
            model: the model's name in requests; None for the server's only model.
            base_url: ``http(s)://host:port``, with or without ``/v1`` at the end; None for OPENAI_BASE_URL, and then
                the key may be in OPENAI_API_KEY.
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
            http: see `HttpOptions`. Servers send nothing before an answer is complete, so ``read_timeout`` has to be
                longer than the longest answer takes. The key may be in CORELM_OPENAI_API_KEY.

        Raises:
            InvalidRequestError: an option is wrong, or one is missing that the server does not say; `field` names it.
            EngineError: no server answers, or it has no ``/v1/completions``, as servers that only chat.
            BackendTimeoutError: the server does not answer within ``open_timeout``.
        """
        variable = KEY_VARIABLE
        if base_url is None:
            base_url = os.environ.get(THEIR_URL)
            variable = KEY_VARIABLE if KEY_VARIABLE in os.environ else THEIR_KEY
        if not base_url:
            raise invalid("base_url", f"this backend needs the address of a server, here or in {THEIR_URL}")
        if model is not None and not isinstance(model, str):
            raise invalid("model", f"expected the model's name in requests, got {type(model).__name__}")
        hints = ModelHints(
            name=model,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_context=max_context,
            eos_token_ids=eos_token_ids,
            trust_remote_code=trust_remote_code,
        )
        trying = replace(http, headers={**(http.headers or {}), **NOT_RECORDED})
        with closing(trying.client(base_url, variable)) as client, http.opening(client) as deadline:
            info = read_server(client, hints, honours, extra_body, deadline)
            info = probe_server(cls(client, info), deadline)
        return cls(http.client(base_url, variable), info)

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        payloads = protocol.generation_requests(request, self.info)
        prompts, limits = request.prompts.tolist(), answer_limits(request, self.info.capabilities.max_context).tolist()
        stops = StopStrings.of_rows(request, self.tokenizer)

        def parse(row: int, reply: Any, aborted: bool) -> RowAnswer:
            return protocol.row_answer(reply, prompts[row], limits[row], request, stops[row], self.info)

        return generate_result(request, list(self.map_rows(request, payloads, parse).values()))

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        payloads = protocol.scoring_requests(request, self.info)
        sequences = request.sequences.tolist()

        def parse(row: int, reply: Any, aborted: bool) -> RowScores:
            return protocol.row_scores(reply, sequences[row], self.info)

        return score_result(request, self.map_rows(request, payloads, parse))
