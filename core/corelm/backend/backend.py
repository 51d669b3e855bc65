"""`Backend`: one opened engine behind a typed façade. It accepts plain Python values and returns records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Never, Self, TypeVar

import torch
from torch import Tensor, nn

from corelm.backend import arguments
from corelm.backend.arguments import prepare_generation, prepare_scoring, refuse_unknown
from corelm.backend.call_log import logger
from corelm.backend.engine import OpenEngine, PreparedCall, R
from corelm.backend.engine_call import Listener
from corelm.backend.futures import Aborts, in_thread
from corelm.backend.given_weights import NewAdapter, NewWeights, checked_name, source_of_adapter, source_of_weights
from corelm.backend.skipping import OnError
from corelm.backend.streams import AnswerStream, AsyncAnswerStream
from corelm.errors import CoreLMError, EngineError, brief, described
from corelm.spec import records
from corelm.spec.answer_text import decoded
from corelm.spec.provenance import Adapter, Provenance, VersionRuns
from corelm.spec.records import GenerateResult, ScoreResult, TokenizeRequest, TokenizeResult, WeightUpdate, When
from corelm.spec.sampling import SamplingParams
from corelm.tensors.modes import in_caller_modes
from corelm.validate import checks_names, did_you_mean, invalid, is_bool, one_of, shown

if TYPE_CHECKING:
    from tensordict import TensorDict

T = TypeVar("T")


class Backend:
    """One opened engine. Use it as a context manager: leaving the block closes the engine.

    If an exception ends the block, Ctrl-C for example, the calls of other threads are aborted if the engine
    can. Requests are checked before a hook sees them, and results before the caller does. The engine is
    entered by one thread at a time unless it declares `concurrent_calls`. A backend cannot be copied or
    pickled, and a fork of its process cannot use it: open the engine in the process that needs it.

    A timeout ends the caller's wait. An engine that does not declare `stops_at_timeout` is then called on a
    thread and finishes alone; scoring with gradients stays on the caller's thread. A thread that makes a call
    has its caller's context variables, gradient mode, autocast and CUDA device.

    `generate` and `score_logprobs` check their arguments and hand the prepared call to `run`; the variants that
    do not wait hand it to `submit`. A subclass that decides when and where calls are made overrides these two.

    Args:
        engine: the engine to call; `get_backend` opens one by name.

    Attributes:
        engine: the engine with its hooks. ``engine.plugin`` is the plugin's own object.
        name: the name that the engine was opened by.
        model_name: the name that labels its numbers.
        timeout: seconds that a call may take when the call does not say; None sets no limit.
        capabilities: what the engine can do.
        tokenizer: the engine's tokenizer.
        eos_token_ids: the ids that end an answer by themselves: the model's own list, else the tokenizer's EOS.
    """

    def __init__(self, engine: OpenEngine) -> None:
        self.engine = engine
        self.name, self.model_name, self.timeout = engine.name, engine.model_name, engine.timeout
        self.capabilities, self.tokenizer = engine.capabilities, engine.tokenizer
        self.eos_token_ids = engine.eos_token_ids
        self._aborts = Aborts(engine.abort, engine.name)

    @classmethod
    def from_plugin(cls, plugin: Any, name: str, **options: Any) -> Backend:
        """Return a backend for a plugin object that is already open. Arguments and errors are those of `OpenEngine`."""
        engine = OpenEngine(plugin, name, **options)
        for wrapper in options.get("wrappers", ()):
            # Before the engine is called.
            if callable(attached := getattr(wrapper, "attached", None)):
                attached(engine)
        return cls(engine)

    # What it is ------------------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> str:
        """The label of the weights in force, "0" until they first change.

        `update_weights` and `weights_changed` change it. An engine that notices that the owner of its model
        trains it in place (see its README) counts up with each change.
        """
        return self.engine.weight_version

    @property
    def info(self) -> Mapping[str, str]:
        """Short facts that the engine tells about itself, as they are now: ``{"decoding": "cached and padded"}``.

        Empty for an engine that tells none, such as one behind a URL, and for one in another process. If the engine
        raises, "info" says what.

        Raises:
            BackendClosedError: the backend was closed.
        """
        self.engine.require_open()
        try:
            told = getattr(self.engine.plugin, "info", None)
            facts = {str(name): str(fact) for name, fact in told.items()} if isinstance(told, Mapping) else {}
        except Exception as error:
            # Answers are not lost for want of facts about them.
            facts = {"info": brief(described(error))}
        return MappingProxyType(facts)

    @property
    def pad_id(self) -> int:
        """The id that fills dense tensors. No mask is ever derived from it."""
        return self.engine.pad_id

    @property
    def closed(self) -> bool:
        return self.engine.closed

    def __reduce__(self) -> Any:
        raise TypeError("an open engine cannot be copied or pickled; call get_backend in the process that needs it")

    def __repr__(self) -> str:
        return f"Backend({self.name!r}, {self.model_name!r}{', closed' if self.closed else ''})"

    # Making calls ----------------------------------------------------------------------------------------------------

    def run(self, call: PreparedCall[R]) -> R:
        """Make a prepared call and return its result."""
        result: R = self.engine.call(call)
        return result

    #: Entered by a policy, with its timeout, while it reads its input, and again while it writes; see `DynamicBatcher`.
    host_turn: Callable[[float | None], AbstractContextManager[object]] = nullcontext

    def submit(self, call: PreparedCall[R], *, block: bool = False) -> Future[R]:
        """Start a prepared call and return its future at once; see `submit_generate`. This makes it on a new thread.

        A call that is cancelled before its turn is not sent. `block` allows to wait for room in a full queue.

        Raises:
            EngineError: the system has no room for a thread.
        """
        future: Future[R] = Future()
        names, works_on = call.request.request_ids, self.engine.works_on

        def abort(done: Future[R]) -> None:
            if done.cancelled():
                self._aborts.add(names, lambda: works_on(names))

        run = in_caller_modes(lambda: self.engine.call(call, caller_waits=lambda: not future.done()))
        in_thread(run, f"corelm-{self.name}", future)
        if self.capabilities.abort:
            future.add_done_callback(abort)
        return future

    # What it does ----------------------------------------------------------------------------------------------------

    def tokenize(
        self,
        texts: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        offsets: bool = False,
    ) -> TokenizeResult:
        """Return one row of ids per text; a single text is one row. The options are those of `TokenizeRequest`."""
        how = {"add_special_tokens": add_special_tokens, "parse_special": parse_special, "offsets": offsets}
        tokens: TokenizeResult = self.engine.convert("tokenize", TokenizeRequest(texts=arguments.texts(texts), **how))
        return tokens

    def detokenize(self, ids: Any, *, skip_special_tokens: bool = True, before: Any = None) -> list[str]:
        """Return one text per row of ids.

        Args:
            ids: the rows, as `generate` takes prompts.
            skip_special_tokens: whether special tokens have no text.
            before: for each row, the ids that precede it, such as the prompt of an answer. The text is then
                what the row adds to theirs: decoders of SentencePiece drop the first space of a text.
        """
        self.engine.require_open()
        rows = arguments.rows_of_ids(ids, "ids").tolist()
        if before is not None:
            before = arguments.rows_of_ids(before, "before").tolist()
            if len(before) != len(rows):
                raise invalid("before", f"has {len(before)} rows, and ids has {len(rows)}")
        return decoded(self.tokenizer, rows, skip_special_tokens, before)

    def generate(
        self,
        prompts: Any,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        *,
        logprobs: Literal["none", "raw", "processed"] = "raw",
        seeds: Tensor | Sequence[int] | None = None,
        request_ids: Sequence[str] | None = None,
        timeout: float | None = None,
        on_error: OnError = "raise",
        adapter: Adapter = None,
        return_support: bool = False,
        top_logprobs: int = 0,
        continue_from: GenerateResult | None = None,
        **unknown: Never,
    ) -> GenerateResult:
        """Sample ``num_samples`` answers for every prompt. Answers to one prompt are neighbours in the result.

        Args:
            prompts: a `Ragged`, a list of lists or tensors of ids, or an integer tensor ``[rows, time]``.
            sampling: how to sample.
            logprobs: which log-probability of each sampled token to return.
            seeds: int64[answers], one seed per answer, instead of the seeds derived from ``sampling.seed``.
            request_ids: one name per answer.
            timeout: seconds that the call may take; None for the backend's own timeout.
            on_error: "raise" looks for all bad rows first and then runs nothing. "skip" serves the other
                rows; a bad row comes back empty, with the finish reason `error` and its message in `errors`.
            adapter: the name of the adapter that answers, see `load_adapter`; False for the base weights alone.
                None leaves the model as it is: without an adapter, or with those active in a PEFT model object.
            return_support: also return, for each sampled token, the ids that top-k, top-p and min-p had left
                (`kept_ids`) and the log of their mass (`kept_log_mass`). `score_logprobs` takes them as
                `support`. The set is empty, which stands for the whole vocabulary, if nothing was cut off.
            top_logprobs: how many of the most probable ids to return at each sampled token, with their
                log-probs under the distribution of `logprobs`, and the log of the mass of all others.
            continue_from: what an earlier call returned for the same prompts, for example when an update has
                aborted it: its answers go on from their ids, under the weights in force, up to `max_new_tokens` in
                all. Old tokens keep their log-probs and versions. Answers that have ended are returned as they are.

        Raises:
            InvalidRequestError: bad ids, an empty or too long prompt, an illegal sampling value; or `continue_from`
                is no result of such a call, or something in `sampling` would be counted from its end on.
            ProvenanceMismatchError: the log-probs of `continue_from` are of another distribution.
            CapabilityError: the engine cannot do what was asked.
            EngineError: the engine failed, or returned what the specification does not allow.
            BackendTimeoutError: the engine did not answer in time.
            BackendClosedError: the backend was closed.
        """
        if unknown:
            refuse_unknown(Backend.generate, unknown)
        return self.run(
            prepare_generation(
                self.engine,
                prompts,
                sampling,
                logprobs=logprobs,
                seeds=seeds,
                request_ids=request_ids,
                timeout=timeout,
                on_error=on_error,
                adapter=adapter,
                return_support=return_support,
                top_logprobs=top_logprobs,
                continue_from=continue_from,
            )
        )

    def submit_generate(
        self, prompts: Any, sampling: SamplingParams | Mapping[str, Any] | None = None, **options: Any
    ) -> Future[GenerateResult]:
        """Start `generate`, with the same arguments, and return its future. Wait only for room in a full queue.

        Cancelling the future aborts the request in an engine that can abort; another engine finishes it, and
        the result is dropped. The future's callbacks run on a thread of the backend and should not take long.
        Do not wait for the future in one of them or in a hook wrapper: its call may wait for them to end.

        `on_tokens`, a function of a `TokenChunk`, is called with tokens as they come, on a thread of the engine. It has
        to return at once. What it raises fails this call alone, once the engine has sampled its answers.

        Raises:
            InvalidRequestError, CapabilityError: as for `generate`; raised here and not by the future.
            QueueFullError: a batcher with ``on_full="raise"`` has no room.
        """
        refuse_unknown(Backend.generate, options, "on_tokens", "new_turn")
        return self.submit(prepare_generation(self.engine, prompts, sampling, **options), block=True)

    def score_logprobs(
        self,
        sequences: Any,
        *,
        temperature: float = 1.0,
        score_from: Any = None,
        return_logits: bool = False,
        return_argmax: bool = False,
        grad: bool = False,
        device: torch.device | str | None = None,
        request_ids: Sequence[str] | None = None,
        timeout: float | None = None,
        on_error: OnError = "raise",
        adapter: Adapter = None,
        support: Any = None,
        top_k: int = 0,
        top_ids: Any = None,
        **unknown: Never,
    ) -> ScoreResult:
        """Return the log-probability of every token but the first of each sequence.

        Args:
            sequences: a `Ragged`, a list of lists or tensors of ids, or an integer tensor ``[rows, time]``.
            temperature: the logits are divided by it; above 0.
            score_from: the first position to score, one for all sequences or one per sequence; None for position 1.
            return_logits: also return the logits, before any temperature.
            return_argmax: also return the most probable id at every scored position; -1 at the others.
            grad: results carry gradients to the model's parameters.
            device: where the results go; None leaves it to the engine.
            request_ids, timeout, on_error, adapter: as for `generate`. Nothing of a bad row is scored. Scores
                with ``adapter=False`` are those of the reference that an adapter started from.
            support: `TokenSets`, or nested lists: the ids over which to normalise at each position, as
                `kept_ids` of answers sampled with `return_support` has them; one set for each id of a
                sequence, or for each that is scored. An empty set stands for the whole vocabulary.
            top_k: how many of the most probable ids to return at each scored position, with their log-probs
                and the log of the mass of all others.
            top_ids: int64 ``[total, k]`` as a `Ragged`, or one tensor ``[time, k]`` a row: the ids to return
                instead, for each id of a sequence, or for each that is scored; -1 stands for no id.

        Raises:
            InvalidRequestError: bad ids, an empty or too long sequence, an illegal temperature or
                `score_from`; a set that lacks the given id, or has one twice or outside the vocabulary.
            CapabilityError: the engine cannot score, or cannot score like this.
            EngineError, BackendTimeoutError, BackendClosedError: as for `generate`.
        """
        if unknown:
            refuse_unknown(Backend.score_logprobs, unknown)
        return self.run(
            prepare_scoring(
                self.engine,
                sequences,
                temperature=temperature,
                score_from=score_from,
                return_logits=return_logits,
                return_argmax=return_argmax,
                grad=grad,
                device=device,
                request_ids=request_ids,
                timeout=timeout,
                on_error=on_error,
                adapter=adapter,
                support=support,
                top_k=top_k,
                top_ids=top_ids,
            )
        )

    def submit_score_logprobs(self, sequences: Any, **options: Any) -> Future[ScoreResult]:
        """Start `score_logprobs`, with the same arguments, and return its future; see `submit_generate`."""
        refuse_unknown(Backend.score_logprobs, options)
        return self.submit(prepare_scoring(self.engine, sequences, **options), block=True)

    def to_containers(self, request: records.ContainerRequest) -> TensorDict:
        """Wrap a batch of rows as TensorClasses in a TensorDict."""
        containers: TensorDict = self.engine.convert("to_containers", request)
        return containers

    def provenance(self, batch: GenerateResult | ScoreResult) -> Provenance | tuple[Provenance, ...]:
        """Return where the log-probs of a result of this backend came from: one for all rows, or one for each."""
        engine, processed = self.engine, batch.mode == "processed"
        versions = batch.weight_versions or (engine.weights.version_with(batch.adapter),)
        sampling = batch.sampling if isinstance(batch, GenerateResult) else None
        runs: list[VersionRuns] = [()] * len(versions)
        if isinstance(batch, GenerateResult) and batch.version_runs is not None:
            # Runs of one version say no more than the version.
            runs = [row if len(row) > 1 else () for row in batch.version_runs]
        rows = list(zip(versions, runs, strict=True))
        made = {}
        for version, of_row in {*rows}:
            made[version, of_row] = Provenance(
                backend=engine.name,
                model=engine.model_name,
                weight_version=version,
                mode=batch.mode,
                temperature=batch.temperature if processed else 1.0,
                support=batch.support if processed else "full",
                penalties=sampling.penalties if processed and sampling is not None else (),
                adapter=batch.adapter,
                version_runs=of_row,
            )
        return made[rows[0]] if len(made) == 1 else tuple(made[row] for row in rows)

    # Streaming -------------------------------------------------------------------------------------------------------

    @property
    def entered(self) -> bool:
        """Whether this thread is in a call to the engine, and so must not wait for a call that another thread makes."""
        return self.engine.entered

    def require_outside(self, field: str) -> None:
        """Refuse a method that waits for a call that another thread makes, if that thread would wait for this one."""
        if self.entered:
            where = "this code runs inside a call to the engine (in a hook wrapper, or in a callback of a batcher)"
            why = f"{where}, and {field} would wait forever for that call to end"
            raise invalid(field, f"{why}; use `generate`, or call the policy itself, here")

    def stream(
        self, prompts: Any, sampling: SamplingParams | Mapping[str, Any] | None = None, **options: Any
    ) -> AnswerStream[GenerateResult]:
        """Start `generate`, with the same arguments, and return an iterator over the tokens as they come.

        After the last chunk, ``stream.result`` is what `generate` returns. Use it as a context manager if you may leave
        early. An engine without the capability `streaming` gives each answer in one chunk when the call has ended. A
        call is not retried (``get_backend(retry=…)``) after its first chunk. With ``new_turn=True`` the texts are those
        of messages, which do not continue the text of the prompt: SentencePiece drops the first space of a text.

        Raises:
            InvalidRequestError: as for `generate`, and raised here; the errors of the engine are raised while
                reading. Also in a hook wrapper or a callback of a batcher, where the stream would wait for itself.
            CapabilityError: as for `generate`, and raised here.
        """
        return AnswerStream(self, partial(self._plan, prompts, sampling, options))

    def astream(
        self, prompts: Any, sampling: SamplingParams | Mapping[str, Any] | None = None, **options: Any
    ) -> AsyncAnswerStream[GenerateResult]:
        """Return what `stream` does for ``async for``. All errors are raised while reading."""
        return AsyncAnswerStream(self, partial(self._plan, prompts, sampling, options))

    def _plan(
        self, prompts: Any, sampling: Any, options: Mapping[str, Any], listener: Listener
    ) -> tuple[PreparedCall[GenerateResult], Callable[[GenerateResult], GenerateResult]]:
        refuse_unknown(Backend.generate, options, "new_turn")
        return prepare_generation(self.engine, prompts, sampling, on_tokens=listener, **options), lambda result: result

    # Weights, sleep, health ------------------------------------------------------------------------------------------

    def _in_turn(self, change: Callable[[], T], when: When = "drain") -> T:
        """Change what the engine runs. A batcher first waits for the requests before it, if `when` is "drain"."""
        return change()

    @checks_names()
    def update_weights(
        self, weights: NewWeights, version: str | None = None, when: When = "drain", expect: object = None
    ) -> str:
        """Load new weights, and return the version that every later row carries.

        Args:
            weights: a model, a state dict or an iterator of (name, tensor) with the names of its checkpoint, or a path.
            version: the label of these weights; None counts up from the last label: "3" to "4", and "step-1", which a
                caller gave, to "step-1+1" and "step-1+2".
            when: "drain" lets answers in flight finish on the old weights first. "abort" ends them with the
                reason `abort`, in an engine that can. "now" lets them go on, on the new weights: their
                `version_runs` say from which token on. Scores never mix two sets of weights.
            expect: what the engine should answer, for what listens to its updates, such as a canary of
                ``core-fleet`` before any other call is served. Without a listener, it is refused.

        Raises:
            InvalidRequestError: the weights do not fit; the old ones are still in force.
            CapabilityError: the engine cannot load them, or not while it answers; the old ones are still in force.
            StaleWeightsError: a listener finds other weights in the engine; as after the next error.
            EngineError: loading failed, or an iterator did half-way. As after an interrupt, weights may be partly new:
                `weight_version` and the tokens that follow get a label that none had before, until an update succeeds.
        """
        one_of("when", when, records.WHENS)
        engine = self.engine
        engine.require("update_weights", "its weights cannot be changed")
        if when == "now":
            why = 'type when="drain" to let its answers finish, or when="abort" to end them'
            engine.require("updates_in_flight", why)
        self._require_listener(expect)
        source = source_of_weights(weights, engine.capabilities.weight_stream)
        update = WeightUpdate(version="", when=when, expect=expect, **source)
        return self._in_turn(partial(engine.weights.update, update, version), when)

    def weights_changed(self, version: str | None = None, expect: object = None) -> str:
        """Say that the owner of the model has changed its weights, and return the version that later rows carry.

        Use it for changes that the engine may not notice. It waits for calls under way; the engine empties its caches.

        Args:
            version, expect: as for `update_weights`.

        Raises:
            BackendAsleepError: the engine has dropped its weights, or was opened without: only an update brings some.
            StaleWeightsError: a listener finds other weights; rows get a label that no weights had before.
        """
        self._require_listener(expect)
        return self._in_turn(partial(self.engine.weights.update, WeightUpdate(version="", expect=expect), version))

    def runs(self, model: nn.Module) -> bool:
        """Return whether the engine runs this model object, so that training it in place changes the engine's weights.

        It does if it was opened with the object, or with one in it: PEFT and DDP wrap models. An engine that
        does not tell the state of its weights (the hook `weights_state`) runs a copy.
        """
        given = self.engine.given_model()
        if given is None or not self.engine.implements("weights_state"):
            return False
        own = {id(parameter) for parameter in given.parameters()}
        return bool(own) and own <= {id(parameter) for parameter in model.parameters()}

    @property
    def adapters(self) -> dict[str, str]:
        """The version of each adapter that `load_adapter` has loaded, by name."""
        return self.engine.weights.adapters

    @checks_names()
    def load_adapter(
        self, name: str, weights: NewAdapter, *, config: Any = None, version: str | None = None, when: When = "drain"
    ) -> str:
        """Load an adapter (LoRA, for example), or replace the one of this name, and return its version.

        Calls name it with ``adapter=name``. Their rows carry a label such as ``"0+policy@3"``: the version of
        the base weights, the adapter, and its version. The base weights and their version stay as they are.

        Args:
            name: the name; without any of ``@ + / \\``.
            weights: a PEFT model, of which the adapter of this name is read, or else the active one; a folder
                that PEFT wrote; or a state dict with the names that ``peft.get_peft_model_state_dict`` gives.
            config: PEFT's configuration of the adapter in a state dict, such as a ``LoraConfig`` or its dict.
                None for that of the adapter that is replaced.
            version: the label of this adapter; None counts up from the last one of this name, from "1".
            when: as for `update_weights`, but not "now": an answer is of one version of its adapter.

        Raises:
            InvalidRequestError: the adapter does not fit the model or the engine; what was loaded before stays.
            CapabilityError: the engine takes no adapters, or none of this kind; what was loaded before stays.
            EngineError: loading failed. The adapter gets a version that none had before, until it is loaded again.
        """
        name = checked_name(name)
        one_of("when", when, records.WHENS_OF_ADAPTERS)
        why = "it runs its base weights only; its README says which options make it take adapters"
        self.engine.require("adapters", why)
        last = self.engine.weights.state.adapters.get(name)
        source = source_of_adapter(name, weights, config, last.config if last else None)
        update = WeightUpdate(version="", when=when, adapter=name, **source)
        return self._in_turn(partial(self.engine.weights.update, update, version), when)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter that `load_adapter` has loaded.

        Raises:
            InvalidRequestError: no adapter of this name was loaded.
            CapabilityError: the engine takes no adapters.
        """
        name = checked_name(name)
        self.engine.require("adapters", "it has none to unload")
        self._in_turn(partial(self.engine.weights.update, WeightUpdate(version="", adapter=name), None))

    def sleep(self, level: int = 1, when: When = "drain") -> None:
        """Free the memory of the engine's accelerator until `wake`, for example for a step of the optimizer.

        It waits for calls under way. Calls that come later, until the engine is awake, are refused. If this
        raises another error than the first three, part of the engine may sleep: `wake` it, or close it.

        Args:
            level: 1 keeps the weights in the memory of the machine. 2 drops them, for an update that follows
                anyway: the engine answers again after `wake` and `update_weights`.
            when: "drain" lets answers in flight finish first; "abort" ends them with the reason `abort`, in
                an engine that can.

        Raises:
            InvalidRequestError: no such level, or none at which this engine can sleep now.
            CapabilityError: the engine cannot sleep.
            BackendAsleepError: part of it sleeps already.
            EngineError: the engine failed; or a wrapper asks for it in the middle of a call, and nothing has changed.
        """
        engine, levels = self.engine, self.engine.capabilities.sleep_levels
        why = "it cannot sleep as it was opened; its README says how an engine that can is opened"
        engine.require("sleep_levels", why)
        if engine.entered:
            why = "it cannot sleep in the middle of a call, which would go on without its memory"
            raise EngineError(f"backend {engine.name!r}: {why}; call sleep outside other calls", usable=True)
        one_of("when", when, records.WHENS_OF_SLEEP)
        if is_bool(level) or level not in records.SLEEP_LEVELS:
            what = "expected 1, which keeps the weights outside the accelerator, or 2, which drops them"
            raise invalid("level", f"{what}; got {shown(level)}")
        if level not in levels:
            able = " and ".join(map(str, sorted(levels)))
            raise invalid("level", f"this engine, as it was opened, sleeps at level {able} only")
        self._in_turn(partial(engine.weights.sleep, records.SleepRequest(level=int(level), when=when)), when)

    def wake(self, tags: str | Iterable[str] | None = None) -> None:
        """Wake what sleeps of the engine; nothing happens to what does not.

        Wake the weights first, update them, and then wake the KV cache, if the trainer's weights, those of the engine
        and the cache do not fit next to one another::

            backend.sleep(level=2)
            ...                                    # the optimizer's step
            backend.wake(["weights"])
            backend.update_weights(model)
            backend.wake(["kv_cache"])

        When all of it is awake and has weights, a listener, such as a canary, looks at it before any other call.

        Args:
            tags: which parts: "weights", "kv_cache" or both; None for all.

        Raises:
            InvalidRequestError: an unknown part.
            StaleWeightsError: the listener objects: the weights came back as others. Rows get a label that no
                weights had before.
            EngineError: the engine failed. It counts as asleep, and `wake` can be called again. If it failed
                when the listener looked, it is awake, and rows get a label as above, until an update succeeds.
        """
        named = records.SLEEP_TAGS if tags is None else [tags] if isinstance(tags, str) else tags
        named, parts = [*named] if isinstance(named, Iterable) else [], ", ".join(records.SLEEP_TAGS)
        for tag in named:
            if tag not in records.SLEEP_TAGS:
                guess = did_you_mean(tag, records.SLEEP_TAGS)
                raise invalid("tags", f"unknown part {shown(tag)}{guess}; known: {parts}")
        if not named:
            raise invalid("tags", f"expected None for all, or a list out of {parts}; got {shown(tags)}")
        self.engine.weights.wake(frozenset(named))

    def health(self) -> bool:
        """Return whether the engine can serve. An engine that does not say is healthy while it is open."""
        return self.engine.health()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests. Answers keep the tokens sampled so far and get the finish reason `abort`.

        Raises:
            CapabilityError: the engine cannot abort.
        """
        logger.info("%s: aborting %d requests", self.engine.name, len(request_ids))
        self.engine.abort(request_ids)

    # Closing ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the engine. Every later call raises `BackendClosedError`; closing twice is fine.

        An engine that takes one call at a time finishes that call first, as long as its caller waits for it: give
        calls a timeout to bound this. If no caller waits for it any more, an engine that can abort ends it.

        Raises:
            BackendTimeoutError: the engine still works on a call whose caller has stopped waiting. The
                backend is closed, and the engine is released when that call ends.
        """
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            self._end(kind is None)
        except CoreLMError as error:
            if kind is None:  # else the exception that ends the block is more important
                raise
            logger.warning("closing backend %s failed: %s", self.name, brief(str(error)))

    def _end(self, well: bool) -> None:
        """Close at the end of a ``with`` block, which ended `well` if it raised nothing."""
        if not well:
            self.engine.close(abort=True)
        self.close()

    def _require_listener(self, expect: object) -> None:
        if expect is not None and self.engine.listener is None:
            raise invalid("expect", "nothing compares the backend with it; core-fleet does: open it with canary=True")
