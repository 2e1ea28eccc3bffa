"""Compare one call of an attention layer in two runs: settings, vectors, weights and output, and why they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from regard.capture.call import Call
from regard.capture.compact_mask import CompactMask
from regard.diagnosis.tensor_relation import (
    MAX_ROUNDING,
    Relation,
    limit_rounding,
    list_rows,
    relate,
    row_differences,
)
from regard.engines.torch_precision import widen
from regard.findings import Finding, format_numbers
from regard.lens.token_rows import TokenRows
from regard.types import ORDINARY_TOLERANCE

Tensor = Any  # the types of torch are not followed


NAMES = ("query", "key", "value")
SAME_FACTOR = 0.01  # relative; a run in bfloat16 rounds each product by 0.004


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
    def kind(self) -> str:
        """Kind of the first difference; empty if there is none."""
        return self.differences[0].kind if self.differences else ""

    @property
    def largest(self) -> float:
        """The largest relative difference of query, key, value and output that is known."""
        sizes = [self.sizes[name] for name in (*NAMES, "output")]
        return max((size for size in sizes if not math.isnan(size)), default=0.0)


def _as_four_axes(tensor: Tensor) -> Tensor:
    """Return a tensor as (batch, heads, rows, width)."""
    while tensor.ndim < 4:
        tensor = tensor[None]
    return tensor.flatten(0, -4)


def _take_tensors(call: Call, q_len: int, kv_len: int) -> dict[str, Tensor]:
    """Return the first queries and keys of a call, (batch, heads, n, width), by name, without what was not recorded."""
    lengths = {"query": q_len, "key": kv_len, "value": kv_len, "output": q_len}
    recorded = {name: getattr(call, name) for name in lengths if getattr(call, name) is not None}
    return {name: _as_four_axes(tensor)[:, :, : lengths[name]] for name, tensor in recorded.items()}


def compare_calls(
    a: Call, b: Call, *, layer: int, previous: float = 0.0, rows: int | None = None, diverged: bool = False
) -> CallComparison:
    """Compare one call in two runs."""
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
    tensors_a, tensors_b = (_take_tensors(call, q_len, kv_len) for call in (a, b))
    query_tokens, key_tokens = (None, None) if swapped else find_common_tokens(a, b, q_len, kv_len)
    relations = {
        name: relate(
            _repeat_heads(tensors_a[name], tensors_b[name].shape[1]),
            _repeat_heads(tensors_b[name], tensors_a[name].shape[1]),
            limit,
            query_tokens if name == "query" else key_tokens,
            explain=not diverged,
        )
        for name in (NAMES if has_scores else NAMES[2:])
        if name in tensors_a and name in tensors_b
    }
    sizes = nan | {name: relation.size for name, relation in relations.items()}
    broken = _find_not_finite(a, b, relations, q_len, query_tokens)
    if broken is not None:  # masks and weights that were read from it mean nothing
        return CallComparison((broken,), sizes, relations, limit=limit)
    same_shape = all(relation.kind != "shape" for relation in relations.values()) and not swapped
    settings: list[Finding] = []
    if same_shape:
        sizes["output"] = _compare_outputs(tensors_a.get("output"), tensors_b.get("output"), query_tokens)
        sizes["weights"] = _compare_weights(a, b, q_len, query_tokens)
        settings = find_setting_differences(a, b, q_len, kv_len, query_tokens)
    if not has_scores:
        weights = relate_weights(a, b, q_len, kv_len, limit, query_tokens)
        relations = {"weights": weights, **relations}
        causes = [*settings, *([] if diverged else explain_weights(a, b, relations, limit))]
        return CallComparison(tuple(causes), sizes, relations, limit=limit)
    if diverged:
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
            message = (
                "Query, key, scale and mask agree, but the weights differ, so a score modification differs."
            )
            hint = "Compare the score_mod, the position bias and the soft cap."
            causes.append(
                Finding("bias", "error", message, hint=hint, evidence={"weights": sizes["weights"]})
            )
        elif sizes["output"] > output_limit:
            message = "Query, key, value and mask agree, but the output differs."
            hint = "Compare the attention functions: dropout, the dtype of the softmax, and the order of the values."
            causes.append(
                Finding("output", "error", message, hint=hint, evidence={"output": sizes["output"]})
            )
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
        if call.weights is None:
            broken.append(False)
            continue
        is_broken = ~_as_four_axes(call.weights)[:, :, rows].isfinite().all(-1).all(1)
        if tokens is not None and len(tokens) == len(is_broken):
            is_broken &= tokens[:, rows].to(is_broken.device)
        broken.append(bool(is_broken.any()))
    if broken[0] == broken[1]:
        return None
    message = (
        f"The weights of {'B' if broken[1] else 'A'} have NaN or inf. The layer computes its own softmax, so its "
        "query, key and scores are unknown."
    )
    hint = "Check its query and key, their product (it may overflow float16), the mask and the softmax."
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
    message = f"The measures differ: {', '.join(names)}."
    hint = "Record query and key to find the cause: call regard.watch without measures."
    return [Finding("measures", "error", message, hint=hint)] if names else []


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Repeat key-value heads for a number of heads that is a multiple of theirs."""
    own = tensor.shape[1]
    return tensor.repeat_interleave(heads // own, 1) if own and heads > own and heads % own == 0 else tensor


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


def _compare_outputs(a: Tensor | None, b: Tensor | None, tokens: Tensor) -> float:
    if a is None or b is None or a.shape != b.shape:
        return math.nan
    first, second = (widen(t).nan_to_num(0, 0, 0) for t in (a, b.to(a.device)))
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


def _scores_agree(
    a: Call, b: Call, tensors_a: Mapping[str, Tensor], tensors_b: Mapping[str, Tensor], limit: float
) -> bool:
    """Return whether the scaled scores of some rows agree, up to a number for each row, which softmax ignores."""
    rows, device = sample_rows(tensors_a["query"].shape[2]), tensors_a["query"].device
    scores, typical = [], []
    for call, tensors in ((a, tensors_a), (b, tensors_b)):
        query, key = widen(tensors["query"][:, :, rows]), widen(tensors["key"])
        if query.shape[1] % max(1, key.shape[1]):
            return False
        key = _repeat_heads(key, query.shape[1])
        scaled = query @ key.mT * call.scale
        scores.append((scaled - scaled.mean(-1, keepdim=True)).to(device))
        size = query.square().mean().sqrt() * key.square().mean().sqrt() * math.sqrt(query.shape[-1])
        typical.append(float(size) * abs(call.scale))
    if scores[0].shape != scores[1].shape:
        return False
    size = max(*typical, float(scores[0].square().mean().sqrt()))
    error = (scores[0] - scores[1]).square().mean(-1).sqrt().max() if scores[0].numel() else 0.0
    return bool(error <= 2 * limit * max(size, 1e-30))


def _output_limit(call: Call, tensors: Mapping[str, Tensor], limit: float) -> float:
    """Return the largest difference of outputs that counts as rounding: weights multiply the error of their scores."""
    rows = sample_rows(tensors["query"].shape[2])
    query, key = tensors["query"][:, :, rows].float(), tensors["key"].float()
    if not query.numel() or query.shape[1] % key.shape[1]:
        return limit
    scores = query @ _repeat_heads(key, query.shape[1]).mT * call.scale
    return max(limit, min(limit * (1 + float(scores.abs().amax())), MAX_ROUNDING))


def _describe_equivalence(relations: Mapping[str, Relation], a: Call, b: Call) -> str:
    if not math.isclose(a.scale, b.scale, rel_tol=1e-5):
        return f"The scale is {b.scale:.4g} instead of {a.scale:.4g}, but query or key compensate for it."
    details = [
        f"the {name} of B {relations[name].detail}" for name in ("query", "key") if not relations[name].agrees
    ]
    return "The scores agree, although " + " and ".join(details) + "."


# Tokens by which it is found out whether some vectors are projections of the same states, and what may remain.
MAX_FITTED, MAX_RESIDUAL = 4096, 1e-2


def explain_relations(a: Call, b: Call, relations: Mapping[str, Relation], layer: int) -> list[Finding]:
    """Explain how query, key and value differ by one cause, or a few."""
    differing = {name: relation for name, relation in relations.items() if not relation.agrees}
    causes: list[Finding] = []
    if "query" in relations and "key" in relations:
        ratio = b.scale / a.scale if a.scale else math.inf
        parts = [] if math.isclose(ratio, 1, rel_tol=1e-5) else ["scale"]
        for name in ("query", "key"):
            if relations[name].kind == "scaled" and not relations[name].rows:
                ratio *= relations[name].ratio
                parts.append(name)
                differing.pop(name, None)
        if parts:
            causes.append(build_scale_difference(a, ratio, " and ".join(parts)))
    for kinds, build in CAUSES.items():
        concerned = {name: relation for name, relation in differing.items() if relation.kind in kinds}
        if concerned:
            return [build(a, b, concerned), *causes]
    if {"query", "key"} <= differing.keys() and _are_states_swapped(a, b):
        message = "The queries of B are projected from the states that A projects to keys, and vice versa."
        hint = "Swap the two inputs: queries come from the decoder, keys and values from the encoder."
        return [_build_cause("encoder states", differing, hint, message), *causes]
    if differing:
        causes.insert(0, _projection(a, b, differing, relations, layer))
    return causes


def _are_states_swapped(a: Call, b: Call) -> bool:
    """Return whether queries of B are linear in keys of A and keys of B in queries of A, which those of A are not."""
    if a.query.shape[-2] != a.key.shape[-2] or a.query.shape != b.query.shape or a.key.shape != b.key.shape:
        return False
    tensors = (a.query, a.key, b.query, b.key)
    vectors = [
        _as_four_axes(x.detach().double().cpu()).transpose(1, 2).flatten(0, 1).flatten(1)[:MAX_FITTED]
        for x in tensors
    ]
    if not all(bool(x.isfinite().all()) for x in vectors):
        return False
    query_a, key_a, query_b, key_b = vectors
    return _is_linear(query_b, key_a) and _is_linear(key_b, query_a) and not _is_linear(query_a, key_a)


def _is_linear(x: Any, source: Any) -> bool:
    """Return whether rows are a linear function of other rows, of which there are more than columns."""
    source = torch.cat([source, torch.ones(len(source), 1, dtype=source.dtype)], 1)
    if 4 * len(source) < 5 * source.shape[1]:
        return False
    fitted = source @ torch.linalg.lstsq(source, x, driver="gelsd").solution
    return bool((fitted - x).norm() <= MAX_RESIDUAL * (x - x.mean(0)).norm())


def _describe(concerned: Mapping[str, Relation]) -> str:
    """Return one sentence on what differs: tensors with the same detail together."""
    by_detail: dict[str, list[str]] = {}
    for name, relation in concerned.items():
        by_detail.setdefault(relation.detail, []).append(name)
    parts = [
        f"the {_join(names)} of B {detail if len(names) == 1 else _plural(detail)}"
        for detail, names in by_detail.items()
    ]
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def _join(names: list[str]) -> str:
    """Join words by commas and "and"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _plural(detail: str) -> str:
    first, _, rest = detail.partition(" ")
    forms = {"is": "are", "was": "were", "has": "have", "differs": "differ"}
    return (
        f"{forms.get(first, first)} {rest}".replace(" its ", " their ")
        .replace(" A's was ", " A's were ")
        .replace(" A's has ", " A's have ")
        .replace(" it had ", " they had ")
    )


def _build_cause(
    kind: str, concerned: Mapping[str, Relation], hint: str, message: str = "", *, is_located: bool = False
) -> Finding:
    """Build a finding about tensors; with `is_located` it has the rows and batch entries of the first of them."""
    evidence = {name: relation.size for name, relation in concerned.items() if math.isfinite(relation.size)}
    first = next(iter(concerned.values()))
    where: dict[str, Any] = {"rows": first.rows, "batch": first.batch} if is_located else {}
    return Finding(kind, "error", message or _describe(concerned), hint=hint, evidence=evidence, **where)


def _explain_not_finite(a: Call, b: Call, concerned: Mapping[str, Relation]) -> Finding:
    return _build_cause(
        "NaN or inf", concerned, "Call recording.diagnose() to find where they first appear.", is_located=True
    )


def _explain_layout(a: Call, b: Call, concerned: Mapping[str, Relation]) -> Finding:
    hint = "Split heads with x.view(batch, n, heads, head_dim).transpose(1, 2)."
    if any("batch and tokens" in relation.detail for relation in concerned.values()):
        hint = "Pass (batch, n, width) with batch_first=True, or (n, batch, width) without it."
    return _build_cause("view or transpose", concerned, hint)


def _explain_shape(a: Call, b: Call, concerned: Mapping[str, Relation]) -> Finding:
    hint = "Compare models of the same size: vectors of different sizes cannot be compared."
    if a.query.shape[1:] == b.query.shape[1:] and a.key.shape[1:] == b.key.shape[1:]:
        hint = "Run both models on the same batch."
    return _build_cause("shape", concerned, hint)


def _explain_heads(a: Call, b: Call, concerned: Mapping[str, Relation]) -> Finding:
    if "query" in concerned:
        hint = "If the output projection permutes its heads in the same way, the models are equal: see later layers."
        return _build_cause("heads permuted", concerned, hint)
    heads = a.query.shape[-3]
    orders = []
    for name, relation in concerned.items():
        stored = {"key": a.key, "value": a.value}[name].shape[-3]
        group = max(1, len(relation.order) // max(1, stored))
        used = [relation.order[h * len(relation.order) // heads] // group for h in range(heads)]
        usual = [h * stored // heads for h in range(heads)]
        orders.append(f"the query heads attend to {name} heads {used} instead of {usual}")
    text = "; ".join(orders) + "."
    hint = "Repeat key and value heads with repeat_interleave(groups, dim=1), not repeat, or pass enable_gqa=True."
    if all(len(set(relation.order)) == 1 for relation in concerned.values()):
        hint = "B expands one key-value head to all query heads: use all of them, repeat_interleave(groups, dim=1)."
    return _build_cause("kv heads reordered", concerned, hint, text[0].upper() + text[1:])


def _explain_order(a: Call, b: Call, concerned: Mapping[str, Relation]) -> Finding:
    if "query" not in concerned and TokenRows.from_call(a).query_offset is None:
        hint = "Pass the encoder output to the decoder with its batch entries in the same order."
        return _build_cause("encoder states", concerned, hint)
    if "query" not in concerned and max(a.steps, b.steps) > 1:
        hint = "Append each step's own key and value to the cache, and keep the order of tokens and batch entries."
        return _build_cause("cache", concerned, hint)
    return _build_cause("other tokens", concerned, "Pass the inputs of both runs in the same order.")


def _explain_turn(a: Call, b: Call, concerned: Mapping[str, Relation]) -> Finding:
    hint = "Compare the positions, the base (theta), the layout of pairs, and where RoPE is applied."
    details = " ".join(relation.detail for relation in concerned.values())
    if concerned.keys() == {"value"}:
        hint = "Apply RoPE to query and key, not to the value."
    elif "once more" in details:
        hint = "Apply RoPE once, to query and key, before the cache is updated."
    elif "head index" in details:
        hint = "Apply RoPE after the transpose to (batch, heads, n, head_dim), or broadcast over axis 1."
    elif "multiplied" in details:
        hint = "Compare rope_scaling: linear interpolation divides the positions by a factor."
    elif "once less" in details and min(next(iter(concerned.values())).rows, default=0) <= 1:
        hint = "Apply RoPE to both query and key, in every layer."
    elif "shifted" in details or "positions were" in details or "every position" in details:
        hint = "Pass position_ids that continue after the cached tokens and do not count padding."
    elif "layout" in details:
        hint = "Weights and RoPE must agree: (i, i + width/2) is half, (2i, 2i + 1) is interleaved."
    return _build_cause("rotary positions", concerned, hint, is_located=True)


CAUSES: dict[tuple[str, ...], Callable[[Call, Call, Mapping[str, Relation]], Finding]] = {
    ("not finite",): _explain_not_finite,
    ("layout",): _explain_layout,
    ("shape",): _explain_shape,
    ("heads",): _explain_heads,
    ("batch", "tokens"): _explain_order,
    ("turned",): _explain_turn,
}


def _projection(
    a: Call, b: Call, differing: Mapping[str, Relation], relations: Mapping[str, Relation], layer: int
) -> Finding:
    names = _join(list(differing))
    agreeing = [name for name, relation in relations.items() if relation.agrees]
    differ, agree = "differ" + "s" * (len(differing) == 1), "agree" + "s" * (len(agreeing) == 1)
    rows = next(iter(differing.values())).rows
    if max(a.steps, b.steps) > 1 and rows and layer + len(agreeing) > 0 and min(rows) >= _prefill(a, b):
        message = (
            f"The {names} agree for the first {min(rows)} tokens and differ in the cached steps after them."
        )
        if agreeing:
            message = f"In the cached steps, the {names} of B {differ}; the {_join(agreeing)} {agree}."
        hint = "Append the keys and values of each step to the cache of its layer, and attend to all of them."
        return _build_cause("cache", differing, hint, message, is_located=True)
    if agreeing and len(differing) < 3:
        message = f"The {names} of B {differ}; the {_join(agreeing)} {agree}."
        hint = f"Compare the weights and bias of the {names} projection, and any norm after it."
        if agreeing == ["query"] and TokenRows.from_call(a).query_offset is None:
            hint = (
                f"Compare the encoder states that the layer reads, and the weights of the {names} projection."
            )
        return _build_cause("projection", differing, hint, message, is_located=True)
    if layer == 0 and rows and len(rows) < a.query.shape[-2]:
        message = f"The {names} of some rows differ in the first layer; the other rows agree."
        hint = "Pass the same tokens to both runs: these rows have different ones."
        return _build_cause("other tokens", differing, hint, message, is_located=True)
    before = (
        "the embedding, its scale, the norm before the layer, and the projections"
        if layer == 0
        else "how the previous layer merges heads, its output projection and feed-forward block, and the norm and "
        "projections of this layer"
    )
    message = f"The {names} of B {differ}, and the cause is before the attention of this layer."
    hint = f"Compare {before}."
    if "value" not in relations and layer:
        hint += " Record with watch(values=True) to compare the output of the previous layer."
    largest = max(relation.size for relation in differing.values())
    if largest <= ORDINARY_TOLERANCE["bfloat16"]:
        hint += " The difference is small enough to be rounding to bfloat16."
    return _build_cause("projection", differing, hint, message, is_located=True)


def _prefill(a: Call, b: Call) -> int:
    """Return the number of tokens of the first of the joined calls, if the others have one token each; at least 1."""
    prefill = min(int(call.query.shape[-2]) - call.steps + 1 for call in (a, b) if call.steps > 1)
    return max(1, prefill)


def build_scale_difference(a: Call, ratio: float, names: str) -> Finding:
    """Describe scores that are a multiple of the other run's, with the mistake that gives this factor."""
    width, heads = a.query.shape[-1], a.query.shape[-3] if a.query.ndim > 2 else 1
    root, kv_heads = math.sqrt(width), a.key.shape[-3] if a.key.ndim > 2 else 1
    mistakes = [
        (1 / root, "1/√head_dim: B scales twice, before the call and inside it, or A does not scale"),
        (root, "√head_dim: B does not scale, or A scales twice"),
        (1 / math.sqrt(heads), "1/√heads: B divides by √d_model instead of √head_dim"),
        (math.sqrt(heads), "√heads: A divides by √d_model instead of √head_dim"),
        (
            1 / math.sqrt(kv_heads),
            "1/√kv_heads: B divides by √(kv_heads · head_dim) instead of √head_dim",
        ),
        (1 / math.sqrt(2), "1/√2: B divides by √(2 · head_dim), as if the head were padded"),
        (1 / width, "1/head_dim: B divides by head_dim once too often, or by √head_dim twice too often"),
        (float(width), "head_dim: B multiplies by √head_dim where A divides by it"),
    ]
    if kv_heads == heads:  # the width of all key heads is that of the model
        mistakes = [(factor, text) for factor, text in mistakes if "kv_heads" not in text]
    cause = "; or ".join(
        text for factor, text in mistakes if math.isclose(ratio, factor, rel_tol=SAME_FACTOR)
    )
    verb = "differ" if " " in names else "differs"
    message = f"The scores of B are {ratio:.4g} × the scores of A, because the {names} {verb}."
    hint = "Compare the scale argument and any factor of query and key."
    hint = f"{ratio:.4g} is {cause}." if cause else hint
    return Finding("scale", "error", message, hint=hint, evidence={"ratio": ratio})


# An additive mask at or below this number masks a key in practice.
MASKED = -9000.0
# Entries of masks and biases that are compared; of larger ones, evenly spaced rows.
MAX_ENTRIES = 1 << 22


def find_setting_differences(
    a: Call, b: Call, q_len: int, kv_len: int, tokens: Tensor | None
) -> list[Finding]:
    """Find the settings that differ.

    Args:
        tokens: (batch, q_len), True for the rows to compare; None for all.
    """
    differences = []
    if not _have_equal_masks(a.compact_mask, b.compact_mask):
        found = _compare_masks(a, b, q_len, kv_len, tokens)
        differences += [] if found is None else [found]
    if a.dropout_p != b.dropout_p:
        message = f"The dropout is {b.dropout_p:g} instead of {a.dropout_p:g}."
        hint = "Pass dropout_p=0.0 unless self.training; call model.eval()."
        evidence = {"A": a.dropout_p, "B": b.dropout_p}
        differences.append(Finding("dropout", "error", message, hint=hint, evidence=evidence))
    if repr(a.softcap) != repr(b.softcap):
        message = f"The soft cap is {b.softcap} instead of {a.softcap}."
        hint = "Compare attn_logit_softcapping, and whether the attention function applies it."
        differences.append(Finding("softcap", "error", message, hint=hint))
    sinks = _compare_sinks(a, b)
    return differences if sinks is None else [*differences, sinks]


def _have_equal_masks(a: CompactMask, b: CompactMask) -> bool:
    """Return whether two masks are equal as they are stored, which is the usual case."""
    if a is b:
        return True
    if a.tiled_mask is not None or b.tiled_mask is not None:
        return False  # compared entry by entry
    pairs = [
        (getattr(a, name), getattr(b, name)) for name in ("start", "stop", "visible_keys", "uniform_keys")
    ]
    for first, second in pairs:
        if (first is None) != (second is None) or (first is not None and not np.array_equal(first, second)):
            return False
    arrays = (a.dense_mask, b.dense_mask), (getattr(a.bias, "array", None), getattr(b.bias, "array", None))
    for first, second in arrays:
        if first is None or second is None:
            if first is not second:
                return False
        elif first.shape != second.shape or not torch.equal(first, second.to(first.device, first.dtype)):
            return False
    return a.bias is b.bias or getattr(a.bias, "array", None) is not None


def describe_moved_masks(masks_a: Sequence[CompactMask], masks_b: Sequence[CompactMask]) -> str:
    """Say which layers of B have the masks of other layers of A, as a hint; empty if that does not explain them."""
    layers = range(len(masks_a))
    kinds = [next(j for j in layers if _have_equal_masks(masks_a[j], masks_a[i])) for i in layers]
    found = [
        next((kinds[j] for j in layers if _have_equal_masks(masks_a[j], masks_b[i])), None) for i in layers
    ]
    if None in found or found == kinds or len(set(found)) < 2:
        return ""
    parts = [
        f"the mask of A's {format_numbers('layer', tuple(i for i in layers if kinds[i] == kind))} is on B's "
        f"{format_numbers('layer', tuple(i for i in layers if found[i] == kind))}"
        for kind in dict.fromkeys(kinds)
    ]
    return f"The masks are on different layers: {'; '.join(parts)}. Compare which layers have a window (layer_types)."


def _compare_masks(a: Call, b: Call, q_len: int, kv_len: int, tokens: Tensor | None) -> Finding | None:
    """Compare mask and bias entry by entry; None if they agree in the rows that count."""
    pairs = max(1, int(np.prod(a.shape[:-2])))
    count = max(1, min(q_len, MAX_ENTRIES // max(1, pairs * kv_len)))
    rows = sample_rows(q_len, count)
    first, second = (_read_bias(call, rows, kv_len) for call in (a, b))
    if not first.numel() or first.shape[1:] != second.shape[1:]:
        return None
    visible_a, visible_b = first > MASKED, second > MASKED
    counted = torch.ones(1, 1, dtype=torch.bool) if tokens is None else tokens.cpu()[:, rows]
    changed = (visible_a != visible_b) & counted[:, None, :, None]
    if bool(changed.any()):
        return _describe_masks(a, b, first, second, changed, rows)
    both = visible_a & counted[:, None, :, None]
    error = torch.where(both, second - first, 0.0)
    # Softmax ignores a number that is added to a whole row.
    mean = error.sum(-1, keepdim=True) / both.sum(-1, keepdim=True).clamp(min=1)
    largest = float(torch.where(both, error - mean, 0.0).abs().max())
    size = float(torch.where(both, first, 0.0).abs().max())
    if largest <= 1e-2 * max(1.0, size) * (1 if a.query.dtype != b.query.dtype else 1e-2):
        return None
    names = [repr(call.compact_mask.bias) for call in (a, b)]
    return Finding(
        "bias", "error", f"The bias of the scores differs by up to {largest:.3g}: {names[1]} instead of {names[0]}.",
        hint="Compare the position bias (sign, slopes, table) and the additive mask.",
        evidence={"largest": largest},
    )  # fmt: skip


def _read_bias(call: Call, rows: list[int], kv_len: int) -> Tensor:
    """Return what mask and bias add to the scores of some rows, (batch, heads, rows, keys); −inf masks."""
    empty = replace(
        call, query=torch.zeros_like(call.query), lse=None, softcap=None, weights=None, versions=()
    )
    return _as_four_axes(empty.matrix.lazy[..., rows, :].scores[...].float().cpu())[..., :kv_len]


def _describe_masks(
    a: Call, b: Call, first: Tensor, second: Tensor, changed: Tensor, rows: list[int]
) -> Finding:
    visible_a, visible_b = first > MASKED, second > MASKED
    names = [_format_mask(call) for call in (a, b)]
    gained = int((changed & visible_b).any(1).sum())
    lost = int((changed & visible_a).any(1).sum())
    parts = [f"{count:,} {word}" for count, word in ((gained, "more"), (lost, "fewer")) if count]
    entries = "entries"
    if len(rows) < a.shape[-2]:
        entries = f"entries in the {len(rows):,} rows compared"
    message = f"The mask is {names[1]} instead of {names[0]}: B attends to {' and '.join(parts)} {entries}."
    if names[0] == names[1]:
        message = f"The masks differ: B attends to {' and '.join(parts)} {entries}."
    flagged = torch.zeros(changed.shape[0], max(rows) + 1, dtype=torch.bool)
    flagged[:, rows] = changed.any(-1).any(1)
    numbers, batch = list_rows(flagged)
    numbers = () if len(numbers) == a.shape[-2] else numbers
    empty = int((changed.any(-1) & ~visible_b.any(-1)).any(1).sum())
    hint = _guess_mistake(b, visible_a, visible_b, second, changed)
    evidence = {"gained": gained, "lost": lost} | ({"rows without a key": empty} if empty else {})
    return Finding("mask", "error", message, hint=hint, rows=numbers, batch=batch, evidence=evidence)


def _format_mask(call: Call) -> str:
    bias = call.compact_mask.bias
    if call.mask is None:
        return "none" if bias is None else f"none with {bias!r}"
    return repr(call.mask) if bias is None else f"{call.mask!r} with {bias!r}"


def _guess_mistake(b: Call, visible_a: Tensor, visible_b: Tensor, added: Tensor, changed: Tensor) -> str:
    """Name the mistake that makes the mask of A the mask of B."""
    array = getattr(b.compact_mask.bias, "array", None)
    if array is not None and bool(((array == 0) | (array == 1)).all()):
        return "A float mask of 0 and 1 is added to the scores. Pass a boolean mask: mask.bool()."
    gained = changed & visible_b
    lowest = float(added[gained].max()) if array is not None and bool(gained.any()) else 0.0
    if lowest < 0:
        return (
            f"The additive mask of {lowest:.3g} is too weak. Pass a boolean mask, or torch.finfo(dtype).min."
        )
    by_head = visible_a[:, :1].transpose(0, 1)
    if visible_a.shape[0] == visible_b.shape[1] and torch.equal(by_head.expand_as(visible_b), visible_b):
        return "Head h of B has the mask of batch entry h: add an axis to (batch, q_len, kv_len) with mask[:, None]."
    if torch.equal(visible_a, ~visible_b):
        return "The mask is inverted: True = attend in F.scaled_dot_product_attention, ignore in nn.MultiheadAttention."
    keys_a, keys_b = _find_shared_keys(visible_a), _find_shared_keys(visible_b)
    padded = ~keys_a.all(-1)  # batch entries
    is_rolled = any(torch.equal(keys_a.roll(n, 0), keys_b) for n in range(1, len(keys_a)))
    if is_rolled and not torch.equal(keys_a, keys_b):
        return "Batch entries have each other's padding masks: reorder the mask with the batch."
    if bool(padded.any()) and not bool((keys_b & keys_a)[padded].any()):
        return "The padding mask is inverted: True = attend in F.scaled_dot_product_attention."
    if bool(gained.any()) and not bool((changed & ~_own_keys(changed, 1)).any()):
        return "B attends to the key after each token: use tril() to attend, or triu(diagonal=1) to mask."
    if not bool(gained.any()) and torch.equal(changed, visible_a & _own_keys(changed)):
        return "B masks each token's own key: use tril() to attend, or triu(diagonal=1) to mask."
    if not bool((changed.any(-1) & visible_b.any(-1)).any()):
        return "These rows of B attend to no key. If they are padding, the difference has no effect on the tokens."
    if bool(visible_b.all()):
        return "B does not mask any key: pass the mask to the attention function, or is_causal=True."
    if b.is_causal and (b.steps > 1 or b.shape[-1] != b.shape[-2]) and not bool(gained.any()):
        return "is_causal aligns to the first key. Use torch.nn.attention.bias.causal_lower_right(q_len, kv_len)."
    if not bool((changed & visible_a).any()):
        return "B attends to keys that A masks: padding, later tokens, another document, or keys outside the window."
    return "Compare how the masks are built: causality, padding, window and documents."


def _own_keys(visible: Tensor, offset: int = 0) -> Tensor:
    """Return a diagonal of (…, rows, keys) as booleans; none if the matrix is not square."""
    rows, keys = visible.shape[-2:]
    return torch.ones(rows, keys, dtype=torch.bool).triu(offset).tril(offset) & (rows == keys)


def _find_shared_keys(visible: Tensor) -> Tensor:
    """Return which keys some other row of the batch entry attends to, (batch, keys)."""
    return (visible & ~_own_keys(visible)).any(-2).any(1)


def _compare_sinks(a: Call, b: Call) -> Finding | None:
    hint = "Load the model with an attention implementation that supports sinks, and pass them (s_aux)."
    if (a.sink is None) != (b.sink is None):
        name = "B" if b.sink is None else "A"
        return Finding("sinks", "error", f"{name} does not use the sinks.", hint=hint)
    if a.sink is None or b.sink is None:
        return None
    first, second = a.sink.float().cpu().squeeze(), b.sink.float().cpu().squeeze()
    if first.shape == second.shape and torch.allclose(first, second, rtol=2e-2, atol=2e-2):
        return None
    return Finding("sinks", "error", "The sinks differ.", hint="Compare the sinks of the two checkpoints.")


# Rows whose weights and scores are compared.
MAX_ROWS = 64
# Weights are exponentials of scores, whose rounding they multiply.
WEIGHT_FACTOR = 4


def sample_rows(q_len: int, count: int = MAX_ROWS) -> list[int]:
    """Return at most `count` rows, evenly spaced."""
    rows = np.linspace(0, q_len - 1, min(q_len, count)).round().astype(int)
    return [int(row) for row in np.unique(rows)]


def relate_weights(
    a: Call, b: Call, q_len: int, kv_len: int, limit: float, tokens: Tensor | None
) -> Relation:
    """Find out how the weights of some rows are related.

    Args:
        tokens: (batch, q_len), True for the rows to compare; None for all.
    """
    first, second, rows = _read_weights(a, b, q_len, kv_len)
    relation = relate(first, second, WEIGHT_FACTOR * limit, None if tokens is None else tokens.cpu()[:, rows])
    return replace(relation, rows=tuple(rows[row] for row in relation.rows))


def _read_weights(a: Call, b: Call, q_len: int, kv_len: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return the weights of some rows in both runs, (batch, heads, rows, keys), and the rows."""
    rows = sample_rows(q_len)
    weights = (call.matrix.lazy[..., rows, :].to_dense().float().cpu() for call in (a, b))
    first, second = (_as_four_axes(x)[..., :kv_len] for x in weights)
    return first, second, rows


def explain_weights(a: Call, b: Call, relations: Mapping[str, Relation], limit: float) -> list[Finding]:
    """Explain how weights and values differ by one cause."""
    weights = relations["weights"]
    values = {name: relation for name, relation in relations.items() if name == "value"}
    if weights.agrees:
        return explain_relations(a, b, values, 0)
    where: dict[str, Any] = {"rows": weights.rows, "batch": weights.batch}
    if weights.kind == "heads":
        return [
            Finding(
                "heads permuted",
                "error",
                f"The weight matrix of B {weights.detail}.",
                evidence={"weights": weights.size},
            )
        ]
    ratio = _find_score_ratio(a, b, limit)
    if ratio is not None:
        message = f"The weights of B are those of scores {ratio:.4g} × as large as in A."
        hint = "Compare the scale and any factor of query and key."
        return [Finding("scale", "error", message, hint=hint, evidence={"ratio": ratio})]
    message = (
        f"The weights differ by {weights.size:.2g}. Query and key are unknown: the layer has its own softmax."
    )
    hint = "Call F.scaled_dot_product_attention in the layer, so that its query and key can be compared."
    return [Finding("weights", "error", message, hint=hint, evidence={"weights": weights.size}, **where)]


def _find_score_ratio(a: Call, b: Call, limit: float) -> float | None:
    """Return the factor between the logarithms of the weights, up to a number for each row; None if there is none."""
    q_len, kv_len = a.shape[-2:]
    first, second, _ = _read_weights(a, b, q_len, kv_len)
    if first.shape != second.shape:
        return None
    both = (first > 0) & (second > 0)
    logs = [widen(torch.where(both, weights.clamp(min=1e-30).log(), 0.0)) for weights in (first, second)]
    count = both.sum(-1, keepdim=True).clamp(min=1)
    centred = [torch.where(both, log - log.sum(-1, keepdim=True) / count, 0.0) for log in logs]
    norm = float(centred[0].square().sum())
    if not norm:
        return None
    ratio = float((centred[0] * centred[1]).sum()) / norm
    error = float(
        (centred[1] - ratio * centred[0]).square().sum() / centred[1].square().sum().clamp(min=1e-30)
    )
    return ratio if error**0.5 <= max(1e-4, WEIGHT_FACTOR * limit) else None
