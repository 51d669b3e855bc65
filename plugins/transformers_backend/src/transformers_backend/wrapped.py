"""Models that are wrapped or sharded: the one inside ``torch.compile`` is used, those of several ranks are refused.

The ranks of a sharded model gather its weights together in every forward. This backend makes as many forwards as the
rows of its own rank need, so one rank would soon wait for another forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch import nn

from corelm.errors import CapabilityError

_BLOCKS = (
    "shards the model, and a rank that makes more forwards than another one would wait forever; open the backend on an "
    "unsharded copy of the model, and after every training step"
)
_STATE_DICT = f"{_BLOCKS} call update_weights(model.state_dict()) on all ranks"
_FULL_STATE_DICT = f"{_BLOCKS} call update_weights with a full state dict"
_ZERO_3 = (
    f"DeepSpeed ZeRO-3 {_BLOCKS} save the weights with engine.save_16bit_model(FOLDER) and call "
    "update_weights('FOLDER/pytorch_model.bin')"
)

#: What to say of classes that cannot be run here, by their package and name: so nothing is imported to recognize them.
_REFUSED = {
    ("torch", "DataParallel"): "DataParallel cuts batches into pieces of any shape; give model.module",
    ("torch", "DistributedDataParallel"): (
        "DistributedDataParallel averages gradients only if its own forward is called; give model.module, and average "
        "the gradients over the ranks yourself if you train through the scores"
    ),
    ("torch", "FullyShardedDataParallel"): f"FullyShardedDataParallel {_FULL_STATE_DICT}",
    ("torch", "FSDPModule"): f"fully_shard {_STATE_DICT}",
    ("deepspeed", "DeepSpeedEngine"): "a DeepSpeedEngine wraps the model for training; give engine.module",
}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside ``torch.compile(model)``, which has the same parameters; any other model as it is.

    It runs without being compiled: rows have new lengths in every call, and torch would compile it again for many.

    Raises:
        CapabilityError: the model, or a part of it, is wrapped or sharded for several devices. Nothing is asked of the
            other ranks, so each of them raises.
    """
    while (inner := dict(model.named_children()).get("_orig_mod")) is not None:
        model = inner
    _refuse(model.modules(), model.parameters())
    return model


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model that was sharded in place since it was opened. For every call, so it looks at little.

    Raises:
        CapabilityError: the model is sharded.
    """
    _refuse([model], islice(model.parameters(), 1))


def _refuse(parts: Iterable[nn.Module], weights: Iterable[Any]) -> None:
    """Refuse weights first: a wrapper may hold a model that is refused as well."""
    weights = list(weights)
    if any(hasattr(weight, "ds_id") for weight in weights):
        raise CapabilityError(_ZERO_3, capability="model")
    for kind in dict.fromkeys(map(type, parts)):
        for ancestor in kind.__mro__:
            if why := _REFUSED.get((ancestor.__module__.partition(".")[0], ancestor.__name__)):
                raise CapabilityError(why, capability="model")
    if weights and not weights[0].numel():
        # The inner model of FSDP1, for example.
        raise CapabilityError(
            f"the model's first parameter is empty, so another library {_FULL_STATE_DICT}", capability="model"
        )
