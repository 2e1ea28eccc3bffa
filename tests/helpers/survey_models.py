"""Models for the survey's tests, opened by name in processes of their own."""

from __future__ import annotations

from typing import Any

import torch

from examples.induction.model import Config, Model, load
from tests.helpers.survey_stub import suffer


def tiny(seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Model(Config(vocabulary=256, width=16, heads=2, layers=2))
    return model.eval().requires_grad_(False), ids


def other() -> tuple[Any, Any]:
    return tiny(1)


def text() -> tuple[Any, Any]:
    return load("text"), ids


def ids(text: str) -> list[int]:
    suffer(text)
    return list(text.encode())


def broken() -> Any:
    raise RuntimeError("these weights are nowhere")
