"""Names of the package: functions are verbs, a class name has one meaning, file names say what they contain."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import regard

PACKAGE = Path(regard.__file__).parent
IRREGULAR = {
    *("told", "kept", "made", "given", "found", "seen", "said", "held", "built", "taken", "shown", "written"),
    *(
        "chosen",
        "drawn",
        "known",
        "hidden",
        "spread",
        "left",
        "put",
        "cut",
        "sent",
        "gone",
        "done",
        "meant",
        "split",
    ),
}
# "put", "cut" and "split" are verbs as well.
VERBS = {"put", "cut", "split", "embed", "need", "feed", "seed", "read", "speed", "shed", "spread"}
# Names of mathematical functions, as the chapters and torch call them.
NOUNS = {"normalised_relu", "normalised_sigmoid", "scaled_dot_product_attention"}
FORMER_FILES = {
    *(
        "_attention",
        "_matrix",
        "_reductions",
        "_looking",
        "_views",
        "_stream",
        "_plan",
        "_products",
        "_linear",
    ),
    *(
        "_explain",
        "_index",
        "_shapes",
        "_types",
        "_errors",
        "_carried",
        "_page",
        "_models",
        "_job",
        "_engines",
    ),
    *(
        "_child",
        "_measurer",
        "_shard",
        "_ledger",
        "_opened",
        "_gathered",
        "_profile",
        "_seen",
        "_asked",
        "_store",
    ),
    *(
        "_live",
        "_capture",
        "_patch",
        "_own",
        "_record",
        "_hints",
        "_recognise",
        "_span",
        "_join",
        "_heads",
        "_find",
    ),
    *(
        "_checks",
        "_diagnose",
        "_multihead",
        "_places",
        "_apart",
        "_convert",
        "_transformers",
        "_plain",
        "_atoms",
    ),
    *(
        "_runs",
        "_largest",
        "_positions",
        "_given",
        "_listing",
        "_values",
        "_ready",
        "_wrong",
        "_faults",
        "_judge",
    ),
    *(
        "_rule",
        "_libraries",
        "_call",
        "_kinds",
        "_data",
        "scores",
        "features",
        "rivals",
        "walk",
        "orders",
        "masked",
    ),
    *("own", "rooms", "house", "raised"),
}
# learn/family/scores.py is the chapter about mechanisms that change the scores.
KEPT_FILES = {"learn/family/scores.py"}


def parse() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text("utf-8"))


def is_participle(name: str) -> bool:
    word = name.split("_")[0]
    return word not in VERBS and name not in NOUNS and (word.endswith("ed") or word in IRREGULAR)


def find_participles(tree: ast.Module) -> list[str]:
    """Public functions and methods named by a participle; properties are values, and may be."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and is_participle(node.name):
            decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
            if not decorators & {"property", "cached_property", "setter"}:
                found.append(node.name)
    return found


def find_class_names(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """The files that define each class name."""
    places = defaultdict(list)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file)
    return places


def test_public_functions_are_verbs():
    found = {file: names for file, tree in parse() if (names := find_participles(tree))}
    assert found == {}


def test_a_class_name_is_defined_once():
    places = find_class_names(dict(parse()))
    assert len(places) > 150
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_former_file_name_is_left():
    files = [file for file, _ in parse() if file not in KEPT_FILES]
    assert [file for file in files if Path(file).stem in FORMER_FILES] == []


def test_planted_names_are_found():
    tree = ast.parse("def told(): ...\ndef carried_rows(): ...\ndef embed(): ...\nclass Frame: ...")
    assert find_participles(tree) == ["told", "carried_rows"]
    assert find_class_names({"a": tree, "b": tree})["Frame"] == ["a", "b"]
