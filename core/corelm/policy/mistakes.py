"""What a policy is given by mistake, and what to type instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from tensordict import TensorDictBase
from torch import Tensor, compiler, nn

from corelm.backend.backend import Backend
from corelm.containers.classes import ChatHistory, Text, Tokens
from corelm.containers.history import History
from corelm.errors import InvalidRequestError
from corelm.spec.message import Message
from corelm.validate import as_list, invalid, shown

#: Keys under which other libraries and data sets keep prompts, in the order in which they are looked for.
_FOREIGN = (
    *("prompt", "prompts", "query", "queries", "question", "questions", "instruction", "input", "inputs"),
    *("messages", "conversation", "conversations", "chat", "chats"),
    *("input_ids", "prompt_ids", "prompt_token_ids", "token_ids"),
    *("history", "text", "texts", "tokens", "problem", "content"),
)
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


def input_hint(td: TensorDictBase, mode: str) -> str:
    """Return how to read what `td` holds under a key of another mode or library; "" if it holds nothing known."""
    for name in sorted(td.keys(), key=lambda key: _FOREIGN.index(key) if key in _FOREIGN else len(_FOREIGN)):
        if name not in _FOREIGN:
            return ""
        try:
            value = td[name]
        except RuntimeError:
            value = td.get(name, as_list=True)
        if hint := hint_for(value, name, mode):
            return hint
    return ""


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


@compiler.disable  # type: ignore[untyped-decorator]
def refuse_compiling() -> NoReturn:
    """Refuse a call that torch.compile traces. Dynamo breaks the graph here and makes this call for real."""
    raise invalid(
        "policy",
        "torch.compile cannot compile an LLMPolicy, whose model runs inside the engine; call the policy itself",
    )


class NotMoved:
    """The methods by which a module is moved or converted. A policy has no weights, so each says where they are."""

    def _not_moved(self, *_: Any, **__: Any) -> NoReturn:
        raise invalid(
            "policy",
            "an LLMPolicy has no weights to move or convert. Open the engine with the device and dtype that you want, "
            "such as get_backend('transformers', 'PATH', device='cuda', dtype='bfloat16'); results go where "
            "policy.replace(device=…) says",
        )

    to = cpu = cuda = xpu = type = half = float = double = bfloat16 = to_empty = _not_moved
