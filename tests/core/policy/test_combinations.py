"""LLMPolicy on the toy backend: the fields and numbers that every combination of options must give."""

import itertools

import torch

import corelm
from corelm import LLMPolicy, Message
from helpers.each import each
from helpers.toy_prompts import QUESTIONS, SAMPLING, TOKENIZER, chat, flat, oracle, prompts

GENERATED = {
    "text": ["full", "prompt", "response"],
    "tokens": ["full", "padded", "prompt", "response"],
    "masks": ["all_assistant_mask", "all_attention_mask", "all_response_mask", "padded"],
    "log_probs": ["full", "padded", "prompt", "provenance", "response", "scored_mask"],
    "history": ["full", "prompt", "response"],
}


def fields_of(td):
    """Return the fields that are set, by container, with `padded` and `provenance`, which are not keys."""
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
        # A batch without rows has no provenance.
        fields.get("log_probs", set()).discard("provenance")
    if mode != "history":
        fields.pop("history", None)
    if not log_probs:
        fields.pop("log_probs")
    return fields


COMBINATIONS = list(
    itertools.product(["history", "text", "tokens"], [False, True], [None, 1, 2], [(), (0,), (3,), (2, 2)])
)


@each("mode, pad, samples, shape", COMBINATIONS)
@each("log_probs", [True, False])
def test_generating_gives_the_expected_fields_and_numbers(backend, mode, pad, samples, shape, log_probs):
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
        provenance = out["log_probs"].provenance
        assert count == 0 or provenance.distribution == ("raw", 1.0, "full", ())
    if pad and count:
        width = out["tokens"].prompt.shape[-1] + out["tokens"].response.shape[-1]
        for name in ("tokens", "masks", "log_probs") if log_probs else ("tokens", "masks"):
            for field in out[name].keys():
                if field in ("full", "scored_mask") or field.startswith("all_"):
                    assert getattr(out[name], field).shape == (*shape, width), (name, field)


@each("mode, pad, shape", [(m, p, s) for m, p, n, s in COMBINATIONS if n is None])
def test_scoring_gives_the_expected_fields_and_numbers(backend, mode, pad, shape):
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
