"""Options that belong to a server and to an engine in this process are told apart before anything is opened."""

from __future__ import annotations

from typing import Any

import pytest

from corelm.errors import InvalidRequestError
from vllm_backend import VLLMBackend


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"dtype": "float32"}, "where the server is started"),
        ({"engine": "sync"}, "where the server is started"),
        ({"max_retrys": 3}, "did you mean 'max_retries'"),
    ],
)
def test_a_server_takes_no_options_of_an_engine(options: dict[str, Any], hint: str) -> None:
    with pytest.raises(InvalidRequestError, match=hint) as caught:
        VLLMBackend.open(base_url="http://127.0.0.1:1", **options)
    assert caught.value.field in options
