"""Edits of the query, key or value of one head, and of the stream that they are computed from, against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.errors import ArgumentError, ArgumentTypeError, NotCapturedError
from regard.interventions import ablate, knockout, patch, patch_input

WHAT = ["query", "key", "value"]


class Attention(nn.Module):
    """Causal attention with grouped heads."""

    own_softmax = False

    def __init__(self, heads=4, kv_heads=2, width=32):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, kv_heads * self.dim), nn.Linear(width, kv_heads * self.dim)

    def project(self, x):
        pairs = ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        q, k, v = (layer(x).unflatten(-1, (heads, self.dim)).transpose(1, 2) for layer, heads in pairs)
        groups = self.heads // self.kv_heads
        return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def forward(self, x):
        q, k, v = self.project(x)
        if self.own_softmax:
            attended = weigh(q, k) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(32), Attention(), nn.Linear(32, 32)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x).relu()


def weigh(q, k):
    future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf).softmax(-1)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block()).eval()


@pytest.fixture
def x():
    return torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def delta():
    return torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(2))


def attend_by_hand(block, x, changed, what, heads, rows=slice(None)):
    """Run a block in which some heads compute query, key or value from a changed input; return output and weights."""
    vectors = dict(zip(WHAT, block.attention.project(block.norm(x)), strict=True))
    others = dict(zip(WHAT, block.attention.project(block.norm(changed)), strict=True))
    vectors[what] = vectors[what].clone()
    vectors[what][:, heads, rows] = others[what][:, heads, rows]
    weights = weigh(vectors["query"], vectors["key"])
    x = x + block.attention.o((weights @ vectors["value"]).transpose(1, 2).flatten(2))
    return x + block.mlp(x).relu(), weights


@pytest.mark.parametrize("what", WHAT)
def test_one_head_reads_a_changed_stream(model, x, delta, what):
    edit = patch_input(1, heads=[1, 2], what=what, change=lambda stream: stream + delta)
    with torch.no_grad(), regard.intervene(model, edit, record=True) as run:
        edited = model(x)
    with torch.no_grad():
        first = model[0](x)
        second, weights = attend_by_hand(model[1], first, first + delta, what, [1, 2])
        expected = model[2](second)
    torch.testing.assert_close(edited, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(run.recording["1.attention"].to_dense(), weights, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(edited, model(x), atol=1e-3)


@pytest.mark.parametrize("what", WHAT)
def test_vectors_of_another_run(model, x, delta, what):
    with torch.no_grad(), regard.watch(model, values=True) as source:
        model(x + delta)
    edit = patch(0, heads=3, source=source, what=what)
    with torch.no_grad(), regard.intervene(model, edit, record=True) as run:
        edited = model(x)
    with torch.no_grad():
        first, weights = attend_by_hand(model[0], x, x + delta, what, [3])
        expected = model[2](model[1](first))
    torch.testing.assert_close(edited, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(run.recording["0.attention"].to_dense(), weights, atol=1e-6, rtol=1e-5)


def test_queries_are_patched_in_some_rows_and_batch_entries(model, x, delta):
    with torch.no_grad(), regard.watch(model, values=True) as source:
        model(x + delta)
    edit = patch(0, heads=3, source=source, what="query", queries=[2, -1], batch=1)
    with torch.no_grad(), regard.intervene(model, edit, record=True, values=True) as run:
        model(x)
    with torch.no_grad(), regard.watch(model, values=True) as plain:
        model(x)
    with torch.no_grad():
        _, weights = attend_by_hand(model[0], x, x + delta, "query", [3], [2, 6])
    recorded, before = (recording["0.attention"].to_dense() for recording in (run.recording, plain))
    torch.testing.assert_close(recorded[1], weights[1], atol=1e-6, rtol=1e-5)
    assert torch.equal(recorded[0], before[0])
    (output,), (base,) = (recording.calls("0.attention") for recording in (run.recording, plain))
    differs = (output.output != base.output).any(-1)
    assert differs.nonzero().tolist() == [[1, 3, 2], [1, 3, 6]]  # every other row keeps its bits


def test_input_edits_combine_with_other_edits_of_the_head(model, x, delta):
    edits = [
        ablate(0, heads=0),
        knockout(0, heads=2, queries=5, keys=[1, 2]),
        patch_input(0, heads=2, change=lambda stream: stream + delta),
        patch_input(0, heads=2, what="value", change=lambda stream: stream - delta),
    ]
    with torch.no_grad(), regard.intervene(model, edits) as run:
        edited = model(x)
    with torch.no_grad():
        block = model[0]
        q, k, v = block.attention.project(block.norm(x))
        q[:, 2] = block.attention.project(block.norm(x + delta))[0][:, 2]
        v[:, 2] = block.attention.project(block.norm(x - delta))[2][:, 2]
        weights = weigh(q, k)
        weights[:, 2, 5, 1:3] = 0
        weights[:, 2, 5] /= weights[:, 2, 5].sum(-1, keepdim=True)
        attended = weights @ v
        attended[:, 0] = 0
        stream = x + block.attention.o(attended.transpose(1, 2).flatten(2))
        expected = model[2](model[1](stream + block.mlp(stream).relu()))
    torch.testing.assert_close(edited, expected, atol=1e-5, rtol=1e-5)
    assert len(run.applied) == 4


def test_path_patching_from_a_head_to_the_key_of_a_later_one(model, x, delta):
    """The sender's difference reaches one head's key, and nothing else."""
    with torch.no_grad(), regard.watch(model, values=True) as clean:
        model(x)
    with torch.no_grad(), regard.watch(model, values=True) as other:
        model(x + delta)
    outputs = [recording.calls("0.attention")[0].output[:, 1] for recording in (other, clean)]
    written = (outputs[0] - outputs[1]) @ model[0].attention.o.weight.T[8:16]
    edit = patch_input(2, heads=3, what="key", change=lambda stream: stream + written)
    with torch.no_grad(), regard.intervene(model, edit):
        edited = model(x)
    with torch.no_grad():
        stream = model[1](model[0](x))
        expected, _ = attend_by_hand(model[2], stream, stream + written, "key", [3])
    torch.testing.assert_close(edited, expected, atol=1e-5, rtol=1e-5)


def test_an_unchanged_stream_leaves_the_output(model, x):
    for what in WHAT:
        with torch.no_grad(), regard.intervene(model, patch_input(1, heads=0, what=what, change=torch.clone)):
            edited = model(x)
        torch.testing.assert_close(edited, model(x), atol=1e-6, rtol=1e-6)


def test_gradients_flow_through_a_changed_input(model, x, delta):
    direction = delta.clone().requires_grad_()
    with regard.intervene(model, patch_input(1, heads=2, change=lambda stream: stream + direction)):
        model(x).square().sum().backward()
    expected = delta.clone().requires_grad_()
    first = model[0](x)
    second, _ = attend_by_hand(model[1], first, first + expected, "query", [2])
    model[2](second).square().sum().backward()
    torch.testing.assert_close(direction.grad, expected.grad, atol=1e-4, rtol=1e-4)


def test_watches_and_interventions_around_see_each_call_once(model, x, delta):
    edit = patch_input(1, heads=2, change=lambda stream: stream + delta)
    with torch.no_grad(), regard.watch(model) as outer, regard.intervene(model, ablate(1, heads=0)) as around:
        with regard.intervene(model, edit) as inner:
            edited = model(x)
        assert [len(outer.calls(name)) for name in outer] == [1, 1, 1]
    assert [row["calls"] for row in around.applied] == [1]
    assert [row["calls"] for row in inner.applied] == [1]
    with torch.no_grad():
        first = model[0](x)
        _, weights = attend_by_hand(model[1], first, first + delta, "query", [2])
    torch.testing.assert_close(outer["1.attention"].to_dense(), weights, atol=1e-6, rtol=1e-5)
    assert not torch.equal(edited, model(x))


@pytest.mark.parametrize("what", WHAT)
def test_torchs_own_encoder_layers(what, x, delta):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, norm_first=True, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    edit = patch_input(1, heads=1, what=what, change=lambda stream: stream + delta)
    with torch.no_grad(), regard.intervene(model, edit):
        edited = model(x)
    with torch.no_grad():
        stream, block = model.layers[0](x), model.layers[1]
        both = []
        for source in (stream, stream + delta):
            projected = F.linear(
                block.norm1(source), block.self_attn.in_proj_weight, block.self_attn.in_proj_bias
            )
            both.append([part.unflatten(-1, (4, 8)).transpose(1, 2) for part in projected.chunk(3, -1)])
        vectors, i = both[0], WHAT.index(what)
        vectors[i] = vectors[i].clone()
        vectors[i][:, 1] = both[1][i][:, 1]
        q, k, v = vectors
        attended = ((q @ k.mT * 8**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        stream = stream + block.self_attn.out_proj(attended)
        expected = stream + block.linear2(block.linear1(block.norm2(stream)).relu())
    torch.testing.assert_close(edited, expected, atol=1e-5, rtol=1e-5)


def test_a_layer_with_its_own_softmax_has_no_query_to_patch(model, x, delta):
    for block in model:
        block.attention.own_softmax = True
    with torch.no_grad(), regard.watch(model, values=True) as source:
        model(x)
    for edit in (patch(0, source=source, what="query"), patch_input(0, change=lambda stream: stream + delta)):
        with (
            pytest.raises(ArgumentError, match="own softmax"),
            torch.no_grad(),
            regard.intervene(model, edit),
        ):
            model(x)


class TwoAttentions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(), Attention()

    def forward(self, x):
        x = x + self.first(x)
        return x + self.second(x)


def test_refusals(model, x, delta):
    def run(edit, target=model, inputs=x):
        with torch.no_grad(), regard.intervene(target, edit):
            target(inputs)

    with pytest.raises(ArgumentError, match="not the first attention of its block"):
        run(patch_input(1, change=torch.clone), nn.Sequential(TwoAttentions()).eval())
    with pytest.raises(ArgumentError, match=r"\(2, 7, 32\)"):
        run(patch_input(1, change=lambda stream: stream[:1]))
    with pytest.raises(ArgumentError, match="None"):
        run(patch_input(1, change=lambda stream: None))
    with pytest.raises(ArgumentTypeError, match="change"):
        patch_input(1, change=delta)
    with pytest.raises(ArgumentError, match="what='pattern'"):
        patch_input(1, change=torch.clone, what="pattern")
    with torch.no_grad(), regard.watch(model, values=True) as source:
        model(x)
    with pytest.raises(ArgumentError, match="what='key' and queries"):
        patch(source=source, what="key", queries=1)
    torch.testing.assert_close(model(x), model(x))  # nothing stays behind


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_models_of_transformers_with_and_without_a_cache(family):
    hf = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
        "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    if family == "gpt2":
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes)).eval()
        block, attention, out = model.transformer.h[1], "transformer.h.1.attn", "c_proj"
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=2)).eval()
        block, attention, out = model.model.layers[1], "model.layers.1.self_attn", "o_proj"
    tokens = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(1))
    delta = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(2))

    def shift(_, args, kwargs):
        if args:
            return (args[0] + delta, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + delta}

    calls = []
    for changes in (False, True):
        handle = block.register_forward_pre_hook(shift, with_kwargs=True) if changes else None
        with torch.no_grad(), regard.watch(model, values=True) as recording:
            model(tokens)
        (call,) = recording.calls(attention)
        repeat = [x.repeat_interleave(call.groups, 1) for x in (call.key, call.value)]
        calls.append(dict(zip(WHAT, (call.query, *repeat), strict=True)))
        if handle is not None:
            handle.remove()
    for what in WHAT:
        vectors = {**calls[0], what: calls[0][what].clone()}
        vectors[what][:, 2] = calls[1][what][:, 2]
        attended = weigh(vectors["query"], vectors["key"]) @ vectors["value"]
        projection = model.get_submodule(f"{attention}.{out}")
        handle = projection.register_forward_pre_hook(lambda *_, a=attended: (a.transpose(1, 2).flatten(2),))
        with torch.no_grad():
            expected = model(tokens).logits
        handle.remove()
        edit = patch_input(1, heads=2, what=what, change=lambda stream: stream + delta)
        for use_cache in (True, False):
            with torch.no_grad(), regard.intervene(model, edit):
                output = model(tokens, use_cache=use_cache)
            torch.testing.assert_close(output.logits, expected, atol=1e-5, rtol=1e-5)
            if use_cache:
                assert output.past_key_values.get_seq_length() == 7
    edit = patch_input(1, heads=2, change=torch.clone)
    with pytest.raises(ArgumentError, match="a step with a cache"), regard.intervene(model, edit):
        model.generate(tokens, max_new_tokens=2, do_sample=False)


class SlicedAttention(nn.Module):
    """Attention that computes `step` entries of batch · heads at a time, as diffusers does with attention slicing."""

    def __init__(self, heads=4, step=2):
        super().__init__()
        self.heads, self.step = heads, step
        self.projection = nn.Linear(32, 96)

    def forward(self, x):
        parts = self.projection(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        outputs = [
            torch.bmm((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1), v)
            for q, k, v in zip(*(part.split(self.step) for part in parts), strict=True)
        ]
        return torch.cat(outputs).unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2)


def test_slices_of_heads_are_recorded_and_only_edited_as_a_whole():
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"attn": SlicedAttention()}), torch.randn(2, 5, 32)
    with torch.no_grad(), regard.watch(model) as recording:
        plain = model["attn"](x)
    weights = torch.cat([call.matrix.to_dense() for call in recording.calls("attn")]).flatten(0, 1)
    model["attn"].step = 8
    with torch.no_grad(), regard.watch(model) as whole:
        assert torch.equal(model["attn"](x), plain)
    torch.testing.assert_close(weights, whole["attn"].to_dense().flatten(0, 1))
    with torch.no_grad(), regard.intervene(model, [knockout(0, keys=1), ablate(0, heads=2)]):
        edited = model["attn"](x)
    model["attn"].step = 2
    for edit in (ablate(0, heads=2), knockout(0, batch=1, keys=1), ablate(0, baseline="mean")):
        with pytest.raises(NotCapturedError, match="in slices"), regard.intervene(model, edit):
            model["attn"](x)
    with torch.no_grad(), regard.intervene(model, knockout(0, keys=1)):
        sliced = model["attn"](x)
    others = [0, 1, 3]
    torch.testing.assert_close(
        sliced.unflatten(-1, (4, 8))[:, :, others], edited.unflatten(-1, (4, 8))[:, :, others]
    )
    assert not torch.allclose(sliced, plain, atol=1e-3)
