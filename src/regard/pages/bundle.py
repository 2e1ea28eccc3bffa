"""Bundle the JavaScript modules of a page into one script, without a build step.

The modules in `assets/` are ECMAScript modules in a restricted form: an import is one statement
`import { a, b } from "./other.js";`, an export stands before a declaration, and there are no default exports and no
cycles. `source("./other.js")` stands for the bundle of that module as a string, for a worker.

In the bundle, each module comes after those it imports. It is a block of its own, so names of different modules cannot
clash, and its exports are the properties of an object.
"""

from __future__ import annotations

import json
import posixpath
import re
from functools import cache
from importlib import resources

IMPORT = re.compile(r'^import (\{[^}]*\}) from "(\.[\w./]*)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?function|const|let|class) (\w+)", re.MULTILINE)
SOURCE = re.compile(r'\bsource\("(\.[\w./]*)\.js"\)')
BASE_STYLE = "components/page"


@cache
def bundle(module: str) -> tuple[str, str]:
    """Return the script and the style of a module and of all modules that it imports.

    >>> script, style = bundle("apps/pipeline")
    >>> "import " in script, "function softmax" in script, ":root" in style
    (False, True, True)

    Args:
        module: Path of the module within `assets/`, without its suffix.

    Returns:
        The script, and the style: `components/page.css`, then the style sheets beside the modules.
    """
    scripts: dict[str, str] = {}
    _add_module(module, scripts)
    styles = (_read(f"{name}.css") for name in (BASE_STYLE, *scripts))
    return '"use strict";\n' + "\n".join(scripts.values()), "".join(style or "" for style in styles)


def exports_object(module: str) -> str:
    """Return the name of the object that holds the exports of a module in a bundle.

    >>> exports_object("components/dom")
    '$components_dom'

    Args:
        module: Path of the module within `assets/`, without its suffix.

    Returns:
        A JavaScript identifier.
    """
    return "$" + module.replace("/", "_")


def _add_module(module: str, scripts: dict[str, str]) -> None:
    """Add the blocks of a module and of its imports to `scripts`, each after those it needs."""
    if module in scripts:
        return
    text = _read(f"{module}.js")
    if text is None:
        raise FileNotFoundError(f"no page module {module}.js")
    for match in IMPORT.finditer(text):
        _add_module(_resolve(module, match[2]), scripts)

    def import_names(match: re.Match[str]) -> str:
        return f"const {match[1].replace(' as ', ': ')} = {exports_object(_resolve(module, match[2]))};"

    text = IMPORT.sub(import_names, text)
    text = SOURCE.sub(lambda match: json.dumps(bundle(_resolve(module, match[1]))[0]), text)
    exports = ", ".join(match[2] for match in EXPORT.finditer(text))
    text = EXPORT.sub(r"\1 \2", text)
    name = exports_object(module)
    scripts[module] = f"const {name} = {{}};\n{{\n{text}Object.assign({name}, {{ {exports} }});\n}}"


def _resolve(module: str, path: str) -> str:
    """Return the path within `assets/` of what `module` imports as `path`."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(module), path))


def _read(path: str) -> str | None:
    """Read a file of `assets/`; None if there is none."""
    file = resources.files("regard.pages").joinpath("assets", path)
    return file.read_text(encoding="utf-8") if file.is_file() else None
