"""Scores in place: what the log-probs there and the new ones say about ids, put together."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from corelm.containers.classes import LogProbs
from corelm.containers.reading import carries_sets, ragged, token_sets
from corelm.errors import InvalidRequestError, refuse
from corelm.spec.records import ContainerRequest
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets

_TOP = {"top_ids": "top_ids", "top_log_probs": "top_logprobs", "tail_log_mass": "tail_log_mass"}


def joined_ids(
    view: TensorDictBase, request: ContainerRequest, there: Ragged, new: Ragged, field: str
) -> dict[str, Any]:
    """Return the fields of the request about ids, with those that are there: where a token has one there, it stays.

    Args:
        view: holds the `log_probs` that are there, and their masks if they are dense.
        request: the new scores.
        there: bool: where the log-probs there are scored.
        new: bool, as long: where the new ones are.
        field: the key of the log-probs, for errors.

    Raises:
        InvalidRequestError: a token was normalised over other ids; or a token would have no ids, or another number of
            them than the others.
    """
    held = view.get("log_probs")
    here, added = there.values.cpu(), new.values.cpu()
    return {
        **_joined_sets(view, held, request, there, here, added, field),
        **_joined_top(view, held, request, here, added, field),
    }


def _joined_sets(
    view: TensorDictBase,
    held: LogProbs,
    request: ContainerRequest,
    there: Ragged,
    here: Tensor,
    added: Tensor,
    field: str,
) -> dict[str, Any]:
    new = request.kept_ids
    if not carries_sets(held):
        if new is not None and bool((here & added & (new.ids.lengths > 0)).any()):
            raise InvalidRequestError(
                f"{field}: the log-probs there do not say over which ids they were normalised, and the new ones do. "
                'Write these elsewhere: log_probs_key="ref_log_probs"; or pass overwrite=True',
                field=field,
            )
        return {"kept_ids": new}
    old = token_sets(view).to("cpu").where(here)
    if new is None:
        merged = old
    else:
        new = new.to("cpu")
        differ = (here & added & ~old.same_as(new)).nonzero().flatten().tolist()
        what = "the token at position {} was normalised over other ids there"
        refuse({int(there.row_index[at]): what.format(int(there.positions[at])) for at in reversed(differ)}, field)
        # Where both have a set, they are equal.
        both = Ragged.cat([old.ids, new.ids])
        index = torch.arange(len(old.ids)) + torch.where(here, 0, len(old.ids))
        merged = TokenSets(both.select(index), old.lengths)
    made: dict[str, Any] = {"kept_ids": merged}
    if "kept_log_mass" in held.keys():
        mass = ragged(view, ("log_probs", "kept_log_mass"))
        made["kept_log_mass"] = mass.with_values(mass.values.masked_fill(~here.to(mass.values.device), 0.0))
    return made


def _joined_top(
    view: TensorDictBase, held: LogProbs, request: ContainerRequest, here: Tensor, added: Tensor, field: str
) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, of_request in _TOP.items():
        new, has = getattr(request, of_request), name in held.keys()
        if not has and new is None:
            continue
        if (not has and bool((here & ~added).any())) or (new is None and bool((added & ~here).any())):
            advice = "score with the top_k of the log-probs that are there" if has else "score without top_k"
            raise InvalidRequestError(
                f"{field}.{name}: some tokens would have these, and others would not; {advice}, or write elsewhere: "
                'log_probs_key="ref_log_probs"',
                field=f"{field}.{name}",
            )
        if not has:
            made[of_request] = new
            continue
        old = ragged(view, ("log_probs", name))
        if new is not None:
            if new.values.shape != old.values.shape:
                raise InvalidRequestError(
                    f"{field}.{name}: {old.values.shape[-1]} ids a token are there, the new scores have "
                    f'{new.values.shape[-1]}; pass top_k={old.values.shape[-1]}, or log_probs_key="ref_log_probs"',
                    field=f"{field}.{name}",
                )
            keep = here.to(new.values.device).reshape(-1, *[1] * (new.values.ndim - 1))
            old = old.with_values(torch.where(keep, old.values.to(new.values.device), new.values))
        made[of_request] = old
    return made
