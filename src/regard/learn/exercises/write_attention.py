"""Exercise 8: write attention yourself, for one head and for several, checked by the conformance kit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from regard.learn.exercises.answer_types import AttentionFunctionAnswer
from regard.learn.exercises.exercise import Exercise, ExercisePart


def attention(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
    """Compute one head: query (q_len, d_k), key (kv_len, d_k), value (kv_len, d_v)."""
    (q_len, d_k), (kv_len, d_v) = query.shape, value.shape
    mask = np.broadcast_to(True if mask is None else mask, (q_len, kv_len))
    output = np.zeros((q_len, d_v))
    for i in range(q_len):
        scores = {}  # only the keys that this query attends to
        for j in range(kv_len):
            if mask[i, j]:
                scores[j] = sum(query[i, c] * key[j, c] for c in range(d_k)) / math.sqrt(d_k)
        if not scores:
            continue  # a fully masked row stays zeros
        highest = max(scores.values())  # subtracted, so that exp does not overflow
        exponentials = {j: math.exp(score - highest) for j, score in scores.items()}
        total = sum(exponentials.values())
        for j in exponentials:
            for c in range(d_v):
                output[i, c] += exponentials[j] / total * value[j, c]
    return output


def many_heads(query: Any, key: Any, value: Any, num_heads: Any, mask: Any = None) -> Any:
    """Compute several heads, which are side by side in the last axis."""
    d_k, d_v = query.shape[-1] // num_heads, value.shape[-1] // num_heads
    mask = np.broadcast_to(True if mask is None else mask, (num_heads, len(query), len(key)))
    outputs = []
    for h in range(num_heads):
        key_columns, value_columns = slice(h * d_k, (h + 1) * d_k), slice(h * d_v, (h + 1) * d_v)
        outputs.append(
            attention(query[:, key_columns], key[:, key_columns], value[:, value_columns], mask[h])
        )
    return np.concatenate(outputs, axis=-1)  # side by side again


def write_attention() -> dict[str, Any]:
    """Return both functions."""
    return {"attention": attention, "many_heads": many_heads}


def _explain() -> str:
    from regard.testing import ConformanceReport

    functions = write_attention()
    reports: dict[str, ConformanceReport] = {
        part.name: part.answer_type.parse(functions[part.name]) for part in WRITE_ATTENTION.parts
    }
    lines = ["Four loops: over queries, over keys, over the entries of a key, over the entries of a value."]
    for name, report in reports.items():
        calls = sum(row.num_calls for row in report.capabilities)
        lines.append(f"{name}: {calls} calls of the conformance kit, {len(report.findings)} findings.")
    lines.append("Skipping a masked key is safer than giving it a weight of 0, because 0 · NaN is NaN.")
    return "\n".join(lines)


WRITE_ATTENTION = Exercise(
    title="Exercise 8. Write attention yourself",
    chapter=8,
    task="Start with loops for one head: query (q_len, d_k), key (kv_len, d_k), value (kv_len, d_v), output "
    "(q_len, d_v). The mask broadcasts to (q_len, kv_len), True = attend. A masked key or value must not change the "
    "output, even if it is NaN, and a fully masked row is zeros. Then write it for several heads: query, key and value "
    "have their heads side by side in the last axis, as in exercise 7, and so has the output; the mask may have an "
    "axis of heads in front. You may answer with the first function alone. Both are passed to "
    "regard.testing.check_conformance, which describes what it finds.",
    given={},
    parts=(
        ExercisePart(
            "attention", "attention for one head, returning the output", AttentionFunctionAnswer("n d", heads=False)
        ),
        ExercisePart("many_heads", "the same for several heads", AttentionFunctionAnswer("n (h d)", heads=True)),
    ),
    solve=write_attention,
    list_mistakes=list,
    explain=_explain,
    imports="import math\nimport numpy as np",
    helpers=(attention, many_heads),
)  # fmt: skip
