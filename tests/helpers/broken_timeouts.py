"""Plugins that declare `stops_at_timeout` and do not stop."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from corelm import hookimpl
from corelm.spec import GenerateRequest, GenerateResult
from corelm_testing.toy import ToyBackend


class NeverStops(ToyBackend):
    """Declares that it stops at a timeout, and works on to the end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.capabilities = replace(self.capabilities, stops_at_timeout=True)


class RaisesAndGoesOn(NeverStops):
    """Declares that it stops at a timeout. It raises in time, but the next call waits for what is left of the work."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.turn = threading.Lock()

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        answers: list[GenerateResult] = []

        def work() -> None:
            with self.turn:
                answers.append(ToyBackend.generate(self, request))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(request.timeout)
        if not answers:
            raise TimeoutError("too slow")
        return answers[0]
