"""inspect_ai answers its samples with a backend: evals, settings, log-probs, tool calls and reasoning."""

import asyncio
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    get_model,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import ToolCall, ToolFunction, ToolInfo, tool
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

import corelm
from corelm.errors import BackendNotFoundError, CapabilityError, InvalidRequestError
from corelm_interop.inspect_provider import log_probs_of
from corelm_interop.token_texts import TokenTexts
from corelm_testing.tiny import build_tiny
from helpers import oracle
from helpers.pages import Page
from helpers.scripted import scripted
from helpers.tiny_models import tiny_tokenizer
from helpers.tool_templates import HERMES, QWEN_XML

ROOT = Path(__file__).parents[2]
ADD = ToolInfo.model_validate(
    {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
            "required": ["x", "y"],
        },
    }
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(build_tiny(tmp_path_factory.mktemp("tiny") / "tiny-model", progress=False))


def ask(model, question="Who are you?", **options):
    config = GenerateConfig(**options.pop("config", {}))
    return asyncio.run(model.generate(question, config=config, **options))


#: The beginning of a chat template that reads tools.
LISTS_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"


def model_of(answer, **args):
    """Return a model that says what is given, and the engine behind it."""
    engine_args = args.pop("engine", {})
    backend, engine = scripted(answer if callable(answer) else lambda prompt: answer, **engine_args)
    args = {"chat_template": LISTS_TOOLS + HERMES, "response_parser": "hermes", **args}
    return get_model("corelm/scripted", backend=backend, memoize=False, **args), engine


# A real model ---------------------------------------------------------------------------------------------------------


def test_an_eval_is_answered_and_scored(tiny, tmp_path):
    questions = ["Who are you?", "What is your name?", "Hello!", "Can you swim?"]
    task = Task(dataset=[Sample(input=text, target="Pip") for text in questions], solver=generate(), scorer=includes())
    (log,) = eval(
        task,
        model=f"corelm/transformers/{tiny}",
        model_args={"dtype": "float32"},
        temperature=0.0,
        max_tokens=24,
        log_dir=str(tmp_path),
        display="none",
    )
    assert log.status == "success", log.error
    with corelm.get_backend("transformers", tiny, dtype="float32") as backend:
        policy = corelm.LLMPolicy(backend, sampling_params={"max_new_tokens": 24, "temperature": 0.0}, inplace=False)
        chats = corelm.History.from_chats([[{"role": "user", "content": text}] for text in questions])
        expected = policy(TensorDict(history=chats))
    said = expected["text"].response
    assert [sample.output.completion for sample in log.samples] == list(said)
    assert log.results.scores[0].metrics["accuracy"].value == sum("Pip" in text for text in said) / len(said) > 0
    sampled = sum(len(row) for row in expected["tokens"].response)
    (usage,) = log.stats.model_usage.values()
    assert usage.output_tokens == sampled and usage.input_tokens == sum(len(row) for row in expected["tokens"].prompt)
    call = log.samples[0].output
    assert call.stop_reason == ("stop" if expected["finish_reason"][0] == "stop" else "max_tokens")


def test_log_probs_are_those_of_a_plain_forward(tiny):
    model = get_model(f"corelm/transformers/{tiny}", dtype="float32", memoize=False)
    try:
        config = {"logprobs": True, "top_logprobs": 3, "max_tokens": 8, "seed": 3, "num_choices": 2}
        output = ask(model, config=config)
        backend = model.api.backend
        plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
        prompt = backend.tokenizer.apply_chat_template(
            [{"role": "user", "content": "Who are you?"}], add_generation_prompt=True, return_dict=False
        )
        assert len(output.choices) == 2
        sampled = 0
        for choice in output.choices:
            tokens = choice.logprobs.content
            text = "".join(each.token for each in tokens)
            ids = backend.tokenizer(text, add_special_tokens=False)["input_ids"]
            assert len(ids) == len(tokens) and text.removesuffix("<|im_end|>") == choice.message.text
            assert b"".join(bytes(each.bytes) for each in tokens) == text.encode()
            logits = oracle.next_logits(plain, [*prompt, *ids]).log_softmax(-1)
            for at, (token_id, each) in enumerate(zip(ids, tokens, strict=True), start=len(prompt)):
                assert each.logprob == pytest.approx(logits[at - 1, token_id].item(), abs=2e-5)
                best = logits[at - 1].topk(3)
                found = [(one.token, one.logprob) for one in each.top_logprobs]
                expected = [backend.tokenizer.decode([one]) for one in best.indices.tolist()]
                assert [token for token, _ in found] == expected
                assert [value for _, value in found] == pytest.approx(best.values.tolist(), abs=2e-5)
            sampled += len(ids)
        assert output.usage.input_tokens == len(prompt) and output.usage.output_tokens == sampled
        assert output.usage.total_tokens == len(prompt) + sampled
        assert asyncio.run(model.api.count_text_tokens("Who are you?")) == len(
            backend.tokenizer("Who are you?").input_ids
        )
        again = ask(model, config=config)
        assert [one.message.text for one in again.choices] == [one.message.text for one in output.choices]
    finally:
        asyncio.run(close(model))
    assert backend.closed


def test_tokens_that_are_parts_of_a_character_have_their_bytes():
    ids = tiny_tokenizer()("日", add_special_tokens=False)["input_ids"]
    tokens = log_probs_of(TokenTexts(tiny_tokenizer()), ids, [-1.0] * len(ids)).content
    assert len(ids) > 1 and b"".join(bytes(each.bytes) for each in tokens) == "日".encode()


async def close(model):
    async with model:
        pass


def test_the_command_finds_the_provider(tiny, tmp_path):
    (tmp_path / "task.py").write_text(
        "from inspect_ai import Task, task\n"
        "from inspect_ai.dataset import Sample\n"
        "from inspect_ai.scorer import includes\n\n\n"
        "@task\n"
        "def names():\n"
        "    return Task(dataset=[Sample(input='Who are you?', target='Pip')], scorer=includes())\n"
    )
    path = os.environ.get("PYTHONPATH", "")
    if "corelm" not in entry_points(group="inspect_ai").names:
        # As an install of this version of core would do it.
        info = tmp_path / "site" / "core_inspect-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: core-inspect\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[inspect_ai]\ncorelm = corelm_interop.inspect_ai\n")
        path = os.pathsep.join([str(info.parent), *filter(None, [path])])
    command = [sys.executable, "-m", "inspect_ai", "eval", "task.py", "--model", f"corelm/transformers/{tiny}"]
    command += ["-M", "dtype=float32", "--max-tokens", "8", "--temperature", "0", "--display", "plain"]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0 and "accuracy" in ended.stdout, ended.stdout + ended.stderr
    assert list((tmp_path / "logs").glob("*.eval"))
    for wrong, said in (
        (["-M", "dtyp=float32"], "got an unexpected keyword argument 'dtyp'; did you mean 'dtype'?"),
        (["-M", "response_parser=hermse"], "did you mean 'hermes'?"),
    ):
        refused = subprocess.run(
            [*command, *wrong],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert refused.returncode == 1 and said in " ".join(refused.stdout.split()), refused.stderr
        assert "Traceback" not in refused.stdout + refused.stderr


# Tools and reasoning --------------------------------------------------------------------------------------------------


@tool
def add():
    async def execute(x: int, y: int):
        """Add two numbers.

        Args:
            x: First number.
            y: Second number.
        """
        return x + y

    return execute


def test_a_tool_is_called_and_its_result_is_read(tmp_path):
    def answer(prompt):
        return "It is 3." if "<|im_start|>tool\n3" in prompt else f"<think>\nEasy.\n</think>\n\nI add.\n{CALL}"

    model, engine = model_of(answer)
    task = Task(dataset=[Sample(input="1 + 2?", target="3")], solver=[use_tools(add()), generate()], scorer=includes())
    (log,) = eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    _, called, result, said = log.samples[0].messages
    assert (called.text, result.text, said.text) == ("I add.", "3", "It is 3.")
    assert (called.tool_calls[0].function, called.tool_calls[0].arguments) == ("add", {"x": 1, "y": 2})
    assert result.tool_call_id == called.tool_calls[0].id
    assert [part.reasoning for part in called.content if isinstance(part, ContentReasoning)] == ["Easy."]
    assert len(engine.requests) == 2
    # The chat template gets back all that the model had said.
    second = engine.tokenizer.decode(engine.requests[1].prompts.tolist()[0])
    assert f"<think>\nEasy.\n</think>\n\nI add.\n{CALL}<|im_end|>" in second
    model.api.backend.close()


def test_tools_reach_the_template_and_type_the_arguments():
    xml = "</think><tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    template = LISTS_TOOLS + QWEN_XML
    model, engine = model_of(xml, chat_template=template, response_parser="qwen")
    output = ask(model, tools=[ADD])
    assert output.message.tool_calls[0].arguments == {"x": 1} and output.stop_reason == "tool_calls"
    prompt = engine.tokenizer.decode(engine.requests[0].prompts.tolist()[0])
    assert prompt.startswith('{"type": "function", "function": {"name": "add", "description": "Add two numbers."')
    ask(model, tools=[ADD], tool_choice="none")
    assert not engine.tokenizer.decode(engine.requests[1].prompts.tolist()[0]).startswith("{")


def test_a_call_that_does_not_parse_is_the_text_of_the_answer():
    model, _ = model_of('<tool_call>{"name": "add", "argu')
    with pytest.warns(Warning, match="ResponseFormatError"):
        output = ask(model, tools=[ADD])
    assert output.completion == '<tool_call>{"name": "add", "argu' and not output.message.tool_calls
    assert "malformed" in output.metadata["response_parser"]["0"]


def test_what_tasks_put_into_a_conversation_is_rendered():
    model, engine = model_of("Yes.")
    thought, call = ContentReasoning(reasoning="Easy."), ToolCall(id="c1", function="add", arguments={"x": 1, "y": 2})
    chat = [
        ChatMessageUser(content=[ContentText(text="1 + 2?"), ContentText(text="Quick!")]),
        ChatMessageAssistant(content=[thought, ContentText(text="I add.")], tool_calls=[call]),
        ChatMessageTool(content="3", tool_call_id="c1", function="add"),
    ]
    ask(model, chat)
    assert engine.tokenizer.decode(engine.requests[0].prompts.tolist()[0]) == (
        "<|im_start|>user\n1 + 2?\nQuick!<|im_end|>\n<|im_start|>assistant\n<think>\nEasy.\n</think>\n\nI add.\n"
        f"{CALL}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    )


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_choices", [None, 2])
def test_a_prompt_that_does_not_fit_the_context_is_no_error(num_choices):
    model, engine = model_of("Yes.", engine={"max_context": 64})
    output = ask(model, "word " * 200, config={"num_choices": num_choices})
    assert output.stop_reason == "model_length" and "64" in output.completion and engine.requests == []


@pytest.mark.parametrize(
    ("asked", "error", "names"),
    [
        ({"config": {"logit_bias": {1: 1.0}}}, CapabilityError, "logit_bias"),
        ({"config": {"best_of": 2}}, CapabilityError, "best_of"),
        ({"config": {"frequency_penalty": 0.5}}, CapabilityError, "frequency_penalty"),
        ({"config": {"top_logprobs": 2, "logprobs": True}}, CapabilityError, "top_logprobs"),
        ({"config": {"temperature": -1.0}}, InvalidRequestError, "temperature"),
        ({"tools": [ADD], "tool_choice": "any"}, CapabilityError, "tool_choice"),
        ({"tools": [ADD], "tool_choice": ToolFunction(name="add")}, CapabilityError, "tool_choice"),
    ],
)
def test_what_cannot_be_honoured_is_refused(asked, error, names):
    model, engine = model_of("Hi")
    with pytest.raises(error, match=names):
        ask(model, **asked)
    assert not engine.requests


def test_tools_need_a_parser_and_images_are_refused():
    model, _ = model_of("Hi", response_parser=None)
    with pytest.raises(InvalidRequestError, match="-M response_parser=hermes"):
        ask(model, tools=[ADD])
    image = ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AAAA")])
    with pytest.raises(InvalidRequestError, match="a part of type 'image'"):
        ask(model, [image])


# Engines --------------------------------------------------------------------------------------------------------------


def test_a_borrowed_engine_stays_open_and_wrong_arguments_open_none():
    model, _ = model_of("Hi")
    asyncio.run(close(model))
    assert not model.api.backend.closed
    with pytest.raises(InvalidRequestError, match="open already"):
        get_model("corelm/scripted", backend=model.api.backend, memoize=False, dtype="float32")
    model.api.backend.close()
    with pytest.raises(BackendNotFoundError, match="no backend"):
        get_model("corelm/nonsense/x", memoize=False)


def test_the_page_runs(tiny, tmp_path, monkeypatch):
    (tmp_path / "tiny-model").symlink_to(tiny)
    monkeypatch.chdir(tmp_path)
    Page(ROOT / "docs" / "inspect.md").run()
