"""What a policy is given by mistake, and what to type instead."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, cast

from tensordict import TensorDictBase
from torch import Tensor, compiler, nn

from corelm.backend.backend import Backend
from corelm.containers.classes import ChatHistory, Text, Tokens
from corelm.containers.history import History
from corelm.errors import InvalidRequestError
from corelm.policy.values import find_value
from corelm.spec.message import Message
from corelm.validate import as_list, invalid, shown

_Method = TypeVar("_Method", bound=Callable[..., Any])

#: Keys under which other libraries and data sets keep prompts, in the order in which they are looked for.
_FOREIGN = (
    *("prompt", "prompts", "query", "queries", "question", "questions", "instruction", "input", "inputs"),
    *("messages", "conversation", "conversations", "chat", "chats"),
    *("input_ids", "prompt_ids", "prompt_token_ids", "token_ids"),
    *("history", "text", "texts", "tokens", "problem", "content"),
)
#: Keys of prompts and of their responses, in the singular and without `_ENDING`.
_PROMPTS = ("prompt", "query", "querie", "question", "instruction", "input", "context", "problem")
_RESPONSES = (
    *("response", "completion", "chosen", "rejected", "answer", "output", "continuation", "target", "solution"),
)
_ENDING = re.compile("(_input|_token)?_ids$")
_HOLDS = {"history": "conversations", "chats": "conversations", "text": "texts", "tokens": "token ids"}


def kind_of_input(value: Any) -> str | None:
    """Return the input mode that reads `value`, "chats" for lists of messages, or None for anything else."""
    if isinstance(value, (History, ChatHistory)):
        return "history"
    if isinstance(value, Text):
        return "text"
    if isinstance(value, Tokens):
        return "tokens"
    while isinstance(value := as_list(value), list) and value:
        value = value[0]
    if isinstance(value, Message) or (isinstance(value, Mapping) and "role" in value):
        return "chats"
    if isinstance(value, str):
        return "text"
    whole = isinstance(value, int) or (isinstance(value, Tensor) and not value.is_floating_point() and value.numel())
    return "tokens" if whole and not isinstance(value, bool) else None


def input_hint(td: TensorDictBase, mode: str, part: str) -> str:
    """Return how to read what `td` holds under a key of another mode or library; "" if it holds nothing known.

    Args:
        td: what the policy was given.
        mode: what the policy reads.
        part: the field of the container that it reads: "full" to score.
    """
    if part == "full" and (hint := _completions_hint(td, mode)):
        return hint
    for name in sorted(td.keys(), key=lambda key: _FOREIGN.index(key) if key in _FOREIGN else len(_FOREIGN)):
        if name not in _FOREIGN:
            return ""
        if hint := hint_for(find_value(td, (name,)), name, mode):
            return hint
    return ""


def _completions_hint(td: TensorDictBase, mode: str) -> str:
    """Return how to score responses to prompts, if `td` holds both under keys of data sets; else "".

    Reading the prompts under an `input_key` would score the prompts alone.
    """
    named = {_ENDING.sub("", name).removesuffix("s"): name for name in td.keys() if isinstance(name, str)}
    prompt = next((named[name] for name in _PROMPTS if name in named), None)
    held = None if prompt is None else find_value(td, (prompt,))
    kind, others = kind_of_input(held), ""
    kinds = {"chats": ("chats", "text"), "text": ("text",), "tokens": ("tokens",)}.get(kind or "", ())
    candidates = [named[name] for name in _RESPONSES if name in named and named[name] != prompt]
    responses = [name for name in candidates if kind_of_input(find_value(td, (name,))) in kinds]
    if not responses:
        return ""
    response = responses[0]
    if kind == "text":
        size = len(held) if isinstance(held := as_list(held), list) else ""
        made = f"text=Text(prompt={prompt}, response={response}, batch_size=[{size}])"
    elif kind == "tokens":
        made = f"tokens=TensorDict(prompt={prompt}, response={response})"
        others = ", with the ids of each row in a list, without pads"
    else:
        kind, said = "history", "other"
        if kind_of_input(find_value(td, (response,))) == "text":
            said = "[{'role': 'assistant', 'content': other}]"
        made = f"history=History.from_chats([one + {said} for one, other in zip({prompt}, {response})])"
    if len(responses) > 1:
        others += f", and {' and '.join(map(repr, responses[1:]))} in the same way"
    option = "" if kind == mode else f", and give the policy input_mode={kind!r}"
    return f"; {prompt!r} and {response!r} hold prompts and responses: pass TensorDict({made}){others}{option}"


def hint_for(value: Any, name: str, mode: str) -> str:
    """Return what to type so that a policy in this `mode` reads the value under the key `name`; "" if it cannot."""
    kind = kind_of_input(value)
    if kind is None:
        return ""
    if kind == "chats":
        also = "" if mode == "history" else ", and give the policy input_mode='history'"
        return f"; {name!r} holds conversations: pass TensorDict(history=History.from_chats({name})){also}"
    options = [] if kind == mode else [f"input_mode={kind!r}"]
    if name not in (kind, "input_ids"):
        options.append(f"input_key={name!r}")
    return f"; {name!r} holds {_HOLDS[kind]}: give the policy {', '.join(options)}" if options else ""


def not_a_tensordict(given: Any, mode: str) -> InvalidRequestError:
    """Return the error for an argument that is not a TensorDict, with the call to make."""
    kind, made = kind_of_input(given), ""
    if isinstance(given, Mapping) and "input_ids" in given:
        masks = ", attention_mask=batch['attention_mask']" if "attention_mask" in given else ""
        kind, made = "tokens", f"TensorDict(input_ids=batch['input_ids']{masks})"
    elif kind == "chats":
        kind, made = "history", "TensorDict(history=History.from_chats([[{'role': …, 'content': …}, …], …]))"
    elif isinstance(given, Mapping):
        kind, made = mode, "TensorDict(…) of the mapping"
    elif isinstance(given, str):
        made = f"TensorDict(text=[{shown(given)}])"
    elif kind == "text":
        made = f"TensorDict(text={shown(given)})"
    elif kind is not None:
        made = f"TensorDict({kind}=…)"
    hint = f"; pass {made}" if made else ""
    if kind is not None and kind != mode:
        hint += f" to a policy with input_mode={kind!r}"
    return invalid("tensordict", f"expected a TensorDict, got {type(given).__name__}{hint}")


def checked_backend(given: Any) -> Backend:
    """Return `given` if it is an open backend.

    Raises:
        InvalidRequestError: it is anything else; the message says how to open one.
    """
    if isinstance(given, Backend):
        return given
    call = "get_backend('transformers', 'PATH')"
    if isinstance(given, nn.Module):
        call = "get_backend('transformers', model, tokenizer=tokenizer)"
    kind = "None" if given is None else f"a {type(given).__name__}"
    raise invalid("backend", f"expected an open backend or the name of one, got {kind}; pass {call}")


_NOT_COMPILED = "torch.compile cannot compile an LLMPolicy, whose model runs inside the engine; call the policy itself"


@compiler.disable(reason=_NOT_COMPILED)  # type: ignore[untyped-decorator]
def refuse_compiling() -> NoReturn:
    """Refuse a call that torch.compile traces.

    Dynamo breaks the graph here and makes this call for real. With ``fullgraph=True`` it raises an error of its own,
    which repeats the reason.
    """
    raise invalid("policy", _NOT_COMPILED)


def not_compiled(method: _Method) -> _Method:
    """Return a method that is refused when torch.compile traces it, before anything else of it is traced."""

    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if compiler.is_compiling():
            refuse_compiling()
        return method(*args, **kwargs)

    return cast(_Method, checked)


class NotMoved:
    """The methods by which a module is moved, converted or compiled. A policy has no weights, and each says so."""

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        raise invalid("policy", _NOT_COMPILED)

    def _not_moved(self, *_: Any, **__: Any) -> NoReturn:
        raise invalid(
            "policy",
            "an LLMPolicy has no weights to move or convert. Open the engine with the device and dtype that you want, "
            "such as get_backend('transformers', 'PATH', device='cuda', dtype='bfloat16'); results go where "
            "policy.replace(device=…) says",
        )

    to = cpu = cuda = xpu = type = half = float = double = bfloat16 = to_empty = _not_moved
