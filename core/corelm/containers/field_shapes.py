"""Which fields of `LogProbs` are not one value a token, and what stands in the pads of a field."""

from __future__ import annotations

#: Ids of all tokens of a row, one after another, so of a length of their own. No id is negative, but the pads are.
SETS = "kept_ids"
#: How many of these ids belong to each token.
COUNTS = "kept_counts"
#: A row of k values for each token.
WIDE = frozenset({"top_ids", "top_log_probs"})
#: The fields that say over which ids the log-probs were normalised, and those about the most probable ids.
KEPT, TOP = (SETS, COUNTS, "kept_log_mass"), ("top_ids", "top_log_probs", "tail_log_mass")
#: What stands in the pads of fields that hold ids, and where nothing was scored. It is 0 in the others.
NO_ID = dict.fromkeys((SETS, "top_ids"), -1)
