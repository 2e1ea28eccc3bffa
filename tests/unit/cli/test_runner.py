"""The command line as a whole: help, version, errors, exit codes and processes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

import regard
from regard.learn import cat
from tests.helpers.command_line import INDUCTION, ROOT, run_process


def test_help_is_short_and_lists_the_exit_codes(run):
    out, _ = run("--help")
    commands = out.split("Commands:\n")[1].split("\n\n")[0].splitlines()
    assert len(out.splitlines()) <= 17 + len(commands) <= 30 and max(map(len, out.splitlines())) <= 100
    assert "2 usage error, 3 an optional package is missing, 4 other failure." in " ".join(out.split())
    for command in (
        "explain",
        "explore",
        "exercise",
        "look",
        "doctor",
        "heads",
        "compare",
        "survey",
        "report",
        "profile",
        "selfcheck",
    ):
        own, _ = run(command, "-h")
        assert f"Example: regard {command}" in own and "--json" in own
        assert max(map(len, own.splitlines())) <= 100


def test_without_arguments_five_things_to_do_are_printed(run):
    out, err = run()
    assert err == "" and "regard --help" in out and max(map(len, out.splitlines())) <= 80
    commands = [
        shlex.split(line[line.index("regard ") :]) for line in out.splitlines() if line.startswith("  ")
    ]
    assert [command for _, command, *_ in commands] == ["look", "doctor", "heads", "survey", "explore"]
    for _, command, *rest in commands:
        text, _ = run(command, "--help")
        assert all(option in text for option in rest if option.startswith("--"))


@pytest.mark.parametrize("command", ["explore", "look", "survey", "report"])
def test_commands_that_write_have_an_output_option(command, run):
    assert re.search(r"-o, --output +(PAGE|FILE|DIR)", run(command, "-h")[0])


def test_every_command_in_the_docs_exists(run):
    page = (ROOT / "docs" / "command-line.md").read_text()
    lines = [line.split("#")[0].split("|")[-1 if "| regard" in line else 0] for line in page.splitlines()]
    commands = [shlex.split(line) for line in lines if line.lstrip().startswith("regard ")]
    assert len(commands) > 10
    for _, command, *rest in commands:
        subcommand = rest[:1] if command == "policy" else []
        text, _ = run(command, *subcommand, "--help")
        for option in (word for word in rest if word.startswith("-") and word != "-"):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), f"{command} {option}"


def test_version(run):
    assert run("--version") == (f"regard {regard.__version__}\n", "")


def test_the_package_installs_the_command():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"regard": "regard.cli:main"}


# -- Errors -------------------------------------------------------------------------------------------------

TEXT = ("--text", "abc")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["heds"], "regard: No such command 'heds'. Did you mean 'heads'?"),
        (["--nonsense"], "regard: No such option"),
        (["heads"], "regard heads: Missing argument 'MODEL'"),
        (["explore", "nothing"], "'NAME': 'nothing' is not one of 'pipeline', 'weights'"),
        (["explain", "no.json"], "regard explain: received 'no.json' (No such file or directory)"),
        (["explain", "bad.json"], "received 'bad.json' (not valid JSON: "),
        (["explain", "list.json"], "received 'list.json' with a list; expected query and key"),
        (["explain", "names.json"], "with query, keys; expected query and key"),
        (["explain", "ragged.json"], "query in 'ragged.json', which is not an array of numbers"),
        (["explain", "mask.json"], "which is neither boolean nor the text causal"),
        (["explain", "bad.npz"], "received 'bad.npz' (not an NPZ file of plain arrays"),
        (["explain", "heads.json"], "query with shape (2, 1, 2); expected one head"),
        (["explain", "heads.json", "--head", "7"], "expected an index into the leading axes, here (2,)"),
        (["explain", "--head", "1"], "Omit --head: the arrays already have one head."),
        (["explore", "weights", "--head", "1"], "Omit --head: the arrays already have one head."),
        (["explain", "-q", "dog"], "a token that occurs once. Use a position (0–4) or one of: The, cat, sat, on, mat."),
        (["explain", "-q", "9"], "received index 9 for axis 0; expected -5 to 4"),
        (["explore", "code", "bad.json", "--causal"], "received 'bad.json'"),
        (["explore", "code", "--causal"], "expected input that this page shows: only the built-in example"),
        (["explore", "scaling", "--causal"], "received mask for scaling"),
        (["explore", "pipeline", "-o", "no/such/place.html"], "Create the folder first: mkdir -p no/such."),
        (["explore", "pipeline", "-o", "."], "-o '.' (Is a directory); expected a file"),
        (["look", "./nowhere", *TEXT, "-o", "no/page.html"], "received -o 'no/page.html' (No such file"),
        (["heads", INDUCTION], 'received no text; expected either --text or --file. Pass --text "…", --file FILE'),
        (["heads", INDUCTION, "--text", ""], "received an empty text; expected at least one word"),
        (["heads", INDUCTION, "--file", "blank.txt"], "received 'blank.txt', which is empty"),
        (["heads", INDUCTION, *TEXT, "--file", "x"], "received --text and --file"),
        (["heads", INDUCTION, "--file", "latin.txt"], "received 'latin.txt', which is not valid UTF-8 at byte 1"),
        (["heads", INDUCTION, *TEXT, "--by", "beauty"], "received --by beauty; expected one of layer, call, head"),
        (["heads", INDUCTION, *TEXT, "--csv", "--json"], "received --csv and --json"),
        (["heads", INDUCTION, *TEXT, "--layers", "absent"], "received layers with 'absent'"),
        (["heads", INDUCTION, "--text", "é"], "received a token with the id 195; expected ids below 128"),
        (["doctor", "./nowhere", *TEXT], "regard doctor: received './nowhere', which does not exist"),
        (["compare", INDUCTION], "regard compare: Missing argument 'MODEL_B'"),
        (["compare", "./nowhere", INDUCTION, *TEXT], "regard compare: received './nowhere', which does not exist"),
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

    monkeypatch.setattr("regard.cli.learn_commands.attention", fail)
    _, err = run("explain", code=4)
    assert (
        err.count("\n") == 1
        and "regard explain: unexpected ZeroDivisionError in test_runner.py, line " in err
    )
    _, err = run("--traceback", "explain", code=4)
    assert "Traceback" in err and "many" in err
    monkeypatch.setenv("REGARD_TRACEBACK", "1")
    assert "Traceback" in run("explain", code=4)[1]


def test_missing_torch_is_named_in_one_line(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for command in (
        ["look"],
        ["heads", INDUCTION, *TEXT],
        ["compare", INDUCTION, INDUCTION, *TEXT],
        ["profile"],
    ):
        _, err = run(*command, code=3)
        assert err == f"regard {command[0]}: torch is not installed. pip install 'regard[torch]'\n"


def test_missing_transformers_is_named_in_one_line(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    _, err = run("doctor", tmp_path, *TEXT, code=3)
    assert err == "regard doctor: transformers is not installed. pip install 'regard[hf]'\n"


# -- Processes ----------------------------------------------------------------------------------------------


def test_a_process_prints_the_same():
    done = run_process("explain", "--query", "sat")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{regard.attention(cat.Q, cat.K).explain(2, cat.V, cat.tokens)}\n"
    done = run_process("explain", "--query", "dog")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1


def test_a_pipe_keeps_minus_signs_whatever_the_locale(monkeypatch):
    for name, value in {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}.items():
        monkeypatch.setenv(name, value)
    done = run_process("explain", "--query", "sat")
    assert (
        done.stdout == f"{regard.attention(cat.Q, cat.K).explain(2, cat.V, cat.tokens)}\n"
        and "−" in done.stdout
    )


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

    monkeypatch.setattr("regard.cli.learn_commands.attention", interrupt)
    assert run("explain", code=130) == ("", "")


def test_shell_completion():
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "_REGARD_COMPLETE": "complete_bash"}
    env |= {"COMP_WORDS": "regard explore we", "COMP_CWORD": "2"}
    code = "import sys; from regard.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["weights"]
