"""WAV files of every width, resampling against the tones it should give, and files that are refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from regard import ArgumentError
from regard.models.audio import read_wav, resample
from tests.helpers.sounds import make_tone, write_wav


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_integers_of_every_width_are_read(tmp_path, width, channels):
    tone = make_tone(300, 0.01)
    samples, rate = read_wav(write_wav(tmp_path / "a.wav", tone, 8000, width, channels))
    assert rate == 8000 and samples.dtype == np.float32
    step = max(2.0 ** (1 - 8 * width), 2.0**-23)  # of the integers, and of float32
    np.testing.assert_allclose(samples, tone, atol=1.5 * step)


def test_channels_are_averaged(tmp_path):
    stereo = np.stack([np.full(10, 0.5), np.full(10, -0.25)], -1)
    samples, _ = read_wav(write_wav(tmp_path / "a.wav", stereo))
    np.testing.assert_allclose(samples, 0.125, atol=1e-4)


@pytest.mark.parametrize(("rate", "new_rate"), [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000)])
def test_a_tone_stays_the_tone(rate, new_rate):
    for frequency in (100.0, 1_000.0, 0.42 * min(rate, new_rate)):
        ours = resample(make_tone(frequency, 0.3, rate).astype(np.float32), rate, new_rate)
        expected = make_tone(frequency, 0.3, new_rate)
        assert abs(len(ours) - len(expected)) <= 1
        inner = slice(new_rate // 20, -new_rate // 20)  # the ends border on silence
        np.testing.assert_allclose(ours[: len(expected)][inner], expected[inner], atol=1e-5)


def test_what_the_new_rate_cannot_carry_is_removed():
    """Without a filter, 9 kHz would sound as 7 kHz."""
    ours = resample(make_tone(9_000, 0.3, 44_100).astype(np.float32), 44_100, 16_000)
    assert np.abs(ours[800:-800]).max() < 1e-5
    constant = resample(np.ones(4410, np.float32), 44_100, 16_000)
    np.testing.assert_allclose(constant[300:-300], 1.0, atol=1e-6)


def rewrite(path, offset, content):
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "No such file or directory"),
        (lambda path: path.write_bytes(b""), "it ends too early"),
        (lambda path: path.write_bytes(b"RIFF"), "expected a WAV file of uncompressed integers"),
        (lambda path: path.write_bytes(b"ID3 an mp3 file with more bytes"), "file does not start with RIFF id"),
        (lambda path: rewrite(path, 20, struct.pack("<H", 3)), "unknown format: 3"),
        (lambda path: rewrite(path, 24, struct.pack("<I", 0)), "0 per second; expected at least one sample"),
        (lambda path: rewrite(path, 24, struct.pack("<I", 2**32 - 1)), "4,294,967,295 per second"),
        (lambda path: rewrite(path, 34, struct.pack("<H", 64)), "samples of 64 bits"),
        (lambda path: rewrite(path, 22, struct.pack("<H", 0)), "bad # of channels"),
        (lambda path: write_wav(path, np.zeros(0)), "with 0 samples"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read(tmp_path, spoil, message):
    path = write_wav(tmp_path / "a.wav", make_tone(300, 0.01))
    spoil(path)
    with pytest.raises(ArgumentError) as caught:
        read_wav(path, "look")
    assert message in str(caught.value) and "ffmpeg" in str(caught.value)


def test_a_header_that_promises_more_than_the_file_has(tmp_path):
    path = write_wav(tmp_path / "a.wav", make_tone(300, 0.01))
    path.write_bytes(path.read_bytes()[:-21])
    try:
        samples, _ = read_wav(path)
    except ArgumentError:
        return
    assert 0 < len(samples) <= 160


@pytest.mark.parametrize("seed", range(20))
def test_random_headers_are_read_or_refused(tmp_path, seed):
    rng = np.random.default_rng(seed)
    path = write_wav(tmp_path / "a.wav", make_tone(300, 0.01))
    for _ in range(4):
        rewrite(path, int(rng.integers(0, 48)), bytes(rng.integers(0, 256, 1).tolist()))
    try:
        samples, rate = read_wav(path)
    except ArgumentError:
        return
    assert np.isfinite(samples).all() and 1_000 <= rate <= 768_000
