"""The command line: arguments, files with matrices, sound, and the files of the exercises."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import wave
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.inputs import STRINGS, change_bytes, change_json, draw_string, draw_value
from tests.fuzz.runner import RunInput, Target, UnexpectedResult

COMMANDS = (
    "explain",
    "explore",
    "exercise",
    "look",
    "doctor",
    "heads",
    "effects",
    "compare",
    "survey",
    "report",
)
OPTIONS = (
    *("--query", "--head", "--causal", "--json", "--csv", "--output", "-o", "--text", "-t", "--file", "-f"),
    *(
        "--answer",
        "--wrong",
        "--baseline",
        "--keys",
        "--top",
        "-n",
        "--by",
        "--layers",
        "--max-tokens",
        "--dtype",
    ),
    *(
        "--class",
        "--solution",
        "--progress",
        "--timeout",
        "--measures",
        "--workers",
        "--executor",
        "--device",
    ),
    *("--shard-size", "--help", "--version", "--generate", "--image", "--audio", "--nonsense", "--"),
)
WORDS = (
    *(
        "0",
        "-1",
        "3",
        "1.5",
        "9999999999999999999999",
        "nan",
        "inf",
        "sat",
        "cat",
        "weights",
        "pipeline",
        "cost",
    ),
    *(
        "matrices.json",
        "missing.json",
        "folder",
        "folder/x.html",
        "page.html",
        "/dev/null/x",
        "json:loads",
        "",
    ),
    *(
        "0,3",
        "3:8",
        ":",
        "9" * 5000,
        "entropy,distance",
        "float16",
        "no-such-model",
        "x" * 300,
        "local",
        "zero",
    ),
)
MATRICES = {
    "query": [[1.0, 0.0], [0.5, 2.0]],
    "key": [[1, 0], [0, 1]],
    "value": [[1.0], [2.0]],
    "tokens": ["a", "b"],
    "mask": [[True, False], [True, True]],
    "scale": 0.5,
}


def build_arguments(folder: Path) -> RunInput:
    from regard.cli import main

    (folder / "folder").mkdir()
    (folder / "matrices.json").write_text(json.dumps(MATRICES))

    def run(rng: Random) -> None:
        words = [rng.choice(COMMANDS)] if rng.random() < 0.95 else []
        for _ in range(rng.randrange(6)):
            kind = rng.randrange(8)
            words.append(
                rng.choice(OPTIONS) if kind < 4 else rng.choice(WORDS) if kind < 7 else rng.choice(STRINGS)
            )
        words = [word.replace("\0", "") for word in words]  # no process has one in its arguments
        output, errors = _Stream(), _Stream()
        before = Path.cwd()
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
                code = main(words)
        finally:
            os.chdir(before)
        text = errors.getvalue()
        if "Traceback" in text or re.search(r": unexpected \w+ in ", text):
            raise UnexpectedResult(f"{' '.join(words)[:200]!r} ended with {text.strip()[:300]!r}")
        if code == 2 and len(text.strip().splitlines()) != 1:
            raise UnexpectedResult(f"{' '.join(words)[:200]!r} printed {text!r}")

    return run


class _Stream(io.TextIOWrapper):
    """A stream as `main` sets up that of a process."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        super().__init__(self._bytes, "utf-8", errors="replace", write_through=True)

    def getvalue(self) -> str:
        return self._bytes.getvalue().decode()


def build_matrices(folder: Path) -> RunInput:
    from regard.cli.learn_commands import _load_inputs
    from regard.core.attention import attention

    plain, packed = folder / "m.json", folder / "m.npz"
    np.savez(packed, **{name: np.asarray(value) for name, value in MATRICES.items() if name != "tokens"})
    stored = packed.read_bytes()
    np.savez_compressed(packed, query=np.ones((2, 3)), key=np.ones((2, 3)), tokens=np.array(["a", "b"]))
    compressed = packed.read_bytes()
    deep = b'{"query": ' + b"[" * 3000 + b"]" * 3000 + b', "key": [[1]]}'

    def run(rng: Random) -> None:
        kind, path = rng.randrange(10), plain
        if kind == 0:
            plain.write_bytes(
                deep if rng.random() < 0.2 else change_bytes(rng, json.dumps(MATRICES).encode())
            )
        elif kind < 7:
            plain.write_text(json.dumps(change_json(rng, MATRICES)))
        else:
            path = packed
            path.write_bytes(change_bytes(rng, rng.choice((stored, compressed))))
        inputs = _load_inputs(path, rng.choice((None, None, "0", "0,0", draw_string(rng))), False, "explain")
        A = attention(inputs["query"], inputs["key"], mask=inputs["mask"], scale=inputs["scale"])
        str(A.explain(0, inputs["value"], inputs["tokens"]))

    return run


def build_archives(folder: Path) -> RunInput:
    """NPZ files whose arrays are far larger than the file, and members with headers of any shape and dtype."""
    import zipfile

    from regard.cli.files import read_matrices

    path = folder / "m.npz"

    def run(rng: Random) -> None:
        shape = tuple(rng.choice((0, 1, 2, 10**3, 10**6, 10**12, -1)) for _ in range(rng.randrange(4)))
        dtype = rng.choice(("<f8", "<f4", "|O", "<U4", "|V8", "<c16", "<M8[s]", "bogus", "<i8", "|b1", "<f2"))
        header = repr({"descr": dtype, "fortran_order": rng.random() < 0.3, "shape": shape}).encode() + b"\n"
        member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
        member += b"\0" * rng.choice((0, 16, 64, 10**5))
        if rng.random() < 0.3:
            member = change_bytes(rng, member)
        method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
        with zipfile.ZipFile(path, "w", method, compresslevel=1) as file:
            for name in ("query.npy", "key.npy", rng.choice(("value.npy", "../../outside.npy", "/x.npy"))):
                file.writestr(name, member)
        read_matrices(path, "explain")

    return run


def build_sound(folder: Path) -> RunInput:
    from regard.models.audio import read_wav

    path = folder / "sound.wav"
    files = []
    for width, channels in ((2, 1), (1, 2), (3, 1), (4, 2)):
        with wave.open(str(path), "wb") as file:
            file.setnchannels(channels)
            file.setsampwidth(width)
            file.setframerate(16_000)
            file.writeframes(bytes(range(240)))
        files.append(path.read_bytes())

    def run(rng: Random) -> None:
        data = rng.choice(files)
        if rng.random() < 0.5:  # a field of the header
            at = 4 * rng.randrange(11)
            number = rng.choice((0, 1, 3, 2**16, 2**31 - 1, 2**32 - 1))
            data = data[:at] + number.to_bytes(4, "little") + data[at + 4 :]
        else:
            data = change_bytes(rng, data)
        path.write_bytes(data)
        samples, rate = read_wav(path)
        if not (np.abs(samples) <= 1).all() or rate < 1:
            raise UnexpectedResult("samples outside −1 to 1")

    return run


def build_progress(folder: Path) -> RunInput:
    from regard.cli.learn_commands import _list_exercises
    from regard.cli.output import Printer
    from regard.learn.exercises.submission import FORMAT, SubmissionResult, load_progress

    entry = {"attempts": 2, "right_parts": ["scores"], "solved": "2030-01-01T00:00:00+00:00", "hint": "Look."}
    stored = {"format": FORMAT, "exercises": {"1": entry, "3": {**entry, "solved": ""}}}
    path = folder / "progress.json"
    result = SubmissionResult("right", (), "", ("scores",), 1, 0.1)

    def run(rng: Random) -> None:
        if rng.random() < 0.3:
            path.write_bytes(change_bytes(rng, json.dumps(stored).encode()))
        else:
            path.write_text(json.dumps(change_json(rng, stored)))
        load_progress(path).record(rng.choice((1, 2)), result).save(path)
        with contextlib.redirect_stdout(_Stream()):
            _list_exercises(Printer(False), path)

    return run


def build_answers(folder: Path) -> RunInput:
    """Answers of any type to the exercises, and notebooks that were changed."""
    from regard.learn import exercises
    from regard.learn.exercises.catalog import EXERCISES
    from regard.learn.exercises.submission import check_here

    path = folder / "n.ipynb"
    cell = {"cell_type": "code", "source": ["x = 1\n", "%pip install x"], "metadata": {}, "outputs": []}
    notebook = {"cells": [cell, {"cell_type": "markdown", "source": "text"}], "nbformat": 4}
    arrays = (
        *(np.zeros(shape) for shape in ((), (0,), (5, 5), (2, 3, 4), (1, 0))),
        *(np.full((5, 5), value) for value in (np.nan, np.inf, 1e308)),
        *(np.array(["a", "b"]), np.array([None, 1], object), np.zeros(3, complex), np.array([True])),
    )

    def draw_answer(rng: Random) -> Any:
        kind = rng.randrange(5)
        return rng.choice((
            lambda: draw_value(rng), lambda: rng.choice(arrays), lambda: [draw_value(rng) for _ in range(kind)],
            lambda: (draw_value(rng),) * kind, lambda: len, lambda: (lambda *_, **__: draw_value(rng)), lambda: ...,
        ))()  # fmt: skip

    def run(rng: Random) -> None:
        if rng.random() < 0.3:
            text = json.dumps(change_json(rng, notebook)).encode()
            path.write_bytes(change_bytes(rng, text) if rng.random() < 0.3 else text)
            check_here(EXERCISES[0], path)
            return
        number = rng.randrange(1, len(EXERCISES) + 1)
        names = [part.name for part in EXERCISES[number - 1].parts]
        answer = draw_answer(rng)
        if rng.random() < 0.7:
            answer = {rng.choice(names): draw_answer(rng) for _ in range(rng.randrange(3))}
        result = exercises.check(number, answer)
        if result.correct or not result.hint.strip():
            raise UnexpectedResult(f"exercise {number}: no hint")

    return run


TARGETS = (
    Target("arguments", 2, build_arguments),
    Target("matrices", 70, build_matrices),
    Target("archives", 20, build_archives),
    Target("sound", 60, build_sound),
    Target("progress", 70, build_progress),
    Target("answers", 20, build_answers),
)
