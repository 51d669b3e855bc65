"""A tiny model that writes letters: any ids that it can sample are those that its tokenizer makes of their text.

A server that takes and returns text alone then leaves nothing unknown.
"""

import copy
import functools

from tokenizers import processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from corelm_testing.tiny import build_tokenizer
from helpers.tiny_models import tiny_model

#: Three special tokens, and one for each byte.
VOCAB = 3 + 256
EOS = 2
#: A logit so low that its token is never sampled.
_NEVER = -100.0


@functools.cache
def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that makes one id of every byte."""
    return build_tokenizer("", VOCAB)


def bos_tokenizer() -> PreTrainedTokenizerFast:
    """Return the same tokenizer, but one that puts id 1 before a text, as many do with BOS."""
    backend = copy.deepcopy(letter_tokenizer().backend_tokenizer)
    bos = backend.id_to_token(1)
    backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 1)])
    eos = letter_tokenizer().eos_token
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)


@functools.cache
def letters() -> list[int]:
    """Return the ids that stand for one printable character each."""
    tokenizer = letter_tokenizer()
    texts = {token: tokenizer.decode([token]) for token in range(3, VOCAB)}
    return [token for token, text in texts.items() if text.isascii() and text.isprintable()]


def letter_model(seed: int = 0, *, ends: bool = True) -> PreTrainedModel:
    """Return a random model that writes letters, and EOS after some ten of them if it `ends`."""
    model = tiny_model("phi-biased", seed=seed, vocab_size=VOCAB)
    bias = model.lm_head.bias.data
    written = [*letters(), EOS] if ends else letters()
    kept = bias[written].clone()
    bias.fill_(_NEVER)
    bias[written] = kept
    if ends:
        bias[EOS] += 2.0
    return model
