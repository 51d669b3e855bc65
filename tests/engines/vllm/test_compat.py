"""The exceptions of the installed version of vLLM are found."""

from __future__ import annotations

import pytest
from vllm.exceptions import VLLMClientError

from vllm_backend.compat import refusals


def test_a_bad_parameter_is_a_refusal() -> None:
    from vllm import SamplingParams

    with pytest.raises(refusals()):
        SamplingParams(temperature=-1.0)
    assert VLLMClientError in refusals()
