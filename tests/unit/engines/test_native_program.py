"""The compiled pass without Python: a C program that checks it on this processor, and on an emulated one with NEON."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from regard.engines.native.build import (
    FLAGS,
    LIBRARY_NAME,
    SOURCE_FOLDER,
    compile_library,
    find_compiler,
    hash_sources,
)

PROGRAM = Path(__file__).parents[2] / "data/check_measures.c"


def run_program(compiler: list[str], folder: Path, emulator: tuple[str, ...] = ()) -> str:
    """Compile the program and return what it prints; it fails if a result is wrong."""
    flags = [flag for flag in FLAGS if flag != "-shared"]
    command = [*compiler, *flags, "-I", SOURCE_FOLDER, "-o", folder / "check", PROGRAM, "-lm"]
    subprocess.run(command, check=True)
    return subprocess.run([*emulator, folder / "check"], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("platform", "names", "others"),
    [("linux", ["cc", "gcc", "clang"], ["cl"]), ("win32", ["clang"], ["cl", "gcc"])],
)
def test_the_compiler_is_the_first_one_that_is_there(monkeypatch, platform, names, others):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sys, "platform", platform)  # on Windows cl has no vector extensions
    for i in range(len(names) + 1):
        installed = {name: f"bin/{name}" for name in (*names[i:], *others)}
        monkeypatch.setattr(shutil, "which", installed.get)
        assert find_compiler() == ([f"bin/{names[i]}"] if i < len(names) else None)
    monkeypatch.setenv("CC", "zig cc")
    assert find_compiler() == ["zig", "cc"]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_pass_is_right_on_this_processor(tmp_path):
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler here")
    printed = run_program(compiler, tmp_path)
    assert re.search(r"^\d{5,} checks, 0 failures$", printed, re.MULTILINE), printed


@pytest.mark.slow
def test_the_pass_is_right_with_neon(tmp_path):
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user")
    printed = run_program([compiler, "-static"], tmp_path, (emulator,))
    assert re.search(r"^\d{5,} checks, 0 failures$", printed, re.MULTILINE), printed


@pytest.mark.slow
@pytest.mark.nightly  # it compiles twice
def test_a_library_carries_the_hash_of_its_sources_and_leaves_nothing_else(tmp_path):
    if find_compiler() is None:
        pytest.skip("no C compiler here")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        assert compile_library(folder) == folder / LIBRARY_NAME
        assert [path.name for path in folder.iterdir()] == [LIBRARY_NAME]
    library = ctypes.CDLL(first / LIBRARY_NAME)
    library.regard_source_hash.restype = ctypes.c_char_p
    assert library.regard_source_hash().decode() == hash_sources()
    assert (first / LIBRARY_NAME).read_bytes() == (second / LIBRARY_NAME).read_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="the compiler is a shell script")
def test_the_compiler_writes_one_stripped_library(tmp_path, monkeypatch):
    compiler, folder = tmp_path / "compiler", tmp_path / "library"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho "$@" > "$2"\n')
    compiler.chmod(0o755)
    folder.mkdir()
    monkeypatch.setenv("CC", str(compiler))
    library = compile_library(folder)
    assert library == folder / LIBRARY_NAME and list(folder.iterdir()) == [library]
    _, _, source, *flags = library.read_text().split()
    assert source == "measures.c" and flags == ["-fPIC", "-lm", "-Wl,--build-id=none", "-s"]


@pytest.mark.parametrize(
    ("compiler", "problem"),
    [
        (None, "no C compiler found\n"),
        ("no-compiler", "no-compiler does not run ([Errno 2] No such file or directory: 'no-compiler')\n"),
        ("false -v", "false -v cannot compile measures.c (exit code 1):\n\n"),
    ],
)
def test_without_a_compiler_stderr_says_why(compiler, problem, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("CC", raising=False)
    if compiler is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setenv("CC", compiler)
    assert compile_library(tmp_path) is None
    assert capfd.readouterr().err == f"regard: measures will run in the block loop: {problem}"
    assert not list(tmp_path.iterdir())
