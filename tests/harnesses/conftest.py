"""Tests with lm-eval, TRL and inspect_ai, in the environment that has them (make test-harnesses, make test-newest).

Elsewhere they are not collected. `make test-hosts` collects those that need the environments of the engines as well.
"""

import os
from importlib.util import find_spec

import pytest

import corelm
from helpers.tiny_models import tiny_model, tiny_tokenizer

NEEDED = {
    "test_lm_eval*.py": "lm_eval",
    "test_local_completions.py": "lm_eval",
    "test_trl*.py": "trl",
    "test_inspect*.py": "inspect_ai",
}
collect_ignore_glob = [files for files, library in NEEDED.items() if find_spec(library) is None]
collect_ignore_glob += [] if os.environ.get("CORELM_TEST_HOSTS") else ["test_*_hosted.py"]


@pytest.fixture
def backend():
    """The engine has a model of its own, with the weights of ``tiny_model()``."""
    with corelm.get_backend("transformers", tiny_model(), tokenizer=tiny_tokenizer()) as opened:
        yield opened
