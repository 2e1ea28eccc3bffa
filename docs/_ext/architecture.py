"""The architecture page: which room imports which, read from the source and drawn, never by hand."""

from __future__ import annotations

import ast
import html
from pathlib import Path

import regard

PACKAGE = Path(regard.__file__).parent
WIDTH, ROW, BOX = 760, 58, 30  # of the drawing, between its rows, of a box: in units of the drawing

HEAD = """\
# Architecture

A room is a module or a package of `regard`. Each stands above those that it imports, so nothing points upwards, and a
test holds it so. Lines that follow from others are left out; what is imported inside a function, when it is asked for,
is not drawn and stands in the table.

"""


def house_page() -> str:
    """The drawing, the table that says the same, and how it works."""
    files = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    eager, lazy = edges(files)
    parts = [
        HEAD,
        f'```{{raw}} html\n<div class="house">{drawing(eager)}</div>\n```',
        table(files, eager, lazy),
    ]
    design = PACKAGE.parents[1] / "DESIGN.md"
    if design.exists():  # the site is built from a checkout; the package may lie elsewhere
        works = design.read_text().partition("\n## How it works\n")[2].partition("\n## ")[0]
        parts.append(f"## How it works\n{works.strip()}")
    return "\n\n".join(parts) + "\n"


def room_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def edges(files: dict[str, str]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """For each room those that it imports: when it is imported itself, and inside a function only."""
    rooms = {room_of(file) for file in files} - {"__init__"}
    eager: dict[str, set[str]] = {room: set() for room in rooms}
    lazy: dict[str, set[str]] = {room: set() for room in rooms}

    def visit(node: ast.AST, room: str, inside: bool) -> None:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "regard" and len(parts) > 1 and parts[1] in rooms - {room}:
                (lazy if inside else eager)[room].add(parts[1])
        for child in ast.iter_child_nodes(node):
            visit(child, room, inside or isinstance(node, ast.FunctionDef))

    for file, text in files.items():
        if (room := room_of(file)) in rooms:
            visit(ast.parse(text), room, False)
    return eager, {room: found - eager[room] for room, found in lazy.items()}


def layers(graph: dict[str, set[str]]) -> list[list[str]]:
    """The rooms from the ground up: each one above the highest that it imports."""
    height: dict[str, int] = {}

    def rise(room: str) -> int:
        if room not in height:
            height[room] = max((rise(below) + 1 for below in graph[room]), default=0)
        return height[room]

    for room in sorted(graph):
        rise(room)
    return [sorted(r for r in graph if height[r] == level) for level in range(max(height.values()) + 1)]


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The lines without those that follow from others."""

    def below(room: str) -> set[str]:
        return graph[room] | {far for near in graph[room] for far in below(near)}

    return {room: near - {far for it in near for far in below(it)} for room, near in graph.items()}


def drawing(graph: dict[str, set[str]]) -> str:
    """The house as SVG: a row for each layer, the ground below."""
    rows = layers(graph)
    lines = reduced(graph)
    at: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        # Under what it carries: rooms in the order of the middle of those they import.
        middle = {room: [at[it][0] for it in lines[room]] for room in row}
        row.sort(key=lambda room: (sum(middle[room]) / max(len(middle[room]), 1), room))
        for place, room in enumerate(row):
            at[room] = (WIDTH * (place + 0.5) / len(row), ROW * (len(rows) - level - 0.5))
    marks = []
    for room, near in sorted(lines.items()):
        for other in sorted(near):
            (x, y), (u, v) = at[room], at[other]
            y, v = y + BOX / 2, v - BOX / 2
            marks.append(
                f'<path d="M{x:.0f} {y:.0f}C{x:.0f} {y + 22:.0f} {u:.0f} {v - 22:.0f} {u:.0f} {v:.0f}"/>'
            )
    for room, (x, y) in sorted(at.items()):
        wide = 8.2 * len(room) + 18
        marks.append(
            f'<rect x="{x - wide / 2:.0f}" y="{y - BOX / 2:.0f}" width="{wide:.0f}" height="{BOX}" rx="6"/>'
            f'<text x="{x:.0f}" y="{y + 4.5:.1f}">{html.escape(room)}</text>'
        )
    told = f"{len(graph)} rooms in {len(rows)} layers; the table below says which imports which."
    return (
        f'<svg viewBox="0 0 {WIDTH} {ROW * len(rows)}" role="img" aria-labelledby="house-title house-told">'
        f'<title id="house-title">The rooms of regard and their imports</title><desc id="house-told">{told}</desc>'
        f"{''.join(marks)}</svg>"
    )


def table(files: dict[str, str], eager: dict[str, set[str]], lazy: dict[str, set[str]]) -> str:
    """The rooms from the top down: what each is for, and what it imports."""
    rows = ["| room | what it is for | imports | when asked |", "| --- | --- | --- | --- |"]
    for row in reversed(layers(eager)):
        for room in row:
            source = files.get(f"{room}.py") or files[f"{room}/__init__.py"]
            doc = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].replace("\n", " ")
            told = doc.replace("|", "\\|").replace("<", "\\<")
            near = ", ".join(f"`{it}`" for it in sorted(eager[room])) or "–"
            rows.append(
                f"| `{room}` | {told} | {near} | {', '.join(f'`{it}`' for it in sorted(lazy[room])) or '–'} |"
            )
    return "\n".join(rows)
