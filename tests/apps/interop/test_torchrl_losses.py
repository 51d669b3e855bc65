"""TorchRL's losses read the policy's output unchanged; values and gradients are checked against the formulas."""

import re

import peft
import pytest
import torch
from tensordict import TensorDict, lazy_stack

import corelm
from corelm import History, LLMPolicy
from corelm.errors import InvalidRequestError, MissingKeyError, ProvenanceMismatchError
from corelm.kl import KLRewardTransform, RetrieveLogProb
from corelm.policy.options import Keys
from corelm_testing.toy import Bigram
from helpers import oracle
from helpers.refusals import refused
from helpers.tiny_models import tiny_model, tiny_tokenizer
from helpers.torchrl import skip_without_torchrl

skip_without_torchrl()

from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import ChatHistory as TheirChatHistory
from torchrl.objectives.llm import CISPOLoss, GRPOLoss, SFTLoss

from corelm_interop.torchrl import EnvPolicy, LossActor, ModuleTransform, ReferenceActor, from_torchrl, to_torchrl

LAYOUTS = pytest.mark.parametrize("pad", [False, True], ids=["rows", "dense"])
CHATS = [[{"role": "user", "content": "Hello there, who are you?"}], [{"role": "user", "content": "Hi"}]]
ADVANTAGES = [1.0, -0.5]
SAMPLING = {"max_new_tokens": 7}


def rollout(backend, pad, chats=CHATS):
    """Return two rows with the second turn of a conversation; the prompt includes the first, sampled, answer."""
    policy = LLMPolicy(backend, sampling_params=SAMPLING, pad_output=pad)
    first = policy(TensorDict(history=History.from_chats(chats)), seed=3)
    history = first["history"].full.append({"role": "user", "content": "And then?"})
    td = policy(TensorDict(history=history), seed=4)
    return advantaged(td)


def advantaged(td):
    td["advantage"] = torch.tensor(ADVANTAGES)[: len(td)].reshape(-1, 1, 1)
    return td


def answers(td):
    """Return prompt and response ids, row by row."""
    return zip(*(corelm.ragged(td, ("tokens", part)).tolist() for part in ("prompt", "response")), strict=True)


def table(model, ids):
    """Return float32[len(ids), V] with gradients: the log-probs that predict each token; row 0 is unused."""
    logits = model(input_ids=torch.tensor([ids])).logits[0].float()
    return logits.roll(1, 0).log_softmax(-1)


def response_terms(model, td):
    """Return, flat over response tokens: log-probs with gradients, log-probs of sampling, advantages, entropies."""
    terms = []
    for (prompt, response), sampled, advantage in zip(
        answers(td), corelm.ragged(td, ("log_probs", "response")).split(), ADVANTAGES, strict=True
    ):
        rows = table(model, prompt + response)[len(prompt) :]
        new = rows.gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
        terms.append((new, sampled, torch.full_like(sampled, advantage), -(rows.exp() * rows).sum(-1)))
    return [torch.cat(term) for term in zip(*terms, strict=True)]


def clipped(new, sampled, advantage, epsilon=0.2):
    ratio = (new - sampled).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return found


@LAYOUTS
@pytest.mark.parametrize("strategy", ["sft", "rlhf", "generic"])
def test_grpo_loss_and_gradient_match_the_formula(backend, trainer, trained, pad, strategy):
    td = rollout(backend, pad)
    loss = GRPOLoss(LossActor(LLMPolicy(trainer), trained), masking_strategy=strategy)
    out = loss(td)
    new, sampled, advantage, entropy = response_terms(trained, td)
    terms = clipped(new, sampled, advantage)
    ratio = (new - sampled).exp()
    assert 0 < ((ratio - 1).abs() > 0.2).sum() < ratio.numel(), "some are clipped and some are not"
    torch.testing.assert_close(out.loss_objective, terms.mean(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.loss_entropy, -0.01 * entropy.mean(), atol=1e-4, rtol=1e-4)
    by_hand = gradients(trained, terms.mean() - 0.01 * entropy.mean())
    assert by_hand.norm() > 0.1
    found = gradients(trained, out.loss_objective + out.loss_entropy)
    torch.testing.assert_close(found, by_hand, atol=1e-3 * by_hand.abs().max().item(), rtol=1e-2)
    assert {id(parameter) for parameter in loss.parameters()} == {id(parameter) for parameter in trained.parameters()}


@LAYOUTS
@pytest.mark.parametrize("strategy", ["sft", "rlhf", "generic"])
def test_with_all_tokens_scored_the_strategy_selects_what_counts(backend, trainer, trained, model, pad, strategy):
    td = LLMPolicy(backend, generate=False, overwrite=True, pad_output=pad)(rollout(backend, pad))
    mask = {"sft": "all_response_mask", "rlhf": "all_assistant_mask", "generic": "all_attention_mask"}[strategy]
    terms = []
    for ids, counts, advantage in zip(
        corelm.ragged(td, ("tokens", "full")).tolist(),
        corelm.ragged(td, ("masks", mask)).split(),
        ADVANTAGES,
        strict=True,
    ):
        new, old = oracle.logprobs(trained, ids)[1:], oracle.logprobs(model, ids)[1:]
        terms.append(clipped(new, old, advantage)[counts[1:]])
    counted = sum(map(len, terms))
    responses = int(corelm.ragged(td, ("tokens", "response")).lengths.sum())
    assert counted == responses if strategy == "sft" else counted > responses
    out = GRPOLoss(LossActor(LLMPolicy(trainer)), masking_strategy=strategy)(td)
    torch.testing.assert_close(out.loss_objective.detach(), torch.cat(terms).mean(), atol=1e-4, rtol=1e-4)


def test_grpo_reads_batches_from_a_replay_buffer(backend, trainer, trained):
    loss, td = GRPOLoss(LossActor(LLMPolicy(trainer), trained)), rollout(backend, False)
    again = lazy_stack([td[1], td[0]])
    torch.testing.assert_close(loss(again).loss_objective, loss(td).loss_objective, atol=1e-4, rtol=1e-4)


def test_grpo_reads_dense_rows_of_different_widths(backend, trainer, trained):
    # The turns of one rollout are such rows: each has its own pads.
    parts = rollout(backend, True)[1:], rollout(backend, True, CHATS[1:])
    td = advantaged(lazy_stack([part[0] for part in parts]))
    widths = [row["tokens"].full.shape[-1] for row in td.unbind(0)]
    assert widths[0] > widths[1] and not parts[0]["masks"].all_attention_mask.all()
    new, sampled, advantage, _ = response_terms(trained, td)
    out = GRPOLoss(LossActor(LLMPolicy(trainer), trained))(td)
    torch.testing.assert_close(out.loss_objective, clipped(new, sampled, advantage).mean(), atol=1e-4, rtol=1e-4)


def test_grpo_reads_a_flattened_group_of_answers(backend, trainer, trained):
    policy = LLMPolicy(backend, sampling_params=SAMPLING, num_samples=2)
    groups = policy(TensorDict(history=History.from_chats([CHATS[0]])), seed=5)
    td = advantaged(groups.view(-1))
    new, sampled, advantage, _ = response_terms(trained, td)
    out = GRPOLoss(LossActor(LLMPolicy(trainer), trained))(td)
    torch.testing.assert_close(out.loss_objective, clipped(new, sampled, advantage).mean(), atol=1e-4, rtol=1e-4)


@LAYOUTS
def test_grpo_reads_the_reference_log_probs(backend, trainer, trained, pad):
    td = rollout(backend, pad)
    td["next"] = TensorDict(batch_size=[2])
    ModuleTransform(RetrieveLogProb(LLMPolicy(backend)))(td)
    out = GRPOLoss(LossActor(LLMPolicy(trainer), trained), kl_to_ref_coeff=0.5)(td)
    new, sampled, *_ = response_terms(trained, td)
    # The sampler is the reference. TorchRL averages over pads and prompts too, where the value is 0.
    diff = sampled - new
    width = max(td["tokens"].full[row].shape[-1] for row in range(2))
    expected = (diff.expm1() - diff).sum() / (2 * width)
    torch.testing.assert_close(out.kl_to_ref, expected.detach(), atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(out.loss_kl_to_ref, 0.5 * expected, atol=1e-5, rtol=1e-3)


def test_losses_related_to_grpo_work(backend, trainer, trained):
    out = CISPOLoss(LossActor(LLMPolicy(trainer), trained))(rollout(backend, False))
    assert gradients(trained, out.loss_objective).norm() > 0


# SFT -----------------------------------------------------------------------------------------------------------------


def assistant_terms(model, td):
    """Return, row by row, the log-probs of all assistant tokens, with gradients."""
    rows, masks = (corelm.ragged(td, key).split() for key in (("tokens", "full"), ("masks", "all_assistant_mask")))
    return [
        table(model, ids.tolist()).gather(-1, ids[:, None]).squeeze(-1)[mask]
        for ids, mask in zip(rows, masks, strict=True)
    ]


@pytest.mark.parametrize("normalise", [True, False])
def test_sft_loss_and_gradient_match_the_formula(backend, trainer, trained, normalise):
    td = rollout(backend, False)
    said = assistant_terms(trained, td)
    assert all(len(row) > SAMPLING["max_new_tokens"] for row in said), "both turns count"
    expected = -torch.stack([row.mean() if normalise else row.sum() for row in said]).mean()
    out = SFTLoss(LossActor(LLMPolicy(trainer), trained), normalize_by_seq_length=normalise)(td)
    torch.testing.assert_close(out.loss_sft, expected, atol=1e-4, rtol=1e-4)
    by_hand = gradients(trained, expected)
    found = gradients(trained, out.loss_sft)
    torch.testing.assert_close(found, by_hand, atol=1e-3 * by_hand.abs().max().item(), rtol=1e-2)


def test_sft_on_conversations_that_were_not_sampled(trainer, trained):
    chats = [[*chat, {"role": "assistant", "content": "I am a very small model."}] for chat in CHATS]
    td = LLMPolicy(trainer, generate=False)(TensorDict(history=History.from_chats(chats)))
    expected = -torch.stack([row.mean() for row in assistant_terms(trained, td)]).mean()
    out = SFTLoss(LossActor(LLMPolicy(trainer)))(td)
    torch.testing.assert_close(out.loss_sft, expected, atol=1e-4, rtol=1e-4)


def test_sft_reads_the_reference_log_probs(backend, trainer, trained, model):
    td = rollout(backend, False)
    td["next"] = TensorDict(batch_size=[2])
    RetrieveLogProb(LLMPolicy(backend))(td)
    # SFTLoss sets its own log-probs to 0 outside the assistant's tokens, but not the reference's.
    ref, masks = td["next", "ref_log_probs"], td["masks"].all_assistant_mask
    ref.full = [row.masked_fill(~mask, 0.0) for row, mask in zip(ref.full, masks, strict=True)]
    out = SFTLoss(LossActor(LLMPolicy(trainer)), kl_to_ref_coeff=0.5)(td)
    pairs = zip(assistant_terms(trained, td), assistant_terms(model, td), strict=True)
    diff = torch.cat([of_ref - new for new, of_ref in pairs])
    count = sum(len(row) for row in td["tokens"].full)
    torch.testing.assert_close(out.kl_to_ref, (diff.expm1() - diff).sum().detach() / count, atol=1e-4, rtol=1e-3)


def test_dense_rows_with_pads_are_never_silently_misread_by_sft(backend, trainer):
    with pytest.raises(ValueError, match="different shapes"):
        SFTLoss(LossActor(LLMPolicy(trainer)))(rollout(backend, True))


# Errors --------------------------------------------------------------------------------------------------------------


def test_log_probs_of_another_distribution_are_refused(backend, trainer, trained):
    hot = {"sampling_params": SAMPLING | {"temperature": 0.5}, "log_probs_mode": "processed"}
    policy = LLMPolicy(backend, **hot)
    td = advantaged(policy(TensorDict(history=History.from_chats(CHATS)), seed=1))
    with pytest.raises(ProvenanceMismatchError, match=r"processed, temperature 0\.5.*raw, temperature 1\.0"):
        GRPOLoss(LossActor(LLMPolicy(trainer)))(td)
    out = GRPOLoss(LossActor(LLMPolicy(trainer, **hot)))(td)
    new = torch.cat([oracle.answer_logprobs(trained, prompt, response, 0.5) for prompt, response in answers(td)])
    *_, sampled, advantage, _ = response_terms(trained, td)
    torch.testing.assert_close(out.loss_objective, clipped(new, sampled, advantage).mean(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("strategy", "missing"),
    [("sft", "masks.all_response_mask"), ("rlhf", "masks.all_assistant_mask"), ("rlhf", "log_probs.scored_mask")],
)
def test_a_missing_field_is_named_together_with_the_remedy(backend, trainer, strategy, missing):
    td = rollout(backend, False)
    td["tokens"] = td["tokens"].select("full")
    container, field = missing.split(".")
    td[container] = type(td[container]).from_tensordict(td[container]._tensordict.exclude(field))
    with pytest.raises(MissingKeyError, match=f"no {re.escape(missing)}.*set it") as error:
        GRPOLoss(LossActor(LLMPolicy(trainer)), masking_strategy=strategy)(td)
    assert error.value.field == missing


@LAYOUTS
@pytest.mark.parametrize("plain", [False, True], ids=["containers", "plain TensorDicts"])
def test_grpo_reads_data_that_torchrls_own_policy_wrote(model, trainer, trained, pad, plain):
    torch.manual_seed(0)
    wrapper = TransformersWrapper(
        model, tokenizer=tiny_tokenizer(), pad_output=pad, generate_kwargs={"max_new_tokens": 7, "do_sample": True}
    )
    prompt = to_torchrl(History.from_chats(CHATS))
    td = advantaged(wrapper(TensorDict(history=TheirChatHistory(prompt=prompt, batch_size=[2]), batch_size=[2])))
    ours = TensorDict({name: from_torchrl(td[name]) for name in ("tokens", "masks")}, batch_size=[2])
    ids = corelm.ragged(ours, ("tokens", "full")).tolist()
    lengths = corelm.ragged(ours, ("tokens", "response")).lengths.tolist()
    assert len(set(map(len, ids))) == 2, "rows differ in length"
    for row, sampled, length in zip(td.unbind(0), ids, lengths, strict=True):
        # TorchRL's wrapper returns log-probs of the response alone, with 0.0 for its first token.
        old = oracle.logprobs(model, sampled)
        old[:-length] = 0.0
        mask = row["masks"].all_attention_mask
        row["log_probs"].full = torch.zeros(mask.shape).masked_scatter(mask, old)
    if plain:
        td = lazy_stack([plain_row(row) for row in td.unbind(0)])
    expected = [
        clipped(oracle.logprobs(trained, row)[-n:], oracle.logprobs(model, row)[-n:], advantage)
        for row, n, advantage in zip(ids, lengths, ADVANTAGES, strict=True)
    ]
    loss = GRPOLoss(LossActor(LLMPolicy(trainer), trained))
    torch.testing.assert_close(loss(td).loss_objective.detach(), torch.cat(expected).mean(), atol=1e-4, rtol=1e-4)


def relaid(td, layout, pad):
    """Return the tokens and masks of `td`, dense, as other programs lay them out."""
    full, answer = (corelm.ragged(td, ("tokens", part)) for part in ("full", "response"))
    prompt = corelm.ragged(td, ("tokens", "prompt"))
    if layout == "prompt left, response right":
        columns = torch.cat([prompt.mask("left"), answer.mask("right")], -1)
    else:
        columns = full.mask(layout)
    tokens = {"full": full.scatter(columns, 0), "response": answer.to_padded(pad, "right")}
    numbers = corelm.ragged(td, ("log_probs", "full")).scatter(columns, 0.0)
    made = {
        "tokens": TensorDict(tokens, batch_size=[2]),
        "masks": TensorDict(all_attention_mask=columns, batch_size=[2]),
        "log_probs": TensorDict(full=numbers, batch_size=[2]),
    }
    return advantaged(TensorDict(made, batch_size=[2]))


@pytest.fixture(scope="module")
def uneven(backend):
    """Return two answers of different lengths."""
    parts = [
        LLMPolicy(backend, sampling_params={"max_new_tokens": new, "min_new_tokens": new})(
            TensorDict(history=History.from_chats([chat])), seed=4
        )
        for new, chat in zip((7, 3), CHATS, strict=True)
    ]
    td = lazy_stack([part[0] for part in parts])
    assert corelm.ragged(td, ("tokens", "response")).lengths.tolist() == [7, 3]
    return td


@pytest.mark.parametrize("pad", [-100, -1, 0])
def test_grpo_finds_the_response_whatever_it_is_padded_with(trainer, trained, uneven, pad):
    td = relaid(uneven, "prompt left, response right", pad)
    new, sampled, advantage, _ = response_terms(trained, uneven)
    out = GRPOLoss(LossActor(LLMPolicy(trainer), trained))(td)
    torch.testing.assert_close(out.loss_objective, clipped(new, sampled, advantage).mean(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pad", [-100, 0])
@pytest.mark.parametrize("layout", ["left", "right"])
def test_a_response_that_is_not_in_the_last_columns_is_refused(trainer, uneven, layout, pad):
    td = relaid(uneven, layout, pad)
    with pytest.raises(InvalidRequestError, match=r"tokens\.response: row 1: .*set masks\.all_response_mask") as error:
        GRPOLoss(LossActor(LLMPolicy(trainer)))(td)
    assert error.value.rows == (1,) and error.value.field == "masks.all_response_mask"


def test_a_response_that_is_wider_than_the_sequence_is_refused(trainer, uneven):
    td = relaid(uneven, "prompt left, response right", 0)
    width = td["tokens", "full"].shape[-1] + 1
    td["tokens", "response"] = torch.zeros(2, width, dtype=torch.int64)
    with pytest.raises(InvalidRequestError, match=f"the last {width} columns of tokens.full do not hold the response"):
        GRPOLoss(LossActor(LLMPolicy(trainer)))(td)


@pytest.mark.parametrize("field", ["all_attention_mask", "all_response_mask"])
def test_an_additive_mask_is_refused_by_the_losses(trainer, uneven, field):
    td = relaid(uneven, "prompt left, response right", 0)
    td["masks", field] = torch.zeros(td["tokens", "full"].shape).index_fill(-1, torch.tensor([0]), -torch.inf)
    with pytest.raises(InvalidRequestError, match=rf"masks\.{field}: row 0: expected True and False, .* got .*-inf"):
        GRPOLoss(LossActor(LLMPolicy(trainer)))(td)


def plain_row(row):
    """Return the tensors of TorchRL's containers in plain TensorDicts."""
    fields = {
        "tokens": ("prompt", "response", "full"),
        "masks": ("all_attention_mask",),
        "log_probs": ("full",),
    }
    made = {name: TensorDict({key: row[name].get(key) for key in keys}) for name, keys in fields.items()}
    return TensorDict({**made, "advantage": row["advantage"]})


def test_other_keys_are_refused(trainer):
    with pytest.raises(InvalidRequestError, match="default keys"):
        LossActor(LLMPolicy(trainer, keys=Keys(tokens="ids")))


def test_a_model_that_gets_no_gradients_is_refused(model):
    own = tiny_model()
    with corelm.get_backend("transformers", own, tokenizer=tiny_tokenizer()) as backend:
        policy = LLMPolicy(backend, batching=True)
        for other in (model, own.lm_head, "x"):
            with refused(InvalidRequestError, field="model"):
                LossActor(policy, other)
        for wrapped in (torch.compile(own), peft.get_peft_model(own, peft.LoraConfig(target_modules=["q_proj"]))):
            assert [*LossActor(policy, wrapped).parameters()] == [*own.parameters()]


@pytest.mark.parametrize("wrap", [LossActor, EnvPolicy, ReferenceActor, KLRewardTransform])
def test_a_backend_in_place_of_a_policy_is_told_how_to_become_one(trainer, trained, wrap):
    for given, kind in ((trainer, "Backend"), (trained, type(trained).__name__), (LLMPolicy, "the class LLMPolicy")):
        with refused(InvalidRequestError, field="policy") as caught:
            wrap(given)
        assert f"such as LLMPolicy(backend), got {kind}" in str(caught.value)


def test_a_class_in_place_of_a_module_is_refused():
    with refused(InvalidRequestError, field="module") as caught:
        ModuleTransform(RetrieveLogProb)
    assert "got the class RetrieveLogProb" in str(caught.value)


def test_sft_refuses_groups_and_says_how_to_flatten_them(trainer):
    td = TensorDict(history=TensorDict(full=History.from_chats([CHATS, CHATS]), batch_size=[2, 2]), batch_size=[2, 2])
    with pytest.raises(InvalidRequestError, match=r"view\(-1\)"):
        LossActor(LLMPolicy(trainer))(td)


# Truncated sampling --------------------------------------------------------------------------------------------------


@LAYOUTS
def test_the_ratio_of_truncated_sampling_is_that_of_the_ids_that_were_left(pad):
    heat, k = 0.7, 3
    sampling = {"max_new_tokens": 6, "temperature": heat, "top_k": k}
    model = Bigram.of_talk()
    with corelm.get_backend("toy", model) as toy:
        how = {"sampling_params": sampling, "log_probs_mode": "processed", "pad_output": pad}
        policy = LLMPolicy(toy, return_support=True, **how)
        td = advantaged(policy(TensorDict(history=History.from_chats(CHATS)), seed=3))
        actor = LossActor(policy, model)
        dist = actor.get_dist(td, "all_response_mask")
        dense = corelm.repad(td, per_token=[])
        new, old = (one[dist.mask] for one in (dist.log_prob(dense["tokens"].full), dense["log_probs"].full))
        torch.testing.assert_close(new, old, atol=1e-5, rtol=0)
        assert dist.entropy()[dist.mask].max() <= torch.tensor(float(k)).log() + 1e-5
        out = GRPOLoss(actor, masking_strategy="sft")(td)
        assert torch.isfinite(out.loss_objective) and torch.isfinite(out.loss_entropy)
        torch.testing.assert_close(out.kl_approx, torch.zeros(()), atol=1e-5, rtol=0)
        gradient = gradients(model, out.loss_objective + out.loss_entropy)
        assert torch.isfinite(gradient).all() and bool(gradient.any())
        without = advantaged(
            LLMPolicy(toy, **how)(TensorDict(history=History.from_chats(CHATS), batch_size=[2]), seed=3)
        )
        with pytest.raises(ProvenanceMismatchError, match="return_support=True"):
            actor.get_dist(without, "all_response_mask")
