"""A pretend device: tensors say that they are on "gpu:0", refuse NumPy and tensors of the CPU, and the CPU computes.

It can lack float64, as MPS does, and it counts what would make a program wait for a real device. Register it once in a
process; `use_device` makes its factories (`torch.zeros(…, device="gpu")`) available in a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = "gpu"
# Operators that take tensors of both devices.
_MIXED = {"_to_copy", "copy_", "index", "index_put_", "index_put", "_index_put_impl_", "set_"}
# Operators whose result has a size that the host must read, or is a number of the host.
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_consecutive", "_unique2"}
_VIEWS = {
    *(
        "view",
        "slice",
        "select",
        "expand",
        "unsqueeze",
        "as_strided",
        "transpose",
        "t",
        "alias",
        "_unsafe_view",
    ),
    *("permute", "detach", "squeeze", "unflatten", "split", "split_with_sizes", "_reshape_alias", "unbind"),
    *("empty", "empty_like", "empty_strided", "lift_fresh", "is_same_size", "diagonal", "unfold"),
}


class _State:
    has_float64 = True
    counts: ClassVar[Counter[str]] = Counter()


class PretendTensor(torch.Tensor):
    """A tensor of the pretend device; `stored` holds its numbers."""

    stored: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, stored: torch.Tensor) -> PretendTensor:
        if stored.dtype == torch.float64 and not _State.has_float64:
            raise TypeError(
                "Cannot convert a gpu Tensor to float64 dtype as the gpu framework doesn't support float64."
            )
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, stored.size(), strides=stored.stride(), storage_offset=stored.storage_offset(), dtype=stored.dtype,
            layout=stored.layout, device=torch.device(DEVICE, 0),
        )  # fmt: skip
        tensor.stored = stored
        return tensor

    def __repr__(self, **_: Any) -> str:
        return f"PretendTensor({self.stored!r})"

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert gpu:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def numpy(self, *, force: bool = False) -> Any:
        return self.detach().cpu().numpy() if force else self.__array__()

    def tolist(self) -> Any:
        _State.counts["waits"] += 1
        return self.stored.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _unwrap(x: Any) -> Any:
    return x.stored if isinstance(x, PretendTensor) else x


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    here = [x for x in tensors if isinstance(x, PretendTensor)]
    elsewhere = [x for x in tensors if not isinstance(x, PretendTensor)]
    if here and any(x.ndim for x in elsewhere) and name not in _MIXED:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, gpu:0 and cpu! ({name})"
        )
    target = kwargs.get("device")
    is_here = torch.device(target).type == DEVICE if target is not None else bool(here)
    _count(name, args, here, elsewhere, is_here)
    kwargs = {**kwargs, "device": torch.device("cpu")} if target is not None else dict(kwargs)
    result = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
    if name.endswith("_") and not name.startswith("__") and isinstance(args[0], PretendTensor):
        return args[0]
    if kwargs.get("out") is not None:
        return kwargs["out"]
    if not is_here:
        return result
    return tree_map(lambda x: PretendTensor(x) if isinstance(x, torch.Tensor) else x, result)


def _count(name: str, args: Any, here: Any, elsewhere: Any, is_here: bool) -> None:
    """Count launches, waits for numbers that the host reads, and copies from the host."""
    if name in _WAITING or (name == "_to_copy" and here and not is_here):
        _State.counts["waits"] += 1
    elif name in ("index", "index_put_", "index_put", "_index_put_impl_") and len(args) > 1:
        indices = [x for x in args[1] if x is not None]
        # A boolean index is converted by nonzero; an index of the host is copied first.
        if any(x.dtype == torch.bool for x in indices):
            _State.counts["waits"] += 1
        if any(not isinstance(x, PretendTensor) for x in indices):
            _State.counts["copies"] += 1
    elif (
        name == "copy_"
        and len(args) > 1
        and isinstance(args[0], PretendTensor) != isinstance(args[1], PretendTensor)
    ):
        _State.counts["copies" if isinstance(args[0], PretendTensor) else "waits"] += 1
    elif name == "_to_copy" and is_here and not here:
        _State.counts["copies"] += 1
    if (here or is_here) and name not in _VIEWS and name not in _WAITING:
        _State.counts["launches"] += 1


class _Factories(TorchDispatchMode):
    """Makes factories and copies with device="gpu" arrive here."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = kwargs.get("device")
        is_target = target is not None and torch.device(target).type == DEVICE
        if is_target or any(isinstance(x, PretendTensor) for x in tree_leaves((args, kwargs))):
            return _dispatch(func, args, kwargs)
        return func(*args, **kwargs)


_library: Any = None
_fallback: Any = None


def _register() -> None:
    global _fallback, _library
    if _library is not None:
        return

    class Module(backend_registration._DummyBackendModule):  # type: ignore[misc]
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16]

    backend_registration._setup_privateuseone_for_python_backend(DEVICE, Module())
    # torch.tensor(…, device="gpu") passes no mode: it asks the backend for memory, and copies.
    _library = torch.library.Library("aten", "IMPL")
    _library.impl(
        "empty_strided",
        lambda size, stride, dtype=None, layout=None, device=None, pin_memory=None: PretendTensor(
            torch.empty_strided(size, stride, dtype=dtype)
        ),
        "PrivateUse1",
    )
    _library.impl(
        "empty.memory_format",
        lambda size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None: PretendTensor(
            torch.empty(size, dtype=dtype)
        ),
        "PrivateUse1",
    )

    def copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
        _State.counts["copies" if isinstance(target, PretendTensor) else "waits"] += 1
        _unwrap(target).copy_(_unwrap(source))
        return target

    _library.impl("_copy_from", copy_from, "PrivateUse1")
    # Autocast converts nothing here; without a kernel of its own it would refuse every operator.
    _fallback = torch.library.Library("_", "IMPL")
    _fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


@contextmanager
def use_device(*, has_float64: bool = True) -> Iterator[Counter[str]]:
    """Make the pretend device available in a block.

    Args:
        has_float64: Whether the device has float64.

    Yields:
        Counts of "launches", of "waits" for the device, and of "copies" from the host.
    """
    from regard.engines import registry, torch_precision

    _register()
    torch_precision._computes_float64.cache_clear()
    _State.has_float64, before = has_float64, _State.has_float64
    _State.counts.clear()
    engines = dict(registry._TORCH_ENGINES)  # an engine remembers what its device can do
    registry._TORCH_ENGINES.clear()
    products = [
        {DEVICE: table["cpu"]} for table in (torch_precision._SETTINGS, torch_precision._IEEE_PRODUCTS)
    ]
    try:
        with (
            mock.patch.dict(torch_precision._SETTINGS, products[0]),  # the CPU computes, as its settings say
            mock.patch.dict(torch_precision._IEEE_PRODUCTS, products[1]),
            _Factories(),
        ):
            yield _State.counts
    finally:
        _State.has_float64 = before
        torch_precision._computes_float64.cache_clear()
        registry._TORCH_ENGINES.clear()
        registry._TORCH_ENGINES.update(engines)
