"""`ServingApp`: the ASGI application. Its routes, and the key that every request but ``/health`` must have."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from corelm import Backend
from corelm.errors import CoreLMError, MissingKeyError
from corelm_interop.trace_context import continued_trace
from corelm_serve.chat import answer_chat
from corelm_serve.completions import answer_completions, answer_tokens
from corelm_serve.exchange import Endpoint
from corelm_serve.options import ServerOptions
from corelm_serve.refusals import Refusal, refusal
from corelm_serve.requests import ChatAsk, CompletionAsk, TokenAsk
from corelm_serve.service import Service, batched
from corelm_serve.sessions import SessionStore


class ServingApp:
    """An ASGI application that answers the OpenAI protocol for an opened backend.

    Args:
        backend: the engine. Its calls are shared by all requests. The application does not close it.
        options: what is answered, whom, and how much at a time.
        sessions: where sessions are recorded; None for a new store.

    Attributes:
        service: what all requests share.
    """

    def __init__(self, backend: Backend, options: ServerOptions, sessions: SessionStore | None = None) -> None:
        store = (sessions if sessions is not None else SessionStore()) if options.sessions else None
        self.service = Service(batched(backend, options), options, store)
        self._batches = self.service.backend is not backend
        guard = Middleware(_Guard, key=options.api_key)
        self._app = Starlette(
            routes=_routes(self.service),
            middleware=[guard],
            exception_handlers={HTTPException: _not_found, CoreLMError: _refused, Refusal: _refused},
            lifespan=self._lifespan,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with continued_trace(scope.get("headers", ())):
            await self._app(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            try:
                await self.service.end()
            finally:
                if self._batches:
                    # The owner of the backend does not know of these threads, and its `close` does not end them.
                    await asyncio.to_thread(self.service.backend.cleanup, flush=False)


class _Guard:
    """Lets requests with the key pass; ``/health`` needs none. Without a key, those to an address and to localhost.

    A page of another site could otherwise let the name of that site stand for this machine, and read the replies.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(Headers(scope=scope), scope["path"]) if scope["type"] == "http" else None
        await (self._app if refused is None else _response(refused))(scope, receive, send)

    def _refusal(self, headers: Headers, path: str) -> Refusal | None:
        if self._key is None:
            if _is_address(headers.get("host", "")):
                return None
            advice = "the server answers requests to localhost or to an IP address only; use one in the URL"
            return Refusal(400, f"without a key, {advice}", code="host", param="host")
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Compared in constant time, so that the time tells nothing about the key.
        same = hmac.compare_digest(key.strip().encode("utf-8", "surrogateescape"), self._key)
        if path == "/health" or (same and scheme.lower() == "bearer"):
            return None
        message = "the key is missing or wrong; send the header 'Authorization: Bearer KEY' with the server's key"
        return Refusal(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _is_address(host: str) -> bool:
    """Return whether the header names no host by another name than localhost.

    >>> _is_address("127.0.0.1:8000"), _is_address("[::1]:8000"), _is_address("localhost"), _is_address("a.example")
    (True, True, True, False)
    """
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _routes(service: Service) -> list[Route]:
    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return JSONResponse(_model(service))

    async def health(request: Request) -> Response:
        healthy = not service.ending and await service.is_healthy()
        return JSONResponse({"status": "ok" if healthy else "unavailable"}, 200 if healthy else 503)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(await asyncio.to_thread(service.metrics), media_type="text/plain; version=0.0.4")

    async def sessions(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(_store(service).ids())})

    async def session(request: Request) -> Response:
        store, name = _store(service), request.path_params["name"]
        try:
            # On a thread, as a session may be long.
            return await asyncio.to_thread(lambda: JSONResponse(store.to_json(name)))
        except MissingKeyError as error:
            raise Refusal(404, str(error), code="session_not_found", param="session") from error

    posts: dict[str, Any] = {
        "/v1/chat/completions": Endpoint(service, ChatAsk.read, answer_chat, "messages"),
        "/v1/completions": Endpoint(service, CompletionAsk.read, answer_completions, "prompt"),
        "/v1/tokens": Endpoint(service, TokenAsk.read, answer_tokens, "prompt_token_ids"),
    }
    return [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/sessions", sessions),
        Route("/sessions/{name}", session),
    ]


def _model(service: Service) -> dict[str, Any]:
    card = {"id": service.name, "object": "model", "created": service.created, "owned_by": "corelm"}
    # As servers of vLLM and SGLang say it. Clients read the longest prompt and answer from it.
    return {**card, "max_model_len": service.backend.capabilities.max_context}


def _store(service: Service) -> SessionStore:
    if service.store is None:
        raise Refusal(404, "this server records no sessions; start it without --no-sessions", code="no_sessions")
    return service.store


def _response(found: Refusal) -> Response:
    return JSONResponse(found.body, found.status, headers=found.headers)


async def _refused(request: Request, error: Exception) -> Response:
    return _response(refusal(error))


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, advice = "not_found", f"the paths are {', '.join(each.path_format for each in request.app.routes)}"
    if error.status_code == 405:
        code, advice = "method_not_allowed", f"send {(error.headers or {})['Allow']}"
    what = f"{request.method} {request.url.path}: {error.detail}; {advice}"
    return _response(Refusal(error.status_code, what, code=code, headers=error.headers))
