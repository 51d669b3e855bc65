"""Work on a batch of lines. If the call fails, find the lines that make it fail, and serve the others."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from corelm import Backend, PolicyOptions, Ragged
from corelm.application import final_turns, render_chats, row_problems
from corelm.errors import CoreLMError, Problems
from corelm.spec import Chat, GenerateResult, Provenance, SamplingParams, ScoreResult
from corelm_cli.lines import L, LineError

#: Output rows, and an error for each line that failed.
Outcome = tuple[list[dict[str, Any]], list[LineError]]


@dataclass(kw_only=True)
class Worker(ABC, Generic[L]):
    """Asks an engine about lines, and makes output rows of what it returns.

    Attributes:
        options: how conversations and texts become token ids, and the adapter to ask for.
        attempted: the lines of the last call that was not a check of the engine.
    """

    engine: Backend
    options: PolicyOptions = field(default_factory=PolicyOptions)
    copy_input: bool = False
    attempted: list[L] = field(default_factory=list)

    @abstractmethod
    def ask(self, lines: list[L]) -> Outcome:
        """Make one call to the engine and return its outcome, with the rows in the order of the lines."""

    @abstractmethod
    def ask_harmless(self, *, chat: bool) -> bool:
        """Ask about a short text, and with `chat` about a short conversation, and return `reached` of them."""

    def reached(self, ids: list[list[int]], sampling: SamplingParams | None = None) -> bool:
        """Return whether the engine was asked about a row of a call that returned.

        Such a call shows that the engine works, whatever it says of the row: an error of the harmless row must not
        become that of every line. A row that core sets aside, because it does not fit for example, shows nothing.
        """
        return len(ids) > len(row_problems(Ragged.from_list(ids), self.engine.capabilities, sampling))

    def serve(self, lines: list[L]) -> Iterator[Outcome]:
        """Yield the outcome of the lines, in one piece, or in several if a call fails.

        If a call fails but the engine can still serve a harmless line, each half of the lines is tried again, down to
        the lines that fail alone.

        Raises:
            Exception: a call failed, and the engine cannot serve a harmless line either. `attempted` holds the lines of
                that call.
        """
        self.attempted = lines
        try:
            outcome = self.ask(lines)
        except Exception as error:
            self._check_engine(lines, error)
            if len(lines) > 1:
                middle = len(lines) // 2
                yield from self.serve(lines[:middle])
                yield from self.serve(lines[middle:])
                return
            outcome = [], [LineError(lines[0].line, lines[0].id, _reason(error))]
        yield outcome

    def row(self, line: L, **more: Any) -> dict[str, Any]:
        """Return the output row of a line. `more` follows what every row has."""
        row: dict[str, Any] = {"id": line.id, "line": line.line, "prompt_hash": line.digest}
        if line.metadata is not None:
            row["metadata"] = line.metadata
        if line.sample is not None:
            row["sample"] = line.sample
        if self.copy_input:
            row |= line.asked
        return row | more

    def failed(self, lines: Sequence[L], problems: Problems) -> list[LineError]:
        """Return the errors of lines, given by their positions."""
        return [LineError(lines[at].line, lines[at].id, what) for at, what in problems.items()]

    def _check_engine(self, lines: list[L], error: Exception) -> None:
        """Raise `error` unless the engine can be asked about harmless lines, so that these lines caused the error."""
        try:
            reached = self.ask_harmless(chat=any("messages" in line.asked for line in lines))
        except Exception:
            reached = False
        if not reached:
            raise error from error.__cause__


def provenance_of_row(provenance: Provenance | tuple[Provenance, ...], row: int) -> dict[str, Any]:
    """Return the provenance of one row of a result, in JSON types."""
    found: dict[str, Any] = json.loads(
        json.dumps((provenance[row] if isinstance(provenance, tuple) else provenance).to_dict())
    )
    return found


def _reason(error: Exception) -> str:
    if not isinstance(error, CoreLMError):
        return f"{type(error).__name__}: {error}"
    # The messages for the rows of this call, without their numbers: all of them are about the line.
    problems = getattr(error, "problems", None)
    return "; ".join(dict.fromkeys(problems.values())) if problems else str(error)


#: The fields of a result that hold other ids than those that were sampled or given: each is a key of a row.
_OF_OTHER_IDS = ("kept_ids", "kept_log_mass", "top_ids", "top_logprobs", "tail_log_mass")


def id_fields(batch: GenerateResult | ScoreResult) -> list[dict[str, list[Any]]]:
    """Return, for each row of a result, what was asked for of other ids, by key, with one value per token.

    JSON has no minus infinity, so None stands for the log of a probability of 0.
    """
    rows: list[dict[str, list[Any]]] = [{} for _ in range(len(batch.logprobs or ()))]
    for name in _OF_OTHER_IDS:
        if (found := getattr(batch, name, None)) is not None:
            for row, values in zip(rows, found.tolist(), strict=True):
                row[name.replace("logprobs", "log_probs")] = _plain(values)
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if value == -math.inf else value


# Conversations to ids -------------------------------------------------------------------------------------------------


def rendered_rows(
    backend: Backend, lines: Sequence[tuple[Chat, list[Any] | None]], options: PolicyOptions, *, ended: str = ""
) -> tuple[list[list[int]], list[list[bool]], Problems]:
    """Render and tokenize conversations, each with its own tools.

    Args:
        ended: for prompts, what to say about one that ends with an assistant turn, unless `options` continue it; "" for
            conversations to score.

    Returns:
        The ids of each conversation; which of them are the assistant's, unless they are prompts; and why conversations
        were not rendered, whose ids are empty.
    """
    if not lines:
        # A tokenizer without a chat template is needed for none.
        return [], [], {}
    chats, begun, problems = [chat for chat, _ in lines], None, Problems()
    if ended:
        eos_ids = backend.eos_token_ids if options.prefer_tokens else None
        begun, problems = final_turns(chats, bool(options.continue_final_message), eos_ids, ended)
    rendered = render_chats(
        backend,
        chats,
        [tools for _, tools in lines],
        begun,
        prompt=bool(ended),
        problems=problems,
        prefer_tokens=options.prefer_tokens,
        template_kwargs=options.template_kwargs,
        chat_template=options.chat_template,
        want_assistant=not ended,
    )
    return rendered.ids.tolist(), [] if rendered.assistant is None else rendered.assistant.tolist(), problems
