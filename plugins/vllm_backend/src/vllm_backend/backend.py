"""`VLLMBackend`: how vLLM in this process, or a server, is opened."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from corelm.errors import CapabilityError
from corelm.validate import flag, invalid
from corelm_engine_kit import (
    HttpOptions,
    ModelHints,
    WeightGroup,
    device_numbers,
    did_you_mean,
    refuse_missing_path,
    refuse_unknown_arguments,
    takes_http_options,
)
from vllm_backend.capabilities import LOGPROBS_MODES
from vllm_backend.engine import InProcessEngine
from vllm_backend.engine_async import AsyncEngine
from vllm_backend.engine_sync import SyncEngine
from vllm_backend.kept_sets_protocol import engine_arguments
from vllm_backend.server import VLLMServer
from vllm_backend.top_ids import MOST_CANDIDATES


class VLLMBackend(InProcessEngine):
    """Opens vLLM: one of the two modes in this process, or a `VLLMServer` behind a URL."""

    @classmethod
    @takes_http_options
    def open(
        cls,
        model: Any = None,
        *,
        tokenizer: Any = None,
        trust_remote_code: bool = False,
        logprobs_mode: str | None = None,
        engine: Literal["async", "sync"] | None = None,
        devices: int | str | Sequence[int] | None = None,
        return_support: bool | None = None,
        base_url: str | None = None,
        vocab_size: int | None = None,
        max_context: int | None = None,
        http: HttpOptions,
        weight_group: WeightGroup | str | None = None,
        **engine_args: Any,
    ) -> InProcessEngine | VLLMServer:
        """Start vLLM on `model`, or use the server at `base_url`.

        Args:
            model: a folder or hub name; with `base_url` the name of one of the server's models, or None.
            tokenizer: a folder or hub name, which vLLM then uses as well; or a tokenizer, which vLLM does not use.
            trust_remote_code: run Python code that comes with the model; with `base_url` only code from a folder or
                repository that `tokenizer` or `model` names.
            logprobs_mode: vLLM's "raw_logprobs" (its default) or "processed_logprobs"; with `base_url` "raw" or
                "processed", or None to find out.
            engine: "async" (the default) for many calls at once; "sync" for quick tests.
            devices: the numbers of the GPUs that vLLM uses, as torch counts them here; None for the first. A rank of
                torchrun gives its own.
            return_support: let answers come with the ids that each token was drawn from. Code of this plugin then runs
                in vLLM's workers, and truncates the distributions there. Needs vLLM's V1 model runner.
            base_url: ``http(s)://host:port`` of a server, with or without ``/v1`` at the end. The options below belong
                to it.
            vocab_size: ids are below it; None to read the model's configuration.
            max_context: the longest prompt + answer; None for the server's limit.
            http: see `HttpOptions`. The key may be in VLLM_API_KEY. Growing counters in ``/metrics`` show progress,
                so that an answer may take longer than ``read_timeout``.
            weight_group: where the server's workers join this process, so that `update_weights` sends them tensors over
                NCCL; None to load weights from a folder only.
            engine_args: vLLM's own engine arguments, passed on unchanged.

        Raises:
            InvalidRequestError: no model, an unknown option, or an option that belongs to the other way of opening.
            CapabilityError: a `logprobs_mode` that returns no log-probs.
        """
        server_options = {"vocab_size": vocab_size, "max_context": max_context, "weight_group": weight_group}
        if base_url is not None:
            engine_args |= {"engine": engine, "devices": devices, "return_support": return_support}
            for name in _without_none(engine_args):
                hint = did_you_mean(name, [*server_options, *vars(http)]) or "; set it where the server is started"
                raise invalid(name, f"not an option for a server that is already running{hint}")
            hints = ModelHints(
                name=model,
                tokenizer=tokenizer,
                vocab_size=vocab_size,
                max_context=max_context,
                trust_remote_code=trust_remote_code,
            )
            return VLLMServer.connect(base_url, hints, http, logprobs_mode, weight_group)
        refuse_missing_path("model", model)
        common = {"logprobs_mode": logprobs_mode, "trust_remote_code": trust_remote_code or None}
        arguments = _without_none(common) | engine_args
        if devices is not None:
            arguments["device_ids"] = device_numbers(devices)
        if return_support is not None and flag("return_support", return_support):
            arguments |= engine_arguments(arguments)
        _check_engine_arguments(arguments)
        server_options |= {name: value for name, value in vars(http).items() if value != getattr(HttpOptions, name)}
        for name in _without_none(server_options):
            hint = "; vLLM calls it max_model_len" if name == "max_context" else ""
            raise invalid(name, f"this option needs base_url{hint}")
        if not isinstance(model, (str, os.PathLike)):
            raise invalid("model", f"expected a folder or a hub name (or base_url=), got {type(model).__name__}")
        start = {"async": AsyncEngine.start, "sync": SyncEngine.start}.get(engine or "async")
        if start is None:
            raise invalid("engine", f"expected 'async' or 'sync', got {engine!r}")
        own = {"disable_log_stats": True, "max_logprobs": MOST_CANDIDATES, **_platform_defaults()}
        arguments = {**own, **arguments, "model": os.fspath(model)}
        if isinstance(tokenizer, (str, os.PathLike)):
            arguments["tokenizer"], tokenizer = os.fspath(tokenizer), None
        return start(arguments, tokenizer)


def _without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _check_engine_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse what vLLM does not know, and modes that do not return log-probs."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    refuse_unknown_arguments("vLLM", arguments, known)
    mode = arguments.get("logprobs_mode", "raw_logprobs")
    if mode not in LOGPROBS_MODES:
        raise CapabilityError(
            f"logprobs_mode={mode!r} would not return log-probs; give one of {', '.join(LOGPROBS_MODES)}",
            capability="generation_modes",
        )


def _platform_defaults() -> dict[str, Any]:
    """Return engine arguments that keep vLLM from crashing on this platform."""
    from vllm.platforms import current_platform

    # On a CPU vLLM crashes when it reads a prompt in two steps and the request has a seed.
    return {"enable_chunked_prefill": False} if current_platform.is_cpu() else {}
