"""Which fields of `LogProbs` are not one value a token, and what stands in the pads of a field."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import NestedKey
from torch import Tensor

from corelm.errors import InvalidRequestError

#: Ids of all tokens of a row, one after another: a row of this field is not as long as its tokens. Pads are negative.
SETS = "kept_ids"
#: How many of these ids belong to each token.
COUNTS = "kept_counts"
#: A row of k values for each token.
WIDE = frozenset({"top_ids", "top_log_probs"})
#: The fields that say over which ids the log-probs were normalised, and those about the most probable ids.
KEPT, TOP = (SETS, COUNTS, "kept_log_mass"), ("top_ids", "top_log_probs", "tail_log_mass")
#: What stands in the pads of fields that hold ids, and where nothing was scored. It is 0 in the others.
NO_ID = dict.fromkeys((SETS, "top_ids"), -1)


def must_be_of_one_width(row_values: Sequence[Tensor], key: NestedKey) -> None:
    """Refuse rows that have different numbers of values a token."""
    for row, values in enumerate(row_values):
        if values.shape[1:] != row_values[0].shape[1:]:
            here, first = ([*one.shape[1:]] for one in (values, row_values[0]))
            what = f"has {here} values a token, and row 0 has {first}"
            raise InvalidRequestError(
                f"{key}: row {row} {what}; read them apart, or give all rows the same top_logprobs or top_k",
                field=str(key),
                problems={row: what},
            )
