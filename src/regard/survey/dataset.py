"""A survey on disk, finished or not: its rows, its means by head, its report, and a cache policy from its weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regard.errors import ArgumentError
from regard.jobs.driver import require_package
from regard.jobs.manifest import (
    MANIFEST_FILE,
    SETTINGS_FILE,
    Entry,
    find_damaged,
    read_manifest,
    read_settings,
)
from regard.jobs.shards import EVICTION_WINDOWS, SCHEMA_VERSION, build_column, build_schema, column_to_numpy
from regard.jobs.worker import SurveyError
from regard.pages.html import Page
from regard.survey.report import SurveyReport, aggregate_rows, index_heads
from regard.survey.schema import MEASURES, PROMPT_MEASURES, SINKS, list_columns
from regard.types import Array

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow as pa
    from pyarrow import dataset

    from regard.policy import CachePolicy


MAX_HEADS = 100_000  # of a model; tables with a row for each are built in memory


class Survey:
    """The committed rows of a survey, for pyarrow, DuckDB, pandas and polars, and their means by head.

    Only shards that the manifest lists are read. To see shards committed later, load the survey again.

    Attributes:
        path: Directory of the survey.
        settings: Settings of the survey: model, measures, corpus and schema version.
    """

    def __init__(self, path: Path, settings: dict[str, Any], committed: dict[int, Entry]) -> None:
        self.path, self.settings = path, settings
        self._committed = dict(sorted(committed.items()))

    @property
    def files(self) -> list[Path]:
        """Files of the committed shards, in order."""
        return [self.path / entry["file"] for entry in self._committed.values()]

    @property
    def documents(self) -> int:
        """Number of measured documents."""
        return sum(entry["documents"] for entry in self._committed.values())

    @property
    def tokens(self) -> int:
        """Number of tokens in the measured documents."""
        return sum(entry["tokens"] for entry in self._committed.values())

    @property
    def complete(self) -> bool:
        """Whether every shard is committed."""
        return bool(len(self._committed) == self.settings["shards"])

    @property
    def quarantined(self) -> list[dict[str, str]]:
        """Documents that could not be measured, in the order of the corpus, with `document`, `kind` and `reason`."""
        return [document for entry in self._committed.values() for document in entry["quarantined"]]

    @cached_property
    def dataset(self) -> dataset.Dataset:
        """A `pyarrow.dataset.Dataset` of the rows, in the order of the corpus."""
        from pyarrow import dataset

        schema = build_schema(self._widths)
        if not self._committed:
            return dataset.dataset(schema.empty_table())
        return dataset.dataset([str(path) for path in self.files], schema=schema)

    @property
    def _widths(self) -> dict[str, int]:
        return {name: int(width) for name, width in self.settings["columns"].items()}

    def iter_batches(self, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows as pyarrow record batches, one file at a time.

        Memory does not grow with the number of files. A scan of `dataset` reads ahead and keeps the metadata of every
        file, which needs more memory.

        Args:
            columns: Columns to read; all by default.

        Raises:
            SurveyError: If a file is missing or damaged.
        """
        from pyarrow import ArrowException, parquet

        expected = build_schema(self._widths)
        for path in self.files:
            try:
                with parquet.ParquetFile(path) as file:
                    for batch in file.iter_batches(columns=columns):
                        self._check_batch(batch, expected)
                        if len(batch):
                            yield batch
            except (OSError, ArrowException, ValueError) as error:
                raise _build_damage_error(path, str(error) or type(error).__name__) from error

    def _check_batch(self, batch: pa.RecordBatch, expected: pa.Schema) -> None:
        """Check that rows have the columns, the layers and the heads of this survey."""
        batch.validate(full=True)
        for field in batch.schema:
            if field.name not in expected.names or field.type != expected.field(field.name).type:
                raise ValueError(f"column {field.name} of {field.type}")
        layers, heads = (
            batch.column(name).to_numpy() if name in batch.schema.names else np.zeros(0, np.int16)
            for name in ("layer", "head")
        )
        counts = np.array(self.settings["heads"])
        if len(layers) and (layers.min() < 0 or layers.max() >= len(counts)):
            raise ValueError(f"a row of layer {layers.max()}, of {len(counts)}")
        if len(heads) == len(layers) and ((heads < 0) | (heads >= counts[layers])).any():
            raise ValueError("a row of a head that the model does not have")

    def to_pandas(self, columns: list[str] | None = None) -> pandas.DataFrame:
        """Return the rows as a pandas DataFrame.

        Args:
            columns: Columns to read; all by default.
        """
        return self.dataset.to_table(columns=columns).to_pandas()

    def to_polars(self, columns: list[str] | None = None) -> polars.DataFrame:
        """Return the rows as a polars DataFrame.

        Args:
            columns: Columns to read; all by default.
        """
        import polars

        return polars.from_arrow(self.dataset.to_table(columns=columns))

    def heads(self, weight: Literal["documents", "tokens"] = "documents") -> pa.Table:
        """Return the mean of every measure over the documents, one row for each layer and head.

        If a measure is undefined for a document, the document is excluded from the mean of that measure. The columns
        `documents` and `tokens` count everything that was measured.

        Args:
            weight: "documents" weights each document equally, "tokens" weights it by its number of tokens.

        Returns:
            A `pyarrow.Table`.

        Raises:
            ArgumentError: If `weight` is neither.
        """
        import pyarrow as pa

        if weight not in ("documents", "tokens"):
            raise ArgumentError(
                "survey.heads",
                received=f"weight {weight!r}",
                expected='"documents" or "tokens"',
                hint='Use "documents" to weight each document equally.',
            )
        heads = self.settings["heads"]
        layers = np.repeat(np.arange(len(heads)), heads)
        means = {name: _RunningMean(len(layers), width) for name, width in self._widths.items()}
        measured = _RunningMean(len(layers), 1)
        modules, kv_heads = [""] * len(layers), np.zeros(len(layers), np.int16)
        for batch in self.iter_batches():
            column = {name: batch.column(name) for name in batch.schema.names}
            index = index_heads(heads, column["layer"], column["head"])
            tokens = column["tokens"].to_numpy().astype(float)
            weights = tokens if weight == "tokens" else np.ones(len(index))
            measured.add(index, tokens, np.ones(len(index)))
            for name, mean in means.items():
                mean.add(index, column_to_numpy(column[name]), weights)
            kv_heads[index] = column["kv_head"].to_numpy()
            for row in np.unique(index, return_index=True)[1]:
                modules[index[row]] = column["module"][int(row)].as_py()
        table: dict[str, Any] = {
            "layer": layers.astype(np.int16),
            "head": np.concatenate([np.arange(count) for count in heads]).astype(np.int16),
            "kv_head": kv_heads,
            "module": modules,
            "documents": measured.weights[:, 0].astype(np.int64),
            "tokens": measured.sums[:, 0].astype(np.int64),
        }
        for name, mean in means.items():
            values = mean.compute()
            table[name] = build_column(values[:, 0] if values.shape[1] == 1 else values)
        return pa.table(table)

    def cache_policy(
        self,
        keep: float = 0.99,
        sinks: int = 4,
        granularity: Literal["kv_head", "layer"] = "kv_head",
    ) -> CachePolicy:
        """Choose how many keys a cache keeps for each key/value head.

        A head gets the smallest window of 1, 2, 4, … 65,536 keys such that window and sinks hold `keep` of its weight,
        averaged over the tokens for which keys are evicted. If no tested window is large enough, the
        head keeps every key. A key/value head uses the largest window of its query heads.

        Args:
            keep: Share of the weight to keep, above 0 and at most 1.
            sinks: Number of first keys that every head keeps: 0, 1 or 4.
            granularity: "kv_head" chooses for each key/value head; "layer" gives all heads of a layer their largest
                window.

        Returns:
            The policy. `policy.verify(model, corpus)` measures its cost on the model.

        Raises:
            ArgumentError: If an argument is invalid, no document or no distance is measured, or layers differ in their
                numbers of heads.
        """
        from regard.policy import FULL, CachePolicy  # which imports torch

        check_policy_arguments(self, keep, sinks, granularity)
        cache, heads = self.settings["cache"], self.settings["heads"]
        layers, kv_heads, groups = len(heads), cache["kv_heads"][0], heads[0] // cache["kv_heads"][0]
        evicted, modules = measure_evicted(self, sinks)
        evicted = evicted.reshape(layers, heads[0], -1)
        enough = evicted <= 1 - keep  # NaN, where no document is longer than the window, is not enough
        chosen = np.where(enough.any(-1), enough.argmax(-1), len(EVICTION_WINDOWS))
        chosen = chosen.reshape(layers, kv_heads, groups).max(-1)  # the widest need of the query heads
        if granularity == "layer":
            chosen = np.broadcast_to(chosen.max(-1, keepdims=True), chosen.shape)
        windows = np.array([*EVICTION_WINDOWS, FULL])[chosen]
        padded = np.concatenate([evicted, np.zeros((layers, heads[0], 1))], -1)
        lost = np.take_along_axis(padded, np.repeat(chosen, groups, 1)[..., None], -1)[..., 0]
        about = {
            "model": self.settings["model"],
            "survey": {
                "corpus": self.settings["corpus"],
                "documents": self.documents,
                "tokens": self.tokens,
                "max_tokens": self.settings["max_tokens"],
            },
            "settings": {"keep": keep, "sinks": sinks, "granularity": granularity},
            "num_heads": heads[0],
            "head_dim": cache["head_dim"][0],
            "value_dim": cache["value_dim"][0],
            "bytes_per_number": cache["bytes_per_number"],
            "predicted": {"lost": np.nan_to_num(lost).round(9).tolist()},
        }
        return CachePolicy(windows, np.full(windows.shape, sinks), tuple(modules), about)

    def page(self, title: str | None = None) -> Page:
        """Build the report: a summary in words, every head, its documents and its behaviour.

        The page is one HTML file that needs no network. Its size does not depend on the number of documents: for each
        head and measure it holds counts in fixed bins and the few documents with the largest and smallest values.

        Args:
            title: Title of the page; the model and the number of documents by default.

        Returns:
            The page.

        Raises:
            ArgumentError: If no document is measured yet.
        """
        return build_report(self).page(title)

    def find_damaged(self) -> list[str]:
        """Return the names of committed files whose sha256 no longer matches; a resumed run measures them again."""
        return [entry["file"] for entry, _ in find_damaged(self.path, self._committed.values())]

    def __repr__(self) -> str:
        heads = sum(self.settings["heads"])
        state = (
            "" if self.complete else f", {len(self._committed)} of {self.settings['shards']} shards committed"
        )
        return (
            f"Survey of {self.settings['model']['name']}: {self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.settings['layers']} layers, {heads} heads, {len(self.quarantined)} quarantined{state}"
        )


def build_report(survey: Survey) -> SurveyReport:
    """Aggregate the rows of a survey for its report."""
    if not survey.documents:
        raise ArgumentError(
            "survey.page",
            received=f"{str(survey.path)!r}, which has no measured documents yet",
            expected="a survey with at least one measured document",
            hint="Resume the survey first. Its manifest lists the quarantined documents.",
        )
    settings, table = survey.settings, survey.heads()
    facts = {
        "model": settings["model"]["name"],
        "corpus": settings["corpus"]["path"],
        "documents": survey.documents,
        "tokens": survey.tokens,
        "max_tokens": settings["max_tokens"],
        "quarantined": len(survey.quarantined),
        "complete": survey.complete,
        "shards": settings["shards"],
        "committed": len(survey.files),
    }
    heads = {
        name: np.array(column.to_pylist(), dtype=None if name == "module" else float)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return SurveyReport(facts, heads, aggregate_rows(settings, survey.iter_batches), survey.quarantined)


def measure_evicted(survey: Survey, sinks: int) -> tuple[Array, list[str]]:
    """Measure the share of the weight that each window evicts, among the tokens that have keys to evict.

    Returns:
        The shares, (heads of all layers, windows), NaN where no document is longer than the window; and the names of
        the layers.
    """
    heads = survey.settings["heads"]
    lost, rows = np.zeros((2, sum(heads), len(EVICTION_WINDOWS)))
    modules = [""] * len(heads)
    measured = f"evicted_{sinks}" if sinks else "distance_histogram"
    for batch in survey.iter_batches(["tokens", "layer", "head", "module", measured]):
        layer = batch.column("layer").to_numpy()
        index = index_heads(heads, batch.column("layer"), batch.column("head"))
        tokens = batch.column("tokens").to_numpy().astype(float)[:, None]
        shares = column_to_numpy(batch.column(measured))
        if not sinks:
            shares = np.maximum(0.0, 1 - np.cumsum(shares, -1)[:, : len(EVICTION_WINDOWS)])
        affected = np.maximum(0.0, tokens - np.array(EVICTION_WINDOWS) - sinks)
        np.add.at(lost, index, shares * tokens)
        np.add.at(rows, index, affected)
        for row in np.unique(layer, return_index=True)[1]:
            modules[layer[row]] = batch.column("module")[int(row)].as_py()
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(rows > 0, lost / rows, np.nan), modules


def check_policy_arguments(survey: Survey, keep: float, sinks: int, granularity: str) -> None:
    """Raise an error if `Survey.cache_policy` cannot make a policy from a survey and these arguments."""

    def refuse(received: str, expected: str, hint: str) -> Any:
        raise ArgumentError("survey.cache_policy", received=received, expected=expected, hint=hint)

    if not 0 < keep <= 1:
        refuse(f"keep {keep}", "a share above 0 and at most 1", "keep=0.99 keeps 99 % of the weight.")
    if sinks not in (0, *SINKS):
        measured = ", ".join(map(str, (0, *SINKS)))
        refuse(f"sinks {sinks}", f"one of {measured}", "The survey measures these numbers of first keys.")
    if granularity not in ("kv_head", "layer"):
        refuse(f"granularity {granularity!r}", '"kv_head" or "layer"', 'Omit it for "kv_head".')
    if not survey.documents:
        refuse("a survey without a measured document", "at least one", "Resume the survey first.")
    settings = survey.settings
    if "cache" not in settings or f"evicted_{SINKS[0]}" not in settings["columns"]:
        refuse(
            "a survey without distances, or without the sizes of keys and values",
            'a survey that measured "distance"',
            'Run the survey again in a new directory, with measures=["distance"] or all of them.',
        )
    for name, counts in (("heads", settings["heads"]), *settings["cache"].items()):
        if isinstance(counts, list) and len(set(counts)) > 1:
            refuse(
                f"a model whose layers differ in {name}: {sorted(set(counts))}",
                "the same number in every layer",
                "A policy is an array of layers and heads; models whose layers differ in shape have none.",
            )


def _build_damage_error(path: Path, problem: str) -> SurveyError:
    return SurveyError(
        "survey",
        received=f"{path.name}, which is missing or damaged ({problem[:200]})",
        expected="the file that the survey wrote",
        hint="Run the survey again with the same settings: it measures the documents of damaged files again. "
        "survey.find_damaged() lists them.",
    )


class _RunningMean:
    """Weighted means for each head, (heads, width), over rows that arrive in batches; NaN is skipped."""

    def __init__(self, heads: int, width: int) -> None:
        self.sums, self.weights = np.zeros((heads, width)), np.zeros((heads, width))

    def add(self, index: Array, values: Array, weights: Array) -> None:
        values = values.reshape(len(index), -1)
        defined = values == values
        np.add.at(self.sums, index, np.where(defined, values, 0.0) * weights[:, None])
        np.add.at(self.weights, index, defined * weights[:, None])

    def compute(self) -> Array:
        with np.errstate(invalid="ignore"):
            return self.sums / self.weights


def load(path: str | Path) -> Survey:
    """Load a survey that `regard.survey.run` wrote, finished or not.

    Args:
        path: The output directory of the survey.

    Returns:
        The survey.

    Raises:
        ArgumentError: If the directory does not contain a survey, or its schema version differs.
        ImportError: If pyarrow is not installed.
    """
    require_package("survey.load", "pyarrow")
    path = Path(path).expanduser().absolute()
    if not (path / SETTINGS_FILE).is_file():
        raise ArgumentError(
            "survey.load",
            received=f"{str(path)!r}, which contains no {SETTINGS_FILE}",
            expected="the output directory of a survey",
            hint="Pass the directory that the survey was written to.",
        )
    settings = read_settings(path / SETTINGS_FILE, "survey.load")
    version = settings.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ArgumentError(
            "survey.load",
            received=f"a survey with schema version {version}",
            expected=f"schema version {SCHEMA_VERSION}",
            hint=f"Load it with the version of regard that wrote it: see regard_version in {SETTINGS_FILE}.",
        )
    damaged = next(_find_bad_settings(settings), None)
    if damaged:
        raise ArgumentError(
            "survey.load",
            received=f"{str(path / SETTINGS_FILE)!r} with {damaged} {str(settings.get(damaged))[:80]}",
            expected="the settings that the survey wrote",
            hint="Restore the file from a copy, or start another survey in a new directory.",
        )
    manifest = path / MANIFEST_FILE
    return Survey(path, settings, read_manifest(manifest)[0] if manifest.exists() else {})


def _find_bad_settings(settings: dict[str, Any]) -> Iterator[str]:
    """Yield the names of settings that a survey cannot have written."""
    widths = list_columns((*MEASURES, *PROMPT_MEASURES))
    heads: Any = settings.get("heads")
    columns, model = settings.get("columns"), settings.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("name"), str):
        yield "model"
    is_list = isinstance(heads, list) and all(type(count) is int and count > 0 for count in heads)
    if not is_list or sum(heads) > MAX_HEADS:
        yield "heads"
    elif settings.get("layers") != len(heads):
        yield "layers"
    if not isinstance(columns, dict) or any(widths.get(name) != width for name, width in columns.items()):
        yield "columns"
    for name in ("shards", "max_tokens"):
        if type(settings.get(name)) is not int or settings[name] < 0:
            yield name
