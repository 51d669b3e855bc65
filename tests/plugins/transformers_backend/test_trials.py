"""How numbers are compared with those of the plain forward."""

from __future__ import annotations

import torch

from corelm_engine_kit.masses import log_softmax_at
from helpers.tiny_models import tiny_model
from transformers_backend.engine import CausalLM
from transformers_backend.trials import token_differences, with_others


def test_an_id_that_is_nearly_certain_hides_no_difference() -> None:
    wanted = torch.zeros(3, 50)
    wanted[:, 7] = 15.0
    found = wanted + torch.where(torch.arange(50) == 7, 0.0, 0.3)
    ids = torch.full((3,), 7)
    alone = token_differences(log_softmax_at(found, ids), wanted, ids)
    both = with_others(ids, 50)
    together = token_differences(log_softmax_at(found, both), wanted, both)
    assert float(alone.max()) < 1e-5 and float(together.min()) > 0.2


def test_a_model_that_keeps_states_in_its_modules_is_known() -> None:
    model = tiny_model("qwen2")
    engine = CausalLM(model, model)
    assert not engine.keeps_states
    model.model.layers[0].mlp.state = torch.zeros(1)
    assert engine.keeps_states
    del model.model.layers[0].mlp.state
