"""Which replica gets which rows. Nothing here has a thread, a clock or an engine.

`assign` chooses for all groups of a call. A *group* is the rows of one prompt: they go to one replica, which reads the
prompt once, unless they are more than its share. A `Policy` chooses the replica of one group; `LeastWork` is that of a
fleet by default. `Loads` knows how much work each replica has.

Work is counted in sampled tokens. A prompt token counts less, because an engine reads many at once. How long an answer
gets is not known before, so `max_new_tokens` stands for it unless the caller knows better.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from corelm.validate import invalid, shown

#: The work of a prompt token, in sampled tokens.
PROMPT_TOKEN = 0.05
#: A group is not split into pieces of fewer rows.
SMALLEST_PIECE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows that begin with the same prompt.

    Attributes:
        rows: their numbers.
        prompt: tokens of the prompt.
        new: tokens that each row will sample, as far as is known: `max_new_tokens`, for example.
        key: groups with equal keys share the beginning of their prompts, as the turns of a session do; None for none.
    """

    rows: tuple[int, ...]
    prompt: int
    new: float
    key: Hashable | None = None

    @property
    def work(self) -> float:
        return self.prompt * PROMPT_TOKEN + self.new * len(self.rows)

    @property
    def work_of_a_row(self) -> float:
        return self.work / len(self.rows)


class Loads(dict[str, float]):
    """The outstanding work of each replica that takes rows, by name; 0.0 for any other."""

    def __missing__(self, name: str) -> float:
        return 0.0

    @property
    def takers(self) -> frozenset[str]:
        """The replicas that take rows."""
        return frozenset(self)

    @property
    def mean(self) -> float:
        """The mean work; 0.0 if no replica takes rows."""
        return sum(self.values()) / len(self) if self else 0.0

    def least(self) -> str | None:
        """Return the replica with the least work; None if none takes rows."""
        return min(self, key=lambda name: (self[name], name), default=None)


class Policy(Protocol):
    """Chooses replicas."""

    def choose(self, group: Group, loads: Loads) -> str | None:
        """Return the replica that gets a group, one of those in `loads`; None if there is none, so that it waits."""


class LeastWork:
    """Sends a group to a replica that has its key unless all of these are overloaded, else where the least work is.

    A replica is overloaded if it has more than `overload` times the mean work, and would still answer later than the
    least loaded one after what it saves: it need not read the beginning of the prompt again. A key that many rows share
    so spreads over as many replicas as it needs.

    Args:
        overload: the multiple of the mean work up to which a replica gets more rows of its keys.
        homes: the largest number of replicas that are remembered for a key.
        remember: how many keys are remembered. Those that were used longest ago are forgotten first.
    """

    def __init__(self, overload: float = 1.25, homes: int = 32, remember: int = 100_000) -> None:
        self.overload = overload
        self.homes = homes
        self.remember = remember
        self._homes: OrderedDict[Hashable, list[str]] = OrderedDict()

    def choose(self, group: Group, loads: Loads) -> str | None:
        least = loads.least()
        if least is None or group.key is None:
            return least
        homes = self._homes.setdefault(group.key, [])
        self._homes.move_to_end(group.key)
        if len(self._homes) > self.remember:
            self._homes.popitem(last=False)
        home = min((name for name in homes if name in loads), key=loads.__getitem__, default=None)
        limit = max(self.overload * loads.mean, loads[least] + group.prompt * PROMPT_TOKEN)
        if home is not None and loads[home] <= limit:
            return home
        if least not in homes:
            homes.append(least)
            del homes[: -self.homes]
        return least


def assign(groups: Iterable[Group], loads: Loads, policy: Policy) -> list[tuple[str, Group]]:
    """Choose a replica for each group of a call, the largest first, and add their work to `loads`.

    A group that is more than the share of one replica is split. Without a replica that takes rows, nothing is assigned.

    Raises:
        InvalidRequestError: the policy chose a replica that takes no rows.

    >>> loads = Loads(a=0.0, b=0.0)
    >>> for name, group in assign([Group(rows=tuple(range(16)), prompt=9, new=5)], loads, LeastWork()):
    ...     print(name, group.rows)
    a (0, 1, 2, 3, 4, 5, 6, 7)
    b (8, 9, 10, 11, 12, 13, 14, 15)
    """
    asked = list(groups)
    share = loads.mean + sum(group.work for group in asked) / max(1, len(loads))
    pieces = [piece for group in asked for piece in split(group, share)]
    assigned = []
    for piece in sorted(pieces, key=lambda each: each.work, reverse=True):
        name = policy.choose(piece, loads)
        if name is None:
            continue
        if name not in loads:
            raise invalid("policy", f"it chose {shown(name)}, which takes no rows now; {', '.join(loads) or 'none'} do")
        loads[name] += piece.work
        assigned.append((name, piece))
    return assigned


def split(group: Group, share: float) -> Sequence[Group]:
    """Split a group into equal pieces of at most `share` work, but of no fewer than 8 rows."""
    count = len(group.rows)
    pieces = min(count // SMALLEST_PIECE, int(-(-group.work // share)) if share > 0 else 1)
    if pieces < 2:
        return [group]
    cuts = [count * piece // pieces for piece in range(pieces + 1)]
    # The first piece keeps the key's replica; the others go where the least work is.
    return [
        replace(group, rows=group.rows[start:end], key=group.key if start == 0 else None)
        for start, end in itertools.pairwise(cuts)
    ]
