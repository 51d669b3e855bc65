"""The vLLM backend: sampling and scoring with vLLM, in this process or behind a URL."""

from vllm_backend.backend import VLLMBackend

__all__ = ["VLLMBackend"]
