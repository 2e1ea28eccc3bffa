"""An image that is drawn here."""

from __future__ import annotations

import numpy as np


def draw_image(height: int = 32, width: int = 48) -> np.ndarray:
    """Draw a disc and a square on a gradient, (height, width, 3), uint8."""
    y, x = np.mgrid[:height, :width]
    image = np.stack([40 + 150 * x / width, 70 + 100 * y / height, 190 - 120 * x / width], -1)
    disc = (y - 0.35 * height) ** 2 + (x - 0.3 * width) ** 2 < (0.22 * min(height, width)) ** 2
    image[disc] = (250, 210, 60)
    image[round(0.55 * height) : round(0.9 * height), round(0.6 * width) : round(0.85 * width)] = (
        200,
        40,
        50,
    )
    return image.astype(np.uint8)
