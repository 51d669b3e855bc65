"""GRPO with the real vLLM and the real SGLang, each in a process of its own environment (CORELM_TEST_HOSTS=1).

TRL itself has no SGLang, and this environment has neither engine.
"""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

import corelm
from corelm_interop.trl import GRPORollout
from helpers import oracle
from helpers.cpu_engines import ENGINES
from helpers.tiny_models import tiny_model, tiny_tokenizer
from helpers.trl_runs import DIFFERENCE, Watched, logged, make_trainer

#: SGLang's log-probs are at the temperature by default, vLLM's with this option.
OPTIONS: dict[str, dict[str, Any]] = {"vllm": {"logprobs_mode": "processed_logprobs"}, "sglang": {}}


@pytest.mark.parametrize("engine", OPTIONS)
def test_ten_steps_are_sampled_with_the_trained_weights(tmp_path, engine):
    assert find_spec(engine) is None
    # Heads are large enough for vLLM on a CPU.
    model, folder = tiny_model(hidden_size=128), tmp_path / "model"
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with corelm.get_backend(engine, folder, **ENGINES[engine], **OPTIONS[engine]) as backend:
        watched = Watched(model)
        rollout = GRPORollout(backend, conversation=watched)
        trainer = make_trainer(model, rollout, tmp_path, max_steps=10)
        trainer.train()
        assert watched.versions == [str(number + 1) for number in range(10)]
        assert max(watched.differences) < 1e-4
        rollout.sync_weights(trainer)
        assert backend.weight_version == "11"
        ids = tiny_tokenizer()("<|im_start|>user\nHello there!<|im_end|>").input_ids
        found = backend.score_logprobs([ids]).logprobs.values
        torch.testing.assert_close(found, oracle.logprobs(model, ids), atol=1e-4, rtol=0)
    differences = logged(trainer, DIFFERENCE)
    print(
        f"{engine}: TRL's largest difference of log-probs {max(differences):.1e}, ours {max(watched.differences):.1e}"
    )
    assert len(differences) == 10 and differences[0] > 0 and max(differences) < 1e-4
    moved = oracle.logprobs(model, ids) - oracle.logprobs(tiny_model(hidden_size=128), ids)
    assert moved.abs().max() > 0.01, "the weights have changed"
