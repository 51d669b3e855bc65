"""The commands. What they do is in `listing`, `job`, `chat` and `serving`; shared flags are in `flags`.

Other distributions add commands through entry points (`commands`).

This module must not import torch, so that ``corelm backends`` and ``--help`` answer at once.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from corelm._version import __version__
from corelm.spec import SamplingParams
from corelm_cli import flags, interrupt_ends_process
from corelm_cli.commands import Commands
from corelm_cli.compare import SidesCommand, compare
from corelm_cli.doctor import doctor
from corelm_cli.engine import EngineChoice
from corelm_cli.exits import SOME_FAILED, typed_exits
from corelm_cli.listing import backends
from corelm_cli.serving import serve
from corelm_cli.streams import Messages, standard_output
from corelm_cli.wording import as_flag

if TYPE_CHECKING:
    from corelm_cli.job import Job

app = typer.Typer(
    cls=Commands,
    help="Sample from any language-model engine, chosen by name, or score with it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(backends)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"corelm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(cls=flags.GroupedCommand)
@flags.sampling_flags()
def generate(
    input: flags.Input,
    output: flags.Output,
    sampling: dict[str, Any],
    backend: flags.BackendName = "transformers",
    model: flags.Model = None,
    base_url: flags.BaseURL = None,
    option: flags.EngineOptions = None,
    retry: flags.Retry = None,
    timeout: flags.Timeout = None,
    adapter: flags.Adapter = None,
    batch_size: flags.BatchSize = 16,
    log_probs: Annotated[
        Literal["none", "raw", "processed"],
        flags.of_files(
            help="Write the log-probability of every token: the model's own (raw), or the one it was sampled with "
            "(processed)."
        ),
    ] = "none",
    return_support: flags.ReturnSupport = False,
    top_logprobs: flags.TopLogprobs = 0,
    overwrite: flags.Overwrite = False,
    return_tokens: flags.ReturnTokens = False,
    copy_input: flags.CopyInput = False,
    as_json: flags.AsJson = False,
    quiet: flags.Quiet = False,
    timing: flags.Timed = False,
    chat_template: flags.ChatTemplate = None,
    template_kwargs: flags.TemplateKwargs = None,
    tokenizer_kwargs: flags.TokenizerKwargs = None,
    truncation: flags.Truncation = "error",
    continue_final_message: flags.ContinueFinalMessage = False,
    response_parser: flags.ResponseParser = None,
) -> None:
    """Answer every prompt in a JSONL file. If interrupted, run it again to continue.

    Each input line is a JSON object with either `prompt` (a text) or `messages` (a conversation, optionally with
    `tools` for the chat template). `id` identifies the line and defaults to its line number; `metadata` is copied to
    the answer.

    With --seed, an answer depends on the seed, its prompt's line number and its sample number. In float32, the batch
    size changes fewer than one token in 10,000.

    For the output answers.jsonl, the settings, how the engine ran (its dtype, for example) and the provenance of the
    log-probabilities are saved once, in answers.settings.json. A run adds to the answers of a file only if it has their
    settings and their prompts.

    Exit code 1: some lines failed; for the output answers.jsonl, they are listed in answers.errors.jsonl. 2: the
    command was refused, or a file could not be read or written. 3: the engine failed. 130: interrupted.
    """
    given = {"return_support": return_support, "top_logprobs": top_logprobs}
    other_ids = {name: value for name, value in given.items() if value}
    if other_ids and log_probs == "none":
        raise typer.BadParameter(
            "no log-probs are written, which say of which distribution it is; give --log-probs raw or processed as "
            "well",
            param_hint=as_flag(next(iter(other_ids))),
        )
    if response_parser is not None and continue_final_message:
        raise typer.BadParameter(
            "it reads whole turns; leave out --continue-final-message", param_hint="--response-parser"
        )
    engine = EngineChoice.from_flags(backend, model, base_url, option, retry=retry, timeout=timeout, adapter=adapter)
    # Before the imports, which take seconds.
    with typed_exits():
        params = SamplingParams.make(sampling)
    with interrupt_ends_process():
        from corelm_cli.generating import Generator
        from corelm_cli.job import Job
        from corelm_cli.lines import Prompt, read_prompt
        from corelm_cli.settings import default_sampling, recorded_policy, recorded_sampling

    with typed_exits():
        options = flags.policy_options(
            chat_template,
            template_kwargs,
            tokenizer_kwargs,
            truncation=truncation,
            continue_final_message=continue_final_message,
            adapter=engine.adapter,
            response_parser=response_parser,
        )
    written: dict[str, Any] = {
        **{"log_probs": log_probs, "return_tokens": return_tokens, "copy_input": copy_input},
        **other_ids,
    }
    job: Job[Prompt] = Job(
        source=flags.named_file(input),
        target=flags.named_file(output),
        engine=engine,
        settings={
            "command": "generate",
            **_recorded(engine),
            **written,
            **recorded_policy(options),
            **(recorded := recorded_sampling(params)),
        },
        defaults=default_sampling(recorded),
        read=read_prompt,
        worker=lambda opened: Generator(engine=opened, options=options, sampling=params, **written),
        samples=params.num_samples or 1,
        batch_size=batch_size,
        overwrite=overwrite,
        quiet=quiet,
        timed=timing,
        as_json=as_json,
    )
    job.run()


@app.command(cls=flags.GroupedCommand)
def score(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Instead of --input: a JSONL file, or, if its name ends in .txt, one text.",
            metavar="FILE",
            callback=flags.to_score,
        ),
    ] = None,
    backend: flags.BackendName = "transformers",
    input: flags.OptionalInput = None,
    output: flags.Output = Path("-"),
    model: flags.Model = None,
    base_url: flags.BaseURL = None,
    option: flags.EngineOptions = None,
    retry: flags.Retry = None,
    timeout: flags.Timeout = None,
    adapter: flags.Adapter = None,
    batch_size: flags.BatchSize = 16,
    temperature: Annotated[float, flags.of_engine(help="The logits are divided by it; above 0.")] = 1.0,
    per_token: Annotated[
        bool,
        flags.of_files(
            "--per-token",
            help="Write `log_probs`, the log-probability of each token that is counted, as well as their sum.",
        ),
    ] = False,
    window: Annotated[
        int | None,
        flags.of_engine(
            min=2,
            metavar="<int>",
            help="Score a `text` in windows of so many tokens, and write its `perplexity`. Without --stride, all "
            "tokens of a window but the first count, after BOS (or EOS), as in lm-eval.",
        ),
    ] = None,
    stride: Annotated[
        int | None,
        flags.of_engine(
            min=1,
            metavar="<int>",
            help="Tokens from the beginning of one window to that of the next, fewer than --window. Only tokens that "
            "were in no window before count, so each has at least window - stride tokens before it.",
        ),
    ] = None,
    is_greedy: flags.IsGreedy = False,
    top_k: flags.TopK = 0,
    overwrite: flags.Overwrite = False,
    return_tokens: flags.ReturnTokens = False,
    copy_input: flags.CopyInput = False,
    as_json: flags.AsJson = False,
    quiet: flags.Quiet = False,
    timing: flags.Timed = False,
    chat_template: flags.ChatTemplate = None,
    template_kwargs: flags.TemplateKwargs = None,
    tokenizer_kwargs: flags.TokenizerKwargs = None,
    completion_boundary: flags.CompletionBoundary = "joint",
) -> None:
    """Score every line of a JSONL file. If interrupted, run it again to continue.

    Each input line is a JSON object with one of: `prompt` and `completion` (or `response`), or `prompt` and a list of
    `completions`; `messages`, a conversation whose assistant's turns are scored; `messages` and a completion or
    several, each scored as the assistant's next turn; `text`, scored after its first token. `tools`, `id` and
    `metadata` are as in `corelm generate`, whose output can be scored if it was made with --copy-input.

    Each output line has `log_prob`, the sum of the log-probabilities of the tokens that count, and `tokens`, their
    number; for `completions`, both are lists. The token that ends a turn of a conversation counts as well.

    By default, prompt and completion are tokenized together, as in lm-eval: whitespace at the end of the prompt belongs
    to the completion, and the completion begins after as many tokens as the prompt has alone.

    Files and exit codes are those of `corelm generate`.
    """
    if (file is None) == (input is None):
        raise typer.BadParameter("give one of FILE and --input", param_hint="FILE")
    if stride is not None and window is None:
        raise typer.BadParameter("give --window as well, a larger number", param_hint="--stride")
    if stride is not None and window is not None and stride >= window:
        raise typer.BadParameter(
            f"give fewer tokens than --window {window}; for windows that do not overlap, leave --stride out",
            param_hint="--stride",
        )
    if not 0 < temperature < math.inf:
        raise typer.BadParameter(f"expected a number above 0, got {temperature:g}", param_hint="--temperature")
    engine = EngineChoice.from_flags(backend, model, base_url, option, retry=retry, timeout=timeout, adapter=adapter)
    with interrupt_ends_process():
        from corelm_cli.job import Job
        from corelm_cli.lines import ToScore, read_to_score
        from corelm_cli.scoring import Scorer
        from corelm_cli.settings import recorded_policy

    with typed_exits():
        options = flags.policy_options(
            chat_template,
            template_kwargs,
            tokenizer_kwargs,
            generate=False,
            completion_boundary=completion_boundary,
            adapter=engine.adapter,
        )
    written: dict[str, Any] = {
        "per_token": per_token,
        "is_greedy": is_greedy,
        "return_tokens": return_tokens,
        "copy_input": copy_input,
        "temperature": temperature,
        **({"top_k": top_k} if top_k else {}),
        **({"window": window, "stride": stride} if window is not None else {}),
    }
    source = input if file is None else file
    assert source is not None
    job: Job[ToScore] = Job(
        source=flags.named_file(source),
        whole=file is not None and flags.is_text(file),
        target=flags.named_file(output),
        engine=engine,
        settings={"command": "score", **_recorded(engine), **written, **recorded_policy(options)},
        read=read_to_score,
        worker=lambda opened: Scorer(engine=opened, options=options, **written),
        batch_size=batch_size,
        overwrite=overwrite,
        quiet=quiet,
        timed=timing,
        as_json=as_json,
    )
    job.run()


@app.command(cls=flags.GroupedCommand)
@flags.sampling_flags("num_samples")
def chat(
    sampling: dict[str, Any],
    path: flags.ModelArgument = None,
    backend: flags.BackendName = "transformers",
    model: flags.Model = None,
    base_url: flags.BaseURL = None,
    option: flags.EngineOptions = None,
    retry: flags.Retry = None,
    timeout: flags.Timeout = None,
    adapter: flags.Adapter = None,
    system: Annotated[
        str | None,
        flags.of_prompts(help="System prompt: the first message of the conversation."),
    ] = None,
    chat_template: flags.ChatTemplate = None,
    template_kwargs: flags.TemplateKwargs = None,
    truncation: flags.Truncation = "error",
) -> None:
    """Chat with a model on the terminal. Each line is a question; the conversation is kept.

    Answers are shown as they come, if the engine streams. Ctrl-C ends the answer: what was said so far stays in the
    conversation, and a question without an answer is dropped. At the prompt, Ctrl-C ends the chat, and so do Ctrl-D and
    /exit. /reset forgets the conversation, but not the system prompt.

    If the standard input is a pipe, each of its lines is a question as well, and only the answers are printed to the
    standard output. Ctrl-C then ends the chat.

    Exit code 1: some lines of a pipe were not answered. 2: the command was refused. 3: the engine failed. 130:
    interrupted.
    """
    model = flags.one_model(path, model)
    engine = EngineChoice.from_flags(backend, model, base_url, option, retry=retry, timeout=timeout, adapter=adapter)
    with typed_exits():
        params = SamplingParams.make(sampling)
    with interrupt_ends_process():
        from corelm import LLMPolicy
        from corelm_cli.chat import Conversation
        from corelm_cli.chat import run as converse

    with typed_exits(), standard_output() as stdout:
        try:
            options = flags.policy_options(
                chat_template, template_kwargs, truncation=truncation, adapter=engine.adapter
            )
            with engine.open() as opened:
                policy = LLMPolicy(opened, options, sampling_params=params, return_log_probs=False, return_masks=False)
                complete = converse(Conversation(policy=policy, system=system, seed=params.seed), stdout)
        except KeyboardInterrupt:
            print(file=Messages())  # after the ^C that the terminal shows
            raise
    raise typer.Exit(0 if complete else SOME_FAILED)


# Flags that `serve` does not have are options of the engine.
_OTHERS = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command(cls=flags.GroupedCommand, context_settings=_OTHERS)(serve)
app.command(cls=SidesCommand)(compare)
app.command(cls=flags.GroupedCommand)(doctor)


# What the commands share ----------------------------------------------------------------------------------------------


def _recorded(engine: EngineChoice) -> dict[str, Any]:
    """Return the settings that say which engine made the answers."""
    from corelm_cli.settings import recorded_options

    settings = {"backend": engine.backend, "model": engine.model, "options": recorded_options(engine.options)}
    adapter = "=".join(filter(None, (engine.adapter, engine.adapter_folder)))
    return {**settings, "adapter": adapter} if adapter else settings
