"""`LLMPolicy`: the TensorDictModule that users call. Conversations, texts or tokens go in; containers come out."""

from __future__ import annotations

import asyncio
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from corelm import validate
from corelm.backend.arguments import prepare_generation, prepare_scoring
from corelm.backend.backend import Backend
from corelm.backend.engine import PreparedCall
from corelm.backend.engine_call import Listener
from corelm.backend.streams import AnswerStream, AsyncAnswerStream
from corelm.batching import BatchingState, DynamicBatcher, Limits
from corelm.containers.assemble import dense_columns
from corelm.errors import CapabilityError, InvalidRequestError, level_of_caller, printable
from corelm.opening import get_backend, kind_and_call
from corelm.policy.inputs import PASSED, InputReader, find_value
from corelm.policy.options import PolicyOptions, out_keys
from corelm.policy.outputs import AnswerReader, deliver, must_have_room, partial_answers, scored
from corelm.policy.rows import InputRows, restricted, room_for_prompts, truncate_left, with_support
from corelm.spec.provenance import Provenance
from corelm.spec.records import GenerateResult, ScoreResult
from corelm.spec.sampling import SamplingParams
from corelm.tensors.categorical import MaskedCategorical
from corelm.tensors.modes import no_inference_mode
from corelm.tensors.ragged import Ragged, counted_positions

Positions = Literal["attention", "assistant", "response"]

_NOT_COMPILED = "torch.compile cannot compile an LLMPolicy, whose model runs inside the engine; call the policy itself"
_NOT_MOVED = (
    "an LLMPolicy has no weights to move or convert. Open the engine with the device and dtype that you want, such as "
    "get_backend('transformers', 'PATH', device='cuda', dtype='bfloat16'); results go where policy.replace(device=…) "
    "says"
)


class _NotMoved:
    """The methods by which a module is moved, converted or compiled. A policy has no weights, and each says so."""

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        raise validate.invalid("policy", _NOT_COMPILED)

    def _not_moved(self, *_: Any, **__: Any) -> NoReturn:
        raise validate.invalid("policy", _NOT_MOVED)

    to = cpu = cuda = xpu = type = half = float = double = bfloat16 = to_empty = _not_moved


class LLMPolicy(_NotMoved, TensorDictModuleBase):
    """Sample answers from an engine, or score what is already there.

    ``LLMPolicy(backend, input_mode="text", num_samples=4)`` and ``LLMPolicy(backend, PolicyOptions(…))`` do the same.

    Args:
        backend: an opened `Backend`, or its name together with `model`.
        options: what to read, ask of the engine and write, or a dict of that; None for the defaults.
        model: the model to open, if `backend` is a name.
        batching: True or `Limits` let callers on several threads or in several tasks share the engine's calls
            (see `DynamicBatcher`).
        changes: options of `PolicyOptions` by name, on top of `options`.

    Attributes:
        backend: the backend that is asked.
        options: the options in force; `replace` makes a policy with others.

    Raises:
        InvalidRequestError: an illegal argument; `field` names it.
        TypeError: a policy has no option of that name.
    """

    def __init__(
        self,
        backend: Backend | str,
        options: PolicyOptions | Mapping[str, Any] | None = None,
        *,
        model: Any = None,
        batching: bool | Limits = False,
        **changes: Any,
    ) -> None:
        super().__init__()
        if isinstance(options, Mapping):
            changes, options = {**options, **changes}, None
        if not isinstance(options, (PolicyOptions, type(None))):
            raise validate.invalid("options", f"expected PolicyOptions, a dict or None, got {validate.shown(options)}")
        if not isinstance(batching, (bool, Limits)):
            raise validate.invalid("batching", f"expected True, False or Limits, got {validate.shown(batching)}")
        if not isinstance(backend, str):
            checked_backend(backend)
        self.options = options = (options or PolicyOptions()).replace(**changes)
        self._reader = InputReader(options)
        #: That of scores.
        self._temperature = options.sampling.temperature if options.log_probs_mode == "processed" else 1.0
        self.in_keys = [self._reader.keys["prompt" if options.generate else "full"]]
        self.out_keys = out_keys(options)
        #: What the end of a ``with`` block closes: the engine, if it was opened here; the batcher, if it was made here.
        self._opened = isinstance(backend, str)
        if isinstance(backend, str):
            # Opened last, so that a wrong argument leaves no engine open.
            backend = get_backend(backend, model)
        elif model is not None:
            raise validate.invalid("model", "this backend is already open; leave the model out, or pass a name")
        self._batches = bool(batching) and not isinstance(backend, DynamicBatcher)
        self.backend = _batched(backend, batching) if batching else backend
        try:
            self._answers = AnswerReader.of(options.response_parser, options.template_kwargs.get("tools"), backend)
        except BaseException:
            if self._opened:
                # Its caller never sees it.
                backend.close()
            raise

    # Calling it ------------------------------------------------------------------------------------------------------

    def forward(
        self, tensordict: TensorDictBase, *, seed: int | None = None, timeout: float | None = None, **changes: Any
    ) -> TensorDictBase:
        """Generate or score.

        Args:
            seed: fixes the answers of this call and overrides ``sampling_params.seed``. None draws from
                torch's generator, or lets the engine choose if its seeds are costly.
            timeout: seconds that the call may take; None for the backend's own timeout.
            changes: options of this call alone, by name, as `replace` takes them, such as
                ``sampling_params={"max_new_tokens": 64, "top_p": 0.9}``. These replace the policy's own, all of them.

        Raises:
            MissingKeyError: the TensorDict lacks what the policy reads.
            InvalidRequestError: the input is not what this policy reads, or a row of it is bad.
            TemplateError: a conversation cannot be rendered.
            CapabilityError: the engine cannot do what was asked.
            EngineError: the engine failed.
            BackendTimeoutError: the engine did not answer in time.
            BackendClosedError: the backend was closed.
        """
        if torch.compiler.is_compiling():
            _refuse_compiling()
        if torch.is_inference_mode_enabled():
            with no_inference_mode():
                return self.forward(tensordict, seed=seed, timeout=timeout, **changes)
        with self.backend.host_turn(timeout):
            call, finish = self._prepare(tensordict, seed, timeout, **changes)
        found = self.backend.run(call)
        with self.backend.host_turn(timeout):
            return finish(found)

    async def aforward(
        self, tensordict: TensorDictBase, *, seed: int | None = None, timeout: float | None = None, **changes: Any
    ) -> TensorDictBase:
        """Generate or score as `forward` does, without ever blocking the event loop.

        With `batching` no thread waits while the engine works. Cancelling the task takes its request out of
        the queue, or aborts it in an engine that can abort.

        Raises:
            InvalidRequestError: as for `forward`. Also in a hook wrapper or a callback of a batcher, where
                the call would wait for itself.
        """
        self.backend.require_outside("aforward")
        call, finish = await asyncio.to_thread(self._prepare, tensordict, seed, timeout, **changes)
        return await asyncio.to_thread(finish, await asyncio.wrap_future(self.backend.submit(call)))

    @no_inference_mode()
    def resume(
        self,
        tensordict: TensorDictBase,
        continue_from: TensorDictBase,
        *,
        seed: int | None = None,
        timeout: float | None = None,
        **changes: Any,
    ) -> TensorDictBase:
        """Complete the answers that the policy has returned before, under the weights in force, and return all of it.

        They go on from their ids, which are not tokenized again. Old tokens keep their log-probs and their
        version, and answers that have ended stay as they are.

        Args:
            tensordict: what `forward` reads: the same prompts.
            continue_from: what `forward` has returned for them, with tokens and, if this policy writes them, log-probs.

        Raises:
            InvalidRequestError: as for `forward`; or the answers are to other prompts, or cannot go on like this.
            MissingKeyError: as for `forward`; or `continue_from` lacks tokens or finish reasons.
            ProvenanceMismatchError: the log-probs of `continue_from` are of another distribution.
        """
        if not self.options.replace(**changes).generate:
            raise validate.invalid("generate", "only answers can go on, and this policy scores")
        call, finish = self._prepare(tensordict, seed, timeout, None, continue_from, **changes)
        return finish(self.backend.run(call))

    def stream(
        self, tensordict: TensorDictBase, *, seed: int | None = None, timeout: float | None = None, **changes: Any
    ) -> AnswerStream[TensorDictBase]:
        """Start to generate, and return an iterator over the tokens of the answers, with text and log-probs.

        Each `AnswerChunk` says which row of the flattened batch it belongs to. After the last chunk, ``stream.result``
        is the TensorDict that calling the policy returns. Use the stream as a context manager if you may leave early::

            with policy.stream(td, seed=7) as stream:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
            stream.result["history"].full

        The arguments are those of `forward`. The time that you take to read does not count against a timeout.

        Raises:
            CoreLMError: the errors of `forward`. Those of the input are raised here, those of the engine while reading.
        """
        return AnswerStream(self.backend, partial(self._plan, changes, tensordict, seed, timeout))

    def astream(
        self, tensordict: TensorDictBase, *, seed: int | None = None, timeout: float | None = None, **changes: Any
    ) -> AsyncAnswerStream[TensorDictBase]:
        """Return what `stream` does for ``async for``, without ever blocking the event loop.

        The request is made, and all errors are raised, while reading. Cancelling the task ends the request.
        """
        return AsyncAnswerStream(self.backend, partial(self._plan, changes, tensordict, seed, timeout))

    @no_inference_mode()
    def _plan(
        self, changes: Mapping[str, Any], *asked: Any
    ) -> tuple[PreparedCall[GenerateResult], Callable[[GenerateResult], TensorDictBase]]:
        call, finish = self._prepare(*asked, **changes)
        return call, no_inference_mode()(finish)

    def _prepare(
        self,
        td: TensorDictBase,
        seed: int | None,
        timeout: float | None,
        on_tokens: Listener | None = None,
        continue_from: TensorDictBase | None = None,
        /,
        **changes: Any,
    ) -> tuple[PreparedCall[Any], Callable[[Any], TensorDictBase]]:
        """Return the call, and what makes its result the policy's. One whose results have nowhere to go is refused."""
        if changes:
            # The arguments of a subclass are not known.
            changed = LLMPolicy(self.backend, self.options.replace(**changes))
            return LLMPolicy._prepare(changed, td, seed, timeout, on_tokens, continue_from)
        options, backend, engine = self.options, self.backend, self.backend.engine
        if on_tokens and not options.generate:
            raise validate.invalid("generate", "only answers can be streamed, and this policy scores; call it instead")
        # Before anything is read: in a fork, torch's own threads are gone, and an operation may hang.
        engine.require_open()
        if not isinstance(td, TensorDictBase):
            raise self._not_a_tensordict(td)
        if seed is not None and not options.generate:
            raise validate.invalid("seed", "scoring samples nothing; leave the seed out")
        want_assistant = "masks" in options.fields
        if options.generate:
            rows = self._reader.read(td, "prompt", backend, want_assistant)
        else:
            rows = self._reader.sequences(td, backend, want_assistant)
        if there := must_have_room(td, rows, options):
            rows = dataclasses.replace(rows, there=there)
        if not options.generate:
            if options.support_key is not None:
                rows = with_support(td, rows, options, self._temperature)
            call = self._scoring(rows, return_argmax=options.return_argmax, top_k=options.top_k, timeout=timeout)
            return call, partial(deliver, td, rows, options, self._answers, backend)
        if options.num_samples is not None and len(rows.batch_size) > 1:
            self._warn_of_nesting(td, rows.batch_size)
        sampling = options.sampling if seed is None else SamplingParams.make(options.sampling, seed=seed)
        if rows.chats is not None and self._answers.parser is not None:
            sampling = self._answers.sampling(sampling)
        if options.truncation == "left":
            rows = truncate_left(rows, room_for_prompts(sampling, engine.capabilities), backend)
        answers = prepare_generation(
            engine,
            rows.ids,
            sampling,
            logprobs=options.log_probs_mode if "log_probs" in options.fields else "none",
            timeout=timeout,
            on_error=options.on_error,
            problems=rows.problems,
            read=True,
            adapter=options.adapter,
            return_support=options.return_support,
            top_logprobs=options.top_logprobs,
            continue_from=None if continue_from is None else partial_answers(continue_from, rows, options),
            on_tokens=on_tokens,
            new_turn=rows.chats is not None,
        )
        return answers, partial(deliver, td, rows, options, self._answers, backend)

    def _not_a_tensordict(self, td: Any) -> InvalidRequestError:
        kind, given = type(td).__name__, PASSED[self.options.input_mode]
        if isinstance(td, Mapping) and "input_ids" in td:
            given = ", ".join(f"{name}=batch[{name!r}]" for name in ("input_ids", "attention_mask") if name in td)
        return validate.invalid("tensordict", f"expected a TensorDict, got {kind}; pass TensorDict({given})")

    def _warn_of_nesting(self, td: TensorDictBase, shape: tuple[int, ...]) -> None:
        """Warn if several samples of each answer's prompt are asked for, rather than of each prompt.

        A program that branches at every turn replaces the container that it reads, which then holds no responses.
        """
        samples, response = self.options.num_samples, (*self._reader.keys["prompt"][:-1], "response")
        if "finish_reason" not in td.keys() or find_value(td, response) is None:
            return
        warnings.warn(
            f"num_samples={samples} adds a dimension to answers that are there: {shape} becomes {(*shape, samples)}. "
            "To sample again, pass each prompt once: the TensorDict that you sampled from, or td[:, 0] of this one",
            stacklevel=level_of_caller(),
        )

    # Scores ----------------------------------------------------------------------------------------------------------

    def _scoring(self, rows: InputRows, **asked: Any) -> PreparedCall[ScoreResult]:
        options, sampling, support = self.options, self.options.sampling, rows.support
        if options.log_probs_mode == "processed":
            # The sets say what truncation left.
            truncates = sampling.truncates_support if support is None else bool(sampling.engine_kwargs)
            if truncates or sampling.penalties or sampling.greedy:
                raise CapabilityError(
                    "scores cannot reflect penalties, and truncation only by support_key=…; pass log_probs_mode='raw'",
                    capability="score",
                )
        return prepare_scoring(
            self.backend.engine,
            rows.ids,
            temperature=self._temperature,
            score_from=rows.prompt_lengths if rows.only_response else None,
            on_error=options.on_error,
            problems=rows.problems,
            read=True,
            adapter=options.adapter,
            # An engine that knows no sets can score rows without any.
            support=None if support is None or not len(support.ids.values) else support,
            **asked,
        )

    def _scored(
        self, td: TensorDictBase, *, want_assistant: bool = False, return_logits: bool = False
    ) -> tuple[InputRows, ScoreResult]:
        """Read and score whole sequences, with a graph if gradients are on."""
        if not isinstance(td, TensorDictBase):
            raise self._not_a_tensordict(td)
        rows = self._reader.sequences(td, self.backend, want_assistant)
        if self.options.support_key is not None:
            rows = with_support(td, rows, self.options, self._temperature)
        grad = torch.is_grad_enabled() and self.backend.capabilities.gradients
        return rows, self.backend.run(self._scoring(rows, grad=grad, return_logits=return_logits))

    @property
    def score_provenance(self) -> Provenance:
        """The label of the log-probs that this policy scores over the whole vocabulary, with the weights in force."""
        label, adapter = Provenance.label_of_scores(self._temperature), self.options.adapter
        version = self.backend.engine.weights.version_with(adapter)
        return Provenance(self.backend.name, self.backend.model_name, version, **label, adapter=adapter)

    @no_inference_mode()
    def get_dist(self, tensordict: TensorDictBase, mask: Positions | Tensor = "attention") -> MaskedCategorical:
        """Return the next-token distributions of whole sequences, dense, with gradients if the engine has them.

        Args:
            tensordict: what `forward` reads to score.
            mask: the positions that count: every scored one (`attention`), those of the `assistant`, those of the
                `response`, or your own bool ``[*batch, width]``. Position 0 never counts, as no token precedes it.

        Returns:
            A distribution over ``[*batch, width]`` whose position t predicts token t. A dense batch keeps its
            columns; rows of unequal length are laid out as ``pad_output=True`` would lay them out.

        Raises:
            CapabilityError: the engine returns no logits.
            InvalidRequestError: the input has no such mask, or `mask` has another shape.
        """
        want_assistant = isinstance(mask, str) and mask == "assistant"
        rows, batch = self._scored(tensordict, want_assistant=want_assistant, return_logits=True)
        assert batch.logits is not None
        columns = rows.columns or dense_columns(rows.tokens)
        shape = (*rows.batch_size, columns.mask.shape[-1])
        kept = batch.logits if rows.support is None else restricted(batch.logits, rows.support)
        logits = kept.scatter(columns.mask, 0.0)
        if batch.temperature != 1.0:
            logits = logits / batch.temperature
        counts = batch.scored.scatter(columns.mask, False).reshape(shape)
        if not isinstance(mask, Tensor):
            mask = self._positions(rows, batch, mask).scatter(columns.mask, False).reshape(shape)
        return MaskedCategorical(logits.reshape(*shape, logits.shape[-1]), counts & counted_positions(mask, counts))

    @no_inference_mode()
    def log_prob(self, tensordict: TensorDictBase) -> Any:
        """Return the float32 log-probabilities of whole sequences, with gradients if the engine has them.

        They are what ``log_probs.full`` would hold: one tensor with `pad_output`, else one tensor a row.
        Positions that are not scored hold 0.0.
        """
        rows, batch = self._scored(tensordict)
        request = scored(rows, batch, self.options, self.backend, frozenset({"log_probs"}))
        return self.backend.to_containers(request)["log_probs"].full

    def _positions(self, rows: InputRows, batch: ScoreResult, mask: str) -> Ragged:
        """Return bool, as long as the sequences: the positions that count."""
        validate.one_of("mask", mask, ("attention", "assistant", "response"))
        if mask == "attention":
            return batch.scored
        if mask == "assistant" and rows.assistant is not None:
            return rows.assistant
        if mask == "response" and rows.prompt_lengths is not None:
            return Ragged(rows.ids.positions >= rows.prompt_lengths[rows.ids.row_index], rows.ids.lengths)
        where = {
            "assistant": "read a history (input_mode='history'), or tokens with their all_assistant_mask",
            "response": "read tokens with their prompt and response (input_mode='tokens')",
        }
        raise validate.invalid("mask", f"this input does not say which tokens belong to the {mask}; {where[mask]}")

    # Variants --------------------------------------------------------------------------------------------------------

    def replace(self, *, batching: bool | Limits | None = None, **changes: Any) -> LLMPolicy:
        """Return a policy with other options on the same engine; this policy stays as it is.

        Args:
            batching: None shares this policy's batcher if it has one; False asks the engine without one.
            changes: options of `PolicyOptions` by name.
        """
        backend = self.backend
        if batching is False and isinstance(backend, DynamicBatcher):
            backend = backend.backend
        return type(self)(backend, options=self.options.replace(**changes), batching=batching or False)

    get_new_version = replace

    def cleanup_batching(self, flush: bool = True) -> None:
        """Answer the requests in the batcher's queue and end its threads. Without a batcher, do nothing.

        The engine stays open; the next call starts the threads again.

        Args:
            flush: False fails the waiting requests with `BackendClosedError` instead.
        """
        if isinstance(self.backend, DynamicBatcher):
            self.backend.cleanup(flush=flush)

    def get_batching_state(self) -> BatchingState | None:
        """Return what the batcher is doing at this moment, or None without a batcher."""
        return self.backend.state() if isinstance(self.backend, DynamicBatcher) else None

    def close(self) -> None:
        """Close the engine, for every policy that shares it."""
        self.backend.close()

    def __enter__(self) -> LLMPolicy:
        return self

    def __exit__(self, *exc: Any) -> None:
        """Close the engine if this policy opened it; otherwise end only the batcher that this policy made."""
        if self._opened:
            self.backend.__exit__(*exc)
        elif self._batches:
            self.cleanup_batching(flush=exc[0] is None)

    def __reduce__(self) -> Any:
        raise TypeError("a policy holds an open engine, which cannot be copied or pickled; use replace()")

    def __repr__(self) -> str:
        """Return the call that makes such a policy, with the options that differ from their defaults."""
        given = {"backend": repr(self.backend)} | _changed(self.options)
        if "sampling_params" in given:
            given["sampling_params"] = _call("dict", _changed(self.options.sampling_params))
        return printable(_call(type(self).__name__, given))


@torch.compiler.disable(reason=_NOT_COMPILED)  # type: ignore[untyped-decorator]
def _refuse_compiling() -> NoReturn:
    """Refuse a call that torch.compile traces.

    Dynamo breaks the graph here and makes this call for real. With ``fullgraph=True`` it raises an error of
    its own, which repeats the reason.
    """
    raise validate.invalid("policy", _NOT_COMPILED)


def checked_backend(given: Any) -> Backend:
    """Return `given` if it is an open backend. Refuse anything else, and say how to open one."""
    if isinstance(given, Backend):
        return given
    kind, call = kind_and_call(given)
    raise validate.invalid("backend", f"expected an open backend or the name of one, got {kind}; pass {call}")


def checked_policy(given: Any, field: str = "policy") -> LLMPolicy:
    """Return `given` if it is a policy. Refuse anything else, and say how to make one."""
    if isinstance(given, LLMPolicy):
        return given
    kind = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
    raise validate.invalid(field, f"expected an LLMPolicy, such as LLMPolicy(backend), got {kind}")


def _batched(backend: Backend, batching: bool | Limits) -> DynamicBatcher:
    """Return a batcher in front of the backend. A batcher that is already there is shared."""
    limits = batching if isinstance(batching, Limits) else None
    if not isinstance(backend, DynamicBatcher):
        return DynamicBatcher(backend, limits)
    if limits is not None and limits != backend.limits:
        raise validate.invalid(
            "batching", "this backend already has a batcher with other limits; pass batching=True to share it as it is"
        )
    return backend


def _changed(record: Any) -> dict[str, str]:
    """Return the fields of a dataclass that differ from their defaults, in short."""
    plain = type(record)()
    return {
        field.name: validate.shown(value)
        for field in dataclasses.fields(record)
        # do_sample follows from the temperature.
        if field.name != "do_sample" and (value := getattr(record, field.name)) != getattr(plain, field.name)
    }


def _call(name: str, given: Mapping[str, str]) -> str:
    return f"{name}({', '.join(f'{field}={value}' for field, value in given.items())})"
