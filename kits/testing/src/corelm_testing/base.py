"""`ConformanceBase`: what an engine author defines and what every test of the kit can use; and `needs`.

pytest imports this module in every session, so torch is not imported with it.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import pytest

if TYPE_CHECKING:
    from torch import Tensor

    from corelm import Backend, Capabilities
    from corelm.spec import Adapter, GenerateResult, ScoreResult

    Oracle = Callable[[list[int], float], Tensor]

#: Prefix of the skip reason of a test that does not apply to the backend.
NOT_APPLICABLE = "not applicable: "
#: Prefix of the reason of a failure: the backend declares something, and no test can show that it works.
NOT_SHOWN = "declared and not shown: "

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


def not_applicable(reason: str) -> NoReturn:
    """Skip the running test as not applicable.

    Args:
        reason: why, as in ``"abort is not declared"`` or ``"needs a temperature other than 0 and 1"``.
    """
    pytest.skip(NOT_APPLICABLE + reason)


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


def engine_facts(backend: Backend) -> dict[str, Any]:
    """Return what a report says of an engine, as JSON: its model, its software and its capabilities."""
    declared = {}
    for each in dataclasses.fields(backend.capabilities):
        value = getattr(backend.capabilities, each.name)
        if isinstance(value, Mapping):
            value = {name: None if span is None else list(span) for name, span in sorted(value.items())}
        declared[each.name] = sorted(value) if isinstance(value, frozenset) else value
    return {"model": backend.model_name, "software": backend.engine.software, "declares": declared}


def require(backend: Backend, *names: str) -> None:
    """Skip the running test if a capability is missing: `needs` for a fixture that several tests share."""
    for name in names:
        if not offers(backend.capabilities, name):
            not_applicable(f"{name} is not declared")


class ConformanceBase:
    """The base of `BackendConformance`. A subclass must define `open_backend`, and `oracle` or `next_logprobs`.

    Attributes:
        tolerance: the largest accepted difference from a log-prob of the oracle, in nats. 16-bit models need more.
        not_shown: what the backend declares but this suite cannot show, with the reason, as in ``{"update_weights":
            "other tests share the server"}``; or ``ignore_eos``, for example, if the backend refuses what every engine
            is asked for. Such tests are reported as expected failures, with that reason.
        vocab_size: the vocabulary size of the backend; set when a test starts.
    """

    tolerance: float = 1e-4
    not_shown: ClassVar[Mapping[str, str]] = {}
    vocab_size: int
    _properties: list[tuple[str, Any]]
    #: What a report calls the tests that the class defines.
    corelm_theme: ClassVar[str] = "own"

    def __init_subclass__(cls, theme: str = "own", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.corelm_theme = theme

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

        It must be computed without the backend. The default calls `next_logprobs` at each position.
        """
        import torch

        if type(self).next_logprobs is ConformanceBase.next_logprobs:
            raise NotImplementedError(
                "define `oracle` or `next_logprobs(self, ids, temperature)`: log-probs computed without the backend"
            )
        found = [self.next_logprobs(ids[:at], temperature)[ids[at]] for at in range(1, len(ids))]
        return torch.stack([torch.tensor(0.0), *found])

    def next_logprobs(self, ids: list[int], temperature: float) -> Tensor:
        """Return float32[vocab_size]: the log-probability of every id that can follow `ids`.

        The default calls `oracle` for each id. A vocabulary of more than 1024 ids needs a definition.
        """
        import torch

        if self.vocab_size > _MAX_ORACLE_VOCAB:
            raise NotImplementedError(
                "define `next_logprobs(self, ids, temperature)`: the default would ask the oracle about each of "
                f"{self.vocab_size} ids"
            )
        if type(self).oracle is ConformanceBase.oracle:
            raise NotImplementedError("define `oracle(self, ids, temperature)`: the default `next_logprobs` calls it")
        return torch.stack([self.oracle([*ids, token], temperature)[-1] for token in range(self.vocab_size)])

    def new_weights(self) -> tuple[Mapping[str, Tensor] | str | PathLike[str], Oracle]:
        """Return other weights for the same model, as ``Backend.update_weights`` accepts them, and their oracle.

        A backend that declares `update_weights` must define it.
        """
        self.declared_and_not_shown(
            "update_weights",
            "define `new_weights(self)`: it returns other weights for the same model, and their oracle",
        )

    def new_adapters(self) -> Sequence[tuple[Mapping[str, Any], Oracle]]:
        """Return two adapters for the same model that differ, each with the oracle of the model that it makes.

        An adapter is given as the arguments of ``Backend.load_adapter`` after its name: ``{"weights": state_dict,
        "config": lora_config}`` or ``{"weights": folder}``. A backend that declares `adapters` must define it.
        """
        self.declared_and_not_shown(
            "adapters",
            "define `new_adapters(self)`: it returns two adapters for the same model, each with its oracle",
        )

    def engine_sampling(self) -> Mapping[str, Any]:
        """Return sampling parameters with `engine_kwargs` that change what is sampled.

        A backend that declares `engine_kwargs` must define it. Log-probs are checked under these parameters too.
        For example: ``{"engine_kwargs": {"logit_bias": {"7": -100.0}}}``.
        """
        self.declared_and_not_shown(
            "engine_kwargs",
            "define `engine_sampling(self)`: it returns sampling parameters with engine_kwargs that change answers",
        )

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
        self._properties = request.node.user_properties
        self._properties += [("corelm_backend", backend.name), ("corelm_engine", engine_facts(backend))]
        for mark in request.node.iter_markers("corelm_needs"):
            require(backend, *mark.args)

    def declared_and_not_shown(self, name: str, remedy: str) -> NoReturn:
        """Fail the running test: the backend declares `name`, and no test can show that it works.

        The test is an expected failure if `not_shown` gives a reason for `name`.

        Args:
            name: a field of `Capabilities`, or a sampling parameter.
            remedy: what the author can do.
        """
        if name in self.not_shown:
            pytest.xfail(f"{NOT_SHOWN}{name}: {self.not_shown[name]}")
        pytest.fail(
            f"{NOT_SHOWN}{name}. {remedy[0].upper()}{remedy[1:]}. Otherwise do not declare it, or say why it cannot be "
            f"shown: not_shown = {{{name!r}: 'the reason'}}",
            pytrace=False,
        )

    def sampling_of(self, backend: Backend, name: str) -> dict[str, Any]:
        """Return sampling parameters with the parameter `name` in force, with a value that the backend declares.

        The running test is not applicable if the backend does not declare the parameter, and fails if no value of it
        can be used.
        """
        from corelm_testing.usage import honoured, use

        if name == "engine_kwargs":
            require(backend, "sampling:engine_kwargs")
            return dict(self.engine_sampling())
        found = use(backend, name)
        if found is None:
            if not honoured(backend, name):
                not_applicable(f"sampling:{name} is not declared")
            remedy = "declare a value other than the default, and the parameters without which it has no effect"
            self.declared_and_not_shown(name, remedy)
        return found

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
            self._record_difference(float(error.max()))
            assert float(error.max()) <= self.tolerance, (
                f"{where}, token {int(error.argmax())}: off by {float(error.max()):.2g} nats, "
                f"{int((error > self.tolerance).sum())} of {len(error)} tokens by more than {self.tolerance:g}"
            )

    def assert_weights(
        self, backend: Backend, oracle: Oracle, capability: str, adapter: Adapter = None, label: str | None = None
    ) -> None:
        """Assert that answers and scores are those of `oracle`, with the `label` of its weights if one is given.

        The rows are the same each time: what a cache holds of them must not answer for other weights.

        Args:
            capability: what cannot be shown if the engine returns no log-probs.
            adapter: that of the calls.
        """
        rows = self.rows(backend, 5, 40)
        if backend.capabilities.generation_modes:
            answers = backend.generate(rows, {"max_new_tokens": 6}, adapter=adapter)
            self.assert_true_answers(rows, answers, oracle)
            assert label is None or answers.weight_versions == (label,) * len(rows)
        if backend.capabilities.score:
            scores = backend.score_logprobs(rows, adapter=adapter)
            self.assert_true_scores(rows, scores, oracle)
            assert label is None or scores.weight_versions == (label,) * len(rows)
        if not (backend.capabilities.generation_modes or backend.capabilities.score):
            self.declared_and_not_shown(capability, "return log-probs, which show the weights")

    def _record_difference(self, difference: float) -> None:
        # An instance that a fixture has made runs no test. NaN and infinity are no JSON, and fail the test anyway.
        if math.isfinite(difference) and "_properties" in vars(self):
            self._properties.append(("corelm_difference", difference))
