"""One HTTP request against a real server that is hostile or broken: the error is typed, bounded, and shows no key."""

from __future__ import annotations

import gzip
import itertools
import shutil
import ssl
import subprocess
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from corelm.errors import BackendTimeoutError, CoreLMError, EngineError, InvalidRequestError
from corelm_engine_kit import AccessError, Secrets
from corelm_engine_kit.http_exchange import is_this_machine
from helpers.http_clients import KEY, Connect, Waits, echo, is_echo
from helpers.http_server import PATIENCE, Reply, Request, drip, json_reply, raw
from helpers.refusals import refused

# One connection for each request --------------------------------------------------------------------------------------


def with_surplus(reply: Reply, surplus: bytes) -> Reply:
    """Send a second response in one segment with `reply`."""

    def write(handler: Any) -> None:
        sent: list[bytes] = []
        send, handler.wfile.write = handler.wfile.write, sent.append
        reply(handler)
        handler.wfile.write = send
        send(b"".join(sent) + b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(surplus), surplus))

    return write


def test_a_surplus_response_is_never_the_answer_to_the_next_request(connect: Connect, serve: Any) -> None:
    server = serve(lambda request: with_surplus(echo(request), b'{"you said": "surplus"}'))
    client = connect(server)
    for number in range(5):
        assert client.post("/x", number) == {"you said": number}
        assert client.get("/a") == {"you said": None}
        assert client.post_each("/x", [number, -1], names=["a", "b"], is_reply_to=is_echo, timeout=30) == [
            {"you said": number},
            {"you said": -1},
        ]
    assert len(server.requests) == 20


# Replies that raised what is not in the tree of errors ---------------------------------------------------------------

ODD = {
    "charset-hex": {"Content-Type": "application/json; charset=hex"},
    "charset-idna": {"Content-Type": "text/plain; charset=idna"},
    "charset-undefined": {"Content-Type": "text/plain; charset=undefined"},
    "charset-zlib": {"Content-Type": "text/plain; charset=zlib"},
    "charset-utf-16": {"Content-Type": "text/plain; charset=utf_16"},
    "retry-after-year": {"Retry-After": "Mon, 01 Jan 99999999999 00:00:00 GMT"},
    "retry-after-zone": {"Retry-After": "Mon, 01 Jan 2024 00:00:00 +99999999999999"},
    "retry-after-digits": {"Retry-After": "9" * 5000},
    "location-script": {"Location": "javascript:alert(1)"},
    "location-idna": {"Location": "http://xn--a/"},
    "location-port": {"Location": "http://h:99999999/"},
    "encoding-zstd": {"Content-Encoding": "zstd, gzip"},
}


def test_an_odd_reply_fails_only_its_own_row_and_with_a_typed_error(connect: Connect, serve: Any) -> None:
    server = serve()
    client = connect(server, max_retries=1)
    for status, (name, headers) in itertools.product((200, 307, 400, 429, 500), ODD.items()):
        odd = raw(b"\xff\xfe\x00odd", status, headers)
        server.answer = lambda request, odd=odd: odd if request.body in ("odd", None) else echo(request)
        found = client.post_each("/x", [1, "odd", 2], names=list("abc"), is_reply_to=is_echo, timeout=30)
        assert found[0] == {"you said": 1} and found[2] == {"you said": 2}, (name, status)
        assert isinstance(found[1], CoreLMError) and "POST /x" in str(found[1]), (name, status)
        assert client.answers("/a") == (status == 200 and not name.startswith("encoding")), (name, status)
        with pytest.raises(CoreLMError):
            client.get("/a")


# Bounds ---------------------------------------------------------------------------------------------------------------


class Endless(httpx2.AsyncByteStream):
    """A body that never ends.

    Attributes:
        read: how many bytes the client has taken.
    """

    PIECE = 2**16

    def __init__(self) -> None:
        self.read = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.read += self.PIECE
            yield bytes(self.PIECE)


def sends(body: Endless, status: int, headers: dict[str, str] | None = None) -> httpx2.MockTransport:
    return httpx2.MockTransport(lambda request: httpx2.Response(status, headers=headers, stream=body))


def test_of_a_reply_beyond_the_limit_no_more_is_read(connect: Connect) -> None:
    body, limit = Endless(), 2**20
    client = connect("http://a-server", transport=sends(body, 200), max_reply_bytes=limit)
    with pytest.raises(EngineError, match=f"longer than {limit} bytes"):
        client.get("/a")
    assert limit < body.read <= limit + body.PIECE


@pytest.mark.parametrize("status", [400, 500])
def test_of_an_endless_error_page_only_the_beginning_is_read(connect: Connect, status: int) -> None:
    body = Endless()
    client = connect("http://a-server", transport=sends(body, status), max_retries=0)
    with pytest.raises(CoreLMError, match=str(status)):
        client.get("/a")
    assert body.read == body.PIECE


@pytest.mark.parametrize("status", [200, 400])
def test_a_compressed_reply_is_refused_unread(connect: Connect, serve: Any, waits: Waits, status: int) -> None:
    message, headers = "compressed" if status == 200 else "400", {"Content-Encoding": "gzip"}
    body = Endless()
    with pytest.raises(CoreLMError, match=message):
        connect("http://a-server", transport=sends(body, status, headers)).get("/a")
    assert body.read == 0 and waits == []
    server = serve(lambda request: raw(gzip.compress(b"{}"), status, headers))
    with pytest.raises(CoreLMError, match=message):
        connect(server).get("/a")
    assert server.requests[0].headers["Accept-Encoding"] == "identity"


def test_a_timeout_ends_a_reply_that_drips(connect: Connect, serve: Any) -> None:
    client = connect(serve(lambda request: drip()), read_timeout=PATIENCE)
    calls: list[Callable[[], object]] = [
        lambda: client.get("/a", timeout=0.2),
        lambda: client.post("/a", 1, timeout=0.2),
        lambda: client.post_each("/x", [1, 2], names=["a", "b"], is_reply_to=is_echo, timeout=0.2),
    ]
    # The reply never ends: a call that did not heed its timeout would end in an error of another kind, or not at all.
    for call in calls:
        with pytest.raises(BackendTimeoutError, match=r"0\.2 s"):
            call()
    assert not client.answers("/a", timeout=0.2)


# Keys -----------------------------------------------------------------------------------------------------------------


def lines(*texts: str) -> Reply:
    """Send these lines as they are."""

    def write(handler: Any) -> None:
        handler.close_connection = True
        handler.wfile.write("\r\n".join([*texts, "", ""]).encode())

    return write


LEAKS = {
    "reason-phrase": lines(f"HTTP/1.1 400 wrong key {KEY}", "Content-Length: 0"),
    "redirect": lines("HTTP/1.1 307 Moved", f"Location: http://h/?key={KEY}", "Content-Length: 0"),
    "illegal-header-line": lines("HTTP/1.1 200 OK", f"Authorization {KEY}"),
    "illegal-status-line": lines(f"{KEY} 200 OK"),
    "garbage": raw(f"<html>{KEY}".encode()),
    "error-page": json_reply({"error": {"message": f"wrong key {KEY}"}}, 401),
}


@pytest.mark.parametrize(
    "given",
    [{"api_key": KEY}, {"headers": {"Authorization": f"Bearer {KEY}"}}, {"headers": {"X-Api-Key": KEY}}],
    ids=["api_key", "header", "bare-header"],
)
def test_no_message_traceback_or_log_shows_a_key(
    connect: Connect, serve: Any, caplog: pytest.LogCaptureFixture, given: dict[str, Any]
) -> None:
    server = serve()
    client = connect(server, max_retries=1, **given)
    for name, leak in LEAKS.items():
        server.answer = lambda request, leak=leak: leak
        with caplog.at_level("DEBUG", "corelm_engine_kit"), pytest.raises(CoreLMError) as caught:
            client.get("/a")
        shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + caplog.text
        assert KEY[:12] not in shown, name
        (entry,) = client.post_each("/x", [1], names=["a"], is_reply_to=is_echo, timeout=30)
        assert KEY[:12] not in "".join(traceback.format_exception(entry)), name


@pytest.mark.parametrize("options", [{"api_key": KEY}, {"headers": {"Authorization": f"Bearer {KEY}"}}])
@pytest.mark.parametrize("status", [200, 400])
def test_no_message_shows_a_part_of_a_key_wherever_the_page_is_cut(
    connect: Connect, serve: Any, options: dict[str, Any], status: int
) -> None:
    # Blanks do not count towards the length of a message.
    def page(request: Request) -> Reply:
        return raw(b" " * int(request.path[1:]) + f"{KEY} is wrong".encode() + b"x" * 9000, status)

    client = connect(serve(page), max_retries=0, **options)
    for offset in range(4096 - 3 * len(KEY), 4096 + 3):
        with pytest.raises(CoreLMError) as caught:
            client.get(f"/{offset}")
        assert KEY[:4] not in str(caught.value), offset


def test_a_reply_is_data_and_is_not_masked(connect: Connect, serve: Any) -> None:
    server = serve(lambda request: json_reply({"model": KEY, "tokens": ["token_id:1000"]}))
    client = connect(server, api_key=KEY, headers={"X-Auth-User": "1000"})
    assert client.get("/v1/models") == {"model": KEY, "tokens": ["token_id:1000"]}
    (entry,) = client.post_each("/x", [1], names=["a"], is_reply_to=is_echo, timeout=30)
    assert entry == {"model": KEY, "tokens": ["token_id:1000"]}
    assert client.secrets.masked(f"{KEY} 1000") == "*** ***"


def test_a_refused_client_is_told_apart_from_a_refused_request(connect: Connect, serve: Any) -> None:
    for status in (401, 403, 307):
        with pytest.raises(AccessError):
            connect(serve(lambda request, status=status: raw(b"", status))).get("/a")


# TLS and proxies ------------------------------------------------------------------------------------------------------


def test_a_tls_server_that_speaks_plain_http_is_named_and_not_retried(
    connect: Connect, serve: Any, waits: Waits
) -> None:
    server = serve()
    with pytest.raises(EngineError, match="http:// address"):
        connect(server.url.replace("http://", "https://")).get("/a")
    assert waits == []


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that only itself vouches for, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    names = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, "-out", names[0], "-keyout", names[1]], check=True, capture_output=True)
    return names


def test_a_certificate_of_an_unknown_authority_is_refused_with_advice(
    connect: Connect,
    serve: Any,
    waits: Waits,
    certificate: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = serve()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server.use_tls(context)
    url = server.url.replace("http://", "https://")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(EngineError, match="SSL_CERT_FILE"):
        connect(url).get("/a")
    assert waits == [] and server.requests == []
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    assert connect(url).get("/a") == {"you said": None}


def test_a_stale_certificate_file_stops_only_what_needs_it(
    connect: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/no/such/file.pem")
    assert connect(serve().url).get("/a") == {"you said": None}
    with refused(InvalidRequestError, field="SSL_CERT_FILE") as caught:
        connect("https://127.0.0.1:9")
    assert "/no/such/file.pem" in str(caught.value)


def test_a_proxy_that_cannot_be_read_is_named(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    for others in ("localhost,[::1]", "localhost,::1", "fe80::/10,[::1]:80"):
        monkeypatch.setenv("NO_PROXY", others)
        connect("http://example.org")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:port")
    with refused(InvalidRequestError, field="HTTPS_PROXY"):
        connect("http://example.org")


def test_which_hosts_are_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "This-Machine")
    own = ("127.0.0.1", "127.8.8.8", "::1", "0.0.0.0", "::", "localhost", "A.localhost", "this-machine")
    assert [host for host in (*own, "10.0.0.1", "example.com") if is_this_machine(host)] == list(own)


# Secrets are masked wherever they are in a message --------------------------------------------------------------------


SK = "sk-0123456789"


@pytest.mark.parametrize("text", [SK, f"x{SK}y", f"Bearer {SK}", f"b'{SK}\\r\\n'", f'{{"k": "{SK}"}}'])
def test_a_key_is_masked_wherever_it_is(text: str) -> None:
    for secrets in (
        Secrets([SK]),
        Secrets(headers={"X-Key": SK}),
        Secrets(headers={"Authorization": f"Bearer {SK}"}),
    ):
        masked = secrets.masked(text)
        assert SK not in masked and "***" in masked


def test_the_scheme_of_a_header_is_not_a_secret() -> None:
    assert Secrets(headers={"Authorization": f"Bearer {SK}"}).masked("expected: Bearer SK") == "expected: Bearer SK"


def test_a_short_key_is_masked_only_as_a_whole_word() -> None:
    secrets = Secrets(["token"])
    assert secrets.masked("bad key token!") == "bad key ***!" and secrets.masked("token_id:7") == "token_id:7"


def test_the_longest_secret_is_masked_first() -> None:
    assert Secrets([SK, SK + "-more"]).masked(SK + "-more") == "***"


def test_errors_of_a_block_are_masked_and_so_are_their_causes() -> None:
    secrets = Secrets([SK])
    with pytest.raises(EngineError) as caught, secrets.masking_errors():
        try:
            int(SK)
        except ValueError as cause:
            raise EngineError(f"no {SK}", usable=True) from cause
    assert str(caught.value) == "no ***" and caught.value.usable
    assert SK not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(EngineError) as caught, secrets.masking_errors():
        raise EngineError("a") from KeyError("b")
    assert isinstance(caught.value.__cause__, KeyError)


def test_without_secrets_nothing_changes() -> None:
    assert Secrets().masked("a b c") == "a b c" and Secrets([None, "", "abc"], {}).longest == 0
    assert str(Secrets([SK]).masked_error(EngineError(f"no {SK}", usable=True))) == "no ***"


def test_the_words_of_a_key_are_not_secret() -> None:
    assert Secrets(["the key of a server"]).masked("the server refuses the key of a server") == "the server refuses ***"
