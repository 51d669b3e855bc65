"""``corelm generate``: answer the prompts of a file in batches, and append the answers to another file."""

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

#: Engine options whose names end like this are secrets: their values are never written to a file.
SECRETS = ("key", "password", "secret", "token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Answer the prompts of `source` and append the answers to `target`.

    With a seed, an answer depends only on the seed, the line number and the sample number: not on the batch size, and
    not on what was answered before. That is why a job passes one seed per answer to the backend; a policy would number
    the rows of each batch.
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
        """Run the job and return the number of lines that failed. If it raises, the answers so far are in `target`."""
        sampling = SamplingParams.make(self.sampling)
        samples = range(sampling.num_samples or 1)
        check_paths(self.source, self.target)
        # Open the files first, so that errors in them are reported before a model loads.
        with (
            self.source.open("rb") as source,
            AnswersFile.open(self.target, self.settings(sampling)) as answers,
            get_backend(self.backend, self.model, retry=self.retry, timeout=self.timeout, **self.options) as engine,
            _progress(console) as progress,
        ):
            before = len(answers.done)
            errors = ErrorsFile(errors_path(self.target))
            task = progress.add_task("answering", total=count_lines(source))
            lines = read_prompts(source)
            while batch := list(islice(lines, self.batch_size)):
                prompts, failed = answers.unanswered(batch, samples)
                if prompts:
                    rows, failed_here = self._answer(engine, sampling, prompts)
                    answers.write(sorted(rows, key=lambda row: row["line"]))
                    failed += failed_here
                for error in sorted(failed, key=lambda error: error.line):
                    console.print(f"line {error.line}: {error.error}", markup=False, soft_wrap=True)
                    errors.write(error)
                progress.advance(task, len(batch))
        written = len(answers.done) - before
        summary = f"{written} answers written, {before} already present"
        if errors.count:
            summary += f", {errors.count} lines failed (see {errors.path})"
        console.print(summary, markup=False, soft_wrap=True)
        return errors.count

    def _answer(
        self, engine: Backend, sampling: SamplingParams, prompts: list[Prompt]
    ) -> tuple[list[dict[str, Any]], list[LineError]]:
        """Return the output rows of a batch, and an error for each line that failed."""
        prompts, ids, errors = _tokenize(engine, prompts)
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
                errors.append(LineError(prompt.line, prompt.id, error if samples == 1 else f"sample {sample}: {error}"))
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
        return rows, errors

    def settings(self, sampling: SamplingParams) -> dict[str, Any]:
        """Return the settings saved with every answer, in JSON types. One file holds answers of one setting."""
        settings: dict[str, Any] = {
            "backend": self.backend,
            "model": self.model,
            # Secrets do not belong in a file of answers, and they do not change an answer.
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
    """Return the prompts that were tokenized (texts first), their ids, and an error for each other prompt."""
    served = [prompt for prompt in prompts if prompt.text is not None]
    ids = [backend.tokenize([prompt.text or "" for prompt in served]).ids]
    errors: list[LineError] = []
    chats = [prompt for prompt in prompts if prompt.chat is not None]
    for _, alike in groupby(sorted(chats, key=_tools), key=_tools):
        rendered, rows, failed = _render(backend, list(alike))
        served += rendered
        ids.append(rows)
        errors += failed
    return served, Ragged.cat(ids), errors


def _tools(prompt: Prompt) -> str:
    return json.dumps(prompt.tools)


def _render(backend: Backend, prompts: list[Prompt]) -> tuple[list[Prompt], Ragged, list[LineError]]:
    """Do what `_tokenize` does, for conversations that have equal tools."""
    errors: list[LineError] = []
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
            errors += [LineError(prompts[row].line, prompts[row].id, what) for row, what in error.problems.items()]
            prompts = [prompt for row, prompt in enumerate(prompts) if row not in error.problems]
        else:
            return prompts, rendered.ids, errors
    return [], Ragged.from_list([]), errors


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
