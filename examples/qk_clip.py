"""QK-clip with exact scores: train a small model with a learning rate that is too high, without and with it.

python -m examples.qk_clip [--rate 0.06] [--steps 300] [--limit 30] [--seeds 3] [--write]

After each step, `regard.monitor` has the largest score of every head, and `regard.monitor.qk_clip` rescales the query
and key weights of heads whose score exceeds the limit, as MuonClip does (Kimi K2, arXiv 2507.20534).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from regard.learn.gpt import GPT, GPTConfig
from regard.monitor import Monitor, qk_clip

FIGURES = Path(__file__).with_suffix(".json")


def train(rate: float, steps: int, limit: float | None, seed: int = 0) -> dict[str, Any]:
    """Train on random tokens that repeat after half the length, with a learning rate that keeps rising.

    Args:
        rate: The learning rate of the last step.
        steps: Number of training steps.
        limit: The largest score to allow; None for no limit.
        seed: Seed of weights and data.

    Returns:
        `losses` of all steps, `max_score` of all steps, and the number of `clips`.
    """
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocabulary=32, width=32, heads=4, layers=2, hidden=64))
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    losses, clips = [], 0
    with Monitor(model, every=1, alarms=()) as monitor:
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate * (step + 1) / steps
            half = torch.randint(32, (12, 16), generator=generator)
            tokens = torch.cat([half, half], 1)
            loss = F.cross_entropy(model(tokens)[:, :-1].mT, tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if limit is not None:
                clips += len(qk_clip(model, monitor, limit))
    largest = [max(monitor.history.filter(step=step).column("max_score")) for step in range(steps)]
    return {"losses": losses, "max_score": largest, "clips": clips}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=0.06)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--limit", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="store the figures, which the guide prints")
    options = parser.parse_args()
    rows = []
    for seed in range(options.seeds):
        row: dict[str, float] = {"seed": seed}
        for name, limit in (("without", None), ("with", options.limit)):
            run = train(options.rate, options.steps, limit, seed)
            row[f"loss {name}"] = sum(run["losses"][-20:]) / 20
            row[f"largest score {name}"] = max(run["max_score"])
            print(
                f"seed {seed}, {name:>7} QK-clip: loss {row[f'loss {name}']:.3f} over the last 20 steps, "
                f"smallest {min(run['losses']):.3f}, largest score {max(run['max_score']):.1f}, "
                f"{run['clips']} rescaled heads",
                flush=True,
            )
        rows.append(row)
    if options.write:
        settings = {"rate": options.rate, "steps": options.steps, "limit": options.limit}
        FIGURES.write_text(json.dumps({**settings, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
