"""`HttpClient`: one server behind a base URL, for any number of threads at once. No engine is named here.

Retries live in this file alone. What is repeated: refused and broken connections, the statuses of `_RETRIED`, a body
that is garbage or cut off. What never is: a server that hangs, which is a `BackendTimeoutError`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import email.utils
import ipaddress
import json
import logging
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
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
from corelm.support.http_errors import ABORTED, Aborted, TransientError

try:
    import httpx
except ImportError as error:
    raise BackendNotInstalledError('an engine behind a URL needs httpx; pip install "core[http]"') from error

T = TypeVar("T")


Send = Callable[..., Coroutine[Any, Any, Any]]
Entry = Any | CoreLMError | Aborted

_log = logging.getLogger(__name__)

_RETRIED = frozenset({429, 500, 502, 503, 504})
#: What the request itself is to blame for. Another one may well be served.
_REFUSED = frozenset({400, 404, 413, 422})
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout, httpx.DecodingError)
#: Seconds before each repetition: 0.5, 1, 2, … and up to half a second of chance, lest all rows come back at once.
_BACKOFF = tenacity.wait_exponential(multiplier=0.5, max=15.0) + tenacity.wait_random(0.0, 0.5)
#: The longest wait, in seconds, that a server's Retry-After is granted.
_LONGEST_WAIT = 60.0
#: An idle connection is given up before the server does so (uvicorn: 5 s), or a request would run into its closing.
_IDLE = 3.0
#: Characters of a server's message that an error repeats.
_WORDS = 300


class HttpClient:
    """Requests and answers in JSON over one pool of connections.

    Args:
        base_url: ``http(s)://host:port``, with a path in front of every other if need be.
        api_key: sent as a bearer token. key_variable: the environment variable to take it from otherwise.
        headers: sent with every request.
        connect_timeout: seconds to make a connection. read_timeout: seconds without a byte after which the server is
            said to hang.
        max_in_flight: how many requests of `post_each` are under way at a time, over all threads.
        max_retries: how often a failure that may pass is tried again.
        transport: an httpx transport used instead of the network. sleep: how to wait between two tries.

    The environment's proxies are used, but not to reach this machine itself. Redirects are not followed: they would
    carry the key elsewhere.

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
        url = _server(base_url)
        _positive(connect_timeout=connect_timeout, read_timeout=read_timeout, max_in_flight=max_in_flight)
        if max_retries < 0:
            raise InvalidRequestError(f"max_retries: expected a count from 0, got {max_retries}", field="max_retries")
        key = api_key or (os.environ.get(key_variable) if key_variable else None)
        sent = {**(headers or {}), **({"Authorization": f"Bearer {key}"} if key else {})}
        _are_plain(sent)
        self.base_url = str(url)
        self.read_timeout = read_timeout
        self._secrets = tuple(text for text in (key, *(headers or {}).values()) if text and len(text) >= 8)
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Accept": "application/json", **sent},
            timeout=httpx.Timeout(read_timeout, connect=connect_timeout, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_in_flight, keepalive_expiry=_IDLE),
            follow_redirects=False,
            trust_env=not _is_this_machine(url.host),
            transport=transport,
        )
        self._places = asyncio.Semaphore(max_in_flight)
        self._named: dict[str, set[asyncio.Task[Entry]]] = {}
        self._sent: set[asyncio.Task[Any]] = set()
        self._retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(max_retries + 1),
            wait=lambda state: max(_BACKOFF(state), _asked_to_wait(state)),
            retry=tenacity.retry_if_exception_type(TransientError),
            before_sleep=_tell,
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
        """The decoded JSON at `path`; retried.

        Args:
            timeout: seconds for all tries together; None leaves it to the timeouts of the client.

        Raises:
            InvalidRequestError: the server refuses the request (400, 404, 413, 422), in its own words.
            EngineError: every other failure. BackendTimeoutError: no answer in time. BackendClosedError: as it says.
        """
        return self._run(self._within(timeout, self._retried, "GET", path))

    def post(
        self, path: str, payload: Any, *, timeout: float | None = None, retry: bool = False, expect_json: bool = True
    ) -> Any:
        """The answer to one request: decoded JSON, or its text without `expect_json`.

        Args:
            retry: repeating it is safe. Raises: what `get` does.
        """
        send = self._retried if retry else self._once
        return self._run(self._within(timeout, send, "POST", path, _encoded(payload), expect_json))

    def post_each(
        self, path: str, payloads: Sequence[Any], *, names: Sequence[str], timeout: float | None
    ) -> list[Entry]:
        """One request for every payload, their answers in order. Repeating them must be safe: they are retried.

        Args:
            names: what `abort` knows each of them by; they may repeat.
            timeout: seconds for all of them together, or None.

        Returns:
            For every payload the decoded JSON, or `ABORTED`, or what went wrong with it: an `InvalidRequestError` with
            the server's words if it is refused, a `BackendTimeoutError` if the server hangs, else an `EngineError`.

        Raises:
            BackendTimeoutError: the time is over. What is in flight is cancelled: its connections close, by which the
                server knows that nobody wants the answers.
            BackendClosedError: the client was closed, before or meanwhile.
        """
        if len(payloads) != len(names):
            raise ValueError(f"{len(payloads)} payloads, but {len(names)} names")
        return self._run(self._each(path, [_encoded(payload) for payload in payloads], names, timeout))

    def abort(self, names: Iterable[str], *, grace: float = 0.0) -> None:
        """End the requests of exactly these names; their entries become `ABORTED`.

        Args:
            grace: seconds that those already sent may still take to answer, where the server was told to end them.
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
        """Cancel what is in flight, whose callers get a `BackendClosedError`; close the connections; end the thread.
        Closing twice is fine.
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
            return await self._retrying.copy()(partial(self._in_its_place, path, body))
        except CoreLMError as error:
            return error

    async def _in_its_place(self, path: str, body: bytes) -> Any:
        async with self._places:
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
            raise TransientError(f"{where}: {_named(error)}", usable=False) from error
        except httpx.TimeoutException as error:
            hangs = f"{where}: the server hangs; nothing came for {self.read_timeout:g} s"
            raise BackendTimeoutError(hangs) from error
        except httpx.HTTPError as error:
            raise EngineError(f"{where}: {_named(error)}") from error
        if not response.is_success:
            raise self._failure(where, response)
        if not expect_json:
            return response.text
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError) as error:
            seen = self._words(response) or "an empty body"
            raise TransientError(f"{where}: status {response.status_code}, but no JSON: {seen}") from error

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

    # What a server says when it does not do what it is asked ----------------------------------------------------------

    def _where(self, method: str, path: str) -> str:
        return f"{method} {path} at {self.base_url}"

    def _failure(self, where: str, response: httpx.Response) -> CoreLMError:
        status = response.status_code
        said = f"{where}: status {status}: {self._words(response) or response.reason_phrase}"
        if status in _REFUSED:
            return InvalidRequestError(said)
        if status in _RETRIED:
            return TransientError(said, retry_after=_retry_after(response.headers.get("Retry-After", "")))
        if status in (401, 403):
            return EngineError(f"{said}; is the api_key the server's?", usable=True)
        if response.is_redirect:
            target = self._masked(response.headers.get("Location", ""))[:_WORDS]
            return EngineError(f"{said}; it redirects to {target!r}, which is not followed: give that as base_url")
        return EngineError(said)

    def _words(self, response: httpx.Response) -> str:
        """The beginning of the server's own message, wherever in the body it is."""
        found: Any = response.text
        with suppress(ValueError, RecursionError):
            found = json.loads(found)
        for name in ("error", "message", "detail"):
            if isinstance(found, dict):
                found = found.get(name, found)
        text = found if isinstance(found, str) else json.dumps(found)
        return self._masked(" ".join(text.split()))[:_WORDS]

    def _masked(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _server(base_url: str) -> httpx.URL:
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError) as error:
        raise InvalidRequestError(f"base_url: {error}", field="base_url") from error
    if url.userinfo:
        # Names of models and servers end up in results and logs.
        raise InvalidRequestError("base_url: leave user and password out; give api_key or headers", field="base_url")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise InvalidRequestError(f"base_url: expected http(s)://host:port, got {base_url!r}", field="base_url")
    return url


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise InvalidRequestError(f"{name}: expected a number above 0, got {value}", field=name)


def _are_plain(headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            # The value stays out of the message: it may be the key.
            field = "api_key" if name == "Authorization" else "headers"
            raise InvalidRequestError(f"{field}: the value of {name} has characters no header can carry", field=field)


def _encoded(payload: Any) -> bytes:
    try:
        return json.dumps(payload, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot be written as JSON: {error}") from error


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _retry_after(text: str) -> float:
    """Seconds from now, from a number of them or a date; 0 if it says neither."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (TypeError, ValueError):
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_WAIT) if math.isfinite(seconds) else 0.0


def _failed_with(state: tenacity.RetryCallState) -> TransientError:
    error = state.outcome.exception() if state.outcome else None
    assert isinstance(error, TransientError)
    return error


def _asked_to_wait(state: tenacity.RetryCallState) -> float:
    return _failed_with(state).retry_after


def _tell(state: tenacity.RetryCallState) -> None:
    _log.warning("%s; trying again in %.1f s", _failed_with(state), state.upcoming_sleep)
