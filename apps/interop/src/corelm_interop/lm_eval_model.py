"""`CoreLM`: the model of lm-eval that any backend is. lm-eval has to be installed; see `corelm_interop.lm_eval`.

It tokenizes, cuts and scores texts as lm-eval's model `hf` does, so that both give the same numbers.
"""

from __future__ import annotations

import json
import logging
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from inspect import signature
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    DEFAULT_MAX_LENGTH,
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from torch import Tensor
from tqdm import tqdm

from corelm import Backend, get_backend, list_backends
from corelm._version import __version__
from corelm.application import Template, answer_seeds
from corelm.errors import EngineError, InvalidRequestError, Problems, TemplateError, first_few, refuse
from corelm.spec import SamplingParams
from corelm.validate import count, flag, invalid, shown

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


def stable_numbers(prompts: Iterable[str]) -> Iterator[int]:
    """Yield a number for each prompt that depends on its text, and on how many equal prompts precede it."""
    seen: Counter[str] = Counter()
    for prompt in prompts:
        digest = blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        yield int.from_bytes(digest, "big") + seen[prompt]
        seen[prompt] += 1


#: The finish reasons of rows without a whole answer.
_FAILED = frozenset({"abort", "error"})


_log = logging.getLogger(__name__)

#: Rows of one call if lm-eval does not say. The engine divides a call by itself, so this does not set how much memory
#: it needs, but how many answers a run that is interrupted loses.
_ROWS = 512
#: What lm-eval's command line passes if the user says nothing.
_UNSAID = {"batch_size": 1, "device": "cuda:0"}

#: ``((context, continuation), ids of the context, ids of the continuation)``, as lm-eval passes it.
Pair = tuple[Any, list[int], list[int]]


class CoreLM(TemplateLM):
    """Any backend as a model of lm-eval: log-likelihoods, rolling log-likelihoods, and answers.

    Args:
        backend: the name of a backend, or one that is open, which stays open when the evaluation ends.
        model: a path or hub name; None for an engine behind a URL.
        pretrained: another name of `model`, which lm-eval's own models use.
        batch_size: the most rows of one call, which the engine divides by itself; "auto" stands for 512.
        max_batch_size: the most rows of one call with "auto".
        max_length: the most ids that the model reads, counting the answer; None for the engine's context.
        max_gen_toks: the length limit of answers to tasks that do not set one, in tokens.
        add_bos_token: whether to begin texts with BOS. None leaves it to the tokenizer.
        prefix_token_id: what precedes a text without a context; None for BOS, or EOS if the tokenizer has no BOS.
        chat_template_args: variables for the chat template.
        enable_thinking: the variable of that name for the chat template.
        think_end_token: what ends the thinking of an answer, a str or an id. Only the text after it counts, and
            `until` only there.
        options: more arguments of `corelm.get_backend`: `python`, `dtype`, `base_url` and so on.

    Attributes:
        engine: the open backend.

    Raises:
        InvalidRequestError: an argument that neither this class nor the engine knows, or a value out of range.
        CoreLMError: what else `get_backend` raises.
    """

    # `backend` is lm-eval's name for the kind of model, and "causal" is inherited.

    def __init__(
        self,
        backend: str | Backend | None = None,
        model: Any = None,
        *,
        pretrained: Any = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.batch_size = _rows_of_call(batch_size, max_batch_size)
        self.max_gen_toks = count("max_gen_toks", max_gen_toks, 1)
        self.chat_template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self.chat_template_args["enable_thinking"] = flag("enable_thinking", enable_thinking)
        if add_bos_token is not None:
            flag("add_bos_token", add_bos_token)
        if enable_thinking and think_end_token is None:
            raise invalid("think_end_token", "enable_thinking=True needs it, to tell the answer from the thinking")
        if model is not None and pretrained is not None and model != pretrained:
            raise invalid("pretrained", f"it is another name of model, which is {shown(model)}; give one of them")
        model = pretrained if model is None else model
        self.engine = backend if isinstance(backend, Backend) else _opened(backend, model, options)
        # lm-eval has no call that says that it has finished, and drops its last reference instead.
        self._closing = weakref.finalize(self, self.engine.close)
        if isinstance(backend, Backend):
            self._closing.detach()
            if more := [*(["model"] if model is not None else []), *options]:
                what = f"it is open already and takes no {', '.join(more)}; give the name of a backend instead"
                raise invalid("backend", what)
        self.tokenizer = self.engine.tokenizer
        self._tokens = {"read": 0, "scored": 0, "sampled": 0}
        try:
            context = self.engine.capabilities.max_context
            self.max_length = _length(max_length, context)
            # Scoring the last id does not take reading it, but engines refuse rows longer than their context.
            self._longest = self.max_length + 1 if context is None else min(self.max_length + 1, context)
            vocab_size = self.engine.capabilities.vocab_size
            given = prefix_token_id
            self._prefix = None if given is None else count("prefix_token_id", given, 0, vocab_size - 1)
            self._add_bos = add_bos_token
            self._bos = getattr(self.tokenizer, "bos_token_id", None)
            if add_bos_token and self._bos is None:
                raise invalid("add_bos_token", "the tokenizer has no BOS; leave it out")
            ends = [[self.prefix_token_id], [self.eot_token_id]]
            self._prefix_text, self._eos_text = self.engine.detokenize(ends, skip_special_tokens=False)
            self._known: dict[tuple[str, bool], list[int]] = {}
            self._think_end = think_end_token
        except BaseException:
            self.close()
            raise

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> CoreLM:
        """Return the model for ``key=value,…`` and for what lm-eval adds to it."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> CoreLM:
        """Return the model for a dict of arguments and for what lm-eval adds to it.

        The command line of lm-eval always adds ``batch_size=1`` and ``device="cuda:0"``, also if the user typed
        neither. Both are ignored: name them among the arguments to mean them.
        """
        added = additional_config or {}
        said = {name: each for name, each in added.items() if each is not None and each != _UNSAID.get(name)}
        return cls(**{**said, **arg_dict})

    def close(self) -> None:
        """Close the backend if it was opened here. It also closes when the object is collected or the program ends."""
        self._closing()

    def __enter__(self) -> CoreLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # What lm-eval asks about it ---------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        own = getattr(self.tokenizer, "eos_token_id", None)
        if own is None and not self.engine.eos_token_ids:
            raise invalid("tokenizer", "neither the tokenizer nor the model has an EOS id; give another tokenizer=")
        return min(self.engine.eos_token_ids) if own is None else int(own)

    @property
    def prefix_token_id(self) -> int:
        bos = getattr(self.tokenizer, "bos_token_id", None)
        given = bos if self._prefix is None else self._prefix
        return self.eot_token_id if given is None else int(given)

    @property
    def tokenizer_name(self) -> str:
        return str(getattr(self.tokenizer, "name_or_path", "") or self.engine.model_name).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes into the results: the engine, how it runs, its weights, the tokens of this run.

        `read` counts the ids of all rows, whether or not the engine read what they share only once.
        """
        return {
            "corelm_version": __version__,
            "corelm_backend": self.engine.name,
            "corelm_model": self.engine.model_name,
            "corelm_weights": self.engine.weight_version,
            "corelm_engine": {"software": self.engine.engine.software, **self.engine.info},
            "corelm_tokens": dict(self._tokens),
        }

    # Texts ------------------------------------------------------------------------------------------------------------

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text, with BOS as `hf` would have it."""
        return self._ids([string], add_special_tokens)[0]

    def _ids(self, texts: Sequence[str], add_special_tokens: bool | None = None) -> list[list[int]]:
        """Return the ids of each text. Equal texts are encoded once."""
        keys = [(text, self._adds_special(text, add_special_tokens)) for text in texts]
        found = {key: self._known.get(key) for key in keys}
        for special in (True, False):
            missing = [text for (text, flag), ids in found.items() if ids is None and flag is special]
            if missing:
                rows = self.engine.tokenize(missing, add_special_tokens=special).ids.tolist()
                if special and self._add_bos:
                    # Most tokenizers add it by themselves, but some name a BOS and leave it out.
                    rows = [ids if ids[:1] == [self._bos] else [self._bos, *ids] for ids in rows]
                found.update({(text, special): ids for text, ids in zip(missing, rows, strict=True)})
        return [list(found[key] or ()) for key in keys]

    @contextmanager
    def _remembering(self, texts: Iterable[str], add_special_tokens: bool | None = None) -> Iterator[None]:
        """Encode the texts at once, and know them until the block ends."""
        unique = list(dict.fromkeys(texts))
        keys = [(text, self._adds_special(text, add_special_tokens)) for text in unique]
        self._known.update(zip(keys, self._ids(unique, add_special_tokens), strict=True))
        try:
            yield
        finally:
            for key in keys:
                self._known.pop(key, None)

    def _adds_special(self, text: str, asked: bool | None) -> bool:
        if asked is not None:
            return asked
        # A chat template, for example, has written it already.
        return self._add_bos is not False and not has_bos_prefix(text, self._prefix_text)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the conversation as the tokenizer's chat template writes it.

        A template that fails for a conversation with a system message gets it without.

        Raises:
            TemplateError: the tokenizer has no template, or it fails.
        """
        options = {**self.chat_template_args, "continue_final_message": not add_generation_prompt}
        template = Template.find(self.tokenizer, None, options)

        def rendered(chat: list[dict[str, str]]) -> str:
            text: str = template(chat, add_generation_prompt)
            return text

        try:
            return rendered(chat_history)
        except TemplateError:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            _log.warning("the chat template fails with a system message, which is left out")
            return rendered(rest)

    # Log-likelihoods --------------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation given its context, and whether it is the greedy one.

        Raises:
            InvalidRequestError: a continuation without ids, or as long as the context of the model.
            EngineError: the engine failed at some requests. The others are in lm-eval's cache, if it has one.
        """
        if self.chat_template_args.get("enable_thinking"):
            raise invalid("enable_thinking", "no thinking precedes a continuation that is given; leave it out")
        pairs = [request.args for request in requests]
        # lm-eval tokenizes one text after another. All of them in one call take a fraction of that time.
        alone = [text for context, text in pairs if not context]
        joined = [text for context, more in pairs if context for text in (context.rstrip(), context + more)]
        with self._remembering(alone, False), self._remembering(joined):
            found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
            return found

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        found: dict[int, tuple[float, bool]] = {}
        for row, log_prob, greedy in self._scores(requests, disable_tqdm):
            found[row] = (log_prob, greedy)
            self.cache_hook.add_partial("loglikelihood", requests[row][0], found[row])
        return [found[row] for row in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, every token of it after as much context as fits.

        Raises:
            EngineError: as for `loglikelihood`.
        """
        texts = [request.args[0] for request in requests]
        windows: list[Pair] = []
        owners: list[int] = []
        for owner, ids in enumerate(self._ids(texts)):
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self._longest - 1, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        parts: list[list[float]] = [[] for _ in texts]
        wanted = Counter(owners)
        for row, log_prob, _ in self._scores(windows, disable_tqdm, greedy=False):
            owner = owners[row]
            parts[owner].append(log_prob)
            if len(parts[owner]) == wanted[owner]:
                self.cache_hook.add_partial("loglikelihood_rolling", (texts[owner],), math.fsum(parts[owner]))
        return [math.fsum(each) for each in parts]

    def _scores(
        self, pairs: Sequence[Pair], disable_tqdm: bool, greedy: bool = True
    ) -> Iterator[tuple[int, float, bool]]:
        """Yield the row of every pair, its log-likelihood and, if `greedy`, whether it is the greedy continuation."""
        problems = {row: why for row, (_, before, after) in enumerate(pairs) if (why := self._problem(before, after))}
        refuse(problems, "requests")
        rows = [(before + after)[-self._longest :] for _, before, after in pairs]
        if cut := sum(len(before) + len(after) > self._longest for _, before, after in pairs):
            _log.warning("%d of %d requests lose their first tokens: %d fit", cut, len(pairs), self._longest)
        # Rows that begin alike come together, so that an engine reads what they share once.
        order = sorted(range(len(rows)), key=rows.__getitem__)
        for some in self._batches(order, "loglikelihood", disable_tqdm):
            starts = [len(rows[row]) - len(pairs[row][2]) for row in some]
            result = self.engine.score_logprobs(
                [rows[row] for row in some], score_from=starts, return_argmax=greedy, on_error="skip"
            )
            log_probs = result.logprobs.tolist()
            best = [[]] * len(some) if result.argmax is None else result.argmax.tolist()
            failed: Problems = {}
            for at, (row, start) in enumerate(zip(some, starts, strict=True)):
                if result.errors and result.errors[at]:
                    failed[row] = result.errors[at]
                    continue
                self._count(read=len(rows[row]), scored=len(rows[row]) - start)
                yield row, math.fsum(log_probs[at][start:]), best[at][start:] == rows[row][start:]
            _raise(failed)

    def _problem(self, before: list[int], after: list[int]) -> str:
        if not before or not after:
            return f"{len(before)} ids of context and {len(after)} of continuation; give at least one of both"
        if len(after) >= self._longest:
            return f"a continuation of {len(after)} ids leaves no context; {self._longest - 1} are legal"
        return ""

    # Answers ----------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each prompt, up to the first string of its `until`.

        Raises:
            InvalidRequestError: generation arguments that are unknown or out of range.
            CapabilityError: the engine does not honour one of them.
            EngineError: as for `loglikelihood`.
        """
        prompts, given = [request.args[0] for request in requests], [request.args[1] for request in requests]
        # Requests with the same arguments share calls.
        groups: dict[str, list[int]] = {}
        for row, each in enumerate(given):
            groups.setdefault(json.dumps(each, sort_keys=True, default=repr), []).append(row)
        # All of them before the first call, so that a mistake in one costs nothing.
        kinds = [(group, self._settings(given[group[0]])) for group in groups.values()]
        rows = self._ids(prompts)
        found: dict[int, str] = {}
        for group, settings in kinds:
            numbers = dict(zip(group, stable_numbers(prompts[row] for row in group), strict=True))
            # The longest prompts come first, so that an engine that runs out of memory does so early.
            group.sort(key=lambda row: (-len(rows[row]), rows[row]))
            sampling = settings.sampling
            for some in self._batches(group, "generate_until", disable_tqdm):
                # The seed of an answer does not depend on which other requests there are, so that a run that is
                # resumed gives the answers that it would have given.
                drawn = sampling.seed is not None and not sampling.greedy
                seeds = answer_seeds(sampling.seed or 0, [numbers[row] for row in some]) if drawn else None
                answers, failed = self._answers([rows[row] for row in some], settings, seeds)
                for at, (row, (text, tokens)) in enumerate(zip(some, answers, strict=True)):
                    if at not in failed:
                        found[row] = text
                        self._count(read=len(rows[row]), sampled=tokens)
                        self.cache_hook.add_partial("generate_until", (prompts[row], given[row]), text)
                _raise({some[at]: why for at, why in failed.items()})
        return [found[row] for row in range(len(rows))]

    def _settings(self, given: Mapping[str, Any]) -> Settings:
        """Return what lm-eval's arguments of a request stand for.

        Raises:
            InvalidRequestError: an argument that is unknown or out of range, or an answer that leaves no room for a
                prompt.
        """
        kwargs: dict[str, Any] = {**normalize_gen_kwargs(dict(given), self.max_gen_toks)}
        until = [text for text in kwargs.pop("until") if text]
        new = kwargs.pop("max_gen_toks")
        if new >= self.max_length:
            raise invalid("max_gen_toks", f"{new} leave no room for a prompt in max_length={self.max_length}")
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
            stop_token_ids=named.stop_token_ids if named.ignore_eos else (*named.stop_token_ids, self.eot_token_id),
            # `until` may name special tokens. The text that counts is made here, from the ids.
            skip_special_tokens=False,
        )
        ends = until if named.ignore_eos else handle_stop_sequences(until, eos=self._eos_text)
        return Settings(sampling, ends, named.skip_special_tokens)

    def _answers(
        self, prompts: Sequence[list[int]], settings: Settings, seeds: Tensor | None
    ) -> tuple[list[tuple[str, int]], Problems]:
        """Return the text of each answer that counts and how many ids were sampled, and what was wrong with rows."""
        sampling = settings.sampling
        room = self.max_length - (sampling.max_new_tokens or 0)
        result = self.engine.generate(
            [ids[-room:] for ids in prompts], sampling, logprobs="none", seeds=seeds, on_error="skip"
        )
        rows = result.ids.tolist()
        counted = [self._after_thinking(ids) for ids in rows]
        texts = self.engine.detokenize(counted, skip_special_tokens=settings.skip_special_tokens)
        if result.texts is not None:
            texts = list(result.texts)
        if isinstance(self._think_end, int):
            texts = [text.lstrip() for text in texts]
        named = self._think_end if isinstance(self._think_end, str) else None
        texts = [postprocess_generated_text(text, settings.until, named) for text in texts]
        errors = result.errors or [""] * len(rows)
        ended = zip(result.finish_reasons, errors, strict=True)
        no_answer = ("abort", "error")
        bad = {row: error or f"it ended with {why!r}" for row, (why, error) in enumerate(ended) if why in no_answer}
        return list(zip(texts, map(len, rows), strict=True)), bad

    def _after_thinking(self, ids: list[int]) -> list[int]:
        """Return the ids after the last one that ends thinking, if an id does."""
        if not isinstance(self._think_end, int) or self._think_end not in ids:
            return ids
        return ids[len(ids) - ids[::-1].index(self._think_end) :]

    # Both -------------------------------------------------------------------------------------------------------------

    def _batches(self, rows: Sequence[int], what: str, disable_tqdm: bool) -> Iterator[Sequence[int]]:
        """Yield the rows of each call, and show how many are done."""
        with tqdm(total=len(rows), desc=f"Running {what} requests", disable=disable_tqdm) as bar:
            for start in range(0, len(rows), self.batch_size):
                yield (some := rows[start : start + self.batch_size])
                bar.update(len(some))

    def _count(self, **tokens: int) -> None:
        for kind, number in tokens.items():
            self._tokens[kind] += number


def _opened(backend: Any, model: Any, options: dict[str, Any]) -> Backend:
    if backend is None:
        names = ", ".join(info.name for info in list_backends())
        raise invalid("backend", f"give the name of one, as in backend=transformers; installed: {names}")
    try:
        return get_backend(backend, model, **options)
    except InvalidRequestError as error:
        if error.field not in options:
            raise
        own = ", ".join(name for name in signature(CoreLM).parameters if name != "options")
        raise invalid(str(error.field), f"{error}. Arguments of the model corelm itself: {own}") from error


def _length(given: int | None, context: int | None) -> int:
    if given is None:
        return context or DEFAULT_MAX_LENGTH
    if context is not None and count("max_length", given, 1) > context:
        raise invalid("max_length", f"the engine's context is {context}, got {given}; give at most {context}")
    return count("max_length", given, 1)


def _rows_of_call(batch_size: int | str | None, most: int | None) -> int:
    if batch_size is None or str(batch_size).partition(":")[0] == "auto":
        return _ROWS if most is None else min(_ROWS, count("max_batch_size", most, 1))
    # The command line passes a text.
    return count("batch_size", int(batch_size) if str(batch_size).isdecimal() else batch_size, 1)


def _raise(failed: Problems) -> None:
    if failed:
        listed = first_few([f"request {row}: {why}" for row, why in sorted(failed.items())], "more requests")
        raise EngineError(f"the engine failed: {listed}", usable=True, problems=failed)
