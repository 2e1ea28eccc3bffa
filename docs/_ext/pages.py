"""The pages of the reference, made from the docstrings when the site is built: one for each room, none by hand."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from pathlib import Path
from typing import Any

from api_reference import Name, Room, rooms
from architecture import house_page
from docutils import nodes
from error_index import errors_page
from sphinx.application import Sphinx

INDEX = """\
# Reference

Every public name, made from the docstrings when the site is built. The examples run in the tests. What is imported
from `regard` itself is listed under the room it lives in, and called by its shorter name.

In signatures, `Array` is an array of the library at hand, NumPy's or a torch tensor, and `IntArray` one of whole
numbers; `Floats` and `Bools` are NumPy's. `Align` is `"upper_left"` or `"lower_right"`, a `Frame` the pairs and lengths
that a block belongs to, and `xp` the array library under the names of the array API.

```{toctree}
:hidden:
"""


def pages() -> dict[str, str]:
    """The Markdown of every page of the reference by its name."""
    links = Links()
    made = {room.page: room_page(room, links) for room in rooms()}
    made["errors"] = errors_page([markdown_of(name, links) for name in exceptions()], links.find)
    made["architecture"] = house_page()
    entries = "\n".join(f"{room.title} <{room.page}>" for room in rooms())
    lists = "\n\n".join(listed(room, links) for room in rooms())
    made["index"] = f"{INDEX}\n{entries}\n```\n\n{lists}\n"
    return made


def exceptions() -> list[Name]:
    """Errors have a page of their own, the widest first."""
    found = [name for room in rooms() for name in room.names if name.kind == "exception"]
    return sorted(found, key=lambda name: (len(name.bases), name.name))


def listed(room: Room, links: Links) -> str:
    """The room in the index: what it is for, and its names."""
    names = ", ".join(f"{{py:obj}}`{it.name.rpartition('.')[2]} <{it.name}>`" for it in room.names)
    return f"## [{room.title}]({room.page}.md)\n{links.text(room.doc.split(chr(10) * 2)[0], room.name)}\n\n{names}"


def room_page(room: Room, links: Links) -> str:
    shown = [name for name in room.names if name.kind != "exception"]
    parts = [
        f"# {room.title}",
        links.docstring(room.doc, room.name),
        *(markdown_of(it, links) for it in shown),
    ]
    if room.name == "regard.cli":
        parts.append(commands())
    if any(name.kind == "exception" for name in room.names):
        parts.append("Its errors are on [the page of errors](errors.md).")
    return "\n\n".join(parts) + "\n"


def markdown_of(name: Name, links: Links) -> str:
    """A function, class or value as the directive of Sphinx's Python domain, its members within."""
    body = [links.docstring(name.doc, name.name, name.signature)]
    if name.bases:
        body.append(f"A kind of {{py:obj}}`{name.bases[0].rpartition('.')[2]} <{name.bases[0]}>`.")
    for member in name.members:
        if not member.told and member.doc:
            text = links.docstring(member.doc, member.name, member.signature)
            short = member.name.rpartition(".")[2]
            if member.kind == "property":
                made = f":type: {member.signature}\n" if member.signature else ""
                body.append(fenced(f"{{py:property}} {short}", f"{made}\n{text}", 4))
            else:
                body.append(fenced(f"{{py:{member.kind}}} {short}{member.signature}", f"\n{text}", 4))
    heading = f"```{{py:currentmodule}} {name.module}\n```\n"
    short = name.name.rpartition(".")[2]
    return heading + fenced(f"{{py:{name.kind}}} {short}{name.signature}", "\n" + "\n\n".join(body), 5)


def commands() -> str:
    """What each command of the command line says of itself."""
    from regard.cli import app as _app
    from regard.cli import main

    def said(*arguments: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            main([*arguments, "--help"])
        return f"```text\n{out.getvalue().strip()}\n```"

    names = sorted(str(command.name) for command in _app.app.registered_commands)
    each = [f"## regard {name}\n{said(name)}" for name in names]
    return "\n\n".join([f"## regard\n{said()}", *each])


def fenced(head: str, body: str, ticks: int) -> str:
    return f"{'`' * ticks}{head}\n{body}\n{'`' * ticks}"


class Links:
    """Names in docstrings as links to where they are told."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        for room in rooms():
            for name in room.names:
                for it in (name, *(member for member in name.members if not member.told and member.doc)):
                    self.known[it.name] = it.name
                    tail = it.name.removeprefix(f"{name.module}.")
                    if it is not name or room.name == "regard":
                        self.known.setdefault(tail, it.name)
                    for owner, called in (
                        ("AttentionMatrix", "A"),
                        ("Recording", "recording"),
                        ("Mask", "mask"),
                    ):
                        if tail.startswith(f"{owner}."):
                            self.known.setdefault(called + tail.removeprefix(owner), it.name)
                        elif tail == owner:
                            self.known.setdefault(called, it.name)

    def find(self, text: str, at: str = "") -> str | None:
        """The full name that a piece of code names, as seen from the name `at`: a member, a neighbour, or public."""
        around = at.split(".")
        for depth in range(len(around), 0, -1):
            if found := self.known.get(".".join([*around[:depth], text])):
                return found
        return self.known.get(text) or self.known.get(f"regard.{text}")

    def text(self, text: str, at: str, signature: str = "") -> str:
        """A paragraph of a docstring as Markdown, names in backticks as links."""

        def piece(match: re.Match[str]) -> str:
            code = match[0]
            if not code.startswith("`"):
                return re.sub(r"[<$*\[\]|~]", r"\\\g<0>", code)
            name = re.fullmatch(r"`([A-Za-z_][\w.]*)(\([^()]*(\(\))?[^()]*\))?`", code)
            if name is None or "<" in code or re.search(rf"\b{re.escape(name[1])}\b:? ?", signature):
                return code
            found = self.find(name[1], at)
            if found is None or found == at or len(name[1]) == 1:
                return code
            return f"{{py:obj}}`{code[1:-1]} <{found}>`"

        return re.sub(r"`[^`]*`|[^`]+", piece, text)

    def docstring(self, doc: str, at: str, signature: str = "") -> str:
        """A docstring as Markdown: paragraphs, and examples in fences."""
        parts = []
        for block in re.split(r"\n\s*\n", doc):
            if block.lstrip().startswith(">>>"):
                parts.append(f"```python\n{textwrap.dedent(block)}\n```")
            elif block.startswith("    "):
                parts.append(f"```text\n{textwrap.dedent(block)}\n```")
            elif block:
                parts.append(self.text(block, at, signature))
        return "\n\n".join(parts)


# -- Within Sphinx ----------------------------------------------------------------------------------------


def write(app: Sphinx) -> None:
    """Puts the pages where Sphinx looks for them; git ignores them."""
    folder = Path(app.srcdir) / "reference"
    folder.mkdir(exist_ok=True)
    made = {folder / f"{name}.md": text for name, text in pages().items()}
    for old in set(folder.glob("*.md")) - made.keys():
        old.unlink()
    for path, text in made.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


TEST = re.compile(r"`(tests/\w+\.py)::(\w+)`")


def in_words(test: str) -> str:
    """The name of a test as the sentence it is."""
    return re.sub(r"^test(_\d+)*_", "", test).replace("_", " ")


def with_tests(app: Sphinx, docname: str, source: list[str]) -> None:
    """Shows each test that the page of promises names, at its end, and links to it."""
    if docname != "promises":
        return
    named = dict.fromkeys(match.groups() for match in TEST.finditer(source[0]))
    linked = TEST.sub(lambda test: f"[{in_words(test[2])}](#{test[2]})", source[0])
    shown = "\n\n".join(
        f"### {name}\nIn `{file}`:\n\n```{{literalinclude}} ../{file}\n:pyobject: {name}\n:language: python\n```"
        for file, name in named
    )
    source[0] = f"{linked}\n## The tests\n{shown}\n"


def resolve(app: Sphinx, env: Any, node: nodes.Element, content: nodes.Element) -> nodes.Element | None:
    """A type in a signature that has no page here is text, not a broken link."""
    in_signature = node.get("refdomain") == "py" and (
        node.get("reftype") == "class" or node["reftarget"] == "None"
    )
    return content if in_signature else None


def without_lists(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Sphinx sets the parameters of a long signature as a list without terms; to a screen reader they are lines."""

    def lines(match: re.Match[str]) -> str:
        inner = match[1].replace("<dd>", '<span class="sig-line">').replace("</dd>", "</span>")
        return f'<span class="sig-lines">{inner}</span>'

    if "body" in context:
        context["body"] = re.sub(r"<dl>\s*(<dd>.*?</dd>)\s*</dl>", lines, context["body"], flags=re.DOTALL)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    app.connect("source-read", with_tests)
    app.connect("html-page-context", without_lists)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
