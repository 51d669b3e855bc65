"""What a policy writes and where, what its options change, and how it composes with other modules."""

import torch
from tensordict import TensorDict

import corelm
from corelm import History, LLMPolicy
from corelm.errors import InvalidRequestError
from corelm.policy.options import Keys
from corelm_testing.toy import Bigram
from helpers.each import each
from helpers.refusals import refused
from helpers.sentencepiece import WHOLE, one_after_another, words_of_sentencepiece
from helpers.toy_prompts import QUESTIONS, SAMPLING, TOKENIZER, chat, nested, prompts


def test_outputs_leave_the_other_keys_of_the_input_unchanged(backend):
    td = TensorDict(
        history=History.from_chats([chat(q) for q in QUESTIONS[:2]]),
        reward=torch.ones(2),
        done=torch.zeros(2, 1, dtype=torch.bool),
        action_mask=torch.ones(2, 3, dtype=torch.bool),
        batch_size=[2],
    )
    before = {name: td[name].clone() for name in ("reward", "done", "action_mask")}
    out = LLMPolicy(backend, sampling_params=SAMPLING)(td)
    assert out is td
    for name, value in before.items():
        assert torch.equal(out[name], value)
    fresh = LLMPolicy(backend, sampling_params=SAMPLING, inplace=False)(td.select("history", "reward"))
    assert "reward" not in fresh.keys()
    empty = LLMPolicy(backend, sampling_params=SAMPLING, inplace="empty")(td.select("history", "reward"))
    assert "reward" not in empty.keys() and empty.batch_size == td.batch_size


@each("mode", ["history", "text", "tokens"])
@each("shape", [(), (2,), (2, 1), (0,), (2, 0), (0, 3), (2, 1, 3)])
@each("pad", [False, True])
def test_every_mode_fills_a_batch_of_any_shape(backend, mode, shape, pad):
    td, ids = prompts("history" if mode == "text" else mode, shape)
    if mode == "text":  # a TensorDict takes bare lists of some of the shapes only
        td = LLMPolicy(backend, sampling_params=SAMPLING)(td).select("text")
        ids = [[TOKENIZER.bos_token_id, *row] for row in ids]
    policy = LLMPolicy(backend, input_mode=mode, sampling_params=SAMPLING, pad_output=pad)
    out = policy(td, seed=5)
    assert out is td and out.batch_size == shape
    assert all(key in out.keys(include_nested=True) for key in policy.out_keys)
    answers = corelm.ragged(out, ("tokens", "response")).tolist()
    full = [asked + answer for asked, answer in zip(ids, answers, strict=True)]
    assert corelm.ragged(out, ("tokens", "full")).tolist() == full
    assert corelm.ragged(out, ("masks", "all_attention_mask")).tolist() == [[True] * len(row) for row in full]
    said = [TOKENIZER.decode(answer, skip_special_tokens=True) for answer in answers]
    assert out["text"].response == nested(said, shape)
    ends = ["stop" if answer[-1] == TOKENIZER.eos_token_id else "length" for answer in answers]
    assert out["finish_reason"] == (nested(ends, shape) if ids else [])
    assert out["errors"] == (nested([""] * len(ids), shape) if ids else [])
    if mode == "history":
        assert [turns[-1].content for turns in out["history"].full.chats] == said


@each(
    "change", [lambda made: made, lambda made: made.lock_(), lambda made: TensorDict(dict(made.items()), batch_size=[])]
)
def test_a_new_result_is_the_callers_own_whatever_a_wrapper_keeps_or_returns(change):
    kept = []

    class Keeping:
        @corelm.hookimpl(wrapper=True)
        def to_containers(self, request):
            kept.append(change((yield)))
            return kept[0]

    with corelm.get_backend("toy", wrappers=[Keeping()]) as backend:
        policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING, inplace=False)
        first, second = (policy(TensorDict(text=QUESTIONS[:2], batch_size=[2])) for _ in range(2))
    first["reward"] = torch.ones(2)
    for made in (second, kept[0]):
        assert set(made.keys()) == {"text", "tokens", "masks", "log_probs", "finish_reason", "errors"}
    assert first.batch_size == second.batch_size == (2,) and first["text"].prompt == QUESTIONS[:2]


def test_keys_say_where_containers_are_read_and_written(backend):
    keys = Keys(text=("agent", "text"), log_probs="ref_log_probs")
    td = TensorDict({("agent", "text"): TensorDict(prompt=QUESTIONS[:2], batch_size=[2])}, batch_size=[2])
    policy = LLMPolicy(backend, input_mode="text", keys=keys, sampling_params=SAMPLING)
    assert policy.in_keys == [("agent", "text", "prompt")]
    out = policy(td)
    assert len(out["agent", "text"].response) == 2 and out["ref_log_probs"].scored_mask is not None


def test_truncation_left_cuts_a_prompt_that_is_too_long(backend):
    limit = backend.capabilities.max_context
    text = "x" * limit + "Where is the cat?"
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING)
    with refused(InvalidRequestError, field="prompts", rows=(0,)):
        policy(TensorDict(text=[text]))
    out = policy.replace(truncation="left")(TensorDict(text=[text, "Hi"]))
    prompt = corelm.ragged(out, ("tokens", "prompt")).tolist()
    assert len(prompt[0]) == limit - 12 and prompt[0] == list(text.encode())[-(limit - 12) :]
    assert out["text"].prompt == [text[-(limit - 12) :], "Hi"]


def test_a_stop_string_cuts_no_text_that_eos_ended(backend):
    # " " occurs only before min_new_tokens, and the long stop string never: neither may cut the text.
    sampling = {"max_new_tokens": 40, "min_new_tokens": 12, "stop": [" ", "z" * 25]}
    policy = LLMPolicy(backend, input_mode="text", sampling_params=sampling, inplace=False)
    out = policy(TensorDict(text=["The tea"] * 16), seed=1)
    ended = [row for row, ids in enumerate(out["tokens"].response) if int(ids[-1]) == TOKENIZER.eos_token_id]
    assert ended
    for row in ended:
        assert out["text"].response[row] == TOKENIZER.decode(
            out["tokens"].response[row].tolist(), skip_special_tokens=True
        )


def test_a_stop_string_of_several_bytes_is_cut_off(backend):
    table = torch.full((260, 260), -20.0)
    for now, then in zip([ord("a"), *"é".encode()], [*"é".encode(), ord("b")], strict=True):
        table[now, then] = 20.0
    with corelm.get_backend("toy", Bigram(table)) as spoken:
        policy = LLMPolicy(spoken, input_mode="text", sampling_params={"max_new_tokens": 5, "stop": "é"})
        out = policy(TensorDict(text=["a"]), seed=0)
    assert out["finish_reason"] == ["stop"] and bytes(out["tokens"].response[0].tolist()).decode() == "é"
    assert out["text"].response == [""]


def test_a_stop_string_that_can_never_match_is_refused(backend):
    policy = LLMPolicy(backend, input_mode="text", sampling_params={"max_new_tokens": 4, "stop": "<|im_start|>"})
    with refused(InvalidRequestError, field="stop"):
        policy(TensorDict(text=["a"]))
    allowed = {"max_new_tokens": 4, "stop": "<|im_start|>", "skip_special_tokens": False}
    assert policy.replace(sampling_params=allowed)(TensorDict(text=["a"]))["finish_reason"]


def test_a_seed_fixes_each_answer_independently_of_the_other_rows(backend):
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING, inplace=False)
    read = lambda out: corelm.ragged(out, ("tokens", "response")).tolist()  # noqa: E731
    starts = [question[:-1] + " " for question in QUESTIONS]  # after "?" the bigram model always ends
    three = read(policy(TensorDict(text=starts[:3]), seed=9))
    assert read(policy(TensorDict(text=starts[:3]), seed=9)) == three
    assert read(policy(TensorDict(text=starts[:3]), seed=10)) != three
    assert read(policy(TensorDict(text=[*starts[:2], "other"]), seed=9))[:2] == three[:2]
    more = read(policy.replace(num_samples=4)(TensorDict(text=starts[:3]), seed=9))
    assert more[::4] == three and len({tuple(a) for a in more[:4]}) > 1
    fixed = policy.replace(sampling_params={**SAMPLING, "seed": 9})
    assert read(fixed(TensorDict(text=starts[:3]))) == read(fixed(TensorDict(text=starts[:3]))) == three
    assert read(fixed(TensorDict(text=starts[:3]), seed=10)) == read(policy(TensorDict(text=starts[:3]), seed=10))
    torch.manual_seed(0)
    first, second = (read(policy(TensorDict(text=starts[:3]))) for _ in range(2))
    torch.manual_seed(0)
    assert read(policy(TensorDict(text=starts[:3]))) == first != second


def test_a_sampled_text_is_scored_as_it_was_sampled():
    with corelm.get_backend("toy", one_after_another(), tokenizer=words_of_sentencepiece()) as backend:
        policy = LLMPolicy(backend, input_mode="text", sampling_params={"max_new_tokens": 3, "temperature": 0})
        sampled = policy(TensorDict(text=["Hello"]))
        with policy.stream(TensorDict(text=["Hello"])) as stream:
            streamed = "".join(chunk.text for chunk in stream)
        given = TensorDict(text=sampled["text"].full)
        scored = LLMPolicy(backend, input_mode="text", generate=False)(given)
    assert sampled["text"].response == [streamed] and streamed.startswith(" my friend")
    assert WHOLE.startswith(sampled["text"].full[0].rstrip("\ufffd"))
    ids, scores = (corelm.ragged(scored, (name, "full")).tolist()[0] for name in ("tokens", "log_probs"))
    assert ids[:3] == corelm.ragged(sampled, ("tokens", "full")).tolist()[0][:3]
    assert scores[1:3] == corelm.ragged(sampled, ("log_probs", "response")).tolist()[0][:2]


def test_an_answer_completes_the_character_that_its_prompt_has_begun():
    with corelm.get_backend("toy", one_after_another(), tokenizer=words_of_sentencepiece()) as backend:
        policy = LLMPolicy(backend, input_mode="tokens", sampling_params={"max_new_tokens": 2, "temperature": 0})
        out = policy(TensorDict(tokens=TensorDict(prompt=torch.tensor([[2, 5]]), batch_size=[1]), batch_size=[1]))
    assert (out["text"].prompt, out["text"].response, out["text"].full) == (["Hello"], ["é."], ["Helloé."])


def test_a_message_begins_without_the_space_that_its_template_writes():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with corelm.get_backend("toy", one_after_another(), tokenizer=words_of_sentencepiece(template)) as backend:
        policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 2, "temperature": 0})
        td = TensorDict(history=History.from_chats([[{"role": "user", "content": "Hello"}]]))
        with policy.stream(td.clone()) as stream:
            streamed = "".join(chunk.text for chunk in stream)
        out = policy(td)
    assert out["text"].full == ["Hello my friend"]
    content = out["history"].response.chats[0][0].content
    assert content == out["text"].response[0] == streamed == "my friend"
