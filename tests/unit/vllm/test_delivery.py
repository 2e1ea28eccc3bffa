"""Records are written whole, once, by threads that a slow or failing writer cannot stop."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard.vllm
from regard.vllm import delivery, record_files
from regard.vllm.delivery import Delivery, summarise_for_span
from regard.vllm.record_files import FileWriter, read_lines
from regard.vllm.settings import Settings
from regard.vllm.worker import RequestEnd
from tests.helpers.served_stand_in import HEADS, StandIn

WORKER = {
    "kind": "worker", "format": 1, "model": "m", "regard": "0", "pid": 1, "rank": 0, "ranks": 1, "engine": "e",
    "started": 0.0,
    "layers": ["layers.0.attn", "layers.1.attn"], "heads": [HEADS] * 2, "first_heads": [0, 0],
}  # fmt: skip


def make_records(**options: Any) -> list[tuple[dict[str, Any], Any]]:
    """Measure three requests of two layers."""
    stand_in = StandIn(Settings(), [{}, {"window": 9}], seed=4)
    for number in range(3):
        given = {"spans": {"a": [0, 2], "b": [3, 5]}, **options}
        stand_in.add(f"cmpl-{number}-0", 12 + number, 20, regard=given)
    stand_in.run()
    return [(record, rows) for record, rows in stand_in.writer.records]


def write(folder: Path, records: Any, worker: dict[str, Any] = WORKER, format: str = "jsonl") -> None:
    writer = FileWriter(folder, worker, format)
    for record, rows in records:
        writer.write(record, rows)
    writer.close()


def describe(log: regard.vllm.RequestLog) -> Any:
    return (
        log.counts,
        log.failures,
        [
            (record.id, record.child, list(record.heads()), list(record.tokens()))
            for own in log.values()
            for record in own
        ],
    )


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_records_are_read_back_from_both_formats(format: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    records = make_records(keep=True, prompt=True)
    failed = {"kind": "failed", "id": "x", "child": 0, "engine_id": "x-1", "reason": "why", "time": 1.0}
    write(tmp_path / "lines", [*records, (failed, {})])
    write(tmp_path / format, [*records, (failed, {})], format=format)
    assert {path.suffix for path in (tmp_path / format).glob("requests-*")} == {f".{format}"}
    log, lines = regard.vllm.load(tmp_path / format), regard.vllm.load(tmp_path / "lines")
    read, wanted = describe(log), describe(lines)
    assert read[:2] == wanted[:2]
    assert log.counts == {"asked": 4, "record": 3, "failed": 1, "open": 0} and log.failures == {"x": "why"}
    for row, wanted_row in zip(log.requests(), lines.requests(), strict=True):
        assert {name: row.pop(name) for name in ("id", "finish_reason")} == {
            name: wanted_row.pop(name) for name in ("id", "finish_reason")
        }
        assert row == pytest.approx(wanted_row, rel=1e-6)
    for own, other in zip(log.values(), lines.values(), strict=True):
        assert own[0].heads().columns == other[0].heads().columns
        for row, wanted_row in zip(own[0].heads("prompt"), other[0].heads("prompt"), strict=True):
            assert row.pop("module") == wanted_row.pop("module")
            assert row == pytest.approx(wanted_row, rel=1e-6)
        np.testing.assert_array_equal(
            own[0].span_mass()["layers.0.attn"], other[0].span_mass()["layers.0.attn"]
        )


def test_ranks_are_joined_by_head_and_by_layer(tmp_path: Path) -> None:
    records = make_records(keep=True)
    four = WORKER | {"ranks": 4}
    write(tmp_path, records, four)
    write(tmp_path, records, four | {"rank": 1, "pid": 2, "first_heads": [HEADS, HEADS]})
    stage = {"ranks": 4, "rank": 2, "pid": 3, "layers": ["layers.2.attn", "layers.3.attn"]}
    write(tmp_path, records, WORKER | stage)
    write(tmp_path, records, WORKER | stage | {"rank": 3, "pid": 4, "first_heads": [HEADS, HEADS]})
    (record,) = regard.vllm.load(tmp_path)["cmpl-1-0"]
    heads = record.heads()
    assert [(row["layer"], row["head"]) for row in heads] == [
        (layer, head) for layer in range(4) for head in range(2 * HEADS)
    ]
    assert record.span_mass().layers[3].mass.shape == (1, 2 * HEADS, 20, 4)
    assert record.page([str(token) for token in range(40)]).html
    means = [np.mean(heads.column(name)) for name in record.names]
    assert np.allclose(
        means, np.mean([[row[name] for name in record.names] for row in record.tokens()], 0), atol=1e-6
    )


def test_a_response_finds_the_records_of_its_prompts(tmp_path: Path) -> None:
    write(tmp_path, make_records())
    log = regard.vllm.load(tmp_path)
    assert [record.id for record in log["cmpl-2"]] == ["cmpl-2-0"]
    for unknown in ("cmpl", "cmpl-", "cmpl-2-", "cmpl-3"):
        with pytest.raises(KeyError):
            log[unknown]


def test_a_request_without_kept_rows_says_how_to_keep_them(tmp_path: Path) -> None:
    write(tmp_path, make_records())
    (record,) = regard.vllm.load(tmp_path)["cmpl-0"]
    with pytest.raises(regard.ArgumentError, match="keep"):
        record.page([])
    with pytest.raises(regard.ArgumentError, match="prompt"):
        record.heads("prompt")
    with pytest.raises(regard.ArgumentError, match="20"):
        record.tokens(["a"])


def test_an_empty_folder_and_a_later_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(regard.ArgumentError, match="folder"):
        regard.vllm.load(tmp_path)
    write(tmp_path, make_records(), WORKER | {"format": 2})
    with pytest.raises(regard.ArgumentError, match="format"):
        regard.vllm.load(tmp_path)


@pytest.mark.parametrize("cut", [1, 10, 100, 1000])
def test_a_file_that_was_cut_by_a_kill_is_read_up_to_its_last_whole_line(cut: int, tmp_path: Path) -> None:
    write(tmp_path, make_records())
    (path,) = tmp_path.glob("*.jsonl")
    whole = read_lines(path)
    path.write_bytes(path.read_bytes()[:-cut])
    log = regard.vllm.load(tmp_path)
    remaining = read_lines(path)
    assert remaining == whole[: len(remaining)] and len(remaining) < len(whole)
    assert log.counts["asked"] == 3 and log.counts["record"] + log.counts["open"] == 3


def test_a_killed_process_without_a_whole_line_is_skipped(tmp_path: Path) -> None:
    write(tmp_path, make_records())
    (tmp_path / "requests-0-rank0-0.jsonl").write_bytes(b'{"kind": "wor')
    assert len(regard.vllm.load(tmp_path)) == 3


def test_what_does_not_fit_on_the_disk_is_removed_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, real_write, budget = make_records(keep=True), os.write, [700]

    def write_some(file: int, data: bytes) -> int:
        """Write what fits, then fail, as a full disk does."""
        if budget[0] <= 0:
            raise OSError(28, "No space left on device")
        count = real_write(file, data[: budget[0]])
        budget[0] -= count
        return count

    monkeypatch.setattr(record_files.os, "write", write_some)
    monkeypatch.setattr(delivery, "RETRY_SECONDS", 0.01)
    threads = Delivery(WORKER, {"file": FileWriter(tmp_path, WORKER, "jsonl")}, 100)
    for record, rows in records:
        threads.put(record, rows)
    while threads.counts["file_errors"] < 3:
        time.sleep(0.01)
    for path in tmp_path.glob("*.jsonl"):
        assert path.read_bytes()[-1:] in (b"", b"\n")
    budget[0] = 10**9
    threads.close()
    assert threads.counts["file_written"] == 6 and threads.counts["file_dropped"] == 0
    assert regard.vllm.load(tmp_path).counts == {"asked": 3, "record": 3, "failed": 0, "open": 0}


class SlowWriter:
    def __init__(self) -> None:
        self.gate, self.records = threading.Event(), list[Any]()

    def write(self, record: Any, rows: Any) -> None:
        self.gate.wait()
        self.records.append(record)

    def close(self) -> None:
        raise RuntimeError("planted")


def test_a_writer_that_hangs_delays_nothing_and_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    slow = SlowWriter()
    threads = Delivery(WORKER, {"slow": slow, "file": FileWriter(tmp_path, WORKER, "jsonl")}, 5)
    for number in range(20):
        threads.put({"kind": "failed", "number": number})
        time.sleep(0.02)
    counts = threads.counts
    assert counts["slow_dropped"] == 14 and counts["slow_waiting"] == 6 and counts["file_dropped"] == 0
    slow.gate.set()
    threads.close()
    assert [record["number"] for record in slow.records] == list(range(6))
    assert threads.counts["file_written"] == 20


def test_files_are_continued_in_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "MAX_FILE_BYTES", 3000)
    write(tmp_path, make_records())
    assert len(list(tmp_path.glob("*.jsonl"))) > 1
    assert regard.vllm.load(tmp_path).counts["record"] == 3


def test_the_attributes_of_a_span_are_means_over_heads() -> None:
    records = [record for record, _ in make_records() if record["kind"] == "request"]
    for record in records:
        attributes = summarise_for_span(record)
        assert attributes["gen_ai.response.id"] == record["id"]
        wanted = np.mean(np.concatenate(record["heads"]["shares"]), 0)
        for name, share in zip(record["names"], wanted, strict=True):
            assert attributes[f"regard.share.{name}"] == pytest.approx(share)
        assert attributes["regard.max_score"] == max(np.concatenate(record["heads"]["max_score"]))
    assert (
        summarise_for_span({"kind": "failed", "id": "x", "child": 0, "reason": "why"})["regard.reason"]
        == "why"
    )


class FaultyWriter:
    """Refuses records that are at fault themselves."""

    def __init__(self, error: Exception) -> None:
        self.error, self.records = error, list[Any]()

    def write(self, record: Any, rows: Any) -> None:
        if record["number"] == 1:
            raise self.error
        self.records.append(record["number"])

    def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [TypeError("planted"), UnicodeEncodeError("utf-8", "x", 0, 1, "planted")])
def test_a_record_that_cannot_be_written_does_not_stop_the_next_ones(error: Exception) -> None:
    writer = FaultyWriter(error)
    threads = Delivery(WORKER, {"file": writer}, 10)
    for number in range(4):
        threads.put({"number": number})
    threads.close()
    assert writer.records == [0, 2, 3]
    assert threads.counts["file_dropped"] == 1 and threads.counts["file_written"] == 3


@pytest.mark.parametrize("name", ["x" * 4000, "../../etc/passwd", "a\x00b", "\ud800", "日本", ""])
def test_any_id_names_a_file(name: str, tmp_path: Path) -> None:
    records = [
        (record | {"engine_id": name, "id": name}, rows) for record, rows in make_records(keep=True)[-1:]
    ]
    write(tmp_path, records)
    (record,) = regard.vllm.load(tmp_path)[name]
    assert record.rows and len(list((tmp_path / "rows").iterdir())) == 1


def test_a_record_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    records = make_records(keep=True)
    write(tmp_path, [*records, records[-1]])
    (path,) = tmp_path.glob("*.jsonl")
    record_files.write_parquet(path, path.with_suffix(".parquet"))  # and killed before the lines were removed
    log = regard.vllm.load(tmp_path)
    assert log.counts["record"] == 3
    assert all(len(record.heads()) == 2 * HEADS for own in log.values() for record in own)


def test_a_request_that_a_rank_did_not_finish_is_open(tmp_path: Path) -> None:
    records, two = make_records(), WORKER | {"ranks": 2}
    write(tmp_path, records, two)
    write(tmp_path, records[:-1], two | {"rank": 1, "pid": 2, "first_heads": [HEADS, HEADS]})
    assert regard.vllm.load(tmp_path).counts == {"asked": 3, "record": 2, "failed": 0, "open": 1}


def test_a_failed_conversion_leaves_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")

    def fail(*_: Any) -> None:
        raise OSError("planted")

    monkeypatch.setattr(record_files, "write_parquet", fail)
    write(tmp_path, make_records(), format="parquet")
    assert regard.vllm.load(tmp_path).counts["record"] == 3


@pytest.mark.parametrize("line", [b"\x00\x00", b'{"kind": "requ', b"[]", b'{"id": 1}', b"\xff", b""])
def test_a_damaged_line_loses_no_other(line: bytes, tmp_path: Path) -> None:
    write(tmp_path, make_records())
    (path,) = tmp_path.glob("*.jsonl")
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:3], line, *lines[3:]]))
    assert regard.vllm.load(tmp_path).counts["record"] == 3


@pytest.mark.parametrize("content", [None, b"", b"not a zip", b"PK\x03\x04"])
def test_rows_that_cannot_be_read_are_named(content: bytes | None, tmp_path: Path) -> None:
    write(tmp_path, make_records(keep=True))
    for path in (tmp_path / "rows").iterdir():
        path.unlink() if content is None else path.write_bytes(content)
    for own in regard.vllm.load(tmp_path).values():
        with pytest.raises(regard.ArgumentError, match="npz"):
            _ = own[0].rows


def test_a_request_without_an_answer_has_no_means(tmp_path: Path) -> None:
    stand_in = StandIn(Settings(keep=True), [{}], seed=4)
    stand_in.add("early", 12, 20, regard={})
    stand_in._step()
    stand_in.measurements._end_requests(
        type("Output", (), {"finished_req_ids": {"early"}, "regard_ends": {"early": RequestEnd(0, "abort")}})
    )
    stand_in.measurements.close()
    write(tmp_path, stand_in.writer.records, WORKER | {"layers": ["layers.0.attn"], "heads": [HEADS]})
    log = regard.vllm.load(tmp_path)
    ((record,),) = log.values()
    assert record.measured_tokens == 0 and record.rows["layers.0.attn"]["shares"].shape[1] == 0
    assert {row["other"] for row in record.heads()} == {None} and log.requests()[0]["entropy"] is None
    with pytest.raises(regard.ArgumentError, match="no token"):
        record.page([])


def test_rows_that_are_too_large_are_not_kept(tmp_path: Path) -> None:
    stand_in = StandIn(Settings(keep=True, keep_bytes=2000), [{}], seed=4)
    stand_in.add("large", 12, 60, regard={})
    stand_in.add("small", 12, 2, regard={})
    results = stand_in.run()
    assert results["large"][1] == {} and results["small"][1] and results["large"][0]["measured_tokens"] == 60


@pytest.mark.parametrize("recent", [0, 2])
def test_the_records_in_memory_are_bounded_also_if_all_fail(recent: int) -> None:
    stand_in = StandIn(Settings(recent=recent), [{}], seed=4)
    for number in range(9):
        stand_in.add(f"request{number}", 12, 3, regard={"wrong": 1} if number % 2 else {})
    stand_in.run()
    assert len(stand_in.measurements.records) == recent
    assert stand_in.measurements.counts["failed"] == 4


def test_scores_that_are_not_finite_break_no_table(tmp_path: Path) -> None:
    stand_in = StandIn(Settings(), [{}], seed=4)
    stand_in.add("nan", 12, 5, regard={})
    stand_in.add("fine", 12, 5, regard={})
    stand_in.requests["nan"].draw[0][0][12:] = float("nan")
    stand_in.run()
    write(tmp_path, stand_in.writer.records, WORKER | {"layers": ["layers.0.attn"], "heads": [HEADS]})
    rows = {row["id"]: row for row in regard.vllm.load(tmp_path).requests()}
    assert rows["nan"]["entropy"] is None and rows["fine"]["entropy"] > 0
    for record, _ in stand_in.writer.records:
        if record["kind"] == "request":
            assert ("regard.entropy" in summarise_for_span(record)) == (record["id"] == "fine")
