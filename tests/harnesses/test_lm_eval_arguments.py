"""The arguments of the model `corelm`: what they mean, and that those which mean nothing are refused by name."""

import pytest

from corelm.errors import InvalidRequestError
from corelm_interop.lm_eval import CoreLM
from helpers.lm_eval_tasks import Watcher, requests


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.mark.parametrize(
    ("arguments", "field", "named"),
    [
        ({}, "backend", "transformers"),
        ({"backend": "transformers", "max_lenght": 3}, "max_lenght", "max_length"),
        ({"backend": "transformers", "device": "abacus"}, "device", "abacus"),
        ({"backend": "transformers", "batch_size": "many"}, "batch_size", "many"),
        ({"backend": "transformers", "max_length": 4096}, "max_length", "1024"),
        ({"backend": "transformers", "pretrained": "elsewhere"}, "pretrained", "model"),
        ({"backend": "transformers", "add_bos_token": True}, "add_bos_token", "no BOS"),
        ({"backend": "transformers", "add_bos_token": "yes"}, "add_bos_token", "yes"),
        ({"backend": "transformers", "prefix_token_id": 70000}, "prefix_token_id", "70000"),
        ({"backend": "transformers", "enable_thinking": True}, "think_end_token", "enable_thinking"),
    ],
    ids=str,
)
def test_arguments_that_mean_nothing_are_named(arguments, field, named, tiny_model, watcher):
    wrappers = {"wrappers": [watcher]} if "backend" in arguments else {}
    given = {"model": str(tiny_model), **wrappers, **arguments}
    with pytest.raises(InvalidRequestError, match=named) as caught:
        CoreLM.create_from_arg_obj(given, {"batch_size": 1, "device": "cuda:0"})
    assert caught.value.field == field
    # What was opened before the mistake was found is closed.
    assert watcher.closed == (field in {"max_length", "prefix_token_id"} or named == "no BOS")


def test_no_thinking_precedes_a_choice(tiny_model):
    with CoreLM("transformers", tiny_model, enable_thinking=True, think_end_token="Pip") as model:
        assert model.apply_chat_template([{"role": "user", "content": "Hi"}]).startswith("<|im_start|>user")
        with pytest.raises(InvalidRequestError, match="enable_thinking"):
            model.loglikelihood(requests("loglikelihood", [("Hello", " there")]))
