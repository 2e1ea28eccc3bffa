"""Compile the library of the measure pass: `python src/regard/engines/native/build.py` does it in place.

The build hook of the package runs this file too, without importing regard; it needs the standard library only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE_FOLDER = Path(__file__).resolve().parent
SOURCES = ("measures.c", "measures_types.h", "measures_pass.h", "measures_sums.h")
LIBRARY_NAME = "measures" + {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")

# -fwrapv: shifts of the bits of numbers wrap around. Nothing here depends on the machine that compiles.
FLAGS = ("-std=gnu11", "-O3", "-fwrapv", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi", "-shared")


def hash_sources() -> str:
    """Return a hash of the sources, which the library carries: one built from other sources is not used."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((SOURCE_FOLDER / name).read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:32]


def find_compiler() -> list[str] | None:
    """Return the command of a C compiler with GCC's vector extensions: `CC`, or the first of cc, gcc and clang."""
    chosen = os.environ.get("CC", "").split()
    if chosen:
        return chosen
    names = ("clang",) if sys.platform == "win32" else ("cc", "gcc", "clang")
    return next(([path] for path in map(shutil.which, names) if path), None)


def compile_library(folder: Path) -> Path | None:
    """Compile the library.

    Returns:
        The library; None if there is no compiler, or if it cannot compile the sources; stderr then says why.
    """
    compiler = find_compiler()
    if compiler is None:
        _report("no C compiler found")
        return None
    library = folder / LIBRARY_NAME
    part = (
        folder / f"{LIBRARY_NAME}.{os.getpid()}"
    )  # replaced at once: another process may have loaded the old one
    command = [*compiler, *FLAGS, f'-DSOURCE_HASH="{hash_sources()}"', "-o", str(part), "measures.c"]
    if sys.platform != "win32":
        command += ["-fPIC", "-lm"]
    if sys.platform == "darwin":
        command += os.environ.get("ARCHFLAGS", "").split()  # as Python's own builds do
    if sys.platform == "linux":
        command += ["-Wl,--build-id=none", "-s"]  # the same bytes from every folder
    try:
        done = subprocess.run(command, cwd=SOURCE_FOLDER, capture_output=True, text=True)
    except OSError as error:
        _report(f"{compiler[0]} does not run ({error})")
        return None
    if done.returncode:
        _report(f"{compiler[0]} cannot compile measures.c:\n{done.stderr}")
        return None
    os.replace(part, library)
    return library


def _report(problem: str) -> None:
    print(f"regard: measures will run in the block loop: {problem}", file=sys.stderr)


if __name__ == "__main__":
    built = compile_library(SOURCE_FOLDER)
    if built is None:
        sys.exit(1)
    print(built)
