"""`HttpEngine`: what plugins for servers behind a URL share. A plugin adds the bodies of requests and reads replies.

Importing this module does not import httpx2: an engine that can also run in this process needs it only for a URL.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from corelm.errors import CoreLMError
from corelm.spec import (
    AbortRequest,
    Capabilities,
    CloseRequest,
    Deadline,
    GenerateRequest,
    GenerateResult,
    HealthRequest,
    RowAnswer,
    RowFailure,
    ScoreRequest,
    StopStrings,
    generate_result,
    hookimpl,
    opening_within,
)
from corelm_engine_kit.ending import answer_limits
from corelm_engine_kit.http_errors import ABORTED, TransientError
from corelm_engine_kit.http_events import Streamed
from corelm_engine_kit.in_flight import InFlight
from corelm_engine_kit.row_checks import checked_answer, raise_if_none_was_served, row_outcome
from corelm_engine_kit.row_streams import ReplyStreams

if TYPE_CHECKING:
    from corelm_engine_kit.http import Entry, HttpClient
    from corelm_engine_kit.http_watch import ProgressProbe

T = TypeVar("T")

#: The body of a request.
Payload = dict[str, Any]

#: Seconds that a server may take to say that it is healthy.
HEALTH_TIMEOUT = 5.0


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """How to reach a server: the options that every plugin for servers has.

    Attributes:
        api_key: sent as a bearer token; None for an environment variable that the plugin names.
        headers: sent with every request. No message repeats their values.
        connect_timeout: seconds to make a connection.
        read_timeout: seconds without an answer or progress after which the server counts as hanging.
        max_in_flight: HTTP requests at a time, over all threads. Others wait here, which is logged once. None is 4,096,
            or fewer if this process may not open as many connections (``ulimit -n``).
        max_retries: how often a request is sent again after a failure that may pass.
        open_timeout: seconds for all requests that find out what the server can do. The first request that a server
            gets may make it load or compile a model.
    """

    api_key: str | None = None
    headers: Mapping[str, str] | None = None
    connect_timeout: float = 10.0
    read_timeout: float = 600.0
    max_in_flight: int | None = None
    max_retries: int = 5
    open_timeout: float = 300.0

    def client(
        self,
        base_url: Any,
        key_variable: str,
        *,
        progress_probe: ProgressProbe | None = None,
        ended: Callable[[], str] | None = None,
    ) -> HttpClient:
        """Return a client of the server at `base_url`, with or without ``/v1`` at its end.

        Args:
            base_url: the server's address.
            key_variable: the environment variable that holds the key if there is no `api_key`.
            progress_probe: see `HttpClient`.
            ended: see `HttpClient`.

        Raises:
            InvalidRequestError: an option cannot be used; `field` names it.
        """
        from corelm_engine_kit.http import HttpClient

        url = base_url.rstrip("/").removesuffix("/v1") if isinstance(base_url, str) else base_url
        options = {name: value for name, value in vars(self).items() if name != "open_timeout"}
        return HttpClient(url, key_variable=key_variable, progress_probe=progress_probe, ended=ended, **options)

    @contextmanager
    def opening(self, client: HttpClient) -> Iterator[Deadline]:
        """Yield the deadline of finding out what a server can do.

        If the block raises, the client is closed. The errors repeat no secrets.

        Raises:
            BackendTimeoutError: `open_timeout` has passed.
        """
        try:
            with opening_within(self.open_timeout, client.base_url) as deadline, client.secrets.masking_errors():
                yield deadline
        except BaseException:
            client.close()
            raise


def takes_http_options(function: Callable[..., T]) -> Callable[..., T]:
    """Add the fields of `HttpOptions` to the options of a plugin's ``open``, which gets them together as `http`.

    The signature of the decorated function lists them, so that core can check options and suggest names.
    """
    added = inspect.signature(HttpOptions).parameters

    @functools.wraps(function)
    def collecting(cls: Any, model: Any = None, **options: Any) -> T:
        http = HttpOptions(**{name: options.pop(name) for name in added.keys() & options.keys()})
        return function(cls, model, http=http, **options)

    own = inspect.signature(function)
    listed = [new for each in own.parameters.values() for new in (added.values() if each.name == "http" else [each])]
    collecting.__signature__ = own.replace(parameters=listed)  # type: ignore[attr-defined]
    return collecting


class HttpEngine:
    """A model of a server behind a URL. Any number of threads may call at once.

    Each row is one HTTP request and fails alone. A plugin derives a class, gives it the attributes below that its
    server needs, and builds and parses what `map_rows` posts.

    Args:
        client: the connection to the server. `close` closes it.
        info: what is known about the server; it has `capabilities` and a `tokenizer`.

    Attributes:
        rows_path: where rows are posted.
        id_field: the field that gives a request its id; "" if the protocol has none.
        health_path: the page that answers while the server is healthy.
        ends_rows: whether the server can be told to end requests; see `end_rows`.
    """

    rows_path: ClassVar[str]
    id_field: ClassVar[str] = ""
    health_path: str
    ends_rows: bool = False

    def __init__(self, client: HttpClient, info: Any) -> None:
        self.client = client
        self.info = info
        self.__in_flight = InFlight()

    @property
    def capabilities(self) -> Capabilities:
        capabilities: Capabilities = self.info.capabilities
        return capabilities

    @property
    def tokenizer(self) -> Any:
        return self.info.tokenizer

    # What servers do in different ways -------------------------------------------------------------------------------

    def is_reply_to(self, payload: Payload, reply: Any) -> bool:
        """Return whether a reply names the request that it answers; True for a protocol in which none does."""
        return True

    def serves(self, timeout: float | None = None) -> bool:
        """Return whether the server works on rows, as it shows within `timeout` seconds, and within five."""
        return self.answers(self.health_path, timeout)

    def answers(self, path: str, timeout: float | None = None) -> bool:
        """Return whether a page answers within `timeout` seconds, and within five."""
        return self.client.answers(path, min(HEALTH_TIMEOUT, timeout or HEALTH_TIMEOUT))

    def end_rows(self, ids: Sequence[str]) -> None:
        """Tell a server that `ends_rows` to end the requests with these ids. It returns what it has of their answers.

        Their connections close if this fails.
        """
        raise NotImplementedError

    # Rows ------------------------------------------------------------------------------------------------------------

    def map_rows(
        self,
        request: GenerateRequest | ScoreRequest,
        payloads: Mapping[int, Payload] | Mapping[int, Payload | RowFailure],
        parse: Callable[[int, Any, bool], T | RowFailure],
        streams: ReplyStreams | None = None,
    ) -> dict[int, T | RowFailure]:
        """Post a request for each row and return what became of it, in the order of `payloads`.

        Args:
            request: the call.
            payloads: by row number, what to post, or why nothing can be posted.
            parse: ``parse(row, reply, aborted)`` returns a row's answer; see `row_outcome`.
            streams: read the replies, which come as events. They know the answer of a row that is aborted.

        Raises:
            CoreLMError: no row was served, because the server does not serve.
            TimeoutError: the time is over.
        """
        deadline = Deadline(request.timeout)
        sent = {row: each for row, each in payloads.items() if not isinstance(each, RowFailure)}
        rows = list(sent)
        streamed = None
        if streams is not None:
            tell = streams.take
            streamed = Streamed(streams.joined, lambda number, reply: tell(rows[number], reply))
        names = [request.request_ids[row] for row in rows]
        entries = self.post_rows(list(sent.values()), names, deadline, streamed=streamed)
        raise_if_none_was_served(entries, lambda: self.serves(deadline.left()))
        replies = dict(zip(rows, entries, strict=True))
        return {
            row: each if isinstance(each, RowFailure) else self.__outcome(row, replies[row], parse, streams)
            for row, each in payloads.items()
        }

    def answer_rows(
        self,
        request: GenerateRequest,
        payloads: Mapping[int, Payload] | Mapping[int, Payload | RowFailure],
        read: Callable[[Any], RowAnswer | RowFailure],
    ) -> GenerateResult:
        """Post a request for each row and return the answers, checked and cut by `checked_answer`.

        Args:
            request: the call.
            payloads: by row number, for every row, what to post, or why nothing can be posted.
            read: returns the answer in a reply as the server gives it: ids, log-probs, and ``stop`` or ``length``. If
                the reply holds none, it returns a `RowFailure` or raises a `RowError`, which fails this row alone.

        Raises:
            ValueError: `payloads` lacks a row, or has one that the request lacks.
            CoreLMError: those of `map_rows`.
            TimeoutError: the time is over.
        """
        rows = range(len(request.prompts))
        if payloads.keys() != {*rows}:
            raise ValueError(f"expected a payload for each of {len(rows)} rows, got those of the rows {[*payloads]}")
        limits = answer_limits(request, self.capabilities.max_context).tolist()
        stops, size = StopStrings.of_rows(request, self.tokenizer), self.capabilities.vocab_size

        def parse(row: int, reply: Any, aborted: bool) -> RowAnswer | RowFailure:
            told = read(reply)
            if isinstance(told, RowFailure):
                return told
            return checked_answer(told, request, limit=limits[row], stops=stops[row], vocab_size=size, aborted=aborted)

        found = self.map_rows(request, payloads, parse)
        return generate_result(request, [found[row] for row in rows])

    def __outcome(
        self, row: int, entry: Entry, parse: Callable[[int, Any, bool], T | RowFailure], streams: ReplyStreams | None
    ) -> T | RowFailure:
        if entry is ABORTED and streams is not None:
            # What was reported of its other ids may be wrong, which is an error of this row alone.
            told: Callable[[int], Any] = streams.aborted
            outcome = row_outcome(row, lambda number, _: told(number))
        else:
            outcome = row_outcome(entry, functools.partial(parse, row))
        if isinstance(outcome, RowFailure):
            # It may repeat a part of a reply.
            return replace(outcome, why=self.client.secrets.masked(outcome.why))
        return outcome

    def post_rows(
        self, payloads: Sequence[Payload], names: Sequence[str], deadline: Deadline, streamed: Streamed | None = None
    ) -> list[Entry]:
        """Return an entry for each payload, which is posted under a new id; see `HttpClient.post_each`.

        Args:
            payloads: what to post.
            names: the caller's name for each of them, by which `abort` finds it.
            deadline: the end of the call.
            streamed: see `HttpClient.post_each`.
        """
        if not payloads:
            return []
        with self.__in_flight.named(names) as ids:
            if self.id_field:
                payloads = [{**each, self.id_field: own} for each, own in zip(payloads, ids, strict=True)]
            return self.client.post_each(
                self.rows_path,
                payloads,
                names=ids,
                is_reply_to=self.is_reply_to,
                timeout=deadline.left(),
                streamed=streamed,
            )

    def try_rows(
        self,
        payloads: Sequence[Payload],
        deadline: Deadline,
        refused: Callable[[CoreLMError], bool] = lambda error: False,
    ) -> list[Any]:
        """Return the reply to each payload, to find out by trying what the server does.

        Args:
            payloads: what to post.
            deadline: the end of opening.
            refused: whether an error tells how the server takes the request. It is returned then.

        Raises:
            CoreLMError: another error of the server.
        """
        entries = self.post_rows(payloads, ["probe"] * len(payloads), deadline)
        for entry in entries:
            if isinstance(entry, CoreLMError) and not refused(entry):
                raise entry.final() if isinstance(entry, TransientError) else entry
        return entries

    # Hooks -----------------------------------------------------------------------------------------------------------

    @hookimpl
    def health(self, request: HealthRequest) -> bool:
        return self.answers(self.health_path)

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        # Looked up once: a request of the same name that begins later is another one.
        ids = self.__in_flight.ids(request.request_ids)

        def tell() -> None:
            self.end_rows([each for each in self.__in_flight.ids(request.request_ids) if each in ids])

        self.client.abort(ids, tell=tell if self.ends_rows else None)
        return True

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        self.client.close()
        return True
