"""`Page`: a page of the documentation, its code blocks, and running them."""

import ast
import re
from pathlib import Path
from typing import Any


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

    def run(self, change: ast.NodeTransformer | None = None, **names: Any) -> dict[str, Any]:
        """Run the blocks marked ``python``, one after another, in one namespace, and return it.

        Args:
            change: what to change in the code of each block first.
            names: what the namespace holds at first.
        """
        names |= {"__name__": self.path.stem}
        for block in self._blocks("python"):
            # Line numbers in a traceback are then those of the page.
            tree = ast.parse("\n" * self.text.count("\n", 0, block.start(1)) + block[1])
            if change is not None:
                tree = ast.fix_missing_locations(change.visit(tree))
            exec(compile(tree, str(self.path), "exec"), names)
        return names

    def _blocks(self, language: str) -> list[re.Match[str]]:
        return list(re.finditer(rf"^```{language}\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE))
