"""Find out whether a TCP port of this machine belongs to a process of ours, before a key is sent to it.

Linux only: other systems do not say which process listens on a port without the rights of an administrator.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

#: A listening socket, in the notation of ``/proc/net/tcp``.
_LISTEN = "0A"

Owner = Literal["none", "ours", "foreign", "unknown"]


def owner_of_port(port: int, ancestor: int) -> Owner:
    """Return whose the sockets are that listen on `port`, on any address.

    Args:
        port: the port.
        ancestor: a process id: sockets of this process and of its descendants are ours.

    Returns:
        ``none`` if no process listens, ``ours`` if only ours do, ``foreign`` if a process that is not ours does, and
        ``unknown`` on a system that does not say.
    """
    if not sys.platform.startswith("linux"):
        return "unknown"
    listening = set(_listening_inodes(port))
    if not listening:
        return "none"
    links = {f"socket:[{inode}]" for inode in listening}
    for pid in _family(ancestor):
        links -= set(_open_files(pid))
    return "foreign" if links else "ours"


def _listening_inodes(port: int) -> Iterator[str]:
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        # Without IPv6 there is no second table.
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            local, state, inode = fields[1], fields[3], fields[9]
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                yield inode


def _family(ancestor: int) -> set[int]:
    """Return the process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of a process is in parentheses and may hold anything.
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    family, waiting = set(), [ancestor]
    while waiting:
        pid = waiting.pop()
        family.add(pid)
        waiting += children.get(pid, ())
    return family


def _open_files(pid: int) -> Iterator[str]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        # The process has ended.
        return
    for name in names:
        try:
            yield os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
