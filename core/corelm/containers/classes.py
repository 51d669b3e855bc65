"""The containers that every engine fills in the same way (`Text`, `Tokens`, `Masks`, `LogProbs`, `ChatHistory`), and
`PerToken` for values computed from them.

Each is a TensorClass: it slices, stacks, saves and moves with the TensorDict that holds it. With batch ``(B,)``, fields
read as::

    td["tokens"].response         # dense: int64[B, width]; otherwise a list of B tensors
    td["text"].response           # a list of B strings
    td["log_probs"].provenance    # one Provenance, or a tuple of them if rows differ

With batch ``()`` a field is one tensor or one string, with ``(B, n)`` a list of lists. A field that is absent reads as
None and is not among the keys. A field can be set to any value of the kind that it returns. `from_rows` makes a
container of rows of their own length; one made with the constructor is dense, unless you pass ``padded=False``. Call
`ragged` for flat values in either layout.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, NonTensorData, NonTensorStack, TensorClass, TensorDict

from corelm.containers.fields import COUNTS, SETS, as_stored, field_readers, is_padded, row_objects, strings, tensors
from corelm.containers.from_rows import container_of_rows
from corelm.containers.history import History
from corelm.errors import InvalidRequestError
from corelm.spec.provenance import Provenance
from corelm.tensors.token_sets import TokenSets

Strings = Any  # str, list[str], list[list[str]] …: nested like the batch
Tensors = Any  # Tensor, or list[Tensor], list[list[Tensor]] …: nested like the batch


@field_readers(strings)
class Text(TensorClass["nocast"]):
    """The text of each row.

    Attributes:
        prompt: the prompt as the model saw it.
        response: the text of the response.
        full: the prompt and the response as the model saw them, or the whole text if rows are not split.
    """

    prompt: Strings = None
    response: Strings = None
    full: Strings = None


@field_readers(tensors, padded=is_padded)
class Tokens(TensorClass["nocast"]):
    """int64 token ids; time is the last dimension. `ContainerRequest` draws them in both layouts.

    Attributes:
        prompt: the ids of the prompt; dense: padded on the left.
        response: the ids of the response; dense: padded on the right.
        full: the prompt followed by the response; dense: with the pads of both.
        padded: whether the rows are dense.
    """

    prompt: Tensors = None
    response: Tensors = None
    full: Tensors = None
    padded: bool = True

    @classmethod
    def from_rows(cls, *, prompt: Any = None, response: Any = None, full: Any = None) -> Tokens:
        """Build from rows of their own length, which have no pads and need no masks.

        ``Tokens.from_rows(prompt=[[5, 17], [300]])`` has batch ``(2,)``, one list of ids has batch ``()``, and lists of
        lists of rows have batch ``(B, n)``. A row may also be a tensor or an array of one dimension.

        Args:
            prompt: the rows of the prompts.
            response: the rows of the responses.
            full: the rows of both; None joins them if both are given.

        Raises:
            InvalidRequestError: a row is malformed, or the fields do not fit each other; `rows` are the rows at fault.
        """
        given = {"prompt": prompt, "response": response, "full": full}
        return container_of_rows(cls, torch.int64, given)


@field_readers(tensors, padded=is_padded)
class Masks(TensorClass["nocast"]):
    """Masks, bool, each shaped like ``tokens.full``.

    Attributes:
        all_attention_mask: True where there is a token, False in pads.
        all_assistant_mask: True where a token is the assistant's.
        all_response_mask: True where a token is part of the response.
        padded: whether the rows are dense.
    """

    all_attention_mask: Tensors = None
    all_assistant_mask: Tensors = None
    all_response_mask: Tensors = None
    padded: bool = True

    @classmethod
    def from_rows(
        cls, *, all_attention_mask: Any = None, all_assistant_mask: Any = None, all_response_mask: Any = None
    ) -> Masks:
        """Build from rows as long as those of ``tokens.full``, of True and False or 1 and 0. See `Tokens.from_rows`."""
        given = {
            "all_attention_mask": all_attention_mask,
            "all_assistant_mask": all_assistant_mask,
            "all_response_mask": all_response_mask,
        }
        return container_of_rows(cls, torch.bool, given)


def _provenance(container: Any, name: str) -> Any:
    """Return the provenance that all rows share, else a tuple of the distinct ones in order, else None."""
    # Rows made together share their datum, and most are, so each datum is read once.
    data = {id(datum): datum for datum in row_objects(container._tensordict, name) if datum}
    found = tuple(dict.fromkeys(map(as_provenance, data.values())))
    return found if len(found) > 1 else next(iter(found), None)


def as_provenance(datum: Mapping[str, Any]) -> Provenance:
    """Return the provenance that a container stores as plain data."""
    # JSON knows no tuples. What was stored before 1.1 has no runs.
    runs = {name: tuple(map(tuple, datum.get(name, ()))) for name in ("penalties", "version_runs")}
    return Provenance(**{**datum, **runs})


_INTEGERS = (SETS, COUNTS, "top_ids")


@field_readers(tensors, padded=is_padded, provenance=_provenance)
class LogProbs(TensorClass["nocast"]):
    """Log-probabilities, float32, in nats, shaped like the fields of `Tokens` with the same names.

    Attributes:
        prompt: those of the prompt's tokens.
        response: those of the response's tokens.
        full: those of all tokens.
        scored_mask: bool, shaped like `full`: where it is False, the log-probability is 0.0 and means nothing.
        padded: whether the rows are dense.
        provenance: the distribution of the numbers; a tuple if rows differ.
        kept_ids: int64: the ids that truncation had left when each token was sampled, those of all tokens of a row one
            after another; dense: padded on the right with -1. Numbers of truncated support are normalised over them.
            `corelm.token_sets` reads them.
        kept_counts: int64, shaped like `full`: how many of them belong to each token. 0 stands for the whole
            vocabulary, and for a token that was not scored.
        kept_log_mass: float32, shaped like `full`: the log of the probability that these ids had together before
            truncation. Log-prob + log mass is the log-prob under the whole tempered distribution.
        top_ids: int64, shaped like `full` with a last dimension of k: the most probable ids at each position, the most
            probable first, or those that the caller gave; -1 where there are fewer, where nothing is scored, in pads.
        top_log_probs: float32, like `top_ids`: their log-probabilities; -inf where there are fewer, 0.0 in pads.
        tail_log_mass: float32, shaped like `full`: the log of the probability that all other ids have together.
    """

    prompt: Tensors = None
    response: Tensors = None
    full: Tensors = None
    scored_mask: Tensors = None
    padded: bool = True
    provenance: Provenance | tuple[Provenance, ...] | None = None
    kept_ids: Tensors = None
    kept_counts: Tensors = None
    kept_log_mass: Tensors = None
    top_ids: Tensors = None
    top_log_probs: Tensors = None
    tail_log_mass: Tensors = None

    @classmethod
    def from_rows(
        cls,
        *,
        prompt: Any = None,
        response: Any = None,
        full: Any = None,
        scored_mask: Any = None,
        provenance: Provenance | None = None,
        kept_ids: Any = None,
        kept_counts: Any = None,
        kept_log_mass: Any = None,
        top_ids: Any = None,
        top_log_probs: Any = None,
        tail_log_mass: Any = None,
    ) -> LogProbs:
        """Build from rows as long as those of `Tokens`. See `Tokens.from_rows`.

        Args:
            prompt: the rows of the prompts.
            response: the rows of the responses.
            full: the rows of both; None joins them if both are given.
            scored_mask: as long as `full`; without it, every log-prob counts.
            provenance: the distribution of all rows, if it is known.
            kept_ids: `TokenSets` as long as `full`, or, together with `kept_counts`, the ids of each row.
            kept_counts: as long as `full`: how many of the ids of its row belong to each token.
            kept_log_mass: as long as `full`.
            top_ids: as long as `full`, with a row of k ids for each token.
            top_log_probs: like `top_ids`.
            tail_log_mass: as long as `full`.
        """
        if isinstance(kept_ids, TokenSets) and kept_counts is None:
            kept_ids, kept_counts = kept_ids.flat, kept_ids.counts
        elif (kept_ids is None) is not (kept_counts is None) or isinstance(kept_ids, TokenSets):
            raise InvalidRequestError(
                "LogProbs.kept_ids: rows of ids need kept_counts, how many of them belong to each token; pass both, or "
                "kept_ids=TokenSets.from_list([[[5, 17], []], [[300]]]) alone, with a list of ids for each token",
                field="kept_ids",
            )
        given = {"prompt": prompt, "response": response, "full": full, "scored_mask": scored_mask}
        given |= {"kept_ids": kept_ids, "kept_counts": kept_counts, "kept_log_mass": kept_log_mass}
        given |= {"top_ids": top_ids, "top_log_probs": top_log_probs, "tail_log_mass": tail_log_mass}
        floats = dict.fromkeys(given, torch.float32) | dict.fromkeys(_INTEGERS, torch.int64)
        known = {} if provenance is None else {"provenance": provenance.to_dict()}
        return container_of_rows(cls, {**floats, "scored_mask": torch.bool}, given, known)

    # Stored as plain data, so that memmap writes JSON and not a pickle.
    def set(self, key: NestedKey, value: Any, *args: Any, **kwargs: Any) -> LogProbs:
        value = value.to_dict() if isinstance(value, Provenance) else value
        return super().set(key, value, *args, **kwargs)


@field_readers(tensors, padded=is_padded)
class PerToken(TensorClass["nocast"]):
    """A number for each token, such as a penalty or a weight, for rows that are not padded.

    A TensorDict cannot hold such rows directly. Dense numbers need no container: they are plain tensors.

    Attributes:
        full: float, as long as ``tokens.full``; 0.0 where the number means nothing. The `argmax` of scores is int64,
            and -1 where nothing was scored. In pads, floats are 0.0 and integers -1.
        padded: whether the rows are dense.
    """

    full: Tensors = None
    padded: bool = True

    @classmethod
    def from_rows(cls, *, full: Any) -> PerToken:
        """Build from rows as long as those of ``tokens.full``. See `Tokens.from_rows`."""
        return container_of_rows(cls, torch.float32, {"full": full})


@field_readers(as_stored)
class ChatHistory(TensorClass["nocast"]):
    """Conversations. Append a message to `full` to get the prompt of the next turn.

    Attributes:
        prompt: the conversation before the response.
        response: the messages of the response.
        full: the prompt followed by the response.
    """

    prompt: History | None = None
    response: History | None = None
    full: History | None = None


#: Pass these to ``torch.serialization.add_safe_globals``, so that ``torch.load(file, weights_only=True)`` can read
#: containers.
SAFE_GLOBALS = (
    *(Text, Tokens, Masks, LogProbs, PerToken, ChatHistory, History),
    *(TensorDict, LazyStackedTensorDict, NonTensorData, NonTensorStack),
    copyreg.dispatch_table[TensorDict](TensorDict({}))[0],  # the function with which tensordict unpickles
)
