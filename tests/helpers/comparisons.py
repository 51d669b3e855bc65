"""Comparisons that were made by hand: what a report shows does not depend on what an engine does."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from corelm_compare.cases import measure
from corelm_compare.records import Cause, Comparison, Divergence, Experiment, Gap, Row, Side

WORDS = (
    " the",
    " cat",
    " sat",
    " on",
    " a",
    " mat",
    ",",
    " and",
    " nobody",
    " knew",
    " why",
    ".\n",
    " It",
    " was",
    " 42",
)
#: Texts that a page must not obey: tags, quotes, an override of the direction of writing, a bell, half a character.
HOSTILE = ("<script>alert(1)</script>", "\"'&amp;<b>", "\u202egnp.exe\u202c", "\x07\x1b[2J", "\ud83d", "</style>")

#: Changes the log-probs of a row, float32[n]; also gets the number of the row.
Change = Callable[[Tensor, int], Tensor]


def same(numbers: Tensor, row: int) -> Tensor:
    return numbers


def noise(size: float) -> Change:
    """Return a change as by rounding: now and then ten times as large."""

    def change(numbers: Tensor, row: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + row)
        spread = torch.randn(len(numbers), generator=generator)
        rare = (torch.rand(len(numbers), generator=generator) < 0.03).float() * 9 + 1
        return numbers + size * spread * rare

    return change


def hotter(numbers: Tensor, row: int) -> Tensor:
    """Return what a temperature below 1 makes of log-probs, roughly."""
    return numbers * 1.4 + 0.2


def comparison(
    changes: dict[str, Change] | None = None,
    *,
    rows: int = 12,
    length: int = 40,
    words: Sequence[str] = WORDS,
    verdict: str = "differ",
    causes: Sequence[Cause] | None = None,
    own_size: float = 2e-7,
) -> Comparison:
    """Return a comparison of sides whose numbers are the same but for the given changes."""
    changes = {"transformers": same, "vllm": hotter} if changes is None else changes
    names = list(changes)
    generator = torch.Generator().manual_seed(0)
    ids = [[int(each) for each in torch.randint(len(words), (length,), generator=generator)] for _ in range(rows)]
    base = [-torch.rand(length, generator=generator).log().neg().mul(2) for _ in ids]
    for numbers in base:
        numbers[0] = math.nan
    numbers = {name: [change(each, row) for row, each in enumerate(base)] for name, change in changes.items()}
    tokens = [tuple(words[token] for token in row) for row in ids]

    def gap(kind: str, one: str, other: str, first: list[Tensor], second: list[Tensor]) -> Gap:
        return measure(kind, one, other, first, second, ids, lambda token: words[token])  # type: ignore[arg-type]

    def own(name: str) -> list[Gap]:
        mine = numbers[name]
        again = [noise(own_size)(each, row) for row, each in enumerate(mine)]
        alone = [noise(2 * own_size)(each, row) for row, each in enumerate(mine)]
        return [
            gap("again", name, f"{name}, the same call again", mine, mine),
            gap("company", name, f"{name}, each row alone", mine, alone),
            gap("late_start", name, f"{name}, from the middle on", mine, again),
        ]

    first = names[0]
    pairs = [(a, b) for at, a in enumerate(names) for b in names[at + 1 :]]
    gaps = [gap("sides", a, b, numbers[a], numbers[b]) for a, b in pairs]
    gaps += [gap("oracle", "plain forward", name, base, numbers[name]) for name in names]
    if causes is None:
        causes = [] if verdict != "differ" else [TEMPERATURE]
    return Comparison(
        sides=tuple(
            Side(
                name=name,
                backend=name,
                model="/models/tiny",
                options={"dtype": "float32", "api_key": "***"},
                software=f"{name} 1.2.3",
                provenance={"backend": name, "kind": "raw", "temperature": 1.0, "weight_version": "0"},
                dtype="float32",
                abilities=("score", "logits", "raw"),
                calls=20,
                tokens=9000,
                seconds=3.2,
            )
            for name in names
        ),
        rows=tuple(
            Row(
                ids=tuple(row),
                prompt_length=length // 3,
                tokens=tokens[at],
                text="".join(tokens[at][: length // 3]),
                kind="conversation" if at % 2 else "text",
                sampled_by=first,
                numbers={name: tuple(numbers[name][at].tolist()) for name in names},
            )
            for at, row in enumerate(ids)
        ),
        gaps=tuple(gaps),
        own=tuple(each for name in names for each in own(name)),
        tolerances=dict.fromkeys(names, 2e-6),
        divergences=tuple(
            Divergence(
                what="numbers",
                one=first,
                other=names[1],
                row=at,
                position=3 + at % 5,
                first=-1.5,
                second=-2.25,
                text="".join(tokens[at][:3]),
            )
            for at in range(rows)
            if verdict in ("differ", "unexplained")
        ),
        experiments=(
            Experiment(
                id="missing-scale",
                side=names[1],
                changed="the plain forward's logits divided by 0.7",
                before=0.41,
                after=3.1e-7,
                tokens=480,
                explains=verdict == "differ",
                note="a factor of 0.7000 fits best",
            ),
            Experiment(
                id="shift",
                side=names[1],
                changed="the numbers moved by one position",
                before=0.41,
                after=2.3,
                tokens=480,
                explains=False,
            ),
        ),
        causes=tuple(causes),
        ruled_out=("shift", "softcap", "truncation", "vocab-padding", "company", "prefix-cache", "eos-suppressed"),
        not_tried={"chunked-prefill": "the engine has no such option"},
        notes=("causes are looked for in 10 of 12 rows; all are compared",),
        oracle="/models/tiny",
        seed=0,
        seconds=12.3,
        verdict=verdict,  # type: ignore[arg-type]
    )


TEMPERATURE = Cause(
    id="missing-scale",
    side="vllm",
    confidence="certain",
    evidence="vllm's log-probs are those of logits divided by 0.7: with that, the plain forward is 3.1e-07 nats a "
    "token away, without it 0.41",
    advice="ask for raw log-probs: get_backend('vllm', …, logprobs_mode='raw_logprobs')",
    figures={"temperature": 0.7, "before": 0.41, "after": 3.1e-7},
)
