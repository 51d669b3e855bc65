"""`EventLoopThread`: an asyncio event loop on a thread of its own, for engines and clients that live on one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoopThread:
    """Runs coroutines for any number of threads at once.

    The thread is a daemon: an interpreter that ends without `stop` is not held up by it.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        # Nothing may slip in behind the last task that `stop` cancels: it would never end, nor whoever waits for it.
        self._door = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """The coroutine's result. Whatever ends the wait early, a `KeyboardInterrupt` too, cancels the coroutine.

        Raises:
            TimeoutError: it took longer than `timeout` seconds.
            concurrent.futures.CancelledError: `stop` or `cancel` ended it.
            RuntimeError: the loop was stopped, or this is its own thread, which must not wait for itself.
        """
        future = self.submit(coroutine)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            if isinstance(error, TimeoutError):
                raise
            # Before Python 3.11 it is not the builtin.
            raise TimeoutError(*error.args) from error
        except BaseException:
            # Nothing to do if the coroutine itself raised.
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine. Cancelling the future cancels it.

        Raises:
            RuntimeError: the loop was stopped, or this is its own thread.
        """
        with self._door:
            if not self._stopped and threading.current_thread() is not self._thread and self._thread.is_alive():
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise RuntimeError("called from the loop's own thread" if self._is_mine() else "this event loop was stopped")

    def cancel(self) -> None:
        """Cancel everything that is running and wait until it has cleaned up."""
        self.run(_cancel_the_others())

    def stop(self) -> None:
        """Cancel what is running, let it clean up, and end the thread. Stopping twice is fine.

        Raises:
            RuntimeError: this is the loop's own thread.
        """
        if self._is_mine():
            raise RuntimeError("called from the loop's own thread")
        with self._door:
            first, self._stopped = not self._stopped, True
            # Not alive in a forked child, where only the thread that forked lives on.
            last = first and self._thread.is_alive()
            ending = asyncio.run_coroutine_threadsafe(_end(), self._loop) if last else None
        if ending is not None:
            ending.result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        else:
            self._thread.join()

    def _is_mine(self) -> bool:
        return threading.current_thread() is self._thread


async def _cancel_the_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _end() -> None:
    await _cancel_the_others()
    await asyncio.get_running_loop().shutdown_asyncgens()
