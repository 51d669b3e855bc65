"""`SGLangBackend`: an SGLang server, which `open` launches, or connects to behind a URL."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import (
    CloseRequest,
    Deadline,
    GenerateRequest,
    GenerateResult,
    GenerationMode,
    RowAnswer,
    RowFailure,
    RowScores,
    ScoreRequest,
    ScoreResult,
    SleepRequest,
    StopStrings,
    WakeRequest,
    WeightUpdate,
    generate_result,
    hookimpl,
    score_result,
)
from corelm.validate import invalid
from corelm_engine_kit import (
    VISIBLE_DEVICES,
    Expected,
    HttpClient,
    HttpEngine,
    HttpOptions,
    ModelHints,
    Payload,
    ProgressProbe,
    Streamed,
    WeightGroup,
    answer_limits,
    configured_shapes,
    local_checkpoint,
    refuse_missing_path,
    takes_http_options,
    visible_devices,
)
from sglang_backend import protocol
from sglang_backend.adapters import adapters_of
from sglang_backend.capabilities import DUMMY, HEALTH_GENERATE, MODEL_INFO, ServerInfo, read_server
from sglang_backend.probing import probe_server
from sglang_backend.weights import ServerWeights

if TYPE_CHECKING:
    from sglang_backend.launch import LaunchedServer

#: The environment variable that holds the key of a server behind a URL, if none is passed.
KEY_VARIABLE = "SGLANG_API_KEY"
#: Seconds that a launched server may take to start: loading a large model is slow.
STARTUP_TIMEOUT = 600.0
#: Seconds that the server may take to acknowledge an abort. If it takes longer, the connections are closed instead.
_ABORT_TIMEOUT = 10.0
#: What the server calls the parts that wake. Its CUDA graphs are of use only with the cache.
_MEMORY = {"weights": ("weights",), "kv_cache": ("kv_cache", "cuda_graph")}


class SGLangBackend(HttpEngine):
    """Samples from and scores with an SGLang server. It takes any number of calls at a time; the server batches them.

    Args:
        dummy: what the first weights have to fit, if the server was launched without weights.

    Attributes:
        launched: the server's process, if this backend started it; None for a server behind a URL.
        weights: the server's weights.
    """

    requires_api = ">=1,<2"
    #: What `corelm conformance` needs to know to test it.
    conformance: ClassVar[Mapping[str, Any]] = {"engine_sampling": {"engine_kwargs": {"logit_bias": {"7": 20.0}}}}
    rows_path, id_field, health_path = protocol.GENERATE, "rid", MODEL_INFO
    ends_rows = True
    info: ServerInfo

    def __init__(
        self,
        client: HttpClient,
        info: ServerInfo,
        launched: LaunchedServer | None = None,
        *,
        dummy: Expected | None = None,
        weight_group: WeightGroup | None = None,
        group_timeout: float = 600.0,
    ) -> None:
        super().__init__(client, info)
        self.launched = launched
        # Such a server reads files of this machine.
        here = launched is not None
        self.weights = ServerWeights(
            self, takes_state_dict=here, dummy=dummy, group=weight_group, timeout=group_timeout
        )
        self._adapters = adapters_of(client, info, reads_files_here=here)

    @classmethod
    @takes_http_options
    def open(
        cls,
        model: Any = None,
        *,
        base_url: str | None = None,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        max_context: int | None = None,
        eos_token_ids: Iterable[int] | None = None,
        http: HttpOptions,
        weight_group: str | WeightGroup | None = None,
        startup_timeout: float = STARTUP_TIMEOUT,
        env: Mapping[str, str] | None = None,
        devices: int | str | Sequence[int] | None = None,
        progress: bool = True,
        **server_args: Any,
    ) -> SGLangBackend:
        """Launch a server for `model`, or connect to the one at `base_url`.

        Args:
            model: a folder or hub name.
            base_url: ``http(s)://host:port`` of a running server, instead of a model; ``/v1`` at the end is ignored.
            tokenizer: a tokenizer, or the folder or hub name of one; None for the model's own.
            vocab_size: ids are below it; None to read the model's configuration.
            max_context: the longest prompt + answer, in tokens; None to ask the server.
            eos_token_ids: the ids that end every answer; None to read the model's files.
            http: see `HttpOptions`. A key and headers are for a server behind a URL; the key may be in SGLANG_API_KEY.
                ``/health_generate`` shows progress, so that an answer may take longer than ``read_timeout``.
            weight_group: the host by which a server behind a URL reaches this process, or that and a port. New weights
                can be tensors then: they are sent to the server, which joins this process at the first ones.
            startup_timeout: seconds that a launched server may take to start, before it is asked what it can do.
            env: added to the environment of a launched server.
            devices: the numbers of the GPUs that a launched server uses, as torch counts them here; None for the first.
            progress: show on standard error how long a launched server has been starting.
            server_args: the launched server's own arguments in Python spelling: ``mem_fraction_static=0.3`` is
                ``--mem-fraction-static 0.3``, and True is a flag.

        Raises:
            InvalidRequestError: neither or both of model and base_url, an option of the other way to open, or a fact
                about the model that has to be passed because it cannot be read here.
            EngineError: the server ends while it starts (the message holds the end of its log), or what answers at
                `base_url` is not an SGLang server.
            CapabilityError: `weight_group` for a server that cannot be sent tensors.
            BackendTimeoutError: the server is not ready in time, or does not answer within ``open_timeout``.
        """
        waiting = None if startup_timeout == STARTUP_TIMEOUT else startup_timeout
        quiet = None if progress else progress
        launching = {"env": env, "devices": devices, "startup_timeout": waiting, "progress": quiet}
        connecting = {"api_key": http.api_key, "headers": http.headers, "weight_group": weight_group}
        _check_options(model, base_url, server_args | launching, connecting)
        group = WeightGroup.given(weight_group)
        hints = ModelHints(
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_context=max_context,
            eos_token_ids=eos_token_ids,
            trust_remote_code=bool(server_args.get("trust_remote_code")),
        )
        # If anything fails from here on, no process and no thread is left behind.
        with ExitStack() as cleanup:
            launched = dummy = modes = None
            if base_url is None:
                # Imported here because `launch` needs a POSIX system, and a server behind a URL does not.
                from sglang_backend.launch import LaunchedServer

                refuse_missing_path("model", model)
                model = os.fspath(model)
                if server_args.get("load_format") == DUMMY:
                    option = f"load_format={DUMMY!r}"
                    dummy = local_checkpoint(model) or configured_shapes(
                        model, hints.trust_remote_code, option=option, capability="load_format"
                    )
                    # The logits of such a server are all alike, so that raw and scaled log-probs are, too.
                    raw = {**os.environ, **(env or {})}.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower()
                    modes = frozenset[GenerationMode]({"raw" if raw in ("true", "1") else "scaled"})
                chosen = {} if devices is None else {VISIBLE_DEVICES: visible_devices(devices)}
                launched = LaunchedServer(model, server_args, dict(env or {}) | chosen)
                cleanup.callback(launched.close)
                base_url, http = launched.base_url, replace(http, api_key=launched.api_key)
            # The page answers once the scheduler has returned a token of any request. While it loads weights it returns
            # none: the server need only be alive.
            probe = ProgressProbe(rows=protocol.GENERATE, page=HEALTH_GENERATE, alive=MODEL_INFO)
            ended = None if launched is None else launched.ended
            client = http.client(base_url, KEY_VARIABLE, progress_probe=probe, ended=ended)
            cleanup.callback(client.close)
            if launched is not None:
                launched.wait_until(lambda: client.answers(MODEL_INFO), startup_timeout, f"sglang, {model}", progress)
            with http.opening(client) as deadline:
                info = probe_server(cls(client, read_server(client, hints, deadline)), deadline, modes)
                info = replace(info, capabilities=replace(info.capabilities, without_weights=dummy is not None))
            if group is not None and info.no_group:
                raise CapabilityError(
                    f"weight_group: {info.no_group}, and SGLang can only send tensors to one replica in one stage; "
                    "leave weight_group out, save new weights where the server can read them, and pass "
                    "update_weights that path; or run one server for each replica",
                    capability="update_weights",
                )
            cleanup.pop_all()
        return cls(client, info, launched, dummy=dummy, weight_group=group, group_timeout=http.read_timeout)

    # Rows ------------------------------------------------------------------------------------------------------------

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        weights = self.weights.history.of_call(request)
        runs = [weights.before] * len(request.prompts)
        stops = StopStrings.of_rows(request, self.tokenizer)
        limits = answer_limits(request, self.capabilities.max_context).tolist()

        def parse(row: int, reply: Any, aborted: bool) -> RowAnswer:
            answer = protocol.whole_answer(reply, aborted, request, limits[row], stops[row], self.info)
            if answer.ids:
                # A request that was aborted before it ran has no weight version.
                runs[row] = weights.runs(reply["meta_info"], len(answer.ids))
            return answer

        streams = None
        if request.on_tokens is not None:
            streams = protocol.AnswerStreams(request, self.info, parse, weights, runs)
        payloads = self._bodies(request, protocol.generation_requests(request, self.info))
        rows = self.map_rows(request, payloads, parse, streams)
        result = generate_result(request, list(rows.values()))
        return result if request.weight_version is None else replace(result, version_runs=tuple(runs))

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        sequences, starts = request.sequences.tolist(), request.score_from.tolist()

        def parse(row: int, reply: Any, aborted: bool) -> RowScores | RowFailure:
            return protocol.row_scores(reply, sequences[row], starts[row], request, self.info)

        payloads = self._bodies(request, protocol.scoring_requests(request))
        return score_result(request, self.map_rows(request, payloads, parse))

    def _bodies(
        self, request: GenerateRequest | ScoreRequest, payloads: list[Payload]
    ) -> dict[int, Payload | RowFailure]:
        """Return the payloads by row, with the adapter of the request."""
        named = {"lora_path": self._adapters.server_name(request.adapter)} if request.adapter else {}
        return {row: {**payload, **named} for row, payload in enumerate(payloads)}

    def post_rows(
        self, payloads: Sequence[Payload], names: Sequence[str], deadline: Deadline, streamed: Streamed | None = None
    ) -> list[Any]:
        """Post requests, and those again that the server refuses as duplicates of a request whose connection broke."""
        entries = super().post_rows(payloads, names, deadline, streamed)
        again = [row for row, entry in enumerate(entries) if protocol.is_duplicate(entry)]
        if again:
            if streamed is not None:
                tell = streamed.tell
                streamed = replace(streamed, tell=lambda number, reply: tell(again[number], reply))
            bodies, whose = [payloads[row] for row in again], [names[row] for row in again]
            for row, entry in zip(again, super().post_rows(bodies, whose, deadline, streamed), strict=True):
                entries[row] = entry
        return entries

    def is_reply_to(self, payload: Payload, reply: Any) -> bool:
        return protocol.is_reply_to(payload, reply)

    def serves(self, timeout: float | None = None) -> bool:
        """Return whether the server's scheduler returns anything in time. `MODEL_INFO` answers without it."""
        return self.answers(HEALTH_GENERATE, timeout)

    def end_rows(self, ids: Sequence[str]) -> None:
        for rid in ids:
            # The server aborts every request whose id starts with `rid`. Ours are equally long, so that is one.
            self.client.post("/abort_request", {"rid": rid}, timeout=_ABORT_TIMEOUT, expect_json=False)

    # Weights and memory ----------------------------------------------------------------------------------------------

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        if request.adapter is None:
            self.weights.load(request)
        else:
            self._adapters.update(request)
        return True

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        """Free the memory of the server's GPUs: weights, cache and CUDA graphs.

        Raises:
            InvalidRequestError: the server works on requests of other clients. Nothing has changed.
            EngineError: the server failed.
        """
        # A server that is not idle would end itself; this refuses instead.
        self.client.post("/flush_cache", {}, expect_json=False)
        self.weights.asleep = True
        self.client.post("/release_memory_occupation", {}, expect_json=False)
        return True

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        tags = [name for tag in sorted(request.tags) for name in _MEMORY[tag]]
        self.client.post("/resume_memory_occupation", {"tags": tags}, expect_json=False)
        self.weights.asleep = not request.last
        self.weights.try_modes()
        return True

    # The server ------------------------------------------------------------------------------------------------------

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        self.weights.close()
        super().close(request)
        self._adapters.close()
        if self.launched is not None:
            self.launched.close()
        return True


def _check_options(
    model: Any, base_url: str | None, launching: Mapping[str, Any], connecting: Mapping[str, Any]
) -> None:
    """Refuse anything but one of `model` and `base_url`, and options that belong to the other one."""
    if base_url is not None and model is not None:
        raise invalid("model", "the server behind base_url already has one; pass only base_url")
    if isinstance(model, (str, os.PathLike)):
        _refuse(connecting, "only for a server behind base_url; a launched one has a random key and takes tensors")
        return
    _refuse(launching, "only for a launched server; pass model= to launch one, and no base_url=")
    if base_url is None:
        raise invalid("model", f"expected a folder or hub name, or base_url= instead; got {type(model).__name__}")


def _refuse(options: Mapping[str, Any], why: str) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise InvalidRequestError(f"{', '.join(given)}: {why}", field=given[0])
