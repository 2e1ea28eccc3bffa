"""`regard look`: it writes the page of the library, and its memory grows linearly with the text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
from examples.induction import load  # noqa: E402
from regard.cli import main  # noqa: E402
from regard.cli.look_command import DEMO_TEXT  # noqa: E402
from regard.learn import TinyGPT  # noqa: E402

ROOT = Path(__file__).parents[3]
LINE = "abcde <b>abcde</b> abcde"


def test_look_writes_the_page_of_the_recording(tmp_path, capsys):
    model = load()
    with regard.watch(model) as recording:
        model(torch.tensor([list(LINE.encode())]))
    title = f"examples.induction:load on {len(LINE)} tokens"
    path = tmp_path / "page.html"
    assert main(["look", "examples.induction:load", "-t", LINE, "-o", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{title}: {path}, ")
    assert captured.err.startswith("examples.induction:load: GPT, ")
    written = path.read_text(encoding="utf-8")
    assert written == recording.page(list(LINE), title=title).html
    assert written == regard.look("examples.induction:load", LINE).html
    assert (
        main(["look", "examples.induction:load", "-t", LINE, "-o", str(path), "-l", "layers.1*", "--json"])
        == 0
    )
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert captured.err == "" and record["layers"] == 1
    assert (record["page"], record["bytes"], record["title"]) == (str(path), path.stat().st_size, title)


def test_without_arguments_it_shows_the_model_that_comes_with_regard(run, tmp_path):
    path = tmp_path / "page.html"
    out, err = run("look", "-o", path)
    assert err.startswith("stories: GPT, 3,938,560 parameters, ") and f": {path}, " in out
    assert path.read_text(encoding="utf-8") == regard.look().html
    assert 'regard look MODEL --text "' in out.splitlines()[-1]
    words = DEMO_TEXT.replace(".", " .").replace(",", " ,").split()
    assert words.count("Max") == 2 and path.read_text("utf-8").count(" kite") >= 1
    # The printed weight is the largest that the model in NumPy has from the one word to the other.
    reading = TinyGPT()(DEMO_TEXT)
    query, key = (
        [i for i, piece in enumerate(reading.pieces) if piece == f" {word}"] for word in ("is", "Max")
    )
    pairs = reading.weights[:, :, query][..., key].max((-2, -1))
    layer, head = np.unravel_index(pairs.argmax(), pairs.shape)
    assert f"layer {layer}, head {head}, weight {pairs.max():.2f}." in out and pairs.max() > 0.9
    assert run("look", "stories", "-o", tmp_path / "named.html").out.splitlines()[1:] == out.splitlines()[1:]
    assert (tmp_path / "named.html").read_text("utf-8") == path.read_text("utf-8")
    own, _ = run("look", "-t", "Once upon a time", "-o", path)
    assert own.startswith("stories on 5 tokens: ") and "MODEL" not in own
    assert json.loads(run("look", "-o", path, "--json").out)["tokens"] == len(reading.tokens)


@pytest.mark.parametrize(
    ("arguments", "terminal", "variables", "opens"),
    [
        ([], True, {"DISPLAY": ":0"}, True),
        ([], True, {"WAYLAND_DISPLAY": "wayland-0"}, True),
        ([], True, {}, False),
        ([], False, {"DISPLAY": ":0"}, False),
        (["--no-open"], True, {"DISPLAY": ":0"}, False),
        (["--json"], True, {"DISPLAY": ":0"}, False),
        (["-t", "Once"], True, {"DISPLAY": ":0"}, False),
        (["-t", "Once", "--open"], False, {}, True),
    ],
)
def test_a_browser_opens_by_itself_only_without_arguments_and_with_a_display(
    arguments, terminal, variables, opens, run, tmp_path, monkeypatch
):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "page.html"
    run("look", *arguments, "-o", path)
    assert opened == ([path.as_uri()] if opens else []) and path.exists()


PEAK = """
import sys
from pathlib import Path
from regard.models import loaded_model
from regard.cli import main
loaded_model.CHUNK_ABOVE, loaded_model.CHUNK_SIZE = 256, 256  # chunks at a length that a test has time for
code = main(sys.argv[1:])
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0], file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the peak memory that Linux reports")
def test_memory_grows_linearly_with_the_text(tmp_path):
    pytest.importorskip("transformers")
    from tests.helpers.model_folders import save_llama

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 8192}
    folder = save_llama(tmp_path / "llama", **sizes)
    (tmp_path / "text.txt").write_text("The cat sat on the mat because it was tired. " * 200)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

    def measure_peak(tokens: int) -> int:
        """Return the peak memory of the process in bytes."""
        command = ["look", folder, "-f", tmp_path / "text.txt", "-o", tmp_path / "page.html", "--json"]
        command += ["--max-tokens", tokens]
        done = subprocess.run(
            [sys.executable, "-c", PEAK, *map(str, command)],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout)["tokens"] == tokens
        return int(done.stderr.split()[-1]) * 1024

    short, long = measure_peak(512), measure_peak(3072)
    per_token = (long - short) / (3072 - 512)
    print(
        f"{short / 1e6:.0f} MB at 512 tokens, {long / 1e6:.0f} MB at 3,072: {per_token / 1e3:.0f} kB per token"
    )
    # 32,768 tokens may take 4 GB in all, including the libraries and the weights.
    assert long + per_token * (32768 - 3072) < 4e9
    # The attention weights of eight heads at 3,072 tokens alone would take 302 MB.
    assert long - short < 8 * 4 * 3072**2
