"""Attention by class, by function and by loops: the four steps, masks, and values that are not finite."""

from __future__ import annotations

import inspect
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard import ArgumentTypeError
from regard.explore.code_explorer import read_listing
from regard.learn import (
    AdditiveAttention,
    CheckedAttention,
    NumpyMultiHeadAttention,
    ScaledDotProductAttention,
    TransformerBlock,
    attention_by_loops,
    create_causal_mask,
    create_padding_mask,
    examples,
    exercises,
    family,
    iter_multiplications,
    kernel_attention,
    scaled_dot_product_attention,
)
from tests.helpers.attention_ways import by_class, by_function, by_loops, draw_qkv

every_way = pytest.mark.parametrize("attend", [by_class, by_function, by_loops])


def definition(Q: Any, K: Any, V: Any, mask: Any) -> tuple[Any, Any]:
    """Compute the softmax as one quotient, over the visible keys only, in long double."""
    n_q, n_k = len(Q), len(K)
    Q, K, V = (x.astype(np.longdouble) for x in (Q, K, V))
    weights = np.zeros((n_q, n_k), dtype=np.longdouble)
    for i, j in np.argwhere(mask):
        own = Q[i] @ K[j]
        seen = [Q[i] @ K[m] for m in range(n_k) if mask[i, m]]
        weights[i, j] = 1 / sum(np.exp((s - own) / np.sqrt(np.longdouble(Q.shape[1]))) for s in seen)
    output = np.zeros((n_q, V.shape[1]), dtype=np.longdouble)
    for i, j in np.argwhere(mask):
        output[i] += weights[i, j] * V[j]
    return output, weights


@every_way
@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_the_definition(attend: Any, seed: int) -> None:
    Q, K, V = draw_qkv(5, 7, 3, 2, seed=seed)
    mask = np.random.default_rng(seed).random((5, 7)) < 0.6
    for rows in (np.ones((5, 7), dtype=bool), mask):
        for got, want in zip(attend(Q, K, V, rows), definition(Q, K, V, rows), strict=True):
            np.testing.assert_allclose(got, want.astype(float), rtol=1e-13, atol=1e-15)
    for got, want in zip(attend(Q, K, V), attend(Q, K, V, np.ones((5, 7), dtype=bool)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_forward_is_the_four_steps_in_order() -> None:
    Q, K, V = draw_qkv(5, 7, 3, 2)
    attention = CheckedAttention(d_k=3)
    scores = attention.compute_scores(Q, K)
    scaled = attention.scale_scores(scores)
    weights = attention.compute_weights(scaled)
    output = attention.compute_output(weights, V)
    np.testing.assert_allclose(scores, np.einsum("id,jd->ij", Q, K), rtol=1e-13)
    np.testing.assert_allclose(scaled * math.sqrt(3), scores, rtol=1e-15)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-15)
    for way in (attention.forward, attention):
        got_output, got_weights = way(Q, K, V)
        np.testing.assert_array_equal(got_weights, weights)
        np.testing.assert_array_equal(got_output, output)


def test_the_class_is_the_same_text_everywhere() -> None:
    source = inspect.getsource(ScaledDotProductAttention)
    docstring = source.partition('    """')[2].partition('"""\n\n')
    assert len((source.partition('    """')[0] + docstring[2]).splitlines()) <= 25
    chapter = (Path(__file__).parents[3] / "docs/book/04-four-steps.md").read_text("utf-8")
    assert source in chapter
    assert source in read_listing("numpy").code
    assert source in exercises.solution(8).code
    assert source == family.MECHANISMS[0].code + "\n"


@pytest.mark.parametrize("masked", [False, True])
def test_the_plain_class_agrees_with_the_definition(masked: bool) -> None:
    Q, K, V = draw_qkv(5, 7, 3, 2)
    mask = np.random.default_rng(0).random((5, 7)) < 0.6 if masked else np.ones((5, 7), dtype=bool)
    found = ScaledDotProductAttention(d_k=3).forward(Q, K, V, mask if masked else None)
    for got, want in zip(found, definition(Q, K, V, mask), strict=True):
        np.testing.assert_allclose(got, want.astype(float), rtol=1e-13, atol=1e-15)


def test_the_plain_class_has_nan_where_all_keys_are_masked_and_the_checked_one_zeros() -> None:
    arrays = draw_qkv(2, 3, 2, 2)
    mask = np.array([[True, True, False], [False, False, False]])
    with np.errstate(invalid="ignore"):
        plain = ScaledDotProductAttention(d_k=2).forward(*arrays, mask)
    checked = CheckedAttention(d_k=2)(*arrays, mask)
    for ours, theirs in zip(plain, checked, strict=True):
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-15)
        assert np.isnan(ours[1]).all() and not theirs[1].any()


@every_way
def test_the_output_comes_first_and_the_weights_second(attend: Any) -> None:
    output, weights = attend(*draw_qkv(5, 7, 3, 2))
    assert output.shape == (5, 2)
    assert weights.shape == (5, 7)


@pytest.mark.parametrize("lead", [(2,), (2, 3), (2, 1, 3)])
def test_leading_axes_are_computed_independently(lead: tuple[int, ...]) -> None:
    Q, K, V = draw_qkv(5, 7, 3, 2, *lead)
    mask = np.random.default_rng(1).random((*lead, 5, 7)) < 0.7
    output, weights = by_class(Q, K, V, mask)
    assert weights.shape == (*lead, 5, 7)
    assert output.shape == (*lead, 5, 2)
    for where in np.ndindex(*lead):
        one_output, one_weights = by_loops(Q[where], K[where], V[where], mask[where])
        np.testing.assert_allclose(weights[where], one_weights, atol=1e-14)
        np.testing.assert_allclose(output[where], one_output, atol=1e-14)


def test_one_set_of_keys_broadcasts_over_heads() -> None:
    Q, K, V = draw_qkv(5, 7, 3, 2, 4)
    output, weights = by_class(Q, K[:1], V[0])
    for h in range(4):
        np.testing.assert_array_equal(weights[h], by_class(Q[h], K[0], V[0])[1])
        np.testing.assert_allclose(output[h], by_class(Q[h], K[0], V[0])[0], atol=1e-15)


@every_way
@pytest.mark.parametrize("size", [1e4, 1e8, 1e150])
def test_large_scores_do_not_overflow(attend: Any, size: float) -> None:
    output, weights = attend([[size]], [[1.0], [2.0], [2.0]], [[1.0], [2.0], [4.0]])
    np.testing.assert_array_equal(weights, [[0, 0.5, 0.5]])
    np.testing.assert_array_equal(output, [[3]])


@every_way
def test_integers_and_half_precision_are_computed_in_float64(attend: Any) -> None:
    Q, K, V = (np.round(x * 4).astype(np.float16) for x in draw_qkv(5, 7, 3, 2))
    for kind in (np.int64, np.float16, np.float32):
        for got, want in zip(
            attend(*(x.astype(kind) for x in (Q, K, V))),
            attend(*(x.astype(float) for x in (Q, K, V))),
            strict=True,
        ):
            assert got.dtype == np.float64
            np.testing.assert_array_equal(got, want)
    _, weights = attend(*[np.full((1, 1), 60000, dtype=np.float16)] * 3)  # a score float16 cannot hold
    np.testing.assert_array_equal(weights, [[1]])


@every_way
@pytest.mark.parametrize(("n_q", "n_k", "d_v"), [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
def test_any_size_except_d_k_may_be_zero(attend: Any, n_q: int, n_k: int, d_v: int) -> None:
    output, weights = attend(np.ones((n_q, 4)), np.ones((n_k, 4)), np.ones((n_k, d_v)))
    assert weights.shape == (n_q, n_k)
    np.testing.assert_array_equal(output, np.full((n_q, d_v), 1.0 if n_k else 0.0))


@every_way
@pytest.mark.parametrize("row", range(5))
def test_a_fully_masked_row_is_zeros(attend: Any, row: int) -> None:
    Q, K, V = draw_qkv(5, 7, 3, 2)
    mask = np.ones((5, 7), dtype=bool)
    mask[row] = False
    output, weights = attend(Q, K, V, mask)
    others = np.arange(5) != row
    np.testing.assert_array_equal(weights[row], np.zeros(7))
    np.testing.assert_array_equal(output[row], np.zeros(2))
    for got, full in zip((output, weights), attend(Q, K, V), strict=True):
        np.testing.assert_array_equal(got[others], full[others])


@every_way
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30, 1e308])
@pytest.mark.parametrize("where", ["key", "value", "both"])
@pytest.mark.filterwarnings("error")
def test_masked_keys_and_values_have_no_effect(attend: Any, poison: float, where: str) -> None:
    Q, K, V = draw_qkv(5, 5, 3, 2)
    mask = create_causal_mask(5)
    mask[:, 2] = False  # masked for all queries, in addition to the causal mask
    clean = attend(Q, K, V, mask)
    if where != "value":
        K[2] = poison
    if where != "key":
        V[2, 0] = poison
    for got, want in zip(attend(Q, K, V, mask), clean, strict=True):
        np.testing.assert_array_equal(got, want)


@every_way
def test_a_nan_spreads_only_to_rows_that_attend_to_it(attend: Any) -> None:
    Q, K, V = draw_qkv(5, 5, 3, 2)
    clean_output, clean_weights = attend(Q, K, V, create_causal_mask(5))
    V[3, 1] = math.nan
    output, weights = attend(Q, K, V, create_causal_mask(5))
    np.testing.assert_array_equal(weights, clean_weights)
    assert np.isnan(output).tolist() == [[False, False]] * 3 + [[False, True]] * 2
    np.testing.assert_allclose(output[:, 0], clean_output[:, 0], atol=1e-15)

    K[3, 0] = math.nan
    output, weights = attend(Q, K, V, create_causal_mask(5))
    assert np.isnan(output).all(axis=1).tolist() == [False, False, False, True, True]
    assert np.isnan(weights).tolist() == [[False] * 5] * 3 + [[True] * 4 + [False], [True] * 5]
    np.testing.assert_array_equal(weights[3, 4], 0)
    for row in (3, 4):  # the loops must not treat a row of NaN as fully masked
        alone = np.zeros((5, 5), dtype=bool)
        alone[row, 3] = True
        assert np.isnan(attend(Q, K, V, alone)[1][row, 3])


@every_way
@pytest.mark.parametrize("kind", [int, float, np.uint8, object])
def test_a_mask_that_is_not_boolean_raises(attend: Any, kind: Any) -> None:
    Q, K, V = draw_qkv(3, 3, 2, 2)
    with pytest.raises(TypeError) as caught:
        attend(Q, K, V, create_causal_mask(3).astype(kind))
    parts = ["received mask, an array of", "expected a boolean mask, True = attend"]
    if kind is object:
        parts.append("pass mask == 0")
    else:
        parts += [
            f'mask=[[1, 0, 0], [1, 1, 0], [1, 1, 1]], true_means="{word}"' for word in ("attend", "ignore")
        ]
        parts += ["1 = look here: query 0 sees key 0\n", "1 = do not look: query 0 sees keys 1, 2"]
    for part in parts:
        assert part in str(caught.value)


MASKED_CALLS: dict[str, Any] = {
    "class": lambda Q, K, V, **mask: CheckedAttention(d_k=4)(Q, K, V, **mask)[1],
    "function": lambda Q, K, V, **mask: scaled_dot_product_attention(Q, K, V, **mask)[1],
    "loops": lambda Q, K, V, **mask: attention_by_loops(Q, K, V, **mask).weights,
    "kernel": lambda Q, K, V, **mask: kernel_attention(Q, K, V, **mask)[1],
    "additive": lambda Q, K, V, **mask: AdditiveAttention(d_q=4, d_k=4, hidden_dim=3)(Q, K, V, **mask)[1],
    "heads": lambda Q, K, V, **mask: NumpyMultiHeadAttention(4, 2)(Q, K, V, **mask)[1],
    "block": lambda Q, K, V, **mask: TransformerBlock(4, 2)(Q, **mask)[1],
    "walk": lambda Q, K, V, **mask: [step.total for step in iter_multiplications(Q, K, V, **mask)],
    "causal": lambda Q, K, V, **mask: family.Causal(d_k=4)(Q, K, V, **mask)[1],
    "flash": lambda Q, K, V, **mask: family.Flash(d_k=4, tile_size=2)(Q, K, V, **mask)[1],
    "cached": lambda Q, K, V, **mask: family.Cached(d_k=4)(Q, K, V, **mask)[1],
    "multi-head": lambda Q, K, V, **mask: family.MultiHead(d_k=2, num_heads=2)(Q, K, V, **mask)[1],
    "linear": lambda Q, K, V, **mask: family.Linear(d_k=4)(Q, K, V, **mask)[1],
}


@pytest.mark.parametrize("name", MASKED_CALLS)
def test_a_mask_says_what_true_means(name: str) -> None:
    call, arrays = MASKED_CALLS[name], draw_qkv(5, 5, 4, 4)
    attend = np.random.default_rng(0).random((5, 5)) < 0.6
    attend[np.arange(5), np.arange(5)] = True
    want = call(*arrays, mask=attend)
    for mask in (attend, attend.astype(float), attend.astype(int).tolist()):
        np.testing.assert_array_equal(call(*arrays, mask=mask, true_means="attend"), want)
    for mask in (~attend, 1.0 - attend, (~attend).astype(np.uint8)):
        np.testing.assert_array_equal(call(*arrays, mask=mask, true_means="ignore"), want)
    with pytest.raises(TypeError, match='true_means="ignore"  # 1 = do not look'):
        call(*arrays, mask=np.tril(np.ones((5, 5))))
    with pytest.raises(ValueError, match="received true_means='keep'"):
        call(*arrays, mask=attend, true_means="keep")
    with pytest.raises(ValueError, match="numbers other than 0 and 1"):
        call(*arrays, mask=-1e9 * attend, true_means="attend")


def test_a_boolean_tensor_with_true_as_masked() -> None:
    torch = pytest.importorskip("torch")
    Q, K, V = draw_qkv(4, 4, 3, 3)
    future = torch.ones(4, 4).triu(1)
    _, weights = CheckedAttention(d_k=3)(Q, K, V, future.bool(), true_means="ignore")
    np.testing.assert_array_equal(weights == 0, future.bool().numpy())


def test_the_hint_on_a_mask_can_be_used_as_it_is() -> None:
    Q, K, V = draw_qkv(2, 3, 2, 2)
    mask = [[1, 0, 1], [1, 1, 0]]
    attention = CheckedAttention(d_k=2)
    for call in (lambda: attention(Q, K, V, mask), lambda: attention.compute_weights(Q @ K.T, mask)):
        with pytest.raises(ArgumentTypeError) as caught:
            call()
        lines = caught.value.hint.split("\n")[1:]
        found = []
        for line in lines:
            start = "__call__(Q, K, V" if "true_means" in line else "compute_weights(Q @ K.T"
            code = f"attention.{start}, {line.strip()}\n)"
            found.append(eval(code, {"attention": attention, "Q": Q, "K": K, "V": V, "np": np}))
        weights = [result[1] if isinstance(result, tuple) else result for result in found]
        np.testing.assert_array_equal(weights[0] > 0, np.array(mask) == 1)
        np.testing.assert_array_equal(weights[1] > 0, np.array(mask) == 0)
    with pytest.raises(
        ArgumentTypeError, match=r'\n    mask=mask, true_means="attend"'
    ):  # too large to repeat
        attention(*draw_qkv(7, 7, 2, 2), np.tril(np.ones((7, 7))))


@every_way
def test_true_means_attend(attend: Any) -> None:
    output, weights = attend([[1.0]], [[1.0], [1.0]], [[10.0], [20.0]], [[True, False]])
    np.testing.assert_array_equal(weights, [[1, 0]])
    np.testing.assert_array_equal(output, [[10]])


@every_way
def test_a_mask_broadcasts(attend: Any) -> None:
    Q, K, V = draw_qkv(5, 7, 3, 2)
    some = np.arange(7) < 4
    for small in (some, some[None, :], np.arange(5)[:, None] < 3, np.array(True)):
        for got, want in zip(
            attend(Q, K, V, small), attend(Q, K, V, np.broadcast_to(small, (5, 7))), strict=True
        ):
            np.testing.assert_array_equal(got, want)


def test_causal_mask_is_the_lower_triangle() -> None:
    for n in (0, 1, 2, 7):
        mask = create_causal_mask(n)
        assert mask.dtype == bool
        np.testing.assert_array_equal(mask, np.tril(np.ones((n, n), dtype=bool)))


def test_padding_mask_keeps_real_tokens() -> None:
    mask = create_padding_mask([0, 2, 5], max_length=5)
    assert mask.shape == (3, 1, 1, 5)
    assert mask.dtype == bool
    assert mask[:, 0, 0].tolist() == [[False] * 5, [True] * 2 + [False] * 3, [True] * 5]
    assert create_padding_mask([], max_length=5).shape == (0, 1, 1, 5)


def test_padding_and_causal_masks_combine() -> None:
    Q, K, V = draw_qkv(5, 5, 3, 2, 3, 2)
    lengths = np.array([0, 2, 5])
    output, weights = by_class(Q, K, V, create_causal_mask(5) & create_padding_mask(lengths, 5))
    for b, i, j in np.ndindex(3, 5, 5):
        assert (weights[b, :, i, j] > 0).all() == (j <= i and j < lengths[b])
        assert (weights[b, :, i, j] == 0).all() == (j > i or j >= lengths[b])
    np.testing.assert_array_equal(output[0], np.zeros((2, 5, 2)))


def test_explain_shows_one_query() -> None:
    attention = CheckedAttention(d_k=4)
    Q, K, V, tokens = examples.cat.Q, examples.cat.K, examples.cat.V, examples.cat.tokens
    output, weights = attention(Q, K, V)
    for i, token in enumerate(tokens):
        steps: Any = attention.explain(Q, K, V, tokens, i)
        np.testing.assert_allclose(steps.weights, weights[i], atol=1e-15)
        np.testing.assert_allclose(steps.output, output[i], atol=1e-15)
        trace = str(steps)
        assert token in trace
        shown = {float(number) for number in re.findall(r"\d+\.\d+", trace)}
        assert shown >= set(weights[i].round(4).tolist())
    with pytest.raises(ValueError, match="since d_k is 3"):
        CheckedAttention(d_k=3).explain(Q, K, V, tokens, 0)


def test_the_class_has_the_attributes_that_learners_use() -> None:
    attention = ScaledDotProductAttention(d_k=16)
    assert (attention.d_k, attention.scale) == (16, 0.25)
    scores = np.array([[1.0, 2.0, 3.0]])
    np.testing.assert_array_equal(attention.scale_scores(scores), scores * attention.scale)


SCRIPT = """
from regard.learn import CheckedAttention, cat, family
{attention}.explain(cat.Q, cat.K, cat.V, cat.tokens)
"""


@pytest.mark.parametrize("attention", ["CheckedAttention(d_k=4)", "family.Causal(d_k=4)"])
def test_explain_prints_once_in_a_script_and_at_a_prompt(attention: str) -> None:
    script, env = SCRIPT.format(attention=attention), {**os.environ, "PYTHONUTF8": "1"}
    for options in (["-"], ["-i", "-q"]):
        command = [sys.executable, *options]
        printed = subprocess.run(
            command, env=env, input=script, capture_output=True, encoding="utf-8", check=True
        ).stdout
        assert printed.count("4. Aggregate") == 1 and "The" in printed


def test_explain_does_not_print_where_a_notebook_shows_the_result(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    cat = examples.cat
    steps = CheckedAttention(d_k=4).explain(cat.Q, cat.K, cat.V)
    assert capsys.readouterr().out == "" and "key 0" in str(steps)
