"""`Actors`: creates the actors of a backend, or finds those of another driver, and opens engines in them."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray

from corelm import __version__
from corelm.errors import BackendIncompatibleError, CoreLMError, EngineError, InvalidRequestError, brief, described
from corelm.validate import invalid
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


@dataclass(frozen=True)
class Order:
    """What an actor opens.

    Attributes:
        inner: the name of the backend.
        model: what the backend opens.
        options: the backend's own options.
    """

    inner: str
    model: str | None
    options: Mapping[str, Any]


class Actors:
    """The actors of a backend.

    Args:
        replicas: how many there are at first; a driver that shares them has to ask for as many.
        name: the first part of their names; None if they are not shared.

    Attributes:
        placement: what each asks of the cluster.
    """

    def __init__(
        self,
        order: Order,
        placement: Placement,
        replicas: int,
        name: str | None,
        namespace: str,
        placement_timeout: float,
    ) -> None:
        self._order, self.placement, self._timeout = order, placement, placement_timeout
        self._name, self._namespace = name, namespace
        self._facts = facts(order, placement, replicas)
        self._starts: dict[int, int] = {}
        #: The actors that this driver has created, by replica; None for one that another driver has created.
        self._created: dict[int, Any] = {}
        self._closed = threading.Event()

    def member(self, index: int) -> Member:
        """Return how a replica is opened and ended."""
        return Member(self._title(index), partial(self.open, index), lambda engine: engine.host.kill(), _has_ended)

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
                raise EngineError(f"{self._title(index)} was lost while it opened: {described(error)}") from error
            raise

    def _opened(self, actor: Any, index: int, owned: bool) -> HostedEngine:
        hello = self._wait(actor.hello.remote(), self._timeout)
        if hello["core"] != __version__:
            raise BackendIncompatibleError(f"the actor has core {hello['core']}, and this is core {__version__}")
        host = RayHost(actor, hello, self._title(index), owned)
        if owned:
            self._starts[index] = self._starts.get(index, 0) + 1
            order = {
                "name": self._order.inner,
                "model": self._order.model,
                "options": dict(self._order.options),
                "threads": self.placement.threads,
                "facts": self._facts,
                "starts": self._starts[index],
            }
            self._wait(actor.open.remote(pack(order)[0]), None)
        # An actor that is not shared has nothing to compare.
        expected = None if self._name is None else self._facts
        # A driver that leaves while it waits has not joined yet.
        self._wait(actor.wait_until_open.remote(), None)
        attached = self._wait(actor.attach.remote(host.driver, expected), None)
        found: tuple[dict[str, Any], Opened | Failure] = unpack(attached)
        has, result = found
        if isinstance(result, Failure):
            error = result.error()
            raise error if isinstance(error, CoreLMError) else EngineError(f"{described(error)}", usable=False)
        if self._name is not None and has != self._facts:
            raise _other_facts(self._title(index), has, self._facts)
        host.connect()
        if not owned:
            # The engine is closed by the driver that has created it.
            result = replace(result, hooks=result.hooks - {"close"})
        return HostedEngine(host, self._order.inner, result)

    def _actor(self, index: int) -> tuple[Any, bool]:
        """Return the actor of a replica, and whether this driver has created it."""
        name, end = self._title(index), time.monotonic() + _REPLACED
        remote = ray.remote(concurrency_groups=GROUPS)(EngineActor)
        options = self.placement.actor_options()
        if self._name is None:
            return remote.options(**options).remote(), True
        lost = self._created.get(index, None)
        while not self._closed.is_set():
            try:
                found = ray.get_actor(name, namespace=self._namespace)
                if lost is None:
                    self._created.setdefault(index, None)
                    if self._created[index] is None:
                        return found, False
            except ValueError:
                if self._created.get(index, ...) is not None:
                    try:
                        made = remote.options(name=name, namespace=self._namespace, **options).remote()
                        self._created[index] = made
                        return made, True
                    except ValueError:
                        # Another driver was faster, or the name of the lost actor is not free yet.
                        pass
            if time.monotonic() > end:
                break
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
    return [_replica_status(name, reply) for name, reply in replies.items()]


def _replica_status(name: str, reply: Any) -> ReplicaStatus:
    found: dict[str, Any] = {"state": "suspect", "epoch": None, "rows": 0, "tokens_per_second": 0.0, "starts": 0}
    why = ""
    try:
        found = {each: value for each, value in ray.get(reply, timeout=0).items() if each != "drivers"}
    except Exception as error:
        why = f"it does not reply: {brief(described(error))}"
    return ReplicaStatus(name=name, why=why, **found)


def facts(order: Order, placement: Placement, replicas: int) -> dict[str, str]:
    """Return what two drivers that share actors have to agree on, by option. Long values are given by their digest."""
    found: dict[str, Any] = {
        "inner": order.inner,
        "model": order.model,
        "replicas": replicas,
        "num_cpus": float(placement.num_cpus),
        "num_gpus": float(placement.num_gpus),
        "resources": sorted(placement.resources.items()),
        "python": placement.python,
        "runtime_env": sorted(placement.runtime_env.items()),
        **{f"option {name}": value for name, value in order.options.items()},
    }
    return {name: _text(name, value) for name, value in found.items()}


def _text(name: str, value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    plain = isinstance(value, (bool, int, float, type(None))) or name in ("inner", "model", "python", "option dtype")
    # Others may hold a key.
    return repr(value) if plain else f"digest {hashlib.sha256(pack(value)[0]).hexdigest()[:12]}"


def _other_facts(name: str, has: Mapping[str, str], wanted: Mapping[str, str]) -> InvalidRequestError:
    none = "nothing"
    differing = [each for each in sorted({*has, *wanted}) if has.get(each, none) != wanted.get(each, none)]
    listed = "; ".join(
        f"{each.removeprefix('option ')}: it has {has.get(each, none)}, this call asks for {wanted.get(each, none)}"
        for each in differing
    )
    return invalid(
        "actor_name", f"{name} was created with other options: {listed}. Give the same ones, or another actor_name"
    )


def _has_ended(engine: HostedEngine) -> bool:
    return engine.host.lost
