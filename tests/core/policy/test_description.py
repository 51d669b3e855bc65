"""What an `LLMPolicy` prints."""

from __future__ import annotations

import corelm
from corelm import LLMPolicy
from corelm.batching import Limits


def test_a_policy_says_backend_model_mode_sampling_and_batching(backend):
    shown = repr(LLMPolicy(backend, sampling_params={"max_new_tokens": 24, "temperature": 0.7, "stop": "end"}))
    assert shown.startswith("LLMPolicy(") and f"backend: toy, model {backend.model_name!r}, weights '0'" in shown
    assert "mode: generate from conversations (input_mode='history'), raw log-probs" in shown
    assert "sampling: max_new_tokens=24, temperature=0.7, stop=('end',)" in shown
    assert "batching: off" in shown and "options:" not in shown


def test_a_policy_names_the_options_that_were_set(backend):
    shown = repr(LLMPolicy(backend, input_mode="text", num_samples=4, pad_output=True, on_error="skip"))
    assert "temperature=1.0" in shown and "num_samples=4" in shown and "do_sample" not in shown
    assert "options: pad_output=True, on_error='skip'" in shown


def test_a_scoring_policy_shows_no_sampling(backend):
    shown = repr(LLMPolicy(backend, input_mode="tokens", generate=False, log_probs_mode="processed"))
    assert "mode: score token ids (input_mode='tokens'), processed log-probs" in shown and "sampling" not in shown


def test_a_policy_with_a_batcher_shows_its_limits_and_a_closed_one_says_so():
    with corelm.get_backend("toy") as opened:
        policy = LLMPolicy(opened, batching=Limits(max_batch_size=8))
        assert "batching: on, min_batch_size=1, max_batch_size=8" in repr(policy)
        policy.cleanup_batching()
    assert ", closed" in repr(policy)


class Parser:
    """Writes a control character in its own repr, which Python does not escape."""

    def __call__(self, text):
        return {"role": "assistant", "content": text}

    def __repr__(self):
        return "\x1b[31mparser"


def test_control_characters_of_an_option_are_escaped(backend):
    shown = repr(LLMPolicy(backend, response_parser=Parser()))
    assert "\x1b" not in shown and r"response_parser=\x1b[31mparser" in shown
