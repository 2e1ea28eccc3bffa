"""Peak memory of every measure under every mask: twice the tokens take at most twice the memory.

Each mask has a process of its own. The peak of the process is reset before each measure, so the memory of torch, NumPy
and the compiled pass counts. A single bit for each entry of the matrix would be seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.nightly import keep_in_ci

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/clear_refs").exists(), reason="needs the peak memory that Linux counts"
    ),
]

MASKS = (
    "no mask", "causal", "window", "windows and a first key", "padding", "prefix", "documents", "random documents",
    "a function", "edges",
)  # fmt: skip
MEASURES = (
    "lse", "output", "entropy", "distance", "position", "spread", "mass", "mass of documents", "received", "sum",
    "coarse", "max", "column max", "max score", "topk 8", "topk 1024", "contribution",
)  # fmt: skip

PROGRAM = r"""
import ctypes, gc, json, sys
import numpy as np, torch, regard
from regard import masks, measures
from regard.masks import document, first

torch.set_num_threads(1)

def read(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0]) << 10

def make_mask(name, n):
    ids = np.random.default_rng(0).integers(0, 50, n)
    return {
        "no mask": lambda: None, "causal": regard.causal, "window": lambda: regard.sliding_window(100),
        "windows and a first key": lambda: regard.sliding_window(100) | first(1),
        "padding": lambda: regard.padding([n - 100]), "prefix": lambda: masks.prefix(n // 2),
        "documents": lambda: document(np.sort(ids)), "random documents": lambda: document(ids) & regard.causal(),
        "a function": lambda: regard.causal() & regard.mask(lambda b, h, q, k: (q * k) % 7 != 3),
        "edges": lambda: ~masks.between(queries=slice(0, n, 3), keys=slice(0, n, 5)),
    }[name]()

def make_measure(name, n, value):
    ids = np.random.default_rng(1).integers(0, 9, n)
    return {
        "output": lambda: measures.Output(value), "entropy": measures.Entropy, "distance": measures.Distance,
        "position": measures.Position, "spread": measures.Spread, "mass": lambda: measures.Mass(first(4)),
        "mass of documents": lambda: measures.Mass(document(ids)), "received": measures.Received,
        "sum": measures.Sum, "coarse": lambda: measures.Coarse(64, "mean"), "max": measures.MaxWeight,
        "column max": lambda: measures.MaxWeight(-2), "max score": measures.MaxScore,
        "topk 8": lambda: measures.TopK(8), "topk 1024": lambda: measures.TopK(1024),
        "contribution": lambda: measures.Contribution(8, value.norm(dim=-1)),
    }[name]()

def find_peak(mask, name, n):
    query, key, value = torch.randn(3, 1, 1, n, 8, generator=torch.Generator().manual_seed(0)).unbind()
    matrix = regard.attention(query, key, mask=make_mask(mask, n))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = read("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    result = matrix.lse if name == "lse" else matrix.measure(found=make_measure(name, n, value))
    return read("VmHWM") - before

mask, names, lengths = sys.argv[1], sys.argv[2].split(","), [int(n) for n in sys.argv[3].split(",")]
peaks = {}
for name in names:
    find_peak(mask, name, 2048)  # first-call imports and caches
    peaks[name] = [find_peak(mask, name, n) for n in lengths]
print(json.dumps(peaks))
"""


def find_peaks(mask: str, names: tuple[str, ...], *lengths: int) -> dict[str, list[int]]:
    """Return the bytes that a process grows by at most, for each measure and length."""
    command = [sys.executable, "-c", PROGRAM, mask, ",".join(names), ",".join(map(str, lengths))]
    # Otherwise glibc keeps freed arrays of many sizes, which then count although nothing uses them.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    peaks: dict[str, list[int]] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    )
    return peaks


def find_superlinear(peaks: dict[str, list[int]], *lengths: int) -> dict[str, list[int]]:
    """Return the measures whose memory more than doubles with the tokens.

    The buffers of a pass do not grow with the tokens, but a longer text may be another pass's, so they are allowed for:
    a little less than what a bit for each entry takes at a length beyond twice the bits at half of it.
    """
    slacks = [n * n // 16 * 15 // 16 for n in lengths]
    return {
        name: found
        for name, found in peaks.items()
        if any(
            after > 2 * before + slack
            for before, after, slack in zip(found, found[1:], slacks[1:], strict=False)
        )
    }


@pytest.mark.parametrize(
    ("mask", "names"),
    keep_in_ci(
        [("causal", ("topk 1024",)), ("random documents", ("lse", "entropy"))],
        ("random documents", ("lse", "entropy")),
    ),
)
def test_14_twice_the_tokens_take_twice_the_memory(mask: str, names: tuple[str, ...]) -> None:
    lengths = (8192, 16_384)
    assert not find_superlinear(find_peaks(mask, names, *lengths), *lengths)


@pytest.mark.nightly
@pytest.mark.parametrize("mask", MASKS)
def test_14_memory_of_every_measure_grows_linearly(mask: str) -> None:
    lengths = (8192, 16_384, 32_768)
    assert not find_superlinear(find_peaks(mask, MEASURES, *lengths), *lengths)


@pytest.mark.parametrize("lengths", [(8192, 16_384), (16_384, 32_768)])
def test_the_limit_detects_a_bit_for_each_entry(lengths: tuple[int, ...]) -> None:
    assert find_superlinear({"bits": [n * n // 8 for n in lengths]}, *lengths)
    assert not find_superlinear({"numbers": [n * 8000 for n in lengths]}, *lengths)
