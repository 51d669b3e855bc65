"""Local tasks for lm-eval, requests made by hand, and a wrapper that watches what an engine is asked."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from corelm import hookimpl

#: Questions of the tiny model's dialogues, each with choices of several tokens and the number of the right one.
QUESTIONS = [
    {"question": question, "choices": ["I am Pip, thank you.", "I do not know.", f"{last}.", "Yes"], "gold": gold}
    for question, last, gold in [
        ("What is your name?", "Pip", 0),
        ("How big are you?", "Very small", 2),
        ("Hello!", "Hello! How can I help you", 2),
        ("Do you like tea?", "Tea", 1),
        ("Can you count to five?", "One, two, three, four, five", 2),
        ("Who are you?", "A very small model", 0),
    ]
]
#: Ends after a few tokens, at several strings, or at none.
UNTIL = ["\n\n", ".", "<|im_start|>", "help"]


PROMPT = "Question: {{question}}\nAnswer:"


def prompt_of(question: str) -> str:
    return PROMPT.replace("{{question}}", question)


def write_tasks(folder: Path, greedy: Sequence[str]) -> Path:
    """Write four tasks, `choices`, `rolling`, `answers` and `chat`, with the data that they read. Return the folder.

    Args:
        greedy: one more choice for each question, such as the first word of the model's own answer.
    """
    folder.mkdir(parents=True)
    data = folder / "questions.json"
    rows = [{**each, "choices": [*each["choices"], own]} for each, own in zip(QUESTIONS, greedy, strict=True)]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "fewshot_split": "test",
    }
    prompt = {"doc_to_text": PROMPT}
    exact = {"metric_list": [{"metric": "exact_match", "ignore_case": True}]}
    answers = {"output_type": "generate_until", "doc_to_target": "{{choices[gold]}}", **exact}
    tasks = {
        "choices": {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold"} | prompt,
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{question}} {{choices | join(' ')}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "answers": answers | prompt | {"generation_kwargs": {"until": UNTIL, "max_gen_toks": 12}},
        "chat": answers | {"doc_to_text": "{{question}}", "generation_kwargs": {"until": "?", "max_gen_toks": 12}},
    }
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **task}))
    return folder


def evaluate(tasks: Path, names: Sequence[str], model: Any, model_args: Any = None, **more: Any) -> dict[str, Any]:
    """Run lm-eval on the tasks of these names. Return its results, with what the model returned to each request."""
    # lm-eval's own tasks are thousands of files to read.
    local = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model, model_args, tasks=list(names), task_manager=local, log_samples=True, bootstrap_iters=0, **more
    )
    assert found is not None
    return found


def responses(results: dict[str, Any], task: str) -> list[Any]:
    """Return what the model returned to each request of a task, in order."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [each for sample in samples for (each, *_) in sample["resps"]]


def assert_alike(found: Sequence[tuple[float, bool]], expected: Sequence[tuple[float, bool]]) -> None:
    """Check that log-likelihoods differ by 1e-4 at most, and that the same continuations are greedy."""
    assert len(found) == len(expected) > 0
    for (one, greedy), (other, is_greedy) in zip(found, expected, strict=True):
        assert abs(one - other) <= 1e-4 and greedy is is_greedy, (one, other, greedy, is_greedy)


def requests(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    """Return requests as a task makes them."""
    return [Instance(kind, doc={}, arguments=each, idx=index) for index, each in enumerate(arguments)]


class Watcher:
    """Counts the rows of calls, and can make some of them fail. Pass it to `get_backend` as one of its wrappers.

    Attributes:
        scored, answered: the number of rows of each call.
        closed: how often the engine was closed.
        last_call: the number of calls after which the engine fails; None if it never does.
        bad_row: the row of each call that fails alone; None for no row.
    """

    def __init__(self) -> None:
        self.scored: list[int] = []
        self.answered: list[int] = []
        self.closed = 0
        self.last_call: int | None = None
        self.bad_row: int | None = None

    @hookimpl(wrapper=True)
    def score_logprobs(self, request: Any) -> Iterator[Any]:
        self._fail_after(self.scored)
        self.scored.append(len(request.sequences))
        result = yield
        if self.bad_row is not None:
            errors = tuple("too hard" if row == self.bad_row else "" for row in range(len(request.sequences)))
            result = dataclasses.replace(result, errors=errors)
        return result

    @hookimpl(wrapper=True)
    def generate(self, request: Any) -> Iterator[Any]:
        self._fail_after(self.answered)
        self.answered.append(len(request.prompts))
        return (yield)

    @hookimpl(wrapper=True)
    def close(self, request: Any) -> Iterator[Any]:
        self.closed += 1
        return (yield)

    def _fail_after(self, calls: list[int]) -> None:
        if self.last_call is not None and len(calls) >= self.last_call:
            raise OSError("the power is out")
