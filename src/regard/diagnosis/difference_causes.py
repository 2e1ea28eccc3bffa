"""Explain how query, key and value of a call differ in two runs: the likely cause, with a hint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from regard.capture.call import Call
from regard.diagnosis.tensor_relation import Relation
from regard.findings import Finding
from regard.lens.token_rows import TokenRows
from regard.types import ORDINARY_TOLERANCE

# Tokens by which it is found out whether some vectors are projections of the same states, and what may remain.
MAX_FITTED, MAX_RESIDUAL = 4096, 1e-2


def explain_relations(a: Call, b: Call, relations: Mapping[str, Relation], layer: int) -> list[Finding]:
    """Explain how query, key and value differ by one cause, or a few.

    Args:
        a: The call of run A.
        b: The call of run B.
        relations: The relations of query, key and value, without those whose difference has no effect.
        layer: Number of the layer, from 0.

    Returns:
        The causes; empty if all agree.
    """
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
    for kinds, build in (
        (("not finite",), _not_finite),
        (("layout",), _layout),
        (("shape",), _shape),
        (("heads",), _heads),
        (("batch", "tokens"), _order),
        (("turned",), _turned),
    ):
        concerned = {name: relation for name, relation in differing.items() if relation.kind in kinds}
        if concerned:
            return [build(a, b, concerned, relations), *causes]
    if {"query", "key"} <= differing.keys() and _are_states_swapped(a, b):
        message = (
            "The queries of B are projections of what A projects to keys, and its keys the other way round."
        )
        hint = "Cross-attention takes queries from the decoder, and keys and values from the encoder: swap the two."
        evidence = _evidence(differing)
        return [Finding("encoder states", "error", message, hint=hint, evidence=evidence), *causes]
    if differing:
        causes.insert(0, _projection(a, b, differing, relations, layer))
    return causes


def _are_states_swapped(a: Call, b: Call) -> bool:
    """Return whether queries of B are linear in keys of A and keys of B in queries of A, which those of A are not."""
    if a.query.shape[-2] != a.key.shape[-2] or a.query.shape != b.query.shape or a.key.shape != b.key.shape:
        return False
    vectors = [
        x.detach()
        .double()
        .cpu()
        .reshape(-1, *x.shape[-3:])
        .transpose(1, 2)
        .flatten(0, 1)
        .flatten(1)[:MAX_FITTED]
        for x in (a.query, a.key, b.query, b.key)
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
    return f"{forms.get(first, first)} {rest}".replace(" that of A", " those of A").replace(
        " its ", " their "
    )


def _where(concerned: Mapping[str, Relation]) -> dict[str, Any]:
    relation = next(iter(concerned.values()))
    return {"rows": relation.rows, "batch": relation.batch}


def _evidence(concerned: Mapping[str, Relation]) -> dict[str, Any]:
    return {name: relation.size for name, relation in concerned.items() if not math.isnan(relation.size)}


def _not_finite(a: Call, b: Call, concerned: Any, relations: Any) -> Finding:
    return Finding(
        "NaN or inf", "error", _describe(concerned), hint="recording.diagnose() finds where they began.",
        **_where(concerned),
    )  # fmt: skip


def _layout(a: Call, b: Call, concerned: Any, relations: Any) -> Finding:
    hint = "Split heads by x.view(batch, n, heads, head_dim).transpose(1, 2)."
    if any("batch and tokens" in relation.detail for relation in concerned.values()):
        hint = "Pass (batch, n, width) with batch_first=True, or (n, batch, width) without it."
    return Finding(
        "view or transpose", "error", _describe(concerned), hint=hint, evidence=_evidence(concerned)
    )


def _shape(a: Call, b: Call, concerned: Any, relations: Any) -> Finding:
    hint = "Compare models of the same sizes: vectors of other sizes have nothing in common."
    if a.query.shape[1:] == b.query.shape[1:] and a.key.shape[1:] == b.key.shape[1:]:
        hint = "Run both models on the same batch."
    return Finding("shape", "error", _describe(concerned), hint=hint)


def _heads(a: Call, b: Call, concerned: Mapping[str, Relation], relations: Mapping[str, Relation]) -> Finding:
    if "query" in concerned:
        return Finding(
            "heads permuted", "error", _describe(concerned), evidence=_evidence(concerned),
            hint="If the output projection has the same order of heads, the model is the same; later layers show it.",
        )  # fmt: skip
    heads = a.query.shape[-3]
    orders = []
    for name, relation in concerned.items():
        stored = {"key": a.key, "value": a.value}[name].shape[-3]
        group = max(1, len(relation.order) // max(1, stored))
        used = [relation.order[h * len(relation.order) // heads] // group for h in range(heads)]
        usual = [h * stored // heads for h in range(heads)]
        orders.append(f"the {name} heads of the query heads are {used} instead of {usual}")
    text = "; ".join(orders) + "."
    hint = "Repeat key and value heads with repeat_interleave(groups, dim=1), not repeat, or pass enable_gqa=True."
    if all(len(set(relation.order)) == 1 for relation in concerned.values()):
        hint = (
            "B expands one key and value head to all query heads: use each, repeat_interleave(groups, dim=1)."
        )
    return Finding(
        "kv heads reordered", "error", text[0].upper() + text[1:], evidence=_evidence(concerned), hint=hint
    )


def _order(a: Call, b: Call, concerned: Mapping[str, Relation], relations: Mapping[str, Relation]) -> Finding:
    if "query" not in concerned and TokenRows.from_call(a).query_offset is None:
        hint = "Pass the encoder's output of the same batch entries, in order, to the decoder."
        return Finding(
            "encoder states", "error", _describe(concerned), hint=hint, evidence=_evidence(concerned)
        )
    if "query" not in concerned and max(a.steps, b.steps) > 1:
        hint = "Append each step's own key and value to the cache, and keep the order of tokens and batch entries."
        return Finding("cache", "error", _describe(concerned), hint=hint, evidence=_evidence(concerned))
    hint = "The inputs of the two runs are in another order."
    return Finding("other tokens", "error", _describe(concerned), hint=hint, evidence=_evidence(concerned))


def _turned(
    a: Call, b: Call, concerned: Mapping[str, Relation], relations: Mapping[str, Relation]
) -> Finding:
    hint = "Compare the positions, the base (theta), the layout of pairs, and where RoPE is applied."
    details = " ".join(relation.detail for relation in concerned.values())
    if concerned.keys() == {"value"}:
        hint = "Apply RoPE to query and key, not to the value."
    elif "once more" in details:
        hint = "Apply RoPE once, to query and key, before the cache is updated."
    elif "number of the head" in details:
        hint = "Apply RoPE after the transpose to (batch, heads, n, head_dim), or broadcast over axis 1."
    elif "multiplied" in details:
        hint = "Compare rope_scaling: linear interpolation divides the positions by a factor."
    elif "once less" in details and min(next(iter(concerned.values())).rows, default=0) <= 1:
        hint = "Apply RoPE to both query and key, in every layer."
    elif "shifted" in details or "positions were" in details or "every position" in details:
        hint = "Pass position_ids that continue after the cached tokens and do not count padding."
    elif "layout" in details:
        hint = "Weights and RoPE must agree: (i, i + width/2) is half, (2i, 2i + 1) is interleaved."
    return Finding(
        "positions turned", "error", _describe(concerned), hint=hint, evidence=_evidence(concerned), **_where(concerned)
    )  # fmt: skip


def _projection(
    a: Call, b: Call, differing: Mapping[str, Relation], relations: Mapping[str, Relation], layer: int
) -> Finding:
    names = _join(list(differing))
    agreeing = [name for name, relation in relations.items() if relation.agrees]
    differ, agree = "differ" + "s" * (len(differing) == 1), "agree" + "s" * (len(agreeing) == 1)
    where, evidence = _where(differing), _evidence(differing)
    rows = next(iter(differing.values())).rows
    if max(a.steps, b.steps) > 1 and rows and layer + len(agreeing) > 0 and min(rows) >= _prefill(a, b):
        message = (
            f"The {names} agree for the first {min(rows)} tokens and differ in the cached steps after them."
        )
        if agreeing:
            message = f"In the cached steps, the {names} of B {differ}; the {_join(agreeing)} {agree}."
        hint = "Append the keys and values of each step to the cache of its layer, and attend to all of them."
        return Finding("cache", "error", message, hint=hint, evidence=evidence, **where)
    if agreeing and len(differing) < 3:
        message = f"The {names} of B {differ}; the {_join(agreeing)} {agree}."
        hint = f"Compare the weights and bias of the {names} projection, and any norm after it."
        if agreeing == ["query"] and TokenRows.from_call(a).query_offset is None:
            hint = (
                f"Compare the encoder states that the layer reads, and the weights of the {names} projection."
            )
        return Finding("projection", "error", message, hint=hint, evidence=evidence, **where)
    if layer == 0 and rows and len(rows) < a.query.shape[-2]:
        message = f"The {names} of some rows differ in the first layer, and the other rows agree."
        hint = "The two runs were given other tokens there."
        return Finding("other tokens", "error", message, hint=hint, evidence=evidence, **where)
    before = (
        "the embedding, its scale, the norm before the layer, and the projections"
        if layer == 0
        else "merging of heads, output projection and feed-forward part of the layer before, and the norm and "
        "projections of this layer"
    )
    message = f"The {names} of B {differ}, by something before the attention of this layer."
    hint = f"Compare {before}."
    if "value" not in relations and layer:
        hint += " Record with watch(values=True) to compare what the layer before returned."
    largest = max(relation.size for relation in differing.values())
    if largest <= ORDINARY_TOLERANCE["bfloat16"]:
        hint += " The difference is as small as rounding to bfloat16 would make it."
    return Finding("projection", "error", message, hint=hint, evidence=evidence, **where)


def _prefill(a: Call, b: Call) -> int:
    """Return the number of tokens of the first of the joined calls, if the others have one token each; at least 1."""
    prefill = min(int(call.query.shape[-2]) - call.steps + 1 for call in (a, b) if call.steps > 1)
    return max(1, prefill)


def build_output_difference(size: float) -> Finding:
    """Build the difference of outputs whose query, key, value and mask agree."""
    return Finding(
        "output", "error", "Query, key, value and mask agree, and the output differs.", evidence={"output": size},
        hint="Compare the attention functions: dropout, the dtype of the softmax, and the order of the values.",
    )  # fmt: skip


def build_score_difference(size: float) -> Finding:
    """Build the difference of weights whose query, key, scale and mask agree: a modification of the scores."""
    return Finding(
        "bias", "error", "Query, key, scale and mask agree, and the weights differ: a score modification does.",
        evidence={"weights": size}, hint="Compare the score_mod, the position bias and the soft cap.",
    )  # fmt: skip


def build_scale_difference(a: Call, ratio: float, names: str) -> Finding:
    """Describe scores that are a multiple of the other run's, with the mistake that gives this factor."""
    width, heads = a.query.shape[-1], a.query.shape[-3] if a.query.ndim > 2 else 1
    root, kv_heads = math.sqrt(width), a.key.shape[-3] if a.key.ndim > 2 else 1
    mistakes = [
        (1 / root, "1/√head_dim: B scales twice, before the call and in it, or A not at all"),
        (root, "√head_dim: B does not scale, or A scales twice"),
        (1 / math.sqrt(heads), "1/√heads: B divides by √d_model instead of √head_dim"),
        (math.sqrt(heads), "√heads: A divides by √d_model instead of √head_dim"),
        (
            1 / math.sqrt(kv_heads),
            "1/√kv_heads: B divides by the root of the width of all key heads, not of one",
        ),
        (1 / math.sqrt(2), "1/√2: B divides by the root of twice the head_dim, as of a padded head"),
        (1 / width, "1/head_dim: B divides by head_dim once more, or by its root twice more"),
        (float(width), "head_dim: B multiplies where A divides"),
    ]
    if kv_heads == heads:  # the width of all key heads is that of the model
        mistakes = [(factor, text) for factor, text in mistakes if "kv_heads" not in text]
    cause = "; or ".join(text for factor, text in mistakes if math.isclose(ratio, factor, rel_tol=1e-3))
    message = f"The scores of B are {ratio:.4g} × those of A, by the {names}."
    hint = (
        f"×{ratio:.4g} is {cause}."
        if cause
        else "Compare the scale that is passed and the factors of query and key."
    )
    return Finding("scale", "error", message, hint=hint, evidence={"ratio": ratio})
