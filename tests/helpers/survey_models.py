"""Models for the tests of the survey, loaded by name in worker processes."""

from __future__ import annotations

from typing import Any

import torch

from examples.induction.model import load
from regard.learn.gpt import GPT, GPTConfig
from tests.helpers.survey_stub import obey


def tiny(seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocabulary=256, width=16, heads=2, layers=2))
    return model.eval().requires_grad_(False), encode


def text() -> tuple[Any, Any]:
    return load("text"), encode


def encode(text: str) -> list[int]:
    obey(text)
    return list(text.encode())


def broken() -> Any:
    raise RuntimeError("these weights do not exist")
