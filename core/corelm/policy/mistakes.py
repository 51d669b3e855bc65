"""What a policy is given by mistake, and what to type instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from tensordict import TensorDictBase
from torch import compiler, nn

from corelm.backend.backend import Backend
from corelm.errors import InvalidRequestError
from corelm.policy.rows import find_value
from corelm.validate import as_list, invalid, read_once


def kind_of(value: Any) -> str:
    """Return the name of the value's type, and how to convert an iterator or a container of TorchRL."""
    kind = type(value)
    if kind.__module__.partition(".")[0] != "torchrl":
        return f"{kind.__name__}{read_once(value)}"
    return (
        f"{kind.__name__} of {kind.__module__}; convert it with corelm_interop.torchrl.from_torchrl, "
        "or give the policy to corelm_interop.torchrl.EnvPolicy"
    )


def input_hint(td: TensorDictBase, mode: str, part: str) -> str:
    """Return how to read a column that data sets and tokenizers have; "" if `td` has none.

    Args:
        td: what the policy was given.
        mode: what the policy reads.
        part: the field of the container that it reads. Prompts are no hint for "full": they would be scored alone.
    """
    columns = ("messages", *(("prompt",) if part == "prompt" else ()), "text", "input_ids")
    name = next((name for name in columns if name in td.keys()), "")
    first = find_value(td, name) if name else None
    while isinstance(first := as_list(first), list) and first:
        first = first[0]
    if isinstance(first, Mapping) and "role" in first:
        also = "" if mode == "history" else ", and give the policy input_mode='history'"
        return f"; {name!r} holds conversations: pass TensorDict(history=History.from_chats({name})){also}"
    if not isinstance(first, str) and name != "input_ids":
        return ""
    kind, what = ("text", "texts") if isinstance(first, str) else ("tokens", "token ids")
    options = [] if kind == mode else [f"input_mode={kind!r}"]
    options += [f"input_key={name!r}"] if name in ("messages", "prompt") else []
    return f"; {name!r} holds {what}: give the policy {', '.join(options)}" if options else ""


def not_a_tensordict(given: Any, mode: str) -> InvalidRequestError:
    """Return the error for an argument that is not a TensorDict, with the call to make."""
    call = {"history": "history=History.from_chats(…)", "text": "text=…", "tokens": "tokens=…"}[mode]
    if isinstance(given, Mapping):
        masks = ", attention_mask=batch['attention_mask']" if "attention_mask" in given else ""
        call = f"input_ids=batch['input_ids']{masks}" if "input_ids" in given else "…"
    return invalid("tensordict", f"expected a TensorDict, got {type(given).__name__}; pass TensorDict({call})")


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
