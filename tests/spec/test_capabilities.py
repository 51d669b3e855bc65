"""Capabilities: what a plugin declares, and mistakes in it."""

from __future__ import annotations

import pytest

from corelm.errors import InvalidRequestError
from corelm.spec import Capabilities


def test_a_misspelt_sampling_parameter_is_refused_and_the_nearest_one_suggested():
    with pytest.raises(InvalidRequestError, match="no field 'temprature'; did you mean 'temperature'") as caught:
        Capabilities(vocab_size=7, max_context=None, sampling={"top_k": None, "temprature": (0.0, 2.0)})
    assert caught.value.field == "sampling"
