"""The history of a run takes a bounded number of bytes, covers the whole run, and survives being saved."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch

import regard
from regard.lens import Table
from regard.monitor.history import RECENT_STEPS, History, Snapshot, find_worst, summarise

KEYS = ("module", "layer", "head")
COLUMNS = ("max_score", "entropy", "nonfinite", "rows")


def draw_snapshot(step: int, layers: int = 3, heads: int = 5, *, skip: int | None = None) -> Snapshot:
    rng = np.random.default_rng(step)
    places = [
        (f"layers.{layer}", layer, head)
        for layer in range(layers)
        if layer != skip
        for head in range(heads - layer)
    ]
    values = rng.normal(size=(len(places), 4))
    values[:, 2:] = rng.integers(0, 3, size=(len(places), 2))
    values[rng.random(len(places)) < 0.2, :2] = math.nan
    return Snapshot(step, KEYS, places, COLUMNS, values)


def test_rows_are_those_that_were_added() -> None:
    history, table = History(10**9), Table()
    for step in range(50):
        snapshot = draw_snapshot(7 * step, skip=step % 4)
        history.add(snapshot)
        table.extend(snapshot.rows())
    assert str(list(history)) == str(list(table)) and len(history) == len(table)  # NaN is not equal to NaN
    assert repr(history) == repr(table)
    assert str(history[17]) == str(table[17]) and str(history[-3]) == str(table[-3])
    assert str(history[-5:]) == str(table[-5:]) and str(history[3:40:9]) == str(table[3:40:9])
    assert str(history.filter(step=21, layer=2)) == str(table.filter(step=21, layer=2)) != str(Table())
    assert str(history.filter(lambda row: row["rows"] == 2)) == str(table.filter(rows=2))
    assert len(history.filter(step=22)) == 0
    assert history.columns == ["step", *KEYS, *COLUMNS]
    assert np.array_equal(history.to_pandas()["head"], table.column("head"))
    with pytest.raises(IndexError, match="row 9999 of a history"):
        history[9999]
    with pytest.raises(regard.ArgumentError, match="colour"):
        history.filter(colour=3)
    for place, numbers in zip(history.places, history.array("entropy").T, strict=True):
        rows = {row["step"]: row["entropy"] for row in table if (row["module"], row["head"]) == place[::2]}
        np.testing.assert_array_equal(numbers, [rows.get(step, math.nan) for step in history.steps])


def test_alarms_read_the_first_and_the_recent_numbers_of_each_head() -> None:
    history, rows = History(0), Table()
    for step in range(100):
        snapshot = draw_snapshot(step, skip=step % 4)
        history.add(snapshot)
        rows.extend(snapshot.rows())
        first, recent = history.first("entropy"), history.recent("entropy", 4)
        for i, (_, layer, head) in enumerate(snapshot.places):
            own = rows.filter(layer=layer, head=head)
            known = [value for value in own.column("entropy") if not math.isnan(value)]
            assert np.array_equal(first[i], known[0] if known else math.nan, equal_nan=True)
            last = {row["step"]: row["entropy"] for row in own}
            steps = range(max(step - 3, 0), step + 1)
            np.testing.assert_array_equal(recent[:, i], [last.get(step, math.nan) for step in steps])


def test_old_steps_are_thinned_evenly_when_the_bytes_run_out() -> None:
    step_bytes = draw_snapshot(0).values.nbytes
    history = History(40 * step_bytes)
    for number in range(3000):
        history.add(draw_snapshot(10 * number))
        old = history.steps[:-RECENT_STEPS]
        assert len(old) <= 40 and (not old or old[0] == 0)
    assert history.steps[-RECENT_STEPS:] == list(range(10 * 3000 - 10 * RECENT_STEPS, 30_000, 10))
    assert np.all(np.diff(old) == 10 * 128) and len(old) > 20
    assert history.num_added == 3000
    assert str(list(history.filter(step=1280))) == str(list(draw_snapshot(1280).rows()))


def test_a_saved_history_continues_as_if_it_was_not_saved() -> None:
    whole, parts = History(3000), History(3000)
    for step in range(200):
        for history in (whole, parts):
            history.add(draw_snapshot(step, skip=step % 4))
        if step % 17 == 0:
            file = io.BytesIO()
            torch.save(parts.state_dict(), file)
            file.seek(0)
            parts = History(3000)
            parts.load_state_dict(torch.load(file))  # weights_only, the default of torch
    assert str(list(parts)) == str(list(whole)) and parts.steps == whole.steps
    np.testing.assert_array_equal(parts.first("entropy"), whole.first("entropy"))


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
@pytest.mark.parametrize("seed", range(5))
def test_summaries_equal_those_of_each_layer_by_itself(seed: int) -> None:
    before, heads = History(0), draw_snapshot(seed)
    before.add(draw_snapshot(seed + 100))
    summary = summarise(heads, ("module", "layer"), before)
    assert summary.places == [(f"layers.{layer}", layer) for layer in range(3)]
    for i, (module, _) in enumerate(summary.places):
        own = [j for j, place in enumerate(heads.places) if place[0] == module]
        for column in ("max_score", "entropy"):
            values = heads[column][own]
            for name, function in {"min": np.nanmin, "median": np.nanmedian, "max": np.nanmax}.items():
                np.testing.assert_allclose(summary[f"{column}.{name}"][i], function(values), rtol=1e-14)
        assert summary["rows"][i] == heads["rows"][own].sum() and summary["heads"][i] == len(own)
        change = np.abs(heads["max_score"] - before.last["max_score"])[own]
        for name, values in (
            ("highest_head", heads["max_score"][own]),
            ("sharpest_head", -heads["entropy"][own]),
            ("fastest_head", change),
        ):
            expected = -1 if np.isnan(values).all() else heads.places[own[np.nanargmax(values)]][-1]
            assert summary[name][i] == expected
        np.testing.assert_array_equal(summary["fastest_change"][i], np.nanmax(change))
    (all_heads,) = summarise(heads, ()).rows()
    assert all_heads["entropy.max"] == np.nanmax(heads["entropy"])
    worst = [heads.places[i] for i in find_worst(heads, before, 1)]
    assert heads.places[int(np.nanargmax(heads["max_score"]))] in worst
    assert heads.places[int(heads["nonfinite"].argmax())] == worst[0]
    assert len(worst) <= 4
