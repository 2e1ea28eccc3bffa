"""`flex_attention` in a watched model: every mask and score_mod is read exactly, and outputs keep their bits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402

import regard  # noqa: E402
from regard import NotCapturedError  # noqa: E402
from regard.capture import patching, watchers  # noqa: E402
from regard.capture.compact_mask import FlexMask  # noqa: E402
from regard.frame import Frame  # noqa: E402
from regard.testing import assert_matches  # noqa: E402
from tests.helpers import imported_flex  # noqa: E402

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
IDS = torch.arange(1500) // 40
LENGTHS = torch.tensor([90, 150])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@pytest.fixture(autouse=True)
def run_without_compiling(monkeypatch):
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    before = flex.flex_attention
    yield
    assert flex.flex_attention is before
    assert not watchers.watched and not patching.list_patches()


class Layer(nn.Module):
    """A layer that calls flex_attention, from this file or from a helper."""

    def __init__(self, attend=None) -> None:
        super().__init__()
        self.attend = attend or flex_attention

    def forward(self, *args, **kwargs):
        return self.attend(*args, **kwargs)


def flex_attention(*args, **kwargs):
    return flex.flex_attention(*args, **kwargs)


def make_inputs(q_len=150, kv_len=150, dtype=torch.float32, heads=HEADS, kv_heads=KV_HEADS):
    generator = torch.Generator().manual_seed(q_len)
    shapes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return [torch.randn(BATCH, *shape, DIM, generator=generator).to(dtype) for shape in shapes]


def record(inputs, attend=None, **options):
    model = nn.ModuleDict({"layer": Layer(attend)})
    expected = model["layer"](*inputs, **options)
    with regard.watch(model) as recording:
        output = model["layer"](*inputs, **options)
    first, second = (result[0] if isinstance(result, tuple) else result for result in (output, expected))
    assert torch.equal(first, second)
    return recording


def compute_weights(query, key, mask_mod=None, score_mod=None, scale=None, dtype=torch.float64):
    """Compute the weights from the definition, entry by entry of the dense matrix."""
    query, key = query.to(dtype), key.to(dtype).repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.mT * (DIM**-0.5 if scale is None else scale)
    b, h, q, kv = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, b, h, q, kv)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(b, h, q, kv), -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0)


def check(recording, query, key, **definition):
    weights = recording["layer"].to_dense()
    exact = compute_weights(query, key, **definition)
    naive = compute_weights(query, key, **definition, dtype=torch.float32)
    assert_matches(weights, naive, exact, dtype="float32", ordinary=True)


def causal(b, h, q, kv):
    return q >= kv


MASKS = {
    "causal": (causal, regard.causal()),
    "window": (lambda b, h, q, kv: (q >= kv) & (q - kv < 20), regard.sliding_window(20)),
    "padding": (lambda b, h, q, kv: kv < LENGTHS[b], regard.padding([90, 150])),
    "documents": (lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (q >= kv), None),
    "prefix": (lambda b, h, q, kv: (q >= kv) | (kv < 30), None),
    "sinks": (lambda b, h, q, kv: (q >= kv) & ((q - kv < 20) | (kv < 3)), None),
    "heads": (lambda b, h, q, kv: (q >= kv) & (q - kv < 20 * (h + 1)), None),
    "strided": (lambda b, h, q, kv: (q - kv) % 3 == 0, None),
    "empty rows": (lambda b, h, q, kv: (q >= kv) & (kv > 9), None),
}
MODS = {
    "none": None,
    "alibi": lambda score, b, h, q, kv: score - SLOPES[h] * (q - kv).abs(),
    "softcap": lambda score, b, h, q, kv: 5 * torch.tanh(score / 5),
}


@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_score_mods_are_read_exactly(name, mod):
    mask_mod, named = MASKS[name]
    query, key, value = make_inputs()
    batch, heads = BATCH if name == "padding" else None, HEADS if name == "heads" else None
    block_mask = create_block_mask(mask_mod, batch, heads, 150, 150, device="cpu")
    recording = record(
        (query, key, value), block_mask=block_mask, score_mod=MODS[mod], scale=0.3, enable_gqa=True
    )
    check(recording, query, key, mask_mod=mask_mod, score_mod=MODS[mod], scale=0.3)
    if named is not None:
        assert recording["layer"].mask == named


@pytest.mark.parametrize(("q_len", "kv_len", "block"), [(1, 300, 128), (70, 129, 128), (200, 61, (64, 32))])
@pytest.mark.parametrize("name", ["causal", "strided"])
def test_lengths_that_are_no_multiple_of_the_block_size(name, q_len, kv_len, block):
    mask_mod = MASKS[name][0]
    query, key, value = make_inputs(q_len, kv_len, heads=3, kv_heads=3)
    block_mask = create_block_mask(mask_mod, None, None, q_len, kv_len, device="cpu", BLOCK_SIZE=block)
    recording = record((query, key, value), block_mask=block_mask)
    check(recording, query, key, mask_mod=mask_mod)


def test_a_mask_function_may_depend_on_heads_that_its_blocks_share():
    query, key, value = make_inputs()
    mask_mod = MASKS["heads"][0]
    block_mask = create_block_mask(causal, None, None, 150, 150, device="cpu")
    block_mask.full_kv_num_blocks = block_mask.full_kv_indices = None  # every block is evaluated
    block_mask.kv_num_blocks[:] = 2
    block_mask.kv_indices[:] = torch.arange(2, dtype=torch.int32)
    block_mask.mask_mod = mask_mod
    recording = record((query, key, value), block_mask=block_mask, enable_gqa=True)
    check(recording, query, key, mask_mod=mask_mod)


def test_a_mask_of_intervals_takes_memory_for_its_rows_only():
    length = 1500
    query, key, value = (tensor[:1, :1] for tensor in make_inputs(length, length))
    names = {"documents": True, "prefix": True, "sinks": False}
    for name, is_interval in names.items():
        block_mask = create_block_mask(MASKS[name][0], None, None, length, length, device="cpu")
        recording = record((query, key, value), block_mask=block_mask)
        (call,) = recording.calls("layer")
        assert (call.compact_mask.tiled_mask is None) == is_interval
        assert not call.compact_mask.stored_arrays and call.nbytes == query.nbytes + key.nbytes


def test_blocks_that_are_skipped_or_full_are_not_evaluated():
    length, calls = 1024, []

    def counted(b, h, q, kv):
        calls.append(q.shape)
        return q >= kv

    block_mask = create_block_mask(counted, None, None, length, length, device="cpu")
    mask = FlexMask(block_mask, 1, 1, length, length)
    calls.clear()
    kinds = mask.classify(range(0, 128), range(256, 512), shape=(length, length))
    assert kinds == "empty"
    assert mask.classify(range(512, 640), range(0, 512), shape=(length, length)) == "full"
    assert mask.classify(range(0, 128), range(0, 128), shape=(length, length)) == "partial" and not calls
    frame = Frame((1,), length, length)
    assert not mask.allows(frame, np.arange(128), np.arange(256, 512), np).any() and not calls
    assert mask.allows(frame, np.arange(128), np.arange(128), np).sum() == 128 * 129 // 2 and calls


@pytest.mark.filterwarnings("ignore:return_lse is deprecated:FutureWarning")
@pytest.mark.parametrize("auxiliary", ["return_lse", "return_aux"])
def test_auxiliary_results_are_passed_on(auxiliary):
    query, key, value = make_inputs()
    options = {"return_lse": True}
    if auxiliary == "return_aux":
        options = {"return_aux": flex.AuxRequest(lse=True)}
    recording = record((query, key, value), enable_gqa=True, **options)
    check(recording, query, key)
    assert recording["layer"].mask is None and recording.calls("layer")[0].kernel == "torch: flex_attention"


@pytest.mark.parametrize("attend", [imported_flex.attend, imported_flex.flex_attention])
def test_a_helper_that_imported_the_function_by_name(attend):
    query, key, value = make_inputs()
    recording = record((query, key, value), attend, enable_gqa=True)
    check(recording, query, key)


@pytest.mark.parametrize("place", ["helper", "attribute"])
def test_a_compiled_function_is_captured_and_stays_compiled(place, monkeypatch):
    runs = []

    def backend(graph, _):
        return lambda *args: runs.append(1) or graph(*args)

    compiled = torch.compile(flex.flex_attention, backend=backend)
    monkeypatch.setattr(imported_flex, "flex_attention", compiled)
    query, key, value = make_inputs()
    block_mask = create_block_mask(causal, None, None, 150, 150, device="cpu")
    attend = imported_flex.attend if place == "helper" else compiled
    recording = record((query, key, value), attend, block_mask=block_mask, enable_gqa=True)
    assert len(runs) == 2 and imported_flex.flex_attention is compiled
    check(recording, query, key, mask_mod=causal)
    assert recording.calls("layer")[0].kernel == "torch: flex_attention, compiled"


def test_a_layer_that_compiles_the_function_at_its_first_call_keeps_no_slow_one():
    runs = []

    def backend(graph, _):
        return lambda *args: runs.append(1) or graph(*args)

    class LazyLayer(nn.Module):
        compiled = None

        def forward(self, *args):
            if self.compiled is None:
                self.compiled = torch.compile(flex.flex_attention, backend=backend)
            return self.compiled(*args, enable_gqa=True)

    query, key, value = make_inputs()
    model = nn.ModuleDict({"layer": LazyLayer()})
    for repetition in range(2):
        with regard.watch(model) as recording:
            output = model["layer"](query, key, value)
        check(recording, query, key)
        assert recording.calls("layer")[0].kernel == "torch: flex_attention, compiled"
        assert len(recording.calls("layer")) == 1
        assert torch.equal(model["layer"](query, key, value), output) and len(runs) == 2 * repetition + 2


def test_a_recording_is_saved_with_a_mask_that_is_no_interval(tmp_path):
    pytest.importorskip("safetensors")
    query, key, value = make_inputs()
    block_mask = create_block_mask(MASKS["sinks"][0], None, None, 150, 150, device="cpu")
    recording = record((query, key, value), block_mask=block_mask, enable_gqa=True)
    recording.save(tmp_path / "flex.safetensors")
    again = regard.load_recording(tmp_path / "flex.safetensors")
    weights, others = again["layer"].to_dense(), recording["layer"].to_dense()
    assert torch.equal(weights > 0, others > 0) and torch.allclose(weights, others, atol=1e-6)
    assert not recording.diagnose().by_severity("error")


def test_blocks_that_contradict_the_function_are_reported():
    """The kernel without compilation ignores the blocks, so no reading of the mask reproduces its output."""
    query, key, value = make_inputs()
    block_mask = create_block_mask(causal, None, None, 150, 150, device="cpu")
    block_mask.mask_mod = lambda b, h, q, kv: q <= kv
    model = nn.ModuleDict({"layer": Layer()})
    with pytest.raises(NotCapturedError, match="flex_attention returned other weights"), regard.watch(model):
        model["layer"](query, key, value, block_mask=block_mask, enable_gqa=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch compiles, and warns of itself
@pytest.mark.parametrize("padded", [False, True])
def test_a_transformers_model_with_flex_attention(padded):
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model, other = (
        hf.LlamaForCausalLM._from_config(hf.LlamaConfig(**sizes), attn_implementation=name).eval()
        for name in ("flex_attention", "sdpa")
    )
    other.load_state_dict(model.state_dict())
    tokens = torch.randint(1, 50, (2, 37), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if padded:
        inputs["attention_mask"][0, :5] = 0
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    # The model compiles flex_attention, which takes minutes.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        expected, tokens = model(**inputs).logits, model.generate(**inputs, **options)
        with regard.watch(model) as recording:
            assert torch.equal(model(**inputs).logits, expected)
        with regard.watch(model) as generated:
            assert torch.equal(model.generate(**inputs, **options), tokens)
        with regard.watch(other) as reference:
            other(**inputs)
    assert list(recording) == list(generated) == list(reference)
    for layer in reference:
        assert recording[layer].mask == reference[layer].mask
        assert recording.calls(layer)[0].kernel == "transformers: flex_attention_forward"
        assert torch.allclose(recording[layer].to_dense(), reference[layer].to_dense(), atol=1e-6)
        assert generated[layer].shape == (2, 4, 40, 40)
