"""When an engine gets new weights or goes to sleep, as seen from the answers that it is sampling."""

from __future__ import annotations

from typing import Literal

#: `drain`: after the answers under way. `abort`: at once; the answers under way end with the reason `abort`. `now`: at
#: once; the answers under way go on, on the new weights.
When = Literal["drain", "abort", "now"]
#: What can be said of new weights.
WHENS: tuple[When, ...] = ("drain", "abort", "now")
#: What can be said of an adapter: an answer is of one version of it.
WHENS_OF_ADAPTERS = WHENS[:2]
#: What can be said of sleep, in which no answer goes on.
WHENS_OF_SLEEP = WHENS[:2]
