"""Which hooks of an engine may be repeated, which wait for the calls under way, and which need what."""

from __future__ import annotations

#: Hooks that may be repeated: repeating them changes nothing but the time taken.
RETRIED = frozenset({"tokenize", "generate", "score_logprobs"})
#: Hooks that do not wait for the calls under way: `abort` ends one of them, and `health` must answer at any time.
OUT_OF_TURN = frozenset({"abort", "health"})
#: Hooks whose results depend on the weights.
READ_WEIGHTS = frozenset({"generate", "score_logprobs"})
#: Hooks that go on while weights are updated in flight.
GO_ON = frozenset({"generate"})
