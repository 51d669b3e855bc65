"""What families' own chat templates write for an assistant's turn, their parsers read as the same turn.

TRL ships these templates. tests/core/rendering/test_response_parsers.py does the same with shorter ones.
"""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st

from corelm import parser_named
from helpers.each import examples
from helpers.tool_templates import Family, cut_out
from helpers.tool_turns import declared, expected, turns

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
FAMILIES = {
    "qwen2_5": Family("hermes", "", "<|im_end|>\n", thinking=None),
    "qwen3": Family("hermes", "", "<|im_end|>\n"),
    "qwen3_instruct_2507": Family("qwen", "", "<|im_end|>\n", thinking=None),
    "qwen3_5_think": Family("qwen", "", "<|im_end|>\n", typed=False),
    "qwen3_6": Family("qwen", "", "<|im_end|>\n", typed=False),
    "glm4moe": Family("glm", "", "", typed=False),
    "llama3_1": Family("llama3_json", "", "<|eot_id|>", calls=1, text_with_calls=False, thinking=None),
    "deepseekv3": Family("deepseek_r1", "", "<｜end▁of▁sentence｜>", thinking=None),
    "gptoss": Family("gpt_oss", "", "<|call|>", calls=1, text_with_calls=False, thinking="thinking"),
}


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_what_the_familys_own_template_wrote_is_read_as_the_same_turn(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    turn = data.draw(turns(family))
    tools = declared(turn)
    written = deepcopy(turn)
    if name == "deepseekv3":
        # This template wants texts, and always prompts for reasoning, which it then leaves out of the turn.
        for call in written.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    end = "<|return|>" if name == "gptoss" and "tool_calls" not in turn else family.end
    template = (TEMPLATES / f"{name}.jinja").read_text()
    template = template.replace("<｜Assistant｜><think>\\n", "<｜Assistant｜>")
    prompt, answer = cut_out(template, written, end)
    found = parser_named(family.parser).parse(answer, prefix=prompt, tools=tools if not family.typed else None)
    assert found == expected(turn)
