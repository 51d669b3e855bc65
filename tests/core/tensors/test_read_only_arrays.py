"""Arrays that numpy calls read-only, as Parquet and memory maps give them, are taken without a warning of torch."""

import numpy as np
import pytest
import torch

from corelm import Masks, Tokens
from corelm.backend.arguments import rows_of_ids, seeds
from helpers.each import each

ROWS = [[5, 17], [300]]


def read_only(values):
    array = np.array(values)
    array.flags.writeable = False
    return array


@pytest.fixture
def every_warning():
    """Let torch warn each time and not once in a process; a warning fails the test."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("every_warning")
def test_torch_warns_of_them():
    with pytest.raises(UserWarning, match="not writable"):
        torch.as_tensor(read_only([1]))


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("every_warning")
@each("form", [list, tuple])
def test_rows_of_ids(form):
    rows = form(read_only(row) for row in ROWS)
    assert rows_of_ids(rows, "prompts").tolist() == ROWS
    assert [row.tolist() for row in Tokens.from_rows(prompt=rows).prompt] == ROWS


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("every_warning")
def test_dense_ids_masks_and_seeds():
    assert rows_of_ids(read_only([[5, 17], [8, 9]]), "prompts").tolist() == [[5, 17], [8, 9]]
    masks = Masks.from_rows(all_attention_mask=[read_only([True, False])])
    assert masks.all_attention_mask[0].tolist() == [True, False]
    assert seeds(read_only([3, 4]), 2).tolist() == [3, 4]
