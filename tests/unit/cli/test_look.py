"""`regard look`: the page is the library's, and memory grows with the text, not with its square."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
torch = pytest.importorskip("torch")

import regard  # noqa: E402
from examples.induction import load  # noqa: E402
from regard.cli import main  # noqa: E402

ROOT = Path(__file__).parents[3]
LINE = "abcde <b>abcde</b> abcde"


def test_look_writes_the_page_of_the_library(tmp_path, capsys):
    model = load()
    with regard.watch(model) as recording:
        model(torch.tensor([list(LINE.encode())]))
    title = f"examples.induction:load on {len(LINE)} tokens"
    path = tmp_path / "page.html"
    assert main(["look", "examples.induction:load", "-t", LINE, "-o", str(path)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{title}: {path}, ")
    assert said.err.startswith("examples.induction:load: Model, ")
    assert path.read_text(encoding="utf-8") == recording.page(list(LINE), title=title).html
    assert (
        main(["look", "examples.induction:load", "-t", LINE, "-o", str(path), "-l", "layers.1*", "--json"])
        == 0
    )
    said = capsys.readouterr()
    record = json.loads(said.out)
    assert said.err == "" and record["layers"] == 1
    assert (record["page"], record["bytes"], record["title"]) == (str(path), path.stat().st_size, title)


PEAK = """
import sys
from pathlib import Path
from regard.models import loaded_model
from regard.cli import main
loaded_model.CHUNK_ABOVE, loaded_model.CHUNK_SIZE = 256, 256  # the steps of long texts, at lengths a test has time for
code = main(sys.argv[1:])
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0], file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux")
def test_memory_grows_with_the_text_and_not_with_its_square(tmp_path):
    pytest.importorskip("transformers")
    from tests.helpers.model_folders import save_llama

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 8192}
    folder = save_llama(tmp_path / "llama", **sizes)
    (tmp_path / "text.txt").write_text("The cat sat on the mat because it was tired. " * 200)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

    def peak(tokens: int) -> int:
        """The most bytes the process held at any time."""
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

    short, long = peak(512), peak(3072)
    each = (long - short) / (3072 - 512)
    print(
        f"{short / 1e6:.0f} MB at 512 tokens, {long / 1e6:.0f} MB at 3,072: {each / 1e3:.0f} kB for each token"
    )
    # What 32,768 tokens may take in all is 4 GB, of which the libraries and the weights are there from the start.
    assert long + each * (32768 - 3072) < 4e9
    # The weights of the eight heads at 3,072 tokens alone would be 302 MB.
    assert long - short < 8 * 4 * 3072**2
