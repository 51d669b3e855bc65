"""`HttpClient`: one server behind a base URL, for any number of threads at once. It knows no engine.

All retries are made here. The client sends a request again after a refused or broken connection, a status that may pass
(see `corelm.support.http_errors`), or a body that is garbage or cut off. It never repeats a request to a server that
hangs: that is a `BackendTimeoutError`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ipaddress
import json
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import tenacity

from corelm.errors import (
    BackendClosedError,
    BackendNotInstalledError,
    BackendTimeoutError,
    CoreLMError,
    EngineError,
    InvalidRequestError,
)
from corelm.support.event_loop import EventLoopThread
from corelm.support.http_errors import ABORTED, Aborted, ResponseReader, TransientError
from corelm.validate import count, invalid, positive

try:
    import httpx
except ImportError as error:
    raise BackendNotInstalledError('an engine behind a URL needs httpx: pip install "core[http]"') from error

T = TypeVar("T")


Send = Callable[..., Coroutine[Any, Any, Any]]
Entry = Any | CoreLMError | Aborted

_log = logging.getLogger(__name__)

_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout, httpx.DecodingError)
#: Seconds before each retry: 0.5, 1, 2, … plus up to half a second at random, so that rows do not all return at once.
_BACKOFF = tenacity.wait_exponential(multiplier=0.5, max=15.0) + tenacity.wait_random(0.0, 0.5)
#: Seconds after which the client closes an idle connection. The server must not be first (uvicorn: 5 s), or a request
#: could be sent just as it closes.
_IDLE = 3.0


class HttpClient:
    """Sends requests and reads answers in JSON, over one pool of connections.

    The environment's proxies are used, except to reach this machine itself. Redirects are not followed, since they
    would carry the key to another server.

    Args:
        base_url: ``http(s)://host:port``, optionally with a path, which then precedes the path of every request.
        api_key: sent as a bearer token.
        key_variable: the environment variable that holds the key if `api_key` is not given.
        headers: sent with every request.
        connect_timeout: seconds to make a connection.
        read_timeout: seconds without a byte, after which the server counts as hanging.
        max_in_flight: how many requests of `post_each` are sent at a time, over all threads.
        max_retries: how often a request is sent again after a failure that may pass.
        transport: an httpx transport to use instead of the network.
        sleep: waits between two tries.

    Raises:
        InvalidRequestError: an argument that cannot be used; `field` names it.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        key_variable: str | None = None,
        headers: Mapping[str, str] | None = None,
        connect_timeout: float = 10.0,
        read_timeout: float = 600.0,
        max_in_flight: int = 128,
        max_retries: int = 5,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        url = _checked_url(base_url)
        connect_timeout = positive("connect_timeout", connect_timeout)
        read_timeout = positive("read_timeout", read_timeout)
        max_in_flight = count("max_in_flight", max_in_flight, 1)
        max_retries = count("max_retries", max_retries)
        key = api_key or (os.environ.get(key_variable) if key_variable else None)
        sent = {**(headers or {}), **({"Authorization": f"Bearer {key}"} if key else {})}
        _check_headers(sent)
        self.base_url = str(url)
        self.read_timeout = read_timeout
        self._reader = ResponseReader([text for text in (key, *(headers or {}).values()) if text and len(text) >= 8])
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Accept": "application/json", **sent},
            timeout=httpx.Timeout(read_timeout, connect=connect_timeout, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_in_flight, keepalive_expiry=_IDLE),
            follow_redirects=False,
            trust_env=not _is_this_machine(url.host),
            transport=transport,
        )
        self._slots = asyncio.Semaphore(max_in_flight)
        self._named: dict[str, set[asyncio.Task[Entry]]] = {}
        self._sent: set[asyncio.Task[Any]] = set()
        self._retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(max_retries + 1),
            wait=lambda state: max(_BACKOFF(state), _asked_to_wait(state)),
            retry=tenacity.retry_if_exception_type(TransientError),
            before_sleep=_log_retry,
            sleep=sleep,
            reraise=True,
        )
        self._closed = False
        self._closing = threading.Lock()
        self._loop = EventLoopThread(f"corelm-http {url.host}")

    def __repr__(self) -> str:
        return f"HttpClient({self.base_url!r}{', closed' if self._closed else ''})"

    # Requests --------------------------------------------------------------------------------------------------------

    def get(self, path: str, *, timeout: float | None = None) -> Any:
        """Return the decoded JSON at `path`. The request is retried.

        Args:
            timeout: seconds for all tries together; None sets no limit in addition to the client's own timeouts.

        Raises:
            InvalidRequestError: the server refused the request (400, 404, 413, 422); the message repeats its words.
            BackendTimeoutError: the server did not answer in time.
            BackendClosedError: the client was closed, before the call or during it.
            EngineError: every other failure.
        """
        return self._run(self._within(timeout, self._retried, "GET", path))

    def post(
        self, path: str, payload: Any, *, timeout: float | None = None, retry: bool = False, expect_json: bool = True
    ) -> Any:
        """Return the answer to one request.

        Args:
            timeout: seconds for all tries together, or None.
            retry: whether the request may be sent again after a failure. Only if repeating it is safe.
            expect_json: whether to return decoded JSON or, if False, the text of the body.

        Raises:
            CoreLMError: the errors that `get` raises.
        """
        send = self._retried if retry else self._once
        return self._run(self._within(timeout, send, "POST", path, _encoded(payload), expect_json))

    def post_each(
        self, path: str, payloads: Sequence[Any], *, names: Sequence[str], timeout: float | None
    ) -> list[Entry]:
        """Send one request for every payload and return their answers, in order.

        The requests are retried, so repeating them must be safe.

        Args:
            names: the name that `abort` knows each request by; several may share one.
            timeout: seconds for all of them together, or None.

        Returns:
            For every payload the decoded JSON, or `ABORTED`, or the error: an `InvalidRequestError` with the server's
            words if the server refused it, a `BackendTimeoutError` if the server hangs, else an `EngineError`.

        Raises:
            BackendTimeoutError: the time is over. The requests in flight are cancelled: their connections close, which
                tells the server that the answers are no longer wanted.
            BackendClosedError: the client was closed, before the call or during it.
        """
        if len(payloads) != len(names):
            raise ValueError(f"{len(payloads)} payloads, but {len(names)} names")
        return self._run(self._each(path, [_encoded(payload) for payload in payloads], names, timeout))

    def abort(self, names: Iterable[str], *, grace: float = 0.0) -> None:
        """End the requests of exactly these names; their entries become `ABORTED`.

        Args:
            grace: seconds that requests already sent may still take to answer, for callers that told the server to end
                them.
        """
        self._run(self._abort(frozenset(names), grace))

    def answers(self, path: str, timeout: float = 5.0) -> bool:
        """Whether a GET of `path` succeeds within `timeout` seconds, at the first try. Never raises."""
        try:
            self._run(self._within(timeout, self._once, "GET", path, b"", False))
        except CoreLMError:
            return False
        return True

    def close(self) -> None:
        """Cancel the requests in flight, close the connections and end the thread. Closing twice is fine.

        Callers that wait for an answer get a `BackendClosedError`.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._loop.cancel()
            self._loop.run(self._client.aclose())
            self._loop.stop()

    # On the loop -----------------------------------------------------------------------------------------------------

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return self._loop.run(coroutine)
        except (concurrent.futures.CancelledError, RuntimeError) as error:
            if self._closed and not isinstance(error, CoreLMError):
                raise BackendClosedError(f"the client of {self.base_url} is closed") from error
            raise

    async def _each(
        self, path: str, bodies: Sequence[bytes], names: Sequence[str], timeout: float | None
    ) -> list[Entry]:
        rows = [asyncio.create_task(self._row(path, body)) for body in bodies]
        for name, row in zip(names, rows, strict=True):
            self._named.setdefault(name, set()).add(row)
        try:
            late = (await asyncio.wait(rows, timeout=timeout))[1] if rows else ()
            if late:
                missing = f"{len(late)} of {len(rows)} requests were not answered within {timeout:g} s"
                raise BackendTimeoutError(f"{self._where('POST', path)}: {missing}")
            return [ABORTED if row.cancelled() else row.result() for row in rows]
        finally:
            for name, row in zip(names, rows, strict=True):
                row.cancel()
                self._named[name].discard(row)
                if not self._named[name]:
                    del self._named[name]
            await asyncio.gather(*rows, return_exceptions=True)

    async def _row(self, path: str, body: bytes) -> Entry:
        try:
            return await self._retrying.copy()(partial(self._once_admitted, path, body))
        except CoreLMError as error:
            return error

    async def _once_admitted(self, path: str, body: bytes) -> Any:
        async with self._slots:
            task = asyncio.current_task()
            assert task is not None
            self._sent.add(task)
            try:
                return await self._once("POST", path, body)
            finally:
                self._sent.discard(task)

    async def _retried(self, method: str, path: str, body: bytes = b"", expect_json: bool = True) -> Any:
        return await self._retrying.copy()(partial(self._once, method, path, body, expect_json))

    async def _once(self, method: str, path: str, body: bytes = b"", expect_json: bool = True) -> Any:
        where = self._where(method, path)
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            response = await self._client.request(method, path, content=body or None, headers=headers)
        except _BROKEN as error:
            raise TransientError(f"{where}: {_described(error)}", usable=False) from error
        except httpx.TimeoutException as error:
            hangs = f"{where}: the server hangs; it sent nothing for {self.read_timeout:g} s"
            raise BackendTimeoutError(hangs) from error
        except httpx.HTTPError as error:
            raise EngineError(f"{where}: {_described(error)}") from error
        if not response.is_success:
            raise self._reader.error(where, response)
        if not expect_json:
            return response.text
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError) as error:
            seen = self._reader.message(response) or "an empty body"
            raise TransientError(f"{where}: status {response.status_code}, but not JSON: {seen}") from error

    async def _within(self, timeout: float | None, send: Send, method: str, path: str, *rest: Any) -> Any:
        try:
            return await asyncio.wait_for(send(method, path, *rest), timeout)
        except BackendTimeoutError:
            raise
        except asyncio.TimeoutError:
            raise BackendTimeoutError(f"{self._where(method, path)}: no answer within {timeout:g} s") from None

    async def _abort(self, names: frozenset[str], grace: float) -> None:
        found = {row for name in names for row in self._named.get(name, ())}
        sent = found & self._sent if grace > 0 else set()
        for row in found - sent:
            row.cancel()
        late = (await asyncio.wait(sent, timeout=grace))[1] if sent else ()
        for row in late:
            row.cancel()

    def _where(self, method: str, path: str) -> str:
        return f"{method} {path} at {self.base_url}"


def _checked_url(base_url: str) -> httpx.URL:
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError) as error:
        raise invalid("base_url", str(error)) from error
    if url.userinfo:
        # The URL appears in results and logs.
        raise invalid("base_url", "it must not contain a user and password; pass api_key= or headers=")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise invalid("base_url", f"expected http(s)://host:port, got {base_url!r}")
    return url


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _check_headers(headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            # The message must not contain the value: it may be the key.
            field = "api_key" if name == "Authorization" else "headers"
            raise invalid(field, f"the value of {name} has characters that a header cannot carry")


def _encoded(payload: Any) -> bytes:
    try:
        return json.dumps(payload, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot be written as JSON: {error}") from error


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _failed_with(state: tenacity.RetryCallState) -> TransientError:
    error = state.outcome.exception() if state.outcome else None
    assert isinstance(error, TransientError)
    return error


def _asked_to_wait(state: tenacity.RetryCallState) -> float:
    return _failed_with(state).retry_after


def _log_retry(state: tenacity.RetryCallState) -> None:
    _log.warning("%s; trying again in %.1f s", _failed_with(state), state.upcoming_sleep)
