"""`Capabilities`: what a backend can do. A plugin declares it when its engine opens; core refuses any other request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from corelm.spec.sampling import FIELDS
from corelm.validate import did_you_mean, invalid

Range = tuple[float, float]
GenerationMode = Literal["raw", "processed", "scaled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of an engine. Every field defaults to "no"; a plugin sets what its engine supports.

    Attributes:
        vocab_size: legal ids are in ``[0, vocab_size)``.
        max_context: the largest number of tokens in prompt and answer together; None if there is no limit.
        eos_token_ids: the ids that end an answer by themselves; None means the tokenizer's ``eos_token_id``.
        sampling: the `SamplingParams` fields that the engine honours, each with its legal inclusive range, or None for
            every value that `SamplingParams` allows. Greedy decoding needs a temperature range that includes 0. Do not
            list stop ids and `max_new_tokens`, which every engine must honour, nor `num_samples` and the others that
            core handles itself.
        generation_modes: the log-probs that `generate` can return: `raw`, `processed` or `scaled`. `scaled` is for
            engines that divide the logits by the temperature (by 1 at temperature 0) and ignore truncation. Core asks
            such an engine for `raw` or `processed` if the scaled number equals it, and else refuses the request.
        score: `score_logprobs` works.
        score_temperature: `score_logprobs` works at temperatures other than 1.
        logits: `score_logprobs` can return full logits.
        gradients: the results of `score_logprobs` can carry gradients to the model.
        empty_prompt: a prompt may have no tokens.
        per_answer_seeds: the same seed gives the same answer, independent of the other rows.
        native_samples: `generate` accepts ``sampling.num_samples`` and returns that many rows per prompt, next to each
            other. Otherwise core repeats the prompts.
        concurrent_calls: hooks may be called from several threads at once.
        stops_at_timeout: soon after ``request.timeout`` seconds, `generate` and `score_logprobs` raise a `TimeoutError`
            and the engine stops working on the request. Otherwise core ends the caller's wait in time, and the engine
            finishes the request while later calls wait.
        update_weights: the optional hook `update_weights` works.
        abort: the optional hook `abort` works.
    """

    vocab_size: int
    max_context: int | None
    eos_token_ids: frozenset[int] | None = None
    sampling: Mapping[str, Range | None] = field(default_factory=dict)
    generation_modes: frozenset[GenerationMode] = frozenset()
    score: bool = False
    score_temperature: bool = False
    logits: bool = False
    gradients: bool = False
    empty_prompt: bool = False
    per_answer_seeds: bool = False
    native_samples: bool = False
    concurrent_calls: bool = False
    stops_at_timeout: bool = False
    update_weights: bool = False
    abort: bool = False

    def __post_init__(self) -> None:
        for name in self.sampling:
            if name not in FIELDS:
                # Otherwise a misspelt name would be ignored, and the parameter refused at every request.
                raise invalid("sampling", f"SamplingParams has no field {name!r}{did_you_mean(name, FIELDS)}")
