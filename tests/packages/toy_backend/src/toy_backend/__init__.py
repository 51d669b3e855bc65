"""The reference plugin: a whole backend in pure torch, small enough to read at one sitting."""

from toy_backend.backend import ToyBackend
from toy_backend.model import Bigram
from toy_backend.tokenizer import ByteTokenizer

__all__ = ["Bigram", "ByteTokenizer", "ToyBackend"]
