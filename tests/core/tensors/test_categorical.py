"""`MaskedCategorical`, compared with a plain log-softmax of every position in values, gradients and memory."""

import torch
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from corelm.errors import InvalidRequestError
from corelm.tensors.categorical import MaskedCategorical
from helpers.each import each
from helpers.refusals import refused

V = 7


class Sliced(MaskedCategorical):
    """Handles two positions at a time, so that a small example has several slices and a shorter last one."""

    SLICE = 2 * V


def example(dtype=torch.float64, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 4, V, generator=generator, dtype=torch.float64)).to(dtype)
    mask = torch.tensor([[True, False, True, True], [False, True, True, False]])
    ids = torch.randint(V, (2, 4), generator=generator)
    return logits.requires_grad_(requires_grad), mask, ids


def plain(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


kinds = each("kind", [MaskedCategorical, Sliced])


@kinds
def test_log_prob_and_entropy_equal_those_of_a_plain_softmax(kind):
    logits, mask, ids = example()
    table = logits.log_softmax(-1)
    dist = kind(logits, mask)
    torch.testing.assert_close(dist.log_prob(ids), torch.where(mask, plain(logits, ids), 0.0))
    torch.testing.assert_close(dist.entropy(), torch.where(mask, -(table.exp() * table).sum(-1), 0.0))
    assert torch.equal(dist.mode, torch.where(mask, logits.argmax(-1), -100))
    assert dist.batch_shape == (2, 4) and dist.event_shape == ()


@kinds
def test_gradients_equal_those_of_a_plain_softmax_and_pass_gradcheck(kind):
    logits, mask, ids = example(requires_grad=True)
    weights = torch.arange(8.0, dtype=torch.float64).reshape(2, 4) - 3
    table = logits.log_softmax(-1)
    entropy = -(table.exp() * table).sum(-1)
    (expected,) = torch.autograd.grad((weights * (plain(logits, ids) + entropy))[mask].sum(), logits)
    dist = kind(logits, mask)
    (found,) = torch.autograd.grad((weights * (dist.log_prob(ids) + dist.entropy())).sum(), logits)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[~mask], torch.zeros_like(found[~mask]))
    assert gradcheck(lambda x: kind(x, mask).log_prob(ids), logits)
    assert gradcheck(lambda x: kind(x, mask).entropy(), logits)


def test_several_samples_are_scored_at_once():
    logits, mask, _ = example(requires_grad=True)
    dist = Sliced(logits, mask)
    ids = dist.sample((3, 2))
    assert ids.shape == (3, 2, 2, 4)
    found = dist.log_prob(ids)
    assert found.shape == ids.shape
    for row, one in zip(found.flatten(0, 1), ids.flatten(0, 1), strict=True):
        torch.testing.assert_close(row, dist.log_prob(one))
    (together,) = torch.autograd.grad(found.sum(), logits)
    (apart,) = torch.autograd.grad(sum(dist.log_prob(one).sum() for one in ids.flatten(0, 1)), logits)
    torch.testing.assert_close(together, apart)


@each("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_are_normalised_in_float32_and_get_gradients_in_their_dtype(dtype):
    logits, mask, ids = example(dtype, requires_grad=True)
    dist = Sliced(logits, mask)
    expected = plain(logits.detach().double(), ids)
    found = dist.log_prob(ids)
    assert found.dtype == dist.entropy().dtype == torch.float32
    torch.testing.assert_close(found[mask].double(), expected[mask], atol=2e-6, rtol=0)
    found.sum().backward()
    assert logits.grad.dtype == dtype and bool(logits.grad[mask].any())


@each("poison", [float("nan"), float("inf"), float("-inf")])
def test_logits_at_masked_positions_have_no_effect(poison):
    logits, mask, ids = example(requires_grad=True)
    poisoned = torch.where(mask[..., None], logits, poison)
    dist = Sliced(poisoned, mask)
    ids = torch.where(mask, ids, -100)
    for value in (dist.log_prob(ids), dist.entropy()):
        assert bool(torch.isfinite(value).all()) and bool((value[~mask] == 0).all())
        (grad,) = torch.autograd.grad(value.sum(), logits, retain_graph=True)
        assert bool(torch.isfinite(grad).all())
    assert bool((dist.mode[~mask] == -100).all()) and bool((dist.sample()[~mask] == -100).all())


def test_an_excluded_token_has_probability_zero_and_makes_no_nan():
    logits, mask, _ = example(requires_grad=True)
    barred = logits.index_fill(-1, torch.tensor([2]), float("-inf"))
    dist = Sliced(barred, mask)
    assert torch.equal(dist.log_prob(torch.full((2, 4), 2))[mask], torch.full((5,), float("-inf"), dtype=torch.float64))
    assert not bool((dist.sample((500,)) == 2).any())
    six = barred[..., [0, 1, 3, 4, 5, 6]].log_softmax(-1)
    torch.testing.assert_close(dist.entropy()[mask], -(six.exp() * six).sum(-1)[mask])
    (grad,) = torch.autograd.grad(dist.entropy().sum(), logits)
    assert bool(torch.isfinite(grad).all()) and bool((grad[..., 2] == 0).all())


def test_samples_follow_the_distribution():
    torch.manual_seed(0)
    logits, mask, _ = example()
    draws = 20_000
    counts = torch.nn.functional.one_hot(Sliced(logits, mask).sample((draws,))[:, mask], V).sum(0).double()
    expected = logits.softmax(-1)[mask] * draws
    chi_square = ((counts - expected).square() / expected).sum(-1)
    # 6 degrees of freedom: one in a thousand is above 22.5, and there are five positions.
    assert bool((chi_square < 27.9).all()), chi_square


@kinds
def test_a_mask_without_true_positions_is_accepted(kind):
    logits, mask, ids = example(requires_grad=True)
    for dist in (kind(logits, torch.zeros_like(mask)), kind(logits[:0], mask[:0])):
        shape = dist.batch_shape
        value = dist.log_prob(ids[: shape[0]]) + dist.entropy()
        assert value.shape == shape and not bool(value.any())
        assert dist.sample((2,)).shape == (2, *shape) and dist.mode.shape == shape
        value.sum().backward()


def test_a_single_position_is_accepted():
    dist = MaskedCategorical(torch.tensor([0.0, 0.0]), torch.tensor(True))
    assert dist.batch_shape == () and dist.sample((3,)).shape == (3,)
    torch.testing.assert_close(dist.entropy(), torch.tensor(2.0).log())
    torch.testing.assert_close(dist.log_prob(torch.tensor(1)), -torch.tensor(2.0).log())


def test_shapes_and_ids_that_do_not_fit_are_refused():
    logits, mask, ids = example()
    with refused(InvalidRequestError, field="mask") as error:
        MaskedCategorical(logits, mask[:, 1:])
    assert f"for logits {list(logits.shape)}" in str(error.value)
    assert MaskedCategorical(logits[..., :0], mask).mask.shape == mask.shape
    with refused(InvalidRequestError, field="mask"):
        MaskedCategorical(logits, mask.float())
    dist = MaskedCategorical(logits, mask)
    with refused(InvalidRequestError, field="value"):
        dist.log_prob(ids[:, 1:])
    with refused(InvalidRequestError, field="value"):
        dist.log_prob(ids + 7)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns, other than views of `given`."""

    def __init__(self, given):
        super().__init__()
        self.own, self.numel = given.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != self.own:
            self.numel = max(self.numel, out.numel())
        return out


def test_no_tensor_as_large_as_the_logits_is_made_or_kept():
    torch.manual_seed(0)
    vocab, positions = 1000, 64

    class Small(MaskedCategorical):
        SLICE = 4 * vocab

    logits = torch.randn(2, positions // 2, vocab, requires_grad=True)
    mask = torch.ones(2, positions // 2, dtype=torch.bool)
    ids = torch.randint(vocab, mask.shape)
    kept = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with keep, Largest(logits) as largest:
        value = Small(logits, mask).log_prob(ids) + Small(logits, mask).entropy()
        Small(logits, mask).sample()
        assert Small(logits, mask).mode.shape == mask.shape
    assert largest.numel <= 4 * vocab, "no operation returns more than a slice"
    own = logits.untyped_storage().data_ptr()
    assert max(t.numel() for t in kept if t.untyped_storage().data_ptr() != own) <= positions
    value.sum().backward()
    assert logits.grad.shape == logits.shape


NAN, INF = float("nan"), float("inf")


@kinds
@each("row", [[NAN], [INF], [-INF] * V, [INF, -INF], [NAN, INF]])
def test_logits_that_are_no_distribution_give_nan_or_an_error_that_names_the_position(kind, row):
    logits, mask, ids = example()
    clean = kind(logits.clone(), mask)
    logits[1, 1, : len(row)] = torch.tensor(row, dtype=logits.dtype)
    dist = kind(logits.requires_grad_(), mask)
    other = torch.ones_like(mask)
    other[1, 1] = False
    for token in range(V):
        tokens = torch.full_like(ids, token)
        found = dist.log_prob(tokens)
        assert bool(found[1, 1].isnan()) and torch.equal(found[other], clean.log_prob(tokens)[other])
    entropy = dist.entropy()
    assert bool(entropy[1, 1].isnan()) and torch.equal(entropy[other], clean.entropy()[other])
    (grad,) = torch.autograd.grad((found + entropy).sum(), logits)
    assert bool(grad[1, 1].isnan().any()) and bool(torch.isfinite(grad[other]).all())
    for draw in (lambda: dist.mode, dist.sample, lambda: dist.sample((2,))):
        with refused(InvalidRequestError, field="logits", rows=(1,)):
            draw()
