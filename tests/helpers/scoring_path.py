"""How the transformers backend computed its latest scores."""

from corelm import Backend
from helpers.tiny_models import DEVICE
from transformers_backend.scoring import RowLayout, ScoringPath

#: The layout of packed rows where the tests run: a GPU attends in many of them at once, where the dtype allows it.
PACKED: RowLayout = "packed" if DEVICE == "cpu" else "fused"


def scoring_path(backend: Backend) -> ScoringPath:
    """Return the path of the latest call of `score_logprobs`.

    Raises:
        AssertionError: the call did not run the model.
    """
    path = backend.engine.plugin.scorer.path
    assert path is not None
    return path
