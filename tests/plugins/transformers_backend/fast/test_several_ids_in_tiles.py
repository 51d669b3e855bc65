"""Log-probs over sets and of several ids, by tiles, are those of plain logits in float64, with the same gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from corelm import Backend, Ragged
from helpers import oracle
from helpers.scoring_path import scoring_path
from helpers.tiny_models import DEVICE, random_rows, tiny_model
from transformers_backend.fast import head as head_module
from transformers_backend.fast.tiles import LogitTiles, TiledHead

from .test_tiles import inputs

Open = Callable[..., Backend]
#: More tokens and entries than a tile, and not a multiple of either; and fewer.
SIZES = [(1100, 2700, 33), (5, 7, 7), (1, 12, 1)]
FORMS = [(1.0, None, 1.0), (2.5, None, 0.7), (0.5, 8.0, 0.7)]


def tempered(leaves: list[Tensor], scale: float, cap: float | None, heat: float) -> Tensor:
    hidden, weight, *bias = leaves
    logits = scale * (hidden @ weight.T + sum(bias))
    return (logits if cap is None else cap * torch.tanh(logits / cap)) / heat


def others(ids: Tensor, vocab: int) -> Tensor:
    """Return bool[n, vocab]: which ids are not among those of their row, int64[n, k]."""
    mask = torch.ones(len(ids), vocab + 1, dtype=torch.bool)
    return mask.scatter_(1, torch.where(ids < 0, vocab, ids), False)[:, :vocab]


@pytest.mark.parametrize("given", [False, True], ids=["most probable", "given"])
@pytest.mark.parametrize(("n", "vocab", "k"), SIZES)
def test_several_ids_and_the_tail(n: int, vocab: int, k: int, given: bool) -> None:
    for bias, form in ((False, FORMS[1]), (True, FORMS[2])):
        _check_several_ids(n, vocab, k, bias, *form, given)
    if n == 5:
        # As many ids as a caller may ask for.
        _check_several_ids(70, 2048, 1024, True, *FORMS[0], given)


def _check_several_ids(
    n: int, vocab: int, k: int, bias: bool, scale: float, cap: float | None, heat: float, given: bool
) -> None:
    leaves, tokens = inputs(n, vocab, 24, torch.float32, bias)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = tempered(exact, scale, cap, heat)
    generator = torch.Generator().manual_seed(3)
    wanted: Tensor | int = k
    if given:
        wanted = torch.rand(n, vocab, generator=generator).argsort(1)[:, :k]
        wanted = wanted.masked_fill(torch.rand(n, k, generator=generator) < 0.2, -1)
    head = TiledHead(leaves[1], leaves[2] if bias else None, scale, cap)
    log_probs, top, argmax = head.logprobs_and_top(leaves[0], tokens, wanted, heat, argmax=True)
    assert argmax is not None
    every = logits.log_softmax(-1)
    # A few steps of float32 at the largest logit, which is 90 at most.
    atol = 1e-5 + 6 * torch.finfo(torch.float32).eps * float(logits.detach().abs().max())

    def close(found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found.double(), wanted, rtol=5e-7, atol=atol)

    close(logits.gather(1, argmax[:, None])[:, 0], logits.amax(1))
    close(log_probs, every.gather(1, tokens[:, None])[:, 0])
    if given:
        assert torch.equal(top.ids, wanted)
    else:
        close(top.logprobs, every.topk(k).values)
    there, rest = top.ids >= 0, others(top.ids, vocab)
    own = every.gather(1, top.ids.clamp_min(0))
    close(top.logprobs[there], own[there])
    assert (top.logprobs[~there] == -math.inf).all()
    tail = every.masked_fill(~rest, -math.inf).logsumexp(-1)
    some = rest.any(1)
    close(top.tail[some], tail[some])
    assert (top.tail[~some] == -math.inf).all()

    upstream = [torch.randn(shape, generator=generator) for shape in ((n,), (n, k), (n,))]
    parts = (
        (log_probs, top.logprobs[there], top.tail[some]),
        (every.gather(1, tokens[:, None])[:, 0], own[there], tail[some]),
    )
    ours, plain = (
        (a * upstream[0]).sum() + (b * upstream[1][there]).sum() + (c * upstream[2][some]).sum() for a, b, c in parts
    )
    for gradient, expected in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(plain, exact), strict=True):
        allowed = 1e-4 + 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=allowed)


@pytest.mark.parametrize(("n", "vocab"), [(300, 2700), (5, 7), (1, 1)])
def test_sets(n: int, vocab: int) -> None:
    for bias, form in ((False, FORMS[1]), (True, FORMS[2])):
        _check_sets(n, vocab, bias, *form)


def _check_sets(n: int, vocab: int, bias: bool, scale: float, cap: float | None, heat: float) -> None:
    leaves, tokens = inputs(n, vocab, 24, torch.float32, bias)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    generator = torch.Generator().manual_seed(3)
    # From one id to all of them, so that there are blocks of many positions and of few.
    sizes = torch.randint(1, 40, (n,), generator=generator)
    sizes[: n // 4] = vocab
    rows = [
        torch.cat([token[None], torch.randint(vocab, (size - 1,), generator=generator)]).unique()
        if size < vocab
        else torch.arange(vocab)
        for token, size in zip(tokens, sizes.tolist(), strict=True)
    ]
    sets = Ragged.from_list(rows)
    head = TiledHead(leaves[1], leaves[2] if bias else None, scale, cap)
    found = head.logprobs_in_sets(leaves[0], tokens, sets, heat)
    inside = torch.zeros(n, vocab, dtype=torch.bool)
    inside[sets.row_index, sets.values] = True
    logits = tempered(exact, scale, cap, heat).masked_fill(~inside, -math.inf)
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, rtol=5e-7, atol=2e-5)
    upstream = torch.randn(n, generator=generator)
    ours, plain = (
        torch.autograd.grad(found, leaves, upstream),
        torch.autograd.grad(expected, exact, upstream.double()),
    )
    for gradient, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-4)


def test_sets_of_a_wide_head() -> None:
    """More of the head than is copied at a time."""
    leaves, tokens = inputs(3, 1100, 4096, torch.float32, True)
    leaves = [(leaf / 64).detach().requires_grad_() for leaf in leaves]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    sets = Ragged.from_list([torch.arange(1100)] * 3)
    found = TiledHead(leaves[1], leaves[2]).logprobs_in_sets(leaves[0], tokens, sets)
    expected = tempered(exact, 1.0, None, 1.0).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)
    ours, plain = torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(expected.sum(), exact)
    for gradient, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck(bias: bool, cap: float | None) -> None:
    leaves, tokens = inputs(4, 9, 3, torch.float64, bias)
    sets = Ragged.from_list([sorted({int(token), 0, 5}) for token in tokens])
    ids = torch.tensor([[3, -1, 8], [0, 1, 2], [-1, -1, 4], [6, 5, 7]])

    def call(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        head = TiledHead(weight, bias, 1.7, cap)
        log_probs, top, _ = head.logprobs_and_top(hidden, tokens, 4, 0.6)
        named, given, _ = head.logprobs_and_top(hidden, tokens, ids, 0.6)
        over = head.logprobs_in_sets(hidden, tokens, sets, 0.6)
        one = head.logprobs(hidden, tokens, 0.6)
        return one, log_probs, top.logprobs, top.tail, named, given.logprobs[ids >= 0], given.tail, over

    assert torch.autograd.gradcheck(call, leaves)


def test_a_token_that_is_not_in_its_set_has_no_probability() -> None:
    (hidden, weight), _ = inputs(2, 9, 3, torch.float32, False)
    found = TiledHead(weight, None).logprobs_in_sets(hidden, torch.tensor([1, 2]), Ragged.from_list([[1, 3], [3, 4]]))
    assert found[0].isfinite() and found[1] == -math.inf


# The order in which a vocabulary comes --------------------------------------------------------------------------------


@pytest.mark.usefixtures("narrow_tiles")
def test_the_largest_are_found_in_any_order() -> None:
    """In ascending order every logit is among the largest so far when it comes."""
    for k in (1, 40):
        for order in ("ascending", "descending", "equal", "one row ascending"):
            _check_order(order, k)


def _check_order(order: str, k: int) -> None:
    rows, vocab = 6, 9 * 1024 + 3
    logits = torch.linspace(-30, 0, vocab).repeat(rows, 1)
    if order == "descending":
        logits = logits.flip(1)
    elif order == "equal":
        logits = torch.zeros_like(logits)
    elif order == "one row ascending":
        logits[1:] = logits[1:, torch.randperm(vocab, generator=torch.Generator().manual_seed(0))]
    # The head's rows are the columns of these logits, and the states pick one row each.
    _, top, _ = TiledHead(logits.T.contiguous(), None).logprobs_and_top(torch.eye(rows), torch.zeros(rows).long(), k)
    every = logits.double().log_softmax(-1)
    torch.testing.assert_close(top.logprobs.double(), every.topk(k).values, rtol=0, atol=1e-5)
    torch.testing.assert_close(top.logprobs.double(), every.gather(1, top.ids), rtol=0, atol=1e-5)
    assert all(len(set(ids)) == k for ids in top.ids.tolist())
    tail = every.masked_fill(~others(top.ids, vocab), -math.inf).logsumexp(-1)
    torch.testing.assert_close(top.tail.double(), tail, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("narrow_tiles")
@pytest.mark.parametrize("gap", [25.0, 200.0])
def test_a_small_tail_keeps_its_digits(gap: float) -> None:
    """One minus the sum of the wanted probabilities would be 0, or be off by a tenth at best."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5000, generator=generator)
    logits[:, [7, 3000]] += gap
    leaf = logits.T.contiguous().requires_grad_()
    exact = leaf.detach().double().requires_grad_()
    every = (torch.eye(3).double() @ exact.T).log_softmax(-1)
    for wanted in (2, torch.tensor([[7, 3000]] * 3)):
        _, top, _ = TiledHead(leaf, None).logprobs_and_top(torch.eye(3), torch.zeros(3).long(), wanted)
        tail = every.masked_fill(~others(top.ids, 5000), -math.inf).logsumexp(-1)
        assert float(tail.detach().max()) < 20 - gap
        torch.testing.assert_close(top.tail.double(), tail, rtol=2e-7, atol=1e-5)
        (found,) = torch.autograd.grad(top.tail.sum(), leaf, retain_graph=True)
        (expected,) = torch.autograd.grad(tail.sum(), exact, retain_graph=True)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("narrow_tiles")
def test_ids_at_minus_infinity() -> None:
    """The first tiles are all minus infinity, and fewer ids than wanted have a probability."""
    (hidden, weight), _ = inputs(2, 5000, 8, torch.float32, False)
    bias = torch.full((5000,), -math.inf)
    bias[4997:] = 0.0
    head = TiledHead(weight, bias)
    _, top, _ = head.logprobs_and_top(hidden, torch.tensor([4998, 3]), 5)
    assert top.ids.sort(1, descending=True).values.tolist() == [[4999, 4998, 4997, -1, -1]] * 2
    assert (top.logprobs[:, 3:] == -math.inf).all() and (top.tail == -math.inf).all()
    _, given, _ = head.logprobs_and_top(hidden, torch.tensor([4998, 3]), torch.tensor([[4999, 3, 4998]] * 2))
    assert (given.logprobs[:, 1] == -math.inf).all() and given.tail.isfinite().all()
    loss = top.logprobs[:, :3].sum() + given.logprobs[:, [0, 2]].sum() + given.tail.sum()
    for gradient in torch.autograd.grad(loss, [hidden, weight]):
        assert not gradient.isnan().any()


# Behind the backend ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "short"), [("gemma2", torch.bfloat16), ("phi-biased", torch.float16)])
def test_under_autocast_the_numbers_are_those_of_the_models_logits(
    open_model: Open, family: str, short: torch.dtype
) -> None:
    model, rows = tiny_model(family, initializer_range=0.05), random_rows(30, 40, 9)
    backend, sets = open_model(model), [[sorted({token, 5, 9, 300}) for token in row] for row in random_rows(30, 40, 9)]
    for dtype in (None, short, None):
        with nullcontext() if dtype is None else torch.autocast(DEVICE, dtype=dtype):
            over = backend.score_logprobs(rows, support=sets, grad=True)
            assert scoring_path(backend).head == "tiled"
            top = backend.score_logprobs(rows, top_k=4, grad=True)
            assert scoring_path(backend).head == "tiled"
            logits = torch.cat([oracle.own_logits(model, row)[:-1].float() for row in rows])
        atol = 1e-5 if dtype is None else 64 * torch.finfo(dtype).eps
        scored = over.scored.values
        ids = [own for row in sets for own in row[1:]]
        tokens = [token for row in rows for token in row[1:]]
        wanted = torch.stack(
            [row[own].log_softmax(0)[own.index(token)] for row, own, token in zip(logits, ids, tokens, strict=True)]
        )
        torch.testing.assert_close(over.logprobs.values[scored], wanted, rtol=1e-7, atol=atol)
        assert top.top_logprobs is not None and top.top_ids is not None
        expected = logits.log_softmax(-1).gather(1, top.top_ids.values[scored])
        torch.testing.assert_close(top.top_logprobs.values[scored], expected, rtol=1e-7, atol=atol)
        (found,) = torch.autograd.grad(over.logprobs.values.sum(), model.get_output_embeddings().weight)
        (plain,) = torch.autograd.grad(wanted.sum(), model.get_output_embeddings().weight)
        assert float((found - plain).norm()) <= float(plain.norm()) * (1e-5 if dtype is None else 16 * atol)


class WrongSets(TiledHead):
    def logprobs_in_sets(self, hidden: Tensor, tokens: Tensor, sets: Ragged, temperature: float = 1.0) -> Tensor:
        return super().logprobs_in_sets(hidden, tokens, sets, 1.0)


class SetsWithoutBias(TiledHead):
    def logprobs_in_sets(self, *args: Any, **kwargs: Any) -> Tensor:
        return TiledHead(self.weight, None, self.scale, self.cap, self.dtype).logprobs_in_sets(*args, **kwargs)


class SetsOfOneId(TiledHead):
    def logprobs_in_sets(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros_like(super().logprobs_in_sets(*args, **kwargs))


class WrongPlain(TiledHead):
    """Wrong for the commonest of requests only."""

    def logprobs_and_top(self, *args: Any, argmax: bool = False, **kwargs: Any) -> Any:
        log_probs, top, best = super().logprobs_and_top(*args, argmax=argmax, **kwargs)
        return log_probs + 0.5 * (top.ids.shape[1] == 0 and not argmax), top, best


class FailingPlain(TiledHead):
    def logprobs_and_top(self, *args: Any, argmax: bool = False, **kwargs: Any) -> Any:
        made = super().logprobs_and_top(*args, argmax=argmax, **kwargs)
        if made[1].ids.shape[1] == 0 and not argmax:
            raise RuntimeError("this device has no such kernel")
        return made


class WrongGiven(TiledHead):
    def logprobs_and_top(self, hidden: Tensor, tokens: Tensor, wanted: Tensor | int, *args: Any, **kwargs: Any) -> Any:
        log_probs, top, best = super().logprobs_and_top(hidden, tokens, wanted, *args, **kwargs)
        return log_probs, type(top)(top.ids, top.logprobs + 0.5 * torch.is_tensor(wanted), top.tail), best


class WrongTail(TiledHead):
    def logprobs_and_top(self, *args: Any, **kwargs: Any) -> Any:
        log_probs, top, argmax = super().logprobs_and_top(*args, **kwargs)
        # A short float rounds a logit by about 0.01.
        wrong = 0.01 if args[0].dtype == torch.float32 else 0.1
        return log_probs, type(top)(top.ids, top.logprobs, top.tail + wrong), argmax


class WrongOrder(TiledHead):
    def logprobs_and_top(self, *args: Any, **kwargs: Any) -> Any:
        log_probs, top, argmax = super().logprobs_and_top(*args, **kwargs)
        return log_probs, type(top)(top.ids.flip(1), top.logprobs, top.tail), argmax


class Failing(TiledHead):
    def logprobs_and_top(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("this device has no such kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "wrong",
    [WrongSets, SetsWithoutBias, SetsOfOneId, WrongPlain, FailingPlain, WrongGiven, WrongTail, WrongOrder, Failing],
)
def test_tiles_that_answer_otherwise_are_not_used(
    open_model: Open, wrong: type[TiledHead], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device on which a kernel is wrong cannot be provoked, so the head in tiles is one that is wrong."""
    model, rows = tiny_model("phi-biased").to(dtype), random_rows(30, 40)
    backend = open_model(model)
    expected = backend.score_logprobs(rows, top_k=4)
    assert scoring_path(backend).head == "tiled"
    monkeypatch.setattr(head_module, "TiledHead", wrong)
    other = open_model(model)
    found = other.score_logprobs(rows, top_k=4)
    assert scoring_path(other).head == "sliced"
    assert found.tail_log_mass is not None and expected.tail_log_mass is not None
    atol = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found.tail_log_mass.values, expected.tail_log_mass.values, rtol=0, atol=atol)


def test_tiles_that_are_others_than_the_models_logits_are_not_used(
    open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device whose products are wrong cannot be provoked, so the products of tiles are."""
    model, rows, product = tiny_model(), random_rows(30, 40), LogitTiles.product
    backend = open_model(model)
    expected = backend.score_logprobs(rows, top_k=4)
    assert scoring_path(backend).head == "tiled"

    def wrong(self: LogitTiles, some: slice, entries: slice) -> tuple[Tensor, float]:
        made, factor = product(self, some, entries)
        return made.mul_(1.01), factor

    monkeypatch.setattr(LogitTiles, "product", wrong)
    # Also where they were right before.
    for other in (open_model(model), backend):
        found = other.score_logprobs(rows, top_k=4)
        assert scoring_path(other).head == "sliced"
        assert found.tail_log_mass is not None and expected.tail_log_mass is not None
        torch.testing.assert_close(found.tail_log_mass.values, expected.tail_log_mass.values, rtol=0, atol=1e-5)
