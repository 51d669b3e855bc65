"""`PartialAnswers`: the argument `continue_from` of `generate`, checked, and how the engine's answers join it.

The ids of a partial answer are kept, never tokenized again: the engine is asked with the prompt and the ids
that the answer has. It has one limit for all rows, so a row that needs fewer tokens than another may get too
many: these are cut off here. So is what follows a stop string that begins in the old part and ends in the new
one, which the engine cannot see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from corelm.backend.check_results import set_problems
from corelm.backend.skipping import spread
from corelm.errors import Problems, ProvenanceMismatchError, refuse
from corelm.spec.answer_text import StopStrings
from corelm.spec.provenance import Adapter, Provenance, VersionRuns
from corelm.spec.records import GenerateResult, fields_of_rows
from corelm.spec.sampling import SamplingParams
from corelm.spec.version_runs import backward, renamed, run_problems, with_runs
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets
from corelm.validate import invalid

#: Fields that a result has together or not at all.
_TOGETHER = (("kept_ids", "kept_log_mass"), ("top_ids", "top_logprobs", "tail_log_mass"))


class PartialAnswers:
    """Answers of an earlier call for the same prompts. Those that have not ended go on.

    Those that are `old`, the argument `continue_from`, may have been saved, cut or put together by their
    caller. The other arguments are those of this call; `asked` is what `_must_agree` takes.

    Attributes:
        index: int64: the answers that go on.
        lengths: int64: how many tokens each of these has.
        samples: answers per prompt.
        joined_prompts: for each of these, its prompt and its tokens.
        sampling_of_rest: how the engine samples the rest of these.
    """

    def __init__(
        self,
        engine: Any,
        old: Any,
        prompts: Ragged,
        sampling: SamplingParams,
        stop_ids: frozenset[int],
        adapter: Adapter,
        **asked: Any,
    ) -> None:
        self.samples, limit = sampling.num_samples or 1, sampling.max_new_tokens
        if not isinstance(old, GenerateResult):
            raise invalid("continue_from", f"expected a GenerateResult, got a {type(old).__name__}")
        if len(old.ids) != (count := len(prompts) * self.samples):
            raise invalid("continue_from", f"has {len(old.ids)} answers, but the call is for {count}")
        _must_agree(old, sampling, adapter, **asked)
        version = engine.weights.version_with(adapter)
        self._old, self._sampling = old, sampling
        strings = StopStrings.of(sampling, engine.tokenizer)
        self._stops = [strings.after(prompt) for prompt in prompts.tolist() for _ in range(self.samples)]
        wrong = _field_problems(old, engine.capabilities.vocab_size)
        # Why each answer has ended; "" for those that go on.
        self._reasons: list[str] = []
        rows = zip(old.ids.tolist(), old.finish_reasons, _runs_of(old), self._stops, strict=True)
        for row, (ids, reason, runs, stops) in enumerate(rows):
            stopped = next((position for position, token in enumerate(ids) if token in stop_ids), None)
            ended = "stop" if reason == "stop" or stopped is not None else ""
            if not ended and limit is not None and len(ids) >= limit:
                ended = "length"
            self._reasons.append(ended)
            problem = run_problems(runs, len(ids)) or backward(runs)
            if problem:
                wrong[row] = f"version_runs: {problem}"
            elif stopped is not None and stopped < len(ids) - 1:
                wrong[row] = f"has the stop id {ids[stopped]} at position {stopped}, and tokens after it"
            elif ended == "length" and len(ids) != limit:
                wrong[row] = f"has {len(ids)} tokens, but max_new_tokens is {limit}"
            elif ended:
                continue
            elif (end := stops.first_end(ids)) is not None:
                wrong[row] = f"holds a stop string, which ends at position {end - 1}"
            elif ids and backward(((runs[-1][0], 0), (version, len(ids)))):
                wrong[row] = (
                    f"was sampled with the weights {runs[-1][0]} up to position {len(ids) - 1}, and would go on with "
                    f"the older weights {version}; sample it from its prompt, or, if the weights in force are newer, "
                    "say so: weights_changed(version=…)"
                )
            elif len(ids) < sampling.min_new_tokens:
                # The engine would count these tokens from the seam on.
                few = f"has fewer than min_new_tokens={sampling.min_new_tokens} tokens"
                why = f"{few}, and the engine would count only new ones; sample this row from its prompt"
                wrong.setdefault(row, why)
        refuse(wrong, "continue_from")
        self.index = torch.tensor([row for row, ended in enumerate(self._reasons) if not ended], dtype=torch.int64)
        self.lengths = old.ids.lengths[self.index]
        if bool(self.lengths.any()):
            for name, value in sampling.penalties:
                if name != "repetition_penalty":
                    # A repetition penalty counts the prompt as well, so it sees them.
                    why = f"{name}={value} counts the tokens of an answer, and the engine would count only new ones"
                    raise invalid(name, f"{why}; sample these answers from their prompts")
        repeated = prompts if self.samples == 1 else prompts.repeat(self.samples)
        self.joined_prompts = repeated.join(old.ids.to(prompts.values.device)).select(self.index)
        if limit is not None and len(self.index):
            # One limit for all rows, that of the row that needs most; none if some would not fit the context then.
            limit, context = limit - int(self.lengths.min()), engine.capabilities.max_context
            if context is not None and int(self.joined_prompts.lengths.max()) + limit > context:
                limit = None
        self.sampling_of_rest = SamplingParams.make(sampling, num_samples=None, min_new_tokens=0, max_new_tokens=limit)

    def joined(self, new: GenerateResult) -> GenerateResult:
        """Return all answers, whole, given what the engine has added to those that go on."""
        old, device, runs = self._old, new.ids.values.device, list(map(list, _runs_of(self._old)))
        added = _runs_of(new)
        # Nothing is added to the others.
        lengths = torch.zeros_like(old.ids.lengths).index_copy(0, self.index, new.ids.lengths)
        new = spread(new, self.index, lengths, {}, "")
        ids = old.ids.to(device).join(new.ids)
        lengths, reasons = ids.lengths.clone(), list(self._reasons)
        for row, of_row, text in zip(self.index.tolist(), added, ids.select(self.index).tolist(), strict=True):
            length, reason = len(text), new.finish_reasons[row]
            if (limit := self._sampling.max_new_tokens) is not None and length > limit:
                length, reason = limit, "length"
            end = None if reason == "error" else self._stops[row].first_end(text[:length])
            if end is not None:
                length, reason = end, "stop"
            lengths[row], reasons[row] = length, reason
            before = int(old.ids.lengths[row])
            kept = runs[row] if before else []
            kept += [(version, before + first) for version, first in of_row if before + first < length]
            runs[row] = kept or [of_row[0]]
        start = torch.zeros_like(lengths)
        fields: dict[str, Any] = {
            name: getattr(old, name).to(device).join(rows).slice(start, lengths)
            for name, rows in fields_of_rows(new).items()
            if isinstance(rows, (Ragged, TokenSets))
        }
        if old.logprobs is not None and old.support == "truncated":
            # What follows may be of full support: the minimum of new tokens has been reached.
            fields["support"] = old.support
        fields |= {"finish_reasons": tuple(reasons), "errors": new.errors if any(new.errors or ()) else None}
        # What the engine says of its cache is of longer prompts, which have the partial answers in them.
        whole = replace(new, **fields, sampling=self._sampling, cached_tokens=None)
        return with_runs(whole, [renamed(tuple(of_row), lambda version: version) for of_row in runs])


def _must_agree(
    old: GenerateResult,
    sampling: SamplingParams,
    adapter: Adapter,
    *,
    logprobs: Any,
    return_support: bool,
    top_logprobs: int,
) -> None:
    """Refuse partial answers that were not sampled for what this call asks for: its arguments of these names."""
    k = 0 if old.top_ids is None else old.top_ids.values.shape[-1]
    if old.texts is not None:
        raise invalid("continue_from", "this engine's texts are not what its ids decode to, so they cannot be joined")
    if old.adapter != adapter:
        raise invalid("continue_from", f"was sampled with adapter={old.adapter!r}; give the same")
    if (old.logprobs is None) != (logprobs == "none"):
        has = "no log-probs" if old.logprobs is None else "log-probs"
        raise invalid("continue_from", f"has {has}, but {logprobs=} was asked for; ask for the same")
    if (old.kept_ids is None) == return_support:
        raise invalid("continue_from", "return_support must be what it was when these answers were begun")
    if k != top_logprobs:
        raise invalid("continue_from", f"was sampled with top_logprobs={k}; give the same")
    if old.logprobs is None:
        return
    wanted: dict[str, Any] = {**Provenance.label(logprobs, sampling)}
    found: dict[str, Any] = {"mode": old.mode, "temperature": old.temperature, "support": old.support}
    if logprobs == "processed":
        # One label names the penalties of all tokens.
        wanted["penalties"] = dict(sampling.penalties)
        found["penalties"] = wanted["penalties"] if old.sampling is None else dict(old.sampling.penalties)
    if found != wanted:
        why = f"its log-probs are of {found}, and those that follow would be of {wanted}"
        raise ProvenanceMismatchError(f"continue_from: {why}; sample as these answers were begun")


def _field_problems(old: GenerateResult, vocab_size: int) -> Problems:
    """Return the rows with another number of values than tokens, or with a set that cannot be that of its token.

    Refuse a result that lacks a field which another one needs, or a row. An empty set is the whole vocabulary.
    """
    for names in _TOGETHER:
        if len({getattr(old, name) is None for name in names}) > 1:
            has = f"has not all of {', '.join(names)}"
            raise invalid("continue_from", f"{has}, which belong together; give the result as generate returned it")
    lengths, problems = old.ids.lengths, Problems()
    for name, rows in fields_of_rows(old).items():
        if len(rows) != len(lengths):
            raise invalid("continue_from", f"has {name} of {len(rows)} answers for {len(lengths)}")
        differ = rows.lengths != lengths if isinstance(rows, (Ragged, TokenSets)) else torch.zeros(0)
        for row in differ.nonzero().flatten().tolist():
            problems.setdefault(row, f"has {name} at {int(rows.lengths[row])} positions for {int(lengths[row])} tokens")
    if old.kept_ids is None or problems:
        return problems
    everywhere = torch.ones(len(old.kept_ids.ids), dtype=torch.bool)
    wrong = set_problems(old.kept_ids, old.ids, vocab_size, everywhere, empty=True)
    return {row: f"kept_ids, position {position}: {what}" for row, (position, what) in wrong.items()}


def _runs_of(batch: GenerateResult) -> Sequence[VersionRuns]:
    """Return the runs of each row; one run for a row of one version, which is called "" if it is not known."""
    if batch.version_runs is not None:
        return batch.version_runs
    return [((version, 0),) for version in batch.weight_versions or ("",) * len(batch.ids)]
