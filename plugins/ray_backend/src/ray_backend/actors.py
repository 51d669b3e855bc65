"""`Actors`: creates the actors of a backend, or finds those of another driver, and opens engines in them."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from corelm import __version__
from corelm.errors import BackendIncompatibleError, CoreLMError, EngineError, brief, described
from corelm_fleet import Member, ReplicaStatus
from corelm_fleet.hosting import Failure, HostedEngine, Opened, pack, unpack
from ray_backend.actor import GROUPS, EngineActor
from ray_backend.host import RayHost
from ray_backend.placement import Placement

#: Seconds between two looks whether an actor has replied.
_PAUSE = 0.5
#: Seconds that an actor has to say how it is doing.
_ASK = 5.0
#: Seconds that a driver waits until another one has started a lost actor again, and until a name is free again.
_REPLACED = 30.0


class Actors:
    """The actors of a backend.

    Args:
        order: what each opens: the ``name`` of a backend, the ``model``, and the ``options`` of the backend.
        replicas: how many there are at first; a driver that shares them has to ask for as many.
        name: the first part of their names; None if they are not shared.

    Attributes:
        placement: what each asks of the cluster.
    """

    def __init__(
        self,
        order: Mapping[str, Any],
        placement: Placement,
        replicas: int,
        name: str | None,
        namespace: str,
        placement_timeout: float,
    ) -> None:
        self.placement, self._timeout = placement, placement_timeout
        self._name, self._namespace = name, namespace
        self._facts = facts(order, placement, replicas)
        # The threads are those of each operation of the engine on the CPU.
        self._order = {**order, "threads": max(1, int(placement.num_cpus)), "facts": self._facts}
        self._starts: dict[int, int] = {}
        #: The actors that this driver has created, by replica; None for one that another driver has created.
        self._created: dict[int, Any] = {}
        self._closed = threading.Event()

    def member(self, index: int) -> Member:
        """Return how a replica is opened and ended."""
        return Member(
            self._title(index),
            partial(self.open, index),
            lambda engine: engine.host.kill(),
            lambda engine: bool(engine.host.lost),
        )

    def close(self) -> None:
        """Stop waiting for actors."""
        self._closed.set()

    @property
    def shares(self) -> bool:
        """Whether some of the actors belong to another driver."""
        return None in self._created.values()

    def open(self, index: int) -> HostedEngine:
        """Open the engine of a replica.

        Raises:
            CoreLMError: what `get_backend` would raise in the actor.
            InvalidRequestError: there is an actor of that name, and it holds something else.
            EngineError: the actor did not start in time, or was lost.
        """
        if self._closed.is_set() or not ray.is_initialized():
            raise EngineError("Ray was shut down", usable=False)
        actor, owned = self._actor(index)
        try:
            return self._opened(actor, index, owned)
        except BaseException as error:
            if owned:
                ray.kill(actor, no_restart=True)
            if isinstance(error, ray.exceptions.RayError):
                raise EngineError(f"it was lost while it opened: {described(error)}") from error
            raise

    def _opened(self, actor: Any, index: int, owned: bool) -> HostedEngine:
        hello = self._wait(actor.hello.remote(), self._timeout)
        if hello["core"] != __version__:
            raise BackendIncompatibleError(f"the actor has core {hello['core']}, and this is core {__version__}")
        if owned:
            self._starts[index] = self._starts.get(index, 0) + 1
            self._wait(actor.open.remote(pack({**self._order, "starts": self._starts[index]})[0]), None)
        # An actor that is not shared has nothing to compare.
        expected = None if self._name is None else self._facts
        # A driver that leaves while it waits has not joined yet.
        self._wait(actor.wait_until_open.remote(), None)
        driver = uuid.uuid4().hex
        result: Opened | Failure = unpack(self._wait(actor.attach.remote(driver, expected), None))
        if isinstance(result, Failure):
            error = result.error()
            raise error if isinstance(error, CoreLMError) else EngineError(f"{described(error)}", usable=False)
        if not owned:
            # The engine is closed by the driver that has created it.
            result = replace(result, hooks=result.hooks - {"close"})
        host = RayHost(actor, driver, hello, self._title(index), owned)
        return HostedEngine(host, self._order["name"], result)

    def _actor(self, index: int) -> tuple[Any, bool]:
        """Return the actor of a replica, and whether this driver has created it."""
        remote = ray.remote(concurrency_groups=GROUPS)(EngineActor)
        options = self.placement.actor_options()
        if self._name is None:
            return remote.options(**options).remote(), True
        name, end = self._title(index), time.monotonic() + _REPLACED
        lost = self._created.get(index)
        while not self._closed.is_set() and time.monotonic() < end:
            # Another driver may be faster, and the name of a lost actor may not be free yet.
            with suppress(ValueError):
                found = ray.get_actor(name, namespace=self._namespace)
                if lost is None:
                    self._created[index] = None
                    return found, False
            if self._created.get(index, ...) is not None:
                with suppress(ValueError):
                    made = remote.options(name=name, namespace=self._namespace, **options).remote()
                    self._created[index] = made
                    return made, True
            time.sleep(_PAUSE / 5)
        raise EngineError(f"{name} was lost, and the driver that had created it has not started it again", usable=False)

    def _wait(self, reply: Any, timeout: float | None) -> Any:
        """Return the reply of an actor."""
        end = None if timeout is None else time.monotonic() + timeout
        while not ray.wait([reply], timeout=_PAUSE)[0]:
            if self._closed.is_set():
                raise EngineError("the backend was closed", usable=False)
            if end is not None and time.monotonic() > end:
                raise EngineError(
                    f"its process did not start within {timeout:g} s; {self.placement.short_of()}",
                    usable=False,
                )
        return ray.get(reply)

    def _title(self, index: int) -> str:
        return f"replica {index}" if self._name is None else f"{self._name}/{index}"


def named_replicas(namespace: str) -> list[ReplicaStatus]:
    """Return how the actors with names in a namespace are doing."""
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == namespace]
    replies: dict[str, Any] = {}
    for name in sorted(names):
        with suppress(ValueError, AttributeError):
            # Other actors may have names in the namespace.
            replies[name] = ray.get_actor(name, namespace=namespace).status.remote()
    if replies:
        ray.wait(list(replies.values()), num_returns=len(replies), timeout=_ASK)
    found = []
    for name, reply in replies.items():
        try:
            found.append(ReplicaStatus(name=name, why="", **ray.get(reply, timeout=0)))
        except Exception as error:
            why = f"it does not reply: {brief(described(error))}"
            none: dict[str, Any] = {"epoch": None, "rows": 0, "tokens_per_second": 0.0, "starts": 0}
            found.append(ReplicaStatus(name=name, state="suspect", why=why, **none))
    return found


def facts(order: Mapping[str, Any], placement: Placement, replicas: int) -> dict[str, str]:
    """Return what two drivers that share actors have to agree on, by option. Long values are given by their digest."""
    found: dict[str, Any] = {"inner": order["name"], "model": order["model"], "replicas": replicas}
    for name, value in vars(placement).items():
        found[name] = sorted(value.items()) if isinstance(value, Mapping) else value
    found |= {f"option {name}": value for name, value in order["options"].items()}
    return {name: _text(name, value) for name, value in found.items()}


def _text(name: str, value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    plain = isinstance(value, (bool, int, float, type(None))) or name in ("inner", "model", "python", "option dtype")
    # Others may hold a key.
    return repr(value) if plain else f"digest {hashlib.sha256(pack(value)[0]).hexdigest()[:12]}"
