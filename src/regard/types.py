"""Types that several packages share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # only type checkers need the default, which `typing` has from Python 3.13 on
    from typing_extensions import TypeVar

    ArrayT = TypeVar("ArrayT", default=Any)
else:
    from typing import TypeVar

    ArrayT = TypeVar("ArrayT")

# An array of any engine: a NumPy array, a torch tensor, or an array of a registered library. What a user calls has
# `ArrayT`, the type of the arrays that the matrix was made from.
Array = Any
# The functions of an array library, as in the array API standard.
Namespace = Any
# Position of query 0 if q_len and kv_len differ; see `regard.causal`.
Align = Literal["upper_left", "lower_right"]
# Positions and indices, always NumPy.
IntArray = npt.NDArray[np.int64]

# Largest absolute error allowed on ordinary inputs (normal values, outputs of order one), by dtype: the error rule.
ORDINARY_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}
