"""`HttpClient`: one server behind a base URL, for any number of threads at once. It knows no engine.

All retries are made here. The client sends a request again after a refused or broken connection, a status that may
pass (see `corelm_engine_kit.http_errors`), a body that is garbage or cut off, or the reply to another request. It never
repeats a request to a server that hangs: that is a `BackendTimeoutError`. A single request is made in `http_exchange`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import tenacity

from corelm.errors import BackendClosedError, BackendTimeoutError, CoreLMError, InvalidRequestError, brief
from corelm.spec import Deadline
from corelm.validate import count, positive
from corelm_engine_kit.event_loop import EventLoopThread
from corelm_engine_kit.http_errors import ABORTED, Aborted, PartialReply, ResponseReader, TransientError
from corelm_engine_kit.http_events import Streamed, streamed_reply
from corelm_engine_kit.http_exchange import Exchange, checked_url, request_headers
from corelm_engine_kit.http_json import encoded
from corelm_engine_kit.http_watch import ProgressProbe
from corelm_engine_kit.redaction import Secrets

try:
    import resource
except ImportError:
    # Windows, which has no limit of this kind.
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

_log = logging.getLogger(__name__)

Send = Callable[..., Coroutine[Any, Any, Any]]
#: What became of one request of `HttpClient.post_each`.
Entry = Any | CoreLMError | Aborted | PartialReply
#: Requests of `HttpClient.post_each`.
Rows = frozenset[asyncio.Task[Entry]]
#: Whether a reply (second) answers the request with a payload (first).
IsReplyTo = Callable[[Any, Any], bool]

#: Requests at a time unless a limit is given. The server queues what it cannot work on yet.
MOST = 4096
#: File descriptors that are left to the rest of the program, but at most half of them.
_SPARE = 256
#: Seconds before each retry: 0.5, 1, 2, … plus up to half a second at random, so that rows do not all return at once.
_BACKOFF = tenacity.wait_exponential(multiplier=0.5, max=15.0) + tenacity.wait_random(0.0, 0.5)
#: Seconds that a server which acknowledges an abort gets to end the requests, and seconds until it is reminded.
_ABORT_TIMEOUT, _ABORT_REMINDER = 60.0, 1.0


class HttpClient:
    """Sends requests and reads answers in JSON.

    Each request has its own connection. The environment's proxies are used, except to reach this machine itself.
    Redirects are not followed, since they would carry the key to another server. Certificates are checked against those
    in ``SSL_CERT_FILE`` or ``SSL_CERT_DIR`` if one of these environment variables is set, else against the system's.

    Args:
        base_url: ``http(s)://host:port``, optionally with a path, which then precedes the path of every request.
        api_key, headers, connect_timeout, max_in_flight, max_retries: see `HttpOptions`.
        key_variable: the environment variable that holds the key if `api_key` is not given.
        read_timeout: seconds without a byte, or for a POST without progress, after which the server counts as hanging.
        progress_probe: what the server is asked whether it makes progress; None if only bytes show it.
        page_timeout: seconds without a byte of a page (GET) of a server with a `progress_probe`, unless `read_timeout`
            is more. A server that works on many rows may take a while for its pages.
        max_reply_bytes: the longest reply that is accepted.
        ended: says that a server which was launched here has ended; "" while it runs. Nothing is sent to one that has
            ended: another process may listen at its port now.
        transport: an httpx2 transport to use instead of the network.
        sleep: waits between two tries.

    Attributes:
        base_url: where the server is.
        secrets: masks the key and the headers in messages that repeat a part of a reply. Replies are not masked.

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
        progress_probe: ProgressProbe | None = None,
        page_timeout: float = 30.0,
        max_in_flight: int | None = None,
        max_retries: int = 5,
        max_reply_bytes: int = 2**27,
        ended: Callable[[], str] | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        url = checked_url(base_url)
        connect_timeout = positive("connect_timeout", connect_timeout)
        read_timeout = positive("read_timeout", read_timeout)
        slots = ConnectionSlots(max_in_flight, str(url))
        max_retries = count("max_retries", max_retries)
        key = os.environ.get(key_variable) if key_variable and api_key in (None, "") else api_key
        sent = request_headers(headers, key, key_variable)
        self.base_url = str(url)
        self.secrets = Secrets([key], headers)
        reader = ResponseReader(self.secrets, key_variable)
        self._exchange = Exchange(
            url,
            sent,
            reader,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            page_timeout=positive("page_timeout", page_timeout),
            progress_probe=progress_probe,
            max_reply_bytes=count("max_reply_bytes", max_reply_bytes, 1),
            ended=ended,
            transport=transport,
        )
        self._slots = slots
        self._named: dict[str, set[asyncio.Task[Entry]]] = {}
        self._sent: set[asyncio.Task[Any]] = set()
        self._to_end: set[asyncio.Task[Entry]] = set()
        self._retrying = retrying(max_retries, self.secrets, sleep)
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
        send = self._retried if retry else self._exchange.send
        return self._run(self._within(timeout, send, "POST", path, _encoded(payload), expect_json))

    def post_each(
        self,
        path: str,
        payloads: Sequence[Any],
        *,
        names: Sequence[str],
        is_reply_to: IsReplyTo,
        timeout: float | None,
        streamed: Streamed | None = None,
    ) -> list[Entry]:
        """Send one request for every payload and return their answers, in order.

        The requests are retried, so repeating them must be safe. A request is not sent again after an event of its
        reply.

        Args:
            names: the name that `abort` knows each request by; several may share one.
            is_reply_to: ``is_reply_to(payload, reply)`` returns whether the reply names the payload's request. Another
                request's reply is dropped, and the request is sent again.
            timeout: seconds for all of them together, or None.
            streamed: what to do with the events of replies that are streamed; None for replies in one piece.

        Returns:
            For every payload the decoded JSON, or a `PartialReply` with it if `abort` named the request, or `ABORTED`
            if it was aborted without a reply, or the error: an `InvalidRequestError` with the server's words if the
            server refused it, a `BackendTimeoutError` if the server hangs, else an `EngineError`.

        Raises:
            BackendTimeoutError: the time is over. The requests in flight are cancelled: their connections close, which
                tells the server that the answers are no longer wanted.
            BackendClosedError: the client was closed, before the call or during it.
        """
        if len(payloads) != len(names):
            raise ValueError(f"{len(payloads)} payloads, but {len(names)} names")
        encoded = [_encoded(payload) for payload in payloads]
        return self._run(self._each(path, payloads, encoded, names, is_reply_to, timeout, streamed))

    def abort(self, names: Iterable[str], *, tell: Callable[[], object] | None = None) -> None:
        """End the requests that have exactly these names now. Return when they have ended.

        Requests that were not sent yet are cancelled, and so are all others if `tell` is None or fails: their entries
        become `ABORTED`, and their connections close. Otherwise the server ends them, and the entry of each is a
        `PartialReply`. The server has a minute for that.

        Args:
            tell: asks the server to end the requests. It is called again every second until they have ended, since the
                server may not have read a request yet when it is told to end it.
        """
        rows = self._run(self._rows(frozenset(names)))
        with suppress(CoreLMError, TimeoutError):
            deadline = Deadline(_ABORT_TIMEOUT)
            while tell is not None:
                if not self._run(self._cancel(rows, keep_sent=True)):
                    return
                tell()
                self._run(asyncio.wait(rows, timeout=_ABORT_REMINDER))
                deadline.check()
        self._run(self._cancel(rows))

    def answers(self, path: str, timeout: float = 5.0) -> bool:
        """Whether a GET of `path` succeeds within `timeout` seconds, at the first try. Never raises."""
        try:
            self._run(self._within(timeout, self._exchange.send, "GET", path, b"", False))
        except Exception:
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
            # In a forked child the loop does not run, and the connections are the parent's.
            with suppress(RuntimeError):
                self._loop.cancel()
                self._loop.run(self._exchange.aclose())
            self._loop.stop()

    # On the loop -----------------------------------------------------------------------------------------------------

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return self._loop.run(coroutine)
        except TransientError as error:
            raise error.final() from error.__cause__
        except (concurrent.futures.CancelledError, RuntimeError) as error:
            if self._closed and not isinstance(error, CoreLMError):
                raise BackendClosedError(f"the client of {self.base_url} is closed") from error
            raise

    async def _each(
        self,
        path: str,
        payloads: Sequence[Any],
        bodies: Sequence[bytes],
        names: Sequence[str],
        is_reply_to: IsReplyTo,
        timeout: float | None,
        streamed: Streamed | None,
    ) -> list[Entry]:
        rows = [
            asyncio.create_task(self._row(path, body, partial(is_reply_to, payload), number, streamed))
            for number, (payload, body) in enumerate(zip(payloads, bodies, strict=True))
        ]
        for name, row in zip(names, rows, strict=True):
            self._named.setdefault(name, set()).add(row)
        try:
            late = (await asyncio.wait(rows, timeout=timeout))[1] if rows else ()
            if late:
                missing = f"{len(late)} of {len(rows)} requests were not answered within {timeout:g} s"
                raise BackendTimeoutError(f"{self._exchange.where('POST', path)}: {missing}")
            return [self._entry(row) for row in rows]
        finally:
            for name, row in zip(names, rows, strict=True):
                row.cancel()
                self._named[name].discard(row)
                if not self._named[name]:
                    del self._named[name]
            await asyncio.gather(*rows, return_exceptions=True)
            # Not earlier: `abort` may add a request until it is done.
            self._to_end.difference_update(rows)

    def _entry(self, row: asyncio.Task[Entry]) -> Entry:
        if row.cancelled():
            return ABORTED
        found = row.result()
        return PartialReply(found) if row in self._to_end and not isinstance(found, CoreLMError) else found

    async def _row(
        self,
        path: str,
        body: bytes,
        is_reply: Callable[[Any], bool],
        number: int,
        streamed: Streamed | None,
    ) -> Entry:
        send: Send = partial(self._exchange.send, "POST", path, body)
        if streamed is not None:
            check = partial(self._check_reply, path, is_reply)
            send = partial(streamed_reply, partial(self._exchange.events, path, body), check, number, streamed)
        try:
            return await self._retrying.copy()(partial(self._once_admitted, path, send, is_reply))
        except CoreLMError as error:
            return error

    async def _once_admitted(self, path: str, send: Send, is_reply: Callable[[Any], bool]) -> Any:
        async with self._slots:
            task = asyncio.current_task()
            assert task is not None
            self._sent.add(task)
            try:
                reply = await send()
            finally:
                self._sent.discard(task)
        self._check_reply(path, is_reply, reply)
        return reply

    def _check_reply(self, path: str, is_reply: Callable[[Any], bool], reply: Any) -> None:
        if not is_reply(reply):
            raise TransientError(
                f"{self._exchange.where('POST', path)}: the reply does not name this request as the one that it "
                "answers, so it was dropped; the server or a proxy mixes up its answers, or gives requests other ids",
                usable=True,
            )

    async def _retried(self, method: str, path: str, body: bytes = b"", expect_json: bool = True) -> Any:
        return await self._retrying.copy()(partial(self._exchange.send, method, path, body, expect_json))

    async def _within(self, timeout: float | None, send: Send, method: str, path: str, *rest: Any) -> Any:
        try:
            return await asyncio.wait_for(send(method, path, *rest), timeout)
        except BackendTimeoutError:
            raise
        except TimeoutError:
            raise BackendTimeoutError(f"{self._exchange.where(method, path)}: no answer within {timeout:g} s") from None

    async def _rows(self, names: frozenset[str]) -> Rows:
        return frozenset(row for name in names for row in self._named.get(name, ()))

    async def _cancel(self, rows: Rows, keep_sent: bool = False) -> bool:
        """Cancel these requests. Return whether any were kept because they have been sent."""
        found = {row for row in rows if not row.done()}
        self._to_end |= found
        kept = found & self._sent if keep_sent else set()
        for row in found - kept:
            row.cancel()
        return bool(kept)


def _encoded(payload: Any) -> bytes:
    try:
        return encoded(payload)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot be written as JSON: {error}") from error


# How many, and how often ----------------------------------------------------------------------------------------------


class ConnectionSlots:
    """Connection slots of a server: ``async with slots:`` waits for one and holds it.

    Args:
        limit: the number of slots; None for `MOST`, or fewer if this process may not open as many connections.
        where: the URL of the server, for the log.

    Raises:
        InvalidRequestError: `limit` is not a positive integer; `field` is ``max_in_flight``.
    """

    def __init__(self, limit: int | None, where: str) -> None:
        self.limit = most_slots() if limit is None else count("max_in_flight", limit, 1)
        self._free = asyncio.Semaphore(self.limit)
        self._told = False
        self._where, self._level, self._advice = where, logging.INFO, "give max_in_flight= a larger number to send more"
        if limit is None and self.limit < MOST:
            # A limit that no one has chosen is told even if the program has not set up logging.
            self._level, self._advice = logging.WARNING, "raise this process's limit of open files (ulimit -n)"

    async def __aenter__(self) -> None:
        if self._free.locked() and not self._told:
            self._told = True
            told = "%s: requests wait in this process while %d are at the server; %s"
            _log.log(self._level, told, self._where, self.limit, self._advice)
        await self._free.acquire()

    async def __aexit__(self, *exc: object) -> None:
        self._free.release()


def most_slots() -> int:
    """Return how many requests may be under way where no limit is given.

    Each takes a connection, which is a file descriptor of this process.
    """
    if resource is None:
        return MOST
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MOST
    return max(1, min(MOST, descriptors - min(_SPARE, descriptors // 2)))


def retrying(max_retries: int, secrets: Secrets, sleep: Callable[[float], Awaitable[None]]) -> tenacity.AsyncRetrying:
    """Return what sends a request again after each `TransientError`. The last one is raised.

    Args:
        max_retries: how often.
        secrets: what the log must not repeat.
        sleep: waits between two tries.
    """
    return tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(max_retries + 1),
        wait=lambda state: max(_BACKOFF(state), _failed_with(state).retry_after),
        retry=tenacity.retry_if_exception_type(TransientError),
        before_sleep=partial(_log_retry, secrets),
        sleep=sleep,
        reraise=True,
    )


def _failed_with(state: tenacity.RetryCallState) -> TransientError:
    error = state.outcome.exception() if state.outcome else None
    assert isinstance(error, TransientError)
    return error


def _log_retry(secrets: Secrets, state: tenacity.RetryCallState) -> None:
    failure = brief(secrets.masked(str(_failed_with(state))))
    _log.warning("%s; trying again in %.1f s", failure, state.upcoming_sleep)
