"""The case matrix: draw cases so that every pair of choices occurs, build inputs, and check engines with them."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from regard import masks, reference, score_mods
from regard.core.attention import attention
from regard.core.matrix import AttentionMatrix
from regard.engines import find_engine, get_engine, native
from regard.masks import first
from regard.measures import Coarse, Distance, Entropy, Mass, MaxScore, Received
from regard.testing.tolerance import ErrorBound, epsilon
from regard.tiling import use_tile_sizes
from regard.types import Array

MASK_ATOMS = (
    "causal",
    "window",
    "two_sided",
    "padding",
    "left_padding",
    "document",
    "prefix",
    "first",
    "dense",
    "function",
)

# The factors of the case matrix, and their choices. A case is one choice from every factor.
FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": ("float64", "float32", "bfloat16", "float16"),
    "mask": (
        "none",
        *MASK_ATOMS,
        *(f"{a} & {b}" for a, b in itertools.combinations(MASK_ATOMS, 2)),
        *(f"{a} | ~{b}" for a, b in itertools.combinations(MASK_ATOMS, 2)),
        "triple",
    ),
    "q_len": (0, 1, 2, 31, 33, 257, "tile - 1", "tile + 1", "2 tile + 1"),
    "kv_len": (0, 1, 2, 31, 33, 257, "tile - 1", "tile + 1", "2 tile + 1"),
    "head_dim": (1, 2, 3, 8, 64, 72, 129),
    "value_dim": ("head_dim", 1, 5, 48),
    "heads": ("none", "three", "batch", "grouped", "multi-query", "one query head"),
    "layout": ("contiguous", "transposed", "expanded", "sliced", "reversed"),
    "values": ("normal", "large scores", "one-hot", "denormal", "NaN masked", "NaN live"),
    "change": (
        "none",
        "softcap",
        "alibi",
        "bias",
        "relative_bias",
        "sink",
        "scale 0",
        "scale -1",
        "scale 1e-30",
    ),
}


@dataclass(frozen=True)
class Case:
    """One choice from each factor of `FACTORS`, and the seed of its random numbers.

    >>> from regard.testing import draw_cases
    >>> case, is_possible = next(draw_cases(1, seed=0, tile=8))
    >>> case.dtype, case.mask, is_possible
    ('float16', 'causal | ~function', True)
    """

    dtype: str
    mask: str
    q_len: Any
    kv_len: Any
    head_dim: int
    value_dim: Any
    heads: str
    layout: str
    values: str
    change: str
    seed: int

    @property
    def cells(self) -> list[tuple[str, Any]]:
        """The (factor, choice) pairs of the case."""
        return [(name, getattr(self, name)) for name in FACTORS]


assert [field.name for field in fields(Case)][:-1] == list(FACTORS)


@dataclass
class CaseInputs:
    """The inputs of a case.

    Args:
        query: (*q_lead, q_len, head_dim).
        key: (*kv_lead, kv_len, head_dim).
        value: (*kv_lead, kv_len, value_dim).
        arguments: Keyword arguments of `regard.attention`.
        definition: The corresponding arguments of the reference, as dense arrays.
        ordinary: Whether the fixed bounds of the error rule apply.

    >>> from regard.testing import build_inputs, draw_cases
    >>> case, _ = next(draw_cases(1, seed=0, tile=8))
    >>> build_inputs(case, tile=8).query.shape
    (33, 3)
    """

    query: Array
    key: Array
    value: Array
    arguments: dict[str, Any]
    definition: dict[str, Any]
    ordinary: bool


def build_inputs(case: Case, tile: int) -> CaseInputs | None:
    """Build the arrays and arguments of a case.

    Args:
        case: The case.
        tile: The tile size that the lengths "tile ± 1" and "2 tile + 1" refer to.

    Returns:
        The inputs; None if the case contradicts itself, because no key is masked.

    >>> from regard.testing import build_inputs, draw_cases
    >>> case, _ = next(draw_cases(1, seed=0, tile=8))
    >>> sorted(build_inputs(case, tile=8).arguments)
    ['mask', 'scale']
    """
    rng = np.random.default_rng(case.seed)
    lengths = {"tile - 1": tile - 1, "tile + 1": tile + 1, "2 tile + 1": 2 * tile + 1}
    q_len, kv_len = lengths.get(case.q_len, case.q_len), lengths.get(case.kv_len, case.kv_len)
    lead, q_lead, kv_lead = {
        "none": ((), (), ()),
        "three": ((3,), (3,), (3,)),
        "batch": ((2, 3), (2, 3), (2, 3)),
        "grouped": ((2, 6), (2, 6), (2, 2)),
        "multi-query": ((2, 3), (2, 3), (2, 1)),
        "one query head": ((2, 3), (2, 1), (2, 3)),
    }[case.heads]
    value_dim = case.head_dim if case.value_dim == "head_dim" else case.value_dim
    query, key = (rng.normal(size=(*x, n, case.head_dim)) for x, n in ((q_lead, q_len), (kv_lead, kv_len)))
    value = rng.normal(size=(*kv_lead, kv_len, value_dim))
    mask, allowed = build_mask(case.mask, (*lead, q_len, kv_len), rng)
    arguments, definition = _build_change(case.change, (*lead, q_len, kv_len), rng)
    if mask is not None:
        arguments["mask"], definition["mask"] = mask, allowed
    if case.heads == "grouped":
        arguments["enable_gqa"] = True
    if case.values == "large scores":
        query, key = query * 100, key * 100 / np.sqrt(case.head_dim)
    elif case.values == "one-hot":
        query, key = (20 * (x == x.max(-1, keepdims=True)) for x in (query, key))
    elif case.values == "denormal":
        query = query * {"float64": 1e-310, "float32": 1e-40, "bfloat16": 1e-40, "float16": 1e-7}[case.dtype]
    elif case.values == "NaN masked":
        if not _poison_masked(key, value, allowed, kv_lead, rng):
            return None
    elif case.values == "NaN live":
        for array in (x for x in (query, key, value) if x.size):
            array.flat[rng.integers(array.size)] = rng.choice([np.nan, np.inf, -np.inf])
    with np.errstate(over="ignore"):
        query, key, value = (
            lay_out(array.astype(numpy_dtype(case.dtype)), case.layout) for array in (query, key, value)
        )
    ordinary = case.values == "normal" and case.change in ("none", "sink")
    return CaseInputs(query, key, value, arguments, definition, ordinary)


def numpy_dtype(name: str) -> Any:
    """Return the NumPy dtype of a name; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def build_mask(spec: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[masks.Mask | None, Any]:
    """Build a mask of (*lead, q_len, kv_len) and, computed independently, the boolean array that it must equal."""
    if spec == "none":
        return None, np.ones(shape, bool)
    if spec == "triple":
        a, b, c = rng.choice(MASK_ATOMS, 3)
        (x, x_allowed), (y, y_allowed), (z, z_allowed) = (_build_atom(name, shape, rng) for name in (a, b, c))
        return x & (y | ~z), x_allowed & (y_allowed | ~z_allowed)
    if " & " in spec:
        (x, x_allowed), (y, y_allowed) = (_build_atom(name, shape, rng) for name in spec.split(" & "))
        return x & y, x_allowed & y_allowed
    if " | ~" in spec:
        (x, x_allowed), (y, y_allowed) = (_build_atom(name, shape, rng) for name in spec.split(" | ~"))
        return x | ~y, x_allowed | ~y_allowed
    return _build_atom(spec, shape, rng)


def _build_atom(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[masks.Mask, Any]:
    *lead, q_len, kv_len = shape
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    align: Any = "lower_right" if rng.random() < 0.5 else "upper_left" if q_len != kv_len else None
    at = i + (kv_len - q_len if align == "lower_right" else 0)
    batch = tuple(lead[:-1])
    ones = np.ones(shape, bool)
    if name == "causal":
        return masks.causal(align), ones & (j <= at)
    if name == "window":
        size = rng.integers(1, kv_len + 2, size=lead[-1:])  # one for each head
        heads = size.reshape(*lead[-1:], 1, 1)
        return masks.sliding_window(size, align=align), ones & (j > at - heads) & (j <= at)
    if name == "two_sided":
        left, right = (int(n) for n in rng.integers(0, kv_len // 2 + 2, size=2))
        return masks.sliding_window(left=left, right=right, align=align), ones & (at - left <= j) & (
            j <= at + right
        )
    if name in ("padding", "left_padding", "prefix", "first"):
        lengths = rng.integers(0, kv_len + 1, size=batch)
        count = lengths.reshape(*batch, *(1,) * (len(shape) - len(batch)))
        if name == "padding":
            return masks.padding(lengths), ones & (j < count)
        if name == "left_padding":
            return masks.padding(lengths, side="left"), ones & (j >= kv_len - count)
        if name == "first":
            return masks.first(lengths), ones & (j < count)
        return masks.prefix(lengths, align), ones & ((j < count) | (j <= at))
    if name == "document":
        ids = np.sort(rng.integers(0, 4, size=(*batch, kv_len)), axis=-1)
        query_ids = rng.integers(0, 5, size=(*batch, q_len))
        expand = (1,) * (len(lead) - len(batch))
        same = query_ids.reshape(*batch, *expand, q_len, 1) == ids.reshape(*batch, *expand, 1, kv_len)
        return masks.document(ids, query_ids), ones & same
    if name == "function":
        b, h = np.divmod(np.arange(math.prod(lead)).reshape(*lead, 1, 1), lead[-1] if lead else 1)
        return masks.mask(_skip_a_quarter), ones & _skip_a_quarter(b, h, i, j)
    array = rng.random((*lead[-1:], q_len, kv_len)) < 0.7
    return masks.dense(array), ones & array


def _skip_a_quarter(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
    """Mask a quarter of the keys of each query, other ones in each batch entry and head."""
    return (3 * q_idx + kv_idx + b + 2 * h) % 4 != 0


def _build_change(
    name: str, shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Build the arguments for a score modification, sink or scale, and those of the definition."""
    *lead, q_len, kv_len = shape
    heads = lead[-1] if lead else 1
    ahead = np.arange(kv_len)[None, :] - np.arange(q_len)[:, None] - (kv_len - q_len)
    per_head = (heads, 1, 1) if lead else (1, 1)
    if name == "softcap":
        return {"score_mod": score_mods.softcap(2.5)}, {"cap": 2.5}
    if name == "alibi":
        slopes = score_mods.alibi_slopes(heads).reshape(per_head)
        return {"score_mod": score_mods.alibi(align="lower_right")}, {"biases": [-slopes * np.abs(ahead)]}
    if name == "bias":
        array = rng.normal(size=(heads, q_len, kv_len) if lead else (q_len, kv_len)).astype(np.float32)
        array[rng.random(array.shape) < 0.2] = -np.inf
        return {"score_mod": score_mods.bias(array)}, {"biases": [array]}
    if name == "relative_bias":
        table = rng.normal(size=(32, heads)).astype(np.float32)
        bucket = score_mods.relative_buckets(ahead, buckets=32, max_distance=128, bidirectional=True)
        bias = np.moveaxis(table[bucket], -1, 0).reshape(*per_head[:-2], q_len, kv_len)
        return {"score_mod": score_mods.relative_bias(table, bidirectional=True, align="lower_right")}, {
            "biases": [bias]
        }
    if name == "sink":
        sink = rng.normal(size=(heads,) if lead else ()).astype(np.float32) * 3
        return {"sink": sink}, {"sink": sink}
    if name.startswith("scale "):
        scale = float(name.removeprefix("scale "))
        return {"scale": scale}, {"scale": scale}
    return {}, {}


def visible_keys(allowed: Array, kv_lead: tuple[int, ...]) -> Array:
    """Return which keys at least one query may attend to, (*kv_lead, kv_len); grouped heads share a key head."""
    visible = allowed.any(-2)
    if visible.shape[:-1] == kv_lead:
        return visible
    return visible.reshape(*kv_lead, visible.shape[-2] // kv_lead[-1], visible.shape[-1]).any(-2)


def _poison_masked(
    key: Array, value: Array, allowed: Array, kv_lead: tuple[int, ...], rng: np.random.Generator
) -> bool:
    """Put NaN, inf or 1e30 into keys and values that no query may attend to; return False if there are none."""
    masked = ~visible_keys(allowed, kv_lead)
    if not masked.any():
        return False
    poison = rng.choice([np.nan, np.inf, -np.inf, 1e30], size=int(masked.sum()))
    key[masked] = poison[:, None]
    value[masked] = poison[:, None]
    return True


def lay_out(array: Array, layout: str) -> Array:
    """Copy an array into another memory layout."""
    if layout == "transposed":
        return array.swapaxes(-1, -2).copy().swapaxes(-1, -2)
    if layout == "expanded" and array.ndim > 2:
        # Stride 0: every batch entry or head is the first one.
        return np.broadcast_to(array[:1], array.shape)
    if layout == "sliced":
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1] + 1), array.dtype)
        wide[..., 1::2] = array
        return wide[..., 1::2]
    if layout == "reversed":
        return array[..., ::-1, :].copy()[..., ::-1, :]
    return array


# Pairs of choices that contradict each other: without a masked key there is none to put NaN into.
IMPOSSIBLE_PAIRS = {
    (("mask", "none"), ("values", "NaN masked")),
    (("kv_len", 0), ("values", "NaN masked")),
}


def all_pairs() -> set[tuple[Any, Any]]:
    """Return every possible pair of choices of two factors."""
    factor_pairs = itertools.combinations(FACTORS, 2)
    return {
        ((a, x), (b, y)) for a, b in factor_pairs for x in FACTORS[a] for y in FACTORS[b]
    } - IMPOSSIBLE_PAIRS


def draw_cases(
    count: int, seed: int, tile: int, dtypes: Sequence[str] = FACTORS["dtype"]
) -> Iterator[tuple[Case, bool]]:
    """Draw cases until `count` of them are possible.

    While some pair of choices has not occurred yet, the candidate that covers most missing pairs is taken. After that,
    cases are random.

    Args:
        count: The number of possible cases to draw.
        seed: The seed of the draw.
        tile: The tile size that the lengths "tile ± 1" and "2 tile + 1" refer to.
        dtypes: The dtypes to draw from. Default: all; bfloat16 needs ml_dtypes.

    Yields:
        Each case, and whether inputs can be built for it.

    >>> from regard.testing import draw_cases
    >>> [is_possible for case, is_possible in draw_cases(2, seed=0, tile=8)]
    [True, True]
    """
    rng = np.random.default_rng(seed)
    missing = all_pairs()
    while count:
        candidates = [_random_case(rng, dtypes) for _ in range(24 if missing else 1)]
        covered = [set(itertools.combinations(case.cells, 2)) & missing for case in candidates]
        best = max(range(len(candidates)), key=lambda i: len(covered[i]))
        # Only masked NaN can be impossible, if the mask leaves every key visible.
        is_possible = (
            candidates[best].values != "NaN masked" or build_inputs(candidates[best], tile) is not None
        )
        if is_possible:
            missing -= covered[best]
            count -= 1
        yield candidates[best], is_possible


def _random_case(rng: np.random.Generator, dtypes: Sequence[str]) -> Case:
    factors = FACTORS | {"dtype": tuple(dtypes)}
    chosen = {name: choices[rng.integers(len(choices))] for name, choices in factors.items()}
    return Case(**chosen, seed=int(rng.integers(2**31)))


# The engines that `check_case` compares with the definition, all without the compiled pass. The last two need torch.
ENGINES = ("numpy", "torch fused", "torch block loop")
# The largest weight of a row, above which single entries may not err more than the dense matrix.
SATURATED = 0.999
# Parts of the names of torch's fused kernels.
FUSED_NAMES = ("flash", "efficient", "cuDNN", "scaled_dot_product")
# The tile size of cases that are drawn here, and tiles so small that most lengths need several.
TILE = 16
SMALL_TILES = {"rows": 64, "columns": 32, "mask_rows": 64, "mask_tile_rows": 72, "joined_columns": 48}


def check_case(case: Case, inputs: CaseInputs, engines: Sequence[str] = ENGINES[:1]) -> list[str]:
    """Compare the attention matrix of a case with the definition, on each engine.

    Args:
        case: The case.
        inputs: Its inputs, from `build_inputs`.
        engines: Names from `ENGINES`, or of engines passed to `regard.engines.register`. Default: NumPy.

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
            for bound, result in compute_results(inputs, bounds, engine):
                bound.check(result)
        except Exception as error:
            failures.append(f"{engine}: {case}\n    {type(error).__name__}: {error}")
    return failures


def list_dtypes() -> list[str]:
    """List the dtypes that cases can have here: bfloat16 needs ml_dtypes."""
    has_bfloat16 = importlib.util.find_spec("ml_dtypes") is not None
    return [dtype for dtype in FACTORS["dtype"] if dtype != "bfloat16" or has_bfloat16]


def draw_bounds(
    count: int, seed: int, dtypes: Sequence[str]
) -> Iterator[tuple[Case, CaseInputs, CaseBounds]]:
    """Draw possible cases, and yield each with its inputs and error bounds."""
    for case, is_possible in draw_cases(count, seed, TILE, dtypes):
        inputs = build_inputs(case, TILE) if is_possible else None
        if inputs is not None:
            yield case, inputs, compute_bounds(case, inputs)


def measure_case(
    case: Case, inputs: CaseInputs, bounds: CaseBounds, engine: str, device: str = "cpu", skipped: str = ""
) -> tuple[float, str]:
    """Return the largest error of a case as a share of what is allowed, and what is wrong, or "".

    `skipped` is the name of a result that is not compared.
    """
    share = 0.0
    try:
        with use_tile_sizes(**SMALL_TILES):
            for bound, result in compute_results(inputs, bounds, engine, device):
                if bound.what != skipped:
                    bound.check(result)
                    share = max(share, bound.compute_share(result))
    except Exception as error:
        return share, " ".join(f"{case}: {type(error).__name__}: {error}".split())
    return share, ""


def to_engine(array: Any, engine: str, device: str = "cpu") -> Any:
    """Convert a NumPy array for an engine and device, in the same memory layout; torch has no negative strides."""
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
    """Make the fused torch kernels unavailable in a block, if the engine is "torch block loop"."""
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
    """Compute the reference result of a case, a naive result at its dtype, and the error that rounding may cause."""
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
    lead = max(inputs.query.shape[:-2], inputs.key.shape[:-2])  # either may have one head
    shape = (*lead, inputs.query.shape[-2], inputs.key.shape[-2])
    allowed = np.broadcast_to(inputs.definition.get("mask", True), shape)
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


def compute_results(
    inputs: CaseInputs, bounds: CaseBounds, engine: str, device: str = "cpu"
) -> Iterator[tuple[ErrorBound, Any]]:
    """Compute the results of a case on an engine; yield each error bound, and the result as a NumPy array."""
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
        yield from compute_measures(matrix, bounds)


def compute_measures(matrix: AttentionMatrix, bounds: CaseBounds) -> Iterator[tuple[ErrorBound, Any]]:
    """Compute the measures of a matrix; yield each error bound, and the result."""
    measures = [Entropy(), Received(), Distance("lower_right"), Mass(first(3)), MaxScore()]
    measures += [Coarse(bounds.coarse_cells, "mean")] if "coarse" in bounds.measures else []
    for name, result in matrix.measure(*measures)._asdict().items():
        yield bounds.measures[name], from_engine(result)


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
    """Convert the result of an engine to NumPy; bfloat16 becomes float32."""
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
        # Where long double is float64, as on Windows, the definition is no wider than what it checks.
        add = _sum_exactly if exact.dtype == working else np.sum
        exact_measures = _compute_measures(exact, cells, least_sum, add)
        naive_measures = _compute_measures(naive, cells, least_sum, np.sum)
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


def _sum_exactly(terms: Any, axis: int) -> Any:
    """Add float64 numbers with a single rounding."""
    add = np.vectorize(math.fsum, otypes=[np.float64], signature="(n)->()")
    return add(np.moveaxis(terms, axis, -1))


def _compute_measures(
    weights: Any, cells: int, least_sum: float, add: Callable[[Any, int], Any]
) -> dict[str, Any]:
    """Compute the measures by their definitions, from dense weights; means are over keys that have `least_sum` left."""
    *lead, q_len, kv_len = weights.shape
    at = np.arange(q_len)[:, None] + kv_len - q_len
    total = weights.sum(-1, keepdims=True)
    keys = np.where(total < least_sum, 0, weights / np.where(total < least_sum, 1, total))
    measures = {
        "entropy": -add(keys * np.log(np.where(keys > 0, keys, 1)), -1),
        "received": add(weights, -2),
        "distance": add(keys * np.abs(np.arange(kv_len)[None, :] - at), -1),
        "mass": add(weights[..., :3], -1),
    }
    if min(q_len, kv_len):
        rows, columns = (np.arange(n) * cells // n for n in (q_len, kv_len))
        parts = [
            [weights[..., rows == a, :][..., columns == b].reshape(*lead, -1) for b in range(cells)]
            for a in range(cells)
        ]
        means = [[add(part, -1) / part.shape[-1] for part in row] for row in parts]
        measures["coarse"] = np.moveaxis(np.array(means), (0, 1), (-2, -1))
    return measures
