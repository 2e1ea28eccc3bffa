"""Sphinx configuration of the site. MyST-NB runs the chapters, which are notebooks in text form, at every build."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from nbclient import NotebookClient
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

import regard

project = "regard"
author = "The regard developers"
copyright = "the regard developers"
release = version = regard.__version__

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
# Of our own: pages writes the reference from the docstrings, course the contents, notebooks what is downloaded.
extensions = ["myst_nb", "sphinx_copybutton", "pages", "course", "supported_models", "notebooks"]
# Address of the repository on GitHub, for links that open the notebooks in hosted services. They are read from the
# branch on which the built site is published: scripts/docs site docs/_build -D repository=https://github.com/owner/name
repository = ""
notebook_branch = "gh-pages"
exclude_patterns = ["_build", "jupyter_execute", "_ext"]
templates_path = ["_templates"]
nitpicky = True
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True

myst_enable_extensions = ["dollarmath", "fieldlist"]
myst_heading_anchors = 3
nb_execution_mode = "force"  # compute every number at every build; a cache would keep old ones
nb_execution_raise_on_error = True
nb_execution_timeout = 900  # a busy machine may take its time
# Join lines that the kernel sent in pieces. MyST-NB's own merging breaks lines at the pieces and repeats them in the
# notebook.
NotebookClient.coalesce_streams = True
logging.getLogger("traitlets").setLevel(logging.WARNING)  # otherwise one line for each notebook

html_theme = "furo"
html_title = "regard"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"
# Colours of the explorers (pages/assets/components/page.css), so that an embedded explorer matches the page.
html_theme_options = {
    "light_css_variables": {
        "color-background-primary": "#fcfbf8",
        "color-background-secondary": "#f6f4ee",
        "color-background-border": "#dcdad3",
        "color-foreground-primary": "#1c2330",
        "color-brand-primary": "#1f5aa8",
        "color-brand-content": "#1f5aa8",
        "color-brand-visited": "#1f5aa8",
        "color-code-background": "#f4f2ec",
        "figure-second": "#a8550f",
    },
    "dark_css_variables": {
        "color-background-primary": "#14171c",
        "color-background-secondary": "#1b1f26",
        "color-background-border": "#343b46",
        "color-foreground-primary": "#e8eaee",
        "color-brand-primary": "#8db8f5",
        "color-brand-content": "#8db8f5",
        "color-brand-visited": "#8db8f5",
        "color-code-background": "#1b1f26",
        "figure-second": "#f0a35e",
    },
}
copybutton_prompt_text = ">>> |... "
copybutton_prompt_is_regexp = True


def mathml(visitor: Any, node: nodes.Element, block: bool) -> None:
    """Write formulas as MathML, which browsers draw without a script."""
    visitor.body.append(tex2mathml(node.astext(), as_block=block))
    raise nodes.SkipNode


def group_navigation(app: Sphinx, docname: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Put the caption of a nested toctree above its pages in the navigation, where Sphinx leaves it out."""
    tree = context["furo_navigation_tree"]
    for toc in app.env.tocs.values():
        for toctree in toc.findall(addnodes.toctree):
            if caption := toctree.get("caption"):
                first = toctree["entries"][0][1]
                href = "#" if first == docname else context["pathto"](first)
                tree = re.sub(
                    rf'<li class="[^"]*"><a class="[^"]*" href="{re.escape(href)}">',
                    lambda item, caption=caption: f'<li class="group">{caption}</li>{item[0]}',
                    tree,
                    count=1,
                )
    context["furo_navigation_tree"] = tree


def check_pages(app: Sphinx, exception: Exception | None) -> None:
    """Fail if a page was not written: Sphinx drops the error of a chunk of pages if it writes in parallel."""
    missing = [name for name in app.env.found_docs if not Path(app.builder.get_outfilename(name)).exists()]
    if missing and exception is None and app.builder.name == "html":
        raise ExtensionError(f"pages not written: {', '.join(sorted(missing))}. sphinx -j 1 shows the error.")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer(
        "mathml", (lambda v, n: mathml(v, n, False), None), (lambda v, n: mathml(v, n, True), None)
    )
    app.connect("html-page-context", group_navigation, priority=900)  # after the theme built the navigation
    app.connect("build-finished", check_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
