"""The conformance kit on an engine that is recorded, and on the replay of what was recorded.

The kit opens several backends. Each has its cassette, in the order in which they are opened. Seeds that a test draws
from torch's generator are drawn again at replay, because every test starts from a seed that follows from its name.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import corelm
from corelm import Backend
from corelm_testing.cassette import CassetteRecorder


class OfCassettes:
    """Comes before the kit among the base classes. A subclass defines `open_engine`, or `replays`.

    Attributes:
        folder: where the cassettes are.
        opened: how many backends were opened.
    """

    folder: ClassVar[Path]
    opened: ClassVar[int] = 0

    @pytest.fixture(autouse=True)
    def same_seeds(self, request: pytest.FixtureRequest) -> None:
        torch.manual_seed(zlib.crc32(request.node.name.encode()))

    @classmethod
    def next_path(cls) -> Path:
        cls.opened += 1
        return cls.folder / str(cls.opened)

    @classmethod
    def opening_recorded(cls, open_engine: Callable[..., Backend]) -> Callable[..., Backend]:
        """Return a function that opens an engine with a recorder."""

        def open_it(**options: Any) -> Backend:
            return open_engine(wrappers=[CassetteRecorder(cls.next_path())], **options)

        return open_it

    @classmethod
    def opening_replays(cls, **options: Any) -> Callable[[], Backend]:
        """Return a function that opens the cassettes in the order in which they were recorded."""
        return lambda: corelm.get_backend("cassette", cls.next_path(), match="content", **options)
