"""`regard selfcheck`: check the installed versions against the definition, and print a report for an issue."""

from __future__ import annotations

from typing import Any

from regard.cli.output import NUMBER_STYLE, Printer, style_text
from regard.testing.installation import InstallationReport, check_installation


def selfcheck(printer: Printer, num_cases: int, device: str | None = None) -> int:
    """Check the installation and print the report.

    Args:
        printer: Prints the result.
        num_cases: Number of generated cases.
        device: Device to check as well.

    Returns:
        The exit code: 1 if something is wrong.
    """
    report = check_installation(num_cases, device=device)
    _print_report(printer, report)
    printer.record(report.to_dict())
    return 0 if report.ok else 1


def _print_report(printer: Printer, report: InstallationReport) -> None:
    rows = [["python", report.platform["python"]]]
    rows += [[name, version or "not installed"] for name, version in report.versions.items()]
    rows += [["platform", " ".join(report.platform[name] for name in ("system", "machine", "libc"))]]
    rows += [["compiled pass", report.platform["compiled_pass"]]]
    rows += [[name.replace("_", " "), str(value)] for name, value in report.precision.items()]
    printer.table(["", "installed"], rows)
    printer.print()
    if report.kernels:
        checks = [
            [kernel["name"], kernel["device"], kernel["cause"] or "passed"] for kernel in report.kernels
        ]
        printer.table(["kernel", "device", "check"], checks)
        printer.print()
    cases = report.cases
    printer.print(
        style_text(
            f"{cases['count']} cases on {', '.join(cases['engines'])}: {cases['failed']} of {cases['checks']} checks "
            "failed; the largest error is ",
            (f"{cases['largest_share_of_allowed_error']:.2f}", NUMBER_STYLE),
            f" of what is allowed ({cases['seconds']:.1f} s).",
        )
    )
    for failure in cases["failures"]:
        printer.print(f"  {failure}")
    if report.device:
        _print_device(printer, report.device)
    for problem in report.problems:
        printer.print(f"problem: {problem}", "bold red")
    printer.print(
        "ok" if report.ok else "Report it: paste the output of 'regard selfcheck --json' into an issue."
    )


def _print_device(printer: Printer, found: dict[str, Any]) -> None:
    printer.print()
    printer.table(["device", ""], [[name, str(value)] for name, value in found["device"].items()])
    printer.print()
    kernels = [*found["kernels"], *found["compiled_kernels"]]
    if kernels:
        rows = [[kernel["name"], kernel["cause"] or "passed"] for kernel in kernels]
        printer.table(["kernel of the device", "check"], rows)
        printer.print()
    hidden = ("operator", "problems")
    rows = [
        [
            entry["operator"],
            ", ".join(f"{name} {value}" for name, value in entry.items() if name not in hidden),
        ]
        for entry in found["conventions"]
    ]
    if rows:
        printer.table(["operator", "conventions"], rows)
        printer.print()
    runs = [
        [run["engine"], run["setting"], f"{run['count']}", f"{run['failed']}", f"{run['largest_share']:.2f}"]
        for run in found["cases"]
    ]
    printer.table(["engine", "setting", "cases", "failed", "largest share of the allowed error"], runs)
    for failure in (failure for run in found["cases"] for failure in run["failures"]):
        printer.print(f"  {failure}")
    if found["speed"]:
        printer.print()
        speed = [
            [f"{entry['length']:,}", entry.get("what", ""), *_format_ratio(entry)] for entry in found["speed"]
        ]
        printer.table(["tokens", "", "bare, ms", "regard, ms", "ratio", "estimated for an A100"], speed)
    printer.print(f"checked in {found['seconds']:.0f} s")


def _format_ratio(entry: dict[str, Any]) -> list[str]:
    if "error" in entry:
        return [entry["error"], "", "", ""]
    return [str(entry[name]) for name in ("bare_ms", "regard_ms", "ratio", "estimated_ratio")]
