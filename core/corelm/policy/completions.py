"""Completions in a user's TensorDict: a `Text` or `Tokens` with a `prompt` and a `response`, but no `full`.

Only the responses are scored: loglikelihoods, multiple choice, the two answers of a preference pair.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor

from corelm.backend.arguments import not_texts, rows_of_ids
from corelm.backend.skipping import OnError, ServedRows
from corelm.containers.classes import Text, Tokens
from corelm.errors import InvalidRequestError, Problems, TokenBoundaryWarning, first_few, level_of_caller, refuse
from corelm.policy.rows import InputRows
from corelm.policy.values import batch_of, differing_rows, find_value, leaves, nested_field
from corelm.rendering.completions import NO_COMPLETION, NO_PROMPT, Boundary, encode_completions
from corelm.rendering.render import Tokenize
from corelm.spec.records import TokenizeResult
from corelm.validate import as_list

if TYPE_CHECKING:
    from corelm.backend.backend import Backend

_REPEAT = "give each response a prompt, in a batch of the same shape: repeat the prompt for every one of its responses"


def are_completions(held: Any) -> bool:
    """Return whether a container, or a plain TensorDict, holds prompts and responses, and no whole sequences."""
    fields = set(held.keys()) if isinstance(held, (Text, Tokens, TensorDictBase)) else set()
    return {"prompt", "response"} <= fields and "full" not in fields


def _fields(held: Any) -> tuple[Any, Any]:
    plain = isinstance(held, TensorDictBase)
    prompt, response = (find_value(held, (name,)) if plain else getattr(held, name) for name in ("prompt", "response"))
    return prompt, response


def read_texts(
    td: TensorDictBase,
    key: tuple[str, ...],
    container: Any,
    tokenize: Tokenize,
    boundary: Boundary,
    options: Mapping[str, Any],
    on_error: OnError,
) -> InputRows:
    """Return the rows of prompts and responses.

    Responses may have more batch dimensions than prompts: each prompt then has several responses.

    Raises:
        InvalidRequestError: the shapes do not fit, or rows cannot be scored.
    """
    field = ".".join((*key, "response"))
    (prompts, outer), (responses, shape) = map(_leaves, _fields(container))
    if 0 in container.batch_size:
        outer = shape = tuple(container.batch_size)
    if any(isinstance(one, list) for one in responses):
        raise InvalidRequestError(f"{field}: prompts have different numbers of responses; {_REPEAT}", field=field)
    if shape[: len(outer)] != outer:
        raise InvalidRequestError(f"{field}: prompts are {outer}, responses {shape}; {_REPEAT}", field=field)
    prompts = [prompt for prompt in prompts for _ in range(math.prod(shape[len(outer) :]))]
    batch_of(td, shape[: td.batch_dims], (*key, "response"))
    problems = {row: f"response: {what}" for row, what in not_texts(responses).items()}
    problems |= {row: f"prompt: {what}" for row, what in not_texts(prompts).items()}
    read = ServedRows.without(problems, len(responses))
    first, rest = ([texts[row] for row in read.index.tolist()] for texts in (prompts, responses))
    encoded = encode_completions(tokenize, first, rest, boundary, options)
    number = read.index.tolist()
    problems |= {number[row]: what for row, what in encoded.problems.items()}
    if on_error == "raise":
        refuse(problems, field)
    if encoded.merged:
        rows = first_few([str(number[row]) for row in encoded.merged])
        warnings.warn(
            f"{field}: rows {rows}: a token holds the end of the prompt and the beginning of the response, and is not "
            "scored, as in lm-eval. Begin the responses with a space, or pass completion_boundary='separate'",
            TokenBoundaryWarning,
            stacklevel=level_of_caller(),
        )
    starts = torch.zeros(len(responses), dtype=torch.int64).index_copy(0, read.index, encoded.starts)
    asked, said = read.values(first, ""), read.values(rest, "")
    return InputRows(
        batch_size=shape,
        ids=read.ragged(encoded.ids),
        texts=tuple(one + other for one, other in zip(asked, said, strict=True)),
        prompt_lengths=starts,
        only_response=True,
        parts=(asked, said),
        problems=problems,
    )


def _leaves(value: Any) -> tuple[list[Any], tuple[int, ...]]:
    # tensordict turns an empty list into an empty tensor.
    return ([], (0,)) if isinstance(value, Tensor) and value.numel() == 0 else leaves(value)


def with_full(tokens: Any, key: str) -> Tokens:
    """Return `Tokens` of prompts and responses with their `full`, in the layout that they have.

    Args:
        tokens: `Tokens`, or a plain TensorDict with a ``prompt`` and a ``response``.
        key: the key that holds them, for errors.

    Raises:
        InvalidRequestError: their shapes do not fit.
    """
    if isinstance(tokens, TensorDictBase):
        given = dict(zip(("prompt", "response"), map(as_list, _fields(tokens)), strict=True))
        if any(isinstance(ids, list) for ids in given.values()):
            # tensordict makes a tensor of rows that happen to be equally long.
            rows = {name: list(ids.unbind()) if isinstance(ids, Tensor) else ids for name, ids in given.items()}
            return Tokens.from_rows(**rows)
        ids = given["prompt"]
        shape = tokens.batch_size if not isinstance(ids, Tensor) or ids.is_nested else ids.shape[:-1]
        tokens = Tokens(**given, batch_size=shape)
    try:
        prompt, response = tokens.prompt, tokens.response
    except InvalidRequestError:  # dense rows of different widths
        return lazy_stack([with_full(row, key) for row in tokens.unbind(0)])
    if not tokens.padded:
        return Tokens.from_rows(prompt=prompt, response=response)
    if nested_field(tokens, "prompt") is not None or nested_field(tokens, "response") is not None:
        nested = {"prompt": rows_of_ids(prompt, f"{key}.prompt"), "response": rows_of_ids(response, f"{key}.response")}
        return Tokens.from_rows(**{name: list(one.split()) for name, one in nested.items()})
    if prompt.ndim == 0 or prompt.shape[:-1] != response.shape[:-1]:
        raise InvalidRequestError(
            f"{key}.response: prompts are {list(prompt.shape)}, responses {list(response.shape)}; {_REPEAT}",
            field=f"{key}.response",
        )
    return Tokens(
        prompt=prompt, response=response, full=torch.cat([prompt, response], -1), batch_size=tokens.batch_size
    )


def spelled_by(
    held: Any, read: InputRows, sampled: InputRows, at: Collection[int], backend: Backend, options: Mapping[str, Any]
) -> bool:
    """Return whether a text was sampled as these ids: its prompt's own ids, and ids that decode to its response.

    Tokenized again, a response may become other ids: the text has no EOS, and one text has many spellings.

    Args:
        held: the value that is read; only a `Text` with a prompt and a response can tell.
        read: the whole texts, tokenized.
        sampled: the ids, split into prompts and responses.
        at: the rows to look at.
        backend: tokenizes and decodes.
        options: how prompts are tokenized.
    """
    parts = sampled.tokens
    if not isinstance(held, Text) or not {"prompt", "response"} <= set(held.keys()) or parts.prompt is None:
        return False
    rows = torch.tensor(sorted(at), dtype=torch.int64)
    prompts, responses = ([_leaves(each)[0][row] for row in rows.tolist()] for each in (held.prompt, held.response))
    if not_texts(prompts) or not_texts(responses) or read.texts is None:
        return False
    if [one + other for one, other in zip(prompts, responses, strict=True)] != [read.texts[row] for row in rows]:
        return False
    if differing_rows(parts.prompt.select(rows), with_one_bos(backend)(prompts, **options).ids):
        return False
    assert parts.response is not None
    decoded = (
        backend.detokenize(parts.response.select(rows), skip_special_tokens=skip, before=before)
        for skip in (True, False)
        for before in (parts.prompt.select(rows), None)
    )
    return all(response in spellings for response, spellings in zip(responses, zip(*decoded, strict=True), strict=True))


def unscorable(rows: InputRows) -> Problems:
    """Return the rows of tokens that have nothing to score, and why."""
    prompts = rows.prompt_lengths
    assert prompts is not None
    found: Problems = dict.fromkeys((rows.ids.lengths <= prompts).nonzero().flatten().tolist(), NO_COMPLETION)
    return {**found, **dict.fromkeys((prompts == 0).nonzero().flatten().tolist(), NO_PROMPT)}


def with_one_bos(backend: Backend) -> Tokenize:
    """Return what tokenizes texts for a backend. A text that begins with the BOS itself, as rendered prompts and
    `text.full` do, gets no second one.
    """
    bos = getattr(backend.tokenizer, "bos_token_id", None)

    def tokenize(texts: Sequence[str], **options: Any) -> TokenizeResult:
        batch = backend.tokenize(texts, **options)
        starts, lengths, values = batch.ids.offsets[:-1], batch.ids.lengths, batch.ids.values
        long = (lengths > 1).nonzero()[:, 0]
        twice = long[(values[starts[long]] == bos) & (values[starts[long] + 1] == bos)] if bos is not None else long[:0]
        if not len(twice):
            return batch
        drop = torch.zeros_like(lengths)
        drop[twice] = 1
        kept = torch.ones_like(values, dtype=torch.bool)
        kept[starts[twice]] = False
        offsets = None if batch.offsets is None else batch.offsets[kept]
        return replace(batch, ids=batch.ids.slice(drop, lengths), offsets=offsets)

    return tokenize
