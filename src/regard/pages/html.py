"""Build self-contained HTML pages: one file that needs no network and no server.

A page holds a style, one script and a record, the data of the script as JSON. The content security policy allows only
this script and this style, by their hashes. Large arrays are stored beside the record, compressed (`EncodedArray`).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from regard.pages.encoding import EncodedArray
from regard.render.table import format_bytes
from regard.render.text import escape_unprintable
from regard.types import Array

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
    """
    scripts: dict[str, str] = {}
    _add_module(module, scripts)
    styles = (_read(f"{name}.css") for name in (BASE_STYLE, *scripts))
    return '"use strict";\n' + "\n".join(scripts.values()), "".join(style or "" for style in styles)


def exports_object(module: str) -> str:
    """Return the name of the object that holds the exports of a module in a bundle.

    >>> exports_object("components/dom")
    '$components_dom'
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


WRITE_CHUNK = 1 << 20  # characters encoded at a time, so that a large page is not in memory twice
MAX_CHARACTERS = 160  # of a name that `shorten` returns
MAX_EMBEDDED = 5 << 20  # bytes of a page that a notebook stores
# In a notebook, each frame gets the height that its page reports (components/dom.js), up to a limit.
FIT_FRAMES = """
window.regardFrames ||= addEventListener("message", ({ source, data }) => {
  const frame = [...document.querySelectorAll("iframe")].find((it) => it.contentWindow === source);
  const height = Math.min(Math.ceil(Number(data?.regardHeight)), 20000);
  if (frame && height > 0 && (height > frame.clientHeight || data.regardMayShrink)) frame.style.height = `${height}px`;
}) || true;
"""


@dataclass(frozen=True, repr=False)
class Page:
    """A self-contained page: `save` it to a file, or let a notebook show it.

    >>> import regard
    >>> regard.explore.pipeline()
    <page "Attention as matrices", ... kB: save(path) writes it>

    Attributes:
        title: Title of the page.
        html: The whole file as text.
    """

    title: str
    html: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file that any browser opens.

        Args:
            path: Path of the file. An existing file is overwritten.
        """
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            for start in range(0, len(self.html), WRITE_CHUNK):
                file.write(self.html[start : start + WRITE_CHUNK])

    def _repr_html_(self) -> str:
        """Return the page in a frame that can run its own script and nothing else, or a link if it is large."""
        if len(self.html) > MAX_EMBEDDED:
            return self._link_file()
        return (
            f'<iframe title="{html.escape(self.title)}" sandbox="allow-scripts" width="100%" height="760" '
            f'style="border: 0" srcdoc="{html.escape(self.html)}"></iframe><script>{FIT_FRAMES}</script>'
        )

    def _link_file(self) -> str:
        """Write the page to the working directory, which is the notebook's, and return a link to it."""
        words = re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")[:40]
        # The digest keeps pages of the same title apart.
        name = f"{words or 'page'}-{hashlib.sha256(self.html.encode()).hexdigest()[:8]}.html"
        title, size = html.escape(self.title), format_bytes(len(self.html.encode()))
        try:
            self.save(name)
        except OSError as error:
            reason = html.escape(f"{name} cannot be written: {error.strerror}")
            return (
                f"<p>{title}: {size}, too large for a notebook, and {reason}. page.save(path) writes it.</p>"
            )
        return f'<p><a href="{name}" target="_blank">{title}</a>: {size} in the file {name} beside the notebook.</p>'

    def __repr__(self) -> str:
        return f'<page "{self.title}", {format_bytes(len(self.html.encode()))}: save(path) writes it>'


def build_page(title: str, app: str, record: dict[str, Any]) -> Page:
    """Build a page that runs an app on a record."""
    title = title.encode(errors="replace").decode()  # a lone surrogate cannot be written to a file
    script, style = bundle(f"apps/{app}")
    policy = (
        f"default-src 'none'; script-src {csp_hash(script)}; style-src {csp_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    if "new Worker(" in script:
        policy += "; worker-src blob:"
    arrays: list[EncodedArray] = []
    data = encode_record(record, arrays)
    before, after = ("".join(_array_elements(arrays, early)) for early in (True, False))
    # With large arrays, the script starts before the whole page is loaded.
    start = " async" if arrays else ""
    text = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{style}</style>
</head>
<body>
<main id="app"><noscript>This page needs JavaScript. Allow scripts to see it.</noscript></main>
<script type="application/json" id="record">{data}</script>
{before}<script type="module"{start}>{script}</script>
{after}</body>
</html>
"""
    return Page(title, text)


def _array_elements(arrays: list[EncodedArray], early: bool) -> Iterator[str]:
    for number, array in enumerate(arrays):
        if array.early == early:
            yield from (f'<script type="text/plain" id="array{number}">', array.text, "</script>\n")


def encode_record(record: Any, arrays: list[EncodedArray] | None = None) -> str:
    r"""Return a record as JSON that can stand inside a script element: ASCII, without `<`, `>` and `&`.

    Numbers that are not finite become the texts that JavaScript's `Number` parses.

    >>> print(encode_record({"tokens": ["</script>", "\u2028"], "score": float("-inf")}))
    {"tokens":["\u003c/script\u003e","\u2028"],"score":"-Infinity"}
    """
    plain = _to_json(record, [] if arrays is None else arrays)
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&"})


def _to_json(value: Any, arrays: list[EncodedArray]) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, EncodedArray):
        arrays.append(value)
        return {"array": len(arrays) - 1, "encoding": value.encoding, "shape": value.shape}
    if isinstance(value, np.ndarray):
        return _to_json(value.tolist(), arrays)
    if isinstance(value, dict):
        return {name: _to_json(item, arrays) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item, arrays) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def encode_float32(numbers: Array | Sequence[Any]) -> str:
    """Return numbers as base64 of little-endian float32, row after row.

    >>> encode_float32([1.0, 2.0])
    'AACAPwAAAEA='

    Args:
        numbers: An array, or nested lists of numbers. Those beyond the range of float32 become infinite.
    """
    with np.errstate(over="ignore"):
        return base64.b64encode(np.asarray(numbers).astype("<f4").tobytes()).decode("ascii")


def csp_hash(text: str) -> str:
    """Return the source expression by which a content security policy allows a script or a style."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") + "'"


def shorten_path(path: str) -> str:
    """Return the end of a path: pages are shared, so their titles do not have the whole.

    >>> shorten_path("/home/me/models/tiny")
    'models/tiny'
    """
    return escape_unprintable("/".join(Path(path).parts[-2:]).strip("/"))


def shorten(text: str) -> str:
    r"""Return a text on one line, without its middle if it is long.

    >>> shorten("tab\t"), len(shorten("long" * 100))
    ('tab\\t', 160)
    """
    text = escape_unprintable(text)
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 41]}…{text[-40:]}"
