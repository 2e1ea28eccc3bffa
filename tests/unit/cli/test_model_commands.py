"""`regard doctor` and `regard heads`: they print what the library returns."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys

import pytest

import regard
from regard.cli.model_commands import COLUMNS
from tests.helpers.command_line import INDUCTION, ROOT, run_process

LINE = "abcde abcde abcde"


@pytest.fixture(scope="module")
def induction():
    """The recording of the trained example model on the line."""
    torch = pytest.importorskip("torch")
    from examples.induction import load

    model, ids = load(), torch.tensor([list(LINE.encode())])
    with regard.watch(model) as recording:
        model(ids)
    return recording, ids


def equals(rows, table):
    """Whether rows of JSON, in which NaN is null, equal a table."""
    return rows == [{name: None if value != value else value for name, value in row.items()} for row in table]


def test_heads_prints_json(run, induction):
    recording, ids = induction
    out, err = run("heads", INDUCTION, "--text", LINE, "--json")
    record = json.loads(out)
    assert equals(record["heads"], recording.heads(ids)) and err == ""
    assert (record["tokens"], record["layers"], record["model"]["class"]) == (len(LINE), 2, "GPT")
    assert list(COLUMNS) == [*recording.heads(ids).columns[1:], "contribution"]
    out, _ = run("heads", INDUCTION, "-t", LINE, "--json", "--by", "induction", "--top", "3")
    assert equals(json.loads(out)["heads"], recording.heads(ids).sort("induction")[:3])
    out, _ = run(
        "heads", INDUCTION, "-t", LINE, "--json", "--by", "entropy", "--smallest", "--layers", "layers.1*"
    )
    rows = json.loads(out)["heads"]
    assert {row["module"] for row in rows} == {"layers.1.attention"}
    assert [row["entropy"] for row in rows] == sorted(row["entropy"] for row in rows)


def test_heads_by_contribution(run, induction):
    torch = pytest.importorskip("torch")
    from examples.induction import load

    model, ids = load(), induction[1]
    with torch.no_grad(), regard.watch(model, values=True) as recording:
        model(ids)
    table = recording.heads(ids).sort("contribution")
    out, _ = run("heads", INDUCTION, "-t", LINE, "--json", "--by", "contribution", "--top", "3")
    rows = json.loads(out)["heads"]
    assert [(row["layer"], row["head"]) for row in rows] == [(row["layer"], row["head"]) for row in table[:3]]
    assert [row["contribution"] for row in rows] == pytest.approx(table.column("contribution")[:3])


def test_heads_prints_csv_and_text(run, induction, tmp_path):
    recording, ids = induction
    (tmp_path / "line.txt").write_text(LINE)
    out, err = run("heads", INDUCTION, "--file", tmp_path / "line.txt", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert err == "" and [row["module"] for row in rows] == recording.heads(ids).column("module")
    assert [float(row["entropy"]) for row in rows] == recording.heads(ids).column("entropy")
    out, err = run("heads", INDUCTION, "-t", LINE, "--by", "induction", "-n", "2")
    head, first, _, rest = out.splitlines()
    assert (
        head.split()[:3] == ["layer", "head", "entropy"]
        and rest == "… and 6 more heads: use --top, --by or --csv"
    )
    best = recording.heads(ids).sort("induction")
    assert first.split()[:2] == [str(best[0]["layer"]), str(best[0]["head"])]
    assert f"{LINE.count('') - 1} tokens, 2 layers, 8 heads" in err


FAULTY = """
import torch
from torch import nn
from torch.nn import functional as F

class Faulty(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.attention = Attention()

    def forward(self, ids):
        return self.attention(self.embedding(ids))

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

def model():
    torch.manual_seed(0)
    return Faulty()
"""


def test_doctor_exits_with_1_on_an_error(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    done = run_process("doctor", "faulty:model", "--file", "-", "--json", cwd=tmp_path, input="abcabc")
    record = json.loads(done.stdout)
    assert done.returncode == 1 and done.stderr == ""
    assert record["counts"]["error"] == 1
    assert {"name": "future token", "reason": "outputs cannot be compared: dropout"} in record["checks"]
    assert [finding["kind"] for finding in record["findings"] if finding["severity"] == "error"] == [
        "dropout"
    ]


def test_doctor_prints_the_findings(run, tmp_path, monkeypatch):
    out, _ = run("doctor", INDUCTION, "-t", LINE)
    summary, blank, *checks = out.splitlines()
    assert re.fullmatch(
        r"No problems found in 2 layers, 8 heads with \d+ forward passes; causal \(inferred\)\.", summary
    )
    assert blank == "" and all(line.startswith(("run      ", "not run  ")) for line in checks)
    assert "run      future token" in checks
    assert "not run  padding on the left: the model does not accept attention_mask" in checks
    out, _ = run("doctor", INDUCTION, "-t", LINE, "--bidirectional")
    assert (
        "; bidirectional (as stated).\n" in out and "not run  future token: the model is not causal\n" in out
    )
    _, err = run("doctor", INDUCTION, "-t", LINE, "--bidirectional", "--causal", code=2)
    assert "expected at most one of them" in err
    (tmp_path / "faulty2.py").write_text(FAULTY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    out, _ = run("doctor", "faulty2:model", "-t", "abcabc", code=1)
    assert "error: dropout. Dropout is active in eval mode.\n  where     layer 0, attention" in out
    assert "  hint      Pass dropout_p=" in out


@pytest.mark.parametrize("command", ["doctor", "heads"])
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_layers_without_attention_are_an_error(run, command, options):
    out, err = run(command, INDUCTION, "-t", LINE, "--layers", "norm*", *options, code=2)
    assert out == "" and "--layers norm*, which match no module that computes attention" in err


def test_a_truncated_text_is_reported(run, tmp_path):
    pytest.importorskip("transformers")
    from tests.helpers.model_folders import save_llama

    path = save_llama(tmp_path / "[bold]llama[/bold]")
    run("--version")  # discards the output of saving
    out, err = run("heads", path, "-t", "x" * 100, "--json")
    record = json.loads(out)
    assert (record["tokens"], record["text_tokens"]) == (64, 100)
    assert (
        err == "warning: The text has 100 tokens; truncated to the first 64 (the model's maximum length).\n"
    )
    assert record["model"]["name"] == str(path) and record["model"]["stored_dtype"] == "float32"
    _, err = run("heads", path, "-t", "x" * 100, "--max-tokens", "10")
    assert "truncated to the first 10 (--max-tokens)." in err
    assert f"{path}: LlamaForCausalLM, " in err  # not parsed as markup


@pytest.mark.nightly
def test_a_terminal_shows_a_progress_bar_and_twenty_rows(tmp_path):
    pytest.importorskip("torch")
    pty = pytest.importorskip("pty")
    (tmp_path / "wide.py").write_text(FAULTY.replace("(3, 2, 8)", "(3, 8, 2)") + "\n" + WIDE)
    chunks = []
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "100"}

    def read(descriptor):
        data = os.read(descriptor, 1024)
        chunks.append(data)
        return data

    child, descriptor = pty.fork()
    if child == 0:  # pragma: no cover - another process
        os.chdir(tmp_path)
        os.execve(sys.executable, [sys.executable, "-m", "regard", "heads", "wide:wide", "-t", "abcabc"], env)
    while True:
        try:
            if not read(descriptor):
                break
        except OSError:  # on Linux, the other end is closed
            break
    _, status = os.waitpid(child, 0)
    text = b"".join(chunks).decode()
    assert os.waitstatus_to_exitcode(status) == 0, text
    assert "Loading wide:wide" in text and "Running 6 tokens" in text and "\x1b[" in text
    assert "… and 4 more heads: use --top, --by or --csv" in text


WIDE = """
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.layers = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x).transpose(1, 2).flatten(-2)
        return x

def wide():
    return Wide()
"""
