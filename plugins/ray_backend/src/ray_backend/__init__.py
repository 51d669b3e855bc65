"""The `ray` backend of corelm."""

from ray_backend.backend import RayBackend

__all__ = ["RayBackend"]
