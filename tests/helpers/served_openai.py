"""The OpenAI server of vLLM with the plugin, and clients of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What a client got: the status, 0 for a lost connection, and the response.

    Of a stream that the client left, the body has the id and one choice.
    """

    status: int
    body: Any
    asked: bool
    ended: float
    left: bool = False


class Server:
    """A server in a process group of its own, restarted by `supervise` if its engine dies.

    Args:
        model: Folder of the model, which is served as `served_name`.
        folder: Folder for records and the log.
        settings: The settings of the plugin; the folder of the records is added.
        records: Folder of the records, if it is not in `folder`.
        served_name: Name of the model in the server.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        settings: dict[str, Any],
        records: Path | None = None,
        served_name: str = "tiny",
        **variables: str,
    ) -> None:
        self.records, self.log = records or folder / "records", folder / "server.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        additional = json.dumps({"regard": {"folder": str(self.records)} | settings})
        self.command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *(
                "--served-model-name",
                served_name,
                "--dtype",
                "float32",
                "--enforce-eager",
                "--max-model-len",
                "512",
            ),
            *("--port", str(self.port), "--host", "127.0.0.1", "--additional-config", additional),
        ]
        self.environ = os.environ | {
            "VLLM_PLUGINS": "regard",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **variables,
        }  # fmt: skip
        self.headers: dict[str, str] = {}
        self.process: Any = None
        self._stopping = threading.Event()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=self.environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + 900
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=2)
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start:\n" + self.log.read_text()[-4000:])
            time.sleep(0.3)

    def stop(self) -> None:
        self._stopping.set()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def find_engine(self) -> int | None:
        """Return the process of the engine."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                is_ours = os.getpgid(int(entry.name)) == self.process.pid
                if is_ours and "EngineCor" in (entry / "comm").read_text() + (entry / "cmdline").read_text():
                    return int(entry.name)
        return None

    def supervise(self) -> threading.Thread:
        """Start the server again whenever it has exited, until `stop`."""

        def watch() -> None:
            while not self._stopping.wait(0.2):
                if self.process.poll() is not None and not self._stopping.is_set():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self.process.pid, signal.SIGKILL)
                    self.start()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        return thread

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers=self.headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def post(self, path: str, body: dict[str, Any], timeout: float = 60) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **self.headers},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()[:300]
        except (OSError, ValueError):
            return 0, None

    def complete(self, words: str, given: Any = None, **more: Any) -> tuple[int, Any]:
        """Ask for a completion; `given` is what the request asks of the plugin."""
        return self.post("/v1/completions", build_body(words, given, **more))

    def leave_stream(self, words: str, given: Any = None) -> tuple[int, Any]:
        """Ask for a stream of 100 tokens, and close the connection after the first one."""
        body = build_body(words, given, stream=True, max_tokens=100)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                return response.status, None
            first = json.loads(response.readline().removeprefix(b"data: "))
            return 200, {"id": first["id"], "choices": [{}]}
        except (OSError, ValueError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()


def build_body(words: str, given: Any, **more: Any) -> dict[str, Any]:
    """Build the body of a completion; `given` is what the request asks of the plugin."""
    body = {
        "model": "tiny",
        "prompt": words,
        "max_tokens": 12,
        "ignore_eos": True,
        "temperature": 0,
        **more,
    }
    return body if given is None else body | {"vllm_xargs": {"regard": json.dumps(given)}}


def draw_words(length: int, draw: random.Random) -> str:
    return " ".join(f"w{draw.randint(3, 999)}" for _ in range(length))


@contextlib.contextmanager
def run_clients(server: Server, clients: int = 16, share_asked: float = 0.5) -> Iterator[list[Answer]]:
    """Let clients send requests one after the other until the block ends; yields the list of their answers.

    Of the requests, 5% are streams that the client leaves, and 10% ask for two answers.
    """
    answers: list[Answer] = []
    stop = threading.Event()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        while not stop.is_set():
            asked = draw.random() < share_asked
            length = draw.randint(10, 200)
            given = {"spans": {"start": [0, 4], "rest": [4, length // 2]}} if asked else None
            kind = draw.random()
            if kind < 0.05:
                status, body = server.leave_stream(draw_words(length, draw), given)
            else:
                more = {"n": 2, "temperature": 1.0} if kind > 0.9 else {}
                status, body = server.complete(draw_words(length, draw), given, **more)
            answers.append(Answer(status, body, asked, time.monotonic(), kind < 0.05))
            if not status:
                stop.wait(0.5)  # the server is being restarted

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join(90)
