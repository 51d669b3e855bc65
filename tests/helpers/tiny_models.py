"""The wide models of the conformance kit as objects, and rows of ids for them.

``CORELM_TEST_DEVICE=cuda`` puts the models on the GPU: ``make test-gpu`` runs the plugin's own tests there.
"""

import copy
import functools
import os
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from corelm_testing import wide_models

CONTEXT, FAMILIES, VOCAB = wide_models.CONTEXT, wide_models.FAMILIES, wide_models.VOCAB
tiny_tokenizer = wide_models.wide_tokenizer
DEVICE = os.environ.get("CORELM_TEST_DEVICE", "cpu")


def tiny_model(family: str = "qwen2", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a tiny random model with wide weights on `DEVICE`, in eval mode."""
    model: PreTrainedModel = wide_models.random_model(family, seed=seed, **changes).to(DEVICE)
    return model


@functools.cache
def tokenizer_that_names_only_eos() -> PreTrainedTokenizerFast:
    """Return `tiny_tokenizer` without the names of its other special tokens, as some base models come."""
    backend = copy.deepcopy(tiny_tokenizer().backend_tokenizer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tiny_tokenizer().eos_token)


def random_rows(*lengths: int, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Return rows of these lengths of random ids, which may be special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]
