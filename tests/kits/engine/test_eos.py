"""The ids that end an answer, from every place that names some."""

from types import SimpleNamespace

from corelm_engine_kit import eos_token_ids


def test_every_source_adds_its_ids():
    generation, tokenizer = SimpleNamespace(eos_token_id=[2, 7]), SimpleNamespace(eos_token_id=3)
    assert eos_token_ids(generation, {"eos_token_id": 5}, tokenizer, vocab_size=10) == {2, 3, 5, 7}
    assert eos_token_ids(1, [4, 6], frozenset({8}), vocab_size=10) == {1, 4, 6, 8}


def test_a_source_may_name_none():
    unset = SimpleNamespace(eos_token_id=None)
    assert eos_token_ids(None, {}, {"eos_token_id": None}, unset, object(), vocab_size=10) == frozenset()


def test_ids_outside_the_vocabulary_are_left_out():
    assert eos_token_ids([-1, 0, 9, 10, 50256], vocab_size=10) == {0, 9}
