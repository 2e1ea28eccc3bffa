"""Wrong calls, as a user makes them: each is refused with the operation, what came, what was expected, and the cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import regard
from regard import ArgumentError, KindError, OutOfRange, RegardError, TooLarge, attention, merge
from regard.masks import causal, dense, document, first, padding, prefix, sliding_window, true_means_ignore
from regard.measures import Coarse, Entropy, Mass, Spread
from regard.positions import rope, sinusoidal
from regard.scores import alibi, bias, relative_bias, softcap

rng = np.random.default_rng(1)
query, key, value = rng.normal(size=(5, 4)), rng.normal(size=(7, 4)), rng.normal(size=(7, 3))
A = attention(query, key)
square = attention(key, key, mask=causal())
heads = attention(rng.normal(size=(2, 6, 5, 4)), rng.normal(size=(2, 3, 7, 4)), enable_gqa=True)
three = np.ones((3, 5, 4))
large = attention(np.zeros((20_000, 1), np.float32), np.zeros((20_000, 1), np.float32))
no_batch = attention(np.zeros((0, 2, 5, 4)), np.zeros((0, 2, 5, 4)))
ragged = [[1.0], [1.0, 2.0]]
table = np.zeros((32, 3))
part = (square @ value, square.lse)

BUILTIN = {ArgumentError: ValueError, KindError: TypeError, OutOfRange: IndexError, TooLarge: MemoryError}


class Wrong(NamedTuple):
    """A call, and words of each part of its refusal; words that stand together are separated by `|`."""

    call: Callable[[], Any]
    kind: type[RegardError]
    operation: str
    received: str
    expected: str
    cure: str


WRONG = {
    # attention
    "query is None": Wrong(lambda: attention(None, key),
        KindError, "attention", "query|NoneType", "NumPy arrays", "numpy.asarray"),
    "query is text": Wrong(lambda: attention("cat", key),
        KindError, "attention", "query|str 'cat'", "numbers", "Convert"),
    "query of text": Wrong(lambda: attention([["a"]], key),
        KindError, "attention", "query", "real numbers", "astype(float)"),
    "query of booleans": Wrong(lambda: attention(query > 0, key),
        KindError, "attention", "query|bool|(5, 4)", "real numbers", "query.astype(float)"),
    "key of complex": Wrong(lambda: attention(query, key * 1j),
        KindError, "attention", "key|complex128|(7, 4)", "real numbers", "key.astype(float)"),
    "query with one axis": Wrong(lambda: attention(query[0], key),
        ArgumentError, "attention", "query|(4,)", "two axes at least", "query[None, :]"),
    "key is a number": Wrong(lambda: attention(query, 3.0),
        ArgumentError, "attention", "key|()", "head_dim", "key[None, :]"),
    "head_dim differs": Wrong(lambda: attention(query[:, :3], key),
        ArgumentError, "attention", "(q_len 5, head_dim 3)|(kv_len 7, head_dim 4)", "same head_dim", "transpose"),
    "heads differ": Wrong(lambda: attention(np.ones((6, 5, 4)), np.ones((3, 7, 4))),
        ArgumentError, "attention", "heads 6|heads 3", "broadcast", "enable_gqa=True"),
    "heads no multiple": Wrong(lambda: attention(np.ones((5, 5, 4)), np.ones((3, 7, 4)), enable_gqa=True),
        ArgumentError, "attention", "heads 5|heads 3|enable_gqa=True", "multiple of kv_heads", "heads / kv_heads"),
    "grouped without heads": Wrong(lambda: attention(query, key, enable_gqa=True),
        ArgumentError, "attention", "enable_gqa=True", "multiple", "heads"),
    "scale NaN": Wrong(lambda: attention(query, key, scale=np.nan),
        ArgumentError, "attention", "scale=nan", "finite number", "1/√head_dim"),
    "scale infinite": Wrong(lambda: attention(query, key, scale=-np.inf),
        ArgumentError, "attention", "scale=-inf", "finite number", "0 makes every row uniform"),
    "scale is text": Wrong(lambda: attention(query, key, scale="0.5"),
        ArgumentError, "attention", "scale='0.5'", "finite number", "Leave it out"),
    "scale is a boolean": Wrong(lambda: attention(query, key, scale=True),
        ArgumentError, "attention", "scale=True", "finite number", "Leave it out"),
    "sink of wrong length": Wrong(lambda: attention(three, three, sink=[1.0, 2.0]),
        ArgumentError, "attention: sink", "(2,)|heads 3", "heads|(3,)", "one entry for each head"),
    "sink is text": Wrong(lambda: attention(query, key, sink="big"),
        KindError, "attention", "sink", "real numbers", "sink.astype(float)"),
    # masks
    "mask is booleans": Wrong(lambda: attention(query, key, mask=np.ones((5, 7), bool)),
        KindError, "mask", "bool|(5, 7)", "regard.causal()", "dense(array)|True = attend"),
    "mask is integers": Wrong(lambda: attention(query, key, mask=np.ones((5, 7), int)),
        KindError, "mask", "int64", "a mask", "dense(array)"),
    "mask is floats": Wrong(lambda: attention(query, key, mask=np.zeros((5, 7))),
        KindError, "mask", "float64", "a mask", "dense(array)"),
    "mask is a list": Wrong(lambda: attention(query, key, mask=[[True]]),
        KindError, "mask", "a list", "a mask", "dense(array)"),
    "mask is not called": Wrong(lambda: attention(query, key, mask=causal),
        KindError, "mask", "the function causal", "regard.causal()", "Call it: causal()"),
    "causal without align": Wrong(lambda: attention(query, key, mask=causal()),
        ArgumentError, "causal", "(q_len 5, kv_len 7)|no align", "upper_left|lower_right", "cache"),
    "causal with a typo": Wrong(lambda: causal("lower-right"),
        ArgumentError, "causal", "align='lower-right'", "upper_left|lower_right", "align="),
    "window with a typo": Wrong(lambda: sliding_window(3, align="left"),
        ArgumentError, "sliding_window", "align='left'", "upper_left", "lower_right"),
    "window of nothing": Wrong(lambda: sliding_window(),
        ArgumentError, "sliding_window", "size=None", "size|left and right", "sliding_window(left=3, right=0)"),
    "window of both": Wrong(lambda: sliding_window(3, left=1),
        ArgumentError, "sliding_window", "size=3|left=1", "either", "own key"),
    "window of size 0": Wrong(lambda: sliding_window(0),
        ArgumentError, "sliding_window", "0", "1 or more", "count tokens"),
    "window of half a token": Wrong(lambda: sliding_window(2.5),
        ArgumentError, "sliding_window", "2.5", "whole numbers", "count tokens"),
    "window for other heads": Wrong(lambda: attention(three, three, mask=sliding_window([1, 2])),
        ArgumentError, "sliding_window", "(2,)|heads 3", "heads|(3,)", "each head"),
    "length negative": Wrong(lambda: padding([3, -1]),
        ArgumentError, "padding", "-1", "0 or more", "count tokens"),
    "length too long": Wrong(lambda: attention(query, key, mask=padding(8)),
        ArgumentError, "padding", "8|kv_len 7", "0 to 7", "real keys"),
    "lengths are floats": Wrong(lambda: padding([3.0, 5.0]),
        ArgumentError, "padding", "[3.0, 5.0]", "whole numbers", "count tokens"),
    "lengths without a batch": Wrong(lambda: attention(query, key, mask=padding([3, 5])),
        ArgumentError, "padding", "q_len 5", "batch", "query[:, None]"),
    "padding on top": Wrong(lambda: padding(3, side="top"),
        ArgumentError, "padding", "side='top'", "left|right", "where the padding stands"),
    "ids too few": Wrong(lambda: attention(key, key, mask=document([0, 1])),
        ArgumentError, "document", "2 query ids|2 ids", "7 (q_len)|7 (kv_len)", "query_ids"),
    "ids are one number": Wrong(lambda: document(3),
        ArgumentError, "document", "3", "one id for each token", "list of ids"),
    "ids of other queries": Wrong(lambda: attention(query, key, mask=document(range(7))),
        ArgumentError, "document", "7 query ids", "5 (q_len)", "query_ids"),
    "first is negative": Wrong(lambda: first(-2),
        ArgumentError, "first", "-2", "0 or more", "tokens"),
    "prefix is text": Wrong(lambda: prefix("all"),
        ArgumentError, "prefix", "'all'", "whole numbers", "tokens"),
    "dense of integers": Wrong(lambda: dense([[1, 0]]),
        KindError, "dense", "int64|(1, 2)", "booleans, True = attend", "dense(array != 0)"),
    "dense of floats": Wrong(lambda: dense(np.zeros((5, 7))),
        KindError, "dense", "float64|(5, 7)", "booleans", "score_mod=bias(array)|true_means_ignore"),
    "ignore of floats": Wrong(lambda: true_means_ignore(np.zeros((5, 7))),
        KindError, "dense", "float64", "booleans", "bias(array)"),
    "dense of another shape": Wrong(lambda: attention(query, key, mask=dense(np.ones((7, 5), bool))),
        ArgumentError, "dense", "(7, 5)", "(q_len 5, kv_len 7)", "last two axes"),
    "dense for other heads": Wrong(lambda: attention(query, key, mask=dense(np.ones((3, 5, 7), bool))),
        ArgumentError, "dense", "(q_len 5, kv_len 7)", "broadcast", "each head"),
    "mask & array": Wrong(lambda: causal() & np.ones((5, 7), bool),
        KindError, "mask & other", "bool|(5, 7)", "another mask", "regard.dense(array)"),
    "mask | True": Wrong(lambda: causal() | True,
        KindError, "mask | other", "bool True", "another mask", "dense"),
    "mask and mask": Wrong(lambda: causal() and first(3),
        KindError, "a mask as a truth value", "causal()", "& | ~", "mask & other"),
    # scores
    "score_mod of functions": Wrong(lambda: attention(query, key, score_mod=[abs]),
        KindError, "score_mod", "abs", "regard.softcap", "bias(array)"),
    "cap of zero": Wrong(lambda: softcap(0),
        ArgumentError, "softcap", "0", "above 0", "Leave it out"),
    "cap is text": Wrong(lambda: softcap("50"),
        ArgumentError, "softcap", "'50'", "a number", "no cap"),
    "slopes of wrong length": Wrong(lambda: attention(key, key, score_mod=alibi([0.5, 0.25])),
        ArgumentError, "alibi", "(2,)|q_len 7", "heads", "each head"),
    "alibi without align": Wrong(lambda: attention(query, key, score_mod=alibi()),
        ArgumentError, "alibi", "no align", "upper_left", "cache"),
    "bias of booleans": Wrong(lambda: bias(np.ones((5, 7), bool)),
        KindError, "bias", "bool|(5, 7)", "floating point", "mask=dense(array)"),
    "bias of another shape": Wrong(lambda: attention(query, key, score_mod=bias(np.zeros((5, 6)))),
        ArgumentError, "bias", "(5, 6)", "(q_len 5, kv_len 7)", "last two axes"),
    "table with one axis": Wrong(lambda: relative_bias(np.zeros(32), bidirectional=True),
        ArgumentError, "relative_bias", "(32,)", "(buckets, heads)", "T5"),
    "table of other heads": Wrong(lambda: attention(key, key, score_mod=relative_bias(table, bidirectional=True)),
        ArgumentError, "relative_bias", "q_len 7", "heads", "each head"),
    # positions
    "rope of an odd dim": Wrong(lambda: rope(query[:, :3], pairing="halves"),
        ArgumentError, "rope", "3", "even", "pairs"),
    "rope in another pairing": Wrong(lambda: rope(query, pairing="half"),
        ArgumentError, "rope", "pairing='half'", "halves|neighbours", "rotate_half"),
    "rope at too few positions": Wrong(lambda: rope(query, [1, 2], pairing="halves"),
        ArgumentError, "rope", "(2,)", "5 tokens", "arange"),
    "sinusoidal of an odd dim": Wrong(lambda: sinusoidal(5, 3),
        ArgumentError, "sinusoidal", "3", "even", "pairs"),
    # indices
    "row out of range": Wrong(lambda: A[9],
        OutOfRange, "A[index]", "9|axis 0", "-5 to 4", "5 entries"),
    "column out of range": Wrong(lambda: A.scores[0, -8],
        OutOfRange, "A.scores[index]", "-8|axis 1", "-7 to 6", "7 entries"),
    "row of an array out of range": Wrong(lambda: A[[0, 5]],
        OutOfRange, "A[index]", "5|axis 0", "-5 to 4", "5 entries"),
    "too many indices": Wrong(lambda: A[0, 0, 0],
        OutOfRange, "A[index]", "3 indices", "at most 2", "2 axes"),
    "two ellipses": Wrong(lambda: A[..., ...],
        OutOfRange, "A[index]", "2 ellipses", "one ellipsis", "axes"),
    "two index arrays": Wrong(lambda: A[[0, 1], [0, 1]],
        KindError, "A[index]", "2 integer arrays", "one integer array", "two steps"),
    "booleans as index": Wrong(lambda: A[np.ones(5, bool)],
        KindError, "A[index]", "bool|(5,)", "integers", "numpy.flatnonzero"),
    "lazy booleans": Wrong(lambda: A.lazy[[True] * 5],
        KindError, "A.lazy[index]", "bool|(5,)", "integers", "numpy.flatnonzero"),
    "lazy columns": Wrong(lambda: A.lazy[:, :3],
        ArgumentError, "A.lazy[index]", "slice", "all columns", "A[index]"),
    "lazy out of range": Wrong(lambda: A.lazy[5],
        OutOfRange, "A.lazy[index]", "5|axis 0", "-5 to 4", "5 entries"),
    # products
    "value too short": Wrong(lambda: A @ value[:5],
        ArgumentError, "A @ value", "(5, 3)", "kv_len 7", "the keys"),
    "value transposed": Wrong(lambda: A @ value.T,
        ArgumentError, "A @ value", "(3, 7)", "kv_len 7|width", "axis before the last"),
    "value is None": Wrong(lambda: A @ None,
        KindError, "A @ value", "value", "real numbers", "value.astype(float)"),
    "value of text": Wrong(lambda: A @ [["cat"], ["hat"]],
        KindError, "A @ value", "value", "real numbers", "value.astype(float)"),
    "value of other heads": Wrong(lambda: heads @ np.ones((2, 6, 7, 3)),
        ArgumentError, "A @ value", "(2, 6, 7, 3)", "(2, 6)|2 times", "leading axes"),
    "x too long": Wrong(lambda: A.mT @ np.ones(7),
        ArgumentError, "A.mT @ x", "(7,)", "q_len 5", "the queries"),
    "x of complex": Wrong(lambda: A.mT @ np.full(5, 1j),
        KindError, "A.mT @ x", "x as|complex128", "real numbers", "x.astype(float)"),
    # measures
    "top 0": Wrong(lambda: A.topk(0),
        ArgumentError, "topk", "k=0|kv_len 7", "1 to 7", "at most as many"),
    "top of more than all": Wrong(lambda: A.topk(8),
        ArgumentError, "topk", "k=8|kv_len 7", "1 to 7", "at most as many"),
    "coarsen to 0": Wrong(lambda: A.coarsen(0),
        ArgumentError, "coarsen", "block=0", "1 to 5", "cells along an edge"),
    "coarsen to more": Wrong(lambda: A.measure(Coarse(6)),
        ArgumentError, "coarsen", "block=6|(5, 7)", "1 to 5", "cells"),
    "coarsen by median": Wrong(lambda: A.coarsen(2, "median"),
        ArgumentError, "coarsen", "reduce='median'", "mean|max|sum", "cells"),
    "sum over heads": Wrong(lambda: heads.sum(axis=1),
        ArgumentError, "sum", "axis=1", "axis=-1|axis=-2|None", "heads"),
    "largest of none": Wrong(lambda: attention(query, key[:0]).argmax(-1),
        ArgumentError, "argmax", "(5, 0)", "one entry", "largest"),
    "distance without align": Wrong(lambda: A.distance(),
        ArgumentError, "distance", "(q_len 5, kv_len 7)", "align=", "lower_right"),
    "spread without align": Wrong(lambda: A.measure(Spread()),
        ArgumentError, "spread", "no align", "align=", "lower_right"),
    "mass of an array": Wrong(lambda: A.mass(np.ones((5, 7), bool)),
        KindError, "mass", "bool|(5, 7)", "regard.first(1)", "dense(array)"),
    "mass too long": Wrong(lambda: A.mass(padding(9)),
        ArgumentError, "padding", "9|kv_len 7", "0 to 7", "real keys"),
    "measure by name": Wrong(lambda: A.measure("entropy"),
        KindError, "measure", "str 'entropy'", "Entropy()", "init and step"),
    "measure twice": Wrong(lambda: A.measure(Entropy(), Entropy()),
        ArgumentError, "measure", "entropy, entropy", "a name for each", "keyword"),
    # explanations
    "explain out of range": Wrong(lambda: A.explain(5),
        OutOfRange, "explain", "5", "-5 to 4", "5 entries"),
    "explain many heads": Wrong(lambda: heads.explain(3),
        ArgumentError, "explain", "batch 2, heads 6", "one head", "A.lazy[0, 0].explain(3)"),
    "tokens too few": Wrong(lambda: A.explain(0, tokens=["a"]),
        ArgumentError, "explain", "1 tokens", "7, one for each key", "keys"),
    "explained value too short": Wrong(lambda: A.explain(0, value=value[:5]),
        ArgumentError, "explain", "(5, 3)", "(kv_len 7, value_dim)", "same head"),
    # conversion and merging
    "numpy of a large matrix": Wrong(lambda: np.asarray(large),
        TooLarge, "numpy.asarray(A)", "(20000, 20000)|1,600,000,000 bytes", "268,435,456 bytes",
        "A.to_dense()|A[rows]|A.coarsen(512)"),
    "numpy without a copy": Wrong(lambda: np.asarray(A, copy=False),
        ArgumentError, "numpy.asarray(A)", "copy=False", "may compute", "lazy"),
    "merge with text": Wrong(lambda: merge([part, (value, "lse")]),
        KindError, "merge", "lse of part 1|str", "NumPy arrays", "numpy.asarray"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_in_four_parts(name):
    wrong = WRONG[name]
    with pytest.raises(BUILTIN[wrong.kind]) as caught:
        wrong.call()
    error = caught.value
    assert type(error) is wrong.kind
    assert error.operation == wrong.operation
    for part_name in ("received", "expected", "cure"):
        for words in getattr(wrong, part_name).split("|"):
            assert words in getattr(error, part_name), part_name
    assert (
        str(error) == f"{error.operation}: received {error.received}; expected {error.expected}. {error.cure}"
    )


# Odd calls that must be refused in the same form; how each is worded is left to the words above.
ODD = {
    "ragged query": lambda: attention(ragged, key),
    "ragged key": lambda: attention(query, ragged),
    "ragged sink": lambda: attention(query, key, sink=ragged),
    "ragged value": lambda: A @ ragged,
    "ragged window": lambda: sliding_window([[1], [2, 3]]),
    "ragged lengths": lambda: padding([[1], [2, 3]]),
    "ragged ids": lambda: document([[1], [2, 3]]),
    "ragged dense": lambda: dense([[True], [True, False]]),
    "ragged bias": lambda: bias(ragged),
    "ragged slopes": lambda: alibi(ragged),
    "ragged index": lambda: A[[[1], [1, 2]]],
    "score_mod is a function": lambda: attention(query, key, score_mod=lambda scores: scores),
    "score_mod is not called": lambda: attention(query, key, score_mod=softcap),
    "score_mod is an array": lambda: attention(query, key, score_mod=np.zeros((5, 7))),
    "dense mask of one length": lambda: causal().to_dense(3),
    "dense mask of a shape": lambda: causal().to_dense((3, 3)),
    "slopes are text": lambda: alibi("steep"),
    "max_distance of zero": lambda: relative_bias(table, bidirectional=True, max_distance=0),
    "max_distance within the exact": lambda: relative_bias(table, bidirectional=True, max_distance=8),
    "alibi with a typo": lambda: alibi(align="lower right"),
    "relative_bias with a typo": lambda: relative_bias(table, bidirectional=True, align="lower right"),
    "distance with a typo": lambda: A.distance("lower right"),
    "rope of a vector": lambda: rope(query[0], pairing="halves"),
    "rope of booleans": lambda: rope(query > 0, pairing="halves"),
    "rope at more positions than tokens": lambda: rope(query, np.zeros((3, 5)), pairing="neighbours"),
    "sinusoidal of half a token": lambda: sinusoidal(2.5, 4),
    "slice of half a row": lambda: A[1.5:],
    "step of zero": lambda: A[::0],
    "top 2.5": lambda: A.topk(2.5),
    "top of text": lambda: A.topk("3"),
    "coarsen to 2.5": lambda: A.coarsen(2.5),
    "coarsen to text": lambda: A.coarsen("2"),
    "axis too far": lambda: A.mean(axis=5),
    "axis by name": lambda: A.sum(axis="keys"),
    "axis as a list": lambda: A.sum(axis=[0, 1]),
    "largest of no batch": lambda: no_batch.max(),
    "place of the largest of no batch": lambda: no_batch.argmax(),
    "explain nothing": lambda: A.explain(None),
    "explain two queries": lambda: A.explain([1, 2]),
    "explain a slice": lambda: A.explain(slice(1, 3)),
    "measure is not called": lambda: A.measure(Entropy),
    "mass of no mask": lambda: A.measure(Mass("first")),
    "merge of nothing": lambda: merge([]),
    "merge of one part": lambda: merge(part),
    "merge of other widths": lambda: merge([part, (part[0][:, :2], part[1])]),
    "merge of other lengths": lambda: merge([part, (part[0], part[1][:3])]),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_call_is_refused_in_four_parts(name):
    with pytest.raises(RegardError) as caught:
        ODD[name]()
    error = caught.value
    assert type(error) in BUILTIN and isinstance(error, BUILTIN[type(error)])
    for words in (error.operation, error.received, error.expected, error.cure):
        assert words and words in str(error)


def test_an_unknown_kind_of_array_is_refused_by_name():
    class Tensor:
        shape, dtype = (5, 4), "float32"

    with pytest.raises(KindError) as caught:
        attention(Tensor(), key)
    assert "query as an array of float32 with shape (5, 4)" in caught.value.received


def test_every_error_can_be_caught_as_one():
    assert {kind.__mro__[1] for kind in BUILTIN} == {RegardError}
    assert all(getattr(regard, kind.__name__) is kind for kind in (*BUILTIN, RegardError))
