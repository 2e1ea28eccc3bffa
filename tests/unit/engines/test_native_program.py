"""The compiled pass without Python: a C program that checks it on this processor, and on an emulated one with NEON."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from regard.engines.native.build import FLAGS, SOURCE_FOLDER, find_compiler

PROGRAM = Path(__file__).parents[2] / "data/check_measures.c"


def run_program(compiler: list[str], folder: Path, emulator: tuple[str, ...] = ()) -> str:
    """Compile the program and return what it prints; it fails if a result is wrong."""
    flags = [flag for flag in FLAGS if flag != "-shared"]
    command = [*compiler, *flags, "-I", SOURCE_FOLDER, "-o", folder / "check", PROGRAM, "-lm"]
    subprocess.run(command, check=True)
    return subprocess.run([*emulator, folder / "check"], check=True, capture_output=True, text=True).stdout


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
