"""The rows of a job: one for each (document, layer, head), in Parquet, with measured columns of fixed width."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1
# Windows of the columns of evicted weight, from which a cache policy is chosen.
EVICTION_WINDOWS = tuple(2**power for power in range(17))
METADATA_KEY = "regard.survey"
ID_COLUMNS = ("document", "name", "tokens", "truncated", "layer", "head", "kv_head", "module")


def build_schema(widths: Mapping[str, int]) -> pa.Schema:
    """Build the Arrow schema of a table whose measured columns have these widths."""
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
    fields = [
        pa.field(name, dtype, nullable=name == "name") for name, dtype in zip(ID_COLUMNS, types, strict=True)
    ]
    for name, width in widths.items():
        fields.append(pa.field(name, pa.float32() if width == 1 else pa.list_(pa.float32(), width)))
    return pa.schema(fields)


class RowBatch(NamedTuple):
    """The rows of one document: `columns` as its worker process returned them, an entry for each layer and head."""

    document: str
    name: str | None
    columns: Mapping[str, Any]


def build_record_batch(documents: Sequence[RowBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Concatenate the rows of several documents into one Arrow record batch."""
    import pyarrow as pa

    counts = [len(document.columns["layer"]) for document in documents]

    def concatenate(name: str) -> Any:
        if name in ("document", "name"):
            values = [getattr(document, name) for document in documents]
        elif name in ("tokens", "truncated"):
            values = [document.columns[name] for document in documents]
        elif name == "module":
            return [module for document in documents for module in document.columns[name]]
        else:
            return np.concatenate([document.columns[name] for document in documents])
        return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]

    arrays = []
    for field in schema:
        values = concatenate(field.name)
        if pa.types.is_fixed_size_list(field.type):
            # NaN stands for an undefined value, which is null in the file. Older pyarrow writes no list that is null.
            flat = values.reshape(-1)
            flat = pa.array(flat, mask=flat != flat)
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, field.type.list_size))
        elif pa.types.is_floating(field.type):
            arrays.append(pa.array(values, mask=values != values))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.record_batch(arrays, schema=schema)


def build_footer(shard: int, quarantined: Collection[Mapping[str, str]]) -> dict[str, str]:
    """Build the key-value metadata of a shard's file."""
    metadata = {"version": SCHEMA_VERSION, "shard": shard, "quarantined": list(quarantined)}
    return {METADATA_KEY: json.dumps(metadata)}


def column_to_numpy(column: pa.Array) -> Any:
    """Convert an Arrow column to float64, (rows,) or (rows, bins); null becomes NaN."""
    import pyarrow as pa

    if not pa.types.is_fixed_size_list(column.type):
        return column.to_numpy(zero_copy_only=False).astype(float)
    width = column.type.list_size
    numbers = column.values.slice(column.offset * width, len(column) * width)
    return numbers.to_numpy(zero_copy_only=False).astype(float).reshape(-1, width)
