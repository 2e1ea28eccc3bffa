"""Every value of data/worked_examples.json, to the digits printed, and every erratum by computation.

A test gets its facts from `@facts(name="path")`, which also records the path. The last tests go through the file and
fail if it has a fact that no test uses.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from regard import learn
from regard.learn import CheckedAttention, create_causal_mask
from regard.learn.examples import cat, magnitude, projection, pronoun, three_tokens, tiny_head

FACTS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data/worked_examples.json").read_text("utf-8")
)
COVERED: set[str] = set()


def fact(path: str) -> Any:
    here: Any = FACTS
    for step in path.split("/"):
        here = here[int(step)] if isinstance(here, list) else here[step]
    return here


def facts(**paths: str) -> pytest.MarkDecorator:
    """Parametrise a test with the facts at these paths, and record that they are tested."""
    COVERED.update(paths.values())
    return pytest.mark.parametrize(
        list(paths), [pytest.param(*[fact(p) for p in paths.values()], id="as_printed")]
    )


def exactly(actual: Any, printed: Any) -> None:
    """Assert equality up to float64 rounding, for facts that are whole numbers or short binary fractions."""
    np.testing.assert_allclose(actual, printed, rtol=1e-14, atol=1e-14, strict=False)
    assert np.shape(actual) == np.shape(printed)


def decimals_of(printed: Any) -> int:
    return max(len(repr(float(x)).partition(".")[2]) for x in np.ravel(printed))


def differs(actual: Any, printed: Any) -> Any:
    """Return where a number does not round to the printed one, at the number of digits printed."""
    places = decimals_of(printed)
    assert places >= 2, "a fact printed with fewer digits is compared by `exactly`"
    assert np.shape(actual) == np.shape(printed)
    return np.abs(np.asarray(actual) - printed) > 0.5 * 10.0**-places + 1e-12


def agrees(actual: Any, printed: Any) -> None:
    assert not differs(actual, printed).any(), f"computed {actual}, printed {printed}"


def numbers_in(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"\d+(?:\.\d+)?", text)]


def by_learn(Q: Any, K: Any, V: Any, causal: bool = False) -> tuple[Any, Any]:
    return CheckedAttention(d_k=Q.shape[-1])(Q, K, V, create_causal_mask(len(Q)) if causal else None)


def by_loops(Q: Any, K: Any, V: Any, causal: bool = False) -> tuple[Any, Any]:
    result = learn.attention_by_loops(Q, K, V, create_causal_mask(len(Q)) if causal else None)
    return result.output, result.weights


def by_matrix(Q: Any, K: Any, V: Any, causal: bool = False) -> tuple[Any, Any]:
    A = regard.attention(Q, K, mask=regard.causal() if causal else None)
    return A @ V, A.to_dense()


every_way = pytest.mark.parametrize("attend", [by_learn, by_loops, by_matrix])


# "The cat sat on mat"


@facts(tokens="cat/tokens", Q="cat/Q", K="cat/K", V="cat/V", d_k="cat/d_k", divisor="cat/scale_divisor")
def test_cat_inputs(tokens: Any, Q: Any, K: Any, V: Any, d_k: int, divisor: float) -> None:
    assert list(cat.tokens) == tokens
    exactly(cat.Q, Q)
    exactly(cat.K, K)
    exactly(cat.V, V)
    assert cat.Q.shape[-1] == cat.K.shape[-1] == d_k
    exactly(np.ones((1, 1)) / CheckedAttention(d_k).scale_scores(np.ones((1, 1))), [[divisor]])


@facts(raw="cat/raw_scores", scaled="cat/scaled_scores")
def test_cat_scores(raw: Any, scaled: Any) -> None:
    attention = CheckedAttention(d_k=4)
    exactly(attention.compute_scores(cat.Q, cat.K), raw)
    exactly(attention.scale_scores(np.array(raw)), scaled)

    A = regard.attention(cat.Q, cat.K)
    exactly(A.scores[...], scaled)
    exactly([A.explain(i).raw_scores for i in range(5)], raw)
    exactly([A.explain(i).products.sum(axis=-1) for i in range(5)], raw)
    exactly([A.explain(i).scores for i in range(5)], scaled)


@every_way
@facts(weights="cat/weights", output="cat/output")
def test_cat_weights_and_output(attend: Any, weights: Any, output: Any) -> None:
    got_output, got_weights = attend(cat.Q, cat.K, cat.V)
    agrees(got_weights, weights)
    agrees(got_output, output)


@facts(weights="cat/weights", output="cat/output")
def test_cat_explained_row_by_row(weights: Any, output: Any) -> None:
    attention = CheckedAttention(d_k=4)
    rows: list[Any] = [attention.explain(cat.Q, cat.K, cat.V, cat.tokens, i) for i in range(5)]
    agrees([row.weights for row in rows], weights)
    agrees([row.output for row in rows], output)
    A = regard.attention(cat.Q, cat.K)
    agrees([A.explain(i, value=cat.V).contributions.sum(axis=0) for i in range(5)], output)


@every_way
@facts(weights="cat/causal_weights", output="cat/causal_output")
def test_cat_causal(attend: Any, weights: Any, output: Any) -> None:
    got_output, got_weights = attend(cat.Q, cat.K, cat.V, causal=True)
    agrees(got_weights, weights)
    agrees(got_output, output)
    assert (np.triu(got_weights, 1) == 0).all()


@facts(exponentials="cat/row0_exponentials_unshifted", total="cat/row0_sum_unshifted")
def test_cat_exponentials_of_row_0_before_the_shift(exponentials: Any, total: float) -> None:
    scaled = CheckedAttention(4).scale_scores(cat.Q @ cat.K.T)
    agrees(np.exp(scaled[0]), exponentials)
    agrees(np.exp(scaled[0]).sum(), total)

    A = regard.attention(cat.Q, cat.K)
    row = A.explain(0)
    agrees(row.exponentials * np.exp(row.shift), exponentials)
    agrees(row.total * np.exp(row.shift), total)
    agrees(np.exp(A.lse)[0], total)


@facts(sums="cat/row_sums_of_shifted_exponentials")
def test_cat_row_sums_of_shifted_exponentials(sums: Any) -> None:
    _, weights = by_learn(cat.Q, cat.K, cat.V)
    agrees(1 / weights.max(axis=1), sums)  # the largest exponential of a row is exp(0) = 1
    A = regard.attention(cat.Q, cat.K)
    agrees([A.explain(i).total for i in range(5)], sums)
    agrees([A.explain(i).exponentials.sum() for i in range(5)], sums)


@facts(bars="cat/row0_trace_bars_at_40")
def test_cat_bars_of_the_trace(bars: Any) -> None:
    _, weights = by_learn(cat.Q, cat.K, cat.V)
    assert np.floor(weights[0] * 40).astype(int).tolist() == bars
    trace = str(regard.attention(cat.Q, cat.K).explain(0, tokens=cat.tokens))
    assert [line.count("█") for line in trace.splitlines() if "█" in line] == bars


@every_way
@facts(weights="cat/unscaled_row0_weights")
def test_cat_row_0_without_scaling(attend: Any, weights: Any) -> None:
    undone = math.sqrt(cat.Q.shape[-1])
    agrees(attend(cat.Q * undone, cat.K, cat.V)[1][0], weights)
    agrees(regard.attention(cat.Q, cat.K, scale=1.0).to_dense()[0], weights)
    agrees(CheckedAttention(4).compute_weights(cat.Q @ cat.K.T)[0], weights)


@facts(heads="cat/heads", head_dim="cat/d_k_per_head", note="cat/heads_note")
def test_cat_with_two_heads(heads: int, head_dim: int, note: str) -> None:
    layer = learn.NumpyMultiHeadAttention(embed_dim=4, num_heads=heads)
    layer.W_Q = layer.W_K = layer.W_V = layer.W_O = np.eye(4)
    output, weights = layer(cat.Q, cat.K, cat.V)
    A = regard.attention(layer.split_heads(cat.Q), layer.split_heads(cat.K))

    columns = [slice(int(a), int(b) + 1) for a, b in re.findall(r"(\d)-(\d)", note)]
    assert len(columns) == heads
    for h, own in enumerate(columns):
        assert cat.Q[:, own].shape == (5, head_dim)
        want_output, want_weights = by_loops(cat.Q[:, own], cat.K[:, own], cat.V[:, own])
        np.testing.assert_allclose(weights[h], want_weights, atol=1e-15)
        np.testing.assert_allclose(A.to_dense()[h], want_weights, atol=1e-15)
        np.testing.assert_allclose(output[:, own], want_output, atol=1e-15)


# Smaller examples


@facts(Q="tiny_head/Q", K="tiny_head/K", V="tiny_head/V")
def test_tiny_head_inputs(Q: Any, K: Any, V: Any) -> None:
    exactly(tiny_head.Q, Q)
    exactly(tiny_head.K, K)
    exactly(tiny_head.V, V)


@every_way
@facts(weights="tiny_head/correct/weights", output="tiny_head/correct/output")
def test_tiny_head_weights_and_output(attend: Any, weights: Any, output: Any) -> None:
    got_output, got_weights = attend(tiny_head.Q, tiny_head.K, tiny_head.V)
    agrees(got_weights, weights)
    agrees(got_output, output)


@facts(query="pronoun/query", keys="pronoun/keys", values="pronoun/values")
def test_pronoun_inputs(query: Any, keys: Any, values: Any) -> None:
    exactly(pronoun.Q, [query])
    assert list(pronoun.tokens) == list(keys) == list(values)
    exactly(pronoun.K, list(keys.values()))
    exactly(pronoun.V, list(values.values()))


@facts(raw="pronoun/raw", scaled="pronoun/scaled")
def test_pronoun_scores(raw: Any, scaled: Any) -> None:
    attention = CheckedAttention(d_k=2)
    exactly(attention.compute_scores(pronoun.Q, pronoun.K), [raw])
    agrees(attention.scale_scores(np.array([raw])), [scaled])
    agrees(regard.attention(pronoun.Q, pronoun.K).scores[0], scaled)


@every_way
@facts(weights="pronoun/weights", context="pronoun/context")
def test_pronoun_weights_and_context(attend: Any, weights: Any, context: Any) -> None:
    got_output, got_weights = attend(pronoun.Q, pronoun.K, pronoun.V)
    agrees(got_weights[0], weights)
    agrees(got_output[0], context)


@facts(
    query="magnitude/query",
    short="magnitude/short_aligned",
    long="magnitude/long_aligned",
    across="magnitude/misaligned",
)
def test_magnitude(query: Any, short: Any, long: Any, across: Any) -> None:
    exactly(magnitude.Q, [query])
    exactly(magnitude.K, [short["key"], long["key"], across["key"]])
    scores = CheckedAttention(d_k=2).compute_scores(magnitude.Q, magnitude.K)
    exactly(scores, [[short["score"], long["score"], across["score"]]])
    exactly(regard.attention(magnitude.Q, magnitude.K, scale=1.0).scores[...], scores)


@facts(Q="three_tokens/Q", K_is_Q="three_tokens/K_is_Q", V="three_tokens/V")
def test_three_tokens_inputs(Q: Any, K_is_Q: bool, V: Any) -> None:
    exactly(three_tokens.Q, Q)
    assert np.array_equal(three_tokens.K, three_tokens.Q) is K_is_Q
    exactly(three_tokens.V, V)


@every_way
@facts(scaled="three_tokens/scaled_scores", weights="three_tokens/weights", output="three_tokens/output")
def test_three_tokens(attend: Any, scaled: Any, weights: Any, output: Any) -> None:
    attention = CheckedAttention(d_k=4)
    exactly(attention.scale_scores(attention.compute_scores(three_tokens.Q, three_tokens.K)), scaled)
    exactly(regard.attention(three_tokens.Q, three_tokens.K).scores[...], scaled)
    got_output, got_weights = attend(three_tokens.Q, three_tokens.K, three_tokens.V)
    agrees(got_weights, weights)
    agrees(got_output, output)


@facts(embeddings="projection/embeddings", Q="projection/Q")
def test_projection(embeddings: Any, Q: Any) -> None:
    assert list(projection.tokens) == list(embeddings)
    exactly(projection.X, list(embeddings.values()))
    agrees(projection.X @ projection.W_Q, Q)


@facts(rule="projection/weights_rule", embeddings="projection/embeddings", Q="projection/Q")
def test_projection_matrices_are_the_seeded_ones(rule: str, embeddings: Any, Q: Any) -> None:
    torch = pytest.importorskip("torch")

    seed, rows, columns, factor = re.match(
        r"torch\.manual_seed\((\d+)\); W_Q = torch\.randn\((\d+), (\d+)\) \* ([\d.]+), then W_K, W_V", rule
    ).groups()  # type: ignore[union-attr]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(seed))
        drawn = [torch.randn(int(rows), int(columns)) * float(factor) for _ in range(3)]
    for W, ours in zip(drawn, (projection.W_Q, projection.W_K, projection.W_V), strict=True):
        np.testing.assert_array_equal(ours.astype(np.float32), W.numpy())
    agrees((torch.tensor(list(embeddings.values())) @ drawn[0]).numpy(), Q)


# Costs: counted by the loops, or from the shape of a matrix that is never stored


def lazy(*shape: int) -> Any:
    """Build an attention matrix of this shape without storing it."""
    *lead, n = shape
    vectors = np.broadcast_to(np.float32(0), (*lead, n, 1))
    return regard.attention(vectors, vectors)


@facts(entries="costs/score_entries")
def test_score_entries(entries: Any) -> None:
    for name, printed in entries.items():
        n = int(name.removeprefix("n="))
        assert math.prod(lazy(n).shape) == printed
    assert learn.scaled_dot_product_attention(*[np.zeros((1000, 1))] * 3)[1].size == entries["n=1000"]


@facts(printed="costs/forward_score_computations_32_layers_32_heads_n8192")
def test_forward_score_computations(printed: int) -> None:
    assert math.prod(lazy(32, 32, 8192).shape) == printed


@facts(printed="costs/layers_heads_n2")
def test_layers_times_heads_times_n_squared(printed: Any) -> None:
    for model, entries in printed.items():
        layers, heads, n = (int(x) for x in model.split()[-1].split("x"))
        assert math.prod(lazy(layers, heads, n).shape) == entries, model


@facts(printed="costs/weights_bytes_fp32_batch32_heads96_n2048")
def test_bytes_of_the_weights(printed: int) -> None:
    assert math.prod(lazy(32, 96, 2048).shape) * np.dtype(np.float32).itemsize == printed


@facts(printed="costs/matrix_kib_fp32")
def test_kib_of_one_matrix(printed: Any) -> None:
    for n, kib in printed.items():
        dense = lazy(int(n)).to_dense()
        assert dense.dtype == np.float32
        assert dense.nbytes == kib * 1024
    sizes = {int(n): kib for n, kib in printed.items()}
    assert all(sizes[2 * n] == 4 * sizes[n] for n in sizes if 2 * n in sizes)


@pytest.mark.parametrize(
    ("n_q", "n_k", "d_k", "d_v"), [(2, 3, 5, 7), (7, 5, 3, 2), (1, 11, 4, 4), (3, 3, 3, 3)]
)
@facts(formula="costs/multiply_adds")
def test_multiply_adds_counted(n_q: int, n_k: int, d_k: int, d_v: int, formula: str) -> None:
    assert formula == "n_q * n_k * (d_k + d_v)"
    rng = np.random.default_rng(0)
    Q, K, V = (rng.normal(size=shape) for shape in [(n_q, d_k), (n_k, d_k), (n_k, d_v)])
    assert learn.attention_by_loops(Q, K, V).counts.multiply_adds == n_q * n_k * (d_k + d_v)


@facts(walk="costs/three_by_three_walkthrough")
def test_three_by_three_multiplications(walk: str) -> None:
    n, d, for_scores, for_values = (int(x) for x in numbers_in(walk))
    Q, K, V = np.arange(3.0 * n * d).reshape(3, n, d) / 10
    counts = learn.attention_by_loops(Q, K, V).counts
    assert (counts.score_multiply_adds, counts.value_multiply_adds) == (for_scores, for_values)


# Conventions


@facts(mask="conventions_that_differ_between_the_sources/mask")
def test_mask_conventions(mask: str) -> None:
    assert mask.endswith("Here: True = attend, named constructors for the rest.")
    keep = create_causal_mask(5)
    drop, zero_drops, subtracted = ~keep, keep.astype(int), 1e9 * ~keep
    _, want = by_learn(cat.Q, cat.K, cat.V, causal=True)

    attention = CheckedAttention(d_k=4)
    for named in (~drop, zero_drops != 0, subtracted == 0):
        np.testing.assert_array_equal(attention(cat.Q, cat.K, cat.V, named)[1], want)
    for unnamed in (zero_drops, subtracted):
        with pytest.raises(TypeError, match="True = attend"):
            attention(cat.Q, cat.K, cat.V, unnamed)
    for named in (regard.masks.dense(keep), regard.masks.dense(drop, true_means="ignore")):
        np.testing.assert_allclose(regard.attention(cat.Q, cat.K, mask=named).to_dense(), want, atol=1e-15)


@facts(order="conventions_that_differ_between_the_sources/return_order")
def test_return_order(order: str) -> None:
    assert "(weights, output)" in order
    assert "(output, weights)" in order
    layer = CheckedAttention(d_k=4)
    for attend in (layer, layer.forward, learn.scaled_dot_product_attention, learn.kernel_attention):
        output, weights = attend(cat.Q, cat.K, cat.V)
        assert (output.shape, weights.shape) == ((5, 4), (5, 5))


@facts(value="conventions_that_differ_between_the_sources/masked_value")
def test_masked_value(value: str) -> None:
    assert "overflows float16" in value
    assert "uniform" in value
    with np.errstate(over="ignore"):
        assert np.float16(-1e9) == -np.inf
    nothing = np.zeros((5, 5), dtype=bool)
    filled = np.where(nothing, cat.Q @ cat.K.T / 2, -1e9)
    exactly(CheckedAttention(4).compute_weights(filled), np.full((5, 5), 0.2))
    exactly(CheckedAttention(4)(cat.Q, cat.K, cat.V, nothing)[1], np.zeros((5, 5)))
    exactly(regard.attention(cat.Q, cat.K, mask=regard.masks.dense(nothing)).to_dense(), np.zeros((5, 5)))


# Errata: the printed value is wrong, and the correction is right


@facts(
    printed="errata/0/printed",
    correct="errata/0/correct",
    row="tiny_head/printed/weights_row0",
    output="tiny_head/printed/output_row0",
    note="tiny_head/erratum",
)
def test_erratum_softmax_of_the_tiny_head(
    printed: str, correct: str, row: Any, output: Any, note: str
) -> None:
    assert note == "see errata"
    *logits, a, b, c, first, second = numbers_in(printed)
    assert [a, b, c] == row
    assert [first, second] == output
    weights = CheckedAttention(d_k=2).compute_weights(np.array([logits]))[0]
    right_weights, right_output = numbers_in(correct)[:3], numbers_in(correct)[3:]
    for got_output, got_weights in (
        (weights @ tiny_head.V, weights),
        [x[0] for x in by_matrix(tiny_head.Q, tiny_head.K, tiny_head.V)],
        [x[0] for x in by_learn(tiny_head.Q, tiny_head.K, tiny_head.V)],
    ):
        assert differs(got_weights, row).all()
        assert differs(got_output, output).tolist() == [True, False]
        np.testing.assert_allclose(got_weights, right_weights, atol=1e-4)  # from logits of three digits
        np.testing.assert_allclose(got_output, right_output, atol=1e-4)
    agrees(got_weights, right_weights)
    agrees(got_output, right_output)


@facts(printed="errata/1/printed", correct="errata/1/correct")
def test_erratum_pronoun_logits(printed: str, correct: str) -> None:
    attention = CheckedAttention(d_k=2)
    logits = attention.scale_scores(attention.compute_scores(pronoun.Q, pronoun.K))[0, :2]
    assert differs(logits, numbers_in(printed)).all()
    agrees(logits, numbers_in(correct))
    agrees(regard.attention(pronoun.Q, pronoun.K).scores[0, :2], numbers_in(correct))


@facts(printed="errata/2/printed", correct="errata/2/correct")
def test_erratum_bytes_of_a_large_batch(printed: str, correct: str) -> None:
    batch, heads, n, n_again, wrong_billions, wrong_gigabytes = numbers_in(printed)
    billions, gigabytes = numbers_in(correct)
    assert n == n_again
    values = math.prod(lazy(int(batch), int(heads), int(n)).shape)
    assert round(values / 1e9, 2) == billions
    assert round(4 * values / 1e9, 1) == gigabytes
    assert round(values / 1e9, 1) != wrong_billions
    assert round(4 * values / 1e9, 1) != wrong_gigabytes


@facts(printed="errata/3/printed", correct="errata/3/correct")
def test_erratum_aggregating_takes_n_squared_times_d_v(printed: str, correct: str) -> None:
    assert "n^3" in printed
    assert correct.endswith("n^2 d_v")
    for n, d_v in [(5, 2), (5, 3), (7, 3), (3, 11)]:
        counts = learn.attention_by_loops(np.ones((n, 2)), np.ones((n, 2)), np.ones((n, d_v))).counts
        assert counts.value_multiply_adds == n**2 * d_v
        assert counts.value_multiply_adds != n**3


@facts(printed="errata/4/printed", correct="errata/4/correct")
def test_erratum_variance_of_dot_products_of_unit_vectors(printed: str, correct: str) -> None:
    assert "unit vectors" in printed
    assert printed.endswith("variance d_k")
    assert correct.endswith("1/d_k")

    # Exactly: all corners of the cube have entries of variance 1; divided by √d they are unit vectors.
    d = 4
    corners = np.array(list(itertools.product([-1.0, 1.0], repeat=d)))
    assert (corners @ corners.T).var() == d
    units = corners / math.sqrt(d)
    assert (units @ units.T).var() == 1 / d

    # By a seeded experiment with normal entries; four standard errors of a sample variance of this size.
    samples = 200_000
    for d in (2, 16, 64):
        a, b = np.random.default_rng(d).normal(size=(2, samples, d))
        entries = (a * b).sum(axis=1)
        a /= np.linalg.norm(a, axis=1, keepdims=True)
        b /= np.linalg.norm(b, axis=1, keepdims=True)
        unit = (a * b).sum(axis=1)
        for dots, variance in ((entries, d), (unit, 1 / d)):
            error = 4 * (dots**2).std() / math.sqrt(samples)
            assert abs(dots.var() - variance) < error
            assert error < 0.1 * variance  # narrow enough to tell d from 1 / d, and to tell neighbours apart


@facts(printed="errata/5/printed", correct="errata/5/correct")
def test_erratum_scaling_does_not_fix_magnitude(printed: str, correct: str) -> None:
    assert "alignment, not magnitude" in printed
    across, short = numbers_in(correct)
    attention = CheckedAttention(d_k=2)
    raw = attention.compute_scores(magnitude.Q, magnitude.K)[0]
    scaled = attention.scale_scores(np.array([raw]))[0]
    agrees(scaled[[2, 0]], [across, short])
    assert scaled[2] > scaled[0]  # the misaligned key still wins
    assert (np.argsort(scaled) == np.argsort(raw)).all()  # one divisor does not change the order
    agrees(regard.attention(magnitude.Q, magnitude.K).scores[0][[2, 0]], [across, short])

    directions = magnitude.K / np.linalg.norm(magnitude.K, axis=1, keepdims=True)
    short_cosine, long_cosine, across_cosine = attention.compute_scores(magnitude.Q, directions)[0]
    assert short_cosine == pytest.approx(long_cosine, rel=1e-15)
    assert across_cosine < short_cosine


@facts(printed="errata/6/printed", correct="errata/6/correct")
def test_erratum_cpu_has_a_flash_kernel(printed: str, correct: str) -> None:
    assert "math fallback" in printed
    assert "flash kernel on CPU" in correct
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    ran: list[str] = []

    class Record(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func.name())
            return func(*args, **(kwargs or {}))

    q, k, v = (torch.tensor(x, dtype=torch.float32)[None, None] for x in (cat.Q, cat.K, cat.V))
    with Record():
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert ran == ["aten::_scaled_dot_product_flash_attention_for_cpu"]
    np.testing.assert_allclose(output[0, 0].numpy(), by_learn(cat.Q, cat.K, cat.V)[0], atol=1e-6)


@every_way
@facts(printed="errata/7/printed", correct="errata/7/correct")
def test_erratum_attention_is_permutation_equivariant(attend: Any, printed: str, correct: str) -> None:
    assert printed.endswith("permutation-invariant")
    assert correct.startswith("equivariant")
    order = np.array([2, 0, 4, 1, 3])
    output, weights = attend(cat.Q, cat.K, cat.V)
    moved_output, moved_weights = attend(cat.Q[order], cat.K[order], cat.V[order])
    np.testing.assert_allclose(moved_output, output[order], atol=1e-15)
    np.testing.assert_allclose(moved_weights, weights[order][:, order], atol=1e-15)
    assert np.abs(moved_output - output).max() > 0.1  # so it is not invariant
    same, _ = attend(cat.Q, cat.K[order], cat.V[order])
    np.testing.assert_allclose(same, output, atol=1e-15)


# Every fact is tested


def leaves(tree: Any, path: str = "") -> list[str]:
    """Return the paths of all facts; a list of records is traversed, any other list is one fact."""
    if isinstance(tree, dict):
        branches = list(tree.items())
    elif isinstance(tree, list) and any(isinstance(x, dict) for x in tree):
        branches = [(str(i), x) for i, x in enumerate(tree)]
    else:
        return [path]
    return [leaf for name, branch in branches for leaf in leaves(branch, f"{path}/{name}".strip("/"))]


def find_untested(tree: Any) -> list[str]:
    tested = [leaf for leaf in leaves(tree) if any(f"{leaf}/".startswith(f"{path}/") for path in COVERED)]
    return [leaf for leaf in leaves(tree) if leaf not in tested and leaf != "about"]  # `about` is not a fact


def test_every_fact_is_tested() -> None:
    assert len(leaves(FACTS)) > 70
    assert find_untested(FACTS) == []


def test_an_untested_fact_is_found() -> None:
    more = copy.deepcopy(FACTS)
    more["cat"]["untested_weights"] = [1]
    more["errata"].append({"printed": "1 + 1 = 3", "correct": "2"})
    assert find_untested(more) == ["cat/untested_weights", "errata/8/printed", "errata/8/correct"]
