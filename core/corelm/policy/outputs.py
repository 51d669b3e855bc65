"""From an engine's result and the rows it was asked about to a `ContainerRequest`, and from containers to answers."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from corelm.backend.backend import Backend
from corelm.containers.classes import LogProbs, Tokens
from corelm.containers.fields import objects
from corelm.containers.reading import carries_sets, list_keys, provenance_of_rows, ragged, token_sets
from corelm.errors import MissingKeyError, Problems, ProvenanceMismatchError, refuse
from corelm.policy.messages import AnswerReader, answer_texts
from corelm.policy.options import PolicyOptions
from corelm.policy.rows import InputRows, provenance_of_scores
from corelm.spec.answer_text import HALF_CHARACTER
from corelm.spec.records import ContainerRequest, GenerateResult, Parts, ScoreResult
from corelm.spec.sampling import SamplingParams
from corelm.spec.version_runs import with_runs
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets
from corelm.validate import invalid

#: Fields of a `LogProbs` about the ids of each token: what they are called in results, and what stands where there is
#: nothing.
ABOUT_IDS = {
    "kept_log_mass": ("kept_log_mass", 0.0),
    "top_ids": ("top_ids", -1),
    "top_log_probs": ("top_logprobs", 0.0),
    "tail_log_mass": ("tail_log_mass", 0.0),
}


def generated(
    rows: InputRows,
    batch: GenerateResult,
    sampling: SamplingParams,
    backend: Backend,
    *,
    fields: frozenset[str],
    reader: AnswerReader,
    **layout: Any,
) -> tuple[ContainerRequest, Problems]:
    """Return prompts and their answers, and the answers that the reader did not parse.

    Every token of an answer is scored and the assistant's; no prompt is scored.
    """
    if sampling.num_samples is not None:
        rows = rows.repeat(sampling.num_samples)
    texts = chats = None
    problems: Problems = {}
    errors = batch.errors or ("",) * len(batch.ids)
    if "text" in fields or "history" in fields:
        said = answer_texts(batch, sampling, backend, rows.continued)
        asked = rows.texts or _without_half(given_texts(rows.ids, backend), batch.ids)
        if rows.chats is not None:
            messages, problems = reader.read(rows, asked, said, batch, sampling, backend)
            if problems:
                errors = tuple([error or problems.get(row, "") for row, error in enumerate(errors)])
            replies = tuple([(message,) for message in messages])
            asked_before = rows.chats
            if rows.begun is not None:
                pairs = zip(rows.chats, rows.begun, strict=True)
                asked_before = tuple([chat if turn is None else chat[:-1] for chat, turn in pairs])
            chats = Parts(rows.chats, replies, _joined(asked_before, replies))
        if "text" in fields:
            after = said if rows.chats is None else answer_texts(batch, sampling, backend, rows.ids)
            texts = Parts(asked, said, _joined(_without_half(asked, batch.ids), after))
    # True where the answers are: those positions are scored, and they are the assistant's.
    answered = rows.ids.join_mask(batch.ids)
    assistant = answered
    if rows.assistant is not None:
        everything = Ragged.full(batch.ids.lengths, True, torch.bool)
        assistant = rows.assistant.join(everything, answered)
    request = ContainerRequest(
        batch_size=rows.batch_size,
        fields=fields,
        tokens=Parts(rows.ids, batch.ids, rows.ids.join(batch.ids, answered)),
        texts=texts,
        chats=chats,
        **({} if batch.logprobs is None else _log_probs(rows.ids, batch, batch.logprobs, answered, backend)),
        assistant=assistant,
        finish_reasons=batch.finish_reasons,
        errors=errors,
        retokenized=rows.retokenized,
        pad_id=backend.pad_id,
        **layout,
    )
    return request, problems


def _log_probs(
    prompts: Ragged, batch: GenerateResult, logprobs: Ragged, answered: Ragged, backend: Backend
) -> dict[str, Any]:
    """Return the log-probs of answers and what the answers say about ids, as long as prompt and answer."""

    def behind_prompts(rows: Ragged, filler: float) -> Ragged:
        shape = (prompts.values.shape[0], *rows.values.shape[1:])
        return prompts.with_values(rows.values.new_full(shape, filler)).join(rows, answered)

    found: dict[str, Any] = {
        "logprobs": behind_prompts(logprobs, 0.0),
        "scored": answered,
        "provenance": backend.provenance(batch),
    }
    if batch.kept_ids is not None:
        device = batch.kept_ids.ids.values.device
        found["kept_ids"] = TokenSets.empty(prompts.lengths).to(device).join(batch.kept_ids)
    for name, filler in ABOUT_IDS.values():
        if (rows := getattr(batch, name)) is not None:
            found[name] = behind_prompts(rows, filler)
    return found


def scored(
    rows: InputRows, batch: ScoreResult, backend: Backend, *, fields: frozenset[str], **layout: Any
) -> ContainerRequest:
    """Return whole sequences and their scores, in the columns that they came in."""
    texts = None
    if "text" in fields:
        prompts, responses = rows.parts or (None, None)
        texts = Parts(prompts, responses, rows.texts or given_texts(rows.ids, backend))
    return ContainerRequest(
        batch_size=rows.batch_size,
        fields=fields,
        tokens=rows.tokens,
        texts=texts,
        chats=None if rows.chats is None else Parts(None, None, rows.chats),
        logprobs=batch.logprobs,
        scored=batch.scored,
        kept_ids=None if rows.support is None else rows.support.sets,
        top_ids=batch.top_ids,
        top_logprobs=batch.top_logprobs,
        tail_log_mass=batch.tail_log_mass,
        argmax=batch.argmax,
        greedy=None if batch.argmax is None else _greedy(rows, batch.scored, batch.argmax),
        provenance=provenance_of_scores(backend.provenance(batch), rows.support),
        assistant=rows.assistant,
        retokenized=rows.retokenized,
        pad_id=backend.pad_id,
        columns=rows.columns,
        **layout,
    )


def _greedy(rows: InputRows, scored: Ragged, argmax: Ragged) -> tuple[bool, ...]:
    """Return whether each row's scored tokens, those of its response if it is split, are the most probable ones."""
    ids, counted = rows.ids.values, scored.values.cpu()
    if rows.prompt_lengths is not None:
        counted = counted & (rows.ids.positions >= rows.prompt_lengths[rows.ids.row_index])
    others = counted & (argmax.values.cpu() != ids)
    number, wrong = (
        torch.zeros_like(rows.ids.lengths).index_add_(0, rows.ids.row_index, some.long()) for some in (counted, others)
    )
    return tuple(((number > 0) & (wrong == 0)).tolist())


def given_texts(ids: Ragged, backend: Backend) -> tuple[str, ...]:
    """Return the texts that prompts or sequences decode to. Illegal ids, which only skipped rows have, are left out."""
    legal = (ids.values >= 0) & (ids.values < backend.capabilities.vocab_size)
    counts = torch.zeros_like(ids.lengths).index_add_(0, ids.row_index, legal.cpu().long())
    return tuple(backend.detokenize(Ragged(ids.values[legal], counts), skip_special_tokens=False))


def _without_half(prompts: tuple[str, ...], answers: Ragged) -> tuple[str, ...]:
    """Return the texts of prompts without an incomplete character at the end: an answer's text begins with it."""
    pairs = zip(prompts, answers.lengths.tolist(), strict=True)
    return tuple([text.rstrip(HALF_CHARACTER) if length else text for text, length in pairs])


def _joined(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([a + b for a, b in zip(first, second, strict=True)])


# Answers that go on --------------------------------------------------------------------------------------------------


def partial_answers(found: Any, rows: InputRows, options: PolicyOptions) -> GenerateResult:
    """Return the answers in what a policy has returned, as `generate(continue_from=)` takes them.

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
    answers: dict[str, Any] = {
        "ids": full.slice(start, stop),
        "logprobs": None,
        "finish_reasons": tuple(objects(found.get("finish_reason"), len(found.batch_size))),
        "adapter": options.adapter,
    }
    held = found.get(options.keys.log_probs, None)
    if not isinstance(held, LogProbs):
        return GenerateResult(**answers)

    def of_answers(name: str) -> Ragged:
        return ragged(found, (options.keys.log_probs, name), masks=masks).to("cpu").slice(start, stop)

    answers["logprobs"] = of_answers("full")
    answers |= {to: of_answers(name) for name, (to, _) in ABOUT_IDS.items() if name in held.keys()}
    if carries_sets(held):
        answers["kept_ids"] = token_sets(found, options.keys.log_probs, masks=masks).to("cpu").slice(start, stop)
    labels = provenance_of_rows(held, len(full))
    refuse({row: "its provenance is not known" for row, one in enumerate(labels) if one is None}, "continue_from")
    known = [one for one in labels if one is not None]
    if len({(one.distribution, one.adapter) for one in known}) > 1:
        raise ProvenanceMismatchError("continue_from: its rows are of several distributions; continue them apart")
    if known:
        first = known[0]
        answers |= {
            "mode": first.mode,
            "temperature": first.temperature,
            "support": first.support,
            "adapter": first.adapter,
            "sampling": SamplingParams.make(dict(first.penalties), temperature=first.temperature),
        }
    runs = [one.version_runs or ((one.weight_version, 0),) for one in known]
    return with_runs(GenerateResult(**answers), runs)


def _must_be_the_prompts(found: Ragged, wanted: Ragged, samples: int) -> None:
    wanted = wanted.repeat(samples) if samples > 1 else wanted
    if len(found) != len(wanted):
        raise invalid("continue_from", f"has {len(found)} answers, but the policy is asked for {len(wanted)}")
    pairs = zip(found.split(), wanted.split(), strict=True)
    refuse(
        {row: "answers another prompt" for row, (one, other) in enumerate(pairs) if not torch.equal(one, other)},
        "continue_from",
    )
