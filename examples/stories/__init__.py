"""The model of children's stories that `regard.explore.model` shows, and how it was trained.

>>> from examples.stories import load_stories
>>> load_stories().config
Config(vocabulary=2560, width=256, heads=8, layers=4, hidden=768, activation='relu2')
"""

from __future__ import annotations

from pathlib import Path

import torch

from examples.induction.model import Config, Model
from regard.learn import TinyGPT, tiny_gpt

CHECKPOINT = Path(tiny_gpt.__file__).parent / tiny_gpt.STORED_MODEL


def load_stories(path: Path | None = None) -> Model:
    """Load a model in PyTorch, also for commands such as `regard look examples.stories:load_stories`.

    Args:
        path: File that `train` wrote. Default: the stored model.

    Returns:
        The model in float32, in which the stored numbers are exact, in eval mode and without gradients.
    """
    stored = TinyGPT(path)
    model = Model(Config(**stored.config))
    model.load_state_dict({name: torch.tensor(array).float() for name, array in stored.parameters.items()})
    model.about = dict(stored.about)
    return model.eval().requires_grad_(False)
