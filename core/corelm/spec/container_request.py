"""`ContainerRequest`: a batch of rows, and everything known about them, to be wrapped in containers.

The example is that of `corelm.spec.records`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor

from corelm.spec.provenance import Provenance
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets

if TYPE_CHECKING:
    from corelm.spec.message import Message

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parts(Generic[T]):
    """A value for the prompt, the response and both together.

    Attributes:
        prompt: None if the input does not tell prompt and response apart.
        response: None if the input does not tell prompt and response apart.
        full: the prompt followed by the response.
    """

    prompt: T | None
    response: T | None
    full: T


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Where the tokens of ``tokens.full`` are in a dense tensor.

    By default prompts are padded on the left and responses on the right (``prompt_width=3`` in the example). Rows that
    are not split are padded on the right (``prompt_width=None``)::

        split   .  5  6 | 11   2   .      mask   [[False, True, True,   True, True, False],
                7  8  9 | 12  13  14              [True,  True, True,   True, True, True ]]

        whole   5  6  11   2   .   .      mask   [[True,  True, True,   True, False, False],
                7  8   9  12  13  14              [True,  True, True,   True, True,  True ]]

    Attributes:
        mask: bool[rows, width]: True where there is a token.
        prompt_width: the number of columns that belong to the prompt; None if rows are not split.
    """

    mask: Tensor
    prompt_width: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContainerRequest:
    """Everything known about a batch of rows, to be wrapped in containers for the user.

    With ``pad_output=False`` each field is a list with one tensor per row, nested like the batch. The example gives::

        tokens.prompt               [ 5, 6 ]                    [ 7, 8, 9 ]
        tokens.response             [ 11, 2 ]                   [ 12, 13, 14 ]
        tokens.full                 [ 5, 6, 11, 2 ]             [ 7, 8, 9, 12, 13, 14 ]
        log_probs.full              [ 0.0, 0.0, -0.5, -0.1 ]    [ 0.0, 0.0, 0.0, -1.2, -0.3, -0.7 ]
        masks.all_response_mask     [ no, no, yes, yes ]        [ no, no, no, yes, yes, yes ]

    With ``pad_output=True`` each field is one tensor. Pads are `pad_id` in tokens, 0.0 in log-probs, False in masks::

        tokens.prompt               .    5    6              tokens.response     11    2    .
                                    7    8    9                                  12   13   14

        tokens.full                 .    5    6     11     2     .
                                    7    8    9     12    13    14

        log_probs.full              .    0.0  0.0   -0.5  -0.1   .
                                    0.0  0.0  0.0   -1.2  -0.3  -0.7

        masks.all_attention_mask    .    yes  yes   yes   yes    .
                                    yes  yes  yes   yes   yes   yes

    Attributes:
        batch_size: the shape of the result; its product is the number of rows, in C order.
        fields: which of `text`, `tokens`, `masks`, `log_probs` and `history` to build.
        tokens: the ids.
        texts: one str per row.
        chats: one conversation per row.
        logprobs: float32, as long as ``tokens.full``.
        scored: bool, as long as ``tokens.full``: False where the log-probability means nothing and is set to 0.0.
        kept_ids: as long as ``tokens.full``: the ids over which each log-probability was normalised, ascending. An
            empty set stands for the whole vocabulary, and for a token that was not scored.
        kept_log_mass: float32, as long as ``tokens.full``: the log of the probability that these ids had together
            before truncation; 0.0 where `scored` is False.
        top_ids: int64, ``values[total, k]``, as long as ``tokens.full``: the most probable ids, or the ids that the
            caller gave; -1 where there are fewer than k, and where `scored` is False.
        top_logprobs: float32, like `top_ids`: their log-probabilities; -inf where there are fewer than k, and 0.0 where
            `scored` is False.
        tail_log_mass: float32, as long as ``tokens.full``: the log of the probability that all other ids have together;
            0.0 where `scored` is False.
        argmax: int64, as long as ``tokens.full``: the most probable id at each position, -1 where `scored` is False.
        greedy: one per row: whether every token that counts is the most probable one.
        provenance: one per row, None for a row of unknown origin; or one for all rows.
        assistant: bool, as long as ``tokens.full``: True where a token is the assistant's; None if that is not known.
        finish_reasons: one per row.
        errors: one message per row, "" for a row without an error.
        retokenized: per row, whether its sampled turns were rendered from their text and lost their ids; None if all
            ids were kept.
        pad_output: True for dense tensors, False for one tensor per row.
        pad_id: the id in the pads of dense tokens.
        columns: the dense layout to keep; None chooses the default layout of `Columns`.
    """

    batch_size: tuple[int, ...]
    fields: frozenset[str]
    tokens: Parts[Ragged]
    texts: Parts[tuple[str, ...]] | None = None
    chats: Parts[tuple[tuple[Message, ...], ...]] | None = None
    logprobs: Ragged | None = None
    scored: Ragged | None = None
    kept_ids: TokenSets | None = None
    kept_log_mass: Ragged | None = None
    top_ids: Ragged | None = None
    top_logprobs: Ragged | None = None
    tail_log_mass: Ragged | None = None
    argmax: Ragged | None = None
    greedy: tuple[bool, ...] | None = None
    provenance: Provenance | tuple[Provenance | None, ...] | None = None
    assistant: Ragged | None = None
    finish_reasons: tuple[str, ...] | None = None
    errors: tuple[str, ...] | None = None
    retokenized: tuple[bool, ...] | None = None
    pad_output: bool = False
    pad_id: int = 0
    columns: Columns | None = None
