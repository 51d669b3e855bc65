"""The modules of core that need a library which the tests' environment may lack."""

from importlib.util import find_spec

#: By the beginning of their names.
NEEDED = {
    "corelm_interop.torchrl": "torchrl",
    "corelm_engine_kit": "httpx2",
    "corelm_interop.inspect_": "inspect_ai",
    **dict.fromkeys(("corelm_serve.app", "corelm_serve.connection", "corelm_serve.exchange"), "starlette"),
    **dict.fromkeys(("corelm_serve.chat", "corelm_serve.completions", "corelm_serve.generation"), "starlette"),
    "corelm_serve.server": "uvicorn",
    "corelm_interop.lm_eval_": "lm_eval",
    "corelm_interop.telemetry": "opentelemetry",
}


def missing_for(module: str) -> str | None:
    """Return the library that a module needs and that is not installed here; None if there is none."""
    needed = (library for name, library in NEEDED.items() if module.startswith(name))
    return next((library for library in needed if find_spec(library) is None), None)
