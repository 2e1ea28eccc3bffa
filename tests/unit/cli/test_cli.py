"""The command line: its output for people and for scripts, its exit codes and its errors."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import regard
from regard.cli import main
from regard.cli.model_commands import COLUMNS
from regard.learn import cat

ROOT = Path(__file__).parents[3]
INDUCTION = "examples.induction:load"


@pytest.fixture
def run(capsys):
    """Runs a command line in this process, checks its exit code, and returns standard output and standard error."""

    def run(*arguments, code=0):
        assert main([str(argument) for argument in arguments]) == code
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def run_process(*arguments, **options):
    """Runs a command line in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "regard", *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, **options)


# -- Commands -----------------------------------------------------------------------------------------------


def test_help_is_short_and_lists_the_exit_codes(run):
    out, _ = run("--help")
    assert run() == (out, "")
    assert len(out.splitlines()) <= 25 and max(map(len, out.splitlines())) <= 100
    assert "2 usage error, 3 an extra is missing, 4 other failure." in " ".join(out.split())
    for command in ("explain", "explore", "look", "doctor", "heads", "survey", "report", "profile"):
        own, _ = run(command, "-h")
        assert f"Example: regard {command}" in own and "--json" in own
        assert max(map(len, own.splitlines())) <= 100


@pytest.mark.parametrize("command", ["explore", "look", "survey", "report"])
def test_commands_that_write_have_an_output_option(command, run):
    assert re.search(r"-o, --output +(PAGE|DIR)", run(command, "-h")[0])


def test_every_command_in_the_docs_exists(run):
    page = (ROOT / "docs" / "command-line.md").read_text()
    lines = [line.split("#")[0].split("|")[-1 if "| regard" in line else 0] for line in page.splitlines()]
    commands = [shlex.split(line) for line in lines if line.lstrip().startswith("regard ")]
    assert len(commands) > 10
    for _, command, *rest in commands:
        text, _ = run(command, "--help")
        for option in (word for word in rest if word.startswith("-") and word != "-"):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), f"{command} {option}"


def test_version(run):
    assert run("--version") == (f"regard {regard.__version__}\n", "")


def test_the_package_installs_the_command():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"regard": "regard.cli:main"}


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_is_named_in_one_line(missing, run, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else find(name))
    assert run("--help", code=3) == ("", f"regard: {missing} is not installed. pip install 'regard[cli]'\n")


# -- explain ------------------------------------------------------------------------------------------------


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
    expected = regard.attention(query[1, 2], key[1, 2], mask=regard.dense(mask), scale=0.3)
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
    _, err = run("explain", "[bold]no[/bold]\x1b[31m\n.json", code=2)
    assert "[bold]no[/bold]" in err and "\x1b" not in err and err.count("\n") == 1


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


# -- explore ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in regard.explore.__all__ if name != "Page"])
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


def test_characters_outside_the_encoding_are_replaced(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "regard", "explore", "cost", "-o", tmp_path / "\u00e9\x1b[1m.html"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and r"?\x1b[1m.html" in done.stdout


def test_explore_reads_a_file(run, tmp_path):
    query, key = np.random.default_rng(1).normal(size=(2, 3, 4))
    np.savez(tmp_path / "mine.npz", query=query, key=key, tokens=["x", "y", "z"])
    run("explore", "heatmap", tmp_path / "mine.npz", "--causal", "-o", tmp_path / "page.html")
    expected = regard.explore.heatmap(query, key, tokens=["x", "y", "z"], mask=regard.causal())
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == expected.html


# -- Errors -------------------------------------------------------------------------------------------------

TEXT = ("--text", "abc")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["heds"], "regard: No such command 'heds'. Did you mean 'heads'? Try 'regard --help'."),
        (["--nonsense"], "regard: No such option: --nonsense"),
        (["look"], "regard look: Missing argument 'MODEL'"),
        (["explore", "nothing"], "'NAME': 'nothing' is not one of 'pipeline', 'heatmap'"),
        (["explain", "no.json"], "regard explain: received 'no.json' (No such file or directory)"),
        (["explain", "bad.json"], "received 'bad.json' (not valid JSON: "),
        (["explain", "list.json"], "received 'list.json' with a list; expected query and key"),
        (["explain", "names.json"], "with query, keys; expected query and key"),
        (["explain", "ragged.json"], "query in 'ragged.json', which is not an array of numbers"),
        (["explain", "mask.json"], "which is neither boolean nor the text causal"),
        (["explain", "bad.npz"], "received 'bad.npz' (not an NPZ file of plain arrays"),
        (["explain", "heads.json"], "query with shape (2, 1, 2); expected one head"),
        (["explain", "heads.json", "--head", "7"], "expected an index into the leading axes, here (2,)"),
        (["explain", "--head", "1"], "Omit --head: the arrays have one head already."),
        (["explore", "heatmap", "--head", "1"], "Omit --head: the arrays have one head already."),
        (["explain", "-q", "dog"], "a token that occurs once. Use a position (0–4) or one of: The, cat, sat, on, mat."),
        (["explain", "-q", "9"], "received index 9 for axis 0; expected from -5 to 4"),
        (["explore", "code", "bad.json", "--causal"], "received 'bad.json'"),
        (["explore", "code", "--causal"], "expected input that this page shows: no input but the built-in example"),
        (["explore", "scaling", "--causal"], "received mask for scaling"),
        (["explore", "pipeline", "-o", "no/such/place.html"], "Create the folder first: mkdir -p no/such."),
        (["explore", "pipeline", "-o", "."], "-o '.' (Is a directory); expected a file"),
        (["look", "./nowhere", *TEXT, "-o", "no/page.html"], "received -o 'no/page.html' (No such file"),
        (["heads", INDUCTION], 'received no text; expected one text. Pass --text "…", --file FILE'),
        (["heads", INDUCTION, "--text", ""], "received an empty text; expected at least one word"),
        (["heads", INDUCTION, "--file", "blank.txt"], "received 'blank.txt', which is empty"),
        (["heads", INDUCTION, *TEXT, "--file", "x"], "received --text and --file"),
        (["heads", INDUCTION, "--file", "latin.txt"], "received 'latin.txt', which is not valid UTF-8 at byte 1"),
        (["heads", INDUCTION, *TEXT, "--by", "beauty"], "received --by beauty; expected one of layer, call, head"),
        (["heads", INDUCTION, *TEXT, "--csv", "--json"], "received --csv and --json"),
        (["heads", INDUCTION, *TEXT, "--layers", "absent"], "received layers with 'absent'"),
        (["heads", INDUCTION, "--text", "é"], "received a token with the id 195; expected ids below 128"),
        (["doctor", "./nowhere", *TEXT], "regard doctor: received './nowhere', which does not exist"),
        (["look", "pickled", *TEXT], "with pytorch_model.bin and no *.safetensors"),
        (["profile", "--mask", "windw:3"], "received --mask windw:3 for 2,048 queries"),
        (["profile", "--mask", "window:0"], "expected none, causal, window:N"),
        (["profile", "--heads", "3", "--kv-heads", "2"], "received 3 heads with 2 key/value heads"),
        (["profile", "-n", "0"], "regard profile: Invalid value for '--length' / '-n'"),
    ],
)  # fmt: skip
def test_a_usage_error_is_one_line(arguments, message, run, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    files = {
        "bad.json": "{",
        "list.json": "[1]",
        "names.json": '{"query": [[1]], "keys": [[1]]}',
        "ragged.json": '{"query": [[1], [1, 2]], "key": [[1]]}',
        "mask.json": '{"query": [[1]], "key": [[1]], "mask": [["yes"]]}',
        "heads.json": '{"query": [[[1, 2]], [[3, 4]]], "key": [[[1, 2]], [[3, 4]]]}',
        "bad.npz": "PK",
        "blank.txt": " \n",
        "pickled/config.json": "{}",
        "pickled/pytorch_model.bin": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.txt").write_bytes("né".encode("latin1"))
    monkeypatch.chdir(tmp_path)
    out, err = run(*arguments, code=2)
    assert out == "" and message in err
    assert err.count("\n") == 1 and err.endswith("\n") and "Traceback" not in err
    assert err.startswith("regard")


def test_an_unexpected_error_is_one_line_without_the_traceback_option(run, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("many\nlines")

    monkeypatch.setattr("regard.cli.explain_commands.attention", fail)
    _, err = run("explain", code=4)
    assert (
        err.count("\n") == 1 and "regard explain: unexpected ZeroDivisionError in test_cli.py, line " in err
    )
    _, err = run("--traceback", "explain", code=4)
    assert "Traceback" in err and "many" in err
    monkeypatch.setenv("REGARD_TRACEBACK", "1")
    assert "Traceback" in run("explain", code=4)[1]


def test_missing_torch_is_named_in_one_line(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for command in (["heads", INDUCTION, *TEXT], ["profile"]):
        _, err = run(*command, code=3)
        assert err == f"regard {command[0]}: torch is not installed. pip install 'regard[torch]'\n"


def test_missing_transformers_is_named_in_one_line(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    _, err = run("doctor", tmp_path, *TEXT, code=3)
    assert err == "regard doctor: transformers is not installed. pip install 'regard[hf]'\n"


# -- Models -------------------------------------------------------------------------------------------------

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
    assert (record["tokens"], record["layers"], record["model"]["class"]) == (len(LINE), 2, "Model")
    assert list(COLUMNS) == [name for name in recording.heads(ids).columns if name != "module"]
    out, _ = run("heads", INDUCTION, "-t", LINE, "--json", "--by", "induction", "--top", "3")
    assert equals(json.loads(out)["heads"], recording.heads(ids).sort("induction")[:3])
    out, _ = run(
        "heads", INDUCTION, "-t", LINE, "--json", "--by", "entropy", "--smallest", "--layers", "layers.1*"
    )
    rows = json.loads(out)["heads"]
    assert {row["module"] for row in rows} == {"layers.1.attention"}
    assert [row["entropy"] for row in rows] == sorted(row["entropy"] for row in rows)


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
    assert [finding["kind"] for finding in record["findings"] if finding["severity"] == "error"] == [
        "dropout"
    ]


def test_doctor_prints_the_findings(run, tmp_path, monkeypatch, induction):
    recording, _ = induction
    out, _ = run("doctor", INDUCTION, "-t", LINE)
    assert out == f"{recording.diagnose(list(LINE))!r}\n" == "Nothing found in 2 layers, 8 heads.\n"
    (tmp_path / "faulty2.py").write_text(FAULTY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    out, _ = run("doctor", "faulty2:model", "-t", "abcabc", code=1)
    assert (
        "error: dropout. Dropout is on although the layer evaluates.\n  where     layer 0, attention" in out
    )
    assert "  hint      Pass dropout_p=" in out


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


# -- profile ------------------------------------------------------------------------------------------------


def test_profile_reports_kernels_times_and_memory(run):
    pytest.importorskip("torch")
    out, err = run(
        "profile", "-n", "64", "-n", "96", "--rounds", "2", "--heads", "2", "--mask", "window:8", "--json"
    )
    record = json.loads(out)
    assert err == "" and [size["kv_len"] for size in record["sizes"]] == [64, 96]
    for size in record["sizes"]:
        sdpa, lazy, measured, stored = size["variants"]
        assert sdpa["name"] == "F.scaled_dot_product_attention" and "attn_mask" in sdpa["kernel"]
        assert lazy["kernel"].startswith("torch: flash on CPU") and "entropy" in measured["kernel"]
        for variant in (sdpa, lazy, measured, stored):
            low, high = variant["quartile_seconds"]
            assert 0 < low <= variant["median_seconds"] <= high
    assert record["growth_exponents"].keys() == {
        variant["name"] for variant in record["sizes"][0]["variants"]
    }
    out, _ = run("profile", "-n", "64", "--rounds", "1", "--value-dim", "32")
    assert (
        "math kernel, which stores all weights. The fused kernel requires value_dim 32 to equal head_dim 64."
        in out
    )


@pytest.mark.parametrize("queries", [1, 24])
@pytest.mark.parametrize("mask", ["none", "causal", "window:5", "padding:7", "documents:4"])
def test_parse_mask_returns_the_visible_share(mask, queries):
    from regard.cli.profile_command import ProfileSize, parse_mask

    size = ProfileSize(1, 1, 1, queries, 24, 8, 8, mask, "float32")
    if mask.startswith("documents") and queries != 24:
        with pytest.raises(regard.ArgumentError):
            parse_mask(size)
        return
    parsed, share = parse_mask(size)
    assert share == (1.0 if parsed is None else pytest.approx(parsed.to_dense(queries, 24).mean()))


# -- Processes -------------------------------------------------------------------------------------------


def test_a_process_prints_the_same():
    done = run_process("explain", "--query", "sat")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{regard.attention(cat.Q, cat.K).explain(2, cat.V, cat.tokens)}\n"
    done = run_process("explain", "--query", "dog")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1


def test_help_imports_neither_torch_nor_transformers():
    code = "import sys, regard.cli; regard.cli.main(['-h']); print({'torch', 'transformers'} & sys.modules.keys())"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize("arguments", [["explain"], ["explain", "--json"]])
def test_a_closed_pipe_is_no_error(arguments):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "regard", *arguments]
    done = subprocess.run(command, env=env, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_exits_with_130(run, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.cli.explain_commands.attention", interrupt)
    assert run("explain", code=130) == ("", "")


def test_shell_completion():
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "_REGARD_COMPLETE": "complete_bash"}
    env |= {"COMP_WORDS": "regard explore he", "COMP_CWORD": "2"}
    code = "import sys; from regard.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["heatmap"]


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
