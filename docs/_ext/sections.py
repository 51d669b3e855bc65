"""The directive ``pages``: a toctree of pages, each shown with its title and its first sentence.

Entries, titles and patterns are those of a toctree with ``glob``. A pattern adds the pages that the document does not
list above, and may match no page, so that a section can name a folder that is empty yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.directives.other import TocTree, glob_re
from sphinx.util import docname_join
from sphinx.util.matching import patfilter

SENTENCE = re.compile(r"(?<=[.!?])\s")


class PageList(nodes.General, nodes.Element):
    """Stands for the list until every page was read."""


class Pages(TocTree):
    def run(self) -> list[nodes.Node]:
        self.options.update(hidden=None, maxdepth=1)
        self.content = StringList(list(self.lines()), source="")
        (wrapper,) = super().run()
        (toctree,) = wrapper.children
        return [wrapper, PageList(entries=toctree["entries"])]

    def lines(self) -> Iterator[str]:
        """Yield the entries, each pattern replaced by the pages that match it and are not listed above."""
        here = self.env.current_document.docname
        listed = self.env.metadata[here].setdefault("listed", [here])
        for line in filter(None, self.content):
            name = docname_join(here, line.rpartition("<")[2].rstrip(">"))
            if glob_re.match(line):
                found = sorted(set(patfilter(self.env.found_docs, name)).difference(listed))
                yield from (f"/{each}" for each in found)
                listed += found
            else:
                yield line
                listed.append(name)


def first_sentence(page: nodes.document) -> str:
    """Return the first sentence of a page, or nothing where it begins with code, a table or a list."""
    section = next((each for each in page.children if isinstance(each, nodes.section)), page)
    shown = (
        each for each in section.children if not isinstance(each, (nodes.Titular, nodes.Invisible, addnodes.index))
    )
    first = next(shown, None)
    if not isinstance(first, nodes.paragraph):
        return ""
    return re.sub(":$", ".", SENTENCE.split(first.astext().replace("\n", " "), maxsplit=1)[0])


def show(app: Any, document: nodes.document, page: str) -> None:
    """Replace each `PageList` by a list of links."""
    for node in list(document.findall(PageList)):
        entries = nodes.bullet_list(classes=["pages"])
        for title, name in node["entries"]:
            text = [nodes.Text(title)] if title else app.env.titles[name].deepcopy().children
            uri = app.builder.get_relative_uri(page, name)
            link = nodes.reference("", "", *text, internal=True, refuri=uri)
            about = nodes.paragraph("", first_sentence(app.env.get_doctree(name)))
            entries += nodes.list_item("", nodes.paragraph("", "", link), about)
        node.replace_self(entries)


def setup(app: Any) -> dict[str, bool]:
    app.add_node(PageList)
    app.add_directive("pages", Pages)
    app.connect("doctree-resolved", show)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
