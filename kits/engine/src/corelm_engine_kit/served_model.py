"""What is known about the model of a server: the caller's hints, and the model's files as far as they can be read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from corelm.errors import CapabilityError, described
from corelm.spec import saved_shapes
from corelm.validate import count, invalid, token_ids
from corelm_engine_kit.eos import eos_token_ids
from corelm_engine_kit.hints import why_unreadable
from corelm_engine_kit.hub import hub_options


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHints:
    """What the caller says about the model of a server. Each hint replaces what would be read.

    Attributes:
        name: the model's name in requests; None for the server's only model.
        tokenizer: a tokenizer, or the folder or hub name of one; None for the model's own.
        vocab_size: ids are below it; None to read the model's files.
        max_context: the longest prompt + answer, in tokens; None for what the server says.
        eos_token_ids: the ids with which the server ends every answer; None to read the model's files.
        trust_remote_code: allow Python code that comes with files that the caller names.
    """

    name: str | None = None
    tokenizer: Any = None
    vocab_size: int | None = None
    max_context: int | None = None
    eos_token_ids: Iterable[int] | None = None
    trust_remote_code: bool = False

    def read_tokenizer(self, model: str, trusted: bool = False) -> Any:
        """Return the tokenizer that the caller gives or names, or else that of the model.

        Args:
            model: the folder or hub name of the model.
            trusted: whether the caller trusts code that comes with it: a server must not choose whose code runs here.

        Raises:
            InvalidRequestError: it cannot be read; `field` is ``tokenizer``.
        """
        given = self.tokenizer
        if given is not None and not isinstance(given, (str, os.PathLike)):
            return given
        from transformers import AutoTokenizer

        source, trusted = (model, trusted) if given is None else (given, self.trust_remote_code)
        try:
            return AutoTokenizer.from_pretrained(source, trust_remote_code=trusted, **hub_options(source))
        except (OSError, ValueError) as error:
            raise invalid(
                "tokenizer",
                f"that of {os.fspath(source)!r} {why_unreadable(error)}; pass tokenizer=, the server's own tokenizer "
                "or its folder",
            ) from error

    def eos_ids(self, *sources: Any, vocab_size: int) -> frozenset[int]:
        """Return the ids with which the server ends every answer: the caller's, or else those that the sources name.

        Args:
            sources: see `eos_token_ids`.
            vocab_size: ids are below it.

        Raises:
            InvalidRequestError: the caller's are not ids of the vocabulary; `field` is ``eos_token_ids``.
        """
        if self.eos_token_ids is None:
            return eos_token_ids(*sources, vocab_size=vocab_size)
        given = token_ids("eos_token_ids", self.eos_token_ids)
        if max(given, default=0) >= vocab_size:
            raise invalid("eos_token_ids", f"the vocabulary has the ids 0 to {vocab_size - 1}, got {max(given)}")
        return frozenset(given)

    def context(self, stated: Any) -> int | None:
        """Return the longest prompt + answer; None if neither the caller nor the server says it.

        Args:
            stated: what the server says.

        Raises:
            InvalidRequestError: the caller's number is more than the server's.
        """
        stated = stated if type(stated) is int and stated > 0 else None
        if self.max_context is None:
            return stated
        given = count("max_context", self.max_context, 2)
        if stated is not None and given > stated:
            raise invalid("max_context", f"the server's context is {stated} tokens, got {given}")
        return given


def model_config(model: str, trust_remote_code: bool = False) -> tuple[Any, str]:
    """Return the configuration of a model; None and the reason if it cannot be read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code), ""
    except (OSError, ValueError) as error:
        return None, why_unreadable(error)


def generation_config(model: Any) -> Any:
    """Return the generation config of a model; None if it has none, or is not named."""
    from transformers import GenerationConfig

    if not (isinstance(model, str) and model):
        return None
    try:
        return GenerationConfig.from_pretrained(model, **hub_options(model))
    except (OSError, ValueError):
        return None


def configured_shapes(
    config: Any, trust_remote_code: bool, *, option: str, capability: str
) -> Mapping[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a model, which may have no weights anywhere.

    Args:
        config: the model's configuration, or the folder or hub name of one.
        trust_remote_code: whether code that comes with it may run.
        option: what needs them, for the message.
        capability: what is missing without them.

    Raises:
        CapabilityError: transformers does not know the model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        if isinstance(config, str):
            config = AutoConfig.from_pretrained(config, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise CapabilityError(
            f"{option}: new weights are compared with the model first, but transformers cannot tell their names from "
            f"its configuration ({described(error)}); have the model's folder on this machine",
            capability=capability,
        ) from error
    return saved_shapes(empty)
