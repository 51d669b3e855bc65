"""Translate `SamplingParams` into the names that vLLM's `SamplingParams` and its server's requests have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from corelm.errors import CapabilityError
from corelm.spec import GenerateRequest, Range, SamplingParams, ScoreRequest, StopStrings
from corelm.validate import invalid, shown
from corelm_engine_kit import RowError, did_you_mean, refuse_settled

#: The lowest temperature above 0. vLLM silently raises lower ones to this value.
COLDEST = 0.01

#: The sampling parameters that vLLM honours, each with its legal range, or None for the range of `SamplingParams`.
HONOURED: dict[str, Range | None] = {
    "temperature": (0.0, 2.0),
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "min_new_tokens": None,
    "stop": None,
    "engine_kwargs": None,
}

#: Fields that engine_kwargs may not hold, in addition to corelm's own names: the plugin decides what vLLM returns.
SETTLED = frozenset(
    {
        "detokenize",
        "flat_logprobs",
        "include_stop_str_in_output",
        "logprob_token_ids",
        "logprobs",
        "output_kind",
        "prompt_logprob_start",
        "prompt_logprob_token_ids",
        "prompt_logprobs",
        "skip_clone",
        "skip_reading_prefix_cache",
        "stream",
        "stream_interval",
        "trace_decode_token_ids",
    }
)

#: The field that makes vLLM end an answer that repeats itself.
REPETITION = "repetition_detection"
#: The fields of engine_kwargs that leave raw log-probs alone: vLLM applies them to a copy of the logits, or to none. It
#: applies a grammar (structured_outputs, response_format) to the logits that it takes raw log-probs from, and what a
#: custom processor does (extra_args, vllm_xargs) is not known.
_LEAVE_RAW_ALONE = frozenset({"logit_bias", "bad_words", "allowed_token_ids", REPETITION})

#: The fields that hold an object of vLLM, and its class in ``vllm.sampling_params``.
_OBJECTS = {"structured_outputs": "StructuredOutputsParams", "repetition_detection": "RepetitionDetectionParams"}


def check_raw(request: GenerateRequest) -> None:
    """Refuse raw log-probs that would not be the model's own.

    Raises:
        CapabilityError: `engine_kwargs` holds a field that changes them, or may do so.
    """
    unsure = sorted(request.sampling.engine_kwargs.keys() - _LEAVE_RAW_ALONE)
    if request.logprobs == "raw" and unsure:
        raise CapabilityError(
            f"with {', '.join(unsure)} in engine_kwargs, vLLM's raw log-probs may not be the model's own; use "
            "logprobs='none' and score the answers",
            capability="engine_kwargs",
        )


def parameters(sampling: SamplingParams, stop_ids: frozenset[int], max_tokens: int, seed: int | None) -> dict[str, Any]:
    """Return all of `sampling` for one answer. Defaults are included, since a server may have different ones.

    vLLM's own EOS handling is switched off: core has put the EOS ids into `stop_ids`.

    Raises:
        CapabilityError: top_p and min_p together. vLLM applies min_p first, which gives a different distribution.
        InvalidRequestError: a temperature that vLLM would change, or a name in engine_kwargs that corelm sets itself.
    """
    if sampling.min_p > 0 and sampling.top_p < 1:
        raise CapabilityError(
            "vLLM applies min_p before top_p and renormalises in between, but corelm promises top_p first; "
            "give one of them",
            capability="min_p",
        )
    if 0 < sampling.temperature < COLDEST:
        raise invalid(
            "temperature", f"vLLM would raise {sampling.temperature} to {COLDEST}; give 0 or at least {COLDEST}"
        )
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "min_tokens": sampling.min_new_tokens,
        "max_tokens": max_tokens,
        # vLLM would stop for those in the reasoning of an answer. `answer_end` finds the others.
        "stop": [] if sampling.reasoning_marks else list(sampling.stop),
        "stop_token_ids": sorted(stop_ids),
        "ignore_eos": True,
        "skip_special_tokens": sampling.skip_special_tokens,
        # Greedy decoding draws nothing.
        "seed": None if sampling.greedy else seed,
        **_engine_kwargs(sampling),
    }


def scored_rows(request: ScoreRequest, whole_prompts: bool) -> Iterator[tuple[int, list[int], list[int], bool]]:
    """Yield each row of which something is asked: its number, its ids, its prompt, and whether log-probs of that are.

    vLLM keeps one position of the context for a sampled token, but a row may be as long as the context. So the prompt
    is all ids except the last one, and a bias makes vLLM sample that one. Its raw log-prob, and those of the most
    probable ids, are from before the bias. If only the last id is asked for, no prompt log-probs are needed and vLLM
    may use its prefix cache. With `whole_prompts`, the prompt is all ids, and nothing is asked of the sampled token.
    """
    rows = zip(request.sequences.tolist(), request.score_from.clamp_min(1).tolist(), strict=True)
    for number, (ids, start) in enumerate(rows):
        if start < len(ids):
            prompt = ids if whole_prompts else ids[:-1]
            yield number, ids, prompt, start < len(prompt)


def answer_end(ids: list[int], reason: str, stops: StopStrings) -> tuple[int, str]:
    """Return how many ids belong to an answer, up to the token that completes a stop string, and why it ended.

    vLLM looks for stop strings in the text that it has released. It holds back the text of a token that ends in the
    middle of a character, with all whole characters in it, and so may go on for the tokens that complete the character.
    It is told none if some do not count.
    """
    if stops.reasoning is not None:
        end = stops.first_end(ids)
        return (len(ids), reason) if end is None else (end, "stop")
    if reason != "stop" or not stops.stops or stops.min_new_tokens or not stops.ends_in_half_a_character(ids[:-1]):
        return len(ids), reason
    return stops.first_end(ids) or len(ids), reason


def unspelt_stop(stop_reason: Any) -> RowError:
    """Return the error for an answer that vLLM stopped for a string which its tokens do not spell.

    vLLM looks for stop strings in a text that it decodes step by step. After a prompt that ends in the middle of a
    character, that text begins with the prompt's own.
    """
    return RowError(
        f"vLLM stopped for {stop_reason!r}, which the tokens of the answer do not spell; end the prompt with a whole "
        "character"
    )


def _engine_kwargs(sampling: SamplingParams) -> dict[str, Any]:
    refuse_settled(sampling.engine_kwargs, SETTLED)
    given = dict(sampling.engine_kwargs)
    if (bias := given.get("logit_bias")) is not None:
        try:
            # JSON, and so the command line, has only texts as keys.
            given["logit_bias"] = {int(token): float(value) for token, value in bias.items()}
        except (AttributeError, TypeError, ValueError):
            raise invalid("engine_kwargs", f"expected logit_bias as a dict of ids and numbers, got {bias!r}") from None
    return given


def check_fields(owner: str, given: Iterable[str], fields: Iterable[str]) -> None:
    """Check that a class of vLLM has these fields.

    Raises:
        InvalidRequestError: it does not have one of them.
    """
    known = [name for name in fields if not name.startswith("_")]
    for name in given:
        if name not in known:
            raise invalid("engine_kwargs", f"vLLM's {owner} has no field {name!r}{did_you_mean(name, known)}")


def with_objects(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with an object of vLLM for each dict that stands for one.

    A request to a server has dicts there, and so has the command line. vLLM checks neither the type of the field nor
    the names in a dict: a dict ended the engine (0.32), and its classes drop unknown names.

    Raises:
        InvalidRequestError: a name that the class does not have, or values that it refuses.
    """
    from vllm import sampling_params

    made = dict(fields)
    for name, of in _OBJECTS.items():
        value = fields.get(name)
        if value is None or isinstance(value, kind := getattr(sampling_params, of)):
            continue
        if not isinstance(value, Mapping):
            raise invalid("engine_kwargs", f"expected {name} as a dict or vLLM's {of}, got {shown(value)}")
        check_fields(of, value, [field.name for field in dataclasses.fields(kind)])
        try:
            made[name] = kind(**value)
        except Exception as error:  # pydantic's, and vLLM's own, which differ between its versions
            raise invalid("engine_kwargs", f"vLLM refuses {name}: {error}") from error
    return made
