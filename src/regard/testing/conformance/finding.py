"""A finding of the conformance kit, and its text."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.render.table import format_table
from regard.render.text import format_number
from regard.testing.conformance.attention_call import AttentionCall
from regard.testing.conformance.attention_steps import AttentionResult

LINE_WIDTH = 88


@dataclass(frozen=True, eq=False)
class ConformanceFinding:
    """One cause of wrong results, how to fix it, where it shows, and the smallest input that shows it.

    Args:
        name: The name of the fault for scripts; "unknown" if the kit has none.
        message: What is wrong.
        hint: How to fix it.
        capabilities: The rows of the report that it affects.
        num_calls: The number of calls that it affects.
        call: The smallest input that shows it.
        actual: The result for that input, or the error of the function.
        expected: The result of the definition for that input.
        if_intended: How to describe the function to the kit if the behaviour is intended.

    >>> import regard
    >>> from regard.testing import check_conformance
    >>> report = check_conformance(lambda q, k, v: regard.attention(q, k, scale=1.0) @ v, mask=None)
    >>> report.findings[0].name
    'scale missing'
    """

    name: str
    message: str
    hint: str
    capabilities: tuple[str, ...]
    num_calls: int
    call: AttentionCall
    actual: AttentionResult | str
    expected: AttentionResult
    if_intended: str = ""

    def __str__(self) -> str:
        return "\n".join(format_finding(self))


def format_finding(finding: ConformanceFinding, prefix: str = "") -> list[str]:
    """Format a finding as lines of text.

    Args:
        finding: The finding.
        prefix: Text before the message, such as its number.
    """
    lines = wrap_text(f"{prefix}{finding.message}", "   ", first_indent="")
    lines += wrap_text(f"{finding.hint} {finding.if_intended}", "   ")
    calls = "one call" if finding.num_calls == 1 else f"{finding.num_calls} calls"
    lines += wrap_text(f"Affects {calls}: {'; '.join(finding.capabilities)}.", "   ")
    call = finding.call
    defaults = {"batch": 1, "heads": 1, "kv_heads": call.sizes["heads"]}
    sizes = ", ".join(f"{name} {n}" for name, n in call.sizes.items() if defaults.get(name) != n)
    lines += wrap_text(f"Smallest input: {sizes}, {call.dtype}", "   ")
    rows = [(name, _format_value(value)) for name, value in list_arguments(call)]
    actual = finding.actual if isinstance(finding.actual, str) else _format_value(finding.actual.output)
    rows += [("actual", textwrap.shorten(actual, LINE_WIDTH - 20, placeholder=" …"))]
    rows += [("expected", _format_value(finding.expected.output))]
    if isinstance(finding.actual, AttentionResult):
        rows += _format_weights_and_gradients(finding.actual, finding.expected)
    return [*lines, *format_table(rows, align="left", indent="     ").split("\n")]


def list_arguments(call: AttentionCall) -> list[tuple[str, Any]]:
    """Return the arguments of a call by name, without options that are not set.

    Args:
        call: The call.
    """
    arrays = [("query", call.query), ("key", call.key), ("value", call.value)]
    options = [("mask", call.mask), ("causal", call.causal), ("scale", call.scale)]
    return arrays + [(name, value) for name, value in options if value is not None]


def wrap_text(text: str, indent: str, first_indent: str | None = None) -> list[str]:
    """Wrap a text to the width of the report.

    Args:
        text: The text.
        indent: The indentation of each line.
        first_indent: The indentation of the first line. Default: `indent`.
    """
    return textwrap.wrap(
        text, LINE_WIDTH, initial_indent=indent if first_indent is None else first_indent,
        subsequent_indent=indent, break_on_hyphens=False,
    )  # fmt: skip


def _format_weights_and_gradients(
    actual: AttentionResult, expected: AttentionResult
) -> list[tuple[str, str]]:
    """Format weights and gradients, if the outputs do not show the difference."""
    outputs_agree = actual.output.shape == expected.output.shape and np.allclose(
        actual.output.astype(float), expected.output.astype(float), rtol=1e-3, atol=1e-3, equal_nan=True
    )
    if not outputs_agree:
        return []
    rows = []
    if actual.weights is not None and actual.gradients is None:
        rows += [("weights", _format_value(actual.weights)), ("… expected", _format_value(expected.weights))]
    if actual.gradients is not None:
        for name, gradient, right in zip(
            ("query", "key", "value"), actual.gradients, expected.gradients, strict=True
        ):
            rows += [
                (f"gradient of {name}", _format_value(gradient)),
                ("… expected", _format_value(right)),
            ]
    return rows


def _format_value(value: Any) -> str:
    """Format a small array in brackets without leading axes of one, and a large one by its shape."""
    if not isinstance(value, np.ndarray):
        return str(value)
    while value.ndim > 2 and value.shape[0] == 1:
        value = value[0]
    if value.size > 24:
        return f"an array of shape {value.shape}"
    return _format_array(value)


def _format_array(value: Any) -> str:
    if value.ndim:
        return "[" + ", ".join(_format_array(x) for x in value) + "]"
    return str(bool(value)) if value.dtype == bool else format_number(float(value) + 0.0)  # −0 + 0 is 0
