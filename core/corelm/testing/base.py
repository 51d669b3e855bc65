"""`ConformanceBase`: what an engine author defines and what every test of the kit can use; and `needs`.

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

#: Prefix of the skip reason of a test that does not apply to the backend.
NOT_APPLICABLE = "not applicable: "

#: The largest vocabulary for which `next_logprobs` asks the oracle about every id.
_MAX_ORACLE_VOCAB = 1024


def needs(*names: str) -> pytest.MarkDecorator:
    """Mark a test that applies only to backends with these capabilities; for others it is reported as not applicable.

    Args:
        names: a field of `Capabilities`, which must be true or not empty; ``sampling:NAME``, a sampling parameter that
            must be declared, as in ``sampling:top_k``; or ``mode:NAME``, a generation mode that must be declared:
            ``raw``, ``processed`` or ``scaled``.
    """
    return pytest.mark.corelm_needs(*names)


def not_applicable(name: str) -> NoReturn:
    """Skip the running test as not applicable, because the backend or its author does not offer `name`."""
    pytest.skip(NOT_APPLICABLE + name)


def offers(capabilities: Capabilities, name: str) -> bool:
    """Return whether the capabilities include `name`, which is written as for `needs`."""
    from corelm import SamplingParams

    kind, _, value = name.partition(":")
    if kind == "sampling":
        # Otherwise a misspelt name would make its test not applicable to every backend.
        assert value in SamplingParams.__dataclass_fields__, name
        return value in capabilities.sampling
    if kind == "mode":
        return value in capabilities.generation_modes
    return bool(getattr(capabilities, name))


def require(backend: Backend, *names: str) -> None:
    """Skip the running test if a capability is missing: `needs` for a fixture that several tests share."""
    for name in names:
        if not offers(backend.capabilities, name):
            not_applicable(name)


class ConformanceBase:
    """The base of `BackendConformance`. A subclass must define `open_backend` and `oracle`; the rest has defaults.

    Attributes:
        tolerance: the largest accepted difference from a log-prob of the oracle, in nats. 16-bit models need more.
        vocab_size: the vocabulary size of the backend; set when a test starts.
    """

    tolerance: float = 1e-4
    vocab_size: int

    # Defined by the author -------------------------------------------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[[], Backend]:
        """Return a function that opens a new backend on the same small model at every call.

        The backends must be independent: what is done to one, including an update of its weights, must not affect
        another or the oracle.
        """
        raise NotImplementedError(
            "define the fixture `open_backend` (scope='class'): it returns a function that opens a backend"
        )

    def oracle(self, ids: list[int], temperature: float) -> Tensor:
        """Return float32[len(ids)]: the log-probability of every id given the ids before it; entry 0 is ignored.

        It must be computed without the backend.
        """
        raise NotImplementedError("define `oracle(self, ids, temperature)`: log-probs computed without the backend")

    def next_logprobs(self, ids: list[int], temperature: float) -> Tensor:
        """Return float32[vocab_size]: the log-probability of every id that can follow `ids`.

        The default calls `oracle` once per id, and is not applicable to vocabularies of more than 1024 ids.
        """
        import torch

        if self.vocab_size > _MAX_ORACLE_VOCAB:
            not_applicable("next_logprobs")
        return torch.stack([self.oracle([*ids, token], temperature)[-1] for token in range(self.vocab_size)])

    def new_weights(self) -> tuple[Mapping[str, Tensor] | str | PathLike[str], Oracle]:
        """Return other weights for the same model, as ``Backend.update_weights`` accepts them, and their oracle."""
        not_applicable("new_weights")

    # Provided to the tests -------------------------------------------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls, open_backend: Callable[[], Backend]) -> Iterator[Backend]:
        """Open the backend that most tests share."""
        with open_backend() as backend:
            yield backend

    @pytest.fixture(autouse=True)
    def corelm_applicable(self, request: pytest.FixtureRequest, backend: Backend) -> None:
        """Skip a test whose `needs` are not met."""
        self.vocab_size = backend.capabilities.vocab_size
        request.node.user_properties.append(("corelm_backend", backend.name))
        for mark in request.node.iter_markers("corelm_needs"):
            require(backend, *mark.args)

    def rows(self, backend: Backend, *lengths: int, seed: int = 0) -> list[list[int]]:
        """Return rows of these lengths: random ids, none special or EOS; the same in every run."""
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
        """Assert that the log-probs of every answer equal those of `oracle` (by default the author's)."""
        assert batch.logprobs is not None
        answers = zip(prompts, batch.ids.tolist(), batch.logprobs.split(), strict=True)
        for row, (prompt, answer, found) in enumerate(answers):
            expected = (oracle or self.oracle)([*prompt, *answer], batch.temperature)[len(prompt) :]
            self.assert_close(found, expected, f"row {row}, after a prompt of {len(prompt)} tokens")

    def assert_true_scores(self, rows: list[list[int]], batch: ScoreResult, oracle: Oracle | None = None) -> None:
        """Assert that all positions except the first are scored as `oracle` (by default the author's) scores them."""
        for row, (ids, found, scored) in enumerate(
            zip(rows, batch.logprobs.split(), batch.scored.split(), strict=True)
        ):
            assert scored.tolist() == [False] + [True] * (len(ids) - 1), f"row {row}"
            self.assert_close(found[1:], (oracle or self.oracle)(ids, batch.temperature)[1:], f"row {row}")

    def assert_close(self, found: Tensor, expected: Tensor, where: str) -> None:
        """Assert that the shapes are equal and that all values agree within `tolerance`."""
        assert found.shape == expected.shape, f"{where}: {len(found)} log-probs, but the oracle has {len(expected)}"
        if len(found):
            error = (found.detach().cpu() - expected).abs()
            assert float(error.max()) <= self.tolerance, (
                f"{where}, token {int(error.argmax())}: off by {float(error.max()):.2g} nats, "
                f"{int((error > self.tolerance).sum())} of {len(error)} tokens by more than {self.tolerance:g}"
            )
