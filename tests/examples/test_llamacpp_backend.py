"""The example of a plugin for llama.cpp is short. `make test-llamacpp` runs it."""

from pathlib import Path


def test_the_plugin_is_80_lines() -> None:
    source = Path(__file__).parents[2] / "examples" / "llamacpp_backend" / "llamacpp_backend.py"
    assert len(source.read_text(encoding="utf-8").splitlines()) <= 80
