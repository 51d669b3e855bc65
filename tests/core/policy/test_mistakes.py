"""What a policy refuses, naming the field, before anything is sampled; and which bad rows it can skip."""

import re
import warnings

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from transformers import GenerationConfig

import corelm
from corelm import History, LLMPolicy, PolicyOptions, SamplingParams
from corelm.errors import InvalidRequestError, MissingKeyError, ResponseParserWarning
from corelm.policy.options import ONLY, OPTIONS, Keys
from corelm_testing.toy import ByteTokenizer
from helpers.each import each
from helpers.refusals import refused
from helpers.toy_prompts import QUESTIONS, SAMPLING, chat


@each("mode", ["history", "text", "tokens"])
@each("generate", [True, False])
def test_a_missing_key_is_named_together_with_the_existing_keys(backend, mode, generate):
    part = "prompt" if generate else "full"
    policy = LLMPolicy(backend, input_mode=mode, generate=generate)
    with pytest.raises(MissingKeyError, match=rf"no '{mode}.{part}'; it has: reward") as error:
        policy(TensorDict(reward=torch.zeros(2)))
    assert isinstance(error.value, KeyError) and error.value.field == f"{mode}.{part}"
    with pytest.raises(MissingKeyError, match=part):
        policy(TensorDict({mode: TensorDict(other=torch.zeros(2, 3), batch_size=[2])}))


@each(
    "arguments, field",
    [
        ({"input_mode": "txt"}, "input_mode"),
        ({"log_probs_mode": "cooked"}, "log_probs_mode"),
        ({"on_error": "ignore"}, "on_error"),
        ({"truncation": "right"}, "truncation"),
        ({"inplace": "full"}, "inplace"),
        ({"inplace": True, "num_samples": 2}, "inplace"),
        ({"num_samples": 2, "sampling_params": {"n": 3}}, "num_samples"),
        ({"generate": False, "num_samples": 2}, "num_samples"),
        ({"generate": False, "return_log_probs": False}, "return_log_probs"),
        ({"input_mode": "text", "return_history": True}, "return_history"),
        ({"input_mode": "text", "response_parser": "hermes"}, "response_parser"),
        ({"response_parser": "hermse"}, "response_parser"),
        ({"model": "twice"}, "model"),
        ({"keys": None}, "keys"),
        ({"sampling_params": {"temprature": 1}}, "temprature"),
    ],
)
def test_illegal_arguments_are_refused_by_name(backend, arguments, field):
    with pytest.raises(InvalidRequestError) as error:
        LLMPolicy(backend, **arguments)
    assert error.value.field == field


@each(
    "mode, value",
    [("text", [3]), ("text", torch.zeros(2)), ("history", ["hello"]), ("tokens", torch.zeros(2, 2)), ("tokens", ["a"])],
)
def test_a_value_of_the_wrong_type_is_refused(backend, mode, value):
    with pytest.raises(InvalidRequestError, match=mode):
        LLMPolicy(backend, input_mode=mode)(TensorDict({mode: value}))


def test_messages_that_are_no_history_are_told_how_to_become_one(backend):
    td = TensorDict(history=[[{"role": "user", "content": "Hello"}]])
    with refused(InvalidRequestError, field="history.prompt") as caught:
        LLMPolicy(backend)(td)
    assert "History.from_chats(" in str(caught.value)


def test_a_batch_size_that_contradicts_the_tensordict_is_refused(backend):
    td = TensorDict(history=History.from_chats([[chat(q)] for q in QUESTIONS[:2]]), batch_size=[2])
    with refused(InvalidRequestError, field="history.prompt"):
        LLMPolicy(backend)(td)
    bare = TensorDict(text=QUESTIONS[:2], reward=torch.zeros(3))
    with refused(InvalidRequestError, field="inplace"):
        LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING)(bare)


def test_a_bad_row_is_skipped_and_the_others_keep_their_places(backend):
    tokens = TensorDict(tokens=torch.tensor([[72, 105], [72, 999], [72, 111]]), batch_size=[3])
    policy = LLMPolicy(backend, input_mode="tokens", sampling_params=SAMPLING, inplace=False)
    with refused(InvalidRequestError, field="prompts", rows=(1,)):
        policy(tokens)
    out = policy.replace(on_error="skip", return_text=False)(tokens, seed=1)
    alone = policy(TensorDict(tokens=tokens["tokens"][:1], batch_size=[1]), seed=1)
    assert list(out["finish_reason"])[1] == "error" and "999" in list(out["errors"])[1]
    assert len(out["tokens"].response[1]) == 0 and out["errors"][0] == ""
    assert torch.equal(out["tokens"].response[0], alone["tokens"].response[0])
    scored = policy.replace(on_error="skip", generate=False, return_text=False)(tokens)
    assert not scored["log_probs"].scored_mask[1].any() and scored["log_probs"].scored_mask[2].tolist() == [False, True]
    assert "999" in list(scored["errors"])[1]


def test_rows_that_cannot_be_read_are_skipped(backend):
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING, inplace=False)
    mixed = TensorDict(text=NonTensorStack("Hi", 3, "Ho"))
    with refused(InvalidRequestError, field="text.prompt", rows=(1,)):
        policy(mixed)
    out = policy.replace(on_error="skip")(mixed, seed=1)
    assert out["finish_reason"][1] == "error" and "expected a str" in out["errors"][1]
    assert out["text"].response[2] and out["errors"][0] == out["errors"][2] == ""

    class TokenizerWithoutEmptyChats(ByteTokenizer):
        def apply_chat_template(self, conversation, **options):
            if not conversation:
                raise ValueError("nothing was said")
            return super().apply_chat_template(conversation, **options)

    with corelm.get_backend("toy", tokenizer=TokenizerWithoutEmptyChats()) as picky:
        chats = TensorDict(history=History.of([chat("Hi"), [], chat("Ho")], (3,)))
        out = LLMPolicy(picky, sampling_params=SAMPLING, inplace=False, on_error="skip")(chats)
        assert out["finish_reason"][1] == "error" and "nothing was said" in out["errors"][1]
        assert len(out["tokens"].response[1]) == 0 and len(out["tokens"].response[2]) > 0
        scored = LLMPolicy(picky, generate=False, inplace=False, on_error="skip")(chats)
        assert "nothing was said" in scored["errors"][1] and scored["log_probs"].scored_mask[2].any()


@each("on_error", ["raise", "skip"])
@each("batching", [False, True])
def test_a_response_parser_that_raises_on_one_answer_loses_no_answer(backend, on_error, batching):
    def parser(text):
        if not seen:
            seen.append(text)
            raise KeyError("answer")
        return {"role": "assistant", "content": f"parsed: {text}"}

    seen = []
    chats = TensorDict(history=History.of([chat("Where?"), chat("Who")], (2,)))
    policy = LLMPolicy(
        backend, sampling_params=SAMPLING, inplace=False, response_parser=parser, on_error=on_error, batching=batching
    )
    with pytest.warns(ResponseParserWarning, match="response_parser: row 0: KeyError") as warned:
        out = policy(chats, seed=3)
    assert [warning.filename for warning in warned] == [__file__]
    policy.cleanup_batching()
    assert "KeyError" in out["errors"][0] and out["errors"][1] == ""
    first, second = out["text"].response
    assert [c[-1].content for c in out["history"].full.chats] == [first, f"parsed: {second}"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("inplace", [True, False])
def test_no_answer_is_lost_where_warnings_are_errors(backend, caplog, inplace):
    td = TensorDict(history=History.from_chats([chat("Where?")]))
    out = LLMPolicy(backend, sampling_params=SAMPLING, inplace=inplace, response_parser=lambda text: {}["answer"])(td)
    assert "KeyError" in out["errors"][0] and out["history"].full.chats[0][-1].content == out["text"].response[0]
    assert "response_parser raised on 1 answers" in caplog.text


def test_a_call_whose_results_have_nowhere_to_go_samples_nothing(backend):
    calls = []

    class GenerateRecorder:
        @corelm.hookimpl(wrapper=True)
        def generate(self, request):
            calls.append(request)
            return (yield)

    with corelm.get_backend("toy", wrappers=[GenerateRecorder()]) as watched:
        policy = LLMPolicy(watched, input_mode="text", sampling_params=SAMPLING)
        with refused(InvalidRequestError, field="inplace"):
            policy(TensorDict(text=["Hi"]).lock_())
        with refused(InvalidRequestError, field="inplace"):
            policy(TensorDict(text=["Hi"], reward=torch.zeros(3)))
        with refused(InvalidRequestError, field="max_new_tokens"):
            policy.replace(truncation="left", sampling_params={"max_new_tokens": 600})(TensorDict(text=["Hi"]))
        with refused(InvalidRequestError, field="tensordict"):
            policy({"text": ["Hi"]})
        with refused(InvalidRequestError, field="seed"):
            policy.replace(generate=False)(TensorDict(text=["Hi"]), seed=1)
        assert calls == []


def test_a_tokenizers_batch_is_told_how_to_become_a_tensordict(backend):
    policy = LLMPolicy(backend, input_mode="tokens")
    with pytest.raises(InvalidRequestError, match=r"TensorDict\(input_ids=batch\['input_ids'\], attention_mask=batch"):
        policy({"input_ids": [[1]], "attention_mask": [[1]]})


# What users of other libraries type -----------------------------------------------------------------------------------


IDS = torch.tensor([[72, 105]])


@each(
    "given, mode",
    [
        *((["Hello"], "text"), ("Hello", "text"), ({"text": ["Hello"]}, "text"), ({"input_ids": IDS}, "text")),
        *(([{"role": "user", "content": "Hi"}], "history"), (IDS, "tokens")),
        *((History.from_chats([chat("Hi")]), "history"), (corelm.Text(full=["Hi"], batch_size=1), "text")),
    ],
)
def test_an_input_that_is_not_a_tensordict_is_refused_with_the_call_to_make(backend, given, mode):
    policy = LLMPolicy(backend, input_mode=mode)
    for call in (policy, policy.log_prob, policy.get_dist):
        with refused(InvalidRequestError, field="tensordict"):
            call(given)


def test_options_of_a_policy_are_no_sampling_parameters(backend):
    for sampling in ({"top_logprobs": 2}, {"engine_kwargs": {"top_logprobs": 2}}):
        with pytest.raises(InvalidRequestError, match="its option top_logprobs=k"):
            LLMPolicy(backend, sampling_params=sampling)
    with pytest.raises(InvalidRequestError, match=r'sampling_params=\{"top_k": 5\}'):
        LLMPolicy(backend, top_k=5)


def test_our_own_parameters_are_refused_in_engine_kwargs(backend):
    with pytest.raises(InvalidRequestError, match="give num_beams=2 next to it"):
        LLMPolicy(backend, sampling_params={"engine_kwargs": {"num_beams": 2}})
    with pytest.raises(InvalidRequestError, match="give max_new_tokens=3 next to it"):
        SamplingParams(engine_kwargs={"max_tokens": 3})


@each(
    "config, read",
    [
        ({"max_new_tokens": 3}, {"max_new_tokens": 3, "temperature": 0}),
        ({"temperature": 0.7, "top_p": 0.9, "do_sample": False, "num_return_sequences": 1}, {"temperature": 0}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7, "top_k": 50}),
        ({"do_sample": True, "top_k": 0, "min_p": 0.1, "num_return_sequences": 2}, {"min_p": 0.1, "num_samples": 2}),
        ({"eos_token_id": [2, 3], "pad_token_id": 0, "stop_strings": "x"}, {"stop": "x", "stop_token_ids": [2, 3]}),
        ({"max_length": 9, "max_new_tokens": 4, "use_cache": False, "no_repeat_ngram_size": 0}, {"max_new_tokens": 4}),
        ({"num_beams": 2, "length_penalty": 0.5}, {"num_beams": 2, "length_penalty": 0.5}),
        ({"length_penalty": 0.5, "typical_p": 1.0}, {}),
    ],
)
def test_a_generation_config_is_read_as_generate_reads_it(backend, config, read):
    policy = LLMPolicy(backend, sampling_params=GenerationConfig(**config), return_log_probs=False)
    assert policy.options.sampling == SamplingParams.make({"do_sample": config.get("do_sample", False)} | read)


@each(
    "config, field",
    [
        ({"max_length": 9}, "max_length"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"typical_p": 0.5, "do_sample": True}, "typical_p"),
        ({"num_beams": 2, "do_sample": True}, "num_beams"),
    ],
)
def test_a_field_of_a_generation_config_without_an_equal_is_refused(backend, config, field):
    with refused(InvalidRequestError, field=field):
        LLMPolicy(backend, sampling_params=GenerationConfig(**config))


#: Names that `engine_kwargs` do not take either.
OF_ENGINES = ["top_logprobs_num", "logprobs", "until", "pad_token_id", "eos_token_id", "prompt_logprobs", "stream"]


@each(
    "name, said",
    [
        ("top_logprobs_num", "top_logprobs=k"),
        ("logprobs", "log_probs_mode"),
        ("until", "give stop"),
        ("pad_token_id", "leave it out"),
        ("eos_token_id", "stop_token_ids"),
        ("prompt_logprobs", "generate=False"),
        ("stream", "policy.stream"),
        ("generate_kwargs", "give the policy sampling_params="),
        ("history_key", "give keys={'history': …}"),
        ("tokens_key", "give keys={'tokens': …}"),
        ("tokenizer", "give it to get_backend"),
        ("response_format", "extra_body="),
        ("device_map", "model_kwargs={'device_map': …}"),
        ("token", "HF_TOKEN"),
        ("allowed_token_ids", "engine_kwargs': {'allowed_token_ids': …}"),
        ("num_generations", "give num_samples"),
        ("tools", "template_kwargs={'tools': […]}"),
    ],
)
def test_a_name_of_another_library_gets_an_exact_answer(backend, name, said):
    """Some of these names are spelt like one of ours that means something else."""
    with pytest.raises(TypeError, match=re.escape(said)) as error:
        LLMPolicy(backend, **{name: 1})
    assert "did you mean" not in str(error.value)
    of_engines = ({"engine_kwargs": {name: 1}},) if name in OF_ENGINES else ()
    for sampling in ({name: 1}, *of_engines):
        with pytest.raises(InvalidRequestError, match=re.escape(said)):
            LLMPolicy(backend, sampling_params=sampling)
    if name != "tokenizer":
        with pytest.raises(InvalidRequestError, match=re.escape(said)):
            corelm.get_backend("toy", **{name: 1})


def test_a_sampling_parameter_given_as_an_option_is_named_with_the_dict_to_pass(backend):
    with pytest.raises(TypeError, match=r"give sampling_params=\{'max_new_tokens': 4\}"):
        LLMPolicy(backend, max_new_tokens=4)
    policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 3}, num_samples=2)
    with pytest.raises(TypeError, match=r"give sampling_params=\{'max_new_tokens': 3, 'temperature': 0.5\}"):
        policy.replace(temperature=0.5)
    with pytest.raises(TypeError, match="did you mean 'pad_output'"):
        LLMPolicy(backend, pad_outputs=True)
    with pytest.raises(TypeError, match="get_backend"):
        LLMPolicy(backend, tensor_parallel_size=2)
    with pytest.raises(TypeError, match=r"'batching'; give it to .*policy.replace\(batching=…\)"):
        policy(TensorDict(text=["Hi"]), batching=True)
    with pytest.raises(TypeError, match=r"'model'; give it to LLMPolicy\(…, model=…\)"):
        policy.replace(model="m")


def test_a_call_takes_options_and_says_what_to_type_for_others(backend):
    td = TensorDict(text=["Hi"])
    policy = LLMPolicy(backend, input_mode="text", sampling_params={"max_new_tokens": 3, "ignore_eos": True})
    changes = {"num_samples": 2, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    out, same = policy(td, seed=1, **changes), policy.replace(**changes)(td, seed=1)
    assert out["text"].response == same["text"].response and len(policy(td.clone())["tokens"].response[0]) == 3
    stream = policy.stream(td.clone(), pad_output=True)
    assert list(stream) and stream.result["tokens"].padded
    for call in (policy, policy.stream):
        with pytest.raises(TypeError, match=r"give sampling_params=\{'max_new_tokens': 4, 'ignore_eos': True\}"):
            call(td, max_new_tokens=4)
        with pytest.raises(TypeError, match="did you mean 'seed'"):
            call(td, sead=4)
    with refused(InvalidRequestError, field="generate"):
        policy.stream(td, generate=False)
    with pytest.raises(InvalidRequestError, match="only answers can go on, and this policy scores"):
        policy.resume(td, None, generate=False)


def test_a_call_with_options_needs_no_arguments_of_a_subclass(backend):
    class Named(LLMPolicy):
        def __init__(self, backend, name, **options):
            super().__init__(backend, **options)
            self.name = name

    policy = Named(backend, "mine", input_mode="text", sampling_params=SAMPLING)
    assert policy(TensorDict(text=["Hi"]), pad_output=True)["tokens"].padded
    with pytest.raises(TypeError, match="'name'"):
        policy.replace(pad_output=True)


def test_keys_may_be_a_dict(backend):
    assert LLMPolicy(backend, keys={"text": "words"}).options.keys == Keys(text="words")
    with pytest.raises(InvalidRequestError, match="did you mean 'tokens'"):
        LLMPolicy(backend, keys={"token": "ids"})
    with pytest.raises(InvalidRequestError, match="expected Keys or a dict of its fields, got 3"):
        LLMPolicy(backend, keys=3)
    for key in (None, "scores"):
        policy = LLMPolicy(backend, keys=Keys(log_probs=("scores", "full")), log_probs_key=key)
        assert policy.options.keys.log_probs == "scores"


def test_a_compiled_policy_is_refused_in_one_sentence(backend):
    policy, td = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING), TensorDict(text=["Hi"])
    with refused(InvalidRequestError, field="policy"):
        torch.compile(policy, backend="eager")(td)
    # With fullgraph, Dynamo raises our error, or one of its own that repeats it.
    with refused((InvalidRequestError, RuntimeError), field="policy"):
        torch.compile(policy, backend="eager", fullgraph=True)(td)
    with refused(InvalidRequestError, field="policy"):
        policy.compile()


# `PolicyOptions` ------------------------------------------------------------------------------------------------------


GREEDY = {"max_new_tokens": 3, "temperature": 0.0}


def test_num_samples_has_one_home_wherever_it_was_given():
    options = PolicyOptions(sampling_params={"n": 4, **GREEDY})
    assert options.num_samples == 4 and options == PolicyOptions(sampling_params=GREEDY, num_samples=4)
    assert options.sampling.num_samples == 4 and options.writes_in_place is False
    assert options.replace(sampling_params=GREEDY).num_samples == 4
    assert options.replace(sampling_params={"n": 2, **GREEDY}).num_samples == 2
    with refused(InvalidRequestError, field="num_samples"):
        PolicyOptions(sampling_params={"n": 4}, num_samples=2)


def test_samples_of_samples_are_warned_about_and_branches_are_not(backend):
    policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 3}, num_samples=4)
    start = TensorDict(history=History.from_chats([chat("Hi"), chat("Who?")]))
    found = policy(start)
    with pytest.warns(UserWarning, match=r"\(2, 4\) becomes \(2, 4, 4\).*td\[:, 0\]"):
        assert policy(found).batch_size == (2, 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert policy(found[:, 0]).batch_size == (2, 4) and policy(start).batch_size == (2, 4)
        found["history"] = found["history"].full.append({"role": "user", "content": "Why?"})
        assert policy.replace(num_samples=2, inplace=False)(found).batch_size == (2, 4, 2)


def test_options_may_be_a_dict_and_sampling_parameters_in_it_are_named(backend):
    assert LLMPolicy(backend, {"input_mode": "text"}).options == PolicyOptions(input_mode="text")
    with pytest.raises(TypeError, match=r"give sampling_params=\{'max_new_tokens': 8\}"):
        LLMPolicy(backend, {"max_new_tokens": 8})
    with refused(InvalidRequestError, field="options"):
        LLMPolicy(backend, ["text"])


#: A value of each option that is not its default, and which options it needs.
CHANGED: dict[str, object] = {
    "input_mode": "text",
    "generate": False,
    "sampling_params": GREEDY,
    "num_samples": 2,
    "pad_output": True,
    "return_text": False,
    "return_tokens": False,
    "return_masks": False,
    "return_log_probs": False,
    "return_history": True,
    "return_argmax": True,
    "return_support": True,
    "top_logprobs": 2,
    "top_k": 2,
    "support_key": "sampled",
    "log_probs_mode": "processed",
    "prefer_tokens": False,
    "inplace": False,
    "overwrite": True,
    "on_error": "skip",
    "truncation": "left",
    "device": "cpu",
    "keys": Keys(text="words"),
    "log_probs_key": "ref_log_probs",
    "input_key": "messages",
    "attention_mask_key": "mask",
    "chat_template": "chatml",
    "template_kwargs": {"thinking": False},
    "tokenizer_kwargs": {"add_special_tokens": False},
    "completion_boundary": "separate",
    "response_parser": str,
    "continue_final_message": True,
    "tools_key": None,
    "adapter": False,
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("generate", [True, False])
def test_an_option_that_a_policy_would_ignore_is_refused_and_reset_by_replace(generate, name):
    assert set(CHANGED) == set(OPTIONS)
    mode = "tokens" if name == "attention_mask_key" else "history"
    given = {"generate": generate, "input_mode": mode, name: CHANGED[name]}
    refusing = name in ONLY[not generate] or (name == "return_log_probs" and not generate)
    if refusing:
        with refused(InvalidRequestError, field=name):
            PolicyOptions(**given)
        with refused(InvalidRequestError, field=name):
            PolicyOptions(input_mode=mode, generate=not generate).replace(**given)
        return
    options = PolicyOptions(**given)
    if name in ONLY[generate]:
        other = options.replace(generate=not generate)
        assert getattr(other, name) == getattr(PolicyOptions(), name)


def test_the_end_of_a_with_block_closes_only_what_the_policy_opened(backend):
    with LLMPolicy("toy", input_mode="text", sampling_params=GREEDY) as own:
        assert own(TensorDict(text=["Hi"]))["text"].response
    assert own.backend.closed
    with LLMPolicy(backend, input_mode="text", sampling_params=GREEDY, batching=True) as shared:
        assert shared(TensorDict(text=["Hi"]))["text"].response
        with shared.replace(pad_output=True) as inner:
            assert inner.backend is shared.backend
        assert shared.get_batching_state().threads
    assert not backend.closed and not shared.get_batching_state().threads
    with pytest.raises(ZeroDivisionError), LLMPolicy(backend, input_mode="text"):
        raise ZeroDivisionError
    assert LLMPolicy(backend, input_mode="text", sampling_params=GREEDY)(TensorDict(text=["Hi"]))["text"].response


def test_what_a_policy_prints_makes_an_equal_one(backend):
    policy = LLMPolicy(backend, input_mode="tokens", generate=False, log_probs_mode="processed", top_k=3)
    shown = repr(policy).replace(repr(backend), "backend")
    assert eval(shown, {"LLMPolicy": LLMPolicy, "backend": backend}).options == policy.options
