"""WAV files for tests, written with the standard library."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np


def write_wav(path: Path, samples: np.ndarray, rate: int = 16_000, width: int = 2, channels: int = 1) -> Path:
    """Write samples from −1 to 1, (n,) or (n, channels), as integers of `width` bytes, and return the path."""
    scaled = np.round(np.asarray(samples, np.float64) * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    if width == 1:
        scaled += 128  # one byte has no sign
    data = np.repeat(scaled.reshape(-1, 1), channels, 1) if scaled.ndim == 1 else scaled
    with wave.open(str(path), "wb") as file:
        file.setnchannels(data.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data.astype("<i8").reshape(-1, 1).view(np.uint8)[:, :width].tobytes())
    return path


def make_tone(frequency: float, seconds: float, rate: int = 16_000) -> np.ndarray:
    """Make a sine of half the largest amplitude."""
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)
