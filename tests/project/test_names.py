"""Names of the package: a class name has one meaning."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import regard

PACKAGE = Path(regard.__file__).parent


def find_class_names(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """The files that define each class name."""
    places = defaultdict(list)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file)
    return places


def test_a_class_name_is_defined_once():
    files = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    places = find_class_names({name: ast.parse(path.read_text("utf-8")) for name, path in files.items()})
    assert len(places) > 150
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_planted_name_is_found():
    tree = ast.parse("class Frame: ...")
    assert find_class_names({"a": tree, "b": tree})["Frame"] == ["a", "b"]
