"""Hints for error messages of plugins, and checks of their options, the same as core's."""

from collections.abc import Collection, Iterable

# Plugins take these from `corelm_engine_kit`.
from corelm.spec.other_libraries import instead_of
from corelm.validate import device as torch_device
from corelm.validate import did_you_mean as did_you_mean
from corelm.validate import dtype as torch_dtype
from corelm.validate import invalid
from corelm.validate import refuse_missing_path as refuse_missing_path

__all__ = [
    "did_you_mean", "refuse_missing_path", "refuse_settled", "refuse_unknown_arguments", "torch_device", "torch_dtype",
    "why_unreadable",
]  # fmt: skip


def refuse_unknown_arguments(engine: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse arguments that an engine does not have, before it starts.

    Args:
        engine: its name, for the message.
        given: the names of the arguments.
        known: the names that it has.

    Raises:
        InvalidRequestError: the message says what to give instead; `field` is the unknown one.
    """
    for name in given:
        if name not in known:
            raise invalid(name, f"{engine} has no argument of this name{instead_of(name, known)}")


def why_unreadable(error: Exception) -> str:
    """Return why a file of a model cannot be read, to follow the file's name in a message.

    Args:
        error: what transformers raised.
    """
    # transformers names its option if it would have to run code that comes with the file.
    if "trust_remote_code" in str(error):
        return "comes with Python code that is not trusted"
    return "cannot be read on this machine"


def refuse_settled(engine_kwargs: Iterable[str], settled: Collection[str]) -> None:
    """Refuse names in engine_kwargs that a plugin sets itself.

    Raises:
        InvalidRequestError: one of them is `settled`; `field` is ``engine_kwargs``.
    """
    for name in engine_kwargs:
        if name in settled:
            raise invalid("engine_kwargs", f"{name!r} is not allowed here; corelm decides it")
