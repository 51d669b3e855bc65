"""The flags that commands share. Those of sampling parameters follow from the fields of `SamplingParams`.

This module must not import torch, so that ``--help`` and the completion of a shell answer at once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import shlex
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from corelm.application import scan
from corelm.spec import ALIASES, SamplingParams
from corelm.validate import nearest
from corelm_cli import strict_json
from corelm_cli.wording import as_flag

if TYPE_CHECKING:
    from corelm import PolicyOptions

#: Arguments of `corelm.get_backend` itself that ``--option`` refuses, and what to do instead.
NOT_OPTIONS = {
    "name": "use --backend",
    "model": "use --model",
    "wrappers": "they are Python objects; call corelm.get_backend from Python",
    "fleet_limits": "it is a Python object; call corelm.get_backend from Python",
    "retry": "use --retry",
    "timeout": "use --timeout",
}
#: Sections of the help.
PANELS = ENGINE, FILES, PROMPTS, SAMPLING = "Engine", "Files", "Prompts", "Sampling"

#: The options that people use first, which the help lists first.
_FIRST = frozenset(
    (
        *("backend", "model", "base_url", "option", "input", "output", "host", "port"),
        *("temperature", "max_new_tokens", "num_samples", "seed"),
    )
)


#: What errors of the command line have in common.
_UsageError: Any = typer.BadParameter.__mro__[1]


def _of_generate(flag: str, own: list[str]) -> str | None:
    """Return the flag of a sampling parameter that `flag` is or is close to, unless it is close to one in `own`."""
    return None if nearest(flag, own) else nearest(flag, map(as_flag, (*SamplingParams.__dataclass_fields__, *ALIASES)))


def _as_option(flag: str, given: list[str], own: list[str]) -> str | None:
    """Return ``--option dtype=float32`` for ``--dtype float32`` among `given`.

    None if the flag is a misspelt one of the command's `own`, or a sampling parameter that the command does not take.
    """
    name = flag.removeprefix("--").replace("-", "_")
    sampled = {*SamplingParams.__dataclass_fields__, *ALIASES}
    if not flag.startswith("--") or not name.isidentifier() or name in sampled or nearest(flag, own):
        return None
    at = next(n for n, each in enumerate(given) if each.partition("=")[0] == flag)
    has_value = not any(each.startswith("-") for each in given[at + 1 : at + 2])
    (pair,) = engine_flags(given[at : at + 1 + has_value], ())
    return f"--option {shlex.quote(pair)}"


class GroupedCommand(TyperCommand):
    """A command whose help groups options under headings: the most used first, then each `rich_help_panel`.

    Help and errors are plain text, which a log or a pipe can hold. For a flag that it does not have, a command with
    ``--option`` says how an option of the engine is typed.
    """

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        given = list(args)
        try:
            return super().make_context(info_name, args, parent, **extra)
        except _UsageError as error:
            # Only the error of a flag that does not exist has both; its class is click's, or typer's copy of it.
            if hasattr(error, "option_name") and hasattr(error, "possibilities"):
                own = [flag for parameter in self.params for flag in parameter.opts]
                meant = _as_option(error.option_name, given, own) if "--option" in own else None
                told = [f"an option of the engine is typed {meant}"] if meant else []
                if sampled := _of_generate(error.option_name, own):
                    told.append(f"`corelm generate` has {sampled}")
                if told:
                    error.message += f"; {'; '.join(told)}"
                    error.possibilities = None
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Used most": []}
        for option in self.get_params(ctx):
            if record := option.get_help_record(ctx):
                panel = getattr(option, "rich_help_panel", None) or "Options"
                kind = "Arguments" if option.param_type_name == "argument" else panel
                groups.setdefault("Used most" if option.name in _FIRST else kind, []).append(record)
        for title, records in groups.items():
            if not records:
                continue
            with formatter.section(title):
                formatter.write_dl(records)


def installed_backends() -> list[str]:
    return [info.name for info in scan().backends]


#: What makes an option of each section of the help.
of_engine, of_files, of_prompts = (functools.partial(typer.Option, rich_help_panel=each) for each in PANELS[:3])
BackendName = Annotated[
    str,
    of_engine(help="Name of the backend, as listed by `corelm backends`.", autocompletion=installed_backends),
]
Model = Annotated[str | None, of_engine(help="Path of the model, or a name that the engine knows.")]
ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="Path of the model, or a name that the engine knows: as --model.")
]
BaseURL = Annotated[str | None, of_engine(help="URL of a running server to use instead of a model.")]
EngineOptions = Annotated[
    list[str] | None,
    of_engine(
        metavar="KEY=VALUE",
        help="Option for the engine; VALUE is JSON or text. Can be repeated. Options are saved with the settings, "
        "without secrets: an option called a key, token, password or the like is left out, and texts inside JSON are "
        "saved as a fingerprint.",
    ),
]
Adapter = Annotated[
    str | None,
    of_engine(
        metavar="NAME[=FOLDER]",
        help="The adapter (LoRA, for example) that answers or scores: one that the engine has, or one that is loaded "
        "from a folder that PEFT wrote, as in policy=runs/step-100.",
    ),
]
Retry = Annotated[int | None, of_engine(min=1, metavar="<int>", help="Attempts per engine call, including the first.")]
Timeout = Annotated[
    float | None, of_engine(min=0, metavar="<seconds>", help="Time limit of each engine call, in seconds.")
]
BatchSize = Annotated[int, of_engine(min=1, metavar="<int>", help="Number of lines to send to the engine at a time.")]
Timed = Annotated[
    bool,
    of_engine(
        "--timing",
        help="Measure the calls of the engine: tokens per second, durations, waits, cache hits. The figures follow the "
        "other lines at the end; with --json they are in `timing`.",
    ),
]


def named_file(path: Path) -> Path | None:
    """Return None for a dash, which is the standard input or output."""
    return None if str(path) == "-" else path


def one_model(path: str | None, model: str | None) -> str | None:
    """Return the model that is given as an argument or with ``--model``."""
    if path is not None and model is not None:
        raise typer.BadParameter(f"the model is given twice, as {path} and with --model", param_hint="--model")
    return model or path


#: Endings of files that commands for JSON Lines neither read nor write.
OTHER_FORMATS = frozenset(
    (
        *(".arrow", ".csv", ".db", ".feather", ".html", ".json", ".npz", ".parquet", ".pt", ".safetensors", ".sqlite"),
        *(".tsv", ".xlsx", ".xml", ".yaml", ".yml", ".bz2", ".gz", ".xz", ".zip", ".zst"),
    )
)


def to_read(path: Path | None) -> Path | None:
    """Refuse a file that is not there, or is no JSON Lines, before libraries are imported, which takes seconds."""
    if path is not None and str(path) != "-":
        if os.path.isdir(path):
            raise typer.BadParameter(f"{path} is a folder")
        try:
            os.stat(path)
        except FileNotFoundError:
            raise typer.BadParameter(f"there is no file {path}") from None
        except OSError:
            # The command says what else is wrong when it opens the file.
            pass
        # Many files of JSON Lines end in .json.
        if path.suffix.lower() in OTHER_FORMATS - {".json"}:
            raise typer.BadParameter(
                f"{path}: only JSON Lines are read; pandas converts it: read_csv(PATH), or read_parquet, and then "
                ".to_json('prompts.jsonl', orient='records', lines=True)"
            )
        if is_text(path) and not _has_objects(path):
            raise typer.BadParameter(
                f"{path} is no JSON Lines: its first lines hold no objects; for one prompt a line, convert it: "
                f"jq -Rc '{{prompt: .}}' {shlex.quote(str(path))} > prompts.jsonl"
            )
    return path


#: Endings of files with the weights of a model.
_WEIGHTS = (".bin", ".gguf", ".pt", ".pth", ".safetensors")


def to_score(path: Path | None) -> Path | None:
    """Refuse a FILE that is neither a text nor JSON Lines, and would fail line by line once the model is open."""
    if path is None or not path.is_file():
        return to_read(path)
    if path.suffix.lower() in _WEIGHTS:
        raise typer.BadParameter(f"{path} is a file of a model; give the folder that holds it with --model")
    if is_text(path):
        if not path.stat().st_size:
            raise typer.BadParameter(f"{path} is empty; give a file with a text, or with lines of JSON")
        return path
    to_read(path)
    if not _has_objects(path):
        raise typer.BadParameter(
            f"{path} is no JSON Lines: its first lines hold no objects; a file whose name ends in .txt is read as "
            "one text"
        )
    return path


def _has_objects(path: Path) -> bool:
    """Return whether one of the first lines of a file may be an object, or it has none, or cannot be read."""
    with suppress(OSError):
        if not path.is_file():
            return True
        with path.open("rb") as file:
            # Not lines: those of a binary file may be long.
            lines = iter(lambda: file.readline(2**16), b"")
            first = list(islice((line.removeprefix(BOM_UTF8) for line in lines if line.strip()), 5))
        # One that is wrong among others is the error of its line.
        return not first or any(re.match(rb"\s*\{\s*\S", line) for line in first)
    return True


def is_text(path: Path) -> bool:
    """Return whether a file is one text to score."""
    return path.suffix.lower() == ".txt"


_INPUT = of_files(help="JSONL file to read, in the format described above; - is the standard input.", callback=to_read)
Input = Annotated[Path, _INPUT]
OptionalInput = Annotated[Path | None, _INPUT]


def _of_json_lines(path: Path) -> Path:
    if path.suffix.lower() in OTHER_FORMATS:
        raise typer.BadParameter(
            f"{path}: only JSON Lines are written; give a name that ends in .jsonl or .ndjson, or - for the standard "
            "output; pandas converts it: read_json(PATH, lines=True), and then .to_csv or .to_parquet"
        )
    return path


Output = Annotated[
    Path,
    of_files(
        help="JSONL file to append to. What it already has is not done again. - is the standard output.",
        callback=_of_json_lines,
    ),
]
Overwrite = Annotated[bool, of_files("--overwrite", help="Replace the answers that the output has.")]
CopyInput = Annotated[bool, of_files("--copy-input", help="Copy what each line asks, such as `prompt`, to the output.")]
AsJson = Annotated[
    bool,
    of_files(
        "--json",
        help="Print a summary as one line of JSON to the standard output, or, if the answers go there, as the last "
        "line of the standard error.",
    ),
]
Quiet = Annotated[bool, of_files("--quiet", "-q", help="Print errors only: no progress, no summary.")]
ReturnTokens = Annotated[bool, of_files("--return-tokens", help="Write the token ids as well.")]
ReturnSupport = Annotated[
    bool,
    of_files(
        "--return-support",
        help="Write `kept_ids`, the ids that top-k, top-p and min-p had left for each token (none: all ids), and "
        "`kept_log_mass`, the log of their mass. With --log-probs.",
    ),
]
TopLogprobs = Annotated[
    int,
    of_files(
        min=0,
        metavar="<int>",
        help="Write this many of the most probable ids for each token, `top_ids`, with `top_log_probs`, and the log of "
        "the mass of all others, `tail_log_mass`. With --log-probs.",
    ),
]
TopK = Annotated[
    int,
    of_files(
        min=0,
        metavar="<int>",
        help="Write this many of the most probable ids for each token that is counted, `top_ids`, with "
        "`top_log_probs`, and the log of the mass of all others, `tail_log_mass`.",
    ),
]
IsGreedy = Annotated[
    bool,
    of_files("--is-greedy", help="Write `is_greedy`: whether every token that is counted is the most probable one."),
]
ResponseParser = Annotated[
    str | None,
    of_files(
        metavar="FORMAT",
        help="Write the answer to a conversation as `message` as well, with its tool calls and reasoning. FORMAT is "
        "hermes, qwen or another one, or auto for the tokenizer's own. For an answer that does not follow it, "
        "`message` is null and `message_error` says why.",
    ),
]


ChatTemplate = Annotated[
    str | None,
    of_prompts(
        help="Renders conversations: a jinja file, jinja text, the name of one of the tokenizer's templates, or "
        "chatml. Default: the tokenizer's own."
    ),
]
TemplateKwargs = Annotated[
    list[str] | None,
    of_prompts(
        metavar="KEY=VALUE",
        help="Variable for the chat template, such as enable_thinking=false; VALUE is JSON or text. Can be repeated.",
    ),
]
TokenizerKwargs = Annotated[
    list[str] | None,
    of_prompts(
        metavar="KEY=VALUE",
        help="How texts that are not conversations become tokens. add_special_tokens=false adds no BOS; "
        "parse_special=false reads the text of a special token as ordinary characters. Can be repeated.",
    ),
]
Truncation = Annotated[
    Literal["error", "left"],
    of_prompts(
        help="What happens to a prompt that does not fit the context: an error, or its first tokens are dropped (left)."
    ),
]
ContinueFinalMessage = Annotated[
    bool,
    of_prompts(
        "--continue-final-message",
        help="Continue a conversation that ends with an assistant turn; `response` is what follows it. Otherwise such "
        "a line fails.",
    ),
]
CompletionBoundary = Annotated[
    Literal["joint", "separate"],
    of_prompts(
        help="Tokenize `prompt` and completion as one text, as lm-eval does (joint), or each by itself, as TRL does "
        "(separate)."
    ),
]


def policy_options(
    chat_template: str | None, template_kwargs: list[str] | None, tokenizer_kwargs: list[str] | None = None, **more: Any
) -> PolicyOptions:
    """Return the options of `LLMPolicy` that have flags.

    Raises:
        OSError: the file of the template cannot be read.
        InvalidRequestError: an illegal value.
    """
    from corelm import PolicyOptions

    return PolicyOptions(
        chat_template=template(chat_template),
        template_kwargs=key_values(template_kwargs or [], "--template-kwargs"),
        tokenizer_kwargs=key_values(tokenizer_kwargs or [], "--tokenizer-kwargs"),
        **more,
    )


def template(given: str | None) -> str | None:
    """Return the value of ``--chat-template``: the text of a file, or what was given if it is jinja text or a name.

    Jinja text has a brace. The path of a file has a dot or a slash, and the name of a template has none.

    Raises:
        OSError: the file cannot be read.
    """
    if given is None or "{" in given or not ("." in given or "/" in given):
        return given
    try:
        return Path(given).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{given} is not UTF-8 text: {error}", param_hint="--chat-template") from error


def engine_options(given: list[str] | None, base_url: str | None) -> dict[str, Any]:
    """Return the options of the engine, from ``--option`` and ``--base-url``."""
    options = key_values(given or [], "--option")
    for key in options:
        if key in NOT_OPTIONS:
            raise typer.BadParameter(f"{key} is not an engine option; {NOT_OPTIONS[key]}", param_hint="--option")
    if base_url is not None:
        if "base_url" in options:
            raise typer.BadParameter("base_url is given more than once", param_hint="--base-url")
        options["base_url"] = base_url
    return options


def engine_flags(given: list[str], own: Iterable[str]) -> list[str]:
    """Return ``["max_model_len=4096", "enforce_eager=true"]`` for ``--max-model-len 4096 --enforce-eager``.

    Args:
        given: flags that the command does not have, each with its value or without one; ``--no-x`` is ``x=false``.
        own: the command's own flags, to tell a misspelt one.
    """
    found, rest = [], list(given)
    while rest:
        flag, sign, value = rest.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or not name.isidentifier():
            raise typer.BadParameter(f"expected a flag of the engine such as --dtype bfloat16, got {flag!r}")
        if meant := nearest(flag, own):
            raise typer.BadParameter(f"there is no flag {flag}; did you mean {meant}?")
        if not sign:
            has_value = bool(rest) and not rest[0].startswith("--")
            name, off = (name, False) if has_value else (name.removeprefix("no_"), name.startswith("no_"))
            value = rest.pop(0) if has_value else "false" if off else "true"
        found.append(f"{name}={value}")
    return found


def key_values(pairs: list[str], flag: str) -> dict[str, Any]:
    """Return ``{"dtype": "bfloat16", "seed": 1}`` for ``["dtype=bfloat16", "seed=1"]``; values may be JSON."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.isidentifier():
            raise typer.BadParameter(f"expected KEY=VALUE, got {pair!r}", param_hint=flag)
        if key in found:
            raise typer.BadParameter(f"{key} is given more than once", param_hint=flag)
        try:
            found[key] = strict_json.loads(value)
        except (ValueError, RecursionError) as error:
            if value.startswith(("{", "[")):
                raise typer.BadParameter(f"{key} is not valid JSON: {error}", param_hint=flag) from error
            found[key] = value
    return found


# Sampling parameters --------------------------------------------------------------------------------------------------


def sampling_flags(*without: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: its parameter `sampling` becomes a flag for each field and alias of `SamplingParams`.

    The command gets a dict of those that were given, under the names that were given, for `SamplingParams.make`.

    Args:
        without: fields that the command has no flags for.
        defaults: what the help says of fields for which the command has another default.
    """
    fields = {field.name: field for field in dataclasses.fields(SamplingParams) if field.name not in without}
    flags = {name: _flag(name, field, defaults) for name, field in fields.items()}
    flags |= {
        alias: _flag(alias, fields[name], defaults, hidden=True) for alias, name in ALIASES.items() if name in fields
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            sampling = {name: given.pop(name) for name in flags}
            sampling = {name: value for name, value in sampling.items() if value not in (None, [], ())}
            command(**given, sampling={name: _value(name, value) for name, value in sampling.items()})

        signature = inspect.signature(command, eval_str=True)
        parameters = [each for each in signature.parameters.values() if each.name != "sampling"]
        run.__signature__ = signature.replace(parameters=[*parameters, *flags.values()])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in (*parameters, *flags.values())}
        return run

    return decorate


def _flag(
    name: str, field: dataclasses.Field[Any], defaults: Mapping[str, Any], *, hidden: bool = False
) -> inspect.Parameter:
    """Return the parameter that typer makes a flag of: for a field, or for one of its aliases, which is not listed."""
    option = typer.Option(
        None,
        help=_help(field, defaults.get(field.name, getattr(SamplingParams(), field.name))),
        hidden=hidden,
        metavar=_metavar(field),
        rich_help_panel=SAMPLING,
    )
    # typer hands numbers over as texts: `_number` parses them, and its errors quote what the user typed.
    kind = {int: str, float: str, list[int]: list[str]}.get(_kind(field), _kind(field))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def _kind(field: dataclasses.Field[Any]) -> Any:
    """Return the type of a flag: ``int`` for ``int | None``, ``list[str]`` for ``tuple[str, ...]`` and a mapping."""
    hint = _HINTS[field.name]
    if get_origin(hint) is tuple:
        return list[get_args(hint)[0]]  # type: ignore[misc]
    if get_origin(hint) is not None and issubclass(get_origin(hint), Mapping):
        return list[str]
    return next((each for each in get_args(hint) if each is not NoneType), hint)


def _metavar(field: dataclasses.Field[Any]) -> str | None:
    """Return what the help shows for the value; None leaves it to typer."""
    if field.name == "engine_kwargs":
        return "KEY=VALUE"
    kind = _kind(field)
    if kind in (int, float):
        return f"<{kind.__name__}{'|none' * _may_be_none(field)}>"
    return f"<{get_args(kind)[0].__name__}>" if get_origin(kind) is list else None


def _may_be_none(field: dataclasses.Field[Any]) -> bool:
    """Return whether None is a value that differs from not giving the parameter."""
    return NoneType in get_args(_HINTS[field.name]) and field.default is not None


def _help(field: dataclasses.Field[Any], default: Any) -> str:
    """Return the field's line in the docstring of `SamplingParams`, with its default and its aliases."""
    # The default follows in the form that all flags share.
    text = _IN_FLAGS.get(field.name) or re.sub(r" Default [\d.]+\.$", "", _DESCRIPTIONS.get(field.name, ""))
    parts, kind = [text[:1].upper() + text[1:]], _kind(field)
    if kind in (int, float) and default is not None:
        parts.append(f"Default: {default:g}.")
    if kind is bool and field.default is not None:
        parts.append(f"Default: {'yes' if default else 'no'}.")
    if get_origin(kind) is list:
        parts.append("Can be repeated.")
    if aliases := [as_flag(alias) for alias, name in ALIASES.items() if name == field.name]:
        parts.append(f"Also {', '.join(aliases)}.")
    return " ".join(filter(None, parts))


def _value(name: str, given: Any) -> Any:
    """Return what a flag means to `SamplingParams`."""
    field = SamplingParams.__dataclass_fields__[ALIASES.get(name, name)]
    kind, may_be_none = _kind(field), _may_be_none(field)
    if field.name == "engine_kwargs":
        return key_values(given, "--engine-kwargs")
    if kind == list[int]:
        return [_number(name, each, int, may_be_none) for each in given]
    return _number(name, given, kind, may_be_none) if kind in (int, float) else given


def _number(name: str, given: str, kind: type[int] | type[float], may_be_none: bool) -> float | None:
    if may_be_none and given.lower() == "none":
        return None
    try:
        return kind(given)
    except ValueError:
        expected = ("an integer" if kind is int else "a number") + " or none" * may_be_none
        raise typer.BadParameter(f"expected {expected}, got {given!r}", param_hint=as_flag(name)) from None


#: What the docstring says with Python's values, or of a TensorDict.
_IN_FLAGS = {
    "max_new_tokens": "Answer length limit in tokens; none fills the model's context.",
    "top_k": "Keep this many of the likeliest tokens; 0 or -1 keeps all, as without this flag. Applied first.",
    "num_samples": "Answers per prompt, each on a line that says which `sample` it is.",
    "seed": "Fixes the answers: each gets a seed derived from this one.",
    "do_sample": "--no-do-sample is temperature 0. It follows from the temperature if it is not given.",
}
_HINTS = get_type_hints(SamplingParams)
#: The lines of the docstring under "Attributes:", by name.
_DESCRIPTIONS = {
    name: " ".join(text.split())
    for name, text in re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(SamplingParams) or "", re.MULTILINE)
}
