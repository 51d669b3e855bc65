"""`read_capabilities`: what the backend can do with a model, read from the model and its tokenizer."""

from __future__ import annotations

from typing import Any

from corelm.spec import Capabilities
from corelm_engine_kit import eos_token_ids
from transformers_backend.engine import CausalLM

#: Sampling parameters honoured, in the ranges that `SamplingParams` itself allows.
HONOURED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_new_tokens",
    "stop",
    "num_beams",
    "length_penalty",
    "early_stopping",
    "engine_kwargs",
)
#: The most ids for which `generate` returns log-probs: what core asks of an engine that has no limit of its own.
MOST_TOP_LOGPROBS = 1024


#: The most ids whose log-probs are returned at every position, if the vocabulary has as many.
_TOP_K = 1024


def read_capabilities(engine: CausalLM, tokenizer: Any, *, adapters: bool = False) -> Capabilities:
    return Capabilities(
        vocab_size=engine.vocab_size,
        max_context=engine.max_context,
        eos_token_ids=eos_token_ids(engine.base.generation_config, tokenizer, vocab_size=engine.vocab_size),
        sampling=dict.fromkeys(HONOURED),
        generation_modes=frozenset({"raw", "processed"}),
        return_support=True,
        top_logprobs=min(MOST_TOP_LOGPROBS, engine.vocab_size),
        score=True,
        score_temperature=True,
        logits=True,
        argmax=True,
        gradients=True,
        per_answer_seeds=True,
        concurrent_calls=True,
        stops_at_timeout=True,
        streaming=True,
        update_weights=True,
        weight_stream=True,
        updates_in_flight=True,
        adapters=adapters,
        score_support=True,
        # More would not be the most probable ones but a good part of the vocabulary.
        score_top_k=min(_TOP_K, engine.vocab_size),
        score_top_ids=True,
        abort=True,
    )
