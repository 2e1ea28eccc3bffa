"""What differs between array libraries for the kit: arrays in, arrays out, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class NumPy:
    """NumPy: float64 unless asked, no gradients."""

    dtype = "float64"
    dtypes: tuple[str, ...] = ("float64", "float32")
    has_gradients = False

    def array(self, array: Any, dtype: str) -> Any:
        """The array of this library; boolean arrays stay boolean, strides stay."""
        return array if array.dtype == bool else array.astype(dtype, copy=False)

    def broadcast(self, array: Any, shape: tuple[int, ...]) -> Any:
        """An array whose repeated entries share memory."""
        return np.broadcast_to(array, shape)

    def numbers(self, array: Any) -> Any:
        """The numbers as NumPy's, float32 where NumPy has no such dtype."""
        return np.asarray(array)

    def gradients(self, fn: Callable[..., Any], arrays: list[Any], gradient_of: Any) -> tuple[Any, list[Any]]:
        """What `fn(*arrays)` returns and its gradients, where that of the output is `gradient_of`."""
        raise NotImplementedError("NumPy has no gradients")


class Torch(NumPy):
    """PyTorch on one device."""

    dtype = "float32"
    dtypes = ("float64", "float32", "float16", "bfloat16")
    has_gradients = True

    def __init__(self, device: str) -> None:
        self.device = device

    def array(self, array: Any, dtype: str) -> Any:
        import torch

        if array.dtype == bool:
            return torch.from_numpy(np.array(array)).to(self.device)
        there = "float32" if dtype == "bfloat16" else dtype
        tensor = torch.from_numpy(array if array.dtype == there else array.astype(there))
        return tensor.to(self.device, getattr(torch, dtype))

    def broadcast(self, array: Any, shape: tuple[int, ...]) -> Any:
        return array.expand(shape)

    def numbers(self, array: Any) -> Any:
        array = array.detach().cpu()
        return (array.float() if array.itemsize < 4 else array).numpy()

    def gradients(self, fn: Callable[..., Any], arrays: list[Any], gradient_of: Any) -> tuple[Any, list[Any]]:
        import torch

        leaves = [array.detach().requires_grad_() for array in arrays]
        returned, output = fn(*leaves)
        slopes = torch.autograd.grad(
            output,
            leaves,
            self.array(gradient_of, str(output.dtype).removeprefix("torch.")),
            allow_unused=True,
        )
        return returned, [
            torch.zeros_like(x) if slope is None else slope for x, slope in zip(leaves, slopes, strict=True)
        ]


class Jax(NumPy):
    """JAX on its default device."""

    dtype = "float32"
    dtypes = ("float32", "float16", "bfloat16")
    has_gradients = True

    def array(self, array: Any, dtype: str) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(array) if array.dtype == bool else jnp.asarray(array, dtype=dtype)

    def broadcast(self, array: Any, shape: tuple[int, ...]) -> Any:
        import jax.numpy as jnp

        return jnp.broadcast_to(array, shape)

    def numbers(self, array: Any) -> Any:
        return np.asarray(array.astype("float32") if array.dtype.itemsize < 4 else array)

    def gradients(self, fn: Callable[..., Any], arrays: list[Any], gradient_of: Any) -> tuple[Any, list[Any]]:
        import jax

        output, back, returned = jax.vjp(lambda *inputs: fn(*inputs)[::-1], *arrays, has_aux=True)
        return returned, list(back(self.array(gradient_of, output.dtype.name)))


def library(name: str, device: str = "cpu") -> NumPy:
    """The library of that name."""
    return {"numpy": NumPy, "torch": lambda: Torch(device), "jax": Jax}[name]()
