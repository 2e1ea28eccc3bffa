"""Compare one call of an attention layer in two runs: its settings, query, key, value, weights and output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from regard.capture.call import Call
from regard.diagnosis.difference_causes import (
    build_output_difference,
    build_scale_difference,
    build_score_difference,
    explain_relations,
)
from regard.diagnosis.setting_differences import find_setting_differences
from regard.diagnosis.tensor_relation import (
    MAX_ROUNDING,
    Relation,
    limit_rounding,
    relate,
    row_differences,
)
from regard.diagnosis.weight_relation import explain_weights, relate_weights, sample_rows
from regard.engines.torch_precision import widen
from regard.findings import Finding
from regard.lens.token_rows import TokenRows

Tensor = Any  # the types of torch are not followed

NAMES = ("query", "key", "value")


@dataclass(frozen=True)
class CallComparison:
    """The differences of one call in two runs.

    Args:
        differences: The causes, the most telling first; empty if the calls agree.
        sizes: Relative difference of query, key, value and output, and the share of weight that moved ("weights").
        relations: How the query, key and value of B are related to those of A.
        equivalent: The query and key differ, but not the scores.
        limit: The largest relative difference that counts as rounding.
    """

    differences: tuple[Finding, ...]
    sizes: dict[str, float]
    relations: dict[str, Relation] = field(default_factory=dict)
    equivalent: str = ""
    limit: float = 0.0

    @property
    def largest(self) -> float:
        """The largest relative difference of query, key, value and output that is known."""
        sizes = [self.sizes[name] for name in (*NAMES, "output")]
        return max((size for size in sizes if not math.isnan(size)), default=0.0)


@dataclass(frozen=True)
class CallTensors:
    """The tensors of a call with four axes, (batch, heads, n, width); value and output are None if not recorded."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    output: Tensor | None

    @classmethod
    def from_call(cls, call: Call, q_len: int, kv_len: int) -> CallTensors:
        """Take the first queries and keys of a call."""

        def take(tensor: Tensor | None, length: int) -> Tensor | None:
            if tensor is None:
                return None
            while tensor.ndim < 4:
                tensor = tensor[None]
            return tensor.flatten(0, -4)[:, :, :length]

        return cls(
            take(call.query, q_len), take(call.key, kv_len), take(call.value, kv_len), take(call.output, q_len)
        )  # fmt: skip


def compare_calls(
    a: Call, b: Call, *, layer: int, previous: float = 0.0, rows: int | None = None, parted: bool = False
) -> CallComparison:
    """Compare one call in two runs.

    Args:
        a: The call of run A.
        b: The call of run B.
        layer: Number of the layer, from 0.
        previous: The largest difference of the layer before.
        rows: Compare the first rows only, if the sequences differ after them; 0 compares settings only. Default: all
            that both have.
        parted: The runs differ before this layer, so only the settings can have a cause of their own.

    Returns:
        The differences.
    """
    dtypes = {str(call.query.dtype).removeprefix("torch.") for call in (a, b) if call.query is not None}
    limit = limit_rounding(dtypes, previous)
    nan = dict.fromkeys((*NAMES, "weights", "output"), math.nan)
    if a.query is None or b.query is None:
        return CallComparison(tuple(_compare_measures(a, b, limit)), nan, limit=limit)
    q_len, kv_len = (min(x, y) for x, y in zip(a.shape[-2:], b.shape[-2:], strict=True))
    if rows == 0:
        return CallComparison(tuple(_compare_settings(a, b, q_len, kv_len, None)), nan, limit=limit)
    if rows is not None:
        q_len, kv_len = min(q_len, rows), min(kv_len, rows)
    has_scores = a.weights is None and b.weights is None
    swapped = has_scores and a.shape[-2:] != b.shape[-2:] and a.query.numel() == b.query.numel()
    if swapped:  # perhaps by a transpose: compare everything
        q_len, kv_len = max(a.shape[-2], b.shape[-2]), max(a.shape[-1], b.shape[-1])
    tensors_a, tensors_b = (CallTensors.from_call(call, q_len, kv_len) for call in (a, b))
    query_tokens, key_tokens = (None, None) if swapped else find_common_tokens(a, b, q_len, kv_len)
    relations = {
        name: relate(
            *_match_heads(getattr(tensors_a, name), getattr(tensors_b, name)),
            limit,
            query_tokens if name == "query" else key_tokens,
            explain=not parted,
        )
        for name in (NAMES if has_scores else NAMES[2:])
        if getattr(tensors_a, name) is not None and getattr(tensors_b, name) is not None
    }
    sizes = nan | {name: relation.size for name, relation in relations.items()}
    broken = _find_not_finite(a, b, relations, q_len, query_tokens)
    if broken is not None:  # masks and weights that were read from it mean nothing
        return CallComparison((broken,), sizes, relations, limit=limit)
    same_shape = all(relation.kind != "shape" for relation in relations.values()) and not swapped
    settings: list[Finding] = []
    if same_shape:
        sizes["output"] = _compare_outputs(tensors_a, tensors_b, query_tokens)
        sizes["weights"] = _compare_weights(a, b, q_len, query_tokens)
        settings = find_setting_differences(a, b, q_len, kv_len, query_tokens)
    if not has_scores:
        weights = relate_weights(a, b, q_len, kv_len, limit, query_tokens)
        relations = {"weights": weights, **relations}
        causes = [*settings, *([] if parted else explain_weights(a, b, relations, limit))]
        return CallComparison(tuple(causes), sizes, relations, limit=limit)
    if parted:
        settings = _compare_settings(a, b, q_len, kv_len, query_tokens) if same_shape else []
        return CallComparison(tuple(settings), sizes, relations, limit=limit)
    equivalent = ""
    moved = [name for name in ("query", "key") if not relations[name].agrees]
    causes = list(settings)
    if moved and same_shape and not settings and _scores_agree(a, b, tensors_a, tensors_b, limit):
        equivalent = _describe_equivalence(relations, a, b)
        relations = {name: r for name, r in relations.items() if name not in ("query", "key")}
    causes += explain_relations(a, b, relations, layer)
    if not causes and same_shape:
        output_limit = _output_limit(a, tensors_a, limit)
        if sizes["weights"] > output_limit:
            causes.append(build_score_difference(sizes["weights"]))
        elif sizes["output"] > output_limit:
            causes.append(build_output_difference(sizes["output"]))
    return CallComparison(tuple(causes), sizes, relations, equivalent, limit)


def _find_not_finite(
    a: Call, b: Call, relations: Mapping[str, Relation], q_len: int, tokens: Tensor | None
) -> Finding | None:
    """Find NaN and inf that one run has and the other has not, in query, key, value or weights."""
    if any(relation.kind == "not finite" for relation in relations.values()):
        return explain_relations(a, b, {n: r for n, r in relations.items() if r.kind == "not finite"}, 0)[0]
    rows = sample_rows(q_len)
    broken = []
    for call in (a, b):
        numbers = (
            None if call.weights is None else call.weights.reshape(-1, *call.weights.shape[-3:])[:, :, rows]
        )
        is_broken = None if numbers is None else ~numbers.isfinite().all(-1).all(1)
        if is_broken is not None and tokens is not None and len(tokens) == len(is_broken):
            is_broken &= tokens[:, rows].to(is_broken.device)
        broken.append(is_broken is not None and bool(is_broken.any()))
    if broken[0] == broken[1]:
        return None
    message = (
        f"The weights of {'B' if broken[1] else 'A'} have NaN or inf. The layer computes its own softmax, so its "
        "query, key and scores are unknown."
    )
    hint = (
        "Check its query and key, the product of the two (it may exceed float16), the mask and the softmax."
    )
    return Finding("NaN or inf", "error", message, hint=hint)


def _compare_settings(a: Call, b: Call, q_len: int, kv_len: int, tokens: Tensor | None) -> list[Finding]:
    """Compare the settings alone, the scale among them."""
    differences = find_setting_differences(a, b, q_len, kv_len, tokens)
    if not math.isclose(a.scale, b.scale, rel_tol=1e-5):
        differences.append(build_scale_difference(a, b.scale / a.scale, "scale"))
    return differences


def _compare_measures(a: Call, b: Call, limit: float) -> list[Finding]:
    """Compare the results of measures, if query and key were not recorded."""
    if a.shape != b.shape:
        return [Finding("shape", "error", f"The matrix has the shape {b.shape} instead of {a.shape}.")]
    results = b.measures or {}
    names = [
        name
        for name, result in (a.measures or {}).items()
        if isinstance(result, torch.Tensor)
        and isinstance(results.get(name), torch.Tensor)
        and not torch.allclose(
            widen(result), widen(results[name]), rtol=100 * limit, atol=100 * limit, equal_nan=True
        )
    ]
    if not names:
        return []
    return [
        Finding(
            "measures",
            "error",
            f"The measures differ: {', '.join(names)}.",
            hint="Record query and key to find the cause: call regard.watch without measures.",
        )
    ]


def _match_heads(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the heads of the one with fewer key-value heads, if the number of the other is a multiple."""
    heads_a, heads_b = a.shape[1], b.shape[1]
    if heads_a == heads_b or not heads_a or not heads_b:
        return a, b
    if heads_b % heads_a == 0:
        return a.repeat_interleave(heads_b // heads_a, 1), b
    if heads_a % heads_b == 0:
        return a, b.repeat_interleave(heads_a // heads_b, 1)
    return a, b


def find_common_tokens(a: Call, b: Call, q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
    """Return which queries and keys to compare, (batch, n): all but the padding of both runs."""
    flags = []
    tokens_a, tokens_b = TokenRows.from_call(a), TokenRows.from_call(b)
    for name, length in (("rows", q_len), ("keys", kv_len)):
        first, second = (
            getattr(tokens, name)[..., :length].reshape(-1, length) for tokens in (tokens_a, tokens_b)
        )
        flags.append(torch.tensor(first | second, device=a.query.device))
    return flags[0], flags[1]


def _compare_outputs(a: CallTensors, b: CallTensors, tokens: Tensor) -> float:
    if a.output is None or b.output is None or a.output.shape != b.output.shape:
        return math.nan
    first, second = (widen(t).nan_to_num(0, 0, 0) for t in (a.output, b.output.to(a.output.device)))
    return float(row_differences(first, second, tokens).max()) if first.numel() else 0.0


def _compare_weights(a: Call, b: Call, q_len: int, tokens: Tensor) -> float:
    """Return the share of weight that moved, ½ Σ |A − B|, averaged over some rows; NaN if the matrices do not match."""
    if a.shape != b.shape or not math.prod(a.shape):
        return math.nan
    rows = sample_rows(q_len)
    first, second = (call.matrix.lazy[..., rows, :].to_dense().cpu().double() for call in (a, b))
    moved = ((first - second).abs().sum(-1) / 2).reshape(len(tokens), -1, len(rows))
    counted = tokens[:, None, rows].cpu().expand_as(moved)
    return float(moved[counted].mean()) if bool(counted.any()) else math.nan


def _scores_agree(a: Call, b: Call, tensors_a: CallTensors, tensors_b: CallTensors, limit: float) -> bool:
    """Return whether the scaled scores of some rows agree, up to a number for each row, which softmax ignores."""
    rows = sample_rows(tensors_a.query.shape[2])
    scores, typical = [], []
    for call, tensors in ((a, tensors_a), (b, tensors_b)):
        query, key = widen(tensors.query[:, :, rows]), widen(tensors.key)
        if query.shape[1] % max(1, key.shape[1]):
            return False
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scaled = query @ key.mT * call.scale
        scores.append((scaled - scaled.mean(-1, keepdim=True)).to(tensors_a.query.device))
        size = query.square().mean().sqrt() * key.square().mean().sqrt() * math.sqrt(query.shape[-1])
        typical.append(float(size) * abs(call.scale))
    if scores[0].shape != scores[1].shape:
        return False
    size = max(*typical, float(scores[0].square().mean().sqrt()))
    error = (scores[0] - scores[1]).square().mean(-1).sqrt().max() if scores[0].numel() else 0.0
    return bool(error <= 2 * limit * max(size, 1e-30))


def _output_limit(call: Call, tensors: CallTensors, limit: float) -> float:
    """Return the largest difference of outputs that counts as rounding: weights multiply the error of their scores."""
    rows = sample_rows(tensors.query.shape[2])
    query, key = tensors.query[:, :, rows].float(), tensors.key.float()
    if not query.numel() or query.shape[1] % key.shape[1]:
        return limit
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * call.scale
    return max(limit, min(limit * (1 + float(scores.abs().amax())), MAX_ROUNDING))


def _describe_equivalence(relations: Mapping[str, Relation], a: Call, b: Call) -> str:
    if not math.isclose(a.scale, b.scale, rel_tol=1e-5):
        return f"The scale is {b.scale:.4g} instead of {a.scale:.4g}, and query or key make up for it."
    details = [
        f"the {name} of B {relations[name].detail}" for name in ("query", "key") if not relations[name].agrees
    ]
    return "The scores agree, although " + " and ".join(details) + "."
