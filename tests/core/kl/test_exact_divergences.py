"""Divergences made tile by tile from hidden states, against two tables of log-softmax."""

import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from corelm.errors import InvalidRequestError
from corelm.kl import OutputHead, exact_divergence
from helpers.each import each
from helpers.refusals import refused

KINDS = ("forward_kl", "reverse_kl", "js")
#: Positions, and entries of the vocabulary, of a tile on a CPU: 4 MiB of float32.
TILE = 1024
#: More positions and ids than a tile has, and no multiples of it.
POSITIONS, VOCAB = TILE + 70, 2 * TILE + 131


def tensor(seed, *shape, dtype=torch.float64, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def sides(positions, vocab, dtype=torch.float64, *, bias=True, scale=0.8, cap=None, widths=(7, 4)):
    """Return hidden states and head of a teacher, then of a student; all require gradients."""
    found = []
    for seed, width in enumerate(widths):
        parts = (tensor(10 * seed, positions, width, dtype=dtype), tensor(10 * seed + 1, vocab, width, dtype=dtype))
        hidden, weight = (part.requires_grad_() for part in parts)
        offset = tensor(10 * seed + 2, vocab, dtype=dtype).requires_grad_() if bias else None
        found += [hidden, OutputHead(weight, offset, scale, cap)]
    return found


def logits_of(hidden, head):
    logits = hidden @ head.weight.T
    logits = head.scale * (logits if head.bias is None else logits + head.bias)
    return logits if head.cap is None else head.cap * torch.tanh(logits / head.cap)


def plainly(teacher_hidden, teacher_head, student_hidden, student_head, kind, beta=0.5, temperature=1.0):
    """Return the divergence by its definition, from two tables."""
    log_p = (logits_of(teacher_hidden, teacher_head) / temperature).log_softmax(-1).detach()
    log_q = (logits_of(student_hidden, student_head) / temperature).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    log_m = (beta * p + (1 - beta) * q).log()
    return {
        "forward_kl": p * (log_p - log_q),
        "reverse_kl": q * (log_q - log_p),
        "js": beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m),
    }[kind].sum(-1)


def leaves(hidden, head):
    return [one for one in (hidden, head.weight, head.bias) if one is not None]


def assert_near(found, wanted, share):
    """Compare with the largest entry: sums of many terms are rounded relative to the largest of them."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert float((found - wanted).detach().abs().max()) <= share * float(wanted.detach().abs().max())


@each(
    "kind, dtype, share, head",
    [
        ("forward_kl", torch.float64, 1e-11, {}),
        ("forward_kl", torch.float64, 1e-11, {"cap": 3.0}),
        ("reverse_kl", torch.float64, 1e-11, {"cap": 3.0, "bias": False}),
        ("js", torch.float64, 1e-11, {"cap": 3.0}),
        ("js", torch.float32, 1e-5, {"bias": False, "scale": 1.0}),
    ],
)
def test_values_and_gradients_are_those_of_two_tables(kind, dtype, share, head):
    given = sides(POSITIONS, VOCAB, dtype, **head)
    found = exact_divergence(*given, kind, beta=0.3, temperature=1.7)
    wanted = plainly(*given, kind, 0.3, 1.7)
    assert_near(found, wanted, share)
    upstream = tensor(5, POSITIONS, dtype=dtype)
    student = leaves(*given[2:])
    ours, theirs = (torch.autograd.grad((value * upstream).sum(), student) for value in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        assert_near(one, other, share)


@each("kind", KINDS)
@each("cap", [None, 2.0])
def test_the_gradient_is_that_of_finite_differences(kind, cap):
    teacher, teacher_head, hidden, head = sides(3, 9, cap=cap)

    def of(hidden, weight, bias):
        made = OutputHead(weight, bias, head.scale, cap)
        return exact_divergence(teacher, teacher_head, hidden, made, kind, beta=0.3, temperature=0.7)

    assert gradcheck(of, (hidden, head.weight, head.bias))


def test_no_gradient_reaches_the_teacher_and_each_of_the_students_is_made_alone():
    teacher, teacher_head, hidden, head = sides(5, 12)
    wanted = torch.autograd.grad(plainly(teacher, teacher_head, hidden, head, "js").sum(), leaves(hidden, head))
    exact_divergence(teacher, teacher_head, hidden, head, "js").sum().backward()
    assert all(leaf.grad is None for leaf in leaves(teacher, teacher_head))
    for place, leaf in enumerate(leaves(hidden, head)):
        frozen = [one.detach() for one in leaves(hidden, head)]
        frozen[place].requires_grad_()
        made = exact_divergence(teacher, teacher_head, frozen[0], OutputHead(*frozen[1:], head.scale), "js")
        made.sum().backward()
        torch.testing.assert_close(frozen[place].grad, leaf.grad)
        torch.testing.assert_close(leaf.grad, wanted[place])
    with torch.no_grad():
        assert not exact_divergence(teacher, teacher_head, hidden, head).requires_grad


@each("kind", KINDS)
def test_masked_positions_affect_nothing(kind):
    teacher, teacher_head, hidden, head = sides(6, 12)
    mask = torch.tensor([[True, False, True], [False, True, True]])
    clean = plainly(teacher, teacher_head, hidden, head, kind).reshape(2, 3).detach()
    spoilt = hidden.detach().clone()
    spoilt[1], teacher.data[3] = torch.nan, torch.inf
    spoilt.requires_grad_()
    found = exact_divergence(teacher.reshape(2, 3, -1), teacher_head, spoilt.reshape(2, 3, -1), head, kind, mask=mask)
    torch.testing.assert_close(found.detach(), torch.where(mask, clean, 0.0))
    found.sum().backward()
    assert all(bool(leaf.grad.isfinite().all()) for leaf in leaves(spoilt, head))
    assert not bool(spoilt.grad[~mask.flatten()].any())
    nothing = exact_divergence(teacher, teacher_head, spoilt, head, kind, mask=torch.zeros(6, dtype=torch.bool))
    assert not bool(nothing.any()) and nothing.shape == (6,)
    assert exact_divergence(teacher[:0], teacher_head, spoilt[:0], head, kind).shape == (0,)


@each("kind", KINDS)
def test_ids_that_both_exclude_add_nothing_and_nan_is_passed_on(kind):
    teacher, teacher_head, hidden, head = sides(4, 12)
    barred = torch.zeros(12, dtype=torch.float64).index_fill(0, torch.tensor([0, 7]), -math.inf)
    left = [i for i in range(12) if i not in (0, 7)]
    out = [OutputHead(one.weight, one.bias + barred, one.scale) for one in (teacher_head, head)]
    kept = [OutputHead(one.weight[left], one.bias[left], one.scale) for one in (teacher_head, head)]
    found = exact_divergence(teacher, out[0], hidden, out[1], kind)
    torch.testing.assert_close(found, plainly(teacher, kept[0], hidden, kept[1], kind))
    (grad,) = torch.autograd.grad(found.sum(), hidden, retain_graph=True)
    torch.testing.assert_close(
        grad, torch.autograd.grad(plainly(teacher, kept[0], hidden, kept[1], kind).sum(), hidden)[0]
    )
    # Only the teacher excludes them.
    found = exact_divergence(teacher, out[0], hidden, head, kind)
    assert bool(found.isfinite().all()) == (kind != "reverse_kl")
    for bad in (torch.nan, torch.inf):
        spoilt = hidden.detach().clone()
        spoilt[2, 0] = bad
        assert exact_divergence(teacher, teacher_head, spoilt, head, kind).isnan().tolist() == [
            False,
            False,
            True,
            False,
        ]


@each("kind", KINDS)
def test_short_floats_and_autocast(kind):
    teacher, teacher_head, hidden, head = sides(20, 300, torch.bfloat16)
    wanted = plainly(teacher.double(), in_double(teacher_head), hidden.double(), in_double(head), kind)
    found = exact_divergence(teacher, teacher_head, hidden, head, kind)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=0.05, atol=0.02)
    found.sum().backward()
    assert [leaf.grad.dtype for leaf in leaves(hidden, head)] == [torch.bfloat16] * 3
    given = sides(20, 300, torch.float32)
    wanted = exact_divergence(*given, kind)
    with torch.autocast("cpu", torch.bfloat16):
        found = exact_divergence(*given, kind)
        ours, theirs = (torch.autograd.grad(one.sum(), leaves(*given[2:])) for one in (found, wanted))
    assert torch.equal(found, wanted) and all(map(torch.equal, ours, theirs))


def in_double(head):
    return OutputHead(head.weight.double(), None if head.bias is None else head.bias.double(), head.scale, head.cap)


def test_a_teacher_that_was_changed_before_the_gradient_is_noticed():
    teacher, teacher_head, hidden, head = sides(4, 12)
    found = exact_divergence(teacher, teacher_head, hidden, head).sum()
    with torch.no_grad():
        teacher_head.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that is made, views of given ones left out."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, torch.Tensor) and not one._is_view():
                self.elements = max(self.elements, one.numel())
        return made


@each("kind", KINDS)
def test_no_tensor_is_larger_than_a_tile_or_the_gradient_of_the_head(kind):
    given = sides(POSITIONS, VOCAB, torch.float32, bias=False)
    given[3].weight.requires_grad_(False)
    with Largest() as seen:
        exact_divergence(*given, kind).sum().backward()
    assert seen.elements == TILE * TILE < POSITIONS * VOCAB


T, TH, S, SH = sides(3, 9)


@each(
    "given, field",
    [
        ((T, OutputHead(TH.weight[:8]), S, SH), "teacher_head"),
        ((T[:2], TH, S, SH), "teacher_hidden"),
        ((T, SH, S, SH), "teacher_head"),
        ((T, TH, S, OutputHead(SH.weight, SH.bias[:4])), "student_head"),
        ((T, TH, S, SH.weight), "student_head"),
        ((T, TH, S, OutputHead(SH.weight[0])), "student_head"),
        ((T.long(), TH, S, SH), "teacher_hidden"),
        ((T, TH, S[:, :0], SH), "student_hidden"),
        ((T, TH, S, OutputHead(SH.weight, cap=0.0)), "student_head.cap"),
        ((T, TH, S, OutputHead(SH.weight, scale=math.nan)), "student_head.scale"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given, field):
    with refused(InvalidRequestError, field=field):
        exact_divergence(*given)


def test_other_arguments_are_checked():
    for options in ({"kind": "kl"}, {"beta": 1.0}, {"temperature": 0.0}, {"mask": torch.ones(2, dtype=torch.bool)}):
        with pytest.raises(InvalidRequestError) as caught:
            exact_divergence(T, TH, S, SH, **options)
        assert caught.value.field == next(iter(options))
