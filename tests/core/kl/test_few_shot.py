"""The assistant's turns in a prompt are examples: they do not count, even if the rollout was scored in place."""

from tensordict import TensorDict

import corelm
from corelm import History, LLMPolicy
from corelm.kl import KLComputation, mismatch_report

CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "two, of course"},
    {"role": "user", "content": "2+2?"},
]


def test_examples_in_the_prompt_do_not_count() -> None:
    with corelm.get_backend("toy") as backend:
        sampling = {"max_new_tokens": 6, "ignore_eos": True}
        rollout = LLMPolicy(backend, sampling_params=sampling, inplace=False)(
            TensorDict(history=History.from_chats([CHAT])), seed=0
        )
        score = LLMPolicy(backend, generate=False, input_mode="tokens", log_probs_key="ref_log_probs")
        again = LLMPolicy(backend, generate=False, overwrite=True)(rollout.clone())
        assert again["log_probs"].scored_mask[0].sum() > 6
        for td in (score(rollout.clone()), score(again)):
            assert mismatch_report(td, train_log_probs_key=("ref_log_probs", "full")).tokens == 6
        td["ref_log_probs"] = td["ref_log_probs"].clone()
        td["ref_log_probs"].full = [row - 1.0 for row in td["ref_log_probs"].full]
        kl = KLComputation(add_to_reward=False)(td)["kl_penalty"].full[0]
        assert (kl != 0).sum() == 6
