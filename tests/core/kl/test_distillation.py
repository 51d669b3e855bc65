"""`DistillationLoss` on the toy backend, against the tables of its bigrams."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import Backend, LLMPolicy, LogProbs
from corelm.errors import CapabilityError, InvalidRequestError, MissingKeyError, ProvenanceMismatchError
from corelm.kl import DistillationLoss, aggregate
from helpers.each import each
from helpers.kl_cases import GEN, LAYOUTS, REF, SHAPES, assert_rows, gen_policy, ref_policy, rollout, rows_of
from helpers.refusals import refused

gen, ref = gen_policy, ref_policy
KINDS = ("forward_kl", "reverse_kl", "js")
V = 260


@pytest.fixture
def student():
    """A bigram that can be trained, and a policy that scores with it."""
    model = type(GEN)(GEN.table.detach().clone().requires_grad_())
    with corelm.get_backend("toy", model) as opened:
        yield model, LLMPolicy(opened, input_mode="tokens", generate=False)


def scored(ref, td, k=5, **changes):
    """Write the teacher's most probable ids."""
    padded = isinstance(td["tokens"].full, torch.Tensor) and td["tokens"].padded
    policy = ref.replace(input_mode="tokens", top_k=k, log_probs_key="teacher_log_probs", pad_output=padded, **changes)
    return policy(td)


def wanted(td, kind, k, student, beta=0.5, counts=None):
    """Return the loss of each token of the response, row by row, from both tables; 0 elsewhere."""
    teacher = REF.table.detach().double().log_softmax(-1)
    table = student.table.double().log_softmax(-1)
    prompts, made = corelm.ragged(td, ("tokens", "prompt")).tolist(), []
    for row, ids in enumerate(corelm.ragged(td, ("tokens", "full")).tolist()):
        values = []
        for t in range(len(ids)):
            if t < (len(prompts[row]) if counts is None else counts):
                values.append(table.new_zeros(()))
                continue
            log_p, log_q = teacher[ids[t - 1]], table[ids[t - 1]]
            best = log_p.topk(k).indices
            rest = torch.ones(V, dtype=torch.bool)
            rest[best] = False
            p, q = (
                torch.cat([one[best].exp(), one[rest].exp().sum(0, keepdim=True)]) if k < V else one.exp()
                for one in (log_p, log_q)
            )
            m = beta * p + (1 - beta) * q
            values.append(
                {
                    "forward_kl": (p * (p / q).log()).sum(),
                    "reverse_kl": (q * (q / p).log()).sum(),
                    "js": (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(),
                }[kind]
            )
        made.append(torch.stack(values))
    return made


@LAYOUTS
@SHAPES
def test_the_loss_is_that_of_the_tables_in_every_layout(gen, ref, student, pad, shape):
    model, policy = student
    td = scored(ref, rollout(gen, shape, pad))
    DistillationLoss(policy)(td)
    assert_rows(
        [row.detach() for row in rows_of(td, "distillation_loss")],
        [row.detach() for row in wanted(td, "forward_kl", 5, model)],
    )


@each("kind", KINDS)
@each("k", [1, 7, V])
def test_values_and_gradients_of_every_kind(gen, ref, student, kind, k):
    model, policy = student
    td = scored(ref, rollout(gen), k)
    mean = DistillationLoss(policy, kind, beta=0.3).mean(td)
    rows = wanted(td, kind, k, model, 0.3)
    counted = sum(len(row) for row in corelm.ragged(td, ("tokens", "response")).tolist())
    by_hand = torch.cat(rows).sum() / counted
    torch.testing.assert_close(mean.detach().double(), by_hand.detach(), rtol=1e-4, atol=1e-6)
    ours, theirs = (torch.autograd.grad(one, model.table)[0] for one in (mean, by_hand))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-7)
    assert "distillation_loss" not in td.keys()


@LAYOUTS
def test_a_student_that_was_scored_elsewhere_is_read_from_the_tensordict(gen, ref, student, pad):
    policy = student[1]
    td = scored(ref, rollout(gen, pad=pad))
    wanted_loss = DistillationLoss(policy)(td.copy())["distillation_loss"]
    result = policy.backend.score_logprobs(
        corelm.ragged(td, ("tokens", "full")), top_ids=corelm.ragged(td, ("teacher_log_probs", "top_ids"))
    )
    fields = {"full": result.logprobs, "scored_mask": result.scored, "tail_log_mass": result.tail_log_mass}
    fields |= {"top_ids": result.top_ids, "top_log_probs": result.top_logprobs}
    if pad:
        where = td["masks"].all_attention_mask
        td["student_log_probs"] = LogProbs(
            **{name: rows.scatter(where, 0) for name, rows in fields.items()}, batch_size=[3]
        )
    else:
        td["student_log_probs"] = LogProbs.from_rows(**{name: rows.split() for name, rows in fields.items()})
    found = DistillationLoss()(td)["distillation_loss"]
    for one, other in zip(*((x,) if pad else x.full for x in (found, wanted_loss)), strict=True):
        torch.testing.assert_close(one, other.detach())


def test_masks_select_what_counts_and_nothing_else_is_scored(gen, ref, student):
    model, policy = student
    td = scored(ref, rollout(gen))
    DistillationLoss(policy, assistant_only=False)(td)
    assert_rows(
        [row.detach() for row in rows_of(td, "distillation_loss")],
        [row.detach() for row in wanted(td, "forward_kl", 5, model, counts=1)],
    )
    td["next"] = TensorDict(batch_size=td.batch_size)
    DistillationLoss(policy, mask_key=("masks", "all_response_mask"), loss_key="loss")(td)
    mask = corelm.ragged(td, ("masks", "all_response_mask")).values
    loss = corelm.ragged(td["next"], ("loss", "full")).values
    assert not bool(loss[~mask].any()) and bool((loss[mask] > 0).any())
    mean = DistillationLoss(policy).mean(td, "seq-mean-token-sum")
    assert float(mean.detach()) == pytest.approx(float(loss.sum().detach()) / 3, rel=1e-5)
    with torch.no_grad():
        assert not DistillationLoss(policy).mean(td).requires_grad


def test_other_temperatures_are_refused(gen, ref, student):
    _, policy = student
    warm = {"log_probs_mode": "processed", "sampling_params": {"temperature": 0.5}}
    td = scored(ref, rollout(gen), **warm)
    with pytest.raises(ProvenanceMismatchError, match=r"row 0: teacher and student .* the same log_probs_mode"):
        DistillationLoss(policy)(td)
    DistillationLoss(policy.replace(**warm))(td)
    td["student_log_probs"] = scored(ref, rollout(gen))["teacher_log_probs"]
    with pytest.raises(ProvenanceMismatchError):
        DistillationLoss()(td)


def test_log_probs_without_the_most_probable_ids_are_refused(gen, ref, student):
    td = rollout(gen)
    loss = DistillationLoss(student[1])
    with refused(MissingKeyError, field="('teacher_log_probs', 'full')"):
        loss(td)
    td["teacher_log_probs"] = td["log_probs"]
    with refused(MissingKeyError, field="('teacher_log_probs', 'top_ids')"):
        loss(td)


@LAYOUTS
def test_ids_tails_and_infinities_are_refused_by_row_and_position(gen, ref, student, pad):
    policy = student[1]
    td = scored(ref, rollout(gen, pad=pad))
    prompt = len(corelm.ragged(td, ("tokens", "prompt")).tolist()[1])
    column = td["tokens"].prompt.shape[-1] + 1 if pad else prompt + 1

    def changed(name, value):
        copy = td.clone()
        rows = list(getattr(copy["teacher_log_probs"], name))
        rows[1] = rows[1].clone()
        rows[1][column] = value
        setattr(copy["teacher_log_probs"], name, torch.stack(rows) if pad else rows)
        return copy

    def refusal(td, **options):
        with pytest.raises(InvalidRequestError) as caught:
            DistillationLoss(policy, **options)(td)
        assert caught.value.rows == (1,)
        return str(caught.value)

    assert f"position {prompt + 1}: the probabilities of the k ids and of the tail sum to" in refusal(
        changed("tail_log_mass", 0.0)
    )
    assert f"position {prompt + 1}" in refusal(changed("top_ids", 7))
    missing = changed("top_log_probs", torch.tensor([0.0] + [-torch.inf] * 4))
    setattr_row(missing, "tail_log_mass", column, -torch.inf, pad)
    message = refusal(missing, kind="reverse_kl")
    assert f"the reverse_kl is inf at position {prompt + 1}" in message and "use kind='js'" in message
    DistillationLoss(policy, "js")(missing)


def setattr_row(td, name, column, value, pad):
    rows = list(getattr(td["teacher_log_probs"], name))
    rows[1] = rows[1].clone()
    rows[1][column] = value
    setattr(td["teacher_log_probs"], name, torch.stack(rows) if pad else rows)


@LAYOUTS
def test_rows_that_were_skipped_count_nothing(gen, ref, student, pad):
    sampler = gen.replace(input_mode="tokens", on_error="skip", sampling_params={"max_new_tokens": 3}, pad_output=pad)
    prompts = corelm.Tokens.from_rows(prompt=[[5, 6], [7, V], [8]])
    td = scored(ref, sampler(TensorDict(tokens=prompts, batch_size=[3])), on_error="skip")
    assert [bool(error) for error in td["errors"]] == [False, True, False]
    model, policy = student
    loss = DistillationLoss(policy.replace(on_error="skip"), mask_key=("masks", "all_response_mask"))
    found = [row.detach() for row in rows_of(loss(td), "distillation_loss")]
    expected = [row.detach() for row in wanted(td, "forward_kl", 5, model)]
    assert_rows(found, [*expected[:1], torch.zeros(len(found[1]), dtype=torch.float64), *expected[2:]])
    with refused(InvalidRequestError, field="sequences", rows=(1,)):
        DistillationLoss(policy, mask_key=("masks", "all_response_mask"))(td)


def test_a_student_that_cannot_score_a_row_is_refused_if_one_token_of_it_counts(ref):
    td = TensorDict(tokens=corelm.Tokens.from_rows(full=[[5], [5, 6], [5, 6, 7]]), batch_size=[3])
    with corelm.get_backend("toy", GEN, max_context=1) as opened:
        student = LLMPolicy(opened, input_mode="tokens", generate=False, on_error="skip")
        with refused(InvalidRequestError, field="tokens", rows=(1, 2)):
            DistillationLoss(student, assistant_only=False)(scored(ref, td))


def test_a_student_whose_engine_cannot_score_the_teachers_ids(gen, ref, student):
    td, plugin = scored(ref, rollout(gen)), type(student[1].backend.engine.plugin).open()
    plugin.capabilities = replace(plugin.capabilities, score_top_ids=False)
    with Backend.from_plugin(plugin, "toy") as modest, pytest.raises(CapabilityError, match="give a student") as error:
        DistillationLoss(LLMPolicy(modest, input_mode="tokens", generate=False))(td)
    assert error.value.capability == "score_top_ids"


def test_tokens_of_another_batch_are_refused(gen, ref, student):
    td = scored(ref, rollout(gen))
    td["tokens"] = rollout(gen, seed=5)["tokens"]
    with refused(InvalidRequestError, field="tokens", rows=(0, 2)):
        DistillationLoss(student[1], assistant_only=False)(td)


def test_arguments_are_checked():
    for options in ({"student": "toy"}, {"kind": "kl"}, {"beta": 0.0}):
        with pytest.raises(InvalidRequestError) as caught:
            DistillationLoss(**options)
        assert caught.value.field == next(iter(options))
    with pytest.raises(InvalidRequestError):
        aggregate(torch.zeros(2), how="mean")
