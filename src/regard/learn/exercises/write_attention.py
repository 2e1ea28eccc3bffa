"""Exercise 8: attention written by oneself, one head and then many, judged by the conformance kit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from regard.learn.exercises.answer_types import Conforms
from regard.learn.exercises.exercise import Exercise, Part


def attention(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
    """One head: query (q_len, d_k), key (kv_len, d_k), value (kv_len, d_v)."""
    (q_len, d_k), (kv_len, d_v) = query.shape, value.shape
    mask = np.broadcast_to(True if mask is None else mask, (q_len, kv_len))
    output = np.zeros((q_len, d_v))
    for i in range(q_len):
        scores = {}  # only of the keys that this query may see
        for j in range(kv_len):
            if mask[i, j]:
                scores[j] = sum(query[i, c] * key[j, c] for c in range(d_k)) / math.sqrt(d_k)
        if not scores:
            continue  # a row that sees nothing stays zeros
        highest = max(scores.values())  # taken off, so that exp does not overflow
        exponentials = {j: math.exp(score - highest) for j, score in scores.items()}
        total = sum(exponentials.values())
        for j in exponentials:
            for c in range(d_v):
                output[i, c] += exponentials[j] / total * value[j, c]
    return output


def many_heads(query: Any, key: Any, value: Any, num_heads: Any, mask: Any = None) -> Any:
    """Heads side by side in the last axis, each attending by itself."""
    d_k, d_v = query.shape[-1] // num_heads, value.shape[-1] // num_heads
    mask = np.broadcast_to(True if mask is None else mask, (num_heads, len(query), len(key)))
    outputs = []
    for h in range(num_heads):
        own, mixed = slice(h * d_k, (h + 1) * d_k), slice(h * d_v, (h + 1) * d_v)
        outputs.append(attention(query[:, own], key[:, own], value[:, mixed], mask[h]))
    return np.concatenate(outputs, axis=-1)  # side by side again


def write_it() -> dict[str, Any]:
    """Both functions."""
    return {"attention": attention, "many_heads": many_heads}


def _explain() -> str:
    from regard.testing import Report

    reports: dict[str, Report] = {part.name: part.kind.read(write_it()[part.name]) for part in WRITE_IT.parts}
    lines = ["Four loops: over queries, over keys, over the numbers of a key, over the numbers of a value."]
    for name, report in reports.items():
        asked = sum(row.asked for row in report.capabilities)
        lines.append(f"{name}: {asked} calls of the conformance kit, {len(report.findings)} findings.")
    lines.append(
        "Leaving a hidden key out of the loop is safer than giving it a weight of 0: 0 · NaN is NaN."
    )
    return "\n".join(lines)


WRITE_IT = Exercise(
    title="Exercise 8. Write attention yourself",
    task="First with loops, for one head: query (q_len, d_k), key (kv_len, d_k), value (kv_len, d_v), output "
    "(q_len, d_v). The mask broadcasts to (q_len, kv_len), True = attend; what is hidden must not matter, not even "
    "a NaN, and a row that sees nothing is zeros. Then for many: query, key and value have their heads side by side "
    "in the last axis, as in exercise 7, and so has the output; the mask may have an axis of heads in front. You may "
    "answer with the first function alone. Both are handed to regard.testing.conformance, which says in words what "
    "it finds.",
    given={},
    parts=(
        Part("attention", "attention for one head, returning the output", Conforms("n d", heads=False)),
        Part("many_heads", "the same for many heads", Conforms("n (h d)", heads=True)),
    ),
    solve=write_it,
    mistakes=list,
    explain=_explain,
    imports="import math\nimport numpy as np",
    helpers=(attention, many_heads),
)  # fmt: skip
