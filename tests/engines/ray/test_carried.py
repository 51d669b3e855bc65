"""Nothing of the specification is lost on the way through an actor: no field, no hook, no token of a stream."""

from __future__ import annotations

import inspect
from typing import Any

import ray
import torch

import corelm
from corelm import Backend, Ragged
from corelm.spec import hookspecs
from corelm_fleet import FleetEngine
from corelm_fleet.hosting import HostedEngine, Kind, pack
from engines.ray.conftest import Open
from ray_backend import RayBackend
from ray_backend.actor import frame_for_ray, frame_of_ray


def test_a_large_tensor_arrives_alone_and_can_be_written_to() -> None:
    whole = torch.randn(4_000, 300)
    carried = ray.get(ray.put(frame_for_ray(Kind.CALL, 0, pack(whole[:1_000]))))
    assert sum(each.nbytes for each in carried[3]) == 1_000 * 300 * 4
    found = frame_of_ray(carried).value()
    assert torch.equal(found, whole[:1_000])
    found += 1


def test_every_hook_is_carried() -> None:
    def hooks(cls: type[Any]) -> set[str]:
        return {name for name, _ in inspect.getmembers(cls, lambda each: hasattr(each, "corelm_impl"))}

    spec = {name for name, value in vars(hookspecs.BackendSpec).items() if hasattr(value, "corelm_spec")}
    # The fleet asks an actor's `HostedEngine`; what the two do not carry has its reason in their own tests.
    assert hooks(RayBackend) == hooks(FleetEngine) == spec - {"to_containers", "weights_state"}
    assert hooks(HostedEngine) == spec - {"tokenize", "to_containers", "weights_state"}


def test_sets_and_the_most_probable_ids_cross_actors(open_toys: Open) -> None:
    backend: Backend = open_toys(replicas=2)
    sampling = {"max_new_tokens": 5, "seed": 5, "temperature": 0.7, "top_k": 4}
    asked: dict[str, Any] = {"logprobs": "processed", "return_support": True, "top_logprobs": 3}
    with corelm.get_backend("toy") as one:
        for prompts in ([[72, 101], [73]], [[n] for n in range(60, 72)]):
            found, expected = (each.generate(prompts, sampling, **asked) for each in (backend, one))
            for name in ("ids", "kept_ids", "kept_log_mass", "top_ids", "top_logprobs", "tail_log_mass"):
                assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
            joined = Ragged.from_list(prompts).join(found.ids)
            starts = [len(prompt) for prompt in prompts]
            for given in ({"support": found.kept_ids}, {"top_k": 2}, {"top_ids": list(found.top_ids.split())}):
                over, plain = (
                    each.score_logprobs(joined, score_from=starts, temperature=0.7, **given) for each in (backend, one)
                )
                assert over.logprobs.tolist() == plain.logprobs.tolist()
                assert (over.top_ids is None) == ("support" in given)
