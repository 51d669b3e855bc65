"""`Oracle`: what the plain float32 forward of a checkpoint says, and what it would say with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corelm.application import Encoder, render
from corelm.errors import CoreLMError, TemplateError
from corelm.spec import Message, TokenizeRequest, TokenizeResult
from corelm.tensors.categorical import log_probs
from corelm_engine_kit.eos import eos_token_ids
from corelm_testing.plain_oracle import PlainOracle

Rows = Sequence[Sequence[int]]
#: One tensor a row, float32[len(row) - 1, vocabulary]: entry t holds the logits that predict the id at t + 1.
Tables = list[Tensor]

#: The most logits that are kept at a time: one gigabyte.
MOST_LOGITS = 250_000_000


@dataclass(frozen=True, eq=False)
class Oracle:
    """The plain forward of one checkpoint: one row at a time, no padding, no cache, float32."""

    plain: PlainOracle
    folder: Path
    tokenizer: Any

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> Oracle:
        """Load the checkpoint of a folder, and its tokenizer if it has one.

        Raises:
            InvalidRequestError: transformers is missing, or the folder holds no model; `field` is ``oracle``.
        """
        return cls(PlainOracle.load(folder), Path(folder), _tokenizer(folder))

    def tables(self, rows: Rows) -> Tables:
        """Return the logits that predict each id but the first of each row."""
        return [self.plain.logits(list(row[:-1])) if len(row) > 1 else torch.zeros(0, 1) for row in rows]

    def numbers(self, rows: Rows) -> list[Tensor]:
        """Return the log-prob of every id of each row; NaN for the first."""
        # One table at a time: all of them may not fit into memory.
        return [chosen(self.tables([row]), [row])[0] for row in rows]

    def with_config(self, **changes: Any) -> Oracle:
        """Return the same weights with other values in the configuration."""
        return replace(self, plain=PlainOracle.load(self.folder, config=changes))

    def in_dtype(self, dtype: torch.dtype) -> Oracle:
        """Return the same checkpoint in another dtype."""
        return replace(self, plain=PlainOracle.load(self.folder, dtype=dtype))

    def with_weights(self, change: Callable[[str, Tensor], Tensor]) -> Oracle:
        """Return the same model with each parameter changed."""
        return replace(self, plain=self.plain.with_weights(change))

    def eos_ids(self) -> frozenset[int]:
        """Return the ids that the checkpoint's files name as ends of an answer."""
        sources = self.plain.generation_config, self.plain.config, self.tokenizer
        return eos_token_ids(*sources, vocab_size=self.plain.config.vocab_size)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int] | None:
        """Return the ids of a text by the checkpoint's own tokenizer; None without one."""
        if self.tokenizer is None:
            return None
        made = self._tokenize((text,), add_special_tokens=add_special_tokens, parse_special=parse_special)
        return list(map(int, made.ids.tolist()[0]))

    def render(self, chat: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]] | None:
        """Return a conversation as text and ids of a prompt, by the checkpoint's own template; None without one."""
        if self.tokenizer is None:
            return None
        eos = getattr(self.tokenizer, "eos_token_id", None)
        try:
            return rendered(chat, self.tokenizer, self._tokenize, () if eos is None else (eos,))
        except TemplateError:
            return None

    def _tokenize(self, texts: Sequence[str], **options: bool) -> TokenizeResult:
        return Encoder(self.tokenizer)(TokenizeRequest(texts=tuple(texts), **options))


def rendered(
    chat: Sequence[Mapping[str, Any]], tokenizer: Any, tokenize: Callable[..., TokenizeResult], eos_ids: Collection[int]
) -> tuple[str, list[int]]:
    """Return a conversation as the text and the ids of a prompt."""
    messages = tuple(map(Message.from_dict, chat))
    made = render([messages], tokenizer, tokenize, add_generation_prompt=True, eos_ids=eos_ids, want_assistant=False)
    return made.texts[0], list(map(int, made.ids.tolist()[0]))


def chosen(tables: Sequence[Tensor], rows: Rows) -> list[Tensor]:
    """Return the log-prob of every id of each row under logits; NaN for the first."""
    found = []
    for table, row in zip(tables, rows, strict=True):
        numbers = torch.full((len(row),), torch.nan)
        if len(row) > 1:
            # In float64: the sum over a large vocabulary loses more in float32 than engines differ by.
            exact = log_probs(table.double())
            numbers[1:] = exact.gather(-1, torch.tensor(list(row[1:]))[:, None])[:, 0]
        found.append(numbers)
    return found


def affordable(rows: Rows, vocab_size: int) -> list[int]:
    """Return the indices of the rows whose logits fit into memory together."""
    kept, room = [], MOST_LOGITS
    for index, row in enumerate(rows):
        size = len(row) * vocab_size
        if size <= room:
            kept.append(index)
            room -= size
    return kept


def find_oracle(given: Any, models: Sequence[Any]) -> tuple[Oracle | None, str | None]:
    """Return the oracle that a caller asks for, and why there is none.

    Raises:
        InvalidRequestError: a folder was named, and it holds no model that transformers can load.
    """
    if given is None:
        return None, "oracle=None: no plain forward says which side is wrong"
    if given != "auto":
        return Oracle.load(given), None
    folders = [Path(model) for model in models if isinstance(model, (str, PathLike))]
    for folder in folders:
        if (folder / "config.json").is_file():
            try:
                return Oracle.load(folder), None
            except CoreLMError as error:
                return None, f"no plain forward says which side is wrong: {error}"
    return None, "no side names a folder with a model, so no plain forward says which side is wrong; pass oracle="


def without_bars() -> None:
    """Switch off the bars that transformers draws for every model of the plain forward, about 40 in one comparison."""
    try:
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        return
    disable_progress_bar()


def _tokenizer(folder: str | PathLike[str]) -> Any:
    try:
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(folder)
        # For a folder without the files of a tokenizer, transformers may return one that knows no text.
        return found if found("a b", add_special_tokens=False)["input_ids"] else None
    except Exception:  # a checkpoint without a tokenizer raises any of five types
        return None
