"""Links that leave docs/ work on the site as they do on a host of the repository.

A link to a Markdown file, such as ``../README.md#install``, leads to the page that includes this file. A link to any
other file leads to a page of the site that shows the file.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

INCLUDE = re.compile(r"^```\{include\} (\S+\.md)$", re.MULTILINE)
#: The folder of the site that holds the pages of shown files.
SHOWN = "repository"


def pages_by_file(docs: Path) -> dict[Path, str]:
    """Return the name of the page that includes each Markdown file outside `docs`."""
    return {
        (page.parent / target).resolve(): page.relative_to(docs).with_suffix("").as_posix()
        for page in sorted(docs.rglob("*.md"))
        for target in INCLUDE.findall(page.read_text())
    }


class RepositoryLinks(SphinxTransform):
    """Give every link out of docs/ its page, before Sphinx makes downloads of files and warns about pages."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        docs = Path(self.app.srcdir)
        for node in list(self.document.findall(addnodes.pending_xref)):
            # MyST takes the suffix away.
            if node.get("reftype") == "myst" and node.get("refdomain") == "doc" and os.path.isabs(node["reftarget"]):
                page = self.env.repository_pages.get(Path(node["reftarget"] + ".md").resolve())
                node["reftarget"] = page or node["reftarget"]
        for node in list(self.document.findall(addnodes.download_reference)):
            file = (docs / self.env.docname).parent.joinpath(node["reftarget"]).resolve()
            if not file.is_relative_to(docs) and file.is_file():
                node.replace_self(self.reference(file.relative_to(docs.parent).as_posix(), node))

    def reference(self, path: str, link: nodes.Element) -> nodes.Element:
        """Return a link to the page that shows the file at `path`, with the text of `link`."""
        self.env.metadata[self.env.docname].setdefault("shown_files", []).append(path)
        here = posixpath.dirname(self.env.docname)
        uri = posixpath.relpath(f"{SHOWN}/{path}", here or ".") + ".html"
        return nodes.reference("", "", *link.children, internal=True, refuri=uri)


def find_pages(app: Any) -> None:
    app.env.repository_pages = pages_by_file(Path(app.srcdir))


def shown_files(app: Any) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield a page for each file that a link leads to."""
    paths = {path for metadata in app.env.metadata.values() for path in metadata.get("shown_files", ())}
    for path in sorted(paths):
        try:
            lexer = get_lexer_for_filename(path)
        except ClassNotFound:
            lexer = TextLexer()
        text = (Path(app.srcdir).parent / path).read_text()
        code = highlight(text, lexer, HtmlFormatter(linenos="inline"))
        yield f"{SHOWN}/{path}", {"title": path, "body": f"<h1><code>{path}</code></h1>\n{code}"}, "page.html"


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", find_pages)
    app.connect("html-collect-pages", shown_files)
    app.add_transform(RepositoryLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
