"""`check_case`: build the model of one row of the table, open it with the backend and check it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast

import corelm

from . import checks, configs
from .checks import Outcome
from .oracle import Oracle, plain

Rows = Sequence[Sequence[int]]


@dataclass
class Case:
    """One model and how it is checked.

    Attributes:
        model: the model; the oracle calls it.
        opened: what the backend is given: None for `model` itself, or a folder.
        rows: what is scored; None for the usual rows.
        prompts: what is answered; None for the usual prompts.
        inside: ids that every second row and prompt contains, if it is long enough.
        change: what happens to the model after the first scoring, before everything that is checked.
    """

    model: nn.Module
    opened: Any = None
    rows: Rows | None = None
    prompts: Rows | None = None
    inside: Sequence[int] = ()
    change: Callable[[], None] | None = None


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: the model type or the special case.
        scoring: what came of scoring; None if there is no model.
        generating: what came of generating; None if there is no model.
        not_built: why there is no model; "" if there is one.
        seconds: how much processor time the row took.
    """

    name: str
    scoring: Outcome | None = None
    generating: Outcome | None = None
    not_built: str = ""
    seconds: float = 0.0


def check_case(name: str, make: Callable[[], Case], device: str) -> Row:
    """Build, open and check one case on `device`."""
    try:
        case = make()
        case.model.to(device)
        vocab = plain(case.model, [3, 4, 5]).shape[-1]
        oracle = Oracle(case.model, vocab)
    except Exception as error:
        return Row(name, not_built=f"{type(error).__name__}: {' '.join(str(error).split())}"[:200])
    rows = case.rows or checks.some_rows(vocab)
    prompts = case.prompts or checks.some_prompts(vocab)
    if case.inside:
        rows, prompts = _every_second_with(case.inside, rows), _every_second_with(case.inside, prompts)
    try:
        opened = case.model if case.opened is None else case.opened
        where = {} if isinstance(opened, nn.Module) else {"device": device}
        backend = corelm.get_backend("transformers", model=opened, tokenizer=tokenizer(vocab), **where)
    except Exception as error:
        outcome = checks.failure(error)
        return Row(name, outcome, outcome)
    with backend:
        if case.change is not None:
            checks.guarded(checks.scoring, backend, oracle, rows)
            case.change()
            oracle.forget()
        return Row(
            name,
            checks.guarded(checks.scoring, backend, oracle, rows),
            checks.guarded(checks.generating, backend, oracle, prompts, vocab),
        )


def case_of_type(model_type: str) -> Case:
    return Case(configs.build(model_type))


def tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with that many words. Nothing is tokenized here, but a backend needs one."""
    words = {f"t{number}": number for number in range(vocab)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t3")), pad_token="t0", eos_token="t2"
    )


def _every_second_with(inside: Sequence[int], rows: Rows) -> Rows:
    def put(ids: Sequence[int]) -> list[int]:
        middle = len(ids) // 2
        return [*ids[:middle], *inside, *ids[middle + len(inside) :]] if len(ids) > len(inside) + 2 else list(ids)

    return [put(ids) if number % 2 else ids for number, ids in enumerate(rows)]
