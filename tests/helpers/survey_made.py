"""A survey written by hand, so that what a report must say of it is known: no model runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import regard
from regard.survey.manifest import line_of
from regard.survey.schema import DISTANCES, KINDS, WINDOWS, Rows, batch_of, footer, schema_of, widths

HEADS = [3, 2, 1]
# What each head of the first two layers is made to do; the third layer looks at another sequence.
LEVELS: list[dict[str, float]] = [
    {"previous": 0.8, "near": 0.9995},
    {"first": 0.5, "near": 0.6},
    {"induction": 0.6, "near": 0.4},
    {"near": 0.95},
    {"near": 0.3},
]


def make_survey(
    folder: Path,
    names: list[str],
    lengths: tuple[int, ...] = (40, 100, 300, 900),
    kinds: tuple[str, ...] = KINDS,
    quarantined: tuple[dict[str, str], ...] = (),
    module: str = "layers.{}.attention",
    shards: int = 2,
) -> Any:
    """Documents of these names, of lengths in turn."""
    folder.mkdir(parents=True)
    columns = widths(kinds)
    schema = schema_of(columns)
    random = np.random.default_rng(0)
    manifest = b""
    for shard, part in enumerate(np.array_split(np.arange(len(names)), shards)):
        file = f"shard-{shard:06}.parquet"
        aside = quarantined if shard == 0 else ()
        documents = [
            Rows(
                names[number],
                None if number % 2 else f"label of {number}",
                rows(random, lengths[number % len(lengths)], columns, module),
            )
            for number in part
        ]
        with pq.ParquetWriter(folder / file, schema) as writer:
            if documents:
                writer.write_batch(batch_of(documents, schema))
            writer.add_key_value_metadata(footer(shard, aside))
        tokens = sum(lengths[number % len(lengths)] for number in part)
        entry = {"shard": shard, "file": file, "documents": len(part), "tokens": tokens}
        manifest += line_of({**entry, "quarantined": list(aside)})
    settings = {
        "schema": 1,
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
    return regard.survey.open(folder)


def rows(random: np.random.Generator, tokens: int, columns: dict[str, int], module: str) -> dict[str, Any]:
    """One document's."""
    count = sum(HEADS)
    layers = np.repeat(np.arange(len(HEADS), dtype=np.int16), HEADS)
    made: dict[str, Any] = {
        "layer": layers,
        "head": np.concatenate([np.arange(each, dtype=np.int16) for each in HEADS]),
        "kv_head": np.zeros(count, np.int16),
        "module": [module.format(layer) for layer in layers],
        "tokens": tokens,
        "cut": False,
    }
    everything: dict[str, Any] = {
        "entropy": 4 * random.random(count),
        "distance": tokens * random.random(count),
        "heavy": random.random(count),
    }
    for name in ("previous", "first", "duplicate", "induction"):
        levels = np.array([each.get(name, 0.1) for each in LEVELS] + [0.1])
        everything[name] = np.clip(levels + 0.1 * random.normal(size=count), 0, 1)
    if random.random() < 0.3:  # no token came twice
        everything |= dict.fromkeys(("duplicate", "induction"), np.full(count, np.nan))
    near = np.array([each["near"] for each in LEVELS] + [0.5])
    for window in WINDOWS:
        # The rest outside shrinks as the window grows, and with it all of a shorter document is inside.
        outside = (1 - near) * (64 / window) ** 2 * random.uniform(0.8, 1.0, count)
        everything[f"within_{window}"] = np.where(window >= tokens, 1.0, 1 - outside)
        everything[f"kept_{window}"] = np.where(window >= tokens, 1.0, 1 - outside / 2)
    everything["distance_histogram"] = random.dirichlet(np.ones(DISTANCES), count)
    everything["entropy_histogram"] = random.dirichlet(np.ones(columns.get("entropy_histogram", 1)), count)
    for name, values in everything.items():
        if name.startswith(("within", "kept", "distance", "previous", "duplicate", "induction")):
            values[-1] = np.nan
        made[name] = values.astype(np.float32)
    return {**made}
