"""Containers of earlier tokens, which a call that replaces the tokens would leave next to the new ones."""

from __future__ import annotations

from tensordict import TensorDictBase

from corelm.containers.classes import LogProbs, Masks, Tokens
from corelm.containers.keys import key_parts
from corelm.errors import InvalidRequestError
from corelm.policy.inputs import Keys
from corelm.policy.options import PolicyOptions
from corelm.policy.values import find_value


def refuse_stale(td: TensorDictBase, options: PolicyOptions, new: str, *, answered: bool = False) -> None:
    """Refuse a call that replaces tokens if it leaves containers as long as the old ones.

    Args:
        new: what the call writes.
        answered: whether to look only at log-probs of an earlier answer.
    """
    keys, plain = options.keys, Keys()
    written = [getattr(keys, name) for name in options.fields]
    # A policy that writes log-probs elsewhere leaves those of the sampler, which are under this key.
    looked_at = [plain.log_probs] if keys.tokens == plain.tokens else []
    looked_at += [] if answered else [keys.tokens, keys.masks]
    for key in looked_at:
        there = find_value(td, key)
        stays = key not in written and isinstance(there, (LogProbs, Masks, Tokens))
        if stays and (not answered or "response" in there.keys()):
            name = ".".join(key_parts(key))
            raise InvalidRequestError(
                f"{name}: it belongs to the tokens that are there, and would stay next to {new}; delete it from the "
                "TensorDict, write it as well, or pass inplace=False",
                field=name,
            )
