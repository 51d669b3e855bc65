"""`LLMPolicy`: the TensorDictModule people call. Conversations, texts or tokens in; containers out; any engine
underneath.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from corelm import validate
from corelm.backend.backend import Backend
from corelm.backend.prepared_call import PreparedCall, prepare_generation, prepare_scoring
from corelm.backend.skipping import OnError
from corelm.batching import BatchingState, DynamicBatcher
from corelm.batching.policies import batched, check_limits, send
from corelm.containers.assemble import dense_columns
from corelm.errors import CapabilityError
from corelm.opening.by_name import get_backend
from corelm.policy.inputs import InputMode, InputReader, InputRows, Keys, Part, truncate_left
from corelm.policy.outputs import ResponseParser, generated, scored
from corelm.spec.provenance import Mode
from corelm.spec.records import ContainerRequest, GenerateResult, ScoreResult
from corelm.spec.sampling import SamplingParams
from corelm.tensors.categorical import MaskedCategorical
from corelm.tensors.modes import no_inference_mode
from corelm.tensors.ragged import Ragged

Inplace = bool | Literal["empty"]
Positions = Literal["attention", "assistant", "response"]
#: The arguments that are a batcher's.
LIMITS = ("min_batch_size", "max_batch_size", "max_batch_tokens", "batching_timeout", "max_queue", "on_full")


class LLMPolicy(TensorDictModuleBase):
    """Sample answers from an engine, or score what is already there.

    Args:
        backend: an opened `Backend`, or its name together with `model`.
        input_mode: what is read: `history` (conversations), `text` or `tokens`; ``("history", "prompt")`` and so on
            when generating, ``("history", "full")`` when scoring. A bare History, list of strings or token tensor at
            the top key will do.
        generate: True samples an answer for every prompt; False scores whole sequences and samples nothing.
        sampling_params: a `SamplingParams` or a dict of its fields; common aliases are understood.
        num_samples: answers per prompt, under a new last batch dimension; None adds no dimension, 1 adds one of size 1.
        pad_output: dense tensors (prompts padded left, responses right) instead of one row a sample.
        return_text, return_tokens, return_masks, return_log_probs, return_history: which containers to write. A
            history is returned by default where one is read, and cannot be elsewhere.
        log_probs_mode: `raw` is the model's own distribution, `processed` the one sampled from. Scoring `processed` is
            scoring at the temperature of `sampling_params`.
        prefer_tokens: sampled turns of a history keep their ids. False renders them from their text, and the output
            says of which rows: bool `retokenized`.
        inplace: True writes into the TensorDict that was passed (the default without `num_samples`, impossible with
            it); False returns a new one with the outputs alone (the default with `num_samples`); "empty" returns an
            empty copy of the one passed, filled with the outputs.
        on_error: "raise" refuses a call with a bad row; "skip" serves the others and says what was wrong in `errors`.
        truncation: what happens to a prompt that does not fit: "error", or "left" to drop its first tokens.
        device: where the results go; None for the device of the TensorDict, else the CPU.
        keys: where the containers are read and written.
        chat_template, template_kwargs: for rendering histories; None is the tokenizer's own.
        tokenizer_kwargs: `add_special_tokens` and `parse_special`, for tokenizing texts.
        response_parser: turns an answer's text into the message that joins the history (tool calls, reasoning, …).
        batching: callers on several threads or in several tasks share the engine's calls (`DynamicBatcher`).
        min_batch_size, max_batch_size, max_batch_tokens, batching_timeout, max_queue, on_full: how; see `Limits`. They
            go with ``batching=True``, and None stands for a default.

    Raises:
        InvalidRequestError: an argument that is not legal; `field` names it.
    """

    def __init__(
        self,
        backend: Backend | str,
        *,
        model: Any = None,
        input_mode: InputMode = "history",
        generate: bool = True,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        num_samples: int | None = None,
        pad_output: bool = False,
        return_text: bool = True,
        return_tokens: bool = True,
        return_masks: bool = True,
        return_log_probs: bool = True,
        return_history: bool | None = None,
        log_probs_mode: Mode = "raw",
        prefer_tokens: bool = True,
        inplace: Inplace | None = None,
        on_error: OnError = "raise",
        truncation: Literal["error", "left"] = "error",
        device: torch.device | str | None = None,
        keys: Keys | None = None,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        response_parser: ResponseParser | None = None,
        batching: bool = False,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        max_batch_tokens: int | None = None,
        batching_timeout: float | None = None,
        max_queue: int | None = None,
        on_full: Literal["block", "raise"] | None = None,
    ) -> None:
        given = {
            name: value for name, value in locals().items() if name not in ("self", "backend", "model", "__class__")
        }
        super().__init__()
        if not isinstance(keys, (Keys, type(None))):
            raise validate.invalid("keys", f"expected a Keys, got {keys!r}")
        validate.one_of("input_mode", input_mode, ("history", "text", "tokens"))
        validate.one_of("log_probs_mode", log_probs_mode, ("raw", "processed"))
        validate.one_of("on_error", on_error, ("raise", "skip"))
        validate.one_of("truncation", truncation, ("error", "left"))
        validate.one_of("inplace", inplace, (None, True, False, "empty"))
        if return_history and input_mode != "history":
            raise validate.invalid("return_history", f"there is no history to return in {input_mode} mode")
        if not generate and not return_log_probs:
            raise validate.invalid("return_log_probs", "scoring without log-probs returns nothing")
        sampling = SamplingParams.make(sampling_params)
        if num_samples is not None:
            if sampling.num_samples not in (None, num_samples):
                raise validate.invalid("num_samples", f"given twice, as {num_samples} and {sampling.num_samples}")
            sampling = SamplingParams.make(sampling, num_samples=num_samples)
        if sampling.num_samples is not None and not generate:
            raise validate.invalid("num_samples", "scoring samples nothing")
        if sampling.num_samples is not None and inplace is True:
            raise validate.invalid("inplace", "num_samples adds a batch dimension, which the input does not have")
        self.input_mode = input_mode
        self.generate = generate
        self.sampling_params = sampling
        self.pad_output = pad_output
        self.log_probs_mode = log_probs_mode
        self.inplace = sampling.num_samples is None if inplace is None else inplace
        self.on_error = on_error
        self.truncation = truncation
        self.device = validate.device(device)
        self.keys = keys or Keys()
        self.response_parser = response_parser
        wanted = {
            "text": return_text,
            "tokens": return_tokens,
            "masks": return_masks,
            "log_probs": return_log_probs,
            "history": input_mode == "history" if return_history is None else return_history,
        }
        self.fields = frozenset(name for name, want in wanted.items() if want)
        self._reader = InputReader(
            mode=input_mode,
            keys=self.keys,
            chat_template=chat_template,
            template_kwargs=dict(template_kwargs or {}),
            tokenizer_kwargs=validate.subset(
                "tokenizer_kwargs", tokenizer_kwargs, ("add_special_tokens", "parse_special")
            ),
            prefer_tokens=prefer_tokens,
        )
        self.in_keys = [self._reader.key("prompt" if generate else "full")]
        self.out_keys = self._out_keys()
        # As it is now: what the caller does with the dicts that were passed is no business of `replace`.
        self._given = {
            **given,
            "sampling_params": SamplingParams.make(sampling, num_samples=None),
            "num_samples": sampling.num_samples,
            "template_kwargs": self._reader.template_kwargs,
            "tokenizer_kwargs": self._reader.tokenizer_kwargs,
        }
        limits = {name: value for name in LIMITS if (value := self._given.pop(name)) is not None}
        check_limits(batching, limits)
        if isinstance(backend, str):
            # Last, so that nothing is left open when an argument is wrong.
            backend = get_backend(backend, model)
        elif model is not None:
            raise validate.invalid("model", "goes with a backend's name, not with a backend that is already open")
        self.backend = batched(backend, limits) if batching else backend

    # Calling it ------------------------------------------------------------------------------------------------------

    @no_inference_mode()
    def forward(
        self, tensordict: TensorDictBase, *, seed: int | None = None, timeout: float | None = None
    ) -> TensorDictBase:
        """Generate or score.

        Args:
            seed: fixes the answers of this call, and wins over ``sampling_params.seed``. None draws from torch's
                generator.
            timeout: seconds; None for the backend's own.

        Raises:
            MissingKeyError, InvalidRequestError, TemplateError: the input.
            CapabilityError, EngineError, BackendTimeoutError, BackendClosedError: the engine.
        """
        rows, question = self._question(tensordict, seed, timeout)
        ask = self.backend.generate if self.generate else self.backend.score_logprobs
        return self._deliver(tensordict, self._answer(rows, ask(**question)))

    async def aforward(
        self, tensordict: TensorDictBase, *, seed: int | None = None, timeout: float | None = None
    ) -> TensorDictBase:
        """`forward` for event loops, which it never blocks. With `batching` no thread waits while the engine works.

        Cancelling the task takes its request out of the queue, or ends it in an engine that can abort.
        """
        rows, prepared = await asyncio.to_thread(self._prepare, tensordict, seed, timeout)
        batch = await asyncio.wrap_future(send(self.backend, prepared))
        return await asyncio.to_thread(self._finish, tensordict, rows, batch)

    @no_inference_mode()
    def _prepare(
        self, td: TensorDictBase, seed: int | None, timeout: float | None
    ) -> tuple[InputRows, PreparedCall[GenerateResult] | PreparedCall[ScoreResult]]:
        rows, question = self._question(td, seed, timeout)
        return rows, (prepare_generation if self.generate else prepare_scoring)(self.backend, **question)

    @no_inference_mode()
    def _finish(self, td: TensorDictBase, rows: InputRows, batch: GenerateResult | ScoreResult) -> TensorDictBase:
        return self._deliver(td, self._answer(rows, batch))

    def _read(self, td: TensorDictBase, part: Part, *, want_assistant: bool) -> InputRows:
        return self._reader.read(td, part, self.backend, want_assistant=want_assistant, on_error=self.on_error)

    def _question(
        self, td: TensorDictBase, seed: int | None, timeout: float | None
    ) -> tuple[InputRows, dict[str, Any]]:
        """What was read, and the arguments for the backend; refused if the results would have nowhere to go."""
        part: Part = "prompt" if self.generate else "full"
        if not isinstance(td, TensorDictBase):
            raise validate.invalid("tensordict", f"expected a TensorDict, got {type(td).__name__}")
        if seed is not None and not self.generate:
            raise validate.invalid("seed", "scoring samples nothing")
        rows = self._read(td, part, want_assistant="masks" in self.fields)
        samples = self.sampling_params.num_samples
        self._must_fit(td, rows.batch_size if samples is None else (*rows.batch_size, samples))
        if not self.generate:
            return rows, {**self._scoring(rows), "timeout": timeout}
        sampling = self.sampling_params if seed is None else SamplingParams.make(self.sampling_params, seed=seed)
        context = self.backend.capabilities.max_context
        if self.truncation == "left" and context is not None:
            room = context - (sampling.max_new_tokens or 1)
            if room < 1:
                raise validate.invalid(
                    "max_new_tokens", f"{sampling.max_new_tokens} leave no room for a prompt in {context}"
                )
            rows = truncate_left(rows, room, self.backend)
        return rows, {
            "prompts": rows.ids,
            "sampling": sampling,
            "logprobs": self.log_probs_mode if "log_probs" in self.fields else "none",
            "timeout": timeout,
            "on_error": self.on_error,
            "problems": rows.problems,
        }

    def _answer(self, rows: InputRows, batch: GenerateResult | ScoreResult) -> ContainerRequest:
        if isinstance(batch, ScoreResult):
            errors = (batch.errors or ("",) * len(rows.ids)) if self.on_error == "skip" else None
            return scored(rows, batch, self.backend, fields=self.fields, errors=errors, pad_output=self.pad_output)
        return generated(
            rows,
            batch,
            self.sampling_params,
            self.backend,
            fields=self.fields,
            parser=self.response_parser,
            on_error=self.on_error,
            pad_output=self.pad_output,
        )

    def _scoring(self, rows: InputRows) -> dict[str, Any]:
        """The arguments for scoring."""
        sampling = self.sampling_params
        restricted = sampling.truncates or sampling.penalties or sampling.min_new_tokens or sampling.greedy
        if self.log_probs_mode == "processed" and restricted:
            raise CapabilityError(
                "given tokens can be scored at a temperature, not under truncation or penalties; score raw log-probs",
                capability="score",
            )
        temperature = sampling.temperature if self.log_probs_mode == "processed" else 1.0
        return {
            "sequences": rows.ids,
            "temperature": temperature,
            "on_error": self.on_error,
            "problems": rows.problems,
        }

    def _must_fit(self, td: TensorDictBase, batch_size: tuple[int, ...]) -> None:
        """Whether the results can go where `inplace` says: asked before anything is sampled."""
        if self.inplace is True and td.is_locked:
            raise validate.invalid("inplace", "the TensorDict is locked; unlock it, or pass inplace=False")
        if self.inplace is False or tuple(td.batch_size) == batch_size:
            return
        rest = td.exclude(getattr(self.keys, self.input_mode)) if self.inplace is True else td.empty()
        try:
            rest.batch_size = torch.Size(batch_size)
        except RuntimeError as error:
            raise validate.invalid(
                "inplace", f"the results have batch {batch_size}, which does not fit the input: {error}"
            ) from error

    def _deliver(self, td: TensorDictBase, request: ContainerRequest) -> TensorDictBase:
        """Put the containers under the policy's keys, where `inplace` says."""
        made = self.backend.to_containers(request)
        device = self.device or td.device
        if device is not None:
            made = made.to(device)
        if self.inplace is False:
            out: TensorDictBase = TensorDict({}, batch_size=request.batch_size, device=device)
        else:
            out = td if self.inplace is True else td.empty()
            if tuple(out.batch_size) != tuple(request.batch_size):
                # The bare input makes way for the container that holds it.
                out.exclude(getattr(self.keys, self.input_mode), inplace=True)
                out.batch_size = torch.Size(request.batch_size)
        for name, value in made.items():
            out.set(getattr(self.keys, name, name), value)
        return out

    # Distributions ---------------------------------------------------------------------------------------------------

    @no_inference_mode()
    def get_dist(self, tensordict: TensorDictBase, mask: Positions | Tensor = "attention") -> MaskedCategorical:
        """The next-token distributions of whole sequences, dense, with gradients where the engine has them.

        Args:
            mask: the positions that count: every scored one (`attention`), the `assistant`'s, the `response`'s, or bool
                ``[*batch, width]`` of your own. Position 0 never counts: nothing predicts it.

        Returns:
            A distribution over ``[*batch, width]`` whose position t predicts token t. A dense batch keeps its
            columns; other rows stand as ``pad_output=True`` would put them.

        Raises:
            CapabilityError: the engine returns no logits.
            InvalidRequestError: a mask that this input does not have, or of another shape.
        """
        rows = self._read(tensordict, "full", want_assistant=isinstance(mask, str) and mask == "assistant")
        batch = self.backend.score_logprobs(**self._scoring(rows), return_logits=True, grad=self._grad())
        assert batch.logits is not None
        columns = rows.columns or dense_columns(rows.tokens)
        shape = (*rows.batch_size, columns.mask.shape[-1])
        logits = batch.logits.scatter(columns.mask, 0.0)
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
        """float32 log-probabilities of whole sequences, as ``log_probs.full`` would hold them, with gradients where the
        engine has them: a tensor if `pad_output`, else one a row. Unscored positions hold 0.0.
        """
        rows = self._read(tensordict, "full", want_assistant=False)
        batch = self.backend.score_logprobs(**self._scoring(rows), grad=self._grad())
        fields = frozenset({"log_probs"})
        request = scored(rows, batch, self.backend, fields=fields, pad_output=self.pad_output)
        return self.backend.to_containers(request)["log_probs"].full

    def _grad(self) -> bool:
        return torch.is_grad_enabled() and self.backend.capabilities.gradients

    def _positions(self, rows: InputRows, batch: ScoreResult, mask: str) -> Ragged:
        """bool, as long as the sequences."""
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
        raise validate.invalid("mask", f"this input does not say which tokens are the {mask}'s; {where[mask]}")

    # Variants --------------------------------------------------------------------------------------------------------

    def replace(self, **changes: Any) -> LLMPolicy:
        """A policy with other arguments on the same engine, and with the same batcher; this one stays as it is."""
        if "sampling_params" in changes or changes.get("generate") is False:
            # New sampling parameters bring their own number of samples, and scoring has none.
            changes = {"num_samples": None, **changes}
        backend = self.backend
        if changes.get("batching") is False and isinstance(backend, DynamicBatcher):
            backend = backend.backend
        return type(self)(backend, **{**self._given, **changes})

    get_new_version = replace

    def cleanup_batching(self, flush: bool = True) -> None:
        """Answer what is waiting in the batcher's queue, or fail it with `BackendClosedError`, and end its threads.

        The engine stays open, and the next call starts anew. Without a batcher there is nothing to do.
        """
        if isinstance(self.backend, DynamicBatcher):
            self.backend.cleanup(flush=flush)

    def get_batching_state(self) -> BatchingState | None:
        """What the batcher is doing; None where there is none."""
        return self.backend.state() if isinstance(self.backend, DynamicBatcher) else None

    def close(self) -> None:
        """Close the engine, for every policy that shares it."""
        self.backend.close()

    def __enter__(self) -> LLMPolicy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a policy holds an open engine, which cannot be copied or pickled; use replace()")

    def extra_repr(self) -> str:
        return f"{self.backend!r}, input_mode={self.input_mode!r}, generate={self.generate}"

    def _out_keys(self) -> list[NestedKey]:
        """What every call writes. Scored tokens that come with their split get their prompt and response as well."""
        parts = ("prompt", "response", "full") if self.generate else ("full",)
        masks = ["all_attention_mask"]
        if self.generate:
            masks.append("all_response_mask")
        if self.generate or self.input_mode == "history":
            masks.append("all_assistant_mask")
        names = {
            "text": parts,
            "tokens": parts,
            "masks": tuple(masks),
            "log_probs": (*parts, "scored_mask"),
            "history": parts,
        }
        keys: list[NestedKey] = []
        for name, inner in names.items():
            if name in self.fields:
                top = getattr(self.keys, name)
                keys += [(*(top if isinstance(top, tuple) else (top,)), part) for part in inner]
        if self.generate:
            keys.append("finish_reason")
        if self.generate or self.on_error == "skip":
            keys.append("errors")
        if self.input_mode == "history" and not self._reader.prefer_tokens:
            keys.append("retokenized")
        return keys
