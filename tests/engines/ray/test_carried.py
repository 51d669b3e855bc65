"""A large tensor goes to an actor without the rest of its storage, and can be written to there."""

from __future__ import annotations

import ray
import torch

from corelm_fleet.hosting import Kind, pack
from ray_backend.actor import frame_for_ray, frame_of_ray


def test_a_large_tensor_arrives_alone_and_can_be_written_to() -> None:
    whole = torch.randn(4_000, 300)
    carried = ray.get(ray.put(frame_for_ray(Kind.CALL, 0, pack(whole[:1_000]))))
    assert sum(each.nbytes for each in carried[3]) == 1_000 * 300 * 4
    found = frame_of_ray(carried).value()
    assert torch.equal(found, whole[:1_000])
    found += 1
