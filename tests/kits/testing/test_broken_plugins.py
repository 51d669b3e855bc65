"""Every broken plugin fails the tests of the kit that the table lists for it."""

import pytest

from corelm_testing import BackendConformance
from corelm_testing.plugin import standard_tests
from helpers import (
    broken_plugins,
    toy_conformance,  # noqa: F401  # The inner runs forget their imports: import it once for all of them.
)

pytest_plugins = "pytester"

RAW = "test_raw_log_probs_are_the_models_own_under"
PROCESSED = "test_processed_log_probs_are_those_of_the_distribution_sampled_from_under"
#: Takes longest, because it measures calls of most of a second.
TIMEOUT = "test_a_timeout_ends_the_wait_and_the_engine_if_it_declares_so"


def cases(test: str, *names: str) -> str:
    """Return the cases of a test that has one for each of these parameters."""
    return " ".join(f"{test}[{name}]" for name in names)


#: Plugin → the tests that find its defect, of those that no plugin before it is for. A test without a
#: case stands for all of its cases.
TABLE = {
    "CutThoughScaled": f"""
        test_scaled_log_probs_are_the_raw_ones_at_temperature_1_under_every_truncation
        {cases(RAW, "top_k")}""",
    "RawReshaped": "test_raw_log_probs_are_the_models_own_under_all_parameters_together",
    "ProcessedUnreshaped": f"""
        {cases(PROCESSED, "min_new_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty")}""",
    "FirstIdUnpenalised": "test_a_repetition_penalty_counts_the_whole_prompt",
    "EngineKwargsIgnored": "test_engine_kwargs_change_answers",
    "TopPBeforeTemperature": "test_top_p_is_applied_after_the_temperature",
    "MinPBeforeTemperature": "test_min_p_is_applied_after_the_temperature test_min_p_is_applied_after_top_p",
    "TopPBeforeTopK": "test_top_p_is_applied_after_top_k",
    "MinPBeforeTopP": "test_min_p_is_applied_after_top_p",
    "MinPNotNormalised": "test_processed_log_probs_are_those_of_the_truncated_distribution",
    "BeamsSampled": "test_beams_search_and_do_not_sample",
    "WeightsLostInSleep": "test_an_engine_that_slept_has_its_weights_and_their_label",
    "WakesAsBefore": "test_weights_loaded_before_the_cache_wakes_are_in_force",
    "AdapterIgnoredWhileScoring": "test_every_call_runs_with_the_adapter_that_it_names",
    "AdaptersLostInSleep": "test_adapters_are_there_after_a_light_sleep",
    "AdapterStaysOn": """
        test_every_call_runs_with_the_adapter_that_it_names
        test_calls_at_once_each_run_with_their_adapter""",
    "DroppedBeforeRefused": "test_an_adapter_that_does_not_fit_changes_nothing",
    "FirstVersionKept": "test_an_adapter_that_is_loaded_again_is_replaced",
    "UnknownIsBase": "test_an_adapter_that_was_unloaded_is_refused test_an_adapter_that_is_not_there_is_refused",
    "MassBeforeTemperature": "test_the_kept_ids_are_those_that_are_left[top_k-tempered]",
    "MassForgotten": "test_every_token_of_every_row_has_its_own_kept_ids",
    "SupportBeforeTemperature": """
        test_scores_are_normalised_over_the_given_ids[tempered]
        test_scores_over_the_kept_ids_are_the_samplers_own""",
    "SupportIgnored": "test_scores_are_normalised_over_the_given_ids",
    "TailOfTheLast": "test_the_most_probable_ids_of_scores_are_the_models",
    "TopIdsOfTheModel": """
        test_processed_top_ids_are_those_of_the_temperature
        test_processed_top_ids_end_where_truncation_cuts""",
    "TopIdsUntempered": """
        test_given_ids_get_their_log_probs[tempered]
        test_top_ids_of_scores_are_those_of_the_temperature""",
    "RunsTooEarly": "test_tokens_after_an_update_are_those_of_the_new_weights",
    "RunsTooLate": "test_tokens_before_an_update_are_those_of_the_old_weights",
    "UpdateUnsaid": "test_an_answer_that_begins_after_an_update_is_of_the_new_weights",
    "AlwaysTheSame": "test_answers_without_a_seed_differ",
    "EmptyPromptFails": "test_an_empty_prompt_gets_an_answer",
    "LogitsReused": "test_later_calls_do_not_change_scores",
    "AbortEndsTheCall": "test_abort_ends_only_the_named_request",
    "FirstLogProbZeroed": """
        test_the_first_response_token_has_its_log_prob
        test_every_sampled_token_has_its_log_prob
        test_processed_log_probs_are_those_of_the_temperature""",
    "PadsCounted": """
        test_the_most_probable_ids_of_answers_are_the_models
        test_greedy_takes_the_likeliest_token_at_every_step
        test_sampling_and_scoring_agree_on_the_response""",
    "RowsSwapped": """
        test_good_prompts_are_served_next_to_a_bad_one
        test_eight_threads_at_once_each_get_their_own_answers""",
    "ScoresSwapped": """
        test_every_token_but_the_first_is_scored
        test_scores_are_those_of_the_temperature
        test_every_id_of_the_vocabulary_can_be_scored""",
    "SecondMostProbable": "test_the_argmax_is_the_most_probable_id",
    "ProcessedCalledRaw": """
        test_raw_log_probs_are_the_models_own_at_every_temperature
        test_top_ids_are_the_models_own_at_every_temperature""",
    "SupportUnsaid": """
        test_processed_log_probs_are_labelled_with_their_sampling
        test_the_kept_ids_do_not_depend_on_the_other_rows""",
    "SeedIgnored": """
        test_the_same_seed_gives_the_same_answers
        test_an_answer_does_not_depend_on_the_other_rows
        test_an_answer_does_not_depend_on_the_number_of_samples
        test_asking_for_log_probs_changes_no_answer
        test_a_text_and_its_ids_are_the_same_prompt""",
    "SeedOfTheCall": """
        test_the_samples_of_a_prompt_differ
        test_samples_follow_the_temperature
        test_an_answer_ends_with_its_eos_and_keeps_it""",
    "EosAlwaysEnds": """
        test_samples_follow_the_model
        test_an_ignored_eos_is_an_ordinary_token
        test_later_tokens_follow_the_model_too""",
    "StopStringIgnored": """
        test_a_stop_string_ends_text_and_ids_together
        test_no_stop_string_ends_an_answer_before_min_new_tokens""",
    "FieldMissing": """
        test_generating_writes_every_promised_field_and_no_other
        test_generating_scores_the_response_and_nothing_else
        test_masks_follow_from_lengths
        test_scoring_tokens_keeps_their_split""",
    "TopKIgnored": "test_top_k_keeps_the_k_likeliest",
    "PenaltyIgnored": "test_a_presence_penalty_is_subtracted_once_per_id",
    "TemperatureIgnoredWhileScoring": "test_scores_are_those_of_the_temperature",
    "OneRowFailsAll": "test_a_row_may_be_as_long_as_the_context test_an_answer_without_a_limit_fills_the_context",
    "NeverStops": TIMEOUT,
    "StreamsNothing": "test_tokens_are_streamed_before_the_answer_ends",
    "StreamedRowsSwapped": """
        test_the_chunks_of_a_stream_are_its_result
        test_streaming_changes_no_answer
        test_streamed_log_probs_are_true""",
    "OwnerUnheard": "test_the_owner_may_say_that_the_weights_have_changed",
    "OldWeights": """
        test_generating_uses_the_new_weights
        test_scoring_uses_the_new_weights
        test_weights_that_do_not_fit_change_nothing""",
}
#: Plugins without a defect. All but the toy do more than it does: the kit on the toy does not show that they pass.
SOUND = (
    *("ToyBackend", "Abortable", "Scaled", "Reshaping", "Modest", "Truncating", "Beams", "Sleeper", "AdapterToy"),
    "InFlight",
)

QUICKLY = ("-q", "--assert=plain", "--tb=line", "-pno:cacheprovider", "-pno:hypothesispytest", "-pno:logging")
SUITE = """
import pytest
import torch
from helpers import toy_conformance
from helpers.broken_plugins import {name}
from corelm import Backend
from corelm_testing.toy import Bigram
{imports}

torch.manual_seed(0)  # for calls without a seed


class TestPlugin(toy_conformance.ToyPromises, {themes}):
    draws = 500  # Enough for these defects.

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls):
        return lambda: Backend.from_plugin({name}.open(Bigram(toy_conformance.TABLE.clone())), "{name}")
"""


@pytest.mark.parametrize("name", SOUND[1:])
def test_the_kit_passes_without_the_defect(pytester: pytest.Pytester, name: str) -> None:
    """The tests run that find a defect in a plugin which is otherwise the same."""
    plugin = getattr(broken_plugins, name)
    spoilt = [each for each in TABLE if issubclass(getattr(broken_plugins, each), plugin)]
    functions = {test.partition("[")[0] for each in spoilt for test in TABLE[each].split()}
    failed, ran = run_selection(pytester, name, functions)
    assert not failed and ran >= len(functions)


@pytest.mark.parametrize("name", TABLE)
def test_the_kit_finds_the_defect(pytester: pytest.Pytester, name: str) -> None:
    """Only the tests that the table lists run."""
    expected = set(TABLE[name].split())
    failed, _ = run_selection(pytester, name, {test.partition("[")[0] for test in expected})
    assert failed == expected


@pytest.mark.nightly
@pytest.mark.parametrize("name", SOUND)
def test_the_whole_kit_passes_without_a_defect(pytester: pytest.Pytester, name: str) -> None:
    failed, ran = run_kit(pytester, name, {BackendConformance})
    assert not failed and ran > 300


def run_selection(pytester: pytest.Pytester, name: str, functions: set[str]) -> tuple[set[str], int]:
    """Do what `run_kit` does for these tests, and collect only the classes of the kit that hold them."""
    owners = standard_tests(BackendConformance)
    themes = {owners[test] for test in functions}
    return run_kit(pytester, name, themes, "-k", " or ".join(sorted(functions)))


def run_kit(pytester: pytest.Pytester, name: str, themes: set[type], *options: str) -> tuple[set[str], int]:
    """Return the tests of these classes of the kit that fail on a plugin, each with its case only if the table lists
    it, and how many reports there are.
    """
    imports = "\n".join(f"from {theme.__module__} import {theme.__name__}" for theme in themes)
    names = ", ".join(theme.__name__ for theme in themes)
    pytester.makepyfile(SUITE.format(name=name, imports=imports, themes=names))
    run = pytester.inline_run(*QUICKLY, *options)
    reports = run.getreports("pytest_runtest_logreport")
    failed = {report.location[2].partition(".")[2] for report in reports if report.failed}
    return {test if test in TABLE.get(name, "").split() else test.partition("[")[0] for test in failed}, len(reports)


def test_every_plugin_is_in_the_table() -> None:
    plugins = {name for name, value in vars(broken_plugins).items() if hasattr(value, "requires_api")}
    assert plugins == {*TABLE, *SOUND}
