"""The model `corelm` of lm-eval gives the numbers and answers of lm-eval's own model `hf`, on every engine."""

import copy
import gc
import os
from pathlib import Path
from typing import Any

import pytest
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import corelm
from corelm.errors import CapabilityError, EngineError, InvalidRequestError, TemplateError
from corelm_interop.lm_eval import CoreLM, register
from helpers.cpu_engines import ENGINES
from helpers.lm_eval_tasks import (
    QUESTIONS,
    UNTIL,
    Watcher,
    assert_alike,
    evaluate,
    prompt_of,
    requests,
    responses,
    write_tasks,
)
from helpers.tiny_models import tiny_model as random_model
from helpers.tiny_models import tiny_tokenizer

TASKS = ("choices", "rolling", "answers")
HOSTS = os.environ.get("CORELM_TEST_HOSTS") == "1"
register()


@pytest.fixture(scope="session")
def hf(tiny_model: Path) -> HFLM:
    return HFLM(str(tiny_model), device="cpu", dtype="float32", batch_size=4)


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory, hf: HFLM) -> Path:
    prompts = [(prompt_of(each["question"]), {"until": [], "max_gen_toks": 1}) for each in QUESTIONS]
    greedy = [text.strip() or "Pip" for text in hf.generate_until(requests("generate_until", prompts))]
    return write_tasks(tmp_path_factory.mktemp("lm-eval") / "tasks", greedy)


@pytest.fixture(scope="session")
def of_hf(tasks: Path, hf: HFLM) -> dict[str, Any]:
    return evaluate(tasks, TASKS, hf)


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def ours(tiny_model: Path, watcher: Watcher):
    with CoreLM("transformers", tiny_model, dtype="float32", wrappers=[watcher]) as model:
        yield model


# The same as hf -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engine",
    [
        "transformers",
        *(
            pytest.param(name, marks=pytest.mark.skipif(not HOSTS, reason="make test-hosts runs it"))
            for name in ("vllm", "sglang")
        ),
    ],
)
def test_every_request_gets_what_hf_gives_it(engine, tasks, of_hf, tiny_model, watcher):
    options = {"dtype": "float32"} if engine == "transformers" else ENGINES[engine]
    given = {"backend": engine, "model": str(tiny_model), **options, "wrappers": [watcher]}
    found = evaluate(tasks, TASKS, "corelm", given)
    assert watcher.closed == 1
    assert_alike(responses(found, "choices"), responses(of_hf, "choices"))
    # Some continuation is the greedy one, else `is_greedy` would show nothing.
    assert {greedy for _, greedy in responses(of_hf, "choices")} == {True, False}
    for one, other in zip(responses(found, "rolling"), responses(of_hf, "rolling"), strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert responses(found, "answers") == responses(of_hf, "answers")
    assert len(set(responses(of_hf, "answers"))) > 1
    for task in TASKS:
        for metric, value in of_hf["results"][task].items():
            if isinstance(value, float):
                assert found["results"][task][metric] == pytest.approx(value, rel=1e-4), metric
    said = found["config"]
    assert said["corelm_backend"] == engine and said["corelm_weights"] == "0"
    assert said["corelm_tokens"]["scored"] > 100 and said["corelm_tokens"]["sampled"] > 10


def test_chats_of_several_turns_with_a_system_message(tasks, hf, ours):
    options = {
        "apply_chat_template": True,
        "fewshot_as_multiturn": True,
        "system_instruction": "You are very small.",
        "num_fewshot": 2,
    }
    theirs = evaluate(tasks, ["chat", "choices"], hf, **options)
    found = evaluate(tasks, ["chat", "choices"], ours, **options)
    arguments, expected = ([sample["arguments"] for sample in run["samples"]["chat"]] for run in (found, theirs))
    assert arguments == expected
    assert all(prompt.count("<|im_start|>user") == 3 and "very small." in prompt for ((prompt, _),) in arguments)
    assert responses(found, "chat") == responses(theirs, "chat")
    assert_alike(responses(found, "choices"), responses(theirs, "choices"))
    assert ours.chat_template(True) == hf.chat_template(True) and ours.tokenizer_name == hf.tokenizer_name


def test_texts_that_are_too_long_lose_their_first_tokens(tiny_model, hf):
    long = "How big are you? I am very small. " * 9
    pairs = [(long, " Pip"), (long, " I am Pip, thank you."), ("Hi", " there")]
    with CoreLM("transformers", tiny_model, dtype="float32", max_length=64) as ours:
        theirs = HFLM(hf.model, tokenizer=hf.tokenizer, max_length=64)
        assert_alike(
            ours.loglikelihood(requests("loglikelihood", pairs)), theirs.loglikelihood(requests("loglikelihood", pairs))
        )
        rolling = requests("loglikelihood_rolling", [(long,), ("Pip",), (long[:99],)])
        found, expected = ours.loglikelihood_rolling(rolling), theirs.loglikelihood_rolling(rolling)
        assert found == pytest.approx(expected, abs=1e-3)
        asked = requests("generate_until", [(long, {"until": [], "max_gen_toks": 50}), ("Hi", {"max_gen_toks": 3})])
        assert ours.generate_until(asked) == theirs.generate_until(asked)


def test_without_a_context_the_prefix_precedes(tiny_model, hf):
    pairs = requests("loglikelihood", [("", "Hello there"), ("", "<|im_end|>Hello")])
    for prefix in (None, 7):
        theirs = HFLM(hf.model, tokenizer=hf.tokenizer, prefix_token_id=prefix)
        with CoreLM("transformers", tiny_model, dtype="float32", prefix_token_id=prefix) as ours:
            assert ours.prefix_token_id == theirs.prefix_token_id
            assert_alike(ours.loglikelihood(pairs), theirs.loglikelihood(pairs))
            texts = requests("loglikelihood_rolling", [("Hello there",), ("",)])
            assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-4)


@pytest.mark.parametrize("writes_bos", [True, False])
@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_bos_is_where_hf_has_it(writes_bos, add_bos_token, tmp_path):
    backend = copy.deepcopy(tiny_tokenizer().backend_tokenizer)
    if writes_bos:
        backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(tmp_path)
    random_model().save_pretrained(tmp_path)
    # With its cache of logits, hf gives wrong numbers where two requests split the same ids differently.
    theirs = HFLM(str(tmp_path), device="cpu", dtype="float32", add_bos_token=add_bos_token, logits_cache=False)
    with CoreLM("transformers", tmp_path, dtype="float32", add_bos_token=add_bos_token) as ours:
        for text in ("Hello there", "<|im_start|>Hello", ""):
            assert ours.tok_encode(text) == theirs.tok_encode(text)
        pairs = requests("loglikelihood", [("Hello", " there"), ("", "Hello there"), ("<|im_start|>Hi ", "there")])
        assert_alike(ours.loglikelihood(pairs), theirs.loglikelihood(pairs))
        asked = requests("generate_until", [("Hello", {"until": ["e"], "max_gen_toks": 9})])
        assert ours.generate_until(asked) == theirs.generate_until(asked)


# Answers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"until": "i"},
        {"until": UNTIL, "do_sample": False, "temperature": 0.0, "top_p": 0.5, "top_k": 3},
        {"until": ["<|im_start|>", "you?", ""]},
        {"until": [], "max_new_tokens": 5},
        {"temperature": 0.0, "do_sample": None, "num_beams": 1},
    ],
    ids=str,
)
def test_answers_end_where_those_of_hf_end(given, hf, ours):
    # Without the empty string, at which hf ends every answer.
    plain = {**given, "until": [text for text in given.get("until", []) if text]}
    prompts = [each["question"] for each in QUESTIONS]
    theirs = hf.generate_until(requests("generate_until", [(text, {"max_gen_toks": 16, **plain}) for text in prompts]))
    found = ours.generate_until(requests("generate_until", [(text, {"max_gen_toks": 16, **given}) for text in prompts]))
    assert found == theirs


@pytest.mark.parametrize("by_id", [False, True])
def test_only_the_text_after_the_thinking_counts(by_id, tiny_model, hf, ours):
    given = {"until": ["\n\n\n"], "max_gen_toks": 24}
    (whole,) = hf.generate_until(requests("generate_until", [("I am", given)]))
    _, end, rest = whole.split(maxsplit=2)
    last: Any = hf.tokenizer(" " + end, add_special_tokens=False)["input_ids"][-1] if by_id else end
    theirs = HFLM(hf.model, tokenizer=hf.tokenizer, think_end_token=last)
    with CoreLM("transformers", tiny_model, dtype="float32", think_end_token=last) as thinking:
        found = thinking.generate_until(requests("generate_until", [("I am", given)]))
        assert found == theirs.generate_until(requests("generate_until", [("I am", given)])) == [rest]


def test_sampled_answers_follow_the_seed_whatever_shares_their_call(tiny_model):
    arguments = {"temperature": 1.0, "do_sample": True, "until": [], "max_gen_toks": 8, "seed": 3}
    asked = requests("generate_until", [("Who are", arguments)] * 3 + [("Hello", arguments)])
    found = []
    for size in ("auto", 1, 3):
        with CoreLM("transformers", tiny_model, dtype="float32", batch_size=size) as model:
            found.append(model.generate_until(asked))
            # As after an interruption, when the cache has the first answers.
            assert model.generate_until(asked[3:]) == found[-1][3:]
    assert found[0] == found[1] == found[2] and len(set(found[0][:3])) == 3


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tempreature": 1.0}, "tempreature"),
        ({"do_sample": True}, "do_sample"),
        ({"max_gen_toks": 5000}, "max_gen_toks"),
        ({"max_length": 5}, "max_length"),
        ({"n": 2}, "num_samples"),
    ],
)
def test_generation_arguments_that_would_be_ignored_are_refused(given, field, ours):
    with pytest.raises(InvalidRequestError) as caught:
        ours.generate_until(requests("generate_until", [("Hello", given)]))
    assert caught.value.field == field


def test_beams_are_refused_by_an_engine_without_them():
    with CoreLM("toy", max_gen_toks=4) as toy, pytest.raises(CapabilityError, match="num_beams"):
        toy.generate_until(requests("generate_until", [("Hello", {"num_beams": 2})]))


def test_a_template_that_refuses_system_messages_gets_none(tiny_model, ours):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ours.tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    assert ours.apply_chat_template(chat) == "Hi"
    ours.tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(TemplateError, match="never"):
        ours.apply_chat_template(chat)


def test_a_turn_that_was_begun_is_continued(hf, ours):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is"}]
    text = ours.apply_chat_template(chat, add_generation_prompt=False)
    assert text == hf.apply_chat_template(chat, add_generation_prompt=False) and text.endswith("The answer is")


# Batches and caches ---------------------------------------------------------------------------------------------------


def test_a_run_that_fails_keeps_what_it_has_and_goes_on_there(tasks, tiny_model, tmp_path, watcher, of_hf):
    given = {"backend": "transformers", "model": str(tiny_model), "dtype": "float32", "wrappers": [watcher]}
    given |= {"batch_size": 4}
    run = lambda: evaluate(tasks, TASKS, "corelm", given, use_cache=str(tmp_path / "cache"))  # noqa: E731
    watcher.last_call = 2
    with pytest.raises(EngineError, match="the power is out"):
        run()
    # The traceback, which was dropped, had references to the model.
    gc.collect()
    assert watcher.scored == [4, 4] and watcher.closed == 1
    watcher.last_call = 9
    with pytest.raises(EngineError, match="the power is out"):
        run()
    # The other 22 of 30 choices, and four of six texts.
    assert watcher.scored[2:] == [4, 4, 4, 4, 4, 2, 4] and not watcher.answered
    watcher.last_call = None
    found = run()
    assert watcher.scored[9:] == [2] and watcher.answered == [4, 2]
    assert_alike(responses(found, "choices"), responses(of_hf, "choices"))
    assert responses(found, "rolling") == pytest.approx(responses(of_hf, "rolling"), abs=1e-4)
    assert responses(found, "answers") == responses(of_hf, "answers")


def test_a_request_that_fails_alone_is_named_and_costs_no_other(ours, watcher):
    kept = {}

    class Kept:
        def add_partial(self, kind, request, result):
            kept[request] = result

    ours.set_cache_hook(Kept())
    pairs = [("Hello", " there"), ("Hello", " you"), ("Who", " are")]
    expected = dict(zip(pairs, ours.loglikelihood(requests("loglikelihood", pairs)), strict=True))
    kept.clear()
    watcher.bad_row = 1
    with pytest.raises(EngineError, match="too hard") as caught:
        ours.loglikelihood(requests("loglikelihood", pairs))
    (bad,) = caught.value.rows
    assert kept == {pair: score for pair, score in expected.items() if pair != pairs[bad]}


@pytest.mark.parametrize("pair", [(" ", "there"), ("Hello", ""), ("", "Hello " * 900)])
def test_a_pair_that_has_no_score_is_refused(pair, ours):
    with pytest.raises(InvalidRequestError, match="row 1") as caught:
        ours.loglikelihood(requests("loglikelihood", [("Hello", " there"), pair]))
    assert caught.value.rows == (1,)


# Opening and closing --------------------------------------------------------------------------------------------------


def test_an_open_backend_is_used_and_stays_open(tasks, tiny_model, of_hf):
    with corelm.get_backend("transformers", tiny_model, dtype="float32") as backend:
        found = evaluate(tasks, ["choices"], CoreLM(backend))
        assert_alike(responses(found, "choices"), responses(of_hf, "choices"))
        assert not backend.closed
        with pytest.raises(InvalidRequestError, match="takes no dtype"):
            CoreLM(backend, dtype="float32")
        assert not backend.closed
