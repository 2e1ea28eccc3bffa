"""What the further chapters of `regard.learn` promise: rivals, variance, additive scores, the block, the costs."""

from __future__ import annotations

import itertools
import json
import math
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard import learn
from regard.learn import (
    AdditiveAttention,
    Cost,
    FeedForward,
    LayerNorm,
    MultiHeadAttention,
    PublishedModel,
    RecurrentNetwork,
    ScaledDotProductAttention,
    TransformerBlock,
    attention_by_loops,
    cat,
    compare_softmax_alternatives,
    cost_table,
    create_causal_mask,
    create_padding_mask,
    fit_exponent,
    gaussian_kernel,
    hardmax,
    iter_multiplications,
    kernel_attention,
    model_table,
    pad_batch,
    profile,
    published_models,
    scaled_dot_product_attention,
    sharpness,
    softmax,
    softmax_jacobian,
    sparsemax,
    unit_vectors,
    variance_experiment,
)
from regard.learn.softmax_alternatives import ALTERNATIVES

COSTS = json.loads((Path(__file__).parents[2] / "data/worked_examples.json").read_text("utf-8"))["costs"]


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


# Softmax and its rivals


every_rival = pytest.mark.parametrize("rival", ALTERNATIVES.values(), ids=ALTERNATIVES.keys())
rows_of_scores = st.lists(st.floats(-50, 50, width=16), min_size=1, max_size=7).map(np.array)


@given(rows_of_scores)
def test_softmax_is_its_definition(scores: Any) -> None:
    wide = np.exp(scores.astype(np.longdouble))
    np.testing.assert_allclose(softmax(scores), (wide / wide.sum()).astype(float), rtol=1e-13)
    np.testing.assert_allclose(
        softmax(scores), ScaledDotProductAttention(1).compute_weights(scores[None])[0], rtol=1e-15
    )


@given(rows_of_scores, st.floats(0.25, 8, width=16))
def test_temperature_divides_the_scores(scores: Any, temperature: float) -> None:
    np.testing.assert_allclose(
        softmax(scores, temperature=temperature), softmax(scores / temperature), rtol=1e-12
    )


@given(rows_of_scores)
def test_temperature_runs_from_one_hot_to_uniform(scores: Any) -> None:
    np.testing.assert_array_equal(softmax(scores, temperature=0), hardmax(scores))
    np.testing.assert_array_equal(softmax(scores, temperature=1e-300), hardmax(scores))
    np.testing.assert_allclose(softmax(scores, temperature=math.inf), 1 / len(scores))


@given(rows_of_scores)
def test_hardmax_is_one_hot_or_shared_among_equals(scores: Any) -> None:
    best = scores == scores.max()
    np.testing.assert_array_equal(hardmax(scores), best / best.sum())


@given(rows_of_scores)
def test_sparsemax_is_the_nearest_distribution(scores: Any) -> None:
    weights = sparsemax(scores)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1, abs=1e-13)
    # The projection onto a convex set is the one point p with (scores − p) · (corner − p) ≤ 0 for every corner.
    for corner in np.eye(len(scores)):
        assert (scores - weights) @ (corner - weights) <= 1e-11


@given(rows_of_scores, st.integers(0, 2**32 - 1))
def test_no_other_distribution_is_nearer_than_sparsemax(scores: Any, seed: int) -> None:
    others = np.random.default_rng(seed).dirichlet(np.ones(len(scores)), size=20)
    nearest = np.linalg.norm(scores - sparsemax(scores))
    assert (np.linalg.norm(scores - others, axis=1) >= nearest - 1e-12).all()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("normalised_sigmoid", lambda s: 1 / (1 + math.exp(-s))),
        ("normalised_relu", lambda s: max(s, 0)),
        ("divide_by_sum", lambda s: s),
    ],
)
def test_the_parts_are_divided_by_their_sum(name: str, part: Any) -> None:
    scores = [0.5, -2.0, 3.0, 1.0, 0.0]
    parts = [part(s) for s in scores]
    np.testing.assert_allclose(ALTERNATIVES[name](scores), np.array(parts) / sum(parts), rtol=1e-14)


@every_rival
def test_a_mask_leaves_what_is_seen_to_itself(rival: Any) -> None:
    scores, mask = draw(5, 7) + 0.3, draw(5, 7, seed=1) < 0.5
    mask[2] = False
    got = rival(scores, mask)
    assert got.shape == (5, 7)
    for row, seen, weights in zip(scores, mask, got, strict=True):
        assert (weights[~seen] == 0).all()
        if seen.any():
            np.testing.assert_allclose(weights[seen], rival(row[seen]), rtol=1e-12, atol=1e-14)
    for poison in (math.nan, math.inf, -math.inf, 1e300):
        np.testing.assert_array_equal(rival(np.where(mask, scores, poison), mask), got)
    np.testing.assert_array_equal(rival(np.where(mask, scores, -math.inf)), got)


@every_rival
def test_rivals_work_on_the_last_axis_of_any_shape(rival: Any) -> None:
    scores = draw(2, 3, 5)
    got = rival(scores)
    for where in np.ndindex(2, 3):
        np.testing.assert_allclose(got[where], rival(scores[where]), rtol=1e-14)
    for shape in [(0,), (3, 0), (0, 4)]:
        assert rival(np.ones(shape)).shape == shape
    order = [3, 0, 4, 1, 2]
    np.testing.assert_allclose(rival(scores[..., order]), got[..., order], atol=1e-12)


def test_what_each_rival_can_and_cannot_do() -> None:
    found = compare_softmax_alternatives([1, 0.5, 0, -1])
    assert list(found.rows) == list(ALTERNATIVES)
    for name, row in found.rows.items():
        np.testing.assert_array_equal(row.weights, ALTERNATIVES[name]([1, 0.5, 0, -1]))
        distribution = (row.weights >= 0).all() and abs(row.weights.sum() - 1) < 1e-12
        assert distribution == (name not in ("divide_by_sum", "divide_by_maximum"))
        assert (row.change_if_shifted < 1e-12) == (name in ("softmax", "sparsemax", "hardmax"))
        assert (row.change_if_doubled < 1e-12) == (name not in ("softmax", "sparsemax", "normalised_sigmoid"))
    assert not np.isfinite(ALTERNATIVES["divide_by_sum"]([1, -1])).any()
    assert (ALTERNATIVES["normalised_relu"]([-1, -2]) == 0).all()


@given(rows_of_scores)
def test_the_jacobian_is_the_derivative(scores: Any) -> None:
    weights, step = softmax(scores), 1e-5
    jacobian = softmax_jacobian(weights)
    for j, nudge in enumerate(np.eye(len(scores)) * step):
        slope = (softmax(scores + nudge) - softmax(scores - nudge)) / (2 * step)
        np.testing.assert_allclose(
            jacobian[:, j], slope, atol=1e-9
        )  # the next term is step² / 6, and rounding
    np.testing.assert_allclose(jacobian.sum(axis=0), 0, atol=1e-15)  # the weights go on summing to 1


def test_a_saturated_softmax_has_no_gradient() -> None:
    one_hot = softmax([40, 0, 0, 0, 0])
    assert one_hot[0] > 1 - 1e-15
    assert 1e12 * sharpness(one_hot).gradient < sharpness(softmax([4, 0, 0, 0, 0])).gradient


# Variance


def test_variance_grows_with_d_k_and_scaling_takes_it_back() -> None:
    found = variance_experiment(d_k=[2, 16, 128], samples=1000)
    assert [row.d_k for row in found.rows] == [2, 16, 128]
    for row in found.rows:
        # The keys of one query share it, which widens the error; a quarter is more than five standard errors.
        assert row.predicted == row.d_k
        assert row.variance == pytest.approx(row.d_k, rel=0.25)
        assert row.scaled_variance == pytest.approx(row.variance / row.d_k, rel=1e-12)
    for a, b in itertools.pairwise(row.unscaled for row in found.rows):
        assert a.largest_weight < b.largest_weight
        assert a.entropy > b.entropy
        assert a.gradient > b.gradient
    last = found.rows[-1]
    assert last.unscaled.largest_weight > 0.85 > 0.45 > last.scaled.largest_weight
    assert last.scaled.gradient > 2 * last.unscaled.gradient
    assert 0.4 < fit_exponent([2, 16, 128], [math.sqrt(row.variance) for row in found.rows]) < 0.6


@pytest.mark.parametrize(("options", "power"), [({"sigma": 3.0}, 1), ({"unit": True}, -1)])
def test_variance_of_other_vectors(options: Any, power: int) -> None:
    for row in variance_experiment(d_k=[4, 32], samples=1000, **options).rows:
        assert row.predicted == pytest.approx(row.d_k**power * options.get("sigma", 1) ** 4)
        assert row.variance == pytest.approx(row.predicted, rel=0.25)


def test_the_experiment_comes_from_its_seed_and_prints() -> None:
    first, again, other = (variance_experiment(d_k=[4, 8], samples=20, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other
    title, headings, *lines = str(first).splitlines()
    assert title == "20 queries against 8 keys each, entries of variance 1"
    assert headings.split()[:3] == ["d_k", "predicted", "variance"]
    assert [line.split()[0] for line in lines] == ["4", "8"]
    assert f"{first.rows[1].scaled.gradient:.3f}" == lines[1].split()[-1]
    assert "unit vectors" in str(variance_experiment(d_k=[2], samples=3, unit=True))


def test_sharpness_from_its_definition() -> None:
    weights = softmax(draw(5, 7))
    found = sharpness(weights)
    assert found.largest_weight == pytest.approx(np.mean([max(row) for row in weights]))
    assert found.entropy == pytest.approx(np.mean([-sum(w * math.log(w) for w in row) for row in weights]))
    norms = [np.linalg.norm(np.diag(row) - np.outer(row, row)) for row in weights]
    assert found.gradient == pytest.approx(np.mean(norms))


def test_unit_vectors_remove_magnitude() -> None:
    K = learn.magnitude.K
    np.testing.assert_allclose(np.linalg.norm(unit_vectors(draw(2, 3, 5)), axis=-1), 1, rtol=1e-15)
    short, long, across = ScaledDotProductAttention(2).compute_scores(learn.magnitude.Q, unit_vectors(K))[0]
    assert short == pytest.approx(long, rel=1e-15)
    assert across < short


# Additive attention


def test_additive_scores_from_the_definition() -> None:
    layer = AdditiveAttention(d_q=3, d_k=2, hidden_dim=11, seed=4)
    Q, K, V = draw(5, 3), draw(7, 2), draw(7, 13)
    want = [[layer.w @ np.tanh(q @ layer.W_Q + k @ layer.W_K) for k in K] for q in Q]
    np.testing.assert_allclose(layer.compute_scores(Q, K), want, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(layer.score_by_loops(Q, K).scores, want, rtol=1e-13, atol=1e-14)
    mask = draw(5, 7, seed=1) < 0.5
    mask[1] = False
    output, weights = layer(Q, K, V, mask)
    np.testing.assert_allclose(weights, softmax(want, mask), atol=1e-14)
    np.testing.assert_allclose(output, weights @ V, atol=1e-14)
    assert (np.abs(layer.compute_scores(1e6 * Q, K)) <= np.abs(layer.w).sum() + 1e-12).all()


@pytest.mark.parametrize(("n_q", "n_k", "d_q", "d_k", "hidden"), [(5, 7, 3, 2, 11), (1, 3, 2, 2, 5)])
def test_additive_work_is_counted(n_q: int, n_k: int, d_q: int, d_k: int, hidden: int) -> None:
    counts = AdditiveAttention(d_q, d_k, hidden).score_by_loops(draw(n_q, d_q), draw(n_k, d_k)).counts
    assert counts.projection_multiply_adds == (n_q * d_q + n_k * d_k) * hidden
    assert counts.pair_multiply_adds == counts.additions == counts.tanh_calls == n_q * n_k * hidden
    assert f"{counts.tanh_calls:,}" == str(counts).split()[-1]


def test_additive_costs_more_than_the_dot_product_of_the_same_size() -> None:
    Q, K, V = draw(3, 6, 4)
    dot = attention_by_loops(Q, K, V).counts
    additive = AdditiveAttention(4, 4, hidden_dim=4).score_by_loops(Q, K).counts
    assert additive.pair_multiply_adds == dot.score_multiply_adds
    assert additive.tanh_calls == additive.additions == dot.score_multiply_adds  # all of it on top
    assert additive.projection_multiply_adds > 0


def test_additive_attention_over_batches_and_hidden_keys() -> None:
    layer = AdditiveAttention(3, 2, 5)
    Q, K, V = draw(2, 5, 3), draw(2, 7, 2), draw(2, 7, 4)
    mask = create_padding_mask([4, 6], 7)[:, 0]
    output, weights = layer(Q, K, V, mask)
    for b, length in enumerate([4, 6]):
        alone = layer(Q[b], K[b, :length], V[b, :length])
        np.testing.assert_allclose(output[b], alone[0], atol=1e-14)
        np.testing.assert_allclose(weights[b, :, :length], alone[1], atol=1e-14)
        K[b, length:] = V[b, length:] = math.nan
    np.testing.assert_allclose(layer(Q, K, V, mask)[0], output, atol=1e-14)


# The block


def test_activations_from_their_definitions() -> None:
    x = draw(3, 5, 7) * 3
    np.testing.assert_array_equal(learn.relu(x), np.where(x > 0, x, 0))
    want = [z * (1 + math.erf(z / math.sqrt(2))) / 2 for z in x.flat]
    np.testing.assert_allclose(learn.gelu(x).ravel(), want, rtol=1e-14, atol=1e-15)
    assert -1e-12 < learn.gelu([-8.0])[0] < 0  # where 1 + erf has rounded to 0


def test_layer_norm_gives_mean_0_and_variance_1() -> None:
    norm = LayerNorm(7, eps=0)
    y = norm(draw(2, 5, 7) * 9 + 4)
    np.testing.assert_allclose(y.mean(axis=-1), 0, atol=1e-14)
    np.testing.assert_allclose(y.var(axis=-1), 1, rtol=1e-13)
    norm.gain, norm.bias = np.arange(7.0), np.ones(7)
    np.testing.assert_allclose(norm(draw(5, 7)), LayerNorm(7, eps=0)(draw(5, 7)) * np.arange(7.0) + 1)
    np.testing.assert_array_equal(LayerNorm(3)([[2, 2, 2]]), 0)  # equal numbers have no spread to divide by


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_block_agrees_with_torch(norm: str, activation: str) -> None:
    import torch

    block = TransformerBlock(6, 3, hidden_dim=11, norm=norm, activation=activation, seed=5)
    rng = np.random.default_rng(1)
    for part in (block.attention_norm, block.feed_forward_norm):
        part.gain, part.bias = rng.normal(size=(2, 6))
    block.feed_forward.b_1, block.feed_forward.b_2 = rng.normal(size=11), rng.normal(size=6)
    theirs = torch.nn.TransformerEncoderLayer(
        6, 3, 11, 0.0, activation, batch_first=True, norm_first=norm == "pre", dtype=torch.float64
    )
    own, ours = theirs.self_attn, block.parameters()
    pairs = [
        (own.out_proj.weight, ours["attention.W_O"].T),
        (own.in_proj_weight, np.concatenate([ours[f"attention.W_{name}"].T for name in "QKV"])),
        (own.in_proj_bias, np.zeros(18)),
        (own.out_proj.bias, np.zeros(6)),
        (theirs.linear1.weight, ours["feed_forward.W_1"].T),
        (theirs.linear1.bias, ours["feed_forward.b_1"]),
        (theirs.linear2.weight, ours["feed_forward.W_2"].T),
        (theirs.linear2.bias, ours["feed_forward.b_2"]),
        (theirs.norm1.weight, ours["attention_norm.gain"]),
        (theirs.norm1.bias, ours["attention_norm.bias"]),
        (theirs.norm2.weight, ours["feed_forward_norm.gain"]),
        (theirs.norm2.bias, ours["feed_forward_norm.bias"]),
    ]
    x = draw(2, 5, 6)
    with torch.no_grad():
        for parameter, array in pairs:
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(array)))
        drop = torch.from_numpy(~create_causal_mask(5))  # there True hides
        want = theirs(torch.from_numpy(x), src_mask=drop)
    output, weights = block(x, mask=create_causal_mask(5))
    np.testing.assert_allclose(output, want.numpy(), atol=1e-12)
    assert weights.shape == (2, 3, 5, 5)
    assert (weights == np.tril(weights)).all()
    # Torch has biases in the attention too; all else is counted alike.
    assert sum(p.numel() for p in theirs.parameters()) == block.parameter_count() + 18 + 6


@pytest.mark.parametrize(("embed_dim", "num_heads", "hidden_dim"), [(6, 2, 11), (15, 5, 7), (4, 1, None)])
def test_parameters_are_counted(embed_dim: int, num_heads: int, hidden_dim: int | None) -> None:
    block = TransformerBlock(embed_dim, num_heads, hidden_dim=hidden_dim)
    wide = 4 * embed_dim if hidden_dim is None else hidden_dim
    attention, network = 4 * embed_dim**2, 2 * embed_dim * wide + wide + embed_dim
    assert block.parameter_count() == attention + network + 4 * embed_dim
    assert sum(array.size for array in block.attention.parameters().values()) == attention
    assert sum(array.size for array in block.feed_forward.parameters().values()) == network
    assert block.parameters()["attention.W_Q"] is block.attention.W_Q


def test_the_block_comes_from_its_seed() -> None:
    first, again, other = (TransformerBlock(8, 2, seed=s).parameters() for s in (0, 0, 1))
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
    assert (first["feed_forward.W_1"] != other["feed_forward.W_1"]).all()
    drawn = [a for parameters in (first, other) for name, a in parameters.items() if ".W_" in name]
    numbers = np.concatenate([array.ravel()[:8] / array.std() for array in drawn])
    assert len(np.unique(numbers.round(9))) == len(numbers)  # no two parts share a stream


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_padded_batch_through_the_block_is_each_sequence_by_itself(norm: str) -> None:
    sequences = [draw(n, 6, seed=n) for n in (2, 5, 3)]
    block = TransformerBlock(6, 2, norm=norm)
    for fill in (0.0, math.nan, math.inf):
        padded, lengths = pad_batch(sequences, fill=fill)
        assert padded.shape == (3, 5, 6)
        output, _ = block(padded, mask=create_padding_mask(lengths, 5))
        for got, x in zip(output, sequences, strict=True):
            np.testing.assert_allclose(got[: len(x)], block(x)[0], atol=1e-13)


def test_with_nothing_to_add_the_residual_is_the_way_through() -> None:
    x = draw(5, 6)
    pre, post = (TransformerBlock(6, 2, norm=norm) for norm in ("pre", "post"))
    for block in (pre, post):
        block.attention.W_O, block.feed_forward.W_2 = np.zeros((6, 6)), np.zeros((24, 6))
    np.testing.assert_array_equal(pre(x)[0], x)
    np.testing.assert_allclose(post(x)[0], LayerNorm(6)(LayerNorm(6)(x)), atol=1e-14)


def test_the_feed_forward_works_on_each_token_by_itself() -> None:
    network, x = FeedForward(6, 11, activation="gelu"), draw(2, 5, 6)
    for where in np.ndindex(2, 5):
        np.testing.assert_allclose(network(x)[where], network(x[where]), atol=1e-14)


def test_dropout_keeps_the_mean() -> None:
    weights = softmax(draw(50, 40))
    dropped = learn.dropout(weights, 0.25, seed=3)
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], weights[kept] / 0.75, rtol=1e-15)
    assert abs((~kept).mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / weights.size)
    np.testing.assert_array_equal(dropped, learn.dropout(weights, 0.25, seed=3))
    np.testing.assert_array_equal(learn.dropout(weights, 0), weights)


# Costs


@pytest.mark.parametrize(("n_q", "n_k", "d_k", "d_v"), [(2, 3, 5, 7), (7, 5, 3, 2), (1, 11, 4, 4)])
def test_the_formulas_are_what_the_loops_count(n_q: int, n_k: int, d_k: int, d_v: int) -> None:
    cost, counted = (
        Cost(n_q, n_k, d_k, d_v, itemsize=8),
        attention_by_loops(draw(n_q, d_k), draw(n_k, d_k), draw(n_k, d_v)),
    )
    assert cost.entries == counted.scores.size == counted.counts.exponentials
    assert cost.bytes == counted.counts.bytes_scores == counted.counts.bytes_weights
    assert cost.score_multiply_adds == counted.counts.score_multiply_adds
    assert cost.value_multiply_adds == counted.counts.value_multiply_adds
    assert cost.multiply_adds == counted.counts.multiply_adds == n_q * n_k * (d_k + d_v)


def test_the_cost_table_has_the_worked_numbers() -> None:
    found = cost_table([int(n) for n in COSTS["matrix_kib_fp32"]])
    assert [row.bytes // 1024 for row in found.rows] == list(COSTS["matrix_kib_fp32"].values())
    for name, entries in COSTS["score_entries"].items():
        assert cost_table([int(name.removeprefix("n="))]).rows[0].entries == entries
    headings, *lines = str(found).splitlines()
    assert headings.split() == ["length", "entries", "growth", "memory", "multiply-adds"]
    assert lines[-1].split() == ["2,048", "4,194,304", "×", "64", "16.8", "MB", "536,870,912"]
    assert sum("× 4" in line for line in lines) == 4
    assert cost_table(3) == cost_table([3])
    assert cost_table([3], d_k=5, d_v=7, dtype=np.float16).rows == (Cost(3, 3, 5, 7, itemsize=2),)


def test_published_models_have_the_worked_numbers() -> None:
    for line, entries in COSTS["layers_heads_n2"].items():
        name, sizes = line.rsplit(" ", 1)
        model = published_models[name]
        assert [model.layers, model.heads, model.length] == [int(x) for x in sizes.split("x")]
        assert model.entries == entries
        assert re.search(r" 20\d\d, ", model.source), "a published size says where"
    assert len(published_models) == len(COSTS["layers_heads_n2"])
    n8192 = COSTS["forward_score_computations_32_layers_32_heads_n8192"]
    assert PublishedModel(layers=32, heads=32, length=8192).entries == n8192
    batch = {"batch of 32, one layer": PublishedModel(layers=32, heads=96, length=2048)}
    assert batch["batch of 32, one layer"].entries * 4 == COSTS["weights_bytes_fp32_batch32_heads96_n2048"]
    assert str(model_table(batch)).endswith("12,884,901,888  51.5 GB")


@pytest.mark.parametrize("exponent", [-1, 0, 0.5, 1, 2, 3])
def test_an_exponent_is_found_again(exponent: float) -> None:
    lengths = [3, 7, 20, 90]
    assert fit_exponent(lengths, [5 * n**exponent for n in lengths]) == pytest.approx(exponent, abs=1e-12)
    noisy = [5 * n**exponent * factor for n, factor in zip(lengths, [1.1, 0.9, 0.95, 1.05], strict=True)]
    slope, _ = np.polyfit(np.log(lengths), np.log(noisy), 1)
    assert fit_exponent(lengths, noisy) == pytest.approx(slope, abs=1e-12)


def test_profile_counts_measures_and_fits() -> None:
    lengths = [64, 128, 256, 512]
    found = profile(lengths, d_k=16, d_v=8)
    assert [row.cost for row in found.rows] == list(cost_table(lengths, d_k=16, d_v=8, dtype=np.float64).rows)
    assert list(found.exponents) == ["entries", "bytes", "multiply_adds", "seconds", "peak_bytes"]
    for name in ("entries", "bytes", "multiply_adds"):
        assert found.exponents[name] == pytest.approx(2, abs=1e-12)
    assert all(row.seconds > 0 for row in found.rows)
    assert found.exponents["seconds"] > 0.3  # a busy machine may bend the curve, not turn it
    assert all(
        row.peak_bytes >= 2 * row.cost.bytes for row in found.rows
    )  # scores and weights are both stored
    assert 1.7 < found.exponents["peak_bytes"] < 2.2
    headings, *lines, last = str(found).splitlines()
    assert headings.split()[0] == "length"
    assert [line.split()[0] for line in lines] == [str(n) for n in lengths]
    assert last.split()[2:6] == ["n^2.00", "n^2.00", "n^2.00", f"n^{found.exponents['seconds']:.2f}"]


def test_profile_sees_what_it_is_given() -> None:
    seen: list[Any] = []

    def linear(Q: Any, K: Any, V: Any) -> Any:
        seen.append((Q.shape, K.shape, V.shape))
        return np.zeros((len(Q), 1000))

    found = profile([100, 200, 400], d_k=3, d_v=5, attend=linear, repeats=2)
    assert seen == [((n, 3), (n, 3), (n, 5)) for n in (100, 200, 400) for _ in range(3)]
    assert found.exponents["peak_bytes"] == pytest.approx(1, abs=0.05)
    assert not tracemalloc.is_tracing()


def test_memory_that_is_not_seen_has_no_exponent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.learn.cost._measure_peak_bytes", lambda call: 0)
    found = profile([8, 16], repeats=1)
    assert math.isnan(found.exponents["peak_bytes"])
    assert str(found).endswith("n^nan")


def test_the_lazy_matrix_holds_less_than_the_stored_one() -> None:
    stored = profile([256, 1024], d_k=8, repeats=1)
    lazy = profile([256, 1024], d_k=8, repeats=1, attend=lambda Q, K, V: regard.attention(Q, K) @ V)
    assert lazy.rows[1].peak_bytes < stored.rows[1].peak_bytes / 2
    assert lazy.exponents["peak_bytes"] < stored.exponents["peak_bytes"]


def test_profile_leaves_a_tracing_that_runs_alone() -> None:
    tracemalloc.start()
    try:
        profile([8, 16], repeats=1)
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


# The walk, the kernel view, the recurrent state, batches


@pytest.mark.parametrize(("n_q", "n_k", "d_k", "d_v"), [(3, 3, 3, 3), (2, 3, 5, 7), (2, 0, 1, 2)])
def test_the_walk_makes_every_multiplication_once(n_q: int, n_k: int, d_k: int, d_v: int) -> None:
    Q, K, V = draw(n_q, d_k), draw(n_k, d_k), draw(n_k, d_v)
    steps = list(iter_multiplications(Q, K, V))
    counts = attention_by_loops(Q, K, V).counts
    assert [step.number for step in steps] == list(range(1, counts.multiply_adds + 1))
    assert [step.table for step in steps] == ["scores"] * counts.score_multiply_adds + [
        "output"
    ] * counts.value_multiply_adds
    scores, output = np.zeros((n_q, n_k)), np.zeros((n_q, d_v))
    for step in steps:
        table = scores if step.table == "scores" else output
        table[step.row, step.column] += step.left * step.right
        assert table[step.row, step.column] == step.total
    np.testing.assert_allclose(scores, Q @ K.T, atol=1e-14)
    np.testing.assert_allclose(output, scaled_dot_product_attention(Q, K, V)[0], atol=1e-14)


def test_the_walk_passes_over_what_a_mask_hides() -> None:
    Q, K, V = draw(3, 2), draw(5, 2), draw(5, 7)
    for mask in (create_causal_mask(5)[:3], np.array([[True] * 5, [False] * 5, [True, False] * 2 + [False]])):
        steps = list(iter_multiplications(Q, K, V, mask))
        loops = attention_by_loops(Q, K, V, mask)
        assert len(steps) == loops.counts.multiply_adds < 3 * 5 * (2 + 7)
        output = np.zeros((3, 7))
        for step in steps:
            if step.table == "scores":
                assert mask[step.row, step.column]
            else:
                output[step.row, step.column] = step.total
        np.testing.assert_allclose(output, loops.output, rtol=1e-14)


def test_the_kernel_view_is_attention() -> None:
    mask = create_causal_mask(5)
    for got, want in zip(
        kernel_attention(cat.Q, cat.K, cat.V, mask),
        scaled_dot_product_attention(cat.Q, cat.K, cat.V, mask),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, atol=1e-15)


def test_a_gaussian_kernel_is_attention_where_keys_are_equally_long() -> None:
    Q, K, V = draw(2, 5, 3), 2.5 * unit_vectors(draw(2, 7, 3, seed=1)), draw(2, 7, 4)
    same = kernel_attention(Q, K, V, kernel=gaussian_kernel)
    want = scaled_dot_product_attention(Q, K, V)
    np.testing.assert_allclose(same[1], want[1], atol=1e-14)
    np.testing.assert_allclose(same[0], want[0], atol=1e-14)
    other = kernel_attention(Q, K * [[1], [2], [3], [4], [5], [6], [7]], V, kernel=gaussian_kernel)
    assert np.abs(other[1] - want[1]).max() > 0.1
    narrow = kernel_attention(K, K, V, kernel=lambda q, k: gaussian_kernel(q, k, width=0.01))
    np.testing.assert_allclose(narrow[0], V, atol=1e-14)  # as a lookup: each key finds its own value


def test_powers_of_the_weights_are_a_markov_chain() -> None:
    _, weights = scaled_dot_product_attention(cat.Q, cat.K, cat.V)
    for power in (2, 3, 50):
        np.testing.assert_allclose(np.linalg.matrix_power(weights, power).sum(axis=1), 1, rtol=1e-13)
    far = np.linalg.matrix_power(weights, 50)
    np.testing.assert_allclose(far, np.broadcast_to(far[0], (5, 5)), atol=1e-12)


def test_influence_is_the_derivative_of_the_last_state() -> None:
    network, x, step = RecurrentNetwork(3, 5, seed=2), draw(7, 3), 1e-5
    found = network.compute_influence(x)
    for t in range(7):
        slopes = []
        for c in range(3):
            nudge = np.zeros((7, 3))
            nudge[t, c] = step
            slopes.append((network(x + nudge)[-1] - network(x - nudge)[-1]) / (2 * step))
        assert found[t] == pytest.approx(np.linalg.norm(slopes), abs=1e-8)


def test_a_recurrent_state_forgets_and_attention_does_not() -> None:
    x = draw(60, 8)
    found = RecurrentNetwork(8, 8).compute_influence(x)
    assert found[0] < 1e-3 * found[-1]
    # The first token, moved to the end, gets the same weight from the same query: attention knows no distance.
    query = x[-1:]
    near, far = (
        scaled_dot_product_attention(query, order, order)[1][0, place]
        for order, place in ((np.roll(x, -1, axis=0), -1), (x, 0))
    )
    assert near == pytest.approx(far, rel=1e-12)
    states = RecurrentNetwork(8, 8)(x)
    np.testing.assert_allclose(states[20], RecurrentNetwork(8, 8)(x[:21])[-1], atol=1e-15)  # no look ahead


def test_a_ragged_batch_is_padded() -> None:
    sequences = [draw(n, 3, seed=n) for n in (2, 0, 5)]
    padded, lengths = pad_batch(sequences, fill=9)
    assert lengths.tolist() == [2, 0, 5]
    for row, one in zip(padded, sequences, strict=True):
        np.testing.assert_array_equal(row[: len(one)], one)
        assert (row[len(one) :] == 9).all()
    assert create_padding_mask(lengths, 5).sum() == 7


# Errors


X32, X34 = np.ones((3, 2)), np.ones((3, 4))
CALLS: list[tuple[Any, str, str, str, str]] = [
    (lambda: softmax([1], temperature=-1), "softmax", "temperature -1", "at least 0", "sharpens"),
    (lambda: softmax([1], temperature=math.nan), "softmax", "temperature nan", "at least 0", "sharpens"),
    (lambda: softmax([1], temperature="hot"), "softmax", "str 'hot'", "number", "sharpens"),  # type: ignore[arg-type]
    (lambda: softmax(1.0), "softmax", "shape ()", "(…, kv_len)", "one row"),
    (lambda: sparsemax([1, 2], [1, 0]), "sparsemax", "mask, an array of int", "True = attend", "mask != 0"),
    (lambda: hardmax([1, 2], [True] * 3), "hardmax", "(3,) for scores (kv_len 2)", "broadcasts", "axes"),
    (
        lambda: compare_softmax_alternatives(X32),
        "compare_softmax_alternatives",
        "(3, 2)",
        "one row",
        "scores[0]",
    ),
    (lambda: variance_experiment([8, 4]), "variance_experiment", "(8, 4)", "rising", "sorted"),
    (lambda: variance_experiment([]), "variance_experiment", "d_k ()", "at least one", "sorted"),
    (lambda: variance_experiment([0]), "variance_experiment", "d_k 0", "at least 1", "shape"),
    (lambda: variance_experiment(sigma=0), "variance_experiment", "sigma 0", "above 0", "deviation"),
    (lambda: AdditiveAttention(2, 0, 3), "AdditiveAttention", "d_k 0", "at least 1", "shape"),
    (lambda: AdditiveAttention(2, 2, 3)(X34, X32, X32), "Q", "(3, 4)", "d_q 2", "fits the array"),
    (lambda: AdditiveAttention(2, 2, 3)(X32, X34, X32), "K", "(3, 4)", "(…, kv_len, d_k)", "fits"),
    (lambda: AdditiveAttention(2, 2, 3)(X32, X32, X34[:2]), "compute_output", "3 keys", "value", "sequence"),
    (
        lambda: AdditiveAttention(2, 2, 3).score_by_loops(X32[None], X32),
        "score_by_loops",
        "(1, 3, 2)",
        "one sequence",
        "Q[0]",
    ),
    (lambda: LayerNorm(4)(X32), "LayerNorm", "(3, 2)", "embed_dim is 4", "embed_dim=2"),
    (lambda: FeedForward(4, 5)(X32), "FeedForward", "(3, 2)", "embed_dim is 4", "embed_dim=2"),
    (lambda: FeedForward(4, 5, activation="tanh"), "FeedForward", "'tanh'", "'relu', 'gelu'", "usual"),
    (lambda: TransformerBlock(4, 2, norm="mid"), "TransformerBlock", "'mid'", "'pre', 'post'", "usual"),
    (lambda: TransformerBlock(4, 3), "MultiHeadAttention", "num_heads 3", "equal parts", "[1, 2, 4]"),
    (lambda: TransformerBlock(4, 2)(X32), "LayerNorm", "(3, 2)", "embed_dim is 4", "embed_dim=2"),
    (lambda: TransformerBlock(4, 2)(X34[0]), "TransformerBlock", "(4,)", "(…, n, embed_dim)", "x[None, :]"),
    (lambda: TransformerBlock(4, 2)(X34, mask=X34 > 0), "compute_weights", "(3, 4)", "broadcasts", "axes"),
    (lambda: learn.dropout(X32, 1), "dropout", "rate 1", "below 1", "chance"),
    (lambda: learn.dropout(X32, -0.1), "dropout", "rate -0.1", "at least 0", "chance"),
    (lambda: cost_table([4, 4]), "cost_table", "(4, 4)", "rising", "sorted"),
    (lambda: cost_table([2.5]), "cost_table", "float 2.5", "whole number", "int(lengths)"),  # type: ignore[list-item]
    (lambda: profile([64]), "profile", "(64,)", "two lengths", "(64, 128)"),
    (lambda: cost_table(None), "cost_table", "a NoneType", "whole number", "int(lengths)"),  # type: ignore[arg-type]
    (lambda: profile([2, 4], attend=7), "profile", "attend, int 7", "attend(Q, K, V)", "Leave it out"),  # type: ignore[arg-type]
    (lambda: fit_exponent([1, 2], [1, 0]), "fit_exponent", "2 amounts", "above 0", "logarithm"),
    (lambda: fit_exponent([1], [1]), "fit_exponent", "1 lengths", "two or more", "two points"),
    (lambda: fit_exponent([1, 2], [1]), "fit_exponent", "1 amounts", "one amount for each", "measure"),
    (
        lambda: iter_multiplications(X32[None], X32, X32),
        "iter_multiplications",
        "(1, 3, 2)",
        "one head",
        "Q[0, 3]",
    ),
    (lambda: iter_multiplications(X32, X34, X32), "ScaledDot", "K of shape (3, 4)", "d_k is 2", "d_k=4"),
    (lambda: kernel_attention(X32, X34, X34), "kernel_attention", "(3, 4)", "(…, kv_len, d_k)", "same d_k"),
    (
        lambda: kernel_attention(X32, X32, X32, kernel=lambda q, k: -(q @ k.T)),
        "kernel_attention",
        "down to -2",
        "never negative",
        "exponential",
    ),
    (lambda: gaussian_kernel(X32, X32, width=0), "gaussian_kernel", "width 0", "above 0", "distance"),
    (lambda: RecurrentNetwork(2, 3)(X34), "RecurrentNetwork", "(3, 4)", "(n, 2)", "size of your tokens"),
    (lambda: pad_batch([X32, X34]), "pad_batch", "[(3, 2), (3, 4)]", "same d", "same number"),
    (lambda: pad_batch(5), "pad_batch", "int 5", "list of sequences", "pad_batch([x])"),  # type: ignore[arg-type]
    (lambda: pad_batch([]), "pad_batch", "[]", "at least one", "same number"),
]


@pytest.mark.parametrize(("call", "operation", "received", "expected", "hint"), CALLS)
def test_wrong_calls_are_told_what_came_what_was_expected_and_the_cure(
    call: Any, operation: str, received: str, expected: str, hint: str
) -> None:
    with pytest.raises(regard.RegardError) as caught:
        call()
    error = caught.value
    assert operation in error.operation
    assert received in error.received
    assert expected in error.expected
    assert hint in error.hint


@pytest.mark.parametrize(
    ("part", "name", "shape"),
    [("feed_forward", "W_1", (4, 3)), ("feed_forward", "b_2", (1,)), ("attention_norm", "gain", (1,))],
)
def test_a_parameter_of_the_wrong_shape_is_refused(part: str, name: str, shape: tuple[int, ...]) -> None:
    block = TransformerBlock(4, 2)
    setattr(getattr(block, part), name, np.ones(shape))
    with pytest.raises(ValueError, match=rf", {name}: received an array of shape \{str(shape)[:-1]}"):
        block(X34)
    additive = AdditiveAttention(2, 2, 3)
    additive.w = np.ones(4)
    with pytest.raises(ValueError, match=r"AdditiveAttention, w: received an array of shape \(4,\)"):
        additive.compute_scores(X32, X32)


def test_heads_name_their_parameters() -> None:
    heads = MultiHeadAttention(4, 2)
    assert {
        name: array is getattr(heads, name) for name, array in heads.parameters().items()
    } == dict.fromkeys(["W_Q", "W_K", "W_V", "W_O"], True)
