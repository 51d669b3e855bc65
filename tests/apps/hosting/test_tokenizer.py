"""The stand-in of a tokenizer of transformers answers like the tokenizer."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from corelm import Backend


@pytest.fixture
def there(model_host: Backend) -> Any:
    return model_host.tokenizer


@pytest.fixture
def here(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def test_calls_return_what_the_tokenizer_returns(here: Any, there: Any) -> None:
    texts = ["Hi", "Who are you?"]
    for args, options in [
        ((texts,), {}),
        (("Hi",), {}),
        ((texts,), {"padding": True, "return_tensors": "pt"}),
        ((["Hi"], ["there"]), {}),
        ((), {"text": "Hi"}),
    ]:
        found, expected = there(*args, **options), here(*args, **options)
        assert found.keys() == expected.keys()
        for key in found:
            one, other = found[key], expected[key]
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    ids = here("Who are you?")["input_ids"]
    assert there.decode(token_ids=ids) == here.decode(ids) == there.decode(ids) == there.decode(torch.tensor(ids))
    assert there.decode([here.eos_token_id], True) == here.decode([here.eos_token_id], skip_special_tokens=True)
    assert there.encode("Hi") == here.encode("Hi")
    chat = [{"role": "user", "content": "Hi"}]
    for options in ({"tokenize": True, "return_dict": False}, {"tokenize": False}):
        assert there.apply_chat_template(chat, **options) == here.apply_chat_template(chat, **options)
        assert there.apply_chat_template(conversation=chat, **options) == here.apply_chat_template(chat, **options)


def test_it_is_neither_copied_nor_pickled(there: Any) -> None:
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            duplicate(there)


def test_attributes_that_follow_from_a_new_one_change_too(here: Any, there: Any) -> None:
    for tokenizer in (here, there):
        tokenizer.pad_token = tokenizer.eos_token
    assert there.pad_token_id == here.pad_token_id == here.eos_token_id
    new = len(here)
    assert there.decode([new]) == here.decode([new])
    for tokenizer in (here, there):
        tokenizer.add_special_tokens({"additional_special_tokens": ["<new>"]})
    assert there.decode([new]) == here.decode([new]) == "<new>"
    assert set(there.all_special_ids) == set(here.all_special_ids)
    assert "<new>" in [str(token) for token in there.added_tokens_decoder.values()]
