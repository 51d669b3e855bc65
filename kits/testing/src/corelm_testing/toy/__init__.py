"""The reference plugin: a whole backend in pure torch, small enough to read at one sitting."""

from corelm_testing.toy.backend import ToyBackend
from corelm_testing.toy.model import Bigram
from corelm_testing.toy.tokenizer import ByteTokenizer

__all__ = ["Bigram", "ByteTokenizer", "ToyBackend"]
