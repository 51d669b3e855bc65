"""Nothing is lost on the way through a fleet: capabilities, changes of a tokenizer, and calls in spite of a mistake."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from apps.fleet.conftest import PROMPTS, SAMPLING
from corelm import Capabilities, Ragged
from corelm.errors import EngineError
from corelm.spec import ScoreResult
from corelm_fleet.agreement import capabilities_of_all
from corelm_fleet.pending import Part, PendingCall, result_of_parts
from corelm_fleet.tokenizer import FleetTokenizer
from helpers.mortal_toys import MortalToy, Toys, one_engine
from helpers.requests import scoring


def test_every_capability_that_is_no_flag_has_a_rule() -> None:
    """A capability that is added to the specification and forgotten by fleets has its default in a fleet."""
    rules: dict[str, tuple[Any, Any, Any]] = {
        "vocab_size": (9, 9, 9),
        "max_context": (8, 4, 4),
        "eos_token_ids": (frozenset({1}), frozenset({1}), frozenset({1})),
        "sampling": (
            {"temperature": (0.0, 2.0), "top_k": None, "stop": None},
            {"temperature": (0.5, 9.0), "top_k": (1, 5)},
            {"temperature": (0.5, 2.0), "top_k": (1, 5)},
        ),
        "generation_modes": (frozenset({"raw", "processed"}), frozenset({"raw"}), frozenset({"raw"})),
        "sleep_levels": (frozenset({1, 2}), frozenset({1}), frozenset({1})),
        "score_top_k": (7, 5, 5),
        "top_logprobs": (3, 9, 3),
        "precision": (None, 0.1, 0.1),
    }
    assert set(rules) == {each.name for each in fields(Capabilities) if not isinstance(each.default, bool)}
    can = {"update_weights": True, "score": True}
    one, two = (Capabilities(**can, **{name: rule[at] for name, rule in rules.items()}) for at in (0, 1))
    common = capabilities_of_all([one, two])
    for name, (_, _, expected) in rules.items():
        assert getattr(common, name) == expected, name


def test_what_was_not_asked_for_is_not_made_up() -> None:
    """An engine may return logits that were not asked for. Those of another engine are not 0."""
    rows = Ragged.from_list([[1], [2]])
    request = scoring([[1], [2]])
    one = ScoreResult(
        logprobs=Ragged.from_list([[0.0]], torch.float32), scored=rows.select([0]).with_values(torch.tensor([False]))
    )
    more = replace(one, logits=Ragged(torch.ones(1, 3), torch.tensor([1])))
    assert result_of_parts(request, [Part(one, [0], [0]), Part(more, [0], [1])], {}, "").logits is None  # type: ignore[union-attr]


# Tokenizers -----------------------------------------------------------------------------------------------------------


class Vocabulary:
    """A tokenizer whose engine may end."""

    def __init__(self, ended: bool = False) -> None:
        self.__dict__.update(tokens=[], ended=ended)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.ended:
            raise EngineError("its process has ended", usable=False)
        self.__dict__[name] = value

    def add_tokens(self, tokens: list[str]) -> int:
        if tokens == ["odd"]:
            raise ValueError("odd")
        self.tokens = [*self.tokens, *tokens]
        return len(tokens)


def test_what_changes_a_tokenizer_changes_those_of_all_engines() -> None:
    running = [Vocabulary(), Vocabulary(ended=True), Vocabulary()]
    tokenizer = FleetTokenizer(lambda: running, lambda: running)
    assert tokenizer.add_tokens(["x", "y"]) == 2
    tokenizer.padding_side = "right"
    tokenizer.padding_side = "left"
    with pytest.raises(ValueError, match="odd"):
        tokenizer.add_tokens(["odd"])
    assert tokenizer.add_tokens(["z"]) == 1
    later = Vocabulary()
    tokenizer.adopt(later)
    for each in (running[0], running[2], later):
        assert each.tokens == ["x", "y", "z"] and each.padding_side == "left"


def test_a_tokenizer_can_be_copied() -> None:
    with Toys("a", "b") as toys:
        assert copy.copy(toys.backend.tokenizer).decode([72, 105]) == "Hi"


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_a_mistake_fails_the_call_and_leaves_no_caller_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Toys("a", "b") as toys:
        with monkeypatch.context() as patch:
            patch.setattr(PendingCall, "take", lambda self, *given: 1 / 0)
            with pytest.raises(EngineError, match="mistake in core: ZeroDivisionError"):
                toys.backend.generate(PROMPTS, SAMPLING, timeout=20)
        assert "could not be ended" in caplog.text
        found = toys.backend.generate(PROMPTS, SAMPLING, timeout=20)
        assert found.ids.tolist() == one_engine().generate(PROMPTS, SAMPLING).ids.tolist()


def test_an_engine_that_fails_when_a_fleet_is_opened_is_not_called_another_one() -> None:
    def before(engine: MortalToy, hook: str, request: Any) -> None:
        if engine.name == "b":
            raise MemoryError("no room")

    with pytest.raises(EngineError, match=r"^b failed when the fleet was opened: .*no room"):
        Toys("a", "b", before=before)
