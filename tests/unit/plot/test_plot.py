"""Figures: the drawn values are the computed ones, labels are literal, and the caller's Axes are used."""

from __future__ import annotations

import io
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from regard import ArgumentError, ArgumentTypeError, causal, learn, sliding_window
from regard.engines.numpy import NumpyEngine
from regard.images import PatchGrid
from regard.learn import cat
from regard.render.text import escape_unprintable
from tests.helpers.pages import HOSTILE

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from regard import plot  # noqa: E402
from regard.plot.figures import format_label  # noqa: E402

close = np.testing.assert_allclose
equal = np.testing.assert_array_equal
ROOT = Path(regard.__file__).parents[1]


@pytest.fixture(autouse=True)
def nothing_is_shown(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda *_, **__: pytest.fail("regard.plot called plt.show()"))
    yield
    plt.close("all")


def matrix(q_len: int, kv_len: int, *lead: int, **how: Any) -> regard.AttentionMatrix:
    rng = np.random.default_rng(3)
    query, key = rng.normal(size=(*lead, q_len, 5)), rng.normal(size=(*lead, kv_len, 5))
    return regard.attention(2 * query, key, **how)


def draw(ax: Any) -> None:
    """Lay the figure out and draw every artist; warnings are errors."""
    ax.figure.figure.draw_without_rendering()  # the figure around a subfigure, too


def saved(ax: Any, kind: str) -> bytes:
    file = io.BytesIO()
    ax.figure.savefig(file, format=kind)
    return file.getvalue()


def texts(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


# -- One head ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, causal("lower_right"), sliding_window(3, align="upper_left")])
def test_a_heatmap_draws_the_weights_and_hatches_the_masked(mask):
    A = matrix(7, 11, mask=mask)
    ax = plot.heatmap(A)
    found = ax.images[0].get_array()
    allowed = np.ones((7, 11), bool) if mask is None else mask.to_dense(7, 11)
    equal(np.broadcast_to(np.ma.getmaskarray(found), allowed.shape), ~allowed)
    close(found.filled(0.0), A.to_dense())
    assert list(ax.images[0].get_extent()) == [-0.5, 10.5, 6.5, -0.5]
    assert ax.images[0].get_clim() == (0, A.to_dense().max())
    assert (
        ax.get_xlabel() == ("key" if mask is None else "key; hatched: masked") and ax.get_ylabel() == "query"
    )
    assert (ax.patch.get_hatch() is None) == (mask is None)
    draw(ax)


def test_a_bias_of_minus_infinity_is_hatched_too_and_nan_is_not():
    bias = np.zeros((3, 3))
    bias[0, 1:] = -np.inf
    query = np.eye(3)
    query[2] = np.nan
    ax = plot.heatmap(regard.attention(query, np.eye(3), score_mod=regard.score_mods.bias(bias)))
    equal(np.argwhere(ax.images[0].get_array().mask), [[0, 1], [0, 2], [2, 0], [2, 1], [2, 2]])
    equal(np.argwhere(~np.ma.getmaskarray(ax.images[1].get_array())), [[2, 0], [2, 1], [2, 2]])
    assert ax.get_xlabel() == "key; hatched: masked; orange: NaN"
    draw(ax)


def test_a_fully_masked_matrix_is_drawn():
    ax = plot.heatmap(regard.attention(np.eye(3), np.eye(3), mask=regard.masks.dense(np.zeros((3, 3), bool))))
    assert ax.images[0].get_array().mask.all()
    draw(ax)


def test_small_maps_have_numbers_and_larger_ones_not():
    A = matrix(3, 4, mask=causal("lower_right"))
    ax = plot.heatmap(A)
    numbers = {text.get_position(): text.get_text() for text in ax.texts}
    dense, allowed = A.to_dense(), causal("lower_right").to_dense(3, 4)
    assert numbers == {(j, i): f"{dense[i, j]:.2f}" for i, j in np.argwhere(allowed).tolist()}
    assert not len(plot.heatmap(matrix(30, 30)).texts) and not len(plot.heatmap(A, numbers=False).texts)
    assert len(plot.heatmap(matrix(30, 30), numbers=True).texts) == 900


@pytest.mark.parametrize("reduce", ["max", "mean", "sum"])
@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_a_long_head_is_drawn_as_cells_and_says_so(reduce, engine):
    A = matrix(90, 70, mask=causal("lower_right") & sliding_window(20, align="lower_right"))
    if engine == "torch":
        torch = pytest.importorskip("torch")
        arrays = (torch.tensor(array, requires_grad=True) for array in (A._spec.query, A._spec.key))
        A = regard.attention(*arrays, mask=A.mask)
    ax = plot.heatmap(A, [f"t{j}" for j in range(70)], cells=32, reduce=reduce)
    found = ax.images[0].get_array()
    expected = A.coarsen(32, reduce)
    close(found.filled(0.0), expected.detach().numpy() if engine == "torch" else expected)
    allowed = A.mask.to_dense(90, 70)
    for i, j in np.ndindex(32, 32):
        rows, columns = np.arange(90) * 32 // 90 == i, np.arange(70) * 32 // 70 == j
        assert found.mask[i, j] == (not allowed[np.ix_(rows, columns)].any())
    assert ax.get_xlabel() == "key; 32 × 32 cells; hatched: masked"
    word = {"max": "the largest", "mean": "the mean", "sum": "the sum"}[reduce]
    assert ax.figure.axes[1].get_ylabel() == f"weight, {word} of 2.812 × 2.188"
    draw(ax)
    assert "t0" not in texts(ax.xaxis) and "60" in texts(ax.xaxis)


@pytest.mark.parametrize("mask", [None, causal()])
def test_nan_in_cells_is_orange_and_not_masked(mask):
    query = np.ones((60, 2))
    query[30:33] = np.nan  # a cell is three rows
    ax = plot.heatmap(regard.attention(query, np.ones((60, 2)), mask=mask), cells=20)
    broken = ~np.ma.getmaskarray(ax.images[1].get_array())
    last = 20 if mask is None else 11
    equal(np.argwhere(broken), [[10, j] for j in range(last)])
    assert ax.get_xlabel().endswith("orange: NaN")


@pytest.mark.parametrize("cells", [4, 40])
def test_a_weight_of_zero_is_not_masked(cells):
    key = np.repeat([[1e4], [0.0]], 20, axis=0)  # the weights of the last twenty underflow
    A = regard.attention(np.ones((40, 1)), key, mask=causal("lower_right"))
    found = plot.heatmap(A, cells=cells).images[0].get_array()
    assert found[-1, -1] == 0 and not found.mask[-1].any() and found.mask[0, -1]


def test_an_unmasked_long_head_and_one_with_a_short_side():
    A = matrix(5, 900)
    ax = plot.heatmap(A)
    assert ax.images[0].get_array().shape == (5, 256) and ax.get_xlabel() == "key; 5 × 256 cells"
    close(ax.images[0].get_array(), A.coarsen((5, 256), "max"))
    assert ax.get_aspect() == "auto"


def test_rows_of_a_part_stand_at_their_positions():
    A = matrix(40, 40, mask=causal())
    tokens = [f"t{i}" for i in range(40)]
    ax = plot.heatmap(A.lazy[::10], tokens)
    close(ax.images[0].get_array().filled(0.0), A.to_dense()[::10])
    draw(ax)
    assert texts(ax.yaxis) == ["t0", "t10", "t20", "t30"] and texts(ax.xaxis) == tokens
    assert ax.get_ylabel() == "query; 4 of 40 rows"
    ax = plot.heatmap(A.lazy[::10])
    draw(ax)
    assert {"0", "10", "20", "30"} <= set(texts(ax.yaxis)) <= {"0", "10", "20", "30", ""}


# -- Labels -----------------------------------------------------------------------------------------------

MATH = ["$x$", r"\frac{1}{2}", "$5", r"\$y\$", "a_b^c", "\n", "%", "$$", "{", "#"]


@pytest.mark.parametrize(("tokens", "kind"), [(HOSTILE, "png"), (MATH, "svg"), (MATH, "pdf")])
def test_tokens_are_shown_as_they_are(tokens, kind):
    n = len(tokens)
    with plt.rc_context({"svg.fonttype": "none"}):  # text stays text, to be read back
        for ax in (plot.heatmap(matrix(n, n), tokens), plot.row(matrix(n, n), 3, tokens)):
            page = saved(ax, kind)
            shown = [format_label(token) for token in tokens]
            assert texts(ax.yaxis) == shown
            for label in [*ax.yaxis.get_ticklabels(), *([ax.title] if ax.get_title() else [])]:
                assert not label.get_parse_math() and not label.get_usetex()
            assert all("\n" not in label for label in shown)
            if kind == "svg":
                assert b">$x$<" in page and rb">\frac{1}{2}<" in page and rb">\$y\$<" in page
    assert [format_label(token) for token in MATH] == [escape_unprintable(token) for token in MATH]


def test_tokens_stay_literal_under_tex_settings():
    with plt.rc_context({"text.usetex": True}):
        ax = plot.heatmap(matrix(3, 3), ["$x", "y_z", "%"], ax=Figure().subplots(), numbers=False)
        assert [label.get_usetex() for label in ax.xaxis.get_ticklabels()] == [False] * 3


def test_labels_are_written_where_they_fit():
    A, tokens = matrix(40, 40), [f"token{i}" for i in range(40)]
    ax = plot.heatmap(A, tokens)
    draw(ax)
    assert texts(ax.xaxis) == texts(ax.yaxis) == tokens
    boxes = [label.get_window_extent() for label in ax.yaxis.get_ticklabels()]
    assert all(a.y0 >= b.y1 - 1 for a, b in pairwise(boxes)), "none overlaps the next"
    small = Figure(figsize=(2, 2)).subplots()
    plot.heatmap(A, tokens, ax=small)
    draw(small)
    assert "token0" not in texts(small.xaxis) and "0" in texts(small.xaxis)
    assert len(format_label("x" * 10**6)) == 24


def test_another_sequence_of_queries_has_its_own_names():
    ax = plot.heatmap(matrix(2, 3), ["a", "b", "c"], query_tokens=["x", "y"])
    assert texts(ax.xaxis) == ["a", "b", "c"] and texts(ax.yaxis) == ["x", "y"]
    ax = plot.heatmap(matrix(2, 3), ["a", "b", "c"])
    draw(ax)
    assert texts(ax.xaxis) == ["a", "b", "c"] and {"0", "1"} <= set(texts(ax.yaxis))


# -- Axes and figures -----------------------------------------------------------------------------


def plot_functions() -> list[Any]:
    A = matrix(6, 6)
    table = [{"layer": 0, "head": 0, "entropy": 0.5}, {"layer": 1, "head": 0, "entropy": 0.25}]
    effects = [{"layer": 0, "head": 0, "effect": 0.5}, {"layer": 1, "head": 0, "effect": -0.25}]
    every = [
        partial(plot.heatmap, A),
        partial(plot.row, A, 0),
        partial(plot.heads, table),
        partial(plot.effects, effects),
        partial(plot.overlay, np.zeros((8, 8, 3), np.uint8), [0.4, 0.1, 0.3, 0.2], PatchGrid(2, 2)),
        plot.cost,
    ]
    assert len(every) == len(plot.__all__)
    return every


def test_without_axes_each_makes_a_figure_of_its_own():
    plt.figure()
    before = plt.get_fignums()
    made = [function() for function in plot_functions()]
    assert len({id(ax.figure) for ax in made}) == len(made) == len(plt.get_fignums()) - len(before)
    assert all(ax.figure.get_layout_engine() is not None for ax in made)


def test_given_axes_are_drawn_on_and_no_figure_is_made():
    for function in plot_functions():
        for parts in (Figure(layout="constrained"), Figure().subfigures(1, 2)[0]):
            ax = parts.subplots()
            assert function(ax=ax) is ax
            draw(ax)
    assert plt.get_fignums() == []


def test_arguments_of_imshow_are_passed_on():
    ax = plot.heatmap(matrix(6, 6), colorbar=False, vmax=0.5, cmap="magma", origin="lower")
    assert len(ax.figure.axes) == 1 and ax.images[0].get_clim() == (0, 0.5)
    assert ax.images[0].get_cmap().name == "magma"
    assert type(plot.heatmap(matrix(6, 6), norm="log").images[0].norm).__name__ == "LogNorm"


@pytest.mark.parametrize(
    ("wrong", "kind", "received", "hint"),
    [
        (lambda: plot.heatmap(matrix(3, 3, 2, 2)), ArgumentError, "heads 2", "plot.heatmap(A[0, 0])"),
        (lambda: plot.row(matrix(3, 3, 2), 0), ArgumentError, "heads 2", "plot.row(A[0])"),
        (lambda: plot.heatmap(np.eye(3)), ArgumentTypeError, "(3, 3)", "regard.attention(query, key)"),
        (lambda: plot.heatmap(matrix(0, 3)), ArgumentError, "(0, 3)", "nothing to draw"),
        (lambda: plot.heatmap(matrix(3, 3), ["a"]), ArgumentError, "1 tokens", "query_tokens"),
        (lambda: plot.heatmap(matrix(3, 3), reduce="median"), ArgumentError, "reduce='median'", "reduction"),
        (lambda: plot.row(matrix(3, 3), 0, "abc"), ArgumentTypeError, "'abc'", "list(text)"),
        (lambda: plot.row(matrix(3, 3), [0, 1]), ArgumentTypeError, "a list", "plot.row"),
        (lambda: plot.heatmap(matrix(3, 3), ax=Figure()), ArgumentTypeError, "a Figure", "plt.subplots()"),
        (lambda: plot.cost(ax=plt), ArgumentTypeError, "a module", "plt.subplots()"),
        (lambda: plot.heads([]), ArgumentTypeError, "empty table", "regard.watch(model)"),
        (
            lambda: plot.heads([{"layer": 0, "head": 0, "entropy": 0.5, "first": 0.25}], "induction"),
            ArgumentError,
            "'induction'",
            "plot.heads(recording, measure, tokens)",
        ),
        (lambda: plot.cost([1, 2]), ArgumentTypeError, "a list", "regard.learn.cost_table("),
        (lambda: plot.cost(quantity="time"), ArgumentError, "'time'", "regard.learn.profile("),
    ],
)
def test_errors_say_what_to_do_and_leave_no_figure(wrong, kind, received, hint):
    with pytest.raises(kind) as caught:
        wrong()
    error = caught.value
    assert error.operation.startswith("plot.") and error.expected
    assert received in error.received and hint in error.hint
    assert plt.get_fignums() == []


def test_an_index_past_the_end_is_refused():
    with pytest.raises(regard.IndexOutOfRangeError, match=r"^plot\.row: "):
        plot.row(matrix(3, 3), 3)


# -- Rows -------------------------------------------------------------------------------------------------


def bars(ax: Any) -> dict[str, float]:
    """The length of each bar by its name."""
    draw(ax)
    return dict(zip(texts(ax.yaxis), [bar.get_width() for bar in ax.patches], strict=True))


def test_a_row_is_a_bar_for_each_key():
    A = regard.attention(cat.Q, cat.K, mask=causal(), sink=0.5)
    ax = plot.row(A, 2, cat.tokens)
    found = bars(ax)
    close(list(found.values()), [*A[2], 1 - A[2].sum()])
    assert list(found) == [*cat.tokens, "(sink)"] and ax.get_title() == f'query 2 "{cat.tokens[2]}"'
    values = [text.get_text() for text in ax.texts]
    assert values[3:5] == ["masked", "masked"] and float(values[0]) == pytest.approx(A[2, 0], abs=1e-4)
    top, bottom = ax.get_ylim()
    assert top > bottom, "the first key is at the top"
    close(list(bars(plot.row(A, -1, cat.tokens)).values())[:5], A[-1])


def test_a_long_row_is_its_top_keys_and_the_rest():
    A = matrix(3, 500, 1)
    ax = plot.row(A, 1, [f"t{j}" for j in range(500)], max_bars=7)
    *top, (rest, weight) = bars(ax).items()
    weights = A[0, 1]
    keys = np.sort(np.argsort(-weights)[:7])
    assert [name for name, _ in top] == [f"t{j}  {j}" for j in keys]
    close([length for _, length in top], weights[keys])
    assert rest == "(493 other keys)" and weight == pytest.approx(1 - weights[keys].sum())
    assert next(iter(bars(plot.row(A, 1, max_bars=7)))) == f"key {keys[0]}"


def test_a_row_of_nan_is_drawn():
    query = np.full((1, 2), np.nan)
    ax = plot.row(regard.attention(query, np.eye(2)), 0)
    assert np.isnan([bar.get_width() for bar in ax.patches]).all()
    draw(ax)


def test_a_row_of_a_million_keys_reads_no_other(monkeypatch):
    read: list[int] = []
    compute = NumpyEngine.compute_scores

    def scores(self: Any, query: Any, key: Any, scale: float) -> Any:
        tile = compute(self, query, key, scale)
        read.append(tile.size)
        return tile

    monkeypatch.setattr(NumpyEngine, "compute_scores", scores)
    n = 1_000_000
    key = np.linspace(0, 1, 2 * n, dtype=np.float32).reshape(n, 2)
    found = bars(plot.row(regard.attention(key, key, mask=causal()), n - 1))
    assert sum(found.values()) == pytest.approx(1, abs=1e-4) and list(found)[-2] == f"key {n - 1}"
    assert sum(read) <= 3 * n


# -- Heads ------------------------------------------------------------------------------------------------


def test_heads_of_a_watched_model():
    torch = pytest.importorskip("torch")
    layer = torch.nn.TransformerEncoderLayer(24, 3, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with regard.watch(model) as recording:
        model(torch.randn(1, 9, 24))
    table = recording.heads()
    ax = plot.heads(recording, "distance")
    found = ax.images[0].get_array()
    assert found.shape == (2, 3) and not found.mask.any()
    for row in table:
        assert found[row["layer"], row["head"]] == row["distance"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("head", "layer")
    assert ax.figure.axes[1].get_ylabel() == "mean distance (tokens)"
    assert texts(ax.yaxis) == ["0", "1"] and texts(ax.xaxis) == ["0", "1", "2"]
    equal(plot.heads(table, "distance").images[0].get_array(), found)
    tokens = list("abcdefghi")
    pairs = recording.find("c", "f", tokens)
    weights = plot.heads(pairs, "weight").images[0].get_array()
    assert weights[1, 2] == next(e["weight"] for e in pairs if (e["layer"], e["head"]) == (1, 2))
    assert plot.heads(recording, "induction", list("abcabcabc")).images[0].get_array().shape == (2, 3)


def test_layers_of_several_calls_and_fewer_heads():
    nan = float("nan")
    table = [
        {"layer": layer, "call": call, "head": head, "first": value}
        for layer, call, head, value in [(2, 0, 0, 0.5), (2, 1, 0, 0.25), (0, 0, 0, nan), (0, 0, 1, 1.0)]
    ]
    ax = plot.heads(table, "first")
    assert texts(ax.yaxis) == ["0, call 0", "2, call 0", "2, call 1"]
    equal(ax.images[0].get_array().filled(-1), [[-1, 1], [0.5, -1], [0.25, -1]])
    assert ax.get_xlabel() == "head; hatched: no number" and ax.patch.get_hatch()
    draw(ax)


# -- Cost -------------------------------------------------------------------------------------------------


def lines(ax: Any) -> dict[str, Any]:
    return {line.get_label(): np.asarray(line.get_xydata()) for line in ax.lines}


def test_cost_draws_the_counted_formulas():
    table = learn.cost_table([64, 128, 256], d_k=8, d_v=4)
    found = lines(plot.cost(table))
    close(found["weights, stored"], [[n, 4 * n * n] for n in (64, 128, 256)])
    close(found["query, key, value and output"], [[n, 4 * n * (8 + 8 + 4 + 4)] for n in (64, 128, 256)])
    ax = plot.cost(table, "work")
    found = lines(ax)
    assert len(found) == 4
    counts = [n * n for n in (64, 128, 256)]
    close([points[:, 1] for points in found.values()], np.outer([8, 1, 1, 4], counts))
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert ax.get_xlabel() == "tokens; one head, d_k 8, d_v 4"
    draw(ax)


def test_cost_draws_measurements_and_their_exponent():
    profile = learn.profile([32, 64, 128], repeats=1)
    for quantity, field in (("time", "seconds"), ("memory", "peak_bytes")):
        ax = plot.cost(profile, quantity)
        exponent = f"n^{profile.exponents[field]:.2f}"
        (points,) = (points for name, points in lines(ax).items() if exponent in name)
        close(points, [[row.cost.q_len, getattr(row, field)] for row in profile.rows])
        fit = np.log(ax.lines[-1].get_xydata())
        close(np.diff(fit[:, 1]) / np.diff(fit[:, 0]), profile.exponents[field])
        draw(ax)


# -- Without matplotlib ------------------------------------------------------------------------------


def run(code: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_without_matplotlib_one_line_says_what_to_install():
    run_result = run("sys.modules['matplotlib'] = None\nimport regard\nregard.plot")
    assert run_result.returncode == 1
    last = run_result.stderr.strip().splitlines()[-1]
    assert last == "ImportError: regard.plot: matplotlib is not installed. pip install 'regard[plot]'"


def test_pyplot_is_imported_only_for_a_new_figure():
    code = """
import numpy as np, regard
assert "matplotlib" not in sys.modules
from matplotlib.figure import Figure
regard.plot.heatmap(regard.attention(np.eye(3), np.eye(3)), ax=Figure().subplots())
assert "matplotlib.pyplot" not in sys.modules
regard.plot.cost()
assert "matplotlib.pyplot" in sys.modules
"""
    assert run(code).stderr == ""
