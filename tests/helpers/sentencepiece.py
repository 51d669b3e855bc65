"""A tokenizer that drops the first space of a text, as those of SentencePiece do, and a model that says its words."""

import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from corelm_testing.toy import Bigram

WORDS = ["▁Hello", "▁my", "▁friend", "<0xC3>", "<0xA9>", "."]
#: The text of all of them after one another.
WHOLE = "Hello my friendé."


def words_of_sentencepiece(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer. Ids 0 and 1 are <unk> and EOS, then come `WORDS`."""
    pieces = ["<unk>", "</s>", *WORDS]
    made = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="</s>", chat_template=chat_template
    )


def one_after_another() -> Bigram:
    """Return a model that says each word after the one before it, and then EOS."""
    size = len(WORDS) + 2
    table = torch.zeros(size, size)
    for token in range(2, size):
        table[token, token + 1 if token + 1 < size else 1] = 20.0
    return Bigram(table)
