"""Read sound from WAV files, and resample it to the rate that a model reads."""

from __future__ import annotations

import math
import os
import wave
from pathlib import Path

import numpy as np

from regard.errors import ArgumentError
from regard.types import Array

# The filter of `resample`: zero crossings on each side, its steepness, and the share of the band that it passes.
ZERO_CROSSINGS, KAISER_BETA, PASS_BAND = 48, 12.0, 0.95
RATES = (1_000, 768_000)  # samples per second that a file may state


def read_wav(path: str | Path, operation: str = "read_wav") -> tuple[Array, int]:
    """Read a WAV file with the standard library; channels are averaged.

    Returns:
        The samples, (n,), float32 from −1 to 1, and their rate per second.
    """
    try:
        with wave.open(str(path), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            # The header may state more than the file has, and memory would be reserved for it.
            present = os.path.getsize(path) // max(1, width * channels)
            data = file.readframes(min(file.getnframes(), present))
    except (OSError, EOFError, wave.Error, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentError(
            operation,
            received=f"{str(path)!r} ({reason or 'it ends too early'})",
            expected="a WAV file of uncompressed integers (PCM)",
            hint="Check the path, or convert the file: ffmpeg -i FILE -ac 1 -c:a pcm_s16le sound.wav.",
        ) from error
    count = len(data) // (width * channels)
    if not count or width > 4 or not RATES[0] <= rate <= RATES[1]:
        raise ArgumentError(
            operation,
            received=f"{str(path)!r} with {count:,} samples of {8 * width} bits, {rate:,} per second",
            expected=f"at least one sample of at most 32 bits, and {RATES[0]:,} to {RATES[1]:,} per second",
            hint="Convert it: ffmpeg -i FILE -ac 1 -c:a pcm_s16le sound.wav.",
        )
    raw = np.frombuffer(data, np.uint8, count * channels * width).reshape(-1, width)
    if width == 1:
        samples = raw[:, 0].astype(np.float64) - 128  # one byte has no sign
    else:
        # Place the bytes at the upper end of 32 bits, so that the sign is in its place.
        padded = np.zeros((len(raw), 4), np.uint8)
        padded[:, 4 - width :] = raw
        samples = padded.view("<i4")[:, 0] / 2 ** (8 * (4 - width))
    mono = samples.reshape(count, channels).mean(1) / 2 ** (8 * width - 1)
    return mono.astype(np.float32), rate


def resample(samples: Array, rate: int, new_rate: int) -> Array:
    """Resample sound by a windowed sinc filter, which removes what the new rate cannot carry.

    Frequencies up to 0.42 of the lower rate pass unchanged.

    Args:
        samples: (n,).
        rate: Samples per second.
        new_rate: Samples per second of the result.

    Returns:
        (⌈n · new_rate / rate⌉,), float32.

    >>> resample(np.ones(8, np.float32), 16000, 16000).tolist() == [1.0] * 8
    True
    """
    if rate == new_rate:
        return samples
    divisor = math.gcd(rate, new_rate)
    up, down = new_rate // divisor, rate // divisor
    count = -(-len(samples) * up // down)
    cutoff = PASS_BAND * min(1.0, up / down)  # relative to half the old rate
    reach = math.ceil(ZERO_CROSSINGS / cutoff)
    padded = np.pad(samples.astype(np.float64), (reach, reach + down + 1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    resampled = np.empty(count)
    offsets = np.arange(-reach, reach + 1)
    # Outputs that lie equally between two inputs share a filter: there are `up` of them.
    for phase in range(min(up, count)):
        position = phase * down / up
        first = math.floor(position)
        distance = offsets - (position - first)
        window = np.i0(KAISER_BETA * np.sqrt(np.clip(1 - (distance / (reach + 1)) ** 2, 0, None)))
        taps = np.sinc(cutoff * distance) * window
        rows = windows[first::down][: -(-(count - phase) // up)]
        resampled[phase::up] = rows @ (taps / taps.sum())  # a constant stays what it is
    return resampled.astype(np.float32)
