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

from corelm.assemble import dense_columns
from corelm.backend import Backend, get_backend
from corelm.distributions import MaskedCategorical
from corelm.errors import CapabilityError, InvalidRequestError
from corelm.inputs import InputMode, InputReader, InputRows, Keys, truncate_left
from corelm.messages import ContainerRequest, ScoreBatch
from corelm.provenance import Mode
from corelm.results import ResponseParser, generated, scored
from corelm.rows import Ragged
from corelm.sampling import SamplingParams
from corelm.skipping import OnError

Inplace = bool | Literal["empty"]
Positions = Literal["attention", "assistant", "response"]


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
    ) -> None:
        given = {
            name: value for name, value in locals().items() if name not in ("self", "backend", "model", "__class__")
        }
        super().__init__()
        _one_of("input_mode", input_mode, ("history", "text", "tokens"))
        _one_of("log_probs_mode", log_probs_mode, ("raw", "processed"))
        _one_of("on_error", on_error, ("raise", "skip"))
        _one_of("truncation", truncation, ("error", "left"))
        _one_of("inplace", inplace, (None, True, False, "empty"))
        if return_history and input_mode != "history":
            raise _invalid("return_history", f"there is no history to return in {input_mode} mode")
        if not generate and not return_log_probs:
            raise _invalid("return_log_probs", "scoring without log-probs returns nothing")
        sampling = SamplingParams.make(sampling_params)
        if num_samples is not None:
            if sampling.num_samples not in (None, num_samples):
                raise _invalid("num_samples", f"given twice, as {num_samples} and {sampling.num_samples}")
            sampling = SamplingParams.make(sampling, num_samples=num_samples)
        if sampling.num_samples is not None and not generate:
            raise _invalid("num_samples", "scoring samples nothing")
        if sampling.num_samples is not None and inplace is True:
            raise _invalid("inplace", "num_samples adds a batch dimension, which the input does not have")
        if isinstance(backend, str):
            backend = get_backend(backend, model)
        elif model is not None:
            raise _invalid("model", "goes with a backend's name, not with a backend that is already open")
        self._given = given
        self.backend = backend
        self.input_mode = input_mode
        self.generate = generate
        self.sampling_params = sampling
        self.pad_output = pad_output
        self.log_probs_mode = log_probs_mode
        self.inplace = sampling.num_samples is None if inplace is None else inplace
        self.on_error = on_error
        self.truncation = truncation
        self.device = None if device is None else torch.device(device)
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
            template_kwargs=template_kwargs or {},
            tokenizer_kwargs=tokenizer_kwargs or {},
            prefer_tokens=prefer_tokens,
        )
        self.in_keys = [self._reader.key("prompt" if generate else "full")]
        self.out_keys = self._out_keys()

    # Calling it ------------------------------------------------------------------------------------------------------

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
        request = self._generate(tensordict, seed, timeout) if self.generate else self._score(tensordict, timeout)
        return self._deliver(tensordict, request)

    async def aforward(
        self, tensordict: TensorDictBase, *, seed: int | None = None, timeout: float | None = None
    ) -> TensorDictBase:
        """`forward` on a thread, for callers that must not block their event loop."""
        return await asyncio.to_thread(self, tensordict, seed=seed, timeout=timeout)

    def _generate(self, td: TensorDictBase, seed: int | None, timeout: float | None) -> ContainerRequest:
        sampling = self.sampling_params if seed is None else SamplingParams.make(self.sampling_params, seed=seed)
        rows = self._reader.read(td, "prompt", self.backend, want_assistant="masks" in self.fields)
        limit = self.backend.capabilities.max_context
        if self.truncation == "left" and limit is not None:
            rows = truncate_left(rows, limit - (sampling.max_new_tokens or 1), self.backend)
        batch = self.backend.generate(
            rows.ids,
            sampling,
            logprobs=self.log_probs_mode if "log_probs" in self.fields else "none",
            timeout=timeout,
            on_error=self.on_error,
        )
        return generated(
            rows,
            batch,
            sampling,
            self.backend,
            fields=self.fields,
            parser=self.response_parser,
            pad_output=self.pad_output,
        )

    def _score(self, td: TensorDictBase, timeout: float | None) -> ContainerRequest:
        rows = self._reader.read(td, "full", self.backend, want_assistant="masks" in self.fields)
        batch = self._scores(rows, timeout=timeout)
        errors = (batch.errors or ("",) * len(rows.ids)) if self.on_error == "skip" else None
        return scored(rows, batch, self.backend, fields=self.fields, errors=errors, pad_output=self.pad_output)

    def _scores(self, rows: InputRows, **options: Any) -> ScoreBatch:
        sampling = self.sampling_params
        if self.log_probs_mode == "processed" and (sampling.truncates or sampling.penalties or sampling.greedy):
            raise CapabilityError(
                "given tokens can be scored at a temperature, not under truncation or penalties; score raw log-probs",
                capability="score",
            )
        temperature = sampling.temperature if self.log_probs_mode == "processed" else 1.0
        return self.backend.score_logprobs(rows.ids, temperature=temperature, on_error=self.on_error, **options)

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
            if out.batch_size != request.batch_size:
                out = _with_batch(out, request.batch_size)
        for name, value in made.items():
            out.set(getattr(self.keys, name, name), value)
        return out

    # Distributions ---------------------------------------------------------------------------------------------------

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
        rows = self._reader.read(tensordict, "full", self.backend)
        batch = self._scores(rows, return_logits=True, grad=self._grad())
        assert batch.logits is not None
        columns = rows.columns or dense_columns(rows.tokens)
        shape = (*rows.batch_size, columns.mask.shape[-1])
        logits = batch.logits.scatter(columns.mask, 0.0)
        if batch.temperature != 1.0:
            logits = logits / batch.temperature
        counts = batch.scored.scatter(columns.mask, False)
        if not isinstance(mask, Tensor):
            mask = self._positions(rows, batch, mask).scatter(columns.mask, False).reshape(shape)
        if mask.shape != shape:
            raise _invalid("mask", f"expected bool{list(shape)}, got {mask.dtype}{list(mask.shape)}")
        counts = counts.reshape(shape) & mask.to(counts.device)
        return MaskedCategorical(logits.reshape(*shape, -1), counts)

    def log_prob(self, tensordict: TensorDictBase) -> Any:
        """float32 log-probabilities of whole sequences, as ``log_probs.full`` would hold them, with gradients where the
        engine has them: a tensor if `pad_output`, else one a row. Unscored positions hold 0.0.
        """
        rows = self._reader.read(tensordict, "full", self.backend, want_assistant=False)
        batch = self._scores(rows, grad=self._grad())
        fields = frozenset({"log_probs"})
        request = scored(rows, batch, self.backend, fields=fields, pad_output=self.pad_output)
        return self.backend.to_containers(request)["log_probs"].full

    def _grad(self) -> bool:
        return torch.is_grad_enabled() and self.backend.capabilities.gradients

    def _positions(self, rows: InputRows, batch: ScoreBatch, mask: str) -> Ragged:
        """bool, as long as the sequences."""
        _one_of("mask", mask, ("attention", "assistant", "response"))
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
        raise _invalid("mask", f"this input does not say which tokens are the {mask}'s; {where[mask]}")

    # Variants --------------------------------------------------------------------------------------------------------

    def replace(self, **changes: Any) -> LLMPolicy:
        """A policy with other arguments on the same engine; this one stays as it is."""
        given = dict(self._given)
        if "sampling_params" in changes and "num_samples" not in changes:
            given["num_samples"] = None
        return type(self)(self.backend, **{**given, **changes})

    get_new_version = replace

    def close(self) -> None:
        """Close the engine, for every policy that shares it."""
        self.backend.close()

    def __enter__(self) -> LLMPolicy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

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


def _with_batch(td: TensorDictBase, batch_size: tuple[int, ...]) -> TensorDictBase:
    """Give a TensorDict without a batch the batch of its data; or, for num_samples, its copy one dimension more."""
    try:
        td.batch_size = torch.Size(batch_size)
    except RuntimeError as error:
        raise _invalid(
            "inplace", f"the results have batch {batch_size}, which does not fit the input: {error}"
        ) from error
    return td


def _one_of(name: str, value: Any, legal: tuple[Any, ...]) -> None:
    if value not in legal:
        raise _invalid(name, f"expected one of {', '.join(map(repr, legal))}, got {value!r}")


def _invalid(name: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {message}", field=name)
