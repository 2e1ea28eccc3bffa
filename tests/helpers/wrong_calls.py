"""Wrong calls of users, and the class of the error that each raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from regard import (
    ArgumentError,
    ArgumentTypeError,
    IndexOutOfRangeError,
    RegardError,
    TooLargeError,
    attention,
    linear_attention,
    merge_states,
)
from regard.core.attention import attention_from_weights
from regard.masks import between, causal, dense, document, first, padding, prefix, sliding_window
from regard.measures import Coarse, Contribution, Entropy, Mass, Spread
from regard.positions import rope, sinusoidal
from regard.score_mods import alibi, bias, relative_bias, softcap

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

BUILTIN = {
    ArgumentError: ValueError,
    ArgumentTypeError: TypeError,
    IndexOutOfRangeError: IndexError,
    TooLargeError: MemoryError,
}


WRONG: dict[str, Callable[[], Any]] = {
    # attention
    "query is None": lambda: attention(None, key),
    "query is text": lambda: attention("cat", key),
    "query of text": lambda: attention([["a"]], key),
    "query of booleans": lambda: attention(query > 0, key),
    "key of complex": lambda: attention(query, key * 1j),
    "query with one axis": lambda: attention(query[0], key),
    "key is a number": lambda: attention(query, 3.0),
    "head_dim differs": lambda: attention(query[:, :3], key),
    "heads differ": lambda: attention(np.ones((6, 5, 4)), np.ones((3, 7, 4))),
    "heads no multiple": lambda: attention(np.ones((5, 5, 4)), np.ones((3, 7, 4)), enable_gqa=True),
    "grouped without heads": lambda: attention(query, key, enable_gqa=True),
    "scale NaN": lambda: attention(query, key, scale=np.nan),
    "scale infinite": lambda: attention(query, key, scale=-np.inf),
    "scale is text": lambda: attention(query, key, scale="0.5"),
    "scale is a boolean": lambda: attention(query, key, scale=True),
    "sink of wrong length": lambda: attention(three, three, sink=[1.0, 2.0]),
    "sink is text": lambda: attention(query, key, sink="big"),
    # masks
    "mask is booleans": lambda: attention(query, key, mask=np.ones((5, 7), bool)),
    "mask is integers": lambda: attention(query, key, mask=np.ones((5, 7), int)),
    "mask is floats": lambda: attention(query, key, mask=np.zeros((5, 7))),
    "mask is a list": lambda: attention(query, key, mask=[[True]]),
    "mask is not called": lambda: attention(query, key, mask=causal),
    "mask is a function": lambda: attention(query, key, mask=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx),
    "score_mod is a function": lambda: attention(query, key, score_mod=lambda scores: scores),
    "causal without align": lambda: attention(query, key, mask=causal()),
    "causal with a typo": lambda: causal("lower-right"),
    "window with a typo": lambda: sliding_window(3, align="left"),
    "window of nothing": lambda: sliding_window(),
    "window of both": lambda: sliding_window(3, left=1),
    "window of size 0": lambda: sliding_window(0),
    "window of half a token": lambda: sliding_window(2.5),
    "window for other heads": lambda: attention(three, three, mask=sliding_window([1, 2])),
    "length negative": lambda: padding([3, -1]),
    "length too long": lambda: attention(query, key, mask=padding(8)),
    "lengths are floats": lambda: padding([3.0, 5.0]),
    "lengths without a batch": lambda: attention(query, key, mask=padding([3, 5])),
    "padding on top": lambda: padding(3, side="top"),
    "ids too few": lambda: attention(key, key, mask=document([0, 1])),
    "ids are one number": lambda: document(3),
    "ids of other queries": lambda: attention(query, key, mask=document(range(7))),
    "first is negative": lambda: first(-2),
    "prefix is text": lambda: prefix("all"),
    "dense of integers": lambda: dense([[1, 0]]),
    "dense of floats": lambda: dense(np.zeros((5, 7))),
    "ignore of floats": lambda: dense(np.zeros((5, 7)), true_means="ignore"),
    "dense of another shape": lambda: attention(query, key, mask=dense(np.ones((7, 5), bool))),
    "dense for other heads": lambda: attention(query, key, mask=dense(np.ones((3, 5, 7), bool))),
    "mask & array": lambda: causal() & np.ones((5, 7), bool),
    "mask | True": lambda: causal() | True,
    "mask and mask": lambda: causal() and first(3),
    # scores
    "score_mod of functions": lambda: attention(query, key, score_mod=[abs]),
    "cap of zero": lambda: softcap(0),
    "cap is text": lambda: softcap("50"),
    "slopes of wrong length": lambda: attention(key, key, score_mod=alibi([0.5, 0.25])),
    "alibi without align": lambda: attention(query, key, score_mod=alibi()),
    "bias of booleans": lambda: bias(np.ones((5, 7), bool)),
    "bias of another shape": lambda: attention(query, key, score_mod=bias(np.zeros((5, 6)))),
    "table with one axis": lambda: relative_bias(np.zeros(32), bidirectional=True),
    "table of other heads": lambda: attention(key, key, score_mod=relative_bias(table, bidirectional=True)),
    # positions
    "rope of an odd dim": lambda: rope(query[:, :3], layout="half"),
    "rope in another layout": lambda: rope(query, layout="halves"),
    "rope at too few positions": lambda: rope(query, [1, 2], layout="half"),
    "sinusoidal of an odd dim": lambda: sinusoidal(5, 3),
    # indices
    "row out of range": lambda: A[9],
    "column out of range": lambda: A.scores[0, -8],
    "row of an array out of range": lambda: A[[0, 5]],
    "too many indices": lambda: A[0, 0, 0],
    "two ellipses": lambda: A[..., ...],
    "token as index": lambda: A["cat"],
    "two index arrays": lambda: A[[0, 1], [0, 1]],
    "booleans as index": lambda: A[np.ones(5, bool)],
    "lazy booleans": lambda: A.lazy[[True] * 5],
    "lazy columns": lambda: A.lazy[:, :3],
    "lazy out of range": lambda: A.lazy[5],
    # products
    "value too short": lambda: A @ value[:5],
    "value transposed": lambda: A @ value.T,
    "value is None": lambda: A @ None,
    "value of text": lambda: A @ [["cat"], ["hat"]],
    "value of other heads": lambda: heads @ np.ones((2, 6, 7, 3)),
    "x too long": lambda: A.mT @ np.ones(7),
    "x of complex": lambda: A.mT @ np.full(5, 1j),
    # measures
    "top 0": lambda: A.topk(0),
    "top of more than all": lambda: A.topk(8),
    "coarsen to 0": lambda: A.coarsen(0),
    "coarsen to more": lambda: A.measure(Coarse(6)),
    "coarsen by median": lambda: A.coarsen(2, "median"),
    "sum over heads": lambda: heads.sum(axis=1),
    "largest of none": lambda: attention(query, key[:0]).argmax(-1),
    "distance without align": lambda: A.distance(),
    "spread without align": lambda: A.measure(Spread()),
    "mass of an array": lambda: A.mass(np.ones((5, 7), bool)),
    "mass too long": lambda: A.mass(padding(9)),
    "measure by name": lambda: A.measure("entropy"),
    "measure as a class": lambda: A.measure(Entropy),
    "measure twice": lambda: A.measure(Entropy(), Entropy()),
    # explanations
    "explain out of range": lambda: A.explain(5),
    "explain a token": lambda: A.explain("cat"),
    "explain many heads": lambda: heads.explain(3),
    "tokens too few": lambda: A.explain(0, tokens=["a"]),
    "explained value too short": lambda: A.explain(0, value=value[:5]),
    # conversion and merging
    "numpy of a large matrix": lambda: np.asarray(large),
    "numpy without a copy": lambda: np.asarray(A, copy=False),
    "merge with text": lambda: merge_states([part, (value, "lse")]),
    # operations by name
    "page of many heads": lambda: heads.page(),
    "max by another name": lambda: A.max(along=-1),
    "pictures of text merged": lambda: Coarse(2, "max").merge("a", "b"),
    "linear attention of text": lambda: linear_attention("cat", key),
    "window of a negative side": lambda: sliding_window(left=-1),
    "no contributions": lambda: Contribution(0, np.ones(7)),
    "norms are text": lambda: A.measure(Contribution(2, "long")),
    "norms of other keys": lambda: A.measure(Contribution(2, np.ones(6))),
    "norms of other heads": lambda: heads.measure(Contribution(2, np.ones((4, 7)))),
    "more contributions than keys": lambda: A.measure(Contribution(8, np.ones(7))),
    "given weights of another shape": lambda: attention_from_weights(
        np.ones((5, 6)), query[:, :0], key[:, :0]
    ),
    "position before the first": lambda: attention(query, key, mask=between(queries=[1, -9])),
    "index of many rows": lambda: large[1:],
    "query ids are text": lambda: document([0, 1], query_ids="a"),
    "documents of another batch": lambda: attention(
        np.ones((2, 1, 3, 4)), np.ones((2, 1, 3, 4)), mask=document(np.zeros((3, 3), int))
    ),
    # odd values
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
    "rope of a vector": lambda: rope(query[0], layout="half"),
    "rope of booleans": lambda: rope(query > 0, layout="half"),
    "rope at more positions than tokens": lambda: rope(query, np.zeros((3, 5)), layout="interleaved"),
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
    "mass of no mask": lambda: A.measure(Mass("first")),
    "merge of nothing": lambda: merge_states([]),
    "merge of one part": lambda: merge_states(part),
    "merge of other widths": lambda: merge_states([part, (part[0][:, :2], part[1])]),
    "merge of other lengths": lambda: merge_states([part, (part[0], part[1][:3])]),
}

# Errors of another class than ArgumentError, and the calls that raise them.
OTHER_ERRORS: dict[type[RegardError], tuple[str, ...]] = {
    ArgumentTypeError: (
        "query is None",
        "query is text",
        "query of text",
        "query of booleans",
        "key of complex",
        "sink is text",
        "mask is booleans",
        "mask is integers",
        "mask is floats",
        "mask is a list",
        "mask is not called",
        "mask is a function",
        "score_mod is a function",
        "dense of integers",
        "dense of floats",
        "ignore of floats",
        "mask & array",
        "mask | True",
        "mask and mask",
        "score_mod of functions",
        "bias of booleans",
        "token as index",
        "two index arrays",
        "booleans as index",
        "lazy booleans",
        "value is None",
        "value of text",
        "x of complex",
        "mass of an array",
        "measure by name",
        "measure as a class",
        "explain a token",
        "merge with text",
        "max by another name",
        "pictures of text merged",
        "linear attention of text",
        "norms are text",
        "score_mod is not called",
        "score_mod is an array",
        "slopes are text",
        "explain nothing",
        "explain two queries",
        "explain a slice",
        "mass of no mask",
    ),
    IndexOutOfRangeError: (
        "row out of range",
        "column out of range",
        "row of an array out of range",
        "too many indices",
        "two ellipses",
        "lazy out of range",
        "explain out of range",
        "position before the first",
    ),
    TooLargeError: (
        "numpy of a large matrix",
        "index of many rows",
    ),
}
