"""The wide models of the conformance kit as objects, and rows of ids for them."""

from __future__ import annotations

import copy
import functools

import torch
from transformers import PreTrainedTokenizerFast

from corelm.testing import wide_models

CONTEXT, FAMILIES, VOCAB = wide_models.CONTEXT, wide_models.FAMILIES, wide_models.VOCAB
tiny_model, tiny_tokenizer = wide_models.random_model, wide_models.wide_tokenizer


@functools.cache
def tokenizer_that_names_only_eos() -> PreTrainedTokenizerFast:
    """Return `tiny_tokenizer` without the names of its other special tokens, as some base models come."""
    backend = copy.deepcopy(tiny_tokenizer().backend_tokenizer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tiny_tokenizer().eos_token)


def random_rows(*lengths: int, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Return rows of these lengths of random ids, which may be special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]
