"""The estimators against the closed form: every expectation is a sum over a small vocabulary, value and gradient."""

import functools
import itertools

import pytest
import torch
from torch.autograd import gradcheck

from corelm import Ragged
from corelm.errors import InvalidRequestError
from corelm.kl import aggregate, exact, k1, k1_st, k2, k3, k3_st, top_k
from corelm.kl.estimators import ESTIMATORS, MAX_K3, MAX_LOG_RATIO
from helpers.each import each
from helpers.refusals import refused

V = 6
NAMES = list(ESTIMATORS)
UNBIASED_VALUE = {"k1", "k1_st", "k3", "k3_st"}


def logits(seed=0, scale=1.0, shape=()):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, V, generator=generator, dtype=torch.float64)


def pair(seed=0, scale=1.0):
    """Return logits of gen, which require gradients, and log-probs of ref."""
    return logits(2 * seed, scale).requires_grad_(), logits(2 * seed + 1, scale).log_softmax(-1)


def closed_form(gen, ref):
    """Return KL(gen‖ref) by its definition."""
    p, q = gen.softmax(-1), ref.exp()
    return (p * (p / q).log()).sum(-1)


def slope(value, of):
    return torch.autograd.grad(value, of, retain_graph=True)[0]


def expectation(name, gen, ref):
    """Return the expectation of the estimator over all tokens gen may draw, and of its gradient as a loss."""
    log_p = gen.log_softmax(-1)
    values = ESTIMATORS[name](log_p, ref, None)
    weights = log_p.detach().exp()
    return (weights * values).sum(), slope((weights * values).sum(), gen)


def in_reward(name, gen, ref):
    """Return the expected policy gradient of a reward that the estimator is added to."""
    log_p = gen.log_softmax(-1)
    values = ESTIMATORS[name](log_p, ref, None).detach()
    return slope((log_p.detach().exp() * values * log_p).sum(), gen)


cases = each("seed, scale", list(itertools.product(range(3), (0.1, 1.0, 2.0))))


@cases
@each("name", NAMES)
def test_the_value_is_unbiased_exactly_where_the_table_says_so(name, seed, scale):
    gen, ref = pair(seed, scale)
    value, _ = expectation(name, gen, ref)
    assert torch.isclose(value, closed_form(gen, ref), rtol=1e-9, atol=0) == (name in UNBIASED_VALUE)


@cases
def test_k2_is_close_for_close_distributions_and_abs_is_an_upper_bound(seed, scale):
    gen, ref = pair(seed, scale)
    true = closed_form(gen, ref)
    assert expectation("abs", gen, ref)[0] > true
    near = gen.log_softmax(-1) + 0.01 * (ref - gen.log_softmax(-1))
    value, _ = expectation("k2", gen, near.detach().log_softmax(-1))
    torch.testing.assert_close(value, closed_form(gen, near.log_softmax(-1)), rtol=0.05, atol=0)


@cases
@each("name", NAMES)
def test_the_gradient_as_a_loss_is_what_the_table_says(name, seed, scale):
    gen, ref = pair(seed, scale)
    _, found = expectation(name, gen, ref)
    true = slope(closed_form(gen, ref), gen)
    other_way = slope((ref.exp() * (ref - gen.log_softmax(-1))).sum(), gen)
    if name == "k1":
        torch.testing.assert_close(found, torch.zeros_like(found))
    elif name == "k3":
        torch.testing.assert_close(found, other_way)
        assert not torch.allclose(found, true, rtol=1e-3)
    elif name == "abs":
        assert not torch.allclose(found, true, rtol=1e-3)
    else:
        torch.testing.assert_close(found, true)


@cases
@each("name", NAMES)
def test_in_the_reward_only_k1_has_the_gradient_of_the_divergence(name, seed, scale):
    gen, ref = pair(seed, scale)
    true = slope(closed_form(gen, ref), gen)
    assert torch.allclose(in_reward(name, gen, ref), true, rtol=1e-6, atol=1e-12) == (name in ("k1", "k1_st"))


@cases
def test_in_the_reward_k3_subtracts_the_gradient_of_the_reverse_divergence(seed, scale):
    gen, ref = pair(seed, scale)
    other_way = slope((ref.exp() * (ref - gen.log_softmax(-1))).sum(), gen)
    torch.testing.assert_close(in_reward("k3", gen, ref), slope(closed_form(gen, ref), gen) - other_way)


def test_straight_through_has_the_exact_value_and_the_gradient_of_k2():
    for scale in (1e-4, 1.0, 30.0):
        gen = (scale * torch.randn(50, generator=torch.Generator().manual_seed(0)) - scale).requires_grad_()
        ref = gen.detach().flip(0)
        for straight, plain in ((k1_st, k1), (k3_st, k3)):
            assert torch.equal(straight(gen, ref), plain(gen, ref))
            assert torch.equal(slope(straight(gen, ref).sum(), gen), slope(k2(gen, ref).sum(), gen))


@each("name", NAMES)
def test_autograd_agrees_with_finite_differences(name):
    gen, ref = logits(0, shape=(3,)).requires_grad_(), logits(1, shape=(3,)).requires_grad_()
    mask = torch.arange(18).reshape(3, V) % 4 != 0
    if not name.endswith("_st"):
        assert gradcheck(lambda a, b: ESTIMATORS[name](a, b, mask), (gen, ref))


@each("name", NAMES)
@each("shape", [(), (0,), (5,), (2, 0), (2, 3), (2, 3, 4)])
def test_shapes_are_kept_and_precision_is_at_least_float32(name, shape):
    for dtype, made in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        gen, ref = torch.full(shape, -1.5, dtype=dtype), torch.full(shape, -1.0, dtype=dtype)
        value = ESTIMATORS[name](gen, ref, torch.ones(shape, dtype=torch.bool))
        assert value.shape == shape and value.dtype == made
        assert torch.equal(value, ESTIMATORS[name](gen, ref, None))


def test_a_small_divergence_is_not_lost_to_rounding():
    # exp(x) − 1 − x in float32 would be off by a tenth here.
    gen, ref = torch.tensor([-1.0]), torch.tensor([-1.0 + 2.0**-11])
    torch.testing.assert_close(float(k3(gen, ref)), 2.0**-23, rtol=1e-3, atol=0)


def test_extremes_stay_finite_in_value_and_gradient():
    gen = torch.tensor([-200.0, -30.0, -0.1, -0.1, -9.0], requires_grad=True)
    ref = torch.tensor([-0.1, -0.1, -60.0, -90.0, -0.1])
    value = k3(gen, ref)
    assert bool(torch.isfinite(value).all()) and float(value.detach().max()) == MAX_K3
    # The value of a token that ref finds unlikely is not clamped to MAX_LOG_RATIO, only the exponent is.
    torch.testing.assert_close(value[2:4], torch.tensor([58.9, 88.9]))
    assert MAX_LOG_RATIO < 58.9
    value.sum().backward()
    assert bool(torch.isfinite(gen.grad).all()) and bool((gen.grad[:2] == 0).all()) and bool((gen.grad[2:] != 0).all())


def test_shapes_that_do_not_fit_are_refused_and_not_broadcast():
    for name in NAMES:
        with refused(InvalidRequestError, field="ref"):
            ESTIMATORS[name](torch.zeros(2, 3), torch.zeros(3), None)
        with refused(InvalidRequestError, field="mask"):
            ESTIMATORS[name](torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3, dtype=torch.bool))
        with refused(InvalidRequestError, field="mask"):
            ESTIMATORS[name](torch.zeros(2), torch.zeros(2), torch.ones(2))
        with pytest.raises(InvalidRequestError, match=r"gen: expected a tensor, got list; corelm.ragged\(td, "):
            ESTIMATORS[name]([torch.zeros(2)], [torch.zeros(2)], None)
    with refused(InvalidRequestError, field="ref_logits"):
        exact(torch.zeros(2, 3), torch.zeros(2, 4))
    with refused(InvalidRequestError, field="k"):
        top_k(torch.zeros(2, 3), torch.zeros(2, 3), k=0)


# From logits ---------------------------------------------------------------------------------------------------------


@cases
def test_exact_is_the_closed_form_in_value_and_gradient(seed, scale):
    gen, ref = pair(seed, scale)
    torch.testing.assert_close(exact(gen, ref), closed_form(gen, ref))
    torch.testing.assert_close(slope(exact(gen, ref), gen), slope(closed_form(gen, ref), gen))
    # Logits are normalised: a constant changes nothing.
    torch.testing.assert_close(exact(gen + 3, ref - 5), closed_form(gen, ref))


@cases
def test_top_k_is_the_divergence_with_the_rest_in_one_bucket(seed, scale):
    gen, ref = pair(seed, scale)
    true, found = closed_form(gen, ref), [top_k(gen, ref, k=k) for k in range(1, V + 2)]
    for k in range(1, V):
        best = gen.argsort(descending=True)[:k]
        rest = torch.ones(V, dtype=torch.bool)
        rest[best] = False
        p, q = (torch.cat([t[best], t[rest].sum(0, keepdim=True)]) for t in (gen.softmax(-1), ref.exp()))
        by_hand = (p * (p / q).log()).sum()
        torch.testing.assert_close(found[k - 1], by_hand)
        torch.testing.assert_close(slope(found[k - 1], gen), slope(by_hand, gen))
    assert all(0 <= value <= true + 1e-12 for value in found)
    for value in found[V - 2 :]:
        torch.testing.assert_close(value, true)
        torch.testing.assert_close(slope(value, gen), slope(true, gen))


def test_tokens_that_gen_excludes_add_nothing():
    gen, ref = logits(0).requires_grad_(), logits(1)
    barred = gen.index_fill(-1, torch.tensor([0, 4]), float("-inf"))
    left = [1, 2, 3, 5]
    p, log_q = barred[left].softmax(-1), ref.log_softmax(-1)[left]
    expected = (p * (p.log() - log_q)).sum()
    for value in (exact(barred, ref), top_k(barred, ref, k=4), top_k(barred, ref, k=5)):
        torch.testing.assert_close(value, expected)
        assert bool(torch.isfinite(slope(value, gen)).all())
    both = ref.index_fill(-1, torch.tensor([0, 4]), float("-inf"))
    assert bool(torch.isfinite(exact(barred, both)))
    assert exact(gen, both) == float("inf")


@each("k", [None, 8])
def test_a_large_vocabulary_loses_no_digits_where_one_token_is_nearly_sure(k):
    """PyTorch's own float32 log-softmax is off by 4e-5 there, on a CPU."""
    gen, noise = torch.randn(2, 16, 49_152, generator=torch.Generator().manual_seed(0))
    gen[:, 100] += 20.0
    divergence = exact if k is None else functools.partial(top_k, k=k)
    for ref in (gen * 1.05, gen + 0.1 * noise):
        found, true = divergence(gen, ref), divergence(gen.double(), ref.double())
        torch.testing.assert_close(found.double(), true, rtol=0, atol=6e-6)


# Aggregation ---------------------------------------------------------------------------------------------------------

VALUES = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 0.0, 0.0], [7.0, 7.0, 7.0, 7.0]])
MASK = torch.tensor([[True, True, False, True], [False, True, False, False], [False] * 4])
EXPECTED = {
    "token-sum": 27.0,
    "token-mean": 27.0 / 4,
    "seq-mean-token-sum": (7.0 + 20.0) / 2,
    "seq-mean-token-mean": (7.0 / 3 + 20.0) / 2,
}


@each("how", EXPECTED)
def test_dense_and_ragged_aggregates_match_numbers_by_hand(how):
    assert float(aggregate(VALUES, MASK, how)) == pytest.approx(EXPECTED[how])
    # No token of the third sequence counts, so the sequence is left out.
    assert float(aggregate(VALUES[:2], MASK[:2], how)) == pytest.approx(EXPECTED[how])
    rows, mask = ([*t[0], *t[1, :2], *t[2, :1]] for t in (VALUES, MASK))
    lengths = torch.tensor([4, 2, 1])
    as_rows = [Ragged(torch.stack(flat), lengths) for flat in (rows, mask)]
    assert float(aggregate(*as_rows, how)) == pytest.approx(EXPECTED[how])
    batched = aggregate(VALUES.reshape(3, 1, 4).expand(3, 2, 4), MASK.reshape(3, 1, 4).expand(3, 2, 4), how)
    assert float(batched) == pytest.approx(EXPECTED[how] * (2 if how == "token-sum" else 1))


@each("how", EXPECTED)
def test_an_aggregate_without_tokens_is_zero_with_a_gradient_of_zero(how):
    for shape in ((3, 4), (0, 4), (3, 0)):
        values = torch.full(shape, torch.nan, requires_grad=True)
        for given in (values, Ragged(values.flatten(), torch.full(shape[:1], shape[1]))):
            nothing = torch.zeros(shape, dtype=torch.bool)
            mask = Ragged(nothing.flatten(), given.lengths) if isinstance(given, Ragged) else nothing
            value = aggregate(given, mask, how)
            assert float(value.detach()) == 0.0
            assert not bool(slope(value, values).any())


def test_without_a_mask_everything_counts():
    assert float(aggregate(VALUES)) == pytest.approx(float(VALUES.mean()))
    assert float(aggregate(Ragged(VALUES.flatten(), torch.tensor([12])))) == pytest.approx(float(VALUES.mean()))
    assert float(aggregate(torch.tensor([1.0, 3.0]), None, "seq-mean-token-mean")) == 2.0


def test_aggregate_refuses_invalid_arguments():
    with refused(InvalidRequestError, field="how"):
        aggregate(VALUES, MASK, "mean")
    rows = Ragged(VALUES.flatten(), torch.tensor([12]))
    for values, mask in ((rows, MASK), (VALUES, rows), (rows, Ragged(MASK.flatten(), torch.tensor([4, 8])))):
        with refused(InvalidRequestError, field="mask"):
            aggregate(values, mask)
    with refused(InvalidRequestError, field="values"):
        aggregate(list(VALUES), MASK)
