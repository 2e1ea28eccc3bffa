"""Calling conventions: how a function expects its arrays, its mask and its options, and how to call it accordingly."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np

from regard.errors import ArgumentError
from regard.testing.cases import lay_out
from regard.testing.conformance.attention_steps import Align, AttentionCall, AttentionResult


class NumpyArrays:
    """NumPy: float64 by default, no gradients. The base class of the other libraries."""

    dtype = "float64"
    dtypes: tuple[str, ...] = ("float64", "float32")
    has_gradients = False

    def from_numpy(self, array: Any, dtype: str) -> Any:
        """Convert a NumPy array to `dtype`, keeping its strides; boolean arrays stay boolean."""
        return array if array.dtype == bool else array.astype(dtype, copy=False)

    def broadcast_to(self, array: Any, shape: tuple[int, ...]) -> Any:
        """Broadcast an array without copying it."""
        return np.broadcast_to(array, shape)

    def to_numpy(self, array: Any) -> Any:
        """Convert an array to NumPy, half precision to float32."""
        return np.asarray(array)

    def compute_gradients(
        self, fn: Callable[..., Any], arrays: list[Any], output_gradient: Any
    ) -> tuple[Any, list[Any]]:
        """Compute the gradients of a function's arguments from the gradient of its output."""
        raise NotImplementedError("NumPy has no gradients")


class TorchArrays(NumpyArrays):
    """PyTorch on one device."""

    dtype = "float32"
    dtypes = ("float64", "float32", "float16", "bfloat16")
    has_gradients = True

    def __init__(self, device: str) -> None:
        self.device = device

    def from_numpy(self, array: Any, dtype: str) -> Any:
        import torch

        if array.dtype == bool:
            return torch.from_numpy(np.array(array)).to(self.device)
        numpy_dtype = "float32" if dtype == "bfloat16" else dtype
        tensor = torch.from_numpy(array if array.dtype == numpy_dtype else array.astype(numpy_dtype))
        return tensor.to(self.device, getattr(torch, dtype))

    def broadcast_to(self, array: Any, shape: tuple[int, ...]) -> Any:
        return array.expand(shape)

    def to_numpy(self, array: Any) -> Any:
        array = array.detach().cpu()
        return (array.float() if array.itemsize < 4 else array).numpy()

    def compute_gradients(
        self, fn: Callable[..., Any], arrays: list[Any], output_gradient: Any
    ) -> tuple[Any, list[Any]]:
        import torch

        leaves = [array.detach().requires_grad_() for array in arrays]
        returned, output = fn(*leaves)
        gradients = torch.autograd.grad(
            output,
            leaves,
            self.from_numpy(output_gradient, str(output.dtype).removeprefix("torch.")),
            allow_unused=True,
        )
        return returned, [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, gradients, strict=True)
        ]


class JaxArrays(NumpyArrays):
    """JAX on its default device."""

    dtype = "float32"
    dtypes = ("float32", "float16", "bfloat16")
    has_gradients = True

    def from_numpy(self, array: Any, dtype: str) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(array) if array.dtype == bool else jnp.asarray(array, dtype=dtype)

    def broadcast_to(self, array: Any, shape: tuple[int, ...]) -> Any:
        import jax.numpy as jnp

        return jnp.broadcast_to(array, shape)

    def to_numpy(self, array: Any) -> Any:
        return np.asarray(array.astype("float32") if array.dtype.itemsize < 4 else array)

    def compute_gradients(
        self, fn: Callable[..., Any], arrays: list[Any], output_gradient: Any
    ) -> tuple[Any, list[Any]]:
        import jax

        output, vjp, returned = jax.vjp(lambda *inputs: fn(*inputs)[::-1], *arrays, has_aux=True)
        return returned, list(vjp(self.from_numpy(output_gradient, output.dtype.name)))


def get_library(name: str, device: str = "cpu") -> NumpyArrays:
    """Return the array library of a name."""
    return {"numpy": NumpyArrays, "torch": lambda: TorchArrays(device), "jax": JaxArrays}[name]()


MaskConvention = Literal["keep", "drop", "additive"]


class OutputError(Exception):
    """The function returned something else than an array of numbers with the axes of the layout."""


@dataclass(frozen=True)
class CallingConvention:
    """How an attention function `fn(query, key, value, …)` is called.

    Args:
        layout: The axes of query, key, value and output in order: b batch, h heads, n positions, d the entries of a
            head. Axes in brackets are packed into one. An axis that is left out does not exist.
        mask: "keep" if True = attend, "drop" if True = ignore, "additive" for 0 and −inf, None if it takes no mask.
        causal: The corner of its causal triangle; None if unknown, then it is called with q_len = kv_len only.
        library: The arrays it takes: "numpy", "torch" or "jax".
        mask_argument: The name of its mask argument; None if it has none.
        causal_argument: The name of its causal flag; None if it has none.
        scale_argument: The name of its scale argument; None if it has none.
        heads_argument: The name of the argument for the number of heads; None if it has none.
        gqa_argument: The name of the flag for grouped heads; None if it has none.
        grouped: Whether it accepts fewer key heads than query heads.
        dtypes: The dtypes it supports. Default: the library's dtypes.
        device: The device of torch tensors.
        returns: The order of the pair, if it returns two arrays.
        unsupported: Capabilities that it does not support. Failures there are not findings, and probes of other
            capabilities that need one of them are skipped.

    Raises:
        ArgumentError: If a field has a value that is not listed above.

    >>> CallingConvention("n b h d").shape({"batch": 2, "heads": 3, "n": 5, "d": 4})
    (5, 2, 3, 4)
    >>> CallingConvention("b n (h d)", heads_argument="num_heads").shape({"batch": 2, "heads": 3, "n": 5, "d": 4})
    (2, 5, 12)
    """

    layout: str = "b h n d"
    mask: MaskConvention | None = "keep"
    causal: Align | None = None
    library: Literal["numpy", "torch", "jax"] = "numpy"
    mask_argument: str | None = "mask"
    causal_argument: str | None = None
    scale_argument: str | None = None
    heads_argument: str | None = None
    gqa_argument: str | None = None
    grouped: bool = False
    dtypes: tuple[str, ...] = ()
    device: str = "cpu"
    returns: Literal["output, weights", "weights, output"] = "output, weights"
    unsupported: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("dtypes", "unsupported"):  # accept lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        letters = re.sub(r"[() ]", "", self.layout)
        is_balanced = re.fullmatch(r"(\s*(\w|\(\s*\w(\s+\w)*\s*\)))+\s*", self.layout)
        if (
            not is_balanced
            or len(set(letters)) < len(letters)
            or not {"n", "d"} <= set(letters) <= set("bhnd")
        ):
            raise ArgumentError(
                "CallingConvention",
                received=f"layout {self.layout!r}",
                expected='the axes b, h, n and d in order, such as "b h n d" or "b n (h d)"; n and d are required',
                hint="b is batch, h heads, n positions, d the entries of a head; brackets pack axes into one.",
            )
        for name, choices in (
            ("mask", ("keep", "drop", "additive", None)),
            ("causal", ("upper_left", "lower_right", None)),
            ("library", ("numpy", "torch", "jax")),
            ("returns", ("output, weights", "weights, output")),
        ):
            if getattr(self, name) not in choices:
                raise ArgumentError(
                    "CallingConvention",
                    received=f"{name} {getattr(self, name)!r}",
                    expected=f"{name} as one of {', '.join(map(repr, choices))}",
                    hint="See the docstring of CallingConvention.",
                )

    # -- Layout ----------------------------------------------------------------------------------------------

    @cached_property
    def axis_groups(self) -> list[str]:
        """The axes of an array, packed ones together: ["b", "n", "hd"]."""
        return [re.sub(r"[() ]", "", group) for group in re.findall(r"\([^)]*\)|\w", self.layout)]

    @cached_property
    def axes(self) -> str:
        """All axes in order, packed or not: "bnhd"."""
        return "".join(self.axis_groups)

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """Return the shape of an array in this layout.

        Args:
            sizes: The sizes of batch, heads, n and d.
        """
        size = {"b": sizes["batch"], "h": sizes["heads"], "n": sizes["n"], "d": sizes["d"]}
        return tuple(int(np.prod([size[axis] for axis in group])) for group in self.axis_groups)

    def to_layout(self, array: Any) -> Any:
        """Rearrange an array (batch, heads, n, d) to this layout.

        Args:
            array: The NumPy array.
        """
        axes = [axis for axis in "bhnd" if axis in self.axes]
        array = array.reshape([size for axis, size in zip("bhnd", array.shape, strict=True) if axis in axes])
        array = np.ascontiguousarray(array.transpose([axes.index(axis) for axis in self.axes]))
        sizes = dict(zip(self.axes, array.shape, strict=True))
        return array.reshape([int(np.prod([sizes[axis] for axis in group])) for group in self.axis_groups])

    def from_layout(self, array: Any, heads: int) -> Any:
        """Rearrange an array of this layout to (batch, heads, n, d). Its sizes may differ from those of the call.

        Args:
            array: The NumPy array.
            heads: The number of heads, to unpack a packed axis.

        Raises:
            OutputError: If the array has another number of axes.
            ValueError: If the packed axis is not a multiple of `heads`.
        """
        if array.ndim != len(self.axis_groups):
            raise OutputError(f"{array.shape}, but layout {self.layout!r} has {len(self.axis_groups)} axes")
        sizes: list[int] = []
        for group, size in zip(self.axis_groups, array.shape, strict=True):
            if len(group) == 1:
                sizes.append(size)
            else:  # only heads and d can be unpacked
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

    # -- The call --------------------------------------------------------------------------------------------

    @cached_property
    def array_library(self) -> NumpyArrays:
        """The array library that the function takes."""
        return get_library(self.library, self.device)

    def find_obstacle(self, call: AttentionCall, gradients: bool) -> str:
        """Return why the function cannot be called this way; empty if it can.

        Args:
            call: The call.
            gradients: Whether gradients are needed.
        """
        sizes = call.sizes
        is_square = sizes["q_len"] == sizes["kv_len"]
        library = self.array_library
        obstacles = {
            "the layout has no batch axis": sizes["batch"] != 1 and "b" not in self.axes,
            "the layout has no heads axis": sizes["heads"] != 1 and "h" not in self.axes,
            "no mask argument": call.mask is not None and (self.mask is None or self.mask_argument is None),
            "no causal argument": call.causal is not None and self.causal_argument is None,
            "causal alignment not described": call.causal is not None
            and not is_square
            and self.causal is None,
            "no scale argument": call.scale is not None and self.scale_argument is None,
            "grouped heads are not described": sizes["heads"] != sizes["kv_heads"] and not self.grouped,
            f"{call.dtype} is not supported": call.dtype not in (self.dtypes or library.dtypes),
            f"{self.library} has no gradients": gradients and not library.has_gradients,
            f"{self.library} has no negative strides": call.memory == "reversed" and self.library != "numpy",
            "jax has no strides": call.memory != "contiguous" and self.library == "jax",
        }
        return next((reason for reason, holds in obstacles.items() if holds), "")

    def invoke(
        self, fn: Callable[..., Any], call: AttentionCall, output_gradient: Any = None
    ) -> AttentionResult:
        """Call a function, and return its result in canonical form. Errors of the function propagate.

        Args:
            fn: The attention function.
            call: The call.
            output_gradient: The gradient of the output, (batch, heads, q_len, value_dim), if gradients are needed.

        Raises:
            OutputError: If the output does not have the axes of the layout.
        """
        library = self.array_library
        arrays = [self._convert_array(x, call) for x in (call.query, call.key, call.value)]
        options = self._build_options(call)
        passed = [*arrays, *(x for x in options.values() if hasattr(x, "shape"))]
        before = [np.array(library.to_numpy(x)) for x in passed]

        def run(*inputs: Any) -> tuple[Any, Any]:
            returned = fn(*inputs, **options)
            output = self._split_pair(returned)[0]
            return returned, output

        if output_gradient is None:
            returned, gradients = run(*arrays)[0], None
        else:
            returned, gradients = library.compute_gradients(run, arrays, self.to_layout(output_gradient))
        output, weights = self._split_pair(returned)
        heads, kv_heads = call.sizes["heads"], call.sizes["kv_heads"]
        after = zip(before, map(library.to_numpy, passed), strict=True)
        inputs_changed = any(not np.array_equal(x, y, equal_nan=True) for x, y in after)
        if not hasattr(output, "shape"):
            raise OutputError(f"a {type(output).__name__}, expected an array")
        # A copy, since a function may write its next result into the same memory.
        numbers = np.array(library.to_numpy(output))
        if numbers.dtype.kind in "biucOSU":
            raise OutputError(f"an array of {numbers.dtype}, expected floating-point numbers")
        canonical = self.from_layout(numbers, heads)
        result = AttentionResult(
            canonical, self._convert_weights(weights, call), inputs_changed=inputs_changed
        )
        if gradients is not None:
            counts = (heads, kv_heads, kv_heads)
            converted = (
                self.from_layout(library.to_numpy(x), n) for x, n in zip(gradients, counts, strict=True)
            )
            result = result._replace(gradients=tuple(converted))
        return result

    def _split_pair(self, returned: Any) -> tuple[Any, Any]:
        """Return (output, weights) from the return value; weights are None if it is a single array."""
        if not isinstance(returned, tuple | list):
            return returned, None
        first, second = (*returned, None, None)[:2]
        return (second, first) if self.returns == "weights, output" else (first, second)

    def _convert_array(self, array: Any, call: AttentionCall) -> Any:
        """Convert an array to this layout and library, with the memory layout of the call."""
        dtype = "float32" if call.dtype == "bfloat16" else call.dtype
        array = self.to_layout(array).astype(dtype)
        if call.memory in ("transposed", "sliced"):
            array = lay_out(array, call.memory)
        elif call.memory == "reversed":
            array = array[::-1].copy()[::-1]
        elif call.memory == "expanded" and "b" in self.axis_groups:
            one = self.array_library.from_numpy(array.take([0], axis=self.axis_groups.index("b")), call.dtype)
            return self.array_library.broadcast_to(one, array.shape)
        return self.array_library.from_numpy(array, call.dtype)

    def _build_options(self, call: AttentionCall) -> dict[str, Any]:
        """Build the keyword arguments of the call."""
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
            options[self.mask_argument] = self.array_library.from_numpy(np.array(mask), call.dtype)
        if call.causal is not None and self.causal_argument:
            options[self.causal_argument] = True
        if call.scale is not None and self.scale_argument:
            options[self.scale_argument] = call.scale
        if self.heads_argument:
            options[self.heads_argument] = call.sizes["heads"]
        if self.gqa_argument and call.sizes["heads"] != call.sizes["kv_heads"]:
            options[self.gqa_argument] = True
        return options

    def _convert_weights(self, weights: Any, call: AttentionCall) -> Any:
        """Return weights as (batch, heads, q_len, kv_len) or transposed; None if the array is something else."""
        if not hasattr(weights, "shape"):
            return None
        sizes = call.sizes
        lead = [n for axis, n in (("b", sizes["batch"]), ("h", sizes["heads"])) if axis in self.axes]
        is_lse = weights.shape[-1:] == (1,)  # or the weights of one key, which look the same
        if list(weights.shape[:-2]) != lead or weights.ndim != len(lead) + 2 or is_lse:
            return None
        converted = np.array(self.array_library.to_numpy(weights))
        return converted.reshape((sizes["batch"], sizes["heads"], *converted.shape[-2:]))

    def __str__(self) -> str:
        """Format the fields that differ from the default, as arguments."""
        default = CallingConvention()
        shown = [("layout", self.layout), ("mask", self.mask), ("library", self.library)]
        shown += [
            (field.name, getattr(self, field.name))
            for field in fields(self)
            if field.name not in ("layout", "mask", "library")
            and getattr(self, field.name) != getattr(default, field.name)
        ]
        return ", ".join(f"{name}={value!r}" for name, value in shown)
