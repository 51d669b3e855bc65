"""`ServerAdapters`: LoRA adapters of an engine that reads folders. Each version is loaded under a new name.

The old one is unloaded then. So no version is ever taken for another, whatever the engine keeps for a name.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection
from tempfile import TemporaryDirectory

from corelm.errors import InvalidRequestError
from corelm.spec import WeightUpdate
from corelm.validate import invalid

#: What the server reads while an adapter is loaded: a folder that was made for it, or None for a path of the caller.
Folder = TemporaryDirectory[str] | None


class ServerAdapters:
    """The adapters of a server: those that it was started with, and those that are loaded here.

    Args:
        own: the names of the adapters that the server was started with.
        folder: ``folder(request)`` returns a folder for the adapter of a request, once that has been found to fit (see
            `adapter_folder`); None if the server reads the caller's path. The folder is kept while it is loaded.
        load: ``load(name, path)`` has the server load an adapter under a new name.
        unload: has the server unload the adapter of that name.
    """

    def __init__(
        self,
        own: Collection[str],
        folder: Callable[[WeightUpdate], Folder],
        load: Callable[[str, str], None],
        unload: Callable[[str], None],
    ) -> None:
        self._own, self._folder, self._load, self._unload = own, folder, load, unload
        # By the name that the caller gave: the server's name, and the folder that was made for it.
        self._loaded: dict[str, tuple[str, Folder]] = {}

    def server_name(self, adapter: str) -> str:
        """Return the server's name for an adapter.

        Raises:
            InvalidRequestError: there is no such adapter.
        """
        if adapter in self._loaded:
            return self._loaded[adapter][0]
        if adapter not in self._own:
            raise unknown_adapter(adapter, {*self._loaded, *self._own})
        return adapter

    def update(self, request: WeightUpdate) -> None:
        """Load, replace or unload the adapter of a request.

        Raises:
            InvalidRequestError: it is not there, or the server was started with it. Nothing has changed.
            CoreLMError: the errors of `folder`, `load` and `unload`.
        """
        name = request.adapter
        assert name is not None
        old = self._loaded.get(name)
        if old is None and name in self._own:
            raise invalid("adapter", f"the server was started with {name!r}; load this one under another name")
        if not request.unloads:
            # A name that no version had, here or in another client.
            new = f"{name}.{uuid.uuid4().hex[:12]}"
            folder = self._folder(request)
            try:
                self._load(new, str(request.path) if folder is None else folder.name)
            except BaseException:
                if folder is not None:
                    folder.cleanup()
                raise
            self._loaded[name] = new, folder
        elif old is None:
            raise unknown_adapter(name, {*self._loaded, *self._own})
        else:
            del self._loaded[name]
        if old is not None:
            self._unload(old[0])
            if old[1] is not None:
                old[1].cleanup()

    def close(self) -> None:
        """Delete the folders."""
        while self._loaded:
            folder = self._loaded.popitem()[1][1]
            if folder is not None:
                folder.cleanup()


def unknown_adapter(name: str, known: Collection[str]) -> InvalidRequestError:
    """Return the error for a request with an adapter that is not there.

    Args:
        name: the adapter's.
        known: the names of those that are.
    """
    others = f"there are {', '.join(map(repr, sorted(known)))}" if known else "no adapter is loaded"
    return invalid("adapter", f"there is no {name!r}; {others}. Call load_adapter({name!r}, …) first")
