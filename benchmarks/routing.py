"""Compare the routing of a fleet with other ways, in a simulation of a thousand replicas.

    python -m benchmarks.routing [--quick] [--replicas 200] [--plot docs/drawings/routing.svg]

Each way serves the same requests (`fleet_simulation.py` says which, and how an engine is modelled): two streams
that ask for 90 % of the fleet's speed, one of them with some very frequent prompts, and one batch of rollouts. 3 % of
the replicas die and are restarted, 3 % are slow.

    our routing           `LeastWork` with `assign`
    least work            the least loaded replica; sessions are not kept together
    sticky                a new session goes to the least loaded replica and stays there while it runs
    random of two         the less loaded one of two random replicas
    round robin           one replica after the other
    static hash           the hash of the session or prompt says which replica

The table shows the seconds until a row is answered, and until all are; the largest outstanding work of a replica over
the mean (the median over time); the prompt tokens that were in a prefix cache; the tokens that died with a replica, of
those that were sampled; the rows that failed because two replicas died while they had them; the processor time to place
a group, and of an event of the state machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import zlib
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

from benchmarks.fleet_simulation import Outcome, Setting, Simulation
from corelm_fleet.routing import Group, LeastWork, Loads, Policy, assign


class LeastLoaded:
    """The least loaded replica."""

    def choose(self, group: Group, loads: Loads) -> str | None:
        return loads.least()


class Sticky:
    """A key stays on the replica that was the least loaded when it came first."""

    def __init__(self) -> None:
        self.kept: dict[Hashable, str] = {}

    def choose(self, group: Group, loads: Loads) -> str | None:
        name = self.kept.get(group.key) if group.key is not None else None
        if name is None or name not in loads:
            name = loads.least()
        if group.key is not None and name is not None:
            self.kept[group.key] = name
        return name


class RandomOfTwo:
    """The less loaded one of two."""

    def __init__(self) -> None:
        self.random = random.Random(2)

    def choose(self, group: Group, loads: Loads) -> str | None:
        names = sorted(loads)
        return min(self.random.choice(names), self.random.choice(names), key=loads.__getitem__) if names else None


class RoundRobin:
    """One replica after the other."""

    turn = -1

    def choose(self, group: Group, loads: Loads) -> str | None:
        self.turn += 1
        names = sorted(loads)
        return names[self.turn % len(names)] if names else None


class StaticHash:
    """The key says which replica; if it takes no rows, the next one."""

    def choose(self, group: Group, loads: Loads) -> str | None:
        names = sorted(loads)
        key = group.key if group.key is not None else group.rows
        return names[zlib.crc32(repr(key).encode()) % len(names)] if names else None


def one_by_one(groups: Sequence[Group], loads: Loads, policy: Policy) -> list[tuple[str, Group]]:
    """Place groups in the order in which they came, none of them split."""
    placed = []
    for group in groups:
        name = policy.choose(group, loads)
        if name is not None:
            loads[name] += group.work
            placed.append((name, group))
    return placed


#: Each way to route, with a function that makes its policy.
WAYS = {
    "our routing": LeastWork,
    "least work": LeastLoaded,
    "sticky": Sticky,
    "random of two": RandomOfTwo,
    "round robin": RoundRobin,
    "static hash": StaticHash,
}


def settings(replicas: int, seconds: float) -> dict[str, Setting]:
    return {
        "some prompts are frequent": Setting(replicas=replicas, seconds=seconds),
        "no prompt is frequent": Setting(replicas=replicas, seconds=seconds, shared=False),
        "one batch": Setting(replicas=replicas, seconds=0.0, batch=4 * replicas),
    }


def run(setting: Setting) -> Iterator[tuple[str, Outcome]]:
    """Serve the same requests in each way."""
    for way, make in WAYS.items():
        place = assign if way == "our routing" else one_by_one
        yield way, Simulation(setting, make(), place).run()


COLUMNS = ("p50 s", "p90 s", "p99 s", "all done s", "max/mean", "hits", "lost", "failed", "µs a choice", "µs an event")


def row_of(out: Outcome) -> list[str]:
    """Return the numbers of a way, in the order of `COLUMNS`."""
    cuts = statistics.quantiles(out.latencies, n=100)
    return [
        *(f"{cuts[percent - 1]:.1f}" for percent in (50, 90, 99)),
        f"{out.makespan:.0f}",
        f"{statistics.median(out.imbalance):.1f}",
        f"{out.hits / max(1, out.prompt_tokens):.1%}",
        f"{out.lost / out.sampled:.2%}",
        f"{out.failed}",
        f"{1e6 * out.deciding / out.decisions:.1f}",
        f"{1e6 * out.in_events / out.events:.1f}",
    ]


def table(title: str, found: dict[str, Outcome]) -> str:
    rows = [[title, *COLUMNS], *([way, *row_of(out)] for way, out in found.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "-|-".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def plot(found: dict[str, dict[str, Outcome]], path: Path) -> None:
    """Draw how many rows wait longer than so many seconds."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    # The same file each time, with its text as text.
    matplotlib.rcParams.update({"svg.hashsalt": "corelm", "svg.fonttype": "none"})
    canvas = Canvas(figsize=(5.2 * len(found), 3.8), layout="constrained")
    for axes, (title, ways) in zip(canvas.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        for way, out in ways.items():
            waits = sorted(out.latencies)
            shares = [10 ** (-step / 20) for step in range(81)]
            points = [waits[min(len(waits) - 1, int((1 - share) * len(waits)))] for share in shares]
            axes.plot(points, shares, label=way, linewidth=2.2 if way == "our routing" else 1.1)
        axes.set(
            title=title,
            xscale="log",
            yscale="log",
            xlabel="seconds until the answer",
            ylabel="part of rows that wait longer",
        )
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    canvas.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="simulate 20 replicas, in about a second")
    parser.add_argument("--replicas", type=int, default=1000, help="how many replicas to simulate")
    parser.add_argument("--plot", type=Path, default=None, help="where to draw the latencies; needs matplotlib")
    given = parser.parse_args()
    found: dict[str, dict[str, Outcome]] = {}
    for title, setting in settings(20 if given.quick else given.replicas, 15.0 if given.quick else 45.0).items():
        found[title] = {}
        for way, out in run(setting):
            found[title][way] = out
        print(table(title, found[title]), end="\n\n", flush=True)
    if given.plot is not None:
        plot(found, given.plot)
        print(f"drawn in {given.plot}")


if __name__ == "__main__":
    main()
