"""`AnswerWriter`: lm-eval's generation arguments as sampling parameters, and sampled ids as the text that counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from torch import Tensor

from corelm import Backend
from corelm.errors import Problems
from corelm.spec import SamplingParams
from corelm.validate import invalid

#: What `hf` ignores in greedy decoding, though tasks often give it.
_IGNORED_IF_GREEDY = ("top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to answer requests with the same generation arguments.

    Attributes:
        sampling: what the engine gets.
        until: the text of an answer ends before the first of these; EOS is one of them.
        skip_special_tokens: whether special tokens are left out of the text.
    """

    sampling: SamplingParams
    until: list[str]
    skip_special_tokens: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of an answer that counts, and how many ids were sampled."""

    text: str
    tokens: int


class AnswerWriter:
    """Answers prompts of ids.

    Args:
        eot_token_id: ends an answer in addition to the engine's own ids.
        think_end_token: see `CoreLM`.
    """

    def __init__(
        self,
        engine: Backend,
        eot_token_id: int,
        max_length: int,
        max_gen_toks: int,
        think_end_token: str | int | None,
    ) -> None:
        self._engine = engine
        self._eot = eot_token_id
        self._max_length = max_length
        self._max_gen_toks = max_gen_toks
        self._think_end = think_end_token
        self._eos_text = engine.detokenize([[eot_token_id]], skip_special_tokens=False)[0]

    def settings(self, given: Mapping[str, Any]) -> Settings:
        """Return what lm-eval's arguments of a request stand for.

        Raises:
            InvalidRequestError: an argument that is unknown or out of range, or an answer that leaves no room for a
                prompt.
        """
        kwargs: dict[str, Any] = {**normalize_gen_kwargs(dict(given), self._max_gen_toks)}
        until = [text for text in kwargs.pop("until") if text]
        new = kwargs.pop("max_gen_toks")
        if new >= self._max_length:
            raise invalid("max_gen_toks", f"{new} leave no room for a prompt in max_length={self._max_length}")
        kwargs.setdefault("temperature", 0.0)
        if kwargs["temperature"] == 0:
            kwargs = {name: each for name, each in kwargs.items() if name not in _IGNORED_IF_GREEDY}
        named = SamplingParams.make(kwargs, max_new_tokens=new)
        if named.num_samples is not None:
            raise invalid("num_samples", "lm-eval expects one answer to a request; set `repeats` of the task instead")
        until = [*dict.fromkeys([*until, *named.stop])]
        sampling = SamplingParams.make(
            named,
            # Thinking may contain any of these strings, so they are looked for in the text after it.
            stop=() if self._think_end is not None else until,
            stop_token_ids=named.stop_token_ids if named.ignore_eos else (*named.stop_token_ids, self._eot),
            # `until` may name special tokens. The text that counts is made here, from the ids.
            skip_special_tokens=False,
        )
        ends = until if named.ignore_eos else handle_stop_sequences(until, eos=self._eos_text)
        return Settings(sampling, ends, named.skip_special_tokens)

    def __call__(
        self, prompts: Sequence[list[int]], settings: Settings, seeds: Tensor | None
    ) -> tuple[list[Answer], Problems]:
        """Return the answer to each prompt, and what was wrong with the rows that failed."""
        sampling = settings.sampling
        room = self._max_length - (sampling.max_new_tokens or 0)
        result = self._engine.generate(
            [ids[-room:] for ids in prompts], sampling, logprobs="none", seeds=seeds, on_error="skip"
        )
        rows = result.ids.tolist()
        counted = [self._after_thinking(ids) for ids in rows]
        texts = self._engine.detokenize(counted, skip_special_tokens=settings.skip_special_tokens)
        if result.texts is not None:
            texts = list(result.texts)
        if isinstance(self._think_end, int):
            texts = [text.lstrip() for text in texts]
        named = self._think_end if isinstance(self._think_end, str) else None
        answers = [
            Answer(postprocess_generated_text(text, settings.until, named), len(ids))
            for text, ids in zip(texts, rows, strict=True)
        ]
        errors = result.errors or [""] * len(rows)
        ended = zip(result.finish_reasons, errors, strict=True)
        bad = {row: error or f"it ended with {why!r}" for row, (why, error) in enumerate(ended) if why in _FAILED}
        return answers, bad

    def _after_thinking(self, ids: list[int]) -> list[int]:
        """Return the ids after the last one that ends thinking, if an id does."""
        if not isinstance(self._think_end, int) or self._think_end not in ids:
            return ids
        return ids[len(ids) - ids[::-1].index(self._think_end) :]


def stable_numbers(prompts: Iterable[str]) -> Iterator[int]:
    """Yield a number for each prompt that depends on its text, and on how many equal prompts precede it."""
    seen: Counter[str] = Counter()
    for prompt in prompts:
        digest = blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        yield int.from_bytes(digest, "big") + seen[prompt]
        seen[prompt] += 1


#: The finish reasons of rows without a whole answer.
_FAILED = frozenset({"abort", "error"})
