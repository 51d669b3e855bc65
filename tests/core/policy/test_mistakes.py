"""What a policy refuses, naming the field, before anything is sampled; and which bad rows it can skip."""

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import corelm
from corelm import History, LLMPolicy
from corelm.errors import InvalidRequestError, MissingKeyError, ResponseParserWarning
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
