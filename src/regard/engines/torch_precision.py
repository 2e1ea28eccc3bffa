"""Full precision inside a block: autocast is off, and products of float32 numbers are rounded as IEEE 754 says.

`torch.set_float32_matmul_precision("medium")` and TF32 round the inputs of products to 8 or 11 bits, which a score of
10 turns into an error of several percent of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import Lock
from typing import Any

import torch

if not hasattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision"):
    missing = "torch.backends.mkldnn.matmul.fp32_precision"
    raise ImportError(
        f"torch {torch.__version__} has no {missing}, which torch 2.9 added. pip install --upgrade 'regard[torch]'",
        name=missing,
    )

# Settings for float32 products by device type; "none" inherits from `torch.backends.fp32_precision`.
_SETTINGS: dict[str, Any] = {"cpu": torch.backends.mkldnn.matmul, "cuda": torch.backends.cuda.matmul}
_SETTINGS["xpu"] = _SETTINGS["cpu"]  # oneDNN computes for both


_IEEE = ("none", "ieee")
# The attribute calls this function, but takes several times as long, which a small product would notice.
_read_cpu_precision = getattr(torch._C, "_get_fp32_precision_getter", None)


class _IeeeProducts:
    """Blocks with IEEE products on one device type. The setting is global, so threads share one change of it."""

    def __init__(self, setting: Any) -> None:
        self._setting, self._lock = setting, Lock()
        self._depth, self._before = 0, ""

    @property
    def is_unchanged(self) -> bool:
        """Whether no block has changed the setting."""
        return not self._before

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth > 1 or _is_ieee(self._setting):
                return
            self._before = self._setting.fp32_precision
            # Reading returns an inherited precision, which must not be restored as an explicit one.
            self._setting.fp32_precision = "none"
            if self._setting.fp32_precision == self._before:
                self._before = "none"
            self._setting.fp32_precision = "ieee"

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0 and self._before:
                self._setting.fp32_precision, self._before = self._before, ""


_IEEE_PRODUCTS = {device_type: _IeeeProducts(_SETTINGS[device_type]) for device_type in ("cpu", "cuda")}
_IEEE_PRODUCTS["xpu"] = _IEEE_PRODUCTS["cpu"]


def has_ieee_products(device_type: str) -> bool:
    """Return whether products of float32 numbers have full precision on a device type."""
    if device_type == "cpu" and _read_cpu_precision is not None:
        return _read_cpu_precision("mkldnn", "matmul") in _IEEE
    setting = _SETTINGS.get(device_type)
    return setting is None or _is_ieee(setting)


def use_full_precision(device_type: str) -> AbstractContextManager[None]:
    """Switch autocast and reduced-precision products off in a block, and restore the settings afterwards."""
    products = _IEEE_PRODUCTS.get(device_type)
    # If no thread has changed the setting, none will restore it within the block.
    is_full = products is None or (products.is_unchanged and has_ieee_products(device_type))
    if is_full and not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return _switch_precision(device_type)


@contextmanager
def _switch_precision(device_type: str) -> Iterator[None]:
    with torch.autocast(device_type, enabled=False):
        products = _IEEE_PRODUCTS.get(device_type)
        if products is None:
            yield
            return
        with products:
            yield


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes with float64: MPS and some Intel GPUs do not."""
    return device.type in ("cpu", "cuda", "meta") or _computes_float64(device)


@cache
def _computes_float64(device: torch.device) -> bool:
    try:
        return bool((torch.ones(1, dtype=torch.float64).to(device) + 1.0).cpu()[0] == 2.0)
    except (RuntimeError, TypeError, NotImplementedError):
        return False


def widen(tensor: Any) -> Any:
    """Convert a tensor to float64, or to float32 if its device has no float64."""
    return tensor.to(torch.float64 if has_float64(tensor.device) else torch.float32)


def _is_ieee(setting: Any) -> bool:
    return setting.fp32_precision in _IEEE
