"""`TransformersBackend`: how a model is opened, and the hooks, each of them a line or two."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import (
    AbortRequest,
    Adapter,
    Capabilities,
    CloseRequest,
    GenerateRequest,
    GenerateResult,
    HealthRequest,
    RowFailure,
    ScoreRequest,
    ScoreResult,
    SleepRequest,
    WakeRequest,
    WeightsStateRequest,
    WeightUpdate,
    generate_result,
    hookimpl,
)
from corelm.validate import flag
from corelm_engine_kit import VersionLog, eos_token_ids
from corelm_engine_kit.logits_engine import sampled_here
from corelm_engine_kit.loop import Aborted, Call, Loop
from transformers_backend import loading, weights
from transformers_backend.adapters import Adapters, may_have_adapters
from transformers_backend.beams import beam_search
from transformers_backend.decoding import CallUpdates, Decoder, MustBeAlone
from transformers_backend.engine import CausalLM, cache_name
from transformers_backend.memory import (
    DEFAULT_TOKENS,
    SleepingWeights,
    give_back,
    naming_max_batch_tokens,
    sleep_levels,
)
from transformers_backend.model_state import WeightsState
from transformers_backend.scoring import Scorer
from transformers_backend.self_test import SelfTest
from transformers_backend.verdicts import Verdict

#: Sampling parameters that are honoured besides those of the kit.
_OF_BEAMS = ("num_beams", "length_penalty", "early_stopping", "engine_kwargs")


@dataclass(frozen=True)
class Key:
    """What calls have to have in common to be made together.

    Attributes:
        adapter: see `GenerateRequest`.
        verdict: what is known of the model; None as long as it is not asked for.
        decoding: whether the accelerations of decoding are on.
        alone: whether no other calls are made meanwhile.
    """

    adapter: Adapter
    verdict: Verdict | None = None
    decoding: bool = False
    alone: bool = False


class TransformersBackend:
    """Samples from and scores with a causal language model, in this process.

    Calls of `generate` share their steps. All that needs the model otherwise comes between two of them.

    Attributes:
        owns_model: whether the model was loaded here, and is to be gone after `close`.
        tokenizer, capabilities: what core asks of every backend.
        conformance: what `corelm conformance` needs to know to test it.
    """

    requires_api = ">=1,<2"
    on_caller_threads = True

    def __init__(
        self,
        engine: CausalLM,
        tokenizer: Any,
        max_batch_tokens: int | None,
        *,
        fast: bool = True,
        owns_model: bool = False,
        recompute_kv_on_update: bool = False,
    ) -> None:
        scorer_class = Scorer
        accelerated: Callable[[], AbstractContextManager[None]] = nullcontext
        if fast:
            # Imported only here, so that everything else works without the folder.
            from transformers_backend.fast import FastScorer, quick_products

            scorer_class, accelerated = FastScorer, partial(quick_products, engine.base)
        self.engine = engine
        self.self_test = SelfTest(engine, tokenizer, fast=fast)
        self.decoder = Decoder(engine, tokenizer, self.self_test, max_batch_tokens, accelerated)
        self.scorer = scorer_class(engine, self.self_test, max_batch_tokens or DEFAULT_TOKENS)
        self.adapters = Adapters(engine)
        self.loop = Loop(self.decoder.step, self._running)
        self._log, self._rereads = VersionLog(), recompute_kv_on_update
        self.owns_model = owns_model
        self.conformance = {
            "engine_sampling": {"num_beams": 2, "temperature": 0.0, "engine_kwargs": {"no_repeat_ngram_size": 1}},
            "recomputes_in_flight": recompute_kv_on_update,
        }
        self._weights_state = WeightsState(engine.module)
        self._sleeping = SleepingWeights(engine.module)
        self.tokenizer = tokenizer
        declared = sampled_here(engine.vocab_size)
        declared["sampling"] |= dict.fromkeys(_OF_BEAMS)
        self.capabilities = Capabilities(
            **declared,
            max_context=engine.max_context,
            eos_token_ids=eos_token_ids(engine.base.generation_config, tokenizer, vocab_size=engine.vocab_size),
            gradients=True,
            update_weights=True,
            weight_stream=True,
            updates_in_flight=True,
            adapters=may_have_adapters(engine, owns_model=owns_model),
            sleep_levels=sleep_levels(engine.module, owns_model),
        )

    @classmethod
    def open(
        cls,
        model: Any = None,
        *,
        tokenizer: Any = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        max_batch_tokens: int | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        fast: bool = True,
        recompute_kv_on_update: bool = False,
    ) -> TransformersBackend:
        """Load a model, or use one that is already loaded.

        Args:
            model: a folder or hub name, or a model object, PEFT-wrapped or not. An object keeps its device, dtype,
                train/eval mode and `requires_grad`. The result of ``torch.compile`` is run without being compiled.
            tokenizer: a tokenizer, or a folder or hub name of one; None for the model's own.
            dtype: None for the checkpoint's own. With a model object, the dtype that it has is accepted.
            device: None for the first GPU, or the CPU if there is no GPU. With a model object, the device that it is on
                is accepted.
            trust_remote_code: run Python code that comes with the model.
            attn_implementation: None for transformers' choice.
            max_batch_tokens: how many tokens share a forward pass, including padding and the answers to come. None for
                32,768; on a GPU, decoding then takes what fits into half of the memory that is free when a call begins.
                With ``max_new_tokens=None`` an answer counts 512 tokens at first; if a batch grows too wide, some of
                its rows wait.
            model_kwargs: passed to ``from_pretrained`` unchanged.
            fast: use the accelerations of `transformers_backend.fast`. False runs the plain code only, to find out
                whether an acceleration causes a problem: the numbers must be the same.
            recompute_kv_on_update: what becomes of the answers under way at ``update_weights(when="now")``. True reads
                their prompts and tokens again with the new weights, so each later token is sampled as a plain forward
                under these would have it. False keeps the cache: later tokens attend to keys and values of the old
                weights. That costs nothing, and the log-probs returned are those they were sampled with, but a forward
                under the new weights alone gives others.

        Raises:
            InvalidRequestError: there is nothing to open, a path or a device that is not there, a file, no
                tokenizer, or an option of loading that differs from what a model object is.
            CapabilityError: this backend cannot run the model, or it is wrapped or sharded for training on several
                ranks.
        """
        given: dict[str, Any] = {"dtype": dtype, "device": device, "attn_implementation": attn_implementation}
        given["model_kwargs"] = model_kwargs or {}
        if isinstance(model, (str, os.PathLike)):
            loading.refuse_file(model, tokenizer, given["model_kwargs"])
            tokenizer = model if tokenizer is None else tokenizer
            module = loading.load_model(model, trust_remote_code=trust_remote_code, **given)
        elif isinstance(model, nn.Module):
            module = loading.unwrapped(model)
            loading.refuse_other_options(module, **given)
        else:
            got = "nothing" if model is None else type(model).__name__
            raise InvalidRequestError(
                f"model: expected a folder, a hub name or a model object, got {got}; "
                "call get_backend('transformers', 'PATH')",
                field="model",
            )
        engine = CausalLM(module, loading.base_model(module))
        tokenizer = loading.load_tokenizer(tokenizer, engine.base, trust_remote_code)
        return cls(
            engine,
            tokenizer,
            max_batch_tokens,
            fast=fast,
            owns_model=module is not model,
            recompute_kv_on_update=flag("recompute_kv_on_update", recompute_kv_on_update),
        )

    @classmethod
    def engine_warning(cls) -> str:
        """Return what makes every model of the installed transformers slow here; "" if nothing does."""
        from transformers import LlamaForCausalLM

        if cache_name(LlamaForCausalLM) is not None:
            return ""
        return "answers are decoded without a cache, because this plugin does not know its name in a model's forward"

    @property
    def info(self) -> dict[str, str]:
        """What it runs on, and how it decodes and scores, as far as that is known, with the cause of a slower way.

        `revision` is the commit of a model from a hub.
        """
        weight = next(self.engine.module.parameters())
        runs = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}"
        config = getattr(self.engine.module, "config", None)
        facts = {
            "model": runs,
            "attention": getattr(config, "_attn_implementation", None),
            "revision": getattr(config, "_commit_hash", None),
            "decoding": self.decoder.info,
            "scoring": self.scorer.info,
        }
        return {name: how for name, how in facts.items() if how}

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        loading.refuse_sharded(self.engine.module)
        self.engine.refuse_unreadable(request.prompts, "prompts")
        alone = request.sampling.num_beams > 1 or self.decoder.keeps_states
        with self.loop.start(request, Key(request.adapter, alone=alone)) as call:
            try:
                return self.loop.run(call, self._answers(request, call), alone=alone)
            except MustBeAlone:
                pass
        return self.generate(request)

    def _answers(self, request: GenerateRequest, call: Call) -> Generator[Any, None, GenerateResult]:
        """Answer a request, as the work of its call."""
        updates = CallUpdates(self._log, request, rereads=self._rereads)
        try:
            with naming_max_batch_tokens(self.engine):
                if request.sampling.num_beams > 1:
                    use_cache = self.decoder.may_use_cache(request, call)
                    made = beam_search(self.engine, request, call, use_cache=use_cache)
                else:
                    made = yield from self.decoder.generate(request, call, updates)
        except Aborted:
            made = generate_result(request, [RowFailure("aborted", aborted=True)] * len(request.prompts))
        # A row that failed has no tokens, which could be of later weights.
        runs = zip(updates.rows.runs, made.errors or [""] * len(request.prompts), strict=True)
        return replace(made, version_runs=tuple(run[:1] if failed else run for run, failed in runs))

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        loading.refuse_sharded(self.engine.module)
        self.engine.refuse_unreadable(request.sequences, "sequences")
        with (
            self.loop.start(request) as call,
            self.loop.held(call.deadline),
            naming_max_batch_tokens(self.engine),
            self._switched(request.adapter, grad=request.grad),
        ):
            return self.scorer.score(request, call)

    @contextmanager
    def _switched(self, adapter: Adapter, *, grad: bool = False) -> Iterator[None]:
        told = nullcontext() if adapter is None else self._weights_state.switching()
        with told, self.adapters.switched(adapter, grad=grad):
            yield

    @contextmanager
    def _running(self, key: Key) -> Iterator[None]:
        """Have the model as the calls with a key need it."""
        decoding = self.decoder.accelerated() if key.decoding else nullcontext()
        with self._switched(key.adapter), self.engine.evaluating(), decoding:
            if key.verdict is not None:
                self.self_test.resume(key.verdict)
            yield

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        loading.refuse_sharded(self.engine.module)
        with self.loop.held():
            try:
                if request.adapter is None:
                    weights.load(self.engine, request)
                else:
                    self.adapters.update(request)
            except (InvalidRequestError, CapabilityError):
                raise
            except BaseException:
                self._log.note(request)
                raise
            finally:
                # Also after a failure: a stream may have changed some.
                torch.clear_autocast_cache()
                self.self_test.forget()
            if request.adapter is None:
                self._log.note(request)
        return True

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        with self.loop.held():
            self._sleeping.sleep(request.level)
            give_back(self.engine.device)
        return True

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        # There is no KV cache between two calls.
        if "weights" in request.tags:
            self._sleeping.wake()
        return True

    @hookimpl
    def weights_state(self, request: WeightsStateRequest) -> Hashable:
        return self._weights_state()

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        self.loop.abort(frozenset(request.request_ids))
        return True

    @hookimpl
    def health(self, request: HealthRequest) -> bool:
        # The model runs in this process, so it can serve as long as the backend is open.
        return True

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        if not self.loop.close():
            return False
        # Core calls no other hook after this one; without these references the model's memory can be freed.
        device = self.engine.device
        if not self.owns_model:
            self.adapters.close()
        for name in ("engine", "adapters", "self_test", "loop", "decoder", "scorer", "_weights_state", "_sleeping"):
            delattr(self, name)
        if self.owns_model:
            # Otherwise a GPU stays full for other engines until Python happens to collect cycles.
            give_back(device)
        return True
