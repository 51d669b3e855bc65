"""`Server`: requests to the native ``/generate`` of an SGLang server, and what comes back as records.

Every row is a request of its own: it has its own seed, and fails alone.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from corelm.errors import CoreLMError
from corelm.spec import AbortRequest, Capabilities, GenerateRequest, GenerateResult, Ragged, ScoreRequest, ScoreResult
from corelm.support import HttpClient
from sglang_backend import answers, ending, sampling
from sglang_backend.answers import Expected, Row

#: Seconds for an answer to return what it has, once the server was told to end it.
_ABORT_GRACE = 10.0
#: Seconds for the server to take note of an abort.
_ABORT_NOTE = 5.0
#: Answers at once and waits for nothing but the server's own process.
ALIVE = "/model_info"


class Server:
    """Attributes:
    label: what the server calls the weights in force. Rows that name others are errors.
    """

    def __init__(self, client: HttpClient, tokenizer: Any, capabilities: Capabilities, label: str) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.capabilities = capabilities
        self.label = label
        self._labels = {label}
        self._rids: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def generate(self, request: GenerateRequest) -> GenerateResult:
        wanted = request.logprobs != "none"
        limits = self._answer_limits(request)
        seeds = [None] * len(limits) if request.seeds is None else request.seeds.tolist()
        asked = [self._parameters(request, limit, seed) for limit, seed in zip(limits, seeds, strict=True)]
        payloads = [
            answers.generate_payload(ids, parameters, wanted)
            for ids, parameters in zip(request.prompts.tolist(), asked, strict=True)
        ]
        entries = self._ask(payloads, request.request_ids, request.timeout)
        rows = [self._ended(answers.parse_answer(entry, self._expected, wanted), request) for entry in entries]
        return GenerateResult(
            ids=Ragged.from_list([row.ids for row in rows]),
            logprobs=Ragged.from_list([row.logprobs for row in rows], torch.float32) if wanted else None,
            finish_reasons=tuple(row.reason for row in rows),
            mode="processed" if request.logprobs == "processed" else "raw",
            temperature=request.sampling.temperature if request.logprobs == "processed" else 1.0,
            errors=tuple(row.error for row in rows),
        )

    def score(self, request: ScoreRequest) -> ScoreResult:
        sequences, starts = request.sequences.tolist(), request.score_from.tolist()
        payloads = [answers.score_payload(ids, start) for ids, start in zip(sequences, starts, strict=True)]
        entries = self._ask(payloads, request.request_ids, request.timeout)
        rows = [
            answers.parse_scores(entry, ids, start, self._expected)
            for entry, ids, start in zip(entries, sequences, starts, strict=True)
        ]
        lengths = request.sequences.lengths
        scored = [_at_the_end(row.logprobs, length) for row, length in zip(rows, lengths.tolist(), strict=True)]
        values = torch.tensor([value for row, _ in scored for value in row], dtype=torch.float32)
        mask = torch.tensor([here for _, row in scored for here in row], dtype=torch.bool)
        device = request.device or request.sequences.values.device
        return ScoreResult(
            logprobs=Ragged(values, lengths).to(device),
            scored=Ragged(mask, lengths).to(device),
            errors=tuple(row.error for row in rows),
        )

    def abort(self, request: AbortRequest) -> bool:
        """Answers in flight return what they have; requests that the server has not got yet are not sent."""
        with self._lock:
            rids = [rid for name in request.request_ids for rid in self._rids.get(name, ())]
        # A server that does not listen will see the connections close.
        with suppress(CoreLMError):
            for rid in rids:
                # The server matches by prefix; ours are all equally long.
                self.client.post("/abort_request", {"rid": rid}, timeout=_ABORT_NOTE, expect_json=False)
        self.client.abort(request.request_ids, grace=_ABORT_GRACE)
        return True

    def new_label(self, version: str) -> str:
        """A name that the server has for no other weights, so that rows of others can be told from theirs."""
        while version in self._labels:
            version += "'"
        self._labels.add(version)
        return version

    def health(self) -> bool:
        return self.client.answers(ALIVE)

    def close(self) -> None:
        self.client.close()

    # Helpers ---------------------------------------------------------------------------------------------------------

    @property
    def _expected(self) -> Expected:
        return Expected(self.label, self.capabilities.vocab_size)

    def _answer_limits(self, request: GenerateRequest) -> list[int]:
        limit, context = request.sampling.max_new_tokens, self.capabilities.max_context
        if limit is not None:
            return [limit] * len(request.prompts)
        assert context is not None
        return [context - length for length in request.prompts.lengths.tolist()]

    def _parameters(self, request: GenerateRequest, limit: int, seed: int | None) -> dict[str, Any]:
        return sampling.parameters(
            request.sampling,
            max_new_tokens=limit,
            seed=seed,
            stop_ids=request.stop_ids,
            eos_token_ids=self.capabilities.eos_token_ids or frozenset(),
            vocab_size=self.capabilities.vocab_size,
        )

    def _ended(self, row: Row, request: GenerateRequest) -> Row:
        """The answer up to what ends it, which the server does not always see."""
        end = ending.first_stop(row.ids, request.sampling, request.stop_ids, self.tokenizer)
        return row if end is None else Row(row.ids[:end], row.logprobs[:end], "stop")

    def _ask(self, payloads: Sequence[dict[str, Any]], names: Sequence[str], timeout: float | None) -> list[Any]:
        """The server's answer to every payload, or what became of it."""
        start = time.monotonic()
        entries = self._post(payloads, names, timeout)
        again = [row for row, entry in enumerate(entries) if answers.still_runs(entry)]
        if again:
            left = None if timeout is None else max(timeout - (time.monotonic() - start), 0.001)
            fresh = self._post([payloads[row] for row in again], [names[row] for row in again], left)
            for row, entry in zip(again, fresh, strict=True):
                entries[row] = entry
        answers.raise_if_none_was_served(entries)
        return entries

    def _post(self, payloads: Sequence[dict[str, Any]], names: Sequence[str], timeout: float | None) -> list[Any]:
        """Each under an id of its own at the server, by which `abort` finds it."""
        rids = [uuid.uuid4().hex for _ in names]
        sent = [{**payload, "rid": rid} for payload, rid in zip(payloads, rids, strict=True)]
        with self._known(names, rids):
            return self.client.post_each("/generate", sent, names=names, timeout=timeout)

    @contextmanager
    def _known(self, names: Sequence[str], rids: Sequence[str]) -> Iterator[None]:
        with self._lock:
            for name, rid in zip(names, rids, strict=True):
                self._rids.setdefault(name, set()).add(rid)
        try:
            yield
        finally:
            with self._lock:
                for name, rid in zip(names, rids, strict=True):
                    self._rids[name].discard(rid)
                    if not self._rids[name]:
                        del self._rids[name]


def _at_the_end(values: list[float], length: int) -> tuple[list[float], list[bool]]:
    """A row of `length` whose last positions are scored.

    >>> _at_the_end([-1.5], 3)
    ([0.0, 0.0, -1.5], [False, False, True])
    """
    before = length - len(values)
    return [0.0] * before + values, [False] * before + [True] * len(values)
