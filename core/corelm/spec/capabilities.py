"""What a backend can do, declared by the plugin once its engine is open. Core refuses the rest beforehand."""

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
    """Everything defaults to "no": a plugin lists what it does.

    Attributes:
        vocab_size: ids are legal in ``[0, vocab_size)``.
        max_context: the longest prompt + answer the model takes, in tokens; None if there is no limit.
        eos_token_ids: what ends an answer by itself; None for the tokenizer's ``eos_token_id``.
        sampling: names of `SamplingParams` fields the engine honours, each with its legal inclusive range, or None for
            "whatever `SamplingParams` allows". Greedy decoding needs a temperature range that includes 0. Stop ids and
            `max_new_tokens` are every engine's duty and not listed, nor is what core does itself (`num_samples`, …).
        generation_modes: which log-probs `generate` can return: `raw`, `processed`, or `scaled`, which is the habit of
            some engines to divide the logits by the temperature (by 1 if it is 0) and not to look at truncation. Core
            asks these for the mode that a scaled number happens to be, and refuses where it is neither.
        score: `score_logprobs` works. score_temperature: also at a temperature other than 1.
        logits: scoring can return full logits. gradients: scoring can carry gradients to the model.
        empty_prompt: a prompt of no tokens is legal.
        per_answer_seeds: the same seed gives the same answer, whatever the other rows.
        native_samples: `generate` gets ``sampling.num_samples`` unexpanded and returns that many rows a prompt,
            together.
        concurrent_calls: hooks may be called from several threads at once.
        update_weights, abort: the optional hook of that name works.
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
    update_weights: bool = False
    abort: bool = False

    def __post_init__(self) -> None:
        for name in self.sampling:
            if name not in FIELDS:
                # Otherwise a misspelt name would be ignored, and the parameter refused at every request.
                raise invalid("sampling", f"SamplingParams has no field {name!r}{did_you_mean(name, FIELDS)}")
