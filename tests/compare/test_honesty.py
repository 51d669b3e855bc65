"""What must not be said: the wrong cause, the wrong side, too much confidence, or "agree" of engines that differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from corelm.compare import compare
from helpers.planted_defects import loaded, opened, sound
from helpers.planted_engines import Rescoring
from helpers.tiny_models import random_rows

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
