"""Train a model, show how it goes, and keep it with its figures and the picture of its loss.

python -m examples.induction.train [induction | text] [--steps N] [--seed N] [--threads N] [--out FOLDER]

Needs the extras torch, hf (for safetensors) and plot. It ends with an error if the model does not do what is claimed.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.induction import baselines
from examples.induction.data import Text, decode, encode, repeats, text
from examples.induction.model import Config, Model, load, save
from regard import Mass, document

Figures = dict[str, Any]
OUT = Path("build/induction")  # not this folder: a try should not write over what is kept


@dataclass(frozen=True)
class Task:
    """What is learnt: the sizes, how long, from what (batches), and what is measured on the way and at the end."""

    config: Config
    steps: int
    rate: float
    every: int
    batch: Callable[[torch.Generator], Tensor]
    measure: Callable[[Model], Figures]
    at_the_end: Callable[[Model], Figures]
    amiss: Callable[[Figures], list[str]]  # what is not as claimed


# Sequences with a repeat


def induction(model: Model, seed: int = 1_000_003, batch: int = 64, **sizes: Any) -> Figures:
    """The loss on the two copies of a block, and what each head of the last layer gives the token to be repeated.

    The whole second copy counts, its first token too, which nobody can foresee. `heads` are means over its rows of the
    weight on the token that came next the first time: the matrix is asked for one key of each row, and never built.
    """
    fresh = repeats(batch, seed, **{"vocabulary": model.config.vocabulary, **sizes})
    with torch.no_grad():
        logits, matrices = model(fresh.tokens, need_matrices=True)
    loss = F.cross_entropy(logits[:, :-1].mT, fresh.tokens[:, 1:], reduction="none")
    first, second = (float(loss[copy[:, 1:]].mean()) for copy in (fresh.first, fresh.second))
    at = torch.arange(fresh.tokens.shape[1])
    looked = matrices[-1].measure(Mass(document(at, query_ids=fresh.source))).mass  # (batch, heads, n)
    heads = looked.transpose(0, 1)[:, fresh.source >= 0].mean(1)
    return {"first": first, "second": second, "heads": heads.tolist()}


def amiss(found: Figures) -> list[str]:
    """What is not as claimed of the induction model; empty if all is."""
    ratio, head = found["second"] / found["first"], max(found["heads"])
    wrong = []
    if not ratio < 1 / 5:
        wrong.append(f"the loss on the repeat is {ratio:.3f} of the first copy's, not below a fifth")
    if not head > 1 / 2:
        wrong.append(f"no head of the last layer gives more than half to the token after: {head:.3f} at most")
    return wrong


# Text


@cache
def read() -> Text:
    return text()


def windows(generator: torch.Generator, batch: int = 16, length: int = 129) -> Tensor:
    """Pieces of the training text, from anywhere."""
    whole = torch.frombuffer(bytearray(read().train), dtype=torch.uint8)
    starts = torch.randint(len(whole) - length, (batch, 1), generator=generator)
    return whole[starts + torch.arange(length)].long()


def bits(model: Model, some: bytes, length: int = 128) -> float:
    """What a text costs by the model, in bits for each byte; each is foreseen from 65 to 128 bytes before it."""
    whole = torch.frombuffer(bytearray(some), dtype=torch.uint8).long()
    pieces = whole.unfold(0, length + 1, length // 2)
    total = 0.0
    with torch.no_grad():
        for part in pieces.split(32):
            logits = model(part[:, :-1])[:, length // 2 :]
            total += float(F.cross_entropy(logits.mT, part[:, length // 2 + 1 :], reduction="sum"))
    return total / (len(pieces) * (length // 2)) / math.log(2)


def fingerprint(some: Text) -> str:
    """The same for the same text, training and held out."""
    return hashlib.sha256(b"\0".join(some)).hexdigest()


def text_figures(model: Model) -> Figures:
    train, held_out = read()
    corpus = {
        "train_bytes": len(train),
        "held_out_bytes": len(held_out),
        "sha256": fingerprint(read()),
        "python": platform.python_version(),
    }
    costs = {
        "zlib": baselines.by_zlib(read()),
        "xz": baselines.by_xz(read()),
        "counting": baselines.by_counting(read()),
    }
    return {
        "bits": {"model": bits(model, held_out), **costs},
        "text": corpus,
        "sample": decode(model.extend(encode("The class of "), 60)),
    }


def text_amiss(found: Figures) -> list[str]:
    """What is not as claimed of the text model; empty if all is."""
    model, least = found["bits"]["model"], found["bits"]["zlib"]
    return [] if model < least else [f"{model:.3f} bits for each byte, not below the {least:.3f} of zlib"]


TASKS = {
    "induction": Task(
        config=Config(vocabulary=128, width=64, heads=4, layers=2),
        steps=2500,
        rate=4e-3,
        every=50,
        batch=lambda generator: repeats(32, generator).tokens,
        measure=induction,
        at_the_end=lambda model: induction(model, batch=512),
        amiss=amiss,
    ),
    "text": Task(
        config=Config(vocabulary=256, width=128, heads=4, layers=3, hidden=512),
        steps=1500,
        rate=3e-3,
        every=50,
        batch=windows,
        measure=lambda model: {"held out": bits(model, read().held_out[:8_000])},
        at_the_end=text_figures,
        amiss=text_amiss,
    ),
}


# Training


def train(
    task: Task, steps: int, seed: int = 0, saw: Callable[[int, Figures], None] = lambda step, found: None
) -> tuple[Model, list[Figures]]:
    """A model after so many steps, and what was measured on the way; the same for the same seed and threads."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Model(task.config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=task.rate, betas=(0.9, 0.98), weight_decay=0.01)
    history = []
    for step in range(steps):
        rate = task.rate * min(1, (step + 1) / 50, 2 * (steps - step) / steps)  # up, level, down
        for group in optimiser.param_groups:
            group["lr"] = rate
        tokens = task.batch(generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found = {"step": step + 1, "loss": loss.item()}
        if step == 0 or (step + 1) % task.every == 0 or step + 1 == steps:
            found |= task.measure(model)
            history.append(rounded(found))
        saw(step + 1, found)
    return model.eval(), history


def rounded(found: Any) -> Any:
    """Numbers with three digits behind the point, which is what a picture needs."""
    if isinstance(found, dict):
        return {name: rounded(value) for name, value in found.items()}
    return [rounded(value) for value in found] if isinstance(found, list) else round(found, 3)


def bar(steps: int) -> Callable[[int, Figures], None]:
    """A line that is written over 200 times: how far, the last figures, and how long it will take."""
    started, shown = time.perf_counter(), ""

    def saw(step: int, found: Figures) -> None:
        nonlocal shown
        if len(found) > 2:
            numbers = {k: v for k, v in found.items() if k not in ("step", "loss", "heads")}
            head = f", best head {max(found['heads']):.2f}" if "heads" in found else ""
            shown = ", ".join(f"{name} {number:.3f}" for name, number in numbers.items()) + head
        if step % max(1, steps // 200) and step < steps:
            return
        done, took = step / steps, time.perf_counter() - started
        full = round(24 * done)
        print(
            f"\r{'█' * full}{'░' * (24 - full)} {step:>4} of {steps}  loss {found['loss']:.3f}  {shown}  "
            f"{took:3.0f} s, {took / done - took:3.0f} s to go ",
            end="" if step < steps else "\n", file=sys.stderr, flush=True,
        )  # fmt: skip

    return saw


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line asks; how many claims were not met."""
    from examples.induction.pictures import losses  # first of all: a missing extra is best known now

    parser = argparse.ArgumentParser(
        prog="python -m examples.induction.train", description=__doc__.split("\n")[0]
    )
    parser.add_argument("task", nargs="?", choices=TASKS, default="induction")
    parser.add_argument("--steps", type=int, help="how many, if not as many as the kept checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT, help=f"where checkpoint and picture go: {OUT}")
    asked = parser.parse_args(arguments)
    task = TASKS[asked.task]
    steps = asked.steps or task.steps
    torch.set_num_threads(asked.threads)
    clock, cpu = time.perf_counter(), time.process_time()
    model, history = train(task, steps, asked.seed, bar(steps))
    seconds = {"seconds": round(time.perf_counter() - clock), "cpu_seconds": round(time.process_time() - cpu)}
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"{asked.task}.safetensors"
    save(model, path)
    model = load(path)  # what is claimed is claimed of the halves that are kept
    found = task.at_the_end(model)
    about = {
        "task": asked.task,
        "steps": steps,
        "seed": asked.seed,
        "threads": asked.threads,
        **seconds,
        **found,
    }
    save(model, path, {**about, "history": history})
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    losses(load(path), asked.out / f"{asked.task}-loss.svg")
    wrong = task.amiss(found)
    print("\n".join(wrong), end="\n" * bool(wrong), file=sys.stderr)
    return len(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
