"""What a hook raises, and what its caller gets: the table in `corelm.spec.hookspecs`."""

import pytest

from corelm.errors import (
    BackendTimeoutError,
    CapabilityError,
    CoreLMError,
    EngineError,
    InvalidRequestError,
    ProvenanceMismatchError,
)
from helpers.each import each
from helpers.fakes import SHORT, fake


@each(
    "raised, kind",
    [
        (CapabilityError("top_p with min_p", capability="min_p"), None),
        (InvalidRequestError("temperature: too cold", field="temperature", problems={1: "too cold"}), None),
        (EngineError("dead", usable=False), None),
        (ProvenanceMismatchError("another distribution"), None),
        (TimeoutError("too slow"), BackendTimeoutError),
        (RuntimeError("out of memory"), EngineError),
        (NotImplementedError(), EngineError),
    ],
)
def test_the_caller_gets_the_error_that_the_table_says(raised: Exception, kind: type[CoreLMError] | None):
    def bend(result):
        raise raised

    for call in (lambda backend: backend.generate([[1], [3]], SHORT), lambda backend: backend.score_logprobs([[1, 3]])):
        with pytest.raises(CoreLMError) as caught:
            call(fake(bend))
        if kind is None:
            assert caught.value is raised
        else:
            assert type(caught.value) is kind and caught.value.__cause__ is raised
