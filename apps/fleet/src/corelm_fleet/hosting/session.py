"""`Session`: the calls of one caller to an engine. Frames with calls arrive, and frames with answers are sent back."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from corelm.errors import CoreLMError, InvalidRequestError, described
from corelm_fleet.hosting.channel import Frame, Kind
from corelm_fleet.hosting.failures import Failure
from corelm_fleet.hosting.packing import pack
from corelm_fleet.hosting.server import EngineServer
from corelm_fleet.hosting.transport import Sender


class Session:
    """Serves the frames of one caller. An engine may have several callers. The sender takes the answers."""

    def __init__(self, server: EngineServer, sender: Sender) -> None:
        self._server, self._sender = server, sender
        #: The numbers of the calls that have not ended. Two callers number their calls alike.
        self._under_way: set[int] = set()

    def handle(self, frame: Frame) -> None:
        """Begin what a frame asks for; return at once."""
        number = frame.call
        if frame.kind is Kind.FORGET:
            self._server.forget((self, number))
            return
        self._under_way.add(number)
        try:
            answer, tell = partial(self._answer, number), partial(self._tell, number)
            self._server.start((self, number), value_of(frame), answer, tell)
        except Exception as error:
            # The call cannot be read, or the system has no room for another thread.
            self._answer(number, Failure.of(error))

    def end(self) -> None:
        """Abort the calls of a caller that is gone."""
        for number in list(self._under_way):
            self._server.forget((self, number))

    def _answer(self, number: int, result: Any) -> None:
        self._under_way.discard(number)
        send_value(self._sender, Kind.ERROR if isinstance(result, Failure) else Kind.RESULT, number, result)

    def _tell(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        send_value(self._sender, Kind.EVENT, number, (name, args))


def send_value(sender: Sender, kind: Kind, number: int, value: Any) -> None:
    """Send a frame with a value. If the value cannot be packed, send the reason as an error."""
    try:
        packed = pack(value)
    except Exception as error:
        kind, packed = Kind.ERROR, pack(Failure.of(error))
    # If the caller has ended, the one who receives notices it.
    with suppress(OSError):
        sender.send_packed(kind, number, packed)


def value_of(frame: Frame) -> Any:
    """Return the value of a frame.

    Raises:
        InvalidRequestError: it cannot be read here.
    """
    try:
        return frame.value()
    except CoreLMError:
        raise
    except Exception as error:
        raise InvalidRequestError(
            f"the process that holds the engine cannot read what it was sent: {described(error)}. Functions and "
            "classes have to be importable there"
        ) from error
