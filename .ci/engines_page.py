"""Run `corelm conformance` on the engines of this repository, and write docs/_reports from what it finds.

The site shows these reports: docs/engines.md, docs/backends.

.venv/bin/python .ci/engines_page.py            run all engines, each in the environment that make builds for it
.venv/bin/python .ci/engines_page.py vllm       run one
.venv/bin/python .ci/engines_page.py toy        write what the toy declares
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "reports"
SHOWN = ROOT / "docs" / "_reports"
sys.path[:0] = [str(ROOT / "tests")]

from engines.vllm.launch import VLLMServerProcess  # noqa: E402
from helpers.cpu_engines import ENGINES  # noqa: E402
from helpers.tiny_models import tiny_model, tiny_tokenizer  # noqa: E402

#: What the command is told beyond how to open the engine.
MORE = {
    "transformers": [
        "--keeps-cache-in-flight",
        *("--engine-sampling", '{"num_beams": 2, "temperature": 0.0, "engine_kwargs": {"no_repeat_ngram_size": 1}}'),
    ],
    "vllm": ["--engine-sampling", '{"engine_kwargs": {"logit_bias": {"7": 20.0}}}'],
    "sglang": ["--engine-sampling", '{"engine_kwargs": {"logit_bias": {"7": 20.0}}}'],
    # Every draw is a request to a server that shares the processors with the kit.
    "openai": ["--draws", "500"],
}
MORE["ray"] = MORE["transformers"]
NAMES = ("transformers", "vllm", "sglang", "openai", "ray")


@contextmanager
def ready(name: str, model: Path) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, str]]]:
    """Start the server that an engine needs, if it needs one.

    Yields:
        The interpreter of the command that tests the engine, the engine's options, and further environment variables.
    """
    if name == "openai":
        python, log = ENGINES["vllm"]["python"], REPORTS / "server.txt"
        environment = ENGINES["vllm"]["env"]
        with VLLMServerProcess(model, log, development=False, python=python, environment=environment) as server:
            yield (
                sys.executable,
                {"base_url": server.url, "tokenizer": str(model)},
                {"CORELM_OPENAI_API_KEY": server.key},
            )
    elif name == "ray":
        options = {"inner": "transformers", "dtype": "float32", "num_cpus": 0.2}
        yield str(ROOT / ".venv-ray" / "bin" / "python"), options, {}
    else:
        yield sys.executable, {k: v for k, v in ENGINES[name].items() if name != "transformers" or k != "python"}, {}


def command(name: str, model: Path, options: Mapping[str, Any]) -> list[str]:
    """Return the command that tests an engine."""
    pairs = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()]
    given = [part for pair in pairs for part in ("--option", pair)]
    return ["conformance", name, "--model", str(model), *given, *MORE[name], "--output", str(REPORTS / name)]


def run(name: str, model: Path) -> None:
    """Test an engine; its report is then in `REPORTS`."""
    with ready(name, model) as (python, options, environment):
        line = command(name, model, options)
        print("corelm", shlex.join(line), flush=True)
        ended = subprocess.run([python, "-m", "corelm_cli", *line], env={**os.environ, **environment})
    if ended.returncode not in (0, 1):
        sys.exit(f"{name} was not tested")


def summary(suite: dict[str, Any]) -> dict[str, Any]:
    """Return what the site shows of the report of an engine."""
    themes: dict[str, Counter[str]] = defaultdict(Counter)
    for test in suite["tests"]:
        themes[test["theme"]][test["outcome"]] += 1
    return {
        # Without the interpreter of an engine in another environment.
        "software": suite["software"].partition(" of ")[0],
        "largest_difference": float(f"{suite['largest_difference']:.1e}"),
        "counts": suite["counts"],
        "declares": suite["declares"],
        "themes": {theme: dict(themes[theme].most_common()) for theme in sorted(themes)},
        "broken": list(broken(suite)),
    }


def broken(suite: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each promise that was not kept, or could not be shown."""
    for test in suite["tests"]:
        if test["outcome"] in ("failed", "xfailed", "xpassed"):
            name = test["test"].removeprefix("test_").replace("_", " ")
            case = f" ({test['case']})" if test["case"] else ""
            yield f"{name}{case}: {test['outcome']}, {test['reason'].splitlines()[0]}"


def toy() -> dict[str, Any]:
    import corelm
    from corelm_testing.base import engine_facts

    with corelm.get_backend("toy") as backend:
        facts = engine_facts(backend)
    return {"software": facts["software"], "declares": facts["declares"]}


def save(name: str, report: dict[str, Any]) -> None:
    (SHOWN / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    REPORTS.mkdir(exist_ok=True)
    model = REPORTS / "model"
    # Heads large enough for vLLM on a CPU.
    tiny_model(hidden_size=128).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    for name in sys.argv[1:] or (*NAMES, "toy"):
        if name == "toy":
            save(name, toy())
            continue
        run(name, model)
        save(name, summary(json.loads((REPORTS / f"{name}.json").read_text())["suites"][0]))


if __name__ == "__main__":
    main()
