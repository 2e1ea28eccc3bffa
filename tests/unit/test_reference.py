"""The reference pages: docstrings and examples of public names, the error index, imports, tests of guarantees."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
import types
from pathlib import Path

import pytest

import regard
from regard import RegardError
from tests.helpers.doc_blocks import run_page
from tests.helpers.wrong_calls import WRONG

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs/_ext"))

pytest.importorskip("torch")  # nn and lens need it
pytest.importorskip("sphinx")
grimp = pytest.importorskip("grimp")

from api_reference import PublicModule, PublicName, describe, find_modules, list_exports, public_modules  # noqa: E402
from architecture import (  # noqa: E402
    DESIGN_SECTIONS,
    draw,
    import_table,
    layers,
    package_imports,
    transitive_reduction,
)
from error_index import Source, errors_by_anchor  # noqa: E402
from pages import TEST_NAME, Links, build_pages, exceptions  # noqa: E402

# -- Docstrings -------------------------------------------------------------------------------------------

# A summary is in the imperative or a noun phrase; these openings are neither.
BAD_OPENING = re.compile(
    r"(Returns|Gets|Computes|Calculates|This|Function|Method|Class|Helper|Wrapper|Utility|TODO)\b"
)

# Public functions and classes without an example of their own, and why.
WITHOUT_EXAMPLE: dict[str, str] = {
    "regard.distributed.DistributedMatrix": "returned by regard.distributed.attention",
    "regard.distributed.attention": "runs in a group of processes; see examples/ring.py",
    "regard.distributed.gather": "runs in a group of processes; see examples/ring.py",
    "regard.distributed.shard": "runs in a group of processes; see examples/ring.py",
    "regard.learn.ScaledDotProductAttention": "chapter 4 runs it",
    "regard.learn.family.Biased": "a base of regard.learn.family.ALiBi",
    "regard.learn.family.Masked": "a base of regard.learn.family.Causal",
    "regard.learn.TinyGPTRun": "returned by regard.learn.TinyGPT",
    "regard.learn.exercises.check_class": "reads the files of a class; see docs/guides/10-teach-a-class.md",
    "regard.learn.exercises.find_submissions": "reads the files of a class; see docs/guides/10-teach-a-class.md",
    "regard.lens.LayerSpans": "a part of regard.lens.SpanMass",
    "regard.lens.ShardedRecording": "runs in a group of processes; see docs/guides/20-many-ranks.md",
    "regard.transformers.UnrecordedWeights": "what regard.transformers.choose_layers leaves out",
    "regard.models.LoadedModel": "returned by regard.models.load",
    "regard.monitor.ClippedHead": "returned by regard.monitor.qk_clip",
    "regard.models.EncodedText": "returned by LoadedModel.encode",
    "regard.interventions.Circuits": "returned by regard.interventions.circuits",
    "regard.interventions.HeadWeights": "returned by Circuits.weights",
    "regard.interventions.Edit": "returned by regard.interventions.knockout and its siblings",
    "regard.interventions.EffectTable": "returned by regard.interventions.effects",
    "regard.monitor.Alarm": "created by a rule in a monitored step",
    "regard.monitor.AlarmError": "raised by a monitored step",
    "regard.monitor.AlarmRule": "a protocol",
    "regard.monitor.AlarmWarning": "issued by a monitored step",
    "regard.monitor.DeadHead": "an argument of regard.monitor.Monitor",
    "regard.monitor.EntropyCollapse": "an argument of regard.monitor.Monitor",
    "regard.monitor.History": "an attribute of regard.monitor.Monitor",
    "regard.monitor.Incident": "listed by regard.monitor.Monitor.incidents",
    "regard.monitor.Snapshot": "passed to the rules of regard.monitor.Monitor",
    "regard.monitor.NonFinite": "an argument of regard.monitor.Monitor",
    "regard.monitor.LostAttention": "an argument of regard.monitor.Monitor",
    "regard.monitor.SaturatedHead": "an argument of regard.monitor.Monitor",
    "regard.monitor.ScoreGrowth": "an argument of regard.monitor.Monitor",
    "regard.monitor.LightningCallback": "runs inside a Trainer of Lightning",
    "regard.monitor.TrainerCallback": "runs inside a Trainer of transformers",
    "regard.policy.Verification": "returned by regard.policy.CachePolicy.verify",
    "regard.vllm.RequestLog": "returned by regard.vllm.load",
    "regard.vllm.RequestRecord": "returned by regard.vllm.load",
    "regard.vllm.Settings": "the example of the package builds one",
    "regard.vllm.find_spans": "asks a server; see docs/guides/24-in-production.md",
    "regard.vllm.load": "reads the files of a server; see docs/guides/24-in-production.md",
    "regard.survey.run": "starts processes that run a model over files; see tests/unit/survey/test_survey.py",
    "regard.survey.load": "reads the files of a survey",
    "regard.survey.Survey": "describes the files of a survey",
    "regard.survey.Progress": "created by a running survey",
    "regard.survey.SurveyError": "raised by a damaged survey",
}


# Chapter 4 explains the methods of this class: docstrings would hide its lines. Subclasses override them.
EXPLAINED_IN_THE_BOOK = set(vars(regard.learn.ScaledDotProductAttention))

# Methods that do not list their parameters, by the start of their name, and why.
WITHOUT_ARGS: dict[str, str] = {
    "regard.engines.ArrayEngine.": "regard.engines.Engine lists them",
    "regard.lens.Watch.": "called by the wrappers of attention functions",
    "regard.interventions.Intervention.": "called by the wrappers of attention functions",
    "regard.monitor.TrainerCallback.": "called by the Trainer of transformers",
    "regard.transformers.UnrecordedWeights.": "every argument is accepted and ignored",
    "regard.monitor.LightningCallback.": "called by the Trainer of Lightning",
    **{
        f"regard.monitor.{name}.check": "regard.monitor.AlarmRule lists them"
        for name in (
            "DeadHead",
            "EntropyCollapse",
            "LostAttention",
            "NonFinite",
            "SaturatedHead",
            "ScoreGrowth",
        )
    },
}


def docstring_faults(name: PublicName) -> list[str]:
    """Describe what is wrong with the docstrings of a name and of its members."""
    faults = []
    explained = EXPLAINED_IN_THE_BOOK if name.name.startswith("regard.learn.") else set()
    members = [it for it in name.members if it.doc or it.name.rpartition(".")[2] not in explained]
    for documented in (name, *(member for member in members if not member.documented_elsewhere)):
        summary = documented.doc.split("\n\n")[0].strip()
        if not summary:
            faults.append(f"{documented.name} has no docstring")
        elif BAD_OPENING.match(summary):
            faults.append(f"{documented.name} opens with {summary[:40]!r}")
        elif summary[-1] not in ".:)…" and documented.kind != "data":
            faults.append(f"{documented.name} has a summary without an end: {summary[-40:]!r}")
    return faults


def missing_args(name: PublicName) -> list[str]:
    """Describe the functions and methods of a name that do not list all their parameters under `Args:`."""
    shown = [member for member in name.members if member.doc and not member.documented_elsewhere]
    return [
        f"{documented.name}: {', '.join(documented.undocumented_parameters)}"
        for documented in (name, *shown)
        if documented.kind in ("function", "method", "classmethod", "staticmethod")
        and not documented.name.endswith("__")
        and not documented.name.startswith(tuple(WITHOUT_ARGS))
        and documented.undocumented_parameters
    ]


def has_example(name: PublicName) -> bool:
    """Tell whether a function, or a class or one of its members, has a doctest."""
    return any(">>> " in documented.doc for documented in (name, *name.members))


def public_names() -> list[PublicName]:
    return [name for module in public_modules() for name in module.names]


def test_every_public_name_has_a_docstring_with_a_summary():
    assert [fault for name in public_names() for fault in docstring_faults(name)] == []


def test_every_public_function_lists_its_parameters():
    assert [missing for name in public_names() for missing in missing_args(name)] == []


def test_every_public_module_has_a_docstring():
    assert [module.name for module in public_modules() if not module.doc] == []


def test_every_public_function_and_class_has_an_example():
    # pytest runs them: it collects the doctests of the modules.
    documented = [name for name in public_names() if name.kind != "data"]
    assert len(documented) > 100
    without = {name.name for name in documented if not has_example(name)}
    assert without == set(WITHOUT_EXAMPLE)


def exported_names() -> set[str]:
    """The public names of regard that are not modules."""
    return {
        f"regard.{name}"
        for name in list_exports(regard)
        if not isinstance(getattr(regard, name), types.ModuleType)
    }


def test_all_public_names_are_listed_once():
    names = [name.name for name in public_names()]
    assert len(names) == len(set(names))
    assert exported_names() <= set(names)
    for module in public_modules():
        assert len(module.module.__all__) == len(set(module.module.__all__))
    assert {"regard.watch", "regard.lens.Recording", "regard.learn.family.show"} <= set(names)


class Undocumented:
    """A class with a method without a docstring."""

    def method(self) -> None:
        pass


def third_person() -> None:
    """Returns nothing."""


def test_faulty_docstrings_are_reported():
    Ours = type("Undocumented", (Undocumented,), {**vars(Undocumented), "__module__": "regard"})
    (fault,) = docstring_faults(describe("regard.Undocumented", Ours, {}))
    assert fault == "regard.Undocumented.method has no docstring"
    (fault,) = docstring_faults(describe("regard.third_person", third_person, {}))
    assert fault == "regard.third_person opens with 'Returns nothing.'"
    assert not has_example(describe("regard.third_person", third_person, {}))


def documented_in_part(first: int, *others: int, last: int = 0) -> None:
    """Add numbers.

    Args:
        first: A number.
        *others: More numbers, which
            name: nothing.
    """


def test_a_missing_parameter_is_reported():
    assert missing_args(describe("regard.add", documented_in_part, {})) == ["regard.add: last"]


def test_a_new_module_gets_a_page(tmp_path, monkeypatch):
    (tmp_path / "listed.py").write_text('"""A module with `__all__`."""\n__all__ = ["one"]\none = 1\n')
    (tmp_path / "unlisted.py").write_text("raise RuntimeError('a module without __all__ is not imported')\n")
    monkeypatch.setattr(regard, "__path__", [*regard.__path__, str(tmp_path)])
    for name in ("listed", "unlisted"):
        monkeypatch.delitem(sys.modules, f"regard.{name}", raising=False)
    found = [module for module in find_modules() if module.__name__ == "regard.listed"]
    assert [PublicModule(module).page for module in found] == ["listed"]
    monkeypatch.delitem(sys.modules, "regard.listed")
    monkeypatch.delattr(regard, "listed")


def test_signatures_name_public_classes_in_full():
    names = {name.name: name for name in public_names()}
    assert "mask: regard.Mask | None = None" in names["regard.attention"].signature
    assert names["regard.attention"].signature.endswith(" -> regard.AttentionMatrix")
    assert names["regard.sliding_window"].signature.endswith(" -> regard.Mask")


# -- Pages ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return build_pages()


def test_every_module_has_a_page_with_all_its_names(pages):
    assert {"index", "errors", "architecture", *(module.page for module in public_modules())} == set(pages)
    for module in public_modules():
        for name in module.names:
            page = pages["errors" if name.kind == "exception" else module.page]
            short = re.escape(name.name.rpartition(".")[2])
            assert re.search(rf"\{{py:{name.kind}\}} {short}(\(|\n)", page), name.name
            assert f"<{name.name}>" in pages["index"], name.name


DOCSTRING = """\
Return a sum of `causal`.

Args:
    first: Number to add, of shape
        (1,).
    *others, scale: More of them.

Returns:
    The sum.

Raises:
    ArgumentError: If `first` is negative.

>>> 1 + 1
2"""


def test_docstring_sections_become_field_lists():
    text = Links().docstring(DOCSTRING, "regard.total", "(first, *others, scale)")
    assert text.split("\n") == [
        "Return a sum of {py:obj}`causal <regard.causal>`.",
        "",
        ":param first: Number to add, of shape (1,).",
        r":param \*others: More of them.",
        ":param scale: More of them.",
        "",
        ":returns: The sum.",
        "",
        ":raises ~regard.ArgumentError: If `first` is negative.",
        "",
        "```python",
        ">>> 1 + 1",
        "2",
        "```",
    ]


def test_the_example_of_the_error_page_runs(pages):
    assert run_page(pages["errors"].partition("## The classes")[0], "errors") == 1


# -- Errors -----------------------------------------------------------------------------------------------


def test_every_error_of_the_wrong_calls_has_an_anchor(pages):
    anchors = set(errors_by_anchor())
    assert all(f"({at})=\n### " in pages["errors"] for at in anchors)
    assert len(WRONG) > 100
    missing = set()
    for call in WRONG.values():
        with pytest.raises(RegardError) as caught:
            call()
        page, at = caught.value.page.split("#")
        assert page == "reference/errors.html"
        missing |= {at} - anchors
    assert missing == set()


def test_an_error_has_a_message_and_an_address():
    error = regard.ArgumentError("recording.find", received="a", expected="b", hint="c.")
    assert str(error) == "recording.find: received a; expected b. c."
    assert error.page == "reference/errors.html#recording-find"


def test_every_error_class_is_on_the_page(pages):
    names = [name.name for name in exceptions()]
    assert len(names) > 5
    assert [it for it in names if f"{{py:exception}} {it.split('.')[-1]}" not in pages["errors"]] == []


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


def test_the_callers_of_an_operation_parameter_are_searched():
    entries = list(Source({"regard.example": RAISES}).find_errors())
    assert {(entry.operation, entry.hint) for entry in entries} == {
        ("late.one", "Come back later."),
        ("two", "Wait a little."),
        ("Base", "z"),
        ("Below", "z"),
    }
    (two,) = (entry for entry in entries if entry.operation == "two")
    assert two.received == "‹count› of …, too soon or too late"


# -- Architecture -----------------------------------------------------------------------------------------


@pytest.fixture
def import_graph() -> grimp.ImportGraph:
    graph = grimp.ImportGraph()
    for module in (
        "regard",
        "regard.low",
        "regard.middle",
        "regard.middle.inner",
        "regard.high",
        "regard._root",
    ):
        graph.add_module(module)
    graph.add_import(importer="regard", imported="regard.high")
    graph.add_import(importer="regard.middle.inner", imported="regard.low")
    graph.add_import(importer="regard.middle", imported="regard._root")
    graph.add_import(importer="regard.high", imported="regard.middle.inner")
    graph.add_import(importer="regard.high", imported="regard.low")
    return graph


def test_the_architecture_is_drawn_from_the_imports(import_graph):
    imports = package_imports(import_graph)
    assert imports == {"low": set(), "middle": {"low"}, "high": {"low", "middle"}}
    assert layers(imports) == [["low"], ["middle"], ["high"]]
    assert layers(imports | {"leaf": set(), "top": {"leaf", "high"}})[2:] == [["high", "leaf"], ["top"]]
    assert transitive_reduction(imports)["high"] == {"middle"}
    drawing = draw(imports)
    assert drawing.count("<rect") == 3 and drawing.count("<path") == 2
    assert 'role="img"' in drawing and "<title" in drawing
    purposes = {"low": "Types.", "middle": "Core.", "high": "Plots | figures."}
    assert "| `high` | Plots \\| figures. | `low`, `middle` |" in import_table(imports, purposes)


def test_the_architecture_page_has_the_design_sections(pages):
    for title in DESIGN_SECTIONS:
        assert re.search(rf"^## {title}\n.{{100}}", pages["architecture"], re.MULTILINE | re.DOTALL), title


def test_an_import_cycle_is_an_error(import_graph):
    import_graph.add_import(importer="regard.low", imported="regard.high")
    with pytest.raises(graphlib.CycleError):
        layers(package_imports(import_graph))


# -- Guarantees and figures -------------------------------------------------------------------------------


def test_the_tests_named_by_the_guarantees_exist():
    text = (ROOT / "docs/promises.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\|$", text, re.MULTILINE)
    assert rows == [str(number) for number in range(1, 13)]
    for row in re.findall(r"^\| \d+ \|.*\|$", text, re.MULTILINE):
        assert TEST_NAME.search(row), row
    for file, name in TEST_NAME.findall(text):
        functions = [
            it.name for it in ast.parse((ROOT / file).read_text()).body if isinstance(it, ast.FunctionDef)
        ]
        assert name in functions, f"{file} has no {name}"


def test_error_figures_cover_every_dtype_and_engine_within_the_rule():
    page = (ROOT / "docs/error-figures.md").read_text()
    ordinary, every = re.findall(r"(?:^\| \w+ \| [\w ]+ \| \d.*\|\n)+", page, re.MULTILINE)
    cells = {tuple(row.split(" | ")[:2]): row for row in re.findall(r"\| (.*) \|", every)}
    assert set(cells) == {
        (d, e) for d in regard.testing.cases.FACTORS["dtype"] for e in regard.testing.ENGINES
    }
    assert all(0 < float(x) <= 1 for row in cells.values() for x in row.split(" | ")[2:])
    assert ordinary.count("naive") == len(regard.testing.cases.FACTORS["dtype"])
