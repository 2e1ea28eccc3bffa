"""QK and OV circuits and composition scores, compared with dense products of the weights, which are read by name."""

import math

import pytest
import torch
import transformers as hf

from regard.errors import ArgumentError, ArgumentTypeError, IndexOutOfRangeError
from regard.interventions import FactoredMatrix, circuits
from tests.helpers.nightly import keep_in_ci

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(1))


def build(model_class, config, dtype=torch.float32):
    torch.manual_seed(0)
    model = model_class(config).eval()
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise), alpha=0.2)
    return model.to(dtype)


def split(weight, heads):
    """(out, in) to (heads, in, dim)."""
    return weight.unflatten(0, (heads, -1)).mT


def read_gpt2(model, i):
    attention = model.transformer.h[i].attn
    query, key, value = attention.c_attn.weight.T.chunk(3)
    out = attention.c_proj.weight.unflatten(0, (4, -1))
    return split(query, 4), split(key, 4), split(value, 4), out, 8**-0.5


def read_separate(query="q_proj", key="k_proj", value="v_proj", out="o_proj", scale=8**-0.5):
    def read(layer):
        linears = [layer.get_submodule(name).weight for name in (query, key, value)]
        parts = [split(weight, len(weight) // 8) for weight in linears]
        parts = [part.repeat_interleave(4 // len(part), 0) for part in parts]
        return *parts, layer.get_submodule(out).weight.T.unflatten(0, (4, -1)), scale

    return read


def read_neox(layer):
    query, key, value = layer.query_key_value.weight.unflatten(0, (4, 3, 8)).unbind(1)
    return query.mT, key.mT, value.mT, layer.dense.weight.T.unflatten(0, (4, -1)), 8**-0.5


def read_phi3(layer):
    query, key, value = layer.qkv_proj.weight.split([32, 16, 16])
    parts = split(query, 4), *(split(x, 2).repeat_interleave(2, 0) for x in (key, value))
    return *parts, layer.o_proj.weight.T.unflatten(0, (4, -1)), 8**-0.5


def llama():
    return build(hf.LlamaForCausalLM, hf.LlamaConfig(**SIZES, num_key_value_heads=2))


def gpt2():
    return build(hf.GPT2LMHeadModel, hf.GPT2Config(**SIZES))


# A model, its attention layers, and what reads their weights by name.
MODELS = {
    "gpt2": (gpt2, None, read_gpt2),
    "llama": (llama, lambda m: [layer.self_attn for layer in m.model.layers], read_separate()),
    "gpt_neox": (
        lambda: build(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**SIZES)),
        lambda m: [layer.attention for layer in m.gpt_neox.layers],
        read_neox,
    ),
    "phi3": (
        lambda: build(hf.Phi3ForCausalLM, hf.Phi3Config(**SIZES, num_key_value_heads=2)),
        lambda m: [layer.self_attn for layer in m.model.layers],
        read_phi3,
    ),
    "opt": (  # multiplies the query by the scale
        lambda: build(hf.OPTModel, hf.OPTConfig(**SIZES, ffn_dim=40, word_embed_proj_dim=32)),
        lambda m: [layer.self_attn for layer in m.decoder.layers],
        read_separate(out="out_proj"),
    ),
    "bert": (
        lambda: build(hf.BertModel, hf.BertConfig(**SIZES)),
        lambda m: [layer.attention for layer in m.encoder.layer],
        read_separate("self.query", "self.key", "self.value", "output.dense"),
    ),
}


def read(name):
    """Build a model; return it with its weights, (layers, …), and the scale."""
    build_model, list_layers, read_layer = MODELS[name]
    model = build_model()
    layers = range(3) if list_layers is None else list_layers(model)
    rows = [read_layer(model, layer) if list_layers is None else read_layer(layer) for layer in layers]
    *weights, scale = zip(*rows, strict=True)
    return model, [torch.stack(part).detach().double() for part in weights], scale[0]


@pytest.mark.parametrize("name", keep_in_ci(MODELS, "gpt2", "llama", "gpt_neox"))
def test_circuits_are_products_of_the_weights_of_a_head(name):
    model, (query, key, value, out), scale = read(name)
    found = circuits(model, TOKENS)
    for layer, head in ((0, 3), (2, 1)):
        dense = query[layer, head] @ key[layer, head].T, value[layer, head] @ out[layer, head]
        for circuit, expected in zip((found.qk(layer, head), found.ov(layer, head)), dense, strict=True):
            assert circuit.rank == 8
            assert circuit.shape == (32, 32)
            torch.testing.assert_close(circuit.to_dense().double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.qk(layer).to_dense()[head], found.qk(layer, head).to_dense())
    weights = found.weights(1)
    torch.testing.assert_close(weights.W_K.double(), key[1], atol=0, rtol=0)
    assert weights.scale == pytest.approx(scale, rel=1e-5)
    assert weights.is_rotated is (name in ("llama", "gpt_neox", "phi3"))


@pytest.mark.parametrize("name", keep_in_ci(MODELS, "gpt2", "llama"))
def test_composition_is_the_norm_of_the_dense_product(name):
    model, (query, key, value, out), _ = read(name)
    found = circuits(model, TOKENS)
    ov, qk = value @ out, query @ key.mT
    for mode, reader in (("Q", qk), ("K", qk.mT), ("V", ov)):
        product = torch.einsum("ahdw,bkwe->ahbkde", ov, reader)
        norms = ov.norm(dim=(-2, -1)), reader.norm(dim=(-2, -1))
        expected = product.norm(dim=(-2, -1)) / norms[0][:, :, None, None] / norms[1]
        expected *= torch.ones(3, 3).triu(1)[:, None, :, None]
        scores = found.composition(mode)
        assert scores.shape == (3, 4, 3, 4)
        torch.testing.assert_close(scores.double(), expected, atol=1e-5, rtol=0)
        assert float(scores[0, :, 1:].min()) > 0.1


def test_a_circuit_gives_the_scores_of_the_model():
    model, _, _ = read("gpt2")
    for layer in model.transformer.h:
        torch.nn.init.zeros_(layer.attn.c_attn.bias)
    states = []
    handle = model.transformer.h[1].attn.register_forward_pre_hook(
        lambda _, args, kwargs: states.append(kwargs.get("hidden_states", *args[:1])), with_kwargs=True
    )
    import regard

    with torch.no_grad(), regard.watch(model) as recording:
        model(TOKENS)
    handle.remove()
    found = circuits(model, TOKENS)
    scores = states[0][0] @ found.qk(1, 2) @ states[0][0].T
    assert isinstance(scores, FactoredMatrix)
    (call,) = recording.calls("transformer.h.1.attn")
    expected = call.query[0, 2] @ call.key[0, 2].T
    torch.testing.assert_close(scores.to_dense(), expected, atol=1e-4, rtol=1e-4)
    pattern = regard.attention(scores.A[None], scores.B.mT[None], scale=call.scale, mask=regard.causal())
    torch.testing.assert_close(
        pattern[0].to_dense(), recording["transformer.h.1.attn"][0, 2].to_dense(), atol=1e-5, rtol=0
    )


def test_folded_norms_give_the_scores_of_the_stream_before_the_norm():
    for name in ("gpt2", "llama"):
        model, (query, key, value, out), _ = read(name)
        found = circuits(model, TOKENS, fold_norms=True)
        norm = model.transformer.h[1].ln_1 if name == "gpt2" else model.model.layers[1].input_layernorm
        gain = norm.weight.detach().double()
        centre = torch.eye(32).double() - (1 / 32 if name == "gpt2" else 0)
        read_in = [centre @ (gain[:, None] * weight[1, 2]) for weight in (query, key, value)]
        torch.testing.assert_close(
            found.qk(1, 2).to_dense().double(), read_in[0] @ read_in[1].T, atol=1e-4, rtol=0
        )
        written = out[1, 2] @ centre
        torch.testing.assert_close(
            found.ov(1, 2).to_dense().double(), read_in[2] @ written, atol=1e-4, rtol=0
        )


def test_torchs_own_layers_are_read():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 40, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    found = circuits(model, torch.randn(2, 5, 32))
    weights = model.layers[1].self_attn.in_proj_weight.detach()
    query, key, value = (split(part, 4)[3] for part in weights.chunk(3))
    torch.testing.assert_close(found.qk("layers.1.self_attn", 3).to_dense(), query @ key.T)
    out = model.layers[1].self_attn.out_proj.weight.detach().T[24:]
    torch.testing.assert_close(found.ov(-1, -1).to_dense(), value @ out)


def test_a_norm_of_queries_refuses_qk_and_keeps_ov():
    model = build(hf.Qwen3ForCausalLM, hf.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8))
    found = circuits(model, TOKENS, layers=[1, "model.layers.2.*"])
    assert found.modules == ["model.layers.1.self_attn", "model.layers.2.self_attn"]
    assert found.ov(0, 3).rank == 8
    with pytest.raises(ArgumentError, match=r"layer 'model.layers.1.self_attn': its query"):
        found.qk(0)
    assert found.composition("V").shape == (2, 4, 2, 4)


def test_cross_attention_has_no_composition():
    config = hf.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=40, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    model = build(hf.T5Model, config)
    found = circuits(model, {"input_ids": TOKENS, "decoder_input_ids": TOKENS.flip(1)})
    cross = model.decoder.block[0].layer[1].EncDecAttention
    expected = split(cross.q.weight, 4)[1] @ split(cross.k.weight, 4)[1].T
    name = "decoder.block.0.layer.1.EncDecAttention"
    torch.testing.assert_close(found.qk(name, 1).to_dense(), expected.detach(), atol=1e-5, rtol=1e-5)
    with pytest.raises(ArgumentError, match="cross-attention"):
        found.composition("V")


def test_wrong_arguments():
    model = gpt2()
    found = circuits(model, TOKENS)
    with pytest.raises(ArgumentError, match="3 tokens"):
        circuits(model, TOKENS[:1, :3])
    with pytest.raises(ArgumentError, match="mode"):
        found.composition("q")
    for layer, head in ((3, 0), ("attn", 0), (0, 4), (0, -5)):
        with pytest.raises(IndexOutOfRangeError):
            found.ov(layer, head)
    with pytest.raises(ArgumentTypeError):
        FactoredMatrix(torch.ones(2, 2, dtype=torch.long), torch.ones(2, 2))
    with pytest.raises(ArgumentError):
        FactoredMatrix(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(ArgumentError):
        found.ov(0, 0) @ torch.ones(31, 2)
    with pytest.raises(ArgumentError):
        torch.ones(31) @ found.ov(0, 0)
    with pytest.raises(ArgumentError):
        (torch.ones(3, 32) @ found.ov(0, 0)).eigenvalues()


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_factored_matrices_agree_with_dense_ones(lead):
    A, B = draw(*lead, 11, 5), draw(*lead, 5, 13)
    matrix, dense = FactoredMatrix(A, B), A @ B
    square = FactoredMatrix(A, draw(*lead, 5, 11))
    close = torch.testing.assert_close
    close(matrix.T.to_dense(), dense.mT)
    close(matrix.norm(), torch.linalg.matrix_norm(dense))
    U, S, Vh = matrix.svd()
    close(U * S[..., None, :] @ Vh, dense)
    close(S, torch.linalg.svdvals(dense)[..., :5])
    ours, theirs = square.eigenvalues(), torch.linalg.eigvals(square.to_dense())
    largest = theirs.abs().sort(descending=True).values[..., :5]
    close(ours.abs().sort(descending=True).values, largest)
    close(ours.sum(-1).real, square.to_dense().diagonal(dim1=-2, dim2=-1).sum(-1))
    right, left = draw(13, 4), draw(6, 11)
    close((matrix @ right).to_dense(), dense @ right)
    close((left @ matrix).to_dense(), left @ dense)
    close(matrix @ right[:, 0], dense @ right[:, 0])
    close(left[0] @ matrix, left[0] @ dense)
    narrow = FactoredMatrix(draw(13, 3), draw(3, 7))
    product = matrix @ narrow
    assert product.rank == 3
    close(product.to_dense(), dense @ narrow.to_dense())
    close((matrix @ matrix.T).to_dense(), dense @ dense.mT)
    close(torch.linalg.matrix_norm(left @ matrix.reduce_columns()), torch.linalg.matrix_norm(left @ dense))
    for index in ((..., 3, 4), (..., slice(2, 9), 1), (..., 2, [0, 5]), (..., [4, 2], slice(None, None, 2))):
        entry = matrix[index]
        rows, columns = index[1:]
        expected = dense[..., rows, :][..., columns]
        close(entry.to_dense() if isinstance(entry, FactoredMatrix) else entry, expected)
    if lead:
        close(matrix[1].to_dense(), dense[1])
    assert matrix.shape == tuple(dense.shape)
    assert matrix.ndim == dense.ndim


def test_a_full_circuit_never_has_the_size_of_the_vocabulary_squared():
    model = gpt2()
    found, embedding = circuits(model, TOKENS), model.get_input_embeddings().weight.detach()
    full = embedding @ found.ov(2, 1) @ model.lm_head.weight.detach().T
    assert (full.rank, full.shape) == (8, (61, 61))
    dense = embedding @ found.ov(2, 1).to_dense() @ model.lm_head.weight.detach().T
    torch.testing.assert_close(full[7, :], dense[7], atol=1e-4, rtol=1e-4)
    values = full.eigenvalues()
    score = float(values.real.sum() / values.abs().sum())  # 1 if the head copies
    theirs = torch.linalg.eigvals(dense.double())
    assert score == pytest.approx(float(theirs.real.sum() / theirs.abs().sum()), abs=1e-3)
    assert math.isfinite(score)


def test_half_precision_models():
    model = llama().bfloat16()
    found = circuits(model, TOKENS)
    dense = found.qk(1, 2).to_dense()
    assert dense.dtype is torch.bfloat16
    assert found.composition("K").dtype is torch.float32
    assert found.qk(1, 2).eigenvalues().shape == (8,)
