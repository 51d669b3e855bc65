"""`PolicyOptions`: a policy's options as one value."""

import pytest
from tensordict import TensorDict

from corelm import LLMPolicy, PolicyOptions
from corelm.errors import InvalidRequestError
from corelm.policy.options import ONLY, OPTIONS, Keys
from helpers.refusals import refused

SAMPLING = {"max_new_tokens": 3, "temperature": 0.0}


def test_num_samples_has_one_home_wherever_it_was_given():
    options = PolicyOptions(sampling_params={"n": 4, **SAMPLING})
    assert options.num_samples == 4 and options == PolicyOptions(sampling_params=SAMPLING, num_samples=4)
    assert options.sampling.num_samples == 4 and options.writes_in_place is False
    assert options.replace(sampling_params=SAMPLING).num_samples is None
    with refused(InvalidRequestError, field="num_samples"):
        PolicyOptions(sampling_params={"n": 4}, num_samples=2)


def test_options_may_be_a_dict_and_sampling_parameters_in_it_are_named(backend):
    assert LLMPolicy(backend, {"input_mode": "text"}).options == PolicyOptions(input_mode="text")
    with pytest.raises(TypeError, match=r"give sampling_params=\{'max_new_tokens': 8\}"):
        LLMPolicy(backend, {"max_new_tokens": 8})
    with refused(InvalidRequestError, field="options"):
        LLMPolicy(backend, ["text"])


#: A value of each option that is not its default, and which options it needs.
CHANGED: dict[str, object] = {
    "input_mode": "text",
    "generate": False,
    "sampling_params": SAMPLING,
    "num_samples": 2,
    "pad_output": True,
    "return_text": False,
    "return_tokens": False,
    "return_masks": False,
    "return_log_probs": False,
    "return_history": True,
    "return_argmax": True,
    "return_support": True,
    "top_logprobs": 2,
    "top_k": 2,
    "support_key": "sampled",
    "log_probs_mode": "processed",
    "prefer_tokens": False,
    "inplace": False,
    "overwrite": True,
    "on_error": "skip",
    "truncation": "left",
    "device": "cpu",
    "keys": Keys(text="words"),
    "log_probs_key": "ref_log_probs",
    "input_key": "messages",
    "attention_mask_key": "mask",
    "chat_template": "chatml",
    "template_kwargs": {"thinking": False},
    "tokenizer_kwargs": {"add_special_tokens": False},
    "completion_boundary": "separate",
    "response_parser": str,
    "continue_final_message": True,
    "tools_key": None,
    "adapter": False,
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("generate", [True, False])
def test_an_option_that_a_policy_would_ignore_is_refused_and_reset_by_replace(generate, name):
    assert set(CHANGED) == set(OPTIONS)
    mode = "tokens" if name == "attention_mask_key" else "history"
    given = {"generate": generate, "input_mode": mode, name: CHANGED[name]}
    refusing = name in ONLY[not generate] or (name == "return_log_probs" and not generate)
    if refusing:
        with refused(InvalidRequestError, field=name):
            PolicyOptions(**given)
        with refused(InvalidRequestError, field=name):
            PolicyOptions(input_mode=mode, generate=not generate).replace(**given)
        return
    options = PolicyOptions(**given)
    if name in ONLY[generate]:
        other = options.replace(generate=not generate)
        assert getattr(other, name) == getattr(PolicyOptions(), name)


def test_the_end_of_a_with_block_closes_only_what_the_policy_opened(backend):
    with LLMPolicy("toy", input_mode="text", sampling_params=SAMPLING) as own:
        assert own(TensorDict(text=["Hi"]))["text"].response
    assert own.backend.closed
    with LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING, batching=True) as shared:
        assert shared(TensorDict(text=["Hi"]))["text"].response
        with shared.replace(pad_output=True) as inner:
            assert inner.backend is shared.backend
        assert shared.get_batching_state().threads
    assert not backend.closed and not shared.get_batching_state().threads
    with pytest.raises(ZeroDivisionError), LLMPolicy(backend, input_mode="text"):
        raise ZeroDivisionError
    assert LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING)(TensorDict(text=["Hi"]))["text"].response


def test_what_a_policy_prints_makes_an_equal_one(backend):
    policy = LLMPolicy(backend, input_mode="tokens", generate=False, log_probs_mode="processed", top_k=3)
    shown = repr(policy).replace(repr(backend), "backend")
    assert eval(shown, {"LLMPolicy": LLMPolicy, "backend": backend}).options == policy.options
