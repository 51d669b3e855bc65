"""The records that cross the hook boundary: a request and a result for each hook.

A hook takes one record, and not separate arguments, because a record can gain a field without breaking plugins.

Row r of a result belongs to row r of its request. Ids are int64, log-probs are float32 and in nats, masks are
bool. A result holds no inference tensors, and a graph only if gradients were requested. Core copies ids,
offsets, log-probs and masks out of a result before the next call, so an engine may reuse their buffers. It
does not copy logits, nor results with gradients: a plugin must not modify these later. Do not modify the
tensors of a `ContainerRequest`: rows are copied from them on first access.

The examples are one batch: prompts ``[[5, 6], [7, 8, 9]]`` with answers ``[[11, 2], [12, 13, 14]]``, where id
2 is EOS. In drawings, a dot is a pad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from torch import Tensor, device

from corelm.spec.provenance import Adapter, Mode, Provenance, Support, VersionRuns

# Re-exported for plugins, which import them from `corelm.spec`.
from corelm.tensors.ragged import Ragged as Ragged
from corelm.tensors.ragged import Side as Side
from corelm.tensors.token_sets import TokenSets as TokenSets

if TYPE_CHECKING:
    from corelm.spec.message import Message
    from corelm.spec.sampling import SamplingParams

T = TypeVar("T")

FINISH_REASONS = ("stop", "length", "abort", "error")
#: When an engine gets new weights or goes to sleep. `drain`: after the answers that it is sampling. `abort`: at once;
#: these end with the reason `abort`. `now`: at once; these go on, on the new weights.
When = Literal["drain", "abort", "now"]
#: What can be said of new weights.
WHENS: tuple[When, ...] = ("drain", "abort", "now")
#: What can be said of an adapter: an answer is of one version of it.
WHENS_OF_ADAPTERS = WHENS[:2]
#: What can be said of sleep, in which no answer goes on.
WHENS_OF_SLEEP = WHENS[:2]
#: The parts of an engine that can be woken. vLLM and SGLang use the same names.
SLEEP_TAGS = ("weights", "kv_cache")
#: How deep an engine can sleep.
SLEEP_LEVELS = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizeRequest:
    """Texts to tokenize; core has already applied chat templates.

    Attributes:
        texts: one text per row.
        add_special_tokens: whether the tokenizer adds its special tokens (BOS, for example).
        parse_special: False reads the text of a special token as ordinary characters, because a user may have typed it.
        offsets: whether to return the characters that each id covers.
    """

    texts: tuple[str, ...]
    add_special_tokens: bool
    parse_special: bool = True
    offsets: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizeResult:
    """The ids of the texts.

    Attributes:
        ids: one row per text.
        offsets: int64[total, 2]: for each id, the characters [start, end) of its text that it covers; None
            unless requested.
    """

    ids: Ragged
    offsets: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """New tokens of one answer, which a backend with `streaming` hands to ``GenerateRequest.on_tokens``.

    The chunks of a row, joined, must be the beginning of its row of the `GenerateResult`. When the call ends,
    core hands over what is missing of each row: its other tokens and its finish reason.

    Attributes:
        row: the row of the `GenerateResult`.
        ids: the tokens that follow those of the last chunk of this row.
        logprobs: one per id, as the request asks for them; not read with ``logprobs="none"``.
        finish_reason: why the answer ended, in the last chunk of a row; None in the others.
        text: leave it None. Core sets it if the engine returns `texts`.
    """

    row: int
    ids: Sequence[int]
    logprobs: Sequence[float] = ()
    finish_reason: str | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """Sample one answer for every prompt.

    Core repeats each prompt for each of its samples, so ``sampling.num_samples`` is None. EOS,
    `stop_token_ids` and `ignore_eos` are combined in `stop_ids`.

    Attributes:
        prompts: one row of ids per prompt.
        sampling: how to sample.
        logprobs: which log-prob of each sampled token to return. `raw`: of the model's own distribution, whatever
            `sampling` changes. `processed`: of the distribution that the token was drawn from. See `Provenance`.
        seeds: int64[answers], each in [0, 2**63): answer i is drawn from the random stream ``seeds[i]``. None
            lets the engine choose: it takes no seeds, or they are costly and the caller gave none.
        stop_ids: an answer ends with the first of these ids and keeps it.
        request_ids: one unique name per row, for `abort`.
        timeout: seconds for the whole call; None for no limit.
        on_tokens: takes tokens as they are sampled; None unless the backend declares `streaming` and the caller reads
            along. It returns at once, raises nothing that concerns the engine, and may be called on any thread.
        adapter: the name of the adapter that answers, or False for none. None, the engine's default, unless
            the backend declares `adapters`.
        return_support: whether to return the ids that each token was drawn from. True only for a backend that
            declares it, with top-k, top-p or min-p in force and a temperature above 0.
        top_logprobs: how many of the most probable ids to return at each token, with their log-probs of the
            kind that `logprobs` names; at most what the backend declares.
        weight_version: the label of the weights when core makes the request; None unless the backend declares
            `updates_in_flight`. An update may come before the hook sees the request: see
            `corelm_engine_kit.VersionLog`.
        weight_update: the `number` of the last update before that.
    """

    prompts: Ragged
    sampling: SamplingParams
    logprobs: Literal["none", "raw", "processed"]
    seeds: Tensor | None
    stop_ids: frozenset[int]
    request_ids: tuple[str, ...]
    timeout: float | None
    on_tokens: Callable[[TokenChunk], None] | None = None
    adapter: Adapter = None
    return_support: bool = False
    top_logprobs: int = 0
    weight_version: str | None = None
    weight_update: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateResult:
    """The answers, one row each. The answers to one prompt are next to each other.

    In the example, the first answer ended with EOS and the second reached ``max_new_tokens=3``::

        ids               [[ 11,    2], [  12,   13,   14]]    int64    values [11, 2, 12, 13, 14], lengths [2, 3]
        logprobs          [[-0.5, -0.1], [-1.2, -0.3, -0.7]]   float32  the same lengths
        finish_reasons    ("stop", "length")

    Attributes:
        ids: the sampled ids, with the stop id or the token of a stop string that ended the answer.
        logprobs: one per id; None only if the request says ``logprobs="none"``.
        finish_reasons: one per row. `stop`: the last token is a stop id or completes a stop string. `length`:
            the answer reached its limit. `abort` and `error`: the request was aborted, or failed.
        mode: with `temperature` and `support`, the distribution of the log-probs. `Provenance.label` makes all three.
        temperature: see `Provenance`.
        support: see `Provenance`.
        texts: one per row, from an engine whose text differs from what its tokenizer decodes; None otherwise.
        weight_versions: the weights that produced each row; None for the weights in force, and with `version_runs`.
        version_runs: for each row, which weights produced which of its tokens: ``((version, first token), ...)``, from
            token 0 on, ascending. A row without tokens has one run. None if each row is of one version. A backend that
            declares `updates_in_flight` returns this or `weight_versions`: tokens sampled before any update are of
            ``request.weight_version``, and those after a call of `update_weights`, even one that failed after it had
            changed weights, of ``WeightUpdate.version``. `corelm_engine_kit.VersionLog` does the counting.
        errors: for each row whose finish reason is `error`, what went wrong; "" for the others. None if all are "".
        adapter: leave it None. Core sets it to that of the request.
        cached_tokens: for each row, how many ids of its prompt the engine took from its prefix cache; None
            for a row of which the engine does not say, or in place of all.
        sampling: leave it None. Core sets it to that of the call.
        kept_ids: for each id, those that truncation had left when it was drawn, ascending, itself among them.
            This and the next four fields are None unless requested.
        kept_log_mass: float32, one per id: the log of the probability that these ids had together before
            truncation, at the temperature and with the penalties of the request.
        top_ids: int64, ``values[total, top_logprobs]``: the most probable ids where each id was sampled, the
            most probable first; -1 in the last columns if fewer ids have a probability.
        top_logprobs: float32, like `top_ids`: their log-probs, as `logprobs`; -inf where the id is -1.
        tail_log_mass: float32, one per id: the log of the probability of all other ids; -inf if they have none.
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
    adapter: Adapter = None
    kept_ids: TokenSets | None = None
    kept_log_mass: Ragged | None = None
    top_ids: Ragged | None = None
    top_logprobs: Ragged | None = None
    tail_log_mass: Ragged | None = None
    version_runs: tuple[VersionRuns, ...] | None = None
    sampling: SamplingParams | None = None
    cached_tokens: tuple[int | None, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreRequest:
    """Return the log-prob of every given token from position ``score_from[r]`` on.

    `request_ids`, `timeout` and `adapter` are as in `GenerateRequest`; at most one of `support`, `top_k` and `top_ids`
    is given, and only to a backend that declares it.

    Attributes:
        sequences: one row of ids per sequence.
        score_from: int64[rows], at least 1: the first position to score. Earlier positions need not be computed.
        temperature: the logits are divided by it.
        return_logits: whether to return the logits as well.
        return_argmax: whether to return the most probable id at every scored position as well.
        grad: whether the results carry gradients to the model's parameters.
        device: where to put the results; None lets the plugin choose.
        top_k: how many of the most probable ids to return at every scored position, at the temperature of the request.
        support: as long as the sequences: the ids over which to normalise at each position, ascending, the
            given one among them. An empty set stands for the whole vocabulary.
        top_ids: int64, ``values[total, k]``, as long as the sequences: ids whose log-probs to return at every
            scored position; those of a position differ from one another, and -1 stands for no id.
    """

    sequences: Ragged
    score_from: Tensor
    temperature: float
    return_logits: bool
    grad: bool
    device: device | None
    request_ids: tuple[str, ...]
    timeout: float | None
    return_argmax: bool = False
    adapter: Adapter = None
    support: TokenSets | None = None
    top_k: int = 0
    top_ids: Ragged | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreResult:
    """The log-probs of given tokens. Fields that are not described are as in `GenerateResult`.

    In the example, prompt and answer are scored together from ``score_from=[2, 3]``, which are the answers::

        sequences    [[5,   6,   11,    2  ], [7,   8,   9,   12,   13,   14  ]]
        logprobs     [[0.0, 0.0, -0.5, -0.1], [0.0, 0.0, 0.0, -1.2, -0.3, -0.7]]    float32  lengths [4, 6]
        scored       [[no,  no,  yes,  yes ], [no,  no,  no,  yes,  yes,  yes ]]    bool     lengths [4, 6]
        logits       values [10, vocab]: row 3 of the first sequence holds the logits that predict its last id, 2

    Attributes:
        logprobs: as long as the sequences; 0.0 where `scored` is False.
        scored: as long as the sequences: whether the log-prob of this token was computed. Never at position 0.
        logits: ``values[total, vocab]`` in the model's scale, before any temperature; None unless requested.
            Row t predicts token t. Rows that are not scored are 0.
        argmax: int64, as long as the sequences: the most probable id at this position given the ids before
            it, any of equally probable ones; -1 where `scored` is False. None unless requested.
        mode: with `temperature` and `support`, what `Provenance.label_of_scores` makes.
        errors: for each row that could not be scored, what went wrong; "" for the others. None if all are "".
        top_ids: as long as the sequences; with ``request.top_ids``, those, in their order. -1 where `scored` is False.
        top_logprobs: at the temperature of the request, with gradients if those were requested; 0.0 where
            `scored` is False.
        tail_log_mass: as long as the sequences; 0.0 where `scored` is False.
    """

    logprobs: Ragged
    scored: Ragged
    logits: Ragged | None = None
    argmax: Ragged | None = None
    mode: Mode = "raw"
    temperature: float = 1.0
    support: Support = "full"
    weight_versions: tuple[str, ...] | None = None
    errors: tuple[str, ...] | None = None
    adapter: Adapter = None
    top_ids: Ragged | None = None
    top_logprobs: Ragged | None = None
    tail_log_mass: Ragged | None = None


def fields_of_rows(batch: GenerateResult | ScoreResult) -> dict[str, Any]:
    """Return the fields that have an entry for each row: `Ragged` or `TokenSets` for its tokens, or a tuple or list."""
    found = {each.name: getattr(batch, each.name) for each in fields(batch)}
    return {name: rows for name, rows in found.items() if isinstance(rows, (Ragged, TokenSets, tuple, list))}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightUpdate:
    """New weights: a state dict, a stream or a path, or nothing if their owner has changed them in place.

    Core calls the hook while no other call is running, unless `when` is `now`: then calls of `generate` may be
    running, and go on with the new weights. Core says `now` only to a backend that declares `updates_in_flight`.

    Attributes:
        version: the label that every later result carries.
        when: what became of the answers in flight. See `When`.
        number: counts the updates of the base weights, from 1 on. See `GenerateRequest.weight_update`.
        state_dict: tensors by parameter name, or None.
        path: where the weights are saved, or None.
        stream: names and tensors that can be read once, or None. The memory of a tensor may be used for the
            next one. Reading raises an `InvalidRequestError` if the caller's iterator fails. Only for engines
            that declare `weight_stream`.
        expect: what the caller said the engine should answer, or None. A plugin with engines behind it hands
            it on to those that listen to their updates; others ignore it.
        adapter: the adapter that is loaded or replaced; with neither `state_dict` nor `path`, the one to
            unload. The base weights stay. None unless the backend declares `adapters`.
        adapter_config: PEFT's ``adapter_config.json`` of the adapter in `state_dict`; None for a folder, which has it.
    """

    version: str
    when: When = "drain"
    number: int = 0
    state_dict: Mapping[str, Tensor] | None = None
    path: Path | None = None
    expect: object = None
    adapter: str | None = None
    adapter_config: Mapping[str, Any] | None = None
    stream: Iterator[tuple[str, Tensor]] | None = None

    @property
    def by_owner(self) -> bool:
        """Whether the owner has changed the weights, so that there is nothing to load."""
        return not self._given and self.adapter is None

    @property
    def unloads(self) -> bool:
        """Whether an adapter is to be unloaded."""
        return not self._given and self.adapter is not None

    @property
    def _given(self) -> bool:
        return not (self.state_dict is None and self.path is None and self.stream is None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SleepRequest:
    """Free the memory of the accelerator. Core calls the hook while no other call is running.

    Attributes:
        level: 1 keeps the weights, outside the accelerator, and drops the KV cache. 2 drops both: core serves
            no call after the engine was woken until `update_weights` has loaded weights.
        when: `drain` or `abort`. See `When`.
    """

    level: int
    when: When = "drain"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WakeRequest:
    """Take the memory again. Core calls the hook while no other call is running.

    Attributes:
        tags: what to wake: `weights`, `kv_cache` or both. All of it sleeps.
        last: whether nothing sleeps any more afterwards.
    """

    tags: frozenset[str]
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightsStateRequest:
    """Ask for the state of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AbortRequest:
    """End requests in flight. Each returns the tokens it has, with the finish reason `abort`.

    Attributes:
        request_ids: the names of the requests to end, as in `GenerateRequest` and `ScoreRequest`.
    """

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HealthRequest:
    """Ask whether the engine can serve."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CloseRequest:
    """Release everything the engine holds."""


@dataclass(frozen=True, slots=True)
class Parts(Generic[T]):
    """A value for the prompt, the response and `full`, both together. The first two are None if rows are not split."""

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

    With ``pad_output=False`` each field is a list with one tensor per row, nested like the batch::

        tokens.prompt               [ 5, 6 ]                    [ 7, 8, 9 ]
        tokens.response             [ 11, 2 ]                   [ 12, 13, 14 ]
        tokens.full                 [ 5, 6, 11, 2 ]             [ 7, 8, 9, 12, 13, 14 ]
        log_probs.full              [ 0.0, 0.0, -0.5, -0.1 ]    [ 0.0, 0.0, 0.0, -1.2, -0.3, -0.7 ]
        masks.all_response_mask     [ no, no, yes, yes ]        [ no, no, no, yes, yes, yes ]

    With ``pad_output=True`` each field is one tensor. Pads are `pad_id` in tokens, 0.0 in log-probs, False in masks::

        tokens.full                 .    5    6     11     2     .      tokens.response     11    2    .
                                    7    8    9     12    13    14                          12   13   14

        log_probs.full              .    0.0  0.0   -0.5  -0.1   .
                                    0.0  0.0  0.0   -1.2  -0.3  -0.7

    Attributes:
        batch_size: the shape of the result; its product is the number of rows, in C order.
        fields: which of `text`, `tokens`, `masks`, `log_probs` and `history` to build.
        tokens: the ids.
        texts: one str per row.
        chats: one conversation per row.
        logprobs: float32, as long as ``tokens.full``.
        scored: bool, as long as ``tokens.full``: False where the log-prob means nothing and is set to 0.0.
        kept_ids: the ids over which each log-prob was normalised, ascending. An empty set stands for the
            whole vocabulary, and for a token that was not scored. This and the next five fields are as long
            as ``tokens.full``; `top_ids` and the three after it are as in `ScoreResult`.
        kept_log_mass: as in `GenerateResult`; 0.0 where `scored` is False.
        greedy: one per row: whether every token that counts is the most probable one.
        provenance: one per row, None for a row of unknown origin; or one for all rows.
        assistant: bool, as long as ``tokens.full``: True where a token is the assistant's; None if that is not known.
        finish_reasons: one per row.
        errors: one message per row, "" for a row without an error.
        retokenized: per row, whether its sampled turns were rendered from their text and lost their ids; None
            if all ids were kept.
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
