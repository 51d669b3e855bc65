"""The names of other libraries in the tables of docs/, and in hints, looked up in the libraries themselves.

A table about a class names it in its first heading, with the library: ``| `vllm.SamplingParams` | here |``. Each name
in the first column is then a parameter, a field or an attribute of that class, or of one of several.
"""

import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

from helpers.pages import Page

_CHATS, _TEXTS = "openai.resources.chat.completions.Completions", "openai.resources.completions.Completions"
_REQUEST = "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest"
#: What has the names about which `corelm.spec.other_libraries` gives hints.
HINTS = {
    "transformers.GenerationConfig": "max_length min_length output_logits output_scores return_dict_in_generate "
    "pad_token_id eos_token_id bos_token_id",
    "transformers.GenerationMixin.generate": "generation_config logits_processor stopping_criteria streamer",
    "transformers.ContinuousBatchingConfig": "return_logprobs",
    "transformers.PreTrainedTokenizerBase.apply_chat_template": "add_generation_prompt tools",
    "transformers.pipeline": "token device_map",
    "transformers.BitsAndBytesConfig": "load_in_8bit load_in_4bit",
    "transformers.TextGenerationPipeline._sanitize_parameters": "return_full_text",
    f"{_CHATS}.create": "messages logprobs top_logprobs stream stream_options response_format logit_bias tool_choice",
    f"{_TEXTS}.create": "best_of echo",
    "openai.resources.responses.Responses.create": "max_output_tokens",
    "openai.OpenAI": "organization",
    "torchrl.modules.llm.TransformersWrapper": "generate_kwargs history_key text_key tokens_key masks_key tokenizer "
    "min_batch_size max_batch_size batching_timeout chat_template_name pad_model_input layout",
    "trl.GRPOConfig": "max_completion_length num_generations generation_kwargs chat_template_kwargs",
    "trl.ModelConfig": "model_name_or_path",
    "lm_eval.models.huggingface.HFLM": "pretrained chat_template_args enable_thinking max_gen_toks",
    "lm_eval.simple_evaluate": "gen_kwargs",
    "lm_eval.models.utils.handle_stop_sequences": "until",
    "vllm.SamplingParams": "prompt_logprobs include_stop_str_in_output structured_outputs allowed_token_ids bad_words "
    "output_kind",
    "vllm.LLM": "logits_processors",
    "vllm.engine.arg_utils.EngineArgs": "reasoning_parser",
    _REQUEST: "truncate_prompt_tokens use_beam_search",
    "sglang.srt.sampling.sampling_params.SamplingParams": "stop_strs no_stop_trim json_schema",
    "sglang.srt.managers.io_struct.GenerateReqInput": "return_logprob top_logprobs_num custom_logit_processor",
    "sglang.srt.server_args.ServerArgs": "model_path tool_call_parser",
}
#: The same, in earlier releases: vLLM before 0.12, and transformers before 5.
FORMER = "guided_json guided_regex guided_choice guided_grammar guided_decoding torch_dtype use_auth_token"
_TABLE = re.compile(r"^\| ?(?P<owners>`[\w.]+`(?:, `[\w.]+`)*) ?\|.*\n\|[-| ]+\|\n(?P<rows>(?:\|.*\n?)+)", re.MULTILINE)
_SPAN = re.compile(r"`([^`]+)`")
_NAME = re.compile(r"[A-Za-z_]\w*")


def unknown_names(page: Page, library: str) -> list[str]:
    """Return the names on the page that the installed library does not have."""
    dotted = re.findall(rf"`({library}\.[\w.]+)`", page.text)
    missing = [name for name in dict.fromkeys(dotted) if not found(name)]
    for owners, name in names_in_tables(page, library):
        known = [owner for owner in map(found, owners) if owner]
        if known and not any(has(owner[0], name) for owner in known):
            missing.append(f"{' or '.join(owners)}: {name}")
    return missing


def names_in_tables(page: Page, library: str) -> Iterator[tuple[list[str], str]]:
    """Yield each name of a first column with the classes of its table."""
    for table in _TABLE.finditer(page.text):
        owners = _SPAN.findall(table["owners"])
        if all(owner.startswith(f"{library}.") for owner in owners):
            for row in table["rows"].splitlines():
                for name in _SPAN.findall(row.split("|")[1]):
                    yield owners, name


def found(dotted: str) -> tuple[Any, ...]:
    """Return the object of that name, in a tuple; an empty tuple if there is none."""
    try:
        return (pkgutil.resolve_name(dotted),)
    except (ImportError, AttributeError):
        return ()


def has(owner: Any, name: str) -> bool:
    """Return whether a class or function has this attribute, field or parameter; some have fields only as objects."""
    if not _NAME.fullmatch(name):
        return False
    if hasattr(owner, name) or name in inspect.signature(owner).parameters:
        return True
    if any(name in getattr(each, "__annotations__", ()) for each in getattr(owner, "__mro__", ())):
        return True
    try:
        return hasattr(owner(), name)
    except Exception:  # it needs arguments
        return False
