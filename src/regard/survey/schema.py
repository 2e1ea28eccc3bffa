"""What a survey writes: Parquet files of one row for each (document, layer, head), all rows of one size.

Version 1 of the schema. A row has no length that grows with its document's:

| column | type | what it is |
| --- | --- | --- |
| `document` | string | where the document stands in the corpus: `guide/intro.txt`, `pages.jsonl@18034` |
| `label` | string, or null | its own name, where the corpus gives one |
| `tokens` | int32 | the tokens that were measured |
| `cut` | bool | whether the document had more than that |
| `layer` | int16 | which attention of the forward pass, in the order they ran |
| `head`, `kv_head` | int16 | which head of it, and whose keys that reads |
| `module` | string | the layer's name in the model |
| `entropy` | float32 | mean over rows, nats |
| `entropy_histogram` | 17 × float32 | share of the rows whose entropy is 0–1, 1–2, … 15–16, more than 16 bits |
| `distance` | float32 | mean distance between a token and where it looks |
| `previous` | float32 | mean weight on the token before |
| `distance_histogram` | 18 × float32 | mass at distance 0, 1, 2–3, 4–7, … 32,768–65,535, and beyond |
| `within_64` … `within_65536` | float32 | mass in a window of so many keys, the token's own among them |
| `kept_64` … `kept_65536` | float32 | the same where the first key is kept besides |
| `first` | float32 | mean weight on the first token |
| `heavy` | float32 | share of all mass that the tenth of the keys that receives most has |
| `duplicate`, `induction` | float32 | of tokens that came before: mass on their copies, on what followed those |

Means are over the document's tokens. Null stands where there is nothing to tell: no distances where rows and keys are
two sequences, no copies where no token comes twice. A shard is one file; the JSON under `regard.survey` in its
footer has the version, the shard's number, and what of it went to quarantine.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

VERSION = 1
KEY = "regard.survey"
# Windows of so many keys, a row's own among them; on both sides where a layer looks ahead.
WINDOWS = tuple(2**power for power in range(6, 17))
# Distances 0, 1, 2–3, 4–7, … 32,768–65,535, and all beyond: a window of 2^k keys is the first k + 1 of them.
DISTANCES = 18
# The entropy of a row in bits: below 1, below 2, … below 16, and all above.
BITS = 17
KINDS = ("entropy", "distance", "first", "heavy", "copies")
WHERE = ("document", "label", "tokens", "cut", "layer", "head", "kv_head", "module")


def widths(kinds: Collection[str] = KINDS) -> dict[str, int]:
    """The columns that are measured, in order, and how many numbers each has: 1, or the bins of a histogram."""
    of = {
        "entropy": {"entropy": 1, "entropy_histogram": BITS},
        "distance": {
            "distance": 1,
            "previous": 1,
            "distance_histogram": DISTANCES,
            **{f"within_{window}": 1 for window in WINDOWS},
            **{f"kept_{window}": 1 for window in WINDOWS},
        },
        "first": {"first": 1},
        "heavy": {"heavy": 1},
        "copies": {"duplicate": 1, "induction": 1},
    }
    return {name: width for kind in KINDS if kind in kinds for name, width in of[kind].items()}


def schema_of(widths: Mapping[str, int]) -> Any:
    """The schema of a table whose measures have these names and so many numbers each."""
    import pyarrow as pa

    types = [
        pa.string(),
        pa.string(),
        pa.int32(),
        pa.bool_(),
        pa.int16(),
        pa.int16(),
        pa.int16(),
        pa.string(),
    ]
    fields = [pa.field(name, kind, nullable=name == "label") for name, kind in zip(WHERE, types, strict=True)]
    for name, width in widths.items():
        fields.append(pa.field(name, pa.float32() if width == 1 else pa.list_(pa.float32(), width)))
    return pa.schema(fields)


class Rows(NamedTuple):
    """One document's rows: `columns` as they came from its process, one entry for each layer and head."""

    document: str
    label: str | None
    columns: Mapping[str, Any]


def batch_of(documents: Sequence[Rows], schema: Any) -> Any:
    """The rows of some documents, one after the other, as a batch of this schema."""
    import pyarrow as pa

    counts = [len(each.columns["layer"]) for each in documents]

    def column(name: str) -> Any:
        if name in ("document", "label"):
            given = [getattr(each, name) for each in documents]
        elif name in ("tokens", "cut"):
            given = [each.columns[name] for each in documents]
        elif name == "module":
            return [module for each in documents for module in each.columns[name]]
        else:
            return np.concatenate([each.columns[name] for each in documents])
        return [value for value, count in zip(given, counts, strict=True) for _ in range(count)]

    arrays = []
    for field in schema:
        values = column(field.name)
        if pa.types.is_fixed_size_list(field.type):
            # NaN says that there is nothing to tell, which is null here.
            flat, missing = pa.array(values.reshape(-1)), pa.array(values[:, 0] != values[:, 0])
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, field.type.list_size, mask=missing))
        elif pa.types.is_floating(field.type):
            arrays.append(pa.array(values, mask=values != values))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.record_batch(arrays, schema=schema)


def footer(shard: int, quarantined: Collection[Mapping[str, str]]) -> dict[str, str]:
    """What stands in a file's footer."""
    return {KEY: json.dumps({"version": VERSION, "shard": shard, "quarantined": list(quarantined)})}


def column_to_numpy(column: Any) -> Any:
    """Convert a pyarrow column to float64, (rows,) or (rows, bins); null becomes NaN."""
    import pyarrow as pa

    if not pa.types.is_fixed_size_list(column.type):
        return column.to_numpy(zero_copy_only=False).astype(float)
    width = column.type.list_size
    numbers = column.values.slice(column.offset * width, len(column) * width)
    numbers = numbers.to_numpy(zero_copy_only=False).astype(float).reshape(-1, width)
    return np.where(column.is_null().to_numpy(zero_copy_only=False)[:, None], np.nan, numbers)
