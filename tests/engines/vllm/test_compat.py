"""The installed version of vLLM has every name that the plugin imports."""

from __future__ import annotations

import pytest
from vllm.exceptions import VLLMClientError

from helpers.vllm_names import NEEDED
from vllm_backend.compat import refusals


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in NEEDED for name in sorted(NEEDED[module])])
def test_a_name_is_where_the_plugin_imports_it_from(module: str, name: str) -> None:
    exec(f"from {module} import {name}", {})


def test_a_bad_parameter_is_a_refusal() -> None:
    from vllm import SamplingParams

    with pytest.raises(refusals()):
        SamplingParams(temperature=-1.0)
    assert VLLMClientError in refusals()
