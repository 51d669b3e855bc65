"""Conversations, rendered by core and by the tokenizer itself."""

from collections.abc import Sequence
from typing import Any

import torch

from corelm.containers.history import History
from corelm.rendering.render import RenderedChats, render
from corelm.spec.records import TokenizeResult
from corelm.tensors.ragged import Ragged
from helpers import chat_templates as ct

TOKENIZER = ct.tokenizer()
ID = {text: TOKENIZER.convert_tokens_to_ids(text) for text in ct.SPECIAL}
EOS_IDS = frozenset({ID["<|im_end|>"], ID["<|eot|>"]})
VOCABULARY = len(TOKENIZER)

QUESTION = {"role": "user", "content": "What is the capital of France?"}
ANSWER = {"role": "assistant", "content": "The capital is Paris."}
MORE = {"role": "user", "content": "And of Italy?"}


def tokenize(
    texts: Sequence[str], *, add_special_tokens: bool, parse_special: bool = True, offsets: bool = False
) -> TokenizeResult:
    encoded = TOKENIZER(
        list(texts),
        add_special_tokens=add_special_tokens,
        split_special_tokens=not parse_special,
        return_offsets_mapping=offsets,
    )
    pairs = [pair for row in encoded["offset_mapping"] for pair in row] if offsets else None
    return TokenizeResult(
        ids=Ragged.from_list(encoded["input_ids"]),
        offsets=None if pairs is None else torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2),
    )


def rendered(chats: list[Any], template: str | None = None, prompt: bool = False, **options: Any) -> RenderedChats:
    options = {"tokenize": tokenize, "eos_ids": EOS_IDS, **options}
    chats = History.from_chats(chats).chats
    return render(chats, TOKENIZER, add_generation_prompt=prompt, chat_template=template, **options)


def ids_of(chat: list[Any], template: str, prompt: bool = False, **options: Any) -> list[int]:
    return rendered([chat], template, prompt, **options).ids.tolist()[0]


def own(chat: list[Any], template: str, prompt: bool = False, **options: Any) -> Any:
    """Render with the tokenizer, as an oracle: ids and, for a template with markers, the assistant mask."""
    return TOKENIZER.apply_chat_template(
        chat, chat_template=template, add_generation_prompt=prompt, return_dict=True, **options
    )


def sampled(text: str, **fields: Any) -> dict[str, Any]:
    """Return a turn with one id per character, unlike any tokenizer; a special token at the end is one id."""
    end = next((special for special in ct.SPECIAL if text.endswith(special)), "")
    body = text.removesuffix(end)
    ids = [i for row in TOKENIZER([*body])["input_ids"] for i in row] + ([ID[end]] if end else [])
    return {"role": "assistant", "content": body, "token_ids": ids, **fields}
