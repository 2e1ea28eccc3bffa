"""Compile the library of the measure pass: `python src/regard/engines/native/build.py` does it in place.

The build hook of the package runs this file too, without importing regard; it needs the standard library only.
scripts/release compiles for every platform with zig, which brings the C libraries of all of them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE_FOLDER = Path(__file__).resolve().parent
SOURCES = ("measures.c", "measures_types.h", "measures_pass.h", "measures_sums.h")
SUFFIXES = {"win32": ".dll", "win": ".dll", "darwin": ".dylib", "macosx": ".dylib"}
LIBRARY_NAME = "measures" + SUFFIXES.get(sys.platform, ".so")

# Platform tags of the released wheels, and what zig calls these platforms.
TARGETS = {
    "manylinux_2_17_x86_64": "x86_64-linux-gnu.2.17",
    "manylinux_2_17_aarch64": "aarch64-linux-gnu.2.17",
    "musllinux_1_2_x86_64": "x86_64-linux-musl",
    "musllinux_1_2_aarch64": "aarch64-linux-musl",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
    "macosx_11_0_x86_64": "x86_64-macos.11.0",
    "win_amd64": "x86_64-windows-gnu",
    "win_arm64": "aarch64-windows-gnu",
}

# -fwrapv: shifts of the bits of numbers wrap around. Nothing here depends on the machine that compiles.
FLAGS = (
    "-std=gnu11",
    "-Werror=implicit-function-declaration",
    "-O3",
    "-fwrapv",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-shared",
)


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


def compile_library(folder: Path, platform: str = "") -> Path | None:
    """Compile the library.

    Args:
        folder: where to put it.
        platform: a key of `TARGETS`, for which zig compiles. Default: this platform, with its own compiler.

    Returns:
        The library; None if there is no compiler, or if it cannot compile the sources; stderr then says why.

    Raises:
        ValueError: if there is no such platform.
    """
    if platform and platform not in TARGETS:
        raise ValueError(f"no platform {platform!r}; there are {', '.join(TARGETS)}")
    target = TARGETS.get(platform, "")
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-mcpu=baseline"]
    compiler = zig if target else find_compiler()
    if compiler is None:
        _report("no C compiler found")
        return None
    system = platform.partition("_")[0] or sys.platform
    name = "measures" + SUFFIXES.get(system, ".so")
    # The library is moved at once, since another process may have loaded the old one. It bears its name from the start,
    # which linkers write into it, and what they put beside it is deleted.
    with tempfile.TemporaryDirectory(dir=folder) as part:
        command = [
            *compiler,
            *FLAGS,
            f'-DSOURCE_HASH="{hash_sources()}"',
            "-o",
            str(Path(part, name)),
            "measures.c",
        ]
        if not system.startswith("win"):
            command += ["-fPIC", "-lm"]
        if system == "darwin":
            command += os.environ.get("ARCHFLAGS", "").split()  # as Python's own builds do
        if "linux" in system:  # the same bytes from every folder
            command += ["-Wl,--build-id=none"]
        if system in ("darwin", "macosx"):
            command += [f"-Wl,-install_name,@rpath/{name}"]
        if target or system == "linux":
            command += ["-s"]
        try:
            done = subprocess.run(command, cwd=SOURCE_FOLDER, capture_output=True, text=True)
        except OSError as error:
            _report(f"{compiler[0]} does not run ({error})")
            return None
        if done.returncode:
            _report(
                f"{' '.join(compiler)} cannot compile measures.c (exit code {done.returncode}):\n{done.stderr}"
            )
            return None
        os.replace(Path(part, name), folder / name)
    return folder / name


def _report(problem: str) -> None:
    print(f"regard: measures will run in the block loop: {problem}", file=sys.stderr)


if __name__ == "__main__":
    built = compile_library(SOURCE_FOLDER)
    if built is None:
        sys.exit(1)
    print(built)
