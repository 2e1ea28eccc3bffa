"""`regard profile`: kernels, times and memory of each variant."""

from __future__ import annotations

import json

import pytest

import regard
from regard.cli.machine_commands import ProfileSize, parse_mask


def test_profile_reports_kernels_times_and_memory(run):
    pytest.importorskip("torch")
    out, err = run(
        "profile", "-n", "64", "-n", "96", "--rounds", "2", "--heads", "2", "--mask", "window:8", "--json"
    )
    record = json.loads(out)
    assert err == "" and [size["kv_len"] for size in record["sizes"]] == [64, 96]
    for size in record["sizes"]:
        sdpa, lazy, measured, stored = size["variants"]
        assert sdpa["name"] == "F.scaled_dot_product_attention" and "attn_mask" in sdpa["kernel"]
        assert lazy["kernel"].startswith("torch: flash on CPU") and "entropy" in measured["kernel"]
        for variant in (sdpa, lazy, measured, stored):
            low, high = variant["quartile_seconds"]
            assert 0 < low <= variant["median_seconds"] <= high
    assert record["growth_exponents"].keys() == {
        variant["name"] for variant in record["sizes"][0]["variants"]
    }
    out, _ = run("profile", "-n", "64", "--rounds", "1", "--value-dim", "32")
    assert (
        "math kernel, which stores all weights. The fused kernel requires value_dim 32 to equal head_dim 64."
        in out
    )


@pytest.mark.parametrize("queries", [1, 24])
@pytest.mark.parametrize("mask", ["none", "causal", "window:5", "padding:7", "documents:4"])
def test_parse_mask_returns_the_visible_share(mask, queries):
    size = ProfileSize(1, 1, 1, queries, 24, 8, 8, mask, "float32")
    if mask.startswith("documents") and queries != 24:
        with pytest.raises(regard.ArgumentError):
            parse_mask(size)
        return
    parsed, share = parse_mask(size)
    assert share == (1.0 if parsed is None else pytest.approx(parsed.to_dense(queries, 24).mean()))
