"""`Exchange`: one HTTP request and its response at a time. Whatever goes wrong becomes one typed error.

It owns what holds for every request, to every path of every server:

- A connection carries one request and is then closed. HTTP/1.1 has no number that ties a response to its request: on a
  connection that is used again, one response too many would be taken for the answer to the next request.
- A body is read piece by piece and refused beyond a limit. It is not decompressed, since a small one could become huge.
- No message repeats a key or a header that the caller passed. A reply is data, and is returned as it is.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from corelm.errors import BackendNotInstalledError, BackendTimeoutError, CoreLMError, EngineError, how_to_install
from corelm.validate import invalid
from corelm_engine_kit.http_errors import ResponseReader, TransientError
from corelm_engine_kit.http_events import event_data
from corelm_engine_kit.http_watch import ProgressProbe, ServerWatch, keep_alive

try:
    import httpx2

    from corelm_engine_kit.http_json import decoded
except ImportError as error:
    raise BackendNotInstalledError(
        f"an engine behind a URL needs httpx2 and orjson: {how_to_install('httpx2', 'orjson')}"
    ) from error

_BROKEN = (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ConnectTimeout)
#: Parts of OpenSSL's messages for a connection that fails in the same way every time, each with what to do about it.
_TLS_FAULTS = {
    "CERTIFICATE_VERIFY_FAILED": "if the server has a certificate of your own authority, set the environment variable "
    "SSL_CERT_FILE to a file with that authority's certificate",
    "WRONG_VERSION_NUMBER": "the server does not speak TLS on this port; give an http:// address",
}
#: How many bytes of the body of an error are read.
_ERROR_BYTES = 4096


class Exchange:
    """Sends requests to one server. `HttpClient` explains the arguments that it has as well."""

    def __init__(
        self,
        url: httpx2.URL,
        headers: Mapping[str, str],
        reader: ResponseReader,
        *,
        connect_timeout: float,
        read_timeout: float,
        page_timeout: float,
        progress_probe: ProgressProbe | None,
        max_reply_bytes: int,
        ended: Callable[[], str] | None,
        transport: httpx2.AsyncBaseTransport | None,
    ) -> None:
        self._url = str(url)
        self._secrets = reader.secrets
        self._reader = reader
        self._read_timeout = read_timeout
        self._page_timeout = read_timeout if progress_probe is None else max(read_timeout, page_timeout)
        self._watch = ServerWatch(progress_probe, read_timeout, self._page) if progress_probe is not None else None
        self._max_reply_bytes = max_reply_bytes
        self._reached, self._ended = False, ended
        sent = httpx2.Headers({"Accept": "application/json", **headers})
        # With "close" the server closes the connection first, so that this machine does not run out of ports.
        sent.update({"Accept-Encoding": "identity", "Connection": "close"})
        own = is_this_machine(url.host)
        with _environment_named():
            self._client = httpx2.AsyncClient(
                base_url=url,
                headers=sent,
                timeout=httpx2.Timeout(read_timeout, connect=connect_timeout, pool=None),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
                follow_redirects=False,
                # Without TLS and without a proxy no certificate is checked.
                verify=False if own and url.scheme == "http" else httpx2.create_ssl_context(),
                trust_env=not own,
                transport=transport,
            )

    def where(self, method: str, path: str) -> str:
        """Return how messages name a request."""
        return f"{method} {path} at {self._url}"

    async def send(self, method: str, path: str, body: bytes = b"", expect_json: bool = True) -> Any:
        """Send one request and return the reply: decoded JSON, or text if `expect_json` is False.

        Raises:
            InvalidRequestError: the server refused the request.
            TransientError: the failure may pass.
            BackendTimeoutError: the server hangs.
            EngineError: every other failure.
        """
        where = self.where(method, path)
        reply = self._guarded(where, self._reply(where, method, path, body, decoded if expect_json else _text))
        if self._watch is not None and method == "POST":
            return await self._watch.over(where, path, reply)
        return await reply

    async def _guarded(self, where: str, reply: Awaitable[Any]) -> Any:
        """Return what is awaited. Its errors become typed errors without secrets."""
        cause: Exception | None = None
        try:
            return await reply
        except CoreLMError as error:
            typed = error
        except Exception as error:
            typed = self._typed(where, error)
            # A traceback prints the cause, too.
            cause = None if self._secrets.masked(repr(error)) != repr(error) else error
        raise self._secrets.masked_error(typed) from cause

    async def events(self, path: str, body: bytes, take: Callable[[Any], object]) -> None:
        """Post one request whose reply is a stream of events, and pass on each event, decoded from JSON.

        Raises:
            CoreLMError: the errors of `send`, or of `take`; a `TransientError` if the stream breaks off.
        """
        where = self.where("POST", path)
        events = self._guarded(where, self._events(where, path, body, take))
        await (self._watch.over(where, path, events) if self._watch else events)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _page(self, path: str) -> str:
        return str(await self.send("GET", path, expect_json=False))

    def _stream(self, method: str, path: str, content: bytes | None, headers: Mapping[str, str]) -> Any:
        """Send a request and return its response, an async context manager."""
        if self._ended is not None and (why := self._ended()):
            raise EngineError(f"{self.where(method, path)}: {why}", usable=False)
        # The watch knows better how long to wait for a POST.
        read = self._page_timeout if method == "GET" else self._read_timeout if self._watch is None else None
        seconds = {**self._client.timeout.as_dict(), "read": read}
        timeout, extensions = httpx2.Timeout(**seconds), {"trace": keep_alive}
        return self._client.stream(
            method, path, content=content, headers=headers, timeout=timeout, extensions=extensions
        )

    async def _pieces(self, response: httpx2.Response) -> AsyncIterator[bytes]:
        async for piece in response.aiter_raw():
            # The watch itself sends GET, and judges the pages by what they say.
            if self._watch is not None and response.request.method == "POST":
                self._watch.note()
            yield piece

    async def _reply(self, where: str, method: str, path: str, body: bytes, decode: Callable[[bytearray], Any]) -> Any:
        headers = {"Content-Type": "application/json"} if body else {}
        async with self._stream(method, path, body or None, headers) as response:
            self._reached = True
            content = await self._body(where, response)
        # A charset in Content-Type is not looked at: JSON is UTF-8, and the name of a codec could be anything.
        if not response.is_success:
            body_text = self._beginning(content)
            raise self._reader.error(where, response.status_code, response.reason_phrase, response.headers, body_text)
        try:
            return decode(content)
        except (ValueError, RecursionError):
            seen = self._reader.message(self._beginning(content)) or "an empty body"
            raise TransientError(f"{where}: status {response.status_code}, but not JSON: {seen}") from None

    async def _events(self, where: str, path: str, body: bytes, take: Callable[[Any], object]) -> None:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        async with self._stream("POST", path, body, headers) as response:
            self._reached = True
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if not response.is_success or kind != "text/event-stream":
                # Also refuses a compressed reply.
                seen = self._beginning(await self._body(where, response))
                if not response.is_success:
                    phrase = response.reason_phrase
                    raise self._reader.error(where, response.status_code, phrase, response.headers, seen)
                raise EngineError(f"{where}: not a stream of events, but {kind!r}: {self._reader.message(seen)}")
            if response.headers.get("Content-Encoding", "").strip().lower() not in ("", "identity"):
                await self._body(where, response)
            try:
                async for data in event_data(self._pieces(response), self._max_reply_bytes):
                    take(decoded(data))
            except CoreLMError:
                raise
            except (ValueError, RecursionError) as error:
                raise EngineError(f"{where}: {error}", usable=True) from None
            except EOFError as error:
                raise TransientError(f"{where}: {error}") from None

    async def _body(self, where: str, response: httpx2.Response) -> bytearray:
        """Return the body, or of an error's body the beginning."""
        encoding = response.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            if not response.is_success:
                return bytearray()
            raise EngineError(
                f"{where}: the reply is compressed ({encoding[:20]!r}), although the request says Accept-Encoding: "
                "identity; switch compression off in the server or in the proxy before it",
                usable=True,
            )
        limit = self._max_reply_bytes if response.is_success else _ERROR_BYTES
        content = bytearray()
        async for piece in self._pieces(response):
            content += piece[: limit + 1 - len(content)]
            if len(content) > limit:
                break
        if len(content) > limit and response.is_success:
            raise EngineError(f"{where}: the reply is longer than {limit} bytes", usable=True)
        return content

    def _beginning(self, content: bytearray) -> str:
        text = content[:_ERROR_BYTES].decode(errors="replace")
        if len(content) <= _ERROR_BYTES:
            return text
        # The cut may go through a key that the server echoes. Half a key is not masked, so the end is dropped, but only
        # after masking: otherwise it would be this cut that goes through a key.
        text = self._secrets.masked(text)
        return text[: max(0, len(text) - self._secrets.longest)]

    def _typed(self, where: str, error: Exception) -> CoreLMError:
        told = f"{where}: {type(error).__name__}" + (f": {error}" if str(error) else "")
        for fault, advice in _TLS_FAULTS.items():
            if fault in str(error):
                return EngineError(f"{told}; {advice}", usable=False)
        if isinstance(error, _BROKEN) and self._ended is not None and (why := self._ended()):
            return EngineError(f"{where}: {why}", usable=False)
        if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
            # A server that has answered before may be restarting. Another one is not there, and waiting does not help.
            kind = TransientError if self._reached else EngineError
            return kind(f"{told}; is the server running, and is this its address?", usable=False)
        if isinstance(error, _BROKEN):
            return TransientError(told, usable=False)
        if isinstance(error, httpx2.TimeoutException):
            seconds = self._page_timeout if where.startswith("GET ") else self._read_timeout
            return BackendTimeoutError(f"{where}: the server hangs; nothing was sent or received for {seconds:g} s")
        return EngineError(told)


def _text(content: bytearray) -> str:
    return content.decode(errors="replace")


@contextmanager
def _environment_named() -> Iterator[None]:
    """Name the environment variable at fault where httpx2 says only what it found there.

    Raises:
        InvalidRequestError: certificates or proxies cannot be read; `field` is the variable.
    """
    try:
        yield
    except OSError as error:
        name = next((name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name)), None)
        if name is None:
            raise
        advice = "let it name certificates in PEM format, or unset it"
        raise invalid(name, f"{os.environ[name]!r} has no certificates that can be read ({error}); {advice}") from error
    except httpx2.InvalidURL as error:
        name = next(name for name in os.environ if name.lower() in ("all_proxy", "http_proxy", "https_proxy"))
        raise invalid(name, f"{os.environ[name]!r} cannot be read: {error}") from error


def is_this_machine(host: str) -> bool:
    """Return whether `host` names this machine, which no proxy can reach for us."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        own = {"localhost", socket.gethostname().lower()}
        return host.lower() in own or host.lower().endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def checked_url(base_url: str) -> httpx2.URL:
    """Return the URL of a server.

    Raises:
        InvalidRequestError: it cannot be used; `field` is ``base_url``.
    """
    try:
        url = httpx2.URL(base_url)
    except (httpx2.InvalidURL, TypeError, ValueError) as error:
        raise invalid("base_url", str(error)) from error
    if url.userinfo:
        # The URL appears in results and logs.
        raise invalid("base_url", "it must not contain a user and password; pass api_key= or headers=")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise invalid("base_url", f"expected http(s)://host:port, got {base_url!r}")
    return url


def request_headers(headers: Mapping[str, str] | None, key: Any, variable: str | None) -> dict[str, str]:
    """Return the headers that are sent with every request, the key among them. No message repeats a value.

    Raises:
        InvalidRequestError: a value cannot be sent; `field` is ``headers`` or ``api_key``.
    """
    if key is not None and not isinstance(key, str):
        # A command line reads `--option api_key=5` as a number.
        instead = f", or set the environment variable {variable} and leave it out" if variable else ""
        raise invalid(
            "api_key", f"expected a text, got a value of type {type(key).__name__}; put it in quotes{instead}"
        )
    sent = {**(headers or {}), **({"Authorization": f"Bearer {key}"} if key else {})}
    for name, value in sent.items():
        if not isinstance(value, str):
            raise invalid("headers", f"the value of {name} is a {type(value).__name__}, expected a str")
        if not (value.isascii() and value.isprintable()):
            field = "api_key" if name == "Authorization" else "headers"
            raise invalid(field, f"the value of {name} has characters that a header cannot carry")
    return sent
