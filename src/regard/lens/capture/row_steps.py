"""Steps of `generate()` by a short way: one unmasked row over the keys of the last call and one more.

Such a step differs from the last one in query, key, value and lse only. Building its record in full would take most of
the time that `watch` adds to a step.
"""

from __future__ import annotations

import math
from threading import Lock
from typing import Any

import torch
from torch import nn

from regard.lens.capture.captured_args import NUMPY_DTYPES, CapturedArgs

Tensor = Any  # the types of torch are not followed

# Keys with at most this many numbers are compared whole with those of the last step; of more, a sample and the newest.
MAX_COMPARED, NEWEST, SAMPLES = 1 << 17, 64, 64


class RowSteps:
    """The steps of one cache that are waiting to be joined.

    Args:
        query: Query of the last call, one row.
        key: Its key.
        value: Its value.
        options: Dropout, `is_causal`, scale and `enable_gqa` of the call, which all steps share.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, options: tuple[Any, ...]) -> None:
        self.queries: list[Tensor] = []
        self.lses: list[Tensor] = []
        self.key, self.value_dim = key, value.shape[-1]
        self.options = options
        self.lock = Lock()
        self._query_shape, self._dtype, self._key_lead = query.shape, query.dtype, tuple(key.shape[:-2])
        self._value_lead, self._head_dim = tuple(value.shape[:-2]), key.shape[-1]
        self._length = key.shape[-2]
        self._numbers = self._next_numbers = key.numpy()
        self._last_number = (-1,) * value.ndim
        self._given: tuple[Any, Any] | None = None  # other arguments of the last step, as they were passed

    @staticmethod
    def accept(args: CapturedArgs) -> bool:
        """Return whether a call is one unmasked row of a kernel whose lse is known, on the CPU."""
        return (
            args.lse is not None
            and args.edits is None
            and args.attn_mask is None
            and not args.is_causal
            and args.query.shape[-2] == 1
            and args.key.is_cpu
            and args.key.dtype in NUMPY_DTYPES
        )

    def matches(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call is the next step.

        Args:
            module: The module that ran.
            args: Arguments of `F.scaled_dot_product_attention`, as they were passed.
            kwargs: Its keyword arguments; `attn_mask` is None.

        Returns:
            Whether `append` may be called. If not, the call is recorded in full, which finds out why.
        """
        if len(args) < 3 or module.training:
            return False
        query, key, value = args[:3]
        if not type(query) is type(key) is type(value) is torch.Tensor:
            return False
        length = self._length + 1
        if (
            key.shape != (*self._key_lead, length, self._head_dim)
            or value.shape != (*self._value_lead, length, self.value_dim)
            or query.shape != self._query_shape
            or not query.dtype is key.dtype is self._dtype
        ):
            return False
        if self._given != (args[3:], kwargs):
            if CapturedArgs(*args, **kwargs)[4:8] != self.options:
                return False
            self._given = args[3:], dict(kwargs)
        # Tensors that may be overwritten are copied, and those with a graph detached.
        if key.is_inference() or key._version or query._version:
            return False
        if key.requires_grad or query.requires_grad or value.requires_grad:
            return False
        if not value.numpy()[self._last_number]:
            return False  # it may not have been written
        numbers = key.numpy()
        if not have_equal_keys(numbers[..., :-1, :], self._numbers, NEWEST, MAX_COMPARED):
            return False
        self._next_numbers = numbers
        return True

    def append(self, query: Tensor, key: Tensor, lse: Tensor) -> None:
        """Add a step for which `matches` returned True."""
        with self.lock:
            self.queries.append(query)
            self.lses.append(lse)
            self.key, self._numbers = key, self._next_numbers
            self._length += 1


def have_equal_keys(a: Any, b: Any, newest: int, max_compared: int) -> bool:
    """Compare keys: all of them if they are few, else a sample and the newest.

    Args:
        a: Keys, of NumPy, which compares several numbers at once, or of torch.
        b: Other keys, of the same shape.
        newest: How many of the last keys are compared in any case.
        max_compared: Up to this many numbers, all are compared.
    """
    if math.prod(a.shape) > max_compared:
        stride = max(1, a.shape[-2] // SAMPLES)
        if not bool((a[..., ::stride, :] == b[..., ::stride, :]).all()):
            return False
        a, b = a[..., -newest:, :], b[..., -newest:, :]
    return bool((a == b).all())
