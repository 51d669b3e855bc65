"""Which replica gets which rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from corelm.errors import InvalidRequestError
from corelm_fleet.routing import PROMPT_TOKEN, Group, LeastWork, Loads, assign, split

ROOT = Path(__file__).parents[3]


def group(*rows: int, key: object = None, prompt: int = 100, new: float = 10) -> Group:
    return Group(rows=rows or (0,), prompt=prompt, new=new, key=key)


def test_a_group_goes_where_the_least_work_is():
    assert LeastWork().choose(group(), Loads(a=3, b=1, c=2)) == "b"


def test_the_samples_of_a_prompt_go_to_one_replica():
    found = assign([group(0, 1, 2, 3), group(4, 5, 6, 7)], Loads(a=0, b=0), LeastWork())
    assert sorted(found[0][1].rows + found[1][1].rows) == list(range(8))
    assert {name for name, _ in found} == {"a", "b"} and len(found) == 2


def test_the_largest_groups_are_placed_first():
    sizes = [1, 1, 1, 1, 4]
    groups = [group(new=100.0 * size, prompt=0) for size in sizes]
    found = assign(groups, Loads(a=0, b=0), LeastWork())
    work = {name: sum(each.work for to, each in found if to == name) for name in "ab"}
    assert work == {"a": 400, "b": 400}


def test_a_big_batch_is_spread_in_proportion_to_the_free_capacity():
    table = Loads(a=500, b=0)
    found = assign([group(row, new=10, prompt=0) for row in range(100)], table, LeastWork())
    assert sum(name == "a" for name, _ in found) == 25 and table["a"] == table["b"] == 750


def test_a_group_beyond_the_share_of_a_replica_is_split_but_not_into_single_rows():
    found = assign([group(*range(64))], Loads(a=0, b=0, c=0, d=0), LeastWork())
    assert sorted(len(each.rows) for _, each in found) == [16, 16, 16, 16]
    assert {name for name, _ in found} == set("abcd")
    assert len(assign([group(*range(8))], Loads(a=0, b=0, c=0, d=0), LeastWork())) == 1
    assert [each.rows for each in split(group(*range(17)), 1.0)] == [tuple(range(8)), tuple(range(8, 17))]


def test_a_session_stays_while_its_replica_is_not_overloaded():
    policy, table = LeastWork(), Loads(a=0, b=0)
    assert policy.choose(group(key="s"), table) == "a"
    table["a"] += 100
    table["b"] += 90
    assert policy.choose(group(key="s"), table) == "a"
    assert policy.choose(group(), table) == "b"


def test_a_session_leaves_an_overloaded_replica_and_stays_where_it_went():
    policy, table = LeastWork(), Loads(a=0, b=0, c=0)
    policy.choose(group(key="s"), table)
    for name, work in (("a", 500), ("b", 10), ("c", 20)):
        table[name] += work
    assert policy.choose(group(key="s"), table) == "b"
    table["b"] += 5
    table["c"] -= 20
    assert policy.choose(group(key="s"), table) == "b"


def test_what_a_replica_saves_by_its_prefix_cache_counts():
    policy, table = LeastWork(overload=0.0), Loads(a=0, b=0)
    policy.choose(group(key="s"), table)
    table["a"] += 100
    assert policy.choose(group(key="s", prompt=round(101 / PROMPT_TOKEN)), table) == "a"
    assert policy.choose(group(key="s", prompt=round(99 / PROMPT_TOKEN)), table) == "b"


def test_a_session_leaves_a_replica_that_takes_no_rows():
    policy, table = LeastWork(), Loads(a=0, b=0)
    assert policy.choose(group(key="s"), table) == "a"
    del table["a"]
    assert policy.choose(group(key="s"), table) == "b"
    assert policy.choose(group(key="s"), Loads()) is None
    assert assign([group()], Loads(), policy) == []


@pytest.mark.parametrize("chosen", ["a", "z"])
def test_a_policy_that_chooses_a_replica_that_takes_no_rows_is_refused(chosen):
    class Wrong(LeastWork):
        def choose(self, group, loads):
            return chosen

    table = Loads(a=0, b=0, c=0)
    del table["a"]
    assert table["a"] == table["z"] == 0.0 and table.takers == {"b", "c"}
    with pytest.raises(InvalidRequestError, match=f"policy: it chose '{chosen}', which takes no rows now; b, c do"):
        assign([group()], table, Wrong())


def test_a_key_that_many_rows_share_spreads():
    policy, table = LeastWork(), Loads(a=0, b=0, c=0, d=0)
    for row in range(40):
        assign([group(row, key="hot")], table, policy)
    assert min(table[name] for name in "abcd") > 0.5 * table.mean


def test_only_so_many_keys_are_remembered():
    policy, table = LeastWork(remember=2), Loads(a=0, b=0)
    policy.choose(group(key=1), table)
    table["a"] += 1
    policy.choose(group(key=2), table)
    policy.choose(group(key=3), table)
    table["b"] += 2
    assert policy.choose(group(key=2), table) == "b"
    table["a"] += 0.5
    table["b"] -= 1.75
    assert policy.choose(group(key=1), table) == "b", "1 was forgotten"


def test_the_simulation_runs_and_no_row_is_lost():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.routing", "--quick"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| our routing ") == 3
