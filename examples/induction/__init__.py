"""Two small models of `regard.nn` and how they were trained; `load(name)` gives the kept ones.

>>> from examples.induction import load
>>> load().config
Config(vocabulary=128, width=64, heads=4, layers=2, hidden=0)
"""

from __future__ import annotations

from examples.induction.data import Repeats, decode, encode, repeats
from examples.induction.model import Config, Model, load, save

__all__ = ["Config", "Model", "Repeats", "decode", "encode", "load", "repeats", "save", "text"]


def text() -> Model:
    """`load("text")`, for who takes the name of a function: `regard heads examples.induction:text`."""
    return load("text")
