"""`MidAnswer`: do something on another thread while a model answers, without reaching into the backend."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
#: Seconds that each step waits for the other thread. The outcome does not depend on it: results say what came when.
_PAUSE = 0.05


class MidAnswer:
    """Make this before the backend is opened, and let the backend answer once: it tries a model that has a new hook.

    Attributes:
        raised: what the work raised; None if it ended.
    """

    def __init__(self, model: Any) -> None:
        self.raised: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._left = 0
        model.get_input_embeddings().register_forward_hook(self._look)

    def run(self, work: Callable[[], object], ask: Callable[[], T], steps: int = 5) -> T:
        """Return what `ask` returns. `work` begins after so many steps of decoding, and later steps are slow until it
        has ended.
        """

        def done() -> None:
            try:
                work()
            except BaseException as error:
                self.raised = error
            finally:
                self._done.set()

        self.raised, self._left = None, steps
        self._done.clear()
        self._thread = thread = threading.Thread(target=done)
        try:
            return ask()
        finally:
            self._thread = None
            assert thread.ident is not None, "the answer had too few steps"
            thread.join(60)
            assert not thread.is_alive()

    def _look(self, module: object, args: Any, out: object) -> None:
        if self._thread is None or args[0].shape[1] != 1:
            return
        self._left -= 1
        if self._left == 0:
            self._thread.start()
        if self._left <= 0:
            self._done.wait(_PAUSE)
