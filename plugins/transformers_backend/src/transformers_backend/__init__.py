"""The transformers backend: sampling from and scoring with Hugging Face models, in this process."""

from transformers_backend.backend import TransformersBackend

__all__ = ["TransformersBackend"]
