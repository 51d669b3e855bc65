"""`Cassettes`: what the pytest fixture `cassette` gives to a test.

pytest imports this module in every session, so torch is not imported with it.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from corelm.errors import InvalidRequestError
from corelm_testing.cassette.file import CassetteError, is_complete

if TYPE_CHECKING:
    import pytest

    from corelm import Backend
    from corelm_testing.cassette.recorder import CassetteRecorder

Mode = Literal["none", "once", "new_episodes", "all"]
#: The words of VCR.
MODES: tuple[Mode, ...] = ("none", "once", "new_episodes", "all")


class Cassettes:
    """Opens engines for one test: recorded, or replayed from the test's folder of cassettes.

    The folder is ``cassettes/MODULE/TEST`` next to the test file, with a cassette for each engine that the test opens.
    The marker ``@pytest.mark.corelm_cassette(…)`` sets the arguments below for a test, a class or a module.

    Args:
        folder: the folder of the test's cassettes.
        mode: "none" replays, and no engine is opened. "once" replays a cassette that was recorded to its end by a test
            that passed, and records otherwise. "new_episodes" opens the engine and adds calls that are not recorded.
            "all" records again.
        match_seeds: as for ``get_backend("cassette", …)``.
        save_tokenizer: whether a recording holds the tokenizer's files.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        mode: Mode = "once",
        *,
        match_seeds: bool = True,
        save_tokenizer: bool = False,
    ) -> None:
        self.folder, self.mode = Path(folder), mode
        self._match_seeds = match_seeds
        self._save_tokenizer = save_tokenizer
        self._opened: list[Backend] = []
        self._recorders: list[CassetteRecorder] = []

    @classmethod
    def of_test(cls, test: pytest.Item, mode: Mode, **settings: Any) -> Cassettes:
        """Return the cassettes of a test.

        Args:
            test: the test.
            mode: see the class.
            settings: those of the marker: see the class, and `path`, which replaces the folder; a relative one is
                next to the test file.

        Raises:
            InvalidRequestError: an unknown setting.
        """
        path = settings.pop("path", None)
        if unknown := settings.keys() - {"match_seeds", "save_tokenizer"}:
            raise InvalidRequestError(
                f"corelm_cassette: {min(unknown)} is unknown; it takes match_seeds, save_tokenizer and path",
                field=min(unknown),
            )
        folder = Path("cassettes", test.path.stem, _folder_name(test))
        return cls(test.path.parent / (folder if path is None else path), mode, **settings)

    def open(
        self,
        name: str,
        model: Any = None,
        *,
        label: str | None = None,
        wrappers: Sequence[object] = (),
        tokenizer: Any = None,
        **options: Any,
    ) -> Backend:
        """Open an engine that is recorded, or its replay. It is closed after the test at the latest.

        Args:
            name: the backend, as for `get_backend`. A replay has its name, too.
            model: the model.
            label: the name of the cassette in the test's folder; None counts: "0", "1", ….
            wrappers: more wrappers, around the recorder and around the replay.
            tokenizer: replaces the tokenizer, also in a replay.
            options: what else `get_backend` takes. A replay needs none of it.

        Raises:
            CassetteError: there is no cassette to replay, or it is damaged.
            CoreLMError: see `get_backend`.
        """
        from corelm import get_backend
        from corelm_testing.cassette.recorder import CassetteRecorder

        path = self.folder / (str(len(self._opened)) if label is None else label)
        if self.mode == "none" and not path.exists():
            raise CassetteError(
                f"{path} does not exist, and --corelm-record-mode=none records nothing; run the test with "
                "--corelm-record-mode=once where the engine is"
            )
        if self.mode == "none" or (self.mode == "once" and is_complete(path)):
            backend = get_backend(
                "cassette", path, wrappers=wrappers, tokenizer=tokenizer, match_seeds=self._match_seeds
            )
        else:
            # What an interrupted recording has left is replaced.
            mode: Literal["new_episodes", "all"] = "new_episodes" if self.mode == "new_episodes" else "all"
            recorder = CassetteRecorder(path, record_mode=mode, save_tokenizer=self._save_tokenizer)
            self._recorders.append(recorder)
            backend = get_backend(name, model, wrappers=[recorder, *wrappers], tokenizer=tokenizer, **options)
        self._opened.append(backend)
        return backend

    def close(self, *, failed: bool = False) -> None:
        """Close what was opened, which completes the recordings.

        Args:
            failed: whether the test failed. Its recordings may lack calls, and are left incomplete.
        """
        for recorder in self._recorders:
            recorder.completes = not failed
        with ExitStack() as closing:
            for backend in self._opened:
                closing.callback(backend.close)


#: A name of a test of which a folder can be named without becoming that of another test.
_PLAIN = re.compile(r"[\w.]{1,100}(\[[\w.-]{0,99}[\w.]\])?")


def _folder_name(test: pytest.Item) -> str:
    """Return a name for the folder of a test, which no other test of its file has.

    ``TestIt.test_it[a-b]`` becomes ``TestIt.test_it-a-b``. A long name, or one with other characters, gets a checksum.
    """
    # Not from the test's id: pytest-xdist adds the name of a group to that.
    chain = test.listchain()
    file = next(place for place, each in enumerate(chain) if each.path == test.path)
    name = ".".join(each.name for each in chain[file + 1 :])
    folder = re.sub(r"[^\w.-]+", "-", name).strip("-")
    return folder if _PLAIN.fullmatch(name) else f"{folder[:100]}-{zlib.crc32(name.encode()):08x}"
