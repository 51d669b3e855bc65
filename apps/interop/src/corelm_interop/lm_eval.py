"""lm-eval 0.4.13 or newer: every backend is its model `corelm`::

    python -m corelm_interop.lm_eval --model corelm --model_args backend=vllm,model=PATH --tasks TASK

lm-eval finds no models in other packages by itself, so this command registers ours and then runs lm-eval's own command
line. A program calls `register` once, or makes a `CoreLM` and passes it to ``lm_eval.simple_evaluate``. See
docs/lm-eval.md.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from corelm.errors import CoreLMError, EngineError, how_to_install

__all__ = ["CoreLM", "main", "register"]  # noqa: F822

#: The name of the model in lm-eval, and the class, which is imported when lm-eval asks for it.
_NAME, _TARGET = "corelm", "corelm_interop.lm_eval_model:CoreLM"


def register() -> None:
    """Make `corelm` a model of lm-eval in this process. Calling it again changes nothing.

    Raises:
        ImportError: lm-eval is not installed.
    """
    try:
        # lm-eval registers its own models only while its registry is empty, so they have to come first.
        import lm_eval.models  # noqa: F401
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise ImportError(f"corelm_interop.lm_eval needs lm-eval: {how_to_install('lm-eval>=0.4.13')}") from error
    if _NAME not in model_registry:
        model_registry.register(_NAME, target=_TARGET)
    logging.getLogger("lm_eval.evaluator").addFilter(_without_pretrained)


def _without_pretrained(record: logging.LogRecord) -> bool:
    """Correct lm-eval's advice to apply a chat template: it takes `pretrained` for the only name of a model."""
    if isinstance(record.msg, str):
        record.msg = record.msg.replace("pretrained=None appears", "the model appears")
    return True


def main() -> None:
    """Run lm-eval's command line, on the arguments of this process, with the model `corelm`."""
    register()
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except EngineError:
        # Its cause says what happened in the engine.
        raise
    except CoreLMError as error:
        sys.exit(f"error: {error}")


def __getattr__(name: str) -> Any:
    # The class needs lm-eval, and everything else in this module can be imported without it.
    if name == "CoreLM":
        register()
        from corelm_interop.lm_eval_model import CoreLM

        return CoreLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    main()
