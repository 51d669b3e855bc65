"""``corelm generate``: prompts from a file through an engine into a file, a batch at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from corelm.backend.backend import Backend
from corelm.backend.seeds import answer_seeds
from corelm.cli.output import AnswersFile, ErrorsFile, check_paths, errors_path
from corelm.cli.prompts import LineError, Prompt, count_lines, read_prompts
from corelm.errors import TemplateError
from corelm.opening.by_name import get_backend
from corelm.policy.outputs import answer_texts
from corelm.rendering.render import render
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged

#: How the names of engine options end whose values are never written down.
SECRETS = ("key", "password", "secret", "token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Answer the prompts of `source` into `target`.

    With a seed an answer depends on the seed, its line and its sample alone: neither on the batch size nor on what was
    answered before. So it calls the backend with a seed per answer, where a policy would number the rows of a batch.
    """

    source: Path
    target: Path
    backend: str
    model: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 16
    log_probs: Literal["none", "raw", "processed"] = "none"
    return_tokens: bool = False
    retry: int | None = None
    timeout: float | None = None

    def run(self, console: Console) -> int:
        """Returns how many lines could not be answered. Whatever it raises, the answers so far are in `target`."""
        sampling = SamplingParams.make(self.sampling)
        samples = range(sampling.num_samples or 1)
        check_paths(self.source, self.target)
        # The files come first: what is wrong with them should not wait for a model to load.
        with (
            self.source.open("rb") as source,
            AnswersFile.open(self.target, self.settings(sampling)) as answers,
            get_backend(self.backend, self.model, retry=self.retry, timeout=self.timeout, **self.options) as engine,
            _progress(console) as progress,
        ):
            before = len(answers.done)
            faults = ErrorsFile(errors_path(self.target))
            task = progress.add_task("answering", total=count_lines(source))
            lines = read_prompts(source)
            while batch := list(islice(lines, self.batch_size)):
                prompts, wrong = answers.missing(batch, samples)
                if prompts:
                    rows, failed = self._answer(engine, sampling, prompts)
                    answers.write(sorted(rows, key=lambda row: row["line"]))
                    wrong += failed
                for fault in sorted(wrong, key=lambda fault: fault.line):
                    console.print(f"line {fault.line}: {fault.error}", markup=False, soft_wrap=True)
                    faults.write(fault)
                progress.advance(task, len(batch))
        written = len(answers.done) - before
        told = f"; lines that failed: {faults.count}, see {faults.path}" if faults.count else ""
        console.print(f"{written} answers written, {before} were there already{told}", markup=False, soft_wrap=True)
        return faults.count

    def _answer(
        self, engine: Backend, sampling: SamplingParams, prompts: list[Prompt]
    ) -> tuple[list[dict[str, Any]], list[LineError]]:
        """The output rows of a batch, and what failed of it."""
        prompts, ids, faults = _tokenize(engine, prompts)
        samples = sampling.num_samples or 1
        seeds = None
        if sampling.seed is not None and not sampling.greedy:
            seeds = answer_seeds(sampling.seed, [prompt.line for prompt in prompts], samples)
        batch = engine.generate(ids, sampling, logprobs=self.log_probs, seeds=seeds, on_error="skip")
        texts, tokens, reasons = answer_texts(batch, sampling, engine), batch.ids.tolist(), batch.finish_reasons
        log_probs = None if batch.logprobs is None else batch.logprobs.tolist()
        provenance = engine.provenance(batch, sampling)
        rows: list[dict[str, Any]] = []
        for index, text in enumerate(texts):
            prompt, sample = prompts[index // samples], index % samples
            if reasons[index] == "error":
                error = batch.errors[index] if batch.errors else "the engine gave no reason"
                faults.append(LineError(prompt.line, prompt.id, error if samples == 1 else f"sample {sample}: {error}"))
                continue
            row: dict[str, Any] = {"id": prompt.id, "line": prompt.line, "prompt_hash": prompt.digest}
            if prompt.metadata is not None:
                row["metadata"] = prompt.metadata
            if sampling.num_samples is not None:
                row["sample"] = sample
            row |= {"response": text, "finish_reason": reasons[index], "tokens": len(tokens[index])}
            if self.return_tokens:
                row["token_ids"] = tokens[index]
            if log_probs is not None:
                row["log_probs"] = log_probs[index]
                row["provenance"] = (provenance[index] if isinstance(provenance, tuple) else provenance).to_dict()
            rows.append(row)
        return rows, faults

    def settings(self, sampling: SamplingParams) -> dict[str, Any]:
        """What a row is made with, as JSON gives it back. Two rows that differ in it do not belong in one file."""
        settings: dict[str, Any] = {
            "backend": self.backend,
            "model": self.model,
            # A secret has no place in a file of answers, and changes none of them.
            "options": {name: value for name, value in self.options.items() if not name.endswith(SECRETS)},
            "log_probs": self.log_probs,
            "return_tokens": self.return_tokens,
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            **sampling.engine_parameters(),
        }
        if sampling.seed is not None:
            settings["seed"] = sampling.seed
        return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def _tokenize(backend: Backend, prompts: list[Prompt]) -> tuple[list[Prompt], Ragged, list[LineError]]:
    """The prompts that can be tokenized, texts first, their ids, and the others."""
    served = [prompt for prompt in prompts if prompt.text is not None]
    ids = [backend.tokenize([prompt.text or "" for prompt in served]).ids]
    faults: list[LineError] = []
    chats = [prompt for prompt in prompts if prompt.chat is not None]
    for _, alike in groupby(sorted(chats, key=_tools), key=_tools):
        rendered, rows, wrong = _render(backend, list(alike))
        served += rendered
        ids.append(rows)
        faults += wrong
    return served, Ragged.cat(ids), faults


def _tools(prompt: Prompt) -> str:
    return json.dumps(prompt.tools)


def _render(backend: Backend, prompts: list[Prompt]) -> tuple[list[Prompt], Ragged, list[LineError]]:
    """The same for conversations with equal tools."""
    faults: list[LineError] = []
    while prompts:
        tools = prompts[0].tools
        try:
            rendered = render(
                [prompt.chat or () for prompt in prompts],
                backend.tokenizer,
                backend.tokenize,
                add_generation_prompt=True,
                eos_ids=backend.eos_token_ids,
                template_kwargs=None if tools is None else {"tools": tools},
                want_assistant=False,
            )
        except TemplateError as error:
            if not error.problems:
                raise
            faults += [LineError(prompts[row].line, prompts[row].id, what) for row, what in error.problems.items()]
            prompts = [prompt for row, prompt in enumerate(prompts) if row not in error.problems]
        else:
            return prompts, rendered.ids, faults
    return [], Ragged.from_list([]), faults


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
