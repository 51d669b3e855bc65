"""The conformance kit itself, run by pytest in pytest: missing tests, tests that do not apply, and the report."""

import importlib
import importlib.util
import json
import pathlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch  # so that the inner runs, which forget their imports, do not import it again

import corelm
import corelm_testing
from corelm import Provenance, Ragged, SamplingParams
from corelm.spec import GenerateResult, ScoreResult
from corelm.spec.sampling import FIELDS
from corelm_testing import BackendConformance, ConformanceBase, usage
from corelm_testing.plugin import META_TEST, standard_tests
from corelm_testing.usage import DECLARABLE, HALF, USAGE

pytest_plugins = "pytester"


SUITE = """
import pytest
import corelm
from corelm_testing import BackendConformance, needs
from helpers.toy_conformance import TABLE, of_table
from corelm_testing.toy import Bigram

class TestToy(BackendConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls):
        return lambda: corelm.get_backend("toy", Bigram(TABLE.clone()))

    def oracle(self, ids, temperature):
        return of_table(TABLE, ids, temperature)
"""

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Return ``run(lines, *arguments)``, which runs the toy suite with these lines added to its class."""

    def run(lines: str = "", *arguments: str) -> pytest.RunResult:
        body = "".join(f"    {line}\n" for line in lines.strip("\n").splitlines())
        pytester.makepyfile(test_suite=SUITE + body)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--strict-markers", *arguments)

    return run


@pytest.fixture
def meta(run: Run) -> Run:
    """Return ``meta(lines)``, which runs only the check of the standard tests."""
    return lambda lines: run(lines, "-k", META_TEST)


def test_a_suite_that_changes_nothing_is_complete(meta: Run) -> None:
    outcomes = meta("").parseoutcomes()
    assert outcomes.keys() == {"passed", "deselected"} and outcomes["passed"] == 1 and outcomes["deselected"] > 250


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("test_text_survives_tokenizing = None", "test_text_survives_tokenizing is deleted by TestToy"),
        ("def test_closing_twice_is_fine(self): pass", "test_closing_twice_is_fine is overridden by TestToy without"),
        (
            "@pytest.mark.skip(reason='slow')\ndef test_closing_twice_is_fine(self): pass",
            "test_closing_twice_is_fine is overridden by TestToy without",
        ),
        (
            "@pytest.mark.xfail\ndef test_closing_twice_is_fine(self): pass",
            "test_closing_twice_is_fine is overridden by TestToy without an xfail with a reason",
        ),
        (f"def {META_TEST}(self): pass\ntest_closing_twice_is_fine = None", "test_closing_twice_is_fine is deleted"),
    ],
    ids=["deleted", "overridden", "skipped", "xfail-without-reason", "the-check-itself-overridden"],
)
def test_a_standard_test_cannot_be_left_out(meta: Run, lines: str, complaint: str) -> None:
    result = meta(lines)
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines([f"*{complaint}*"])


def test_a_standard_test_may_be_an_xfail_with_a_reason(run: Run) -> None:
    lines = """
@pytest.mark.xfail(reason="this engine reads NaN as a pad")
def test_closing_twice_is_fine(self):
    raise AssertionError
"""
    outcomes = run(lines, "-k", f"{META_TEST} or closing_twice").parseoutcomes()
    assert (outcomes["passed"], outcomes["xfailed"]) == (1, 1) and "failed" not in outcomes


def test_a_test_that_does_not_apply_names_the_missing_capability(run: Run) -> None:
    lines = """
@needs("abort")
def test_claim_one(self): raise AssertionError
@needs("score", "sampling:min_p")
def test_claim_two(self): raise AssertionError
@needs("mode:raw", "score", "sampling:top_k")
def test_claim_three(self): pass
"""
    result = run(lines, "-rs", "-k", "test_claim")
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["skipped"]) == (1, 2) and "failed" not in outcomes
    result.stdout.fnmatch_lines(
        ["*not applicable: abort is not declared", "*not applicable: sampling:min_p is not declared"], consecutive=False
    )
    result.stdout.fnmatch_lines(["corelm conformance: 1 passed, 2 not applicable (TestToy)"])


def test_the_name_of_a_theme_selects_all_its_tests(run: Run) -> None:
    themes = {test: theme.corelm_theme for test, theme in standard_tests(BackendConformance).items()}
    result = run("pass", "--collect-only", "-q", "-k", "in_flight")
    chosen = {line.rpartition("::")[2].partition("[")[0] for line in result.outlines if "::" in line}
    assert chosen >= {test for test, theme in themes.items() if theme == "in_flight"}
    assert all("in_flight" in themes[test] + test for test in chosen)


def test_a_misspelt_capability_is_an_error(run: Run) -> None:
    for name in ("scores", "sampling:top_q"):
        result = run(f"@needs({name!r})\ndef test_one(self): pass", "-k", "test_one")
        assert result.parseoutcomes()["errors"] == 1


def test_a_suite_without_a_backend_says_what_to_write(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("from corelm_testing import BackendConformance\nclass TestMine(BackendConformance): pass")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "closing_twice")
    result.stdout.fnmatch_lines(["*NotImplementedError: define the fixture `open_backend`*"])


def test_the_report_holds_every_outcome(run: Run, pytester: pytest.Pytester) -> None:
    lines = """
tolerance = 0.0
@pytest.mark.parametrize("case", [1, 2])
def test_good(self, case): pass
def test_bad(self): assert 1 == 2, "one|two"
@needs("abort")
def test_absent(self): pass
@pytest.mark.xfail(reason="not yet")
def test_later(self): raise AssertionError
@pytest.fixture
def broken(self): raise KeyError("torn")
def test_broken(self, broken): pass
"""
    choice = "good or bad or absent or later or broken or twice"
    result = run(lines, "--corelm-report=reports/toy.json", "-k", f"({choice}) and not prompt and not bad_ and not row")
    written = json.loads((pytester.path / "reports/toy.json").read_text())
    (suite,) = written["suites"]
    assert written["corelm"] == corelm.__version__ and suite["backend"] == "toy"
    found = {(test["test"], test["case"]): test for test in suite["tests"]}
    outcomes = {key: test["outcome"] for key, test in found.items()}
    assert outcomes["test_good", "1"] == outcomes["test_good", "2"] == "passed"
    assert outcomes["test_bad", ""] == outcomes["test_broken", ""] == "failed"
    assert (
        outcomes["test_absent", ""] == "not applicable"
        and found["test_absent", ""]["reason"] == "abort is not declared"
    )
    assert outcomes["test_later", ""] == "xfailed" and found["test_later", ""]["reason"] == "not yet"
    assert found["test_closing_twice_is_fine", ""]["theme"] == "lifecycle"
    assert "one|two" in found["test_bad", ""]["reason"]
    told = result.parseoutcomes()
    assert Counter(outcomes.values()) == Counter(suite["counts"])
    assert suite["counts"]["passed"] == told["passed"] and suite["counts"]["failed"] == told["failed"] + told["errors"]
    table = (pytester.path / "reports/toy.md").read_text()
    assert "| lifecycle | closing twice is fine | passed |" in table
    assert "| own | good | 2 passed |" in table and "| own | absent | not applicable: abort is not declared |" in table


@pytest.mark.nightly
def test_a_backend_with_minimal_capabilities_passes_and_the_rest_is_not_applicable(pytester: pytest.Pytester) -> None:
    suite = SUITE.replace(
        'corelm.get_backend("toy", Bigram(TABLE.clone()))',
        'corelm.Backend.from_plugin(Modest.open(Bigram(TABLE.clone())), "modest")',
    )
    modest = """
from corelm_testing.toy import ToyBackend

class Modest(ToyBackend):
    def __init__(self, *given):
        super().__init__(*given)
        self.capabilities = corelm.Capabilities(vocab_size=260, max_context=None)
"""
    head, _, body = suite.partition("class TestToy")
    pytester.makepyfile(test_suite=f"{head}{modest}\nclass TestToy{body}")
    pytester.runpytest_inprocess("-p", "no:cacheprovider", "--corelm-report=modest")
    (suite,) = json.loads((pytester.path / "modest.json").read_text())["suites"]
    wrong = [test for test in suite["tests"] if test["outcome"] not in ("passed", "not applicable")]
    assert not wrong
    reasons = {test["reason"] for test in suite["tests"] if test["outcome"] == "not applicable"}
    lacking = {"score", "generation_modes", "per_answer_seeds", "update_weights", "abort", "max_context"}
    assert {f"{name} is not declared" for name in lacking} <= reasons
    assert suite["counts"]["passed"] > 50


def test_every_theme_is_in_the_suite_and_no_test_overrides_another() -> None:
    names = [module.name for module in pkgutil.iter_modules(corelm_testing.__path__, "corelm_testing.")]
    themes = {
        value
        for name in names
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, type) and issubclass(value, ConformanceBase) and value.__module__ == name
        # Suites that are made of it, such as the one of `corelm conformance`.
        if value is BackendConformance or not issubclass(value, BackendConformance)
    }
    assert themes == {c for c in BackendConformance.__mro__ if issubclass(c, ConformanceBase)}
    defined = Counter(test for theme in themes for test in vars(theme) if test.startswith("test_"))
    assert set(defined) == set(standard_tests(BackendConformance)) and max(defined.values()) == 1
    assert Counter(theme.corelm_theme for theme in themes) - Counter(own=2) == Counter(corelm_testing.THEMES)


def test_every_sampling_parameter_has_a_trial() -> None:
    assert set(USAGE) == set(FIELDS), "say in corelm/testing/usage.py how the kit uses the parameter"
    assert all(USAGE[name].values for name in DECLARABLE)
    neutral = SamplingParams()
    for name, each in USAGE.items():
        assert all(value is HALF or value != getattr(neutral, name) for value in each.values), name
        assert each.given.keys() <= set(FIELDS), name


def test_what_is_declared_and_not_shown_fails(run: Run) -> None:
    result = run("", "-k", "weights")
    assert result.parseoutcomes()["errors"] == 6 and "passed" in result.parseoutcomes()
    result.stdout.fnmatch_lines(["*declared and not shown: update_weights. Define `new_weights(self)`*not_shown = *"])


def test_what_is_declared_and_cannot_be_shown_needs_a_reason(run: Run) -> None:
    result = run('not_shown = {"update_weights": "the server is shared"}', "-rx", "-k", "weights")
    assert result.parseoutcomes()["xfailed"] == 6 and "errors" not in result.parseoutcomes()
    result.stdout.fnmatch_lines(
        [
            "  6 xfailed: declared and not shown: update_weights: the server is shared",
            "*declared and not shown: update_weights: the server is shared*",
        ]
    )


def test_an_engines_own_options_need_an_example(pytester: pytest.Pytester) -> None:
    plugin = "corelm.Backend.from_plugin(Reshaping.open(Bigram(TABLE.clone())), 'reshaping')"
    suite = SUITE.replace('corelm.get_backend("toy", Bigram(TABLE.clone()))', plugin)
    pytester.makepyfile(f"from helpers.broken_plugins import Reshaping\n{suite}")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "engine_kwargs")
    assert result.parseoutcomes()["failed"] == 3
    result.stdout.fnmatch_lines(["*declared and not shown: engine_kwargs. Define `engine_sampling(self)`*"])


def test_a_token_that_is_not_the_likeliest_is_named_with_its_row_and_prompt(run: Run) -> None:
    lines = """
def next_logprobs(self, ids, temperature):
    return -TABLE[ids[-1]].log_softmax(-1)
"""
    result = run(lines, "-k", "greedy_takes")
    assert result.parseoutcomes()["failed"] == 1
    said = r"*row 0, after a prompt of 4 tokens that ends in [[]*, *, *, *], token 0: id * has log-prob *, but id *"
    result.stdout.fnmatch_lines([said])


@pytest.mark.parametrize(
    ("refused", "reasons", "outcome"),
    [
        ("ignore_eos", {}, "failed"),
        ("ignore_eos", {"ignore_eos": "its own"}, "xfailed"),
        ("score", {"score": "no"}, "failed"),
    ],
)
def test_a_refusal_of_what_every_engine_is_asked_for_needs_a_reason(run: Run, refused, reasons, outcome) -> None:
    lines = f"""
not_shown = {reasons}
def test_refusal(self):
    raise corelm.errors.CapabilityError("it cannot", capability={refused!r})
"""
    assert run(lines, "-k", "test_refusal").parseoutcomes()[outcome] == 1


def test_next_logprobs_alone_are_an_oracle_and_neither_is_refused() -> None:
    class Case(ConformanceBase):
        def next_logprobs(self, ids: list[int], temperature: float) -> torch.Tensor:
            return -torch.arange(10.0) / temperature - sum(ids)

    assert Case().oracle([1, 2, 4], 2.0).tolist() == [0.0, -2.0, -5.0]
    with pytest.raises(NotImplementedError, match="define `oracle` or `next_logprobs"):
        ConformanceBase().oracle([1, 2], 1.0)

    class Asking(ConformanceBase):
        vocab_size = 10

        def next_logprobs(self, ids: list[int], temperature: float) -> torch.Tensor:
            return super().next_logprobs(ids, temperature)

    for ask in (Asking().oracle, Asking().next_logprobs):
        with pytest.raises(NotImplementedError, match=r"define `oracle.*the default `next_logprobs"):
            ask([1, 2], 1.0)


def test_a_large_vocabulary_needs_next_logprobs() -> None:
    case = ConformanceBase()
    case.vocab_size = 32_000
    with pytest.raises(NotImplementedError, match="define `next_logprobs"):
        case.next_logprobs([1, 2], 1.0)


def test_a_sampling_parameter_that_the_kit_does_not_know_is_named_with_the_table(monkeypatch):
    monkeypatch.setattr("corelm.spec.FIELDS", (*SamplingParams.__dataclass_fields__, "top_z"))
    found = importlib.util.spec_from_file_location("usage_again", usage.__file__)
    again = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "usage_again", again)
    with pytest.raises(NotImplementedError, match=r"'top_z'.*USAGE"):
        found.loader.exec_module(again)


def test_the_kit_by_name_refuses_a_misspelt_part_of_its_subject(tmp_path: pathlib.Path) -> None:
    from corelm_testing import by_name

    given = dict.fromkeys(["opened", "opener", "plain", "sampling", "other_weights", "tolerance", "draws", "not_shown"])
    with pytest.raises(TypeError, match="recompute_in_flight"):
        by_name.run(tmp_path / "report", subject=by_name.Subject(**given, recompute_in_flight=True))
    assert not hasattr(by_name.Kit, "recompute_in_flight")


# What the kit compares with an oracle ---------------------------------------------------------------------------------


def test_a_wrong_log_prob_is_found_wherever_it_is() -> None:
    class Case(ConformanceBase):
        def oracle(self, ids: list[int], temperature: float) -> torch.Tensor:
            return torch.arange(float(len(ids))).neg()

    case, rows, prompts = Case(), [[5, 6, 7, 8], [9, 8]], [[5], [9]]
    lengths, right = torch.tensor([4, 2]), torch.tensor([0.0, -1.0, -2.0, -3.0, 0.0, -1.0])
    scored = right != 0

    label = Provenance.label_of_scores(1.0)

    def look_at_scores(values: torch.Tensor) -> None:
        batch = ScoreResult(logprobs=Ragged(values, lengths), scored=Ragged(scored, lengths), **label)
        case.assert_true_scores(rows, batch)

    def look_at_answers(values: torch.Tensor) -> None:
        ids, logprobs = (Ragged(part[scored], lengths - 1) for part in (torch.arange(6), values))
        batch = GenerateResult(ids=ids, logprobs=logprobs, finish_reasons=("length",) * 2, **label)
        case.assert_true_answers(prompts, batch)

    for look in (look_at_scores, look_at_answers):
        look(right)
        for place in scored.nonzero().flatten().tolist():
            wrong = right.clone()
            wrong[place] -= 2 * case.tolerance
            with pytest.raises(AssertionError, match="off by"):
                look(wrong)
