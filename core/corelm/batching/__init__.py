"""Callers on many threads and in many tasks share an engine's calls.

- `scheduling.py`: which requests go next, as rules without threads.
- `merging.py`: how requests become one call, and how its result is taken apart.
- `dispatcher.py`: the threads that take requests to the engine.
- `timers.py`: when a request's time is over.
- `batcher.py`: `DynamicBatcher`, the backend in front of them.
"""

from corelm.batching.batcher import BatchingState, DynamicBatcher
from corelm.batching.scheduling import Limits
from corelm.errors import QueueFullError

__all__ = ["BatchingState", "DynamicBatcher", "Limits", "QueueFullError"]
