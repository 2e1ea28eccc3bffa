"""`RequestLog`: the records that the workers of a server wrote."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.lens.span_mass import LayerSpans, SpanMass, compute_lookback
from regard.lens.table import Table
from regard.pages.html import Page
from regard.types import Array
from regard.vllm.record_files import FORMAT, read_records
from regard.vllm.settings import select_ids

__all__ = ["RequestLog", "RequestRecord", "load"]


def load(folder: str | Path) -> RequestLog:
    """Load the records of a server, running or stopped.

    Args:
        folder: The directory that the setting `folder` names.

    Returns:
        The records of all workers that wrote there.

    Raises:
        ArgumentError: If the directory contains no records, or they were written by a later version.
    """
    folder = Path(folder).expanduser()
    files = sorted([*folder.glob("requests-*.jsonl"), *folder.glob("requests-*.parquet")])
    if not files:
        raise ArgumentError(
            "regard.vllm.load",
            received=f"{str(folder)!r}, which contains no records",
            expected="the directory that a server writes to",
            hint='It is the setting "folder" of the server, relative to the directory in which it was started.',
        )
    parts = []
    for file in files:
        if file.suffix == ".jsonl" and file.with_suffix(".parquet") in files:
            continue  # killed between the conversion and the removal of the lines
        try:
            worker, records = read_records(file)
        except FileNotFoundError:  # converted meanwhile
            worker, records = read_records(file.with_suffix(".parquet"))
        if worker is None or worker["kind"] != "worker":  # killed before the first line was written
            continue
        if worker.get("format") != FORMAT:
            raise ArgumentError(
                "regard.vllm.load",
                received=f"{file.name!r} in format {worker.get('format')}",
                expected=f"format {FORMAT}",
                hint=f"Load it with regard {worker.get('regard')}, which wrote it.",
            )
        parts.append((worker, records))
    return RequestLog(folder, parts)


class RequestRecord:
    """What was measured for one request, over all ranks of the model.

    Attributes:
        id: The id that the client saw.
        child: Number of the answer, for n > 1.
        names: Names of the parts of the sequence: the spans, then "other", the rest of the prompt, then "generated".
        prompt_tokens: Tokens of the prompt.
        generated_tokens: Tokens that were generated.
        measured_tokens: Tokens of them whose rows were measured.
        preemptions: How often the request lost its blocks and was computed again.
        finish_reason: Why the engine ended the request: "stop", "length" or "abort". vLLM's server finds stop strings
            itself and then aborts the request, so that reason is "abort" also.
        spans: Ranges of tokens of each span; None without spans.
        token_ids: Tokens of prompt and answer, if the operator stores them.
        layers: Names of the layers that were measured.
    """

    def __init__(self, parts: Sequence[tuple[dict[str, Any], dict[str, Any]]], folder: Path) -> None:
        # Tensor-parallel ranks hold heads, pipeline stages hold layers.
        self._parts = sorted(parts, key=lambda part: part[0]["rank"])
        self._folder = folder
        record = self._parts[0][1]
        self.id: str = record["id"]
        self.child: int = record["child"]
        self.names: tuple[str, ...] = tuple(record["names"])
        self.prompt_tokens: int = record["prompt_tokens"]
        self.generated_tokens: int = record["generated_tokens"]
        self.measured_tokens: int = record["measured_tokens"]
        self.preemptions: int = record["preemptions"]
        self.finish_reason: str = record["finish_reason"]
        self.spans: dict[str, Any] | None = record.get("spans")
        self.token_ids: list[int] | None = record.get("token_ids")
        self.layers = tuple(dict.fromkeys(name for worker, _ in self._parts for name in worker["layers"]))

    def heads(self, rows: str = "generated") -> Table:
        """Return a table with one row for each layer and head: means over the rows of the request.

        Args:
            rows: "generated" for the rows that predicted tokens, or "prompt" for the rows of the prompt, if they were
                measured.

        Returns:
            Columns `module`, `layer`, `head`, one for each of `names`, `entropy`, `first` (the weight on the first
            token) and `max_score` (the largest score of all rows).

        Raises:
            ArgumentError: If these rows were not measured.
        """
        key = {"generated": "heads", "prompt": "prompt"}.get(rows)
        if key is None or key not in self._parts[0][1]:
            raise ArgumentError(
                "record.heads",
                received=f"rows={rows!r}",
                expected='"generated"' + (' or "prompt"' if "prompt" in self._parts[0][1] else ""),
                hint='Rows of the prompt are measured if the request or the server asks for {"prompt": true}.',
            )
        table = Table()
        for worker, record in self._parts:
            means = record[key]
            for index, module in enumerate(worker["layers"]):
                for head, shares in enumerate(means["shares"][index]):
                    table.append(
                        {
                            "module": module,
                            "layer": self.layers.index(module),
                            "head": worker["first_heads"][index] + head,
                            **dict(zip(self.names, shares, strict=True)),
                            **{name: means[name][index][head] for name in ("entropy", "first", "max_score")},
                        }
                    )
        return Table(sorted(table, key=lambda row: (row["layer"], row["head"])))

    def tokens(self, tokens: Sequence[str] | None = None) -> Table:
        """Return a table with one row for each generated token: means over all layers and heads.

        Args:
            tokens: Texts of the generated tokens, for a column `token`.

        Returns:
            Columns `position`, `token` if texts were given, one for each of `names`, `entropy` and `first`.

        Raises:
            ArgumentError: If there are fewer texts than tokens.
        """
        if tokens is not None and len(tokens) < self.measured_tokens:
            raise ArgumentError(
                "record.tokens",
                received=f"{len(tokens)} tokens",
                expected=f"at least {self.measured_tokens}, the tokens of the answer",
                hint="Pass the texts of the generated tokens, without those of the prompt.",
            )
        weights = np.array([sum(worker["heads"]) for worker, _ in self._parts], float)
        columns = {
            name: np.tensordot(
                weights / weights.sum(),
                np.array([record["tokens"][name] for _, record in self._parts], float),
                1,
            )
            for name in ("shares", "entropy", "first")
        }
        table = Table()
        for row in range(self.measured_tokens):
            text = {} if tokens is None else {"token": str(tokens[row])}
            shares = dict(zip(self.names, columns["shares"][row].tolist(), strict=True))
            numbers = {name: float(columns[name][row]) for name in ("entropy", "first")}
            table.append({"position": self.prompt_tokens + row, **text, **shares, **numbers})
        return table

    @cached_property
    def rows(self) -> dict[str, dict[str, Array]]:
        """The numbers of every row, for a request that was kept whole, by the name of the layer.

        Each layer has `positions` (rows,), `shares` (heads, rows, names), `entropy`, `first` and `max_score`
        (heads, rows), and `top_values` and `top_keys` (heads, rows, k): the largest weights and their keys.

        Raises:
            ArgumentError: If the request was not kept whole.
        """
        found: dict[str, list[dict[str, Array]]] = {}
        for worker, record in self._parts:
            if "rows" not in record:
                raise ArgumentError(
                    "record.rows",
                    received=f"the request {self.id!r}, of which the means were stored",
                    expected="a request that was kept whole",
                    hint='Ask for it: extra_args={"regard": {"keep": True}}, or set "keep" for the server.',
                )
            with self._open_rows(record["rows"]) as file:
                for index, module in enumerate(worker["layers"]):
                    if f"shares_{index}" in file:
                        own = {"shares": file[f"shares_{index}"]}
                        own |= {
                            name: file[f"numbers_{index}"][..., i]
                            for i, name in enumerate(("entropy", "first", "max_score"))
                        }
                        own |= {
                            name: file[f"{name}_{index}"]
                            for name in ("top_values", "top_keys")
                            if f"{name}_{index}" in file
                        }
                        found.setdefault(module, []).append({"positions": file[f"positions_{index}"], **own})
        return {
            module: {
                name: parts[0][name]
                if name == "positions"
                else np.concatenate([part[name] for part in parts])
                for name in parts[0]
            }
            for module, parts in found.items()
        }

    def _open_rows(self, name: str) -> Any:
        path = self._folder / "rows" / Path(name).name
        try:
            return np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
        except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
            raise ArgumentError(
                "record.rows",
                received=f"{path.name!r}, which cannot be read: {error}",
                expected="the file that the server wrote",
                hint="Copy the directory 'rows' together with the other files.",
            ) from error

    def span_mass(self) -> SpanMass:
        """Return the share of each generated token's attention on each part of the prompt, for every layer and head.

        Returns:
            The shares, as `Recording.span_mass` returns them.

        Raises:
            ArgumentError: If the request was not kept whole, or ended before its first token.
        """
        if not self.measured_tokens:
            raise ArgumentError(
                "record.span_mass",
                received=f"the request {self.id!r}, of which no token was generated",
                expected="a request with an answer",
                hint="record.generated_tokens is the length of the answer.",
            )
        layers = []
        for number, (module, own) in enumerate(self.rows.items()):
            answer = own["positions"] >= self.prompt_tokens - 1
            mass = own["shares"][None][:, :, answer]
            lookback = compute_lookback(mass, self.prompt_tokens, np.arange(mass.shape[2]))
            layers.append(LayerSpans(module, number, mass, lookback, "measured in vLLM"))
        labels = np.full((1, self.prompt_tokens), len(self.names) - 2)
        for index, ranges in enumerate((self.spans or {}).values()):
            for start, stop in ranges:
                labels[0, start:stop] = index
        count = layers[0].mass.shape[2] if layers else 0
        positions = np.arange(count) + self.prompt_tokens
        return SpanMass(self.names, positions, self.prompt_tokens, layers, labels)

    def page(self, tokens: Sequence[str], *, title: str | None = None) -> Page:
        """Build the answer page: which part of the prompt each token of the answer attended to.

        Args:
            tokens: Texts of the whole sequence, prompt and answer.
            title: Title of the page.

        Returns:
            The page: `page.save(path)` writes it, and a notebook shows it.

        Raises:
            ArgumentError: If the request was not kept whole, or there are fewer texts than tokens.
        """
        return self.span_mass().page(tokens, title=title)

    def __repr__(self) -> str:
        return (
            f"RequestRecord({self.id!r}, {self.prompt_tokens} prompt tokens, {self.measured_tokens} of "
            f"{self.generated_tokens} generated tokens measured, {self.finish_reason})"
        )


def _mean(column: Sequence[float | None]) -> float | None:
    """Return the mean of a column; None if it has no rows, or one that is not finite."""
    return None if not column or None in column else float(np.mean(np.array(column, float)))


class RequestLog(Mapping[str, list[RequestRecord]]):
    """The records of a server: `log[id]` lists the records of one response, one for each child of n > 1.

    Attributes:
        folder: The directory of the records.
        workers: What describes each worker that wrote there: model, versions, rank, layers.
        counts: Requests that were `asked` for, have a `record` of every rank, `failed`, or are `open`: still running,
            or lost when a process was killed.
        failures: Why requests were not measured, by id.
    """

    def __init__(
        self, folder: Path, parts: Sequence[tuple[dict[str, Any], Sequence[dict[str, Any]]]]
    ) -> None:
        self.folder = folder
        self.workers = [worker for worker, _ in parts]
        asked: set[tuple[Any, ...]] = set()
        failed: dict[tuple[Any, ...], str] = {}
        found: dict[tuple[Any, ...], dict[int, tuple[dict[str, Any], dict[str, Any]]]] = {}
        for worker, records in parts:
            for record in records:
                # Offline engines count their requests from 0, so an id belongs to an engine.
                key = (record["id"], record["child"], record["engine_id"], worker["engine"])
                if record["kind"] == "asked":
                    asked.add(key)
                elif record["kind"] == "failed":
                    failed[key] = record["reason"]
                else:  # one for each rank; a record that was written twice counts once
                    found.setdefault(key, {})[worker["rank"]] = (worker, record)
        whole = {
            key: list(own.values())
            for key, own in found.items()
            if key not in failed and len(own) == next(iter(own.values()))[0]["ranks"]
        }
        self._records: dict[str, list[RequestRecord]] = {}
        for key, own in sorted(whole.items(), key=lambda item: (item[1][0][1]["time"], item[0])):
            self._records.setdefault(key[0], []).append(RequestRecord(own, folder))
        for records_of_id in self._records.values():
            records_of_id.sort(key=lambda record: record.child)
        self.failures = {key[0]: reason for key, reason in failed.items()}
        self.counts = {
            "asked": len(asked | found.keys() | failed.keys()),
            "record": len(whole),
            "failed": len(failed),
            "open": len((asked | found.keys()) - whole.keys() - failed.keys()),
        }

    def __getitem__(self, response_id: str) -> list[RequestRecord]:
        """Return the records of a response; an id of the server also finds those of each prompt of the request."""
        found = [record for name in select_ids(self._records, response_id) for record in self._records[name]]
        if not found:
            raise KeyError(response_id)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def requests(self) -> Table:
        """Return a table with one row for each request: means over its tokens, layers and heads.

        Returns:
            Columns `id`, `child`, `prompt_tokens`, `generated_tokens`, `measured_tokens`, `finish_reason`, one for each
            name that a request has (None for requests without it), `entropy`, `first` and `max_score`.
        """
        records = [record for own in self._records.values() for record in own]
        names = list(dict.fromkeys(name for record in records for name in record.names))
        table = Table()
        for record in records:
            heads = record.heads()
            means = {
                name: _mean(heads.column(name)) if name in heads.columns else None
                for name in (*names, "entropy", "first")
            }
            largest = [row["max_score"] for row in heads if row["max_score"] is not None]
            table.append(
                {
                    name: getattr(record, name)
                    for name in (
                        "id",
                        "child",
                        "prompt_tokens",
                        "generated_tokens",
                        "measured_tokens",
                        "finish_reason",
                    )
                }
                | means
                | {"max_score": max(largest) if largest else None}
            )
        return table

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items() if name != "record")
        return f"RequestLog({self.counts['record']} records; {counts})"
