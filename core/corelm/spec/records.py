"""The records that cross the hook boundary. One request and one result per hook; a record can grow a field, a
signature cannot.

`rows` is the number of prompts (or sequences) in a request; row r of every result belongs to row r of its request.
Token ids are int64, log-probabilities float32 and in nats, masks bool. No result holds an inference tensor, and what a
result holds is its own: a plugin does not write to it again. Nor does anybody write to what a `ContainerRequest` holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from torch import Tensor, device

from corelm.spec.provenance import Mode, Provenance, Support

# Plugins take these two from `corelm.spec`.
from corelm.tensors.ragged import Ragged as Ragged
from corelm.tensors.ragged import Side as Side

if TYPE_CHECKING:
    from corelm.spec.message import Message
    from corelm.spec.sampling import SamplingParams

T = TypeVar("T")

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizeRequest:
    """Rendered texts; templates have been applied in core.

    Attributes:
        parse_special: False reads the text of a special token as ordinary characters (a user may type one).
        offsets: also say which characters each token covers.
    """

    texts: tuple[str, ...]
    add_special_tokens: bool
    parse_special: bool = True
    offsets: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizeResult:
    """`ids`: one row per text. `offsets`, if asked for: int64[total, 2], the characters [start, end) each id stands
    for.
    """

    ids: Ragged
    offsets: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """Sample one answer for every prompt.

    Core has expanded prompts × samples (so ``sampling.num_samples`` is None, unless the backend declares
    `native_samples`) and has resolved EOS, `stop_token_ids` and `ignore_eos` into `stop_ids`: an answer ends with,
    and keeps, the first of them.

    Attributes:
        logprobs: which log-probability of each sampled token is wanted.
        seeds: int64[answers], each in [0, 2**63), or None for "any": answer i is drawn from its own stream
            ``seeds[i]``.
        request_ids: one unique name per row, for `abort`.
        timeout: seconds for the whole call, or None.
    """

    prompts: Ragged
    sampling: SamplingParams
    logprobs: Literal["none", "raw", "processed"]
    seeds: Tensor | None
    stop_ids: frozenset[int]
    request_ids: tuple[str, ...]
    timeout: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateResult:
    """The answers. `ids` and `logprobs` are equally long in every row; the id that ended an answer is part of both.

    A stop string: the token that completes it stays in `ids`. `mode`, `temperature` and `support` describe the
    log-probabilities (see `Provenance`); `texts` is for an engine whose text is not what its tokenizer decodes.
    `errors`: what went wrong with a row whose finish reason is `error`, "" elsewhere.
    """

    ids: Ragged
    logprobs: Ragged | None
    finish_reasons: tuple[str, ...]
    mode: Mode = "raw"
    temperature: float = 1.0
    support: Support = "full"
    texts: tuple[str, ...] | None = None
    weight_versions: tuple[str, ...] | None = None
    errors: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreRequest:
    """Log-probability of every given token from position ``score_from[r]`` (≥ 1) on; earlier ones need not be computed.

    Attributes:
        return_logits: also return the logits. grad: results carry gradients to the model's parameters.
        device: where the results should be; None for the plugin's choice.
    """

    sequences: Ragged
    score_from: Tensor
    temperature: float
    return_logits: bool
    grad: bool
    device: device | None
    request_ids: tuple[str, ...]
    timeout: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreResult:
    """`logprobs` and `scored` are as long as the sequences. Where `scored` is False (position 0 always) the value is
    0.0.

    `logits`, if asked for, is ``values[total, vocab]`` in the model's own scale, before any temperature: row t predicts
    token t; rows that are not scored are 0. `errors`: what went wrong with a row of which nothing is scored, ""
    elsewhere.
    """

    logprobs: Ragged
    scored: Ragged
    logits: Ragged | None = None
    mode: Mode = "raw"
    temperature: float = 1.0
    support: Support = "full"
    weight_versions: tuple[str, ...] | None = None
    errors: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Parts(Generic[T]):
    """One thing as `prompt`, `response` and `full`; None where the input does not tell them apart."""

    prompt: T | None
    response: T | None
    full: T


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A dense layout of `full`: bool[rows, width], and how many of the columns are the prompt's (None: no split)."""

    mask: Tensor
    prompt_width: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContainerRequest:
    """Everything known about a batch of rows, to be wrapped for the user.

    Attributes:
        batch_size: the shape of the result; its product is the number of rows, in C order.
        fields: which of text, tokens, masks, log_probs and history to build.
        logprobs, scored: as long as ``tokens.full``. provenance: one per row, or one for all.
        assistant: bool, as long as ``tokens.full``; None where it cannot be known.
        errors: a message per row, "" where it went well.
        retokenized: whether sampled turns of a row were rendered from their text and lost their ids; None where all
            ids were kept.
        pad_output: dense tensors instead of one row a sample. columns: the dense layout to keep; None to choose one.
    """

    batch_size: tuple[int, ...]
    fields: frozenset[str]
    tokens: Parts[Ragged]
    texts: Parts[tuple[str, ...]] | None = None
    chats: Parts[tuple[tuple[Message, ...], ...]] | None = None
    logprobs: Ragged | None = None
    scored: Ragged | None = None
    provenance: Provenance | tuple[Provenance, ...] | None = None
    assistant: Ragged | None = None
    finish_reasons: tuple[str, ...] | None = None
    errors: tuple[str, ...] | None = None
    retokenized: tuple[bool, ...] | None = None
    pad_output: bool = False
    pad_id: int = 0
    columns: Columns | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightUpdate:
    """New weights, as exactly one of a state dict and a path, and the name every later result carries.

    Core calls the hook while no other call is under way; without `drain` it has aborted what was.
    """

    version: str
    drain: bool
    state_dict: Mapping[str, Tensor] | None = None
    path: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AbortRequest:
    """End these requests; they finish with what they have and the reason `abort`."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HealthRequest:
    """Is the engine able to serve?"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CloseRequest:
    """Release everything the engine holds."""
