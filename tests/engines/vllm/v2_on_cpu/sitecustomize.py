"""Let vLLM's V2 model runner start on a CPU, in all processes that have this folder on PYTHONPATH; see `interpreted`.

Python imports a module of this name when it starts. vLLM looks for Triton before it loads its plugins.
"""

from types import SimpleNamespace

from triton.backends import backends

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)  # type: ignore[assignment]
