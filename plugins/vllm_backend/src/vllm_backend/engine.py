"""`InProcessEngine`: what the two modes of vLLM in this process share."""

from __future__ import annotations

import gc
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from corelm.errors import BackendClosedError, EngineError
from corelm.spec import (
    Deadline,
    GenerateRequest,
    GenerateResult,
    RowFailure,
    ScoreRequest,
    ScoreResult,
    SleepRequest,
    WakeRequest,
    WeightUpdate,
    hookimpl,
)
from vllm_backend import kept_sets_protocol, weights
from vllm_backend import protocol_inprocess as protocol
from vllm_backend.adapters import local_adapters
from vllm_backend.capabilities import ModelInfo, at_a_time
from vllm_backend.children import Errors
from vllm_backend.kept_sets_protocol import TAKE, KeptSetsOfRow
from vllm_backend.protocol_inprocess import RowOutput, VLLMRequest

DEAD = "vLLM's engine has failed and cannot go on; open the backend again"
KEPT_CACHE = "vLLM kept its prefix cache, which belongs to the old weights"

#: Takes the number of a request and one of its outputs.
OnOutput = Callable[[int, Any], None]


class InProcessEngine(ABC):
    """Builds vLLM's requests, lets the subclass run them, and parses their outputs.

    Attributes:
        capabilities: what the backend declares.
        tokenizer: the tokenizer of the backend.
        checkpoint: what new weights are compared with: the folder of the model's safetensors, or names and shapes.
    """

    requires_api = ">=1,<2"
    #: What `corelm conformance` needs to know to test it.
    conformance: ClassVar[Mapping[str, Any]] = {"engine_sampling": {"engine_kwargs": {"logit_bias": {7: 20.0}}}}
    #: Whether `reload_tensors` reads each tensor when it is its turn, so that the next may use its memory.
    streams_tensors = False

    def __init__(self, info: ModelInfo) -> None:
        self.capabilities = info.capabilities
        self.tokenizer, self.reasons = info.tokenizer, info.reasons
        self.checkpoint = info.checkpoint
        self._loras: dict[str, Any] = {}
        self.adapters = local_adapters(info, self._loras, lambda lora: self._ask("add_lora", lora), self._remove_lora)
        self._info = info
        self._lost_keys: list[str] = []
        self._closed = False
        self._broken = False
        self._asleep = False
        self._errors = Errors()

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        keys = kept_sets_protocol.new_keys(request)
        requests = protocol.generation_requests(request, self._info, self._lora(request), keys)
        on_output = protocol.on_output(request, self.tokenizer)
        try:
            outputs = self.run(requests, request.request_ids, request.timeout, on_output)
        except BaseException:
            # The next call that wants sets has the workers forget these.
            self._lost_keys.extend(keys)
            raise
        return protocol.generation_result(request, outputs, self._info, self._kept_sets(keys))

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        requests = protocol.scoring_requests(request, self._info, self._lora(request))
        names, deadline = [request.request_ids[number] for number in requests], Deadline(request.timeout)
        outputs: list[RowOutput] = []
        for rows in at_a_time(len(names), alone=self._info.scores_alone):
            outputs += self.run(list(requests.values())[rows], names[rows], deadline.left())
        return protocol.scoring_result(request, dict(zip(requests, outputs, strict=True)), self._info)

    def try_kept_sets(self, config: Any) -> None:
        """Declare sets of kept ids if an engine with this `VllmConfig` gets them right on short rows."""
        if kept_sets_protocol.are_loaded(config) and kept_sets_protocol.works(
            self.capabilities, self.generate, self.score_logprobs
        ):
            self.capabilities = replace(self.capabilities, return_support=True)
            self._info = replace(self._info, capabilities=self.capabilities)

    def _kept_sets(self, keys: Sequence[str]) -> list[KeptSetsOfRow]:
        if not keys:
            return []
        lost, self._lost_keys = self._lost_keys, []
        return kept_sets_protocol.rows_of(self._call_workers(TAKE, {"keys": [*keys, *lost]}), len(keys))

    def reload(self, folder: Path, request: WeightUpdate) -> None:
        """Load the safetensors in `folder`, and forget everything computed with the old weights.

        Raises:
            EngineError: they were not loaded completely. The engine cannot be used again.
        """
        self._load(lambda: self._load_folder(folder), request)

    def reload_tensors(self, tensors: Iterable[tuple[str, Tensor]], largest: int, request: WeightUpdate) -> None:
        """Load tensors that `needs_file` accepts, with their names in the checkpoint. Errors are those of `reload`.

        Args:
            tensors: their names and the tensors.
            largest: bytes of the largest one.
            request: the update that they belong to.
        """
        self._load(lambda: self._hand_over(tensors, largest), request)

    @abstractmethod
    def needs_file(self, tensors: Iterable[Tensor]) -> str:
        """Return why these tensors have to go through a file; empty if they can be handed to vLLM as they are."""

    @abstractmethod
    def _hand_over(self, tensors: Iterable[tuple[str, Tensor]], largest: int) -> None: ...

    def forget(self, request: WeightUpdate) -> None:
        """Forget everything computed with the old weights: the owner of the model has changed them.

        Raises:
            EngineError: vLLM kept some of it. The engine cannot be used again.
        """
        self._load(lambda: None, request)

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        weights.load(self, request)
        return True

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        """Free the GPU's memory; the prefix cache is emptied."""
        self._require_usable()
        self._asleep = True
        self._ask("sleep", request.level)
        return True

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        """Take the memory again. When all of it is back, vLLM goes on to schedule requests."""
        self._require_usable()
        self._ask("wake_up", sorted(request.tags))
        self._asleep = not request.last
        return True

    def load_adapter(self, request: WeightUpdate) -> None:
        """Load, replace or unload an adapter. Errors are those of `ServerAdapters.update`."""
        self._require_usable()
        self.adapters.update(request)

    def _lora(self, request: GenerateRequest | ScoreRequest) -> Any:
        """Return vLLM's `LoRARequest` for the adapter of a request; None for the base weights."""
        return self._loras[self.adapters.server_name(request.adapter)] if request.adapter else None

    def _remove_lora(self, lora_id: int) -> None:
        self._ask("remove_lora", lora_id)

    def _load(self, load: Callable[[], None], request: WeightUpdate) -> None:
        self._require_usable()
        try:
            with self._while_idle(request):
                load()
        except BaseException as error:
            # Some of the weights may be new ones.
            self._broken = True
            if not isinstance(error, Exception):
                raise
            raise EngineError(f"the new weights are not in force: {error}. {self.dead()}", usable=False) from error

    def dead(self) -> str:
        """Return what to say of an engine that has failed, with vLLM's own last errors."""
        return f"{DEAD}{self._errors.said()}"

    @abstractmethod
    def run(
        self,
        requests: Sequence[VLLMRequest | RowFailure],
        names: Sequence[str],
        timeout: float | None,
        on_output: OnOutput | None = None,
    ) -> list[RowOutput]:
        """Return the output of every request, in order; failures are returned as they are.

        Args:
            requests: what to run.
            names: the name of each request, for `abort`.
            timeout: seconds for all of them together, or None.
            on_output: takes the number of a request and each of its outputs, the last included.

        Raises:
            TimeoutError: it took longer than `timeout` seconds.
            EngineError: the engine has failed and cannot be used again.
        """

    @abstractmethod
    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of vLLM's engine where that may be called, and return what it returned."""

    def _call_workers(self, method: Any, arguments: dict[str, Any]) -> list[Any]:
        """Call a method of vLLM's workers, and return what each of them returned."""
        found: list[Any] = self._ask("collective_rpc", method, kwargs=arguments)
        return found

    @abstractmethod
    def _while_idle(self, request: WeightUpdate) -> AbstractContextManager[None]:
        """Have vLLM run no request in the ``with`` block, and then forget what it has computed with the old weights.

        With ``when="now"`` the requests in flight go on afterwards.
        """

    def _load_folder(self, folder: Path) -> None:
        if self._info.dummy:
            # Otherwise vLLM would look for a loader of random numbers that reads files.
            self._call_workers("update_config", {"overrides": {"load_config": {"load_format": "auto"}}})
        self._call_workers("reload_weights", {"weights_path": str(folder)})

    def _require_usable(self) -> None:
        if self._closed:
            raise BackendClosedError("this vLLM engine is closed")
        if self._broken:
            raise EngineError(DEAD, usable=False)


def timeout_error(timeout: float | None) -> TimeoutError:
    return TimeoutError("vLLM did not answer in time" + ("" if timeout is None else f", within {timeout:g} seconds"))


@contextmanager
def collecting_garbage() -> Iterator[None]:
    """Free at once what the ``with`` block releases.

    vLLM's objects reference one another in cycles, and the threads of its sockets live until the cycles are collected.
    """
    with warnings.catch_warnings():
        # vLLM offers no call that closes the context of its sockets.
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()
        # Without multiprocessing, and with weights that were handed over, this process itself holds memory of the GPU.
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
