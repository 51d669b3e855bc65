"""The header of a cassette: which engine was recorded, and what it can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corelm.errors import CoreLMError
from corelm.spec import Capabilities
from corelm.validate import shown
from corelm_testing.cassette.errors import CassetteError
from corelm_testing.cassette.tokenizer import tokenizer_facts
from corelm_testing.cassette.values import as_json

if TYPE_CHECKING:
    from corelm.backend.engine import OpenEngine


def header_of(engine: OpenEngine, model: str, core: str) -> dict[str, Any]:
    """Return the header for an engine that is open.

    Args:
        model: the name of its model, without what may be secret in a URL.
        core: the version of core.
    """
    declared = {each.name: as_json(getattr(engine.capabilities, each.name)) for each in fields(Capabilities)}
    return {
        "core": core,
        "backend": engine.name,
        "model": model,
        "software": engine.software,
        # The tokenizer's EOS counts for an engine that declares none, and a replay need not have the tokenizer.
        "capabilities": {**declared, "eos_token_ids": sorted(engine.eos_token_ids), "gradients": False},
        "tells_weights": engine.implements("weights_state"),
        "tokenizer": tokenizer_facts(engine.tokenizer),
    }


@dataclass(frozen=True, slots=True)
class Recorded:
    """The engine of a cassette.

    Attributes:
        backend, model, software: its name, its model and the versions of its software.
        capabilities: what it can do, gradients excepted.
        tokenizer: see `tokenizer_facts`.
    """

    backend: str
    model: str
    software: str
    capabilities: Capabilities
    tokenizer: Mapping[str, Any]

    @classmethod
    def of(cls, path: Path, header: Mapping[str, Any]) -> Recorded:
        """Return what a header says. A capability that this version of core does not know is passed over.

        Raises:
            CassetteError: the header is damaged.
        """
        try:
            known = {each.name for each in fields(Capabilities)}
            declared = {name: value for name, value in header["capabilities"].items() if name in known}
            declared["sampling"] = {
                name: None if span is None else (span[0], span[1]) for name, span in declared["sampling"].items()
            }
            return cls(
                str(header["backend"]),
                str(header["model"]),
                str(header["software"]),
                Capabilities(**declared),
                dict(header["tokenizer"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, CoreLMError) as error:
            raise CassetteError(
                f"cassette {path}: its header cannot be read ({type(error).__name__}: {error}); record again"
            ) from error


def refuse_other_engine(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to add calls of one engine to the cassette of another.

    Raises:
        CassetteError: they differ in more than the versions of their software.
    """
    for name in ("backend", "model", "capabilities"):
        if old.get(name) != new[name]:
            was, now = shown(old.get(name)), shown(new[name])
            raise CassetteError(
                f"cassette {path}: it was recorded with another engine: {name} {was}, and this one has {now}; record "
                "it again with record_mode='all', or name another folder"
            )
