"""What `get_backend` opens in other processes, as a fleet, or with a canary."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from corelm import Backend
from corelm.validate import count, invalid, shown

if TYPE_CHECKING:
    from corelm.application import OpenOne
    from corelm_fleet.canary import Canary
    from corelm_fleet.records import FleetLimits

#: A server that is gone may come back: a fleet of URLs connects so often, which takes hours.
_RESTARTS = 1000


class FleetOpener:
    """Opens engines in processes of another interpreter, many as one, and with a canary: options of `get_backend`.

    Args:
        python: opens the engine in a new process of this interpreter, which has core and the plugin: the path of an
            executable, or the folder of an environment. This process then needs core alone. The option `env` adds
            variables to the environment of that process. See docs/scaling.md.
        replicas: how many such processes to open, each with the same engine. They answer as one engine, which
            re-runs the rows of a process that dies. `env` may then be a list with the variables of each. A list of URLs
            as ``base_url=`` is a fleet of servers in the same way.
        fleet_limits: how patient such a fleet is with replicas that are silent or die; None for the defaults.
        canary: ask the engine a few fixed questions now and after every change of its weights, and raise a
            `StaleWeightsError` if it does not answer as they should. See `corelm_fleet.canary`.

    Raises:
        InvalidRequestError: the options contradict one another, or the engines of a fleet would not answer alike.
        CapabilityError: a canary was asked for, and nothing that the engine can do shows its weights.
        StaleWeightsError: the canary disagrees.
    """

    def __init__(
        self,
        *,
        python: str | os.PathLike[str] | None = None,
        replicas: int | None = None,
        fleet_limits: FleetLimits | None = None,
        canary: bool | Canary = False,
    ) -> None:
        self._python = python
        self._replicas = replicas
        self._limits = fleet_limits
        self._canary: Canary | None = None
        if canary is not False:
            # Only here: most engines are opened without one.
            from corelm_fleet.canary import Canary

            self._canary = Canary.make(canary)

    def open(self, open_one: OpenOne, name: str, model: Any, options: Mapping[str, Any]) -> tuple[Any, str]:
        """Open the engine or the fleet. See `corelm.opening.Opener`."""
        if self._python is not None:
            open_one = partial(_open_in_process, name, model, self._python)
        each = options_of_each(options, self._replicas, self._python is not None)
        if each:
            return self._open_fleet(open_one, each, name)
        if self._limits is not None:
            raise invalid(
                "fleet_limits", "one engine is no fleet: pass replicas=, or a list of URLs as base_url=, as well"
            )
        return open_one(options)

    def opened(self, backend: Backend) -> None:
        """Ask the canary, if there is one."""
        if self._canary is not None:
            from corelm_fleet.canary import watch

            watch(backend, self._canary)

    def _open_fleet(self, open_one: OpenOne, each: Mapping[str, Mapping[str, Any]], name: str) -> tuple[Any, str]:
        """Open a fleet of the engines that `open_one` opens with the options of `each`. Hosted ones can be killed."""
        # Only here: most engines are not in a fleet.
        from corelm_fleet.fleet import FleetEngine
        from corelm_fleet.records import FleetLimits
        from corelm_fleet.replica import Member

        labels: list[str] = []

        def open_it(options: Mapping[str, Any]) -> Any:
            engine, label = open_one(options)
            labels.append(label)
            return engine

        hosted, limits = self._python is not None, self._limits
        end = (lambda engine: engine.host.kill()) if hosted else None
        ended = (lambda engine: engine.host.lost) if hosted else None
        members = [Member(each_name, partial(open_it, options), end, ended) for each_name, options in each.items()]
        if limits is None and not hosted:
            limits = FleetLimits(restarts=_RESTARTS)
        fleet = FleetEngine(members, name, canary=self._canary, limits=limits)
        return fleet, f"{len(members)} replicas of {labels[0]}"


def _open_in_process(
    name: str, model: Any, python: str | os.PathLike[str], options: Mapping[str, Any]
) -> tuple[Any, str]:
    # Only here: an engine in this process needs none of it.
    from corelm_fleet.hosting.engine import open_in_process

    rest = {option: value for option, value in options.items() if option != "env"}
    return open_in_process(name, model, python, options.get("env"), rest)


def options_of_each(options: Mapping[str, Any], replicas: int | None, hosted: bool) -> dict[str, dict[str, Any]]:
    """Return the options of each engine of a fleet by its name; nothing if the options are those of one engine.

    Args:
        options: the options of `get_backend`. A list in `base_url` or `env` has an entry for each engine.
        replicas: how many engines to open; None if the caller did not say.
        hosted: whether each engine is opened in a process.

    Raises:
        InvalidRequestError: the options contradict one another; `field` names one.
    """
    lists = {name: each for name in ("base_url", "env") if isinstance(each := options.get(name), (list, tuple))}
    urls, envs = lists.get("base_url"), lists.get("env")
    if urls is not None:
        if replicas is not None:
            raise invalid("replicas", "leave it out: base_url has one URL for each replica")
        different = {url.rstrip("/") for url in urls if isinstance(url, str)}
        if not urls or len(different) < len(urls):
            raise invalid("base_url", f"expected different URLs, got {shown(urls)}")
    if envs is not None and not hosted:
        raise invalid("env", "a list has the variables of each process: pass python= as well")
    given = envs if urls is None else urls
    if replicas is None and given is None:
        return {}
    number = len(given or ()) if replicas is None else count("replicas", replicas, 1)
    if envs is not None and (not envs or len(envs) != number):
        raise invalid("env", f"expected one mapping for each of {number or 'the'} replicas, got {len(envs)}")
    if urls is None and number > 1:
        if options.get("base_url") is not None:
            raise invalid("base_url", "give a list with one URL for each replica, and leave out replicas")
        if not hosted:
            raise invalid(
                "replicas",
                "each replica is opened in a process of an interpreter: pass python= as well, for example "
                "python=sys.executable",
            )
    if number == 1 and given is None:
        return {}
    found = {}
    for at in range(number):
        own = {} if envs is None else {"env": envs[at]}
        if urls is not None:
            own["base_url"] = urls[at]
        found[own.get("base_url", f"replica {at}")] = {**options, **own}
    return found
