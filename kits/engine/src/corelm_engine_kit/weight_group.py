"""`WeightGroup`: where a server on another machine joins this process, to be sent the tensors of new weights."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from corelm.validate import count, invalid, shown

_FIELD = "weight_group"
_LAST_PORT = 2**16 - 1


@dataclass(frozen=True)
class WeightGroup:
    """The address at which a server joins a process group with this process, its rank 0, which sends the tensors.

    >>> WeightGroup("10.0.0.5", port=29600).address()
    ('10.0.0.5', 29600)

    Args:
        host: the address or name by which the server reaches this process.
        port: a TCP port of this machine that the server may reach; None for a free one.

    Raises:
        InvalidRequestError: not an address and a port; `field` is ``weight_group``.
    """

    host: str
    port: int | None = None

    def __post_init__(self) -> None:
        # A URL, or a port in the host, would only be noticed by a server that waits for a process that never comes.
        is_name = isinstance(self.host, str) and self.host.strip() == self.host != "" and "/" not in self.host
        if not is_name or self.host.count(":") == 1:
            raise invalid(
                _FIELD,
                "expected the host by which the server reaches this process, as in "
                f"WeightGroup('10.0.0.5', port=29600); got {shown(self.host)}",
            )
        if self.port is not None:
            count(f"{_FIELD}.port", self.port, 1, _LAST_PORT)

    @classmethod
    def given(cls, value: Any) -> WeightGroup | None:
        """Return the option ``weight_group=`` as one of these: it may be a host alone, or None.

        Raises:
            InvalidRequestError: it is something else; `field` is ``weight_group``.

        >>> WeightGroup.given("trainer.local")
        WeightGroup(host='trainer.local', port=None)
        """
        return value if value is None or isinstance(value, cls) else cls(value)

    def address(self) -> tuple[str, int]:
        """Return host and port. Where none was given, the port is one that is free now, and another each time."""
        if self.port is not None:
            return self.host, self.port
        with socket.socket() as probe:
            probe.bind(("", 0))
            return self.host, probe.getsockname()[1]
