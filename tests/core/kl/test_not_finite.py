"""What NaN and infinity mean in every argument of `corelm.kl`: the docstring of the package, as one table."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from corelm import LogProbs, Masks, Ragged
from corelm.errors import InvalidRequestError
from corelm.kl import (
    AdaptiveKLController,
    FixedKLController,
    ImportanceCorrection,
    KLComputation,
    abs_kl,
    aggregate,
    exact,
    k1,
    k1_st,
    k2,
    k3,
    k3_st,
    mismatch_report,
    top_k,
)
from corelm.kl.estimators import ESTIMATORS, MAX_K3
from helpers.each import each
from helpers.refusals import refused

NAN, INF = float("nan"), float("inf")
POISONS = {"nan": NAN, "inf": INF, "-inf": -INF}
REFUSED = "refused"
BAD = 1  # the position of two that is poisoned


def of_log_probs(estimate: Any, side: str) -> Callable[[float, bool], Any]:
    def call(poison: float, counts: bool) -> Any:
        values = {"gen": torch.tensor([-1.0, -2.0]), "ref": torch.tensor([-1.5, -1.0])}
        values[side][BAD] = poison
        gen, ref = (values[name].requires_grad_() for name in ("gen", "ref"))
        return estimate(gen, ref, torch.tensor([True, counts])), gen, ref

    return call


def of_logits(divergence: Any, side: str, tokens: slice) -> Callable[[float, bool], Any]:
    def call(poison: float, counts: bool) -> Any:
        values = {name: torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 3.0]]) for name in ("gen", "ref")}
        values[side][BAD, tokens] = poison
        gen, ref = (values[name].requires_grad_() for name in ("gen", "ref"))
        return divergence(gen, ref, torch.tensor([True, counts])), gen, ref

    return call


def of_values(how: str, flat: bool) -> Callable[[float, bool], Any]:
    def call(poison: float, counts: bool) -> Any:
        values = torch.tensor([1.0, poison]).requires_grad_()
        mask = torch.tensor([True, counts])
        if flat:
            lengths = torch.tensor([1, 1])
            return aggregate(Ragged(values, lengths), Ragged(mask, lengths), how), values, values
        return aggregate(values[None], mask[None], how), values, values

    return call


def batch(side: str, poison: float, counts: bool) -> TensorDict:
    """Two rows of two tokens; the last token of row 1 is poisoned."""
    names = {"gen": "log_probs", "ref": "ref_log_probs"}
    values = {name: torch.full((2, 2), -1.0) for name in names.values()}
    if side in names:
        values[names[side]][1, BAD] = poison
    assistant = torch.tensor([[True, True], [True, counts]])
    masks = Masks(all_attention_mask=torch.ones(2, 2, dtype=torch.bool), all_assistant_mask=assistant, batch_size=2)
    containers = {name: LogProbs(full=full.requires_grad_(), batch_size=2) for name, full in values.items()}
    reward = torch.tensor([0.0, poison if side == "reward" else 0.0])
    return TensorDict(masks=masks, reward=reward, batch_size=2, **containers)


def of_a_batch(module: Callable[[TensorDict], Any], side: str) -> Callable[[float, bool], Any]:
    def call(poison: float, counts: bool) -> Any:
        td = batch(side, poison, counts)
        before = set(td.keys())
        try:
            found = module(td)
        except InvalidRequestError as error:
            assert error.rows == (1,) and f"at position {BAD}" in str(error)
            assert set(td.keys()) == before and td["reward"].tolist()[0] == 0.0, "nothing is written"
            raise
        return found, td["log_probs"].full, td["ref_log_probs"].full

    return call


def own(gen: torch.Tensor, ref: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """An estimator that a caller wrote without thinking of masks."""
    return ((gen - ref) * gen).square()


def kl(estimator: Any) -> Callable[[TensorDict], Any]:
    module = KLComputation(estimator, add_to_reward=False, detach=False)
    return lambda td: module(td)["kl_penalty"]


def reward(td: TensorDict) -> Any:
    return KLComputation("k1")(td)["reward"]


def weights(level: Any) -> Callable[[TensorDict], Any]:
    module = ImportanceCorrection(level, train_log_probs_key=("ref_log_probs", "full"))
    return lambda td: module(td)["importance_weights"]


def report(td: TensorDict) -> torch.Tensor:
    found = mismatch_report(td, train_log_probs_key=("ref_log_probs", "full"))
    return torch.tensor(list(found.to_dict().values()))


def all_of(result: Any) -> dict[str, Any]:
    return dict.fromkeys(POISONS, result)


#: The argument that is poisoned -> a function of the poison and of whether its position counts, and what each gives.
TABLE: dict[str, tuple[Callable[[float, bool], Any], dict[str, Any]]] = {}
for name, estimate in ESTIMATORS.items():
    limit = MAX_K3 if name.startswith("k3") else INF
    TABLE[f"{name}: gen"] = of_log_probs(estimate, "gen"), all_of(NAN)
    TABLE[f"{name}: ref"] = of_log_probs(estimate, "ref"), all_of(NAN) | {"-inf": limit}
for name, divergence in {
    "exact": exact,
    "top_1": lambda gen, ref, mask: top_k(gen, ref, mask, k=1),
    "top_2": lambda gen, ref, mask: top_k(gen, ref, mask, k=2),
    "top_9": lambda gen, ref, mask: top_k(gen, ref, mask, k=9),
}.items():
    for place, tokens in {"first": slice(0, 1), "last": slice(2, 3)}.items():
        # A token that only gen excludes adds nothing; one that only ref excludes makes the KL infinite.
        TABLE[f"{name}: gen, {place} token"] = of_logits(divergence, "gen", tokens), all_of(NAN) | {"-inf": "finite"}
        in_the_rest = name == "top_1" and place == "first"
        excluded = "finite" if in_the_rest else INF
        TABLE[f"{name}: ref, {place} token"] = of_logits(divergence, "ref", tokens), all_of(NAN) | {"-inf": excluded}
    for side in ("gen", "ref"):
        TABLE[f"{name}: {side}, every token"] = of_logits(divergence, side, slice(None)), all_of(NAN)
for how in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"):
    for flat in (False, True):
        TABLE[f"aggregate {how}: {'rows' if flat else 'dense'}"] = of_values(how, flat), POISONS
for side in ("gen", "ref"):
    for name, module in {
        "KLComputation k1": kl(k1),
        "KLComputation k3_st": kl(k3_st),
        "KLComputation, own estimator": kl(own),
        "KLComputation, reward": reward,
        "ImportanceCorrection token": weights("token"),
        "ImportanceCorrection sequence": weights("sequence"),
        "mismatch_report": report,
    }.items():
        TABLE[f"{name}: {side}"] = of_a_batch(module, side), all_of(REFUSED)


@each("poison", POISONS)
@each("case", TABLE)
def test_a_number_that_is_not_finite_where_a_position_counts(case: str, poison: str) -> None:
    call, expected = TABLE[case]
    if expected[poison] == REFUSED:
        with pytest.raises(InvalidRequestError):
            call(POISONS[poison], True)
        return
    value, gen, _ = call(POISONS[poison], True)
    found = value.flatten()[-1]
    if expected[poison] == "finite":
        assert bool(torch.isfinite(found)) and bool(found > 0)
    else:
        torch.testing.assert_close(found, torch.tensor(expected[poison]), equal_nan=True)
    if value.numel() > 1:
        assert bool(torch.isfinite(value.flatten()[0])), "other positions are not touched"
    if found.isnan() and case.split(":")[0] in ("k2", "k3", "k1_st", "k3_st"):
        value.sum().backward()
        assert gen.grad is not None and bool(gen.grad[BAD].isnan()), "a loss of NaN has no finite gradient"


@each("poison", POISONS)
@each("case", TABLE)
def test_a_number_that_is_not_finite_where_a_position_does_not_count(case: str, poison: str) -> None:
    call, _ = TABLE[case]
    value, gen, ref = call(POISONS[poison], False)
    clean, _, _ = call(-1.0, False)
    assert torch.equal(value, clean) and bool(torch.isfinite(value).all())
    if not value.requires_grad:
        return
    value.sum().backward()
    for grad in (gen.grad, ref.grad):
        assert grad is None or (bool(torch.isfinite(grad).all()) and float(grad.flatten()[-1]) == 0.0)


@each("poison", ["inf", "-inf"])
def test_an_infinite_reward_is_passed_on_and_nan_is_refused(poison: str) -> None:
    assert reward(batch("reward", POISONS[poison], True)).tolist() == [0.0, POISONS[poison]]
    with refused(InvalidRequestError, field="reward", rows=(1,)):
        reward(batch("reward", NAN, True))


@each(
    "make, field",
    [
        (lambda gen, ref, mask: (gen - ref) * NAN, "kl_penalty"),
        (lambda gen, ref, mask: gen - ref + INF, "kl_penalty"),
        (lambda gen, ref, mask: [0.0], "estimator"),
    ],
)
def test_an_estimator_that_returns_something_else_than_numbers_is_refused(make: Any, field: str) -> None:
    td = batch("", 0.0, True)
    with refused(InvalidRequestError, field=field):
        KLComputation(make)(td)
    assert "kl_penalty" not in td.keys() and td["reward"].tolist() == [0.0, 0.0]


def test_a_penalty_that_overflows_is_refused() -> None:
    td = batch("gen", -1e30, True)
    with refused(InvalidRequestError, field="kl_penalty", rows=(1,)):
        KLComputation(k2)(td)
    with refused(InvalidRequestError, field="reward", rows=(1,)):
        KLComputation("k1", 1e30)(td)
    assert "kl_penalty" not in td.keys() and td["reward"].tolist() == [0.0, 0.0]


@each("poison", POISONS.values())
def test_coefficients_bounds_and_measured_kls_are_finite(poison: float) -> None:
    adaptive = AdaptiveKLController(0.1, target=6.0, horizon=100)
    fixed = FixedKLController(0.1)

    class Drifting:
        value = poison

    for make in (
        lambda: FixedKLController(poison),
        lambda: AdaptiveKLController(poison, 6.0, 100),
        lambda: AdaptiveKLController(0.1, poison, 100),
        lambda: AdaptiveKLController(0.1, 6.0, poison),
        lambda: adaptive.update(poison),
        lambda: adaptive.update(torch.tensor(poison)),
        lambda: adaptive.update(1.0, poison),
        lambda: adaptive.load_state_dict({"value": poison}),
        lambda: fixed.load_state_dict({"value": poison}),
        lambda: KLComputation("k1", poison),
        lambda: KLComputation("k1", Drifting()),
        lambda: ImportanceCorrection(low=poison),
        lambda: ImportanceCorrection(high=poison) if poison != INF else ImportanceCorrection(low=2.0),
        lambda: top_k(torch.zeros(1, 3), torch.zeros(1, 3), k=poison),
    ):
        with pytest.raises(InvalidRequestError):
            make()
    assert fixed.update(poison) == 0.1, "a fixed coefficient ignores what was measured"
    assert adaptive.value == fixed.value == 0.1
    assert ImportanceCorrection(high=INF).bounds == (0.0, INF)


@each(
    "make",
    [
        lambda: AdaptiveKLController(0.1, 6.0, 100).load_state_dict({"value": 0.0}),
        lambda: AdaptiveKLController(0.1, 6.0, 100).load_state_dict({}),
        lambda: FixedKLController(0.1).load_state_dict(None),
        lambda: AdaptiveKLController(0.1, 6.0, 100).update(1.0, "x"),
        lambda: ImportanceCorrection(low="x"),
        lambda: ImportanceCorrection(high=torch.ones(2)),
        lambda: k1([0.0], torch.zeros(1)),
        lambda: k1(torch.zeros(1), torch.zeros(1), [True]),
        lambda: exact(torch.zeros(1), [0.0]),
        lambda: exact(torch.zeros(()), torch.zeros(())),
        lambda: top_k(torch.zeros(2, 0), torch.zeros(2, 0), k=1),
        lambda: top_k(torch.zeros(2, 3), torch.zeros(2, 3), k=torch.ones(2)),
        lambda: aggregate(torch.zeros(2), how=torch.ones(2)),
    ],
)
def test_arguments_of_other_types_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequestError):
        make()


def test_a_huge_gap_gives_the_right_number_or_infinity() -> None:
    gen, ref = torch.tensor([1e30, -1e30, -(2.0**40)]), torch.zeros(3)
    assert torch.equal(k1(gen, ref), gen) and torch.equal(abs_kl(gen, ref), gen.abs())
    assert k2(gen, ref).tolist() == [INF, INF, 2.0**79], "the square of 1e30 is not a float32"
    # Never negative, also where the two terms of k3 have different sizes.
    assert k3(gen, ref).tolist() == [MAX_K3] * 3
    for straight, value in ((k1_st, k1), (k3_st, k3)):
        wanted = gen.clone().requires_grad_()
        found = straight(wanted, ref)
        found.sum().backward()
        assert torch.equal(found.detach(), value(gen, ref)) and torch.equal(wanted.grad, gen)


def test_a_probability_that_rounds_to_zero_still_makes_the_kl_infinite() -> None:
    gen, ref = torch.tensor([[0.0, -1000.0]]), torch.tensor([[0.0, -INF]])
    assert exact(gen, ref).tolist() == [INF] and top_k(gen, ref, k=1).tolist() == [INF]


def test_masks_of_floats_are_refused() -> None:
    td = batch("", 0.0, True)
    td["log_probs"].scored_mask = torch.full((2, 2), NAN)
    with refused(InvalidRequestError, field="('log_probs', 'scored_mask')"):
        KLComputation(add_to_reward=False)(td)
