"""`partial_answers`: the answers that a policy has returned before, as `generate(continue_from=)` takes them."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from corelm.containers.classes import LogProbs, Tokens
from corelm.containers.fields import objects
from corelm.containers.keys import list_keys
from corelm.containers.reading import carries_sets, provenance_of_rows, ragged, token_sets
from corelm.errors import MissingKeyError, ProvenanceMismatchError, refuse
from corelm.policy.options import PolicyOptions
from corelm.policy.rows import InputRows
from corelm.spec.records import GenerateResult
from corelm.spec.sampling import SamplingParams
from corelm.spec.version_runs import with_runs
from corelm.tensors.ragged import Ragged
from corelm.validate import invalid

#: Fields of a `LogProbs` about the ids of each token, and what they are called in a `GenerateResult`.
_ABOUT_IDS = {
    "kept_log_mass": "kept_log_mass",
    "top_ids": "top_ids",
    "top_log_probs": "top_logprobs",
    "tail_log_mass": "tail_log_mass",
}


def partial_answers(found: Any, rows: InputRows, options: PolicyOptions) -> GenerateResult:
    """Return the answers in what a policy has returned.

    Args:
        found: the TensorDict.
        rows: the prompts that the policy reads now.
        options: those of the policy.

    Raises:
        MissingKeyError: it has no tokens, or no finish reasons.
        InvalidRequestError: its prompts are others, or there are more or fewer.
        ProvenanceMismatchError: its rows are of several distributions.
    """
    if not isinstance(found, TensorDictBase):
        kind = type(found).__name__
        raise invalid("continue_from", f"expected the TensorDict that a policy returned, got a {kind}")
    tokens, masks = found.get(options.keys.tokens, None), options.keys.masks
    if not isinstance(tokens, Tokens) or not {"prompt", "full"} <= set(tokens.keys()):
        has = list_keys(found)
        raise MissingKeyError(
            f"continue_from: there are no tokens.prompt and tokens.full; it has: {has}", field="continue_from"
        )
    if "finish_reason" not in found.keys():
        raise MissingKeyError("continue_from: it has no finish_reason, as answers do", field="continue_from")
    prompt, full = (ragged(found, (options.keys.tokens, name), masks=masks).to("cpu") for name in ("prompt", "full"))
    _must_be_the_prompts(prompt, rows.ids.to("cpu"), options.num_samples or 1)
    start, stop = prompt.lengths, full.lengths
    answers = GenerateResult(
        ids=full.slice(start, stop),
        logprobs=None,
        finish_reasons=tuple(objects(found.get("finish_reason"), len(found.batch_size))),
        adapter=options.adapter,
    )
    held = found.get(options.keys.log_probs, None)
    if not isinstance(held, LogProbs):
        return answers

    def of_answers(name: str) -> Ragged:
        return ragged(found, (options.keys.log_probs, name), masks=masks).to("cpu").slice(start, stop)

    values: dict[str, Any] = {to: of_answers(name) for name, to in _ABOUT_IDS.items() if name in held.keys()}
    if carries_sets(held):
        values["kept_ids"] = token_sets(found, options.keys.log_probs, masks=masks).to("cpu").slice(start, stop)
    labels = provenance_of_rows(held, len(full))
    refuse({row: "its provenance is not known" for row, one in enumerate(labels) if one is None}, "continue_from")
    known = [one for one in labels if one is not None]
    if len({(one.distribution, one.adapter) for one in known}) > 1:
        raise ProvenanceMismatchError("continue_from: its rows are of several distributions; continue them apart")
    if known:
        first = known[0]
        values |= {
            "mode": first.mode,
            "temperature": first.temperature,
            "support": first.support,
            "adapter": first.adapter,
            "sampling": SamplingParams.make(dict(first.penalties), temperature=first.temperature),
        }
    runs = [one.version_runs or ((one.weight_version, 0),) for one in known]
    return with_runs(GenerateResult(**{**_shallow(answers), **values, "logprobs": of_answers("full")}), runs)


def _shallow(answers: GenerateResult) -> dict[str, Any]:
    return {name: getattr(answers, name) for name in ("ids", "finish_reasons", "adapter")}


def _must_be_the_prompts(found: Ragged, wanted: Ragged, samples: int) -> None:
    wanted = wanted.repeat(samples) if samples > 1 else wanted
    if len(found) != len(wanted):
        raise invalid("continue_from", f"has {len(found)} answers, but the policy is asked for {len(wanted)}")
    pairs = zip(found.split(), wanted.split(), strict=True)
    refuse(
        {row: "answers another prompt" for row, (one, other) in enumerate(pairs) if not torch.equal(one, other)},
        "continue_from",
    )
