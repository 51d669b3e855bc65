"""`LoadedWeights`: whether an engine has weights to answer with."""

from __future__ import annotations

from dataclasses import dataclass

from corelm.errors import CapabilityError


@dataclass(slots=True)
class LoadedWeights:
    """Whether an engine has weights. A plugin asks it before every call, and clears it when weights were loaded.

    Attributes:
        absent: why there are none, such as "it was opened with load_format='dummy'"; empty while there are some.
    """

    absent: str = ""

    def require(self) -> None:
        """Refuse a call that needs weights.

        Raises:
            CapabilityError: the engine has none; `capability` is ``weights``.
        """
        if self.absent:
            raise CapabilityError(
                f"the engine has no weights to answer with: {self.absent}; call update_weights(...) first",
                capability="weights",
            )
