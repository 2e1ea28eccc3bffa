"""Format numbers, vectors, bars and small matrices as text."""

from __future__ import annotations

import math
from collections.abc import Iterable

from regard.types import Array

BAR_WIDTH = 40  # blocks of a bar that stands for 1
TERMS_SHOWN = 8  # entries of a vector, or terms of a sum


def format_number(x: float) -> str:
    """Return a number to four digits after the point, with an exponent below 0.001 and from a million on.

    >>> format_number(2.0), format_number(0.5), format_number(0.29756)
    ('2', '0.5', '0.2976')
    >>> format_number(1e-9), format_number(float("-inf"))
    ('1.000e-09', '-inf')
    """
    if not math.isfinite(x) or x == 0:
        return f"{x:g}"
    return f"{x:.4f}".rstrip("0").rstrip(".") if 1e-3 <= abs(x) < 1e6 else f"{x:.3e}"


def format_factor(x: float) -> str:
    """Return a number as a factor of a product, in parentheses if it has a minus sign.

    >>> f"{format_factor(-0.5)}·{format_factor(0.4)}"
    '(-0.5)·0.4'
    """
    text = format_number(x)
    return f"({text})" if text.startswith("-") else text


def format_vector(numbers: Iterable[float]) -> str:
    """Return numbers in brackets, with an ellipsis in place of the middle of more than 8.

    >>> format_vector([1, 0.5])
    '[1, 0.5]'
    """
    shown = [format_number(float(x)) for x in numbers]
    if len(shown) > TERMS_SHOWN:
        shown = [*shown[: TERMS_SHOWN - 2], "…", shown[-1]]
    return "[" + ", ".join(shown) + "]"


def format_bar(weight: float) -> str:
    """Return a bar as long as the weight: 40 blocks for a weight of 1, none for a number that is not finite.

    >>> format_bar(0.1095)
    '████'
    """
    return "█" * int(weight * BAR_WIDTH) if math.isfinite(weight) else ""


def format_matrix(numbers: Array) -> str:
    """Return a small matrix as lines of numbers with four decimals.

    >>> import numpy as np
    >>> print(format_matrix(np.eye(2)))
    [1.0000 0.0000]
    [0.0000 1.0000]
    """
    return "\n".join("[" + " ".join(f"{x:.4f}" for x in row) + "]" for row in numbers)


def escape_unprintable(text: str) -> str:
    r"""Return text on one line, its control characters and line ends escaped.

    >>> escape_unprintable("a\n")
    'a\\n'
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def join_lines(text: str) -> str:
    r"""Return text of several lines on one line, for a cell of a table.

    >>> join_lines("a\n  b")
    'a b'
    """
    return " ".join(text.split())
