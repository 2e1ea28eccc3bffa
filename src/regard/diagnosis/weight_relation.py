"""Compare the weights of a call in two runs, if a layer computed its own softmax and has no query and key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from regard.capture.call import Call
from regard.diagnosis.difference_causes import explain_relations
from regard.diagnosis.tensor_relation import Relation, relate
from regard.engines.torch_precision import widen
from regard.findings import Finding

Tensor = Any  # the types of torch are not followed

# Rows whose weights and scores are compared.
MAX_ROWS = 64
# Weights are exponentials of scores, whose rounding they multiply.
WEIGHT_FACTOR = 4


def sample_rows(q_len: int) -> list[int]:
    """Return at most MAX_ROWS rows, evenly spaced."""
    rows = np.linspace(0, q_len - 1, min(q_len, MAX_ROWS)).round().astype(int)
    return [int(row) for row in np.unique(rows)]


def relate_weights(
    a: Call, b: Call, q_len: int, kv_len: int, limit: float, tokens: Tensor | None
) -> Relation:
    """Find out how the weights of some rows are related.

    Args:
        a: The call of run A.
        b: The call of run B.
        q_len: Number of queries to compare, from the first.
        kv_len: Number of keys to compare, from the first.
        limit: Largest relative difference of a query or key that counts as rounding.
        tokens: (batch, q_len), True for the rows to compare; None for all.

    Returns:
        The relation; its rows are those of the matrix.
    """
    first, second, rows = _read_weights(a, b, q_len, kv_len)
    relation = relate(first, second, WEIGHT_FACTOR * limit, None if tokens is None else tokens.cpu()[:, rows])
    if not relation.rows:
        return relation
    numbers = tuple(rows[row] for row in relation.rows)
    return Relation(
        relation.kind, relation.size, relation.detail, relation.ratio, relation.order, numbers, relation.batch
    )


def _read_weights(a: Call, b: Call, q_len: int, kv_len: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return the weights of some rows in both runs, (batch, heads, rows, keys), and the rows."""
    rows = sample_rows(q_len)
    parts = []
    for call in (a, b):
        weights = call.matrix.lazy[..., rows, :].to_dense().float().cpu()
        while weights.ndim < 4:
            weights = weights[None]
        parts.append(weights.flatten(0, -4)[..., :kv_len])
    return parts[0], parts[1], rows


def explain_weights(a: Call, b: Call, relations: Mapping[str, Relation], limit: float) -> list[Finding]:
    """Explain how weights and values differ by one cause.

    Args:
        a: The call of run A.
        b: The call of run B.
        relations: The relations of the weights, and of the value if both have one.
        limit: Largest relative difference that counts as rounding.

    Returns:
        The causes; empty if all agree.
    """
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
                f"The weight of B {weights.detail}.",
                evidence={"weights": weights.size},
            )
        ]
    ratio = _find_score_ratio(a, b, limit)
    if ratio is not None:
        message = f"The scores of B are {ratio:.4g} × those of A, by their weights."
        hint = "Compare the scale, and the factors of query and key."
        return [Finding("scale", "error", message, hint=hint, evidence={"ratio": ratio})]
    message = f"The weights differ by {weights.size:.2g}; the layer computes its own softmax, so nothing else is known."
    hint = "Let the layer call F.scaled_dot_product_attention to compare its query and key."
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
