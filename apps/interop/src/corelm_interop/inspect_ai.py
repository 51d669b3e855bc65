"""Inspect (inspect_ai 0.3.285 or newer): any backend as a model, such as ``--model corelm/vllm/PATH``.

inspect_ai imports this module through its entry points, with every other extension, and looks for the provider only
when it needs one. So the module imports nothing heavy. See docs/inspect.md, and `corelm_interop.inspect_provider` for
the arguments of a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from corelm.errors import how_to_install

try:
    from inspect_ai.model import modelapi
except ImportError as error:
    raise ImportError(f"corelm_interop.inspect_ai needs inspect_ai: {how_to_install('inspect-ai>=0.3.285')}") from error

if TYPE_CHECKING:
    from corelm_interop.inspect_provider import CoreLMAPI

__all__ = ["corelm"]


def _models() -> type[CoreLMAPI]:
    from corelm_interop.inspect_provider import CoreLMAPI

    return CoreLMAPI


#: Makes the models whose names begin with ``corelm/``.
corelm = modelapi(name="corelm")(_models)
