"""Core refuses arguments of a wrong type, and objects whose methods fail, with an error that names the argument."""

import numpy as np
import torch

from corelm.errors import InvalidRequestError
from helpers.fakes import SHORT, fake
from helpers.refusals import refused


def test_a_mapping_of_texts_is_refused():
    with refused(InvalidRequestError, field="texts"):
        fake().tokenize({"12": "34"})


def test_truth_values_are_no_positions_and_no_seeds_and_any_integer_is():
    backend = fake()
    for wrong in (True, [True], [torch.tensor(True)], torch.tensor([True]), np.array([True]), torch.tensor(True)):
        with refused(InvalidRequestError, field="score_from"):
            backend.score_logprobs([[1, 2, 3]], score_from=wrong)
        with refused(InvalidRequestError, field="seeds"):
            backend.generate([[1]], SHORT, seeds=wrong)
    for position in (2, np.int64(2), torch.tensor(2), [np.int32(2)], np.array([2])):
        assert backend.score_logprobs([[1, 2, 3]], score_from=position).scored.tolist() == [[False, False, True]]
    with refused(InvalidRequestError, field="prompts", rows=(0,)):
        backend.generate([[3, torch.tensor(True)]], SHORT)
