"""Which GPUs the processes of an engine may use, and whose CPU it is."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from corelm.validate import invalid, is_bool, shown

#: The variable by which CUDA is told which GPUs a process sees, by numbers or by names (UUIDs).
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def device_numbers(given: Any) -> list[int]:
    """Return the numbers of GPUs, as torch counts them in this process: 0 is ``cuda:0``.

    Args:
        given: a number, several, or a text of numbers with commas between them.

    Raises:
        InvalidRequestError: no numbers, a number twice, or one below 0; `field` is ``devices``.

    >>> device_numbers("2,3"), device_numbers(0)
    ([2, 3], [0])
    """
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, Iterable) else [given]
    numbers = [int(part) for part in parts if not is_bool(part) and str(part).strip().isdecimal()]
    if not numbers or len({*numbers}) < len(numbers) or len(numbers) < len(list(parts)):
        raise invalid("devices", f"expected the numbers of GPUs, each once, as in [0, 1]; got {shown(given)}")
    return numbers


def visible_devices(given: Any, environment: Mapping[str, str] = os.environ) -> str:
    """Return the value of ``CUDA_VISIBLE_DEVICES`` with which a child sees these GPUs and no others.

    Args:
        given: as for `device_numbers`.
        environment: that of this process. If it sees only some of the GPUs, the numbers count those.

    Raises:
        InvalidRequestError: as for `device_numbers`; or this process does not see a GPU of that number.

    >>> visible_devices([1], {"CUDA_VISIBLE_DEVICES": "4,5"}), visible_devices([1], {})
    ('5', '1')
    """
    numbers = device_numbers(given)
    seen = environment.get(VISIBLE_DEVICES)
    if seen is None:
        return ",".join(map(str, numbers))
    names = [name.strip() for name in seen.split(",") if name.strip()]
    if max(numbers) >= len(names):
        raise invalid("devices", f"this process sees {len(names)} GPUs, {VISIBLE_DEVICES}={seen!r}; got {shown(given)}")
    return ",".join(names[number] for number in numbers)


def cpu_vendor() -> str:
    """Return the maker of the CPU as it names itself, such as ``GenuineIntel``; "" if the system does not tell."""
    try:
        found = re.search(r"^vendor_id\s*: (\S+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return found[1] if found else ""
    except OSError:
        # Windows says "Intel64 Family 6 Model 142 Stepping 10, GenuineIntel".
        return platform.processor().rpartition(", ")[2]
