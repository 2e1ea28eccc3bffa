"""Caches that lose keys or values: every faulty step is reported, and no row is dropped."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import regard  # noqa: E402
from regard import ArgumentError  # noqa: E402

PREFILL, STEPS = 10, 6


class CachedLayer(nn.Module):
    """Causal self-attention with a key-value cache that has one of several faults."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.qkv, self.fault, self.cache, self.steps = nn.Linear(16, 48), fault, None, 0

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.cache is not None:
            old_key, old_value = self.cache
            if self.fault == "overwrites" or (self.fault == "off by one" and self.steps == 0):
                old_key, old_value = old_key[..., :-1, :], old_value[..., :-1, :]
            if self.fault == "skips":
                zeros = torch.zeros_like(key)
                key, value = torch.cat([zeros, key], -2), torch.cat([zeros, value], -2)
            if self.fault == "values unwritten":
                value = torch.zeros_like(value)
            self.steps += 1
            key = torch.cat([old_key, key], -2)
            value = old_value if self.fault == "values missing" else torch.cat([old_value, value], -2)
            if self.fault == "omits":
                self.cache = key, value
                key, value = old_key, old_value
                return F.scaled_dot_product_attention(query, key, value)
        first = self.cache is None
        self.cache = key, value
        return F.scaled_dot_product_attention(query, key, value, is_causal=first)


def record(fault: str):
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": CachedLayer(fault)})
    x = torch.randn(1, PREFILL + STEPS, 16)
    with torch.no_grad(), regard.watch(model) as recording:
        model["layer"](x[:, :PREFILL])
        for i in range(PREFILL, PREFILL + STEPS):
            model["layer"](x[:, i : i + 1])
    return recording


def test_a_healthy_cache_is_one_matrix_without_findings():
    recording = record("")
    assert recording["layer"].shape == (1, 2, 16, 16)
    assert not recording.diagnose().by_severity("error")


@pytest.mark.parametrize(
    ("fault", "kind", "calls"),
    [
        ("overwrites", "keys do not grow", "calls 1–6"),
        ("off by one", "keys do not grow", "call 1"),
        ("omits", "keys do not grow", "call 1"),
        ("skips", "keys skipped", "calls 1–6"),
    ],
)
def test_steps_that_do_not_add_their_keys_are_reported_and_kept(fault, kind, calls):
    recording = record(fault)
    with pytest.raises(ArgumentError, match=f"call 1: {kind}"):
        recording["layer"]
    assert sum(call.query.shape[-2] for call in recording.calls("layer")) == PREFILL + STEPS
    (finding,) = recording.diagnose().by_severity("error")
    assert (finding.kind, finding.module, finding.layer) == (f"cache: {kind}", "layer", 0)
    assert finding.evidence["in"] == calls


@pytest.mark.parametrize("fault", ["values missing", "values unwritten"])
def test_values_that_are_not_appended_are_reported(fault):
    recording = record(fault)
    assert recording["layer"].shape == (1, 2, 16, 16)
    (finding,) = recording.diagnose().by_severity("error")
    assert finding.kind == "cache: values missing" and finding.evidence["in"] == "calls 1–6"


def test_a_saved_recording_keeps_the_faults_of_its_cache(tmp_path):
    pytest.importorskip("safetensors")
    recording = record("overwrites")
    recording.save(tmp_path / "recording.safetensors")
    again = regard.load_recording(tmp_path / "recording.safetensors")
    assert again.diagnose().by_severity("error") == recording.diagnose().by_severity("error")


def test_cross_attention_whose_keys_are_computed_again_is_no_fault():
    class Attention(nn.Module):
        def forward(self, query, key):
            return F.scaled_dot_product_attention(query, key, key)

    layer, key = Attention(), torch.randn(1, 2, 11, 8)
    with regard.watch(layer) as recording:
        for length in (3, 1, 1):
            layer(torch.randn(1, 2, length, 8), key.clone())
    assert not recording.diagnose().by_severity("error")
