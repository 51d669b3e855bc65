"""The sglang backend of core."""

from sglang_backend.backend import SGLangBackend

__all__ = ["SGLangBackend"]
