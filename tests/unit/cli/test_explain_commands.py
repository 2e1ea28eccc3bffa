"""`regard explain` and `regard explore`: they print and write what the library returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import regard
from regard.learn import cat
from tests.helpers.command_line import ROOT


def test_explain_prints_the_example(run):
    A = regard.attention(cat.Q, cat.K)
    assert run("explain") == (f"{A.explain(0, cat.V, cat.tokens)}\n", "")
    A = regard.attention(cat.Q, cat.K, mask=regard.causal())
    assert run("explain", "--query", "sat", "--causal")[0] == f"{A.explain(2, cat.V, cat.tokens)}\n"


def test_explain_prints_json(run):
    out, err = run("explain", "--causal", "-q", "1", "--json")
    steps = regard.attention(cat.Q, cat.K, mask=regard.causal()).explain(1, cat.V, cat.tokens)
    record = json.loads(out)
    assert err == "" and record["title"] == steps.title and record["tokens"] == list(cat.tokens)
    for name in ("query", "raw_scores", "weights", "contributions", "output"):
        np.testing.assert_array_equal(record[name], getattr(steps, name))
    assert [float(score) for score in record["scores"]] == steps.scores.tolist()
    assert record["scores"][-1] == "-Infinity" and record["masks"] == ["causal()"]


def test_explain_reads_a_file(run, tmp_path):
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 2, 3, 5, 4))
    mask = np.tril(np.ones((5, 5), bool))
    np.savez(
        tmp_path / "mine.npz", query=query, key=key, value=value, mask=mask, tokens=list("abcde"), scale=0.3
    )
    expected = regard.attention(query[1, 2], key[1, 2], mask=regard.masks.dense(mask), scale=0.3)
    out, _ = run("explain", tmp_path / "mine.npz", "--head", "1,2", "-q", "d")
    assert out == f"{expected.explain(3, value[1, 2], 'abcde')}\n"
    given = {"query": query[0, 0].tolist(), "key": key[0, 0].tolist(), "mask": "causal", "scale": 0.3}
    (tmp_path / "mine.json").write_text(json.dumps(given))
    expected = regard.attention(query[0, 0], key[0, 0], mask=regard.causal(), scale=0.3)
    assert run("explain", tmp_path / "mine.json", "-q", "-1")[0] == f"{expected.explain(4)}\n"


def test_file_contents_are_escaped(run, tmp_path):
    tokens = ["[bold]x[/bold]", "\x1b[31mred", "line\nend", ":smile:"]
    (tmp_path / "mine.json").write_text(
        json.dumps({"query": np.eye(4).tolist(), "key": np.eye(4).tolist(), "tokens": tokens})
    )
    out, _ = run("explain", tmp_path / "mine.json", "-q", "1")
    for shown in ("[bold]x[/bold]", r"\x1b[31mred", r"line\nend", ":smile:"):
        assert f"   {shown} " in out
    assert "\x1b" not in out
    _, err = run("explain", "[bold]no\x1b[31m\n.json", code=2)
    assert "[bold]no" in err and "\x1b" not in err and err.count("\n") == 1


class CallsOnLoad:
    """An object that calls a function when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a pickled file was read",))


def test_a_pickled_file_is_not_loaded(run, tmp_path):
    np.savez(
        tmp_path / "mine.npz", query=np.array([CallsOnLoad()], dtype=object), key=np.eye(2), allow_pickle=True
    )
    _, err = run("explain", tmp_path / "mine.npz", code=2)
    assert "not an NPZ file of plain arrays" in err


# `explore.training` shows a run of the caller; there is no example to write.
@pytest.mark.parametrize("name", sorted(set(regard.explore.__all__) - {"Page", "training"}))
def test_explore_writes_each_page(name, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    page = getattr(regard.explore, name)()
    out, _ = run("explore", name)
    written = tmp_path / f"{name}.html"
    assert written.read_text(encoding="utf-8") == page.html
    assert out.startswith(f"{page.title}: {name}.html, ") and opened == []
    record = json.loads(run("explore", name, "--json", "--open", "-o", tmp_path / "own.html")[0])
    assert record == {
        "explorer": name,
        "title": page.title,
        "page": str(tmp_path / "own.html"),
        "bytes": written.stat().st_size,
    }
    assert opened == [(tmp_path / "own.html").as_uri()]


@pytest.mark.parametrize("name", ["pipeline", "weights", "geometry", "cost"])
def test_a_causal_mask_is_applied_to_the_example_of_the_page(name, run, tmp_path):
    page = tmp_path / "page.html"
    run("explore", name, "--causal", "-o", page)
    # The query of the geometry page comes after its three keys.
    mask = regard.causal(align="lower_right") if name == "geometry" else regard.causal()
    assert page.read_text(encoding="utf-8") == getattr(regard.explore, name)(mask=mask).html


@pytest.mark.skipif(os.name == "nt", reason="Windows refuses this name")
def test_characters_outside_the_encoding_are_replaced(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "regard", "explore", "cost", "-o", tmp_path / "\u00e9\x1b[1m.html"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and r"?\x1b[1m.html" in done.stdout


def test_explore_reads_a_file(run, tmp_path):
    query, key = np.random.default_rng(1).normal(size=(2, 3, 4))
    np.savez(tmp_path / "mine.npz", query=query, key=key, tokens=["x", "y", "z"])
    run("explore", "weights", tmp_path / "mine.npz", "--causal", "-o", tmp_path / "page.html")
    expected = regard.explore.weights(query, key, tokens=["x", "y", "z"], mask=regard.causal())
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == expected.html
