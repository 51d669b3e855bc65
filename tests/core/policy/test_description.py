"""What an `LLMPolicy` prints."""

from __future__ import annotations

from corelm import LLMPolicy


def test_a_policy_shows_its_backend_and_the_options_that_were_set(backend):
    assert repr(LLMPolicy(backend)) == f"LLMPolicy(backend={backend!r})"
    sampling = {"max_new_tokens": 24, "temperature": 0.7, "stop": "end"}
    shown = repr(LLMPolicy(backend, input_mode="text", num_samples=4, sampling_params=sampling))
    assert shown == (
        f"LLMPolicy(backend={backend!r}, input_mode='text', "
        "sampling_params=dict(max_new_tokens=24, temperature=0.7, stop=('end',)), num_samples=4)"
    )


def test_the_shown_call_makes_an_equal_policy(backend):
    policy = LLMPolicy(backend, input_mode="tokens", generate=False, log_probs_mode="processed", top_k=3)
    shown = repr(policy).replace(repr(backend), "backend")
    again = eval(shown, {"LLMPolicy": LLMPolicy, "backend": backend})
    assert again.options == policy.options
