"""What a model is tried with: rows of ids, the lengths at which its behaviour may change, and how far logits differ."""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor

from corelm.spec import Ragged
from corelm_engine_kit.masses import log_softmax_at
from transformers_backend.engine import CausalLM

#: Length of the longest trial row, if the model reads so many ids.
LONGEST = 8
#: The number of the trial row that is only there to be read beside the others.
OTHER = 1
#: How far apart ids are that are compared together: a prime.
_STRIDE = 7919
#: Lengths beyond this are not in any configuration; powers of two go up to it.
_NO_LENGTH = 2**24
#: Ids that a model of text may read anywhere in a row.
_ORDINARY_SPECIALS = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "sep_token_id", "cls_token_id")


def trial_rows(engine: CausalLM, tokenizer: Any, *, with_specials: bool = True) -> Ragged:
    """Return four rows of random ids: the first half of row 2, another row, row 2, and the first half again.

    Row 2 is the longest. It has the padding id and the end of a text inside, as far as the tokenizer or the
    model names them.
    """
    config = engine.base.config
    longest = min(LONGEST, engine.max_context or LONGEST, engine.rope_switch or LONGEST)
    readable = torch.ones(engine.readable, dtype=torch.bool)
    for name, value in config.to_dict().items():
        # An image token, for example, needs an image.
        other = name.endswith(("_token_id", "_token_index")) and name not in _ORDINARY_SPECIALS
        if other and isinstance(value, int) and 0 <= value < engine.readable:
            readable[value] = False
    ids = readable.nonzero()[:, 0]
    row, other = ids[torch.randint(len(ids), (2, longest), generator=torch.Generator().manual_seed(0))]
    other = other[: max(1, longest - 2)]
    half = row[: max(1, longest // 2)]
    for place, name in ((3, "pad_token_id"), (6, "eos_token_id")) if with_specials else ():
        named = (getattr(source, name, None) for source in (tokenizer, config.get_text_config()))
        special = next((each for each in named if isinstance(each, int) and 0 <= each < engine.readable), None)
        if special is not None:
            row[place : place + 1] = special
    return Ragged.from_list([half, other, row, half])


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's random numbers, which change when a model draws some."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


class LengthClasses:
    """Ranges of lengths within which a model may be expected to treat rows alike.

    A window, a chunk or a scale begins at a number that the configuration holds, so every whole number in it
    ends a range, and so does the number before it. Every power of two ends one too.
    """

    def __init__(self, config: Any) -> None:
        numbers = {int(each) for each in re.findall(r"(?<![\w.-])\d+\b", repr(config.to_dict()))}
        numbers = {number for number in numbers if 1 < number < _NO_LENGTH}
        numbers |= {2**power for power in range(1, _NO_LENGTH.bit_length())}
        self._ends = sorted(numbers | {number - 1 for number in numbers})

    def around(self, length: int) -> tuple[int, int]:
        """Return the first and the last length of the range that holds `length`."""
        index = min(bisect_left(self._ends, length), len(self._ends) - 1)
        return self._ends[index - 1] + 1 if index else 0, self._ends[index]


def spread(logits: Tensor) -> float:
    """Return the standard deviation of the finite logits of a position, for the position where it is largest."""
    return max(float(some[some.isfinite()].std(correction=0).nan_to_num()) for some in logits.float())


def with_others(ids: Tensor, vocab_size: int) -> Tensor:
    """Return int64[n, 2]: each id, and some other one: the log-prob of an id that is nearly certain hides much."""
    return torch.stack([ids, (ids * _STRIDE + 1) % vocab_size], -1)


def token_differences(found: Tensor, wanted: Tensor, tokens: Tensor) -> Tensor:
    """Return how far log-probs of tokens are from those that logits ``[n, vocab]`` give, float32[n] on the CPU.

    That is the root mean square of a position's tokens; infinity where only one of two numbers is finite.

    Args:
        found: float32[n] or float32[n, k].
        tokens: int64 of that shape.
    """
    plain = log_softmax_at(wanted.float(), tokens.to(wanted.device))
    found = found.to(plain)
    apart = (found - plain).abs().where(found.isfinite() == plain.isfinite(), float("inf"))
    apart = apart.where(found.isfinite() | plain.isfinite(), 0.0).cpu()
    return apart.view(len(apart), -1).square().mean(-1).sqrt()


def differences(found: Tensor, wanted: Tensor) -> Tensor:
    """Return how far two sets of logits ``[positions, vocab]`` are apart, float32[positions].

    That is the root mean square, over the vocabulary, of the difference of their log-probabilities; infinity
    if one of them rules out an id that the other allows.
    """
    if found.shape != wanted.shape:
        return torch.tensor([float("inf")])
    # A position at a time, because the logits of a large vocabulary take megabytes.
    return torch.tensor([_apart(one, other) for one, other in zip(found.detach(), wanted.detach(), strict=True)])


def _apart(found: Tensor, wanted: Tensor) -> float:
    # Over a large vocabulary, log_softmax in float32 has a bias of 1e-5 on a CPU.
    found, wanted = (each.float() - each.float().logsumexp(-1) for each in (found, wanted))
    finite = wanted.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return float("inf")
    return float((found - wanted)[finite].square().mean().sqrt().nan_to_num())
