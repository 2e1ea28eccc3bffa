"""Test the alarms of `regard.monitor`: runs that are healthy, and runs that are driven to divergence.

python -m examples.alarms [--set tuning] [--jobs 2] [--write]

Every run trains a small decoder for 300 steps and is monitored every fifth step. `alarm_runs.json` lists the runs: the
rules were tuned on the set "tuning", and the guide shows the set "reported". A run is

- healthy if the mean loss of its last 20 steps is below 0.8 × the first loss, and the loss never doubles.
- diverging if the loss doubles: the mean of 5 steps exceeds 2 × the lowest such mean so far, or is NaN.

A diverging run is flagged if its first alarm comes after the fault began and before the loss has doubled. The layer is
right if the first step with alarms names it. It is the layer that the run manipulates, if there is one. Otherwise it is
the first layer whose largest score has grown by 30, which eager attention in float64 measures in every step.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.monitor import Alarm, AlarmRule, Monitor
from regard.monitor.alarms import DEFAULT_ALARMS

RUNS = Path(__file__).with_name("alarm_runs.json")
FIGURES = Path(__file__).with_suffix(".json")
STEPS, EVERY, BATCH, LENGTH, VOCABULARY = 300, 5, 16, 32, 32
WINDOW, GROWTH, SHARE = 5, 30.0, 0.8


@dataclass(frozen=True)
class Config:
    """A run.

    Args:
        seed: Seed of weights and data.
        way: "healthy", or how the run is driven to divergence:
            "rising rate": from step `start` on, the learning rate is multiplied by `growth` in each step.
            "no norms": like "rising rate", in a model without norms.
            "fast layer": like "rising rate", for the parameters of `layer` only.
            "fast queries": like "fast layer", for the query and key projections of `layer` only.
            "wrong gradient": like "fast queries", and the gradient has the wrong sign.
            "growing weights": from step `start` on, the projections of `layer` are multiplied by `growth` in each step.
        layers: Number of layers.
        width: Width of the model.
        heads: Number of heads.
        post_norm: Whether norms follow the residual connections instead of preceding attention and MLP.
        optimizer: "adamw", "adam" with beta2 of 0.95, "rmsprop", or "sgd" with momentum 0.9.
        rate: The largest learning rate.
        warmup: Number of steps in which the rate rises to `rate`.
        cosine: Whether the rate falls to 0 after the warm-up.
        start: First step of the fault.
        layer: The layer with the fault; None if the fault concerns all layers.
        growth: Factor of each step of the fault.
    """

    seed: int
    way: str = "healthy"
    layers: int = 2
    width: int = 32
    heads: int = 4
    post_norm: bool = False
    optimizer: str = "adamw"
    rate: float = 3e-3
    warmup: int = 20
    cosine: bool = False
    start: int = 0
    layer: int | None = None
    growth: float = 1.0


class Layer(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads, self.is_post_norm = config.width, config.heads, config.post_norm
        make_norm = nn.Identity if config.way == "no norms" else nn.RMSNorm
        self.norm1, self.norm2 = make_norm(width), make_norm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.scale = (width // config.heads) ** -0.5

    def project(self, x: Tensor) -> list[Tensor]:
        """Return query, key and value, each (batch, heads, n, head_dim)."""
        x = x if self.is_post_norm else self.norm1(x)
        projections = self.query, self.key, self.value
        return [project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in projections]

    def forward(self, x: Tensor) -> Tensor:
        output = F.scaled_dot_product_attention(*self.project(x), is_causal=True, scale=self.scale)
        attended = x + self.out(output.transpose(1, 2).flatten(2))
        if self.is_post_norm:
            attended = self.norm1(attended)
            return self.norm2(attended + self.mlp(attended))
        return attended + self.mlp(self.norm2(attended))


class Decoder(nn.Module):
    """A causal language model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(n, config.width) for n in (VOCABULARY, LENGTH))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.Identity() if config.way == "no norms" else nn.RMSNorm(config.width)
        self.unembed = nn.Linear(config.width, VOCABULARY, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.unembed(self.norm(x))


def draw_tokens(generator: torch.Generator) -> Tensor:
    """Draw a batch in which each token is known from the token two before it, except one in ten, which is random."""
    follows = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(7))
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    is_random = torch.rand(BATCH, LENGTH, generator=generator) < 0.1
    for i in range(2, LENGTH):
        tokens[:, i] = torch.where(is_random[:, i], tokens[:, i], follows[tokens[:, i - 2]])
    return tokens


def measure_scores(model: Decoder, tokens: Tensor) -> list[float]:
    """Return the largest score of each layer, from eager attention in float64."""
    model = copy.deepcopy(model).double()
    largest = []
    with torch.no_grad():
        x = model.embed(tokens)
        for layer in model.layers:
            query, key, _ = layer.project(x)
            scores = query @ key.mT * layer.scale
            is_masked = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            largest.append(scores.masked_fill(is_masked, -math.inf).max().item())
            x = layer(x)
    return largest


def find_fault(model: Decoder, config: Config) -> list[nn.Parameter]:
    """Return the parameters that the fault manipulates."""
    if config.layer is None:
        return []
    layer = model.layers[config.layer]
    query_key = [layer.query.weight, layer.key.weight]
    if config.way in ("fast queries", "wrong gradient"):
        return query_key
    return (
        list(layer.parameters())
        if config.way == "fast layer"
        else [*query_key, layer.value.weight, layer.out.weight]
    )


def make_optimizer(model: Decoder, config: Config) -> torch.optim.Optimizer:
    """Return the optimiser; the last group has query and key of the layer with the fault."""
    fault = find_fault(model, config)
    rest = [p for p in model.parameters() if not any(p is other for other in fault)]
    groups = [{"params": rest}, {"params": fault}] if fault else [{"params": rest}]
    if config.optimizer == "adam":
        return torch.optim.Adam(groups, config.rate, betas=(0.9, 0.95))
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, config.rate, momentum=0.9)
    return {"adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}[config.optimizer](groups, config.rate)


def apply_fault(model: Decoder, optimizer: torch.optim.Optimizer, config: Config, step: int) -> None:
    """Set the learning rate of a step, and apply the fault if it has begun."""
    rate = config.rate * min(1.0, (step + 1) / config.warmup)
    if config.cosine and step >= config.warmup:
        rate *= (1 + math.cos(math.pi * (step - config.warmup) / (STEPS - config.warmup))) / 2
    for group in optimizer.param_groups:
        group["lr"] = rate
    if config.way == "healthy" or step < config.start:
        return
    if config.way == "growing weights":
        with torch.no_grad():
            for parameter in find_fault(model, config):
                parameter *= config.growth
        return
    group = optimizer.param_groups[-1]
    group["lr"] *= config.growth ** (step - config.start + 1)
    if config.way == "wrong gradient":
        group["maximize"] = True


def find_doubling(losses: Sequence[float]) -> int | None:
    """Return the first step at which the loss has doubled; None if it never does."""
    lowest = math.inf
    for step in range(len(losses)):
        mean = sum(losses[max(step - WINDOW + 1, 0) : step + 1]) / min(step + 1, WINDOW)
        if not mean <= 2 * lowest:
            return step
        lowest = min(lowest, mean)
    return None


def train(config: Config, rules: Sequence[AlarmRule] = DEFAULT_ALARMS) -> dict[str, Any]:
    """Train a run, and return what happened; a diverging run ends when its loss has doubled."""
    torch.manual_seed(config.seed)
    model = Decoder(config)
    optimizer = make_optimizer(model, config)
    generator = torch.Generator().manual_seed(config.seed)
    losses: list[float] = []
    alarms: list[Alarm] = []
    right, largest_first = config.layer, None
    with Monitor(model, EVERY, alarms=rules, on_alarm=alarms.append, optimizer=optimizer) as monitor:
        for step in range(STEPS):
            apply_fault(model, optimizer, config, step)
            tokens = draw_tokens(generator)
            if config.way != "healthy" and right is None:
                largest = measure_scores(model, tokens)
                largest_first = largest_first or largest
                growth = [now - first for now, first in zip(largest, largest_first, strict=True)]
                right = growth.index(max(growth)) if max(growth) >= GROWTH else None
            loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            doubled = find_doubling(losses)
            if config.way != "healthy" and doubled is not None:
                break
    flagged = alarms[0].step if alarms else None
    named = sorted({alarm.layer for alarm in alarms if alarm.step == flagged})
    row = {
        "first loss": losses[0],
        "last loss": sum(losses[-20:]) / len(losses[-20:]),
        "largest score": max(monitor.history.column("max_score")),
        "doubled": doubled,
        "flagged": flagged,
        "rules": sorted({alarm.kind for alarm in alarms if alarm.step == flagged}),
        "named": named,
        "right layer": right,
    }
    if config.way == "healthy":
        row["valid"] = doubled is None and row["last loss"] < SHARE * losses[0]
    else:
        row["valid"] = doubled is not None
    return row


def load_runs(name: str) -> list[Config]:
    """Return the runs of a set, "tuning" or "reported"."""
    return [Config(**values) for values in json.loads(RUNS.read_text())[name]]


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Count the runs of each way: all, valid ones (healthy, or diverging), and those with an alarm, before the loss has
    doubled, that names the right layer.
    """
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        count = counts.setdefault(row["way"], dict.fromkeys(("runs", "valid", "flagged", "right"), 0))
        is_flagged = row["flagged"] is not None
        if row["way"] != "healthy":
            is_flagged = is_flagged and row["valid"] and row["start"] <= row["flagged"] < row["doubled"]
        is_right = is_flagged and row["right layer"] in row["named"]
        for name, value in zip(count, (True, row["valid"], is_flagged, is_right), strict=True):
            count[name] += value
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=("tuning", "reported"), default="reported")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--write", action="store_true", help="store the figures, which the guide prints")
    options = parser.parse_args()
    configs, rows = load_runs(options.set), []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, spawn, torch.set_num_threads, (1,)) as pool:
        for config, row in zip(configs, pool.map(train, configs), strict=True):
            rows.append({**asdict(config), **row})
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(summarise(rows)))
    if options.write:
        FIGURES.write_text("[" + ",\n".join(map(json.dumps, rows)) + "]\n")


if __name__ == "__main__":
    main()
