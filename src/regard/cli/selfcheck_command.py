"""`regard selfcheck`: check the installed versions against the definition, and print a report for an issue."""

from __future__ import annotations

from regard.cli.output import NUMBER_STYLE, Printer, style_text
from regard.testing.installation import InstallationReport, check_installation


def selfcheck(printer: Printer, num_cases: int) -> int:
    """Check the installation and print the report.

    Args:
        printer: Prints the result.
        num_cases: Number of generated cases.

    Returns:
        The exit code: 1 if something is wrong.
    """
    report = check_installation(num_cases)
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
    for problem in report.problems:
        printer.print(f"problem: {problem}", "bold red")
    printer.print(
        "ok" if report.ok else "Report it: paste the output of 'regard selfcheck --json' into an issue."
    )
