"""Caches that lose keys or values: every faulty step is reported, and no row is dropped."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import regard  # noqa: E402
from regard import ArgumentError  # noqa: E402
from regard.capture.cache_store import RowSteps  # noqa: E402

PREFILL, STEPS = 10, 6


class CachedLayer(nn.Module):
    """Causal self-attention with a key-value cache that has one of several faults."""

    def __init__(self, fault: str, healthy: int = 0) -> None:
        super().__init__()
        self.qkv, self.late_fault, self.cache, self.steps = nn.Linear(16, 48), fault, None, 0
        self.healthy = healthy  # steps before the fault

    @property
    def fault(self):
        return self.late_fault if self.steps >= self.healthy else ""

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
            fault = self.fault
            self.steps += 1
            key = torch.cat([old_key, key], -2)
            value = old_value if fault == "values missing" else torch.cat([old_value, value], -2)
            if fault == "omits":
                self.cache = key, value
                key, value = old_key, old_value
                return F.scaled_dot_product_attention(query, key, value)
        first = self.cache is None
        self.cache = key, value
        return F.scaled_dot_product_attention(query, key, value, is_causal=first)


def record(fault: str, healthy: int = 0, **options):
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": CachedLayer(fault, healthy).eval()})
    x = torch.randn(1, PREFILL + STEPS, 16)
    with torch.no_grad(), regard.watch(model, **options) as recording:
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


@pytest.mark.parametrize("healthy", range(1, STEPS))
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("overwrites", "keys do not grow"),
        ("omits", "keys do not grow"),
        ("skips", "keys skipped"),
        ("values unwritten", "values missing"),
    ],
)
def test_a_fault_after_healthy_steps_is_reported_in_its_call(fault, kind, healthy):
    recording = record(fault, healthy)
    (finding,) = recording.diagnose().by_severity("error")
    assert finding.kind == f"cache: {kind}"
    assert finding.evidence["in"].split("–")[0].split()[-1] == str(healthy + 1)


def test_the_short_way_of_a_step_records_what_the_long_one_does(monkeypatch):
    rows = []
    matches = RowSteps.matches
    monkeypatch.setattr(RowSteps, "matches", lambda *args: rows.append(matches(*args)) or rows[-1])
    (short,) = record("").calls("layer")
    assert rows.count(True) == STEPS - 1  # the first step is checked in every respect
    rows.clear()
    (long,) = record("", copy=True).calls("layer")
    assert not rows
    assert short.steps == long.steps == STEPS + 1 and short.mask == long.mask == regard.causal()
    assert short.query_offset == long.query_offset and short.nbytes == long.nbytes
    for name in ("query", "key", "lse"):
        assert torch.equal(getattr(short, name), getattr(long, name)), name


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
