"""`ChatAsk`: the body of a request for a chat completion, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corelm.errors import InvalidRequestError
from corelm.spec import Chat, Message
from corelm.validate import count, flag, invalid, one_of, shown
from corelm_serve.chat_messages import said
from corelm_serve.fields import LENGTHS, SAMPLING, Ask, check_names, model_of, sampling_of, streaming_of

KNOWN = frozenset(
    {
        *("model", "messages", "n", "min_tokens", "stream", "stream_options", "logprobs", "top_logprobs"),
        *("tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
        *LENGTHS,
        *SAMPLING,
    }
)
#: What a message may hold. Further keys of an assistant's message are what official clients send back of an answer.
_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_OF_ANSWERS = ("refusal", "annotations", "audio", "function_call")
#: Names that the server gives the template itself. A client must not bring its own template, for example.
_SET_BY_THE_SERVER = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "messages", "tools"}
)
#: Arguments of `apply_chat_template` of transformers. No template reads them, so they would be ignored, or fail.
_NO_VARIABLES = frozenset(
    {
        *("conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAsk(Ask):
    """A request for a chat completion.

    Attributes:
        continue_final_message: what to do after an assistant turn at the end; see `PolicyOptions`.
    """

    messages: Chat
    stream: bool
    include_usage: bool
    logprobs: bool
    top_logprobs: int
    tools: list[dict[str, Any]] | None
    template_kwargs: Mapping[str, Any]
    continue_final_message: bool | None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> ChatAsk:
        """Check a body.

        Raises:
            InvalidRequestError: a field is unknown, not supported or illegal; `field` names it.
        """
        check_names(given, KNOWN)
        stream, include_usage = streaming_of(given)
        logprobs = flag("logprobs", given.get("logprobs", False))
        top = count("top_logprobs", given.get("top_logprobs", 0), 0)
        if top and not logprobs:
            raise invalid("top_logprobs", "they belong to logprobs; give logprobs=true as well")
        return cls(
            model=model_of(given),
            messages=_messages(given.get("messages")),
            sampling=sampling_of(given, default_max_tokens=None),
            stream=stream,
            include_usage=include_usage,
            logprobs=logprobs,
            top_logprobs=top,
            tools=_tools(given),
            template_kwargs=_template_kwargs(given.get("chat_template_kwargs", {})),
            continue_final_message=_continues(given),
        )


def _continues(given: Mapping[str, Any]) -> bool | None:
    """Return True to continue an assistant turn at the end, None to sample a new turn after it, False to refuse it."""
    continues = flag("continue_final_message", given.get("continue_final_message", False))
    if flag("add_generation_prompt", given.get("add_generation_prompt", not continues)) is continues:
        raise invalid(
            "add_generation_prompt",
            "a new turn is sampled, or with continue_final_message=true the last one is continued; give one of the two",
        )
    return None if "add_generation_prompt" in given and not continues else continues


def _template_kwargs(given: Any) -> Mapping[str, Any]:
    field = "chat_template_kwargs"
    if not isinstance(given, dict):
        raise invalid(field, f"expected an object, got {shown(given)}")
    if set_here := sorted(_SET_BY_THE_SERVER & given.keys()):
        raise invalid(field, f"the server sets {set_here[0]} itself; leave it out")
    if odd := sorted(_NO_VARIABLES & given.keys()):
        raise invalid(field, f"{odd[0]} is not a variable of the template; leave it out")
    return given


def _messages(given: Any) -> Chat:
    if not isinstance(given, list) or not given:
        raise invalid("messages", f"expected a list of at least one message, got {shown(given)}")
    return tuple(_message(each, f"messages[{at}]") for at, each in enumerate(given))


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise invalid(where, f"expected an object with role and content, got {shown(given)}")
    given = {name: value for name, value in given.items() if value is not None}
    check_names({name: value for name, value in given.items() if name not in _OF_ANSWERS or value}, _MESSAGE, where)
    one_of(f"{where}.role", given.get("role"), tuple(_ROLES))
    for at, call in enumerate(_list(given, "tool_calls", where)):
        _check_call(call, f"{where}.tool_calls[{at}]")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(given.get(name, ""), str):
            raise invalid(f"{where}.{name}", f"expected a text, got {shown(given[name])}")
    try:
        message = said({**given, "role": _ROLES[given["role"]]})
    except InvalidRequestError as error:
        raise invalid(f"{where}.{error.field}", str(error).removeprefix(f"{error.field}: ")) from error
    if message.content is None and not message.tool_calls:
        raise invalid(f"{where}.content", "the message has neither content nor tool_calls; give one of them")
    return message


def _check_call(given: Any, where: str) -> None:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(where, f'expected {{"id": …, "type": "function", "function": {{…}}}}, got {shown(given)}')
    check_names(given, ("id", "type", "function", "index"), where)
    one_of(f"{where}.type", given.get("type", "function"), ("function",))
    check_names(function, ("name", "arguments"), f"{where}.function")


def _tools(given: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools that the template is given: none, if the model must not call them."""
    tools = _list(given, "tools")
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            expected = '{"type": "function", "function": {"name": …, "parameters": …}}'
            raise invalid(f"tools[{at}]", f"expected {expected}, got {shown(tool)}")
    choice = given.get("tool_choice", "auto" if tools else "none")
    if choice not in ("auto", "none"):
        advice = 'a model cannot be made to call a tool; give "auto" or "none"'
        raise invalid("tool_choice", f"{shown(choice)} is not supported: {advice}")
    if choice == "auto" and not tools:
        raise invalid("tool_choice", "there are no tools to choose from; give tools, or leave it out")
    return tools if tools and choice == "auto" else None


def _list(given: Mapping[str, Any], name: str, where: str = "") -> list[Any]:
    found = given.get(name, [])
    if not isinstance(found, list):
        raise invalid(f"{where}.{name}" if where else name, f"expected a list, got {shown(found)}")
    return found
