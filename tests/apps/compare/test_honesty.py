"""What must not be said: the wrong cause, the wrong side, too much confidence, or "agree" of engines that differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from corelm import Backend
from corelm_compare import compare
from corelm_compare.cases import Case
from corelm_compare.oracles import Oracle
from corelm_compare.precision import explain, quantized
from corelm_compare.report_text import limit
from corelm_compare.sides import OpenSide
from helpers.planted_defects import PROMPTS, loaded, opened, sound
from helpers.planted_engines import Coarse, Heats, Rescoring, SaysItIsCoarse
from helpers.tiny_models import random_rows
from transformers_backend import TransformersBackend

NIGHTLY = pytest.mark.nightly
#: Rows of which some begin with BOS, as texts and ids do.
MIXED = [[2, *row] for row in random_rows(20, 30, 40, seed=7)] + random_rows(15, 25, seed=8)


class DropsBos(Rescoring):
    """Leaves out BOS where a row begins with it."""

    def rescored(self, rows, score):
        found: list[Tensor] = []
        for row in rows:
            if row[0] == 2 and len(row) > 2:
                numbers = score([row[1:]])[0]
                found.append(torch.cat([torch.zeros(1), torch.full((1,), -5.0), numbers[1:]]))
            else:
                found.append(score([row])[0])
        return found


class AddsMissingBos(Rescoring):
    """Puts BOS before rows that do not begin with it."""

    def rescored(self, rows, score):
        return [score([row])[0] if row[0] == 2 else score([[2, *row]])[0][1:] for row in rows]


class DoublesBosOfIds(Rescoring):
    """Puts a second BOS before rows that begin with it."""

    def rescored(self, rows, score):
        return [score([[2, *row]])[0][1:] if row[0] == 2 else score([row])[0] for row in rows]


@pytest.mark.parametrize(
    ("plugin", "cause"), [(DropsBos, "bos-missing"), (AddsMissingBos, "bos-added"), (DoublesBosOfIds, "bos-doubled")]
)
def test_an_engine_that_treats_bos_in_its_own_way_has_no_wrong_cache(plugin, cause, folder_of):
    folder = folder_of("qwen2", 3)
    with sound(folder) as one, opened(plugin, loaded(folder), AutoTokenizer.from_pretrained(folder)) as other:
        found = compare([one, other], MIXED, oracle=folder)
    assert {(each.id, each.side, each.confidence) for each in found.causes} == {(cause, "planted", "certain")}


def test_what_an_engine_declares_as_its_precision_is_rounding(folder_of):
    folder = folder_of("qwen2", 3)
    tokenizer, verdicts = AutoTokenizer.from_pretrained(folder), []
    for plugin in (Coarse, SaysItIsCoarse):
        with sound(folder) as one, opened(plugin, loaded(folder), tokenizer) as other:
            found = compare([one, other], PROMPTS, oracle=folder)
        verdicts.append((found.exit_code, found.verdict == "agree", [each.id for each in found.causes]))
    assert verdicts[0][:2] == (1, False) and verdicts[1] == (0, True, [])


class ReadsFirstIdsOtherwise(Rescoring):
    """Reads id 400 at the beginning of a row as id 401: no cause is for that."""

    def rescored(self, rows, score):
        return score([[401, *row[1:]] if row[0] == 400 else row for row in rows])


def test_a_first_id_that_is_read_otherwise_is_no_cache(folder_of):
    folder, rows = folder_of("qwen2", 3), [[400, *row] for row in random_rows(20, 30, 40, seed=7)]
    with (
        sound(folder) as one,
        opened(ReadsFirstIdsOtherwise, loaded(folder), AutoTokenizer.from_pretrained(folder)) as other,
    ):
        found = compare([one, other], rows, oracle=folder)
    assert "prefix-cache" not in {each.id for each in found.causes} and found.exit_code == 1


def moved(folder: Path, part: float) -> PreTrainedModel:
    """Return the model of a folder with noise of a part of each parameter's spread, as an update would move it."""
    model, generator = loaded(folder), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            size = part * parameter.std(correction=0).clamp_min(1e-3)
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("part", [0.005, pytest.param(0.01, marks=NIGHTLY), pytest.param(0.03, marks=NIGHTLY)])
@pytest.mark.parametrize("named", [True, False], ids=["named", "not named"])
def test_an_update_that_was_missed_is_not_rounding(part, named, folder_of, tmp_path):
    folder = folder_of("qwen2", 3)
    earlier = moved(folder, part)
    earlier.save_pretrained(tmp_path / "step-1")
    moved(folder, 2 * part).save_pretrained(tmp_path / "step-0")
    half = opened(TransformersBackend, earlier.to(torch.bfloat16), AutoTokenizer.from_pretrained(folder))
    checkpoints = [tmp_path / "step-0", tmp_path / "step-1"] if named else []
    with sound(folder) as one, half as other:
        found = compare([one, other], PROMPTS, oracle=folder, checkpoints=checkpoints)
    assert found.exit_code == 1 and not {"dtype", "quantized"} & {each.id for each in found.causes}
    if named:
        (cause,) = found.causes
        assert (cause.id, cause.side, cause.confidence) == ("stale-weights", "planted", "likely")
        assert "step-1" in cause.evidence


@pytest.mark.parametrize("part", [pytest.param(0.0, marks=NIGHTLY), 0.001])
def test_a_checkpoint_that_a_rounding_side_does_not_hold_is_not_named(part, folder_of, tmp_path):
    folder = folder_of("qwen2", 3)
    for step in (1, 2):
        moved(folder, 0.005 * step).save_pretrained(tmp_path / f"step-{step}")
    half = opened(TransformersBackend, moved(folder, part).to(torch.bfloat16), AutoTokenizer.from_pretrained(folder))
    with sound(folder) as one, half as other:
        found = compare([one, other], PROMPTS, oracle=folder, checkpoints=[tmp_path / "step-1", tmp_path / "step-2"])
    assert [each.id for each in found.causes] == ["dtype"]


@pytest.mark.parametrize("part", [0.003, *(pytest.param(part, marks=NIGHTLY) for part in (0.01, 0.1, 0.5))])
@pytest.mark.parametrize("family", ["qwen2", pytest.param("llama", marks=NIGHTLY)])
def test_other_weights_are_not_quantized_ones(family, part, folder_of):
    folder = folder_of(family, 3)
    with (
        sound(folder) as one,
        opened(TransformersBackend, moved(folder, part), AutoTokenizer.from_pretrained(folder)) as other,
    ):
        found = compare([one, other], PROMPTS, oracle=folder)
    assert {each.id for each in found.causes} <= {"other-weights"} and found.exit_code == 1
    assert "certain" not in {each.confidence for each in found.causes}


def test_what_correlation_names_is_certain_only_if_nothing_is_left(folder_of):
    """The numbers of 4 bits, with half as much again of something else."""
    folder = folder_of("qwen2", 3)
    plain, rows = Oracle.load(folder), random_rows(40, 40, 40)
    truth, rounded = plain.numbers(rows), next(each for each in quantized(plain, rows) if "int4" in each.name)
    noise = torch.randn(len(rounded.delta), generator=torch.Generator().manual_seed(0)) * rounded.size
    confidence = []
    for part in (0.0, 0.3, 2.0):
        numbers = (torch.cat(truth) + rounded.delta + part * noise).split([40, 40, 40])
        with sound(folder) as one:
            side = OpenSide(one, "one", None, None)
            case = Case(
                side=side,
                what="scores",
                rows=rows,
                numbers=numbers,
                truth=truth,
                tables=None,
                scorer=plain.numbers,
                reference="the plain forward",
                oracle=plain,
                noise=2e-4,
            )
            cause = explain(case, "float32", [rounded])[1]
        confidence.append(cause and cause.confidence)
    assert confidence == ["certain", "possible", None]


@pytest.mark.parametrize("with_oracle", [True, False])
def test_two_causes_at_once_are_not_one_that_is_certain(with_oracle, folder_of):
    class ShiftedAndHot(Heats):
        def rescored(self, rows, score):
            return [torch.cat([row[1:], row[-1:]]) for row in Heats.rescored(self, rows, score)]

    folder = folder_of("qwen2", 3)
    with (
        sound(folder) as one,
        opened(ShiftedAndHot, loaded(folder), AutoTokenizer.from_pretrained(folder)) as other,
    ):
        found = compare([one, other], PROMPTS, oracle=folder if with_oracle else None)
    assert found.exit_code == 1
    assert "certain" not in {each.confidence for each in found.causes}
    assert {each.side for each in found.causes} <= {"planted"}


class SaysNoDtype(TransformersBackend):
    """Shows no logits, as servers do, so that its dtype cannot be seen."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, logits=False)


def test_a_side_of_unknown_dtype_that_differs_is_over_its_limit_in_the_table(folder_of):
    """What it may be from itself, as if it computed in bfloat16, is no limit for its distance to the plain forward."""
    folder = folder_of("qwen2")
    model, generator = loaded(folder), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 3e-3 * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with sound(folder) as one, opened(SaysNoDtype, model, tokenizer) as other:
        found = compare([one, other], PROMPTS[:4], oracle=folder)
    assert found.verdict == "differ"
    (gap,) = (gap for gap in found.gaps if gap.kind == "oracle" and gap.other == "planted")
    assert limit(found, gap) == found.oracle_limits["planted"] < gap.mean_abs < found.limits["planted"]


@pytest.mark.parametrize("family", ["qwen2", pytest.param("gpt2", marks=NIGHTLY)])
@pytest.mark.parametrize("with_oracle", [True, False])
@pytest.mark.parametrize("both", [True, False])
def test_rounding_of_a_side_that_does_not_say_its_dtype_is_no_fault(both, with_oracle, family, folder_of):
    folder = folder_of(family, 2)

    def half(name: str) -> Backend:
        model, tokenizer = loaded(folder).to(torch.bfloat16), AutoTokenizer.from_pretrained(folder)
        return opened(SaysNoDtype, model, tokenizer, name)

    with half("one") if both else sound(folder) as one, half("other") as other:
        found = compare([one, other], PROMPTS, oracle=folder if with_oracle else None)
    print(found)
    if both:
        assert (found.verdict, found.causes) == ("agree", ())
    elif with_oracle:
        assert (found.verdict, [(each.id, each.side) for each in found.causes]) == ("rounding", [("dtype", "other")])
    else:
        # Nothing tells rounding of an unknown kind from a fault: the sides differ, and no side is accused.
        assert (found.verdict, found.causes) == ("unexplained", ())
        assert any("does not say in which dtype" in note for note in found.notes)
    assert all(side.dtype != "bfloat16" for side in found.sides)
