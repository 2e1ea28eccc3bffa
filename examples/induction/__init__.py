"""Two small models built from `regard.nn`, and how they were trained; `load(name)` returns the stored ones.

>>> from examples.induction import load
>>> load().config
GPTConfig(vocabulary=128, width=64, heads=4, layers=2, hidden=0, activation='gelu')
"""

from __future__ import annotations

from examples.induction.data import RepeatBatch, decode, draw_repeats, encode
from examples.induction.model import load, save
from regard.learn.gpt import GPT

__all__ = ["RepeatBatch", "decode", "draw_repeats", "encode", "load", "load_text", "save"]


def load_text() -> GPT:
    """Load the text model, for commands that take a function name: `regard heads examples.induction:load_text`."""
    return load("text")
