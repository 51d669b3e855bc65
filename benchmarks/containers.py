"""The cost of returning a batch as containers.

The rows are an engine's answers: prompts and responses of 8 to 39 tokens, with masks and log-probs.

    core                  tokens, masks and log-probs, from the records; rows are made on first access
    core, all five        the same, and text, history, finish reasons and errors
    core, rows asked for  the same three, and all their rows are made
    tensordict            the same three by hand: one TensorDict per row, lazily stacked
    torchrl               the same three in TorchRL's own classes, one per row, if torchrl is installed

For dense batches the comparison by hand is `pad_sequence`, field by field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.measure import Figure, Way, compare
from corelm import LogProbs, Masks, Message, Provenance, Ragged, Tokens
from corelm.containers.assemble import assemble
from corelm.spec.records import ContainerRequest, Parts

THREE = frozenset({"tokens", "masks", "log_probs"})
FIVE = THREE | {"text", "history"}


def figures(quick: bool) -> Iterator[list[Figure]]:
    for rows in (16, 256, 4096) if quick else (16, 256, 4096, 16_384):
        repeats = (21 if rows < 4096 else 2) if quick else (51 if rows < 4096 else 9)
        asked = answers(rows)
        # With few rows the fixed cost of a call dominates, so there is no goal.
        counts = rows > 16
        yield compare(
            f"containers of {rows} rows, one row a sample",
            ragged_ways(asked),
            baseline="tensordict",
            repeats=repeats,
            rows=rows,
            goal_seconds={"core": 2e-6} if counts else {},
        )
        yield compare(
            f"containers of {rows} rows, dense",
            dense_ways(asked),
            baseline="pad_sequence",
            repeats=repeats,
            rows=rows,
            goal_seconds={"core": 2e-6} if counts else {},
        )
        yield compare(
            f"padding {rows} rows of one field",
            padding_ways(asked.tokens.full),
            baseline="pad_sequence",
            repeats=repeats,
            rows=rows,
            goal_seconds={"core, right": 1e-6, "core, left": 1e-6} if counts else {},
        )


def answers(rows: int) -> ContainerRequest:
    """Return random answers to random prompts."""
    draw = torch.Generator().manual_seed(0)

    def part() -> Ragged:
        lengths = torch.randint(8, 40, (rows,), generator=draw)
        return Ragged(torch.randint(1000, (int(lengths.sum()),), generator=draw), lengths)

    prompt, response = part(), part()
    full = prompt.join(response)
    in_response = Ragged.full(prompt.lengths, False, torch.bool).join(Ragged.full(response.lengths, True, torch.bool))
    asks = tuple((Message("user", f"question {row}"),) for row in range(rows))
    says = tuple((Message("assistant", "answer", token_ids=tuple(ids)),) for ids in response.tolist())
    texts = tuple(f"text {row}" for row in range(rows))
    return ContainerRequest(
        batch_size=(rows,),
        fields=THREE,
        tokens=Parts(prompt, response, full),
        texts=Parts(texts, texts, texts),
        chats=Parts(asks, says, tuple(ask + say for ask, say in zip(asks, says, strict=True))),
        logprobs=Ragged(-torch.rand(full.values.shape, generator=draw), full.lengths),
        scored=in_response,
        assistant=in_response,
        provenance=Provenance("none", "none", "0"),
    )


def ragged_ways(asked: ContainerRequest) -> dict[str, Way]:
    rows = len(asked.tokens.full)
    all_five = replace(asked, fields=FIVE, finish_reasons=("stop",) * rows, errors=("",) * rows)

    def every_row() -> None:
        made = assemble(asked)
        for name in THREE:
            made[name][0]

    def by_hand() -> TensorDict:
        made = {name: stacked(fields) for name, fields in split(asked).items()}
        made = {name: CLASSES[name].from_tensordict(stack) for name, stack in made.items()}
        return TensorDict(made, batch_size=[rows])

    def stacked(fields: Mapping[str, list[Tensor]]) -> LazyStackedTensorDict:
        each = (dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True))
        return LazyStackedTensorDict(*(TensorDict(row, batch_size=[]) for row in each))

    ways: dict[str, Way] = {
        "core": lambda: assemble(asked),
        "core, all five": lambda: assemble(all_five),
        "core, rows asked for": every_row,
        "tensordict": by_hand,
    }
    if find_spec("torchrl") is not None:
        ways["torchrl"] = lambda: torchrl_rows(asked)
    return ways


def dense_ways(asked: ContainerRequest) -> dict[str, Way]:
    dense = replace(asked, pad_output=True)
    rows = len(asked.tokens.full)

    def by_hand() -> TensorDict:
        made = {}
        for name, fields in split(asked).items():
            padded = {
                field: pad_sequence(values, batch_first=True, padding_side="left" if field == "prompt" else "right")
                for field, values in fields.items()
            }
            made[name] = CLASSES[name](**padded, batch_size=[rows])
        return TensorDict(made, batch_size=[rows])

    return {"core": lambda: assemble(dense), "pad_sequence": by_hand}


def padding_ways(full: Ragged) -> dict[str, Way]:
    given = list(full.split())
    return {
        "core, right": lambda: full.to_padded(0),
        "core, left": lambda: full.to_padded(0, "left"),
        "pad_sequence": lambda: pad_sequence(given, batch_first=True),
    }


CLASSES: dict[str, Any] = {"tokens": Tokens, "masks": Masks, "log_probs": LogProbs}


def split(asked: ContainerRequest) -> dict[str, dict[str, list[Tensor]]]:
    """Return every field of the three as a list with one tensor per row; no two share storage."""
    prompt, response, full = asked.tokens.prompt, asked.tokens.response, asked.tokens.full
    logprobs, scored = asked.logprobs, asked.scored
    assert prompt is not None and response is not None and logprobs is not None and scored is not None
    lengths = full.lengths.tolist()
    both = torch.stack([prompt.lengths, response.lengths], -1).flatten().tolist()

    def copies(values: Tensor, lengths: list[int]) -> list[Tensor]:
        return [row.clone() for row in values.split(lengths)]

    def parts(values: Tensor) -> dict[str, list[Tensor]]:
        pairs = copies(values, both)
        return {"prompt": pairs[::2], "response": pairs[1::2], "full": copies(values, lengths)}

    return {
        "tokens": parts(full.values),
        "masks": {
            "all_attention_mask": copies(torch.ones_like(scored.values), lengths),
            "all_assistant_mask": copies(scored.values, lengths),
        },
        "log_probs": parts(logprobs.values),
    }


def torchrl_rows(asked: ContainerRequest) -> TensorDict:
    from torchrl.modules.llm.policies import LogProbs as RLLogProbs
    from torchrl.modules.llm.policies import Masks as RLMasks
    from torchrl.modules.llm.policies import Tokens as RLTokens

    classes = {"tokens": RLTokens, "masks": RLMasks, "log_probs": RLLogProbs}
    made = {}
    for name, fields in split(asked).items():
        each = (dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True))
        made[name] = lazy_stack([classes[name](**row, padded=False, batch_size=()) for row in each])
    return TensorDict(made, batch_size=asked.batch_size)
