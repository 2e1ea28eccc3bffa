"""The model of children's stories that `regard.explore.model` shows, and how it was trained.

>>> from examples.stories import load_stories
>>> load_stories().config
Config(vocabulary=256, width=128, heads=4, layers=4, hidden=512, activation='relu2')
"""

from __future__ import annotations

from pathlib import Path

from examples.induction.model import Model, load
from regard.learn import tiny_gpt

CHECKPOINT = Path(tiny_gpt.__file__).parent / tiny_gpt.STORED_MODEL


def load_stories() -> Model:
    """Load the stored model, also for commands such as `regard look examples.stories:load_stories`."""
    return load(CHECKPOINT)
