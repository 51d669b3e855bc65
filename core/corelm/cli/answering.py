"""``corelm generate``: prompts from a file through an engine into a file, a batch at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from corelm.backend import Backend, get_backend
from corelm.cli.files import Answers, Fault, Faults, Prompt, count_lines, read_prompts
from corelm.errors import TemplateError
from corelm.render import render
from corelm.results import answer_texts
from corelm.rows import Ragged
from corelm.sampling import SamplingParams, answer_seeds


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

    def run(self, console: Console) -> int:
        """Returns how many lines could not be answered. Whatever it raises, the answers so far are in `target`."""
        sampling = SamplingParams.make(self.sampling)
        samples = range(sampling.num_samples or 1)
        total = count_lines(self.source)
        # The files come first: what is wrong with them should not wait for a model to load.
        answers = Answers(self.target, self._settings(sampling))
        before = len(answers.done)
        with get_backend(self.backend, self.model, **self.options) as engine, answers, _progress(console) as progress:
            faults = Faults(self.target)
            task = progress.add_task("answering", total=total)
            lines = read_prompts(self.source)
            while batch := list(islice(lines, self.batch_size)):
                wrong = [line for line in batch if isinstance(line, Fault)]
                prompts = [line for line in batch if isinstance(line, Prompt)]
                prompts = [p for p in prompts if any((p.id, sample) not in answers.done for sample in samples)]
                if prompts:
                    rows, failed = self._answer(engine, sampling, prompts)
                    answers.write(sorted(rows, key=lambda row: row["line"]))
                    wrong += failed
                for fault in sorted(wrong, key=lambda fault: fault.line):
                    console.print(f"line {fault.line}: {fault.error}", markup=False, soft_wrap=True)
                    faults.write(fault)
                progress.advance(task, len(batch))
        told = f"; lines that failed: {faults.count}, see {faults.path}" if faults.count else ""
        written = len(answers.done) - before
        console.print(f"{written} answers written, {before} were there already{told}", markup=False, soft_wrap=True)
        return faults.count

    def _answer(
        self, engine: Backend, sampling: SamplingParams, prompts: list[Prompt]
    ) -> tuple[list[dict[str, Any]], list[Fault]]:
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
        settings = self._settings(sampling)
        rows: list[dict[str, Any]] = []
        for index, text in enumerate(texts):
            prompt, sample = prompts[index // samples], index % samples
            if reasons[index] == "error":
                error = batch.errors[index] if batch.errors else "the engine gave no reason"
                faults.append(Fault(prompt.line, prompt.id, error if samples == 1 else f"sample {sample}: {error}"))
                continue
            row: dict[str, Any] = {"id": prompt.id, "line": prompt.line}
            if sampling.num_samples is not None:
                row["sample"] = sample
            row |= {"response": text, "finish_reason": reasons[index], "tokens": len(tokens[index])}
            if self.return_tokens:
                row["token_ids"] = tokens[index]
            if log_probs is not None:
                row["log_probs"] = log_probs[index]
                row["provenance"] = asdict(provenance[index] if isinstance(provenance, tuple) else provenance)
            rows.append({**row, "settings": settings})
        return rows, faults

    def _settings(self, sampling: SamplingParams) -> dict[str, Any]:
        """What an answer is made with; two that differ in it do not belong into one file. As JSON gives it back."""
        source = self.model or self.options.get("base_url")
        own = {"backend": self.backend, "model": source, "max_new_tokens": sampling.max_new_tokens}
        settings = {**own, "temperature": sampling.temperature, **sampling.engine_parameters()}
        if sampling.seed is not None:
            settings["seed"] = sampling.seed
        return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def _tokenize(backend: Backend, prompts: list[Prompt]) -> tuple[list[Prompt], Ragged, list[Fault]]:
    """The prompts that can be tokenized, texts first, their ids, and the others."""
    texts = [prompt for prompt in prompts if prompt.text is not None]
    chats = [prompt for prompt in prompts if prompt.chat is not None]
    ids = [backend.tokenize([prompt.text or "" for prompt in texts]).ids]
    faults: list[Fault] = []
    while chats:
        try:
            rendered = render(
                [prompt.chat or () for prompt in chats],
                backend.tokenizer,
                backend.tokenize,
                add_generation_prompt=True,
                eos_ids=backend.eos_token_ids,
                want_assistant=False,
            )
        except TemplateError as error:
            if not error.problems:
                raise
            faults += [Fault(chats[row].line, chats[row].id, what) for row, what in error.problems.items()]
            chats = [prompt for row, prompt in enumerate(chats) if row not in error.problems]
        else:
            ids.append(rendered.ids)
            break
    return texts + chats, Ragged.cat(ids), faults


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
