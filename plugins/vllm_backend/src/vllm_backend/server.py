"""`Server`: a vLLM server behind a URL, over its OpenAI-compatible routes. Needs no vLLM here."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from corelm.errors import BackendTimeoutError, CapabilityError, CoreLMError, EngineError, InvalidRequestError
from corelm.spec import (
    AbortRequest,
    Capabilities,
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    ScoreResult,
    WeightUpdate,
)
from vllm_backend import completions, probes, weights
from vllm_backend.completions import NEUTRAL, Payload, only_choice
from vllm_backend.outcomes import Unserved
from vllm_backend.sampling import HONOURED
from vllm_backend.served import Served, find

if TYPE_CHECKING:
    from corelm.support import HttpClient

#: The server's own name of a sampling parameter, where it is another than core's.
FIELDS = {"min_new_tokens": "min_tokens"}
#: The routes that new weights need. A server has them in its development mode only.
DEVELOPMENT = frozenset(
    {"/collective_rpc", "/pause", "/reset_prefix_cache", "/resume", "/update_weight_version", "/weight_info"}
)
#: Seconds that requests may still take to answer once the server was told to end them, and that telling it may take.
GRACE, TELLING = 1.0, 5.0


class Server:
    """One model of a server. Any number of threads may call at once, one HTTP request a row.

    Rows are retried by the client, so that a server which is restarted meanwhile still serves them.
    """

    def __init__(self, client: HttpClient, served: Served, mode: Literal["raw", "processed"], seeds: bool) -> None:
        self.tokenizer = served.tokenizer
        self.capabilities = Capabilities(
            vocab_size=served.vocab_size,
            max_context=served.max_context,
            eos_token_ids=served.eos_token_ids,
            sampling={name: span for name, span in HONOURED.items() if _takes(served, name)},
            generation_modes=frozenset({mode}),
            score=served.takes("prompt_logprobs", "logprob_token_ids"),
            per_answer_seeds=seeds,
            concurrent_calls=True,
            update_weights=served.routes >= DEVELOPMENT,
            abort=True,
        )
        self._client = client
        self._served = served
        # Other clients of the server may choose the same names for their requests.
        self._prefix = uuid.uuid4().hex
        self._first_version = self._version()
        self._loaded: str | None = None

    @classmethod
    def connect(
        cls,
        base_url: str,
        *,
        model: str | None = None,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        max_context: int | None = None,
        logprobs_mode: Literal["raw", "processed"] | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        connect_timeout: float = 10.0,
        read_timeout: float = 600.0,
        max_in_flight: int = 128,
        max_retries: int = 5,
        trust_remote_code: bool = False,
    ) -> Server:
        """Find out what the server at `base_url` serves and does.

        Args:
            base_url: ``http://host:port``, with or without a ``/v1`` at its end.
            model: which of the server's models; None if it has one.
            tokenizer, vocab_size: None to read them where the server says that its model is, if that can be read here.
            max_context: None for the server's own limit; less is fine.
            logprobs_mode: None to find out by a few short requests.
            api_key: None for the environment's VLLM_API_KEY, if it is set.
            headers, connect_timeout, read_timeout, max_in_flight, max_retries: see `corelm.http.HttpClient`.
            trust_remote_code: for the model's configuration and tokenizer, when they are read.

        Raises:
            InvalidRequestError: something that has to be given, or cannot be as it is.
            EngineError: no server, no vLLM, or one whose log-probs cannot be made out.
        """
        from corelm.support import HttpClient

        if logprobs_mode not in (None, "raw", "processed"):
            raise InvalidRequestError(
                f"logprobs_mode: of a server it is 'raw' or 'processed', got {logprobs_mode!r}", field="logprobs_mode"
            )
        client = HttpClient(
            base_url.rstrip("/").removesuffix("/v1") if isinstance(base_url, str) else base_url,
            api_key,
            key_variable="VLLM_API_KEY",
            headers=headers,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            max_in_flight=max_in_flight,
            max_retries=max_retries,
        )
        try:
            served = find(client, model, tokenizer, vocab_size, max_context, trust_remote_code)
            mode, seeds = _probed(client, served, logprobs_mode)
            return cls(client, served, mode, seeds)
        except BaseException:
            client.close()
            raise

    def generate(self, request: GenerateRequest) -> GenerateResult:
        payloads = completions.generation_payloads(request, self._served)
        outcomes, version = self._ask(payloads, request.request_ids, request.timeout)
        batch = completions.answers(request, payloads, outcomes, self.tokenizer)
        return batch if version is None else replace(batch, weight_versions=(version,) * len(payloads))

    def score(self, request: ScoreRequest) -> ScoreResult:
        payloads = completions.scoring_payloads(request)
        names = [request.request_ids[number] for number in payloads]
        outcomes, version = self._ask(list(payloads.values()), names, request.timeout)
        batch = completions.scores(request, payloads, dict(zip(payloads, outcomes, strict=True)))
        return batch if version is None else replace(batch, weight_versions=(version,) * len(request.sequences))

    def update_weights(self, request: WeightUpdate) -> bool:
        """Load the safetensors in a folder, which the server must see under the same name."""
        if request.path is None:
            raise CapabilityError(
                "a server loads weights from a folder that it can read; save them and give the path",
                capability="update_weights",
            )
        with _fitting(request, Path(self._served.root)) as folder, self._paused("wait" if request.drain else "abort"):
            # If this fails half way, no version is the one in force, and every later call says so.
            self._loaded = request.version
            self._call_weights("being loaded")
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self._client.post("/collective_rpc", reload)
            done = self._client.post("/reset_prefix_cache", {}, retry=True)
            if done != {"success": True}:
                raise EngineError(f"the server kept its prefix cache, which belongs to the old weights: {done}")
            self._call_weights(request.version)
        return True

    def health(self) -> bool:
        return self._client.answers("/health")

    def abort(self, request: AbortRequest) -> bool:
        names = request.request_ids
        told = "/abort_requests" in self._served.routes and self._served.takes("request_id")
        # A list of none would end all there are.
        if names and told:
            with suppress(CoreLMError):
                self._client.post(
                    "/abort_requests", {"request_ids": [f"cmpl-{self._id(name)}-0" for name in names]}, timeout=TELLING
                )
        # Without that route a connection that closes tells the server, and what the answers had is lost.
        self._client.abort(names, grace=GRACE if told else 0.0)
        return True

    def close(self) -> None:
        self._client.close()

    # Requests --------------------------------------------------------------------------------------------------------

    def _ask(
        self, payloads: Sequence[Payload], names: Sequence[str], timeout: float | None
    ) -> tuple[list[Unserved | Any], str | None]:
        """The choice of every row, or why it has none; and the weights' version if it is not the backend's.

        Raises:
            EngineError: no row was served, and not because each was refused; or the weights are not what they were.
            BackendTimeoutError: the time is over.
        """
        if not payloads:
            return [], None
        left = _countdown(timeout)
        before = self._version(left())
        named = [
            {**p, "model": self._served.name, "request_id": self._id(n)} for p, n in zip(payloads, names, strict=True)
        ]
        entries = self._client.post_each("/v1/completions", named, names=names, timeout=left())
        after = self._version(left())
        self._same_weights(before, after)
        failed = [entry for entry in entries if isinstance(entry, CoreLMError)]
        if len(failed) == len(entries):
            for error in failed:
                if not isinstance(error, InvalidRequestError):
                    raise error
        return [_outcome(entry) for entry in entries], None if after in (self._first_version, self._loaded) else after

    def _id(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    # Weights ---------------------------------------------------------------------------------------------------------

    def _version(self, timeout: float | None = None) -> str | None:
        """What the server calls its weights; None if it does not."""
        if "/weight_info" not in self._served.routes:
            return None
        return str(self._client.get("/weight_info", timeout=timeout).get("weight_version"))

    def _same_weights(self, before: str | None, after: str | None) -> None:
        if self._loaded is not None and after != self._loaded:
            raise EngineError(
                f"the server's weights are called {after!r} and not {self._loaded!r}, as when they were loaded: it was "
                "restarted, or somebody else has loaded others, or loading failed; call update_weights again",
                usable=False,
            )
        if before != after:
            raise EngineError(
                f"somebody has loaded other weights meanwhile ({before!r} → {after!r}), so it is not known which rows "
                "come from which; ask again",
                usable=True,
            )

    @contextmanager
    def _paused(self, mode: str) -> Iterator[None]:
        """No request of any client runs meanwhile: none shall be made of two weights."""
        self._client.post(f"/pause?mode={mode}", {}, retry=True)
        try:
            yield
        finally:
            self._client.post("/resume", {}, retry=True)

    def _call_weights(self, version: str) -> None:
        self._client.post("/update_weight_version", {"new_version": version}, retry=True)


@contextmanager
def _fitting(request: WeightUpdate, checkpoint: Path) -> Iterator[Path]:
    """The folder of the new weights, compared with the model's own checkpoint if that can be read here."""
    assert request.path is not None
    if checkpoint.is_dir():
        with weights.fitting(request, checkpoint) as folder:
            yield folder
        return
    if not any(request.path.glob("*.safetensors")):
        raise InvalidRequestError(
            f"path: expected a folder with .safetensors files, and {request.path} is none", field="path"
        )
    yield request.path.resolve()


def _outcome(entry: Any) -> Unserved | Any:
    from corelm.support import ABORTED

    if entry is ABORTED:
        return Unserved("aborted", aborted=True)
    return Unserved(str(entry)) if isinstance(entry, CoreLMError) else only_choice(entry)


def _takes(served: Served, parameter: str) -> bool:
    if parameter == "engine_kwargs":
        # What a server knows it can take. One that does not say would ignore the rest in silence.
        return served.fields is not None
    return served.takes(FIELDS.get(parameter, parameter))


def _probed(
    client: HttpClient, served: Served, mode: Literal["raw", "processed"] | None
) -> tuple[Literal["raw", "processed"], bool]:
    prompt = served.tokenizer(["The"], add_special_tokens=False)["input_ids"][0]

    def ask(requests: list[dict[str, Any]]) -> list[Any]:
        payloads = [{**NEUTRAL, **request, "model": served.name} for request in requests]
        entries = client.post_each("/v1/completions", payloads, names=["probe"] * len(payloads), timeout=None)
        for entry in entries:
            if isinstance(entry, CoreLMError):
                raise entry
        return [only_choice(entry) for entry in entries]

    try:
        return mode or probes.logprobs_mode(ask, prompt), probes.honours_seeds(ask, prompt)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"{client.base_url} is no vLLM server, or too old: its completions lack what they were asked for "
            f"({type(error).__name__}: {error})",
            usable=True,
        ) from error


def _countdown(timeout: float | None) -> Callable[[], float | None]:
    """What is left of the time, whenever it is called."""
    if timeout is None:
        return lambda: None
    end = time.monotonic() + timeout

    def left() -> float:
        seconds = end - time.monotonic()
        if seconds <= 0:
            raise BackendTimeoutError(f"the server did not answer within {timeout:g} s")
        return seconds

    return left
