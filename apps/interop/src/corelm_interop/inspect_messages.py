"""Messages, calls and settings of inspect_ai as core's, and core's answers as inspect_ai's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Logprobs,
)
from inspect_ai.tool import ToolCall, ToolChoice, ToolInfo

from corelm.errors import CapabilityError
from corelm.spec import Message
from corelm.spec.message import new_call_id
from corelm.validate import invalid
from corelm_interop.openai_answers import Top
from corelm_interop.openai_logprobs import chat_logprobs
from corelm_interop.token_texts import TokenTexts

#: Keys of a message under which chat templates read reasoning.
REASONING = ("reasoning_content", "thinking", "reasoning")
#: Settings by inspect's name, and what core calls them.
_SAMPLING = {
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_seqs": "stop",
    "seed": "seed",
    "num_choices": "num_samples",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}
#: Settings that would change the answers, and that core cannot honour: what to do instead.
_REFUSED = {
    "best_of": "use num_choices, and choose among the answers in a scorer",
    "logit_bias": "pass what the engine understands as -M engine_kwargs={…}",
    "prompt_logprobs": "score the prompt with an LLMPolicy(generate=False)",
    "response_schema": "pass what the engine understands as -M engine_kwargs={…}",
    "modalities": "core samples text only",
    "extra_body": "pass what the engine understands as -M engine_kwargs={…}",
    "extra_headers": "pass -M headers={…} to a backend that has this option",
}
#: Settings that ask for a kind of reasoning. They are variables of the chat template, if it knows them.
_TEMPLATE = ("reasoning_effort",)
#: Settings that hosted services understand.
IGNORED = ("effort", "reasoning_tokens", "reasoning_mode", "reasoning_summary", "verbosity", "parallel_tool_calls")


def sampling_of(config: GenerateConfig) -> dict[str, Any]:
    """Return the sampling parameters that a config sets, as `SamplingParams` takes them.

    Raises:
        CapabilityError: it sets something that changes answers and that core cannot honour.
    """
    for name, instead in _REFUSED.items():
        if getattr(config, name) not in (None, [], {}):
            raise CapabilityError(f"inspect's {name} is not supported; {instead}", capability=name)
    return {ours: value for theirs, ours in _SAMPLING.items() if (value := getattr(config, theirs)) is not None}


def template_kwargs_of(config: GenerateConfig) -> dict[str, Any]:
    """Return the variables of the chat template that a config sets."""
    return {name: value for name in _TEMPLATE if (value := getattr(config, name)) is not None}


def tools_of(tools: Sequence[ToolInfo], choice: ToolChoice) -> list[dict[str, Any]]:
    """Return the tools as chat templates read them.

    Raises:
        CapabilityError: a call of a tool is demanded, which a chat template cannot promise.
    """
    if not tools or choice == "none":
        return []
    if choice != "auto":
        raise CapabilityError(
            f"tool_choice={choice!r} cannot be enforced: the model decides what it writes; pass tool_choice='auto'",
            capability="tool_choice",
        )
    return [{"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"options"})} for tool in tools]


def message_of(said: ChatMessage, reasoning: str) -> Message:
    """Return a message as core's.

    Args:
        reasoning: the key under which the chat template reads reasoning.

    Raises:
        InvalidRequestError: it has an image, or anything else that is not text.
    """
    texts, thoughts = [], []
    for part in [ContentText(text=said.content)] if isinstance(said.content, str) else said.content:
        if isinstance(part, ContentText):
            texts.append(part.text)
        elif isinstance(part, ContentReasoning):
            thoughts.append(part.reasoning)
        else:
            raise invalid("input", f"a message of the {said.role} has a part of type {part.type!r}; only text is read")
    content, more = "\n".join(texts), {}
    if isinstance(said, ChatMessageTool):
        if said.error is not None:
            content = said.error.message
        more = {"tool_call_id": said.tool_call_id, "name": said.function}
    elif isinstance(said, ChatMessageAssistant) and said.tool_calls:
        more = {"tool_calls": tuple(map(_call_of, said.tool_calls))}
    extra = {reasoning: "\n".join(thoughts)} if thoughts else {}
    return Message(said.role, content, **more, extra=extra)


def _call_of(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.function, "arguments": call.arguments}}


def assistant_of(answer: Message, model: str) -> ChatMessageAssistant:
    """Return an answer as inspect's message."""
    thoughts = [ContentReasoning(reasoning=answer.extra[key]) for key in REASONING if answer.extra.get(key)]
    text = answer.content or ""
    calls = [
        ToolCall(
            id=call.get("id") or new_call_id(),
            function=call["function"]["name"],
            arguments=dict(call["function"]["arguments"]),
        )
        for call in answer.tool_calls or ()
    ]
    content: Any = [*thoughts, ContentText(text=text)] if thoughts else text
    return ChatMessageAssistant(content=content, tool_calls=calls or None, model=model, source="generate")


def log_probs_of(
    texts: TokenTexts, ids: Sequence[int], log_probs: Sequence[float], top: Sequence[Top] | None = None
) -> Logprobs:
    """Return the log-probs of an answer."""
    # Inspect has the shape of the OpenAI protocol.
    return Logprobs.model_validate({"content": chat_logprobs(texts, ids, log_probs, top)["content"]})
