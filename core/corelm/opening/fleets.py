"""What `get_backend` opens as a fleet: an engine for each of several URLs, or one in each of several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from corelm.validate import count, invalid, shown

if TYPE_CHECKING:
    from corelm.fleet.canary import Canary
    from corelm.fleet.fleet import FleetEngine
    from corelm.fleet.records import FleetLimits

#: A server that is gone may come back: a fleet of URLs connects so often, which takes hours.
_RESTARTS = 1000

#: Opens one engine with these options. It returns the engine, and the distribution and version of its plugin.
Open = Callable[[Mapping[str, Any]], tuple[Any, str]]


def options_of_each(options: Mapping[str, Any], replicas: int | None, hosted: bool) -> dict[str, dict[str, Any]]:
    """Return the options of each engine of a fleet by its name; nothing if the options are those of one engine.

    Args:
        options: the options of `get_backend`. A list in `base_url` or `env` has an entry for each engine.
        replicas: how many engines to open; None if the caller did not say.
        hosted: whether each engine is opened in a process.

    Raises:
        InvalidRequestError: the options contradict one another; `field` names one.
    """
    urls, envs = (_listed(options.get(name)) for name in ("base_url", "env"))
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


def _listed(option: Any) -> Sequence[Any] | None:
    return option if isinstance(option, (list, tuple)) else None


def open_fleet(
    open_one: Open,
    each: Mapping[str, Mapping[str, Any]],
    name: str,
    canary: Canary | None,
    limits: FleetLimits | None,
    hosted: bool,
) -> tuple[FleetEngine, str]:
    """Open a fleet.

    Args:
        open_one: opens one engine.
        each: the options of each engine, see `options_of_each`.
        name: the name of the backend.
        canary: how the answers of two engines are compared; None for the defaults.
        limits: how patient the fleet is; None for the defaults.
        hosted: whether each engine is opened in a process, which can be killed.

    Returns:
        The fleet, and what `open_one` said of the plugin.
    """
    # Only here: most engines are not in a fleet.
    from corelm.fleet.fleet import FleetEngine
    from corelm.fleet.records import FleetLimits
    from corelm.fleet.replica import Member

    labels: list[str] = []

    def open_it(options: Mapping[str, Any]) -> Any:
        engine, label = open_one(options)
        labels.append(label)
        return engine

    end = (lambda engine: engine.host.kill()) if hosted else None
    ended = (lambda engine: engine.host.lost) if hosted else None
    members = [Member(each_name, partial(open_it, options), end, ended) for each_name, options in each.items()]
    if limits is None and not hosted:
        limits = FleetLimits(restarts=_RESTARTS)
    fleet = FleetEngine(members, name, canary=canary, limits=limits)
    return fleet, f"{len(members)} replicas of {labels[0]}"
