"""`InProcessEngine`: what the two modes of vLLM in this process share."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from corelm.errors import BackendClosedError, EngineError
from corelm.spec import (
    CloseRequest,
    Deadline,
    GenerateRequest,
    GenerateResult,
    HealthRequest,
    RowFailure,
    ScoreRequest,
    ScoreResult,
    SleepRequest,
    WakeRequest,
    WeightUpdate,
    hookimpl,
    whole_tensor,
)
from corelm_engine_kit import (
    expected_shapes,
    fitting,
    fitting_stream,
    say_why_files,
    weights_folder,
    wrong_kept_ids,
)
from vllm_backend import kept_sets_protocol
from vllm_backend import protocol_inprocess as protocol
from vllm_backend.adapters import local_adapters
from vllm_backend.capabilities import ModelInfo, at_a_time
from vllm_backend.children import Errors
from vllm_backend.kept_sets_protocol import TAKE, RowSets
from vllm_backend.protocol_inprocess import RowOutput, VLLMRequest

_log = logging.getLogger(__name__)

DEAD = "vLLM's engine has failed and cannot go on; open the backend again"
KEPT_CACHE = "vLLM kept its prefix cache, which belongs to the old weights"

#: Takes the number of a request and one of its outputs.
OnOutput = Callable[[int, Any], None]


class InProcessEngine(ABC):
    """Builds vLLM's requests, lets the subclass run them, and parses their outputs.

    Attributes:
        capabilities: what the backend declares.
        tokenizer: the tokenizer of the backend.
        checkpoint: what new weights are compared with; see `ModelInfo`.
        llm: vLLM's engine; None once this one is closed.
    """

    requires_api = ">=1,<2"
    #: What `corelm conformance` needs to know to test it.
    conformance: ClassVar[Mapping[str, Any]] = {"engine_sampling": {"engine_kwargs": {"logit_bias": {7: 20.0}}}}
    #: Whether `_hand_over` reads each tensor when it is its turn, so that the next may use its memory.
    streams_tensors = False

    def __init__(self, llm: Any, info: ModelInfo) -> None:
        self.llm = llm
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

    @property
    def info(self) -> Mapping[str, str]:
        """What the model runs in and on."""
        return self._info.runs

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
        if not kept_sets_protocol.are_loaded(config):
            return
        if why := wrong_kept_ids(self.generate, self.score_logprobs, self.capabilities.vocab_size):
            _log.warning("vLLM's sets of kept ids are not used: %s", why)
            return
        self.capabilities = replace(self.capabilities, return_support=True)
        self._info = replace(self._info, capabilities=self.capabilities)

    def _kept_sets(self, keys: Sequence[str]) -> list[RowSets]:
        if not keys:
            return []
        lost, self._lost_keys = self._lost_keys, []
        return kept_sets_protocol.rows_of(self._call_workers(TAKE, {"keys": [*keys, *lost]}), len(keys))

    @abstractmethod
    def needs_file(self, tensors: Iterable[Tensor]) -> str:
        """Return why these tensors have to go through a file; empty if they can be handed to vLLM as they are."""

    @abstractmethod
    def _hand_over(self, tensors: Iterable[tuple[str, Tensor]], largest: int) -> None:
        """Have vLLM load tensors that `needs_file` accepts. The largest one has so many bytes."""

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        """Load the weights of `request`. If their owner has changed or loaded them, only drop what is cached.

        vLLM loads tensors in place, one by one, and an unknown name stops it half way. So all names and shapes are
        compared with those of the checkpoint that the engine was opened on, before vLLM gets anything.

        Raises:
            InvalidRequestError: the weights cannot be read or do not fit the model. Nothing has changed.
            EngineError: the weights fit, but were not loaded; or a tensor of a stream that was handed over one by one
                did not fit. The engine has no usable weights.
        """
        if request.adapter is not None:
            self._require_usable()
            self.adapters.update(request)
        elif request.by_owner:
            self._load(lambda: None, request)
        elif request.path is not None:
            self._load_file(request)
        else:
            self._load_tensors(request)
        return True

    def _load_file(self, request: WeightUpdate) -> None:
        with weights_folder(request, self.checkpoint) as folder:
            self._load(lambda: self._load_folder(folder), request)

    def _load_tensors(self, request: WeightUpdate) -> None:
        """Hand tensors to vLLM if it can take them as they are; else write them to a folder that it loads."""
        checkpoint, stream = self.checkpoint, request.stream
        assert checkpoint is not None, "without one, nothing can be loaded"
        tensors: Iterable[Tensor] = (request.state_dict or {}).values()
        if stream is not None:
            # Nothing is known of a stream but its first tensor.
            first = list(itertools.islice(stream, 1))
            tensors, stream = [tensor for _, tensor in first], itertools.chain(first, stream)
            request = replace(request, stream=stream)
        if why := self.needs_file(tensors):
            say_why_files("vLLM", why)
            self._load_file(request)
            return
        pairs: Iterable[tuple[str, Tensor]]
        if stream is not None and self.streams_tensors:
            checked = fitting_stream(stream, checkpoint)
            # What is wrong with the first one is found before vLLM begins.
            first = list(itertools.islice(checked, 1))
            pairs, size = itertools.chain(first, checked), max([4, *(tensor.element_size() for _, tensor in first)])
            largest = size * max(map(math.prod, expected_shapes(checkpoint).values()), default=0)
        else:
            # vLLM keeps tensors until a layer is complete, and the memory of one may be used for the next.
            given = request.state_dict or {name: tensor.to("cpu", copy=True) for name, tensor in stream or ()}
            given = fitting(given, checkpoint, "state_dict" if stream is None else "weights")
            pairs = ((name, whole_tensor(tensor)) for name, tensor in given.items())
            largest = max((tensor.nbytes for tensor in given.values()), default=0)
        self._load(lambda: self._hand_over(pairs, largest), request)

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

    @hookimpl
    def health(self, request: HealthRequest) -> bool:
        return not (self._closed or self._broken)

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        self._closed = True
        try:
            self._end()
        finally:
            self.adapters.close()
        with warnings.catch_warnings():
            # vLLM's objects reference one another in cycles, and the threads of its sockets live until these are
            # collected. It offers no call that closes the context of its sockets.
            warnings.simplefilter("ignore", ResourceWarning)
            self.llm = None
            gc.collect()
            # Without multiprocessing, and with weights that were handed over, this process holds memory of the GPU.
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        return True

    @abstractmethod
    def _end(self) -> None:
        """Shut vLLM down, and what it runs on. Calls in flight fail."""

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
        if self.capabilities.without_weights:
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
