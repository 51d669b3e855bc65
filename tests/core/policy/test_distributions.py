"""`get_dist` and `log_prob`: distributions of the positions asked for, with gradients."""

import torch
from tensordict import TensorDict

import corelm
from corelm import History, LLMPolicy
from corelm.errors import InvalidRequestError
from helpers.each import each
from helpers.refusals import refused
from helpers.toy_prompts import QUESTIONS, SAMPLING, TABLE, TOKENIZER, chat


@each("mask", ["attention", "assistant", "response", "tensor"])
@each("pad", [True, False])
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
        assert backend.engine.plugin.model.table.grad.abs().sum() > 0


def test_log_prob_carries_gradients_and_equals_the_scores():
    with corelm.get_backend("toy") as backend:
        policy = LLMPolicy(backend, input_mode="text", generate=False, inplace=False)
        td = TensorDict(text=QUESTIONS)
        rows = policy.log_prob(td)
        assert [len(row) for row in rows] == [len(ids) for ids in TOKENIZER(QUESTIONS)["input_ids"]]
        for row, scored in zip(rows, policy(td)["log_probs"].full, strict=True):
            assert torch.equal(row.detach(), scored)
        sum(row.sum() for row in rows).backward()
        assert backend.engine.plugin.model.table.grad.abs().sum() > 0
        with torch.no_grad():
            assert not policy.replace(pad_output=True).log_prob(td).requires_grad


def test_a_mask_that_the_input_does_not_have_is_refused(backend):
    policy = LLMPolicy(backend, input_mode="text", generate=False)
    with refused(InvalidRequestError, field="mask"):
        policy.get_dist(TensorDict(text=["hello"]), mask="assistant")
    with refused(InvalidRequestError, field="mask"):
        policy.get_dist(TensorDict(text=["hello"]), mask="prompt")
    with refused(InvalidRequestError, field="mask"):
        policy.get_dist(TensorDict(text=["hello"]), mask=torch.ones(1, 3, dtype=torch.bool))
