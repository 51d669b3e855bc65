"""`EventLoopThread`: an asyncio event loop that runs on its own thread, for engines and clients that need a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from corelm.waiting import done_within

T = TypeVar("T")


class EventLoopThread:
    """Runs coroutines for any number of threads at once.

    The thread is a daemon, so it does not keep an interpreter alive that ends without calling `stop`.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        # `stop` and `submit` exclude each other. A coroutine submitted after `stop` has cancelled the others would
        # never end, and its caller would wait forever.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run the coroutine and return its result. If the wait ends early, the coroutine is cancelled.

        Raises:
            TimeoutError: it took longer than `timeout` seconds.
            concurrent.futures.CancelledError: `stop` or `cancel` ended it.
            RuntimeError: the loop was stopped, or the caller is the loop's own thread, which cannot wait for itself.
        """
        future = self.submit(coroutine)
        try:
            if not done_within(future, timeout):
                raise TimeoutError
        except BaseException:
            # For example a KeyboardInterrupt.
            future.cancel()
            raise
        return future.result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine. Cancelling the future cancels it.

        Raises:
            RuntimeError: the loop was stopped, or the caller is the loop's own thread.
        """
        with self._lock:
            if not self._stopped and threading.current_thread() is not self._thread and self._thread.is_alive():
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        own = self._is_own_thread()
        raise RuntimeError("called from the loop's own thread" if own else "this event loop was stopped")

    def cancel(self) -> None:
        """Cancel all running coroutines and wait until they have cleaned up."""
        self.run(_cancel_the_others())

    def stop(self) -> None:
        """Cancel all running coroutines, let them clean up, and end the thread. Stopping twice is fine.

        Raises:
            RuntimeError: the caller is the loop's own thread.
        """
        if self._is_own_thread():
            raise RuntimeError("called from the loop's own thread")
        with self._lock:
            first, self._stopped = not self._stopped, True
            # In a forked child the thread is not alive: only the thread that called fork is copied.
            last = first and self._thread.is_alive()
            ending = asyncio.run_coroutine_threadsafe(_end(), self._loop) if last else None
        if ending is not None:
            ending.result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        else:
            self._thread.join()

    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread


async def _cancel_the_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _end() -> None:
    await _cancel_the_others()
    await asyncio.get_running_loop().shutdown_asyncgens()
