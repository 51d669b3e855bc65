"""The `openai` backend of corelm."""

from openai_backend.backend import OpenAIBackend

__all__ = ["OpenAIBackend"]
