"""`Member` says how an engine of a fleet is opened; `OpenReplica` is one that is open."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from corelm import Backend
from corelm.application import Aborts, Call
from corelm.errors import CapabilityError, CoreLMError, EngineError, InvalidRequestError, StaleWeightsError, message
from corelm.spec import GenerateRequest, WeightUpdate
from corelm_engine_kit.joining import Result
from corelm_fleet.canary import Canary, Watch
from corelm_fleet.pending import Request
from corelm_fleet.probes import Probe, ProbeScores, Sampled

#: Seconds that an engine has to finish its calls when it is closed, and seconds after which it is ended by force.
_FINISH, _CLOSE = 2.0, 10.0
#: Seconds for which the canary is trusted after it has agreed.
_TRUST = 5.0


@dataclass(frozen=True, slots=True)
class Member:
    """How one engine of a fleet is opened, and opened again after it was lost.

    Attributes:
        name: its name, for people. No other member has it.
        open: opens the engine: returns what a plugin's ``open`` returns.
        end: ends an engine that `open` returned by force, although it does not reply; None if that cannot be done. It
            may be called while the engine is in a call, which then fails.
        ended: returns whether an engine that `open` returned has ended, so that it will not reply any more; None if
            that is not known.
    """

    name: str
    open: Callable[[], Any]
    end: Callable[[Any], object] | None = None
    ended: Callable[[Any], bool] | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """What the canary of a replica said, to compare other replicas with the same weights with; see `Watch`."""

    scores: ProbeScores | None
    sampled: Mapping[Probe, Sampled]


class _ReplicaCall(Call):
    """A call to one engine of a fleet, whose weights must be those of the fleet."""

    def __init__(self, replica: OpenReplica, request: Request) -> None:
        super().__init__("generate" if isinstance(request, GenerateRequest) else "score_logprobs", request)
        self._replica = replica

    def finish(self, result: Result) -> Result:
        engine = self._replica.backend.engine
        if engine.weights.state.label != self._replica.label:
            raise EngineError(
                f"{engine.name}: the weights were changed where they are, so they are not those of the fleet; use "
                "update_weights, or weights_changed, on the fleet",
                usable=False,
            )
        return result


class OpenReplica:
    """An open engine of a fleet, with its own turns, checks and canary. No method is called under the fleet's lock.

    Args:
        plugin: what ``member.open()`` returned.
        canary: how its canary compares.

    Attributes:
        label: the label of its weights.
        watch: its canary; None if nothing that the engine can do shows its weights.
    """

    def __init__(self, member: Member, plugin: Any, canary: Canary) -> None:
        if hasattr(plugin, "to_containers"):
            # Rows of several engines go into one container.
            what = f"{member.name} makes its own containers; open it without a fleet"
            raise CapabilityError(what, capability="to_containers")
        self._member, self._plugin = member, plugin
        self.backend = Backend.from_plugin(plugin, member.name)
        self.capabilities = self.backend.capabilities
        self._engine = self.backend.engine
        self._aborts = Aborts(self._engine.abort, member.name)
        self.label = self._engine.weight_version
        self._agreed_at, self._looking = -math.inf, threading.Lock()
        self.watch: Watch | None = None
        with suppress(CapabilityError):
            self._engine.listener = self.watch = Watch(self.backend, canary)

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    @property
    def closed(self) -> bool:
        return self._engine.closed

    def serve(self, request: Request, is_awaited: Callable[[], bool]) -> Result:
        """Return the checked result of a request. See `OpenEngine.call`."""
        can = self.capabilities
        seeded = can.per_answer_seeds and not can.seeds_are_costly
        if isinstance(request, GenerateRequest) and request.seeds is None and seeded:
            # Another engine of the fleet takes no seeds, or takes long with them.
            request = replace(request, seeds=torch.randint(2**63 - 1, (len(request.prompts),)))
        result: Result = self._engine.call(_ReplicaCall(self, request), caller_waits=is_awaited)
        return result

    def load(self, update: WeightUpdate) -> None:
        """Load new weights. Its canary compares them with ``update.expect``.

        Raises:
            InvalidRequestError: it has refused them and kept its own.
            CapabilityError: as above.
            CoreLMError: loading failed, or the canary disagrees.
        """
        if update.adapter is not None:
            # The base weights keep their label.
            self._engine.weights.update(update, update.version)
        elif update.by_owner:
            self.label = self.backend.weights_changed(update.version, update.expect)
        else:
            weights: Any = update.path if update.state_dict is None else update.state_dict
            self.label = self.backend.update_weights(weights, update.version, update.when, update.expect)

    def look(self, expected: Said | None) -> Said | None:
        """Have the canary ask the engine, and return what it said; None if it sleeps or nothing shows its weights.

        Args:
            expected: what another replica with the same weights said.

        Raises:
            StaleWeightsError: the canary disagrees.
            CoreLMError: the engine failed.
        """
        if self.watch is None or not self._engine.weights.answers:
            return None
        scores = expected.scores if expected is not None and self.capabilities.score else None
        self.watch.look(scores)
        if expected is not None and scores is None:
            self.watch.compare_sampled(expected.sampled)
        self.label = self._engine.weight_version
        return Said(self.watch.scores, self.watch.sampled)

    def changed(self) -> str:
        """Ask the canary of an engine that may have been started again without notice, as a server may be.

        Returns:
            How it differs from the engine that was opened; "" if it does not.

        Raises:
            CoreLMError: the engine failed, so that this is not known.
        """
        if self.watch is None or self._member.ended is not None or not self._engine.weights.answers:
            # The end of a process does not go unnoticed. An engine that sleeps is asked when it wakes.
            return ""
        with self._looking:
            if time.monotonic() - self._agreed_at < _TRUST:
                return ""
            try:
                self.watch.look()
            except EngineError as error:
                refused = isinstance(error.__cause__, (InvalidRequestError, CapabilityError))
                if refused or isinstance(error, StaleWeightsError):
                    return message(error)
                raise
            self._agreed_at = time.monotonic()
            return ""

    def health(self) -> bool:
        """Return whether the engine can serve."""
        try:
            return self._engine.health()
        except CoreLMError:
            return False

    @property
    def ended(self) -> bool:
        """Whether it is known that the engine will not reply any more."""
        return self._member.ended is not None and self._member.ended(self._plugin)

    def abort(self, names: tuple[str, ...], under_way: Callable[[], bool]) -> None:
        """End requests soon, on another thread, if the engine can. `under_way` returns whether their call goes on."""
        if self.capabilities.abort:
            self._aborts.add(names, under_way)

    def close(self, by_force: bool) -> None:
        """Close the engine within about ten seconds. A call in it is aborted, or ended by force where that can be done.

        An engine that does not reply is not asked first, but ended `by_force`.
        """
        end = self._member.end
        if by_force and end is not None:
            end(self._plugin)
        # It may wait for a call that does not end.
        asking = threading.Thread(target=self._ask_to_close, name=f"corelm-{self._member.name}-close", daemon=True)
        try:
            asking.start()
        except RuntimeError:
            # The system has no room for a thread.
            self._ask_to_close()
            return
        asking.join(_CLOSE)
        if asking.is_alive() and end is not None:
            end(self._plugin)
            asking.join(_CLOSE)

    def _ask_to_close(self) -> None:
        try:
            self._engine.close(_FINISH, abort=True)
        except CoreLMError:
            if self._member.end is not None:
                self._member.end(self._plugin)
