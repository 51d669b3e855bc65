"""The vLLM backend of core: sample from and score with vLLM, in this process or behind a URL."""

from vllm_backend.backend import VLLMBackend

__all__ = ["VLLMBackend"]
