"""A long head in one process: correct where it is checked, in less than 1 GB of memory (failure mode 14).

The default is 24,000 tokens; scripts/nightly runs the guaranteed size, `--large 70000`.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from regard import attention, causal, reference
from regard.testing import assert_matches
from regard.testing.tolerance import epsilon

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokens(request):
    return request.config.getoption("--large")


@pytest.fixture(scope="module")
def found(tokens, tmp_path_factory):
    """Run examples/long_context.py in its own process, so that its memory can be measured."""
    path = tmp_path_factory.mktemp("large") / "found.npz"
    code = "import sys, numpy, long_context; numpy.savez(sys.argv[1], **long_context.main(int(sys.argv[2])))"
    own = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    env = {**own, "PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), str(ROOT / "src")])}
    subprocess.run([sys.executable, "-c", code, str(path), str(tokens)], check=True, env=env)
    with np.load(path) as archive:
        return {name: archive[name].copy() for name in archive.files}


@pytest.fixture(scope="module")
def some(found, tokens):
    """Compute the reference of the first 32 sampled rows, in float64 and in float32."""
    rows = found["sampled"][:32]
    mask = np.arange(tokens) <= rows[:, None]
    return rows, [
        reference.attention(found["query"][rows], found["key"], mask=mask, dtype=dtype)
        for dtype in (np.float64, np.float32)
    ]


def test_14_memory_grows_by_less_than_a_gigabyte(found):
    assert 0 < found["grown"] < 1000


def test_14_rows_lse_and_entropy_match_the_reference(found, some):
    rows, (exact, naive) = some
    drift = (
        4 * epsilon("float32") * (1 + np.abs(np.where(np.isfinite(exact.scores), exact.scores, 0)).max(-1))
    )
    assert_matches(
        found["rows"], exact.weights[:10], naive.weights[:10], dtype="float32", score_error=drift[:10, None]
    )
    assert_matches(found["lse"][rows], exact.lse, naive.lse, dtype="float32", magnitude=1 + np.abs(exact.lse))
    exact_entropy, naive_entropy = (
        -np.sum(x.weights * np.log(np.where(x.weights > 0, x.weights, 1)), axis=-1) for x in (exact, naive)
    )
    assert_matches(
        found["entropy"][rows],
        exact_entropy,
        naive_entropy,
        dtype="float32",
        score_error=drift,
        what="entropy",
    )


def test_14_top_keys_match_the_reference(found, some):
    _, (exact, _) = some
    assert np.array_equal(found["top"][:32], np.argsort(-exact.weights, axis=-1, kind="stable")[:, :8])


def test_14_received_is_the_sum_of_the_column(found, tokens):
    assert np.isclose(found["received"].sum(), tokens, rtol=1e-6)
    query, lse = found["query"].astype(np.float64), found["lse"].astype(np.float64)
    for j in (0, 1, 12_345, tokens - 1):
        weights = np.exp(query[j:] @ found["key"][j].astype(np.float64) / 8 - lse[j:])
        assert np.isclose(found["received"][j], weights.sum(), rtol=1e-5)


def test_14_coarse_cells_are_means_of_their_entries(found, tokens):
    coarse = found["coarse"]
    assert coarse.shape == (512, 512)
    cell = np.arange(tokens) * 512 // tokens
    for a, b in ((0, 0), (7, 3), (300, 299), (511, 0), (511, 511), (5, 400)):
        rows, columns = np.flatnonzero(cell == a), np.flatnonzero(cell == b)
        scores = found["query"][rows].astype(np.float64) @ found["key"][columns].astype(np.float64).T / 8
        weights = np.exp(scores - found["lse"][rows, None]) * (columns <= rows[:, None])
        assert np.isclose(coarse[a, b], weights.mean(), rtol=1e-5, atol=0), (a, b)


def test_the_million_tokens_example_matches_a_dense_matrix(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = runpy.run_path(str(ROOT / "examples" / "million.py"))["main"](8192)
    printed = capsys.readouterr().out
    assert "100%" in printed and "tile at 7,680, 0" in printed
    assert found["max_error"] < 1e-5
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(8192, 64, generator=generator) for _ in range(2))
    A = attention(query.double(), key.double(), mask=causal())
    torch.testing.assert_close(found["lse"].double(), A.lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["received"], A.sum(axis=-2).double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["coarse"], A.coarsen(512, "mean").double(), rtol=1e-4, atol=1e-9)


@pytest.mark.nightly
@pytest.mark.parametrize("side", ["bare kernel", "regard", "stored weights"])
def test_the_growth_benchmark_measures_each_side(side: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "growth.py"), "--one", side, "2048"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["tokens"] == 2048 and found["seconds"] > 0
    if side == "stored weights":
        assert found["grown_mb"] > 2048 * 2048 * 4 / 2**20
