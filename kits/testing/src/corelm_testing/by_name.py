"""The conformance kit on a backend chosen by name, without a test file: `run`, and the suite that pytest collects."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import pytest

from corelm_testing.base import NOT_SHOWN
from corelm_testing.suite import BackendConformance

if TYPE_CHECKING:
    from torch import Tensor

    from corelm import Backend
    from corelm_testing.base import Oracle
    from corelm_testing.plain_oracle import PlainOracle


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What `run` tests. The attributes that `BackendConformance` has as well are explained there.

    Attributes:
        opened: a backend that is open already, and that most tests share.
        opener: opens another one on the same model.
        plain: the plain forward of that model.
        sampling: sampling parameters with `engine_kwargs` that change answers; None if there are none.
        other_weights: other weights for the same model, which the engine loads by their path, and their oracle; None
            for those of the oracle with some noise, as a state dict.
    """

    opened: Backend
    opener: Callable[[], Backend]
    plain: PlainOracle
    sampling: Mapping[str, Any] | None
    other_weights: tuple[str, PlainOracle] | None
    tolerance: float
    draws: int
    recomputes_in_flight: bool
    not_shown: Mapping[str, str]


def run(
    subject: Subject, report: Path, arguments: Sequence[str] = (), on_test: Callable[[int], object] | None = None
) -> int:
    """Run the kit in this process, write its report, and return pytest's exit status.

    Args:
        subject: what is tested.
        report: where the report goes: a path to which ``.json``, ``.md`` and ``.html`` are added.
        arguments: more arguments for pytest, such as ``["-k", "seed"]``.
        on_test: is called with the number of tests when one has ended. pytest then prints no letter for it.
    """
    Kit.subject = subject
    Kit.tolerance, Kit.draws, Kit.not_shown = subject.tolerance, subject.draws, subject.not_shown
    Kit.recomputes_in_flight = subject.recomputes_in_flight

    class Chosen:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            self.tests = len(session.items)

        def pytest_runtest_logfinish(self) -> None:
            if on_test is not None:
                on_test(self.tests)

        @pytest.hookimpl(wrapper=True)
        def pytest_report_teststatus(self) -> Generator[None, tuple[str, str, str], tuple[str, str, str]]:
            category, letter, word = yield
            return category, letter if on_test is None else "", word

    with tempfile.TemporaryDirectory() as folder:
        # No settings of the folder in which the user happens to be.
        settings = Path(folder, "pytest.ini")
        settings.write_text("[pytest]\npython_files = by_name.py\npython_classes = Kit\n")
        options = [
            *("--pyargs", __name__, "-c", str(settings), "--rootdir", folder, "-p", "no:cacheprovider"),
            # Modules that the engine has imported cannot be rewritten any more, and need not be.
            *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
            *("--noconftest", "--import-mode=prepend", "--no-header", "--tb=short", "-q"),
        ]
        return pytest.main([*options, f"--corelm-report={report.absolute()}", *arguments], plugins=[Chosen()])


class Kit(BackendConformance):
    """The kit on what `run` is given."""

    subject: ClassVar[Subject]

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[[], Backend]:
        return cls.subject.opener

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls) -> Iterator[Backend]:
        yield cls.subject.opened

    def oracle(self, ids: list[int], temperature: float) -> Tensor:
        return self.subject.plain.logprobs(ids, temperature)

    def next_logprobs(self, ids: list[int], temperature: float) -> Tensor:
        return self.subject.plain.next_logprobs(ids, temperature)

    def new_weights(self) -> tuple[Mapping[str, Tensor] | str, Oracle]:
        if "update_weights" in self.not_shown:
            super().new_weights()
        if self.subject.other_weights is not None:
            path, oracle = self.subject.other_weights
            return path, oracle.logprobs
        other = self.subject.plain.with_other_weights()
        return other.state_dict(), other.logprobs

    def new_adapters(self) -> Sequence[tuple[Mapping[str, Any], Oracle]]:
        adapters: list[tuple[Mapping[str, Any], Oracle]] = []
        for seed in range(2):
            made = self.subject.plain.with_adapter(seed)
            if made is None:
                self.declared_and_not_shown("adapters", "choose a model with layers called q_proj or v_proj")
            state, config, other = made
            adapters.append(({"weights": state, "config": config}, other.logprobs))
        return adapters

    def engine_sampling(self) -> Mapping[str, Any]:
        if self.subject.sampling is None:
            self.declared_and_not_shown("engine_kwargs", "pass --engine-sampling")
        return self.subject.sampling

    def declared_and_not_shown(self, name: str, remedy: str) -> NoReturn:
        if name == "update_weights":
            remedy = f"{remedy}; --new-weights PATH gives the path of other weights"
        if name not in self.not_shown:
            pytest.fail(
                f"{NOT_SHOWN}{name}. {remedy[0].upper()}{remedy[1:]}. If it cannot be shown here, say why: "
                f"--not-shown {name}='the reason'",
                pytrace=False,
            )
        super().declared_and_not_shown(name, remedy)
