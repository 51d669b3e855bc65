"""What `get_backend` opens as a fleet: an engine for each of several URLs, or one in each of several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from corelm.fleet.canary import Canary
from corelm.fleet.fleet import FleetEngine
from corelm.fleet.records import FleetLimits
from corelm.fleet.replica import Member
from corelm.validate import count, invalid, shown

#: A server that is gone may come back: a fleet of URLs connects again for hours.
_SERVERS = FleetLimits(restarts=1000)

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
    urls, env = options.get("base_url"), options.get("env")
    if isinstance(urls, (list, tuple)):
        if replicas is not None:
            raise invalid("replicas", "leave it out: base_url has one URL for each replica")
        if not urls or not all(isinstance(url, str) for url in urls) or len({*urls}) < len(urls):
            raise invalid("base_url", f"expected different URLs, got {shown(urls)}")
        return {url: {**options, "base_url": url} for url in urls}
    each_env = env if isinstance(env, (list, tuple)) else None
    if replicas is None and each_env is None:
        return {}
    number = count("replicas", len(each_env or ()) if replicas is None else replicas, 1)
    if each_env is not None and len(each_env) != number:
        raise invalid("env", f"expected one mapping for each of {number} replicas, got {len(each_env)}")
    if number > 1 and not hosted:
        raise invalid(
            "replicas",
            "each replica is opened in a process of an interpreter: pass python= as well, for example "
            "python=sys.executable",
        )
    if number == 1:
        return {} if each_env is None else {"replica 0": {**options, "env": each_env[0]}}
    envs: Sequence[Any] = [env] * number if each_env is None else each_env
    return {f"replica {at}": {**options, **({} if given is None else {"env": given})} for at, given in enumerate(envs)}


def open_fleet(
    open_one: Open, each: Mapping[str, Mapping[str, Any]], name: str, canary: Canary | None, hosted: bool
) -> tuple[FleetEngine, str]:
    """Open a fleet.

    Args:
        open_one: opens one engine.
        each: the options of each engine, see `options_of_each`.
        name: the name of the backend.
        canary: how the answers of two engines are compared; None for the defaults.
        hosted: whether each engine is opened in a process, which can be killed.

    Returns:
        The fleet, and what `open_one` said of the plugin.
    """
    labels: list[str] = []

    def open_it(options: Mapping[str, Any]) -> Any:
        engine, label = open_one(options)
        labels.append(label)
        return engine

    end = (lambda engine: engine.host.kill()) if hosted else None
    ended = (lambda engine: engine.host.connection.lost) if hosted else None
    members = [Member(each_name, partial(open_it, options), end, ended) for each_name, options in each.items()]
    fleet = FleetEngine(members, name, canary=canary, limits=None if hosted else _SERVERS)
    return fleet, f"{len(members)} replicas of {labels[0]}"
