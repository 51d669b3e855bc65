"""`refused`: what an error carries for programs, which its words may not replace."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from corelm.errors import CoreLMError


@contextmanager
def refused(kind: type[CoreLMError], **attributes: Any) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error of this class with these attributes: `field`, `rows`, `capability`.

    Tests assert the words of a message only where it says what to type.
    """
    with pytest.raises(kind) as caught:
        yield caught
    found = {name: getattr(caught.value, name) for name in attributes}
    assert found == attributes, f"{found} instead of {attributes}: {caught.value}"
