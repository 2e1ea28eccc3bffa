"""Linear attention: gradients, growth with the length, printed descriptions, and feature maps."""

from __future__ import annotations

import math
import time
import tracemalloc

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
from regard import Entropy, Position, attention, linear_attention  # noqa: E402
from regard.core import linear as _linear  # noqa: E402
from regard.feature_maps import elu, random_features, relu  # noqa: E402
from regard.masks import causal, dense, document, first, padding, prefix, sliding_window  # noqa: E402
from regard.tiling import use_tile_sizes  # noqa: E402
from tests.helpers.linear_cases import MASKS, SOME, D, N, draw  # noqa: E402

# -- Gradients --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_chunks(small):
    """Use chunks so small that a few dozen tokens are split into many; more features would make them larger."""
    with use_tile_sizes(linear_chunk=4):
        yield


def learnt(*arrays):
    return [torch.tensor(array, requires_grad=True) for array in arrays]


GRADIENTS = {
    "none": (None, "elu"),
    "causal": (causal(), "elu"),
    "window": (sliding_window(3), "relu"),
    "dense": (dense(SOME[:7, :7]), "elu"),
    "random": (causal(), random_features(4)),
}


@pytest.mark.parametrize(("mask", "feature_map"), GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_through_the_product(mask, feature_map):
    rng = np.random.default_rng(14)
    query, key, value = learnt(*(rng.normal(size=(7, width)) for width in (3, 3, 2)))

    def product(query, key, value):
        return linear_attention(query, key, mask=mask, feature_map=feature_map) @ value

    assert torch.autograd.gradcheck(product, (query, key, value))


@pytest.mark.parametrize("what", ["entries", "lse", "streamed", "scores"])
def test_gradients_of_entries_and_measures_are_right_where_a_product_is_zero(what):
    # Some features are zeros, so that a product of zero has a gradient.
    rng = np.random.default_rng(15)
    features = [rng.uniform(0.5, 2.0, size=(5, 4)) * (rng.random((5, 4)) < 0.4) for _ in range(2)]
    features[0][0], features[1][0] = [1, 0, 0, 0], [0, 1, 0, 0]
    value = torch.tensor(rng.normal(size=(5, 2)))
    query, key = learnt(*features)
    mask = causal()
    A = linear_attention(query, key, mask=mask | first(2), feature_map=lambda x: x)
    products = torch.where(torch.tensor((mask | first(2)).to_dense(5, 5)), query @ key.T, 0.0)
    total = products.sum(-1, keepdim=True)
    weights = products / torch.where(total == 0, 1.0, total)
    assert bool((products == 0)[:, :2].any()) and bool((total > 0).any())
    if what == "entries":
        ours, theirs = (A.to_dense() @ value).sum(), (weights @ value).sum()
    elif what == "streamed":
        poisoned = torch.cat([value, torch.full((1, 2), math.nan)])
        more = torch.cat([key, torch.ones((1, 4), dtype=key.dtype)])
        B = linear_attention(
            query, more, mask=(causal("upper_left") | first(2)) & padding(5), feature_map=lambda x: x
        )
        ours, theirs = (B @ poisoned).sum(), (weights @ value).sum()
        assert "block loop" in B.kernel
    elif what == "lse":
        live = (total > 0)[:, 0]
        ours, theirs = A.lse[live].sum(), total[live].log().sum()
    else:
        live = products > 0
        ours, theirs = A.scores[...][live].sum(), products[live].log().sum()
    assert torch.allclose(ours, theirs)
    mine, its = (torch.autograd.grad(x, (query, key)) for x in (ours, theirs))
    for a, b in zip(mine, its, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_a_live_nan_reaches_its_rows_also_with_gradients():
    query, key, _ = learnt(*draw(27, lead=()))
    with torch.no_grad():
        key[9, 2] = math.nan
    weights = linear_attention(query, key, mask=causal()).to_dense()
    assert weights.requires_grad
    lower = np.tril(np.ones((N, N), bool)) & (np.arange(N) >= 9)[:, None]
    assert np.array_equal(weights.detach().isnan().numpy(), lower)


def test_an_empty_row_has_no_gradient():
    query, key, value = learnt(*draw(16, 9, 4, lead=()))
    A = linear_attention(query, key, mask=causal("lower_right"))
    (A @ value).sum().backward()
    assert not query.grad[:5].any() and query.grad[6:].any()
    assert all(bool(x.grad.isfinite().all()) for x in (query, key, value))


@use_tile_sizes(linear_chunk=16)
@pytest.mark.parametrize("mask", [causal(), "half"], ids=str)
def test_memory_saved_for_gradients_grows_with_the_length(mask):

    def saved_numbers(n):
        sizes = {}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        some = dense(np.arange(n)[:, None] % 2 == np.arange(n) % 2) if mask == "half" else mask
        query, key, value = learnt(*draw(17, n, n, lead=()))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = linear_attention(query, key, mask=some) @ value
        assert output.grad_fn is not None
        return sum(sizes.values())

    assert saved_numbers(240) <= 5 * saved_numbers(60)  # n² would be 16


def test_gradients_at_half_precision_and_under_autocast():
    query, key, value = (torch.tensor(x, dtype=torch.bfloat16, requires_grad=True) for x in draw(18))
    with torch.autocast("cpu", torch.bfloat16):
        A = linear_attention(query, key, mask=causal())
        output = A @ value
    assert A.dtype == torch.float32 and output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(x.grad.dtype == torch.bfloat16 and bool(x.grad.isfinite().all()) for x in (query, key, value))
    wide = [x.detach().float() for x in (query, key, value)]
    assert torch.equal(output, (linear_attention(*wide[:2], mask=causal()) @ wide[2]).bfloat16())


# -- Growth -----------------------------------------------------------------------------------------------

LINEAR = {
    "none": lambda n: None,
    "causal": lambda n: causal(),
    "window": lambda n: sliding_window(40),
    "wide window": lambda n: sliding_window(n // 2),
    "documents": lambda n: document(np.arange(n) // 50),
    "long documents": lambda n: document(np.arange(n) // (n // 3)),
    "padding": lambda n: padding([n - 7, n // 2]),
    "prefix": lambda n: prefix(n // 3),
    "several": lambda n: causal() & padding([n, n // 3]) & (sliding_window(n // 4) | first(4)),
}


def explicit_tiles(kernel):
    words = kernel.split()
    return int(words[words.index("of") - 1]), int(words[words.index("of") + 1])


@pytest.mark.parametrize("mask", LINEAR.values(), ids=LINEAR)
def test_explicitly_computed_tiles_grow_with_the_length(mask):
    def tiles(n):
        return explicit_tiles(linear_attention(*np.ones((2, 2, 1, n, D)), mask=mask(n)).kernel)

    (few, of_few), (many, of_many) = tiles(400), tiles(1600)
    assert of_many == 16 * of_few
    assert many <= 5 * few
    assert many <= of_many / 8


def test_the_kernel_name_counts_the_explicitly_computed_tiles(monkeypatch):
    ran = []
    tile = _linear.LinearProblem._multiply_tile
    monkeypatch.setattr(
        _linear.LinearProblem, "_multiply_tile", lambda self, *given: (ran.append(1), tile(self, *given))[1]
    )
    query, key, value = draw(19, lead=())
    for mask in MASKS.values():
        if mask is None or getattr(mask, "left", None) is MASKS["windows of heads"].left:
            continue
        A = linear_attention(query, key, mask=mask)
        before = A.kernel
        ran.clear()
        A @ value
        assert A.kernel == before and explicit_tiles(before)[0] == len(ran)
    n = -(-N // 5)  # five features make chunks of five
    assert linear_attention(query, key, mask=dense(SOME)).kernel == (
        f"numpy: linear attention, {n * n} of {n * n} tiles computed explicitly"
    )


@use_tile_sizes(linear_chunk=128)
@pytest.mark.parametrize("mask", [None, causal()], ids=str)
def test_time_grows_with_the_length(mask):
    rng = np.random.default_rng(20)

    def seconds(n):
        query, key, value = rng.normal(size=(3, n, 16)).astype(np.float32)
        A = linear_attention(query, key, mask=mask)
        start = time.process_time()
        A @ value
        return time.process_time() - start

    pairs = [(seconds(4096), seconds(32768)) for _ in range(3)]
    assert min(long for _, long in pairs) <= 24 * min(
        short for short, _ in pairs
    )  # eight times; n² would be 64


@use_tile_sizes(linear_chunk=256)
@pytest.mark.parametrize("mask", [None, causal()], ids=str)
def test_memory_at_65536_tokens_is_a_few_times_that_of_the_inputs(mask):
    n, width = 65536, 16
    query, key, value = np.random.default_rng(21).normal(size=(3, n, width)).astype(np.float32)
    tracemalloc.start()
    try:
        A = linear_attention(query, key, mask=mask)
        output, lse = A @ value, A.lse
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert output.shape == (n, width) and np.isfinite(lse).all()
    assert peak < 10 * 3 * n * width * 4  # 126 MB; the matrix would be 17 GB


# -- Printed descriptions ---------------------------------------------------------------------------------


def test_repr_plan_and_explanation_name_linear_attention():
    A = linear_attention([[1.0, 0.0]], [[1.0, 0.0], [0.0, -1.0]])
    assert repr(A).splitlines()[0] == "AttentionMatrix(q_len 1, kv_len 2) float64, linear attention (elu)"
    masked = linear_attention(*np.zeros((2, 15, 2)), mask=causal(), feature_map=random_features(8, seed=3))
    assert repr(masked) == (
        "AttentionMatrix(q_len 15, kv_len 15) float64, linear attention (random_features(8, seed=3)), mask causal()"
    )
    assert masked.plan(Position()) == (
        "numpy: linear attention, 2 of 4 tiles computed explicitly, one product: lse; "
        "position from extra value columns"
    )
    assert "one pass with the lse of the product: entropy" in masked.plan(Entropy())
    explanation = A.explain(0, value=[[1.0], [2.0]])
    assert np.allclose(explanation.raw_scores, [5, 2 + math.exp(-1)])
    assert np.allclose(explanation.scores, np.log(explanation.raw_scores)) and np.allclose(
        explanation.output, A @ [1.0, 2.0]
    )
    assert "attends by the features elu of query and key" in str(
        explanation
    ) and "Scale: × 1, then log" in str(explanation)


def test_causal_requires_an_alignment():
    with pytest.raises(regard.ArgumentError, match="align"):
        linear_attention(np.ones((3, 2)), np.ones((4, 2)), mask=causal())


# -- Feature maps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [elu, relu, random_features(16)], ids=["elu", "relu", "random"])
def test_a_feature_map_is_the_same_on_both_engines(given):
    x = np.random.default_rng(22).normal(size=(2, 7, 5))
    made = given(x)
    assert (made >= 0).all() and made.shape[:-1] == x.shape[:-1]
    assert np.allclose(given(torch.tensor(x)), made, rtol=1e-12)


def test_elu_equals_torch_elu_plus_one():
    x = torch.linspace(-20, 5, 101, dtype=torch.float64, requires_grad=True)
    ours, theirs = elu(x), torch.nn.functional.elu(x) + 1
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-15)
    grads = [torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs)]
    assert torch.allclose(*grads)


def test_random_features_estimate_softmax_attention_without_bias():
    rng = np.random.default_rng(23)
    query, key = rng.normal(size=(2, 6, 4)) * 0.7
    features = [random_features(6, seed) for seed in range(600)]
    found = np.array([each(query) @ each(key).T for each in features])
    error = (found.mean(0) - np.exp(query @ key.T / 2)) / (found.std(0) / math.sqrt(len(features)))
    assert np.abs(error).max() < 4.5 and 0.5 < error.std() < 2  # in standard errors of the mean
    assert random_features(9) == random_features(9, seed=0) != random_features(9, seed=1)
    assert not np.array_equal(random_features(9)(query), random_features(9, seed=1)(query))


def test_more_random_features_are_closer_to_softmax_attention():
    query, key, value = (x / 2 for x in draw(25, lead=()))
    exact = attention(query, key) @ value

    def error(count):
        maps = [random_features(count, seed) for seed in range(8)]
        return np.mean([np.abs(linear_attention(query, key, feature_map=m) @ value - exact) for m in maps])

    assert error(1024) < 0.5 * error(32)


def test_a_custom_map_may_have_any_number_of_features():
    query, key, value = draw(24)

    def polynomial(x):
        return np.concatenate([np.ones_like(x[..., :1]), x**2, np.abs(x)], axis=-1)

    A = linear_attention(query, key, feature_map=polynomial, mask=causal())
    products = np.tril(polynomial(query) @ polynomial(key).swapaxes(-1, -2))
    assert np.allclose(A @ value, products @ value / products.sum(-1, keepdims=True), rtol=1e-12)
    assert "linear attention (polynomial)" in repr(A)


def test_a_trainable_map_gets_gradients():
    torch.manual_seed(0)
    learnt_map = torch.nn.Sequential(torch.nn.Linear(D, 6, dtype=torch.float64), torch.nn.Softplus())
    query, key, value = map(torch.tensor, draw(26))
    A = linear_attention(query, key, feature_map=learnt_map, mask=causal())
    assert "linear attention (Sequential)" in repr(A)
    products = torch.tril(learnt_map(query) @ learnt_map(key).mT)
    grads = [
        torch.autograd.grad((output**2).sum(), list(learnt_map.parameters()))
        for output in (A @ value, products / products.sum(-1, keepdim=True) @ value)
    ]
    assert all(torch.allclose(ours, theirs, rtol=1e-10) for ours, theirs in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("feature_map", "kind", "words"),
    [
        ("gelu", ValueError, "received feature_map='gelu'; expected \"elu\" or \"relu\", or a function"),
        (3, TypeError, "received int 3"),
        (random_features, TypeError, "Call it: random_features()."),
        (lambda x: x, ValueError, "<lambda> of query with features down to -1"),
        (lambda x: x[..., 0], ValueError, "A feature map changes only the last axis"),
        (lambda x: torch.ones(x.shape), ValueError, "of numpy"),
        (lambda x: np.ones((len(x), len(x))), ValueError, "2 features of query and 3 of key"),
        (lambda x: x > 0, TypeError, "the features of query"),
    ],
    ids=["name", "number", "factory", "negative", "shape", "library", "counts", "booleans"],
)  # fmt: skip
def test_an_invalid_feature_map_is_refused_with_a_hint(feature_map, kind, words):
    with pytest.raises(kind) as refusal:
        linear_attention(np.array([[1.0, -1.0]] * 2), np.ones((3, 2)), feature_map=feature_map)
    assert isinstance(refusal.value, regard.RegardError) and words in str(refusal.value)
    assert str(refusal.value).startswith("linear_attention: ")


def test_negative_features_that_require_grad_are_refused():
    (query,) = learnt([[1.0, -2.0]])
    with pytest.raises(regard.ArgumentError, match=r"<lambda> of query with features down to -2"):
        linear_attention(query, query, feature_map=lambda x: x)


def test_wrong_shapes_name_linear_attention_in_the_error():
    with pytest.raises(regard.ArgumentError, match=r"^linear_attention: .*the same head_dim"):
        linear_attention(np.ones((3, 2)), np.ones((4, 5)))
    with pytest.raises(regard.ArgumentTypeError, match=r"^mask: "):
        linear_attention(np.ones((3, 2)), np.ones((3, 2)), mask=np.ones((3, 3), bool))
