"""`AttentionWeights`: the weights of one layer, a lazy matrix that reads like a tensor.

They may be averaged over leading axes of the matrix and multiplied by a number. Sums are linear, so the matrix computes
them, and they are averaged afterwards. The largest weights of a mean are not those of its heads, so they are searched
in the weights of some rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from regard.core.matrix import AttentionMatrix
from regard.errors import ArgumentError, ArgumentTypeError, IndexOutOfRangeError, format_named_shape
from regard.measures import MaxWeight
from regard.transformers.recorded_call import RecordedCall
from regard.transformers.stacked_weights import DENSE_HINT, StackedWeights

Tensor = Any  # the types of torch are not followed

# Weights that are computed at once.
BAND = 1 << 23

# Functions of torch that run the method of the same name.
_METHODS = {"amax", "argmax", "max", "mean", "sum", "topk"}
_METHODS |= {"clone", "detach", "div", "mul", "squeeze", "true_divide"}


class AttentionWeights:
    """The attention weights of one layer, as `outputs.attentions` holds them with `attn_implementation="regard"`.

    They have the shape, dtype and device of the tensor that eager attention returns, and the methods below, which need
    O(n) memory. Reading an index computes the weights there; an index of whole heads, and a mean or sum over heads,
    stay lazy. Other operations raise an error: `to_dense()` returns the tensor. `matrix` is the `AttentionMatrix`, for
    entropies, measures and pages.

    A row that attends to no key is zero, where eager attention has equal weights. Weights are those before dropout.

    >>> import torch, transformers
    >>> import regard.transformers
    >>> config = transformers.GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2)
    >>> model = transformers.GPT2Model._from_config(config, attn_implementation="regard").eval()
    >>> with torch.no_grad():
    ...     weights = model(torch.arange(4)[None], output_attentions=True).attentions[0]
    >>> weights.shape, weights.mean(dim=1).shape
    (torch.Size([1, 2, 4, 4]), torch.Size([1, 4, 4]))
    >>> weights[0, 1].sum(dim=-1).round(decimals=3)
    tensor([1., 1., 1., 1.])
    >>> weights.mean(1)[0, -1].topk(2).indices.shape
    torch.Size([2])
    """

    def __init__(
        self,
        source: RecordedCall | AttentionMatrix,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        *,
        averaged: tuple[int, ...] = (),
        factor: float = 1.0,
        detached: bool = False,
    ) -> None:
        query = source.query if isinstance(source, RecordedCall) else source.problem.query
        self._source = source  # the matrix of a call is built when it is needed
        self.dtype: torch.dtype = dtype or query.dtype
        self.device: torch.device = device or query.device
        self._averaged = (
            averaged  # leading axes of the matrix over which the mean is taken, in ascending order
        )
        self._factor = factor  # of the weights
        self._detached = detached

    def _replace(self, **changes: Any) -> AttentionWeights:
        fields = {"source": self._source, "dtype": self.dtype, "device": self.device}
        fields |= {"averaged": self._averaged, "factor": self._factor, "detached": self._detached}
        return AttentionWeights(**fields | changes)

    @property
    def _matrix(self) -> AttentionMatrix:
        """The matrix before the mean."""
        return self._source.matrix if isinstance(self._source, RecordedCall) else self._source

    def _finish(self, tensor: Tensor, axes: tuple[int, ...] | None = None) -> Tensor:
        """Average what was computed over some axes, and scale it; its dtype is float32 or wider."""
        axes = self._averaged if axes is None else axes
        tensor = tensor.mean(axes) if axes else tensor
        return tensor if self._factor == 1.0 else tensor * self._factor

    def _convert(self, tensor: Tensor) -> Tensor:
        """Convert what was computed to the dtype and the device of these weights."""
        tensor = tensor.detach() if self._detached else tensor
        return tensor.to(device=self.device, dtype=self.dtype if tensor.is_floating_point() else None)

    # Attributes of a tensor

    @property
    def shape(self) -> torch.Size:
        """The shape, (batch, heads, q_len, kv_len)."""
        return torch.Size(size for axis, size in enumerate(self._source.shape) if axis not in self._averaged)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of one axis.

        Args:
            dim: An axis; None for all.
        """
        return self.shape if dim is None else self.shape[dim]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of axes."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of weights."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that `to_dense()` would store."""
        return self.numel() * int(self.dtype.itemsize)

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow from the weights to the model."""
        if self._detached:
            return False
        if isinstance(self._source, RecordedCall):
            return self._source.requires_grad
        return bool(self._source.problem.query.requires_grad or self._source.problem.key.requires_grad)

    def __len__(self) -> int:
        return int(self.shape[0])

    # Conversions

    @property
    def matrix(self) -> AttentionMatrix:
        """The lazy matrix of `regard`, for `entropy()`, `measure(…)`, `explain(…)` and `page(…)`.

        Raises:
            ArgumentError: If these weights are a mean over heads, or multiplied by a number.
        """
        if self._averaged or self._factor != 1.0:
            raise ArgumentError(
                "weights.matrix",
                received="a mean over heads, or weights multiplied by a number",
                expected="the weights of a layer, or of some of its heads",
                hint="Measure first, then average: weights.matrix.entropy().mean(1).",
            )
        return self._matrix

    def to_dense(self) -> Tensor:
        """Compute and store the whole tensor, of `nbytes`."""
        return self._convert(self._finish(self._matrix.to_dense()))

    def to(self, *args: Any, **kwargs: Any) -> AttentionWeights:
        """Return weights on another device, or of another dtype.

        Query and key of a layer are moved, so that their memory on the old device is released. Of some heads, or of a
        mean, the results are moved.

        Args:
            *args: A device, a dtype, both, or a tensor that has them.
            **kwargs: `device` and `dtype`; other arguments of `torch.Tensor.to` have no effect.
        """
        device, dtype, source = self.device, self.dtype, self._source
        for arg in (*args, kwargs.get("device"), kwargs.get("dtype")):
            if isinstance(arg, torch.Tensor | AttentionWeights):
                device, dtype = arg.device, arg.dtype
            elif isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, str | int | torch.device) and not isinstance(arg, bool):
                device = torch.empty(0, device=arg).device  # with its number: "cuda" is the current one
        if device != self.device and isinstance(source, RecordedCall):
            source = source.to(device)
        return self._replace(source=source, dtype=dtype, device=device)

    def cpu(self) -> AttentionWeights:
        """Return weights on the CPU."""
        return self.to("cpu")

    def float(self) -> AttentionWeights:
        """Return weights of dtype float32, in which they are computed."""
        return self.to(torch.float32)

    def half(self) -> AttentionWeights:
        """Return weights of dtype float16."""
        return self.to(torch.float16)

    def bfloat16(self) -> AttentionWeights:
        """Return weights of dtype bfloat16."""
        return self.to(torch.bfloat16)

    def double(self) -> AttentionWeights:
        """Return weights of dtype float64."""
        return self.to(torch.float64)

    def detach(self) -> AttentionWeights:
        """Return weights without gradients."""
        source = self._source.detach() if isinstance(self._source, RecordedCall) else self._source
        return self._replace(source=source, detached=True)

    def clone(self) -> AttentionWeights:
        """Return the weights, which nothing can change."""
        return self

    def squeeze(self, dim: int | None = None) -> AttentionWeights:
        """Return weights without an axis of batch or heads of size 1; by default, without any of them.

        Args:
            dim: The axis. If its size is not 1, nothing changes.
        """
        if dim is not None and dim % self.ndim >= self.ndim - 2:
            self._raise_for("squeeze", "Index the queries or keys instead: weights[..., 0, :].")
        leading = range(self.ndim - 2)
        dims = [
            axis for axis in leading if self.shape[axis] == 1 and (dim is None or axis == dim % self.ndim)
        ]
        index = tuple(0 if axis in dims else slice(None) for axis in leading)
        return self[index] if dims else self

    # Entries

    def __getitem__(self, index: Any) -> Any:
        """Return weights, equal to `to_dense()[index]`.

        Args:
            index: Integers, slices, an ellipsis and at most one array of integers or booleans, as in torch.

        Returns:
            The weights as a tensor; lazy weights if the index keeps all queries and keys, as in `weights[0]`.

        Raises:
            IndexOutOfRangeError: If the index is past the end of an axis, or has too many entries.
            ArgumentTypeError: If the index has several arrays.
            TooLargeError: If the result would take more than 256 MiB.
        """
        full, axes = insert_axes(index, self.shape, self._averaged)
        part = self._matrix[full]
        if isinstance(part, AttentionMatrix):
            return self._replace(source=part, averaged=axes)
        return self._convert(self._finish(part, axes))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    # Reductions

    def sum(self, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
        """Sum the weights.

        Args:
            dim: Axis or axes; None for all. A sum over batch or heads alone stays lazy.
            keepdim: Keep the summed axes, of size 1.
            dtype: Dtype of the result.

        Returns:
            A tensor, or lazy weights.
        """
        return self._reduce(resolve_dims(dim, self.ndim, "sum"), keepdim, dtype, is_mean=False)

    def mean(self, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
        """Average the weights.

        Args:
            dim: Axis or axes; None for all. A mean over batch or heads alone stays lazy: `weights.mean(dim=1)`.
            keepdim: Keep the averaged axes, of size 1.
            dtype: Dtype of the result.

        Returns:
            A tensor, or lazy weights.
        """
        return self._reduce(resolve_dims(dim, self.ndim, "mean"), keepdim, dtype, is_mean=True)

    def _reduce(self, dims: list[int], keepdim: bool, dtype: torch.dtype | None, *, is_mean: bool) -> Any:
        weights = self if dtype is None else self.to(dtype)
        tokens = [axis for axis in dims if axis >= self.ndim - 2]
        count = math.prod(self.shape[axis] for axis in dims)
        if not tokens:
            if keepdim:
                self._raise_for(
                    "keepdim=True", "Leave it out: the result then has fewer axes, and stays lazy."
                )
            kept = [axis for axis in range(len(self._source.shape)) if axis not in self._averaged]
            averaged = tuple(sorted((*self._averaged, *(kept[axis] for axis in dims))))
            return weights._replace(averaged=averaged, factor=self._factor * (1 if is_mean else count))
        total = self._finish(self._matrix.sum(tokens[-1] - self.ndim))
        if others := [axis for axis in dims if axis != tokens[-1]]:
            total = total.sum(others)
        if keepdim:
            total = total.reshape([1 if axis in dims else size for axis, size in enumerate(self.shape)])
        return weights._convert(total / count if is_mean else total)

    def max(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """Find the largest weights.

        Args:
            dim: −1 searches each row, −2 each column, None the whole tensor.
            keepdim: Keep the axis, of size 1.

        Returns:
            A scalar for None, else a named tuple of `values` and `indices`. Ties go to the lowest index.
        """
        if dim is None:
            return self._convert(self._find_largest(-1)[0].max())
        found = self._find_largest(self._resolve_token_axis("max", dim))
        values, indices = (self._convert(part.unsqueeze(dim) if keepdim else part) for part in found)
        return torch.return_types.max((values, indices))

    def amax(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        """Return the largest weights; see `max`.

        Args:
            dim: Axis or axes; None for all weights.
            keepdim: Whether the axes stay, with size 1.
        """
        *others, last = resolve_dims(dim, self.ndim, "amax")
        values = self.max(last, keepdim=True).values
        values = values.amax(others, keepdim=True) if others else values
        return values if keepdim else values.squeeze((*others, last))

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Return the indices of the largest weights; see `max`.

        Args:
            dim: An axis; None for an index into the flattened tensor.
            keepdim: Whether the axis stays, with size 1.
        """
        if dim is not None:
            self._resolve_token_axis("argmax", dim)
            return self.max(dim, keepdim).indices
        values, indices = self._find_largest(-1)
        row = values.flatten().argmax()
        return self._convert(row * self.shape[-1] + indices.flatten()[row])

    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        """Find the k largest weights of each row, largest first; ties go to the lowest index.

        Args:
            k: Number of keys, from 1 to kv_len.
            dim: −1, the axis of the keys.
            largest: True: the smallest weights of a causal row are zeros.
            sorted: Accepted as by torch; the result is always sorted.

        Returns:
            A named tuple of `values` and `indices`, each (…, q_len, k).
        """
        if not largest or self._resolve_token_axis("topk", dim) != -1:
            self._raise_for("topk", "Call topk(k) for the largest weights of each row.")
        if not self._averaged and self._factor > 0:
            values, indices = self._matrix.topk(k)
            values = values * self._factor
        else:
            self._matrix.lazy[..., :0, :].topk(k)  # checks k
            bands = [band.sort(dim=-1, descending=True, stable=True) for band in self._bands()]
            values = torch.cat([band.values[..., :k] for band in bands], -2)
            indices = torch.cat([band.indices[..., :k] for band in bands], -2)
        return torch.return_types.topk((self._convert(values), self._convert(indices)))

    def _find_largest(self, axis: int) -> tuple[Tensor, Tensor]:
        """Return the largest weight of each row (−1) or column (−2) and its index; ties go to the lowest."""
        if not self._averaged and self._factor > 0:
            values, indices = self._matrix.measure(top=MaxWeight(axis)).top
            return values * self._factor, indices
        if axis == -1:
            rows = [band.max(-1) for band in self._bands()]
            return torch.cat([row.values for row in rows], -1), torch.cat([row.indices for row in rows], -1)
        best: tuple[Tensor, Tensor] | None = None
        start = 0
        for band in self._bands():
            values, indices = band.max(-2)
            indices, start = indices + start, start + band.shape[-2]
            if best is not None:
                is_larger = values > best[0]
                values, indices = (
                    torch.where(is_larger, new, old) for new, old in zip((values, indices), best, strict=True)
                )
            best = values, indices
        assert best is not None
        return best

    def _bands(self) -> Iterator[Tensor]:
        """Yield the weights of some rows at a time."""
        rows = max(1, BAND * self.shape[-2] // max(1, math.prod(self._source.shape)))
        for start in range(0, self.shape[-2], rows):
            yield self._finish(self._matrix.lazy[..., start : start + rows, :].to_dense())

    def _resolve_token_axis(self, operation: str, dim: int) -> int:
        axis, *others = resolve_dims(dim, self.ndim, operation)
        if others:
            self._raise_for(
                f"weights.{operation}(dim={dim})", "Pass one axis: −1 for each row, −2 for each column."
            )
        if axis < self.ndim - 2:
            hint = (
                f"Over heads it has as many numbers as the matrix: weights.to_dense().{operation}(dim={dim})."
            )
            self._raise_for(f"weights.{operation}(dim={dim})", hint)
        return axis - self.ndim

    # Arithmetic with numbers

    def __mul__(self, number: Any) -> AttentionWeights:
        """Multiply by a number; the result stays lazy.

        Args:
            number: The factor.
        """
        is_number = isinstance(number, int | float | np.number) or (
            isinstance(number, torch.Tensor | np.ndarray) and number.ndim == 0
        )
        if not is_number:
            self._raise_for(
                "weights * other", "Multiply what you read of them: weights[0, head, row] * other."
            )
        return self._replace(factor=self._factor * float(number))

    def __truediv__(self, number: Any) -> AttentionWeights:
        """Divide by a number; the result stays lazy.

        Args:
            number: The divisor.
        """
        return self.__mul__(1.0 / number)

    __rmul__ = mul = __mul__
    div = true_divide = __truediv__

    # What is refused

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch that needs O(n) memory, such as `torch.mean(weights, dim=1)`; refuse others."""
        name, kwargs = getattr(function, "__name__", str(function)), dict(kwargs or {})
        if name in _METHODS:
            if "input" in kwargs:
                args = (kwargs.pop("input"), *args)
            if name == "mul" and not isinstance(args[0], cls):
                args = args[::-1]
            if isinstance(args[0], cls):
                return getattr(args[0], name)(*args[1:], **kwargs)
        if name == "stack":
            parts, dim = _bind_stack(*args, **kwargs)
            if all(isinstance(part, cls) and part.shape == parts[0].shape for part in parts):
                return StackedWeights(parts, dim % (parts[0].ndim + 1))
        weights = next(_find_weights((args, kwargs)))
        return weights._raise_for(f"torch.{name}", DENSE_HINT)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Refuse to convert to an array."""
        self._raise_for("numpy.asarray(weights)", "Store the matrix first: weights.to_dense().numpy().")

    def numpy(self) -> NoReturn:
        """Refuse to convert to an array."""
        self._raise_for("weights.numpy", "Store the matrix first: weights.to_dense().numpy().")

    def _raise_for_arithmetic(self, other: Any) -> NoReturn:
        self._raise_for("arithmetic with weights", "Store the matrix first: weights.to_dense().")

    __add__ = __radd__ = __sub__ = __rsub__ = __matmul__ = __rmatmul__ = __pow__ = _raise_for_arithmetic
    __lt__ = __le__ = __gt__ = __ge__ = _raise_for_arithmetic
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same object; refuse to compare each weight with a number or an array."""
        if isinstance(other, int | float | np.number | np.ndarray | torch.Tensor):
            self._raise_for_arithmetic(other)
        return self is other

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"'AttentionWeights' object has no attribute {name!r}")
        # An AttributeError, so that hasattr and copy work.
        raise AttributeError(
            f"AttentionWeights are lazy and have no {name!r}. Call weights.to_dense().{name}, which stores "
            f"{self.nbytes:,} bytes, or read fewer weights: weights[0, head, row]."
        )

    def _raise_for(self, operation: str, hint: str) -> NoReturn:
        raise ArgumentTypeError(
            operation,
            received=f"lazy weights of shape {tuple(self.shape)}, which would take {self.nbytes:,} bytes",
            expected="a tensor, or an operation in O(n) memory: an index, sum, mean, max, argmax, topk, * number",
            hint=hint,
        )

    def __repr__(self) -> str:
        shape = format_named_shape(tuple(self.shape), "q_len", "kv_len")
        if self._averaged:
            shape = f"{tuple(self.shape)}, a mean over axes {self._averaged} of {tuple(self._source.shape)},"
        factor = "" if self._factor == 1.0 else f" × {self._factor:g}"
        return f"AttentionWeights{shape} {str(self.dtype).removeprefix('torch.')}{factor}"


def _bind_stack(tensors: Sequence[Any], dim: int = 0) -> tuple[Sequence[Any], int]:
    """Return the arguments of `torch.stack`."""
    return tensors, dim


def _find_weights(arguments: Any) -> Iterator[AttentionWeights]:
    """Yield the lazy weights in nested arguments."""
    if isinstance(arguments, AttentionWeights):
        yield arguments
    elif isinstance(arguments, dict):
        yield from _find_weights(tuple(arguments.values()))
    elif isinstance(arguments, list | tuple):
        for argument in arguments:
            yield from _find_weights(argument)


def resolve_dims(dim: Any, ndim: int, operation: str) -> list[int]:
    """Resolve an axis, several, or None for all, to sorted positions from 0.

    >>> resolve_dims((-1, 0), 4, "sum"), resolve_dims(None, 2, "sum")
    ([0, 3], [0, 1])
    """
    if dim is None or dim == ():
        return list(range(ndim))
    given = [dim] if isinstance(dim, int) else list(dim)
    dims = sorted({axis + ndim if axis < 0 else axis for axis in given})
    if len(dims) != len(given) or not all(0 <= axis < ndim for axis in dims):
        raise ArgumentError(
            f"weights.{operation}",
            received=f"dim={dim}",
            expected=f"distinct axes from {-ndim} to {ndim - 1}",
            hint="The axes are batch, heads, queries and keys.",
        )
    return dims


def insert_axes(
    index: Any, shape: Sequence[int], averaged: tuple[int, ...]
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Extend an index by the axes over which the result is averaged.

    Args:
        index: The index that the caller passed, for an array of `shape`.
        shape: Shape after averaging.
        averaged: Axes of the matrix that are averaged, in ascending order.

    >>> insert_axes((0, -1), (1, 5, 5), (1,))
    ((0, slice(None, None, None), -1, slice(None, None, None)), (0,))
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    given = sum(entry is not None and entry is not Ellipsis for entry in entries)
    dots = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    if given > len(shape) or len(dots) > 1:
        raise IndexOutOfRangeError(
            "weights[index]",
            received=f"{given} indices and {len(dots)} ellipses",
            expected=f"at most {len(shape)} indices and one ellipsis",
            hint=f"The weights have {len(shape)} axes.",
        )
    at = dots[0] if dots else len(entries)
    entries[at : at + 1] = [slice(None)] * (len(shape) - given)
    full: list[Any] = []
    positions: list[int] = []
    result_axes = axis = matrix_axis = 0

    def insert_averaged() -> None:
        nonlocal matrix_axis, result_axes
        while matrix_axis in averaged:
            full.append(slice(None))
            positions.append(result_axes)
            matrix_axis, result_axes = matrix_axis + 1, result_axes + 1

    for entry in entries:
        if entry is not None:
            insert_averaged()
            entry = _resolve_booleans(entry, shape[axis])
            axis, matrix_axis = axis + 1, matrix_axis + 1
        full.append(entry)
        result_axes += _count_axes(entry)
    return tuple(full), tuple(positions)


def _count_axes(entry: Any) -> int:
    """Return the number of axes that an entry of an index gives the result."""
    if entry is None or isinstance(entry, slice):
        return 1
    return int(np.ndim(entry)) if not hasattr(entry, "ndim") else int(entry.ndim)


def _resolve_booleans(entry: Any, size: int) -> Any:
    """Replace a boolean array along one axis by the positions of its true entries."""
    if isinstance(entry, list):
        entry = np.array(entry)
    is_boolean = getattr(entry, "ndim", 0) == 1 and str(getattr(entry, "dtype", "")).endswith("bool")
    if not is_boolean:
        return entry
    if len(entry) != size:
        raise IndexOutOfRangeError(
            "weights[index]",
            received=f"{len(entry)} booleans for an axis of size {size}",
            expected="as many booleans as the axis has entries",
            hint="To select by position, pass integers.",
        )
    return entry.nonzero()[0] if isinstance(entry, np.ndarray) else entry.nonzero()[:, 0]
