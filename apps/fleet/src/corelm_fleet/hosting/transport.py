"""`Transport` carries the frames of calls to an engine elsewhere; `Host` is the process that holds the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from corelm_fleet.hosting.channel import Frame, Kind
    from corelm_fleet.hosting.packing import Packed
    from corelm_fleet.hosting.server import Call

#: Functions of a request by the names of their fields.
Callbacks = Mapping[str, Callable[..., object]]


class Sender(Protocol):
    """Sends frames to another process, in order."""

    def send_packed(self, kind: Kind, call: int, packed: Packed) -> None:
        """Send a frame. Any thread may send.

        Raises:
            OSError: the other process has ended.
        """


class Transport(Sender, Protocol):
    """Carries frames between two processes. `Channel` does it with a socket."""

    def receive(self) -> Frame | None:
        """Return the next frame; None if the other process has ended, or after `shut_down`. One thread receives.

        Raises:
            Exception: the connection broke.
        """

    def shut_down(self) -> None:
        """End the connection; any thread may. The thread that receives gets None."""

    def close(self) -> None:
        """Give back what the connection holds. The thread that receives calls this when it has got None."""


class Host(Protocol):
    """A process that holds an engine, as a `HostedEngine` sees it. `HostProcess` is a child of this process."""

    @property
    def lost(self) -> bool:
        """Whether the process has ended, so that it will not reply any more."""

    def call(self, call: Call, timeout: float | None = None, callbacks: Callbacks | None = None) -> Any:
        """Have the process make a call and return its result. See `Connection.send`."""

    def close(self) -> None:
        """Have the process end. It has closed its engine. In a fork of the process that opened it, do nothing."""

    def kill(self) -> None:
        """End the process although it may not reply. Calls under way fail. In a fork, do nothing."""
