"""Run `corelm conformance` on the engines of this repository, and write docs/engines.md from its reports.

.venv/bin/python .ci/engines_page.py            run all engines, each in the environment that make builds for it
.venv/bin/python .ci/engines_page.py vllm       run one again, and write the page from all reports that are there
.venv/bin/python .ci/engines_page.py --pages    run none; write the tables in docs/backends/ again, from docs/engines.md
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "reports"
DOCS = ROOT / "docs"
sys.path[:0] = [str(ROOT / "tests")]

from engines.vllm.launch import VLLMServerProcess  # noqa: E402
from helpers import capability_tables  # noqa: E402
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
#: What the engine of a backend is that works with others.
ENGINE_OF = {"openai": "a vLLM server", "ray": "transformers in an actor"}
HEAD = """\
# The engines

What the engines of this repository declare, and which of their promises the [conformance kit](conformance.md) has
seen kept. `corelm conformance` wrote the reports, and `.ci/engines_page.py` this page from them. All ran on a CPU in
float32, on a random model of two layers with wide weights, next to a plain float32 forward of one row. What the backend
`openai` declares is what the server can do, here a vLLM server, and each test of a distribution draws 500 tokens there
instead of 2,000. What `ray` declares is what its engine can do, here transformers. vLLM and SGLang each ran
in another process (`python=`), to which core does not stream weights. In this process, they also declare
`weight_stream`.
`corelm conformance NAME --model PATH` does the same on any installed backend.
"""


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


def tables(suites: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page's tables."""
    yield "| engine | plugin and engine | tests | largest difference, nats |"
    yield "|---|---|---|---|"
    for name, suite in suites.items():
        counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(suite["counts"].items(), reverse=True))
        # Without the interpreter of an engine in another environment.
        software = ", ".join(filter(None, [suite["software"].partition(" of ")[0], ENGINE_OF.get(name)]))
        yield f"| {name} | {software} | {counts} | {suite['largest_difference']:.1e} |"
    yield from ("", "## What they declare", "")
    yield from capability_tables.tables({name: suite["declares"] for name, suite in suites.items()})
    yield from ("## What was found", "", f"| theme | {' | '.join(suites)} |", "|---" * (len(suites) + 1) + "|")
    themes = sorted({test["theme"] for suite in suites.values() for test in suite["tests"]})
    for theme in themes:
        yield f"| {theme} | {' | '.join(found(suite, theme) for suite in suites.values())} |"
    wrong = list(broken(suites))
    yield from ("", "## What is not as promised", "", *(wrong or ["Every promise that applies was kept."]))


def broken(suites: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each promise that was not kept, or could not be shown."""
    for name, suite in suites.items():
        for test in suite["tests"]:
            if test["outcome"] in ("failed", "xfailed", "xpassed"):
                case = f" ({test['case']})" if test["case"] else ""
                yield (
                    f"- {name}, {test['test'].removeprefix('test_').replace('_', ' ')}{case}: {test['outcome']}, "
                    + (test["reason"].splitlines()[0])
                )


def found(suite: dict[str, Any], theme: str) -> str:
    counts = Counter(test["outcome"] for test in suite["tests"] if test["theme"] == theme)
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()) or "–"


def run(name: str, model: Path) -> None:
    """Test an engine; its report is then in `REPORTS`."""
    with ready(name, model) as (python, options, environment):
        line = command(name, model, options)
        print("corelm", shlex.join(line), flush=True)
        ended = subprocess.run([python, "-m", "corelm", *line], env={**os.environ, **environment})
    if ended.returncode not in (0, 1):
        sys.exit(f"{name} was not tested")


def write_engines() -> None:
    """Write docs/engines.md from all reports that are there."""
    reports = {name: REPORTS / f"{name}.json" for name in NAMES if (REPORTS / f"{name}.json").exists()}
    suites = {name: json.loads(path.read_text())["suites"][0] for name, path in reports.items()}
    (DOCS / "engines.md").write_text("\n".join([HEAD, *tables(suites)]).rstrip() + "\n")


def write_backends() -> None:
    """Write the tables in docs/backends/, from docs/engines.md and from the toy."""
    engines = (DOCS / "engines.md").read_text()
    for name in (*NAMES, "toy"):
        page = DOCS / "backends" / f"{name}.md"
        said = toy() if name == "toy" else capability_tables.column(engines, name)
        page.write_text(capability_tables.with_table(page.read_text(), said))


def toy() -> dict[str, str]:
    import corelm
    from corelm.testing.base import engine_facts

    with corelm.get_backend("toy") as backend:
        return capability_tables.cells(engine_facts(backend)["declares"])


def main() -> None:
    given = sys.argv[1:]
    if given != ["--pages"]:
        REPORTS.mkdir(exist_ok=True)
        model = REPORTS / "model"
        # Heads large enough for vLLM on a CPU.
        tiny_model(hidden_size=128).save_pretrained(model)
        tiny_tokenizer().save_pretrained(model)
        for name in given or NAMES:
            run(name, model)
        write_engines()
    write_backends()


if __name__ == "__main__":
    main()
