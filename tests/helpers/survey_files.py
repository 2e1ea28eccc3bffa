"""Write the files of a survey with known numbers, without a model, so that its report can be checked."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import regard
from regard.jobs.manifest import format_entry
from regard.jobs.shards import (
    EVICTION_WINDOWS,
    RowBatch,
    ShardResult,
    build_footer,
    build_record_batch,
    build_schema,
    compute_sha256,
)
from regard.survey.schema import DISTANCE_BINS, MEASURES, SINKS, WINDOWS, list_columns

HEADS = [3, 2, 1]
# The behaviour of each head of the first two layers; the third layer is cross-attention.
LEVELS: list[dict[str, float]] = [
    {"previous": 0.8, "near": 0.9995},
    {"first": 0.5, "near": 0.6},
    {"induction": 0.6, "near": 0.4},
    {"near": 0.95},
    {"near": 0.3},
]


def write_survey(
    folder: Path,
    ids: list[str],
    lengths: tuple[int, ...] = (40, 100, 300, 900),
    measures: tuple[str, ...] = MEASURES,
    quarantined: tuple[dict[str, str], ...] = (),
    module: str = "layers.{}.attention",
    shards: int = 2,
) -> regard.survey.Survey:
    """Write a survey of documents with these ids, cycling through the lengths, and open it."""
    folder.mkdir(parents=True)
    columns = list_columns(measures)
    schema = build_schema(columns)
    random = np.random.default_rng(0)
    manifest = b""
    for shard, numbers in enumerate(np.array_split(np.arange(len(ids)), shards)):
        file = f"shard-{shard:06}.parquet"
        own_quarantined = quarantined if shard == 0 else ()
        documents = [
            RowBatch(
                ids[number],
                None if number % 2 else f"name of {number}",
                build_rows(random, lengths[number % len(lengths)], columns, module),
            )
            for number in numbers
        ]
        with pq.ParquetWriter(folder / file, schema) as writer:
            if documents:
                writer.write_batch(build_record_batch(documents, schema))
            writer.add_key_value_metadata(build_footer(shard, own_quarantined))
        tokens = sum(lengths[number % len(lengths)] for number in numbers)
        result = ShardResult(
            shard=shard,
            temp_file="",
            sha256=compute_sha256(folder / file),
            bytes=(folder / file).stat().st_size,
            rows=len(numbers) * sum(HEADS),
            documents=len(numbers),
            tokens=tokens,
            ids_sha256="",
            quarantined=list(own_quarantined),
        )
        manifest += format_entry({"file": file, **asdict(result)})
    settings = {
        "schema_version": 1,
        "model": {"name": "some/where/a model <b>"},
        "corpus": {"path": "pages"},
        "layers": len(HEADS),
        "heads": HEADS,
        "columns": columns,
        "max_tokens": max(lengths),
        "shards": shards,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "manifest.jsonl").write_bytes(manifest)
    return regard.survey.load(folder)


def build_rows(
    random: np.random.Generator, tokens: int, columns: dict[str, int], module: str
) -> dict[str, Any]:
    """Build the rows of one document."""
    count = sum(HEADS)
    layers = np.repeat(np.arange(len(HEADS), dtype=np.int16), HEADS)
    rows: dict[str, Any] = {
        "layer": layers,
        "head": np.concatenate([np.arange(heads, dtype=np.int16) for heads in HEADS]),
        "kv_head": np.zeros(count, np.int16),
        "module": [module.format(layer) for layer in layers],
        "tokens": tokens,
        "truncated": False,
    }
    measured: dict[str, Any] = {
        "entropy": 4 * random.random(count),
        "distance": tokens * random.random(count),
        "heavy": random.random(count),
    }
    for name in ("previous", "first", "duplicate", "induction"):
        levels = np.array([level.get(name, 0.1) for level in LEVELS] + [0.1])
        measured[name] = np.clip(levels + 0.1 * random.normal(size=count), 0, 1)
    if random.random() < 0.3:  # no token is repeated
        measured |= dict.fromkeys(("duplicate", "induction"), np.full(count, np.nan))
    near = np.array([level["near"] for level in LEVELS] + [0.5])
    for window in WINDOWS:
        # The weight outside shrinks as the window grows; a shorter document lies inside.
        outside = (1 - near) * (64 / window) ** 2 * random.uniform(0.8, 1.0, count)
        measured[f"within_{window}"] = np.where(window >= tokens, 1.0, 1 - outside)
        measured[f"kept_{window}"] = np.where(window >= tokens, 1.0, 1 - outside / 2)
    for sinks in SINKS:
        shape = (count, len(EVICTION_WINDOWS))
        measured[f"evicted_{sinks}"] = np.sort(np.random.default_rng(tokens).random(shape), -1)[:, ::-1] * (
            np.array(EVICTION_WINDOWS) < tokens
        )
    measured["distance_histogram"] = random.dirichlet(np.ones(DISTANCE_BINS), count)
    measured["entropy_histogram"] = random.dirichlet(np.ones(columns.get("entropy_histogram", 1)), count)
    for name, values in measured.items():
        if name.startswith(("within", "kept", "distance", "previous", "duplicate", "induction", "evicted")):
            values[-1] = np.nan
        rows[name] = values.astype(np.float32)
    return rows
