"""`FastDecoder`: decoding with quick products."""

from __future__ import annotations

from contextlib import AbstractContextManager

from transformers_backend.decoding import Decoder
from transformers_backend.fast.onednn import quick_products


class FastDecoder(Decoder):
    def accelerated(self) -> AbstractContextManager[None]:
        return quick_products(self._engine.base)
