"""The modules of core that need a library which the tests' environment may lack."""

from __future__ import annotations

from importlib.util import find_spec

#: By the beginning of their names.
NEEDED = {
    "corelm.interop.torchrl": "torchrl",
    "corelm.support": "httpx",
    "corelm.interop.inspect_": "inspect_ai",
    **dict.fromkeys(("corelm.serving.app", "corelm.serving.connection", "corelm.serving.exchange"), "starlette"),
    **dict.fromkeys(("corelm.serving.chat", "corelm.serving.completions", "corelm.serving.generation"), "starlette"),
    **dict.fromkeys(("corelm.serving.server", "corelm.serving.tokens"), "uvicorn"),
    "corelm.interop.lm_eval_": "lm_eval",
    "corelm.wrappers.telemetry": "opentelemetry",
}


def missing_for(module: str) -> str | None:
    """Return the library that a module needs and that is not installed here; None if there is none."""
    needed = (library for name, library in NEEDED.items() if module.startswith(name))
    return next((library for library in needed if find_spec(library) is None), None)
