"""Scoring and generation with a model that people use, and what its first calls cost.

    python -m benchmarks.real --checkpoint FOLDER [--dtype bfloat16] [--quick] [--out FOLDER]

``make bench-real`` gives it SmolLM2-135M-Instruct. Rows are pieces of the dialogues of the examples. The ways are

    padded          rows sorted by length, a few to a padded batch, the model's forward, `log_softmax`, `gather`
    raw generate    ``model.generate`` of transformers, without log-probs
    with log-probs  the same with ``output_logits``, and `log_softmax` and `gather` of these
    backend         the transformers backend, and how it computed: `Scorer.path` or `Decoder.way`

Errors are those to a float64 forward of each row alone. The results are a part of ``benchmarks/results/full.json``.
``python -m benchmarks.gpu --checkpoint FOLDER`` measures the same on a GPU, in float32 and in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import corelm
from benchmarks.__main__ import RESULTS, recorded, save
from benchmarks.generation import asked, counted
from benchmarks.gpu.device import clock, device, value
from benchmarks.gpu.generation import plain
from benchmarks.gpu.scoring import padded
from benchmarks.measure import LONGER, Figure, Way, compare
from benchmarks.models import dialogues, named
from benchmarks.scoring import compare_errors, log_softmax
from corelm import Backend, Ragged

DTYPES = ("float32", "bfloat16")
SHORTEST, LONGEST = 16, 120
#: Tokens of a padded batch of the baseline: those of eight of the longest rows on a CPU, many more on a GPU.
TOKENS = {"cpu": 8 * LONGEST, "cuda": 32_768}
#: Lengths of the prompt and of its answers.
PROMPT, ANSWER = 64, 32
#: How many seconds, and how many forwards of the body, a first call may take more than a later one.
FIRST_SECONDS, FIRST_FORWARDS = 1.5, 4


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description="Measure with a real model.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the model and its tokenizer")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="dtype of the weights")
    parser.add_argument("--quick", action="store_true", help="run fewer and smaller benchmarks")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / ("quick.json" if given.quick else "full.json")
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    part = f"real, {given.dtype}"
    found[part] = recorded(part, RealModel(given.checkpoint, given.dtype, given.quick).works())
    save(found, path)
    print(f"\nwritten to {path}")


class RealModel:
    """Measures with one model, on the GPU if there is one.

    Args:
        checkpoint: folder of the model and its tokenizer.
        dtype: of the weights.
        quick: whether to run fewer and smaller benchmarks.
    """

    def __init__(self, checkpoint: Path, dtype: str, quick: bool) -> None:
        self._quick = quick
        self._tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
        self._model: Any = loaded.to(device()).eval()
        self._exact: Any = copy.deepcopy(self._model).double()
        config = self._model.config
        self._named = f"{dtype}, {named((config.vocab_size, config.hidden_size, config.num_hidden_layers))}"
        text = "\n".join(turn["content"] for chat in dialogues() for turn in chat)
        self._text: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def works(self) -> Iterator[list[Figure]]:
        mixed = [2, 8] if self._quick else [2, 8, 64]
        batches = {f"{count} rows of {SHORTEST} to {LONGEST}": self._mixed(count) for count in mixed}
        answered, new = self._mixed(8, PROMPT), 4 if self._quick else 32
        name, rows = list(batches.items())[1]
        # Let PyTorch and transformers do what they do once in a process.
        padded(self._model, rows)
        plain(self._model, answered, 1)
        yield self._first_call(f"scoring {name}", lambda backend: backend.score_logprobs(rows))
        yield self._first_call(f"{new} tokens for 8 prompts", lambda backend: backend.generate(answered, asked(new)))
        with self._opened() as backend:
            for count, length in ((1, 16),) if self._quick else ((8, 64), (32, 32), (1, 16), (1, 32), (1, 64)):
                batches[f"{'one row' if count == 1 else f'{count} rows'} of {length}"] = self._rows([length] * count)
            for name, rows in batches.items():
                yield self._scoring(backend, name, rows, goal=1.0)
            prompt = self._rows([PROMPT])[0]
            answers = [prompt + answer for answer in self._rows([ANSWER] * 16)]
            name = f"16 answers of {ANSWER} to a prompt of {PROMPT}"
            yield self._scoring(backend, name, answers, goal=0.6, start=PROMPT)
            yield self._generating(backend, answered, new)
            yield self._generating(backend, self._rows([32]), 4 if self._quick else 16)

    # Work -------------------------------------------------------------------------------------------------------------

    def _scoring(self, backend: Backend, name: str, rows: list[list[int]], goal: float, start: int = 1) -> list[Figure]:
        """Score the tokens of each row from `start` on: compare times, and errors."""
        paths: set[str] = set()

        def ours() -> Any:
            scores = backend.score_logprobs(rows, score_from=[start] * len(rows))
            path = backend.engine.plugin.scorer.path
            paths.add(f"{path.head}, {path.layout}, {path.shared} shared")
            return scores

        def theirs() -> list[Tensor]:
            return padded(self._model, rows, start=start, tokens=TOKENS[device()])

        exact = torch.cat([log_softmax(self._exact, Ragged.from_list([row]).to(device()))[start - 1 :] for row in rows])
        # The first call finds out which ways are right.
        ours()
        paths.clear()
        scores = ours()
        found = {"padded": torch.cat(theirs()), "backend": scores.logprobs.values[scores.scored.values]}
        timed = self._timed(f"scoring {name}", {"padded": theirs, "backend": ours}, goal, paths)
        errors = {way: (each.cpu() - exact.cpu()).abs() for way, each in found.items()}
        return timed + compare_errors(f"error of scoring {name}, {self._named}", errors, "padded", {})

    def _generating(self, backend: Backend, prompts: list[list[int]], new: int) -> list[Figure]:
        paths: set[str] = set()

        def ours() -> None:
            backend.generate(prompts, asked(new))
            paths.add(str(backend.engine.plugin.decoder.way))

        def with_logprobs() -> Tensor:
            made = plain(self._model, prompts, new, output_logits=True, return_dict_in_generate=True)
            table = torch.stack(made.logits, 1).float().log_softmax(-1)
            return table.gather(-1, made.sequences[:, -new:, None]).cpu()

        ours()
        paths.clear()
        ways: dict[str, Way] = {
            "raw generate": lambda: plain(self._model, prompts, new),
            "with log-probs": with_logprobs,
            "backend": ours,
        }
        return self._timed(f"{new} sampled tokens for {counted(len(prompts))}", ways, 1.0, paths)

    def _timed(self, name: str, ways: Mapping[str, Way], goal: float, paths: set[str]) -> list[Figure]:
        """Compare with the first way, and name the paths that the backend took, which its way puts into `paths`."""
        figures = compare(
            f"{name}, {self._named}",
            ways,
            baseline=next(iter(ways)),
            repeats=2 if self._quick else 15,
            goals={"backend": goal},
            clock=clock,
            longest=LONGER,
        )
        took = f"backend: {' or '.join(sorted(paths))}"
        return [replace(figure, way=took) if figure.way == "backend" else figure for figure in figures]

    def _first_call(self, name: str, ask: Callable[[Backend], object]) -> list[Figure]:
        """Open a backend, and compare its first call with later ones that ask the same."""
        seconds: list[float] = []
        forwards: list[int] = []
        passes: list[None] = []
        # Each forward of the body calls this once. A hook on the body would itself make the backend more careful.
        hook = self._model.get_input_embeddings().register_forward_pre_hook(lambda *_: passes.append(None))
        with self._opened() as backend:
            for _ in range(3 if self._quick else 6):
                passes.clear()
                began = clock()
                ask(backend)
                seconds.append(clock() - began)
                forwards.append(len(passes))
        hook.remove()
        more = forwards[0] - statistics.median(forwards[1:])
        work = f"what the first call takes more: {name}, {self._named}"
        return [
            Figure(
                work=work,
                way="seconds",
                seconds=seconds[0] - statistics.median(seconds[1:]),
                goal_seconds=FIRST_SECONDS,
            ),
            value(work, "forwards of the body", more, FIRST_FORWARDS),
        ]

    # Inputs -----------------------------------------------------------------------------------------------------------

    def _opened(self) -> Backend:
        return corelm.get_backend("transformers", self._model, tokenizer=self._tokenizer)

    def _mixed(self, count: int, longest: int = LONGEST) -> list[list[int]]:
        """Return rows of `SHORTEST` to `longest` tokens."""
        return self._rows([int(length) for length in torch.linspace(SHORTEST, longest, count)])

    def _rows(self, lengths: list[int]) -> list[list[int]]:
        """Return pieces of the text, which begin at different places."""
        step = (len(self._text) - max(lengths)) // len(lengths)
        return [self._text[step * row :][:length] for row, length in enumerate(lengths)]


if __name__ == "__main__":
    main()
