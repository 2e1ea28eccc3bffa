"""Check the installed versions together: kernels and generated cases against the definition, as one report."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from regard.engines.native import library
from regard.testing.cases import ENGINES, draw_bounds, list_dtypes, measure_case
from regard.testing.device_check import check_device, check_kernels

PACKAGES = (
    *("regard", "numpy", "torch", "array-api-compat", "transformers", "safetensors", "matplotlib"),
    *("typer", "rich", "ray", "pyarrow", "ml_dtypes"),
)
MAX_FAILURES = 3  # shown; all are counted


@dataclass(frozen=True)
class InstallationReport:
    """Result of `check_installation`. It holds no paths and no names of the machine or the user.

    Args:
        ok: Whether nothing is wrong.
        problems: What is wrong, one sentence each.
        versions: Versions of regard and the packages it can use; None if not installed.
        platform: Python, operating system, processor architecture, and the instruction set of the compiled pass.
        precision: The settings of torch that change results or speed; empty without torch.
        kernels: The fused kernels of torch, in order of preference: name, device, whether the results were right, and
            the cause if not. The kernels of the given device are in `device`.
        cases: Number of generated cases, engines, failures, and the largest error as a share of what is allowed.
        device: Result of `regard.testing.check_device`; empty if no device was given.

    >>> from regard.testing import check_installation
    >>> check_installation(num_cases=1).ok
    True
    """

    ok: bool
    problems: list[str]
    versions: dict[str, str | None]
    platform: dict[str, str]
    precision: dict[str, Any]
    kernels: list[dict[str, Any]]
    cases: dict[str, Any]
    device: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return asdict(self)


def check_installation(num_cases: int = 100, seed: int = 0, device: str | None = None) -> InstallationReport:
    """Compare kernels and generated cases with the definition, in the versions and settings of this process.

    Args:
        num_cases: Number of cases to draw from the case matrix; each runs on every engine that is installed.
        seed: Seed of the draw.
        device: Device of torch to check as well, such as "cuda" or "mps": 300 cases in three settings, the conventions
            of its operators, compiled kernels, and its speed. This takes about two minutes.

    Returns:
        The report; `report.ok` says whether anything is wrong.

    >>> from regard.testing import check_installation
    >>> report = check_installation(num_cases=2)
    >>> report.cases["count"], report.cases["failed"]
    (2, 0)
    """
    problems: list[str] = []
    precision: dict[str, Any] = {}
    kernels: list[dict[str, Any]] = []
    engines: tuple[str, ...] = ENGINES[:1]
    if importlib.util.find_spec("torch") is not None:
        try:
            precision, kernels = _describe_precision(), _remove_all_paths(list(_check_kernels(device)))
            engines = ENGINES
        except Exception as error:  # what remains of a removed torch imports as an empty package
            problems.append(f"torch cannot be used: {_remove_paths(str(error))}")
    problems += [
        f"kernel {kernel['name']} on {kernel['device']}: {kernel['cause']}"
        for kernel in kernels
        if kernel["cause"]
    ]
    cases = _run_cases(num_cases, seed, engines)
    if cases["failed"]:
        problems.append(f"{cases['failed']} of {cases['checks']} checks against the definition failed")
    found: dict[str, Any] = {}
    if device is not None:
        try:
            found = _remove_all_paths(check_device(device))
            problems += found["problems"]
        except (AssertionError, ImportError, RuntimeError) as error:  # torch asserts that it was built for it
            problems.append(f"the device {device} cannot be used: {_remove_paths(str(error))}")
    return InstallationReport(
        not problems,
        problems,
        {name: _find_version(name) for name in PACKAGES},
        _describe_platform(),
        precision,
        kernels,
        cases,
        found,
    )


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _describe_platform() -> dict[str, str]:
    is_there = library.LIBRARY_FILE.exists()
    unused = "none: its library cannot be used" if is_there else "none"
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": platform.system(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "compiled_pass": library.find_instruction_set() or unused,
    }


def _describe_precision() -> dict[str, Any]:
    import torch

    from regard.engines.torch_precision import has_ieee_products

    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "ieee_products_on_cpu": has_ieee_products("cpu"),
        "autocast_on_cpu": torch.is_autocast_enabled("cpu"),
        "autocast_dtype_on_cpu": str(torch.get_autocast_dtype("cpu")).removeprefix("torch."),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.cuda.is_available(),
    }


def _check_kernels(other: str | None) -> Iterator[dict[str, Any]]:
    """Check every kernel of the devices that are here, also those that are not needed; not of one checked elsewhere."""
    import torch

    for device in ("cpu", "cuda"):
        is_here = device == "cpu" or torch.cuda.is_available()
        if is_here and (other is None or not other.startswith(device)):
            yield from check_kernels(device)


def _run_cases(count: int, seed: int, engines: tuple[str, ...]) -> dict[str, Any]:
    """Run cases on the engines."""
    dtypes = list_dtypes()
    start, failures, largest = time.perf_counter(), [], (0.0, "")
    for case, inputs, bounds in draw_bounds(count, seed, dtypes):
        for engine in engines:
            share, message = measure_case(case, inputs, bounds, engine)
            if message:
                failures.append(f"{engine}: {_remove_paths(message)}")
            largest = max(largest, (share, f"{engine}: {case}"))
    return {
        "count": count,
        "seed": seed,
        "engines": list(engines),
        "dtypes": dtypes,
        "checks": count * len(engines),
        "failed": len(failures),
        "failures": failures[:MAX_FAILURES],
        "largest_share_of_allowed_error": largest[0],
        "largest_share_in": largest[1],
        "seconds": round(time.perf_counter() - start, 2),
    }


def _remove_all_paths(entry: Any) -> Any:
    """Remove paths from every text in lists and dictionaries."""
    if isinstance(entry, dict):
        return {name: _remove_all_paths(value) for name, value in entry.items()}
    if isinstance(entry, list):
        return list(map(_remove_all_paths, entry))
    return _remove_paths(entry) if isinstance(entry, str) else entry


def _remove_paths(text: str) -> str:
    """Replace what may be a path by "(path)", and keep one line.

    Names may have spaces, so what stands between two paths of a clause goes too.

    >>> _remove_paths("cannot open /home/me too/libx.so: no such file")
    'cannot open (path): no such file'
    """
    home = os.path.expanduser("~")  # the name of a user may have any character; "~" for a user without a home
    for own in (home, repr(home)[1:-1]):
        text = text.replace(own, "/home") if len(own) > 1 else text
    name = r"""[^\s:;,'"()\\/]"""
    absolute = rf"(?<![\w.~-])(?:[A-Za-z]:)?[/\\](?=\S)(?:[^:;,\n]*[/\\])*{name}*"
    relative = rf"{name}+(?:[/\\]{name}+){{2,}}"
    text = re.sub(rf"{absolute}|{relative}", "(path)", text)
    return " ".join(text.split())
