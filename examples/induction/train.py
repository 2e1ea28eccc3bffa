"""Train a model with a progress bar, and save it with its figures and a plot of its loss.

python -m examples.induction.train [induction | text] [--steps N] [--seed N] [--threads N] [--out FOLDER]

Needs the extras torch, hf (for safetensors) and plot. The exit code is the number of claims that the model
does not meet.
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
from examples.induction.data import TextSplit, build_text, decode, draw_repeats, encode
from examples.induction.model import load, save
from regard import Mass
from regard.learn.gpt import GPT, GPTConfig
from regard.masks import document

Figures = dict[str, Any]
OUT = Path("build/induction")  # not this folder, so that an experiment does not overwrite the stored models


@dataclass(frozen=True)
class TrainingTask:
    """A training task: the model, the data, and the measurements during and after training.

    Attributes:
        config: The sizes of the model.
        steps: Number of training steps.
        rate: The highest learning rate.
        every: Number of steps between measurements.
        draw_batch: A function that draws a batch of tokens (batch, n) from a generator.
        measure: A function that measures a model during training.
        measure_final: A function that measures the trained model.
        find_failures: A function of the final figures that lists the claims they do not meet.
    """

    config: GPTConfig
    steps: int
    rate: float
    every: int
    draw_batch: Callable[[torch.Generator], Tensor]
    measure: Callable[[GPT], Figures]
    measure_final: Callable[[GPT], Figures]
    find_failures: Callable[[Figures], list[str]]


# Sequences with a repeat


def measure_induction(model: GPT, seed: int = 1_000_003, batch: int = 64, **sizes: Any) -> Figures:
    """Measure the loss on the two copies of a block, and the weight of each head on the token to repeat.

    The loss on the second copy includes its first token, which cannot be predicted. The weight is measured for one key
    per row, without building the matrix.

    Args:
        model: The model.
        seed: Seed of the sequences.
        batch: Number of sequences.
        sizes: Other arguments of `draw_repeats`.

    Returns:
        `first` and `second`, the losses in nats, and `heads`, the mean weight of each head of the last layer.
    """
    sample = draw_repeats(batch, seed, **{"vocabulary": model.config.vocabulary, **sizes})
    with torch.no_grad():
        logits, matrices = model(sample.tokens, need_matrices=True)
    loss = F.cross_entropy(logits[:, :-1].mT, sample.tokens[:, 1:], reduction="none")
    first, second = (float(loss[copy[:, 1:]].mean()) for copy in (sample.first, sample.second))
    positions = torch.arange(sample.tokens.shape[1])
    mask = document(positions, query_ids=sample.source)  # one visible key per row
    mass = matrices[-1].measure(Mass(mask)).mass  # (batch, heads, n)
    heads = mass.transpose(0, 1)[:, sample.source >= 0].mean(1)
    return {"first": first, "second": second, "heads": heads.tolist()}


def find_induction_failures(figures: Figures) -> list[str]:
    """List the claims about the induction model that its figures do not meet.

    Args:
        figures: The result of `measure_induction`.

    Returns:
        One sentence for each failed claim.
    """
    ratio, head = figures["second"] / figures["first"], max(figures["heads"])
    failures = []
    if not ratio < 1 / 5:
        failures.append(f"The loss on the repeat is {ratio:.3f} of the first copy's, not below a fifth.")
    if not head > 1 / 2:
        failures.append(
            f"No head of the last layer gives more than half to the token after: {head:.3f} at most."
        )
    return failures


# Text


@cache
def load_text() -> TextSplit:
    """Build the text once."""
    return build_text()


def draw_windows(generator: torch.Generator, batch: int = 16, length: int = 129) -> Tensor:
    """Draw pieces of the training text at random positions.

    Args:
        generator: The random generator.
        batch: Number of pieces.
        length: Bytes per piece.

    Returns:
        Bytes (batch, length).
    """
    whole = torch.frombuffer(bytearray(load_text().train), dtype=torch.uint8)
    starts = torch.randint(len(whole) - length, (batch, 1), generator=generator)
    return whole[starts + torch.arange(length)].long()


def measure_bits(model: GPT, text: bytes, length: int = 128) -> float:
    """Measure the loss of a model on a text; each byte is predicted from the 65 to 128 bytes before it.

    Args:
        model: The model.
        text: The text.
        length: Length of the context; half of it is the shortest one used.

    Returns:
        Bits per byte.
    """
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    pieces = whole.unfold(0, length + 1, length // 2)
    total = 0.0
    with torch.no_grad():
        for part in pieces.split(32):
            logits = model(part[:, :-1])[:, length // 2 :]
            total += float(F.cross_entropy(logits.mT, part[:, length // 2 + 1 :], reduction="sum"))
    return total / (len(pieces) * (length // 2)) / math.log(2)


def hash_text(text: TextSplit) -> str:
    """Compute the SHA-256 of the training and the held-out text."""
    return hashlib.sha256(b"\0".join(text)).hexdigest()


def measure_text(model: GPT) -> Figures:
    """Measure the text model against the baselines on the held-out text.

    Args:
        model: The model.

    Returns:
        Bits per byte by method, a description of the text, and a sample that the model generates.
    """
    text = load_text()
    corpus = {
        "train_bytes": len(text.train),
        "held_out_bytes": len(text.held_out),
        "sha256": hash_text(text),
        "python": platform.python_version(),
    }
    costs = {
        "zlib": baselines.measure_zlib(text),
        "xz": baselines.measure_xz(text),
        "counting": baselines.measure_ngrams(text),
    }
    return {
        "bits": {"model": measure_bits(model, text.held_out), **costs},
        "text": corpus,
        "sample": decode(model.generate(encode("The class of "), 60)),
    }


def find_text_failures(figures: Figures) -> list[str]:
    """List the claims about the text model that its figures do not meet.

    Args:
        figures: The result of `measure_text`.

    Returns:
        One sentence for each failed claim.
    """
    model, limit = figures["bits"]["model"], figures["bits"]["zlib"]
    return [] if model < limit else [f"{model:.3f} bits per byte, not below the {limit:.3f} of zlib."]


TASKS = {
    "induction": TrainingTask(
        config=GPTConfig(vocabulary=128, width=64, heads=4, layers=2),
        steps=2500,
        rate=4e-3,
        every=50,
        draw_batch=lambda generator: draw_repeats(32, generator).tokens,
        measure=measure_induction,
        measure_final=lambda model: measure_induction(model, batch=512),
        find_failures=find_induction_failures,
    ),
    "text": TrainingTask(
        config=GPTConfig(vocabulary=256, width=128, heads=4, layers=3, hidden=512),
        steps=1500,
        rate=3e-3,
        every=50,
        draw_batch=draw_windows,
        measure=lambda model: {"held out": measure_bits(model, load_text().held_out[:8_000])},
        measure_final=measure_text,
        find_failures=find_text_failures,
    ),
}


# Training


def train(
    task: TrainingTask,
    steps: int,
    seed: int = 0,
    on_step: Callable[[int, Figures], None] = lambda step, figures: None,
) -> tuple[GPT, list[Figures]]:
    """Train a model; the result is reproducible for the same seed and number of threads.

    Args:
        task: The task.
        steps: Number of training steps.
        seed: Seed of the parameters and the batches.
        on_step: Called after each step with its number and the figures measured.

    Returns:
        The model, and the figures measured during training.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = GPT(task.config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=task.rate, betas=(0.9, 0.98), weight_decay=0.01)
    history = []
    for step in range(steps):
        rate = task.rate * min(1, (step + 1) / 50, 2 * (steps - step) / steps)  # warm up, hold, decay
        for group in optimiser.param_groups:
            group["lr"] = rate
        tokens = task.draw_batch(generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        figures: Figures = {"step": step + 1, "loss": loss.item()}
        if step == 0 or (step + 1) % task.every == 0 or step + 1 == steps:
            figures |= task.measure(model)
            history.append(round_figures(figures))
        on_step(step + 1, figures)
    return model.eval(), history


def round_figures(figures: Any) -> Any:
    """Round the numbers in nested lists and dicts to three decimals, which is enough for a plot."""
    if isinstance(figures, dict):
        return {name: round_figures(value) for name, value in figures.items()}
    return [round_figures(value) for value in figures] if isinstance(figures, list) else round(figures, 3)


def build_progress_bar(steps: int) -> Callable[[int, Figures], None]:
    """Build a callback for `train` that prints a progress bar with the last figures and the remaining time.

    Args:
        steps: Number of training steps.

    Returns:
        A function of the step and the figures; it updates the line 200 times.
    """
    started, last = time.perf_counter(), ""

    def update(step: int, figures: Figures) -> None:
        nonlocal last
        if len(figures) > 2:
            numbers = {k: v for k, v in figures.items() if k not in ("step", "loss", "heads")}
            head = f", best head {max(figures['heads']):.2f}" if "heads" in figures else ""
            last = ", ".join(f"{name} {number:.3f}" for name, number in numbers.items()) + head
        if step % max(1, steps // 200) and step < steps:
            return
        done, elapsed = step / steps, time.perf_counter() - started
        full = round(24 * done)
        print(
            f"\r{'█' * full}{'░' * (24 - full)} {step:>4} of {steps}  loss {figures['loss']:.3f}  {last}  "
            f"{elapsed:3.0f} s, {elapsed / done - elapsed:3.0f} s to go ",
            end="" if step < steps else "\n", file=sys.stderr, flush=True,
        )  # fmt: skip

    return update


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments; those of the process by default.

    Returns:
        The number of claims that the trained model does not meet.
    """
    from examples.induction.pictures import plot_losses  # before training, in case the extra is missing

    parser = argparse.ArgumentParser(
        prog="python -m examples.induction.train", description=__doc__.split("\n")[0]
    )
    parser.add_argument("task", nargs="?", choices=TASKS, default="induction")
    parser.add_argument(
        "--steps", type=int, help="number of training steps; default: that of the stored checkpoint"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, default=OUT, help=f"folder for the checkpoint and the plot; default: {OUT}"
    )
    options = parser.parse_args(arguments)
    task = TASKS[options.task]
    steps = options.steps or task.steps
    torch.set_num_threads(options.threads)
    clock, cpu = time.perf_counter(), time.process_time()
    model, history = train(task, steps, options.seed, build_progress_bar(steps))
    seconds = {"seconds": round(time.perf_counter() - clock), "cpu_seconds": round(time.process_time() - cpu)}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.task}.safetensors"
    save(model, path)
    model = load(path)  # the claims are about the stored float16 weights
    figures = task.measure_final(model)
    about = {
        "task": options.task,
        "steps": steps,
        "seed": options.seed,
        "threads": options.threads,
        **seconds,
        **figures,
    }
    save(model, path, {**about, "history": history})
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    plot_losses(load(path), options.out / f"{options.task}-loss.svg")
    failures = task.find_failures(figures)
    print("\n".join(failures), end="\n" * bool(failures), file=sys.stderr)
    return len(failures)


if __name__ == "__main__":
    raise SystemExit(main())
