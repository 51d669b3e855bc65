"""A LoRA adapter for an engine that reads a folder: found to fit first, as engines fail half-way or not at all.

An engine may look at such a folder again, long after it has loaded it. So the folder is kept until the adapter goes.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from corelm.errors import CapabilityError, InvalidRequestError, described, first_few
from corelm.spec import WeightUpdate, whole_tensor
from corelm.validate import invalid
from corelm_engine_kit.checkpoints import Shapes, shapes_of, tensor_shapes

#: How PEFT ends the names of the two matrices of a layer, and what it begins all names with.
_DOWN, _UP, _PREFIX = ".lora_A.weight", ".lora_B.weight", "base_model.model."
#: How it ends the names of all matrices, those of embeddings included.
_MATRICES = (_DOWN, _UP, ".lora_embedding_A", ".lora_embedding_B")
#: Fields of PEFT's configuration with which an adapter is more than two matrices and one scale per layer. An engine
#: that does not know such a field leaves it out without a word, and answers as another adapter.
_BEYOND_LORA = (
    *("use_rslora", "rank_pattern", "alpha_pattern", "use_dora", "lora_bias", "modules_to_save", "layer_replication"),
    *("alora_invocation_tokens", "use_bdlora", "use_qalora"),
)
#: Ways to begin a LoRA that also change the base weights, by the beginnings of their names.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
#: How PEFT names the files of an adapter.
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"


def adapter_folder(
    request: WeightUpdate,
    checkpoint: Path | None,
    *,
    largest_rank: int | None,
    option: str,
    honoured: Collection[str] = (),
    problems: Callable[[Shapes], Iterable[str]] = lambda shapes: (),
) -> TemporaryDirectory[str]:
    """Return a temporary folder with the LoRA adapter of a request, once it has been found to fit.

    The folder of a path is copied: its owner may write the next version there, and the engine may read it again. For an
    engine that does not know the scale of rsLoRA, the copy has an equal plain one.

    Args:
        request: an update that loads an adapter.
        checkpoint: the folder of the base model's checkpoint. None if it cannot be read here: shapes are not compared.
        largest_rank: the largest rank that the engine takes; None if that is not known.
        option: how the engine is told a larger rank, as in ``max_lora_rank``.
        honoured: the fields of PEFT's configuration that the engine honours, of those beyond a plain LoRA:
            ``use_rslora``, ``rank_pattern`` and ``alpha_pattern``, for example. Adapters with others are refused.
        problems: returns what else this engine cannot take of tensors with these names and shapes.

    Raises:
        InvalidRequestError: there is no adapter, or it does not fit; `field` is ``path`` or ``state_dict``.
        CapabilityError: it is not a LoRA adapter.
    """
    config = checked_adapter(
        request,
        checkpoint,
        largest_rank=largest_rank,
        option=option,
        honoured={*honoured, "use_rslora"},
        problems=problems,
    )
    if "use_rslora" not in honoured:
        config = _plainly_scaled(config, "path" if request.state_dict is None else "state_dict")
    temporary = TemporaryDirectory(prefix="corelm-adapter-")
    folder = Path(temporary.name)
    try:
        if request.state_dict is not None:
            _save(request.state_dict, folder / _TENSORS)
        else:
            assert request.path is not None
            shutil.copyfile(request.path / _TENSORS, folder / _TENSORS)
        (folder / _CONFIG).write_text(json.dumps(config))
    except BaseException:
        temporary.cleanup()
        raise
    return temporary


def checked_adapter(
    request: WeightUpdate,
    checkpoint: Path | None,
    *,
    largest_rank: int | None,
    option: str,
    honoured: Collection[str] = (),
    problems: Callable[[Shapes], Iterable[str]] = lambda shapes: (),
) -> Mapping[str, Any]:
    """Return the configuration of an adapter, if it fits. Arguments and errors are those of `adapter_folder`."""
    field = "path" if request.state_dict is None else "state_dict"
    config: Mapping[str, Any]
    shapes: Shapes
    if request.state_dict is not None:
        config, shapes = request.adapter_config or {}, shapes_of(request.state_dict)
    else:
        assert request.path is not None
        config, shapes = _read(request.path)
    _check_kind(config)
    found = [
        *_rank_problems(config, largest_rank, option),
        *_ignored_fields(config, honoured),
        *_shape_problems(shapes, checkpoint),
        *problems(shapes),
    ]
    if found:
        raise invalid(field, f"the adapter does not fit: {first_few(found)}")
    return config


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    # Copies, since safetensors refuses tensors that share memory.
    copies = {name: whole_tensor(value).to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    save_file(copies, file, metadata={"format": "pt"})


def _read(folder: Path) -> tuple[Mapping[str, Any], Shapes]:
    from safetensors import SafetensorError, safe_open

    try:
        config = json.loads((folder / _CONFIG).read_text())
        with safe_open(folder / _TENSORS, framework="pt") as tensors:
            shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
        if not isinstance(config, dict):
            raise ValueError(f"{_CONFIG} is not a mapping")
    except (OSError, ValueError, SafetensorError) as error:
        raise no_adapter(folder, error) from error
    return config, shapes


def no_adapter(folder: Path, error: Exception) -> InvalidRequestError:
    """Return the error for a folder that an adapter could not be read from."""
    why = f"there is no readable adapter in {folder} ({described(error)})"
    return invalid("path", f"{why}; give a folder that save_pretrained of a PEFT model wrote")


def _check_kind(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise CapabilityError(
            f"the engine takes LoRA adapters only, and this one is {config.get('peft_type')!r}; merge it into the "
            "model with update_weights(peft_model)",
            capability="adapters",
        )


def _rank_problems(config: Mapping[str, Any], largest: int | None, option: str) -> list[str]:
    rank = max([config.get("r") or 0, *(config.get("rank_pattern") or {}).values()])
    if largest is None or rank <= largest:
        return []
    return [f"its rank {rank} is above {option}={largest}; open the engine with {option}={rank} or more"]


def _ignored_fields(config: Mapping[str, Any], honoured: Collection[str]) -> list[str]:
    """Return what the engine would leave out."""
    given = {name: config.get(name) for name in _BEYOND_LORA if name not in honoured}
    bias, begun = config.get("bias"), config.get("init_lora_weights")
    given["bias"] = None if bias == "none" else bias
    given["init_lora_weights"] = begun if isinstance(begun, str) and begun.lower().startswith(CHANGES_BASE) else None
    return [
        f"the engine does not know {name}={value!r}; train without it, or merge the adapter into the model with "
        "update_weights(peft_model)"
        for name, value in given.items()
        if value
    ]


def _plainly_scaled(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return the configuration without rsLoRA, which scales by ``lora_alpha / sqrt(r)``, and with the same scale."""
    if not config.get("use_rslora"):
        return config
    for name in ("r", "lora_alpha"):
        if type(config.get(name)) not in (int, float) or config[name] <= 0:
            raise invalid(
                field,
                f"the adapter's scale needs {name} as a number above 0 in its configuration, got {config.get(name)!r}",
            )
    return {**config, "use_rslora": False, "lora_alpha": config["lora_alpha"] * math.sqrt(config["r"])}


def _shape_problems(shapes: Shapes, checkpoint: Path | None) -> list[str]:
    if not shapes:
        return ["it has no tensors"]
    problems = [f"{name!r} is not a matrix of a LoRA" for name in sorted(shapes) if not name.endswith(_MATRICES)]
    if checkpoint is None:
        return problems
    base = tensor_shapes(checkpoint)
    for name, shape in sorted(shapes.items()):
        end = next((end for end in (_DOWN, _UP) if name.endswith(end)), None)
        layer = name.removeprefix(_PREFIX).removesuffix(end or "")
        # Experts have other names in the module than in the checkpoint, and a tied head has none there.
        if end is None or "expert" in layer or (layer == "lm_head" and "lm_head.weight" not in base):
            continue
        weight = base.get(f"{layer}.weight")
        if weight is None:
            problems.append(f"{name!r} belongs to no layer of this model")
        elif len(weight) == 2 and shape[-1 if end == _DOWN else 0] != weight[-1 if end == _DOWN else 0]:
            problems.append(f"{name!r} is {shape}, for a weight that is {weight}")
    return problems
