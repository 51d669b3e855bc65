"""Plugins that sleep, with one realistic defect each, which the conformance kit must find."""

from __future__ import annotations

from corelm import hookimpl
from corelm.spec.records import SleepRequest, WakeRequest
from helpers.capable_plugins import Sleeper


class WeightsLostInSleep(Sleeper):
    """It wakes with other weights than it fell asleep with."""

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        if self.kept is not None:
            self.kept = self.kept.flip(0)
        return super().wake(request)


class WakesAsBefore(Sleeper):
    """Waking the cache brings back the weights that it fell asleep with, whatever was loaded since then."""

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        self.before = self.model.table.detach().clone()
        return super().sleep(request)

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        super().wake(request)
        if request.last:
            self.model.table.data = self.before
        return True


class CopyOutlivesUpdate(Sleeper):
    """Waking the cache brings back the weights that level 1 kept, whatever was loaded since then."""

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        super().sleep(request)
        self.copy = None if self.kept is None else self.kept.clone()
        return True

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        super().wake(request)
        if request.last and self.copy is not None:
            self.model.table.data = self.copy
        return True
