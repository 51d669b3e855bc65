"""How Sphinx builds the site: `make docs`. `_ext` holds what only this site needs."""

from __future__ import annotations

import sys
from pathlib import Path

from corelm import __version__

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "core"
author = "The corelm authors"
copyright = "The corelm authors"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "engine_reports",
    "mathml",
    "public_names",
    "repository_links",
    "result_figures",
    "sections",
]
exclude_patterns = ["_build", "_ext", "_reports", "drawings"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Only notebooks are executed here. tests/test_docs.py and test_docs_more.py run the blocks of the other pages.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300

# Docstrings mark code with single backticks. They become links where they hold a public name: public_names.py.
default_role = "py:obj"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
napoleon_use_ivar = True
add_module_names = False

html_theme = "pydata_sphinx_theme"
html_title = "core"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "_ext" / "scorer.js")
html_math_renderer = "mathml"
html_show_sphinx = False
html_show_sourcelink = False
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 8,
    "show_toc_level": 2,
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": []}

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
