"""``corelm serve``: answer the OpenAI protocol over HTTP, with any engine.

This module must not import torch, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Literal

import typer

from corelm.errors import how_to_install
from corelm_cli import flags, interrupt_ends_process
from corelm_cli.engine import EngineChoice
from corelm_cli.exits import REFUSED, typed_exits
from corelm_cli.streams import tell

_of_server = partial(typer.Option, rich_help_panel="Server")
#: The variable that holds the key of the server.
KEY_VARIABLE = "CORELM_API_KEY"
#: As a shell shows a program that SIGTERM has ended.
_TERMINATED = 128 + signal.SIGTERM


def serve(
    context: typer.Context,
    path: flags.ModelArgument = None,
    backend: flags.BackendName = "transformers",
    model: flags.Model = None,
    base_url: flags.BaseURL = None,
    option: flags.EngineOptions = None,
    retry: flags.Retry = None,
    adapter: flags.Adapter = None,
    timeout: Annotated[
        float, flags.of_engine(min=0, metavar="<seconds>", help="Time limit of each request, in seconds.")
    ] = 600.0,
    host: Annotated[
        str, _of_server(help="Address to listen at. Any but 127.0.0.1 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, _of_server(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        _of_server(
            envvar=KEY_VARIABLE,
            help="Key that clients must send. Other users of this machine can read a command line, so set the "
            "variable instead. Without a key, one is made and printed.",
        ),
    ] = None,
    no_api_key: Annotated[bool, _of_server("--no-api-key", help="Answer everyone who reaches the port.")] = False,
    model_name: Annotated[
        str | None, _of_server(help="Name of the model in requests. Default: what --model says.")
    ] = None,
    max_body: Annotated[int, _of_server(min=1, metavar="<bytes>", help="Largest request, in bytes.")] = 16 * 2**20,
    max_requests: Annotated[
        int,
        _of_server(
            min=1,
            metavar="<int>",
            help="Number of requests that are answered or wait at a time. A further one gets status 429.",
        ),
    ] = 1024,
    chat_template: flags.ChatTemplate = None,
    template_kwargs: flags.TemplateKwargs = None,
    response_parser: Annotated[
        str | None,
        flags.of_prompts(
            help="Makes tool calls and reasoning of what the model writes: hermes, qwen, llama3_json, deepseek_r1, …, "
            "or auto for the tokenizer's own. Default: answers are texts."
        ),
    ] = None,
    log_probs: Annotated[
        Literal["raw", "processed"],
        _of_server(
            help="Log-probabilities to return and to record: the model's own (raw), or those a token was sampled with "
            "(processed)."
        ),
    ] = "raw",
    no_sessions: Annotated[bool, _of_server("--no-sessions", help="Record nothing of what clients say.")] = False,
    limit_sessions: Annotated[
        int, _of_server(min=1, metavar="<int>", help="Number of sessions to keep; those used longest ago are dropped.")
    ] = 1000,
    limit_tokens: Annotated[
        int, _of_server(min=1, metavar="<int>", help="Number of token ids to keep, in all sessions.")
    ] = 20_000_000,
    telemetry: Annotated[
        bool,
        _of_server(
            "--telemetry",
            help="Report the calls of the engine to OpenTelemetry. Start the command with opentelemetry-instrument, "
            "which sets up where reports go.",
        ),
    ] = False,
) -> None:
    """Answer the OpenAI protocol over HTTP: chat completions, completions, and token ids.

    Flags that are not listed here are options of the engine: --max-model-len 4096 is --option max_model_len=4096.

    Clients use the URL that is printed as their base URL, and the key. What they say and are told is recorded, token
    for token, under /sessions.

    Ctrl-C and SIGTERM end the requests under way and close the engine.

    Exit code 2: the command was refused, or the address cannot be used. 3: the engine failed. 130: Ctrl-C. 143:
    SIGTERM.
    """
    # The processes of the engine must not inherit the key.
    os.environ.pop(KEY_VARIABLE, None)
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        tell(f"error: corelm serve needs {' and '.join(missing)}: {how_to_install(*missing)}")
        raise typer.Exit(REFUSED)
    if telemetry and find_spec("opentelemetry") is None:
        tell(f"error: --telemetry needs OpenTelemetry: {how_to_install('opentelemetry-api>=1.30')}")
        raise typer.Exit(REFUSED)
    if api_key is not None and no_api_key:
        raise typer.BadParameter(
            f"a key is given, here or in {KEY_VARIABLE}; leave one of them out", param_hint="--no-api-key"
        )
    more = list(context.args)
    if path is not None and path.startswith("--"):
        # A flag of the engine that comes before any MODEL.
        more, path = [path, *more], None
    own = [flag for each in context.command.params for flag in each.opts if flag.startswith("--")]
    option = [*(option or ()), *flags.engine_flags(more, own)]
    model = flags.one_model(path, model)
    engine = EngineChoice.from_flags(backend, model, base_url, option, retry=retry, adapter=adapter)
    with interrupt_ends_process():
        from corelm_serve.app import ServingApp
        from corelm_serve.options import ServerOptions
        from corelm_serve.server import listening, new_key, run_server, url_of
        from corelm_serve.sessions import SessionStore

    wrappers = _reporting() if telemetry else []
    key = None if no_api_key else new_key() if api_key is None else api_key
    with typed_exits():
        options = ServerOptions(
            api_key=key,
            model_name=model_name,
            chat_template=flags.template(chat_template),
            template_kwargs=flags.key_values(template_kwargs or [], "--template-kwargs"),
            response_parser=response_parser,
            log_probs=log_probs,
            adapter=engine.adapter,
            sessions=not no_sessions,
            max_body=max_body,
            max_requests=max_requests,
            timeout=timeout or None,
        )
        # First, so that a port in use is reported before a model loads.
        with closing(listening(host, port)) as listener, engine.open(wrappers) as opened:
            store = SessionStore(limit_sessions=limit_sessions, limit_tokens=limit_tokens)
            app = ServingApp(opened, options, store)

            def announce() -> None:
                tell(f"serving {app.service.name} at {url_of(listener)}/v1")
                if key is not None and api_key is None:
                    tell(f"key: {key}")
                sys.stderr.flush()

            ended_by = run_server(app, listener, announce)
        if ended_by == signal.SIGINT:
            raise KeyboardInterrupt
    raise typer.Exit(_TERMINATED if ended_by == signal.SIGTERM else 0)


def _reporting() -> list[object]:
    """Return the wrapper that reports to OpenTelemetry, and say so if its reports go nowhere."""
    from opentelemetry import trace

    from corelm_interop.telemetry import Telemetry

    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        tell(
            "--telemetry: no SDK of OpenTelemetry is set up, so nothing is reported; install opentelemetry-distro and "
            "an exporter, and start this command with opentelemetry-instrument"
        )
    return [Telemetry()]
