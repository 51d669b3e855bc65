"""Sessions within the limits of a store: which are dropped, which are in use, and what is read while they go on."""

import gc
import random

import pytest

from corelm.errors import MissingKeyError
from corelm_serve.session_tree import SessionIndex, SessionTree
from corelm_serve.sessions import SessionStore
from helpers.serving import told

HI = {"role": "user", "content": "Hi"}
NEXT = {"role": "user", "content": "And then?"}
PIP = {"role": "assistant", "content": "I am Pip."}


def test_the_sessions_used_longest_ago_are_dropped_but_none_in_use():
    store = SessionStore(limit_sessions=3)
    names = "abcd"
    turns = {name: store.begin([HI], session=name) for name in names}
    assert store.ids() == tuple(names)
    for name in "bca":
        turns[name].record(prompt_ids=[1], ids=[2], message=PIP)
    turns["b"].close()
    assert store.ids() == ("d", "c", "a") and store.dropped == 1
    with pytest.raises(MissingKeyError, match="'b'"):
        store.get("b")
    turns["c"].close()
    told(store, [HI], PIP, session="e")
    assert store.ids() == ("d", "a", "e") and store.dropped == 2
    # What was dropped is no longer found, and its name is free.
    session, messages = told(store, [HI, PIP, NEXT], PIP, session="b")
    assert messages[1].token_ids is None and len(store.get(session).nodes) == 4


def test_a_turn_that_its_owner_lost_does_not_keep_a_session():
    store = SessionStore(limit_sessions=1)
    turn = store.begin([HI], session="a")
    del turn
    gc.collect()
    told(store, [HI], PIP, session="b")
    assert store.ids() == ("b",) and store.dropped == 1


def test_a_session_is_kept_for_the_turns_that_are_left():
    store = SessionStore(limit_sessions=1)
    kept, lost, closed = (store.begin([HI], session="a") for _ in range(3))
    closed.close()
    del lost, closed
    gc.collect()
    told(store, [HI], PIP, session="b")
    assert store.ids() == ("a",)
    kept.close()
    told(store, [HI], PIP, session="c")
    assert store.ids() == ("c",)


def test_what_is_dropped_is_what_a_list_in_order_of_use_says():
    for seed in range(20):
        drop_by_use(random.Random(seed), SessionStore(limit_sessions=4, limit_tokens=60))


def drop_by_use(rng, store):
    kept, turns, held = [], {}, {}

    def used(name):
        if name in kept:
            kept.remove(name)
        kept.append(name)
        for one in [*kept]:
            if (len(kept) > 4 or sum(held[other] for other in kept) > 60) and not turns[one]:
                kept.remove(one)

    for _ in range(200):
        name = rng.choice("abcdefgh")
        if name not in kept or rng.random() < 0.4:
            turn = store.begin_tokens([1, 2, 3], session=name)
            held[name] = held[name] if name in kept else 3
            turns[name] = [*(turns[name] if name in kept else ()), turn]
        elif turns[name] and rng.random() < 0.6:
            size = rng.randrange(8)
            turns[name][0].record(ids=[5] * size)
            held[name] += size
        elif turns[name]:
            turn = turns[name].pop()
            # Without an answer, a session ends with its last turn.
            turn.answered or turn.record(ids=[])
            used(name)
            turn.close()
        else:
            continue
        used(name)
        assert store.ids() == tuple(kept) and store.tokens == sum(held[one] for one in kept)


def test_a_session_is_read_as_it_was_while_it_goes_on():
    tree = SessionTree("a", named=True, now=0.0, index=SessionIndex())
    first = tree.add(None, "message", 1.0)
    read = tree.reader()
    tree.updated = 2.0
    tree.add(first, "message", 2.0)
    tree.remove_unasked(first.children[0])
    assert [node.id for node in read().nodes] == [0] and read().updated == 0.0
