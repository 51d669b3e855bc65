"""`Backend`: one opened engine behind a typed façade. It accepts plain Python values and returns records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from corelm import validate
from corelm.backend import arguments
from corelm.backend.aborts import Aborts
from corelm.backend.call_log import logger
from corelm.backend.check_results import checked
from corelm.backend.controls import EngineControls
from corelm.backend.engine import OpenEngine
from corelm.backend.engine_call import Call
from corelm.backend.futures import in_thread
from corelm.backend.prepared_call import PreparedCall, R, prepare_generation, prepare_scoring
from corelm.backend.skipping import OnError
from corelm.backend.streams import AnswerStreams
from corelm.errors import CoreLMError, brief
from corelm.rendering.encoding import decoded
from corelm.spec.capabilities import Capabilities
from corelm.spec.provenance import Adapter, Provenance, VersionRuns
from corelm.spec.records import ContainerRequest, GenerateResult, ScoreResult, TokenizeRequest, TokenizeResult
from corelm.spec.sampling import SamplingParams
from corelm.tensors.modes import in_caller_modes

if TYPE_CHECKING:
    from tensordict import TensorDict


class Backend(EngineControls, AnswerStreams):
    """One opened engine. Use it as a context manager: leaving the block closes the engine.

    If an exception ends the block, Ctrl-C for example, the calls of other threads are aborted if the engine can.
    Requests are checked before a hook sees them, and results before the caller does. The engine is entered by one
    thread at a time unless it declares `concurrent_calls`. A backend cannot be copied or pickled, and a fork of its
    process cannot use it: open the engine in the process that needs it.

    A timeout ends the caller's wait. An engine that does not declare `stops_at_timeout` is then called on a thread and
    finishes alone; scoring with gradients stays on the caller's thread. A thread that makes a call has its caller's
    context variables, gradient mode, autocast and CUDA device.

    `generate` and `score_logprobs` check their arguments and hand the prepared call to `run`; the variants that do not
    wait hand it to `submit`. A subclass that decides when and where calls are made overrides these two.

    Args:
        engine: the engine to call; `get_backend` opens one by name.

    Attributes:
        engine: the engine with its hooks. ``engine.plugin`` is the plugin's own object.
    """

    def __init__(self, engine: OpenEngine) -> None:
        self.engine = engine
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
    def name(self) -> str:
        """The name that the engine was opened by."""
        return self.engine.name

    @property
    def model_name(self) -> str:
        """The name that labels its numbers."""
        return self.engine.model_name

    @property
    def timeout(self) -> float | None:
        """Seconds that a call may take when the call does not say; None sets no limit."""
        return self.engine.timeout

    @property
    def weight_version(self) -> str:
        """The label of the weights in force, "0" until they first change.

        `update_weights` and `weights_changed` change it. An engine that notices that the owner of its model trains it
        in place (see its README) counts up with each change.
        """
        return self.engine.weight_version

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do."""
        return self.engine.capabilities

    @property
    def info(self) -> Mapping[str, str]:
        """Short facts that the engine tells about itself, as they are now: ``{"decoding": "cached and padded"}``.

        Empty for an engine that tells none, and for one in another process.

        Raises:
            BackendClosedError: the backend was closed.
        """
        self.engine.require_open()
        return MappingProxyType(dict(getattr(self.engine.plugin, "info", {})))

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer."""
        return self.engine.tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer by themselves: the model's own list, else the tokenizer's EOS."""
        return self.engine.eos_token_ids

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

    def submit(self, call: PreparedCall[R], *, block: bool = False) -> Future[R]:
        """Start a prepared call and return its future at once. This backend makes the call on a new thread.

        Cancelling the future aborts the request in an engine that can abort; another engine finishes it, and the result
        is dropped. One that is cancelled before its turn is not sent. `block` allows to wait for room in a full queue.

        Raises:
            EngineError: the system has no room for a thread.
        """
        future: Future[R] = Future()
        names, works_on = call.request.request_ids, self.engine.works_on

        def abort(done: Future[R]) -> None:
            if done.cancelled():
                self._aborts.add(names, lambda: works_on(names))

        run = in_caller_modes(lambda: call.run(attended=lambda: not future.done()))
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
        """Return one row of ids per text. A single text is one row."""
        request = TokenizeRequest(
            texts=arguments.texts(texts),
            add_special_tokens=add_special_tokens,
            parse_special=parse_special,
            offsets=offsets,
        )

        tokens: TokenizeResult = self.engine.call(_TokenizeCall(request, self.engine))
        return tokens

    def detokenize(self, ids: Any, *, skip_special_tokens: bool = True, before: Any = None) -> list[str]:
        """Return one text per row of ids.

        Args:
            ids: the rows, as `generate` takes prompts.
            skip_special_tokens: whether special tokens have no text.
            before: for each row, the ids that precede it, such as the prompt of an answer. The text is then what the
                row adds to theirs: decoders of SentencePiece drop the first space of a text.
        """
        self.engine.require_open()
        rows = arguments.rows_of_ids(ids, "ids").tolist()
        if before is not None:
            before = arguments.rows_of_ids(before, "before").tolist()
            if len(before) != len(rows):
                raise validate.invalid("before", f"has {len(before)} rows, and ids has {len(rows)}")
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
    ) -> GenerateResult:
        """Sample ``num_samples`` answers for every prompt. Answers to one prompt are neighbours in the result.

        Args:
            prompts: a `Ragged`, a list of lists or tensors of ids, or an integer tensor ``[rows, time]``.
            sampling: how to sample.
            logprobs: which log-probability of each sampled token to return.
            seeds: int64[answers], one seed per answer, instead of the seeds derived from ``sampling.seed``.
            request_ids: one name per answer.
            timeout: seconds that the call may take; None for the backend's own timeout.
            on_error: "raise" looks for all bad rows first and then runs nothing. "skip" serves the other rows; a bad
                row comes back empty, with the finish reason `error` and its message in `errors`.
            adapter: the name of the adapter that answers, see `load_adapter`; False for the base weights alone. None
                leaves the model as it is: without an adapter, or with those active in a PEFT model object.
            return_support: also return, for each sampled token, the ids that top-k, top-p and min-p had left
                (`kept_ids`) and the log of their mass (`kept_log_mass`). `score_logprobs` takes them as `support`. The
                set is empty, which stands for the whole vocabulary, if nothing was cut off.
            top_logprobs: how many of the most probable ids to return at each sampled token, with their log-probs under
                the distribution of `logprobs`, and the log of the mass of all others.
            continue_from: what an earlier call returned for the same prompts, for example when an update has aborted
                it: its answers go on from their ids, under the weights in force, up to `max_new_tokens` in all. Old
                tokens keep their log-probs and versions. Answers that have ended are returned as they are.

        Raises:
            InvalidRequestError: bad ids, an empty or too long prompt, an illegal sampling value; or `continue_from` is
                no result of such a call, or something in `sampling` would be counted from its end on.
            ProvenanceMismatchError: the log-probs of `continue_from` are of another distribution.
            CapabilityError: the engine cannot do what was asked.
            EngineError: the engine failed, or returned what the specification does not allow.
            BackendTimeoutError: the engine did not answer in time.
            BackendClosedError: the backend was closed.
        """
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

        Cancelling the future aborts the request in an engine that can abort; another engine finishes it, and the result
        is dropped. The future's callbacks run on a thread of the backend and should not take long. Do not wait for the
        future in one of them or in a hook wrapper: its call may wait for them to end.

        Raises:
            InvalidRequestError, CapabilityError: as for `generate`; raised here and not by the future.
            QueueFullError: a batcher with ``on_full="raise"`` has no room.
        """
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
            request_ids: one name per sequence.
            timeout: as for `generate`.
            on_error: as for `generate`. Nothing of a bad row is scored, and `errors` says why.
            adapter: as for `generate`. Scores with ``adapter=False`` are those of the reference that an adapter started
                from.
            support: `TokenSets`, or nested lists: the ids over which to normalise at each position, as `kept_ids` of
                answers sampled with `return_support` has them; one set for each id of a sequence, or for each that is
                scored. An empty set stands for the whole vocabulary.
            top_k: how many of the most probable ids to return at each scored position, with their log-probs and the log
                of the mass of all others.
            top_ids: int64 ``[total, k]`` as a `Ragged`, or one tensor ``[time, k]`` a row: the ids to return instead,
                for each id of a sequence, or for each that is scored; -1 stands for no id.

        Raises:
            InvalidRequestError: bad ids, an empty or too long sequence, an illegal temperature or `score_from`; a set
                that lacks the given id, or has one twice or outside the vocabulary.
            CapabilityError: the engine cannot score, or cannot score like this.
            EngineError, BackendTimeoutError, BackendClosedError: as for `generate`.
        """
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
        return self.submit(prepare_scoring(self.engine, sequences, **options), block=True)

    def to_containers(self, request: ContainerRequest) -> TensorDict:
        """Wrap a batch of rows as TensorClasses in a TensorDict."""
        return self.engine.call(Call("to_containers", request))

    def provenance(self, batch: GenerateResult | ScoreResult) -> Provenance | tuple[Provenance, ...]:
        """Return where the log-probs of a result came from: one for all rows if they agree, else one per row.

        Args:
            batch: what this backend returned.
        """
        engine, processed = self.engine, batch.mode == "processed"
        versions = batch.weight_versions or (engine.version_with(batch.adapter),)
        sampling = None
        runs: list[VersionRuns] = [()] * len(versions)
        if isinstance(batch, GenerateResult):
            sampling = batch.sampling
            if batch.version_runs is not None:
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

    # Closing ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the engine. Every later call raises `BackendClosedError`; closing twice is fine.

        An engine that takes one call at a time finishes that call first, as long as its caller waits for it: give calls
        a timeout to bound this. If no caller waits for it any more, an engine that can abort ends it.

        Raises:
            BackendTimeoutError: the engine still works on a call whose caller has stopped waiting. The backend is
                closed, and the engine is released when that call ends.
        """
        self.engine.close()

    def __enter__(self) -> Backend:
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


class _TokenizeCall(Call):
    def __init__(self, request: TokenizeRequest, engine: OpenEngine) -> None:
        super().__init__("tokenize", request)
        self._engine = engine

    def finished(self, result: TokenizeResult) -> TokenizeResult:
        tokens: TokenizeResult = checked(self._engine, "tokenize", result, self.request)
        return tokens
