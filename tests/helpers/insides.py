"""What tests ask the inside of the code, because no public name answers it: only this module reads private names.

A user does not need these answers. A test needs them to reach a moment that it cannot see from outside, such as one in
which a call waits for its turn.
"""

from typing import Any

from corelm import Backend


def a_call_waits(backend: Backend) -> bool:
    """Return whether a call waits until the engine has ended another one. A call says so only when it has its turn."""
    return bool(backend.engine.lock.waiting)


def _runner(backend: Backend) -> Any:
    fleet = backend.engine.plugin
    return fleet._runner


def look_around(backend: Backend) -> None:
    """Have a fleet check its engines now. It does so by itself once a second, for which many tests would wait."""
    _runner(backend).look_around()


def pids(backend: Backend) -> list[int]:
    """Return the processes of the engines of a fleet that run. ``status()`` has the names of the engines only."""
    running = list(_runner(backend).runs.running.values())
    return [replica.backend.engine.plugin.host.pid for replica in running]


def holds_rows(backend: Backend) -> bool:
    """Return whether a fleet keeps anything of a call. ``status()`` counts only rows that are in an engine."""
    runner = _runner(backend)
    return bool(runner._calls or runner._named or runner.state.rows.all)


def rows_wait(backend: Backend) -> bool:
    """Return whether rows of a fleet wait for an engine. ``status()`` counts only rows that are in an engine."""
    return bool(_runner(backend).state.rows.fresh)


def choose_onednn_operator_again() -> None:
    """Forget whether oneDNN has the operator of the fast path. That is found out once in a process."""
    from transformers_backend.fast import onednn

    onednn._is_there.cache_clear()


def use_onednn(monkeypatch: Any, *, from_products: float) -> None:
    """Have the fast path take oneDNN's products from so many products on, whatever is quicker on this CPU."""
    from transformers_backend.fast import onednn

    monkeypatch.setattr(onednn, "_pays_from", lambda: from_products)


def calls_in_steps(engine: Any) -> Any:
    """Return the calls that take part in the steps of a `LogitsEngine`."""
    return vars(engine)["_LogitsEngine__loop"]._stepping
