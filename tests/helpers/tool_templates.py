"""Chat templates of families of models that write reasoning and tool calls, shortened, and a way to cut a turn out.

Each is written after what the family's own template puts around an assistant's turn. Those that TRL ships are
read in tests/harnesses/test_trl_templates.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helpers import chat_templates as ct

_HEAD = "{%- for m in messages %}{%- if m.role != 'assistant' %}"
_OTHERS = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- else %}"
_TAIL = "{%- endif %}{%- endfor %}"
_THINK = "{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
_CHATML_PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"

#: Hermes and Qwen3: JSON between tags.
HERMES = (
    _HEAD
    + _OTHERS
    + "{{- '<|im_start|>assistant\\n' }}"
    + _THINK
    + "{{- m.content }}{%- for call in m.tool_calls or [] %}"
    "{%- if not loop.first or m.content %}{{- '\\n' }}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson + '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    + _TAIL
    + _CHATML_PROMPT
)

#: Qwen3.5, which begins the reasoning in the prompt: XML between the same tags, values between newlines.
QWEN_XML = (
    _HEAD
    + _OTHERS
    + "{{- '<|im_start|>assistant\\n<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '\\n\\n' if loop.first and m.content else '\\n' if not loop.first else '' }}"
    "{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}"
    "{%- for key, value in call.function.arguments | items %}"
    "{{- '<parameter=' + key + '>\\n' }}"
    "{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    "{{- '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    + _TAIL
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)

#: GLM-4.5: keys and values between tags, and no mark at the end of a turn.
GLM = (
    "{%- for m in messages %}{%- if m.role != 'assistant' %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- else %}"
    "{{- '<|assistant|>\\n<think>' + (m.reasoning_content or '') + '</think>' }}"
    "{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}"
    "{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>' + call.function.name + '\\n' }}"
    "{%- for key, value in call.function.arguments | items %}{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}"
    "{{- value if value is string else value | tojson }}{{- '</arg_value>\\n' }}{%- endfor %}"
    "{{- '</tool_call>' }}{%- endfor %}" + _TAIL + "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)

#: Llama 3.1: a turn is a text or one call.
LLAMA = (
    "{%- for m in messages %}{{- '<|start|>' + m.role + '<|end|>\\n\\n' }}"
    "{%- if m.tool_calls %}{%- set call = m.tool_calls[0].function %}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments | tojson + '}' }}"
    "{%- else %}{{- m.content }}{%- endif %}{{- '<|eot|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}"
)


def _deepseek(before: str, after_name: str, after: str, between: str) -> str:
    return (
        "{%- for m in messages %}{%- if m.role != 'assistant' %}{{- '<｜User｜>' + m.content }}{%- else %}"
        "{{- '<｜Assistant｜><think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' + m.content }}"
        "{%- for call in m.tool_calls or [] %}{{- '<｜tool▁calls▁begin｜>' if loop.first else '" + between + "' }}"
        "{{- '<｜tool▁call▁begin｜>" + before + "' + call.function.name + '" + after_name + "' }}"
        "{{- call.function.arguments | tojson + '" + after + "<｜tool▁call▁end｜>' }}"
        "{{- '<｜tool▁calls▁end｜>' if loop.last else '' }}{%- endfor %}{{- '<｜end▁of▁sentence｜>' }}"
        + _TAIL
        + "{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"
    )


#: DeepSeek R1 and V3: the JSON is fenced.
DEEPSEEK_R1 = _deepseek("function<｜tool▁sep｜>", "\\n```json\\n", "\\n```", "\\n")
#: DeepSeek V3.1.
DEEPSEEK_V31 = _deepseek("", "<｜tool▁sep｜>", "", "")


def _mistral(calls: str) -> str:
    return (
        "{%- for m in messages %}{%- if m.role != 'assistant' %}{{- '[INST]' + m.content + '[/INST]' }}{%- else %}"
        "{%- if m.reasoning_content %}{{- '[THINK]' + m.reasoning_content + '[/THINK]' }}{%- endif %}{{- m.content }}"
        + calls
        + "{{- '</s>' }}"
        + _TAIL
    )


#: Mistral's older models: one list of calls with their ids.
MISTRAL_LIST = _mistral(
    "{%- for call in m.tool_calls or [] %}{{- '[TOOL_CALLS][' if loop.first else ', ' }}"
    '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' + call.function.arguments | tojson }}'
    "{{- ', \"id\": \"' + call.id + '\"}' }}{{- ']' if loop.last else '' }}{%- endfor %}"
)
#: Its newer ones.
MISTRAL_ARGS = _mistral(
    "{%- for call in m.tool_calls or [] %}{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}"
    "{{- call.function.arguments | tojson }}{%- endfor %}"
)
#: And those between, which write the ids as well.
MISTRAL_IDS = _mistral(
    "{%- for call in m.tool_calls or [] %}{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}"
    "{{- call.function.arguments | tojson }}{%- endfor %}"
)

#: Kimi K2: a section of calls with ids.
KIMI = (
    "{%- for m in messages %}{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}"
    "{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}{{- m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '<|tool_calls_section_begin|>' if loop.first else '' }}"
    "{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + call.function.arguments | tojson }}"
    "{{- '<|tool_call_end|>' }}{{- '<|tool_calls_section_end|>' if loop.last else '' }}{%- endfor %}"
    "{{- '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"
)

#: gpt-oss: channels, and one call a turn.
HARMONY = (
    "{%- for m in messages %}{%- if m.role != 'assistant' %}{{- '<|start|>' + m.role + '<|message|>' + m.content }}"
    "{{- '<|end|>' }}{%- else %}"
    "{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{%- if m.tool_calls %}{%- set call = m.tool_calls[0].function %}"
    "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{- call.arguments | tojson + '<|call|>' }}"
    "{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{%- endif %}"
    + _TAIL
    + "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)


@dataclass(frozen=True)
class Family:
    """A template and what it can write.

    Attributes:
        parser: the name of the format.
        template: jinja text.
        end: what ends a turn.
        ids: what the id of call number 0 looks like, with the name of its function; "" if calls have none.
        calls: the most calls of a turn.
        text_with_calls: whether a turn with calls may have text.
        thinking: the key of the reasoning; None if there is none.
        typed: whether values are written without their types.
    """

    parser: str
    template: str
    end: str
    ids: str = ""
    calls: int = 3
    text_with_calls: bool = True
    thinking: str | None = "reasoning_content"
    typed: bool = True


FAMILIES = {
    "hermes": Family("hermes", HERMES, "<|im_end|>\n"),
    "qwen": Family("qwen", HERMES, "<|im_end|>\n"),
    "qwen_xml": Family("qwen", QWEN_XML, "<|im_end|>\n", typed=False),
    "glm": Family("glm", GLM, "", typed=False),
    "llama": Family("llama3_json", LLAMA, "<|eot|>", calls=1, text_with_calls=False, thinking=None),
    "deepseek_r1": Family("deepseek_r1", DEEPSEEK_R1, "<｜end▁of▁sentence｜>"),
    "deepseek_v31": Family("deepseek_r1", DEEPSEEK_V31, "<｜end▁of▁sentence｜>"),
    "mistral_list": Family("mistral", MISTRAL_LIST, "</s>", ids="abcdefgh{number}"),
    "mistral_args": Family("mistral", MISTRAL_ARGS, "</s>"),
    "mistral_ids": Family("mistral", MISTRAL_IDS, "</s>", ids="abcdefgh{number}"),
    "kimi": Family("kimi_k2", KIMI, "<|im_end|>", ids="functions.{name}:{number}"),
    "gpt_oss": Family("gpt_oss", HARMONY, "<|call|>", calls=1, text_with_calls=False, thinking="thinking"),
}


def cut_out(
    template: str, turn: Mapping[str, Any], end: str, *, tools: Sequence[Any] | None = None, tokenizer: Any = None
) -> tuple[str, str]:
    """Return the prompt and the answer that a template makes of a question and the assistant's turn.

    The answer has no `end`, and not what the prompt has already written of it.
    """
    tokenizer = tokenizer or ct.tokenizer()
    question = {"role": "user", "content": "What is it?"}
    prompt, full = (
        tokenizer.apply_chat_template(
            chat, chat_template=template, tools=tools, tokenize=False, add_generation_prompt=prompts
        )
        for chat, prompts in (([question], True), ([question, turn], False))
    )
    assert full.startswith(prompt), (prompt, full)
    return prompt, full[len(prompt) :].removesuffix(end)
