"""Check one case: output, lse, weights, single entries and measures of the matrix are compared with the definition."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from regard import reference
from regard.core.attention import attention
from regard.core.matrix import AttentionMatrix
from regard.engines import find_engine, get_engine, native
from regard.masks import first
from regard.measures import Coarse, Distance, Entropy, Mass, MaxScore, Received
from regard.testing.cases.factors import Case
from regard.testing.cases.inputs import CaseInputs, visible_keys
from regard.testing.tolerance import ErrorBound, epsilon

# The engines that `check_case` can compare with the definition, all without the compiled pass. The last two need torch.
ENGINES = ("numpy", "torch fused", "torch block loop")
# The largest weight of a row, above which single entries may not err more than the dense matrix.
SATURATED = 0.999
# Parts of the names of torch's fused kernels.
FUSED_NAMES = ("flash", "efficient", "cuDNN", "scaled_dot_product")
COMPILED = "compiled "  # the engines of `list_compiled_engines` begin with it


def list_compiled_engines() -> tuple[str, ...]:
    """List the instruction sets of the compiled pass as engines for `check_case`; empty if it is not built.

    They compute measures and lse only: of NumPy arrays in two passes, or of tensors with the lse of a fused kernel, as
    the seed of the case decides.

    >>> set(list_compiled_engines()) <= {"compiled baseline", "compiled AVX2", "compiled AVX-512"}
    True
    """
    return tuple(f"{COMPILED}{name}" for name in native.list_instruction_sets())


def check_case(case: Case, inputs: CaseInputs, engines: Sequence[str] = ENGINES[:1]) -> list[str]:
    """Compare the attention matrix of a case with the definition, on each engine.

    Args:
        case: The case.
        inputs: Its inputs, from `build_inputs`.
        engines: Names from `ENGINES` or `list_compiled_engines()`, or of engines passed to
            `regard.engines.register`. Default: NumPy.

    Returns:
        One message for each engine that breaks the error rule or raises; empty if none does.

    >>> from regard.testing import build_inputs, check_case, draw_cases
    >>> case, _ = next(draw_cases(1, seed=0, tile=8))
    >>> check_case(case, build_inputs(case, tile=8))
    []
    """
    bounds = compute_bounds(case, inputs)
    failures = []
    for engine in engines:
        try:
            if engine.startswith(COMPILED):
                has_torch = importlib.util.find_spec("torch") is not None
                arrays = "torch fused" if has_torch and case.seed % 2 else "numpy"
                _check_compiled(inputs, bounds, engine, arrays)
            else:
                _check_engine(inputs, bounds, engine)
        except Exception as error:
            failures.append(f"{engine}: {case}\n    {type(error).__name__}: {error}")
    return failures


def to_engine(array: Any, engine: str, device: str = "cpu") -> Any:
    """Convert a NumPy array for an engine, in the same memory layout; torch has no negative strides.

    Args:
        array: The array.
        engine: A name from `ENGINES`, or of a registered engine.
        device: Device of the tensors of torch's engines.
    """
    if engine == "numpy" or not isinstance(array, np.ndarray):
        return array
    if engine not in ENGINES:
        return get_engine(engine).as_float(array, "check_case", "array")
    import torch

    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    if not array.flags.writeable:  # expanded
        array = np.lib.stride_tricks.as_strided(array.base, array.shape, array.strides)
    if array.dtype.name == "bfloat16":
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor if device == "cpu" else _move_strided(tensor, device)


def _move_strided(tensor: Any, device: str) -> Any:
    """Copy a tensor to a device with the strides that it has; `to` makes the result contiguous."""
    import torch

    if not tensor.numel():
        return tensor.to(device)
    size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    moved = torch.zeros(size, dtype=tensor.dtype, device=device).as_strided(tensor.shape, tensor.stride())
    target = moved
    for axis, stride in enumerate(tensor.stride()):
        if not stride:  # expanded: every entry is the first one
            target, tensor = target.narrow(axis, 0, 1), tensor.narrow(axis, 0, 1)
    target.copy_(tensor)
    return moved


@contextmanager
def disable_fused_kernel(engine: str) -> Iterator[None]:
    """Make the fused torch kernels unavailable in a block, if the engine is "torch block loop".

    Args:
        engine: A name from `ENGINES`.
    """
    if engine != "torch block loop":
        yield
        return
    from regard.engines import torch_kernels

    get_kernel = torch_kernels.get_kernel
    torch_kernels.get_kernel = lambda device_type: None
    try:
        yield
    finally:
        torch_kernels.get_kernel = get_kernel


class CaseBounds(NamedTuple):
    """The error bounds of the results of a case, computed once for all engines."""

    output: ErrorBound
    lse: ErrorBound
    weights: ErrorBound
    measures: dict[str, ErrorBound]
    coarse_cells: int  # along an edge of Coarse


def compute_bounds(case: Case, inputs: CaseInputs) -> CaseBounds:
    """Compute the reference result of a case, a naive result at its dtype, and the error that rounding may cause.

    Args:
        case: The case.
        inputs: The inputs that `build_inputs` returned for the case.

    Returns:
        One error bound for each result.
    """
    exact_dtype = np.longdouble if case.dtype == "float64" else np.float64
    working = np.float64 if case.dtype == "float64" else np.float32
    value = _zero_invisible_values(inputs)
    exact = reference.attention(inputs.query, inputs.key, value, **inputs.definition, dtype=exact_dtype)
    naive = _worst_naive(inputs, value, exact, working)
    largest, summed = _magnitudes(inputs, exact)
    drift = 4 * epsilon(working) * (1 + largest)  # relative error of a weight from the rounding of its score
    # Four ulps of the lse or of its scores: of few scores it may be near 0, of many larger than any of them.
    own_size = np.abs(np.where(np.isfinite(exact.lse), exact.lse, 0))
    common: dict[str, Any] = {"dtype": working, "ordinary": inputs.ordinary}
    cells = max(1, min(*exact.weights.shape[-2:], 4))
    measures = _compute_measure_bounds(exact.weights, naive.weights, drift, cells, working)
    max_scores = (np.max(scores, axis=-1, initial=-np.inf) for scores in (exact.scores, naive.scores))
    measures["max_score"] = ErrorBound.compute(*max_scores, magnitude=1 + largest, what="max_score", **common)
    return CaseBounds(
        ErrorBound.compute(
            exact.output, naive.output, magnitude=summed, score_error=drift[..., None], dtype=case.dtype,
            ordinary=inputs.ordinary, what="output",
        ),
        ErrorBound.compute(exact.lse, naive.lse, magnitude=np.maximum(own_size, 1 + largest), what="lse", **common),
        ErrorBound.compute(exact.weights, naive.weights, score_error=drift[..., None], what="weights", **common),
        measures,
        cells,
    )  # fmt: skip


def _magnitudes(inputs: CaseInputs, exact: reference.Definition) -> tuple[Any, Any]:
    """Return the largest |score| of each row, and the sum of absolute terms of each output, Σ w |v|.

    The rounding error of a score is relative to the absolute terms of its sum: signs may cancel, and a cap limits it.
    """
    query, key, value = (
        np.abs(np.asarray(x).astype(np.float64)) for x in (inputs.query, inputs.key, inputs.value)
    )
    scale = inputs.definition.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else abs(scale)
    with np.errstate(all="ignore"):
        terms = query @ reference.repeat_heads(key, query).swapaxes(-1, -2) * scale
        terms = np.where(
            inputs.definition.get("mask", True), terms, 0
        )  # masked keys must not widen the bound
        sizes = [np.abs(np.where(np.isfinite(s), s, 0)) for s in (exact.scores, terms)]
        finite = reference.repeat_heads(np.where(np.isfinite(value), value, 0), query)
        return np.max(np.maximum(*sizes), axis=-1, initial=0), exact.weights.astype(np.float64) @ finite


def _zero_invisible_values(inputs: CaseInputs) -> Any:
    """Replace NaN and inf that no query may attend to by zeros: the definition is unchanged and much faster."""
    allowed = np.broadcast_to(
        inputs.definition.get("mask", True), (*inputs.query.shape[:-1], inputs.key.shape[-2])
    )
    visible = visible_keys(allowed, inputs.value.shape[:-2])[..., None]
    return np.where(visible | np.isfinite(inputs.value), inputs.value, inputs.value.dtype.type(0))


def _worst_naive(
    inputs: CaseInputs, value: Any, exact: reference.Definition, working: Any
) -> reference.Definition:
    """Return the definition plus the largest error of a naive computation in three orders of summation.

    With few terms one order may be exact by chance, so a bound from one order would depend on luck.
    """
    orders = [
        slice(None),
        slice(None, None, -1),
        np.random.default_rng(0).permutation(inputs.query.shape[-1]),
    ]
    worst: list[Any] = [0.0] * len(exact)
    with np.errstate(all="ignore"):
        for order in orders:
            query, key = (x[..., order] for x in (inputs.query, inputs.key))
            naive = reference.attention(query, key, value, **inputs.definition, dtype=working)
            naive = naive._replace(output=naive.output.astype(inputs.value.dtype).astype(working))
            errors = [np.abs(rounded - right) for rounded, right in zip(naive, exact, strict=True)]
            worst = [np.fmax(before, error) for before, error in zip(worst, errors, strict=True)]
        return reference.Definition(*(right + error for right, error in zip(exact, worst, strict=True)))


def _check_engine(inputs: CaseInputs, bounds: CaseBounds, engine: str) -> None:
    for bound, result in compute_results(inputs, bounds, engine):
        bound.check(result)


def compute_results(
    inputs: CaseInputs, bounds: CaseBounds, engine: str, device: str = "cpu"
) -> Iterator[tuple[ErrorBound, Any]]:
    """Compute the results of a case on an engine.

    Args:
        inputs: The inputs of the case.
        bounds: Its error bounds.
        engine: A name from `ENGINES`, or of a registered engine.
        device: Device of the tensors of torch's engines.

    Yields:
        Each error bound, and the result as a NumPy array.
    """
    query, key, value = (
        to_engine(array, engine, device) for array in (inputs.query, inputs.key, inputs.value)
    )
    with disable_fused_kernel(engine), native.use_instruction_set(None):
        matrix = attention(query, key, **inputs.arguments)
        output = matrix @ value
        if engine == "torch fused" and "block loop" not in matrix.kernel:
            assert any(name in matrix.kernel for name in FUSED_NAMES), matrix.kernel
        yield bounds.output, from_engine(output)
        yield bounds.lse, from_engine(matrix.lse)
        dense = from_engine(matrix.to_dense())
        yield bounds.weights, dense
        if dense.size:
            # Half of the cases read a matrix that has no lse of a product yet.
            is_fresh = int(np.nan_to_num(dense).argmax()) % 2
            read = attention(query, key, **inputs.arguments) if is_fresh else matrix
            yield from _read_entries(read, dense, bounds.weights)
        yield from _compute_measures_of(matrix, bounds)


def _compute_measures_of(matrix: AttentionMatrix, bounds: CaseBounds) -> Iterator[tuple[ErrorBound, Any]]:
    measures = [Entropy(), Received(), Distance("lower_right"), Mass(first(3)), MaxScore()]
    measures += [Coarse(bounds.coarse_cells)] if "coarse" in bounds.measures else []
    for name, result in matrix.measure(*measures)._asdict().items():
        yield bounds.measures[name], from_engine(result)


def _check_compiled(inputs: CaseInputs, bounds: CaseBounds, engine: str, arrays: str) -> None:
    query, key, value = (to_engine(array, arrays) for array in (inputs.query, inputs.key, inputs.value))
    with native.use_instruction_set(engine.removeprefix(COMPILED)):
        matrix = attention(query, key, **inputs.arguments)
        if "score_mod" in inputs.arguments:
            return  # runs in the block loop, which the other engines test
        if arrays == "torch fused":
            _ = matrix @ value
        assert "compiled pass" in matrix.plan(Received()), matrix.plan(Received())
        for bound, result in _compute_measures_of(matrix, bounds):
            bound.check(result)
        bounds.lse.check(from_engine(matrix.lse))


def _read_entries(matrix: AttentionMatrix, dense: Any, bound: ErrorBound) -> Iterator[tuple[ErrorBound, Any]]:
    """Read a row and single entries by their index, the largest weight among them.

    Each result is the dense matrix with these entries in place of its own, under the rule of the dense matrix. In a
    saturated row, where the rounding of a score cancels in the softmax, they may not differ more than the dense matrix.
    """
    exact = np.nan_to_num(np.asarray(bound.definition, np.float64))
    largest = np.unravel_index(int(exact.argmax()), exact.shape)
    middle = np.unravel_index(exact.size // 2, exact.shape)
    with np.errstate(all="ignore"):
        dense_error = np.nan_to_num(np.abs(dense - exact), nan=0, posinf=0).max()
        rounding = 8 * epsilon(dense.dtype) * exact + np.finfo(dense.dtype).tiny
        tight = 2 * (bound.naive_error + dense_error) + rounding
    # The definition is float64: of float64 weights it measures no error, so only the rule of the dense matrix applies.
    has_measured_error = epsilon(dense.dtype) > epsilon(exact.dtype)
    is_saturated = has_measured_error & (exact.max(-1, keepdims=True) > SATURATED)
    limit = np.where(is_saturated, np.minimum(tight, bound.limit), bound.limit)
    for what, indices in {"a row": [largest[:-1]], "entries": [largest, middle]}.items():
        read = np.array(dense)
        for index in indices:
            position = tuple(int(i) for i in index)
            read[position] = from_engine(matrix[position])
        yield replace(bound, limit=limit, what=f"weights, {what} read by index"), read


def from_engine(array: Any) -> Any:
    """Convert the result of an engine to NumPy; bfloat16 becomes float32.

    Args:
        array: An array of any engine.
    """
    if hasattr(array, "new_tensor"):
        array = array.detach().cpu()
        return array.float().numpy() if array.itemsize < 4 else array.numpy()
    return find_engine("check_case", result=array).to_numpy(array)


def _compute_measure_bounds(
    exact: Any, naive: Any, drift: Any, cells: int, working: Any
) -> dict[str, ErrorBound]:
    bounds = {}
    with np.errstate(all="ignore"):
        # The floor of a measure is its value times the relative drift of the weights it sums.
        least_sum = np.finfo(working).tiny / np.finfo(working).eps
        exact_measures, naive_measures = (
            _compute_measures(weights, cells, least_sum) for weights in (exact, naive)
        )
        worst = np.max(drift, axis=-1, initial=0)
        drifts = {"received": worst[..., None], "coarse": worst[..., None, None]}
        for name, measure in exact_measures.items():
            size = np.abs(measure)
            if (
                name == "entropy"
            ):  # −w ln w changes by drift · w (1 + |ln w|); with a sink, ln Σ w is taken off it
                total = exact.sum(-1)
                size = size + 1 + np.abs(np.log(np.where(total < least_sum, 1, total)))
            bounds[name] = ErrorBound.compute(
                measure, naive_measures[name], magnitude=size, score_error=drifts.get(name, drift), dtype=working,
                what=name,
            )  # fmt: skip
    return bounds


def _compute_measures(weights: Any, cells: int, least_sum: float) -> dict[str, Any]:
    """Compute the measures by their definitions, from dense weights; means are over keys that have `least_sum` left."""
    *_, q_len, kv_len = weights.shape
    at = np.arange(q_len)[:, None] + kv_len - q_len
    total = weights.sum(-1, keepdims=True)
    keys = np.where(total < least_sum, 0, weights / np.where(total < least_sum, 1, total))
    measures = {
        "entropy": -(keys * np.log(np.where(keys > 0, keys, 1))).sum(-1),
        "received": weights.sum(-2),
        "distance": (keys * np.abs(np.arange(kv_len)[None, :] - at)).sum(-1),
        "mass": weights[..., :3].sum(-1),
    }
    if min(q_len, kv_len):
        rows, columns = (np.arange(n) * cells // n for n in (q_len, kv_len))
        means = [
            [weights[..., rows == a, :][..., columns == b].mean((-2, -1)) for b in range(cells)]
            for a in range(cells)
        ]
        measures["coarse"] = np.moveaxis(np.array(means), (0, 1), (-2, -1))
    return measures
