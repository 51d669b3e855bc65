"""How an SGLang server shows that it works on answers that are not complete yet."""

from __future__ import annotations

from corelm_engine_kit import SignOfWork
from sglang_backend.capabilities import HEALTH_GENERATE, MODEL_INFO
from sglang_backend.protocol import GENERATE

#: `HEALTH_GENERATE` answers once the scheduler has returned a token of any request, so no counters are needed. While
#: the scheduler loads weights it returns none: the server need only be alive.
SIGN = SignOfWork(rows=GENERATE, page=HEALTH_GENERATE, alive=MODEL_INFO)
