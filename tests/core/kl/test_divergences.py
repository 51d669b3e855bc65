"""Divergences of top-k log-probs with a tail, against sums over a small vocabulary."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from corelm.errors import InvalidRequestError
from corelm.kl import TopLogProbs, exact, js_upper_bound, top_k_divergence
from helpers.each import each, examples
from helpers.refusals import refused

KINDS = ("forward_kl", "reverse_kl", "js")
INF = float("inf")


def logits(seed, vocab, shape=(), scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, vocab, generator=generator, dtype=torch.float64)


def by_definition(p, q, kind, beta=0.5):
    """Return the divergence of two tables of probabilities, by its definition."""

    def kl(a, b):
        return sum(x * math.log(x / y) if y else INF for x, y in zip(a, b, strict=True) if x)

    if kind == "forward_kl":
        return kl(p, q)
    if kind == "reverse_kl":
        return kl(q, p)
    mixture = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


def of_tables(teacher, student, ids):
    """Return both sides as an engine gives them: the log-probs of `ids`, and the tail, by log-sum-exp."""
    sides = []
    for table in (teacher, student):
        log_probs = table.log_softmax(-1)
        rest = log_probs.scatter(-1, ids, -INF)
        tail = rest.logsumexp(-1) if ids.shape[-1] < table.shape[-1] else torch.full(table.shape[:-1], -INF)
        sides.append(TopLogProbs(log_probs.gather(-1, ids), tail.double(), ids))
    return sides


def top(table, k):
    return table.topk(k, -1).indices


@each("kind", KINDS)
@each("seed, vocab", list(itertools.product(range(3), (2, 5, 12))))
def test_it_is_the_divergence_of_the_outcomes_and_a_lower_bound_that_k_closes(kind, seed, vocab):
    teacher, student = logits(2 * seed, vocab), logits(2 * seed + 1, vocab).requires_grad_()
    p, q = (table.softmax(-1).tolist() for table in (teacher, student))
    true = by_definition(p, q, kind, 0.3)
    before = 0.0
    for k in range(1, vocab + 1):
        ids = top(teacher, k)
        found = top_k_divergence(*of_tables(teacher, student, ids), kind, beta=0.3).detach()
        chosen = ids.tolist()
        merged = [[table[i] for i in chosen] + [1 - sum(table[i] for i in chosen)] for table in (p, q)]
        merged = [[max(x, 0.0) if k < vocab else x for x in row[: k + (k < vocab)]] for row in merged]
        assert float(found) == pytest.approx(by_definition(*merged, kind, 0.3), abs=1e-9)
        # Every further id splits an outcome, which can only raise the divergence.
        assert before - 1e-12 <= float(found) <= true + 1e-12
        before = float(found)
        if k >= vocab - 1:
            assert float(found) == pytest.approx(true, abs=1e-9)
    if kind == "forward_kl":
        torch.testing.assert_close(found, exact(teacher, student).detach())
    if kind == "reverse_kl":
        torch.testing.assert_close(found, exact(student, teacher).detach())


@each("kind", KINDS)
@each("k", [1, 3, 5, 6])
def test_the_gradient_is_that_of_finite_differences_and_of_the_plain_formula(kind, k):
    teacher, student = logits(0, 6, (2, 3)), logits(1, 6, (2, 3)).requires_grad_()
    ids = top(teacher, k)
    assert gradcheck(lambda s: top_k_divergence(*of_tables(teacher, s, ids), kind, beta=0.3), (student,))
    # Log-probs and tail as independent numbers, which carry the gradient each for itself.
    ours, theirs = of_tables(teacher, student.detach(), ids)
    free = [theirs.log_probs.requires_grad_(), theirs.tail.requires_grad_()]
    (top_k_divergence(ours, theirs, kind, beta=0.3) * torch.arange(6.0).reshape(2, 3)).sum().backward()
    got = torch.cat([free[0].grad, free[1].grad[..., None]], -1)
    log_p = torch.cat([ours.log_probs, ours.tail[..., None]], -1)
    log_q = torch.cat([theirs.log_probs, theirs.tail[..., None]], -1).detach().requires_grad_()
    width = k + (k < 6)
    p, q = log_p[..., :width].exp(), log_q[..., :width].exp()
    m = 0.3 * p + 0.7 * q
    plain = {
        "forward_kl": p * (p / q).log(),
        "reverse_kl": q * (q / p).log(),
        "js": 0.3 * p * (p / m).log() + 0.7 * q * (q / m).log(),
    }[kind]
    (plain.sum(-1) * torch.arange(6.0).reshape(2, 3)).sum().backward()
    torch.testing.assert_close(got, log_q.grad)


@settings(max_examples=examples(60), deadline=None)
@given(vocab=st.integers(2, 12), data=st.data(), beta=st.floats(0.01, 0.99), kind=st.sampled_from(KINDS))
def test_bounds_hold_for_any_distributions_also_with_zeros(vocab, data, beta, kind):
    weights = st.lists(st.sampled_from([0.0, 1e-6, 0.1, 1.0, 3.0]), min_size=vocab, max_size=vocab)
    p, q = (torch.tensor(data.draw(weights.filter(any)), dtype=torch.float64) for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    ids = torch.tensor(data.draw(st.permutations(range(vocab)))[: data.draw(st.integers(1, vocab))])
    sides = []
    for table in (p, q):
        rest = table.clone()
        rest[ids] = 0
        sides.append(TopLogProbs(table[ids].log().requires_grad_(), rest.sum().log().requires_grad_(), ids))
    loss = top_k_divergence(*sides, kind, beta=beta)
    low = loss.detach()
    true = by_definition(p.tolist(), q.tolist(), kind, beta)
    assert -1e-12 <= float(low) <= true + 1e-9
    if len(ids) == vocab and true < INF:
        assert float(low) == pytest.approx(true, abs=1e-9)
    loss.backward()
    grads = sides[1].log_probs.grad, sides[1].tail.grad
    assert not any(bool(grad.isnan().any()) for grad in grads)
    if float(low) < INF:
        assert all(bool(grad.isfinite().all()) for grad in grads)
    assert sides[0].log_probs.grad is None and sides[0].tail.grad is None
    if kind == "js":
        high = js_upper_bound(*sides, beta=beta)
        entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        mass = float((beta * sides[0].tail.exp() + (1 - beta) * sides[1].tail.exp()).detach())
        assert true - 1e-9 <= float(high) <= float(low) + math.log(2) * mass + 1e-9
        assert float(low) <= entropy + 1e-12


def test_the_upper_bound_is_reached_by_tails_that_share_no_id():
    p, q = [0.5, 0.5, 0.0], [0.5, 0.0, 0.5]
    sides = [TopLogProbs(torch.tensor([0.5]).double().log(), torch.tensor(0.5).double().log()) for _ in range(2)]
    assert float(top_k_divergence(*sides, "js", beta=0.2)) == pytest.approx(0)
    assert float(js_upper_bound(*sides, beta=0.2)) == pytest.approx(by_definition(p, q, "js", 0.2))


@each("kind", KINDS)
def test_missing_ids_and_empty_tails_add_nothing(kind):
    teacher = TopLogProbs(torch.tensor([0.7, 0.3, 0.0]).log(), torch.tensor(-INF), torch.tensor([4, 2, -1]))
    log_probs = torch.tensor([0.6, 0.4, 0.0]).log().requires_grad_()
    tail = torch.tensor(-INF).requires_grad_()
    loss = top_k_divergence(teacher, TopLogProbs(log_probs, tail, teacher.ids), kind)
    assert float(loss.detach()) == pytest.approx(by_definition([0.7, 0.3], [0.6, 0.4], kind), abs=1e-6)
    loss.backward()
    assert bool(log_probs.grad.isfinite().all()) and float(log_probs.grad[2]) == 0 and float(tail.grad) == 0


def test_what_only_one_side_finds_possible_makes_a_kl_infinite_and_js_finite():
    whole = TopLogProbs(torch.tensor([0.5]).log(), torch.tensor(0.5).log())
    narrow = TopLogProbs(torch.tensor([1.0]).log(), torch.tensor(-INF))
    assert float(top_k_divergence(whole, narrow)) == INF
    assert float(top_k_divergence(narrow, whole, "reverse_kl")) == INF
    assert float(top_k_divergence(narrow, whole)) == pytest.approx(math.log(2))
    assert float(top_k_divergence(whole, narrow, "js")) == pytest.approx(by_definition([0.5, 0.5], [1.0, 0.0], "js"))
    # A probability that float32 rounds to 0 is not impossible.
    tiny = TopLogProbs(torch.tensor([0.0]), torch.tensor(-200.0))
    for kind in KINDS:
        assert math.isfinite(float(top_k_divergence(tiny, whole, kind)))
        assert math.isfinite(float(top_k_divergence(whole, tiny, kind)))
    assert float(top_k_divergence(tiny, narrow)) == INF


@each("kind", KINDS)
@each("side", ["teacher", "student"])
def test_masked_positions_affect_nothing_and_nan_is_passed_on(kind, side):
    teacher, student = logits(0, 6, (2, 3)), logits(1, 6, (2, 3))
    mask = torch.tensor([[True, False, True], [False, True, True]])
    ours, theirs = of_tables(teacher, student, top(teacher, 3))
    clean = top_k_divergence(ours, theirs, kind)
    poisoned = ours if side == "teacher" else theirs
    poisoned.log_probs[0, 1], poisoned.tail[1, 0] = torch.nan, 5.0
    poisoned.ids[0, 1] = 7
    theirs = TopLogProbs(theirs.log_probs.requires_grad_(), theirs.tail.requires_grad_(), theirs.ids)
    value = top_k_divergence(ours, theirs, kind, mask=mask)
    assert torch.equal(value, torch.where(mask, clean, 0.0)) and not bool(value.signbit().any())
    value.sum().backward()
    for grad in (theirs.log_probs.grad, theirs.tail.grad):
        assert bool(grad.isfinite().all()) and not bool(grad[~mask].any()) and bool((grad[mask] != 0).any())
    ours = TopLogProbs(ours.log_probs, ours.tail)
    poisoned.tail.detach()[1, 0] = -1.0
    value = top_k_divergence(*(TopLogProbs(one.log_probs[0], one.tail[0]) for one in (ours, theirs)), kind)
    assert value.isnan().tolist() == [False, True, False]
    grad = torch.autograd.grad(value.sum(), theirs.log_probs)[0]
    assert bool(grad[0, 1].isnan().all()) and bool(grad[0, ::2].isfinite().all())


@each("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_precision_is_at_least_float32(dtype):
    teacher, student = logits(0, 6, (4,)), logits(1, 6, (4,))
    sides = of_tables(teacher, student, top(teacher, 3))
    short = [TopLogProbs(side.log_probs.to(dtype), side.tail.to(dtype)) for side in sides]
    for kind in KINDS:
        found = top_k_divergence(*short, kind)
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(found.double(), top_k_divergence(*sides, kind), rtol=0.05, atol=0.02)


def sound(shape=(2, 3), k=2):
    return TopLogProbs(
        torch.full((*shape, k), 0.25).log(),
        torch.full(shape, 1 - 0.25 * k).log(),
        torch.arange(k).expand(*shape, k).contiguous(),
    )


def refusal(teacher, student, **options):
    with pytest.raises(InvalidRequestError) as caught:
        top_k_divergence(teacher, student, **options)
    return caught.value


def test_probabilities_that_do_not_sum_to_one_are_refused_by_row_and_position():
    for name in ("teacher", "student"):
        bad = sound()
        bad.tail[1, 2] = 0.0
        bad.log_probs[0, 1, 0] = -0.1
        error = refusal(bad, sound()) if name == "teacher" else refusal(sound(), bad)
        assert error.field == name and error.rows == (0, 1)
        assert error.problems[1] == "position 2: the probabilities of the k ids and of the tail sum to 1.5, not to 1"
        assert error.problems[0].startswith("position 1: ")
    # A tail that was left out.
    short = sound()
    short.tail[0, 0] = -INF
    assert "sum to 0.5" in str(refusal(short, sound()))
    flat = sound((3,))
    flat.tail[2] = 0.0
    assert str(refusal(flat, sound((3,)))).startswith("teacher: position 2: ")
    deep = sound((2, 2, 3))
    deep.tail[1, 0, 2] = 0.0
    assert refusal(deep, sound((2, 2, 3))).rows == (2,)
    # Rounding is no reason to refuse.
    rounded = sound()
    rounded.tail[0, 0] += 1e-4
    assert bool(top_k_divergence(rounded, sound()).isfinite().all())


def test_ids_that_differ_or_are_there_twice_are_refused_by_row_and_position():
    other = sound()
    other.ids[1, 2, 1] = 9
    error = refusal(sound(), other)
    assert error.field == "student.ids" and error.rows == (1,)
    assert "position 2: the ids are not the teacher's; score the student at" in str(error)
    twice = sound()
    twice.ids[0, 1, 1] = 0
    error = refusal(twice, twice)
    assert str(error) == "teacher.ids: row 0: position 1: an id is there twice"
    missing = sound()
    missing.ids[...] = -1
    assert top_k_divergence(missing, missing).shape == (2, 3), "-1 may be there more than once"
    # Where a position does not count, ids may be anything.
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[1, 2] = False
    assert top_k_divergence(sound(), other, mask=mask).shape == (2, 3)
    assert top_k_divergence(TopLogProbs(other.log_probs, other.tail), sound()).shape == (2, 3)


@each(
    "teacher, student, field",
    [
        (sound(k=2), sound(k=3), "student"),
        (sound((2, 3)), sound((3,)), "student"),
        (TopLogProbs(torch.zeros(2, 3), torch.zeros(3)), sound(), "teacher.tail"),
        (TopLogProbs(torch.zeros(2, 0), torch.zeros(2)), sound(), "teacher.log_probs"),
        (TopLogProbs(torch.tensor(0.0), torch.tensor(0.0)), sound(), "teacher.log_probs"),
        (TopLogProbs(torch.zeros(2, 1).long(), torch.zeros(2)), sound(), "teacher.log_probs"),
        (TopLogProbs([[0.0]], torch.zeros(1)), sound(), "teacher.log_probs"),
        (sound(), sound().log_probs, "student"),
        (TopLogProbs(sound().log_probs, sound().tail, torch.zeros(2, 3, 2)), sound(), "teacher.ids"),
        (TopLogProbs(sound().log_probs, sound().tail, sound().ids[0]), sound(), "teacher.ids"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(teacher, student, field):
    with refused(InvalidRequestError, field=field):
        top_k_divergence(teacher, student)


def test_other_arguments_are_checked():
    assert refusal(sound(), sound(), kind="kl").field == "kind"
    for beta in (0.0, 1.0, -0.1, 2.0, float("nan"), True):
        assert refusal(sound(), sound(), kind="js", beta=beta).field == "beta"
    for mask in (torch.ones(3, dtype=torch.bool), torch.ones(2, 3), [True]):
        assert refusal(sound(), sound(), mask=mask).field == "mask"
