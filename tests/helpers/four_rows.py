"""Four rows in every container, in both layouts, and the check that a TensorDict holds some of them."""

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from corelm.containers import LogProbs, Text, Tokens, ragged
from corelm.containers.assemble import assemble
from corelm.spec.message import Message
from corelm.spec.provenance import Provenance
from corelm.spec.records import ContainerRequest, Parts
from corelm.tensors.ragged import Ragged
from helpers.each import each

RAW = Provenance("toy", "tiny", "0")
HOT = Provenance("toy", "tiny", "1", "processed", 1.5, "truncated", (("repetition_penalty", 1.2),))

PROMPTS = [[1, 2, 3], [4], [5, 6], [7]]
RESPONSES = [[8], [9, 10, 11], [], [12, 13]]
TEXTS, FINISH_REASONS = ["a", "b", "c", "d"], ["stop", "length"] * 2
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]

# The four rows when padded: prompts to 3 columns, responses to 3.
LEFT = [[1, 2, 3], [0, 0, 4], [0, 5, 6], [0, 0, 7]]
RIGHT = [[8, 0, 0], [9, 10, 11], [0, 0, 0], [12, 13, 0]]


def batch(shape: tuple[int, ...] = (4,), pad_output: bool = False, provenance: Any = RAW) -> TensorDict:
    """The four rows above. Each log-prob is minus its token's id."""
    full = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    tokens = Parts(*(Ragged.from_list(rows) for rows in (PROMPTS, RESPONSES, full)))
    scored = [[False] * len(p) + [True] * len(r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    messages = tuple((Message("user", text),) for text in TEXTS)
    request = ContainerRequest(
        batch_size=shape,
        fields=frozenset({"text", "tokens", "masks", "log_probs", "history"}),
        tokens=tokens,
        texts=Parts(tuple(TEXTS), tuple(TEXTS), tuple(TEXTS)),
        chats=Parts(messages, messages, messages),
        logprobs=Ragged(-tokens.full.values.float(), tokens.full.lengths),
        scored=Ragged.from_list(scored, torch.bool),
        provenance=provenance,
        finish_reasons=tuple(FINISH_REASONS),
        pad_output=pad_output,
    )
    return assemble(request)


def plain(value: Any) -> Any:
    return [plain(item) for item in value] if isinstance(value, list) else value.tolist()


def pick(table: list[Any], rows: Any) -> Any:
    """The rows of a table, nested as `rows` is."""
    return [pick(table, row) for row in rows] if isinstance(rows, list) else table[rows]


def assert_holds(td: TensorDictBase, rows: Any, pad_output: bool) -> None:
    """Check that every container of `td` holds these of the four rows, nested like `rows`, in the same layout."""
    prompts, responses = (LEFT, RIGHT) if pad_output else (PROMPTS, RESPONSES)
    tokens, log_probs = td["tokens"], td["log_probs"]
    assert (type(tokens), type(log_probs), type(td["text"])) == (Tokens, LogProbs, Text)
    assert [tokens.padded, td["masks"].padded, log_probs.padded] == [pad_output] * 3
    assert plain(tokens.prompt) == pick(prompts, rows)
    assert plain(tokens.response) == pick(responses, rows)
    assert plain(log_probs.response) == pick([[-float(i) for i in row] for row in responses], rows)
    assert td["text"].response == pick(TEXTS, rows)
    assert td["history"].full.to_chats() == pick(CHATS, rows)
    flat = torch.tensor(rows, dtype=torch.int64).flatten().tolist()
    assert ragged(td, ("tokens", "full")).tolist() == [PROMPTS[row] + RESPONSES[row] for row in flat]
    assert ragged(td, ("masks", "all_response_mask")).tolist() == [
        [False] * len(PROMPTS[row]) + [True] * len(RESPONSES[row]) for row in flat
    ]
    if "finish_reason" in td.keys():
        # A list of str, and not only equal to one.
        reasons = pick(FINISH_REASONS, rows)
        assert td["finish_reason"] == reasons and isinstance(td["finish_reason"], type(reasons))
    assert log_probs.provenance == (RAW if flat else None)
    assert set(td["masks"].keys()) - {"padded"} == {"all_attention_mask", "all_response_mask"}


both_layouts = each("pad_output", [False, True])
