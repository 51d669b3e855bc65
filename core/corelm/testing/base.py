"""`ConformanceBase`: what an engine author gives, what every test of the kit is given; and `needs`.

pytest imports this module in every session, so torch is not imported with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from torch import Tensor

    from corelm import Backend, Capabilities
    from corelm.spec.records import GenerateResult, ScoreResult

    Oracle = Callable[[list[int], float], Tensor]

#: How the reason of a skipped test starts if the backend does not claim what the test is about.
NOT_APPLICABLE = "not applicable: "

#: The largest vocabulary for which asking the oracle about every next id is bearable.
_ASK_FOR_EACH = 1024


def needs(*names: str) -> pytest.MarkDecorator:
    """Mark a test that applies to backends of these capabilities only; to others it is reported as not applicable.

    A name is a field of `Capabilities` that must be true (or hold something); ``sampling:top_k`` is a sampling
    parameter that must be declared; ``mode:raw`` is a generation mode that must be (``raw``, ``processed`` or
    ``scaled``).
    """
    return pytest.mark.corelm_needs(*names)


def not_applicable(name: str) -> NoReturn:
    """End the running test as not applicable, because the backend or its author does not offer `name`."""
    pytest.skip(NOT_APPLICABLE + name)


def offers(capabilities: Capabilities, name: str) -> bool:
    """Whether a name as `needs` takes it is there."""
    from corelm import SamplingParams

    kind, _, value = name.partition(":")
    if kind == "sampling":
        # A name that is misspelt would be missing for ever.
        assert value in SamplingParams.__dataclass_fields__, name
        return value in capabilities.sampling
    if kind == "mode":
        return value in capabilities.generation_modes
    return bool(getattr(capabilities, name))


def require(backend: Backend, *names: str) -> None:
    """What `needs` does for a test, for a fixture that is shared by several of them."""
    for name in names:
        if not offers(backend.capabilities, name):
            not_applicable(name)


class ConformanceBase:
    """Subclass `BackendConformance` and give `open_backend` and `oracle`; everything else has a default.

    Attributes:
        tolerance: how far a log-prob may be from the oracle's, in nats. 16-bit models need more.
        vocab_size: the backend's, known once a test runs.
    """

    tolerance: float = 1e-4
    vocab_size: int

    # The author's ----------------------------------------------------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[[], Backend]:
        """A function that opens a new backend on the same small model at every call. What one of them is made to do,
        taking new weights included, must not show in another or in the oracle.
        """
        raise NotImplementedError("define the fixture `open_backend` (scope='class'): it returns a function that opens")

    def oracle(self, ids: list[int], temperature: float) -> Tensor:
        """float32[len(ids)]: the log-probability of every id given those before it; entry 0 is ignored. Computed
        without the backend.
        """
        raise NotImplementedError("define `oracle(self, ids, temperature)`: log-probs computed without the backend")

    def next_logprobs(self, ids: list[int], temperature: float) -> Tensor:
        """float32[vocab_size]: the log-probability of every id that may follow `ids`. Asks `oracle` for each one."""
        import torch

        if self.vocab_size > _ASK_FOR_EACH:
            not_applicable("next_logprobs")
        return torch.stack([self.oracle([*ids, token], temperature)[-1] for token in range(self.vocab_size)])

    def new_weights(self) -> tuple[Mapping[str, Tensor] | str | PathLike[str], Oracle]:
        """Other weights for the same model, as ``Backend.update_weights`` takes them, and their oracle."""
        not_applicable("new_weights")

    # Given to the tests ----------------------------------------------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls, open_backend: Callable[[], Backend]) -> Iterator[Backend]:
        """The one backend that most tests share."""
        with open_backend() as backend:
            yield backend

    @pytest.fixture(autouse=True)
    def corelm_applicable(self, request: pytest.FixtureRequest, backend: Backend) -> None:
        """Keeps a test from running where its `needs` are not met."""
        self.vocab_size = backend.capabilities.vocab_size
        request.node.user_properties.append(("corelm_backend", backend.name))
        for mark in request.node.iter_markers("corelm_needs"):
            require(backend, *mark.args)

    def rows(self, backend: Backend, *lengths: int, seed: int = 0) -> list[list[int]]:
        """Rows of these lengths: random ids that stand for text, none of them special or EOS. The same at every run."""
        tokenizer: Any = backend.tokenizer
        never = {*tokenizer.all_special_ids, *backend.eos_token_ids}
        # A model may have more outputs than its tokenizer has entries.
        known = min(backend.capabilities.vocab_size, len(tokenizer))
        legal = [token for token in range(known) if token not in never]
        generator = random.Random(seed)
        return [generator.choices(legal, k=length) for length in lengths]

    def assert_true_answers(
        self, prompts: list[list[int]], batch: GenerateResult, oracle: Oracle | None = None
    ) -> None:
        """Every answer's log-probs are those of `oracle` (the author's own by default) after its prompt."""
        assert batch.logprobs is not None
        answers = zip(prompts, batch.ids.tolist(), batch.logprobs.split(), strict=True)
        for row, (prompt, answer, found) in enumerate(answers):
            expected = (oracle or self.oracle)([*prompt, *answer], batch.temperature)[len(prompt) :]
            self.assert_close(found, expected, f"row {row}, after a prompt of {len(prompt)} tokens")

    def assert_true_scores(self, rows: list[list[int]], batch: ScoreResult, oracle: Oracle | None = None) -> None:
        """Every position but the first of every row is scored, as `oracle` (the author's own by default) does."""
        for row, (ids, found, scored) in enumerate(
            zip(rows, batch.logprobs.split(), batch.scored.split(), strict=True)
        ):
            assert scored.tolist() == [False] + [True] * (len(ids) - 1), f"row {row}"
            self.assert_close(found[1:], (oracle or self.oracle)(ids, batch.temperature)[1:], f"row {row}")

    def assert_close(self, found: Tensor, expected: Tensor, where: str) -> None:
        """Equal in shape, and within `tolerance` everywhere."""
        assert found.shape == expected.shape, f"{where}: {len(found)} log-probs, but the oracle has {len(expected)}"
        if len(found):
            error = (found.detach().cpu() - expected).abs()
            assert float(error.max()) <= self.tolerance, (
                f"{where}, token {int(error.argmax())}: off by {float(error.max()):.2g} nats, "
                f"{int((error > self.tolerance).sum())} of {len(error)} tokens by more than {self.tolerance:g}"
            )
