"""The site that `make docs` builds: no warning, every page in two clicks, nothing from the network, no broken link."""

import fcntl
import importlib
import json
import os
import re
import subprocess
import sys
from collections import deque
from html import unescape
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
#: What the group `docs` of pyproject.toml installs. Other environments need not have it.
NEEDED = ("sphinx", "pydata_sphinx_theme", "myst_nb", "sphinx_copybutton", "sphinx_design", "matplotlib")
#: Pages that Sphinx makes. A reader comes to them by the search or by a link to a source.
MADE = ("_modules/", "repository/", "genindex", "py-modindex", "search")
PUBLIC = (
    *("corelm", "corelm.spec", "corelm.errors", "corelm.containers", "corelm.kl", "corelm.batching", "corelm_serve"),
    *("corelm_engine_kit", "corelm_testing", "corelm_interop.torchrl", "corelm_interop.trl", "corelm_interop.lm_eval"),
    *("corelm_serve.recorded", "corelm_testing.cassette", "corelm_interop", "corelm_compare", "corelm_fleet"),
)
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason="what builds the site is not installed: the group docs"),
]


class Html(HTMLParser):
    """What a page links to, loads, and can be linked at.

    Attributes:
        links: the targets of its links.
        loaded: the addresses of its scripts, styles, pictures and frames.
        ids: what a link can name after ``#``.
        text: the text between tags.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.loaded, self.ids, self.text = [], [], [], ""
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon", "preconnect", "dns-prefetch"):
            self.loaded.append(given["href"])
        elif tag in ("script", "img", "iframe", "source", "video", "audio", "embed") and "src" in given:
            self.loaded.append(given["src"])
        if "id" in given:
            self.ids.append(given["id"])

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """Return the folder of the site, built once for all processes of the tests."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, log = shared / "site", shared / "site.log"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not log.exists():
            command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
            command += ["--builder", "html", str(ROOT / "docs"), str(folder)]
            made = subprocess.run(command, capture_output=True, text=True)
            log.write_text(made.stderr if made.returncode else "")
    return folder


@pytest.fixture(scope="session")
def pages(site) -> dict[str, Html]:
    found = {path.relative_to(site).as_posix(): path for path in sorted(site.rglob("*.html"))}
    return {name: Html(path) for name, path in found.items() if not name.startswith("_static/")}


def internal(page: str, link: str) -> tuple[str, str] | None:
    """Return the page and the anchor that a link of `page` leads to; None if it leaves the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    target = os.path.normpath(os.path.join(os.path.dirname(page), unquote(parts.path))) if parts.path else page
    return target, unquote(parts.fragment)


def test_the_site_is_built_without_a_warning(site):
    assert not site.with_suffix(".log").read_text()


def test_every_page_is_two_clicks_from_the_first(pages):
    clicks, queue = {"index.html": 0}, deque(["index.html"])
    while queue:
        page = queue.popleft()
        for target in filter(None, (internal(page, link) for link in pages[page].links)):
            if target[0] in pages and target[0] not in clicks:
                clicks[target[0]] = clicks[page] + 1
                queue.append(target[0])
    sources = [path for path in (ROOT / "docs").rglob("*.*") if path.suffix in (".md", ".ipynb")]
    written = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in sources}
    assert written <= set(pages)
    far = {page: clicks.get(page) for page in pages if not page.startswith(MADE) and clicks.get(page, 9) > 2}
    assert not far


def test_every_link_has_its_page_and_its_anchor(site, pages):
    broken = []
    for page, html in pages.items():
        for link in html.links:
            target = internal(page, link)
            if target is None or link == "#":
                continue
            name, anchor = target
            if not (site / name).is_file() or (anchor and name in pages and anchor not in pages[name].ids):
                broken.append(f"{page}: {link}")
    assert not broken


def test_nothing_is_loaded_from_the_network(site, pages):
    loaded = {f"{page}: {address}" for page, html in pages.items() for address in html.loaded}
    assert loaded and not [each for each in loaded if re.search(r": (\w+:)?//", each)]
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text()), style
    missing = [
        f"{page}: {address}"
        for page, html in pages.items()
        for address in html.loaded
        if not address.startswith("data:") and not (site / internal(page, address)[0]).is_file()
    ]
    assert not missing


def test_every_figure_that_was_measured_is_in_a_table(pages):
    shown = pages["verified.html"].text
    for name in ("full.json", "gpu/gpu.json"):
        works = {
            each["work"]
            for section in json.loads((RESULTS / name).read_text()).values()
            for each in section.get("figures", [])
        }
        assert len(works) >= 5 and not [work for work in works if work not in shown]


def test_every_public_name_is_on_the_page_of_its_module(pages):
    for module in PUBLIC:
        if module == "corelm_interop.lm_eval":
            names = ["CoreLM", "main", "register"]
        else:
            found = importlib.import_module(module)
            own = [name for name, value in vars(found).items() if getattr(value, "__module__", "") == module]
            names = [name for name in getattr(found, "__all__", own) if not name.startswith("_")]
        page = pages[f"api/{module.partition('.')[0] if module.startswith('corelm_') else module}.html"]
        assert [f"{module}.{name}" for name in names if f"{module}.{name}" not in page.ids] == []


def test_every_module_that_the_readme_calls_public_has_a_page(pages):
    (listed,) = re.findall(r"## Public names\n\n(.*?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL)
    named = re.findall(r"`(corelm[.\w]*)`", listed)
    assert len(named) >= 12 and not [name for name in named if f"api/{name}.html" not in pages]
    public = pages["api/public.html"].text
    assert not [name for name in named if name not in public]


def test_the_tour_ran_and_shows_tokens_and_plots(site):
    """The site runs the notebook."""
    shown = (site / "notebooks" / "tour.html").read_text()
    outputs = "".join(re.findall(r'<div class="cell_output.*?(?=<div class="cell |</article>)', shown, re.DOTALL))
    assert len(re.findall(r"<img [^>]*png", outputs)) == 2 and "stderr" not in outputs
    assert re.search(r"title=\"[^\"]*-\d+\.\d+", outputs), "no token has its log-prob"
    # The reference is an earlier step of the same training: its KL is not 0.
    (printed,) = re.findall(r"^(?:<[^>]*>)*\[([-\d., ]+)\]$", unescape(outputs), re.MULTILINE)
    assert all(abs(float(number)) > 0.5 for number in printed.split(","))
