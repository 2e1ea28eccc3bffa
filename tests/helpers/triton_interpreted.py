"""Checks of the Triton kernels in Triton's interpreter; run as a program with TRITON_INTERPRET=1, prints JSON.

The interpreter replaces Triton's functions when Triton is imported, so these checks need a process of their own.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import regard
from regard.engines import triton_launch, triton_pass
from regard.engines.triton_check import check_kernels, compare, compute_exact
from regard.engines.triton_launch import ROW_SUMS, KernelVariant, Launcher, PassInputs
from regard.frame import Frame

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# batch, heads, key heads, queries, keys, head_dim, value_dim
SHAPES = [
    (2, 2, 1, 70, 70, 24, 24),
    (1, 2, 1, 33, 130, 64, 40),
    (1, 2, 2, 1, 77, 16, 16),
    (2, 1, 1, 65, 33, 80, 80),
    (1, 1, 1, 131, 197, 128, 128),
    (2, 1, 1, 3, 1, 1, 1),
]
SHARES = (((0, 1),), ((0, 7), (12, 500)), ())


def make_mask(kind: str, batch: int, rows: int, kv_len: int) -> Any:
    """One of five kinds of masks; the last two differ between the entries of a batch and have rows without keys."""
    align = "lower_right"
    match kind:
        case "none":
            return None
        case "causal":
            return regard.causal(align)
        case "window":
            window = regard.sliding_window(13, align=align)
            return regard.causal(align) & (window | regard.masks.first(3))
        case "padding":
            return regard.padding([max(1, kv_len - 5), kv_len // 2][:batch])
    allowed = np.random.default_rng(rows).random((batch, 1, rows, kv_len)) < 0.3
    allowed[0, 0, rows // 2] = False
    return regard.masks.dense(allowed)


MASKS = ("none", "causal", "window", "padding", "dense")


def make_problem(shape: Any, kind: str, dtype: Any, guard: int = 0) -> tuple[PassInputs, Any, Any]:
    """Draw a matrix and a value; around the keys of each array lie `guard` rows of NaN that nothing may read."""
    batch, heads, kv_heads, rows, kv_len, head_dim, value_dim = shape
    rng = torch.Generator().manual_seed(rows * 1000 + kv_len)

    def draw(pairs: int, length: int, dim: int) -> Any:
        whole = torch.full((pairs, length + 2 * guard, dim), math.nan, dtype=dtype)
        whole[:, guard : guard + length] = torch.randn((pairs, length, dim), generator=rng).to(dtype)
        return whole[:, guard : guard + length]

    query, key, value = (
        draw(batch * heads, rows, head_dim),
        draw(batch * kv_heads, kv_len, head_dim),
        draw(batch * kv_heads, kv_len, value_dim),
    )
    index = np.arange(batch * heads)
    sink = torch.linspace(-1, 1, batch * heads) if kind == "window" else None
    inputs = PassInputs(
        query, key, index, index // (heads // kv_heads), np.arange(rows), Frame((batch, heads), rows, kv_len),
        make_mask(kind, batch, rows, kv_len), head_dim**-0.5, sink,
    )  # fmt: skip
    return inputs, value, inputs.key_index


def list_launches(inputs: PassInputs, value: Any) -> list[KernelVariant]:
    dtype, head_dim, kv_len = inputs.query.dtype, inputs.query.shape[-1], inputs.key.shape[1]
    sums = frozenset(ROW_SUMS)
    top_k = min(8, triton_launch.round_up_power(kv_len + 1, least=1) // 2)
    measure = KernelVariant("measure", dtype, head_dim, row_sums=sums, shares=True, columns=True, cells="sum")
    return [
        KernelVariant("softmax", dtype, head_dim, value.shape[-1], sums),
        measure,
        replace(measure, row_sums=frozenset(), shares=False, columns=False, cells="max", top_k=top_k),
    ]


def run_launch(
    launcher: Launcher, variant: KernelVariant, value: Any, index: Any, exact: Any, cells: Any, lse: bool
) -> Any:
    offset = launcher.kv_len - launcher.rows
    if variant.kernel == "softmax":
        return launcher.run_softmax(variant, value, index, offset)[0]
    stats = (exact["lse"].float(), None) if lse else (exact["max"].float(), exact["sum"])
    return launcher.run_measures(variant, *stats, offset=offset, shares=SHARES, cells=cells)[0]


def check_shapes(every_dtype: str = "") -> dict[str, Any]:
    """Run both kernels on every shape and mask, each at one dtype or at all; errors as shares of what is allowed."""
    worst: dict[str, float] = {}
    count = 0
    for number, (shape, kind) in enumerate(itertools.product(SHAPES, MASKS)):
        for dtype in DTYPES if every_dtype else (DTYPES[number % 3],):
            inputs, value, index = make_problem(shape, kind, dtype)
            launcher = Launcher(inputs)
            cells = (min(5, launcher.rows), min(7, launcher.kv_len))
            exact = compute_exact(inputs, value, index, launcher.kv_len - launcher.rows, SHARES, cells, 8)
            for variant in list_launches(inputs, value):
                results = run_launch(launcher, variant, value, index, exact, cells, lse=number % 2 == 0)
                count += 1
                for name, share in compare(results, exact, variant):
                    key = f"{str(dtype)[6:]} {variant.kernel} {name}"
                    worst[key] = max(worst.get(key, 0.0), share)
                    if not share <= 1:
                        return {"failed": f"{shape} {kind} {variant.name}: {name} {share}"}
    return {"failed": "", "launches": count, "worst": worst}


class AddressCheck:
    """Passes the calls of the interpreter's memory functions on if every address lies in an array of the launch."""

    def __init__(self) -> None:
        from triton.runtime import interpreter

        self._real, self._ranges, self.count = interpreter._interpreter, [], 0
        interpreter._interpreter = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def watch(self, kernel: Any) -> None:
        kernel.add_pre_run_hook(lambda *args, **kwargs: self._list_ranges((*args, *kwargs.values())))

    def _list_ranges(self, arguments: Any) -> None:
        self._ranges = []
        for tensor in arguments:
            if isinstance(tensor, torch.Tensor):
                itemsize = tensor.element_size()
                steps = (step * itemsize for step in tensor.stride())
                self._ranges.append(
                    (tensor.data_ptr(), list(zip(tensor.shape, steps, strict=True)), itemsize)
                )

    def _check(self, addresses: Any, mask: Any) -> None:
        found = np.unique(addresses[np.broadcast_to(mask, addresses.shape)]).astype(np.int64)
        self.count += len(found)
        allowed = np.zeros(found.shape, bool)
        for start, axes, itemsize in self._ranges:
            offset = found - start
            inside = offset >= 0
            # An address is inside if it is start + Σ index · step for an index inside the shape; steps descend.
            for size, step in sorted(axes, key=lambda axis: -axis[1]):
                position = np.minimum(offset // max(step, 1), size - 1)
                offset = offset - position * step
            allowed |= inside & (offset >= 0) & (offset < itemsize)
        if not allowed.all():
            raise MemoryError(f"{int((~allowed).sum())} of {len(found)} addresses outside every array")

    def load(self, pointers: Any, mask: Any, *rest: Any) -> Any:
        self._check(pointers, mask)
        return self._real.load(pointers, mask, *rest)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._check(pointers, mask)
        return self._real.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._check(pointers, mask)
        return self._real.atomic_rmw(operation, pointers, value, mask, *rest)


# Each overrun removes one bound: the key after the last one is read, a row after the last one is written.
OVERRUNS = {
    "": ("", ""),
    "read": ("mask=(d[:, None] < D) & (j[None, :] < kv_len)", "mask=(d[:, None] < D)"),
    "write": ("tl.store(SUM + out, all_total, mask=live)", "tl.store(SUM + out, all_total)"),
}


def check_addresses(folder: str) -> dict[str, Any]:
    """Run the kernels with every address checked: as they are, and with each bound of `OVERRUNS` removed."""
    name = "regard.engines.triton_kernels"
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text("utf-8")
    check = AddressCheck()
    found = {}
    for overrun, (before, after) in OVERRUNS.items():
        assert not before or source.count(before) == 1
        path = Path(folder) / f"kernels_{overrun}.py"
        path.write_text(source.replace(before, after) if before else source, "utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        kernels = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernels)
        check.watch(kernels.run_softmax_pass)
        check.watch(kernels.run_measure_pass)
        check.count = 0
        found[overrun] = {"cause": _find_overrun(), "count": check.count}
    return found


def _find_overrun() -> str:
    for shape, kind in itertools.product(SHAPES[:3], ("none", "dense")):
        inputs, value, index = make_problem(shape, kind, torch.float16, guard=64)
        launcher = Launcher(inputs)
        cells = (min(5, launcher.rows), min(7, launcher.kv_len))
        exact = compute_exact(inputs, value, index, 0, SHARES, cells, 8)
        try:
            for variant in list_launches(inputs, value):
                run_launch(launcher, variant, value, index, exact, cells, lse=False)
        except Exception as error:
            return str(error)
    return ""


def check_matrix() -> dict[str, Any]:
    """Use the pass through `AttentionMatrix`: results, plans, fallbacks and the switch."""
    rng = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn((1, 4, 90, 16), generator=rng).to(torch.bfloat16) for _ in range(3))
    key, value = key[:, :2], value[:, :2]
    mask = regard.causal() & (regard.sliding_window(40) | regard.masks.first(2))
    measures = {
        "entropy": regard.Entropy(), "received": regard.Received(), "distance": regard.Distance(),
        "position": regard.Position(), "mass": regard.Mass(regard.masks.first(2)), "coarse": regard.Coarse(9, "mean"),
        "peak": regard.Coarse(4, "max"), "top": regard.TopK(5), "max_weight": regard.MaxWeight(),
        "max_score": regard.MaxScore(), "spread": regard.Spread(), "columns": regard.MaxWeight(-2),
    }  # fmt: skip
    wide = regard.attention(query.double(), key.double(), mask=mask, enable_gqa=True)
    expected = wide.measure(**measures)

    def attend(q: Any = query, k: Any = key) -> Any:
        return regard.attention(q, k, mask=mask, enable_gqa=True)

    def flatten(result: Any) -> list[Any]:
        return [part.double() for part in result] if isinstance(result, tuple) else [result.double()]

    report: dict[str, Any] = {"errors": {}}
    with triton_pass.use_interpreter():
        A = attend()
        report["plan"] = A.plan(**measures)
        found = A.measure(**measures)
        for name in measures:
            pairs = list(zip(flatten(getattr(found, name)), flatten(getattr(expected, name)), strict=True))
            report["errors"][name] = max(float((x - y).abs().max()) for x, y in pairs)
        report["errors"]["lse"] = float((A.lse.double() - wide.lse).abs().max())
        # With a sink, means over the keys are those of the matrix without it.
        sunk = regard.attention(query, key, mask=mask, enable_gqa=True, sink=torch.linspace(-2, 3, 4))
        means = {name: measures[name] for name in ("entropy", "distance", "position")}
        for found in (sunk.measure(**measures), sunk.measure(output=regard.Output(value), **means)):
            for name in means:
                error = float((getattr(found, name).double() - getattr(expected, name)).abs().max())
                report["errors"][f"{name}, sink"] = max(error, report["errors"].get(f"{name}, sink", 0.0))
        A = attend()
        rows = {"output": regard.Output(value), "entropy": regard.Entropy(), "distance": regard.Distance()}
        report["flash_plan"] = A.plan(**rows)
        both = A.measure(**rows)
        report["flash_kernel"], report["output_dtype"] = A.kernel, str(both.output.dtype)
        report["errors"]["flash output"] = float((both.output.double() - wide @ value.double()).abs().max())
        for name in ("entropy", "distance"):
            report["errors"][f"flash {name}"] = float(
                (getattr(both, name) - getattr(expected, name)).abs().max()
            )
        some = attend().lazy[0, 1:3, [80, 3, 77], :]
        report["errors"]["some rows"] = float(
            (some.distance() - expected.distance[0, 1:3, [80, 3, 77]]).abs().max()
        )
        # NaN reaches the rows that attend to it, and no others.
        poisoned = key.clone()
        poisoned[:, :, 50] = math.nan
        entropy = attend(k=poisoned).measure(regard.Received(), regard.Entropy()).entropy
        allowed = torch.from_numpy(mask.to_dense(90, 90)[:, 50])
        report["nan_rows"] = bool((entropy.isnan() == allowed).all())
        # A wrong kernel is switched off, named, and replaced by the block loop.
        triton_pass._CHECKED.clear()
        kernels = sys.modules["regard.engines.triton_kernels"]
        real = kernels.run_measure_pass
        kernels.run_measure_pass = _Silent()
        A = attend()
        received = A.measure(regard.Received()).received
        kernels.run_measure_pass = real
        report["errors"]["received without the pass"] = float((received - expected.received).abs().max())
        report["off_kernel"], report["off_plan"] = A.kernel, A.plan(regard.Received())
    return report


class _Silent:
    """A kernel that computes nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **keywords: None


def main() -> None:
    part, *rest = sys.argv[1:]
    start = time.perf_counter()
    torch.set_num_threads(1)
    parts = {
        "shapes": check_shapes,
        "kernels": lambda: {"reports": check_kernels("cpu", (24,), (torch.bfloat16,))},
        "matrix": check_matrix,
        "addresses": check_addresses,
    }
    report = parts[part](*rest)
    print(json.dumps({**report, "seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
