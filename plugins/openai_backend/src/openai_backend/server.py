"""`OpenAIServer`: posts the requests of a call to a server behind a URL, and keeps track of those in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from corelm.spec import AbortRequest, Capabilities, Deadline, GenerateRequest, GenerateResult, ScoreRequest, ScoreResult
from corelm_engine_kit import HttpClient, InFlight, raise_if_none_was_served
from openai_backend import protocol
from openai_backend.server_info import ServerInfo

#: Seconds that the server may take to say that it is healthy.
_HEALTH_TIMEOUT = 5.0


class OpenAIServer:
    """One model of a server. Any number of threads may call at once; each row is one HTTP request.

    Args:
        client: the connection to the server. `close` closes it.
        info: what is known about the server.
    """

    def __init__(self, client: HttpClient, info: ServerInfo) -> None:
        self.info = info
        self._client = client
        self._in_flight = InFlight()

    @property
    def capabilities(self) -> Capabilities:
        return self.info.capabilities

    def generate(self, request: GenerateRequest) -> GenerateResult:
        payloads = protocol.generation_requests(request, self.info)
        rows = list(payloads)
        names = [request.request_ids[row] for row in rows]
        answered = protocol.counted(request.on_answer, rows)
        entries = self._post(list(payloads.values()), names, request.timeout, answered)
        return self._client.secrets.masked_result(protocol.generation_result(request, payloads, entries, self.info))

    def score(self, request: ScoreRequest) -> ScoreResult:
        payloads = protocol.scoring_requests(request, self.info)
        names = [request.request_ids[row] for row in payloads]
        entries = self._post(list(payloads.values()), names, request.timeout)
        return self._client.secrets.masked_result(protocol.scoring_result(request, payloads, entries, self.info))

    def abort(self, request: AbortRequest) -> bool:
        """End requests by closing their connections. The protocol has no other way, so no tokens are left of them."""
        self._client.abort(self._in_flight.ids(request.request_ids))
        return True

    def health(self, timeout: float | None = None) -> bool:
        """Return whether the server answers within `timeout` seconds, and within five."""
        return self._client.answers(self.info.health, min(_HEALTH_TIMEOUT, timeout or _HEALTH_TIMEOUT))

    def close(self) -> None:
        self._client.close()

    def _post(
        self,
        payloads: Sequence[protocol.Payload],
        names: Sequence[str],
        timeout: float | None,
        answered: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Return an entry for every payload; see `HttpClient.post_each`.

        Raises:
            CoreLMError: no row was served, because the server does not serve.
            TimeoutError: the time is over.
        """
        if not payloads:
            return []
        deadline = Deadline(timeout)
        with self._in_flight.named(names) as ids:
            entries = self._client.post_each(
                protocol.COMPLETIONS,
                payloads,
                names=ids,
                # The protocol has no field by which a client names its request. `protocol` checks what the reply says.
                is_reply_to=lambda payload, reply: True,
                timeout=deadline.left(),
                answered=answered,
            )
        raise_if_none_was_served(entries, lambda: self.health(deadline.left()))
        return entries
