"""The settings saved for the answers of a file, without the secrets among the engine options.

A run compares these settings with those of the answers in the output, so a setting that may change an answer must be
recognised, even where its value must not be saved.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from corelm import PolicyOptions
from corelm.spec import FIELDS, SamplingParams
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


def recorded_policy(options: PolicyOptions) -> dict[str, Any]:
    """Return the options for prompts that are not at their default, in JSON types.

    A template's text may be long, so its fingerprint is saved.
    """
    default = PolicyOptions()
    names = (
        "chat_template",
        "template_kwargs",
        "tokenizer_kwargs",
        "truncation",
        "continue_final_message",
        "completion_boundary",
        "response_parser",
    )
    settings = {name: getattr(options, name) for name in names if getattr(options, name) != getattr(default, name)}
    if "{" in settings.get("chat_template", ""):
        settings["chat_template"] = _fingerprint(settings["chat_template"])
    return settings


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
