"""`ChatAsk`, `CompletionAsk` and `TokenAsk`: the bodies of requests. Each field is read, accepted because it changes no
answer, or refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from corelm.errors import InvalidRequestError, brief
from corelm.spec import Chat, Message, SamplingParams
from corelm.spec.sampling import LARGEST
from corelm.validate import count, did_you_mean, flag, invalid, is_index, one_of, shown, token_ids
from corelm_serve.chat_messages import said


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The body of a request, checked: the model that the client names, how to sample, and whether to stream.

    Attributes:
        include_usage: whether to end the stream with the usage.

    Raises:
        InvalidRequestError: a field is unknown, not supported or illegal; `field` names it. `read` raises it.
    """

    model: str | None
    sampling: SamplingParams
    stream: bool
    include_usage: bool


#: What a client may tell about itself. It changes no answer and is not kept.
METADATA = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
#: How to sample, under the names of the protocol and of `SamplingParams`.
SAMPLING = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    }
)
#: What every body may hold.
SHARED = frozenset({"model", "n", "min_tokens", "logprobs", *SAMPLING})
#: Fields of the protocol that may only have the value that changes nothing, and what to do otherwise.
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "logit_bias": (({},), "it would change the distribution that log-probs are of; leave it out"),
    "response_format": (({"type": "text"},), 'answers are not constrained; give {"type": "text"} or leave it out'),
    "service_tier": (("auto", "default"), 'give "auto" or leave it out'),
    "modalities": ((["text"],), 'answers are texts; give ["text"] or leave it out'),
    "parallel_tool_calls": ((True,), "a model calls as many tools as it likes; give true or leave it out"),
    "functions": (([],), "give tools instead"),
    "function_call": (("none", "auto"), "give tool_choice instead"),
    "best_of": ((1,), "give n and choose"),
    "suffix": (("",), "nothing is inserted into a text; leave it out"),
    "reasoning_effort": ((), "give chat_template_kwargs with the variable that the model's template reads"),
    "verbosity": ((), "leave it out"),
    "prediction": ((), "leave it out"),
    "audio": ((), "answers are texts; leave it out"),
    "web_search_options": ((), "the server searches nothing; give tools"),
}
#: Fields that only one path reads, which are sent to another one by mistake.
_PATHS = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "prompt_token_ids": "/v1/tokens",
}
#: The largest number of answers to one prompt, as in the protocol.
MOST_SAMPLES = 128


def parsed(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body, without the fields that are null: the protocol takes null for "not given".

    Raises:
        InvalidRequestError: the body is not a JSON object.
    """
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise invalid("body", f"expected a JSON object, but it is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise invalid("body", f"expected a JSON object, got {shown(found)}")
    return {name: value for name, value in found.items() if value is not None}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def check_names(given: Mapping[str, Any], known: Collection[str], where: str = "") -> None:
    """Refuse fields that would be ignored.

    Args:
        where: the object that holds the fields, if that is not the body: ``"messages[0]"``.

    Raises:
        InvalidRequestError: a field that is neither read nor without effect; `field` names it.
    """
    for name, value in given.items():
        if name in known or (not where and name in METADATA):
            continue
        if not where and name in NEUTRAL:
            legal, advice = NEUTRAL[name]
            # An int equals a bool, and 1 is not true.
            if any(value == each and type(value) is type(each) for each in legal):
                continue
            raise invalid(name, f"{shown(value)} is not supported: {advice}")
        if not where and (path := _PATHS.get(name)):
            raise invalid(name, f"this path does not read it; send it to {path}")
        # A client may send any text as a name, however long.
        field = brief(f"{where}.{name}" if where else name)
        raise invalid(field, f"the server does not know this field{did_you_mean(name, known) or '; leave it out'}")


def sampling_of(given: Mapping[str, Any], *, default_max_tokens: int | None) -> SamplingParams:
    """Return how to sample. `num_samples` is the protocol's `n`.

    Args:
        default_max_tokens: the length limit of an answer if the request sets none; None fills the context.

    Raises:
        InvalidRequestError: an illegal value; `field` is the name that the client typed.
    """
    longest = {name: count(name, given[name], 1, LARGEST) for name in LENGTHS if name in given}
    if len({*longest.values()}) > 1:
        raise invalid("max_tokens", f"it and max_completion_tokens differ: {longest}; give one of them")
    samples = count("n", given.get("n", 1), 1, MOST_SAMPLES)
    least = count("min_tokens", given.get("min_tokens", 0), 0, LARGEST)
    most = next(iter(longest.values()), default_max_tokens)
    if most is not None and least > most:
        raise invalid("min_tokens", f"{least} is more than max_tokens={most}")
    return SamplingParams(
        **{name: given[name] for name in SAMPLING if name in given},
        max_new_tokens=most,
        min_new_tokens=least,
        num_samples=samples,
    )


#: The fields that limit the length of an answer.
LENGTHS = ("max_tokens", "max_completion_tokens")


def shared(given: Mapping[str, Any], *, default_max_tokens: int | None) -> dict[str, Any]:
    """Return what every body holds: the fields of `Ask`.

    Args:
        default_max_tokens: see `sampling_of`.
    """
    stream, options = flag("stream", given.get("stream", False)), given.get("stream_options")
    if options is not None:
        if not stream:
            raise invalid("stream_options", "they belong to streams; give stream=true, or leave them out")
        if not isinstance(options, dict):
            raise invalid("stream_options", f"expected an object, got {shown(options)}")
        check_names(options, ("include_usage", "include_obfuscation"), "stream_options")
        if options.get("include_obfuscation"):
            raise invalid("stream_options.include_obfuscation", "events are not padded; give false or leave it out")
    model = given.get("model")
    if not isinstance(model, str | None):
        raise invalid("model", f"expected a text, got {shown(model)}")
    usage = flag("stream_options.include_usage", (options or {}).get("include_usage") or False)
    sampling = sampling_of(given, default_max_tokens=default_max_tokens)
    return {"model": model, "sampling": sampling, "stream": stream, "include_usage": usage}


# Chat completions -----------------------------------------------------------------------------------------------------

_CHAT = frozenset(
    {
        *("messages", "stream", "stream_options", "top_logprobs", "tools", "tool_choice", "chat_template_kwargs"),
        *("add_generation_prompt", "continue_final_message", *LENGTHS, *SHARED),
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
    logprobs: bool
    top_logprobs: int
    tools: list[dict[str, Any]] | None
    template_kwargs: Mapping[str, Any]
    continue_final_message: bool | None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> ChatAsk:
        """Check a body. See `Ask`."""
        check_names(given, _CHAT)
        always = shared(given, default_max_tokens=None)
        logprobs = flag("logprobs", given.get("logprobs", False))
        top = count("top_logprobs", given.get("top_logprobs", 0), 0)
        if top and not logprobs:
            raise invalid("top_logprobs", "they belong to logprobs; give logprobs=true as well")
        return cls(
            **always,
            messages=_messages(given.get("messages")),
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


# Completions of texts and of ids --------------------------------------------------------------------------------------

_COMPLETION = frozenset(
    {
        *("prompt", "max_tokens", "stream", "stream_options", "echo", "return_tokens_as_token_ids"),
        *SHARED,
    }
)
_TOKENS = frozenset({*("prompt_token_ids", "top_logprobs"), *LENGTHS, *SHARED})
#: The largest number of answers to one request: all its prompts together.
MOST_ANSWERS = 4096

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionAsk(Ask):
    """A request for completions of texts.

    Attributes:
        samples: whether to sample at all: ``max_tokens=0`` with `echo` only scores.
        echo: whether the prompt begins the text of the answer, and its log-probs those of the answer.
        logprobs: how many of the most probable ids to return for each token, with its own log-prob; None for no
            log-probs.
        by_id: whether log-probs name each token by its id, as ``token_id:5``. Several ids may have one text.
    """

    texts: tuple[str, ...] | None
    ids: tuple[Ids, ...] | None
    samples: bool
    echo: bool
    logprobs: int | None
    by_id: bool

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> CompletionAsk:
        """Check a body. See `Ask`."""
        check_names(given, _COMPLETION)
        echo = flag("echo", given.get("echo", False))
        logprobs = given.get("logprobs")
        samples = not (given.get("max_tokens") == 0 and type(given["max_tokens"]) is int)
        if not samples and not echo:
            raise invalid("max_tokens", "0 only scores the prompt; give echo=true as well, or at least 1")
        # Nothing is sampled, so the limit does not matter.
        sampled = given if samples else {name: value for name, value in given.items() if name != "max_tokens"}
        always = shared(sampled, default_max_tokens=16)
        texts, ids = _prompts(given.get("prompt"))
        _check_answers(len(texts or ids or ()), always["sampling"], "prompt")
        return cls(
            **always,
            texts=texts,
            ids=ids,
            samples=samples,
            echo=echo,
            logprobs=None if logprobs is None else count("logprobs", logprobs, 0),
            by_id=flag("return_tokens_as_token_ids", given.get("return_tokens_as_token_ids", False)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAsk(Ask):
    """A request for answers to ids, as ids.

    Attributes:
        logprobs: the distribution of the log-probs to return; None for that of the server.
    """

    prompts: tuple[Ids, ...]
    logprobs: Literal["none", "raw", "processed"] | None
    top_logprobs: int

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> TokenAsk:
        """Check a body. See `Ask`."""
        check_names(given, _TOKENS)
        always = shared(given, default_max_tokens=16)
        logprobs = given.get("logprobs")
        if logprobs is not None:
            one_of("logprobs", logprobs, ("none", "raw", "processed"))
        top = count("top_logprobs", given.get("top_logprobs", 0), 0)
        if top and logprobs == "none":
            raise invalid("top_logprobs", "they belong to logprobs; give logprobs as raw or processed, or leave it out")
        rows = given.get("prompt_token_ids")
        if not isinstance(rows, list) or not rows:
            raise invalid("prompt_token_ids", f"expected a list of ids, or a list of such lists, got {shown(rows)}")
        prompts = _rows_of_ids(rows, "prompt_token_ids")
        _check_answers(len(prompts), always["sampling"], "prompt_token_ids")
        return cls(**always, prompts=prompts, logprobs=logprobs, top_logprobs=top)


def _prompts(given: Any) -> tuple[tuple[str, ...] | None, tuple[Ids, ...] | None]:
    if isinstance(given, str):
        return (given,), None
    if not isinstance(given, list) or not given:
        raise invalid("prompt", f"expected a text, a list of texts, ids, or a list of lists of ids, got {shown(given)}")
    if isinstance(given[0], str):
        if odd := [each for each in given if not isinstance(each, str)]:
            raise invalid("prompt", f"expected texts only, got {shown(odd[0])} among them")
        return tuple(given), None
    return None, _rows_of_ids(given, "prompt")


def _rows_of_ids(given: list[Any], field: str) -> tuple[Ids, ...]:
    rows = [given] if is_index(given[0]) else given
    if odd := [each for each in rows if not isinstance(each, list)]:
        raise invalid(field, f"expected lists of ids only, got {shown(odd[0])} among them")
    return tuple(token_ids(field, row) for row in rows)


def _check_answers(prompts: int, sampling: SamplingParams, field: str) -> None:
    if prompts * (sampling.num_samples or 1) > MOST_ANSWERS:
        asked = f"{prompts} prompts with n={sampling.num_samples}"
        raise invalid(field, f"{asked} are more than {MOST_ANSWERS} answers to one request; send several requests")
