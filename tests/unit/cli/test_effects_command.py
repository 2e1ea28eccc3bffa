"""`regard effects`: it prints what `regard.interventions.effects` returns."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from examples.induction import load  # noqa: E402
from regard.interventions import effects, logit_difference  # noqa: E402
from regard.learn import TinyGPT  # noqa: E402
from tests.helpers.command_line import INDUCTION  # noqa: E402

LINE = "abcdefgh, abcdefg"


def test_heads_by_the_change_of_an_answer(run):
    out, err = run("effects", INDUCTION, "-t", LINE, "--answer", "h", "--wrong", "z", "--json")
    record = json.loads(out)
    expected = effects(load(), torch.tensor([list(LINE.encode())]), logit_difference(ord("h"), ord("z")))
    assert err == "" and record["clean"] == pytest.approx(expected.clean, abs=1e-4)
    assert [row["effect"] for row in record["heads"]] == pytest.approx(expected.column("effect"), abs=1e-4)
    out, err = run("effects", INDUCTION, "-t", LINE, "--answer", "h", "-n", "3")
    assert out.splitlines()[0].split() == ["layer", "head", "metric", "effect"] and len(out.splitlines()) == 4
    assert "log-probability of the answer" in err and "its output was set to 0" in err


def test_spans_and_pages(run, tmp_path):
    page = tmp_path / "effects.html"
    options = ("--answer", "h", "--keys", "7", "--baseline", "mean", "-o", str(page), "--json")
    record = json.loads(run("effects", INDUCTION, "-t", LINE, *options)[0])
    assert record["edit"] == "its edges to keys 7 were knocked out" and record["page"] == str(page)
    assert "Effect of each head of" in page.read_text()
    out, _ = run("effects", INDUCTION, "-t", LINE, "--answer", "h", "--keys", "2:5", "--json")
    assert json.loads(out)["edit"] == "its edges to keys slice(2, 5, None) were knocked out"


def test_a_truncated_text_is_reported(run):
    options = ("-t", LINE, "--answer", "h", "--max-tokens", "5", "--json")
    out, err = run("effects", INDUCTION, *options)
    assert "truncated to the first 5 (--max-tokens)" in err
    record = json.loads(out)
    assert (record["tokens"], record["text_tokens"]) == (5, len(LINE))


def test_a_page_to_open_needs_a_file(run):
    _, err = run("effects", INDUCTION, "-t", LINE, "--answer", "h", "--open", code=2)
    assert "received --open without -o" in err


def test_an_answer_without_tokens(run):
    _, err = run("effects", INDUCTION, "-t", LINE, "--answer", "", code=2)
    assert "a word that the model can predict" in err


@pytest.mark.parametrize("answer", [" Max", " Max was glad"])
def test_the_answer_is_the_token_that_follows_the_text(answer, run):
    text = 'There was a fox named Max. A bird asked, "What is your name?" "My name is'
    out, _ = run("effects", "stories", "-t", text, "--answer", answer, "--json")
    expected = np.log(dict(TinyGPT()(text).best(9))[" Max"])  # the tokenizer begins each text with a newline
    assert json.loads(out)["clean"] == pytest.approx(expected, abs=1e-4)
