"""What other libraries call things: names that core does otherwise, and their objects as `SamplingParams` takes them.

The names are those of transformers, vLLM, SGLang, TRL, TorchRL, OpenAI and lm-eval. The table is exact: the
spelling of a name says nothing about what another library means by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from corelm.validate import did_you_mean, invalid

_LOG_PROBS = "a policy returns the log-probs of sampled tokens; its option log_probs_mode chooses which"
_DISTRIBUTIONS = "a policy returns those of the most probable ids with its option top_logprobs=k; get_dist returns all"
_OUTPUTS = "core always returns the same containers; choose them with the options return_… of the policy"
_STOP_TEXT = "not supported: a text ends before its stop string; backend.detokenize(ids) shows it"
_PADS = "prompts are not padded on their way to the engine, and pad_output=True pads with the tokenizer's pad id"
_STREAM = "call policy.stream(td) or policy.astream(td); leave it out"
#: Names of sampling parameters that core never passes to an engine, and what to do instead.
NOT_OURS = {
    "max_length": "it counts the prompt too; give max_new_tokens",
    **dict.fromkeys(("max_gen_toks", "max_output_tokens", "max_completion_length"), "give max_new_tokens"),
    "best_of": "give num_samples and choose",
    "num_generations": "give num_samples",
    **dict.fromkeys(("until", "stop_strs"), "give stop"),
    **dict.fromkeys(("logprobs", "return_logprob", "return_logprobs", "output_logits", "output_scores"), _LOG_PROBS),
    **dict.fromkeys(("top_logprobs", "top_logprobs_num"), _DISTRIBUTIONS),
    "prompt_logprobs": "a policy with generate=False scores prompts; leave it out",
    "echo": "the fields prompt and full of the containers hold the prompt; leave it out",
    "return_dict_in_generate": _OUTPUTS,
    "return_full_text": "text.full holds the prompt and the answer; leave it out",
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim"), _STOP_TEXT),
    "pad_token_id": f"{_PADS}; leave it out",
    "eos_token_id": "the model's own EOS ids end an answer; give stop_token_ids for more, or ignore_eos=True",
    "bos_token_id": "the tokenizer adds it; leave it out",
    **dict.fromkeys(("stream", "stream_options"), _STREAM),
    "truncate_prompt_tokens": "give the policy truncation='left'",
}
_SAMPLING = "give the policy sampling_params={…}"
_BATCHING = "give batching=True, or batching=Limits(…)"
_OBJECTS = "not supported, because objects of Python would work with one engine only"
_STRUCTURED = (
    "the engine decodes it: give sampling_params={'engine_kwargs': {…}}, or open an OpenAI server with extra_body={…} "
    "(see the page about structured output)"
)
_MODEL = "give the model as the second argument of get_backend"
_HUB = "log in with `hf auth login` or set HF_TOKEN, which the engines read"
_KEYS = "keys={{'{0}': …}} for what is written, and input_key for what is read"
_FEW = "sampling_params={{'engine_kwargs': {{'{0}': …}}}}, or open an OpenAI server with extra_body={{'{0}': …}}"
#: Other names, and what to do instead. Some engines take some of them in `engine_kwargs` or when they are opened.
ELSEWHERE = {
    **dict.fromkeys(("generate_kwargs", "generation_kwargs", "gen_kwargs", "generation_config"), _SAMPLING),
    **{f"{name}_key": f"give {_KEYS.format(name)}" for name in ("history", "text", "tokens", "masks")},
    **dict.fromkeys(("min_batch_size", "max_batch_size", "batching_timeout"), _BATCHING),
    **dict.fromkeys(("response_format", "structured_outputs", "json_schema"), _STRUCTURED),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"), _STRUCTURED),
    **{name: f"give {_FEW.format(name)}" for name in ("logit_bias", "allowed_token_ids", "bad_words")},
    **dict.fromkeys(("logits_processor", "logits_processors", "stopping_criteria", "custom_logit_processor"), _OBJECTS),
    "min_length": "it counts the prompt too; give min_new_tokens",
    "use_beam_search": "give num_beams",
    "output_kind": _OUTPUTS,
    "streamer": "call policy.stream(td)",
    "tokenizer": "it belongs to the engine: give it to get_backend",
    "chat_template_name": "give chat_template, a text or the name of one of the tokenizer's templates",
    **dict.fromkeys(("chat_template_kwargs", "chat_template_args"), "give template_kwargs"),
    "enable_thinking": "give template_kwargs={'enable_thinking': …}",
    "add_generation_prompt": "it follows from the last turn of a conversation; leave it out",
    "tools": "give template_kwargs={'tools': […]}",
    "tool_choice": "not supported, because engines differ in it; leave it out",
    **dict.fromkeys(("reasoning_parser", "tool_call_parser"), "give response_parser"),
    "pad_model_input": "not supported, because prompts are never padded; leave it out",
    "layout": "give pad_output=True for padded tensors; the default is rows of their own lengths",
    "messages": "conversations are given in the TensorDict; leave it out",
    **dict.fromkeys(("model_name_or_path", "pretrained", "model_path"), _MODEL),
    "device_map": "for one device, open with device='cuda:0'; for several, with model_kwargs={'device_map': …}",
    "torch_dtype": "open with dtype='bfloat16'",
    "token": f"{_HUB}; for a server, open with api_key='…'",
    "use_auth_token": _HUB,
    **dict.fromkeys(("load_in_8bit", "load_in_4bit"), "open with model_kwargs={'quantization_config': …}"),
    "organization": "open with headers={'OpenAI-Organization': '…'}",
}


def instead_of(name: Any, known: Iterable[str]) -> str:
    """Return a hint to append to a message about an unknown name: from the tables, or a known name that is near."""
    exact = NOT_OURS.get(str(name)) or ELSEWHERE.get(str(name))
    return f"; {exact}" if exact else did_you_mean(name, known)


#: Parameters that transformers ignores if it does not sample, and those that belong to its beam search.
_SAMPLED, _BEAMS = ("temperature", "top_k", "top_p", "min_p", "top_h"), ("length_penalty", "early_stopping")
#: Fields that change no answer.
_HARMLESS = frozenset(
    (
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile"),
        *("continuous_batching_config", "low_memory", "prefill_chunk_size", "use_mtp", "transformers_version"),
        *("pad_token_id", "bos_token_id", "output_attentions", "output_hidden_states", "output_scores"),
        *("output_logits", "return_dict_in_generate", "decoder_start_token_id", "is_assistant"),
        *("detokenize", "output_kind", "flat_logprobs", "skip_clone", "stream_interval", "output_text_buffer_length"),
        "skip_reading_prefix_cache",
    )
)
#: Values that switch off what core does not have.
_OFF = {"typical_p": 1, "encoder_repetition_penalty": 1, "num_beam_groups": 1, "guidance_scale": 1, "top_h": 1}


def sampling_fields(value: Any, names: Iterable[str]) -> Mapping[str, Any] | None:
    """Return what a `GenerationConfig` of transformers or a `SamplingParams` of vLLM says; None for another object.

    A field that is set and has no equal among core's `names`, its sampling parameters and their aliases, is refused.
    """
    library, kind = type(value).__module__.partition(".")[0], type(value).__name__
    if library == "transformers" and kind == "GenerationConfig":
        return _of_transformers(value.to_diff_dict(), frozenset(names))
    if library == "vllm" and kind == "SamplingParams":
        return _of_vllm(value, frozenset(names))
    return None


def _of_transformers(given: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Return the parameters that `generate` would use: it is greedy unless told to sample, and has a top-k of 50."""
    found = {name: value for name, value in given.items() if name[0] != "_" and value is not None}
    sampled, beams = bool(found.get("do_sample")), found.get("num_beams", 1)
    if sampled and beams > 1:
        raise invalid("num_beams", "a beam search that samples has no equal here; give do_sample=False or num_beams=1")
    unused = {*(() if sampled else _SAMPLED), *(() if beams > 1 else _BEAMS), *_HARMLESS}
    unused |= {"max_length"} if "max_new_tokens" in found else set()
    unused |= {"num_return_sequences"} if found.get("num_return_sequences") == 1 else set()
    found = {name: value for name, value in found.items() if name not in unused}
    if (ends := found.pop("eos_token_id", None)) is not None:
        found["stop_token_ids"] = ends
    for name in [name for name in found if name not in names]:
        if found.pop(name) not in (0, _OFF.get(name, 0)):
            raise invalid(name, f"transformers' {name} has no equal here{instead_of(name, ())}")
    return {**({"top_k": 50} if sampled else {}), **found, "do_sample": sampled}


def _of_vllm(value: Any, names: frozenset[str]) -> dict[str, Any]:
    """Return the fields that differ from vLLM's defaults. Those that only vLLM has go into `engine_kwargs`."""
    default = type(value)()
    fields = (name for name in value.__struct_fields__ if name[0] != "_" and name not in _HARMLESS)
    given = {name: getattr(value, name) for name in fields if getattr(value, name) != getattr(default, name)}
    own = {name: given.pop(name) for name in [*given] if name not in names}
    for name in own:
        if name in NOT_OURS:
            raise invalid(name, f"vLLM's {name} has no equal here; {NOT_OURS[name]}")
    return {"max_tokens": value.max_tokens, **given, **({"engine_kwargs": own} if own else {})}
