"""Run `corelm conformance` on the engines of this repository, and write docs/engines.md from its reports.

.venv/bin/python .ci/engines_page.py            run all engines, each in the environment that make builds for it
.venv/bin/python .ci/engines_page.py vllm       run one again, and write the page from all reports that are there
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "reports"
sys.path[:0] = [str(ROOT / "tests")]

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
}
HEAD = """\
# The engines

What the engines of this repository declare, and which of their promises the [conformance kit](conformance.md) has
seen kept. `corelm conformance` wrote the reports, and `.ci/engines_page.py` this page from them. All ran on a CPU in
float32, on a random model of two layers with wide weights, next to a plain float32 forward of one row.
`corelm conformance NAME --model PATH` does the same on any installed backend.
"""


def command(name: str, model: Path) -> list[str]:
    """Return the command that tests an engine."""
    options = {key: value for key, value in ENGINES[name].items() if name != "transformers" or key != "python"}
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
        software = suite["software"].partition(" of ")[0]
        yield f"| {name} | {software} | {counts} | {suite['largest_difference']:.1e} |"
    yield from (
        "",
        "## What they declare",
        "",
        f"| capability | {' | '.join(suites)} |",
        "|---" * (len(suites) + 1) + "|",
    )
    for capability in next(iter(suites.values()))["declares"]:
        cells = (declared(suite["declares"].get(capability)) for suite in suites.values())
        yield f"| `{capability}` | {' | '.join(cells)} |"
    yield from ("", "## What was found", "", f"| theme | {' | '.join(suites)} |", "|---" * (len(suites) + 1) + "|")
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


def declared(value: Any) -> str:
    """Return what a capability says, in words."""
    if isinstance(value, dict):
        value = [name if span is None else f"{name} {span[0]:g} to {span[1]:g}" for name, span in value.items()]
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    if value is True:
        return "yes"
    return "not said" if value is None else str(value or "no")


def found(suite: dict[str, Any], theme: str) -> str:
    counts = Counter(test["outcome"] for test in suite["tests"] if test["theme"] == theme)
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()) or "–"


def main() -> None:
    REPORTS.mkdir(exist_ok=True)
    model = REPORTS / "model"
    # Heads large enough for vLLM on a CPU.
    tiny_model(hidden_size=128).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    for name in sys.argv[1:] or ENGINES:
        line = command(name, model)
        print("corelm", shlex.join(line), flush=True)
        if subprocess.run([sys.executable, "-m", "corelm", *line]).returncode not in (0, 1):
            sys.exit(f"{name} was not tested")
    reports = {name: REPORTS / f"{name}.json" for name in ENGINES if (REPORTS / f"{name}.json").exists()}
    suites = {name: json.loads(path.read_text())["suites"][0] for name, path in reports.items()}
    (ROOT / "docs" / "engines.md").write_text("\n".join([HEAD, *tables(suites)]).rstrip() + "\n")


if __name__ == "__main__":
    main()
