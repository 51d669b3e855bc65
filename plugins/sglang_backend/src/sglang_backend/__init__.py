"""The `sglang` backend of corelm."""

from sglang_backend.backend import SGLangBackend

__all__ = ["SGLangBackend"]
