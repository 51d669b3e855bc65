"""In this process: an output of vLLM that cannot be the answer to its row fails that row alone."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from types import SimpleNamespace
from typing import Any, Literal

from corelm.spec import Capabilities, GenerateRequest
from corelm_testing.toy import ByteTokenizer
from helpers.each import case
from helpers.half_characters import Pieces
from helpers.requests import generation, scoring
from vllm_backend.capabilities import ModelInfo
from vllm_backend.protocol_inprocess import generation_result, scoring_result
from vllm_backend.sampling import parameters

#: Ids and their log-probs at one position: first the prompt's own id or the sampled one.
Candidates = list[tuple[int, float]]


def output(ids: list[int], values: list[float], reason: str = "length", prompt: list[float] | None = None) -> Any:
    """What vLLM returns for a row, as far as the plugin reads it. Each position has one candidate."""

    def flat(numbers: list[float]) -> Any:
        return SimpleNamespace(logprobs=numbers, token_ids=ids, start_indices=list(range(len(numbers))))

    completion = SimpleNamespace(token_ids=ids, finish_reason=reason, stop_reason=None, logprobs=flat(values))
    scores = None if prompt is None else flat(prompt)
    return SimpleNamespace(outputs=[completion], prompt_logprobs=scores, num_cached_tokens=None)


def request(logprobs: Literal["raw", "processed"] = "raw", **sampling: Any) -> GenerateRequest:
    return generation([[5], [6], [7]], logprobs, max_new_tokens=2, **sampling)


def scored(last: Candidates, *prompt: Candidates) -> Any:
    """What vLLM returns for a scored row: the candidates of its last position, then those of the others."""

    def flat(positions: Sequence[Candidates]) -> Any:
        ends = list(accumulate(map(len, positions)))
        ids, values = zip(*chain(*positions), strict=True)
        starts = [0, *ends[:-1]]
        return SimpleNamespace(token_ids=ids, logprobs=values, start_indices=starts, end_indices=ends)

    sampled, _ = last[0]
    completion = SimpleNamespace(token_ids=[sampled], finish_reason="length", stop_reason=None, logprobs=flat([last]))
    return SimpleNamespace(outputs=[completion], prompt_logprobs=flat([[], *prompt]))


INFO = ModelInfo(capabilities=Capabilities(vocab_size=512, max_context=64), tokenizer=None, checkpoint=None)
SCORED = [[5, 6, 7], [5, 6, 8]]
RAW, GREEDY = request(), request("processed", temperature=0.0)


def test_a_log_prob_that_is_none_fails_its_row_alone() -> None:
    for asked, value in itertools.product([RAW, GREEDY], [math.nan, 0.5]):
        with case(asked, value):
            good = output([8, 9], [-1.0, -2.0])
            result = generation_result(asked, [good, output([8, 9], [-1.0, value]), good], INFO)
            assert result.finish_reasons == ("length", "error", "length") and result.ids.lengths.tolist() == [2, 0, 2]
            assert "position 1" in (result.errors or ("", ""))[1]
            kept = [-1.0, -2.0] if asked is RAW else [0.0, 0.0]
            assert result.logprobs is not None and result.logprobs.tolist() == [kept, [], kept]


def test_a_row_that_fails_after_an_update_in_flight_has_the_runs_of_no_tokens() -> None:
    """Runs beyond the tokens of a row would make core refuse the whole result."""
    asked = replace(request(top_k=2), return_support=True, weight_version="old", weight_update=0)
    info = replace(
        INFO,
        capabilities=replace(INFO.capabilities, update_weights=True, concurrent_calls=True, updates_in_flight=True),
    )
    rows = [output([8, 9], [-1.0, -2.0]) for _ in range(2)]
    for row in rows:
        row.outputs[0].weight_versions = [
            SimpleNamespace(version="default", start=0, end=1),
            SimpleNamespace(version="1:new", start=1, end=2),
        ]
    result = generation_result(asked, rows, info, [([[8], [9]], [0.0, 0.0]), ([[8]], [0.0])])
    assert "remembered the ids of 1 tokens" in (result.errors or ("", ""))[1]
    assert result.version_runs == ((("old", 0), ("new", 1)), (("old", 0),))


def test_a_score_that_is_none_fails_its_row_alone() -> None:
    for value in [math.nan, -math.inf]:
        with case(value):
            rows = {n: output([7 + n], [-1.0], prompt=[0.0, found]) for n, found in enumerate((value, -2.0))}
            result = scoring_result(scoring(SCORED, return_argmax=False), rows, INFO)
            assert result.scored.tolist() == [[False] * 3, [False, True, True]]
            assert result.logprobs.tolist()[1] == [0, -2, -1]
            assert result.errors is not None and [bool(error) for error in result.errors] == [True, False]


def test_the_most_probable_ids_are_the_second_candidates() -> None:
    rows = {0: scored([(7, -2.0), (3, -0.7)], [(6, -1.5), (9, -0.3)]), 1: scored([(8, -1.0)] * 2, [(6, -1.0)] * 2)}
    result = scoring_result(scoring(SCORED, return_argmax=True), rows, INFO)
    assert result.errors is None and result.argmax is not None and result.argmax.tolist() == [[-1, 9, 3], [-1, 6, 8]]
    assert result.logprobs.tolist() == [[0, -1.5, -2], [0, -1, -1]]


def test_an_id_that_is_not_the_most_probable_one_fails_its_row_alone() -> None:
    for last, prompt, message in [
        ([(7, -2.0), (3, -0.7)], [(6, -1.5)], "did not return the 1 most probable ids"),
        ([(7, -2.0)], [(6, -1.5), (9, -0.3)], "did not return the 1 most probable ids"),
        ([(7, -2.0), (3, -0.7)], [(6, -0.5), (9, -0.9)], "did not return the 1 most probable ids"),
        ([(7, -0.6), (3, -0.7)], [(6, -1.5), (9, -0.3)], "did not return the 1 most probable ids"),
        ([(7, -2.0), (7, -0.7)], [(6, -1.5), (9, -0.3)], "id 7 .* at position 1, but id 7 has -2 there"),
        ([(7, -2.0), (3, -0.7)], [(6, -1.5), (9, math.nan)], "not a number of at most 0"),
    ]:
        with case(last, prompt, message):
            rows = {0: scored(last, prompt), 1: scored([(8, -1.0)] * 2, [(6, -1.0)] * 2)}
            result = scoring_result(scoring(SCORED, return_argmax=True), rows, INFO)
            assert result.argmax is not None and result.argmax.tolist() == [[-1] * 3, [-1, 6, 8]]
            assert result.errors is not None and re.search(message, result.errors[0]) and not result.errors[1]


def test_a_row_whose_last_id_vllm_did_not_sample_fails_alone() -> None:
    """A model that gives the id no probability at all makes vLLM sample another one."""
    for return_argmax, last in itertools.product([False, True], [[(3, -0.7)] * 2, [(3, -0.7), (7, -0.7)]]):
        with case(return_argmax, last):
            rows = {0: scored(last, [(6, -1.5), (9, -0.3)]), 1: scored([(8, -1.0)] * 2, [(6, -1.0)] * 2)}
            result = scoring_result(scoring(SCORED, return_argmax=return_argmax), rows, INFO)
            assert result.scored.tolist() == [[False] * 3, [False, True, True]]
            assert result.errors is not None and "log-prob of id 7" in result.errors[0] and not result.errors[1]


def test_with_whole_prompts_every_score_is_one_of_the_prompt() -> None:
    row = scored([(2, -0.1)], [(6, -1.5), (9, -0.3)], [(7, -2.0), (3, -0.7)])
    row.outputs[0].logprobs = None
    other = scored([(2, -0.1)], [(6, -1.5), (9, -0.3)], [(8, -2.0), (3, -0.7)])
    result = scoring_result(scoring(SCORED, return_argmax=True), {0: row, 1: other}, replace(INFO, whole_prompts=True))
    assert result.errors is None and result.logprobs.tolist()[0] == [0, -1.5, -2.0]
    assert result.argmax is not None and result.argmax.tolist()[0] == [-1, 9, 3]


def test_an_unknown_reason_is_an_error_and_repetition_ends_an_answer_if_it_was_asked_for() -> None:
    rows = [output([8], [-1.0], reason) for reason in ("repetition", "error", "length")]
    assert generation_result(request(), rows, INFO).finish_reasons == ("error", "error", "length")
    asked = request(engine_kwargs={"repetition_detection": {"max_pattern_size": 2}})
    assert generation_result(asked, rows, INFO).finish_reasons == ("stop", "error", "length")


class Letters:
    """A tokenizer whose ids are the letters from a on."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + each) for each in ids)


def test_a_stop_that_the_ids_do_not_show_fails_its_row_alone() -> None:
    """vLLM was seen to find a stop string in text that no token of the answer stands for."""
    rows = [output([0, 1], [-1.0, -1.0], "stop"), output([0, 3], [-1.0, -1.0], "stop")]
    result = generation_result(request(stop=("b",)), rows, replace(INFO, tokenizer=Letters()))
    assert result.finish_reasons == ("stop", "error")
    assert "do not spell" in (result.errors or ("", ""))[1]


def test_an_answer_that_goes_on_to_complete_a_character_ends_at_its_stop_string() -> None:
    """vLLM holds back the text of token 1, which ends in half a character, and so finds the "x" a token later."""
    result = generation_result(
        request(stop=("x",)), [output([0, 1, 2], [-1.0, -2.0, -3.0], "stop")], replace(INFO, tokenizer=Pieces())
    )
    assert result.ids.tolist() == [[0, 1]] and result.finish_reasons == ("stop",)
    assert result.logprobs is not None and result.logprobs.tolist() == [[-1.0, -2.0]]


def test_an_answer_is_cut_after_a_stop_string_that_vllm_was_not_told() -> None:
    asked = request(stop=("x",), reasoning_marks=("<t>", "</t>"))
    ids = list(b"<t>x</t>a x and more")
    assert parameters(asked.sampling, frozenset(), 99, None)["stop"] == []
    told = [output(ids[:length], [-1.0] * length) for length in (4, len(ids))]
    result = generation_result(asked, told, replace(INFO, tokenizer=ByteTokenizer()))
    assert result.ids.tolist() == [ids[:4], list(b"<t>x</t>a x")] and result.finish_reasons == ("length", "stop")
