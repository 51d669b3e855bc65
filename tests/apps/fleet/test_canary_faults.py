"""Faults of weights that the canary finds, and what its callers see of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from apps.fleet.conftest import looks
from corelm import Backend
from corelm.errors import StaleWeightsError
from corelm_fleet import ProbeScores
from corelm_fleet.canary import Canary, probe_scores, watch
from helpers.faulty_weights import Half, Ignoring, PrefixCaching, Restarting, StalePrefixes, open_faulty
from helpers.tiny_models import tiny_model
from transformers_backend import TransformersBackend

DTYPES = [torch.float32, torch.bfloat16]
SHORT = {"max_new_tokens": 2}


def weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return tiny_model(seed=seed).to(dtype).state_dict()


def expected(seed: int, dtype: torch.dtype = torch.float32) -> ProbeScores:
    return probe_scores(tiny_model(seed=seed).to(dtype))


def watched(plugin: type[TransformersBackend], dtype: torch.dtype = torch.float32, **options: Any) -> Backend:
    backend = open_faulty(plugin, dtype)
    watch(backend, Canary(**options))
    return backend


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prefix_cache_of_the_old_weights_is_found_without_being_told_what_to_expect(dtype: torch.dtype) -> None:
    with watched(PrefixCaching, dtype) as backend:
        assert backend.update_weights(weights(1, dtype)) == "1"
        assert backend.engine.plugin.hits > 0, "the probes must use the cache"
    with watched(StalePrefixes, dtype) as backend:
        # As if other requests had filled the cache: the canary puts its probes back before the weights are loaded.
        backend.engine.plugin.cache.clear()
        with pytest.raises(StaleWeightsError):
            backend.update_weights(weights(1, dtype))


def test_a_state_dict_and_a_folder_of_it_count_as_the_same_weights(tmp_path: Any) -> None:
    model = tiny_model(seed=1)
    model.save_pretrained(tmp_path)
    with watched(TransformersBackend) as backend:
        for given in (model.state_dict(), tmp_path, tmp_path / "model.safetensors", model.state_dict()):
            backend.update_weights(given)
    with watched(Ignoring) as backend:
        backend.update_weights(tmp_path)
        with pytest.raises(StaleWeightsError):
            backend.update_weights(weights(2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plugin", [Ignoring, Half])
def test_weights_that_were_not_loaded_whole_are_found_with_expect(
    plugin: type[TransformersBackend], dtype: torch.dtype
) -> None:
    with watched(TransformersBackend, dtype) as backend:
        assert backend.update_weights(weights(1, dtype), "sound", expect=expected(1, dtype)) == "sound"
    with watched(plugin, dtype) as backend, pytest.raises(StaleWeightsError, match="differ from those expected"):
        backend.update_weights(weights(1, dtype), expect=expected(1, dtype))


def test_a_step_smaller_than_the_tolerance_that_was_not_loaded_is_found_with_expect() -> None:
    model = tiny_model(seed=1)
    with watched(TransformersBackend, tolerance=0.5) as sound, watched(Ignoring, tolerance=0.5) as faulty:
        faulty.engine.plugin.engine.module.load_state_dict(model.state_dict())
        for backend in (sound, faulty):
            backend.update_weights(model.state_dict(), expect=probe_scores(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.005 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        assert sound.update_weights(model.state_dict(), expect=probe_scores(model)) == "2"
        with pytest.raises(StaleWeightsError, match="the trainer's scores have moved by 0"):
            faulty.update_weights(model.state_dict(), expect=probe_scores(model))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_server_restarted_with_its_first_weights_is_found(dtype: torch.dtype) -> None:
    with watched(Restarting, dtype) as backend:
        looks(backend).look()
        backend.engine.plugin.restart()
        looks(backend).look()
        backend.update_weights(weights(1, dtype), "tuned")
        looks(backend).look()
        backend.engine.plugin.restart()
        with pytest.raises(StaleWeightsError, match="those of the last good look"):
            looks(backend).look()
        # No row says that it comes from weights that it does not come from.
        assert backend.generate([[5, 6]], SHORT).weight_versions != ("tuned",)
        with pytest.raises(StaleWeightsError):
            looks(backend).look()
        assert backend.update_weights(weights(1, dtype), "tuned") == "tuned"
        looks(backend).look()


def test_a_server_restarted_after_small_steps_is_found() -> None:
    with watched(Restarting, tolerance=0.5) as backend:
        model = tiny_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.005 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        backend.update_weights(model.state_dict())
        looks(backend).look()
        backend.engine.plugin.restart()
        with pytest.raises(StaleWeightsError, match="those of earlier weights"):
            looks(backend).look()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_buffer_that_was_overwritten_is_found(dtype: torch.dtype) -> None:
    with watched(TransformersBackend, dtype) as backend:
        frequencies = next(
            buffer for name, buffer in backend.engine.plugin.engine.module.named_buffers() if "inv_freq" in name
        )
        looks(backend).look()
        assert backend.weight_version == "0"
        # Buffers are no part of what the plugin watches, and no state dict holds this one.
        frequencies.zero_()
        with pytest.raises(StaleWeightsError):
            looks(backend).look()
        assert backend.weight_version == "1"


@pytest.mark.filterwarnings("ignore:std")
def test_weights_that_are_nan_are_found() -> None:
    broken = {name: torch.full_like(value, torch.nan) for name, value in weights(1).items()}
    with watched(TransformersBackend) as backend:
        with pytest.raises(StaleWeightsError):
            backend.update_weights(broken)
        assert backend.update_weights(weights(1), expect=expected(1)) == "2"
    model = tiny_model()
    model.load_state_dict(broken)
    with Backend.from_plugin(TransformersBackend.open(model, tokenizer=backend.tokenizer), "nan") as unwatched:
        with pytest.raises(StaleWeightsError):
            watch(unwatched)
        assert unwatched.engine.listener is None


def test_weights_that_the_canary_refuses_have_a_label_that_none_had_until_an_update_succeeds() -> None:
    with watched(Half) as backend:
        labels = {backend.weight_version}
        for _ in range(2):
            with pytest.raises(StaleWeightsError) as caught:
                backend.update_weights(weights(1), "tuned", expect=expected(1))
                pytest.fail("half a checkpoint was taken for whole")
            assert caught.value.usable
            found = backend.generate([[5, 6]], SHORT).weight_versions
            assert found is not None and found[0] == backend.weight_version
            assert not {*found} & (labels | {"tuned"})
            labels |= {*found}
            with pytest.raises(StaleWeightsError):
                looks(backend).look()
        backend.engine.plugin.__class__ = TransformersBackend
