"""`regard policy`: make a cache policy from a survey, verify it on the model, and tighten it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard.cli.output import Printer
from regard.cli.page_files import check_output, save_page
from regard.cli.survey_commands import INTERRUPTED, show_progress, silence_logging

FOUND = 1


def make(
    printer: Printer, survey: Path, output: Path, keep: float, sinks: int, by_layer: bool, length: int
) -> int:
    """Make a policy from a survey and write it.

    Args:
        printer: Prints the result.
        survey: Directory of the survey.
        output: File to write.
        keep: Share of the weight to keep.
        sinks: Number of first keys that every head keeps.
        by_layer: Give the heads of a layer the same window.
        length: Context length of the printed sizes.

    Returns:
        The exit code.
    """
    check_output(output, "policy make")
    from regard.survey import open as open_survey

    policy = open_survey(survey).cache_policy(keep, sinks, "layer" if by_layer else "kv_head")
    policy.save(output)
    printer.record(
        {
            "policy": str(output),
            "length": length,
            "bytes": policy.num_bytes(length),
            "saved": policy.savings(length),
            "windows": policy.windows.tolist(),
            "sinks": policy.sinks.tolist(),
        }
    )
    printer.print(f"{policy.summary(length)}\n{policy.table(length)!r}")
    printer.print(f"To verify it: regard policy verify MODEL {output} CORPUS", "dim")
    return 0


def verify(
    printer: Printer,
    model: str,
    path: Path,
    corpus: str,
    output: Path | None,
    resume: Path | None,
    show: bool,
    options: dict[str, Any],
) -> int:
    """Verify a policy, print the result and write its page.

    Args:
        printer: Prints the result.
        model: A folder, a name on the Hub, or `module:function`.
        path: File of the policy.
        corpus: A file, directory or pattern.
        output: Page to write, if any.
        resume: Directory in which an interrupted run is resumed.
        show: Open the page in a browser.
        options: Further arguments of `CachePolicy.verify`.

    Returns:
        The exit code: 1 if the policy fails.
    """
    if output is not None:
        check_output(output, "policy verify")
    from regard.policy import CachePolicy

    policy = CachePolicy.load(path)
    try:
        with show_progress(printer, model, []) as progress, silence_logging():
            result = policy.verify(model, corpus, resume, progress=progress, **options)
    except KeyboardInterrupt:
        return _stop(printer, resume)
    printer.print(str(result))
    if output is not None:
        save_page(printer, result.page(), output, show, result.summary)
    else:
        printer.record(result.summary)
    return 0 if result.holds else FOUND


def tighten(
    printer: Printer,
    model: str,
    path: Path,
    corpus: str,
    output: Path,
    bound: float,
    resume: Path | None,
    options: dict[str, Any],
) -> int:
    """Tighten a policy and write the result.

    Args:
        printer: Prints the result.
        model: A folder, a name on the Hub, or `module:function`.
        path: File of the policy.
        corpus: A file, directory or pattern.
        output: Policy to write.
        bound: Largest mean KL divergence, in nats per token.
        resume: Directory in which an interrupted run is resumed.
        options: Further arguments of `CachePolicy.tighten`.

    Returns:
        The exit code.
    """
    check_output(output, "policy tighten")
    from regard.policy import CachePolicy

    policy = CachePolicy.load(path)
    try:
        with show_progress(printer, model, []) as progress, silence_logging():
            result = policy.tighten(bound, model, corpus, resume, progress=progress, **options)
    except KeyboardInterrupt:
        return _stop(printer, resume)
    result.save(output)
    printer.record({"policy": str(output), **result.about["tightened"]})
    for change in result.about["tightened"]["changes"]:
        before, after = (
            f"{'full' if window < 0 else window} + {sinks}"
            for window, sinks in (change["before"], change["after"])
        )
        printer.print(f"layer {change['layer']}, kv head {change['kv_head']}: {before} -> {after}")
    printer.print(f"{result.summary()}\nwritten to {output}")
    return 0


def _stop(printer: Printer, resume: Path | None) -> int:
    hint = "Pass --resume DIR to be able to resume." if resume is None else "Run the same command to resume."
    printer.warn(f"Interrupted. {hint}")
    return INTERRUPTED
