"""`SGLangServer`: posts requests to a server behind a URL, launched or not, and keeps track of those in flight.

`protocol` builds the payloads and parses the replies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from corelm.errors import EngineError
from corelm.spec import (
    AbortRequest,
    Capabilities,
    Deadline,
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    ScoreResult,
    SleepRequest,
    WakeRequest,
    WeightUpdate,
)
from corelm_engine_kit import (
    Expected,
    HttpClient,
    InFlight,
    Streamed,
    WeightGroup,
    local_checkpoint,
    raise_if_none_was_served,
)
from sglang_backend import events, handover, protocol
from sglang_backend.adapters import Adapters
from sglang_backend.capabilities import HEALTH_GENERATE, MODEL_INFO, ServerInfo, checkpoint_of
from sglang_backend.pausing import answers_held
from sglang_backend.probing import ServerProbe
from sglang_backend.protocol import Payload
from sglang_backend.replies import decode
from sglang_backend.weight_channel import WeightChannel
from sglang_backend.weight_history import WeightHistory

#: Seconds that the server may take to acknowledge an abort. If it takes longer, the connections are closed instead.
_ABORT_TIMEOUT = 10.0
#: Seconds that the server may take to say that it is healthy.
_HEALTH_TIMEOUT = 5.0

#: Seconds for the first answers of a server that was launched without weights. They may make it compile.
_CONFIRM_TIMEOUT = 300.0
#: What the server calls the parts that wake. Its CUDA graphs are of use only with the cache.
_MEMORY = {"weights": ("weights",), "kv_cache": ("kv_cache", "cuda_graph")}


class SGLangServer:
    """A running SGLang server. Any number of threads may call at once; the server batches their rows.

    Args:
        client: the connection to the server. `close` closes it.
        info: what is known about the server.
        takes_state_dict: the server reads files of this machine, so a state dict can be handed over in one.
        dummy: what the first weights have to fit, if the server was launched without weights.
        weight_group: where the server joins this process to be sent tensors; None if it is sent none.
        group_timeout: seconds that the server may take to join, or to receive tensors.

    Attributes:
        info: likewise; `reload` replaces it.
        takes_state_dict: likewise.
    """

    def __init__(
        self,
        client: HttpClient,
        info: ServerInfo,
        *,
        takes_state_dict: bool,
        dummy: Expected | None = None,
        weight_group: WeightGroup | None = None,
        group_timeout: float = 600.0,
    ) -> None:
        self._client = client
        self.info = info
        self.takes_state_dict = takes_state_dict
        self._dummy = dummy
        # Whether the generation modes are to be tried on the first weights, and whether these have come.
        self._modes_assumed, self._modes_untried = dummy is not None, False
        self._asleep = False
        self._history = WeightHistory(info.weight_label)
        self._in_flight = InFlight()
        self._channel = None
        if weight_group is not None:
            self._channel = WeightChannel(
                weight_group, ranks=info.ranks, on_gpu=info.on_gpu, tell=self._tell, timeout=group_timeout
            )
        self._adapters = Adapters(client, info, reads_files_here=takes_state_dict)

    @property
    def capabilities(self) -> Capabilities:
        return self.info.capabilities

    @property
    def tokenizer(self) -> Any:
        return self.info.tokenizer

    @property
    def is_sent_tensors(self) -> bool:
        """Whether the server is sent the tensors of new weights, as `broadcast` does."""
        return self._channel is not None

    @property
    def checkpoint(self) -> Expected | None:
        """What new weights have to fit: the folder on this machine with the model's safetensors; None without one.

        Names and shapes from the model's configuration do if tensors are sent: the server may be on another machine.

        Raises:
            CapabilityError: tensors are sent, and neither the folder nor the configuration can be read here.
        """
        if self._dummy is not None:
            return self._dummy
        if self._channel is None:
            return local_checkpoint(self.info.model)
        return checkpoint_of(
            self.info.model, trust_remote_code=False, option="weight_group", capability="update_weights"
        )

    def generate(self, request: GenerateRequest) -> GenerateResult:
        weights = self._history.of_call(request)
        payloads = self._with_adapter(request, protocol.generation_requests(request, self.info))
        streams = streamed = None
        if request.on_tokens is not None:
            streams, streamed = events.row_streams(request, self.info, weights)
        answered = protocol.counted(request.on_answer)
        entries = self._post_all(payloads, request.request_ids, request.timeout, streamed, answered)
        result = protocol.generation_result(request, entries, self.info, streams, weights)
        return self._client.secrets.masked_result(result)

    def score(self, request: ScoreRequest) -> ScoreResult:
        payloads = self._with_adapter(request, protocol.scoring_requests(request))
        entries = self._post_all(payloads, request.request_ids, request.timeout)
        return self._client.secrets.masked_result(protocol.scoring_result(request, entries, self.info))

    def load_adapter(self, request: WeightUpdate) -> None:
        """Load, replace or unload an adapter. Errors are those of `Adapters.update`."""
        self._adapters.update(request, local_checkpoint(self.info.model))

    def reload(self, folder: Path, request: WeightUpdate) -> None:
        """Load the safetensors in `folder`, which the server must see at the same path.

        Raises:
            EngineError: the server did not load them.
        """
        label = self._history.new_label(request.version)
        payload = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
        if self._dummy is not None:
            # Otherwise the server would fill the model with random numbers again.
            payload["load_format"] = "auto"
        with answers_held(self._client, self._history, label, request):
            # Not retried: the first attempt may have succeeded and only its reply been lost.
            reply = self._client.post("/update_weights_from_disk", payload)
            if not isinstance(reply, dict) or reply.get("success") is not True:
                raise EngineError(self._client.secrets.masked(f"the server did not load the weights: {reply}"))
            self._has(label, request)

    def reload_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], request: WeightUpdate, bucket_size: int = handover.BUCKET
    ) -> None:
        """Load tensors that `needs_file` accepts, with their names in the checkpoint, one bucket after the other.

        Args:
            bucket_size: bytes of tensors after which a bucket is loaded.

        Raises:
            EngineError: the server did not load them. Its weights may be partly new.
        """

        def hand_over(bucket: handover.Pairs) -> None:
            # One for each reader, because each of them releases its own.
            handles = [handover.handle(bucket) for _ in range(self.info.ranks)]
            self._tell("/update_weights_from_tensor", {"serialized_named_tensors": handles, "flush_cache": False})

        self._load(handover.buckets(tensors, bucket_size), hand_over, request)

    def broadcast(
        self, tensors: Iterable[tuple[str, Tensor]], request: WeightUpdate, bucket_size: int = handover.BUCKET
    ) -> None:
        """Send tensors to a server that `is_sent_tensors`, with their names in the checkpoint.

        Args:
            bucket_size: bytes of tensors after which a bucket is sent and loaded.

        Raises:
            CoreLMError: the errors of `WeightChannel.send`. The server's weights may be partly new.
        """
        assert self._channel is not None
        page = self._client.get(MODEL_INFO)
        if not isinstance(page, dict) or str(page.get("weight_version")) != self.info.weight_label:
            # It may have been restarted: its processes have left the group.
            self._channel.leave()
        self._load(handover.buckets(tensors, bucket_size), self._channel.send, request)

    def needs_file(self, tensors: Iterable[Tensor]) -> str:
        """Return why these tensors have to go through a file; empty if they can be handed to the server."""
        return self.info.needs_file or handover.obstacle(tensors)

    def weights_came(self) -> None:
        """Find out on the first weights whether the server returns the log-probs that it was expected to return.

        If it has no cache to answer with, it is asked when it is awake.

        Raises:
            EngineError: it returns others.
        """
        self._modes_assumed, self._modes_untried = False, self._modes_assumed or self._modes_untried
        if self._asleep or not self._modes_untried:
            return
        expected = self.capabilities.generation_modes
        with self._client.secrets.masking_errors():
            found = ServerProbe(self._client, self.info, Deadline(_CONFIRM_TIMEOUT)).generation_modes()
        self._modes_untried = False
        if found and found != expected:
            raise EngineError(
                f"the server returns {'/'.join(found)} log-probs and not {'/'.join(expected)} ones, as its environment "
                "says; open the backend on weights, and not with load_format='dummy'",
                usable=False,
            )

    def forget(self, request: WeightUpdate) -> None:
        """Forget what was computed with the old weights: their owner has changed them in the server.

        Raises:
            EngineError: the server kept its cache, for example because it works on requests of other clients.
        """
        label = self._history.new_label(request.version)
        with answers_held(self._client, self._history, label, request):
            self._forget(label, request)

    def sleep(self, request: SleepRequest) -> None:
        """Free the memory of the server's GPUs: weights, cache and CUDA graphs.

        Raises:
            InvalidRequestError: the server works on requests of other clients. Nothing has changed.
            EngineError: the server failed.
        """
        # A server that is not idle would end itself; this refuses instead.
        self._client.post("/flush_cache", {}, expect_json=False)
        self._asleep = True
        self._client.post("/release_memory_occupation", {}, expect_json=False)

    def wake(self, request: WakeRequest) -> None:
        """Take the memory again."""
        tags = [name for tag in sorted(request.tags) for name in _MEMORY[tag]]
        self._client.post("/resume_memory_occupation", {"tags": tags}, expect_json=False)
        self._asleep = not request.last
        if request.last and self._modes_untried:
            self.weights_came()

    def abort(self, request: AbortRequest) -> bool:
        """End requests. Those that the server runs return what they have; those not sent yet are not sent."""
        # Looked up once: a request of the same name that begins later is another one.
        rids = self._in_flight.ids(request.request_ids)

        def tell() -> None:
            running = set(self._in_flight.ids(request.request_ids))
            for rid in running.intersection(rids):
                # The server aborts every request whose id starts with `rid`. Ours are equally long, so that is one.
                self._client.post("/abort_request", {"rid": rid}, timeout=_ABORT_TIMEOUT, expect_json=False)

        self._client.abort(rids, tell=tell)
        return True

    def health(self, timeout: float | None = None) -> bool:
        """Return whether the server's own process answers within `timeout` seconds, and within five."""
        return self._answers(MODEL_INFO, timeout)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.leave()
        self._client.close()
        self._adapters.close()

    # Helpers ---------------------------------------------------------------------------------------------------------

    def _with_adapter(self, request: GenerateRequest | ScoreRequest, payloads: Sequence[Payload]) -> list[Payload]:
        named = self._adapters.fields(request.adapter)
        return [{**payload, **named} for payload in payloads]

    def _post_all(
        self,
        payloads: Sequence[Payload],
        names: Sequence[str],
        timeout: float | None,
        streamed: Streamed | None = None,
        answered: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Return the entry of every payload; see `HttpClient.post_each`.

        Raises:
            CoreLMError: no request was served, because the server does not serve.
            TimeoutError: the server took longer than `timeout` seconds.
        """
        deadline = Deadline(timeout)
        entries = self._post_each(payloads, names, deadline, streamed, answered)
        duplicates = [row for row, entry in enumerate(entries) if protocol.is_duplicate(entry)]
        if duplicates:
            if streamed is not None:
                tell = streamed.tell
                streamed = replace(streamed, tell=lambda number, reply: tell(duplicates[number], reply))
            repeated = self._post_each(
                [payloads[row] for row in duplicates], [names[row] for row in duplicates], deadline, streamed
            )
            for row, entry in zip(duplicates, repeated, strict=True):
                entries[row] = entry
        raise_if_none_was_served(entries, lambda: self._serves(deadline.left()))
        return entries

    def _serves(self, timeout: float | None) -> bool:
        """Return whether the server's scheduler returns anything within `timeout` seconds, and within five."""
        return self._answers(HEALTH_GENERATE, timeout)

    def _answers(self, path: str, timeout: float | None) -> bool:
        return self._client.answers(path, min(_HEALTH_TIMEOUT, timeout or _HEALTH_TIMEOUT))

    def _post_each(
        self,
        payloads: Sequence[Payload],
        names: Sequence[str],
        deadline: Deadline,
        streamed: Streamed | None = None,
        answered: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Post every payload under a new id of the server's, by which `abort` finds it."""
        with self._in_flight.named(names) as rids:
            identified = [{**payload, "rid": rid} for payload, rid in zip(payloads, rids, strict=True)]
            return self._client.post_each(
                protocol.GENERATE,
                identified,
                names=rids,
                is_reply_to=protocol.is_reply_to,
                timeout=deadline.left(),
                streamed=streamed,
                answered=answered,
                decode=decode,
            )

    def _load(
        self,
        buckets: Iterable[handover.Pairs],
        load: Callable[[handover.Pairs], None],
        request: WeightUpdate,
    ) -> None:
        """Have the server load all buckets as one update."""
        label = self._history.new_label(request.version)
        with answers_held(self._client, self._history, label, request):
            self._tell("/begin_weight_update", {})
            try:
                for bucket in buckets:
                    load(bucket)
            finally:
                self._tell("/end_weight_update", {})
            self._forget(label, request)

    def _forget(self, label: str, request: WeightUpdate) -> None:
        """Empty the cache, and give the weights their name."""
        self._client.post("/flush_cache", {}, expect_json=False)
        # By default this would abort the requests of all clients.
        self._tell("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        self._has(label, request)

    def _has(self, label: str, request: WeightUpdate) -> None:
        """Take note that the server has the weights of `request`."""
        self._history.note(label, request)
        self.info = replace(self.info, weight_label=label)

    def _tell(self, path: str, payload: dict[str, Any], timeout: float | None = None) -> None:
        """Post what changes the weights. Not retried: the first attempt may have succeeded and only its reply be lost.

        Raises:
            EngineError: the server did not do it.
            BackendTimeoutError: it took longer than `timeout` seconds.
        """
        reply = self._client.post(path, payload, timeout=timeout)
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise EngineError(self._client.secrets.masked(f"the server refused {path}: {reply}"))
