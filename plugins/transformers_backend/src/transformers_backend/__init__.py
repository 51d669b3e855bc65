"""The transformers backend: samples from and scores with Hugging Face models, in this process."""

from transformers_backend.backend import TransformersBackend

__all__ = ["TransformersBackend"]
