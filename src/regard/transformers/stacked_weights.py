"""`StackedWeights`: the weights of several layers, as `torch.stack(outputs.attentions)` returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from regard.errors import ArgumentTypeError, IndexOutOfRangeError, describe_argument

Tensor = Any  # the types of torch are not followed

DENSE_HINT = (
    "Store the matrices first: attentions = [weights.to_dense() for weights in outputs.attentions]. "
    "If transformers itself raised this, as generate() of Whisper does, record with regard.watch instead."
)


class StackedWeights:
    """Lazy weights of several layers, (layers, batch, heads, q_len, kv_len), with the axes in any order.

    `torch.stack` of lazy weights returns them. `permute` stays lazy. An index of integers and slices computes the
    weights there, layer by layer. Other operations raise an error: `to_dense()` returns the tensor.

    >>> import torch, transformers
    >>> import regard.transformers
    >>> config = transformers.GPT2Config(vocab_size=50, n_embd=8, n_layer=3, n_head=2)
    >>> model = transformers.GPT2Model._from_config(config, attn_implementation="regard").eval()
    >>> with torch.no_grad():
    ...     stacked = torch.stack(model(torch.arange(4)[None], output_attentions=True).attentions, dim=1)
    >>> stacked
    StackedWeights(1, 3, 2, 4, 4) float32
    >>> stacked[0, :, :, -1].shape, stacked.permute(0, 4, 3, 1, 2)[:, :, -1].shape
    (torch.Size([3, 2, 4]), torch.Size([1, 4, 3, 2]))
    """

    def __init__(self, parts: Sequence[Any], axis: int, order: Sequence[int] | None = None) -> None:
        self._parts = tuple(parts)
        self._axis = axis  # of the layers, before the permutation
        self._order = tuple(
            range(parts[0].ndim + 1) if order is None else order
        )  # axes before it, one for each axis

    @property
    def shape(self) -> torch.Size:
        """The shape, as of the tensor that dense weights give."""
        stacked = [*self._parts[0].shape]
        stacked.insert(self._axis, len(self._parts))
        return torch.Size(stacked[axis] for axis in self._order)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._order)

    def dim(self) -> int:
        """Return the number of axes."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of one axis.

        Args:
            dim: The axis.
        """
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights that are read."""
        return self._parts[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights that are read."""
        return self._parts[0].device

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def to(self, *args: Any, **kwargs: Any) -> StackedWeights:
        """Return weights of another dtype or device.

        Args:
            *args: A dtype or a device, as in torch.
            **kwargs: `dtype` or `device`.
        """
        return self._map("to", *args, **kwargs)

    def cpu(self) -> StackedWeights:
        """Return weights on the CPU."""
        return self._map("cpu")

    def float(self) -> StackedWeights:
        """Return weights of dtype float32."""
        return self._map("float")

    def detach(self) -> StackedWeights:
        """Return weights without gradients."""
        return self._map("detach")

    def clone(self) -> StackedWeights:
        """Return the weights, which nothing can change."""
        return self

    def _map(self, method: str, *args: Any, **kwargs: Any) -> StackedWeights:
        parts = [getattr(part, method)(*args, **kwargs) for part in self._parts]
        return StackedWeights(parts, self._axis, self._order)

    def permute(self, *dims: Any) -> StackedWeights:
        """Return the weights with their axes in another order.

        Args:
            *dims: The axes in their new order, each once.
        """
        listed = [*dims[0]] if len(dims) == 1 and not isinstance(dims[0], int) else [*dims]
        axes = [axis + self.ndim if axis < 0 else axis for axis in listed]
        if sorted(axes) != list(range(self.ndim)):
            raise IndexOutOfRangeError(
                "weights.permute",
                received=f"axes {tuple(listed)}",
                expected=f"the axes 0 to {self.ndim - 1}, each once",
                hint=f"The shape is {tuple(self.shape)}.",
            )
        return StackedWeights(self._parts, self._axis, [self._order[axis] for axis in axes])

    def __getitem__(self, index: Any) -> Any:
        """Return weights, equal to `to_dense()[index]`.

        Args:
            index: Integers, slices and an ellipsis.

        Returns:
            The weights as a tensor; lazy weights if the index keeps all queries and keys.

        Raises:
            ArgumentTypeError: If the index has another entry.
            IndexOutOfRangeError: If the index is past the end of an axis, or has too many entries.
            TooLargeError: If the result would take more than 256 MiB in one layer.
        """
        entries = list(index) if isinstance(index, tuple) else [index]
        place = next((i for i, entry in enumerate(entries) if entry is Ellipsis), None)
        if place is not None:
            entries[place : place + 1] = [slice(None)] * (self.ndim - len(entries) + 1)
        entries += [slice(None)] * (self.ndim - len(entries))
        if len(entries) > self.ndim:
            raise IndexOutOfRangeError(
                "weights[…]",
                received=f"{len(entries)} indices",
                expected=f"at most {self.ndim}",
                hint=f"The shape is {tuple(self.shape)}.",
            )
        for entry in entries:
            if isinstance(entry, bool) or not isinstance(entry, int | slice):
                raise ArgumentTypeError(
                    "weights[…]",
                    received=f"an index with {describe_argument(entry)}",
                    expected="integers, slices and an ellipsis",
                    hint="Index the weights of one layer with an array: outputs.attentions[0][:, :, array].",
                )
        by_axis = dict(zip(self._order, entries, strict=True))
        layers = by_axis.pop(self._axis)
        inside = tuple(by_axis[axis] for axis in sorted(by_axis))
        found = [part[inside] for part in self._pick(layers)]
        # Axes that are left, before the permutation and after it.
        kept = [
            axis for axis in sorted(self._order) if axis == self._axis or isinstance(by_axis[axis], slice)
        ]
        wanted = [axis for axis in self._order if axis in kept]
        place = kept.index(self._axis)
        order = [kept.index(axis) for axis in wanted]
        if isinstance(found[0], torch.Tensor):
            stacked = torch.stack(found, place).permute(order)
            return stacked if isinstance(layers, slice) else stacked.squeeze(order.index(place))
        if isinstance(layers, slice):
            return StackedWeights(found, place, order)
        order.remove(place)
        if order != sorted(order):
            self._refuse("weights[…]", "Select the layer first: outputs.attentions[layer].")
        return found[0]

    def _pick(self, layers: int | slice) -> tuple[Any, ...]:
        """Return the layers that an index selects."""
        if isinstance(layers, slice) and self._parts[layers]:
            return self._parts[layers]
        if isinstance(layers, slice):
            self._refuse("weights[…]", "The index selects no layer.")
        if not -len(self._parts) <= layers < len(self._parts):
            raise IndexOutOfRangeError(
                "weights[…]",
                received=f"layer {layers}",
                expected=f"a number from 0 to {len(self._parts) - 1}",
                hint=f"The shape is {tuple(self.shape)}.",
            )
        return (self._parts[layers],)

    def to_dense(self) -> Tensor:
        """Return the weights as a tensor."""
        return torch.stack([part.to_dense() for part in self._parts], self._axis).permute(self._order)

    # What is refused

    def _refuse(self, operation: str, hint: str) -> NoReturn:
        raise ArgumentTypeError(
            operation,
            received=f"lazy weights of {len(self._parts)} layers, {tuple(self.shape)}",
            expected="a tensor, or an operation in O(n) memory: permute, or an index of integers and slices",
            hint=hint,
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse functions of torch."""
        raise ArgumentTypeError(
            f"torch.{getattr(function, '__name__', function)}",
            received="lazy weights of several layers",
            expected="tensors",
            hint=DENSE_HINT,
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Refuse to convert to an array."""
        self._refuse("numpy.asarray(weights)", DENSE_HINT)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"'StackedWeights' object has no attribute {name!r}")
        raise AttributeError(f"StackedWeights are lazy and have no {name!r}. {DENSE_HINT}")

    def __repr__(self) -> str:
        return f"StackedWeights{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"
