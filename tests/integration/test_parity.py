"""Parity with modules of torch and transformers: layers with their weights, compared with the module in float64."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import regard
from regard.families import ATTENTION_MODULES
from regard.nn import MultiheadAttention, from_transformers
from regard.score_mods import alibi_slopes, relative_buckets
from tests.parity import models, torch_module
from tests.parity.compare import Float64Mode, measure_parity

ROOT = Path(__file__).parents[2]
ALL = [*torch_module.comparisons(), *models.comparisons()]
BY_NAME = {str(comparison): comparison for comparison in ALL}


QUICK = re.compile("one pass|cross-attention|attn_mask$")
IN_CI = re.compile(
    r"torch\.nn|Llama:|Gemma 2|T5 decoder:"
)  # every situation; of other modules, the quick ones


def mark(name):
    marks = [pytest.mark.slow] if IN_CI.match(name) else [pytest.mark.slow, pytest.mark.nightly]
    return name if QUICK.search(name) else pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [mark(name) for name in BY_NAME])
def test_parity(name):
    row = measure_parity(BY_NAME[name])
    assert row.ok, row
    # An error of exactly 0 would mean that both sides ran the same code.
    assert row.max_share > 0


def test_the_page_lists_every_comparison():
    assert len(ALL) == len(BY_NAME)
    known = {
        type(models._build_model(s, torch.float32, torch.float32).get_submodule(s.path)).__name__
        for s in models.SUBJECTS
    }
    assert known == {name for name, spec in ATTENTION_MODULES.items() if spec.is_convertible}
    assert len({s.model for s in models.SUBJECTS}) >= 8
    page = (ROOT / "docs" / "parity.md").read_text()
    listed = re.findall(r"^\| ([^|]+) \| ([^|]+) \| \d", page, re.MULTILINE)
    assert listed == [(c.module, c.situation) for c in ALL], "run scripts/docs parity --write"


def test_the_definition_is_float64_throughout():
    with Float64Mode():
        x = torch.ones(2, 3, dtype=torch.float64) / 3
        assert x.float().dtype == torch.float64
        assert x.to(torch.float32).dtype == x.to(dtype=torch.float32).dtype == torch.float64
        assert torch.nn.functional.softmax(x, -1, dtype=torch.float32).dtype == torch.float64
        assert torch.arange(3).float().dtype == torch.float64
    assert x.float().dtype == torch.float32


# -- Broken layers must fail --------------------------------------------------------------------------------


def zero(*names):
    def break_layer(layer, options):
        for name in names:
            layer.get_parameter(name).data.zero_()

    return break_layer


def swap(layer, options):
    layer.k_proj, layer.v_proj = layer.v_proj, layer.k_proj


def without_scale(layer, options):
    layer.scale = None


def other_pairs(layer, options):
    layer.rope.layout = "interleaved"
    layer.rope.cos = layer.rope.cos[:0]


def set_option(name, value):
    def break_layer(layer, options):
        options[name] = value

    return break_layer


def rope_factor(layer, options):
    layer.rope.factor = 1.0


FAULTS = {
    "key and value swapped": ("GPT-2: fused, scale by layer", swap),
    "the scale of the paper": ("GPT-2: fused, scale by layer", without_scale),
    "a bias left out": ("GPT-2: fused, scale by layer", zero("out_proj.bias")),
    "interleaved": ("Llama: rotary, grouped heads", other_pairs),
    "not causal": ("Llama: rotary, grouped heads", set_option("mask", None)),
    "the norm's weight left out": ("Qwen 3: norms of queries and keys", zero("k_norm.weight")),
    "a window one wider": ("Mistral: sliding window", set_option("mask", regard.sliding_window(5))),
    "no cap": ("Gemma 2: softcap, every key", set_option("score_mod", None)),
    "sinks of 0": ("GPT-OSS: sinks, YaRN, every key", zero("sink")),
    "the angles' factor left out": ("GPT-OSS: sinks, YaRN, every key", rope_factor),
    "no slopes": ("BLOOM: ALiBi", set_option("score_mod", None)),
    "slopes of eight heads": (
        "MPT: ALiBi, six heads",
        set_option("score_mod", regard.alibi(alibi_slopes(8)[:6])),
    ),
    "no relative bias": ("T5 encoder: relative bias", set_option("score_mod", None)),
    "causal": ("BERT: both directions", set_option("mask", regard.causal())),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_layer_fails(fault, monkeypatch):
    subject, break_layer = FAULTS[fault]

    def convert_broken(module):
        layer, options = from_transformers(module)
        break_layer(layer, options)
        return layer, options

    monkeypatch.setattr(models, "from_transformers", convert_broken)
    assert not measure_parity(BY_NAME[f"{subject}: one pass"]).ok


PADDED = (
    "Llama: rotary, grouped heads: padded left",
    "BLOOM: ALiBi: padded left",
    "T5 encoder: relative bias: padded right",
    "T5 cross-attention: padded right",
    "BERT: both directions: padded right",
)


@pytest.mark.parametrize("name", PADDED)
def test_ignored_padding_fails(name, monkeypatch):
    forward = MultiheadAttention.forward
    monkeypatch.setattr(
        MultiheadAttention,
        "forward",
        lambda self, *x, padding=None, **options: forward(self, *x, **options),
    )
    assert not measure_parity(BY_NAME[name]).ok


# -- T5 bias --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_equal_those_of_t5(bidirectional):
    from transformers.models.t5.modeling_t5 import T5Attention

    ahead = np.arange(-3000, 3001)
    for buckets, distance in itertools.product((8, 32, 64), (20, 100, 128, 512)):
        if distance > buckets // (4 if bidirectional else 2):
            theirs = T5Attention._relative_position_bucket(
                torch.tensor(ahead), bidirectional, buckets, distance
            )
            ours = relative_buckets(
                ahead, buckets=buckets, max_distance=distance, bidirectional=bidirectional
            )
            assert np.array_equal(ours, theirs.numpy()), (buckets, distance)


# -- Conversion ------------------------------------------------------------------------------------------------


def llama(**options):
    config = transformers.LlamaConfig(**models._llama_like(**options))
    return transformers.LlamaModel(config)


def test_conversion_copies_weights_dtype_mode_and_dropout():
    module = llama(attention_dropout=0.25).to(torch.bfloat16).eval().layers[0].self_attn
    layer, options = from_transformers(module)
    assert options == {"mask": regard.causal(), "score_mod": []}
    assert layer.dropout == 0.25 and not layer.training
    assert from_transformers(copy.deepcopy(module).train())[0].training
    assert {x.dtype for x in layer.parameters()} == {torch.bfloat16}
    before = layer.q_proj.weight.clone()
    module.q_proj.weight.data.zero_()
    assert torch.equal(layer.q_proj.weight, before) and before.any()


def clipped_module():
    config = transformers.MptConfig(
        d_model=8, n_heads=2, n_layers=1, vocab_size=9, attn_config={"clip_qkv": 6.0}
    )
    return transformers.MptModel(config).blocks[0].attn


def cross_attention_module():
    config = transformers.GPT2Config(
        n_embd=8, n_head=2, n_layer=1, vocab_size=9, add_cross_attention=True, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2Model(config).h[0].crossattention


def dynamic_rope_module():
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    return llama(rope_parameters=rope).layers[0].self_attn


UNSUPPORTED = {
    "a Linear": (lambda: torch.nn.Linear(2, 2), "a transformers attention module: BertAttention, Bloom"),
    "clipped queries and keys": (clipped_module, "regard.attention"),
    "a query projection beside a fused one": (cross_attention_module, "regard.attention"),
    "rotary angles that change with the length": (dynamic_rope_module, "regard.attention"),
}


@pytest.mark.parametrize("received", UNSUPPORTED)
def test_unsupported_modules_are_rejected(received):
    build_module, message = UNSUPPORTED[received]
    with pytest.raises((TypeError, ValueError)) as error:
        from_transformers(build_module())
    assert (
        "from_transformers" in str(error.value)
        and received in str(error.value)
        and message in str(error.value)
    )
