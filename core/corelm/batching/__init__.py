"""Callers on many threads and in many tasks share an engine's calls.

Read `rules.py` for who goes next, `joining.py` for how requests become one call, `dispatcher.py` for the threads, and
`batcher.py` for the façade in front of them.
"""

from corelm.batching.batcher import BatchingState, DynamicBatcher
from corelm.batching.scheduling import Limits
from corelm.errors import QueueFullError

__all__ = ["BatchingState", "DynamicBatcher", "Limits", "QueueFullError"]
