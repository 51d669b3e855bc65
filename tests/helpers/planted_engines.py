"""Plugins that are wrong in one thing each: the transformers plugin, with a real change of what it computes."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from corelm import Ragged, hookimpl
from corelm.spec import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult, TokenizeRequest, TokenizeResult
from transformers_backend import TransformersBackend

Row = list[int]


# Changes of scores ----------------------------------------------------------------------------------------------------


class Rescoring(TransformersBackend):
    """Scores each row through `rescored`, and samples as it should."""

    def rescored(self, rows: list[Row], score: Callable[[list[Row]], list[Tensor]]) -> list[Tensor]:
        """Return the numbers for the rows; `score` is the sound engine's."""
        raise NotImplementedError

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        if request.return_logits:
            return TransformersBackend.score_logprobs(self, request)
        rows = request.sequences.tolist()

        def score(changed: list[Row]) -> list[Tensor]:
            sequences = Ragged.from_list(changed)
            asked = replace(
                request,
                sequences=sequences,
                score_from=torch.ones(len(changed), dtype=torch.int64),
                request_ids=tuple(f"{n}" for n in range(len(changed))),
            )
            return list(TransformersBackend.score_logprobs(self, asked).logprobs.split())

        values = torch.cat([row.float() for row in self.rescored(rows, score)])
        sequences = request.sequences
        scored = sequences.positions >= request.score_from[sequences.row_index]
        return ScoreResult(
            logprobs=Ragged(torch.where(scored, values, 0.0).clamp(max=0.0), sequences.lengths),
            scored=Ragged(scored, sequences.lengths),
            mode="raw" if request.temperature == 1.0 else "processed",
            temperature=request.temperature,
        )


class Coarse(Rescoring):
    """Scores as an engine with 8-bit activations does: log-probs are off by about 0.02 nats, in each call by others."""

    def rescored(self, rows: list[Row], score: Callable[[list[Row]], list[Tensor]]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(len(rows) + sum(map(sum, rows)))
        return [row + 0.02 * torch.randn(len(row), generator=generator) for row in score(rows)]


class SaysItIsCoarse(Coarse):
    """Declares what its numbers may be off by."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.capabilities = replace(self.capabilities, precision=0.05)


class ShiftedForward(Rescoring):
    """Gives the number of the next token at each position."""

    def rescored(self, rows: list[Row], score: Callable[[list[Row]], list[Tensor]]) -> list[Tensor]:
        return [torch.cat([row[1:], row[-1:]]) for row in score(rows)]


class ShiftedBack(Rescoring):
    """Gives the number of the token before at each position."""

    def rescored(self, rows: list[Row], score: Callable[[list[Row]], list[Tensor]]) -> list[Tensor]:
        return [torch.cat([row[:1], row[:-1]]) for row in score(rows)]


class AddsBos(Rescoring):
    """Puts an id before every row that it scores."""

    def rescored(self, rows: list[Row], score: Callable[[list[Row]], list[Tensor]]) -> list[Tensor]:
        return [row[1:] for row in score([[2, *row] for row in rows])]


class DropsFirst(Rescoring):
    """Leaves out the first id of every row that it scores."""

    def rescored(self, rows: list[Row], score: Callable[[list[Row]], list[Tensor]]) -> list[Tensor]:
        found = score([row[1:] for row in rows])
        return [torch.cat([torch.zeros(1), torch.full((1,), -5.0), row[1:]])[: len(row) + 1] for row in found]


class CutsLeft(Rescoring):
    """Reads the last 70 ids of a row only."""

    def rescored(self, rows: list[Row], score: Callable[[list[Row]], list[Tensor]]) -> list[Tensor]:
        found = score([row[-70:] for row in rows])
        return [
            torch.cat([torch.full((len(row) - len(numbers),), -9.0), numbers])
            for row, numbers in zip(rows, found, strict=True)
        ]


class ForgetsChunks(Rescoring):
    """Reads a row in chunks of 64 ids that do not see one another."""

    def rescored(self, rows: list[Row], score: Callable[[list[Row]], list[Tensor]]) -> list[Tensor]:
        out = []
        for row in rows:
            numbers = score([row])[0].clone()
            for start in range(64, len(row), 64):
                part = row[start : start + 64]
                if len(part) > 1:
                    numbers[start + 1 : start + len(part)] = score([part])[0][1:]
            out.append(numbers)
        return out


class Bits(Rescoring):
    """Gives logarithms to base 2."""

    def rescored(self, rows: list[Row], score: Callable[[list[Row]], list[Tensor]]) -> list[Tensor]:
        return [row / math.log(2) for row in score(rows)]


class OwnSoftmax(Rescoring):
    """Makes its own softmax of the model's logits."""

    def changed(self, logits: Tensor) -> Tensor:
        """Return what takes the place of logits ``[T, V]``; the vocabulary may be longer."""
        raise NotImplementedError

    @torch.no_grad()
    def rescored(self, rows: list[Row], score: Callable[[list[Row]], list[Tensor]]) -> list[Tensor]:
        out = []
        for row in rows:
            numbers = torch.zeros(len(row))
            if len(row) > 1:
                logits = self.engine.module(input_ids=torch.tensor([row[:-1]]), use_cache=False).logits[0].float()
                ids = torch.tensor(row[1:])[:, None]
                numbers[1:] = self.changed(logits).log_softmax(-1).gather(-1, ids)[:, 0]
            out.append(numbers)
        return out


class CountsPadding(OwnSoftmax):
    """Counts 128 padded ids of its output layer, whose logits are 0."""

    def changed(self, logits: Tensor) -> Tensor:
        return torch.cat([logits, torch.zeros(len(logits), 128)], -1)


class TopOnly(OwnSoftmax):
    """Normalises over the 200 most probable ids, and gives -50 to all others."""

    def changed(self, logits: Tensor) -> Tensor:
        least = logits.topk(200, -1).values[:, -1:]
        return torch.where(logits < least, logits.min() - 50.0, logits)


class ForbidsEos(OwnSoftmax):
    """Forbids EOS where it scores, as min_tokens would."""

    def changed(self, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([2]), -60.0)


class Heats(OwnSoftmax):
    """Scores at a temperature of 1.3."""

    def changed(self, logits: Tensor) -> Tensor:
        return logits / 1.3


class PadsWithoutMask(Rescoring):
    """Pads rows on the left of its batches, and lets the others attend to the pads."""

    @torch.no_grad()
    def rescored(self, rows: list[Row], score: Callable[[list[Row]], list[Tensor]]) -> list[Tensor]:
        width = max(map(len, rows))
        padded = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        table = self.engine.module(input_ids=padded, use_cache=False).logits.float().log_softmax(-1)
        out = []
        for n, row in enumerate(rows):
            numbers = torch.zeros(len(row))
            start = width - len(row)
            if len(row) > 1:
                ids = torch.tensor(row[1:])[:, None]
                numbers[1:] = table[n, start : start + len(row) - 1].gather(-1, ids)[:, 0]
            out.append(numbers)
        return out


class LeaksBetweenRows(Rescoring):
    """Packs rows into one sequence, and lets each attend to the one before it."""

    def rescored(self, rows: list[Row], score: Callable[[list[Row]], list[Tensor]]) -> list[Tensor]:
        out = []
        before: Row = []
        for row in rows:
            head = before[-20:]
            out.append(score([[*head, *row]])[0][len(head) :].clone())
            out[-1][0] = 0.0
            before = row
        return out


class ForgetsItsCache(Rescoring):
    """Answers from a cache of prefixes from the second time on, and has another row's first block in it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: set[tuple[int, ...]] = set()

    def rescored(self, rows: list[Row], score: Callable[[list[Row]], list[Tensor]]) -> list[Tensor]:
        out = []
        for row in rows:
            key = tuple(row[:8])
            out.append(score([[*reversed(row[:8]), *row[8:]] if key in self.seen else row])[0])
            self.seen.add(key)
        return out


class StaleCache(Rescoring):
    """Keeps the first sixteen ids of rows that it has served in a cache of prefixes, also when its weights change.

    Attributes:
        cache: keys, values and logits by the ids of the prefix.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cache: dict[tuple[int, ...], Any] = {}

    @torch.no_grad()
    def rescored(self, rows: list[Row], score: Callable[[list[Row]], list[Tensor]]) -> list[Tensor]:
        out = []
        for row in rows:
            if len(row) < 18:
                out.append(score([row])[0])
                continue
            head = tuple(row[:16])
            if head not in self.cache:
                self.cache[head] = self.engine.module(input_ids=torch.tensor([head]), use_cache=True)
            kept = self.cache[head]
            past = copy.deepcopy(kept.past_key_values)
            rest = self.engine.module(input_ids=torch.tensor([row[16:]]), past_key_values=past)
            logits = torch.cat([kept.logits[0], rest.logits[0]])[:-1].float()
            ids = torch.tensor(row[1:])[:, None]
            out.append(torch.cat([torch.zeros(1), logits.log_softmax(-1).gather(-1, ids)[:, 0]]))
        return out


class Drops(Rescoring):
    """Leaves dropout on: every call gives other numbers."""

    @torch.no_grad()
    def rescored(self, rows: list[Row], score: Callable[[list[Row]], list[Tensor]]) -> list[Tensor]:
        out = []
        for row in rows:
            numbers = torch.zeros(len(row))
            if len(row) > 1:
                hidden = self.engine.module.base_model(input_ids=torch.tensor([row[:-1]])).last_hidden_state
                hidden = torch.nn.functional.dropout(hidden, 0.1)
                logits = self.engine.module.get_output_embeddings()(hidden)[0].float()
                numbers[1:] = logits.log_softmax(-1).gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
            out.append(numbers)
        return out


# Changes of what is sampled -------------------------------------------------------------------------------------------


class SaysProcessed(TransformersBackend):
    """Returns log-probs of the distribution that it sampled from, and calls them the model's own."""

    def lies(self, request: GenerateRequest) -> bool:
        """Return whether it does so for this request."""
        raise NotImplementedError

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.logprobs != "raw" or not self.lies(request):
            return TransformersBackend.generate(self, request)
        made = TransformersBackend.generate(self, replace(request, logprobs="processed"))
        return replace(made, mode="raw", temperature=1.0, support="full")


class SaysScaled(SaysProcessed):
    """Does so at a temperature."""

    def lies(self, request: GenerateRequest) -> bool:
        return request.sampling.temperature not in (0.0, 1.0)


class SaysTruncated(SaysProcessed):
    """Does so with top-k and top-p."""

    def lies(self, request: GenerateRequest) -> bool:
        return request.sampling.truncates


class SaysPenalized(SaysProcessed):
    """Does so with penalties."""

    def lies(self, request: GenerateRequest) -> bool:
        return bool(request.sampling.penalties)


class SamplesOneLate(TransformersBackend):
    """Gives the number of the next sampled token at each position of an answer; its scores are right."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        made = TransformersBackend.generate(self, request)
        if made.logprobs is None:
            return made
        moved = [torch.cat([row[1:], row[-1:]]) for row in made.logprobs.split()]
        return replace(made, logprobs=Ragged(torch.cat(moved), made.logprobs.lengths))


class StopsLate(TransformersBackend):
    """Goes on for three tokens after a stop string."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        if not request.sampling.stop:
            return TransformersBackend.generate(self, request)
        ended = TransformersBackend.generate(self, request)
        most = min(int(ended.ids.lengths.max()) + 3, request.sampling.max_new_tokens or 10**6)
        free = replace(request, sampling=replace(request.sampling, stop=(), max_new_tokens=most))
        made = TransformersBackend.generate(self, free)
        reasons = tuple("stop" if reason == "length" else reason for reason in made.finish_reasons)
        return replace(made, finish_reasons=reasons)


# Changes of texts -----------------------------------------------------------------------------------------------------


class DoublesBos(TransformersBackend):
    """Puts an id before every text."""

    @hookimpl
    def tokenize(self, request: TokenizeRequest) -> TokenizeResult | None:
        if not request.add_special_tokens:
            return None
        rows = [[2, *self.tokenizer(text, add_special_tokens=True)["input_ids"]] for text in request.texts]
        return TokenizeResult(ids=Ragged.from_list(rows))


class ReadsSpecialsAsText(TransformersBackend):
    """Reads the text of special tokens as ordinary characters."""

    @hookimpl
    def tokenize(self, request: TokenizeRequest) -> TokenizeResult | None:
        made = self.tokenizer(
            list(request.texts), add_special_tokens=request.add_special_tokens, split_special_tokens=True
        )
        return None if request.offsets else TokenizeResult(ids=Ragged.from_list(made["input_ids"]))


class ReadsCharacters(TransformersBackend):
    """Has another tokenizer: every character is tokenized alone."""

    @hookimpl
    def tokenize(self, request: TokenizeRequest) -> TokenizeResult | None:
        rows = [
            [token for letter in text for token in self.tokenizer(letter, add_special_tokens=False)["input_ids"]]
            for text in request.texts
        ]
        return None if request.offsets else TokenizeResult(ids=Ragged.from_list(rows))


class IgnoresAdapters(TransformersBackend):
    """Answers with its base weights whatever adapter a call names."""

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        return TransformersBackend.score_logprobs(self, replace(request, adapter=False))


class Silent(TransformersBackend):
    """Samples as it should, and cannot score."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        of_scores = dict.fromkeys(("score", "score_temperature", "logits", "argmax", "gradients"), False)
        of_sets = {"score_support": False, "score_top_k": 0, "score_top_ids": False}
        self.capabilities = replace(self.capabilities, **of_scores, **of_sets)
