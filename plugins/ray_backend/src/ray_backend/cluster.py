"""The connection to Ray: local by default, and ended by whoever has begun it."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from corelm.errors import EngineError, InvalidRequestError, described
from corelm.spec import CloseRequest
from corelm.validate import invalid

if TYPE_CHECKING:
    from corelm_fleet import FleetEngine

_log = logging.getLogger(__name__)

#: The address of a cluster that only this machine can reach.
_LOOPBACK = "127.0.0.1"
#: Seconds that a cluster's address may take to accept a connection.
_CONNECT_TIMEOUT = 10.0


class Cluster:
    """Counts the backends that use Ray, and shuts Ray down after the last one if it has started it.

    Attributes:
        ours: whether Ray was started, or connected to, from here.
        backends: what is closed when the program ends.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users = 0
        self.ours = False
        self.backends: weakref.WeakSet[FleetEngine] = weakref.WeakSet()

    def enter(self, address: str | None, namespace: str, start: bool = True) -> None:
        """Use Ray; start or connect to it if the program has not done so. Each call needs one of `leave`.

        Args:
            address: the cluster's address; None for the one that the program uses already, or that ``RAY_ADDRESS``
                names, or else a new one on this machine.
            start: whether a new cluster may be started.

        Raises:
            InvalidRequestError: the program uses another cluster already, or a new one would have to be started, or the
                address names no host.
            EngineError: Ray did not start, or does not answer at the address.
        """
        import ray

        wanted = address or os.environ.get("RAY_ADDRESS") or "local"
        with self._lock:
            # Once, and after Ray has registered its own end, so that this comes first.
            atexit.unregister(self._end_of_program)
            atexit.register(self._end_of_program)
            if ray.is_initialized():
                used = ray.get_runtime_context().gcs_address
                if address not in (None, "auto", "local", used):
                    raise invalid(
                        "address",
                        f"this program uses the Ray cluster at {used} already; leave address out, or call "
                        "ray.shutdown() first",
                    )
            elif not start and wanted == "local":
                raise invalid(
                    "address",
                    "name the cluster, for example 127.0.0.1:6379. The logger ray_backend of the program that "
                    "has started it says where it is",
                )
            else:
                self._start(ray, wanted, namespace)
            self._users += 1

    def leave(self) -> None:
        """Note that a backend does not use Ray any more."""
        import ray

        with self._lock:
            self._users -= 1
            if self._users <= 0 and self.ours:
                self.ours = False
                if ray.is_initialized():
                    ray.shutdown()
                    _log.info("ray: shut down what was started")

    def _start(self, ray: Any, address: str, namespace: str) -> None:
        # A running cluster could belong to someone else, so it is not looked for.
        alone = address == "local"
        here = alone or address.startswith((_LOOPBACK, "localhost"))
        options = {"include_dashboard": False, "_node_ip_address": _LOOPBACK} if alone else {}
        try:
            if not alone:
                _must_listen(address)
                if here:
                    _use_token()
            # A driver that names another address of this machine would not be reached from a cluster on loopback.
            with _on_loopback() if here else nullcontext():
                silent = {"log_to_driver": False, "logging_level": logging.ERROR}
                context = ray.init(address, namespace=namespace, **silent, **options)
        except BaseException as error:
            with suppress(Exception):
                ray.shutdown()
            if not isinstance(error, Exception) or isinstance(error, InvalidRequestError):
                raise
            what, advice = "Ray did not start" if alone else f"no Ray cluster could be joined at {address}", ""
            if not alone and type(error) is ConnectionError and "RAY_AUTH_MODE" not in os.environ:
                advice = "; if the cluster has a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
            raise EngineError(f"{what}: {described(error)}{advice}", usable=False) from error
        self.ours = True
        if alone:
            where, logs = ray.get_runtime_context().gcs_address, context.address_info.get("session_dir", "")
            if not where.startswith(_LOOPBACK):
                _log.warning("ray: the cluster that was started can be reached from other machines, at %s", where)
            started = "ray: started Ray %s on this machine alone, at %s; its logs are in %s"
            _log.info(started, ray.__version__, where, logs)
        else:
            _log.info("ray: joined the cluster at %s", context.address_info.get("gcs_address", address))

    def _end_of_program(self) -> None:
        for backend in list(self.backends):
            with suppress(Exception):
                backend.close(CloseRequest())


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have Ray listen on the loopback interface only.

    Ray replaces a loopback address by another one of the machine, except where RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER is 0.
    It reads that variable when it is imported, which may have happened long ago, and keeps it in a constant.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _must_listen(address: str) -> None:
    """Raise an error at once if nothing listens at an address: Ray tries for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and not host:
        raise invalid("address", f"expected HOST:PORT, such as 127.0.0.1:6379, got {address!r}")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT).close()


def _use_token() -> None:
    """Have Ray send the user's token, if there is one: a cluster that `ray.init` starts demands it.

    For an address that was given, Ray itself does so only with RAY_AUTH_MODE=token.
    """
    with suppress(ImportError):
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


#: The one connection of this program.
CLUSTER = Cluster()
