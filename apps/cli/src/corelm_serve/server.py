"""A server on uvicorn: `run_server` in the main thread until a signal ends it, `ServerThread` on a thread."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

import uvicorn

from corelm import Backend, validate
from corelm.errors import EngineError
from corelm_serve.app import ServingApp
from corelm_serve.options import ServerOptions
from corelm_serve.service import SHUTDOWN_TIMEOUT
from corelm_serve.sessions import SessionStore

#: Seconds that an idle connection is kept: longer than clients keep theirs, or a request may meet a connection that the
#: server is just closing.
KEEP_ALIVE = 75
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def new_key() -> str:
    """Return a random key."""
    return f"sk-corelm-{secrets.token_urlsafe(24)}"


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens, before an engine is opened.

    Args:
        host: an address of this machine. Any but that of the loopback interface lets other machines in.
        port: 0 lets the system choose.

    Raises:
        OSError: the address cannot be used.
        InvalidRequestError: `host` is not an address.
    """
    if host == "localhost":
        host = "127.0.0.1"
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError as error:
        raise validate.invalid("host", f"expected an IP address such as 127.0.0.1, got {host!r}") from error
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(2048)
    except OSError as error:
        made.close()
        advice = "give another host or port; port 0 takes a free one"
        raise OSError(error.errno, f"cannot listen at {host}, port {port}: {error.strerror}; {advice}") from error
    except BaseException:
        made.close()
        raise
    return made


def url_of(listener: socket.socket) -> str:
    """Return the URL at which a socket of this machine is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """A server that ends its requests before it waits for them, and leaves signals to its caller."""

    def __init__(self, app: ServingApp, ready: Callable[[], object]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
            )
        )
        self._app, self._ready = app, ready
        self.ended_by: int | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and say so."""
        await super().startup(sockets)
        if not self.started:
            raise EngineError("the application did not start; its log says why")
        self._ready()

    async def main_loop(self) -> None:
        """Serve until `should_exit`; then end the requests under way."""
        await super().main_loop()
        # No connection is accepted from here on, and `end` refuses requests on those that there are.
        for listener in self.servers:
            listener.close()
        ending = asyncio.ensure_future(self._app.service.end())
        while not ending.done() and not self.force_exit:
            await asyncio.wait({ending}, timeout=0.1)
        ending.cancel()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Let Ctrl-C and SIGTERM end the server in the block, if it runs in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self.handle_exit) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal. A second one ends the server without waiting for requests."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.ended_by = sig


def run_server(app: ServingApp, listener: socket.socket, ready: Callable[[], object] = lambda: None) -> int | None:
    """Serve until Ctrl-C or SIGTERM, and return the number of that signal.

    The requests under way are ended and the threads of the batcher are stopped. The engine stays open.
    """
    server = _Server(app, ready)
    try:
        asyncio.run(server.serve(sockets=[listener]))
    finally:
        listener.close()
        app.service.backend.cleanup(flush=False)
    return server.ended_by


class ServerThread:
    """A server on a thread of this process, for a program that trains the model it serves. A context manager.

    Args:
        backend: an opened backend, which stays open.
        options: what is answered, whom, and how much at a time; None for the defaults. Without a key, one is made.
        host: the address to listen at.
        port: 0 lets the system choose.
        sessions: where sessions are recorded; None for a new store.

    Attributes:
        url: where the server is, without a path.
        api_key: the key that clients must send.
        sessions: the recorded sessions; None with ``ServerOptions(sessions=False)``.
        service: what all requests share.

    Raises:
        OSError: the address cannot be used.
        EngineError: the server did not start.
    """

    def __init__(
        self,
        backend: Backend,
        options: ServerOptions | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        sessions: SessionStore | None = None,
    ) -> None:
        options = options or ServerOptions()
        if options.api_key is None:
            options = replace(options, api_key=new_key())
        assert options.api_key is not None
        self.api_key: str = options.api_key
        listener = listening(host, port)
        self.url = url_of(listener)
        started: Future[None] = Future()
        try:
            app = ServingApp(backend, options, sessions)
            self.service, self.sessions = app.service, app.service.store
            self._server = _Server(app, lambda: started.set_result(None))
        except BaseException:
            listener.close()
            raise

        def run() -> None:
            try:
                asyncio.run(self._server.serve(sockets=[listener]))
            except BaseException as error:
                if not started.done():
                    started.set_exception(EngineError(f"the server did not start: {error}"))
                raise
            finally:
                listener.close()

        self._thread = threading.Thread(target=run, name="corelm-serve", daemon=True)
        self._thread.start()
        started.result()

    def close(self) -> None:
        """End the requests under way, and the server. Closing twice is fine."""
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
