"""The processes behind a fleet, as tests kill, stop and start them again."""

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from corelm import Backend
from corelm_fleet.records import FleetLimits
from helpers.insides import pids

#: Impatient, so that many faults fit into a test. A row may be in flight at many deaths: they are not its fault here.
LIMITS = FleetLimits(
    **{"misses": 1, "take_back": 1.0, "give_up": 4.0, "trial": 1.0, "deaths": 1000, "errors": 3},
    **{"backoff": 0.2, "longest_backoff": 1.0, "restarts": 100_000, "outage": 300.0},
)


class Processes(Protocol):
    """The processes behind a fleet. A victim is whatever the other methods take."""

    def victims(self) -> Sequence[Any]:
        """Return the processes that run now, and were not stopped."""

    def kill(self, victim: Any) -> bool:
        """Kill a process, and return whether it ran."""

    def stop(self, victim: Any) -> bool:
        """Stop a process, and return whether it ran."""

    def resume(self, victim: Any) -> bool:
        """Continue a process that was stopped, and return whether it was still there."""

    def restarted(self) -> int:
        """Return how many processes were started after the first ones."""


class Hosts:
    """The processes of a fleet that starts them itself. A victim is the id of a process.

    Args:
        backend: the fleet.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def victims(self) -> list[int]:
        return pids(self._backend)

    def kill(self, victim: int) -> bool:
        return self._signal(victim, signal.SIGKILL)

    def stop(self, victim: int) -> bool:
        return self._signal(victim, signal.SIGSTOP)

    def resume(self, victim: int) -> bool:
        return self._signal(victim, signal.SIGCONT)

    def restarted(self) -> int:
        return sum(each.starts - 1 for each in self._backend.engine.plugin.status())

    def _signal(self, victim: int, number: int) -> bool:
        # The fleet may have ended it meanwhile.
        if victim in self.victims():
            with suppress(ProcessLookupError):
                os.kill(victim, number)
                return True
        return False


class Server(Protocol):
    """A server behind a URL, which the test starts."""

    url: str

    def start(self) -> None:
        """Start it, at the same URL as before."""

    def wait_until_ready(self) -> None: ...

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes."""

    def kill(self) -> None:
        """Kill all of its processes, and wait for their end."""


class Servers:
    """Servers, which are started again when they were killed. A victim is one of them.

    Args:
        servers: the servers, which run.
    """

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers, self._up, self._stopped = servers, set(range(len(servers))), set[int]()
        self._locks = [threading.Lock() for _ in servers]
        self._starting: list[threading.Thread] = []

    def victims(self) -> list[int]:
        return sorted(self._up - self._stopped)

    def kill(self, victim: int) -> bool:
        with self._locks[victim]:
            if victim not in self._up:
                return False
            self._up.discard(victim)
            self._stopped.discard(victim)
            self._servers[victim].kill()
            self._starting.append(threading.Thread(target=self._start, args=(victim,)))
            self._starting[-1].start()
            return True

    def stop(self, victim: int) -> bool:
        return self._signal(victim, signal.SIGSTOP)

    def resume(self, victim: int) -> bool:
        return self._signal(victim, signal.SIGCONT)

    def restarted(self) -> int:
        """Wait until all run again, and return how often one was started."""
        for thread in self._starting:
            thread.join()
        return len(self._starting)

    def _start(self, victim: int) -> None:
        self._servers[victim].start()
        self._servers[victim].wait_until_ready()
        self._up.add(victim)

    def _signal(self, victim: int, number: int) -> bool:
        (self._stopped.add if number == signal.SIGSTOP else self._stopped.discard)(victim)
        with self._locks[victim]:
            if victim not in self._up:
                return False
            self._servers[victim].signal(number)
            return True
