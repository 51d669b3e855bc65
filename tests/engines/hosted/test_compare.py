"""`corelm_compare` on real engines: none is accused, and what they round is called rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from corelm_compare import SideSpec, compare
from helpers.cpu_engines import ENGINES
from helpers.planted_defects import PROMPTS


def _sides(folder: Path, engine: str, dtype: str) -> list[SideSpec]:
    options = {**ENGINES[engine], "dtype": dtype}
    return [
        SideSpec(backend="transformers", model=folder, options={"dtype": dtype}, name="here"),
        SideSpec(backend=engine, model=str(folder), options=options),
    ]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_real_engine_agrees_with_transformers(engine: str, folder: Path) -> None:
    found = compare(_sides(folder, engine, "float32"), PROMPTS)
    print(found, *found.own, sep="\n")
    assert (found.verdict, found.causes, found.exit_code) == ("agree", (), 0)
    assert any(gap.kind == "sampled" and gap.one == engine and gap.count > 20 for gap in found.own)


def test_bfloat16_is_rounding(folder: Path) -> None:
    found = compare(_sides(folder, "vllm", "bfloat16"), PROMPTS)
    print(found)
    assert found.verdict == "rounding" and {cause.id for cause in found.causes} == {"dtype"}
