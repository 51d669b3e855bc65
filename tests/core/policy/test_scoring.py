"""A policy scores what another one sampled: ids, their positions and log-probs stay the same, turn after turn."""

import torch
from tensordict import TensorDict

import corelm
from corelm import History, LLMPolicy
from helpers.each import each
from helpers.toy_prompts import QUESTIONS, SAMPLING, chat, prompts


@each("pad", [False, True])
@each("samples", [None, 2])
def test_scoring_sampled_rows_gives_the_same_ids_and_log_probs(backend, pad, samples):
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
    # A history next to its own tokens keeps their split into prompt and response and, if they are dense, their columns.
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


def test_prefer_tokens_false_reports_the_rows_rendered_from_text(backend):
    policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 4, "ignore_eos": True}, inplace=False)
    first = policy(TensorDict(history=History.from_chats([chat(q) for q in QUESTIONS[:2]])), seed=1)
    assert "retokenized" not in first.keys() and "retokenized" not in policy.out_keys
    again = policy.replace(prefer_tokens=False, generate=False)
    assert "retokenized" in again.out_keys
    mixed = History.of([first["history"].full.chats[0], first["history"].prompt.chats[1]], (2,))
    assert again(TensorDict(history=mixed))["retokenized"].tolist() == [True, False]
    going_on = policy.replace(prefer_tokens=False, continue_final_message=True)
    assert going_on(TensorDict(history=mixed), seed=1)["retokenized"].tolist() == [True, False]
