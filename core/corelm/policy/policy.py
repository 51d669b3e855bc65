"""`LLMPolicy`: the TensorDictModule that users call. Conversations, texts or tokens go in; containers come out."""

from __future__ import annotations

from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from corelm import validate
from corelm.backend.backend import Backend
from corelm.backend.delivery import Listener
from corelm.backend.prepared_call import PreparedCall, prepare_generation, prepare_scoring
from corelm.batching import BatchingState, DynamicBatcher, Limits
from corelm.containers.assemble import dense_columns
from corelm.errors import CapabilityError, Problems
from corelm.opening import get_backend
from corelm.policy.calls import PolicyCalls, batched
from corelm.policy.delivery import deliver, merged, must_fit, must_keep, must_replace, scores_are_dense
from corelm.policy.description import describe
from corelm.policy.inputs import InputReader, Part
from corelm.policy.messages import AnswerReader, warn_unparsed
from corelm.policy.mistakes import NotMoved, checked_backend, not_a_tensordict, not_compiled
from corelm.policy.options import PolicyOptions, out_keys
from corelm.policy.outputs import generated, scored
from corelm.policy.progress import AnswerBar
from corelm.policy.resuming import partial_answers
from corelm.policy.rows import InputRows, provenance_of_scores, room_for_prompts, truncate_left
from corelm.policy.support import with_support
from corelm.spec.provenance import Provenance
from corelm.spec.records import ContainerRequest, GenerateResult, ScoreResult
from corelm.spec.sampling import SamplingParams
from corelm.tensors.categorical import MaskedCategorical
from corelm.tensors.modes import no_inference_mode
from corelm.tensors.ragged import Ragged

Positions = Literal["attention", "assistant", "response"]


class LLMPolicy(PolicyCalls, NotMoved, TensorDictModuleBase):
    """Sample answers from an engine, or score what is already there.

    ``LLMPolicy(backend, input_mode="text", num_samples=4)`` and ``LLMPolicy(backend, PolicyOptions(…))`` do the same.

    Args:
        backend: an opened `Backend`, or its name together with `model`.
        options: what to read, ask of the engine and write; None for the defaults.
        model: the model to open, if `backend` is a name.
        batching: True or `Limits` let callers on several threads or in several tasks share the engine's calls (see
            `DynamicBatcher`).
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
        options: PolicyOptions | None = None,
        *,
        model: Any = None,
        batching: bool | Limits = False,
        **changes: Any,
    ) -> None:
        super().__init__()
        if not isinstance(options, (PolicyOptions, type(None))):
            raise validate.invalid("options", f"expected PolicyOptions or None, got {validate.shown(options)}")
        if not isinstance(batching, (bool, Limits)):
            raise validate.invalid("batching", f"expected True, False or Limits, got {validate.shown(batching)}")
        if not isinstance(backend, str):
            checked_backend(backend)
        self.options = options = (options or PolicyOptions()).replace(**changes)
        self._sampling, self._fields = options.sampling, options.fields
        self._reader = InputReader(
            mode=options.input_mode,
            keys=options.keys,
            input_key=options.input_key,
            attention_mask_key=options.attention_mask_key,
            chat_template=options.chat_template,
            template_kwargs=options.template_kwargs,
            tokenizer_kwargs=options.tokenizer_kwargs,
            prefer_tokens=options.prefer_tokens,
            completion_boundary=options.completion_boundary,
            continue_final_message=options.continue_final_message,
            tools_key=options.tools_key,
        )
        self.in_keys = [self._reader.key("prompt" if options.generate else "full")]
        self.out_keys = out_keys(options)
        opened_here = isinstance(backend, str)
        if isinstance(backend, str):
            # Opened last, so that a wrong argument leaves no engine open.
            backend = get_backend(backend, model)
        elif model is not None:
            raise validate.invalid("model", "this backend is already open; leave the model out, or pass a name")
        opened = checked_backend(backend)
        self.backend = batched(opened, batching) if batching else opened
        self._answers = AnswerReader.of(
            options.response_parser, options.template_kwargs.get("tools"), opened, opened_here=opened_here
        )

    # Calling it ------------------------------------------------------------------------------------------------------

    @not_compiled
    @no_inference_mode()
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        seed: int | None = None,
        timeout: float | None = None,
        progress: bool = False,
    ) -> TensorDictBase:
        """Generate or score.

        Args:
            seed: fixes the answers of this call and overrides ``sampling_params.seed``. None draws from torch's
                generator, or lets the engine choose if its seeds are costly.
            timeout: seconds that the call may take; None for the backend's own timeout.
            progress: show a bar with the finished answers and their tokens per second, if stderr is a terminal. It
                changes nothing else: the call is made, repeated and answered as without it.

        Raises:
            MissingKeyError: the TensorDict lacks what the policy reads.
            InvalidRequestError: the input is not what this policy reads, or a row of it is bad.
            TemplateError: a conversation cannot be rendered.
            CapabilityError: the engine cannot do what was asked.
            EngineError: the engine failed.
            BackendTimeoutError: the engine did not answer in time.
            BackendClosedError: the backend was closed.
        """
        with self._bar(progress) as bar:
            rows, call = self._prepare(tensordict, seed, timeout, bar=bar)
            result = self.backend.run(call)
            if bar is not None:
                bar.complete(result)
            return self._finish(tensordict, rows, result)

    @no_inference_mode()
    def _prepare(
        self,
        td: TensorDictBase,
        seed: int | None,
        timeout: float | None,
        on_tokens: Listener | None = None,
        bar: AnswerBar | None = None,
        continue_from: TensorDictBase | None = None,
    ) -> tuple[InputRows, PreparedCall[Any]]:
        """Return the rows that were read and the call. One whose results would have nowhere to go is refused here."""
        options = self.options
        # Before anything is read: in a fork, torch's own threads are gone, and an operation may hang.
        self.backend.engine.hooks.require_here()
        if not isinstance(td, TensorDictBase):
            raise not_a_tensordict(td, options.input_mode)
        if seed is not None and not options.generate:
            raise validate.invalid("seed", "scoring samples nothing; leave the seed out")
        rows = self._read(td, "prompt" if options.generate else "full", want_assistant="masks" in self._fields)
        samples = options.num_samples
        must_fit(td, rows.batch_size if samples is None else (*rows.batch_size, samples), options)
        engine = self.backend.engine
        if not options.generate:
            rows = with_support(td, rows, options, self.score_provenance.temperature)
            if options.writes_in_place is True:
                must_keep(td, rows, options, provenance_of_scores(self.score_provenance, rows.support))
            scoring = {**self._scoring(rows), "return_argmax": options.return_argmax, "top_k": options.top_k}
            return rows, prepare_scoring(engine, **scoring, timeout=timeout)
        if bar is not None:
            bar.expect(len(rows.ids) * (samples or 1))
        if options.writes_in_place is True:
            must_replace(td, options)
        sampling = self._sampling if seed is None else SamplingParams.make(self._sampling, seed=seed)
        if rows.chats is not None:
            sampling = self._answers.sampling(sampling)
        if options.truncation == "left":
            rows = truncate_left(rows, room_for_prompts(sampling, engine.capabilities), self.backend)
        return rows, prepare_generation(
            engine,
            rows.ids,
            sampling,
            logprobs=options.log_probs_mode if "log_probs" in self._fields else "none",
            timeout=timeout,
            on_error=options.on_error,
            problems=rows.problems,
            adapter=options.adapter,
            return_support=options.return_support,
            top_logprobs=options.top_logprobs,
            continue_from=None if continue_from is None else partial_answers(continue_from, rows, options),
            on_tokens=on_tokens,
            on_answer=bar,
            new_turn=rows.chats is not None,
        )

    @no_inference_mode()
    def _finish(self, td: TensorDictBase, rows: InputRows, result: GenerateResult | ScoreResult) -> TensorDictBase:
        request, unparsed = self._answer(td, rows, result)
        out = deliver(td, rows, request, self.backend, self.options)
        warn_unparsed(unparsed)
        return out

    def _read(self, td: TensorDictBase, part: Part, *, want_assistant: bool) -> InputRows:
        return self._reader.read(td, part, self.backend, want_assistant=want_assistant, on_error=self.options.on_error)

    def _answer(
        self, td: TensorDictBase, rows: InputRows, batch: GenerateResult | ScoreResult
    ) -> tuple[ContainerRequest, Problems]:
        """Return what to deliver, and the answers that `response_parser` did not parse."""
        if isinstance(batch, ScoreResult):
            errors = (batch.errors or ("",) * len(rows.ids)) if self.options.on_error == "skip" else None
            dense = scores_are_dense(td, rows, self.options)
            request = scored(rows, batch, self.backend, fields=self._fields, errors=errors, pad_output=dense)
            return merged(td, rows, request, self.options), {}
        return generated(
            rows,
            batch,
            self._sampling,
            self.backend,
            fields=self._fields,
            reader=self._answers,
            pad_output=self.options.pad_output,
        )

    def _scoring(self, rows: InputRows) -> dict[str, Any]:
        """Return the arguments for scoring these rows."""
        sampling, support = self._sampling, rows.support
        # The sets say what truncation left.
        truncates = sampling.truncates_support if support is None else bool(sampling.engine_kwargs)
        restricted = truncates or sampling.penalties or sampling.greedy
        if self.options.log_probs_mode == "processed" and restricted:
            raise CapabilityError(
                "scores cannot reflect penalties, and truncation only by support_key=…; pass log_probs_mode='raw'",
                capability="score",
            )
        temperature = sampling.temperature if self.options.log_probs_mode == "processed" else 1.0
        return {
            "sequences": rows.ids,
            "temperature": temperature,
            "score_from": rows.prompt_lengths if rows.only_response else None,
            "on_error": self.options.on_error,
            "problems": rows.problems,
            "adapter": self.options.adapter,
            "support": None if support is None else support.for_engine,
        }

    def _scored(self, rows: InputRows, **options: Any) -> ScoreResult:
        """Score rows with a graph, if gradients are on."""
        return self.backend.run(
            prepare_scoring(self.backend.engine, **self._scoring(rows), grad=self._grad(), **options)
        )

    @property
    def score_provenance(self) -> Provenance:
        """The label of the log-probs that this policy scores over the whole vocabulary, with the weights in force."""
        processed = self.options.log_probs_mode == "processed"
        label = Provenance.label_of_scores(self._sampling.temperature if processed else 1.0)
        adapter = self.options.adapter
        version = self.backend.engine.version_with(adapter)
        return Provenance(self.backend.name, self.backend.model_name, version, **label, adapter=adapter)

    # Distributions ---------------------------------------------------------------------------------------------------

    @no_inference_mode()
    def get_dist(self, tensordict: TensorDictBase, mask: Positions | Tensor = "attention") -> MaskedCategorical:
        """Return the next-token distributions of whole sequences, dense, with gradients if the engine has them.

        Args:
            tensordict: what `forward` reads to score.
            mask: the positions that count: every scored one (`attention`), those of the `assistant`, those of the
                `response`, or your own bool ``[*batch, width]``. Position 0 never counts, as no token precedes it.

        Returns:
            A distribution over ``[*batch, width]`` whose position t predicts token t. A dense batch keeps its columns;
            rows of unequal length are laid out as ``pad_output=True`` would lay them out.

        Raises:
            CapabilityError: the engine returns no logits.
            InvalidRequestError: the input has no such mask, or `mask` has another shape.
        """
        rows = self._read(tensordict, "full", want_assistant=isinstance(mask, str) and mask == "assistant")
        rows = with_support(tensordict, rows, self.options, self.score_provenance.temperature)
        batch = self._scored(rows, return_logits=True)
        assert batch.logits is not None
        columns = rows.columns or dense_columns(rows.tokens)
        shape = (*rows.batch_size, columns.mask.shape[-1])
        restricted = batch.logits if rows.support is None else rows.support.restrict(batch.logits)
        logits = restricted.scatter(columns.mask, 0.0)
        if batch.temperature != 1.0:
            logits = logits / batch.temperature
        counts = batch.scored.scatter(columns.mask, False)
        if not isinstance(mask, Tensor):
            mask = self._positions(rows, batch, mask).scatter(columns.mask, False).reshape(shape)
        if mask.shape != shape or mask.dtype.is_floating_point:
            raise validate.invalid("mask", f"expected bool{list(shape)}, got {mask.dtype}{list(mask.shape)}")
        counts = counts.reshape(shape) & mask.to(counts.device, torch.bool)
        return MaskedCategorical(logits.reshape(*shape, logits.shape[-1]), counts)

    @no_inference_mode()
    def log_prob(self, tensordict: TensorDictBase) -> Any:
        """Return the float32 log-probabilities of whole sequences, with gradients if the engine has them.

        They are what ``log_probs.full`` would hold: one tensor with `pad_output`, else one tensor a row. Positions that
        are not scored hold 0.0.
        """
        rows = self._read(tensordict, "full", want_assistant=False)
        rows = with_support(tensordict, rows, self.options, self.score_provenance.temperature)
        batch = self._scored(rows)
        fields = frozenset({"log_probs"})
        request = scored(rows, batch, self.backend, fields=fields, pad_output=self.options.pad_output)
        return self.backend.to_containers(request)["log_probs"].full

    def _grad(self) -> bool:
        return torch.is_grad_enabled() and self.backend.capabilities.gradients

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
        return type(self)(backend, self.options.replace(**changes), batching=batching or False)

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
        self.backend.__exit__(*exc)

    def __reduce__(self) -> Any:
        raise TypeError("a policy holds an open engine, which cannot be copied or pickled; use replace()")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe(self.backend, self.options)})"
