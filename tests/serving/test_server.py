"""The real server under load, killed, with a full disk, and with a collector that goes away."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
import urllib.error
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

import regard.vllm
from tests.helpers.served_models import save_model
from tests.helpers.served_openai import Answer, Server, draw_words, run_clients

pytestmark = pytest.mark.nightly

SECONDS = float(os.environ.get("SERVING_SECONDS", "300"))
KILLS = int(os.environ.get("SERVING_KILLS", "10"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("models"))


def find_missing(answers: list[Answer], log: regard.vllm.RequestLog) -> list[str]:
    """Return the responses that asked to be measured and have no record, or not one for each answer."""
    missing = []
    for answer in answers:
        if answer.asked and answer.status == 200:
            try:
                records = log[answer.body["id"]]
            except KeyError:
                records = []
            children = sorted(record.child for record in records)
            if children != list(range(len(answer.body["choices"]))):
                missing.append(answer.body["id"])
    return missing


def check_lines(folder: Path) -> int:
    """Check that every line but the last of a killed process is whole; return the number of lines."""
    count = 0
    for path in folder.glob("*.jsonl"):
        *lines, last = path.read_bytes().split(b"\n")
        count += len([json.loads(line) for line in lines])
        assert not last or path.stat().st_size
    return count


def test_five_minutes_of_sixteen_clients(model: Path, tmp_path: Path) -> None:
    with Server(model, tmp_path, {"rate": 0.01}) as server:
        with run_clients(server) as answers:
            time.sleep(SECONDS)
        assert answers and all(answer.status == 200 for answer in answers)
        asked = [answer for answer in answers if answer.asked]
        children = sum(len(answer.body["choices"]) for answer in asked)
        # The route has the last records: all children of a response.
        last = server.complete("w5 w6 w7 w8", {"spans": {"a": [0, 2]}}, n=3, temperature=1.0)[1]
        ((*records,),) = server.get(f"/regard/{last['id']}")
        assert sorted(record["child"] for record in records) == [0, 1, 2]
        assert all(record["names"] == ["a", "other", "generated"] for record in records)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            server.get("/regard/cmpl-unknown")

        def count() -> dict[str, int]:
            return server.get("/regard")[0]["counts"]

        wait_until(lambda: not count()["running"] and not count()["file_waiting"])
        counts = count()
    log = regard.vllm.load(server.records)
    print(f"\n{len(answers)} requests, {children} answers asked for, {counts}, {log}")
    assert find_missing(answers, log) == []
    # The counts of the clients, of the server and of the files agree.
    assert counts["seen"] == 3 + sum(len(answer.body["choices"]) for answer in answers)
    measured = counts["measured"]
    assert 0 <= measured - children - 3 < 0.05 * len(answers)  # those that the rate chose
    assert counts["asked"] == measured and counts["failed"] == counts["file_dropped"] == 0
    assert log.counts == {"asked": measured, "record": measured, "failed": 0, "open": 0}
    # One line for a request that is asked for, and one for its record.
    assert counts["file_written"] == 2 * measured
    assert check_lines(server.records) == len(log.workers) + 2 * measured
    left = [answer for answer in asked if answer.left]
    assert left and any(log[answer.body["id"]][0].finish_reason == "abort" for answer in left)
    for own in log.values():
        for record in own:
            shares = record.tokens()
            assert all(abs(sum(row[name] for name in record.names) - 1) < 1e-5 for row in shares)


def test_killed_at_random(model: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    server = Server(model, tmp_path, {})
    server.start()
    server.supervise()
    kills, left_over = [], 0
    with run_clients(server, 8, 1.0) as answers:
        for _ in range(KILLS):
            time.sleep(draw.uniform(2, 10))
            while (engine := server.find_engine()) is None or server.process.poll() is not None:
                time.sleep(0.2)
            kills.append(time.monotonic())
            os.kill(engine, signal.SIGKILL)
            server.process.wait(60)
            while True:  # until the supervisor has started it again
                with contextlib.suppress(OSError):
                    if server.get("/regard"):
                        break
                time.sleep(0.3)
        time.sleep(5)
    server.stop()
    log = regard.vllm.load(server.records)
    check_lines(server.records)
    assert len(log.workers) == KILLS + 1
    failed = [answer for answer in answers if answer.status != 200]
    succeeded = [answer for answer in answers if answer.status == 200]
    # A request fails only while the server is down: between a kill and the start that follows.
    assert len(succeeded) > 50
    assert all(answer.status in (0, 500, 503) for answer in failed)
    missing = find_missing(answers, log)
    left_over = log.counts["open"]
    print(
        f"\n{len(succeeded)} answers, {len(failed)} lost connections, {len(missing)} without a record, {log}"
    )
    assert log.counts["asked"] == log.counts["record"] + log.counts["failed"] + log.counts["open"]
    # Eight clients: at a kill at most eight requests of one or two children are in flight.
    assert left_over <= 16 * KILLS and len(missing) <= 8 * KILLS
    assert log.counts["failed"] == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_loses_no_request_and_no_record(model: Path, tmp_path: Path, small_disk: Path) -> None:
    draw = random.Random(1)
    with Server(model, tmp_path, {"queue": 1000}, small_disk / "records") as server:
        filler = small_disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        answers = []
        for _ in range(40):
            status, body = server.complete(draw_words(30, draw), {"keep": True})
            answers.append(Answer(status, body, True, time.monotonic()))
        assert all(answer.status == 200 for answer in answers)
        (status,) = server.get("/regard")
        counts = status["counts"]
        assert counts["file_errors"] > 0 and counts["file_waiting"] > 40 and counts["file_dropped"] == 0
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
        wait_until(lambda: not server.get("/regard")[0]["counts"]["file_waiting"])
        assert server.get("/regard")[0]["counts"]["file_dropped"] == 0
    log = regard.vllm.load(server.records)
    assert find_missing(answers, log) == []
    check_lines(server.records)
    assert all(record.rows for own in log.values() for record in own)
    assert not list(server.records.rglob("*.part"))


class Collector:
    """A collector of OpenTelemetry traces: the gRPC service of the protocol."""

    def __init__(self, port: int = 0) -> None:
        import grpc
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

        spans = self.spans = []

        class Service(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - of the protocol
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                return trace_service_pb2.ExportTraceServiceResponse()

        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.server.start()


def test_a_collector_that_goes_away_and_comes_back(model: Path, tmp_path: Path) -> None:
    draw = random.Random(2)
    collector = Collector()
    with Server(model, tmp_path, {"otlp_endpoint": f"http://127.0.0.1:{collector.port}"}) as server:
        answers: list[Answer] = []

        def ask(count: int) -> None:
            for _ in range(count):
                status, body = server.complete(draw_words(20, draw), {"spans": {"a": [0, 5]}})
                answers.append(Answer(status, body, True, time.monotonic()))

        ask(10)
        wait_until(lambda: len(collector.spans) == 10)
        collector.server.stop(None).wait()
        ask(10)
        back = Collector(collector.port)
        ask(10)
        wait_until(lambda: len(back.spans) == 20)
    assert all(answer.status == 200 for answer in answers)
    spans = [*collector.spans, *back.spans]
    found = {attribute.value.string_value for span in spans for attribute in span.attributes
             if attribute.key == "gen_ai.response.id"}  # fmt: skip
    assert {answer.body["id"] + "-0" for answer in answers} == found
    shares = [
        {attribute.key: attribute.value.double_value for attribute in span.attributes} for span in spans
    ]
    assert all(
        abs(sum(value for key, value in own.items() if key.startswith("regard.share.")) - 1) < 1e-5
        for own in shares
    )
    assert find_missing(answers, regard.vllm.load(server.records)) == []


def test_spans_are_found_by_the_server_itself(model: Path, tmp_path: Path) -> None:
    with Server(model, tmp_path, {}) as server:
        prompt = "w5 w6 w7 w8 w9 w10 w11"
        parts = {"first": "w5 w6", "last": "w10 w11"}
        spans = regard.vllm.find_spans(prompt, parts, url=server.url, model="tiny")
        assert spans == {"first": [0, 2], "last": [5, 7]}
        messages = [{"role": "system", "content": "w20 w21"}, {"role": "user", "content": "w30 w31 w32"}]
        found = regard.vllm.find_spans(messages, {"question": "w31 w32"}, url=server.url, model="tiny")
        assert found == {"question": [3, 5]}
        with pytest.raises(regard.ArgumentError, match="several times"):
            regard.vllm.find_spans("w5 w6 w5", {"a": "w5"}, url=server.url, model="tiny")
        body = {"model": "tiny", "messages": messages, "max_tokens": 4, "ignore_eos": True,
                "vllm_xargs": {"regard": json.dumps({"spans": found})}}  # fmt: skip
        status, response = server.post("/v1/chat/completions", body)
        assert status == 200
        ((record,),) = server.get(f"/regard/{response['id']}")
        assert record["prompt_tokens"] == 5 and record["names"][0] == "question"


def test_the_route_needs_the_key_of_the_server_and_survives_any_name(model: Path, tmp_path: Path) -> None:
    with Server(model, tmp_path, {"keep": True}, VLLM_API_KEY="secret") as server:
        assert server.complete("w5 w6", {})[0] == 401
        for path in ("/regard", "/regard/cmpl-1"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                server.get(path)
        server.headers = {"Authorization": "Bearer secret"}
        # A name that cannot be sent between processes, and an id that is too long for a file.
        assert server.complete("w5 w6 w7", {"spans": {"\ud800": [0, 2]}})[0] == 200
        status, long = server.complete("w5 w6 w7", {}, request_id="x" * 300)
        assert status == 200
        ((record,),) = server.get(f"/regard/{long['id']}")
        assert record["id"].startswith("cmpl-xxx")
        status, last = server.complete("w5 w6 w7", {})
        wait_until(lambda: not server.get("/regard")[0]["counts"]["file_waiting"])
        counts = server.get("/regard")[0]["counts"]
        assert counts["measured"] == 2 and counts["failed"] == 1 and counts["file_errors"] == 0
    log = regard.vllm.load(server.records)
    assert log[last["id"]][0].rows and log[long["id"]][0].rows
    assert "span named" in next(iter(log.failures.values()))


def test_without_settings_the_server_measures_nothing_and_says_so(model: Path, tmp_path: Path) -> None:
    server = Server(model, tmp_path, {})
    server.command = server.command[: server.command.index("--additional-config")]
    with server:
        assert server.complete("w5 w6", {"spans": {"a": [0, 1]}})[0] == 200
        with pytest.raises(urllib.error.HTTPError, match="503"):
            server.get("/regard")
    assert not server.records.exists()


def test_a_cache_that_cannot_be_read_turns_the_plugin_off(model: Path, tmp_path: Path) -> None:
    with Server(model, tmp_path, {"rate": 2}) as server:  # a wrong setting likewise
        assert server.complete("w5 w6", {})[0] == 200
    assert "rate=2" in server.log.read_text()


def wait_until(is_true: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.1)
