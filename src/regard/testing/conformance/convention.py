"""Conventions: how a function wants its arrays, its mask and its options, and how it is called by them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np

from regard.errors import ArgumentError
from regard.testing.conformance.array_libraries import NumPy, library
from regard.testing.conformance.attention_call import Align, Call
from regard.testing.conformance.attention_steps import Answer

Masks = Literal["keep", "drop", "additive"]


class WrongShape(Exception):
    """What came back has not the axes of the layout."""


@dataclass(frozen=True)
class Convention:
    """How an attention function `fn(query, key, value, …)` is called.

    `layout` names the axes of query, key, value and output in order: b batch, h heads, n positions, d the numbers of a
    head; axes in brackets are packed into one. An axis that is left out is one the function does not have.
    `mask`: "keep" True = attend, "drop" True = hidden, "additive" 0 and −inf, None takes no mask.
    `causal`: the corner its causal triangle starts from, None where that is not said: only q_len = kv_len is asked.
    `…_argument`: the names of its options, None where it has none. `without`: capabilities it does not claim.

    >>> Convention("n b h d").shape({"batch": 2, "heads": 3, "n": 5, "d": 4})
    (5, 2, 3, 4)
    >>> Convention("b n (h d)", heads_argument="num_heads").shape({"batch": 2, "heads": 3, "n": 5, "d": 4})
    (2, 5, 12)
    """

    layout: str = "b h n d"
    mask: Masks | None = "keep"
    causal: Align | None = None
    library: Literal["numpy", "torch", "jax"] = "numpy"
    mask_argument: str | None = "mask"
    causal_argument: str | None = None
    scale_argument: str | None = None
    heads_argument: str | None = None
    gqa_argument: str | None = None
    grouped: bool = False  # takes fewer key heads than heads
    dtypes: tuple[str, ...] = ()  # those of the library unless given
    device: str = "cpu"
    returns: Literal["output, weights", "weights, output"] = "output, weights"  # where it returns two
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("dtypes", "without"):  # lists will do
            object.__setattr__(self, name, tuple(getattr(self, name)))
        letters = re.sub(r"[() ]", "", self.layout)
        balanced = re.fullmatch(r"(\s*(\w|\(\s*\w(\s+\w)*\s*\)))+\s*", self.layout)
        if not balanced or len(set(letters)) < len(letters) or not {"n", "d"} <= set(letters) <= set("bhnd"):
            raise ArgumentError(
                "Convention",
                received=f"layout {self.layout!r}",
                expected='the axes b, h, n and d in order, as in "b h n d", "b n (h d)" or "n d"; n and d are needed',
                hint="b is batch, h heads, n positions, d the numbers of a head; brackets pack axes into one.",
            )
        for name, choices in (
            ("mask", ("keep", "drop", "additive", None)),
            ("causal", ("upper_left", "lower_right", None)),
            ("library", ("numpy", "torch", "jax")),
            ("returns", ("output, weights", "weights, output")),
        ):
            if getattr(self, name) not in choices:
                raise ArgumentError(
                    "Convention",
                    received=f"{name} {getattr(self, name)!r}",
                    expected=f"{name} as one of {', '.join(map(repr, choices))}",
                    hint="See the docstring of Convention.",
                )

    # -- arrays ------------------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> list[str]:
        """The axes of an array, those packed into one together: ["b", "n", "hd"]."""
        return [re.sub(r"[() ]", "", group) for group in re.findall(r"\([^)]*\)|\w", self.layout)]

    @cached_property
    def axes(self) -> str:
        """The axes in order, packed or not."""
        return "".join(self.groups)

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The shape of an array of these sizes: batch, heads, n, d."""
        size = {"b": sizes["batch"], "h": sizes["heads"], "n": sizes["n"], "d": sizes["d"]}
        return tuple(int(np.prod([size[axis] for axis in group])) for group in self.groups)

    def arranged(self, array: Any) -> Any:
        """An array (batch, heads, n, d) in this layout."""
        axes = [axis for axis in "bhnd" if axis in self.axes]
        array = array.reshape([size for axis, size in zip("bhnd", array.shape, strict=True) if axis in axes])
        array = np.ascontiguousarray(array.transpose([axes.index(axis) for axis in self.axes]))
        sizes = dict(zip(self.axes, array.shape, strict=True))
        return array.reshape([int(np.prod([sizes[axis] for axis in group])) for group in self.groups])

    def canonical(self, array: Any, heads: int) -> Any:
        """An array of this layout as (batch, heads, n, d); its sizes may be others than were asked for."""
        if array.ndim != len(self.groups):
            raise WrongShape(f"{array.shape}, where layout {self.layout!r} has {len(self.groups)} axes")
        sizes: list[int] = []
        for group, size in zip(self.groups, array.shape, strict=True):
            if len(group) == 1:
                sizes.append(size)
            else:  # heads and d; anything else packed is split by what was asked
                if "h" not in group or len(group) > 2 or (heads and size % heads):
                    raise ValueError(
                        f"an axis of {size} does not hold ({' '.join(group)}) with {heads} heads"
                    )
                width = size // max(heads, 1)
                sizes += [heads if axis == "h" else width for axis in group]
        array = array.reshape(sizes)
        present = [axis for axis in "bhnd" if axis in self.axes]
        array = array.transpose([self.axes.index(axis) for axis in present])
        return array.reshape([array.shape[present.index(axis)] if axis in present else 1 for axis in "bhnd"])

    # -- what it can be asked ----------------------------------------------------------------------------

    @cached_property
    def arrays(self) -> NumPy:
        """Its array library."""
        return library(self.library, self.device)

    def cannot(self, call: Call, gradients: bool) -> str:
        """Why the function cannot be asked this call; nothing where it can."""
        sizes = call.sizes
        square = sizes["q_len"] == sizes["kv_len"]
        reasons = {
            "the layout has no batch": sizes["batch"] != 1 and "b" not in self.axes,
            "the layout has no heads": sizes["heads"] != 1 and "h" not in self.axes,
            "it takes no mask": call.mask is not None and (self.mask is None or self.mask_argument is None),
            "it takes no causal argument": call.causal is not None and self.causal_argument is None,
            "its causal corner is not described": call.causal is not None
            and not square
            and self.causal is None,
            "it takes no scale": call.scale is not None and self.scale_argument is None,
            "grouped heads are not described": sizes["heads"] != sizes["kv_heads"] and not self.grouped,
            f"it does not claim {call.dtype}": call.dtype not in (self.dtypes or self.arrays.dtypes),
            f"{self.library} has no gradients": gradients and not self.arrays.has_gradients,
            f"{self.library} has no negative strides": call.memory == "reversed" and self.library != "numpy",
            "jax has no strides": call.memory != "contiguous" and self.library == "jax",
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    # -- the call ----------------------------------------------------------------------------------------

    def ask(self, fn: Callable[..., Any], call: Call, gradient_of: Any = None) -> Answer:
        """What the function answers, in the kit's own form; whatever it raises is raised."""
        arrays = [self._array(x, call) for x in (call.query, call.key, call.value)]
        options = self._options(call)
        before = [np.array(self.arrays.numbers(x)) for x in arrays]

        def run(*inputs: Any) -> tuple[Any, Any]:
            returned = fn(*inputs, **options)
            output = self._pair(returned)[0]
            return returned, output

        if gradient_of is None:
            returned, slopes = run(*arrays)[0], None
        else:
            returned, slopes = self.arrays.gradients(run, arrays, self.arranged(gradient_of))
        output, weights = self._pair(returned)
        heads, kv_heads = call.sizes["heads"], call.sizes["kv_heads"]
        after = zip(before, map(self.arrays.numbers, arrays), strict=True)
        changed = any(not np.array_equal(x, y, equal_nan=True) for x, y in after)
        if not hasattr(output, "shape"):
            raise WrongShape(f"a {type(output).__name__}, where an array was expected")
        numbers = self.canonical(self.arrays.numbers(output), heads)
        answer = Answer(numbers, self._weights(weights, call), changed=changed)
        if slopes is not None:
            counts = (heads, kv_heads, kv_heads)
            found = (self.canonical(self.arrays.numbers(x), n) for x, n in zip(slopes, counts, strict=True))
            answer = answer._replace(gradients=tuple(found))
        return answer

    def _pair(self, returned: Any) -> tuple[Any, Any]:
        if not isinstance(returned, tuple | list):
            return returned, None
        first, second = (*returned, None)[:2]
        return (second, first) if self.returns == "weights, output" else (first, second)

    def _array(self, array: Any, call: Call) -> Any:
        """The array in this layout, in the memory the call asks for."""
        dtype = "float32" if call.dtype == "bfloat16" else call.dtype
        array = self.arranged(array).astype(dtype)
        if call.memory == "transposed":
            array = array.swapaxes(-1, -2).copy().swapaxes(-1, -2)
        elif call.memory == "sliced":
            wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1] + 1), array.dtype)
            wide[..., 1::2] = array
            array = wide[..., 1::2]
        elif call.memory == "reversed":
            array = array[::-1].copy()[::-1]
        elif call.memory == "expanded" and "b" in self.groups:
            one = self.arrays.array(array.take([0], axis=self.groups.index("b")), call.dtype)
            return self.arrays.broadcast(one, array.shape)
        return self.arrays.array(array, call.dtype)

    def _options(self, call: Call) -> dict[str, Any]:
        """The keyword arguments of the call."""
        options: dict[str, Any] = {}
        if call.mask is not None and self.mask_argument:
            mask = call.mask
            if mask.ndim == 4:
                mask = mask.reshape(
                    [n for axis, n in zip("bhqk", mask.shape, strict=True) if axis in self.axes + "qk"]
                )
            if self.mask == "drop":
                mask = ~mask
            elif self.mask == "additive":
                mask = np.where(mask, 0.0, -np.inf)
            options[self.mask_argument] = self.arrays.array(np.array(mask), call.dtype)
        if call.causal is not None and self.causal_argument:
            options[self.causal_argument] = True
        if call.scale is not None and self.scale_argument:
            options[self.scale_argument] = call.scale
        if self.heads_argument:
            options[self.heads_argument] = call.sizes["heads"]
        if self.gqa_argument and call.sizes["heads"] != call.sizes["kv_heads"]:
            options[self.gqa_argument] = True
        return options

    def _weights(self, weights: Any, call: Call) -> Any:
        """Returned weights as (batch, heads, q_len, kv_len), either way round; None where they are something else."""
        if not hasattr(weights, "shape"):
            return None
        sizes = call.sizes
        lead = [n for axis, n in (("b", sizes["batch"]), ("h", sizes["heads"])) if axis in self.axes]
        if list(weights.shape[:-2]) != lead or weights.ndim != len(lead) + 2:
            return None
        numbers = self.arrays.numbers(weights)
        return numbers.reshape((sizes["batch"], sizes["heads"], *numbers.shape[-2:]))

    def __str__(self) -> str:
        """What differs from the usual, as it would be written."""
        usual = Convention()
        said = [("layout", self.layout), ("mask", self.mask), ("library", self.library)]
        said += [
            (field.name, getattr(self, field.name))
            for field in fields(self)
            if field.name not in ("layout", "mask", "library")
            and getattr(self, field.name) != getattr(usual, field.name)
        ]
        return ", ".join(f"{name}={value!r}" for name, value in said)
