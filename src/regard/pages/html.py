"""Pages: plain records in, one HTML file out that needs no network and no server.

A page is the style, one script and the record; arrays of the record may stand beside it, compressed (`parts`). `pages/`
holds the modules it is made of, which need no build step: an import is a line `import { … } from "./name.js";`, an
export stands before the declaration. Put together, each module comes after those it imports, with these two words taken
away; so all share one scope, and names at the top differ. `source("./name.js")` stands for such a script as a string,
for a worker. The style is `page.css` and, for each module that has one, the style of the same name.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from regard.pages.parts import Part
from regard.types import Array

IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z]+)\.js";\n', re.MULTILINE)
CHUNK = 1 << 20
SOURCE = re.compile(r'\bsource\("\./([a-z]+)\.js"\)')


@dataclass(frozen=True, repr=False)
class Page:
    """A page that stands by itself: `save` it, or let a notebook show it. `html` is the file as text.

    >>> import regard
    >>> regard.explore.pipeline()
    <page "How one query attends", ... kB: save(path) writes it>
    """

    title: str
    html: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file that any browser opens.

        Args:
            path: File to write.
        """
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            for start in range(0, len(self.html), CHUNK):  # encoded whole, a large page would be there twice
                file.write(self.html[start : start + CHUNK])

    def _repr_html_(self) -> str:
        """The page in a frame of its own, which can run its script and reach nothing else."""
        return (
            f'<iframe title="{html.escape(self.title)}" sandbox="allow-scripts" width="100%" height="760" '
            f'style="border: 0" srcdoc="{html.escape(self.html)}"></iframe>'
        )

    def __repr__(self) -> str:
        return f'<page "{self.title}", {len(self.html.encode()) / 1000:.0f} kB: save(path) writes it>'


def page(title: str, module: str, record: dict[str, Any]) -> Page:
    """A page that runs a module of `pages/` on a record of numbers, texts, lists and dicts.

    >>> page("Nothing", "softmax.js", {})
    <page "Nothing", ... kB: save(path) writes it>
    """
    script, style = bundle(module)
    policy = (
        f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    if "new Worker(" in script:
        policy += "; worker-src blob:"
    parts: list[Part] = []
    data = embedded(record, parts)
    soon, later = ("".join(_beside(parts, first)) for first in (True, False))
    # A page of large parts begins before they are read, instead of at its end.
    begin = " async" if parts else ""
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
<main id="app"><noscript>This page is drawn by its own script. Allow scripts to see it.</noscript></main>
<script type="application/json" id="record">{data}</script>
{soon}<script type="module"{begin}>{script}</script>
{later}</body>
</html>
"""
    return Page(title, text)


def _beside(parts: list[Part], first: bool) -> Iterator[str]:
    for number, each in enumerate(parts):
        if each.first == first:
            yield from (f'<script type="text/plain" id="part{number}">', each.text, "</script>\n")


def embedded(record: Any, parts: list[Part] | None = None) -> str:
    r"""The record as JSON that can stand inside a script element: ASCII, without `<`, `>` and `&`.

    What is not finite becomes the text that JavaScript's `Number` reads. Parts are put into `parts`, and told by
    their place there.

    >>> print(embedded({"tokens": ["</script>", "\u2028"], "score": float("-inf")}))
    {"tokens":["\u003c/script\u003e","\u2028"],"score":"-Infinity"}
    """
    text = json.dumps(_finite(record, [] if parts is None else parts), separators=(",", ":"), allow_nan=False)
    return text.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&"})


def _finite(thing: Any, parts: list[Part]) -> Any:
    if isinstance(thing, str):
        return thing
    if isinstance(thing, Part):
        parts.append(thing)
        return {"part": len(parts) - 1, "kind": thing.kind, "shape": thing.shape}
    if isinstance(thing, np.ndarray):
        return _finite(thing.tolist(), parts)
    if isinstance(thing, dict):
        return {name: _finite(each, parts) for name, each in thing.items()}
    if isinstance(thing, list | tuple):
        return [_finite(each, parts) for each in thing]
    if isinstance(thing, float) and not math.isfinite(thing):
        return "NaN" if math.isnan(thing) else "Infinity" if thing > 0 else "-Infinity"
    return thing


def packed(numbers: Array | Sequence[Any]) -> str:
    """Many numbers in few characters: base64 of little-endian float32, row after row.

    >>> packed([1.0, 2.0])
    'AACAPwAAAEA='
    """
    with np.errstate(over="ignore"):  # beyond float32 is beyond what is shown
        return base64.b64encode(np.asarray(numbers).astype("<f4").tobytes()).decode("ascii")


def bundle(module: str) -> tuple[str, str]:
    """The script, which is the module and all it imports, each after what it needs; and their style.

    >>> script, style = bundle("pipeline.js")
    >>> "import " in script, "function softmax" in script, ":root" in style
    (False, True, True)
    """
    pages = resources.files("regard.pages").joinpath("assets")
    scripts: dict[str, str] = {}

    def add(name: str) -> None:
        if name not in scripts:
            text = pages.joinpath(f"{name}.js").read_text(encoding="utf-8")
            for needed in IMPORT.findall(text):
                add(needed)
            text = SOURCE.sub(lambda found: json.dumps(bundle(found[1])[0]), text)
            scripts[name] = re.sub(r"^export ", "", IMPORT.sub("", text), flags=re.MULTILINE)

    add(module.removesuffix(".js"))
    styles = [pages.joinpath(f"{name}.css") for name in ("page", *scripts)]
    return "\n".join(scripts.values()), "".join(
        style.read_text(encoding="utf-8") for style in styles if style.is_file()
    )


def digest(text: str) -> str:
    """The hash by which a content security policy knows a script or a style."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") + "'"
