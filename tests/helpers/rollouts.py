"""Rollouts of the toy backend, and what they hold as plain values."""

from corelm import History, LLMPolicy
from helpers.toy_prompts import SAMPLING, prompts

FIELDS = {
    "text": ("prompt", "response", "full"),
    "tokens": ("prompt", "response", "full"),
    "masks": ("all_attention_mask", "all_assistant_mask", "all_response_mask"),
    "log_probs": ("prompt", "response", "full", "scored_mask"),
    "history": ("prompt", "response", "full"),
}


def rollout(backend, mode="history", shape=(3,), pad=False, **changes):
    td, _ = prompts(mode, shape)
    return LLMPolicy(backend, input_mode=mode, pad_output=pad, sampling_params=SAMPLING, **changes)(td, seed=1)


def plain(value):
    if isinstance(value, History):
        return value.to_chats()
    return [plain(item) for item in value] if isinstance(value, list) else getattr(value, "tolist", lambda: value)()


def contents(td, keys=FIELDS):
    there = [(name, field) for name in keys if name in td.keys() for field in keys[name]]
    return {(name, field): plain(getattr(td[name], field)) for name, field in there}
