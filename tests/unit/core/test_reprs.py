"""Notebook output: right numbers, escaped text, no script, and bounded work for a matrix of any length."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import regard
from regard import causal
from regard.core.matrix import ENTRIES, MULTIPLY_ADDS, SIDE, SMALL
from regard.engines.numpy import NumpyEngine
from regard.learn import cat
from regard.render import notebook
from regard.render.text import escape_unprintable
from tests.helpers.pages import HOSTILE, faults

torch = pytest.importorskip("torch")

from regard.lens import Finding, Findings, Table  # noqa: E402
from regard.lens.head_grid import build_head_grid  # noqa: E402

close = np.testing.assert_allclose


class Read(HTMLParser):
    """Parse HTML into its tables (rows of cell texts), its text, and the tags and attributes that occur."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[list[list[str]]] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        if "table" in self.open:
            self.tables[-1][-1][-1] += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def read(thing: Any, *more_tags: str) -> Read:
    found = Read(thing._repr_html_())
    assert found.tags - set(more_tags) <= {
        "div",
        "p",
        "strong",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "bdi",
        "ul",
        "li",
        "span",
    }
    assert found.attributes - ({"alt", "src"} if "img" in more_tags else set()) <= {
        "style",
        "class",
        "scope",
        "tabindex",
    }
    return found


def matrix(q_len: int, kv_len: int, *lead: int, seed: int = 0, **how: Any) -> regard.AttentionMatrix:
    rng = np.random.default_rng(seed)
    query, key = rng.normal(size=(*lead, q_len, 3)), rng.normal(size=(*lead, kv_len, 3))
    return regard.attention(query.astype(np.float32), key.astype(np.float32), **how)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of entries of every tile of scores that is computed."""
    recording: list[int] = []
    compute = NumpyEngine.compute_scores

    def scores(self: Any, query: Any, key: Any, scale: float) -> Any:
        tile = compute(self, query, key, scale)
        recording.append(tile.size)
        return tile

    monkeypatch.setattr(NumpyEngine, "compute_scores", scores)
    return recording


# -- Matrices ---------------------------------------------------------------------------------------------


def test_a_small_matrix_shows_every_weight():
    A = matrix(5, 7, mask=causal("lower_right"))
    found = read(A)
    assert repr(A).splitlines()[0] in found.text and "All weights" in found.text
    ((head, *rows),) = found.tables
    assert head == ["query \\ key", *map(str, range(7))]
    assert [row[0] for row in rows] == list("01234")
    allowed = causal("lower_right").to_dense(5, 7)
    expected = [
        [f"{x:.4f}" if attended else "–" for x, attended in zip(*row, strict=True)]
        for row in zip(A.to_dense(), allowed, strict=True)
    ]
    assert [row[1:] for row in rows] == expected
    assert "masked" in found.text and "masked" not in read(matrix(5, 7)).text


def test_a_large_matrix_shows_a_few_rows_summed_over_runs_of_keys():
    A = matrix(37, 50, mask=causal("lower_right"))
    found = read(A)
    assert f"{SIDE} of 37 rows, the others not read" in found.text
    ((head, *rows),) = found.tables
    starts, chosen = [int(x) for x in head[1:]], [int(row[0]) for row in rows]
    assert len(starts) == len(chosen) == SIDE and chosen[0] == 0 and chosen[-1] == 36 and starts[0] == 0
    dense, attended = A.to_dense(), causal("lower_right").to_dense(37, 50)
    for i, row in zip(chosen, rows, strict=True):
        for j, end, cell in zip(starts, [*starts[1:], 50], row[1:], strict=True):
            if not attended[i, j:end].any():
                assert cell == "–"
            else:
                close(float(cell), dense[i, j:end].sum(), atol=5.1e-5)


@pytest.mark.parametrize("n", [4, 40])
def test_a_weight_of_zero_is_not_masked(n):
    key = np.repeat([[1e4], [0.0]], n // 2, axis=0)  # the weights of the later half underflow
    rows = read(regard.attention(np.ones((n, 1)), key, mask=causal())).tables[0][1:]
    assert rows[-1][-1] == "0.0000" and rows[0][-1] == "–"


def test_the_first_of_many_heads_is_shown_and_named():
    assert "This is A[0], the first of 2 heads." in read(matrix(4, 4, 2)).text
    assert "the first of" not in read(matrix(4, 4, 1)).text
    A = matrix(4, 4, 2, 3)
    found = read(A)
    assert "This is A[0, 0], the first of 6 heads." in found.text
    assert [row[1:] for row in found.tables[0][1:]] == [[f"{x:.4f}" for x in row] for row in A[0, 0]]


def test_a_page_has_the_tokens_and_the_title():
    page = matrix(2, 3).page(["cat", "sat", "mat"], query_tokens=["who", "where"], title="Who sat where")
    assert page.title == "Who sat where"
    for token in ("cat", "sat", "mat", "who", "where"):
        assert f'"{token}"' in page.html


def test_rows_of_a_part_keep_their_positions():
    part = matrix(9, 4).lazy[[7, 2, 5]]
    assert [row[0] for row in read(part).tables[0][1:]] == ["7", "2", "5"]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 3, 3)])
def test_an_empty_matrix_is_described(shape):
    *lead, q_len, kv_len = shape
    found = read(matrix(q_len, kv_len, *lead))
    assert found.tables == [] and "AttentionMatrix" in found.text


def test_nan_and_empty_rows():
    query = np.array([[1.0], [np.nan]])
    A = regard.attention(query, [[1.0], [2.0]], mask=regard.masks.dense([[False, False], [True, True]]))
    assert [row[1:] for row in read(A).tables[0][1:]] == [["–", "–"], ["nan", "nan"]]


@pytest.mark.parametrize("lead", [(), (3,)])
def test_a_million_tokens_take_a_bounded_amount_of_work(counted, lead):
    n = 1_000_000
    key = np.zeros((n, 2), np.float32)
    key[: n // 4] = 1.0
    A = regard.attention(np.broadcast_to(key, (*lead, n, 2)), key, mask=causal())
    assert repr(A) and counted == []
    found = read(A)
    rows = found.tables[0][1:]
    assert len(rows) == ENTRIES // n and f"{len(rows)} of 1,000,000 rows" in found.text
    # Each entry is computed at most twice for the weights and once for the scores.
    assert sum(counted) <= 3 * ENTRIES
    assert sum(float(cell) for cell in rows[-1][1:]) == pytest.approx(1, abs=1e-3)


def test_wide_heads_and_very_long_rows_stay_within_the_limits(counted):
    wide = np.zeros((600, 1 << 16), np.float32)
    A = regard.attention(wide, wide)
    assert len(read(A).tables[0]) - 1 == MULTIPLY_ADDS // (600 * (1 << 16)) < SIDE
    endless = np.zeros((ENTRIES + 1, 1), np.float32)
    before = len(counted)
    found = read(regard.attention(endless[:1], endless))
    assert found.tables == [] and "too long to show here" in found.text
    assert len(counted) == before


def test_a_tensor_that_requires_grad_is_shown_unchanged():
    query = torch.randn(2, 40, 8, requires_grad=True)
    A = regard.attention(query, query, mask=causal())
    assert len(read(A).tables[0]) == SIDE + 1
    (A @ query).sum().backward()
    assert query.grad.isfinite().all()
    linear = regard.linear_attention(torch.randn(30, 8), torch.randn(30, 8))
    assert len(read(linear).tables[0]) == SIDE + 1


def test_every_weight_is_shown_up_to_the_limit():
    assert len(read(matrix(SMALL, SMALL)).tables[0]) == SMALL + 1
    A = matrix(SMALL + 1, 2)  # fewer keys than SIDE columns
    head, first, *rows = read(A).tables[0]
    assert len(rows) == SIDE - 1 and head[1:] == ["0", "1"] and first[1:] == [f"{x:.4f}" for x in A[0]]
    assert len(read(matrix(2, SMALL + 1)).tables[0]) == 2 + 1


# -- Explanations -----------------------------------------------------------------------------------------


def test_an_explanation_shows_the_printed_text():
    A = regard.attention(cat.Q, cat.K, mask=causal(), sink=0.5)
    steps = A.explain(2, value=cat.V, tokens=cat.tokens)
    found = read(steps)
    assert len(found.tables) == 4
    printed = str(steps).splitlines()
    for line in (each for each in printed if each and each[0] != " "):
        assert line in found.text
    shown = [" ".join(row).split() for table in found.tables for row in table[1:]]
    rows = [line.replace("█", "").split() for line in printed if line[:3] == "   "]
    assert shown == rows[:-1] and " ".join(rows[-1]) in found.text  # the last is the output


def test_a_long_row_is_shown_by_its_top_keys():
    A = matrix(400, 400)
    found = read(A.explain(7))
    assert [len(table) for table in found.tables] == [13, 13, 14]
    assert found.tables[2][-1][0] == "(388 other keys)"
    weights = {f"key {j}": w for j, w in enumerate(A[7])}
    for name, _, weight, _ in found.tables[2][1:-1]:
        close(float(weight), weights[name], rtol=1e-2)


# -- Results of the lens ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording():
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 60, enable_nested_tensor=False
    ).eval()
    with regard.watch(model) as recording:
        model(torch.randn(1, 5, 16))
    return recording


def decode_png(data: bytes) -> np.ndarray:
    """Return the levels of a PNG with a palette and no filters."""
    assert data.startswith(b"\x89PNG")
    chunks, at = {}, 8
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        chunks[name] = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + chunks[name])
        at += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    assert len(chunks[b"PLTE"]) == 3 * 64 and list(chunks[b"tRNS"]) == sorted(chunks[b"tRNS"])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    return lines[:, 1:]


def read_pictures(recording):
    return [
        decode_png(base64.b64decode(data)) for data in re.findall(r"base64,([^\"]*)", recording._repr_html_())
    ]


def test_a_recording_shows_its_heads():
    layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
    with torch.no_grad(), regard.watch(torch.nn.ModuleDict({"first <b>": layer})) as recording:
        layer(torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(3)))
    found = read(recording, "img")
    assert found.tables == [[["layer", "heads"], ["first <b>.self_attn", ""]]]
    assert "first batch entry" in found.text and f"{recording.nbytes:,} bytes held" in found.text
    (picture,) = read_pictures(recording)
    weights = recording["first <b>.self_attn"].to_dense()[0].double().numpy()
    cell = np.arange(30) * 24 // 30
    for head, map_ in enumerate(np.split(picture, 4, axis=1)):
        assert map_.shape == (25, 25) and not map_[-1].any() and not map_[:, -1].any()  # a gap
        largest = np.array(
            [[weights[head][np.ix_(cell == a, cell == b)].max() for b in range(24)] for a in range(24)]
        )
        expected = 1 + 62 * np.sqrt(largest / largest.max())
        np.testing.assert_allclose(map_[:-1, :-1], expected, atol=0.51)


def test_of_many_weights_some_queries_are_shown(monkeypatch):
    monkeypatch.setattr("regard.lens.head_grid.MAX_WEIGHTS", 100)
    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    with torch.no_grad(), regard.watch(layer) as recording:
        layer(torch.randn(1, 30, 16, generator=torch.Generator().manual_seed(3)))
    assert "evenly spaced queries" in read(recording, "img").text
    weights = recording["self_attn"].to_dense()[0, 0].double().numpy()[np.linspace(0, 29, 24).astype(int)]
    cell = np.arange(30) * 24 // 30
    largest = np.stack([weights[:, cell == b].max(1) for b in range(24)], 1)
    found = read_pictures(recording)[0][:24, :24]
    np.testing.assert_allclose(found, 1 + 62 * np.sqrt(largest / largest.max()), atol=0.51)


def test_the_picture_of_a_large_model_is_small():
    """Random weights do not compress: 40 layers of 32 heads."""
    shape = (1, 32, 64, 64)
    rng = np.random.default_rng(0)
    calls = [SimpleNamespace(name=f"layers.{i}.attn", shape=shape) for i in range(40)]

    def draw(call, edge, samples):
        return rng.uniform(size=(32, edge, edge))

    with mock.patch("regard.lens.head_grid._draw_heads", draw):
        rows, _ = build_head_grid(calls)
    assert len(rows) == 40 and len(notebook.render_pictures("a model", rows)) < 200_000


def test_a_recording_of_measures_shows_layers_and_bytes_up_to_the_limit():
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 60, enable_nested_tensor=False
    ).eval()
    with regard.watch(model, measures="default") as recording:
        model(torch.randn(1, 5, 16))
    found = read(recording)
    ((head, *rows),) = found.tables
    assert head == ["layer", "module", "shape", "kernel", "bytes"]
    assert len(rows) == notebook.MAX_ROWS and "… and 10 more layers" in found.text
    assert rows[3][:3] == ["3", "layers.3.self_attn", "(batch 1, heads 2, q_len 5, kv_len 5)"]
    assert f"{recording.nbytes:,} bytes held" in found.text
    assert int(rows[0][-1].replace(",", "")) * 60 == recording.nbytes
    with pytest.warns(regard.lens.EmptyRecordingWarning), regard.watch(torch.nn.Linear(2, 2)) as nothing:
        pass
    assert "Recording(empty)" in read(nothing).text


def test_a_table_shows_its_rows_up_to_the_limit(recording):
    table = recording.heads()
    found = read(table)
    ((head, *rows),) = found.tables
    assert head == table.columns and len(rows) == notebook.MAX_ROWS
    assert f"… and {len(table) - notebook.MAX_ROWS} more rows" in found.text
    assert rows[1][0] == table[1]["module"] and rows[1][4] == f"{table[1]['entropy']:.3f}"
    assert "(no rows)" in read(Table()).text


def finding(severity: str, layer: int = 3, **more: Any) -> Finding:
    return Finding("dropout", severity, "It is on.", "attn", layer, evidence={"p": 0.1}, hint="Off.", **more)


def test_findings_are_sorted_by_severity():
    found = read(Findings([finding("note"), finding("error", heads=(1, 2))], "2 layers"))
    assert found.text.index("1 error, 1 note in 2 layers") < found.text.index("error: dropout")
    assert found.text.index("error: dropout") < found.text.index("note: dropout")
    for line in ("It is on.", "where: layer 3, attn, heads 1–2", "evidence: p 0.1", "hint: Off."):
        assert line in found.text
    assert "error: dropout" in read(finding("error")).text
    assert "No problems found in 1 layer." in read(Findings([], "1 layer")).text
    layers = read(Findings([finding("note", layer=n) for n in range(9)]))
    assert layers.text.count("note: dropout") == 1 and "also in layers 1–8: attn" in layers.text
    many = read(Findings([replace(finding("note"), message=f"{n}") for n in range(notebook.MAX_ROWS + 7)]))
    assert "… and 7 more; print() shows all of them." in many.text
    assert many.text.count("note: dropout") == notebook.MAX_ROWS


# -- Hostile text, and the browser ------------------------------------------------------------------------


def everything(tokens: list[str]) -> list[Any]:
    """Return one object of each class that shows text from outside, with all the tokens."""
    n = len(tokens)
    findings = [Finding(each, "error", each, each, 0, evidence={each: each}, hint=each) for each in tokens]
    return [
        matrix(n, n).explain(0, value=np.eye(n), tokens=tokens),
        Table({"module": each, "weight": 0.5} for each in tokens),
        Findings(findings, tokens[0]),
    ]


def test_hostile_text_is_escaped():
    for thing in everything(HOSTILE):
        found = read(thing)  # checks that there are no other tags and attributes
        assert all(escape_unprintable(token) in found.text for token in HOSTILE)


def test_columns_names_and_masks_are_escaped_too(recording):
    assert "<img src=x>" in read(Table([{"<img src=x>": 1.0}])).text
    strange = type(
        "Strange", (regard.ScoreMod,), {"__repr__": lambda self: "<script>", "apply": lambda s, x, *_: x}
    )
    A = regard.attention(np.eye(2), np.eye(2), score_mod=strange())
    assert "<script>" in read(A).text and "<script>" in read(A.explain(0)).text


def test_a_long_text_is_truncated():
    (row,) = read(Table([{"module": "<" * 10**6}])).tables[0][1:]
    assert row[0] == "<" * notebook.MAX_CHARS + "…"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser_no_script_runs_and_everything_is_accessible(browser, recording, scheme):
    paper, ink = {"light": ("#fff", "rgba(0,0,0,.87)"), "dark": ("#111", "rgba(255,255,255,.87)")}[scheme]
    things = [*everything(HOSTILE), matrix(5, 5, mask=causal()), matrix(90, 90, 2, mask=causal()), recording]
    things += [Findings([finding("error"), finding("warning"), finding("note")])]
    body = "".join(each._repr_html_() for each in things)
    context = browser.new_context(color_scheme=scheme)
    tab = context.new_page()
    events = []
    tab.on("console", lambda message: events.append(message.text))
    tab.on("dialog", lambda d: (events.append(d.message), d.dismiss()))
    tab.on("request", lambda request: events.append(request.url))
    tab.set_content(
        f'<!DOCTYPE html><html lang="en"><title>notebook</title><body style="background: {paper}; color: {ink}; '
        f'font: 13px sans-serif"><main><h1>notebook</h1>{body}</main>'
    )
    assert tab.locator("main script, main img:not([src^='data:image/png']), main b").count() == 0
    assert tab.locator("th", has_text="<img src=x onerror=alert(1)>").count() == 4
    assert faults(tab) == []
    assert events == []
    context.close()
