"""Texts to ids with a tokenizer, and where the completion begins in the ids of a prompt and it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from corelm.errors import Problems
from corelm.spec.records import TokenizeRequest, TokenizeResult
from corelm.tensors.ragged import Ragged


class Encoder:
    """Encodes texts with `tokenizer`, a callable that returns a mapping with `input_ids`, as in transformers.

    One thread encodes at a time, because encoding changes the settings of a fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.RLock()

    def __call__(self, request: TokenizeRequest) -> TokenizeResult:
        if not request.texts:
            return TokenizeResult(ids=Ragged.from_list([]))
        # Pass only the options that differ from their defaults, so that a plain callable works as a tokenizer.
        options: dict[str, Any] = {"add_special_tokens": request.add_special_tokens}
        if not request.parse_special:
            options["split_special_tokens"] = True
        if request.offsets:
            options["return_offsets_mapping"] = True
        if (getattr(type(self.tokenizer).__call__, "__module__", "") or "").startswith("transformers."):
            # transformers warns of texts longer than `model_max_length`. Core knows the context of the engine.
            options["verbose"] = False
        with self._lock:
            encoded = self.tokenizer(list(request.texts), **options)
        offsets = None
        if request.offsets:
            pairs = chain.from_iterable(encoded["offset_mapping"])
            offsets = Ragged.from_list([list(chain.from_iterable(pairs))]).values.reshape(-1, 2)
        return TokenizeResult(ids=Ragged.from_list(encoded["input_ids"]), offsets=offsets)


# Prompts and completions ----------------------------------------------------------------------------------------------


class Tokenize(Protocol):
    """Texts to ids, one row per text, as `Backend.tokenize` does it."""

    def __call__(
        self, texts: Sequence[str], *, add_special_tokens: bool, parse_special: bool = True, offsets: bool = False
    ) -> TokenizeResult: ...


#: How prompt and completion become ids: tokenized as one text, or each by itself.
Boundary = Literal["joint", "separate"]

NO_PROMPT = (
    "the prompt has no tokens, and only a token after another one has a log-prob; give a longer prompt, or begin it "
    "with the tokenizer's BOS or EOS token, as lm-eval does"
)
NO_COMPLETION = "the completion has no tokens, so there is nothing to score"


@dataclass(frozen=True, slots=True, eq=False)
class EncodedCompletions:
    """Prompts and completions as ids, one row per pair.

    Attributes:
        ids: the ids of prompt and completion together.
        starts: int64[rows], the position in `ids` at which the completion begins.
        problems: the rows that cannot be scored, and why.
        merged: the rows in which a token holds the end of the prompt and the beginning of the completion.
    """

    ids: Ragged
    starts: Tensor
    problems: Problems
    merged: tuple[int, ...]


def encode_completions(
    tokenize: Tokenize,
    prompts: Sequence[str],
    completions: Sequence[str],
    boundary: Boundary = "joint",
    options: Mapping[str, Any] | None = None,
) -> EncodedCompletions:
    """Tokenize pairs of a prompt and a completion. See `PolicyOptions.completion_boundary`.

    Special tokens that the tokenizer adds at the end of a text never count as the prompt's: with "joint" they follow
    the completion, with "separate" they are left out.

    `options` are `add_special_tokens` and `parse_special`, for `tokenize`.
    """
    options = {"add_special_tokens": True, **(options or {})}
    joint = boundary == "joint"
    starts_of = [prompt.rstrip() for prompt in prompts] if joint else list(prompts)
    place = {text: number for number, text in enumerate(dict.fromkeys(starts_of))}
    alone = tokenize(list(place), **options).ids
    alone = alone.slice(stop=(alone.lengths - _ending(tokenize, options)).clamp_min(0))
    first = alone.select(torch.tensor([place[text] for text in starts_of], dtype=torch.int64))
    if joint:
        ids = tokenize([prompt + rest for prompt, rest in zip(prompts, completions, strict=True)], **options).ids
    else:
        ids = first.join(tokenize(list(completions), **{**options, "add_special_tokens": False}).ids)
    starts = torch.minimum(first.lengths, ids.lengths)
    problems: Problems = {}
    for row, (start, length) in enumerate(zip(first.lengths.tolist(), ids.lengths.tolist(), strict=True)):
        if start == 0:
            problems[row] = NO_PROMPT
        elif start >= length and not completions[row]:
            problems[row] = "the completion is empty, so there is nothing to score"
        elif start >= length:
            problems[row] = f"prompt and completion together have {length} tokens, and the prompt alone has {start}"
            if completions[row].strip():
                problems[row] += "; they merge into one token, so begin the completion with a space"
    pairs = zip(ids.slice(stop=starts).tolist(), first.tolist(), strict=True) if joint else ()
    merged = tuple(row for row, (one, other) in enumerate(pairs) if one != other and row not in problems)
    return EncodedCompletions(ids, starts, problems, merged)


def _ending(tokenize: Tokenize, options: Mapping[str, Any]) -> int:
    """Return how many special tokens the tokenizer adds at the end of a text."""
    if not options["add_special_tokens"]:
        return 0
    (full,) = tokenize(["a"], **options).ids.tolist()
    (bare,) = tokenize(["a"], **{**options, "add_special_tokens": False}).ids.tolist()
    ends = [at + len(bare) for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare]
    return len(full) - ends[-1] if ends else 0
