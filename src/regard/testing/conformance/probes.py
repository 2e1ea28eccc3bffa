"""The probe calls of the conformance kit, and how the result of each is compared with the definition."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from regard import reference
from regard.errors import ArgumentError
from regard.testing.cases import build_inputs, draw_cases
from regard.testing.conformance.attention_steps import (
    DEFINITION,
    HALF_DTYPES,
    Align,
    AttentionCall,
    AttentionResult,
    Steps,
    build_causal_mask,
    repeat_kv_heads,
    return_both,
    round_to,
    run_steps,
)
from regard.testing.conformance.convention import CallingConvention, OutputError
from regard.testing.tolerance import assert_matches, epsilon

NOT_FINITE, LARGE = "NaN or inf", "large numbers"  # features of probes that are not ordinary
CAPABILITIES_OF_CALLS = {  # features that are capabilities, and part of probes of other capabilities
    "q_len ≠ kv_len", "value_dim ≠ head_dim", "grouped heads", "empty rows", "gradients",
}  # fmt: skip
LARGEST_ORDINARY = 8  # probes draw numbers up to 2; rounding and random cases stay below this


@dataclass(frozen=True, eq=False)
class ProbeCall:
    """One call that tests a capability.

    Args:
        capability: The row of the report.
        name: The name of the probe within the capability.
        call: The arguments.
        gradients: Whether gradients are compared too.
        ordinary: Whether the fixed bounds of the error rule apply.
    """

    capability: str
    name: str
    call: AttentionCall
    gradients: bool = False
    ordinary: bool = True

    def __str__(self) -> str:
        return f"{self.capability}: {self.name}"

    @cached_property
    def features(self) -> tuple[str, ...]:
        """What the call contains, to find what failing calls have in common; the least telling come last."""
        call, sizes = self.call, self.call.sizes
        arrays = (call.query, call.key, call.value)
        present = {
            **{f"more than {tile} queries": sizes["q_len"] > tile for tile in (16, 32, 64, 128, 256)},
            **{f"more than {tile} keys": sizes["kv_len"] > tile for tile in (16, 32, 64, 128, 256)},
            "a head_dim above 64": sizes["head_dim"] > 64,
            NOT_FINITE: not all(np.isfinite(x).all() for x in arrays),
            LARGE: any((np.abs(x) > LARGEST_ORDINARY).any() for x in arrays),
            f"{call.memory} memory": call.memory != "contiguous",
            "empty inputs": 0 in sizes.values(),
            "empty rows": not call.build_mask().any(-1).all(),
            "value_dim ≠ head_dim": sizes["value_dim"] != sizes["head_dim"],
            "a scale of 0 or below": call.scale is not None and call.scale <= 0,
            "a scale": call.scale is not None,
            "grouped heads": sizes["heads"] != sizes["kv_heads"],
            "several heads": sizes["heads"] > 1,
            "a batch": sizes["batch"] > 1,
            "q_len ≠ kv_len": sizes["q_len"] != sizes["kv_len"],
            "a mask": call.mask is not None,
            "causal masking": call.causal is not None,
            "gradients": self.gradients,
            call.dtype: True,
        }
        return tuple(name for name, holds in present.items() if holds)

    @property
    def required(self) -> set[str]:
        """Other capabilities that the call needs. A function that does not support one is not called this way."""
        names = {"causal"} if "causal masking" in self.features else set()
        if {"causal masking", "q_len ≠ kv_len"} <= set(self.features):
            names.add("causal, q_len ≠ kv_len")
        return (names | (set(self.features) & CAPABILITIES_OF_CALLS)) - {self.capability}


def generate_probes(dtype: str, align: Align | None, size: str = "quick") -> Iterator[ProbeCall]:
    """Generate the probes in the order of the report, smallest first within a capability."""
    for capability, name, options in _list_probes(align, size):
        yield _build_probe(capability, name, {"dtype": dtype, **options})
    if size == "full":
        yield from _draw_probes()


def _list_probes(align: Align | None, size: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    whole = {"batch": 2, "heads": 3, "q_len": 5, "kv_len": 5, "head_dim": 4}
    longer = {**whole, "kv_len": 7, "q_len": 4}
    causal = {"causal": align or "lower_right"}
    yield "plain", "two keys", {"q_len": 2, "kv_len": 2}
    yield "plain", "three keys", {"head_dim": 4}
    yield "heads and batch", "two heads", {"heads": 2}
    yield "heads and batch", "batch of two", {"batch": 2}
    yield "heads and batch", "both", whole
    yield "q_len ≠ kv_len", "2 × 5", {"q_len": 2, "kv_len": 5}
    yield "q_len ≠ kv_len", "5 × 2", {"q_len": 5, "kv_len": 2}
    yield "q_len ≠ kv_len", "4 × 7, heads and batch", longer
    yield "one query or key", "one query", {"q_len": 1, "kv_len": 7}
    yield "one query or key", "one key", {"q_len": 7, "kv_len": 1}
    yield "empty inputs", "q_len 0", {"q_len": 0}
    yield "empty inputs", "kv_len 0", {"kv_len": 0}
    yield "empty inputs", "batch 0", {"batch": 0, "heads": 2}
    yield "value_dim ≠ head_dim", "value_dim 3", {"head_dim": 4, "value_dim": 3}
    yield "value_dim ≠ head_dim", "value_dim 5, heads and batch", {**longer, "value_dim": 5}
    yield "grouped heads", "6 heads on 2", {"heads": 6, "kv_heads": 2}
    yield "grouped heads", "3 heads on 1", {"heads": 3, "kv_heads": 1}
    yield (
        "grouped heads",
        "4 heads on 2, batch, mask",
        {**longer, "heads": 4, "kv_heads": 2, "mask": "random"},
    )
    grouped = {**longer, "heads": 4, "kv_heads": 2}
    yield "grouped heads", "4 heads on 2, a mask for each head", {**grouped, "mask": "random", "per": "bh"}
    yield "grouped heads", "4 heads on 2, causal", {**grouped, **causal, "kv_len": 4}
    yield "scale given", "0.25", {"scale": 0.25}
    yield "scale given", "2, heads and batch", {**longer, "scale": 2.0}
    for scale in (0.0, -1.0, 1e-30):
        yield "scale 0 or negative", f"{scale:g}", {"scale": scale}
    yield (
        "scale 0 or negative",
        "-1, large scores, mask",
        {**longer, "scale": -1.0, "factor": 16, "mask": "random"},
    )
    yield "boolean mask", "3 × 3", {"mask": "random"}
    yield "boolean mask", "4 × 6", {"mask": "random", "q_len": 4, "kv_len": 6}
    yield "boolean mask", "6 × 4", {"mask": "random", "q_len": 6, "kv_len": 4}
    yield "boolean mask", "causal as a mask", {**whole, "mask": "causal"}
    yield "mask per head or batch", "a mask for each batch entry", {**longer, "mask": "random", "per": "b"}
    yield "mask per head or batch", "a mask for each head", {**longer, "mask": "random", "per": "h"}
    yield "mask per head or batch", "a mask for each", {**longer, "mask": "random", "per": "bh"}
    yield "padding", "one row for all queries", {"kv_len": 5, "mask": "padding"}
    yield "padding", "lengths 4 and 6", {**longer, "mask": "padding", "per": "b"}
    yield "padding", "on the left", {**longer, "mask": "left padding", "per": "b"}
    yield "causal", "3 × 3", causal
    yield "causal", "5 × 5, heads and batch", {**whole, **causal}
    yield "causal, q_len ≠ kv_len", "2 × 5", {**causal, "q_len": 2, "kv_len": 5}
    yield "causal, q_len ≠ kv_len", "5 × 2", {**causal, "q_len": 5, "kv_len": 2}
    yield "causal, q_len ≠ kv_len", "4 × 7, heads and batch", {**longer, **causal}
    yield "causal and mask", "5 × 5, padding", {**whole, **causal, "mask": "padding", "per": "b"}
    wide = {**whole, **causal, "q_len": 13, "kv_len": 19}
    yield "causal and mask", "13 × 19, padding", {**wide, "mask": "padding", "per": "b"}
    yield "empty rows", "one row", {"mask": "one row empty"}
    yield "empty rows", "every row", {"mask": "all empty"}
    yield "empty rows", "of one batch entry", {**longer, "mask": "one batch empty", "per": "b"}
    for where in ("key", "value"):
        for number in (np.nan, np.inf, 1e30):
            yield f"masked NaN or inf in {where}", f"{number:g}", {"mask": "last masked", where: number}
        yield (
            f"masked NaN or inf in {where}", "NaN, masked for some queries",
            {**longer, "mask": "last masked for some", where: np.nan},
        )  # fmt: skip
        square = {"q_len": 4, "kv_len": 4, **causal}
        yield f"masked NaN or inf in {where}, causal", "NaN", {**square, where: np.nan}
    for where in ("query", "key", "value"):
        yield "live NaN", f"in {where}", {where: np.nan}
    yield "live inf", "in value", {"value": np.inf}
    yield "large scores", "1e4", {"factor": 64}
    yield "large scores", "1e4, masked", {**longer, "factor": 64, "mask": "random"}
    yield "large scores", "3 × 33, every score below −90", {"kv_len": 33, "factor": 32, "sign": -1}
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        yield dtype, "5 × 7", {"dtype": dtype, "q_len": 5, "kv_len": 7, "head_dim": 8}
        yield dtype, "heads, batch, mask", {**longer, "dtype": dtype, "mask": "random"}
    half = {"dtype": "float16", "head_dim": 8, "factor": 96, "sign": 1}
    yield "float16, scores above 65504", "before the scale", half
    for memory in ("transposed", "sliced", "expanded", "reversed"):
        yield "layout in memory", memory, {**longer, "memory": memory}
    for q_len, kv_len in (
        (31, 33),
        (33, 31),
        (3, 65),
        (1, 129),
        (2, 513),
        (321, 5),
        *(((257, 255), (515, 1030)) if size == "full" else ()),
    ):
        yield "lengths around tiles", f"{q_len} × {kv_len}", {"q_len": q_len, "kv_len": kv_len, "head_dim": 8}
    yield "lengths around tiles", "5 × 67, padding", {"q_len": 5, "kv_len": 67, "mask": "padding"}
    yield "lengths around tiles", "37 × 70, mask", {"q_len": 37, "kv_len": 70, "mask": "random"}
    for q_len, kv_len in ((131, 131), (70, 131), (131, 70)):
        sizes = {"q_len": q_len, "kv_len": kv_len}
        yield "lengths around tiles, causal", f"{q_len} × {kv_len}", {**sizes, **causal}
    for head_dim in (128, 257):
        yield (
            "lengths around tiles", f"5 × 7, head_dim {head_dim}", {"q_len": 5, "kv_len": 7, "head_dim": head_dim}
        )  # fmt: skip
    yield "gradients", "3 × 3", {"gradients": True}
    yield "gradients", "heads, batch, mask", {**longer, "mask": "random", "gradients": True}
    yield "gradients", "131 × 70", {"q_len": 131, "kv_len": 70, "gradients": True}
    yield "gradients", "70 × 131", {"q_len": 70, "kv_len": 131, "gradients": True}
    yield "gradients, value_dim ≠ head_dim", "value_dim 5", {**longer, "value_dim": 5, "gradients": True}
    yield "gradients, grouped heads", "4 heads on 2", {**grouped, "kv_len": 4, "gradients": True}
    yield "gradients, scale given", "2, heads and batch", {**longer, "scale": 2.0, "gradients": True}
    yield "gradients, causal", "4 × 4", {**causal, "q_len": 4, "kv_len": 4, "gradients": True}
    yield "gradients, causal", "4 × 7, heads and batch", {**longer, **causal, "gradients": True}
    yield "gradients, causal", "131 × 131", {**causal, "q_len": 131, "kv_len": 131, "gradients": True}
    yield "gradients, empty rows", "one row", {"mask": "one row empty", "gradients": True}
    for where in ("key", "value"):
        yield (
            "gradients, masked NaN", f"in {where}", {"mask": "last masked", where: np.nan, "gradients": True},
        )  # fmt: skip


def _build_probe(capability: str, name: str, options: dict[str, Any]) -> ProbeCall:
    """Build a probe from multiples of a quarter, which every dtype represents exactly."""
    # Seeded by its name, so that other probes do not change its numbers.
    rng = np.random.default_rng(zlib.crc32(f"{capability}: {name}".encode()))
    get = options.get
    batch, heads, q_len, kv_len, head_dim = (
        get(axis, default)
        for axis, default in (("batch", 1), ("heads", 1), ("q_len", 3), ("kv_len", 3), ("head_dim", 2))
    )
    kv_heads, value_dim = get("kv_heads", heads), get("value_dim", head_dim)
    factor = get("factor", 1)

    def draw_quarters(*shape: int) -> Any:
        return rng.integers(1, 9, size=shape) * rng.choice([-1, 1], size=shape) / 4

    arrays = {
        "query": draw_quarters(batch, heads, q_len, head_dim) * factor,
        "key": draw_quarters(batch, kv_heads, kv_len, head_dim) * factor,
        "value": draw_quarters(batch, kv_heads, kv_len, value_dim),
    }
    if get("sign"):  # the sign of every score
        arrays["query"], arrays["key"] = abs(arrays["query"]), get("sign") * abs(arrays["key"])
    if get("memory") == "expanded":
        arrays = {name: np.repeat(array[:1], batch, axis=0) for name, array in arrays.items()}
    for where in arrays.keys() & options.keys():
        arrays[where][..., -1, :] = options[where]
    mask = _build_mask(get("mask"), get("per", ""), (batch, heads, q_len, kv_len), rng)
    call = AttentionCall(
        **arrays, dtype=options["dtype"], mask=mask, causal=get("causal"), scale=get("scale"),
        memory=get("memory", "contiguous"),
    )  # fmt: skip
    is_special = factor > 1 or arrays.keys() & options.keys() or get("scale") is not None
    return ProbeCall(capability, name, call, get("gradients", False), not is_special)


def _build_mask(kind: str | None, per: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Build a boolean mask; with `per` it has four axes, of size one for batch and heads unless `per` names them."""
    if kind is None:
        return None
    batch, heads, q_len, kv_len = shape
    lead = (batch if "b" in per else 1, heads if "h" in per else 1)
    mask = np.ones((*lead, q_len, kv_len), bool)
    if kind == "random":
        mask = rng.random(mask.shape) < 0.5
        # One visible key for each query, chosen asymmetrically: no row is empty, and a transposed mask differs.
        mask[..., np.arange(q_len), (np.arange(q_len) * 2 + 1) % kv_len] = True
        mask[..., 0, kv_len - 1], mask[..., q_len - 1, 0] = False, True
        mask[..., 0, 0] = True
    elif kind == "causal":
        mask &= build_causal_mask(q_len, kv_len, "lower_right")
    elif kind.endswith("padding"):
        lengths = (kv_len - 1 - 2 * np.arange(lead[0]))[::-1, None, None, None]
        j = np.arange(kv_len)
        mask = j < lengths if kind == "padding" else j >= kv_len - lengths
    elif kind == "one row empty":
        mask[..., 1, :] = False
        mask[..., 0, 1] = False
    elif kind == "all empty":
        mask[...] = False
    elif kind == "one batch empty":
        mask[0], mask[1:, ..., 0] = False, False
    elif kind == "last masked":
        mask[..., -1] = False
    else:  # the last key, masked for some queries
        mask[..., : q_len // 2, -1] = False
    return mask if per else mask[0, 0]


def _draw_probes(count: int = 300, seed: int = 20261115, tile: int = 32) -> Iterator[ProbeCall]:
    """Draw calls from the case matrix: its masks, lengths, dtypes and values, without score modifications."""
    if find_spec("ml_dtypes") is None:
        raise ArgumentError(
            "check_conformance", received='size "full" without ml_dtypes', expected="ml_dtypes, for bfloat16 in NumPy",
            hint="pip install ml_dtypes, or use the quick size.",
        )  # fmt: skip
    for case, is_possible in draw_cases(count, seed, tile):
        has_supported_heads = case.heads != "one query head"  # which few functions broadcast
        is_supported = has_supported_heads and (case.change == "none" or case.change.startswith("scale"))
        inputs = build_inputs(case, tile) if is_possible and is_supported else None
        if inputs is None:
            continue
        query, key, value = (
            np.asarray(x).astype(np.float64).reshape((1,) * (4 - x.ndim) + x.shape)
            for x in (inputs.query, inputs.key, inputs.value)
        )
        mask = inputs.definition.get("mask")
        if mask is not None:
            mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        call = AttentionCall(query, key, value, case.dtype, mask, None, inputs.definition.get("scale"))
        name = f"{case.mask}, {case.values}, seed {case.seed}"
        yield ProbeCall("random cases", name, call, False, inputs.ordinary)


@dataclass(frozen=True, eq=False)
class ProbeOutcome:
    """The outcome of a probe: a result, a failure, or the reason why it was skipped."""

    probe: ProbeCall
    result: AttentionResult | None = None
    failure: str = ""  # the type and first line of the error, or the wrong shape
    skip_reason: str = ""

    @property
    def max_error(self) -> float:
        """The largest error of the output where both sides are finite; NaN if there is nothing to compare."""
        exact = compute_expected(self.probe, DEFINITION).exact.output
        return float("nan") if self.result is None else _find_largest_error(self.result.output, exact)

    @property
    def has_other_nan(self) -> bool:
        """Whether NaN or inf are in other places of the output than in the definition."""
        exact = compute_expected(self.probe, DEFINITION).exact.output
        return self.result is None or not np.array_equal(np.isfinite(self.result.output), np.isfinite(exact))

    def list_errors(self) -> list[float]:
        """Return the largest error of the output, of the weights and of the gradients, as far as there are any."""
        exact = compute_expected(self.probe, DEFINITION).exact
        if self.result is None:
            return []
        pairs = [(self.result.output, exact.output)]
        if self.result.weights is not None:
            pairs.append((self.result.weights, exact.weights))
        pairs += zip(self.result.gradients or (), exact.gradients or (), strict=True)
        return [_find_largest_error(*pair) for pair in pairs]


def run_probe(fn: Callable[..., Any], convention: CallingConvention, probe: ProbeCall) -> ProbeOutcome:
    """Call a function with a probe, unless its convention does not allow the call."""
    obstacle = convention.find_obstacle(probe.call, probe.gradients)
    if obstacle:
        return ProbeOutcome(probe, skip_reason=obstacle)
    try:
        with np.errstate(all="ignore"):
            return ProbeOutcome(probe, convention.invoke(fn, probe.call, build_output_gradient(probe)))
    except OutputError as error:
        return ProbeOutcome(probe, failure=f"returns {error}")
    except Exception as error:  # an error of the function is an outcome like any other
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return ProbeOutcome(probe, failure=f"raises {type(error).__name__}{': ' if first else ''}{first}")


def build_output_gradient(probe: ProbeCall) -> Any:
    """Return the output gradient of a probe of gradients, (batch, heads, q_len, value_dim); otherwise None."""
    if not probe.gradients:
        return None
    shape = (*probe.call.query.shape[:-1], probe.call.value.shape[-1])
    return np.random.default_rng(0).integers(-4, 5, size=shape) / 4


class StepsNotComputableError(Exception):
    """The steps cannot be computed for a call: a function with these steps would raise an error."""


@dataclass(frozen=True, eq=False)
class ExpectedResult:
    """The result of a function with some steps. The error of naive arithmetic is computed on demand."""

    probe: ProbeCall
    steps: Steps
    exact: AttentionResult

    @cached_property
    def naive(self) -> AttentionResult:
        """The result computed at the dtype of the call, half precision in float32."""
        call = self.probe.call
        if (
            self.rounds_to_half
        ):  # a result may differ from the rounded steps as much as they do from the definition
            return compute_expected(self.probe, DEFINITION).exact
        naive = run_steps(call, self.steps, _working_dtype(call), build_output_gradient(self.probe))
        return naive._replace(output=round_to(naive.output, call.dtype))

    @property
    def rounds_to_half(self) -> bool:
        """Whether every intermediate result is rounded to half precision."""
        return self.steps.half_precision and self.probe.call.dtype in HALF_DTYPES

    @cached_property
    def score_error(self) -> Any:
        """The relative error of a row's weights from rounding its scores, by the largest sum of absolute terms."""
        call = self.probe.call
        query, key = (np.abs(np.where(np.isfinite(x), x, 0)) for x in (call.query, call.key))
        terms = query @ repeat_kv_heads(key, query.shape[1]).swapaxes(-1, -2) * abs(self.steps.scale(call))
        largest = np.where(call.build_mask(), terms, 0).max(-1, keepdims=True, initial=0)
        error = 4 * epsilon(_working_dtype(call)) * (1 + largest)
        # Other return values may have rows that are no longer queries.
        return error if self.steps.return_value is return_both else error.max(initial=0)

    @cached_property
    def magnitude(self) -> AttentionResult:
        """The sums of absolute terms: Σ weight · |value| for an output, the weight itself for a weight."""
        call = self.probe.call
        unsigned = replace(call, value=np.abs(np.where(np.isfinite(call.value), call.value, 0)))
        return run_steps(unsigned, self.steps)

    @cached_property
    def compares_gradients(self) -> bool:
        """Whether gradients are compared: not if a fault has already changed the output."""
        own, right = self.exact.output, compute_expected(self.probe, DEFINITION).exact.output
        if not self.probe.gradients or self.steps is DEFINITION:
            return self.probe.gradients
        return own.shape == right.shape and bool(np.allclose(own, right, 1e-10, 1e-10, equal_nan=True))

    def find_mismatch(self, result: AttentionResult) -> str:
        """Return how a result breaks the error rule; empty if it matches."""
        exact, naive, size = self.exact, self.naive, self.magnitude
        common: dict[str, Any] = {"dtype": self.probe.call.dtype}
        try:
            assert_matches(
                result.output, exact.output, naive.output, magnitude=size.output, score_error=self.score_error,
                ordinary=self.probe.ordinary and not self.rounds_to_half, **common,
            )  # fmt: skip
            if result.weights is not None:
                assert exact.weights is not None, "weights: returned, but none expected"
                assert_matches(
                    result.weights, exact.weights, naive.weights, magnitude=size.weights,
                    score_error=self.score_error, what="weights", **common,
                )  # fmt: skip
            if self.compares_gradients:
                for name, *gradients in zip(
                    ("query", "key", "value"), result.gradients, exact.gradients, naive.gradients, strict=True
                ):
                    largest = np.max(np.abs(gradients[1]), initial=1, where=np.isfinite(gradients[1]))
                    assert_matches(
                        *gradients, magnitude=largest, factor=3.0, what=f"gradient of {name}", **common
                    )
        except AssertionError as error:
            return str(error)
        return ""


def _working_dtype(call: AttentionCall) -> Any:
    return np.float64 if call.dtype == "float64" else np.float32


@lru_cache(maxsize=4096)
def compute_expected(probe: ProbeCall, steps: Steps) -> ExpectedResult:
    """Compute the result of a function with some steps for a probe."""
    call = probe.call
    # The definition is wider than the dtype it checks. A fault must overflow as the function does, in float64 at most.
    wide = np.longdouble if call.dtype == "float64" and steps is DEFINITION else np.float64
    rounds = steps.half_precision and call.dtype in HALF_DTYPES
    try:
        exact = run_steps(call, steps, np.float32 if rounds else wide, build_output_gradient(probe))
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise StepsNotComputableError(str(error)) from error
    if steps is DEFINITION:
        definition = reference.attention(
            call.query, call.key, call.value, mask=call.build_mask(), scale=call.scale, dtype=wide
        )
        exact = AttentionResult(definition.output, definition.weights, exact.gradients)
    return ExpectedResult(probe, steps, exact)


def matches(outcome: ProbeOutcome, steps: Steps) -> bool:
    """Return whether a function with these steps produces this outcome.

    An error of the function matches steps that cannot be computed.
    """
    try:
        expected = compute_expected(outcome.probe, steps)
    except StepsNotComputableError:
        return outcome.result is None
    if outcome.result is None or not _roughly_matches(outcome.result.output, expected):
        return False
    return not expected.find_mismatch(outcome.result)


def _find_largest_error(actual: Any, exact: Any) -> float:
    """Return the largest error where both sides are finite; NaN if there is nothing to compare."""
    if actual.shape != exact.shape:
        return float("nan")
    with np.errstate(all="ignore"):
        errors = np.abs(actual.astype(np.float64) - exact.astype(np.float64))
    finite = errors[np.isfinite(errors)]
    return float(finite.max()) if finite.size else float("nan")


def changes(outcome: ProbeOutcome, steps: Steps, others: Steps) -> bool:
    """Return whether two functions have different results for a probe; no if one of them raises an error."""
    try:
        expected, other = (compute_expected(outcome.probe, which) for which in (steps, others))
    except StepsNotComputableError:
        return False
    return bool(other.find_mismatch(expected.exact))


def _roughly_matches(output: Any, expected: ExpectedResult) -> bool:
    """Run a cheap check first, which every result within the error rule passes."""
    exact = expected.exact.output
    if output.shape != exact.shape:
        return False
    if expected.rounds_to_half:
        return True
    finite = np.isfinite(exact)
    if not np.array_equal(finite, np.isfinite(output)):
        return False
    with np.errstate(all="ignore"):
        return bool((np.abs(output - exact)[finite] <= 0.1 * (1 + np.abs(exact[finite]))).all())
