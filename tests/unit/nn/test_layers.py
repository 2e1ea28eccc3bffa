"""Layers: compared with the formula in NumPy, their gradients, and compile, autocast, state_dict, casts."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import regard
from regard import alibi, causal, padding, relative_bias, rope, sliding_window, softcap
from regard.engines import torch_kernels as kernels
from regard.masks import first
from regard.nn import KVCache, MultiheadAttention, Rope
from regard.testing import assert_matches


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def build_layer(*sizes: int, dtype: torch.dtype = torch.float32, **options) -> MultiheadAttention:
    """A layer without zero parameters."""
    layer = MultiheadAttention(*sizes, dtype=dtype, **options)
    for seed, parameter in enumerate(layer.parameters()):
        values = draw(*parameter.shape, seed=seed, dtype=dtype) * (parameter.shape[-1] ** -0.5)
        parameter.data.copy_(values)
    return layer


def turned(x, positions, layout, frequencies):
    """Each pair of entries as one complex number, multiplied by exp(i · angle)."""
    half = x.shape[-1] // 2
    real, imaginary = (x[..., :half], x[..., half:]) if layout == "half" else (x[..., 0::2], x[..., 1::2])
    angles = (positions[..., None] * frequencies).astype(x.dtype)
    a = real * np.cos(angles) - imaginary * np.sin(angles)
    b = real * np.sin(angles) + imaginary * np.cos(angles)
    if layout == "half":
        return np.concatenate([a, b], -1)
    return np.stack([a, b], -1).reshape(x.shape)


def by_hand(layer, query, key=None, value=None, *, allowed=None, added=0.0, dtype=np.longdouble):
    """Output and weights, step by step, in NumPy."""
    key = query if key is None else key
    value = key if value is None else value

    def heads(projection, x):
        x = x.numpy().astype(dtype) @ projection.weight.detach().numpy().astype(dtype).T
        x = x if projection.bias is None else x + projection.bias.detach().numpy().astype(dtype)
        return x.reshape(*x.shape[:2], -1, layer.head_dim).swapaxes(1, 2)

    q, k, v = (
        heads(projection, x)
        for projection, x in ((layer.q_proj, query), (layer.k_proj, key), (layer.v_proj, value))
    )
    if layer.rope is not None:
        q, k = (
            turned(x, np.arange(x.shape[2]).astype(dtype), layer.rope.layout, layer.rope.frequencies)
            for x in (q, k)
        )
    k, v = (x.repeat(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
    scores = q @ k.swapaxes(-1, -2) * dtype(scale) + np.asarray(added, dtype)
    scores = scores if allowed is None else np.where(allowed, scores, -np.inf)
    shift = scores.max(-1, keepdims=True)
    if layer.sink is not None:
        sink = torch.as_tensor(layer.sink).detach().numpy().astype(dtype).reshape(-1, 1, 1)
        shift = np.maximum(shift, sink)
    weights = np.exp(scores - shift)
    total = weights.sum(-1, keepdims=True)
    weights = weights / (total if layer.sink is None else total + np.exp(sink - shift))
    output = (weights @ v).swapaxes(1, 2).reshape(*query.shape[:2], -1)
    output = output @ layer.out_proj.weight.detach().numpy().astype(dtype).T
    bias = layer.out_proj.bias
    return (output if bias is None else output + bias.detach().numpy().astype(dtype)), weights


def hold(actual, definition, naive, dtype="float32", what="output"):
    actual = actual.detach().double().numpy() if isinstance(actual, torch.Tensor) else actual
    size = np.abs(definition).max(initial=1)
    assert_matches(actual, definition, naive, dtype=dtype, magnitude=size, what=what)


# -- The formula ----------------------------------------------------------------------------------------------

LAYERS = {
    "plain": {},
    "no bias": {"bias": False},
    "bias but for the output": {"out_bias": False},
    "grouped": {"num_kv_heads": 2},
    "multi-query": {"num_kv_heads": 1},
    "wide heads": {"head_dim": 10},
    "scale": {"scale": 0.1},
    "rotary, half": {"rope": "half"},
    "rotary, interleaved": {"rope": "interleaved", "num_kv_heads": 2},
    "sinks": {"sink": "learned"},
    "fixed sink": {"sink": -0.5},
    "all of it": {"num_kv_heads": 2, "head_dim": 6, "rope": "half", "sink": "learned", "out_bias": False},
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_equals_the_formula(name, masked):
    layer, x = (
        build_layer(24, 6 if "head_dim" not in LAYERS[name] else 4, **LAYERS[name]),
        draw(3, 11, 24, seed=50),
    )
    mask = causal() & (sliding_window(5) | first(2)) if masked else None
    allowed = mask.to_dense(11, 11) if masked else None
    output, A = layer(x, mask=mask, need_matrix=True)
    right, naive = by_hand(layer, x, allowed=allowed), by_hand(layer, x, allowed=allowed, dtype=np.float32)
    hold(output, right[0], naive[0])
    hold(A.to_dense(), right[1], naive[1], what="weights")


@pytest.mark.parametrize("wide", [{}, {"kdim": 7}, {"vdim": 5}, {"kdim": 7, "vdim": 5}])
def test_cross_attention(wide):
    layer = build_layer(24, 4, num_kv_heads=2, **wide)
    query, key = draw(3, 5, 24, seed=1), draw(3, 9, wide.get("kdim", 24), seed=2)
    value = draw(3, 9, wide.get("vdim", 24), seed=3)
    lengths = [9, 4, 1]
    allowed = padding(lengths).to_dense(3, 1, 5, 9)
    right, naive = (
        by_hand(layer, query, key, value, allowed=allowed, dtype=t) for t in (np.longdouble, np.float32)
    )
    for given in (padding(lengths), torch.tensor(allowed[:, 0, 0])):
        output, A = layer(query, key, value, padding=given, need_matrix=True)
        hold(output, right[0], naive[0])
        hold(A.to_dense(), right[1], naive[1], what="weights")
    if not wide:
        assert torch.equal(layer(query, key), layer(query, key, key))


def test_score_mods_and_masks_equal_those_of_attention():
    layer, x = build_layer(16, 4), draw(2, 9, 16, seed=7)
    table = draw(8, 4, seed=8).numpy()
    mods = [alibi(), relative_bias(table, bidirectional=True), softcap(2.0)]
    output, A = layer(x, mask=causal(), score_mod=mods, need_matrix=True)
    q, k, v = (p(x).unflatten(-1, (4, 4)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    same = regard.attention(q.detach(), k.detach(), mask=causal(), score_mod=mods)
    torch.testing.assert_close(A.to_dense(), same.to_dense())
    torch.testing.assert_close(output, layer.out_proj((same @ v).transpose(1, 2).flatten(2)))
    assert torch.equal(layer(x, score_mod=alibi()), layer(x, score_mod=[alibi()]))


def test_queries_and_keys_are_normed_before_rotation():
    layer, x = build_layer(16, 2, rope="half", qk_norm=torch.nn.RMSNorm), draw(2, 5, 16, seed=9)
    layer.q_norm.weight.data.uniform_(0.5, 2.0)
    A = layer(x, need_matrix=True)[1]
    q, k = (p(x).unflatten(-1, (2, 8)) for p in (layer.q_proj, layer.k_proj))
    q, k = (rope(n(y).transpose(1, 2), layout="half") for n, y in ((layer.q_norm, q), (layer.k_norm, k)))
    torch.testing.assert_close(A.to_dense(), (q @ k.mT * 8**-0.5).softmax(-1))


def test_unbatched_input():
    layer, x = build_layer(24, 4, num_kv_heads=2, rope="half", sink="learned"), draw(3, 11, 24)
    outputs, A = layer(x, mask=causal(), need_matrix=True)
    for i in range(3):
        output, B = layer(x[i], mask=causal(), need_matrix=True)
        torch.testing.assert_close(output, outputs[i])
        assert B.shape == (4, 11, 11)
        torch.testing.assert_close(B.to_dense(), A[i].to_dense())
    half = layer(x[0], mask=causal(), padding=padding(6))
    torch.testing.assert_close(half[:6], outputs[0, :6])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_masked_and_not_counted(side):
    layer, x, lengths = build_layer(24, 4, rope="interleaved"), draw(3, 9, 24), [9, 4, 6]
    padded = torch.full_like(x, 1e4)
    for i, n in enumerate(lengths):
        padded[i, 9 - n if side == "left" else 0 :][:n] = x[i, :n]
    output = layer(padded, mask=causal(), padding=padding(lengths, side=side))
    for i, n in enumerate(lengths):
        found = output[i, 9 - n if side == "left" else 0 :][:n]
        torch.testing.assert_close(found, layer(x[i, :n], mask=causal()), atol=1e-5, rtol=1e-5)


def test_padding_between_tokens_is_not_counted():
    # Rotary positions are relative, so only padding between tokens could shift them.
    layer, x = build_layer(24, 4, rope="interleaved"), draw(2, 9, 24)
    real = torch.tensor([[1, 0, 1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1, 0, 1]]).bool()
    output = layer(x, mask=causal(), padding=real)
    for i in range(2):
        right = layer(x[i, real[i]], mask=causal())
        torch.testing.assert_close(output[i, real[i]], right, atol=1e-5, rtol=1e-5)


def test_project_kv_projects_keys_once():
    layer, query, memory = (
        build_layer(24, 4, num_kv_heads=2, kdim=7, vdim=7),
        draw(3, 5, 24),
        draw(3, 9, 7, seed=1),
    )
    lengths = padding([9, 4, 1])
    kept = layer.project_kv(memory, padding=lengths)
    layer.k_proj.weight.register_hook(lambda grad: pytest.fail("projected again"))
    direct, A = layer(query, memory, padding=lengths, need_matrix=True)
    for start in (0, 2):
        output, B = layer(query[:, start : start + 2], kept, need_matrix=True)
        torch.testing.assert_close(output, direct[:, start : start + 2])
        torch.testing.assert_close(B.to_dense(), A.to_dense()[:, :, start : start + 2])
    torch.testing.assert_close(layer(query[0], layer.project_kv(memory[0])), direct[0])
    assert kept.lengths.tolist() == [9, 4, 1]


# -- The matrix beside the output -----------------------------------------------------------------------------


def test_the_matrix_costs_nothing_in_the_forward_pass(monkeypatch):
    calls = []
    kernel = kernels.get_kernel("cpu")

    def counted(*arguments):
        calls.append(arguments)
        return kernel.forward(*arguments)

    counting = kernels.Kernel(kernel.name, counted, kernel.backward)
    monkeypatch.setattr(kernels, "get_kernel", lambda device_type: counting)
    layer, x = build_layer(24, 4), draw(3, 70, 24)
    alone = layer(x, mask=causal())
    assert len(calls) == 1
    output, A = layer(x, mask=causal(), need_matrix=True)
    assert len(calls) == 2 and torch.equal(output, alone)
    with torch.no_grad():
        scores = A.scores[...]
        torch.testing.assert_close(A.lse, scores.logsumexp(-1))
    assert A.kernel == "torch: flash on CPU, causal"
    assert len(calls) == 2


def test_dropout_only_while_training():
    layer, x = build_layer(24, 4, num_kv_heads=2, dropout=0.5), draw(3, 11, 24)
    still = copy.deepcopy(layer).eval()
    expected, same = still(x, mask=causal(), need_matrix=True)
    assert torch.equal(still(x, mask=causal()), build_layer(24, 4, num_kv_heads=2)(x, mask=causal()))
    torch.manual_seed(0)
    output, A = layer(x, mask=causal(), need_matrix=True)
    torch.testing.assert_close(A.to_dense(), same.to_dense())  # the matrix before dropout
    torch.manual_seed(0)
    weights = F.dropout(same.to_dense(), 0.5)
    assert 0.3 < (weights[same.to_dense() > 0] == 0).double().mean() < 0.7
    v = layer.v_proj(x).unflatten(-1, (2, 6)).transpose(1, 2).repeat_interleave(2, 1)
    torch.testing.assert_close(output, layer.out_proj((weights @ v).transpose(1, 2).flatten(2)))
    assert not torch.allclose(output, expected)


# -- Gradients ------------------------------------------------------------------------------------------------

GRADIENTS = {
    "plain": ({}, {}),
    "causal": ({"num_kv_heads": 1}, {"mask": causal()}),
    "rotary, sinks, window": (
        {"rope": "half", "sink": "learned"},
        {"mask": causal() & sliding_window(2)},
    ),
    "interleaved, capped": ({"rope": "interleaved"}, {"score_mod": softcap(1.0), "mask": causal()}),
    "one more key": ({"bias_kv": True, "sink": 0.0}, {"mask": causal(), "score_mod": alibi()}),
    "normed, padded": ({"qk_norm": torch.nn.RMSNorm}, {"padding": padding([3, 2])}),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_everything(name):
    options, arguments = GRADIENTS[name]
    layer = build_layer(4, 2, dtype=torch.float64, **options).double()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,), arguments)

    x = draw(2, 3, 4, seed=99, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *parameters))


def test_gradients_with_dropout():
    layer = build_layer(4, 2, dtype=torch.float64, dropout=0.3, sink="learned")

    def run(x, sink):
        torch.manual_seed(3)
        return torch.func.functional_call(layer, {"sink": sink}, (x,), {"mask": causal()})

    x = draw(2, 3, 4, seed=99, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, layer.sink))


# -- compile, autocast, state_dict, casts ---------------------------------------------------------------------


def compiled(layer: MultiheadAttention, backend: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    x = draw(3, 11, 24).requires_grad_()
    quick = torch.compile(layer, backend=backend)
    for arguments in (
        {"mask": causal()},
        {"mask": causal(), "score_mod": alibi(), "padding": padding([2, 11, 5])},
    ):
        output, A = quick(x, need_matrix=True, **arguments)
        expected = layer(x, **arguments)
        torch.testing.assert_close(output, expected)
        assert A.shape == (3, 4, 11, 11)
        (found,) = torch.autograd.grad(output.square().sum(), x)
        (right,) = torch.autograd.grad(expected.square().sum(), x)
        torch.testing.assert_close(found, right)
    # The graph breaks in one place only: at the matrix.
    assert len(counters["graph_break"]) == 1 and "masks and matrices are Python objects" in str(counters)


# The compiler emits warnings of its own.
by_compiler = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@by_compiler
def test_compiled_for_autograd():
    compiled(build_layer(24, 4, num_kv_heads=2, rope="half"), "aot_eager")


@pytest.mark.nightly
@by_compiler
def test_compiled_by_the_inductor():
    compiled(build_layer(24, 4, num_kv_heads=2, rope="half"), "inductor")


def test_under_autocast():
    layer, x = build_layer(32, 4, num_kv_heads=2, rope="half", sink="learned"), draw(2, 300, 32)
    right = copy.deepcopy(layer).double()(x.double(), mask=causal())
    with torch.autocast("cpu", torch.bfloat16):
        output, A = layer(x, mask=causal(), need_matrix=True)
        q, k, v = (
            p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        q, k = (rope(y, layout="half") for y in (q, k))
        scores = (q @ k.repeat_interleave(2, 1).mT * 8**-0.5).masked_fill(
            ~torch.ones(300, 300).tril().bool(), -torch.inf
        )
        scores = torch.cat([scores, layer.sink[:, None, None].expand(2, 4, 300, 1)], -1)
        naive = layer.out_proj(
            (scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2)
        )
    assert output.dtype == torch.bfloat16 and A.dtype == torch.float32
    hold(output, right.detach().numpy(), naive.detach().double().numpy(), "bfloat16")
    output.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("options", [{}, LAYERS["all of it"], {"bias_kv": True, "sink": 0.0, "rope": "half"}])
def test_state_dict_round_trip(options):
    layer, x = build_layer(24, 4, **options), draw(2, 7, 24)
    output = layer(x, mask=causal())
    state = layer.state_dict()
    assert not any("cos" in name or "sin" == name.split(".")[-1] for name in state)
    other = MultiheadAttention(24, 4, **options)
    other.load_state_dict(state, strict=True)
    assert torch.equal(other(x, mask=causal()), output)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again(x, mask=causal()), output)
    assert ("sink" in state) == (options.get("sink") == "learned")


def test_moved_and_cast():
    layer, x = build_layer(24, 4, rope="half", sink="learned"), draw(2, 7, 24)
    output = layer(x)
    torch.testing.assert_close(layer.double()(x.double()).float(), output)
    assert layer.rope.cos.dtype == torch.float64
    half = layer.bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16 and half.rope.cos.dtype == torch.float32
    torch.testing.assert_close(layer.float()(x), output, atol=0.02, rtol=0.02)  # the weights were rounded
    assert layer.to("meta").out_proj.weight.is_meta


# -- Rotary positions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_19_rope_rotates_tensors_as_arrays(layout):
    x, at = draw(2, 3, 5, 8, dtype=torch.float64), np.array([0, 7, 1000, 131_071, 2])
    right = rope(x.numpy(), at, layout=layout)
    np.testing.assert_allclose(right, turned(x.numpy(), at, layout, 1e4 ** (-np.arange(4) / 4)), atol=1e-12)
    np.testing.assert_allclose(rope(x, at, layout=layout), right, atol=1e-15)
    np.testing.assert_allclose(rope(x, torch.tensor(at), layout=layout), right, atol=1e-15)
    module = Rope(8, layout=layout)
    np.testing.assert_allclose(module(x, at), right, atol=1e-15)
    for dtype, eps in ((torch.float32, 2**-23), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
        for found in (module.to(dtype)(x.to(dtype), at), rope(x.to(dtype), at, layout=layout)):
            exact = rope(x.to(dtype).double(), at, layout=layout)
            assert found.dtype == dtype
            assert (found.double() - exact).abs().max() <= 4 * eps * x.abs().max()
    y = x[:1, :1].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda y: rope(y, at, layout=layout), y)
    assert torch.autograd.gradcheck(lambda y: module(y, at), y)


def test_rope_tables_grow_and_accept_every_form_of_positions():
    module, x = Rope(8, layout="half"), draw(2, 3, 5, 8)
    whole = rope(draw(2, 3, 5, 8), np.arange(40, 45), layout="half")
    for at in (40, np.arange(40, 45), torch.arange(40, 45), torch.arange(40, 45).expand(2, 5)):
        torch.testing.assert_close(module(x, at), whole)
    each = module(x, torch.tensor([[0, 1, 2, 3, 4], [40, 41, 42, 43, 44]]))
    torch.testing.assert_close(each[0], module(x)[0])
    torch.testing.assert_close(each[1], whole[1])
    assert 45 <= len(module.cos) <= 90 and not module.state_dict()


def test_partial_rope_with_custom_frequencies():
    x, angles = draw(2, 3, 5, 8), np.array([0.5, 0.02])
    found = Rope(8, layout="interleaved", frequencies=torch.tensor(angles), factor=1.5)(x)
    right = turned(x[..., :4].double().numpy(), np.arange(5), "interleaved", angles) * 1.5
    np.testing.assert_allclose(found[..., :4], right, atol=1e-6)
    assert torch.equal(found[..., 4:], x[..., 4:])


# -- Errors ---------------------------------------------------------------------------------------------------

x = torch.zeros(2, 5, 24)
INVALID = {
    "heads that do not divide": (lambda: MultiheadAttention(24, 5), "num_heads 5.*divides.*pass head_dim"),
    "grouping that does not divide": (
        lambda: MultiheadAttention(24, 4, num_kv_heads=3),
        "num_kv_heads 3.*multiple of num_kv_heads.*in a row",
    ),
    "no heads": (lambda: MultiheadAttention(24, 0), "num_heads 0.*above 0"),
    "all dropped": (
        lambda: MultiheadAttention(24, 4, dropout=1.0),
        "dropout=1.0.*probability.*0.0 drops none",
    ),
    "layout": (
        lambda: MultiheadAttention(24, 4, rope="halves"),
        "layout='halves'.*half.*interleaved.*rotate_half",
    ),
    "odd heads": (lambda: MultiheadAttention(20, 4, rope="half"), "head_dim 5.*even.*in pairs"),
    "another rope": (
        lambda: MultiheadAttention(24, 4, rope=Rope(8, layout="half")),
        r"rope of head_dim 8.*as in the layer.*Rope\(6, layout='half'\)",
    ),
    "sinks of no kind": (
        lambda: MultiheadAttention(24, 4, sink=True),
        "sink=True.*learned.*fixed for all heads",
    ),
    "positions below 0": (
        lambda: build_layer(24, 4, rope="half")(x, positions=torch.arange(-1, 4)),
        r"some below 0; expected integers from 0, of shape \(5,\) or \(2, 5\)",
    ),
    "too few positions": (
        lambda: build_layer(24, 4, rope="half")(x, positions=[[1, 2]]),
        r"\(1, 2\).*each token",
    ),
    "width": (
        lambda: build_layer(24, 4)(x[..., :7]),
        r"query as an array .*\(2, 5, 7\).*\(batch, n, 24\).*kdim",
    ),
    "key without batch": (lambda: build_layer(24, 4)(x, x[0]), "key as an array.*batch"),
    "an array": (lambda: build_layer(24, 4)(x.numpy()), "a tensor"),
    "value without key": (lambda: build_layer(24, 4)(x, value=x), "a value and no key.*self-attention"),
    "cache and key": (
        lambda: build_layer(24, 4)(x, x + 1, cache=KVCache()),
        r"a cache and a key.*project_kv\(key\)",
    ),
    "cache and positions": (
        lambda: build_layer(24, 4)(x, positions=[1], cache=KVCache()),
        "counts positions",
    ),
    "cached and padding": (
        lambda: build_layer(24, 4)(x, build_layer(24, 4).project_kv(x), padding=padding([1, 2])),
        r"project_kv\(key, padding=…\)",
    ),
    "padding of numbers": (
        lambda: build_layer(24, 4)(x, padding=[[1, 0, 0, 0, 0]] * 2),
        "True = a real token.*!= 0",
    ),
    "padding that depends on the query": (
        lambda: build_layer(24, 4)(x, padding=causal()),
        r"padding as causal\(\)",
    ),
    "padding of another length": (lambda: build_layer(24, 4)(x, padding=torch.ones(2, 4).bool()), "kv_len 5"),
    "a tensor for a mask": (
        lambda: build_layer(24, 4)(x, mask=torch.ones(5, 5).bool()),
        r"masks\.dense\(array\)",
    ),
    "a mask not called": (
        lambda: build_layer(24, 4)(x, mask=causal, cache=KVCache()),
        r"causal\(\)\.$",
    ),
    "score_mod": (
        lambda: build_layer(24, 4)(x, score_mod=torch.ones(5, 5), cache=KVCache()),
        r"bias\(array\)",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments_raise_an_error_with_a_hint(name):
    call, message = INVALID[name]
    with pytest.raises(regard.RegardError, match=message):
        call()


def test_public_names_are_sorted_and_documented():
    assert regard.nn.__all__ == sorted(regard.nn.__all__)
    assert all(getattr(regard.nn, name).__doc__ for name in regard.nn.__all__)
