"""How old the weights are that each token was sampled with: `staleness`, and the label of each token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from corelm.containers.classes import PerToken, provenance_of_rows
from corelm.errors import InvalidRequestError, Problems, refuse
from corelm.kl.layout import TokenLayout
from corelm.kl.pairs import read_scoring
from corelm.spec.version_runs import backward, counts_of, run_problems
from corelm.validate import as_list, invalid, shown


@dataclass(frozen=True, eq=False)
class TokenVersions:
    """The weights that sampled each token, flat, row after row.

    Attributes:
        labels: the labels, in the order in which they first occur.
        index: int64[total]: the place of each token's label in `labels`; -1 for tokens that were not sampled.
        layout: how the tokens are stored in the TensorDict.
    """

    labels: Sequence[str]
    index: Tensor
    layout: TokenLayout


def token_versions(td: TensorDictBase, key: NestedKey, masks_key: NestedKey) -> TokenVersions:
    """Read which weights sampled each token.

    Raises:
        MissingKeyError: there are no such log-probs.
        InvalidRequestError: the provenance of a row is not known, or its runs cannot be; `rows` lists the rows.
    """
    scoring = read_scoring(td, key, masks_key)
    lengths = scoring.layout.lengths.tolist()
    problems: Problems = {}
    labels: dict[str, int] = {}
    rows: list[Tensor] = []
    for row, (one, length) in enumerate(zip(provenance_of_rows(scoring.log_probs, len(lengths)), lengths, strict=True)):
        index = torch.full((length,), -1)
        rows.append(index)
        if one is None:
            problems[row] = "its provenance is not known, so neither are its weights"
            continue
        start = 0
        if one.version_runs:
            if scoring.answers is None:
                problems[row] = "is of several weights, and without masks it is not known where its answer begins"
                continue
            start = int(scoring.answers[row])
            if why := run_problems(one.version_runs, length - start) or backward(one.version_runs):
                problems[row] = f"version_runs: {why}"
                continue
        for version, first in one.version_runs or ((one.weight_version, 0),):
            index[start + first :] = labels.setdefault(version, len(labels))
    refuse(problems, str(key))
    index = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
    return TokenVersions(list(labels), torch.where(scoring.scored, index, -1), scoring.layout)


def staleness(
    td: TensorDictBase,
    version: str,
    *,
    versions: Iterable[str] | None = None,
    log_probs_key: NestedKey = ("log_probs", "full"),
    masks_key: NestedKey = "masks",
) -> Tensor | PerToken:
    """Return by how many updates the weights that sampled each token are behind `version`.

    Labels that core makes count up, also with an adapter: ``"3+policy@12"`` is three updates behind ``"4+policy@14"``,
    one of the base weights and two of the adapter. Of other labels, say the order::

        stale = corelm.staleness(td, backend.weight_version)              # "7"
        td["fresh"] = td["masks"].all_assistant_mask & (stale <= 2)       # dense rows
        stale = corelm.staleness(td, "step-20", versions=["init", "step-10", "step-20"])

    Args:
        td: what a policy returned.
        version: the label of the weights to compare with, usually those in force.
        versions: all labels, oldest first, for labels that do not count.
        log_probs_key: the sampler's log-probs, the field `full` of a `LogProbs`.
        masks_key: the `Masks` that the policy wrote.

    Returns:
        int64, in the layout of the log-probs; rows of different lengths give a `PerToken`. -1 at pads and at tokens
        without a log-prob, such as those of the prompt.

    Raises:
        MissingKeyError: there are no such log-probs.
        InvalidRequestError: a label does not count and is not among `versions`; weights are newer than `version` or go
            backwards within a row; the provenance of a row is not known. The message names row and position.
    """
    found = token_versions(td, log_probs_key, masks_key)
    order = None if versions is None else _order(versions)
    behind: list[int] = []
    for place, label in enumerate(found.labels):
        age = _behind(label, version, order)
        if isinstance(age, str) or age < 0:
            here = found.layout.ragged(found.index == place)
            at = here.values.nonzero().flatten()
            why = age if isinstance(age, str) else f"the weights {label!r} are newer than {shown(version)}"
            if not len(at):
                behind.append(-1)
                continue
            row, position = int(here.row_index[at[0]]), int(here.positions[at[0]])
            what = f"row {row}, position {position}: {why}"
            raise InvalidRequestError(what, field="version", problems={row: f"position {position}: {why}"})
        behind.append(age)
    ages = torch.tensor([*behind, -1])[found.index]
    if found.layout.padded:
        layout = found.layout
        return layout.ragged(ages).scatter(layout.columns.cpu(), -1).reshape(*layout.batch, layout.columns.shape[-1])
    return found.layout.stored(ages)


def _order(versions: Iterable[str]) -> dict[str, int]:
    labels = as_list(versions)
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise invalid("versions", f"expected a list of labels, oldest first, got {shown(versions)}")
    if len({*labels}) < len(labels):
        raise invalid("versions", "a label is there twice, so it says nothing about the order")
    return {label: place for place, label in enumerate(labels)}


def _behind(label: str, version: str, order: dict[str, int] | None) -> int | str:
    """Return by how many updates a label is behind `version`, or why that is not known."""
    if label == version:
        return 0
    if order is not None:
        missing = [each for each in (label, version) if each not in order]
        return f"the weights {missing[0]!r} are not among versions" if missing else order[version] - order[label]
    one, other = counts_of(label), counts_of(version)
    if one is None or other is None:
        return f"{(label if one is None else version)!r} does not count up; give versions=[…], all labels, oldest first"
    if one[1] != other[1]:
        return f"the weights {label!r} and {version!r} have other adapters; give the version of the same adapter"
    return other[0] - one[0] + other[2] - one[2]
