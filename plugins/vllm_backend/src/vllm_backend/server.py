"""`VLLMServer`: a vLLM server behind a URL, over its OpenAI-compatible routes. vLLM itself is not needed here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from corelm.errors import CoreLMError, EngineError, InvalidRequestError
from corelm.spec import (
    AbortRequest,
    Deadline,
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    ScoreResult,
    SleepRequest,
    WakeRequest,
    WeightUpdate,
    opening_within,
)
from corelm_engine_kit import ABORTED, InFlight, Streamed, WeightGroup, local_checkpoint, raise_if_none_was_served
from vllm_backend import protocol_http as protocol
from vllm_backend import replies, sampling_masks
from vllm_backend.adapters import ServerAdapters
from vllm_backend.capabilities_http import ModelHints, ServerInfo, read_server
from vllm_backend.lanes import Lanes, Turn, lane_of, together
from vllm_backend.probing import LogprobsMode, probe_server
from vllm_backend.protocol_http import Payload
from vllm_backend.signs import SIGN
from vllm_backend.weight_channel import ANSWER_TIMEOUT, WeightChannel, require_transfer

if TYPE_CHECKING:
    from corelm_engine_kit import HttpClient

#: Seconds that the server may take to acknowledge an abort. If it takes longer, the connections are closed instead.
ABORT_TIMEOUT = 10.0
#: Seconds that the server may take to say that it is healthy.
HEALTH_TIMEOUT = 5.0
#: Seconds that reading and probing a server may take. The first request that a server gets may make it compile.
OPEN_TIMEOUT = 300.0


class VLLMServer:
    """One model of a server. Any number of threads may call at once; each row is one HTTP request.

    The client retries rows, so that a server which is restarted during a call still serves them.

    Attributes:
        capabilities: what the backend declares.
        tokenizer: the model's tokenizer.
        checkpoint: the folder on this machine with the model's safetensors; None where they are not on this machine.
        channel: sends tensors to the server's workers; None if the server takes weights from a folder only.
    """

    takes_state_dict: Literal[False] = False

    def __init__(
        self, client: HttpClient, info: ServerInfo, deadline: Deadline, group: WeightGroup | None = None
    ) -> None:
        self.capabilities = info.capabilities
        self.tokenizer, self.reasons = info.tokenizer, info.reasons
        self.channel = None if group is None else WeightChannel(client, group)
        self._client = client
        self._info = info
        self._in_flight = InFlight()
        # Which of vLLM's runners a server has is not known. Calls of other clients cannot be kept apart.
        self._lanes = Lanes()
        self._adapters = ServerAdapters(client, info, self.health)
        self._initial_version = self._weight_version(deadline.left())
        self._loaded_version: str | None = None
        self._asleep = False

    @classmethod
    def connect(
        cls,
        base_url: str,
        *,
        model: str | None = None,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        max_context: int | None = None,
        logprobs_mode: LogprobsMode | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        connect_timeout: float = 10.0,
        read_timeout: float = 600.0,
        max_in_flight: int | None = None,
        max_retries: int = 5,
        open_timeout: float = OPEN_TIMEOUT,
        weight_group: WeightGroup | str | None = None,
        trust_remote_code: bool = False,
    ) -> VLLMServer:
        """Find out what the server at `base_url` serves and what it can do.

        Args:
            base_url: ``http://host:port``, with or without ``/v1`` at the end.
            model: the name of one of the server's models; None if it has only one.
            tokenizer: a tokenizer, or the folder or hub name of one; None for the model's own, if its files can be read
                on this machine.
            vocab_size: None to read the model's configuration, if it can be read on this machine.
            max_context: None for the server's limit; it may be lower.
            logprobs_mode: None to find out with a few short requests.
            api_key: None for the environment variable VLLM_API_KEY, if it is set.
            headers: sent with every request; see `corelm_engine_kit.HttpClient`.
            connect_timeout: see `corelm_engine_kit.HttpClient`.
            read_timeout: see `corelm_engine_kit.HttpClient`.
            max_in_flight: see `corelm_engine_kit.HttpClient`.
            max_retries: see `corelm_engine_kit.HttpClient`.
            open_timeout: seconds for all requests that find out what the server can do.
            weight_group: where the server's workers join this process, to be sent tensors over NCCL; None to load
                weights from a folder only.
            trust_remote_code: allow Python code that comes with the tokenizer, or with the model's configuration. Only
                from a folder or repository that `tokenizer` or `model` names: a server must not choose which code runs.

        Raises:
            InvalidRequestError: an argument is wrong, or one is missing that the server does not say.
            BackendTimeoutError: the server does not answer within `open_timeout`.
            EngineError: no server answers, it is not vLLM, or its kind of log-probs cannot be found out.
        """
        from corelm_engine_kit import HttpClient

        group = WeightGroup.given(weight_group)
        if logprobs_mode not in (None, "raw", "processed"):
            raise InvalidRequestError(
                f"logprobs_mode: with base_url it is 'raw' or 'processed', got {logprobs_mode!r}", field="logprobs_mode"
            )
        client = HttpClient(
            base_url.rstrip("/").removesuffix("/v1") if isinstance(base_url, str) else base_url,
            api_key,
            key_variable="VLLM_API_KEY",
            headers=headers,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            sign=SIGN,
            max_in_flight=max_in_flight,
            max_retries=max_retries,
        )
        hints = ModelHints(
            name=model,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_context=max_context,
            trust_remote_code=trust_remote_code,
        )
        try:
            with opening_within(open_timeout, client.base_url) as deadline, client.secrets.masking_errors():
                info = probe_server(client, read_server(client, hints, deadline), logprobs_mode, deadline)
                if group is not None:
                    require_transfer(info.weight_transfer)
                return cls(client, info, deadline, group)
        except BaseException:
            client.close()
            raise

    @property
    def checkpoint(self) -> Path | None:
        return local_checkpoint(self._info.model)

    def generate(self, request: GenerateRequest) -> GenerateResult:
        model, deadline = self._adapters.model(request.adapter), Deadline(request.timeout)
        payloads = protocol.generation_requests(request, self._info)
        streams = streamed = None
        # The ids that tokens were drawn from come with whole answers only.
        if request.on_tokens is not None and not request.return_support:
            streams, streamed = protocol.row_streams(request, payloads, self._info)
        answered = protocol.counted(request.on_answer)
        sent = [sampling_masks.request_of(each) for each in payloads] if request.return_support else payloads
        with self._lanes.entered(lane_of(request), request.timeout, request.request_ids) as turn:
            entries, version = self._post_left(turn, sent, request.request_ids, model, streamed, answered)
        if request.return_support:
            entries = [sampling_masks.as_completion(entry) for entry in entries]
            rows, unscored = sampling_masks.scores_wanted(request, entries, deadline.left())
            if rows:
                sampling_masks.put_masses(entries, rows, self.score(unscored), version)
        result = self._client.secrets.masked_result(
            protocol.generation_result(request, payloads, entries, self._info, streams)
        )
        return result if version is None else replace(result, weight_versions=(version,) * len(payloads))

    def score(self, request: ScoreRequest) -> ScoreResult:
        model = self._adapters.model(request.adapter)
        payloads = protocol.scoring_requests(request)
        names = [request.request_ids[number] for number in payloads]
        with self._lanes.entered(lane_of(request), request.timeout, names) as turn:
            entries, version = self._post_left(turn, list(payloads.values()), names, model)
        result = self._client.secrets.masked_result(protocol.scoring_result(request, payloads, entries, self._info))
        return result if version is None else replace(result, weight_versions=(version,) * len(request.sequences))

    def reload(self, folder: Path, request: WeightUpdate) -> None:
        """Load the safetensors in `folder`, which the server must see at the same path."""
        with self._new_weights(request):
            self._client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})

    def reload_tensors(
        self, pairs: Iterable[tuple[str, Tensor]], some: Iterable[Tensor], request: WeightUpdate
    ) -> None:
        """Send tensors to the server's workers, which load them. Errors are those of `WeightChannel`.

        Args:
            pairs: names and tensors as in the checkpoint.
            some: tensors of `pairs` that can be looked at before.
        """
        assert self.channel is not None
        with self._client.secrets.masking_errors():
            # A server that was restarted, or that another client has changed, has left the group.
            again = self._weight_version(ANSWER_TIMEOUT) != self._loaded_version
            self.channel.join(some, again=again)
        with self._new_weights(request):
            self.channel.send(pairs, reused=request.stream is not None)

    def load_adapter(self, request: WeightUpdate) -> None:
        """Load, replace or unload an adapter. Errors are those of `ServerAdapters.update`."""
        with self._client.secrets.masking_errors():
            self._adapters.update(request, local_checkpoint(self._info.files))

    def forget(self, request: WeightUpdate) -> None:
        """Forget what was computed with the old weights: their owner has changed them in the server."""
        with self._new_weights(request):
            pass

    @contextmanager
    def _new_weights(self, request: WeightUpdate) -> Iterator[None]:
        """Have the ``with`` block load weights, then empty the prefix cache and give the weights their name."""
        with self._client.secrets.masking_errors(), self._paused("wait" if request.when == "drain" else "abort"):
            # If anything fails, the server's version stays different from this one, and every later call fails.
            self._loaded_version = request.version
            self._set_weight_version("being loaded")
            yield
            reply = self._client.post("/reset_prefix_cache", {}, retry=True)
            if reply != {"success": True}:
                raise EngineError(f"the server kept its prefix cache, which belongs to the old weights: {reply}")
            self._set_weight_version(request.version)

    def sleep(self, request: SleepRequest) -> None:
        """Free the memory of the server's GPUs. Requests of other clients wait until it is awake."""
        self._asleep = True
        mode = "wait" if request.when == "drain" else "abort"
        try:
            self._client.post(f"/sleep?level={request.level}&mode={mode}", {}, retry=True)
        except InvalidRequestError:
            # It was refused, so the next update has to resume the server.
            self._asleep = False
            raise

    def wake(self, request: WakeRequest) -> None:
        """Take the memory again."""
        self._client.post("/wake_up?" + "&".join(f"tags={tag}" for tag in sorted(request.tags)), {})
        self._asleep = not request.last

    def health(self, timeout: float | None = None) -> bool:
        """Return whether the server answers within `timeout` seconds, and within five."""
        return self._client.answers("/health", min(HEALTH_TIMEOUT, timeout or HEALTH_TIMEOUT))

    def abort(self, request: AbortRequest) -> bool:
        self._lanes.abort(request.request_ids)
        # Looked up once: a request of the same name that begins later is another one.
        ids = self._in_flight.ids(request.request_ids)
        named = [f"{protocol.ID_PREFIX}{request_id}-0" for request_id in ids]
        if self.capabilities.return_support:
            named += [f"{sampling_masks.ID_PREFIX}{request_id}" for request_id in ids]

        def tell() -> None:
            self._client.post("/abort_requests", {"request_ids": named}, timeout=ABORT_TIMEOUT)

        # Without the route, closing the connection aborts a request, and what it has generated so far is lost. An empty
        # list of ids would abort every request of the server.
        has_route = "/abort_requests" in self._info.routes
        self._client.abort(ids, tell=tell if named and has_route else None)
        return True

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self._client.close()

    # Requests --------------------------------------------------------------------------------------------------------

    def _post_left(
        self,
        turn: Turn,
        payloads: Sequence[Payload],
        names: Sequence[str],
        model: str,
        streamed: Streamed | None = None,
        answered: Callable[[int, Any], None] | None = None,
    ) -> tuple[list[Any], str | None]:
        """Do what `_post` does for the rows that were not aborted while the call waited for its turn."""
        rows = [row for row, name in enumerate(names) if name not in turn.aborted]
        if len(rows) == len(names):
            return self._post(payloads, names, turn.timeout, model, streamed, answered)
        if streamed is not None:
            streamed = replace(streamed, tell=protocol.renumbered(streamed.tell, rows))
        if answered is not None:
            answered = protocol.renumbered(answered, rows)
        some, their_names = [payloads[row] for row in rows], [names[row] for row in rows]
        found, version = self._post(some, their_names, turn.timeout, model, streamed, answered)
        entries: list[Any] = [ABORTED] * len(names)
        for row, entry in zip(rows, found, strict=True):
            entries[row] = entry
        return entries, version

    def _post(
        self,
        payloads: Sequence[Payload],
        names: Sequence[str],
        timeout: float | None,
        model: str,
        streamed: Streamed | None = None,
        answered: Callable[[int, Any], None] | None = None,
    ) -> tuple[list[Any], str | None]:
        """Return an entry for every payload, and the server's weight version where it is not the backend's.

        Raises:
            EngineError: no row was served, because the server does not serve; or the weights have changed.
            TimeoutError: the time is over.
        """
        if not payloads:
            return [], None
        deadline = Deadline(timeout)
        before = self._weight_version(deadline.left())
        if self.capabilities.return_support:
            payloads = [sampling_masks.accepted(payload, self.capabilities.vocab_size) for payload in payloads]
        with self._in_flight.named(names) as ids:
            requests = [
                {**payload, "model": model, "request_id": request_id}
                for payload, request_id in zip(payloads, ids, strict=True)
            ]
            alone = self._info.scores_alone and any("prompt_logprobs" in payload for payload in payloads)
            entries: list[Any] = []
            for rows in together(len(ids), alone):
                entries += self._client.post_each(
                    sampling_masks.ROUTE if sampling_masks.is_for_route(payloads[0]) else protocol.COMPLETIONS,
                    requests[rows],
                    names=ids[rows],
                    is_reply_to=protocol.is_reply_to,
                    timeout=deadline.left(),
                    streamed=streamed,
                    answered=answered,
                    decode=replies.decoder(payloads),
                )
        raise_if_none_was_served(entries, lambda: self.health(deadline.left()))
        after = self._weight_version(deadline.left())
        with self._client.secrets.masking_errors():
            self._check_weight_versions(before, after)
        return entries, None if after in (self._initial_version, self._loaded_version) else after

    # Weights ---------------------------------------------------------------------------------------------------------

    def _weight_version(self, timeout: float | None = None) -> str | None:
        """Return the server's name for its weights; None if it has no route for it."""
        if "/weight_info" not in self._info.routes:
            return None
        return str(self._client.get("/weight_info", timeout=timeout).get("weight_version"))

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
        self._client.post(f"/pause?mode={mode}", {}, retry=True)
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
            self._client.post("/resume", {}, retry=True, timeout=timeout)

    def _set_weight_version(self, version: str) -> None:
        self._client.post("/update_weight_version", {"new_version": version}, retry=True)
