"""Draw cases from the case matrix so that every pair of choices occurs, and report what was covered."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from regard.render.table import Alignment, format_table
from regard.testing.cases.factors import FACTORS, Case
from regard.testing.cases.inputs import build_inputs

# Pairs of choices that contradict each other: without a masked key there is none to put NaN into.
IMPOSSIBLE_PAIRS = {
    (("mask", "none"), ("values", "NaN masked")),
    (("kv_len", 0), ("values", "NaN masked")),
}


def _all_pairs() -> set[tuple[Any, Any]]:
    factor_pairs = itertools.combinations(FACTORS, 2)
    return {
        ((a, x), (b, y)) for a, b in factor_pairs for x in FACTORS[a] for y in FACTORS[b]
    } - IMPOSSIBLE_PAIRS


def draw_cases(
    count: int, seed: int, tile: int, dtypes: Sequence[str] = FACTORS["dtype"]
) -> Iterator[tuple[Case, bool]]:
    """Draw cases until `count` of them are possible.

    While some pair of choices has not occurred yet, the candidate that covers most missing pairs is taken. After that,
    cases are random.

    Args:
        count: The number of possible cases to draw.
        seed: The seed of the draw.
        tile: The tile size that the lengths "tile ± 1" and "2 tile + 1" refer to.
        dtypes: The dtypes to draw from. Default: all; bfloat16 needs ml_dtypes.

    Yields:
        Each case, and whether inputs can be built for it.

    >>> from regard.testing import draw_cases
    >>> [is_possible for case, is_possible in draw_cases(2, seed=0, tile=8)]
    [True, True]
    """
    rng = np.random.default_rng(seed)
    missing = _all_pairs()
    while count:
        candidates = [_random_case(rng, dtypes) for _ in range(24 if missing else 1)]
        covered = [set(itertools.combinations(case.cells, 2)) & missing for case in candidates]
        best = max(range(len(candidates)), key=lambda i: len(covered[i]))
        # Only masked NaN can be impossible, if the mask leaves every key visible.
        is_possible = (
            candidates[best].values != "NaN masked" or build_inputs(candidates[best], tile) is not None
        )
        if is_possible:
            missing -= covered[best]
            count -= 1
        yield candidates[best], is_possible


def _random_case(rng: np.random.Generator, dtypes: Sequence[str]) -> Case:
    factors = FACTORS | {"dtype": tuple(dtypes)}
    chosen = {name: choices[rng.integers(len(choices))] for name, choices in factors.items()}
    return Case(**chosen, seed=int(rng.integers(2**31)))


def find_uncovered_pairs(cases: list[Case]) -> list[tuple[Any, Any]]:
    """Return the possible pairs of choices of two factors that no case has.

    Args:
        cases: The cases that ran.

    >>> from regard.testing import draw_cases, find_uncovered_pairs
    >>> cases = [case for case, _ in draw_cases(20, seed=0, tile=8)]
    >>> len(find_uncovered_pairs(cases)) < len(find_uncovered_pairs(cases[:10]))
    True
    """
    covered = {pair for case in cases for pair in itertools.combinations(case.cells, 2)}
    return sorted(_all_pairs() - covered, key=repr)


def format_counts(cases: list[Case], skipped: list[Case]) -> str:
    """Format a table of how many cases ran and were skipped for each choice, by dtype.

    Args:
        cases: The cases that ran.
        skipped: The cases that were drawn but are impossible.

    >>> from regard.testing import draw_cases, format_counts
    >>> cases = [case for case, _ in draw_cases(3, seed=0, tile=8)]
    >>> format_counts(cases, []).splitlines()[0].split()
    ['factor', 'choice', 'float64', 'float32', 'bfloat16', 'float16', 'skipped']
    """
    ran = Counter((name, choice, case.dtype) for case in cases for name, choice in case.cells)
    not_run = Counter((name, choice) for case in skipped for name, choice in case.cells)
    dtypes = FACTORS["dtype"]
    rows = [
        [name, str(choice), *(ran[name, choice, dtype] for dtype in dtypes), not_run[name, choice]]
        for name, choices in FACTORS.items()
        if name != "dtype"
        for choice in choices
    ]
    headers = ["factor", "choice", *dtypes, "skipped"]
    align: list[Alignment] = ["left" if header in ("factor", "choice") else "right" for header in headers]
    return format_table(rows, headers, align=align)
