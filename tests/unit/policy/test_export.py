"""`policy.export`: files that other tools read, and refusals where a format cannot say what the policy says."""

from __future__ import annotations

import http.server
import json
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from regard.errors import ArgumentError, ArgumentTypeError
from regard.policy import FULL, CachePolicy

LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")
ABOUT = {"model": {"name": "tiny"}, "num_heads": 4}


def make(windows, sinks=0) -> CachePolicy:
    shape = np.broadcast_shapes(np.shape(windows), (2, 2))
    return CachePolicy(np.broadcast_to(windows, shape), np.broadcast_to(sinks, shape), LAYERS, ABOUT)


def test_json_is_the_file_of_save(tmp_path):
    policy = make([[FULL, 5], [7, 9]], 2)
    assert CachePolicy.load(policy.export(tmp_path / "policy.json", "json")) == policy


def test_duo_attention(tmp_path):
    folder = make([[FULL, 256], [256, FULL]], 128).export(tmp_path / "pattern", "duo_attention")
    # As its readers do.
    heads = np.loadtxt(folder / "full_attention_heads.tsv", dtype=float, delimiter="\t")
    assert heads.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    config = json.loads((folder / "config.json").read_text())
    assert config == {"model_name": "tiny", "sink_size": 128, "recent_size": 256}


def test_duo_attention_widens_when_asked(tmp_path):
    policy = make([[FULL, 256], [64, FULL]], [[0, 2], [4, 0]])
    with pytest.raises(ArgumentError, match="windows of 64 to 256 and 2 to 4 sinks"):
        policy.export(tmp_path, "duo_attention")
    policy.export(tmp_path, "duo_attention", widen=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["sink_size"], config["recent_size"]) == (4, 256)


def test_unknown_formats_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="format='tsv'"):
        make(4).export(tmp_path, "tsv")
    with pytest.raises(ArgumentTypeError, match="configuration"):
        make(4).export(tmp_path, "transformers")


@pytest.mark.nightly
def test_kvpress_loads_the_pattern(tmp_path, monkeypatch):
    pytest.importorskip("kvpress", exc_type=ImportError)
    import transformers as hf
    from kvpress.presses import duo_attention_press

    policy = make([[FULL, 16], [16, 16]], 4)
    policy.export(tmp_path / "tiny", "duo_attention")
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    get = duo_attention_press.requests.get

    def get_locally(url: str) -> Any:
        return get(f"http://127.0.0.1:{server.server_port}/{url.split('/attn_patterns/')[1]}")

    monkeypatch.setattr(duo_attention_press.requests, "get", get_locally)
    monkeypatch.setitem(duo_attention_press.PATTERNS_DICT, "tiny-model", "tiny")
    config = hf.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, name_or_path="tiny-model",
    )  # fmt: skip
    press = duo_attention_press.DuoAttentionPress(head_compression_ratio=0.75)
    try:
        press.post_init_from_model(hf.LlamaForCausalLM(config))
    finally:
        server.shutdown()
        server.server_close()
    assert (press.sink_size, press.recent_size) == (4, 16)
    assert press.streaming_mask.tolist() == (policy.windows != FULL).tolist()
