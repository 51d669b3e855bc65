"""Decode long replies of an SGLang server without a Python list for every token.

A decoded reply is a dict as `json` would make it, without its text. Its lists of ``[logprob, id, text]`` are `Entries`.
Only replies that are built as expected are decoded so; all others are decoded plainly, and `protocol` says what is
wrong with them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from corelm_engine_kit import decoder_of

try:
    import msgspec
except ImportError:
    msgspec = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Entries:
    """A list of ``[logprob, id, text]``, without the texts.

    Attributes:
        ids: of each entry, the id.
        logprobs: of each entry after the first ones without a log-prob, the log-prob.
        without: how many entries at the start have None: 0 or 1.
    """

    ids: list[int]
    logprobs: array[float]
    without: int

    def __len__(self) -> int:
        return len(self.ids)

    def plain(self) -> list[list[Any]]:
        """Return the entries as `json` decodes them, without their texts."""
        values = [None] * self.without + self.logprobs.tolist()
        return [[value, token, None] for value, token in zip(values, self.ids, strict=True)]


#: The lists of entries, and the other fields of ``meta_info`` that `protocol` reads.
_LISTS = ("output_token_logprobs", "input_token_logprobs")
_FORMS = ("", "_b64", "_b64_dtype")
_TOP = [f"{side}_top_logprobs" for side in ("input", "output")]
_ARRAYS = [f"{side}_{part}_flat{form}" for side in _TOP for part in ("idx", "val") for form in _FORMS]
_FIELDS = (
    "id",
    "finish_reason",
    "cached_tokens",
    "weight_version",
    "weight_versions",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
    *(f"{side}{field}" for side in _TOP for field in ("", "_shape", "_null_prefix")),
    *_ARRAYS,
)

if msgspec is None:
    decode = decoder_of(None)
else:
    # Without `gc=False` the garbage collector would look at all of them, and at the rest of the process in between.
    class _Entry(msgspec.Struct, array_like=True, gc=False):  # type: ignore[call-arg]
        logprob: float | None
        id: int

    _Meta = msgspec.defstruct(
        "_Meta",
        [
            *((name, Any, msgspec.UNSET) for name in _FIELDS),
            *((name, list[_Entry] | None | msgspec.UnsetType, msgspec.UNSET) for name in _LISTS),
        ],
    )
    _Reply = msgspec.defstruct("_Reply", [("meta_info", _Meta), ("output_ids", Any, msgspec.UNSET)])
    _reply = msgspec.json.Decoder(_Reply)

    def _compact(body: bytes | bytearray) -> dict[str, Any]:
        """Return a reply; a ValueError if it has no compact form."""
        found = _set_fields(_reply.decode(body))
        meta = found["meta_info"] = _set_fields(found["meta_info"])
        for name in _LISTS:
            if meta.get(name):
                meta[name] = _entries(meta[name])
        return found

    def _entries(entries: list[Any]) -> Entries:
        # Comprehensions take half the time of `map` with an `attrgetter`.
        values = [entry.logprob for entry in entries]
        without = int(values[0] is None)
        if without:
            del values[0]
        if None in values:
            raise ValueError("an entry after the first one has no log-prob")
        return Entries([entry.id for entry in entries], array("d", values), without)

    def _set_fields(struct: Any) -> dict[str, Any]:
        """Return the fields that a reply has."""
        fields = ((name, getattr(struct, name)) for name in struct.__struct_fields__)
        return {name: value for name, value in fields if value is not msgspec.UNSET}

    decode = decoder_of(_compact)
