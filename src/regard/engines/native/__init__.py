"""The compiled measure pass: scores, softmax and all accumulators in one read of each tile, without a BLAS.

`accumulate` runs it on the memory of NumPy arrays or CPU tensors, `multiply` also multiplies by a value, and
`describe_pass` says whether it would run. The library is optional: without it, the block loop computes the measures.
This package may import masks and frame.
"""

from __future__ import annotations

from regard.engines.native.library import find_instruction_set, list_instruction_sets, use_instruction_set
from regard.engines.native.measure_pass import (
    accumulate,
    count_processors,
    describe_pass,
    keeps_exponentials,
    multiply,
)

__all__ = [
    "accumulate",
    "count_processors",
    "describe_pass",
    "find_instruction_set",
    "keeps_exponentials",
    "list_instruction_sets",
    "multiply",
    "use_instruction_set",
]
