"""`PatchGrid`: where the patches of one image are among the tokens of a sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.types import Array, IntArray
from regard.validation import check_count


@dataclass(frozen=True)
class PatchGrid:
    """The patches of one image among the tokens of a sequence.

    Patches are consecutive tokens, row after row. Class tokens, registers, text and other images are before or after
    them.

    Args:
        rows: Patches from top to bottom.
        columns: Patches from left to right.
        before: Tokens before the first patch.
        after: Tokens after the last patch.
        names: Names of the first tokens, such as ("class", "register 1"); at most `before`.
        block: Patches are listed in blocks of block × block, and row after row within each: the order in which the
            vision model of Qwen2-VL reads them, because it merges each block to one token later.

    Raises:
        ArgumentError: If a number is out of range, there are more names than tokens before the patches, or rows and
            columns are not multiples of `block`.

    >>> PatchGrid(14, 14, before=1, names=("class",)).length
    197
    >>> PatchGrid(2, 4, block=2).positions
    array([[0, 1, 4, 5],
           [2, 3, 6, 7]])
    """

    rows: int
    columns: int
    before: int = 0
    after: int = 0
    names: tuple[str, ...] = ()
    block: int = 1

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("columns", 1), ("before", 0), ("after", 0), ("block", 1)):
            hint = "Count patches along each side of the image, and tokens that are no patches."
            count = check_count(getattr(self, name), least, None, "PatchGrid", name, "", hint)
            object.__setattr__(self, name, count)
        object.__setattr__(self, "names", tuple(map(str, self.names)))
        if len(self.names) > self.before:
            raise ArgumentError(
                "PatchGrid",
                received=f"{len(self.names)} names for {self.before} tokens before the patches",
                expected="at most one name for each token before the patches",
                hint=f"Pass before={len(self.names)}.",
            )
        if self.rows % self.block or self.columns % self.block:
            raise ArgumentError(
                "PatchGrid",
                received=f"{self.rows} × {self.columns} patches in blocks of {self.block} × {self.block}",
                expected="rows and columns that are multiples of the block",
                hint="If patches are listed row by row, pass block=1.",
            )

    @property
    def num_patches(self) -> int:
        """Number of patches."""
        return self.rows * self.columns

    @property
    def length(self) -> int:
        """Number of tokens of the sequence."""
        return self.before + self.num_patches + self.after

    @property
    def positions(self) -> IntArray:
        """The token of each patch, (rows, columns)."""
        block = self.block
        blocks = np.arange(self.num_patches).reshape(self.rows // block, self.columns // block, block, block)
        return self.before + blocks.transpose(0, 2, 1, 3).reshape(self.rows, self.columns)

    @property
    def others(self) -> IntArray:
        """The tokens that are no patches of this image: (before + after,)."""
        last = self.before + self.num_patches
        return np.concatenate([np.arange(self.before), np.arange(last, self.length)])

    def to_map(self, weights: Array) -> Array:
        """Return the weights of the patches as a map.

        Args:
            weights: Weights of all tokens, (…, length): an array or a tensor.

        Returns:
            (…, rows, columns), of the same array library.

        Raises:
            ArgumentError: If there is not one weight for each token.

        >>> PatchGrid(2, 2, before=1).to_map(np.array([0.5, 0.1, 0.2, 0.0, 0.2]))
        array([[0.1, 0.2],
               [0. , 0.2]])
        """
        if not hasattr(weights, "shape"):
            weights = np.asarray(weights)
        self.check_length(weights.shape[-1] if len(weights.shape) else 0, "grid.to_map")
        return weights[..., self.positions]

    def extend(self, length: int) -> PatchGrid:
        """Return the grid in a sequence that has grown at its end, as that of `generate()` does.

        Args:
            length: Number of tokens; at least those up to the last patch.

        Returns:
            The grid with another `after`.

        Raises:
            ArgumentError: If the patches end after `length` tokens.
        """
        after = length - self.before - self.num_patches
        if after < 0:
            self.check_length(length, "grid.extend")
        return replace(self, after=after)

    def check_length(self, length: int, operation: str, what: str = "weights") -> None:
        """Refuse a number of tokens that the grid does not have.

        Args:
            length: The number of tokens.
            operation: Name of the calling function, for the error message.
            what: What there are `length` of, for the error message.

        Raises:
            ArgumentError: If it is not `self.length`.
        """
        if length != self.length:
            raise ArgumentError(
                operation,
                received=f"{length} {what} for a grid of {self.length} tokens: {self}",
                expected=f"{self.length}, one for each token",
                hint="Read the grid from the configuration and the inputs of the model: "
                "regard.images.read_grids(model.config, inputs).",
            )

    def __str__(self) -> str:
        """Describe the grid: `4 × 6 patches, 1 token before`."""
        parts = [f"{self.rows} × {self.columns} patches"]
        for count, side in ((self.before, "before"), (self.after, "after")):
            if count:
                parts.append(f"{count} token{'s' * (count != 1)} {side}")
        return ", ".join(parts)

    def to_record(self) -> dict[str, Any]:
        """Return the grid as JSON data; `PatchGrid(**record)` reads it."""
        return {
            "rows": self.rows,
            "columns": self.columns,
            "before": self.before,
            "after": self.after,
            "names": list(self.names),
            "block": self.block,
        }
