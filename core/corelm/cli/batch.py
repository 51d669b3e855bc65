"""Answer a batch of prompts. If the call fails, find the lines that make it fail, and answer the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from corelm.backend.backend import Backend
from corelm.backend.check_requests import prompt_problems
from corelm.backend.seeds import answer_seeds
from corelm.cli.prompts import LineError, Prompt
from corelm.errors import CoreLMError, InvalidRequestError, TemplateError
from corelm.policy.outputs import answer_texts
from corelm.rendering.render import render
from corelm.spec.message import Message
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged

#: Output rows, and an error for each line that failed.
Outcome = tuple[list[dict[str, Any]], list[LineError]]

#: Prompts that every working engine can answer: a text and a conversation.
HARMLESS_TEXT = Prompt(line=0, id=0, digest="", text="Hello")
HARMLESS_CHAT = Prompt(line=0, id=0, digest="", chat=(Message("user", "Hello"),))


@dataclass(slots=True, kw_only=True)
class Answerer:
    """Asks an engine for answers, and makes output rows of them.

    Attributes:
        engine: the engine.
        sampling: how to sample.
        log_probs: which log-probs to add to the rows.
        return_tokens: whether to add the ids.
        attempted: the prompts of the last call that was not a check of the engine.
    """

    engine: Backend
    sampling: SamplingParams
    log_probs: Literal["none", "raw", "processed"]
    return_tokens: bool
    attempted: list[Prompt] = field(default_factory=list)

    def answer(self, prompts: list[Prompt]) -> Iterator[Outcome]:
        """Yield the outcome of the prompts, in one piece, or in several if a call fails.

        If a call fails but the engine can still answer a harmless prompt, each half of the prompts is tried again, down
        to the lines that fail alone.

        Raises:
            Exception: a call failed, and the engine cannot answer a harmless prompt either. `attempted` holds the
                prompts of that call.
        """
        self.attempted = prompts
        try:
            outcome = self._ask(prompts, self.sampling)
        except Exception as error:
            self._check_engine(prompts, error)
            if len(prompts) > 1:
                middle = len(prompts) // 2
                yield from self.answer(prompts[:middle])
                yield from self.answer(prompts[middle:])
                return
            outcome = [], [LineError(prompts[0].line, prompts[0].id, _reason(error))]
        yield outcome

    def _check_engine(self, prompts: list[Prompt], error: Exception) -> None:
        """Raise `error` unless the engine can be asked harmless prompts, so that the prompts caused the error."""
        harmless = [HARMLESS_TEXT]
        if any(prompt.chat is not None for prompt in prompts):
            harmless.append(HARMLESS_CHAT)
        sampling = SamplingParams.make(self.sampling, max_new_tokens=1, num_samples=None)
        try:
            # A row that cannot be rendered or does not fit never reaches the engine and so shows nothing.
            _, ids, _ = _tokenize(self.engine, harmless)
            reached = len(ids) > len(prompt_problems(ids, self.engine.capabilities, sampling))
            # Rows that fail in a call that returns do not matter here: the engine did answer.
            self._ask(harmless, sampling)
        except Exception:
            reached = False
        if not reached:
            raise error from error.__cause__

    def _ask(self, prompts: list[Prompt], sampling: SamplingParams) -> Outcome:
        prompts, ids, errors = _tokenize(self.engine, prompts)
        samples = sampling.num_samples or 1
        seeds = None
        if sampling.seed is not None and not sampling.greedy:
            seeds = answer_seeds(sampling.seed, [prompt.line for prompt in prompts], samples)
        batch = self.engine.generate(ids, sampling, logprobs=self.log_probs, seeds=seeds, on_error="skip")
        texts, tokens, reasons = answer_texts(batch, sampling, self.engine), batch.ids.tolist(), batch.finish_reasons
        log_probs = None if batch.logprobs is None else batch.logprobs.tolist()
        provenance = self.engine.provenance(batch, sampling)
        rows: list[dict[str, Any]] = []
        for index, text in enumerate(texts):
            prompt, sample = prompts[index // samples], index % samples
            problem = None
            if reasons[index] == "error":
                problem = (batch.errors[index] if batch.errors else "") or "the engine gave no reason"
            elif reasons[index] == "abort":
                problem = "the engine aborted the answer"
            if problem is not None:
                where = "" if samples == 1 else f"sample {sample}: "
                errors.append(LineError(prompt.line, prompt.id, where + problem))
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
        return sorted(rows, key=lambda row: row["line"]), sorted(errors, key=lambda error: error.line)


def _reason(error: Exception) -> str:
    """Return why a call for one line failed."""
    if not isinstance(error, CoreLMError):
        return f"{type(error).__name__}: {error}"
    # The messages for the rows of this call, without their numbers: the only row is the line.
    problems = getattr(error, "problems", None)
    return "; ".join(dict.fromkeys(problems.values())) if problems else str(error)


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
        except (TemplateError, InvalidRequestError) as error:
            if not error.problems:
                raise
            errors += [LineError(prompts[row].line, prompts[row].id, what) for row, what in error.problems.items()]
            prompts = [prompt for row, prompt in enumerate(prompts) if row not in error.problems]
        else:
            return prompts, rendered.ids, errors
    return [], Ragged.from_list([]), errors
