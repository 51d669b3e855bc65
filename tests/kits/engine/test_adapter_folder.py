"""LoRA adapters for engines that read a folder: what an engine would leave out is refused or written in its terms."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import WeightUpdate
from corelm_engine_kit import adapter_folder, checked_adapter
from helpers import oracle
from helpers.lora import lora, save
from helpers.tiny_models import random_rows, tiny_model

LIMITS: dict[str, Any] = {"largest_rank": 16, "option": "max_lora_rank"}
STATE, CONFIG = lora(tiny_model())


def update(config: dict[str, Any], state: dict[str, torch.Tensor] = STATE) -> WeightUpdate:
    return WeightUpdate(version="1", adapter="one", state_dict=state, adapter_config=config)


@pytest.mark.parametrize("by_path", [False, True])
def test_the_scale_of_rslora_is_written_as_a_plain_one(tmp_path: Path, by_path: bool) -> None:
    """The oracle is PEFT itself, with the configuration as it was."""
    config = {**CONFIG, "use_rslora": True}
    original = save(STATE, config, tmp_path / "original")
    request = WeightUpdate(version="1", adapter="one", path=original) if by_path else update(config)
    row = random_rows(24)[0]
    with adapter_folder(request, None, **LIMITS) as folder:
        written = json.loads((Path(folder) / "adapter_config.json").read_text())
        assert written["use_rslora"] is False and written["lora_alpha"] == pytest.approx(8 * math.sqrt(8))
        found = oracle.logprobs(peft.PeftModel.from_pretrained(tiny_model(), folder), row)
    expected = oracle.logprobs(peft.PeftModel.from_pretrained(tiny_model(), original), row)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    plain = save(STATE, CONFIG, tmp_path / "plain")
    other = oracle.logprobs(peft.PeftModel.from_pretrained(tiny_model(), plain), row)
    assert float((other - expected).abs().max()) > 0.1


def test_a_scale_of_rslora_that_is_not_known_is_refused() -> None:
    for name, value in (("lora_alpha", None), ("lora_alpha", "8"), ("r", None)):
        with pytest.raises(InvalidRequestError, match=name) as caught:
            adapter_folder(update({**CONFIG, "use_rslora": True, name: value}), None, **LIMITS)
        assert caught.value.field == "state_dict"


def test_an_engine_that_knows_rslora_gets_it_as_it_is() -> None:
    config = {**CONFIG, "use_rslora": True}
    with adapter_folder(update(config), None, **LIMITS, honoured={"use_rslora"}) as folder:
        assert json.loads((Path(folder) / "adapter_config.json").read_text()) == config


def test_what_the_engine_would_leave_out_is_refused() -> None:
    for name, value in (
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"q_proj": 32}),
        ("use_dora", True),
        ("lora_bias", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("layer_replication", [[0, 1], [0, 1]]),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "lora_ga"),
    ):
        request = update({**CONFIG, name: value})
        with pytest.raises(InvalidRequestError, match=f"does not know {name}=") as caught:
            adapter_folder(request, None, **LIMITS)
        assert caught.value.field == "state_dict"
        if name in ("rank_pattern", "alpha_pattern"):
            adapter_folder(request, None, **LIMITS, honoured={name}).cleanup()


def test_a_server_that_reads_the_folder_itself_gets_no_other_scale() -> None:
    with pytest.raises(InvalidRequestError, match="use_rslora=True"):
        checked_adapter(update({**CONFIG, "use_rslora": True}), None, **LIMITS)


def test_a_plain_adapter_is_taken() -> None:
    for more in ({"bias": "none"}, {"init_lora_weights": "gaussian"}, {"rank_pattern": {}}):
        assert checked_adapter(update({**CONFIG, **more}), None, **LIMITS) == {**CONFIG, **more}


def test_tensors_that_are_not_of_a_lora_are_refused() -> None:
    state = {**STATE, "base_model.model.lm_head.weight": torch.zeros(3)}
    with pytest.raises(InvalidRequestError, match=r"lm_head.weight.* is not a matrix of a LoRA"):
        adapter_folder(update(CONFIG, state), None, **LIMITS)


def test_other_kinds_of_adapters_are_refused() -> None:
    with pytest.raises(CapabilityError, match="LoRA adapters only"):
        adapter_folder(update({**CONFIG, "peft_type": "IA3"}), None, **LIMITS)
