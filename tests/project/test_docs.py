"""Every Python block of README and docs runs, and prints what it says."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.doc_blocks import ELSEWHERE, run_page
from tests.helpers.nightly import keep_in_ci

ROOT = Path(__file__).parents[2]
NOTEBOOK = "---\nfile_format: mystnb\n"  # run by test_notebooks.py, and when the site is built
MADE = ROOT / "docs/reference"  # from the docstrings, whose examples run where they stand
WRITTEN = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - set(MADE.glob("*.md")))
PAGES = [
    page
    for page in WRITTEN
    if not page.read_text().startswith(NOTEBOOK)
    and "```python" in page.read_text()
    and page.name not in ELSEWHERE
]


FAST = [page for page in PAGES if page.name != "survey.md"]  # it runs a survey


@pytest.mark.parametrize("page", keep_in_ci(PAGES, *FAST), ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    assert run_page(page.read_text(), page.name) > 0


@pytest.mark.parametrize("block", ["assert 1 == 2", ">>> 1 + 1\n3\n", "import regard.nonexistent"])
def test_a_wrong_block_is_seen(block):
    with pytest.raises((AssertionError, ImportError)):
        run_page(f"```python\n{block}\n```", "page")


def test_relative_links_lead_somewhere():
    for page in [*WRITTEN, ROOT / "CONTRIBUTING.md", ROOT / "DESIGN.md"]:
        for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_figures_of_the_readme_are_what_the_benchmarks_kept(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    figures = importlib.import_module("figures")
    readme = (ROOT / "README.md").read_text()
    assert figures.insert_table(readme) == readme
    assert figures.insert_table(readme.replace("| `A @ value`, 8 heads", "| faster")) == readme


def test_a_build_that_lost_a_page_fails(tmp_path, monkeypatch):
    pytest.importorskip("myst_nb")
    from sphinx.errors import ExtensionError

    monkeypatch.setattr(sys, "path", [*sys.path])  # the settings add the folder of our extensions
    check_pages = runpy.run_path(str(ROOT / "docs/conf.py"))["check_pages"]
    builder = SimpleNamespace(name="html", get_outfilename=lambda name: tmp_path / f"{name}.html")
    app = SimpleNamespace(env=SimpleNamespace(found_docs={"written", "lost"}), builder=builder)
    (tmp_path / "written.html").touch()
    with pytest.raises(ExtensionError, match=r"not written: lost\."):
        check_pages(app, None)
    (tmp_path / "lost.html").touch()
    check_pages(app, None)


def test_the_commands_of_claims_and_contributing_name_existing_files():
    pages = "".join((ROOT / name).read_text() for name in ("CONTRIBUTING.md", "docs/claims.md"))
    paths = re.findall(r"(?:tests|benchmarks|examples|scripts)/[\w./*-]+", pages)
    assert len(paths) > 50
    assert [path for path in paths if not list(ROOT.glob(path))] == []


def test_the_tree_in_contributing_lists_the_packages():
    tree = re.search(r"```text\n(errors .+?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[1]
    names = {name for line in tree.splitlines() for name in re.split(r"  +", line)[0].split(" · ")}
    source = ROOT / "src/regard"
    assert names >= {path.parent.name for path in source.glob("*/__init__.py")}
    assert {
        name for name in names if not ((source / name).is_dir() or (source / f"{name}.py").is_file())
    } == set()


def test_the_page_of_supported_models_lists_every_result_and_every_reason(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(ROOT / "docs/_ext")
    page = importlib.import_module("supported_models")
    results = json.loads((ROOT / "docs/supported-models.json").read_text("utf-8"))
    found = re.findall(
        r'<tr><td>(\w+)</td><th .*?<span class="pre">(.+?)</span>.*?</th>(.*)</tr>',
        page.models_table(results),
    )
    rows = {name if package == "transformers" else f"{package}.{name}": row for package, name, row in found}
    assert rows.keys() == results["models"].keys() and len(rows) == len(found)
    for name, model in results["models"].items():
        *answers, compared, version, date, notes = re.findall(r"<td>(.*?)</td>", rows[name])
        assert version and re.fullmatch(r"\d{4}-\d\d-\d\d", date)
        assert bool(compared) >= ("package" in model and answers[0] == "yes")
        good = [model.get(key, [""])[0] in page.ANSWERS for key in ("watch", "intervene", "implementation")]
        assert [answer != "–" for answer in answers] == good
        assert bool(notes) >= any(answer.startswith(("no", "fails")) for answer in answers), name


def test_at_least_40_models_of_other_packages_have_rows_from_runs():
    pytest.importorskip("torch")
    table = importlib.import_module("tests.third_party.models").MODELS
    results = json.loads((ROOT / "docs/supported-models.json").read_text("utf-8"))["models"]
    rows = {name: row for name, row in results.items() if "package" in row}
    assert rows.keys() == table.keys()  # `scripts/docs third-party --write` after a change
    assert {row["watch"][0] for row in rows.values()} == {"captured", "rejected"}
    assert {row["intervene"][0] for row in rows.values()} <= {"edited", "refused"}
    assert sum(row["watch"][0] == "captured" for row in rows.values()) >= 40
