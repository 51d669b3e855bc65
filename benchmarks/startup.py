"""Start-up time: the processor time of a new interpreter per run.

corelm           import every public name of corelm; torch and tensordict are imported before
corelm --help    the command's help
corelm backends  the command that lists the backends
corelm, …        open a tiny model with `get_backend`, and get the first score, or the first token
transformers     load the same model with ``from_pretrained`` and run its forward once on the same ids

A model is opened with the imports counted, and with torch, transformers and the model's own module imported before.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial

from benchmarks.measure import LONGER, Figure, Way, compare
from benchmarks.models import random_model, tokenizer

EVERY_NAME = """
import time, torch, tensordict
start = time.process_time()
import corelm; [getattr(corelm, name) for name in corelm.__all__]
print(time.process_time() - start)
"""
HELP = "import sys; sys.argv = ['corelm', '--help']; from corelm_cli import main; main()"
LISTING = "import sys; sys.argv = ['corelm', 'backends', '--json']; from corelm_cli import main; main()"

#: Goal: the checks before the first answer, and core's own imports, take at most so much more.
GOAL_OPEN = 1.15
#: What both sides import before anything is counted in the second figure.
_IMPORTED = "from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM"
_TIMED = """
import time, torch
torch.set_num_threads(1)
{before}
start = time.process_time()
{work}
print(time.process_time() - start)
"""
_PLAIN = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (each.from_pretrained({path!r}) for each in (AutoModelForCausalLM, AutoTokenizer))
with torch.no_grad():
    model(**tokenizer("How are you?", return_tensors="pt"))
"""
_OPENED = """
import corelm
backend = corelm.get_backend("transformers", {path!r})
ids = backend.tokenize(["How are you?"]).ids
"""
_ANSWERS = {
    "corelm, first score": _OPENED + "backend.score_logprobs(ids)",
    "corelm, first token": _OPENED + "backend.generate(ids, {{'max_new_tokens': 1}})",
}


def figures(quick: bool) -> Iterator[list[Figure]]:
    turns = 3 if quick else 11
    taken = statistics.median(float(run(EVERY_NAME)) for _ in range(turns))
    work = "import after torch and tensordict"
    yield [Figure(work=work, way="corelm", seconds=taken, turns=turns, goal_seconds=0.15)]
    for name, code in {"corelm --help": HELP, "corelm backends": LISTING}.items():
        yield compare(
            name,
            {"an interpreter": lambda: run("pass"), name: partial(run, code)},
            baseline="an interpreter",
            repeats=5 if quick else 21,
            clock=of_children,
            goal_seconds={name: 0.3},
        )
    with tempfile.TemporaryDirectory() as folder:
        random_model((len(tokenizer()), 128, 2)).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        repeats = 3 if quick else 11
        codes = {"transformers": _PLAIN, **_ANSWERS}
        work = "from a new interpreter to the first answer of a tiny model"
        yield compare(
            work,
            {way: partial(run, _timed(code, folder)) for way, code in codes.items()},
            baseline="transformers",
            repeats=repeats,
            clock=of_children,
            goals=dict.fromkeys(_ANSWERS, GOAL_OPEN),
            longest=LONGER,
        )
        said = _SaidTime()
        yield compare(
            f"{work}, after importing transformers",
            {way: said.by(_timed(code, folder, before=_IMPORTED)) for way, code in codes.items()},
            baseline="transformers",
            repeats=repeats,
            clock=said,
        )


def _timed(work: str, folder: str, before: str = "") -> str:
    """Return a program that prints the processor seconds that `work` takes after `before`."""
    return _TIMED.format(before=before, work=work.format(path=folder))


class _SaidTime:
    """A clock that goes on by the seconds that programs print."""

    def __init__(self) -> None:
        self._total = 0.0

    def __call__(self) -> float:
        return self._total

    def by(self, code: str) -> Way:
        def way() -> None:
            self._total += float(run(code))

        return way


def run(code: str) -> str:
    """Run the code in a new interpreter and return what it prints.

    The interpreter keeps what it compiles, as it would of packages that were installed: otherwise every run would
    compile core and the plugin, and nothing of the other libraries.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["TQDM_DISABLE"] = "1"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def of_children() -> float:
    """Return the processor seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
