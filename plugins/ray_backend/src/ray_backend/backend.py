"""`RayBackend`: a fleet of engines in Ray actors, and `open`, which creates the actors or joins existing ones."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from corelm.errors import CapabilityError
from corelm.spec import CloseRequest, hookimpl
from corelm.validate import count, invalid, number
from corelm_fleet import FleetEngine, FleetLimits, ReplicaStatus
from corelm_fleet.hosting import check_option, portable_model
from ray_backend.cluster import CLUSTER

if TYPE_CHECKING:
    from ray_backend.actors import Actors


class RayBackend(FleetEngine):
    """Samples from and scores with engines of another backend, each in a Ray actor. They answer as one engine."""

    requires_api = ">=1,<2"

    def __init__(self, actors: Actors, replicas: int, limits: FleetLimits | None) -> None:
        self._actors, self._ended, self._process = actors, False, os.getpid()
        self._scaling = threading.Lock()
        super().__init__([actors.member(index) for index in range(replicas)], "ray", limits=limits)
        CLUSTER.backends.add(self)

    @classmethod
    def open(
        cls,
        model: Any = None,
        *,
        inner: str = "transformers",
        replicas: int = 1,
        fleet_limits: FleetLimits | None = None,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        python: Any = None,
        actor_name: str | None = None,
        namespace: str = "corelm",
        address: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        placement_timeout: float = 120.0,
        **inner_options: Any,
    ) -> RayBackend:
        """Open `replicas` engines of the backend `inner`, each in an actor.

        Args:
            model: what `inner` opens: a path or a name; the same on every node. A model object cannot cross.
            inner: the backend's name.
            replicas: how many actors. Rows of one that dies are answered by another; it is started again.
            fleet_limits: when a silent actor counts as dead, and how often it is started; None for the defaults.
            num_cpus: CPU cores of each actor, and threads of each operation; may be a fraction.
            num_gpus: GPUs of each actor; may be a fraction.
            resources: custom resources of the cluster that each actor takes, by name.
            python: the interpreter of the actors' processes, which has the same Ray and core, this plugin and that of
                `inner`: the path of an executable, or the folder of an environment; the same on every node. None for
                that of the cluster.
            actor_name: shares the actors with other programs that open the same under this name. The first one creates
                them, and they end when it closes its backend or ends. Weights can be changed while no other program
                uses them.
            namespace: Ray's namespace in which the name is known.
            address: the cluster to join. None for the one that this program uses already, or that the environment
                variable ``RAY_ADDRESS`` names, or else a new one on this machine, which ends with the last backend.
            runtime_env: Ray's description of the actors' environment.
            placement_timeout: seconds to make the runtime_env and start an actor's process, before it opens its engine.
            inner_options: the options of `inner`.

        Raises:
            InvalidRequestError: an option that `inner` does not know; resources that the cluster does not have; an
                actor of this name holds something else. `field` names the option.
            BackendImportError: `python` has no Ray or no core.
            BackendIncompatibleError: `python` has another version of Ray or of core.
            BackendNotFoundError: `python` has no plugin `inner`.
            EngineError: Ray or an actor did not start, or the engine did not open.
        """
        _check(inner, actor_name, namespace, address)
        replicas = count("replicas", replicas, 1)
        model = portable_model(model)
        if model is not None and os.path.exists(model):
            # An actor has another current folder.
            model = os.path.abspath(model)
        for name, value in inner_options.items():
            check_option(name, value)
        CLUSTER.enter(address, namespace)
        try:
            # Only here: these import Ray.
            from ray_backend.actors import Actors
            from ray_backend.placement import Placement, require_interpreter

            placement = Placement.make(num_cpus, num_gpus, resources, python, runtime_env)
            timeout = number("placement_timeout", placement_timeout, 0.0)
            if placement.python is not None:
                require_interpreter(placement.python, inner)
            placement.require_room(replicas)
            order = {"name": inner, "model": model, "options": inner_options}
            return cls(Actors(order, placement, replicas, actor_name, namespace, timeout), replicas, fleet_limits)
        except BaseException:
            CLUSTER.leave()
            raise

    @classmethod
    def replica_status(cls, *, address: str | None = None, namespace: str = "corelm") -> list[ReplicaStatus]:
        """Return how the actors with names are doing, for ``corelm fleet status``.

        Args:
            address: the cluster. None for the one that this program uses, or that ``RAY_ADDRESS`` names.

        Raises:
            InvalidRequestError: nothing says which cluster.
            EngineError: it does not answer.
        """
        CLUSTER.enter(address, namespace, start=False)
        try:
            from ray_backend.actors import named_replicas

            return named_replicas(namespace)
        finally:
            CLUSTER.leave()

    def scale(self, replicas: int) -> None:
        """Have this many actors; return at once. `status` shows which have joined or left.

        An actor that leaves finishes its rows first. One that joins loads the weights in force before it serves.

        Raises:
            InvalidRequestError: the cluster has no room for them.
            CapabilityError: the actors belong to another program.
        """
        replicas = count("replicas", replicas, 1)
        if self._actors.shares:
            raise CapabilityError("the actors belong to another program, which can scale them", capability="scale")
        with self._scaling:
            stays = [each.name for each in self.status() if each.state not in ("gone", "draining")]
            self._actors.placement.require_room(replicas)
            for name in stays[replicas:]:
                self.drain(name)
            taken = {each.name for each in self.status() if each.state != "gone"}
            members = (self._actors.member(index) for index in itertools.count())
            fresh = (member for member in members if member.name not in taken)
            for member in itertools.islice(fresh, max(0, replicas - len(stays))):
                self.join(member)

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        """Close the engines that this driver has opened, and leave Ray. Later calls do nothing, nor does a fork's."""
        if not self._ended and os.getpid() == self._process:
            self._ended = True
            self._actors.close()
            try:
                super().close(request)
            finally:
                CLUSTER.leave()
        return True


def _check(inner: Any, actor_name: Any, namespace: Any, address: Any) -> None:
    if not isinstance(inner, str) or inner in ("", "ray"):
        raise invalid("inner", f"expected the name of the backend that the actors open, got {inner!r}")
    for name, value in {"actor_name": actor_name, "namespace": namespace, "address": address}.items():
        if not (isinstance(value, str) and value) and not (value is None and name != "namespace"):
            raise invalid(name, f"expected a text, got {value!r}")
