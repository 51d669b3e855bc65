"""TorchRL, for the tests that are about it."""

import pytest


def skip_without_torchrl() -> None:
    pytest.importorskip("torchrl", reason="TorchRL is not installed: no release of it supports tensordict 0.15 yet")
