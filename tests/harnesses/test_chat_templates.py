"""Conversations in the chat templates that TRL and llama.cpp publish, compared with what the templates write.

Each template gets a tokenizer that has its special tokens. The assistant's turns are sampled as the template writes
them, one after another: every prompt has to be the template's own, or, where a template rewrites earlier turns, to
begin with the ids of the turns before.
"""

import importlib.metadata
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import corelm
from corelm import History, LLMPolicy
from corelm.errors import TemplateError
from corelm_testing.toy import Bigram

pytest.importorskip("trl")

SPECIAL = re.compile(
    r"<\|[^|<>\s'\"{}+]{1,40}\|?>|<[^|<>\s'\"{}+]{1,30}\|>|<｜[^｜<>]{1,40}｜>|</?s>|<(?:start|end)_of_turn>|"
    r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS|TOOL_CONTENT|THINK|ARGS|CALL_ID)\]"
)
#: They write contents that are lists of parts only.
PARTS_ONLY = ("idefics3", "smolvlm")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, number: int) -> dict[str, Any]:
    return {"id": f"abcdefgh{number}", "type": "function", "function": {"name": name, "arguments": {"city": "Rome"}}}


def result(text: str, name: str, number: int) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"abcdefgh{number}", "name": name}


CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "the city"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Look it up.", "parameters": CITY}}
    for name in ("weather", "clock")
]
PLAIN = [user("What is up?"), assistant("Not much."), user("And now?"), assistant("Still nothing."), user("Bye.")]
CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": PLAIN,
    "with a system prompt": [{"role": "system", "content": "Be brief."}, *PLAIN],
    "reasoning": [each if each["role"] == "user" else {**each, "reasoning_content": "Let me see."} for each in PLAIN],
    "a call": [
        user("Weather in Rome?"),
        assistant("", tool_calls=[call("weather", 1)]),
        result("sunny, 21 C", "weather", 1),
        assistant("It is sunny."),
        user("Thanks a lot"),
    ],
    "parallel calls": [
        user("Weather and time?"),
        assistant("", tool_calls=[call("weather", 1), call("clock", 2)]),
        result("sunny, 21 C", "weather", 1),
        result("noon sharp", "clock", 2),
        assistant("It is sunny."),
        user("Thanks a lot"),
    ],
    "a call with reasoning": [
        user("Weather in Rome?"),
        assistant("", reasoning_content="I ask.", tool_calls=[call("weather", 1)]),
        result("sunny, 21 C", "weather", 1),
        assistant("It is sunny.", reasoning_content="I saw."),
        user("Thanks a lot"),
    ],
}


def sources_of_trl() -> dict[str, str]:
    files = importlib.metadata.files("trl") or []
    found = [Path(str(file.locate())) for file in files if file.match("trl/chat_templates/*.jinja")]
    return {f"trl/{path.stem}": path.read_text() for path in found}


def sources_of_llama_cpp(folder: Path) -> dict[str, str]:
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    if subprocess.run([*download, "llama-cpp-python", "--dest", str(folder)], check=False).returncode:
        pytest.skip("the sdist of llama-cpp-python cannot be had here")
    (sdist,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = [one for one in archive if "/models/templates/" in one.name and one.name.endswith(".jinja")]
        return {f"llama/{Path(one.name).stem}": archive.extractfile(one).read().decode() for one in members}


def tokenizer_of(template: str) -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.train_from_iterator(
        ["Hello there, how are you?"],
        trainers.BpeTrainer(vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    special = sorted({*SPECIAL.findall(template), "<|pad|>", "<s>", "</s>"})
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special], special_tokens=True)
    tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token = "<|pad|>", "<s>", "</s>"
    tokenizer.chat_template = template
    return tokenizer


class Template:
    """A template, a tokenizer for it, and a policy that renders with it."""

    def __init__(self, source: str) -> None:
        self.tokenizer = tokenizer_of(source)
        model = Bigram(torch.zeros(len(self.tokenizer), len(self.tokenizer)))
        self.backend = corelm.get_backend("toy", model, tokenizer=self.tokenizer, max_context=100_000)
        self.options: dict[str, Any] = {}
        self.compared = 0

    def own(self, chat: list[dict[str, Any]], prompt: bool, **more: Any) -> str | None:
        """Return what the template writes; None if it refuses the conversation."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=prompt, **self.options, **more
                )
            )
        except Exception:
            return None

    def read(self, chat: list[dict[str, Any]], **options: Any) -> tuple[list[int], list[bool]]:
        """Return the ids that a policy reads, and which of them are the assistant's."""
        policy = LLMPolicy(
            self.backend, template_kwargs=self.options, sampling_params={"max_new_tokens": 1}, inplace=False, **options
        )
        out = policy(TensorDict(history=History.from_chats([chat])))
        ids = out["tokens"].prompt[0] if options.get("generate", True) else out["tokens"].full[0]
        return ids.tolist(), out["masks"].all_assistant_mask[0][: len(ids)].tolist()

    def sampled_text(self, chat: list[dict[str, Any]], at: int) -> str | None:
        """Return what a model samples that writes turn `at` as the template does, up to the last special token."""
        before, through = self.own(chat[:at], True), self.own(chat[: at + 1], False)
        if before is None or through is None or not through.startswith(before):
            return None
        said = through[len(before) :]
        *_, last = [0, *(found.end() for found in SPECIAL.finditer(said))]
        return said[:last] if last and not said[last:].strip() else said

    def check_rollout(self, chat: list[dict[str, Any]]) -> None:
        turns: list[dict[str, Any]] = []
        known: list[int] = []
        for at, message in enumerate([*chat, None]):
            if message is not None and message["role"] != "assistant":
                turns.append(message)
                continue
            prompt, mask = self.read(turns)
            text, canonical = self.tokenizer.decode(prompt), self.own(chat[:at], True)
            assert prompt[: len(known)] == known, f"the prompt of message {at} does not begin with the turns before"
            if canonical is not None and canonical.startswith(self.tokenizer.decode(known)):
                assert text == canonical, at
                self.compared += 1
            trained = self.tokenizer.decode([one for one, is_said in zip(prompt, mask, strict=True) if is_said])
            for said in (each["content"] for each in chat[:at] if each["role"] in ("user", "tool")):
                assert said in text and said not in trained, (at, text)
            if message is None:
                return
            if (answer := self.sampled_text(chat, at)) is None:
                return
            ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
            known = prompt + ids
            turns.append({**message, "token_ids": ids})

    def check_masks(self, chat: list[dict[str, Any]]) -> None:
        ids, mask = self.read(chat, generate=False)
        assert self.tokenizer.decode(ids) == self.own(chat, False)
        trained = self.tokenizer.decode([one for one, is_said in zip(ids, mask, strict=True) if is_said])
        for each in chat:
            assert (each["content"] in trained) is (each["role"] == "assistant"), trained

    def check_continuation(self, chat: list[dict[str, Any]]) -> None:
        *before, last = chat[:-1]
        begun = [*before, {**last, "content": last["content"][:-3]}]
        wanted = self.own(begun, False, continue_final_message=True)
        if wanted is not None:
            ids, _ = self.read(begun, continue_final_message=True)
            assert self.tokenizer.decode(ids) == wanted


def check(sources: dict[str, str]) -> list[str]:
    """Try all templates. Return what was refused."""
    assert len(sources) > 60
    refused, compared = [], 0
    for name, source in sources.items():
        template = Template(source)
        for kind, chat in CHATS.items():
            template.options = {"tools": TOOLS} if "call" in kind else {}
            if ("call" in kind and "tools" not in source) or template.own(chat, True) is None:
                continue
            for what in (template.check_rollout, template.check_masks, template.check_continuation):
                # Some templates write tools and no calls. Only the ids of a sampled turn keep its calls.
                loses_calls = "call" in kind and "tool_calls" not in source and what != template.check_rollout
                try:
                    what(chat)
                    assert not loses_calls
                except TemplateError:
                    if not loses_calls:
                        refused.append(f"{name}, {kind}: {what.__name__}")
                except AssertionError as error:
                    raise AssertionError(f"{name}, {kind}: {what.__name__}") from error
        template.backend.close()
        compared += template.compared
    assert compared > 400
    return refused


def test_the_templates_of_trl() -> None:
    refused = check(sources_of_trl())
    assert all(each.startswith(tuple(f"trl/{name}" for name in PARTS_ONLY)) for each in refused), refused


@pytest.mark.nightly
def test_the_templates_of_llama_cpp(tmp_path: Path) -> None:
    refused = check(sources_of_llama_cpp(tmp_path))
    assert len(refused) <= 8, refused
