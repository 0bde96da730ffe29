"""Sphinx: the pages of docs/ and the lessons, which `make docs` builds from the root."""

import logging
import re
from functools import partial, partialmethod
from importlib.metadata import metadata, version as installed
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from nbclient import NotebookClient
from sphinx.application import Sphinx

project = "clearhead"
author = "the clearhead authors"
version = release = installed("clearhead")
root_doc = "docs/index"
include_patterns = [
    "docs/**", "lessons/*.md", "DESIGN.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md",
    "bench/LOG.md",
]  # fmt: skip
exclude_patterns = ["docs/accuracy.md"]  # a part of semantics.md

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_show_tb = True
nb_merge_streams = True
nb_ipywidgets_js = {}  # a page with widgets would load scripts from other hosts
# Without this, each kernel logs its start, and warns that its connection is not encrypted.
logging.getLogger("traitlets").setLevel(logging.WARNING)
NotebookClient.__init__ = partialmethod(
    NotebookClient.__init__, extra_arguments=["--log-level=ERROR"]
)

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings describe each argument
napoleon_use_rtype = False
napoleon_use_param = False
napoleon_use_ivar = True

html_theme = "furo"
html_math_renderer = "mathml"
html_title = "clearhead"
html_extra_path = ["llms.txt", "index.html"]
html_show_sourcelink = False
# The address of the site, which is set in pyproject.toml only.
html_baseurl = dict(
    entry.split(", ") for entry in metadata("clearhead").get_all("Project-URL", [])
)["Documentation"]
html_static_path = ["static"]
html_css_files = ["pages.css"]
copybutton_prompt_text = ">>> |$ "
copybutton_prompt_is_regexp = True

# ---- formulas as MathML, which browsers draw: a page requests nothing from the network ----


def formula(self: Any, node: nodes.math, display: str) -> None:
    """Write the MathML of a formula in place of its LaTeX."""
    self.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def link_to_notebooks(app: Sphinx, page: str, source: list[str]) -> None:
    """Link to lessons that the site runs, where a forge shows `lessons/read/`."""
    source[0] = re.sub(r"(\]\((?:[./]*lessons/)?)read/", r"\1", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", link_to_notebooks)
    app.add_html_math_renderer(
        "mathml",
        (partial(formula, display="inline"), None),
        (partial(formula, display="block"), None),
    )
