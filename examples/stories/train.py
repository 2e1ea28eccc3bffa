"""Train the model of children's stories that `regard.explore.model` shows.

python -m examples.stories.train FOLDER [--steps N] [--seed N] [--out FOLDER]

FOLDER has the files that README.md names; the stories of `grammar` are added to them. A checkpoint is written every 400
steps; the same command resumes from it. Needs the extras torch, hf (for safetensors) and plot.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.induction import baselines
from examples.induction.data import TextSplit
from examples.induction.train import build_progress_bar, round_figures
from examples.stories.data import read_stories
from examples.stories.grammar import draw_stories, rename
from examples.stories.muon import Muon
from examples.stories.pieces import build_vocabulary
from regard.learn.gpt import GPT, GPTConfig, load_stories
from regard.learn.tiny_gpt import FACTOR, encode

CONFIG = GPTConfig(vocabulary=2560, width=256, heads=8, layers=4, hidden=768, activation="relu2")
CONTEXT = 192
STEPS = 3000
WARMUP_STEPS = 50
DECAY = 0.2  # part of the steps during which the learning rates fall to 0
MATRIX_RATE, OTHER_RATE = 0.02, 3e-3
CHECKPOINT_STEPS, MEASURE_STEPS = 400, 100
MADE_STORIES = 60_000
REPEATED_WORD_COUNT = 10  # words of TinyStories that stories of the grammar repeat occur so often
BATCH = (5, 2, 5)  # contexts of each training text in a step
OUT = Path("build/stories")


def rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rates: it rises during the first steps, and falls to 0 during the last.

    Args:
        step: Number of the step, from 0.
        steps: Number of steps of the whole run.

    Returns:
        A number between 0 and 1.
    """
    return min(1, (step + 1) / WARMUP_STEPS, (steps - step) / (DECAY * steps))


class StoryText:
    """The tokens of the training texts and of the held-out text.

    The training texts are the excerpts of TinyStories, the same with made-up names, and stories of the grammar.

    Args:
        text: Excerpts of TinyStories for training, and held-out ones.
        vocabulary: Number of word pieces.
        made_stories: Number of stories of the grammar.
        seed: Seed of names and stories.
    """

    def __init__(self, text: TextSplit, vocabulary: int, made_stories: int, seed: int) -> None:
        told = text.train.decode()
        counts = Counter(re.findall(r"\b[a-z]{3,}\b", told))
        words = sorted(word for word, count in counts.items() if count >= REPEATED_WORD_COUNT)
        made = "\n".join(draw_stories(made_stories, seed, words))
        self.text, self.made_bytes = text, len(made)
        self.pieces = build_vocabulary(f"{told}\n{made[: len(told)]}", vocabulary)
        numbers = {piece: number for number, piece in enumerate(self.pieces)}
        *self.training, self.held_out = (
            torch.tensor(encode(part, numbers), dtype=torch.int16)
            for part in (told, rename(told, seed), made, text.held_out.decode())
        )

    def find_starts(self, context: int) -> list[Tensor]:
        """Return the lines of each training text at which a context can begin."""
        return [(tokens[: -context - 1] == 0).nonzero().flatten() for tokens in self.training]


class Trainer:
    """A model in training, with everything needed to resume.

    Until the learning rates fall, training does not depend on the number of steps, so a checkpoint of a longer run can
    be resumed with fewer: the result is that of a run with this number from the start.

    Args:
        text: The training text and the held-out text.
        seed: Seed of the parameters and the batches.
        config: The sizes of the model.
        batch: Number of contexts of each training text in a step.
        context: Number of tokens in each.
    """

    def __init__(
        self,
        text: StoryText,
        seed: int = 0,
        config: GPTConfig = CONFIG,
        batch: tuple[int, ...] = BATCH,
        context: int = CONTEXT,
    ) -> None:
        torch.manual_seed(seed)
        self.text, self.batch, self.context = text, batch, context
        self.starts = text.find_starts(context)
        self.generator = torch.Generator().manual_seed(seed)
        self.model = GPT(config)
        matrices = [p for name, p in self.model.layers.named_parameters() if p.dim() == 2]
        for layer in self.model.layers:
            torch.nn.init.zeros_(layer.attention.out_proj.weight)
            torch.nn.init.zeros_(layer.mlp[3].weight)
        chosen = {id(matrix) for matrix in matrices}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        self.optimisers: list[tuple[float, torch.optim.Optimizer]] = [
            (MATRIX_RATE, Muon(matrices, MATRIX_RATE, weight_decay=0.05)),
            (OTHER_RATE, torch.optim.AdamW(others, OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0)),
        ]
        self.step, self.seconds = 0, [0.0, 0.0]
        self.history: list[dict[str, Any]] = []

    def draw_batch(self) -> Tensor:
        """Draw contexts that begin at random lines, (batch, context + 1)."""
        drawn = []
        for tokens, starts, count in zip(self.text.training, self.starts, self.batch, strict=True):
            chosen = starts[torch.randint(len(starts), (count, 1), generator=self.generator)]
            drawn.append(tokens[chosen + torch.arange(self.context + 1)].long())
        return torch.cat(drawn)

    def train_step(self, steps: int) -> float:
        """Make one step of a run.

        Args:
            steps: Number of steps of the whole run, which decides when the learning rates fall.

        Returns:
            The loss in nats.
        """
        factor = rate_factor(self.step, steps)
        tokens = self.draw_batch()
        loss = F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for rate, optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
            optimiser.step()
            optimiser.zero_grad()
        self.step += 1
        return loss.item()

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs."""
        return {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for _, optimiser in self.optimisers],
            "generator": self.generator.get_state(),
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Args:
            state: The result of `state`.
        """
        self.model.load_state_dict(state["model"])
        for (_, optimiser), saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.generator.set_state(state["generator"])
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]


def run(trainer: Trainer, steps: int, folder: Path) -> None:
    """Train to the end of a run, with checkpoints.

    Args:
        trainer: The model in training.
        steps: Number of steps of the whole run.
        folder: Folder for the checkpoints.
    """
    show = build_progress_bar(steps)
    clocks = time.perf_counter(), time.process_time()
    before = trainer.seconds
    while trainer.step < steps:
        figures: dict[str, Any] = {"step": trainer.step + 1, "loss": trainer.train_step(steps)}
        if trainer.step == 1 or trainer.step % MEASURE_STEPS == 0 or trainer.step == steps:
            trainer.model.eval()
            figures["held out"] = measure_bits(trainer.model, trainer.text, trainer.context, 6_000)
            trainer.model.train()
            trainer.history.append(round_figures(figures))
        spent = time.perf_counter() - clocks[0], time.process_time() - clocks[1]
        trainer.seconds = [old + new for old, new in zip(before, spent, strict=True)]
        if trainer.step % CHECKPOINT_STEPS == 0:
            torch.save(trainer.state(), folder / f"step-{trainer.step}.pt")
        show(trainer.step, figures)


@torch.no_grad()
def measure_bits(model: GPT, text: StoryText, context: int, limit: int | None = None) -> float:
    """Measure the loss of a model on the held-out text; each token is predicted from at least half a context.

    Args:
        model: The model.
        text: The text.
        context: Number of tokens in a context.
        limit: Number of tokens to read; None for all.

    Returns:
        Bits per byte.
    """
    tokens, half, total = text.held_out[:limit].long(), context // 2, 0.0
    for at in range(0, len(tokens) - 1, half):
        start = max(0, at - half)
        part = tokens[start : at + half + 1]
        loss = F.cross_entropy(model(part[None, :-1])[0], part[1:], reduction="none")
        total += float(loss[at - start :].sum())
    # The space that begins a line is not in the text.
    count = sum(len(text.pieces[token]) for token in tokens[1:]) - int((tokens[:-1] == 0).sum())
    return total / count / math.log(2)


def store(model: GPT, pieces: list[str], path: Path, about: dict[str, Any]) -> None:
    """Write the file that `regard.learn.TinyGPT` reads: matrices as int8 with a factor for each row, others as float16.

    Args:
        model: The trained model.
        pieces: The word pieces.
        path: The file.
        about: How it was trained and what was measured.
    """
    from safetensors.torch import save_file

    stored: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 2:
            factor = (tensor.abs().amax(1) / 127).clamp(min=2.0**-24).half()
            stored[name + FACTOR] = factor
            stored[name] = (tensor / factor[:, None].float()).round().clamp(-127, 127).to(torch.int8)
        else:
            stored[name] = tensor.half()
    metadata = {"config": asdict(model.config), "about": about, "pieces": pieces}
    save_file(stored, path, metadata={name: json.dumps(value) for name, value in metadata.items()})


def describe(model: GPT, trainer: Trainer, seed: int) -> dict[str, Any]:
    """Measure a trained model against other methods, and say how it was trained.

    Args:
        model: The model, with the weights as they are stored.
        trainer: The finished training.
        seed: Seed of the training.

    Returns:
        Data for the header of the file.
    """
    text = trainer.text.text
    return describe_run(trainer, seed) | {
        "bits": {
            "model": measure_bits(model, trainer.text, trainer.context),
            "zlib": baselines.measure_zlib(text),
            "xz": baselines.measure_xz(text),
            "counting": baselines.measure_ngrams(text),
        },
        "text": {
            "name": "TinyStories (CDLA-Sharing-1.0) and stories of a grammar",
            "train_bytes": len(text.train),
            "made_bytes": trainer.text.made_bytes,
            "held_out_bytes": len(text.held_out),
            "sha256": hashlib.sha256(b"\0".join(text)).hexdigest(),
        },
        "history": trainer.history,
    }


def describe_run(trainer: Trainer, seed: int) -> dict[str, Any]:
    """Return the settings of a run, its time, and the places of the data that `describe` measures.

    Args:
        trainer: The finished training.
        seed: Seed of the training.

    Returns:
        Data for the header of the file.
    """
    return {
        "task": "stories",
        "context": trainer.context,
        "steps": trainer.step,
        "seed": seed,
        "batch": sum(trainer.batch),
        "seconds": round(trainer.seconds[0]),
        "cpu_seconds": round(trainer.seconds[1]),
        "bits": {},
        "text": {},
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: The arguments; those of the process by default.
    """
    from examples.induction.pictures import plot_losses  # before training, in case the extra is missing

    parser = argparse.ArgumentParser(
        prog="python -m examples.stories.train", description=__doc__.split("\n")[0]
    )
    parser.add_argument("text", type=Path, help="folder with the training text")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    text = StoryText(read_stories(options.text), CONFIG.vocabulary, MADE_STORIES, options.seed)
    trainer = Trainer(text, options.seed)
    # A checkpoint from the time before the rates fall serves runs of any length.
    constant = (1 - DECAY) * options.steps
    saved = [(int(path.stem.split("-")[1]), path) for path in options.out.glob("step-*.pt")]
    usable = [(step, path) for step, path in saved if step <= constant]
    if usable:
        trainer.restore(torch.load(max(usable)[1]))
    run(trainer, options.steps, options.out)
    path = options.out / "stories.safetensors"
    store(trainer.model, trainer.text.pieces, path, describe_run(trainer, options.seed))
    stored, _ = load_stories(path)
    about = describe(stored, trainer, options.seed)  # the figures are about the stored weights
    store(trainer.model, trainer.text.pieces, path, about)
    plot_losses(load_stories(path)[0], options.out / "stories-loss.svg")
    print("\n".join(f"{name}: {value}" for name, value in about.items() if name != "history"))


if __name__ == "__main__":
    main()
