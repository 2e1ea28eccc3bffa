"""Array types shared by every module."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

# An array of any engine. The engine is found from the array itself, so no static type names them all.
Array = Any
Namespace = Any
Align = Literal["upper_left", "lower_right"]
IntArray = npt.NDArray[np.int64]
