"""A survey as it lies in its directory, finished or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regard.errors import ArgumentError
from regard.survey.manifest import MANIFEST, SETTINGS, damaged, read_manifest
from regard.survey.schema import VERSION, column_to_numpy, schema_of

if TYPE_CHECKING:
    from regard.pages.html import Page


class Survey:
    """What a survey has committed: `dataset` for pyarrow and DuckDB, tables of pandas and polars, means by head.

    Only shards that the manifest names are read; what a run is writing meanwhile is seen by opening it anew.
    """

    def __init__(self, path: Path, settings: dict[str, Any], committed: dict[int, dict[str, Any]]) -> None:
        self.path, self.settings = path, settings
        self._committed = dict(sorted(committed.items()))

    @property
    def files(self) -> list[Path]:
        """The files of the committed shards, in order."""
        return [self.path / entry["file"] for entry in self._committed.values()]

    @property
    def documents(self) -> int:
        """How many documents were measured."""
        return sum(entry["documents"] for entry in self._committed.values())

    @property
    def tokens(self) -> int:
        """How many tokens they have."""
        return sum(entry["tokens"] for entry in self._committed.values())

    @property
    def complete(self) -> bool:
        """Whether every shard is committed."""
        return bool(len(self._committed) == self.settings["shards"])

    @property
    def quarantined(self) -> list[dict[str, str]]:
        """The documents that could not be measured: `document`, `kind` and `reason`, in the order of the corpus."""
        return [each for entry in self._committed.values() for each in entry["quarantined"]]

    @cached_property
    def dataset(self) -> Any:
        """A `pyarrow.dataset.Dataset` of the rows, in the order of the corpus; its columns are told in `_schema`."""
        from pyarrow import dataset

        schema = schema_of(self._widths)
        if not self._committed:
            return dataset.dataset(schema.empty_table())
        return dataset.dataset([str(path) for path in self.files], schema=schema)

    @property
    def _widths(self) -> dict[str, int]:
        return {name: int(width) for name, width in self.settings["columns"].items()}

    def batches(self, columns: list[str] | None = None) -> Iterator[Any]:
        """The rows as record batches of pyarrow, a file after the other; memory does not grow with the files.

        A scan of `dataset` reads ahead and keeps every file's metadata, which is much where files are many.
        """
        from pyarrow import parquet

        for path in self.files:
            with parquet.ParquetFile(path) as file:
                yield from filter(len, file.iter_batches(columns=columns))

    def to_pandas(self, columns: list[str] | None = None) -> Any:
        """The rows as a DataFrame of pandas; `columns` for some of them."""
        return self.dataset.to_table(columns=columns).to_pandas()

    def to_polars(self, columns: list[str] | None = None) -> Any:
        """The rows as a DataFrame of polars."""
        import polars

        return polars.from_arrow(self.dataset.to_table(columns=columns))

    def heads(self, weight: Literal["documents", "tokens"] = "documents") -> Any:
        """One row for each layer and head, a `pyarrow.Table`: the mean of every measure over the documents.

        Each document counts the same, or by its tokens. A document that tells nothing of a measure is left out of that
        one's mean; `documents` and `tokens` are what was measured.
        """
        import pyarrow as pa

        if weight not in ("documents", "tokens"):
            raise ArgumentError(
                "heads",
                received=f"weight {weight!r}",
                expected='"documents" or "tokens"',
                hint="By documents, each counts the same.",
            )
        heads = self.settings["heads"]
        layers = np.repeat(np.arange(len(heads)), heads)
        begins = np.concatenate([[0], np.cumsum(heads)])
        means = {name: _Mean(len(layers), width) for name, width in self._widths.items()}
        seen = _Mean(len(layers), 1)
        modules, kv_heads = [""] * len(layers), np.zeros(len(layers), np.int16)
        for batch in self.batches():
            column = {name: batch.column(name) for name in batch.schema.names}
            at = begins[column["layer"].to_numpy()] + column["head"].to_numpy()
            tokens = column["tokens"].to_numpy().astype(float)
            by = tokens if weight == "tokens" else np.ones(len(at))
            seen.add(at, tokens, np.ones(len(at)))
            for name, mean in means.items():
                mean.add(at, column_to_numpy(column[name]), by)
            kv_heads[at] = column["kv_head"].to_numpy()
            for row in np.unique(at, return_index=True)[1]:
                modules[at[row]] = column["module"][int(row)].as_py()
        numbers = np.concatenate([np.arange(count) for count in heads])
        table: dict[str, Any] = {
            "layer": layers.astype(np.int16),
            "head": numbers.astype(np.int16),
            "kv_head": kv_heads,
            "module": modules,
            "documents": seen.weights[:, 0].astype(np.int64),
            "tokens": seen.sums[:, 0].astype(np.int64),
        }
        for name, mean in means.items():
            result = mean.result()
            if result.shape[1] == 1:
                table[name] = pa.array(result[:, 0], mask=result[:, 0] != result[:, 0])
            else:
                table[name] = pa.FixedSizeListArray.from_arrays(pa.array(result.reshape(-1)), result.shape[1])
        return pa.table(table)

    def page(self, title: str | None = None) -> Page:
        """A report of the survey in a file of its own: an answer in words, every head, its documents and its kind.

        The page needs no network. Making it reads the rows in batches; it has the same size for any number of
        documents, since of each head and measure it carries counts in fixed bins and the few documents at either end.
        """
        from regard.survey.report import Report

        return Report(self).page(title)

    def broken(self) -> list[str]:
        """The committed files that are not what was written, by their sha256; a resumed run measures them again."""
        return [entry["file"] for entry, _ in damaged(self.path, self._committed.values())]

    def __repr__(self) -> str:
        heads = sum(self.settings["heads"])
        state = (
            "" if self.complete else f", {len(self._committed)} of {self.settings['shards']} shards so far"
        )
        return (
            f"Survey of {self.settings['model']['name']}: {self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.settings['layers']} layers, {heads} heads, {len(self.quarantined)} quarantined{state}"
        )


class _Mean:
    """Sums and weights of some numbers for each head, over rows that come a batch at a time."""

    def __init__(self, heads: int, width: int) -> None:
        self.sums, self.weights = np.zeros((heads, width)), np.zeros((heads, width))

    def add(self, at: Any, values: Any, by: Any) -> None:
        values = values.reshape(len(at), -1)
        there = values == values
        np.add.at(self.sums, at, np.where(there, values, 0.0) * by[:, None])
        np.add.at(self.weights, at, there * by[:, None])

    def result(self) -> Any:
        with np.errstate(invalid="ignore"):
            return self.sums / self.weights


def open(path: str | Path) -> Survey:
    """What `regard.survey` wrote to a directory, whether or not it is finished; see `Survey`."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError("survey.open: pyarrow is not installed. pip install 'regard[survey]'") from error
    path = Path(path).expanduser().absolute()
    if not (path / SETTINGS).is_file():
        raise ArgumentError(
            "survey.open",
            received=f"{str(path)!r}, where no {SETTINGS} is",
            expected="a directory that regard.survey wrote",
            hint="Give the directory that was its out.",
        )
    settings = json.loads((path / SETTINGS).read_text())
    if settings["schema"] != VERSION:
        raise ArgumentError(
            "survey.open",
            received=f"a survey of schema {settings['schema']}",
            expected=f"schema {VERSION}",
            hint="Open it with the regard that wrote it; settings.json says which.",
        )
    manifest = path / MANIFEST
    return Survey(path, settings, read_manifest(manifest)[0] if manifest.exists() else {})
