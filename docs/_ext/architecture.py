"""Draw the architecture page from the imports between the packages of regard."""

from __future__ import annotations

import ast
import html
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

import regard

PACKAGE = Path(regard.__file__).parent
WIDTH, ROW, BOX = 760, 58, 30  # of the drawing, of a layer and of a box, in SVG units

HEAD = """\
# Architecture

Each package of `regard` stands above the packages that it imports, so no line points upwards. The contracts in
`pyproject.toml` enforce the direction. Lines that follow from other lines are left out; the table lists every import.

"""

DESIGN_SECTIONS = ("The life of a call", "Design decisions")

Imports = dict[str, set[str]]


def architecture_page() -> str:
    """Return the page: the drawing, the table of imports, and two sections of DESIGN.md."""
    imports = package_imports(grimp.build_graph("regard", cache_dir=None))
    parts = [
        HEAD,
        f'```{{raw}} html\n<div class="architecture">{draw(imports)}</div>\n```',
        import_table(imports, {package: purpose(package) for package in imports}),
    ]
    design = PACKAGE.parents[1] / "DESIGN.md"
    if design.exists():  # absent if the package is installed elsewhere
        for title in DESIGN_SECTIONS:
            section = design.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
            parts.append(f"## {title}\n{section.strip()}")
    return "\n\n".join(parts) + "\n"


def package_imports(graph: grimp.ImportGraph) -> Imports:
    """Return the packages that each package imports, without the root, which imports all of them on demand."""
    children = [module for module in graph.find_children("regard") if not module.startswith("regard._")]
    for module in children:
        graph.squash_module(module)
    return {
        module.removeprefix("regard."): {
            imported.removeprefix("regard.")
            for imported in graph.find_modules_directly_imported_by(module)
            if imported in children and imported != module
        }
        for module in sorted(children)
    }


def layers(imports: Imports) -> list[list[str]]:
    """Return the packages from the bottom up, each one above its imports and close below the packages that use it."""
    order = list(TopologicalSorter(imports).static_order())  # raises CycleError
    height: dict[str, int] = {}
    for package in order:
        height[package] = max((height[imported] + 1 for imported in imports[package]), default=0)
    for package in reversed(order):
        above = [height[importer] for importer in imports if package in imports[importer]]
        height[package] = min(above, default=height[package] + 1) - 1
    return [sorted(it for it in imports if height[it] == level) for level in range(max(height.values()) + 1)]


def transitive_reduction(imports: Imports) -> Imports:
    """Drop the imports that follow from other imports."""

    def descendants(package: str) -> set[str]:
        return imports[package] | {far for near in imports[package] for far in descendants(near)}

    return {
        package: near - {far for imported in near for far in descendants(imported)}
        for package, near in imports.items()
    }


def draw(imports: Imports) -> str:
    """Return the drawing as SVG: one row for each layer, the lowest layer at the bottom."""
    rows = layers(imports)
    lines = transitive_reduction(imports)
    position: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        # Order a row by the mean position of the packages that each one imports, so that few lines cross.
        below = {package: [position[imported][0] for imported in lines[package]] for package in row}
        row.sort(key=lambda package: (sum(below[package]) / max(len(below[package]), 1), package))
        for place, package in enumerate(row):
            position[package] = (WIDTH * (place + 0.5) / len(row), ROW * (len(rows) - level - 0.5))
    marks = []
    for package, near in sorted(lines.items()):
        for imported in sorted(near):
            (x, y), (u, v) = position[package], position[imported]
            y, v = y + BOX / 2, v - BOX / 2
            marks.append(
                f'<path d="M{x:.0f} {y:.0f}C{x:.0f} {y + 22:.0f} {u:.0f} {v - 22:.0f} {u:.0f} {v:.0f}"/>'
            )
    for package, (x, y) in sorted(position.items()):
        width = 8.2 * len(package) + 18
        marks.append(
            f'<rect x="{x - width / 2:.0f}" y="{y - BOX / 2:.0f}" width="{width:.0f}" height="{BOX}" rx="6"/>'
            f'<text x="{x:.0f}" y="{y + 4.5:.1f}">{html.escape(package)}</text>'
        )
    summary = f"{len(imports)} packages in {len(rows)} layers; the table below lists the imports."
    return (
        f'<svg viewBox="0 0 {WIDTH} {ROW * len(rows)}" role="img" aria-labelledby="imports-title imports-desc">'
        f'<title id="imports-title">The packages of regard and their imports</title>'
        f'<desc id="imports-desc">{summary}</desc>{"".join(marks)}</svg>'
    )


def purpose(package: str) -> str:
    """Return the first paragraph of the package's docstring."""
    path = PACKAGE / f"{package}.py"
    tree = ast.parse((path if path.exists() else PACKAGE / package / "__init__.py").read_text())
    return (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")


def import_table(imports: Imports, purposes: dict[str, str]) -> str:
    """Return the packages from the top down as a Markdown table: purpose and imports."""
    rows = ["| package | purpose | imports |", "| --- | --- | --- |"]
    for layer in reversed(layers(imports)):
        for package in layer:
            text = purposes[package].replace("|", "\\|").replace("<", "\\<")
            listed = ", ".join(f"`{imported}`" for imported in sorted(imports[package])) or "–"
            rows.append(f"| `{package}` | {text} | {listed} |")
    return "\n".join(rows)
