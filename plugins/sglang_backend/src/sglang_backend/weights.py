"""New weights for a server: compared with the model's checkpoint first, then loaded.

SGLang loads the tensors whose names it knows and silently keeps its own for the rest. A tensor of another shape ends
the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from corelm.errors import CapabilityError, CoreLMError, EngineError
from corelm.spec import Deadline, WeightUpdate, whole_tensor
from corelm.validate import invalid
from corelm_engine_kit import (
    Expected,
    HttpClient,
    WeightGroup,
    buckets,
    configured_shapes,
    fitting,
    local_checkpoint,
    say_why_files,
    weights_folder,
)
from sglang_backend import handover
from sglang_backend.capabilities import MODEL_INFO, ServerInfo
from sglang_backend.probing import ServerProbe
from sglang_backend.weight_channel import WeightChannel
from sglang_backend.weight_history import WeightHistory

Pairs = Iterable[tuple[str, Tensor]]

#: Seconds for the first answers of a server that was launched without weights. They may make it compile.
_CONFIRM_TIMEOUT = 300.0


def tell(
    client: HttpClient, path: str, payload: Mapping[str, Any], timeout: float | None = None, failure: str = ""
) -> None:
    """Post what changes a server. Not retried: the first attempt may have succeeded and only its reply been lost.

    Args:
        failure: what it has not done if it fails, for the message.

    Raises:
        EngineError: the server did not do it.
        BackendTimeoutError: it took longer than `timeout` seconds.
    """
    reply = client.post(path, payload, timeout=timeout)
    if not isinstance(reply, dict) or reply.get("success") is not True:
        raise EngineError(client.secrets.masked(f"the server {failure or f'refused {path}'}: {reply}"))


class ServerWeights:
    """The weights of a server. Every reply names those that it was made with, or its row is an error.

    Args:
        takes_state_dict: the server reads files of this machine, so a state dict can be handed over in one.
        dummy: what the first weights have to fit, if the server was launched without weights.
        timeout: seconds that the server may take to join, or to receive tensors.

    Attributes:
        history: the labels that the weights have had.
        asleep: whether the server's memory is free.
    """

    def __init__(
        self, engine: Any, *, takes_state_dict: bool, dummy: Expected | None, group: WeightGroup | None, timeout: float
    ) -> None:
        self._engine, self._client, self._dummy = engine, engine.client, dummy
        self.takes_state_dict, self.asleep = takes_state_dict, False
        self.history = WeightHistory(self._info.weight_label)
        # Without weights, the generation modes were only assumed.
        self._has_weights, self._modes_untried = dummy is None, dummy is not None
        self._tell: Callable[..., None] = partial(tell, self._client)
        self._channel = None
        if group is not None:
            ranks, on_gpu = self._info.ranks, self._info.on_gpu
            self._channel = WeightChannel(group, ranks=ranks, on_gpu=on_gpu, tell=self._tell, timeout=timeout)

    @property
    def _info(self) -> ServerInfo:
        return cast("ServerInfo", self._engine.info)

    def load(self, request: WeightUpdate) -> None:
        """Load the weights of `request`. If their owner has changed or loaded them, only drop what is cached.

        Raises:
            InvalidRequestError: the weights cannot be read, do not fit, or cannot be compared. Nothing has changed.
            CapabilityError: tensors for a server that this backend did not launch, without ``weight_group``; or for one
                whose model is not known here.
            EngineError: the server did not load them, or kept its cache, because it works on other clients' requests.
        """
        if request.by_owner:
            with self._new_weights(request):
                pass
        else:
            self._load(request, self._checkpoint(request))
        self._has_weights = True
        self.try_modes()

    def try_modes(self) -> None:
        """Find out on the first weights whether the server returns the log-probs that it was expected to return.

        If it has no cache to answer with, it is asked when it is awake.
        """
        if self.asleep or not (self._has_weights and self._modes_untried):
            return
        expected = self._info.capabilities.generation_modes
        with self._client.secrets.masking_errors():
            found = ServerProbe(self._engine, Deadline(_CONFIRM_TIMEOUT)).generation_modes()
        self._modes_untried = False
        if found and found != expected:
            raise EngineError(
                f"the server returns {'/'.join(found)} log-probs and not {'/'.join(expected)} ones, as its environment "
                "says; open the backend on weights, and not with load_format='dummy'",
                usable=False,
            )

    def close(self) -> None:
        if self._channel is not None:
            self._channel.leave()

    # Ways to load ----------------------------------------------------------------------------------------------------

    def _checkpoint(self, request: WeightUpdate) -> Expected:
        """Return what new weights have to fit: the folder on this machine with the model's safetensors.

        Names and shapes from the model's configuration do if tensors are sent: the server may be on another machine.
        """
        if request.path is None and not self.takes_state_dict and self._channel is None:
            raise CapabilityError(
                "to send tensors to a server behind a URL, open the backend with weight_group='HOST', the host by "
                "which the server reaches this process; or save them where the server can read them, and pass that "
                "path",
                capability="update_weights",
            )
        if found := self._dummy or local_checkpoint(self._info.model):
            return found
        if self._channel is not None:
            return configured_shapes(self._info.model, False, option="weight_group", capability="update_weights")
        field = next((each for each in ("path", "state_dict") if getattr(request, each) is not None), "weights")
        raise invalid(
            field,
            f"the checkpoint of the server's model {self._info.model!r} is not on this machine, so new weights cannot "
            "be compared with it, and could end the server; open the backend on a machine that has the checkpoint",
        )

    def _load(self, request: WeightUpdate, checkpoint: Expected) -> None:
        """Hand a state dict to the server in memory if it takes it; else write it, or a stream, to a folder.

        A stream is written, because a server that got half of one would have half of its weights. A server on another
        machine is sent what was written.
        """
        if request.state_dict is not None:
            given = fitting(request.state_dict, checkpoint)
            if self._channel is not None:
                self.broadcast(((name, whole_tensor(tensor)) for name, tensor in given.items()), request)
                return
            why = self._info.needs_file or handover.obstacle(given.values())
            if not why:
                self.reload_tensors(_own(given), request)
                return
            say_why_files("SGLang", why)
        with weights_folder(request, checkpoint) as folder:
            if self._channel is not None and request.path is None:
                self.broadcast(_saved(folder), request)
                return
            # The server must see the folder at the same path.
            payload = {"model_path": str(folder), "flush_cache": True}
            if self._dummy is not None:
                # Otherwise the server would fill the model with random numbers again.
                payload["load_format"] = "auto"
            with self._new_weights(request, named=True) as label:
                payload["weight_version"] = label
                self._tell("/update_weights_from_disk", payload, failure="did not load the weights")

    def reload_tensors(self, tensors: Pairs, request: WeightUpdate, bucket_size: int = handover.BUCKET) -> None:
        """Hand tensors with their names in the checkpoint to a server of this machine, one bucket after the other.

        `handover.obstacle` has to accept them. If this fails, the server's weights may be partly new.
        """

        def hand_over(bucket: handover.Pairs) -> None:
            # One for each reader, because each of them releases its own.
            handles = [handover.handle(bucket) for _ in range(self._info.ranks)]
            self._tell("/update_weights_from_tensor", {"serialized_named_tensors": handles, "flush_cache": False})

        self._load_buckets(tensors, bucket_size, hand_over, request)

    def broadcast(self, tensors: Pairs, request: WeightUpdate, bucket_size: int = handover.BUCKET) -> None:
        """Send tensors with their names in the checkpoint to a server on another machine. See `reload_tensors`."""
        assert self._channel is not None
        page = self._client.get(MODEL_INFO)
        if not isinstance(page, dict) or str(page.get("weight_version")) != self._info.weight_label:
            # It may have been restarted: its processes have left the group.
            self._channel.leave()
        self._load_buckets(tensors, bucket_size, self._channel.send, request)

    def _load_buckets(
        self, tensors: Pairs, size: int, load: Callable[[handover.Pairs], None], request: WeightUpdate
    ) -> None:
        """Have the server load all tensors as one update, so many bytes of them at a time."""
        whole = ((name, tensor.detach().contiguous()) for name, tensor in tensors)
        with self._new_weights(request):
            self._tell("/begin_weight_update", {})
            try:
                for bucket in buckets(whole, size):
                    load(bucket)
            finally:
                self._tell("/end_weight_update", {})

    @contextmanager
    def _new_weights(self, request: WeightUpdate, *, named: bool = False) -> Iterator[str]:
        """Yield a label, have the block change the weights, empty the cache, and give the weights that label.

        Answers in flight that are to go on with the new weights are held meanwhile. SGLang takes them off its batch
        after the token that it works on, and computes their keys and values again. If that fails, the weights may be
        partly new, so they get their label all the same.

        Args:
            named: whether the block empties the cache and names the weights itself.

        Raises:
            EngineError: the server did not stop, and nothing has changed; or it does not go on.
        """
        label, in_flight = self.history.new_label(request.version), request.when == "now"
        if in_flight:
            self._client.post("/pause_generation", {"mode": "retract"}, expect_json=False)
        try:
            yield label
            if not named:
                self._client.post("/flush_cache", {}, expect_json=False)
                self._name(label)
            self.history.note(label, request)
            self._engine.info = replace(self._info, weight_label=label)
        except BaseException:
            if in_flight:
                try:
                    self._name(label)
                    self.history.note(label, request)
                except CoreLMError:
                    self.history.lose_track()
            raise
        finally:
            if in_flight:
                self._go_on()

    def _go_on(self) -> None:
        # All clients of the server wait meanwhile.
        for left in (2, 1, 0):
            try:
                self._client.post("/continue_generation", {}, expect_json=False)
                return
            except CoreLMError as error:
                if not left:
                    why = f"the server was paused for new weights and does not go on: {error}"
                    advice = "post /continue_generation to it, or restart it"
                    raise EngineError(f"{why}; {advice}", usable=False) from error

    def _name(self, label: str) -> None:
        # By default this would abort the requests of all clients.
        self._tell("/update_weight_version", {"new_version": label, "abort_all_requests": False})


def _saved(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that were written to `folder`, one at a time."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)


def _own(given: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, gathered if they are sharded. Those on the CPU are copied: a caller's own stay where they are."""
    for name, tensor in given.items():
        whole = whole_tensor(tensor)
        yield name, whole if whole.is_cuda else whole.clone()
