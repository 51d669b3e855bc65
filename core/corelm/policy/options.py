"""`PolicyOptions`: what an `LLMPolicy` does with its backend, checked once and never changed afterwards."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Literal

import torch
from tensordict import NestedKey

from corelm import validate
from corelm.backend.given_weights import checked_adapter
from corelm.backend.skipping import OnError
from corelm.batching.scheduling import Limits
from corelm.containers.classes import KEPT, TOP
from corelm.containers.reading import container_of, key_parts
from corelm.rendering.encoding import Boundary
from corelm.rendering.response_parsers import check_name
from corelm.spec.message import Message
from corelm.spec.other_libraries import instead_of
from corelm.spec.provenance import Adapter, Mode
from corelm.spec.sampling import ALIASES, FIELDS, SamplingParams

Inplace = bool | Literal["empty"]
InputMode = Literal["history", "text", "tokens"]
#: Turns an answer's text into a message, as a `Message` or a dict. The caller adds the ids.
ResponseParser = Callable[[str], Message | Mapping[str, Any]]
#: Arguments of a tokenizer's `apply_chat_template` that the policy gives itself, and what to do instead.
_NOT_FOR_TEMPLATES = {
    "continue_final_message": "give the policy continue_final_message=True",
    "add_generation_prompt": "generate=True prompts for an answer, generate=False scores whole conversations",
    "chat_template": "give the policy chat_template=…",
    "tokenize": "leave it out",
}
#: Options that only one kind of policy has, by the value of `generate` that they need, and what to do
#: instead. A policy of the other kind refuses them, and `replace` resets those that were not given again.
ONLY = {
    True: {
        "num_samples": "scoring samples nothing; leave it out, or pass generate=True",
        "return_support": "only sampling returns it; score over the ids of a sampler with support_key",
        "top_logprobs": "only sampling takes it; pass top_k={} to score",
        "truncation": "scores of a part are not those of the whole; leave it out, or cut the sequences",
        "response_parser": "scoring reads no answers; leave it out, or pass generate=True",
        "continue_final_message": "scoring reads whole conversations, the last turn included; leave it out",
    },
    False: {
        "return_argmax": "only scoring returns it; leave it out, or pass generate=False",
        "top_k": 'only scoring takes it; pass top_logprobs={0}, or sampling_params={{"top_k": {0}}} to truncate',
        "support_key": "only scoring reads it; leave it out, or pass generate=False",
        "overwrite": "a new answer replaces an earlier one as it is; leave it out, or pass generate=False",
        "completion_boundary": "only scoring reads completions; leave it out, or pass generate=False",
    },
}
#: Options that one input mode has, and what the others lack.
ONLY_IN = {
    "return_history": ("history", "mode reads no history"),
    "response_parser": ("history", "mode writes no messages"),
    "attention_mask_key": ("tokens", "mode reads no mask"),
}


@dataclass(frozen=True, slots=True)
class Keys:
    """Where a policy reads and writes its containers."""

    text: NestedKey = "text"
    tokens: NestedKey = "tokens"
    masks: NestedKey = "masks"
    log_probs: NestedKey = "log_probs"
    history: NestedKey = "history"


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """The options of a policy: what it reads, asks of the engine and writes.

    Attributes:
        input_mode: what is read: `history` (conversations), `text` or `tokens`. The container's ``prompt`` is read to
            generate and its ``full`` to score. A bare History, sequence of strings (list, tuple, numpy array, pandas
            Series, column of `datasets`) or token tensor at the top key is fine; a nested tensor has rows of unequal
            length. If there are no `tokens`, the `input_ids` and `attention_mask` of a tokenizer are read.
        generate: True samples an answer for every prompt; False scores and samples nothing: whole sequences, or, given
            a `Text` or `Tokens` with a ``prompt`` and a ``response`` but no ``full``, the responses.
        sampling_params: a `SamplingParams` or a dict of its fields; common aliases are understood.
        num_samples: answers per prompt, under a new last batch dimension; None adds no dimension, 1 adds one of size 1.
        pad_output: dense tensors (prompts padded left, responses right) instead of one row a sample. Scores
            that join tokens in place take the layout of those tokens.
        return_text: write the `Text` container.
        return_tokens: write the `Tokens` container.
        return_masks: write the `Masks` container.
        return_log_probs: write the `LogProbs` container.
        return_history: write the `ChatHistory` container; None writes it where a history is read, and it
            cannot be written elsewhere.
        return_argmax: for scoring: write `argmax`, the most probable id at every scored position (int64, as
            long as ``tokens.full``, -1 elsewhere), and `is_greedy`, bool and shaped like the batch: whether
            each scored token of the row, or of its response if the row has one, is the most probable one.
        return_support: for generation: write into the `LogProbs` which ids top-k, top-p and min-p had left
            for each sampled token (`kept_ids`, see `corelm.token_sets`), and the log of their mass.
        top_logprobs: for generation: how many of the most probable ids to write into the `LogProbs` for each
            sampled token, with their log-probs and the log of the mass of all others (`top_ids` and so on).
        top_k: for scoring: the same for each scored token. The `top_k` of sampling is in `sampling_params`.
        support_key: for scoring: the key of a sampler's `LogProbs`, sampled with ``return_support=True``. Each token is
            scored over the ids that were left when it was sampled, at the sampler's temperature, which must be the
            policy's. Tokens without such ids, such as those of prompts, are scored over the whole vocabulary.
        log_probs_mode: `raw` is the model's own distribution, `processed` the one sampled from. Scoring
            `processed` scores at the temperature of `sampling_params`.
        prefer_tokens: sampled turns of a history keep their ids, and so does a sampled `Text` that is scored
            with its tokens next to it. False renders turns and tokenizes texts again, and the bool output
            `retokenized` marks the rows of a history in which that happened.
        inplace: True writes into the TensorDict that was passed; it is the default without `num_samples` and
            impossible with it. A new answer replaces the containers of an earlier answer; other entries stay.
            Scores join what is there and replace nothing (see `overwrite`). False returns a new TensorDict
            with the outputs alone; it is the default with `num_samples`. "empty" returns an empty copy of the
            one passed, filled with the outputs.
        overwrite: for scoring: whether scores in place may replace log-probs, tokens other than those that were scored,
            and other values under the keys of the containers; by default, a call that would is refused.
        on_error: "raise" refuses a call with a bad row; "skip" serves the other rows and says in `errors`
            what was wrong.
        truncation: for generation: what happens to a prompt that does not fit: "error", or "left" to drop its
            first tokens.
        device: where the results go; None for the device of the TensorDict, else the CPU.
        keys: where the containers are read and written: `Keys`, or a dict of its fields.
        log_probs_key: where the log-probs are written, such as ``"ref_log_probs"``: short for
            ``keys=Keys(log_probs=…)``.
        input_key: where the input is read, if not under the key of its container: a container, or a bare
            value such as the strings of a data set. It stays where it is.
        attention_mask_key: where the mask of the tokens is; by default ``all_attention_mask`` of the masks,
            or the `attention_mask` next to the ids, if it is as wide. Without a mask, dense tokens are taken
            to have no pads, and refused if a row begins or ends with the tokenizer's pad id.
        chat_template: renders histories: jinja text, the name of one of the tokenizer's templates, or
            "chatml"; None for the tokenizer's own.
        template_kwargs: passed to the template.
        tokenizer_kwargs: `add_special_tokens` and `parse_special`, for tokenizing texts.
        completion_boundary: for scoring: how prompt and response of a `Text` become ids. "joint", as in
            lm-eval: whitespace at the end of a prompt belongs to the response, both are tokenized as one
            text, and the response begins after as many tokens as the prompt has alone. "separate", as in TRL
            0.26's `DPOTrainer`: each by itself.
        response_parser: for generation: turns an answer's text into the message that joins the history (tool calls,
            reasoning, …): the name of a format, such as "hermes" (see `corelm.parser_named`), or a function of the
            text. If it raises, the message holds the plain text, `errors` says why, and a `ResponseParserWarning` is
            shown. No answer is lost: where warnings are errors, a line is logged instead.
        continue_final_message: for generation: True continues a conversation that ends with an assistant
            turn: that turn is the beginning of the answer. The message in the history is the whole turn, and
            `response_parser` gets its whole text; the response of texts and tokens is what was sampled. Other
            conversations get a new turn. False refuses a conversation that ends with an assistant turn; None
            samples a new turn after it, as environments need whose rows end at different times.
        adapter: the adapter that answers or scores: the name of one that ``backend.load_adapter`` has loaded,
            or False for the base weights alone. So ``policy.replace(adapter=False)`` is the reference of a
            policy with an adapter, in the same engine. None leaves the model as it is.
        tools_key: where the tools of each conversation are, if the TensorDict has this key: for each
            conversation a list of dicts, or None for those of `template_kwargs`. None reads none.

    Raises:
        InvalidRequestError: an illegal value, or two that exclude each other; `field` names the option.
    """

    input_mode: InputMode = "history"
    generate: bool = True
    sampling_params: SamplingParams | Mapping[str, Any] | None = None
    num_samples: int | None = None
    pad_output: bool = False
    return_text: bool = True
    return_tokens: bool = True
    return_masks: bool = True
    return_log_probs: bool = True
    return_history: bool | None = None
    return_argmax: bool = False
    return_support: bool = False
    top_logprobs: int = 0
    top_k: int = 0
    support_key: NestedKey | None = None
    log_probs_mode: Mode = "raw"
    prefer_tokens: bool = True
    inplace: Inplace | None = None
    overwrite: bool = False
    on_error: OnError = "raise"
    truncation: Literal["error", "left"] = "error"
    device: torch.device | str | None = None
    keys: Keys = field(default_factory=Keys)
    log_probs_key: NestedKey | None = None
    input_key: NestedKey | None = None
    attention_mask_key: NestedKey | None = None
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    completion_boundary: Boundary = "joint"
    response_parser: ResponseParser | str | None = None
    continue_final_message: bool | None = False
    tools_key: NestedKey | None = "tools"
    adapter: Adapter = None

    def __post_init__(self) -> None:
        if not isinstance(self.keys, (Keys, Mapping)):
            raise validate.invalid("keys", f"expected Keys or a dict of its fields, got {validate.shown(self.keys)}")
        if isinstance(self.keys, Mapping):
            self._set("keys", Keys(**validate.subset("keys", self.keys, tuple(Keys.__dataclass_fields__))))
        validate.one_of("input_mode", self.input_mode, ("history", "text", "tokens"))
        validate.one_of("log_probs_mode", self.log_probs_mode, ("raw", "processed"))
        validate.one_of("on_error", self.on_error, ("raise", "skip"))
        validate.one_of("truncation", self.truncation, ("error", "left"))
        validate.one_of("completion_boundary", self.completion_boundary, ("joint", "separate"))
        validate.one_of("inplace", self.inplace, (None, True, False, "empty"))
        for name in ("generate", "overwrite", "return_argmax", "return_support"):
            validate.flag(name, getattr(self, name))
        validate.one_of("continue_final_message", self.continue_final_message, (False, True, None))
        for name in ("top_logprobs", "top_k"):
            self._set(name, validate.count(name, getattr(self, name)))
        self._settle_log_probs_key()
        self._settle_samples(SamplingParams.make(self.sampling_params))
        for name, instead in ONLY[not self.generate].items():
            if (value := getattr(self, name)) != _DEFAULTS[name]:
                raise validate.invalid(name, instead.format(value))
        for name, (mode, lacks) in ONLY_IN.items():
            if getattr(self, name) and self.input_mode != mode:
                raise validate.invalid(name, f"{self.input_mode} {lacks}; leave it out, or pass input_mode={mode!r}")
        if not self.return_log_probs:
            if not self.generate:
                raise validate.invalid(
                    "return_log_probs", "scoring returns nothing but log-probs; leave out return_log_probs=False"
                )
            for name in ("return_support", "top_logprobs"):
                if getattr(self, name):
                    raise validate.invalid(name, "it is written into the LogProbs; leave out return_log_probs=False")
        if self.support_key is not None:
            self._must_be_key("support_key", self.support_key)
            self._set("support_key", container_of(self.support_key))
            if self.top_k:
                raise validate.invalid(
                    "top_k", "the most probable ids are those of the whole vocabulary; leave out top_k or support_key"
                )
        # Copies, so that the caller's later changes to these dicts do not reach the policy.
        known = ("add_special_tokens", "parse_special")
        self._set("tokenizer_kwargs", validate.subset("tokenizer_kwargs", self.tokenizer_kwargs, known))
        self._set("template_kwargs", dict(self.template_kwargs or {}))
        if self.response_parser is not None and not callable(self.response_parser):
            check_name(self.response_parser)
        for name, instead in _NOT_FOR_TEMPLATES.items():
            if name in self.template_kwargs:
                raise validate.invalid("template_kwargs", f"{name} is not a variable of the template; {instead}")
        self._set("device", validate.device(self.device))
        self._set("adapter", checked_adapter(self.adapter))

    def _settle_log_probs_key(self) -> None:
        """Keep the key of the log-probs in `keys`. It may be passed there or as an option; both then read the same."""
        key = self.keys.log_probs if self.log_probs_key is None else self.log_probs_key
        self._must_be_key("log_probs_key", key)
        key = container_of(key)
        if container_of(self.keys.log_probs) not in (Keys().log_probs, key):
            raise validate.invalid(
                "log_probs_key", f"given twice, as {key!r} and in keys as {self.keys.log_probs!r}; leave one out"
            )
        self._set("keys", dataclasses.replace(self.keys, log_probs=key))
        self._set("log_probs_key", key)

    @staticmethod
    def _must_be_key(name: str, key: Any) -> None:
        if not isinstance(key, str) and not (isinstance(key, tuple) and key and all(isinstance(k, str) for k in key)):
            raise validate.invalid(name, f"expected a key of a TensorDict, got {validate.shown(key)}")

    def _settle_samples(self, sampling: SamplingParams) -> None:
        """Keep `num_samples` in one place. It may be passed as an option or inside `sampling_params`."""
        samples, inside = self.num_samples, sampling.num_samples
        if samples is not None:
            if inside not in (None, samples):
                raise validate.invalid(
                    "num_samples", f"given twice, as {samples} and in sampling_params as {inside}; leave one out"
                )
            inside = SamplingParams.make(sampling, num_samples=samples).num_samples
        if inside is not None and self.inplace is True:
            raise validate.invalid(
                "inplace", "num_samples adds a batch dimension that the input does not have; pass inplace=False"
            )
        self._set("num_samples", inside)
        self._set("sampling_params", SamplingParams.make(sampling, num_samples=None))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def replace(self, **changes: Any) -> PolicyOptions:
        """Return these options with changes. `num_samples` stays unless new `sampling_params` bring their own.

        Raises:
            TypeError: a policy has no option of that name.
        """
        _refuse_unknown(changes, SamplingParams.make(self.sampling_params))
        reset: set[str] = set()
        if "keys" in changes:
            reset.add("log_probs_key")
        elif "log_probs_key" in changes:
            changes = {"keys": dataclasses.replace(self.keys, log_probs=Keys().log_probs), **changes}
        generate, mode = changes.get("generate", self.generate), changes.get("input_mode", self.input_mode)
        if (generate, mode) != (self.generate, self.input_mode):
            # These keys hold the input of one mode, a prompt or a whole sequence.
            reset |= {"input_key", "attention_mask_key"}
            reset |= ONLY[not generate].keys() | {name for name, (only, _) in ONLY_IN.items() if only != mode}
        if "sampling_params" in changes and SamplingParams.make(changes["sampling_params"]).num_samples is not None:
            reset.add("num_samples")
        return dataclasses.replace(self, **{name: _DEFAULTS[name] for name in reset} | changes)

    @functools.cached_property
    def sampling(self) -> SamplingParams:
        """The sampling parameters, with the number of samples."""
        return SamplingParams.make(self.sampling_params, num_samples=self.num_samples)

    @functools.cached_property
    def writes_in_place(self) -> Inplace:
        """`inplace`, with its default resolved."""
        return self.num_samples is None if self.inplace is None else self.inplace

    @functools.cached_property
    def fields(self) -> frozenset[str]:
        """The containers to write, by name."""
        history = self.input_mode == "history" if self.return_history is None else self.return_history
        wanted = self.return_text, self.return_tokens, self.return_masks, self.return_log_probs, history
        return frozenset(compress(("text", "tokens", "masks", "log_probs", "history"), wanted))


OPTIONS = tuple(option.name for option in dataclasses.fields(PolicyOptions))
_DEFAULTS: dict[str, Any] = {option.name: option.default for option in dataclasses.fields(PolicyOptions)}


def _refuse_unknown(given: Mapping[str, Any], sampling: SamplingParams) -> None:
    """Refuse an option that a policy does not have, and say what to type instead, given its `sampling`."""
    name = next((name for name in given if name not in OPTIONS), None)
    if name is None:
        return
    if name in {limit.name for limit in dataclasses.fields(Limits)}:
        instead = f"give batching=Limits({name}=…)"
    elif ALIASES.get(name, name) in FIELDS:
        kept = {field: value for field in FIELDS if (value := getattr(sampling, field)) != getattr(_NEUTRAL, field)}
        kept.pop("do_sample", None)
        meant = kept | {ALIASES.get(each, each): value for each, value in given.items() if each not in OPTIONS}
        instead = f"it is a sampling parameter: give sampling_params={meant}"
    elif name in ("batching", "model"):
        instead = f"give it to LLMPolicy(…, {name}=…), or batching to policy.replace(batching=…)"
    else:
        instead = instead_of(name, (*OPTIONS, *FIELDS, "timeout")).removeprefix("; ") or (
            f"options of the engine are given to get_backend; a policy has {', '.join(OPTIONS)}"
        )
    raise TypeError(f"a policy has no option {name!r}; {instead}")


_NEUTRAL = SamplingParams()
_made = PolicyOptions.__init__


@functools.wraps(_made)
def _make(self: PolicyOptions, **given: Any) -> None:
    # The same mistakes as in `replace`.
    if not given.keys() <= set(OPTIONS):
        _refuse_unknown(given, SamplingParams.make(given.get("sampling_params")))
    _made(self, **given)


PolicyOptions.__init__ = _make  # type: ignore[method-assign]


def out_keys(options: PolicyOptions) -> list[NestedKey]:
    """Return the keys that every call writes.

    Scored tokens that come with their split get their prompt and response as well. A container of completions that is
    scored in place keeps its fields and gets no `full`, so that the next policy scores the same completions.
    """
    parts = ("prompt", "response", "full") if options.generate else ("full",)
    masks = ["all_attention_mask", *(["all_response_mask"] if options.generate else [])]
    if options.generate or options.input_mode == "history":
        masks.append("all_assistant_mask")
    kept = KEPT if options.return_support else KEPT[:2] if options.support_key is not None else ()
    top = TOP if options.top_k or options.top_logprobs else ()
    names = {
        "text": parts,
        "tokens": parts,
        "masks": masks,
        "log_probs": (*parts, "scored_mask", *kept, *top),
        "history": parts,
    }
    keys: list[NestedKey] = [
        (*key_parts(getattr(options.keys, name)), part)
        for name, inner in names.items()
        if name in options.fields
        for part in inner
    ]
    keys += ["finish_reason"] if options.generate else []
    keys += ["argmax", "is_greedy"] if options.return_argmax else []
    keys += ["errors"] if options.generate or options.on_error == "skip" else []
    keys += ["retokenized"] if options.input_mode == "history" and not options.prefer_tokens else []
    return keys
