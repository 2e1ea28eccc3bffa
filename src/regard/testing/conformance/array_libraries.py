"""Array libraries that the kit can call functions with: conversion, broadcasting and gradients of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


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
        """Compute the gradients of a function's arguments from the gradient of its output.

        Args:
            fn: Returns a pair: its return value, and the output in it.
            arrays: The arguments of `fn`.
            output_gradient: The gradient of the output, in NumPy.

        Returns:
            The return value, and one gradient for each argument.
        """
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
    """Return the array library of a name.

    Args:
        name: "numpy", "torch" or "jax".
        device: The device of torch tensors.
    """
    return {"numpy": NumpyArrays, "torch": lambda: TorchArrays(device), "jax": JaxArrays}[name]()
