"""Let callers on many threads and in many tasks share an engine's calls.

- `scheduling.py`: the rules that say which requests go next, without threads.
- `dispatcher.py`: the thread that owns the queue, those that take requests to the engine, and how requests are merged.
- `batcher.py`: `DynamicBatcher`, the backend in front of them.
"""

from corelm.batching.batcher import BatchingState, DynamicBatcher
from corelm.batching.scheduling import Limits
from corelm.errors import QueueFullError

__all__ = ["BatchingState", "DynamicBatcher", "Limits", "QueueFullError"]
