"""How the transformers backend computed its latest scores."""

from __future__ import annotations

from corelm import Backend
from transformers_backend.scoring import ScoringPath


def scoring_path(backend: Backend) -> ScoringPath:
    """Return the path of the latest call of `score_logprobs`.

    Raises:
        AssertionError: the call did not run the model.
    """
    path = backend.engine.plugin.scorer.path
    assert path is not None
    return path
