"""The settings saved for the answers of a file, without the secrets among the engine options; and their file.

A run compares these settings with those of the answers in the output, so a setting that may change an answer must be
recognised, even where its value must not be saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from corelm import Backend, PolicyOptions
from corelm._version import __version__
from corelm.spec import FIELDS, SamplingParams
from corelm_cli.line_file import INSTEAD, OutputError
from corelm_engine_kit.redaction import is_secret

#: Written instead of a secret.
HIDDEN = "***"
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]*@")


def recorded_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Return the parameters that may change an answer, in JSON types: all that are not at their default, and two more.

    More samples do not change the first ones, so their number is left out.
    """
    default = SamplingParams()
    always, never = ("max_new_tokens", "temperature"), ("num_samples", "do_sample", "engine_kwargs")
    settings = {
        name: getattr(sampling, name)
        for name in FIELDS
        if name not in never and (name in always or getattr(sampling, name) != getattr(default, name))
    }
    if sampling.engine_kwargs:
        # Nothing is left out here: `stop_at_token` is no secret, and changes answers.
        kept = recorded_options(sampling.engine_kwargs)
        settings["engine_kwargs"] = {
            name: kept[name] if name in kept else _fingerprint(json.dumps(value, default=repr))
            for name, value in sampling.engine_kwargs.items()
        }
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def default_sampling(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the parameters that `recorded_sampling` left out because they are at their default."""
    others = (*recorded, "num_samples", "do_sample", "engine_kwargs")
    return {name: getattr(SamplingParams(), name) for name in FIELDS if name not in others}


def recorded_policy(options: PolicyOptions) -> dict[str, Any]:
    """Return the options for prompts that are not at their default, in JSON types.

    A template's text may be long, so its fingerprint is saved.
    """
    default = PolicyOptions()
    names = (
        *("chat_template", "template_kwargs", "tokenizer_kwargs", "truncation"),
        *("continue_final_message", "completion_boundary", "response_parser"),
    )
    settings = {name: getattr(options, name) for name in names if getattr(options, name) != getattr(default, name)}
    if "{" in settings.get("chat_template", ""):
        settings["chat_template"] = _fingerprint(settings["chat_template"])
    return settings


def recorded_engine(backend: Backend) -> dict[str, str]:
    """Return what makes the answers, as the open engine tells it: versions and, if it says so, dtype and device."""
    return {"software": backend.engine.software, **backend.info}


#: The files of a model's or an adapter's folder that decide its answers.
_DECIDING = (
    *("config.json", "generation_config.json", "adapter_config.json", "chat_template*", "tokenizer*", "vocab*"),
    *("added_tokens.json", "special_tokens_map.json", "merges.txt", "*.safetensors*", "*.gguf", "*.model", "*.py"),
    *("pytorch_model*", "adapter_model*", "consolidated*", "params.json", "*.jinja"),
)
_BLOCK, _BLOCKS = 2**16, 256


def files_of(**folders: str | None) -> dict[str, str]:
    """Return the fingerprints of the files in the folders, without names that are not folders of this machine.

    Files of up to 16 MiB count as a whole. Of a larger one count its size and 256 blocks of 64 KiB at equal distances,
    so that the weights of a large model need not be read twice.
    """
    return {name: _of_folder(Path(each)) for name, each in folders.items() if each and Path(each).is_dir()}


def _of_folder(folder: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted({path for pattern in _DECIDING for path in folder.glob(pattern) if path.is_file()}):
        size = path.stat().st_size
        whole.update(os.fsencode(path.name) + f" {size}\n".encode())
        with path.open("rb") as file:
            for begin in range(0, size, max(_BLOCK, size // _BLOCKS)):
                file.seek(begin)
                whole.update(file.read(_BLOCK))
    return f"sha256:{whole.hexdigest()[:16]}"


def _same_folder(one: str, other: Any) -> bool:
    return Path(one).is_dir() and isinstance(other, str) and Path(other).is_dir() and os.path.samefile(one, other)


def recorded_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine options as they are saved.

    - An option whose name says that it is a secret is left out: it changes no answer, and may be replaced by another
      between two runs. In a nested value, three asterisks stand for it.
    - Any other text in a nested value is replaced by a fingerprint, because `headers`, `env` and the like hold secrets
      under any name. Another text has another fingerprint.
    - A user and password in a URL are replaced by three asterisks.
    - Everything else is saved unchanged.
    """
    return {name: _recorded(value, nested=False) for name, value in options.items() if not is_secret(name, value)}


def _recorded(value: Any, *, nested: bool = True) -> Any:
    if isinstance(value, dict):
        return {key: HIDDEN if is_secret(key, each) else _recorded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_recorded(each) for each in value]
    if isinstance(value, str):
        return _fingerprint(value) if nested else _USER_IN_URL.sub(f"{HIDDEN}@", value)
    return value


def _fingerprint(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]}"


#: What a settings file holds; and what it may hold: earlier versions did not save how the engine ran, or the run.
NEEDED = {"corelm", "fingerprint", "settings", "provenance"}
KNOWN = {*NEEDED, "engine", "run"}
#: What tells in `engine` that the model is the same under any name.
IDENTITIES = {
    "model_files": "the files of the model",
    "adapter_files": "the files of the adapter",
    "revision": "the commit of the model",
}


class SettingsFile:
    """``answers.settings.json``: the settings of the answers in ``answers.jsonl``, and what made them.

    `engine` says how the engine ran, `provenance` where the log-probs came from, and `run` when it ran, with which
    versions and on which input, all in the first run; an answer of a later run with another `engine` or `provenance`
    holds its own. Every answer names the fingerprint of its settings, so answers of other settings are recognised even
    if the file is of other answers.

    Attributes:
        settings: those of this run; a model in the same folder keeps the path that is saved for it.
        fingerprint: 16 hex digits of the sha256 of `settings`, as JSON.
        saved: the object in the file; None if there is no file yet.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.saved = self._read()
        before = self.saved and self.saved["settings"].get("model")
        if before and _same_folder(before, self.settings.get("model")):
            self.settings["model"] = before
        self.fingerprint = fingerprint(self.settings)

    def refuse_answers_of(self, made: Any, where: str) -> None:
        """Raise the error that says how the settings of an answer differ from those of this run."""
        if self.saved is None:
            raise OutputError(
                f"{self.path}, which says how the answers were made, is missing; restore it, or {INSTEAD}"
            )
        then = self.saved["settings"]
        if made == self.saved["fingerprint"] == fingerprint(then):
            for name in sorted({*then, *self.settings}):
                was, now = then.get(name), self.settings.get(name)
                if was != now:
                    raise OutputError(f"{where} was made with {name} {was!r}, but {name} is now {now!r}; {INSTEAD}")
        raise OutputError(f"{where} was made with other settings than those in {self.path}; {INSTEAD}")

    def holds_for(self, made: Any) -> bool:
        """Return whether an answer that names this fingerprint has the settings of this run and of the file."""
        return made == self.fingerprint and self.saved is not None and self.saved["fingerprint"] == made

    def save(self, engine: Mapping[str, str], provenance: dict[str, Any] | None, run: Mapping[str, Any]) -> None:
        """Write the file. It is complete, or the old one is kept."""
        made = {
            "corelm": __version__,
            "fingerprint": self.fingerprint,
            "settings": self.settings,
            "engine": dict(engine),
            "provenance": provenance,
            "run": dict(run),
        }
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            # A lone surrogate, as in a path that is not UTF-8, cannot be encoded. backslashreplace writes it as JSON
            # does.
            text = json.dumps(made, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
            unfinished.write_bytes(text.encode(errors="backslashreplace"))
            os.replace(unfinished, self.path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.saved = made

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not NEEDED <= set(found) <= KNOWN or not isinstance(found["settings"], dict):
            raise OutputError(
                f"{self.path} is not a settings file of corelm, but the settings of the answers are written to this "
                "file; move it, or use another --output"
            )
        return found


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Return 16 hex digits that identify the settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
