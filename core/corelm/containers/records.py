"""`to_records`: plain dicts for pandas, polars, `datasets` and JSONL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, product
from typing import Any, Literal

import torch
from tensordict import TensorDictBase, is_non_tensor
from torch import Tensor

from corelm import validate
from corelm.containers.classes import LogProbs, Masks, PerToken, Text, Tokens, flat, objects
from corelm.containers.history import ChatHistory, History
from corelm.containers.reading import (
    CONTAINERS,
    Path,
    TokenRows,
    about_ids,
    masks_of,
    must_have_batch,
    provenance_of_rows,
    ragged,
    scan,
    token_ids,
)
from corelm.errors import MissingKeyError
from corelm.tensors.ragged import Ragged, unreadable

Columns = dict[str, Sequence[Any]]


def to_records(
    td: TensorDictBase, by: Literal["row", "token"] = "row", *, tokenizer: Any = None
) -> list[dict[str, Any]]:
    """Return one plain dict per row, or per token: str, int, float, bool, None, and lists and dicts of them.

    All records have the same keys, in the same order::

        pandas.DataFrame(to_records(td))          datasets.Dataset.from_list(to_records(td))
        polars.from_dicts(to_records(td))         "\\n".join(json.dumps(record) for record in to_records(td))

    Keys of a row's record, if `td` has what they show:

    =======================================  =============================================================
    row, sample                              the row's index in the batch; ``sample`` only in a batch of
                                             two dimensions, ``index_2`` and so on in a larger one
    prompt, response                         texts; ``text`` if they are not split
    messages                                 the conversation, as ``history.full.to_chats()`` returns it
    finish_reason, errors, …                 every other entry of `td`, under its own key
    prompt_ids, response_ids                 ids without pads; ``ids`` if they are not split
    prompt_length, response_length           how many; ``length`` if they are not split
    log_probs                                of the response, else of all tokens; None where not scored
    log_probs_sum, log_probs_mean            over the scored ones of them; None if none is scored
    log_probs_prompt                         of the prompt, if one of its tokens is scored in any row
    kept_ids, kept_log_mass                  as long as ``log_probs``: a list of ids per token, empty for the whole
                                             vocabulary, and a number; None where not scored
    top_ids, top_log_probs, tail_log_mass    likewise; two lists of k per token, and a number
    backend, model, weight_version, mode,    the provenance of ``log_probs``
    temperature, support, penalties,         `version_runs`: lists of a version and its first token in the answer, empty
    adapter, version_runs                    if all tokens are of ``weight_version``
    assistant_mask                           as long as all ids: which tokens are the assistant's
    =======================================  =============================================================

    Keys of a token's record: ``row`` (``sample``), ``position``, ``part`` (prompt or response, if rows are
    split), ``id``, ``token`` (its text, with `tokenizer`), ``log_prob`` (None where not scored), ``scored``,
    ``kept_ids`` and the other four keys about ids, ``assistant``, and one key for each `PerToken` and for
    ``argmax`` (-1 where not scored).

    A container under another key keeps that key: that of ``ref_log_probs`` is ``ref_log_probs``, its provenance
    ``ref_log_probs_backend`` and so on; nested keys are joined with dots. A tensor ``[*batch, 1]`` gives a
    number, a wider one a list, pads included, because nothing says what its columns are.

    NaN and infinities stay what they are, which the other libraries read. JSON has neither: ``json.dumps`` writes
    ``NaN`` and ``-Infinity``, which only some parsers accept; ``json.dumps(record, allow_nan=False)`` raises instead.

    Args:
        td: what a policy returned, or any TensorDict with containers; may be a single row, with batch shape ().
        by: "row" or "token".
        tokenizer: decodes each id alone for ``token``; a character split over several tokens shows as U+FFFD.

    Raises:
        InvalidRequestError: an entry is not plain data, two entries give the same key, dense tokens have no
            masks, or fields of one row have different lengths; `field` names the entry.
        MissingKeyError: ``by="token"``, but there are no tokens.
    """
    validate.one_of("by", by, ("row", "token"))
    if not isinstance(td, TensorDictBase):
        raise validate.invalid("td", f"expected a TensorDict, such as a policy returns, got {type(td).__name__}")
    if by == "token":
        return _token_records(td, tokenizer)
    if tokenizer is not None:
        raise validate.invalid("tokenizer", 'only by="token" decodes ids; leave the tokenizer out')
    columns = _index(td)
    for name, values in _row_columns(td).items():
        if name in columns:
            raise validate.invalid(
                name, f"two entries give the key {name!r}; rename one: td.rename_key_({name!r}, 'other')"
            )
        columns[name] = values
    return _records(columns)


def _records(columns: Columns) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _index(td: TensorDictBase) -> Columns:
    """Return the index of every row, one column per batch dimension."""
    shape = tuple(td.batch_size) or (1,)
    indices = list(product(*map(range, shape)))
    names = ["row", "sample", *(f"index_{dim}" for dim in range(2, len(shape)))]
    return {names[dim]: [index[dim] for index in indices] for dim in range(len(shape))}


# By row --------------------------------------------------------------------------------------------------------------

#: What parts of a container are called in a record.
_TEXTS = {"prompt": "prompt", "response": "response", "full": "text"}
_CHATS = {"prompt": "prompt_messages", "response": "response_messages", "full": "messages"}


def _row_columns(td: TensorDictBase) -> Columns:
    """Return the columns of all entries: texts first, lists of numbers last."""
    found, held = scan(td)
    own = {".".join(path) for path, value in found.items() if not isinstance(value, CONTAINERS)}
    columns: Columns = {}
    for kind in (Text, ChatHistory, History, object, Tokens, LogProbs, PerToken, Masks):
        for path, value in found.items():
            if kind is object and not isinstance(value, CONTAINERS):
                columns[".".join(path)] = _plain_values(td, path, value)
            elif kind is not object and isinstance(value, kind):
                must_have_batch(td, path, value)
                for name, values in _columns_of(held, path, value).items():
                    # An entry that is called like a column of a container keeps its name: td["prompt"] next to Text.
                    name = name if name not in own and name not in columns else f"{'.'.join(path)}.{name}"
                    columns[name] = values
    return columns


def _columns_of(held: TensorDictBase, path: Path, value: Any) -> Columns:
    key = ".".join(path)
    if isinstance(value, Text):
        parts = [name for name in ("prompt", "response") if name in value.keys()] or ["full"]
        texts = {_named(path, "text", _TEXTS[name]): getattr(value, name) for name in parts}
        return {name: flat(text) for name, text in texts.items()}
    if isinstance(value, ChatHistory):
        parts = ["full"] if "full" in value.keys() else [name for name in _CHATS if name in value.keys()]
        return {_named(path, "history", _CHATS[name]): _messages(getattr(value, name)) for name in parts}
    if isinstance(value, History):
        return {"messages" if path == ("history",) else key: _messages(value)}
    if isinstance(value, Tokens):
        return _id_columns(held, path)
    if isinstance(value, LogProbs):
        return _log_prob_columns(held, path, value)
    field, name = "all_assistant_mask", _named(path, "masks", "assistant_mask")
    if isinstance(value, PerToken):
        field, name = "full", key
    if field not in value.keys():
        return {}
    return {name: ragged(held, (*path, field), masks=masks_of(held, path)).tolist()}


def _named(path: Path, default: str, column: str) -> str:
    """Return the name of a column of the container at `path`. Containers under another key than `default` keep it."""
    return column if path == (default,) else f"{'.'.join(path)}_{column}"


def _messages(history: History) -> list[Any]:
    return [_plain([message.to_dict() for message in chat], "history") for chat in history.chats]


def _id_columns(held: TensorDictBase, path: Path) -> Columns:
    ids, start = token_ids(held, path, masks_of(held, path))
    parts = {"": ids} if start is None else {"prompt_": ids.slice(stop=start), "response_": ids.slice(start)}
    columns: Columns = {}
    for part, rows in parts.items():
        columns[_named(path, "tokens", f"{part}ids")] = rows.tolist()
        columns[_named(path, "tokens", f"{part}length")] = rows.lengths.tolist()
    return columns


def _log_prob_columns(held: TensorDictBase, path: Path, log_probs: LogProbs) -> Columns:
    key, rows = ".".join(path), TokenRows(held, [path], masks_of(held, path))
    whole, marks = rows.log_probs(path)
    # The response is the end of all tokens.
    start = rows.prompt_lengths if "response" in log_probs.keys() else torch.zeros_like(rows.lengths)
    scored, before = marks.slice(start), marks.slice(stop=start)
    numbers = _scored_only(whole.slice(start).tolist(), scored)
    columns: Columns = {key: numbers}
    for field, about in about_ids(held, path, rows.masks).items():
        last = [row[len(row) - len(own) :] for row, own in zip(about.tolist(), numbers, strict=True)]
        columns[_named(path, "log_probs", field)] = _scored_only(last, scored)
    counted = [[number for number in row if number is not None] for row in numbers]
    columns[f"{key}_sum"] = [math.fsum(row) if row else None for row in counted]
    columns[f"{key}_mean"] = [math.fsum(row) / len(row) if row else None for row in counted]
    if {"prompt", "response", "scored_mask"} <= set(log_probs.keys()) and bool(before.values.any()):
        columns[f"{key}_prompt"] = _scored_only(whole.slice(stop=start).tolist(), before)
    labels = [{} if label is None else label.to_dict() for label in provenance_of_rows(log_probs, len(numbers))]
    for attribute in next(filter(None, labels), {}):
        found = [_plain(label.get(attribute), key) for label in labels]
        columns[_named(path, "log_probs", attribute)] = found
    return columns


def _scored_only(rows: list[list[Any]], scored: Ragged) -> list[list[Any]]:
    pairs = zip(rows, scored.tolist(), strict=True)
    return [[value if counts else None for value, counts in zip(*row, strict=True)] for row in pairs]


# Plain data ----------------------------------------------------------------------------------------------------------


def _plain_values(td: TensorDictBase, path: Path, value: Any) -> list[Any]:
    """Return an entry that is no container as one plain value a row."""
    name = ".".join(path)
    dims = len(td.batch_size)
    if isinstance(value, Tensor) and (why := unreadable(value)):
        raise validate.invalid(name, f"it is {why}; leave it out: td.exclude({name!r})")
    if isinstance(value, list):
        return [_plain(row, name) for row in value]
    if is_non_tensor(value):
        return [_plain(one, name) for one in objects(value, dims)]
    if not isinstance(value, Tensor):
        return [_plain(value, name)] * math.prod(td.batch_size)
    return [_plain(row, name) for row in (value.flatten(0, dims - 1) if dims else value[None])]


def _plain(value: Any, name: str) -> Any:
    """Return a value as str, int, float, bool, None, or lists and dicts of them, and refuse anything else."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value if type(value) in (int, float) else (int if isinstance(value, int) else float)(value)
    if isinstance(value, Tensor):
        return value.item() if value.shape == (1,) else value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(one, name) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, name) for one in value]
    if hasattr(value, "__array__") and hasattr(value, "tolist"):
        return _plain(value.tolist(), name)
    kind = type(value).__name__
    raise validate.invalid(name, f"it holds a {kind}, which is not plain data; leave it out: td.exclude({name!r})")


# By token ------------------------------------------------------------------------------------------------------------


def _token_records(td: TensorDictBase, tokenizer: Any) -> list[dict[str, Any]]:
    found = TokenRows.of(td)
    if found is None:
        raise MissingKeyError('to_records(by="token") needs tokens, and this TensorDict has none', field="tokens")
    ids, start = found.ids()
    columns: Columns = {name: [values[row] for row in ids.row_index.tolist()] for name, values in _index(td).items()}
    columns["position"] = ids.positions.tolist()
    if start is not None:
        columns["part"] = ["response" if after else "prompt" for after in found.in_response.tolist()]
    columns["id"] = ids.values.tolist()
    if tokenizer is not None:
        text = {one: tokenizer.decode([one], skip_special_tokens=False) for one in dict.fromkeys(columns["id"])}
        columns["token"] = [text[one] for one in columns["id"]]
    for path in found.paths_of(LogProbs):
        key, own, (values, scored) = ".".join(path), path == ("log_probs",), found.log_probs(path)
        columns["log_prob" if own else key] = flat(_scored_only(values.tolist(), scored))
        columns["scored" if own else f"{key}_scored"] = scored.values.tolist()
        for name, rows in about_ids(found.td, path, found.masks).items():
            columns[name if own else f"{key}_{name}"] = list(chain.from_iterable(_scored_only(rows.tolist(), scored)))
    if (assistant := found.assistant()) is not None:
        columns["assistant"] = assistant.values.tolist()
    columns |= {".".join(path): found.read((*path, "full")).values.tolist() for path in found.paths_of(PerToken)}
    return _records(columns)
