"""LLMPolicy on the toy backend: every cell filled the same way, and every number what the bigram table says."""

import asyncio
import copy
import itertools
import pickle

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack
from tensordict.nn import TensorDictSequential
from toy_backend import Bigram, ByteTokenizer

import corelm
from corelm import History, LLMPolicy, Message, SamplingParams
from corelm.errors import (
    BackendClosedError,
    CapabilityError,
    InvalidRequestError,
    MissingKeyError,
)
from corelm.inputs import Keys

TABLE = Bigram.of_talk().table.detach().double().log_softmax(-1)
TOKENIZER = ByteTokenizer()
QUESTIONS = ["Where is the cat?", "Is the tea hot?", "Who?", "When is it dark?"]
SAMPLING = {"max_new_tokens": 12}


@pytest.fixture(scope="module")
def backend():
    with corelm.get_backend("toy") as opened:
        yield opened


def chat(question):
    return [{"role": "user", "content": question}]


def oracle(ids):
    """float64: the bigram's log-probability of every id but the first."""
    return TABLE[ids[:-1], ids[1:]]


def nested(values, shape):
    if not shape:
        return values[0]
    step = len(values) // shape[0] if shape[0] else 0
    return [nested(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def flat(value):
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, list) else [value]


def prompts(mode, shape):
    """A TensorDict with prompts in the place `mode` reads, and the ids that must come of them."""
    count = int(torch.Size(shape).numel())
    questions = (QUESTIONS * count)[:count]
    rendered = [TOKENIZER.apply_chat_template(chat(q), add_generation_prompt=True) for q in questions]
    if mode == "history":
        td = TensorDict(history=History.of([chat(q) for q in questions], shape), batch_size=shape)
        return td, [TOKENIZER([text], add_special_tokens=False)["input_ids"][0] for text in rendered]
    if mode == "text":
        ids = TOKENIZER(questions)["input_ids"] if questions else []
        td = TensorDict({}, batch_size=shape)
        td["text"] = nested(questions, shape) if count else []
        return td, ids
    width = 5
    ids = [[(7 * row + column) % 256 for column in range(width)] for row in range(count)]
    tokens = torch.tensor(ids, dtype=torch.int64).reshape(*shape, width)
    return TensorDict(tokens=tokens, batch_size=shape), ids


GENERATED = {
    "text": ["full", "prompt", "response"],
    "tokens": ["full", "padded", "prompt", "response"],
    "masks": ["all_assistant_mask", "all_attention_mask", "all_response_mask", "padded"],
    "log_probs": ["full", "padded", "prompt", "provenance", "response", "scored_mask"],
    "history": ["full", "prompt", "response"],
}


def fields_of(td):
    """What is really there, by container; `padded` and `provenance` describe and are not keys of their own."""
    names = [n for n in td.keys() if n in GENERATED]
    return {name: {f for f in GENERATED[name] if getattr(td[name], f) is not None} for name in names}


def expected_fields(mode, generate, log_probs, count):
    full = {"text": {"full"}, "tokens": {"full", "padded"}, "masks": {"all_attention_mask", "padded"}}
    fields = {k: set(v) for k, v in GENERATED.items()} if generate else full
    if not generate:
        fields["log_probs"] = {"full", "padded", "provenance", "scored_mask"}
        if mode == "history":
            fields["masks"].add("all_assistant_mask")
            fields["history"] = {"full"}
    if count == 0:
        # No rows have no provenance.
        fields.get("log_probs", set()).discard("provenance")
    if mode != "history":
        fields.pop("history", None)
    if not log_probs:
        fields.pop("log_probs")
    return fields


CELLS = list(itertools.product(["history", "text", "tokens"], [False, True], [None, 1, 2], [(), (0,), (3,), (2, 2)]))


@pytest.mark.parametrize(("mode", "pad", "samples", "shape"), CELLS)
@pytest.mark.parametrize("log_probs", [True, False])
def test_generating_fills_every_cell_the_same_way(backend, mode, pad, samples, shape, log_probs):
    td, ids = prompts(mode, shape)
    policy = LLMPolicy(
        backend,
        input_mode=mode,
        pad_output=pad,
        num_samples=samples,
        return_log_probs=log_probs,
        sampling_params=SAMPLING,
    )
    out = policy(td, seed=5)
    shape = (*shape, samples) if samples else shape
    count = int(torch.Size(shape).numel())
    assert tuple(out.batch_size) == shape and (out is td) == (samples is None)
    assert fields_of(out) == expected_fields(mode, True, log_probs, count)
    for key in policy.out_keys:
        assert key in out.keys(include_nested=True), key
    assert out["finish_reason"] is not None and flat(out["errors"]) == [""] * count
    assert set(flat(out["finish_reason"])) <= {"stop", "length"}

    rows = lambda *key: corelm.ragged(out, key).tolist()  # noqa: E731
    asked = [row for row in ids for _ in range(samples or 1)]
    assert rows("tokens", "prompt") == asked
    answers = rows("tokens", "response")
    assert rows("tokens", "full") == [a + b for a, b in zip(asked, answers, strict=True)]
    assert all(1 <= len(answer) <= 12 for answer in answers)
    assert rows("masks", "all_attention_mask") == [
        [True] * (len(a) + len(b)) for a, b in zip(asked, answers, strict=True)
    ]
    only_answers = [[False] * len(a) + [True] * len(b) for a, b in zip(asked, answers, strict=True)]
    assert rows("masks", "all_response_mask") == rows("masks", "all_assistant_mask") == only_answers
    for text, answer in zip(flat(out["text"].response), answers, strict=True):
        assert text == TOKENIZER.decode(answer, skip_special_tokens=True)
    joined = [a + b for a, b in zip(flat(out["text"].prompt), flat(out["text"].response), strict=True)]
    assert flat(out["text"].full) == joined
    if mode == "history":
        for full, text, answer in zip(out["history"].full.chats, flat(out["text"].response), answers, strict=True):
            assert full[-1] == Message("assistant", text, token_ids=tuple(answer)) and full[0].role == "user"
    if log_probs:
        assert rows("log_probs", "scored_mask") == only_answers
        for full, logp, ids_ in zip(
            rows("log_probs", "full"), rows("log_probs", "response"), rows("tokens", "full"), strict=True
        ):
            start = len(ids_) - len(logp)
            assert full == [0.0] * start + logp
            torch.testing.assert_close(torch.tensor(logp).double(), oracle(ids_)[start - 1 :], atol=1e-5, rtol=0)
        made = out["log_probs"].provenance
        assert count == 0 or made.distribution == ("raw", 1.0, "full", ())
    if pad and count:
        width = out["tokens"].prompt.shape[-1] + out["tokens"].response.shape[-1]
        for name in ("tokens", "masks", "log_probs") if log_probs else ("tokens", "masks"):
            for field in out[name].keys():
                if field in ("full", "scored_mask") or field.startswith("all_"):
                    assert getattr(out[name], field).shape == (*shape, width), (name, field)


@pytest.mark.parametrize(("mode", "pad", "shape"), [(m, p, s) for m, p, n, s in CELLS if n is None])
def test_scoring_fills_every_cell_the_same_way(backend, mode, pad, shape):
    td, ids = prompts(mode, shape)
    if mode == "history":
        ids = [
            TOKENIZER([TOKENIZER.apply_chat_template(c)], add_special_tokens=False)["input_ids"][0]
            for c in map(chat, (QUESTIONS * 4)[: len(ids)])
        ]
    policy = LLMPolicy(backend, input_mode=mode, pad_output=pad, generate=False)
    out = policy(td)
    assert out is td and tuple(out.batch_size) == shape
    assert fields_of(out) == expected_fields(mode, False, True, len(ids))
    for key in policy.out_keys:
        assert key in out.keys(include_nested=True), key
    assert "finish_reason" not in out.keys()
    assert corelm.ragged(out, ("tokens", "full")).tolist() == ids
    for row, logp, scored in zip(
        ids,
        corelm.ragged(out, ("log_probs", "full")).tolist(),
        corelm.ragged(out, ("log_probs", "scored_mask")).tolist(),
        strict=True,
    ):
        assert scored == [False] + [True] * (len(row) - 1) and logp[0] == 0.0
        torch.testing.assert_close(torch.tensor(logp[1:]).double(), oracle(row), atol=1e-5, rtol=0)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("samples", [None, 2])
def test_what_was_generated_is_what_is_scored(backend, pad, samples):
    td, _ = prompts("history", (3,))
    policy = LLMPolicy(backend, pad_output=pad, num_samples=samples, sampling_params=SAMPLING)
    out = policy(td, seed=1)
    by_tokens = policy.replace(input_mode="tokens", generate=False, inplace=False)(out)
    by_history = policy.replace(generate=False, inplace=False)(out)
    sampled, answered = corelm.ragged(out, ("log_probs", "full")), corelm.ragged(out, ("log_probs", "scored_mask"))
    for scored in (by_tokens, by_history):
        assert corelm.ragged(scored, ("tokens", "full")).tolist() == corelm.ragged(out, ("tokens", "full")).tolist()
        again = corelm.ragged(scored, ("log_probs", "full"))
        torch.testing.assert_close(again.values[answered.values], sampled.values[answered.values], atol=1e-5, rtol=0)
        assert corelm.ragged(scored, ("masks", "all_assistant_mask")).tolist() == answered.tolist()
    # A history that stands beside its own tokens keeps their split and, if they are dense, their columns.
    for scored in (by_tokens, by_history):
        assert scored["log_probs"].prompt is not None
        if pad:
            assert torch.equal(scored["tokens"].full, out["tokens"].full)
            assert torch.equal(scored["masks"].all_attention_mask, out["masks"].all_attention_mask)
            assert torch.equal(scored["tokens"].response, out["tokens"].response)
    alone = policy.replace(generate=False, inplace=False)(out.select("history"))
    assert alone["log_probs"].prompt is None
    told = History.of(
        [[*c[:-1], {"role": "assistant", "content": "Else."}] for c in out["history"].full.chats], out.shape
    )
    stale = policy.replace(generate=False, inplace=False)(out.copy().set("history", told))
    assert stale["log_probs"].prompt is None


def test_scoring_in_place_keeps_what_generation_wrote(backend):
    policy = LLMPolicy(backend, pad_output=True, sampling_params=SAMPLING)
    out = policy(prompts("history", (3,))[0], seed=1)
    before = out["tokens"].response.clone()
    reference = policy.replace(generate=False, keys=Keys(log_probs="ref_log_probs"))(out)
    assert reference is out and torch.equal(out["tokens"].response, before)
    assert out["masks"].all_response_mask is not None
    mask = out["log_probs"].scored_mask
    torch.testing.assert_close(out["ref_log_probs"].full[mask], out["log_probs"].full[mask], atol=1e-5, rtol=0)
    dist = policy.replace(generate=False).get_dist(out, mask="response")
    assert torch.equal(dist.mask, out["masks"].all_response_mask)


def test_three_turns_never_change_an_id(backend):
    policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 20}, inplace=False)
    history = History.from_chats([chat(q) for q in QUESTIONS])
    before = [[]] * len(QUESTIONS)
    for turn in range(3):
        out = policy(TensorDict(history=history), seed=turn)
        full = corelm.ragged(out, ("tokens", "full")).tolist()
        for earlier, now in zip(before, corelm.ragged(out, ("tokens", "prompt")).tolist(), strict=True):
            assert now[: len(earlier)] == earlier
        scored = policy.replace(generate=False)(TensorDict(history=out["history"].full))
        assert corelm.ragged(scored, ("tokens", "full")).tolist() == full
        before = full
        history = out["history"].full.append({"role": "user", "content": "And then?"})


def test_rendering_sampled_turns_from_their_text_is_said(backend):
    policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 4, "ignore_eos": True}, inplace=False)
    first = policy(TensorDict(history=History.from_chats([chat(q) for q in QUESTIONS[:2]])), seed=1)
    assert "retokenized" not in first.keys() and "retokenized" not in policy.out_keys
    again = policy.replace(prefer_tokens=False, generate=False)
    assert "retokenized" in again.out_keys
    mixed = History.of([first["history"].full.chats[0], first["history"].prompt.chats[1]], (2,))
    assert again(TensorDict(history=mixed))["retokenized"].tolist() == [True, False]


def test_seeds_belong_to_answers(backend):
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING, inplace=False)
    read = lambda out: corelm.ragged(out, ("tokens", "response")).tolist()  # noqa: E731
    starts = [question[:-1] + " " for question in QUESTIONS]  # after "?" the bigram always ends
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


def test_bare_and_nested_inputs_are_the_same_prompts(backend):
    for mode, bare, inner in (
        ("text", QUESTIONS[:2], QUESTIONS[:2]),
        ("history", History.from_chats([chat(q) for q in QUESTIONS[:2]]), None),
        ("tokens", torch.tensor([[72, 105], [72, 111]]), None),
    ):
        policy = LLMPolicy(backend, input_mode=mode, sampling_params=SAMPLING)
        one = policy(TensorDict({mode: bare}), seed=1)
        two = policy(
            TensorDict({mode: TensorDict(prompt=bare if inner is None else inner, batch_size=[2])}, batch_size=[2]),
            seed=1,
        )
        assert tuple(one.batch_size) == tuple(two.batch_size) == (2,)
        assert one["text"].response == two["text"].response


def test_a_single_prompt_has_no_batch(backend):
    out = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING)(TensorDict(text=QUESTIONS[0]))
    assert out.batch_size == () and isinstance(out["text"].response, str) and out["tokens"].response.ndim == 1
    assert isinstance(out["finish_reason"], str)


def test_tokens_with_a_mask_leave_the_pads_out(backend):
    tokens = torch.tensor([[256, 256, 72, 105], [72, 101, 108, 256]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
    td = TensorDict({"tokens": tokens, ("masks", "all_attention_mask"): mask}, batch_size=[2])
    policy = LLMPolicy(backend, input_mode="tokens", generate=False, pad_output=True, inplace=False)
    out = policy(td)
    assert corelm.ragged(out, ("tokens", "full")).tolist() == [[72, 105], [72, 101, 108]]
    assert torch.equal(out["masks"].all_attention_mask, mask)
    assert out["log_probs"].scored_mask.tolist() == [[False, False, False, True], [False, True, True, False]]


def test_masks_of_zeros_and_ones_are_masks_and_others_are_refused(backend):
    tokens = torch.tensor([[256, 256, 72, 105], [72, 101, 108, 256]])
    policy = LLMPolicy(backend, input_mode="tokens", generate=False, inplace=False)
    whole = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    out = policy(TensorDict({"tokens": tokens, ("masks", "all_attention_mask"): whole}, batch_size=[2]))
    assert corelm.ragged(out, ("tokens", "full")).tolist() == [[72, 105], [72, 101, 108]]
    with pytest.raises(InvalidRequestError, match="their attention mask is"):
        policy(TensorDict({"tokens": tokens, ("masks", "all_attention_mask"): whole[:, :3]}, batch_size=[2]))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("generate", [True, False])
def test_what_is_written_to_the_input_afterwards_does_not_show(backend, padded, generate):
    ids = [[65, 66, 67], [70, 71]]
    given = TensorDict(tokens=torch.tensor([[65, 66, 67], [70, 71, 72]]), batch_size=[2])
    if not padded:
        given = lazy_stack([TensorDict(tokens=torch.tensor(row)) for row in ids])
    policy = LLMPolicy(backend, input_mode="tokens", generate=generate, sampling_params=SAMPLING, inplace=False)
    part = "prompt" if generate else "full"
    out = policy(given)
    rows = [given["tokens"]] if padded else given.get("tokens", as_list=True)
    expected = [row.tolist() for row in (rows[0] if padded else rows)]
    for row in rows:
        row.zero_()
    assert [row.tolist() for row in getattr(out["tokens"], part)] == expected


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 2)])
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("pad", [True, False])
def test_no_rows_stay_no_rows_in_every_mode(backend, shape, mode, pad):
    out = LLMPolicy(backend, pad_output=pad, sampling_params=SAMPLING)(TensorDict(history=History.of([], shape)))
    scorer = LLMPolicy(backend, input_mode=mode, generate=False, pad_output=pad, inplace=False)
    assert tuple(scorer(out).batch_size) == shape
    assert tuple(scorer.get_dist(out).batch_shape[:-1]) == shape


def test_bare_rows_of_different_lengths_are_read_in_place(backend):
    policy = LLMPolicy(backend, input_mode="tokens", sampling_params=SAMPLING)
    out = policy(TensorDict(tokens=[[72], [72, 105]]))
    assert tuple(out.batch_size) == (2,) and [len(p) for p in out["tokens"].prompt] == [1, 2]
    stacked = lazy_stack([TensorDict(tokens=torch.tensor(row)) for row in ([72], [72, 105])])
    assert corelm.ragged(policy(stacked), ("tokens", "prompt")).tolist() == [[72], [72, 105]]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("generate", [True, False])
def test_a_callers_inference_mode_changes_nothing(backend, mode, generate):
    with mode():
        out = LLMPolicy(backend, input_mode="text", generate=generate, sampling_params=SAMPLING)(
            TensorDict(text=["Hi"])
        )
        batch = backend.score_logprobs([[72, 105], [999]], on_error="skip")
    for tensor in (out["tokens"].full[0], out["log_probs"].full[0], out["masks"].all_attention_mask[0]):
        assert not tensor.is_inference()
        tensor.add_(1) if tensor.dtype != torch.bool else tensor.logical_not_()
    assert not batch.logprobs.values.is_inference()


# Mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("generate", [True, False])
def test_a_missing_key_is_named_beside_those_that_are_there(backend, mode, generate):
    part = "prompt" if generate else "full"
    policy = LLMPolicy(backend, input_mode=mode, generate=generate)
    with pytest.raises(MissingKeyError, match=rf"no '{mode}.{part}'; it has: reward") as error:
        policy(TensorDict(reward=torch.zeros(2)))
    assert isinstance(error.value, KeyError) and error.value.field == f"{mode}.{part}"
    with pytest.raises(MissingKeyError, match=part):
        policy(TensorDict({mode: TensorDict(other=torch.zeros(2, 3), batch_size=[2])}))


@pytest.mark.parametrize(
    ("arguments", "field"),
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
        ({"model": "twice"}, "model"),
        ({"sampling_params": {"temprature": 1}}, "temprature"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(backend, arguments, field):
    with pytest.raises(InvalidRequestError) as error:
        LLMPolicy(backend, **arguments)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("mode", "value"),
    [("text", [3]), ("text", torch.zeros(2)), ("history", ["hello"]), ("tokens", torch.zeros(2, 2)), ("tokens", ["a"])],
)
def test_a_value_of_another_kind_is_refused(backend, mode, value):
    with pytest.raises(InvalidRequestError, match=mode):
        LLMPolicy(backend, input_mode=mode)(TensorDict({mode: value}))


def test_a_batch_that_contradicts_the_tensordict_is_refused(backend):
    td = TensorDict(history=History.from_chats([[chat(q)] for q in QUESTIONS[:2]]), batch_size=[2])
    with pytest.raises(InvalidRequestError, match=r"its batch is \(2, 1\), but the TensorDict's is \(2,\)"):
        LLMPolicy(backend)(td)
    bare = TensorDict(text=QUESTIONS[:2], reward=torch.zeros(3))
    with pytest.raises(InvalidRequestError, match="does not fit the input"):
        LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING)(bare)


def test_unknown_arguments_are_errors(backend):
    with pytest.raises(TypeError, match="pad_outputs"):
        LLMPolicy(backend, pad_outputs=True)
    with pytest.raises(TypeError, match="pad_outputs"):
        LLMPolicy(backend).replace(pad_outputs=True)


def test_a_bad_row_is_skipped_in_place_and_the_others_are_served(backend):
    tokens = TensorDict(tokens=torch.tensor([[72, 105], [72, 999], [72, 111]]), batch_size=[3])
    policy = LLMPolicy(backend, input_mode="tokens", sampling_params=SAMPLING, inplace=False)
    with pytest.raises(InvalidRequestError, match="row 1: id 999"):
        policy(tokens)
    out = policy.replace(on_error="skip", return_text=False)(tokens, seed=1)
    alone = policy(TensorDict(tokens=tokens["tokens"][:1], batch_size=[1]), seed=1)
    assert list(out["finish_reason"])[1] == "error" and "999" in list(out["errors"])[1]
    assert len(out["tokens"].response[1]) == 0 and out["errors"][0] == ""
    assert torch.equal(out["tokens"].response[0], alone["tokens"].response[0])
    scored = policy.replace(on_error="skip", generate=False, return_text=False)(tokens)
    assert not scored["log_probs"].scored_mask[1].any() and scored["log_probs"].scored_mask[2].tolist() == [False, True]
    assert "999" in list(scored["errors"])[1]


def test_skipping_serves_the_rows_that_can_be_read(backend):
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING, inplace=False)
    mixed = TensorDict(text=NonTensorStack("Hi", 3, "Ho"))
    with pytest.raises(InvalidRequestError, match="row 1: expected a str, got int"):
        policy(mixed)
    out = policy.replace(on_error="skip")(mixed, seed=1)
    assert out["finish_reason"][1] == "error" and "expected a str" in out["errors"][1]
    assert out["text"].response[2] and out["errors"][0] == out["errors"][2] == ""

    class Picky(ByteTokenizer):
        def apply_chat_template(self, conversation, **options):
            if not conversation:
                raise ValueError("nothing was said")
            return super().apply_chat_template(conversation, **options)

    with corelm.get_backend("toy", tokenizer=Picky()) as picky:
        chats = TensorDict(history=History.of([chat("Hi"), [], chat("Ho")], (3,)))
        out = LLMPolicy(picky, sampling_params=SAMPLING, inplace=False, on_error="skip")(chats)
        assert out["finish_reason"][1] == "error" and "nothing was said" in out["errors"][1]
        assert len(out["tokens"].response[1]) == 0 and len(out["tokens"].response[2]) > 0
        scored = LLMPolicy(picky, generate=False, inplace=False, on_error="skip")(chats)
        assert "nothing was said" in scored["errors"][1] and scored["log_probs"].scored_mask[2].any()


def test_a_parser_that_fails_loses_no_answer_when_rows_are_skipped(backend):
    def parser(text):
        if not text:
            raise KeyError("empty")
        return {"role": "assistant", "content": text}

    chats = TensorDict(history=History.of([chat("Where?"), chat("Who")], (2,)))
    policy = LLMPolicy(backend, sampling_params=SAMPLING, inplace=False, response_parser=lambda text: {}["answer"])
    with pytest.raises(InvalidRequestError, match="response_parser: row 0: KeyError") as error:
        policy(chats)
    assert error.value.rows == (0, 1)
    out = policy.replace(on_error="skip")(chats)
    assert all("KeyError" in text for text in out["errors"])
    assert [c[-1].content for c in out["history"].full.chats] == out["text"].response


def test_nothing_is_sampled_for_results_that_have_no_place(backend):
    calls = []

    class Watch:
        @corelm.hookimpl(wrapper=True)
        def generate(self, request):
            calls.append(request)
            return (yield)

    with corelm.get_backend("toy", plugins=[Watch()]) as watched:
        policy = LLMPolicy(watched, input_mode="text", sampling_params=SAMPLING)
        with pytest.raises(InvalidRequestError, match="locked"):
            policy(TensorDict(text=["Hi"]).lock_())
        with pytest.raises(InvalidRequestError, match="does not fit"):
            policy(TensorDict(text=["Hi"], reward=torch.zeros(3)))
        with pytest.raises(InvalidRequestError, match="leave no room"):
            policy.replace(truncation="left", sampling_params={"max_new_tokens": 600})(TensorDict(text=["Hi"]))
        with pytest.raises(InvalidRequestError, match="expected a TensorDict"):
            policy({"text": ["Hi"]})
        with pytest.raises(InvalidRequestError, match="seed"):
            policy.replace(generate=False)(TensorDict(text=["Hi"]), seed=1)
        assert calls == []


def test_it_keeps_what_it_was_given_and_not_what_became_of_it(backend):
    sampling = {"max_new_tokens": 3}
    policy = LLMPolicy(backend, sampling_params=sampling)
    sampling["max_new_tokens"] = 7
    assert policy.replace(pad_output=True).sampling_params.max_new_tokens == 3


def test_an_open_engine_is_not_copied(backend):
    for copier in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copier(LLMPolicy(backend))


# What it does to what it is given ------------------------------------------------------------------------------------


def test_it_writes_beside_what_is_there(backend):
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


def test_keys_can_be_elsewhere(backend):
    keys = Keys(text=("agent", "text"), log_probs="ref_log_probs")
    td = TensorDict({("agent", "text"): TensorDict(prompt=QUESTIONS[:2], batch_size=[2])}, batch_size=[2])
    policy = LLMPolicy(backend, input_mode="text", keys=keys, sampling_params=SAMPLING)
    assert policy.in_keys == [("agent", "text", "prompt")]
    out = policy(td)
    assert len(out["agent", "text"].response) == 2 and out["ref_log_probs"].scored_mask is not None


def test_it_is_a_module_among_modules(backend):
    policy = LLMPolicy(backend, sampling_params=SAMPLING)
    scorer = policy.replace(input_mode="tokens", generate=False, keys=Keys(log_probs="ref_log_probs"))
    out = TensorDictSequential(policy, scorer)(
        TensorDict(history=History.from_chats([chat(QUESTIONS[0])]), batch_size=[1])
    )
    assert {"log_probs", "ref_log_probs"} <= set(out.keys())
    assert "LLMPolicy" in repr(policy)


def test_replace_shares_the_engine_and_mutates_nothing(backend):
    policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 3}, num_samples=2)
    other = policy.get_new_version(sampling_params={"max_new_tokens": 5, "n": 4})
    assert other.backend is policy.backend
    assert policy.sampling_params == SamplingParams(max_new_tokens=3, num_samples=2)
    assert other.sampling_params == SamplingParams(max_new_tokens=5, num_samples=4)


def test_closing_is_for_everyone():
    policy = LLMPolicy("toy", input_mode="text", sampling_params=SAMPLING)
    other = policy.replace(pad_output=True)
    with policy:
        other(TensorDict(text=["Hi"]))
    with pytest.raises(BackendClosedError):
        other(TensorDict(text=["Hi"]))


def test_it_can_be_awaited(backend):
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING, inplace=False)

    async def both():
        return await asyncio.gather(*(policy.aforward(TensorDict(text=[q]), seed=2) for q in QUESTIONS[:2]))

    for question, out in zip(QUESTIONS, asyncio.run(both()), strict=False):
        assert out["text"].response == policy(TensorDict(text=[question]), seed=2)["text"].response


# Options -------------------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_too_long_can_be_cut_from_the_left(backend):
    limit = backend.capabilities.max_context
    text = "x" * limit + "Where is the cat?"
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING)
    with pytest.raises(InvalidRequestError, match="do not fit the context"):
        policy(TensorDict(text=[text]))
    out = policy.replace(truncation="left")(TensorDict(text=[text, "Hi"]))
    prompt = corelm.ragged(out, ("tokens", "prompt")).tolist()
    assert len(prompt[0]) == limit - 12 and prompt[0] == list(text.encode())[-(limit - 12) :]
    assert out["text"].prompt == [text[-(limit - 12) :], "Hi"]


def test_a_stop_string_ends_the_text_and_stays_in_the_ids(backend):
    policy = LLMPolicy(backend, input_mode="text", sampling_params={"max_new_tokens": 60, "stop": "the"})
    out = policy(TensorDict(text=["Where is "] * 8), seed=3)
    stopped = [row for row in range(8) if "the" in TOKENIZER.decode(out["tokens"].response[row].tolist())]
    assert stopped
    for row in stopped:
        whole = TOKENIZER.decode(out["tokens"].response[row].tolist())
        assert whole.endswith("the") and out["text"].response[row] == whole[:-3]
        assert out["finish_reason"][row] == "stop" and len(out["log_probs"].response[row]) == len(whole)


def test_text_ends_where_the_stop_string_that_ended_it_begins(backend):
    # " " occurs before min_new_tokens, and the long one never: neither may cut the text of an answer that EOS ended.
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


def test_a_stop_string_that_could_do_nothing_is_refused(backend):
    policy = LLMPolicy(backend, input_mode="text", sampling_params={"max_new_tokens": 4, "stop": "<|im_start|>"})
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        policy(TensorDict(text=["a"]))
    allowed = {"max_new_tokens": 4, "stop": "<|im_start|>", "skip_special_tokens": False}
    assert policy.replace(sampling_params=allowed)(TensorDict(text=["a"]))["finish_reason"]


def test_processed_log_probs_are_of_what_was_sampled_from(backend):
    sampling = {"max_new_tokens": 8, "temperature": 0.5, "top_k": 3}
    policy = LLMPolicy(backend, input_mode="text", sampling_params=sampling, log_probs_mode="processed")
    out = policy(TensorDict(text=["Is"]), seed=1)
    ids = out["tokens"].full[0].tolist()
    for position, value in zip(range(len(ids) - 8, len(ids)), out["log_probs"].response[0].tolist(), strict=True):
        best = (TABLE[ids[position - 1]] / 0.5).topk(3)
        assert value == pytest.approx(float(best.values.log_softmax(-1)[best.indices == ids[position]]), abs=1e-5)
    assert out["log_probs"].provenance.distribution == ("processed", 0.5, "truncated", ())


def test_scoring_at_a_temperature_is_processed(backend):
    policy = LLMPolicy(
        backend, input_mode="text", generate=False, log_probs_mode="processed", sampling_params={"temperature": 2.0}
    )
    out = policy(TensorDict(text=["cat"]))
    ids = out["tokens"].full[0]
    expected = (TABLE[ids[:-1]] / 2).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    torch.testing.assert_close(out["log_probs"].full[0][1:].double(), expected, atol=1e-5, rtol=0)
    assert out["log_probs"].provenance.distribution == ("processed", 2.0, "full", ())
    with pytest.raises(CapabilityError, match="truncation"):
        policy.replace(sampling_params={"top_k": 3})(TensorDict(text=["cat"]))


def test_a_response_parser_makes_the_message(backend):
    parser = lambda text: {"role": "assistant", "content": text.upper(), "tool_calls": [{"name": "look"}]}  # noqa: E731
    out = LLMPolicy(backend, sampling_params=SAMPLING, response_parser=parser)(
        TensorDict(history=History.from_chats([chat("Who?")]))
    )
    (message,) = out["history"].response.chats[0]
    assert message.content == out["text"].response[0].upper() and message.tool_calls[0]["name"] == "look"
    assert list(message.token_ids) == out["tokens"].response[0].tolist()


# Distributions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["attention", "assistant", "response", "tensor"])
@pytest.mark.parametrize("pad", [True, False])
def test_distributions_of_the_positions_asked_for(mask, pad):
    with corelm.get_backend("toy") as backend:
        policy = LLMPolicy(backend, pad_output=pad, sampling_params=SAMPLING)
        out = policy(TensorDict(history=History.from_chats([chat(q) for q in QUESTIONS])), seed=4)
        scorer = policy.replace(input_mode="tokens", generate=False)
        full = corelm.ragged(out, ("tokens", "full"))
        split = [corelm.ragged(out, (name, field)) for name, field in (("tokens", "prompt"), ("tokens", "response"))]
        dense = torch.cat([split[0].to_padded(0, "left"), split[1].to_padded(0, "right")], -1)
        at = torch.cat([split[0].mask("left"), split[1].mask("right")], -1)
        if mask == "tensor":
            chosen = at & (torch.arange(at.shape[1]) % 2 == 0)
            first = at.long().argmax(-1)
            expected = chosen & (torch.arange(at.shape[1]) != first[:, None])
        else:
            chosen, expected = mask, {"attention": None}.get(mask, corelm.ragged(out, ("masks", "all_response_mask")))
            if expected is None:
                expected = corelm.Ragged((full.positions > 0), full.lengths)
            expected = at.new_zeros(at.shape).masked_scatter_(at, expected.values)
        dist = scorer.get_dist(out, mask=chosen)
        assert torch.equal(dist.mask, expected)
        logp = dist.log_prob(dense)
        assert bool((logp[~expected] == 0).all())
        rows, columns = expected.nonzero().T
        # Inside a row tokens are neighbours, so the one before is one column to the left.
        truth = TABLE[dense[rows, columns - 1], dense[rows, columns]]
        torch.testing.assert_close(logp[expected].double(), truth, atol=1e-5, rtol=0)
        logp.sum().backward()
        assert backend._engine.model.table.grad.abs().sum() > 0


def test_log_prob_carries_gradients_and_equals_the_scores():
    with corelm.get_backend("toy") as backend:
        policy = LLMPolicy(backend, input_mode="text", generate=False, inplace=False)
        td = TensorDict(text=QUESTIONS)
        rows = policy.log_prob(td)
        assert [len(row) for row in rows] == [len(ids) for ids in TOKENIZER(QUESTIONS)["input_ids"]]
        for row, scored in zip(rows, policy(td)["log_probs"].full, strict=True):
            assert torch.equal(row.detach(), scored)
        sum(row.sum() for row in rows).backward()
        assert backend._engine.model.table.grad.abs().sum() > 0
        with torch.no_grad():
            assert not policy.replace(pad_output=True).log_prob(td).requires_grad


def test_which_containers_are_written_changes_no_distribution(backend):
    told = [{"role": "user", "content": "Is the tea hot?"}, {"role": "assistant", "content": "The tea is hot."}]
    td = TensorDict(history=History.from_chats([told]))
    policy = LLMPolicy(backend, generate=False, inplace=False)
    masks, none = (policy.replace(return_masks=wanted).get_dist(td, mask="assistant") for wanted in (True, False))
    assert masks.mask.any() and torch.equal(masks.mask, none.mask)
    # Nobody asks here whose words they are, so a template that cannot tell is no obstacle.

    class NoPrefixes(ByteTokenizer):
        def apply_chat_template(self, conversation, **options):
            return f"{len(conversation)} {super().apply_chat_template(conversation, **options)}"

    with corelm.get_backend("toy", tokenizer=NoPrefixes()) as opaque:
        policy = LLMPolicy(opaque, generate=False, inplace=False)
        assert len(policy.log_prob(td)) == 1 and policy.get_dist(td).mask.any()


def test_a_mask_that_the_input_does_not_have_is_refused(backend):
    policy = LLMPolicy(backend, input_mode="text", generate=False)
    with pytest.raises(InvalidRequestError, match="does not say which tokens are the assistant's"):
        policy.get_dist(TensorDict(text=["hello"]), mask="assistant")
    with pytest.raises(InvalidRequestError, match="expected one of"):
        policy.get_dist(TensorDict(text=["hello"]), mask="prompt")
    with pytest.raises(InvalidRequestError, match=r"expected bool\[1, 6\]"):
        policy.get_dist(TensorDict(text=["hello"]), mask=torch.ones(1, 3, dtype=torch.bool))
