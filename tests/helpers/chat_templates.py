"""Short chat templates in common styles, and a tokenizer for the tests of conversations."""

import re
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def unmarked(template: str) -> str:
    """Return the template without its ``{% generation %}`` tags: same text, but assistant text is not marked."""
    return re.sub(r"\{%-? (end)?generation -?%\}", "", template)


#: The plain style: every turn is between markers, and all roles use the same ones.
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Headers with two newlines, a BOS written by the template, trimmed contents.
LLAMA_MARKED = (
    "<|endoftext|>{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot|>' }}{% endgeneration %}"
    "{% else %}{{ m.content | trim + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)

#: A space before the EOS, and no header for the assistant.
INSTRUCT_MARKED = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% generation %} {{ m.content | trim }} <|im_end|>{% endgeneration %}"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)

#: No EOS anywhere: a turn ends with a newline.
BARE_MARKED = (
    "{% for m in messages %}{{ m.role + ': ' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

#: Keeps thinking only in turns after the last question; a turn without any gets an empty block; tools as JSON.
THINKING_MARKED = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}{%- generation -%}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + (call.function | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- endgeneration -%}
    {%- else %}
        {{- content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

#: Spread over lines, with tags that strip whitespace before or after; the newline after the EOS is marked too.
SPREAD_MARKED = """\
{% for m in messages %}
<|im_start|>{{ m.role }}
    {% if m.role == 'assistant' %}
    says  {%- generation -%}

    {{ m.content }}<|im_end|>
    {% endgeneration -%}

    {% else %}
{{ m.content }}<|im_end|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

MARKED = {
    "chatml": CHATML_MARKED,
    "llama": LLAMA_MARKED,
    "instruct": INSTRUCT_MARKED,
    "bare": BARE_MARKED,
    "thinking": THINKING_MARKED,
    "spread": SPREAD_MARKED,
}
CHATML, LLAMA, INSTRUCT, BARE, THINKING = map(
    unmarked, (CHATML_MARKED, LLAMA_MARKED, INSTRUCT_MARKED, BARE_MARKED, THINKING_MARKED)
)
UNMARKED = {"chatml": CHATML, "llama": LLAMA, "instruct": INSTRUCT, "bare": BARE, "thinking": THINKING}

#: Changes earlier turns: only the last assistant turn is written in full.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}[earlier]{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Changes earlier turns, and ends with their number.
COUNTING = CHATML.replace("{% endfor %}", "{{ '.' if loop.last }}{% endfor %}{{ messages[1].content | length }}")

#: Alters contents, and therefore placeholders too.
SHOUTING = CHATML.replace("m.content", "m.content | upper")

#: Raises unless user and assistant alternate.
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]

_WORDS = """\
system user assistant tool What is the capital of France? The capital of France is Paris. And of Italy? Rome, I think.
<think> </think> [INST] [/INST] thinking about numbers 1 2 3, one two three, hello world, again, please answer.
"""


@cache
def tokenizer() -> Any:
    """Return a byte-level BPE trained on a few words; `SPECIAL` are its special tokens, ``<|im_end|>`` its EOS."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([_WORDS] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[text for text in SPECIAL if text not in ("<|im_end|>", "<|endoftext|>")],
        clean_up_tokenization_spaces=False,
        chat_template=CHATML,
    )
