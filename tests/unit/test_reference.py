"""The reference: every public name is told and shown, every error has its place, every promise its test."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import regard
from regard import RegardError
from tests.helpers.doc_blocks import run_page
from tests.helpers.wrong_calls import ODD, WRONG

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs/_ext"))

pytest.importorskip("torch")  # nn and lens are rooms too
pytest.importorskip("sphinx")

from api_reference import Name, Room, describe, modules, rooms  # noqa: E402
from architecture import drawing, edges, layers, reduced, table  # noqa: E402
from error_index import Source, by_operation  # noqa: E402
from pages import TEST, exceptions, pages  # noqa: E402

# -- Docstrings -------------------------------------------------------------------------------------------

# A docstring opens with what the caller gets, not with how it is said.
IDLE = re.compile(
    r"(Returns?|Gets?|Computes?|Calculates?|This|Function|Method|Class|Helper|Wrapper|Utility|TODO)\b"
)

# Public functions and classes without an example of their own, and why.
WITHOUT_EXAMPLE: dict[str, str] = {
    "regard.survey": "it starts processes that run a model over files; tests/unit/survey/test_survey.py does",
    "regard.survey.open": "it reads what a survey wrote",
    "regard.survey.Survey": "it is what a survey wrote",
    "regard.survey.Progress": "a running survey makes it",
    "regard.survey.SurveyError": "a broken survey raises it",
}


def told_badly(name: Name) -> list[str]:
    """What is wrong with the docstring of a name and of its members."""
    wrong = []
    for it in (name, *(member for member in name.members if not member.told)):
        first = it.doc.split("\n\n")[0].strip()
        if not first:
            wrong.append(f"{it.name} has no docstring")
        elif IDLE.match(first):
            wrong.append(f"{it.name} does not open with what the caller gets: {first[:40]}")
        elif first[-1] not in ".:)…" and it.kind != "data":
            wrong.append(f"{it.name} does not open with a sentence: {first[-40:]}")
    return wrong


def has_example(name: Name) -> bool:
    """Whether a function, or a class in itself or one of its members, is shown in use."""
    return any(">>> " in it.doc for it in (name, *name.members))


def public() -> list[Name]:
    return [name for room in rooms() for name in room.names]


def test_every_public_name_has_a_docstring_that_opens_with_what_the_caller_gets():
    assert [wrong for name in public() for wrong in told_badly(name)] == []


def test_every_room_says_what_it_is():
    assert [room.name for room in rooms() if not room.doc] == []


def test_every_public_function_and_class_has_an_example_that_runs():
    # That they run is seen by pytest itself: it collects the doctests of the modules.
    shown = [name for name in public() if name.kind != "data"]
    assert len(shown) > 100
    without = {name.name for name in shown if not has_example(name)}
    assert without == set(WITHOUT_EXAMPLE)


def test_all_public_names_are_there_and_each_once():
    names = [name.name for name in public()]
    assert len(names) == len(set(names))
    assert {f"regard.{name}" for name in regard.__all__} <= set(names)
    for room in rooms():
        assert len(room.module.__all__) == len(set(room.module.__all__))
    assert {
        "regard.watch",
        "regard.load_recording",
        "regard.lens.Recording",
        "regard.learn.family.show",
    } <= set(names)


class Untold:
    """A class with a method that says nothing of itself."""

    def method(self) -> None:
        pass


def idle() -> None:
    """Returns nothing."""


def test_what_is_untold_is_seen():
    Ours = type("Untold", (Untold,), {**vars(Untold), "__module__": "regard"})
    (wrong,) = told_badly(describe("regard.Untold", Ours, {}))
    assert wrong == "regard.Untold.method has no docstring"
    (wrong,) = told_badly(describe("regard.idle", idle, {}))
    assert "does not open with what the caller gets" in wrong
    assert not has_example(describe("regard.idle", idle, {}))


def test_a_room_that_is_new_appears_by_itself(tmp_path, monkeypatch):
    (tmp_path / "attic.py").write_text('"""The attic: what is kept."""\n__all__ = ["kept"]\nkept = 1\n')
    (tmp_path / "cellar.py").write_text("raise RuntimeError('it names nothing, so nobody opens it')\n")
    monkeypatch.setattr(regard, "__path__", [*regard.__path__, str(tmp_path)])
    for name in ("attic", "cellar"):
        monkeypatch.delitem(sys.modules, f"regard.{name}", raising=False)
    found = [module for module in modules() if module.__name__ == "regard.attic"]
    assert [Room(module).page for module in found] == ["attic"]
    monkeypatch.delitem(sys.modules, "regard.attic")
    monkeypatch.delattr(regard, "attic")


# -- Pages ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages()


def test_there_is_a_page_for_each_room_with_all_its_names(made):
    assert {"index", "errors", "architecture", *(room.page for room in rooms())} == set(made)
    for room in rooms():
        for name in room.names:
            page = made["errors" if name.kind == "exception" else room.page]
            short = re.escape(name.name.rpartition(".")[2])
            assert re.search(rf"\{{py:{name.kind}\}} {short}(\(|\n)", page), name.name
            assert f"<{name.name}>" in made["index"], name.name


def test_the_examples_of_the_page_of_errors_run(made):
    assert run_page(made["errors"].partition("## The classes")[0], "errors") == 1


# -- Errors -----------------------------------------------------------------------------------------------


def test_every_error_that_can_be_met_has_its_place_on_the_page(made):
    known = set(by_operation())
    assert all(f"({at})=\n### " in made["errors"] for at in known)
    calls = {**{name: wrong.call for name, wrong in WRONG.items()}, **ODD}
    assert len(calls) > 100
    lost = set()
    for call in calls.values():
        with pytest.raises(RegardError) as caught:
            call()
        page, at = caught.value.page.split("#")
        assert page == "reference/errors.html"
        lost |= {at} - known
    assert lost == set()


def test_the_message_is_what_it_was(made):
    error = regard.ArgumentError("recording.find", received="a", expected="b", hint="c.")
    assert str(error) == "recording.find: received a; expected b. c."
    assert error.page == "reference/errors.html#seen-find"


def test_every_class_of_errors_is_on_the_page(made):
    assert [
        name.name
        for name in exceptions()
        if f"{{py:exception}} {name.name.split('.')[-1]}" not in made["errors"]
    ] == []


RAISES = """
class Refused(RegardError): pass
LATE = "late"
class Base:
    def take(self, operation, hint="Wait a little."):
        why = "too soon" if self.soon else "too late"
        raise Refused(operation, received=f"{self.count} of {len(self.all)}, {why}", expected="one", hint=hint)
    def one(self): self.take(f"{LATE}.one", "Come back later.")
    def two(self): self.take("two")
    def name(self): raise Refused(type(self).__name__, received="x", expected="y", hint="z")
class Below(Base): pass
"""


def test_an_operation_that_is_a_parameter_is_followed_to_those_who_give_it():
    found = {(it.operation, it.hint) for it in Source({"regard.made": RAISES}).raised()}
    assert found == {
        ("late.one", "Come back later."),
        ("two", "Wait a little."),
        ("Base", "z"),
        ("Below", "z"),
    }
    (one,) = (it for it in Source({"regard.made": RAISES}).raised() if it.operation == "two")
    assert one.received == "‹count› of …, too soon or too late"


# -- Architecture -----------------------------------------------------------------------------------------

FILES = {
    "ground.py": '"""The ground."""',
    "wall.py": "from regard.ground import x\ndef late():\n    from regard.roof import y",
    "roof/__init__.py": '"""The roof | top."""\nfrom regard import wall\nimport regard.ground',
}


def test_the_house_is_drawn_from_the_imports():
    eager, lazy = edges(FILES)
    assert eager == {"ground": set(), "wall": {"ground"}, "roof": {"wall", "ground"}}
    assert lazy == {"ground": set(), "wall": {"roof"}, "roof": set()}
    assert layers(eager) == [["ground"], ["wall"], ["roof"]]
    assert reduced(eager)["roof"] == {"wall"}
    picture = drawing(eager)
    assert picture.count("<rect") == 3 and picture.count("<path") == 2
    assert 'role="img"' in picture and "<title" in picture
    assert "| `roof` | The roof \\| top. | `ground`, `wall` | – |" in table(FILES, eager, lazy)


# -- Promises and figures ---------------------------------------------------------------------------------


def test_every_test_that_a_promise_names_is_there():
    text = (ROOT / "docs/promises.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\|$", text, re.MULTILINE)
    assert rows == [str(number) for number in range(1, 13)]
    for row in re.findall(r"^\| \d+ \|.*\|$", text, re.MULTILINE):
        assert TEST.search(row), row
    for file, name in TEST.findall(text):
        functions = [
            it.name for it in ast.parse((ROOT / file).read_text()).body if isinstance(it, ast.FunctionDef)
        ]
        assert name in functions, f"{file} has no {name}"


def test_the_figures_are_those_of_every_dtype_and_engine_within_the_rule():
    page = (ROOT / "docs/error-figures.md").read_text()
    ordinary, every = re.findall(r"(?:^\| \w+ \| [\w ]+ \| \d.*\|\n)+", page, re.MULTILINE)
    cells = {tuple(row.split(" | ")[:2]): row for row in re.findall(r"\| (.*) \|", every)}
    assert set(cells) == {(d, e) for d in regard.testing.FACTORS["dtype"] for e in regard.testing.ENGINES}
    assert all(0 < float(x) <= 1 for row in cells.values() for x in row.split(" | ")[2:])
    assert ordinary.count("naive") == len(regard.testing.FACTORS["dtype"])
