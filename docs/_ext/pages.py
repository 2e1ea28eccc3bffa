"""Write the reference pages from the docstrings when the site is built: one page for each public module."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from pathlib import Path
from typing import Any

from api_reference import PublicModule, PublicName, public_modules
from architecture import architecture_page
from docutils import nodes
from error_index import errors_page
from sphinx.application import Sphinx

INDEX = """\
# API reference

Look up a function, a class or an [error](errors.md) here. To find the function for a task, see
[the guides](../guides/index.md). {py:obj}`regard.watch` reads the attention of a model, and
{py:obj}`regard.attention` computes attention.

Every public name is listed, generated from the docstrings when the site is built. The examples run in the tests. A
name that can be imported from `regard` itself is listed under its module with the shorter name.

In signatures, `Array` is a NumPy array or a torch tensor, `ArrayT` is the type of the arrays that a matrix was made
from, and `IntArray` is an array of integers; `Floats` and `Bools` are NumPy arrays.
`Align` is `"upper_left"` or `"lower_right"`, a `Frame` holds the pairs and lengths of the matrix that a block
belongs to, and `xp` is the array library as an array API namespace.

```{toctree}
:hidden:

errors
../measures
../glossary
"""


def build_pages() -> dict[str, str]:
    """Return the Markdown of every reference page by file name."""
    links = Links()
    modules = public_modules()
    pages = {module.page: module_page(module, links) for module in modules}
    pages["errors"] = errors_page([object_markdown(name, links) for name in exceptions()], links.find)
    pages["architecture"] = architecture_page()
    entries = "\n".join(f"{module.name} <{module.page}>" for module in modules)
    sections = "\n\n".join(index_section(module, links) for module in modules)
    pages["index"] = f"{INDEX}{entries}\n```\n\n{sections}\n"
    return pages


def exceptions() -> list[PublicName]:
    """Return the public exceptions, base classes first; they have a page of their own."""
    found = [name for module in public_modules() for name in module.names if name.kind == "exception"]
    return sorted(found, key=lambda name: (len(name.bases), name.name))


def index_section(module: PublicModule, links: Links) -> str:
    """Return the module's entry in the index: its summary and its names."""
    names = ", ".join(f"{{py:obj}}`{it.name.rpartition('.')[2]} <{it.name}>`" for it in module.names)
    summary = links.link_names(module.doc.split("\n\n")[0], module.name)
    return f"## [{module.name}]({module.page}.md)\n{summary}\n\n{names}"


def module_page(module: PublicModule, links: Links) -> str:
    """Return the page of a module; its exceptions are on the error page."""
    shown = [name for name in module.names if name.kind != "exception"]
    parts = [
        f"# {module.name}",
        links.docstring(module.doc, module.name),
        *(object_markdown(name, links) for name in shown),
    ]
    if module.name == "regard.cli":
        parts.append(commands())
    if len(shown) < len(module.names):
        parts.append("Its errors are on [the error page](errors.md).")
    return "\n\n".join(parts) + "\n"


def object_markdown(name: PublicName, links: Links) -> str:
    """Return a function, class or value as a directive of Sphinx's Python domain, members included."""
    body = [links.docstring(name.doc, name.name, name.signature)]
    if name.bases:
        body.append(f"Base class: {{py:obj}}`{name.bases[0].rpartition('.')[2]} <{name.bases[0]}>`.")
    for member in name.members:
        if not member.documented_elsewhere and member.doc:
            text = links.docstring(member.doc, member.name, member.signature)
            short = member.name.rpartition(".")[2]
            if member.kind == "property":
                annotation = f":type: {member.signature}\n" if member.signature else ""
                body.append(fence(f"{{py:property}} {short}", f"{annotation}\n{text}", 4))
            else:
                body.append(fence(f"{{py:{member.kind}}} {short}{member.signature}", f"\n{text}", 4))
    heading = f"```{{py:currentmodule}} {name.module}\n```\n"
    short = name.name.rpartition(".")[2]
    return heading + fence(f"{{py:{name.kind}}} {short}{name.signature}", "\n" + "\n\n".join(body), 5)


def commands() -> str:
    """Return the help text of each command."""
    from regard.cli import app, main

    def help_text(*arguments: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            main([*arguments, "--help"])
        return f"```text\n{out.getvalue().strip()}\n```"

    groups = {str(group.name): group.typer_instance for group in app.app.registered_groups}
    names = [[str(command.name)] for command in app.app.registered_commands]
    names += [[group, str(it.name)] for group, inner in groups.items() for it in inner.registered_commands]
    sections = [f"## regard {' '.join(name)}\n{help_text(*name)}" for name in sorted(names)]
    return "\n\n".join([f"## regard\n{help_text()}", *sections])


def fence(head: str, body: str, ticks: int) -> str:
    return f"{'`' * ticks}{head}\n{body}\n{'`' * ticks}"


# Variables that docstrings use for instances of these classes.
INSTANCES = {"AttentionMatrix": "A", "Recording": "recording", "Mask": "mask"}
# Sections of a docstring (Google style) and the fields that Sphinx knows for their entries.
SECTIONS = {
    "Args": "param",
    "Attributes": "ivar",
    "Raises": "raises",
    "Returns": "returns",
    "Yields": "yields",
}


class Links:
    """Turn the public names in docstrings into links."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        for module in public_modules():
            for name in module.names:
                documented = [it for it in name.members if not it.documented_elsewhere and it.doc]
                for target in (name, *documented):
                    self.known[target.name] = target.name
                    tail = target.name.removeprefix(f"{name.module}.")
                    if target is not name or module.name == "regard":
                        self.known.setdefault(tail, target.name)
                    owner, dot, member = tail.partition(".")
                    if owner in INSTANCES:
                        self.known.setdefault(INSTANCES[owner] + dot + member, target.name)

    def find(self, text: str, at: str = "") -> str | None:
        """Return the full name that `text` means inside the docstring of `at`: a member, a neighbour, or public."""
        path = at.split(".")
        for depth in range(len(path), 0, -1):
            if found := self.known.get(".".join([*path[:depth], text])):
                return found
        return self.known.get(text) or self.known.get(f"regard.{text}")

    def link_names(self, text: str, at: str, signature: str = "") -> str:
        """Return a paragraph as Markdown, with names in backticks as links."""

        def link_piece(match: re.Match[str]) -> str:
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

        return re.sub(r"`[^`]*`|[^`]+", link_piece, text)

    def docstring(self, doc: str, at: str, signature: str = "") -> str:
        """Return a docstring as Markdown: paragraphs, sections as field lists, and examples in fences."""
        parts: list[str] = []
        section = ""
        for block in re.split(r"\n\s*\n", doc):
            title, _, body = block.partition("\n")
            if title.endswith(":") and title[:-1] in SECTIONS and body.startswith("    "):
                section = title[:-1]
                parts.append(self._fields(section, body, at, signature))
                continue
            if section and block.startswith("    "):  # further entries of the section
                parts[-1] += "\n" + self._fields(section, block, at, signature)
                continue
            section = ""
            if block.lstrip().startswith(">>>"):
                parts.append(f"```python\n{textwrap.dedent(block)}\n```")
            elif block.startswith("    "):
                parts.append(f"```text\n{textwrap.dedent(block)}\n```")
            elif block:
                parts.append(self.link_names(block, at, signature))
        return "\n\n".join(parts)

    def _fields(self, section: str, body: str, at: str, signature: str) -> str:
        """Return the entries of a docstring section as a field list."""
        text = textwrap.dedent(body)
        if section in ("Returns", "Yields"):
            return f":{SECTIONS[section]}: {self.link_names(' '.join(text.split()), at, signature)}"
        fields = []
        for entry in re.split(r"\n(?! )", text):
            names, _, description = " ".join(entry.split()).partition(": ")
            for name in re.split(r",\s+", names):
                if section == "Raises" and (target := self.find(name, at)):
                    name = f"~{target}"
                shown = name.replace("*", r"\*").strip("`")
                fields.append(f":{SECTIONS[section]} {shown}: {self.link_names(description, at, signature)}")
        return "\n".join(fields)


# -- Sphinx hooks -----------------------------------------------------------------------------------------


def write_pages(app: Sphinx) -> None:
    """Write the pages into docs/reference, which git ignores, and delete the ones no longer built."""
    folder = Path(app.srcdir) / "reference"
    folder.mkdir(exist_ok=True)
    pages = {folder / f"{name}.md": text for name, text in build_pages().items()}
    for stale in set(folder.glob("*.md")) - pages.keys():
        stale.unlink()
    for path, text in pages.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


TEST_NAME = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def humanize_test_name(test: str) -> str:
    """Return the name of a test as words.

    >>> humanize_test_name("test_01_masked_keys_cannot_matter")
    'masked keys cannot matter'
    """
    return re.sub(r"^test(_\d+)*_", "", test).replace("_", " ")


def append_tests(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the source of every test that the page of guarantees names, and link the names to it."""
    if docname != "promises":
        return
    named = dict.fromkeys(match.groups() for match in TEST_NAME.finditer(source[0]))
    linked = TEST_NAME.sub(lambda test: f"[{humanize_test_name(test[2])}](#{test[2]})", source[0])
    listings = "\n\n".join(
        f"### {name}\nIn `{file}`:\n\n```{{literalinclude}} ../{file}\n:pyobject: {name}\n:language: python\n```"
        for file, name in named
    )
    source[0] = f"{linked}\n## The tests\n{listings}\n"


def resolve_reference(
    app: Sphinx, env: Any, node: nodes.Element, content: nodes.Element
) -> nodes.Element | None:
    """Show a type without a page as text instead of reporting a broken link."""
    is_type = node.get("refdomain") == "py" and (
        node.get("reftype") in ("class", "exc") or node["reftarget"] == "None"
    )
    return content if is_type else None


def replace_signature_lists(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Replace the lists without terms that Sphinx builds for long signatures; screen readers reject them."""

    def replace_list(match: re.Match[str]) -> str:
        inner = match[1].replace("<dd>", '<span class="sig-line">').replace("</dd>", "</span>")
        return f'<span class="sig-lines">{inner}</span>'

    if "body" in context:
        context["body"] = re.sub(
            r"<dl>\s*(<dd>.*?</dd>)\s*</dl>", replace_list, context["body"], flags=re.DOTALL
        )


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_pages)
    app.connect("source-read", append_tests)
    app.connect("html-page-context", replace_signature_lists)
    app.connect("missing-reference", resolve_reference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
