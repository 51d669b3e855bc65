"""llama.cpp as a backend of core. It gives vocabulary, chat template and logits; the engine kit does the rest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import create_string_buffer
from typing import Any

import llama_cpp
import numpy as np

from corelm_engine_kit import LogitsEngine, TemplateTokenizer


class LlamaCppBackend(LogitsEngine):
    """A model in llama.cpp. Its KV cache holds one row, so rows are answered one after another."""

    max_under_way = 1

    def __init__(self, llama: llama_cpp.Llama, max_context: int, precision: float) -> None:
        vocab = llama_cpp.llama_model_get_vocab(llama.model)
        ends = frozenset(token for token in range(llama.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, token))
        tokenizer = tokenizer_of(llama, vocab)
        super().__init__(tokenizer, max_context=max_context, eos_token_ids=ends, precision=precision)
        self.llama, self.conformance = llama, {"tolerance": 10 * precision}

    @classmethod
    def open(
        cls, model: str | os.PathLike[str], *, max_context: int = 2048, gpu_layers: int = 0, precision: float = 0.1
    ) -> LlamaCppBackend:
        """Open a GGUF file.

        Args:
            model: the path of the file.
            max_context: the longest prompt and answer together. Memory is taken for the logits of so many ids.
            gpu_layers: how many layers run on a GPU; -1 for all.
            precision: as `Capabilities.precision`. Activations are rounded to 8 bits unless the file is in float32.
        """
        exact = dict.fromkeys(("type_k", "type_v"), llama_cpp.GGML_TYPE_F32)
        options: dict[str, Any] = {"n_ctx": max_context, "n_gpu_layers": gpu_layers, **exact}
        return cls(llama_cpp.Llama(os.fspath(model), **options, logits_all=True, verbose=False), max_context, precision)

    def logits(self, rows: Sequence[list[int]], caches: Sequence[dict[str, Any]]) -> np.ndarray:
        """Return the logits that follow each row."""
        return np.stack([self._read(row)[-1] for row in rows])

    def sequence_logits(self, ids: list[int], first: int) -> np.ndarray:
        """Return the logits that follow ``ids[: first + 1]`` … ``ids``."""
        return self._read(ids)[first:]

    def _read(self, ids: list[int]) -> np.ndarray:
        """Return float32[len(ids), V], the logits that follow each id. What was read last is not read again."""
        llama = self.llama
        llama.n_tokens = llama.longest_token_prefix(llama.input_ids[: llama.n_tokens].tolist(), ids)
        if not llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(llama.ctx), -1, llama.n_tokens, -1):
            llama.reset()  # the memory of such a model cannot be cut
        llama.eval(ids[llama.n_tokens :])
        return llama.scores[: len(ids)]


def tokenizer_of(llama: llama_cpp.Llama, vocab: Any) -> TemplateTokenizer:
    """Return the tokenizer of a model in llama.cpp."""
    buffer, tokens = create_string_buffer(1024), range(llama.n_vocab())

    def piece(token: int) -> bytes:
        length = llama_cpp.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[:length]

    pieces = [piece(token) for token in tokens]
    texts = {token: pieces[token].decode() for token in tokens if llama_cpp.llama_vocab_is_control(vocab, token)}
    return TemplateTokenizer(
        encode=lambda text: llama.tokenize(text.encode(), add_bos=False),
        decode=lambda ids: b"".join(pieces[token] for token in ids).decode(errors="replace"),
        specials={text: token for token, text in texts.items()},
        template=llama.metadata.get("tokenizer.chat_template"),
        size=len(pieces),
        eos=texts.get(llama.token_eos()),
        bos=texts.get(llama.token_bos()) if llama_cpp.llama_vocab_get_add_bos(vocab) else None,
    )
