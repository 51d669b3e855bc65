"""`FastDecoder`: decoding with a roomy cache and quick products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers_backend.decoding import Decoder
from transformers_backend.fast.cache import roomy_cache
from transformers_backend.fast.onednn import quick_products


class FastDecoder(Decoder):
    @contextmanager
    def accelerated(self) -> Iterator[None]:
        with quick_products(self._engine.base):
            yield

    def _new_cache(self) -> Any:
        return roomy_cache(self._engine.base.config)
