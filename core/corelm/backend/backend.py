"""`Backend`: one opened engine behind a typed façade, friendly arguments in, records out. `get_backend` opens one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tenacity
import torch
from tensordict import TensorDict
from torch import Tensor

from corelm import validate
from corelm.backend import arguments, check_results
from corelm.backend.hooks import EngineHooks
from corelm.backend.prepared_call import prepare_generation, prepare_scoring
from corelm.backend.seeds import answer_seeds
from corelm.backend.skipping import OnError
from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec.capabilities import Capabilities
from corelm.spec.provenance import Provenance
from corelm.spec.records import (
    AbortRequest,
    ContainerRequest,
    GenerateResult,
    HealthRequest,
    ScoreResult,
    TokenizeRequest,
    TokenizeResult,
    WeightUpdate,
)
from corelm.spec.sampling import SamplingParams


class Backend:
    """One opened engine. A context manager: leaving it closes the engine.

    Calls are checked before and after (`corelm.checks`) and made by a `EngineHooks`, one thread at a time unless the
    engine declares `concurrent_calls`.

    Attributes:
        name: what it was opened as. model_name: what its numbers are labelled with.
        capabilities: what it can do. tokenizer: the engine's tokenizer.
        weight_version: the label of the weights in force, "0" until the first update.

    It cannot be copied or pickled: open it where it is needed.
    """

    def __init__(
        self,
        engine: Any,
        name: str,
        *,
        model_name: str = "",
        wrappers: Sequence[object] = (),
        retry: int | tenacity.BaseRetrying | None = None,
        timeout: float | None = None,
    ) -> None:
        self.name = name
        self.model_name = model_name
        self.timeout = None if timeout is None else validate.positive(timeout, "timeout")
        self.weight_version = "0"
        self._engine = engine
        self._hooks = EngineHooks(engine, name, wrappers, retry)

    # What it is ------------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        capabilities: Capabilities = self._engine.capabilities
        return capabilities

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """What ends an answer by itself: the model's own list, else the tokenizer's EOS."""
        if self.capabilities.eos_token_ids is not None:
            return self.capabilities.eos_token_ids
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return frozenset() if eos is None else frozenset([eos])

    @property
    def pad_id(self) -> int:
        """What fills dense tensors; no mask is ever derived from it."""
        known = (getattr(self.tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        return next((int(token) for token in known if token is not None), 0)

    @property
    def closed(self) -> bool:
        return self._hooks.closed

    def __reduce__(self) -> Any:
        raise TypeError("an open engine cannot be copied or pickled; open it where it is needed with get_backend")

    def __repr__(self) -> str:
        return f"Backend({self.name!r}, {self.model_name!r}{', closed' if self._hooks.closed else ''})"

    # What it does ----------------------------------------------------------------------------------------------------

    def tokenize(
        self,
        texts: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        offsets: bool = False,
    ) -> TokenizeResult:
        """One row of ids per text (a single text is one row)."""
        found = arguments.texts(texts)
        request = TokenizeRequest(
            texts=found, add_special_tokens=add_special_tokens, parse_special=parse_special, offsets=offsets
        )

        def finish(batch: TokenizeResult) -> TokenizeResult:
            check_results.check_tokens(batch, len(found), self._hooks.fault("tokenize"))
            return batch

        tokens: TokenizeResult = self._hooks.call("tokenize", request, finish)
        return tokens

    def detokenize(self, ids: Any, *, skip_special_tokens: bool = True) -> list[str]:
        """One text per row of ids."""
        self._hooks.require_open()
        rows = arguments.rows_of_ids(ids, "ids").tolist()
        return [self.tokenizer.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]

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
        problems: Mapping[int, str] | None = None,
    ) -> GenerateResult:
        """Sample ``num_samples`` answers for every prompt; those of one prompt are neighbours in the result.

        Args:
            prompts: a `Ragged`, a list of lists or tensors of ids, or an integer tensor ``[rows, time]``.
            seeds: int64[answers], instead of those that follow from ``sampling.seed``.
            request_ids: one per row the engine is sent: an answer, or a prompt if it declares `native_samples`.
            on_error: "raise" finds all bad rows first and runs nothing; "skip" serves the others, and a bad row comes
                back empty with the finish reason `error` and its message in `errors`.
            problems: rows already known to be bad, and why.

        Raises:
            InvalidRequestError: bad ids, an empty or too long prompt, an illegal sampling value.
            CapabilityError: something the engine does not do.
            EngineError, BackendTimeoutError, BackendClosedError: as they say.
        """
        return prepare_generation(
            self,
            prompts,
            sampling,
            logprobs=logprobs,
            seeds=seeds,
            request_ids=request_ids,
            timeout=timeout,
            on_error=on_error,
            problems=problems,
        ).run(self._hooks)

    def score_logprobs(
        self,
        sequences: Any,
        *,
        temperature: float = 1.0,
        score_from: Any = None,
        return_logits: bool = False,
        grad: bool = False,
        device: torch.device | str | None = None,
        request_ids: Sequence[str] | None = None,
        timeout: float | None = None,
        on_error: OnError = "raise",
        problems: Mapping[int, str] | None = None,
    ) -> ScoreResult:
        """Log-probability of every token but the first of each sequence, from position ``score_from[r]`` on.

        Args:
            on_error: "skip" scores nothing of a bad row, and says why in `errors`.
            problems: rows already known to be bad, and why.

        Raises:
            InvalidRequestError: bad ids, an empty or too long sequence, an illegal temperature or `score_from`.
            CapabilityError: the engine cannot score, or not like this.
            EngineError, BackendTimeoutError, BackendClosedError: as they say.
        """
        return prepare_scoring(
            self,
            sequences,
            temperature=temperature,
            score_from=score_from,
            return_logits=return_logits,
            grad=grad,
            device=device,
            request_ids=request_ids,
            timeout=timeout,
            on_error=on_error,
            problems=problems,
        ).run(self._hooks)

    def to_containers(self, request: ContainerRequest) -> TensorDict:
        return self._hooks.call("to_containers", request)

    def provenance(
        self, batch: GenerateResult | ScoreResult, sampling: SamplingParams | None = None
    ) -> Provenance | tuple[Provenance, ...]:
        """Where the log-probs of `batch` came from: one for all rows if they agree, else one per row."""
        raw = batch.mode == "raw"
        penalties = () if raw or sampling is None else sampling.penalties
        made = {
            version: Provenance(
                backend=self.name,
                model=self.model_name,
                weight_version=version,
                mode=batch.mode,
                temperature=1.0 if raw else batch.temperature,
                support="full" if raw else batch.support,
                penalties=penalties,
            )
            for version in {*(batch.weight_versions or ()), self.weight_version}
        }
        versions = batch.weight_versions or (self.weight_version,)
        return made[versions[0]] if len(set(versions)) == 1 else tuple(made[version] for version in versions)

    # Its life --------------------------------------------------------------------------------------------------------

    def update_weights(
        self, weights: Mapping[str, Tensor] | str | os.PathLike[str], version: str | None = None, drain: bool = True
    ) -> str:
        """Load a state dict or the weights at a path. Returns the version that every later row carries.

        Args:
            version: its label; by default the number of updates so far.
            drain: let answers in flight finish on the old weights first; False ends them with the reason `abort`, in an
                engine that can. Either way no row is made of two weights.
        """
        self._needs("update_weights", "its weights cannot be changed")
        if version is None:
            # Whatever the caller named the last one, the next one has another name.
            version = (
                str(int(self.weight_version) + 1) if self.weight_version.isdecimal() else f"{self.weight_version}+1"
            )
        if not isinstance(version, str):
            raise InvalidRequestError(f"version: expected a str, got {version!r}", field="version")
        if isinstance(weights, (str, os.PathLike)):
            request = WeightUpdate(version=version, drain=drain, path=Path(weights))
        elif isinstance(weights, Mapping):
            request = WeightUpdate(version=version, drain=drain, state_dict=weights)
        else:
            raise InvalidRequestError(
                f"weights: expected a state dict or a path, got {type(weights).__name__}", field="weights"
            )

        def finish(done: Any) -> str:
            if done is not True:
                raise self._hooks.fault("update_weights")(f"returned {done!r}: the new weights are not in force")
            self.weight_version = version
            return version

        loaded: str = self._hooks.call("update_weights", request, finish)
        return loaded

    def health(self) -> bool:
        """Whether the engine can serve. An engine that does not say is healthy while it is open."""
        if self._hooks.closed:
            return False
        return not self._hooks.implements("health") or bool(self._hooks.call("health", HealthRequest()))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; they return what they have with the finish reason `abort`."""
        self._needs("abort", "its requests cannot be aborted")
        self._hooks.call("abort", AbortRequest(request_ids=tuple(request_ids)))

    def close(self) -> None:
        """Release the engine. Every later call raises `BackendClosedError`; closing twice is fine."""
        self._hooks.close()

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Helpers ---------------------------------------------------------------------------------------------------------

    def _needs(self, capability: str, why: str) -> None:
        if not getattr(self.capabilities, capability):
            raise CapabilityError(f"backend {self.name!r} lacks {capability}: {why}", capability=capability)

    def _limit(self, timeout: float | None) -> float | None:
        return self.timeout if timeout is None else validate.positive(timeout, "timeout")

    def _stops_can_match(self, sampling: SamplingParams) -> None:
        """Where special tokens are left out of the text, a stop string that has one would never be met."""
        if not (sampling.stop and sampling.skip_special_tokens):
            return
        specials = getattr(self.tokenizer, "all_special_tokens", ())
        for stop in sampling.stop:
            if any(special in stop for special in specials):
                raise InvalidRequestError(
                    f"stop: {stop!r} has a special token in it, and the text has none; give its id in "
                    "stop_token_ids, or skip_special_tokens=False",
                    field="stop",
                )

    def _seeds(self, sampling: SamplingParams, rows: int, seeds: Any) -> Tensor | None:
        samples = sampling.num_samples or 1
        if not self.capabilities.per_answer_seeds:
            if seeds is not None or (sampling.seed is not None and not sampling.greedy):
                self._needs("per_answer_seeds", "it does not honour seeds; leave the seed out")
            return None
        if seeds is not None:
            return arguments.seeds(seeds, rows * samples)
        if sampling.greedy:
            # Nothing is drawn, so torch's generator stays where it is.
            return answer_seeds(0, range(rows), samples)
        # Without a seed torch.manual_seed governs the answers, as it does all else that a torch user samples.
        seed = int(torch.randint(2**62, ())) if sampling.seed is None else sampling.seed
        return answer_seeds(seed, range(rows), samples)
