"""The files of a release: names, sizes, tags, and the compiled pass where a platform runs or is emulated."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from regard.engines.native.build import SOURCE_FOLDER, TARGETS, hash_sources
from tests.helpers.foreign_python import ForeignPython, install_arm_python, install_windows_python

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/data/check_measures.c"
MAX_BYTES = 8_000_000
# What runs a program of a platform here, with a file that must exist; the other platforms are only inspected.
RUNNERS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "manylinux_2_17_x86_64": ((), "/lib64/ld-linux-x86-64.so.2", ""),
    "musllinux_1_2_x86_64": ((), "/lib/ld-musl-x86_64.so.1", "musl"),
    "manylinux_2_17_aarch64": (
        ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"),
        "/usr/aarch64-linux-gnu/lib/ld-linux-aarch64.so.1",
        "qemu-user libc6-arm64-cross",
    ),
    "win_amd64": (("wine",), "/", "wine wine64"),
}


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    found = request.config.getoption("--wheels")
    if found is None:
        pytest.skip("needs the files of scripts/release, and --wheels FOLDER")
    return Path(found).resolve(strict=True)


def find_wheel(folder: Path, platform: str) -> Path:
    (wheel,) = folder.glob(f"regard-*-py3-none-{platform}.whl")
    return wheel


def extract_library(folder: Path, platform: str, out: Path) -> Path:
    """Extract the library of a wheel."""
    with zipfile.ZipFile(find_wheel(folder, platform)) as archive:
        (name,) = (n for n in archive.namelist() if re.search(r"/measures\.(so|dylib|dll)$", n))
        return Path(archive.extract(name, out))


def test_a_release_is_ten_files(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 10 and sum(name.endswith(".tar.gz") for name in names) == 1
    assert {re.sub(r".*-py3-none-|\.whl$", "", n) for n in names if n.endswith(".whl")} == {*TARGETS, "any"}


def test_wheels_are_small_and_differ_in_the_library_alone(folder: Path) -> None:
    with zipfile.ZipFile(find_wheel(folder, "any")) as archive:
        pure = {n for n in archive.namelist() if "dist-info" not in n}
        weights = {
            i.filename: i.compress_size for i in archive.infolist() if i.filename.endswith(".safetensors")
        }
    print({name: f"{size:,} bytes" for name, size in weights.items()})
    assert weights and not any(re.search(r"measures\.(so|dylib|dll)$", name) for name in pure)
    for platform in TARGETS:
        wheel = find_wheel(folder, platform)
        with zipfile.ZipFile(wheel) as archive:
            (added,) = {n for n in archive.namelist() if "dist-info" not in n} - pure
            print(
                f"{wheel.name}: {wheel.stat().st_size:,} bytes, {archive.getinfo(added).file_size:,} in {added}"
            )
        assert wheel.stat().st_size <= MAX_BYTES


@pytest.mark.parametrize("platform", TARGETS)
def test_pip_chooses_the_wheel_of_a_platform(folder: Path, platform: str, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--no-compile", "--pre"]
    choice = ["--only-binary", ":all:", "--platform", platform, "--find-links", folder, "--target", tmp_path]
    subprocess.run([*pip, *choice, "regard"], check=True)
    (native,) = tmp_path.glob("regard/engines/native")
    suffix = {"win": "dll", "macosx": "dylib"}.get(platform.split("_")[0], "so")
    assert [path.suffix[1:] for path in native.glob("measures.*") if path.suffix not in (".c", ".h")] == [
        suffix
    ]


@pytest.mark.parametrize("platform", TARGETS)
def test_a_library_needs_what_its_tag_allows_and_no_python(
    folder: Path, platform: str, tmp_path: Path
) -> None:
    library = extract_library(folder, platform, tmp_path).read_bytes()
    assert hash_sources().encode() in library  # else it is not loaded
    assert not re.search(rb"Py[A-Z_]\w+|libpython|libgcc|libstdc", library)
    is_arm = platform.endswith(("aarch64", "arm64"))
    versions = [tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_([\d.]+)", library)]
    if platform.startswith("manylinux"):
        assert versions and max(versions) <= (2, 17)
    else:
        assert not versions
    if platform.startswith("musllinux"):
        assert re.findall(rb"\0(lib\w+\.so[.\d]*|ld-\S+)(?=\0)", library) == [b"libc.so"]
    if "linux" in platform:
        assert library[:4] == b"\x7fELF" and struct.unpack_from("<H", library, 18)[0] == (
            183 if is_arm else 62
        )
    elif platform.startswith("win"):
        (header,) = struct.unpack_from("<I", library, 60)
        assert struct.unpack_from("<4sH", library, header) == (b"PE\0\0", 0xAA64 if is_arm else 0x8664)
    else:
        magic, processor, _, kind, count = struct.unpack_from("<IIIII", library)
        assert (magic, processor, kind) == (0xFEEDFACF, 0x0100000C if is_arm else 0x01000007, 6)
        commands, at = {}, 32
        for _ in range(count):
            command, size = struct.unpack_from("<II", library, at)
            commands[command] = library[at : at + size]
            at += size
        name, minimum = struct.unpack_from("<II", commands[0x32], 8)  # LC_BUILD_VERSION
        assert (name, minimum) == (1, 11 << 16)
        assert 0x1D in commands or not is_arm  # LC_CODE_SIGNATURE, without which arm64 loads nothing


# On a system with glibc, auditwheel takes the libc.so that a musl wheel needs for glibc's.
@pytest.mark.parametrize("platform", [platform for platform in TARGETS if "manylinux" in platform])
def test_auditwheel_agrees_with_the_tag(folder: Path, platform: str) -> None:
    pytest.importorskip("auditwheel")
    command = [sys.executable, "-m", "auditwheel", "show", find_wheel(folder, platform)]
    printed = " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert f'is consistent with the following platform tag: "{platform}"' in printed, printed


@pytest.mark.parametrize("platform", RUNNERS)
def test_the_pass_is_right_where_it_runs(folder: Path, platform: str, tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    emulator, file, packages = RUNNERS[platform]
    if not Path(file).exists() or (emulator and shutil.which(emulator[0]) is None):
        pytest.skip(f"needs apt-get install {packages}")
    library, program = extract_library(folder, platform, tmp_path), tmp_path / "check.exe"
    command = [sys.executable, "-m", "ziglang", "cc", "-target", TARGETS[platform], "-mcpu=baseline", "-O1"]
    options = [
        "-DTYPES_ONLY",
        "-std=gnu11",
        "-fno-sanitize=all",
        "-I",
        SOURCE_FOLDER,
        PROGRAM,
        "-lm",
        "-o",
        program,
    ]
    dynamic = ["-dynamic"] if "musl" in platform else []
    subprocess.run([*command, *dynamic, *options], check=True)
    done = subprocess.run([*emulator, program, library], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"library of the sources {hash_sources()}" in done.stdout
    assert re.search(r"^\d{5,} checks, 0 failures", done.stdout, re.MULTILINE), done.stdout
    print(platform, *re.findall(r"set (\d)", done.stdout))


@pytest.mark.skipif(sys.platform != "linux", reason="the wheel is for Linux")
def test_the_library_of_a_wheel_passes_the_case_matrix(folder: Path, tmp_path: Path) -> None:
    library = extract_library(folder, "manylinux_2_17_x86_64", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--library", library]
    done = subprocess.run(
        [*command, "tests/unit/engines/test_native.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    print(done.stdout.splitlines()[-1])


# Which Python of another platform runs here, and the tests that need neither torch nor what its emulator lacks: child
# processes under qemu, and the end of a tree of processes under wine.
FOREIGN: dict[str, tuple[Any, list[str]]] = {
    # A thirtieth of the speed: each mask, the exponentials and ties; the check of the wheel runs 100 cases.
    "manylinux_2_17_aarch64": (
        install_arm_python,
        ["tests/unit/engines/test_native.py", "-k", "every_mask or exponentials or ties"],
    ),
    "win_amd64": (
        install_windows_python,
        [
            *(f"tests/unit/{name}" for name in ("core", "masks", "measures", "images", "render", "testing")),
            *("tests/unit/engines/test_native.py", "tests/unit/cli", "tests/unit/learn"),
            "--ignore=tests/unit/cli/test_model_commands.py",
            *("-k", "not stopped_with_what_it_started"),
        ],
    ),
}


@pytest.fixture(scope="module", params=FOREIGN)
def foreign(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ForeignPython, list[str]]:
    install, tests = FOREIGN[request.param]
    return install(find_wheel(folder, request.param), tmp_path_factory.mktemp("foreign") / "python"), tests


def test_an_installed_wheel_passes_its_own_check(
    foreign: tuple[ForeignPython, list[str]], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    foreign[0].run("-m", "regard", "selfcheck", "--report", str(report))
    found = json.loads(report.read_text())
    assert found["ok"] and found["cases"]["checks"] == 100 and found["cases"]["failed"] == 0
    assert found["platform"]["compiled_pass"] in ("baseline", "AVX2", "AVX-512")
    print(found["platform"])


def test_the_library_passes_tests_on_its_platform(foreign: tuple[ForeignPython, list[str]]) -> None:
    python, tests = foreign
    (library,) = (
        p for p in python.packages.glob("regard/engines/native/measures.*") if p.suffix not in (".c", ".h")
    )
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--library", str(library)]
    printed = python.run(*options, *tests)
    print(re.findall(r"\d+ passed.*", printed))
