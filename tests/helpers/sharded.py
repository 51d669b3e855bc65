"""What the ranks of `test_wrapped` do: each function runs on both ranks, see `helpers.ranks`."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from corelm import Backend
from corelm.backend.given_weights import checked_pairs, collected
from corelm.errors import CapabilityError
from corelm.spec import WeightUpdate
from corelm_engine_kit import weights_folder
from helpers.tiny_models import random_rows, tiny_model, tiny_tokenizer
from transformers_backend import TransformersBackend


def everything(rank: int) -> dict[str, Any]:
    """Return what each function below returns: starting two ranks takes much longer than any of them."""
    return {job.__name__: job(rank) for job in (refusals, refusals_after_opening, updated, streamed, gathered)}


def sharded(family: str, seed: int = 1) -> Any:
    model = tiny_model(family, seed=seed)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def opened(model: nn.Module) -> Backend:
    return Backend.from_plugin(TransformersBackend.open(model, tokenizer=tiny_tokenizer()), "transformers")


def refusals(rank: int) -> dict[str, str]:
    """Return why each wrapped model is refused when it is opened."""
    wrapped = {
        "fully_shard": sharded("qwen2"),
        "DistributedDataParallel": DistributedDataParallel(tiny_model()),
        "FullyShardedDataParallel": FullyShardedDataParallel(tiny_model(), device_id=torch.device("cpu")),
    }
    wrapped["layers"] = tiny_model()
    for layer in wrapped["layers"].model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    found = {}
    for name, model in wrapped.items():
        try:
            opened(model)
        except CapabilityError as error:
            found[name] = str(error)
    return found


def refusals_after_opening(rank: int) -> dict[str, str]:
    """Return what calls raise whose ranks have different work, on a model that was sharded after it was opened."""
    model = tiny_model()
    backend = opened(model)
    rows = random_rows(*([9] if rank == 0 else [3, 20, 40, 41, 5]))
    before = backend.score_logprobs(rows)
    assert before.weight_versions == ("0",) * len(rows)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    calls = {
        "generate": lambda: backend.generate(rows, {"max_new_tokens": 2 + 5 * rank}),
        "score": lambda: backend.score_logprobs(rows, grad=True),
        "update": lambda: backend.update_weights(tiny_model().state_dict()),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except CapabilityError as error:
            found[name] = str(error)
    return found


def updated(rank: int) -> dict[str, Tensor]:
    """Return the scores of a plain model that got the weights of a sharded one, by the model's family."""
    (ids,) = random_rows(20)
    found = {}
    for family in ("qwen2", "qwen2-tied"):
        trained = sharded(family)
        # A forward leaves the weights of the outermost part gathered.
        trained(torch.tensor([ids]))
        backend = opened(tiny_model(family))
        backend.update_weights(trained.state_dict())
        found[family] = backend.score_logprobs([ids]).logprobs.values
    return found


def streamed(rank: int) -> dict[str, Tensor]:
    """Return the scores of a plain model that got an iterator over a sharded one, by the model's family."""
    (ids,) = random_rows(20)
    found = {}
    for family in ("qwen2", "qwen2-tied"):
        trained = sharded(family)
        backend = opened(tiny_model(family))
        backend.update_weights(iter(trained.state_dict().items()))
        found[family] = backend.score_logprobs([ids]).logprobs.values
    return found


def gathered(rank: int) -> dict[str, dict[str, Tensor]]:
    """Return the weights of a sharded model as engines of other processes get them, by the way that they take."""
    from corelm_fleet.hosting.packing import pack, unpack
    from corelm_fleet.replica_runs import own_copy

    state = sharded("qwen2-tied").state_dict()
    update = WeightUpdate(version="1", when="drain", state_dict=state)
    with TemporaryDirectory() as checkpoint:
        # transformers' save_pretrained writes on rank 0 only.
        own = {name: value for name, value in tiny_model("qwen2-tied").state_dict().items() if name != "lm_head.weight"}
        save_file(own, Path(checkpoint, "model.safetensors"))
        with weights_folder(update, Path(checkpoint)) as folder:
            (file,) = folder.glob("*.safetensors")
            found = {"folder": load_file(file)}
        update_of_pairs = WeightUpdate(version="1", when="drain", stream=checked_pairs(state.items()))
        with weights_folder(update_of_pairs, Path(checkpoint)) as folder:
            (file,) = folder.glob("*.safetensors")
            found["stream"] = load_file(file)
    found["collected"] = collected(iter(state.items()))
    found["fleet"] = dict(own_copy(update).state_dict or {})
    found["process"] = {name: value.clone() for name, value in unpack(*pack(state)).items()}
    return found
