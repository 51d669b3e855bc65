"""Whether partial answers can be what they say: values and sets for each of their tokens, weights that do not go back.

A caller may have saved them, cut them, or put them together. What does not fit would end up next to other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from corelm.backend.check_sets import set_problems
from corelm.errors import Problems
from corelm.spec.provenance import VersionRuns
from corelm.spec.records import GenerateResult
from corelm.spec.version_runs import backward, run_problems
from corelm.tensors.ragged import Ragged
from corelm.validate import invalid

#: Fields of a result with a value, or a row of values, for each token.
OF_TOKENS = ("logprobs", "kept_log_mass", "top_ids", "top_logprobs", "tail_log_mass")
#: Fields that a result has together or not at all.
_TOGETHER = (("kept_ids", "kept_log_mass"), ("top_ids", "top_logprobs", "tail_log_mass"))
#: Fields with one entry a row.
_OF_ROWS = ("finish_reasons", "version_runs", "weight_versions")


def must_be_whole(old: GenerateResult) -> None:
    """Refuse a result that lacks a field which another one needs, or an entry for a row.

    Raises:
        InvalidRequestError: naming the field.
    """
    for names in _TOGETHER:
        missing = [name for name in names if getattr(old, name) is None]
        if 0 < len(missing) < len(names):
            there = next(name for name in names if name not in missing)
            raise invalid("continue_from", f"has {there} and no {missing[0]}; give the result as generate returned it")
    for name in _OF_ROWS:
        given = getattr(old, name)
        if given is not None and len(given) != len(old.ids):
            raise invalid("continue_from", f"has {len(given)} {name} for {len(old.ids)} answers")


def token_problems(old: GenerateResult, vocab_size: int) -> Problems:
    """Return the rows with another number of values than tokens, or with a set that cannot be that of its token.

    An empty set stands for the whole vocabulary.
    """
    lengths, problems = old.ids.lengths, Problems()
    fields = {name: rows.lengths for name in OF_TOKENS if isinstance(rows := getattr(old, name), Ragged)}
    if old.kept_ids is not None:
        fields["kept_ids"] = old.kept_ids.lengths
    for name, found in fields.items():
        if len(found) != len(lengths):
            raise invalid("continue_from", f"has {name} of {len(found)} answers for {len(lengths)}")
        for row in (found != lengths).nonzero().flatten().tolist():
            problems.setdefault(row, f"has {name} at {int(found[row])} positions for {int(lengths[row])} tokens")
    if old.kept_ids is None or problems:
        return problems
    everywhere = torch.ones(len(old.kept_ids.ids), dtype=torch.bool)
    wrong = set_problems(old.kept_ids, old.ids, vocab_size, everywhere, empty=True)
    return {row: f"kept_ids, position {position}: {what}" for row, (position, what) in wrong.items()}


def version_problems(old: GenerateResult, going: Sequence[int], in_force: str) -> Problems:
    """Return the rows whose runs do not ascend, or whose weights go backwards, also from the old part to the new one.

    Args:
        old: the partial answers.
        going: the rows that go on.
        in_force: the label of the weights that they go on with.
    """
    problems = Problems()
    lengths = old.ids.lengths.tolist()
    for row, runs in enumerate(old.version_runs or ()):
        if why := run_problems(runs, lengths[row]) or backward(runs):
            problems[row] = f"version_runs: {why}"
    known = runs_of(old)
    for row in going:
        if row in problems or not lengths[row]:
            continue
        if backward(((known[row][-1][0], 0), (in_force, lengths[row]))):
            problems[row] = (
                f"was sampled with the weights {known[row][-1][0]} up to position {lengths[row] - 1}, and would go on "
                f"with the older weights {in_force}; sample it from its prompt, or, if the weights in force are newer, "
                "say so: weights_changed(version=…)"
            )
    return problems


def runs_of(batch: GenerateResult) -> Sequence[VersionRuns]:
    """Return the runs of each row; one run for a row of one version, which is called "" if it is not known."""
    if batch.version_runs is not None:
        return batch.version_runs
    return [((version, 0),) for version in batch.weight_versions or ("",) * len(batch.ids)]
