"""The factors of the case matrix and their choices; a case is one choice from every factor."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Any

MASK_ATOMS = (
    "causal",
    "window",
    "two_sided",
    "padding",
    "left_padding",
    "document",
    "prefix",
    "first",
    "dense",
)

# The factors of the case matrix, and their choices. A case is one choice from every factor.
FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": ("float64", "float32", "bfloat16", "float16"),
    "mask": (
        "none",
        *MASK_ATOMS,
        *(f"{a} & {b}" for a, b in itertools.combinations(MASK_ATOMS, 2)),
        *(f"{a} | ~{b}" for a, b in itertools.combinations(MASK_ATOMS, 2)),
        "triple",
    ),
    "q_len": (0, 1, 2, 31, 33, 257, "tile - 1", "tile + 1", "2 tile + 1"),
    "kv_len": (0, 1, 2, 31, 33, 257, "tile - 1", "tile + 1", "2 tile + 1"),
    "head_dim": (1, 2, 3, 8, 64, 72, 129),
    "value_dim": ("head_dim", 1, 5, 48),
    "heads": ("none", "three", "batch", "grouped", "multi-query"),
    "layout": ("contiguous", "transposed", "expanded", "sliced", "reversed"),
    "values": ("normal", "large scores", "one-hot", "denormal", "NaN masked", "NaN live"),
    "change": (
        "none",
        "softcap",
        "alibi",
        "bias",
        "relative_bias",
        "sink",
        "scale 0",
        "scale -1",
        "scale 1e-30",
    ),
}


@dataclass(frozen=True)
class Case:
    """One choice from each factor of `FACTORS`, and the seed of its random numbers.

    >>> from regard.testing import draw_cases
    >>> case, is_possible = next(draw_cases(1, seed=0, tile=8))
    >>> case.dtype, case.mask, is_possible
    ('float16', 'causal | ~first', True)
    """

    dtype: str
    mask: str
    q_len: Any
    kv_len: Any
    head_dim: int
    value_dim: Any
    heads: str
    layout: str
    values: str
    change: str
    seed: int

    @property
    def cells(self) -> list[tuple[str, Any]]:
        """The (factor, choice) pairs of the case."""
        return [(name, getattr(self, name)) for name in FACTORS]


assert [field.name for field in fields(Case)][:-1] == list(FACTORS)
