"""`VLLMServer`: a vLLM server behind a URL, over its OpenAI-compatible routes. vLLM itself is not needed here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from corelm.errors import CapabilityError, CoreLMError, EngineError, InvalidRequestError
from corelm.spec import (
    Adapter,
    CloseRequest,
    Deadline,
    GenerateRequest,
    GenerateResult,
    RowAnswer,
    RowFailure,
    RowScores,
    ScoreRequest,
    ScoreResult,
    SleepRequest,
    StopStrings,
    WakeRequest,
    WeightUpdate,
    generate_result,
    hookimpl,
    score_result,
)
from corelm.validate import invalid
from corelm_engine_kit import (
    HttpClient,
    HttpEngine,
    HttpOptions,
    ModelHints,
    Payload,
    ProgressProbe,
    ReplyStreams,
    Streamed,
    WeightGroup,
    fitting,
    fitting_stream,
    local_checkpoint,
    weights_folder,
)
from vllm_backend import protocol_http as protocol
from vllm_backend.adapters import server_adapters
from vllm_backend.capabilities import at_a_time
from vllm_backend.capabilities_http import ServerInfo, read_server
from vllm_backend.probing import LOGPROBS_MODES, probe_server
from vllm_backend.weight_channel import ANSWER_TIMEOUT, WeightChannel, require_transfer

T = TypeVar("T")

#: Seconds that the server may take to acknowledge an abort. If it takes longer, the connections are closed instead.
ABORT_TIMEOUT = 10.0

#: What vLLM counts while it works: ``vllm/v1/metrics/loggers.py``. While it reads a long prompt in parts, only the
#: share of the cache in use grows.
_COUNTERS = (
    "vllm:generation_tokens_total{",
    "vllm:prompt_tokens_total{",
    "vllm:iteration_tokens_total_count{",
    "vllm:kv_cache_usage_perc{",
)


def counters(metrics: str) -> tuple[str, ...] | None:
    """Return the lines of ``/metrics`` that change while the engine works; None if the server does not count."""
    return tuple(line for line in metrics.splitlines() if line.startswith(_COUNTERS)) or None


#: While the server loads weights, its counters stand still: it need only be alive.
PROBE = ProgressProbe(rows=protocol.COMPLETIONS, page="/metrics", progress=counters, alive="/health")


class VLLMServer(HttpEngine):
    """One model of a server. Any number of threads may call at once; each row is one HTTP request.

    The client retries rows, so that a server which is restarted during a call still serves them.

    Attributes:
        checkpoint: the folder on this machine with the model's safetensors; None where they are not on this machine.
        channel: sends tensors to the server's workers; None if the server takes weights from a folder only.
    """

    requires_api = ">=1,<2"
    #: What `corelm conformance` needs to know to test it.
    conformance: ClassVar[Mapping[str, Any]] = {"engine_sampling": {"engine_kwargs": {"logit_bias": {"7": 20.0}}}}
    rows_path, id_field, health_path = protocol.COMPLETIONS, "request_id", "/health"
    info: ServerInfo

    def __init__(self, client: HttpClient, info: ServerInfo, group: WeightGroup | None = None) -> None:
        super().__init__(client, info)
        self.channel = None if group is None else WeightChannel(client, group)
        # Without the route, closing the connection aborts a request, and what it has generated so far is lost.
        self.ends_rows = "/abort_requests" in info.routes
        self._adapters = server_adapters(client, info, self.serves)
        self._initial_version: str | None = None
        self._loaded_version: str | None = None
        self._asleep = False

    @classmethod
    def connect(
        cls,
        base_url: str,
        hints: ModelHints,
        http: HttpOptions,
        logprobs_mode: str | None = None,
        weight_group: WeightGroup | str | None = None,
    ) -> VLLMServer:
        """Find out what the server at `base_url` serves and what it can do. For the arguments see `VLLMBackend.open`.

        Raises:
            InvalidRequestError: an argument is wrong, or one is missing that the server does not say.
            BackendTimeoutError: the server does not answer within ``open_timeout``.
            EngineError: no server answers, it is not vLLM, or its kind of log-probs cannot be found out.
        """
        group = WeightGroup.given(weight_group)
        if logprobs_mode is not None and logprobs_mode not in LOGPROBS_MODES:
            raise invalid("logprobs_mode", f"with base_url it is 'raw' or 'processed', got {logprobs_mode!r}")
        client = http.client(base_url, "VLLM_API_KEY", progress_probe=PROBE)
        with http.opening(client) as deadline:
            server = cls(client, read_server(client, hints, deadline), group)
            server.info = probe_server(server, LOGPROBS_MODES.get(logprobs_mode or ""), deadline)
            if group is not None:
                require_transfer(server.info.weight_transfer)
            # The weights that the server has now are those that it was opened with.
            server._initial_version = server._weight_version(deadline.left())
            return server

    @property
    def reasons(self) -> Mapping[str, str]:
        return self.info.reasons

    @property
    def checkpoint(self) -> Path | None:
        return local_checkpoint(self.info.model)

    # Rows ------------------------------------------------------------------------------------------------------------

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        payloads = protocol.generation_requests(request, self.info)
        stops = StopStrings.of_rows(request, self.tokenizer)

        def parse(row: int, reply: Any, aborted: bool) -> RowAnswer:
            return protocol.row_answer(reply, aborted, payloads[row], request, stops[row], self.info)

        streams = None
        if request.on_tokens is not None:
            streams = protocol.AnswerStreams(request, payloads, self.info, parse)
        rows, version = self._serve(request, dict(enumerate(payloads)), parse, streams)
        result = generate_result(request, list(rows.values()))
        return result if version is None else replace(result, weight_versions=(version,) * len(payloads))

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        payloads = protocol.scoring_requests(request, self.info)
        sequences, starts = request.sequences.tolist(), request.score_from.clamp_min(1).tolist()

        def parse(row: int, reply: Any, aborted: bool) -> RowScores | RowFailure:
            return protocol.row_scores(reply, payloads[row], sequences[row], starts[row], request, self.info)

        rows, version = self._serve(request, payloads, parse)
        result = score_result(request, rows)
        return result if version is None else replace(result, weight_versions=(version,) * len(request.sequences))

    def _serve(
        self,
        request: GenerateRequest | ScoreRequest,
        payloads: Mapping[int, Payload],
        parse: Callable[[int, Any, bool], T | RowFailure],
        streams: ReplyStreams | None = None,
    ) -> tuple[dict[int, T | RowFailure], str | None]:
        """Return what `map_rows` returns, and the server's weight version where it is not the backend's.

        Raises:
            EngineError: no row was served, because the server does not serve; or the weights have changed.
            TimeoutError: the time is over.
        """
        model, deadline = self._model(request.adapter), Deadline(request.timeout)
        payloads = {row: {**payload, "model": model} for row, payload in payloads.items()}
        before = self._weight_version(deadline.left())
        rows = self.map_rows(replace(request, timeout=deadline.left()), payloads, parse, streams)
        after = self._weight_version(deadline.left())
        with self.client.secrets.masking_errors():
            self._check_weight_versions(before, after)
        return rows, None if after in (self._initial_version, self._loaded_version) else after

    def post_rows(
        self, payloads: Sequence[Payload], names: Sequence[str], deadline: Deadline, streamed: Streamed | None = None
    ) -> list[Any]:
        """Post requests, each one alone where the server cannot score it next to others."""
        alone = self.info.scores_alone and any("prompt_logprobs" in payload for payload in payloads)
        entries: list[Any] = []
        for rows in at_a_time(len(payloads), alone=alone):
            entries += super().post_rows(payloads[rows], names[rows], deadline, streamed)
        return entries

    def is_reply_to(self, payload: Payload, reply: Any) -> bool:
        # What is no completion is left to the parser.
        if not isinstance(reply, dict) or "choices" not in reply:
            return True
        return bool(reply.get("id") == f"{protocol.ID_PREFIX}{payload['request_id']}")

    def end_rows(self, ids: Sequence[str]) -> None:
        named = [f"{protocol.ID_PREFIX}{each}-0" for each in ids]
        # An empty list would abort every request of the server.
        if named:
            self.client.post("/abort_requests", {"request_ids": named}, timeout=ABORT_TIMEOUT)

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        if self.channel is not None:
            self.channel.leave()
        return bool(super().close(request))

    def _model(self, adapter: Adapter) -> str:
        """Return the name of the model that answers requests with this adapter."""
        if adapter:
            return self._adapters.server_name(adapter)
        return self.info.name if adapter is None else self.info.base_name

    # Weights and memory ----------------------------------------------------------------------------------------------

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        """Load weights from a folder, or send tensors, once they fit the checkpoint of the server's model.

        Raises:
            InvalidRequestError: they cannot be read or do not fit. Nothing has changed.
            CapabilityError: tensors for a server that cannot be sent any. Nothing has changed.
            EngineError: they fit, but were not loaded; or a tensor of a stream did not fit.
        """
        if request.adapter is not None:
            with self.client.secrets.masking_errors():
                self._adapters.update(request)
        elif request.by_owner:
            with self._new_weights(request):
                # Their owner has changed them in the server. What was computed with the old ones is forgotten.
                pass
        elif request.path is not None:
            with weights_folder(request, self.checkpoint) as folder, self._new_weights(request):
                # The server must see the folder at the same path.
                path = {"weights_path": str(folder)}
                self.client.post("/collective_rpc", {"method": "reload_weights", "kwargs": path})
        else:
            self._send_tensors(request)
        return True

    def _send_tensors(self, request: WeightUpdate) -> None:
        """Send tensors to the server's workers, a state dict once all of them fit, a stream once the first one does."""
        if self.channel is None:
            raise CapabilityError(
                "a server loads weights from a folder that it can read: save the weights there and give the path; or "
                "open the backend with weight_group=, so that tensors are sent to the server's GPUs over NCCL",
                capability="update_weights",
            )
        checkpoint, stream = self.checkpoint, request.stream
        field = "state_dict" if stream is None else "weights"
        if checkpoint is None:
            raise invalid(
                field,
                "there is no checkpoint of the server's model on this machine to compare the names with; put "
                "it at the same path as on the server, or download it",
            )
        pairs: Iterable[tuple[str, Tensor]]
        if stream is None:
            given = fitting(request.state_dict or {}, checkpoint, field)
            pairs, some = given.items(), list(given.values())
        else:
            checked = fitting_stream(stream, checkpoint)
            first = list(itertools.islice(checked, 1))
            pairs, some = itertools.chain(first, checked), [tensor for _, tensor in first]
        with self.client.secrets.masking_errors():
            # A server that was restarted, or that another client has changed, has left the group.
            again = self._weight_version(ANSWER_TIMEOUT) != self._loaded_version
            self.channel.join(some, again=again)
        with self._new_weights(request):
            self.channel.send(pairs, reused=stream is not None)

    @contextmanager
    def _new_weights(self, request: WeightUpdate) -> Iterator[None]:
        """Have the ``with`` block load weights, then empty the prefix cache and give the weights their name."""
        with self.client.secrets.masking_errors(), self._paused("wait" if request.when == "drain" else "abort"):
            # If anything fails, the server's version stays different from this one, and every later call fails.
            self._loaded_version = request.version
            self._set_weight_version("being loaded")
            yield
            reply = self.client.post("/reset_prefix_cache", {}, retry=True)
            if reply != {"success": True}:
                raise EngineError(f"the server kept its prefix cache, which belongs to the old weights: {reply}")
            self._set_weight_version(request.version)

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        """Free the memory of the server's GPUs. Requests of other clients wait until it is awake."""
        self._asleep = True
        mode = "wait" if request.when == "drain" else "abort"
        try:
            self.client.post(f"/sleep?level={request.level}&mode={mode}", {}, retry=True)
        except InvalidRequestError:
            # It was refused, so the next update has to resume the server.
            self._asleep = False
            raise
        return True

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        """Take the memory again."""
        self.client.post("/wake_up?" + "&".join(f"tags={tag}" for tag in sorted(request.tags)), {})
        self._asleep = not request.last
        return True

    def _weight_version(self, timeout: float | None = None) -> str | None:
        """Return the server's name for its weights; None if it has no route for it."""
        if "/weight_info" not in self.info.routes:
            return None
        return str(self.client.get("/weight_info", timeout=timeout).get("weight_version"))

    def _check_weight_versions(self, before: str | None, after: str | None) -> None:
        if self._loaded_version is not None and after != self._loaded_version:
            raise EngineError(
                f"the server's weights are now called {after!r}, but {self._loaded_version!r} were loaded: the server "
                "was restarted, another client has loaded other weights, or loading failed; call update_weights again",
                usable=False,
            )
        if before != after:
            raise EngineError(
                f"another client loaded weights during the call ({before!r} → {after!r}), so it is not known which "
                "rows come from which; repeat the call",
                usable=True,
            )

    @contextmanager
    def _paused(self, mode: str) -> Iterator[None]:
        """Keep the server from running requests of any client, so that no answer is made with two sets of weights."""
        self.client.post(f"/pause?mode={mode}", {}, retry=True)
        try:
            yield
        except BaseException:
            # What went wrong is what the caller has to know. The next update resumes a server that does not answer now.
            with suppress(CoreLMError):
                self._resume(ANSWER_TIMEOUT)
            raise
        self._resume()

    def _resume(self, timeout: float | None = None) -> None:
        # A server without its KV cache has nothing to run requests with; waking it resumes them.
        if not self._asleep:
            self.client.post("/resume", {}, retry=True, timeout=timeout)

    def _set_weight_version(self, version: str) -> None:
        self.client.post("/update_weight_version", {"new_version": version}, retry=True)
