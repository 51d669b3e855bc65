"""What ``corelm generate`` asks the engine for: answers, and which fields of them it writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from corelm import NamedParser, Ragged, parser_named
from corelm.application import answer_seeds, answer_texts, last_tokens, room_for_prompts, whole_texts
from corelm.errors import ResponseFormatError
from corelm.spec import GenerateResult, Message, SamplingParams
from corelm_cli.batch import Outcome, Worker, id_fields, provenance_of_row, rendered_rows
from corelm_cli.lines import LineError, Prompt

#: Prompts that every working engine can answer.
HARMLESS_TEXT = Prompt(line=0, id=0, digest="", text="Hello")
HARMLESS_CHAT = Prompt(line=0, id=0, digest="", chat=(Message("user", "Hello"),))

_ENDED = (
    "messages: the conversation ends with an assistant turn; give --continue-final-message to continue that turn, or "
    "add the turn that the next answer replies to"
)


@dataclass(kw_only=True)
class Generator(Worker[Prompt]):
    """Answers prompts.

    With a seed, an answer depends only on the seed, the line number and the sample number: not on the batch size, and
    not on what was answered before. That is why one seed per answer is passed to the backend; a policy would number the
    rows of each batch.

    Attributes:
        parser: makes messages of answers to conversations; it follows from the options.
    """

    sampling: SamplingParams
    log_probs: Literal["none", "raw", "processed"]
    return_tokens: bool
    return_support: bool = False
    top_logprobs: int = 0
    parser: NamedParser | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # Here, so that a parser that the tokenizer does not have fails no line.
        if isinstance(name := self.options.response_parser, str):
            self.parser = parser_named(name, self.engine.tokenizer)
            self.sampling = self.parser.sampling(self.sampling)

    def ask(self, lines: list[Prompt]) -> Outcome:
        return self._ask(lines, self.sampling)

    def ask_harmless(self, *, chat: bool) -> bool:
        # Not 0: an engine, or core, may refuse every minimum with what else was asked for.
        least = min(1, self.sampling.min_new_tokens)
        short = SamplingParams.make(self.sampling, max_new_tokens=1, min_new_tokens=least, num_samples=None)
        lines = [HARMLESS_TEXT] + [HARMLESS_CHAT] * chat
        self._ask(lines, short)
        return self.reached(self._tokenize(lines)[1], short)

    def _ask(self, prompts: list[Prompt], sampling: SamplingParams) -> Outcome:
        prompts, ids, errors = self._tokenize(prompts)
        samples = sampling.num_samples or 1
        seeds = None
        if sampling.seed is not None and not sampling.greedy:
            seeds = answer_seeds(sampling.seed, [prompt.line for prompt in prompts], samples)
        rows_of_ids = Ragged.from_list(ids)
        if self.options.truncation == "left":
            rows_of_ids = last_tokens(rows_of_ids, room_for_prompts(sampling, self.engine.capabilities))
        batch = self.engine.generate(
            rows_of_ids,
            sampling,
            logprobs=self.log_probs,
            seeds=seeds,
            on_error="skip",
            return_support=self.return_support,
            top_logprobs=self.top_logprobs,
            adapter=self.options.adapter,
        )
        # An answer in a chat is a new message, so its text does not continue the prompt.
        asked = zip(prompts, rows_of_ids.tolist(), strict=True)
        before = Ragged.from_list([() if prompt.chat is not None else row for prompt, row in asked]).repeat(samples)
        texts = answer_texts(batch, sampling, self.engine.tokenizer, before)
        tokens, reasons = batch.ids.tolist(), batch.finish_reasons
        messages = self._messages(prompts, rows_of_ids, batch, sampling)
        log_probs = None if batch.logprobs is None else batch.logprobs.tolist()
        provenance, other_ids = self.engine.provenance(batch), id_fields(batch)
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
            row = self.row(prompt, **({} if sampling.num_samples is None else {"sample": sample}))
            row |= {"response": text, "finish_reason": reasons[index], "tokens": len(tokens[index])}
            row |= messages[index]
            if self.return_tokens:
                row["token_ids"] = tokens[index]
            if log_probs is not None:
                row["log_probs"] = log_probs[index]
                row |= other_ids[index]
                row["provenance"] = provenance_of_row(provenance, index)
            rows.append(row)
        return rows, errors

    def _messages(
        self, prompts: list[Prompt], ids: Ragged, batch: GenerateResult, sampling: SamplingParams
    ) -> list[dict[str, Any]]:
        """Return, for each answer to a conversation, what the parser made of it; {} where there is nothing to parse."""
        if self.parser is None:
            return [{}] * len(batch.ids)
        (texts, typed), samples = whole_texts(batch, sampling, self.engine, self.parser), sampling.num_samples or 1
        before = self.engine.detokenize(ids, skip_special_tokens=False)
        found: list[dict[str, Any]] = []
        for index, text in enumerate(texts):
            prompt = prompts[index // samples]
            if prompt.chat is None:
                found.append({})
                continue
            tools = self.options.template_kwargs.get("tools") if prompt.tools is None else prompt.tools
            try:
                message = self.parser.parse(text, prefix=before[index // samples], tools=tools or (), typed=typed)
                found.append({"message": message.to_dict()})
            except ResponseFormatError as error:
                found.append({"message": None, "message_error": str(error)})
        return found

    def _tokenize(self, prompts: list[Prompt]) -> tuple[list[Prompt], list[list[int]], list[LineError]]:
        """Return the prompts that were tokenized, their ids, and an error for each other prompt."""
        texts = {at: prompt.text for at, prompt in enumerate(prompts) if prompt.text is not None}
        chats = {at: (prompt.chat, prompt.tools) for at, prompt in enumerate(prompts) if prompt.chat is not None}
        rendered, _, problems = rendered_rows(self.engine, list(chats.values()), self.options, ended=_ENDED)
        encoded = self.engine.tokenize(list(texts.values()), **self.options.tokenizer_kwargs).ids.tolist()
        ids = dict(zip((*texts, *chats), (*encoded, *rendered), strict=True))
        bad = {at: problems[row] for row, at in enumerate(chats) if row in problems}
        good = sorted(ids.keys() - bad)
        return [prompts[at] for at in good], [ids[at] for at in good], self.failed(prompts, bad)
