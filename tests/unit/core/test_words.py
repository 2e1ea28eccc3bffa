"""The words a reader gets: whole error messages, plans, captions and the description of a page."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

import regard
from regard import attention, causal, padding
from regard.core.matrix_page import build_payload
from regard.errors import RegardError
from regard.masks import between, dense, document, prefix
from regard.measures import Entropy
from regard.score_mods import bias

EYE = np.eye(3)
A = attention(EYE, EYE)


def too_large_a_bias():
    build_payload(attention(EYE, EYE, score_mod=bias(np.ones((3, 3)))).problem, "page")


def take_too_much():
    long = np.zeros((60_000, 2), np.float32)
    attention(long, long)[:, :59_999]


def convert_with_gradient():
    torch = pytest.importorskip("torch")
    query = torch.eye(3, requires_grad=True)
    torch.as_tensor(attention(query, query))


ERRORS = {
    "A[index]: received an index with a result of shape (60000, 59999) that would take 14,399,760,000 bytes; expected "
    "at most 268,435,456 bytes. Select fewer rows, or call A.lazy[index] for a lazy part of the matrix, A.coarsen(512) "
    "for a heat map, or A.to_dense() to store the whole matrix.": take_too_much,
    "dense: received array as nested lists of different lengths; expected rows of equal length. Pad the shorter ones, "
    "and mask the padding with padding(lengths).": lambda: dense([[1, 0], [1]]),
    "measure: received int 3; expected measures such as Entropy() or TopK(8). To write a measure, subclass "
    "regard.measures.Measure and define init and step.": lambda: A.measure(3),
    "measure: received the class Entropy; expected measures such as Entropy() or TopK(8). Pass an instance: "
    "Entropy(…).": lambda: A.measure(Entropy),
    "measure: received results with the names entropy, entropy; expected a unique name for each result. Rename one "
    "with a keyword: A.measure(Mass(regard.masks.first(1)), near=Mass(sliding_window(64))).": (
        lambda: A.measure(Entropy(), Entropy())
    ),
    "mask: received int 3; expected a mask such as regard.causal(). Wrap it: regard.masks.dense(array) for booleans, "
    "True = attend; use score_mod=regard.score_mods.bias(array) to add numbers to the scores.": lambda: (
        attention(EYE, EYE, mask=3)
    ),
    "mask: received the function len; expected a mask such as regard.causal(). Wrap a function of b, h, q_idx and "
    "kv_idx: mask=regard.mask(function).": (lambda: attention(EYE, EYE, mask=len)),
    "mask: received the function causal; expected a mask such as regard.causal(). Call it: regard.causal().": (
        lambda: attention(EYE, EYE, mask=causal)
    ),
    "score_mod: received int 3; expected regard.softcap, regard.alibi, regard.relative_bias or regard.score_mods.bias. "
    "Wrap it: regard.score_mods.bias(array).": (lambda: attention(EYE, EYE, score_mod=3)),
    "attention: received sink as an array of <U1 with shape (1,); expected real numbers. Convert it first: "
    "sink.astype(float).": lambda: attention(EYE, EYE, sink=["a"]),
    "page: received 2 tokens; expected 3, one for each key. tokens label the keys. If the queries are different "
    "tokens, also pass query_tokens.": lambda: A.page(["a", "b"]),
    "page: received 4 query_tokens; expected 3, one for each query. tokens label the keys. If the queries are "
    "different tokens, also pass query_tokens.": lambda: A.page(query_tokens=list("abcd")),
    "page: received 0 queries and 3 keys; expected at least one of each. An empty matrix has nothing to show.": (
        lambda: attention(EYE[:0], EYE).page()
    ),
    "page: received bias(<array of shape (3, 3)>), 9 numbers; expected at most 8 in a page. Select fewer rows with "
    "A.lazy[..., rows, :], or use relative_bias or alibi.": too_large_a_bias,
    "A.mT @ x: received x of shape (4, 2); expected (…, q_len 3, width) for a matrix of (q_len 3, kv_len 3). The "
    "second-to-last axis must have one entry for each query.": lambda: A.mT @ np.ones((4, 2)),
    "between: received keys with position -4; expected positions from 0 to 2, or from −3 to −1 from the end. Queries "
    "are rows of the matrix, keys are columns.": lambda: attention(EYE, EYE, mask=between(keys=-4)),
    "between: received queries as str 'a'; expected an integer, a slice, or a list of integers. For example "
    "regard.masks.between(queries=slice(8, None), keys=[0, 1]).": lambda: between(queries="a"),
    "mask & other: received int 3; expected another mask. Wrap a boolean array (True = attend): "
    "regard.masks.dense(array).": lambda: causal() & 3,
    "document: received [1, 2]; expected one id for each token. Pass a list of ids.": lambda: document(
        [1, 2], 3
    ),
    'dense: received true_means=\'x\'; expected "attend" or "ignore". Pass true_means="ignore" for an '
    'nn.MultiheadAttention mask, "attend" for an SDPA mask.': lambda: dense(EYE, true_means="x"),
    "prefix: received -1; expected integers, 0 or more. Sizes and lengths count tokens.": lambda: prefix(-1),
    "document: received 0.5; expected integers. Number the documents: 0, 1, 2, …": lambda: document(0.5),
    "padding: received a length of 4 for kv_len 3; expected lengths from 0 to 3. Lengths count the real keys of each "
    "batch entry, without the padding.": lambda: attention(EYE, EYE, mask=padding(4)),
    "A @ value: received value of shape (4,); expected (…, kv_len 3, width) for a matrix of (q_len 3, kv_len 3). The "
    "second-to-last axis must have one entry for each key.": lambda: A @ np.ones(4),
    "torch.as_tensor(A): received a matrix that requires a gradient; expected a matrix without gradients. Call "
    "A.to_dense() to keep the gradient, or convert under torch.no_grad() to drop it.": convert_with_gradient,
}


@pytest.mark.parametrize("words", ERRORS)
def test_errors_say_what_was_wrong_what_is_accepted_and_how_to_mend_it(words, monkeypatch):
    monkeypatch.setattr("regard.core.matrix_page.MAX_BIAS_SIZE", 8)
    with pytest.raises(RegardError) as raised:
        ERRORS[words]()
    assert " ".join(str(raised.value).split()) == words


def test_booleans_and_words_as_an_index():
    with pytest.raises(
        RegardError, match=r"Convert booleans to positions first: numpy\.flatnonzero\(chosen\)\."
    ):
        A[[True, False, True]]
    with pytest.raises(RegardError, match="received str 'ab'"):
        A["ab"]


def test_an_array_of_one_integer_is_an_integer():
    np.testing.assert_array_equal(A[np.array(1)], A.to_dense()[1])
    with pytest.raises(RegardError, match=r"received an array of float64 with shape \(\)"):
        A[np.array(1.5)]


def test_the_last_position_from_the_end_is_inside():
    weights = attention(EYE, EYE, mask=between(keys=-3)).to_dense()
    np.testing.assert_array_equal(weights, [[1, 0, 0]] * 3)
    assert repr(between(queries=0, keys=[1, 2])) == "between(queries=0, keys=[1, 2])"


def test_the_description_of_a_page():
    text = attention(np.ones((4, 2)), np.ones((5, 2)), mask=causal(align="lower_right"), sink=1.0).page().html
    words = "4 × 5 weights of one attention head, head_dim 2; scale 0.7071, mask causal(align='lower_right'), sink. "
    assert json.dumps(words + "Made by regard.") in text


def test_the_bound_of_an_exactly_stored_matrix_is_that_of_its_arithmetic():
    # Halves represent these numbers, so that only products, exponentials and sums round, each by at most eps.
    query, key = np.array([[3.0, 4.0], [0.0, 1.0]]), np.array([[6.0, 8.0], [1.0, 0.0], [0.0, 0.5]])
    error = build_payload(attention(query, key, scale=0.5).problem, "page").error
    eps = np.finfo(np.float64).eps
    change = 0.5 * (2 + 8) * eps * 5 * 10 + 8 * eps
    stored_lse = float(np.abs(attention(query, key, scale=0.5).lse.astype(np.float32)).max()) * 2.0**-24
    assert error.exact
    assert error.absolute == pytest.approx(math.tanh(change / 2) + math.expm1(stored_lse), rel=1e-12, abs=0)
    assert error.relative == pytest.approx(math.expm1(2 * change + stored_lse), rel=1e-9, abs=0)


def test_the_caption_of_a_sample_of_weights():
    assert (
        ">Every row. Each number is the share" in attention(np.ones((5, 2)), np.ones((400, 2)))._repr_html_()
    )


def test_the_table_of_an_explanation_heads_each_column():
    heads = re.findall(r'<th scope="col"[^>]*>([^<]*)', A.explain(0, value=EYE)._repr_html_())
    assert heads[:4] == ["key", "score", "key", "scaled score"]
    assert heads[-3:] == ["key", "weight · value", "contribution"]


def test_linear_products_keep_the_dtype_of_the_value():
    linear = regard.linear_attention(np.ones((5, 2), np.float32), np.ones((5, 2), np.float32), mask=causal())
    assert (linear @ np.ones((5, 3), np.float32)).dtype == np.float32


def test_a_page_states_the_difference_that_was_found_and_its_bound():
    rng = np.random.default_rng(0)
    matrix = attention(rng.normal(size=(40, 8)), rng.normal(size=(40, 8)))
    error = build_payload(matrix.problem, "page").error
    assert 0 < error.found_absolute < error.absolute and 0 < error.found_relative < error.relative
    assert error.compared == matrix.problem.shape[0] * 40 * 40
