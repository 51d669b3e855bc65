"""`Page`: a page of the documentation, its code blocks, and running them."""

from __future__ import annotations

import re
from pathlib import Path


class Page:
    """A Markdown file.

    Attributes:
        path: where it is.
        text: all of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text()

    def blocks(self, language: str) -> list[str]:
        """Return the code blocks that are marked with `language`, in order."""
        return [block[1] for block in self._blocks(language)]

    def run(self) -> None:
        """Run the blocks marked ``python``, one after another, in one namespace."""
        names = {"__name__": self.path.stem}
        for block in self._blocks("python"):
            # Line numbers in a traceback are then those of the page.
            source = "\n" * self.text.count("\n", 0, block.start(1)) + block[1]
            exec(compile(source, str(self.path), "exec"), names)

    def _blocks(self, language: str) -> list[re.Match[str]]:
        return list(re.finditer(rf"^```{language}\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE))
