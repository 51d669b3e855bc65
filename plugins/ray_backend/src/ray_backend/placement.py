"""`Placement`: what each actor asks of the cluster, checked before anything is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from corelm import __version__, list_backends
from corelm.errors import BackendImportError, BackendIncompatibleError, BackendNotFoundError, how_to_install
from corelm.validate import invalid, number
from corelm_fleet.hosting import ask_interpreter, find_interpreter

#: Finds out what an interpreter has.
_PROBE = (
    "import ray, corelm; found.update(ray=ray.__version__, core=corelm.__version__, "
    "backends=[each.name for each in corelm.list_backends()])"
)
#: Seconds that an interpreter has for that. Ray is slow to import from a cold disk.
_PROBE_TIMEOUT = 120.0


@dataclass(frozen=True)
class Placement:
    """What each actor asks of the cluster. See `RayBackend.open`."""

    num_cpus: float
    num_gpus: float
    resources: Mapping[str, float]
    python: str | None
    runtime_env: Mapping[str, Any]

    @classmethod
    def make(cls, num_cpus: Any, num_gpus: Any, resources: Any, python: Any, runtime_env: Any) -> Placement:
        """Check the options of `RayBackend.open`.

        Raises:
            InvalidRequestError: an option is not what it should be; `field` names it.
        """
        for name, given in (("resources", resources), ("runtime_env", runtime_env)):
            if given is not None and not isinstance(given, Mapping):
                raise invalid(name, f"expected a mapping, got {given!r}")
        wanted = {str(name): number(f"resources[{name!r}]", value, 0.0) for name, value in (resources or {}).items()}
        if used := {"CPU", "GPU"} & wanted.keys():
            raise invalid("resources", f"pass num_cpus= and num_gpus= for {' and '.join(sorted(used))}")
        if python is not None and "py_executable" in (runtime_env or {}):
            raise invalid("python", "runtime_env has a py_executable already; pass one of them")
        return cls(
            number("num_cpus", num_cpus, 0.0),
            number("num_gpus", num_gpus, 0.0),
            wanted,
            None if python is None else find_interpreter(python),
            dict(runtime_env or {}),
        )

    def actor_options(self) -> dict[str, Any]:
        """Return the options of an actor, for Ray."""
        interpreter = {} if self.python is None else {"py_executable": self.python}
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "resources": dict(self.resources),
            # The fleet starts actors again, loads their weights and sends their rows elsewhere.
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": {**self.runtime_env, **interpreter} or None,
        }

    def require_room(self, replicas: int) -> None:
        """Refuse what the cluster cannot hold, for which Ray would wait without a word.

        Raises:
            InvalidRequestError: `field` names the resource that is short.
        """
        wanted = self._wanted()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]

        def room(units: Mapping[str, float]) -> int:
            # All of an actor is on one node.
            return sum(min(int(node.get(name, 0.0) / each + 1e-9) for name, each in units.items()) for node in nodes)

        for name, each in wanted.items():
            if (fit := room({name: each})) < replicas:
                there = sum(node.get(name, 0.0) for node in nodes)
                raise invalid(
                    {"CPU": "num_cpus", "GPU": "num_gpus"}.get(name, "resources"),
                    f"{replicas} {'replica asks' if replicas == 1 else 'replicas ask'} for {each:g} {name} each, "
                    f"and the cluster has {there:g} {name} on {len(nodes)} node{'s' * (len(nodes) != 1)}, which is "
                    f"room for {fit}; ask for less",
                )
        if wanted and (fit := room(wanted)) < replicas:
            raise invalid(
                "replicas", f"no nodes have {_listed(wanted)} for each of {replicas} replicas; there is room for {fit}"
            )

    def short_of(self) -> str:
        """Return what an actor that does not start may be waiting for."""
        free, wanted = ray.available_resources(), self._wanted()
        return f"it asks for {_listed(wanted)}; free are {_listed({name: free.get(name, 0.0) for name in wanted})}"

    def _wanted(self) -> dict[str, float]:
        """Return what each actor takes, by Ray's names."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: value for name, value in wanted.items() if value > 0}


def require_interpreter(python: str, inner: str) -> None:
    """Refuse an interpreter that could not run the actor: Ray would wait for it without a word.

    Args:
        python: the interpreter's path on this machine. Other nodes need the same at the same place.
        inner: the backend that the actor opens.

    Raises:
        InvalidRequestError: it is not an interpreter that works.
        BackendImportError: Ray or core is not installed there.
        BackendIncompatibleError: Ray or core is of another version there.
        BackendNotFoundError: a plugin is not installed there.
    """
    there = ask_interpreter(python, _PROBE, _PROBE_TIMEOUT)
    install = how_to_install("core-ray-backend", f"ray=={ray.__version__}", python=python)
    if "missing" in there:
        raise BackendImportError(f"an actor in {python} needs Ray and core: {there['missing']}; {install}")
    for name, here in (("ray", ray.__version__), ("core", __version__)):
        if there[name] != here:
            raise BackendIncompatibleError(f"{python} has {name} {there[name]}, and this is {name} {here}; {install}")
    distributions = {info.name: info.distribution for info in list_backends()}
    for backend in ("ray", inner):
        if backend not in there["backends"]:
            raise BackendNotFoundError(
                f"backend {backend!r} is not installed for {python}; "
                f"{how_to_install(distributions.get(backend, f'core-{backend}-backend'), python=python)}. "
                f"Installed there: {', '.join(there['backends']) or 'none'}"
            )


def _listed(units: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {name}" for name, value in units.items()) or "nothing"
