"""`engine_kwargs` for an engine in this process: further fields of vLLM's `SamplingParams`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from corelm.validate import invalid, shown
from corelm_engine_kit import did_you_mean

#: The fields that hold an object of vLLM, and its class in ``vllm.sampling_params``.
_OBJECTS = {"structured_outputs": "StructuredOutputsParams", "repetition_detection": "RepetitionDetectionParams"}


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Check that vLLM's `SamplingParams` has these fields.

    Raises:
        InvalidRequestError: it does not have one of them.
    """
    _check("SamplingParams", given, [name for name in known if not name.startswith("_")])


def with_objects(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with an object of vLLM for each dict that stands for one.

    A request to a server has dicts there, and so has the command line. vLLM checks neither the type of the field nor
    the names in a dict: a dict ended the engine (0.32), and its classes drop unknown names.

    Raises:
        InvalidRequestError: a name that the class does not have, or values that it refuses.
    """
    from vllm import sampling_params

    made = dict(fields)
    for name, of in _OBJECTS.items():
        value = fields.get(name)
        if value is None or isinstance(value, kind := getattr(sampling_params, of)):
            continue
        if not isinstance(value, Mapping):
            raise invalid("engine_kwargs", f"expected {name} as a dict or vLLM's {of}, got {shown(value)}")
        _check(of, value, [field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")])
        try:
            made[name] = kind(**value)
        except Exception as error:  # pydantic's, and vLLM's own, which differ between its versions
            raise invalid("engine_kwargs", f"vLLM refuses {name}: {error}") from error
    return made


def _check(owner: str, given: Iterable[str], known: list[str]) -> None:
    for name in given:
        if name not in known:
            raise invalid("engine_kwargs", f"vLLM's {owner} has no field {name!r}{did_you_mean(name, known)}")
