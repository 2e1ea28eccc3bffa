"""Alarms: they name layer and head, precede the loss in runs that collapse, and stay silent in healthy ones."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

import regard
from regard.monitor import (
    AlarmError,
    AlarmWarning,
    DeadHead,
    EntropyCollapse,
    Monitor,
    NonFinite,
    SaturatedHead,
    ScoreGrowth,
)
from tests.helpers.training import Decoder, compute_loss, draw_batch, train


def row(step: int = 0, head: int = 0, **numbers: float) -> dict[str, object]:
    usual = {"max_score": 5.0, "entropy": 2.0, "first": 0.2, "saturated": 0.0, "nonfinite": 0, "rows": 9}
    return {"step": step, "module": "attn", "layer": 0, "head": head, **usual, **numbers}


def check(rule: object, *steps: dict[str, object]) -> list[tuple[str, int, float]]:
    history = {("attn", steps[-1]["head"]): list(steps)}
    return [(alarm.kind, alarm.head, alarm.value) for alarm in rule.check(list(steps[-1:]), history)]


def test_score_growth_by_value_and_by_trend() -> None:
    assert check(ScoreGrowth(), row(max_score=99.0)) == []
    assert check(ScoreGrowth(), row(max_score=101.0, head=3)) == [("score growth", 3, 101.0)]
    rising = [row(step, max_score=score) for step, score in enumerate([2.0, 15.0, 20.0, 31.0])]
    assert check(ScoreGrowth(), *rising) == [("score growth", 0, 31.0)]
    assert check(ScoreGrowth(), *rising[:3]) == []  # below the floor
    pause = [row(step, max_score=score) for step, score in enumerate([2.0, 20.0, 15.0, 31.0])]
    assert check(ScoreGrowth(), *pause) == []
    large = [row(step, max_score=score) for step, score in enumerate([4.0, 15.0, 20.0, 31.0])]
    assert check(ScoreGrowth(), *large) == []  # less than ten times its first value


def test_the_other_rules() -> None:
    start = row(entropy=2.0)
    assert check(EntropyCollapse(), start, row(1, entropy=0.19, max_score=31.0)) == [
        ("entropy collapse", 0, 0.19)
    ]
    unknown = row(entropy=math.nan)  # all rows of the first step had NaN
    assert check(EntropyCollapse(), unknown, start, row(1, entropy=0.19, max_score=31.0)) == [
        ("entropy collapse", 0, 0.19)
    ]
    assert check(EntropyCollapse(), unknown) == []
    assert check(EntropyCollapse(), start, row(1, entropy=0.19, max_score=29.0)) == []
    assert check(EntropyCollapse(), start, row(1, entropy=0.21, max_score=31.0)) == []
    assert check(SaturatedHead(), row(saturated=0.95, max_score=31.0)) == [("saturated head", 0, 0.95)]
    assert check(SaturatedHead(), row(saturated=0.95)) == []
    assert check(DeadHead(), row(first=0.999)) == [("dead head", 0, 0.999)]
    assert check(DeadHead(), row(first=0.99)) == []
    assert check(NonFinite(), row(nonfinite=2)) == [("NaN or inf", 0, 2.0)]


def run_with_nan(on_alarm: object) -> Monitor:
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = Monitor(model, every=1, on_alarm=on_alarm)
    with monitor:
        train(model, optimizer, 2)
        with torch.no_grad():
            model.blocks[1].query.weight[:4] = math.nan  # the first head of layer 1
        train(model, optimizer, 2)
    return monitor


def test_alarms_name_layer_and_head_and_are_reported_once() -> None:
    received = []
    monitor = run_with_nan(received.append)
    assert received == monitor.raised
    alarm = received[0]
    assert (alarm.kind, alarm.step, alarm.module, alarm.layer, alarm.head) == (
        "NaN or inf",
        2,
        "blocks.1",
        1,
        0,
    )
    assert (alarm.value, str(alarm)[:33]) == (3 * 23, "step 2, blocks.1, head 0: NaN or ")
    # In step 3 all weights are NaN: layer 0 is named, and no layer after it.
    assert {(alarm.step, alarm.layer) for alarm in received[1:]} == {(3, 0)}


def test_alarms_warn_or_raise() -> None:
    with pytest.warns(AlarmWarning, match="NaN or inf: ") as warned:
        run_with_nan("warn")
    assert str(warned[0].message).startswith("step 2, blocks.1, head 0: NaN or inf: 69 of 69 rows")
    with pytest.raises(AlarmError, match=r"NaN or inf in 'blocks\.1', head 0, at step 2") as raised:
        run_with_nan("raise")
    assert isinstance(raised.value, regard.RegardError)
    assert pickle.loads(pickle.dumps(raised.value)).alarms == raised.value.alarms


def run(seed: int, peak: float, warmup: int, steps: int, *, stops: bool) -> tuple[list[float], Monitor]:
    """Train on repeated random tokens with a learning rate that reaches `peak` at step `warmup`, and may go on rising.

    The run ends as soon as the loss is 10 % above its running minimum.
    """
    torch.manual_seed(seed)
    model = Decoder(layers=2, width=32, heads=4, kv_heads=4, n=32, vocabulary=32)
    optimizer = torch.optim.AdamW(model.parameters(), peak, weight_decay=0.0)
    losses: list[float] = []
    with Monitor(model, every=5, on_alarm=lambda alarm: None) as monitor:
        for step in range(steps):
            rate = peak * (step + 1) / warmup
            optimizer.param_groups[0]["lr"] = min(rate, peak) if stops else rate
            loss = compute_loss(model, draw_batch(1000 * seed + step, 12, 32, 32))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if losses[-1] > 1.1 * min(losses):
                break
    return losses, monitor


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 5))]
)
def test_alarms_precede_the_loss_in_runs_that_collapse(seed: int) -> None:
    losses, monitor = run(seed, 0.03, 150, 400, stops=False)
    assert losses[-1] > 1.1 * min(losses)
    collapse = [alarm.step for alarm in monitor.raised if alarm.kind == "entropy collapse"]
    assert monitor.raised[0].step <= len(losses) - 1 - 20
    assert collapse


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 5))]
)
def test_healthy_runs_raise_no_alarm(seed: int) -> None:
    losses, monitor = run(seed, 0.003, 20, 250, stops=True)
    assert monitor.raised == []
    assert losses[-1] < 0.97 * losses[0] and len(losses) == 250
