"""Masks: values that say which keys a query may see. True = attend, always.

Each mask is named for what it lets through, and masks combine with `&`, `|` and `~`:

>>> causal() & padding([3, 5]) & (sliding_window(512) | first(4))
causal() & padding([3, 5]) & (sliding_window(512) | first(4))

No mask is ever built whole: it answers for one block of rows and columns, and tells from the numbers alone
whether a block is empty, full or partial, so that empty blocks are skipped and full ones are not tested.
To write a mask of your own, subclass `Mask` and give it `allows` and `bounds`.
"""

from __future__ import annotations

from typing import Any, Literal

from regard._public import set_public_module
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.masks.atoms import Band, Dense, Document, Keys, Numbers, whole_numbers
from regard.masks.base import Mask
from regard.types import Align
from regard.validation import as_array, check_align

__all__ = [
    "Mask",
    "causal",
    "dense",
    "document",
    "first",
    "padding",
    "prefix",
    "sliding_window",
]


def causal(align: Align | None = None) -> Mask:
    """A mask that lets a query see its own position and those before it: kv_idx ≤ q_idx.

    Where q_len ≠ kv_len it must be said which corner is meant: with `align="upper_left"` query 0 stands at
    key 0, with `"lower_right"` the last query stands at the last key (decoding with a cache).

    >>> causal().to_dense(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    >>> causal(align="upper_left").to_dense(2, 5).astype(int)
    array([[1, 0, 0, 0, 0],
           [1, 1, 0, 0, 0]])
    """
    check_align(align, "causal")
    return Band(None, Numbers(0), align)


def sliding_window(
    size: Any = None, *, left: Any = None, right: Any = None, align: Align | None = None
) -> Mask:
    """A mask that lets a query see the `size` keys that end at its own: q_idx − size < kv_idx ≤ q_idx.

    Or, two-sided, `left` keys before its own and `right` after: q_idx − left ≤ kv_idx ≤ q_idx + right; a side left
    out has no bound. Sizes are numbers, or arrays of shape (heads,) where heads differ. `align` as in `causal`.

    >>> sliding_window(2).to_dense(4, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1]])
    >>> sliding_window(left=1, right=0, align="lower_right").to_dense(2, 5).astype(int)
    array([[0, 0, 1, 1, 0],
           [0, 0, 0, 1, 1]])
    """
    check_align(align, "sliding_window")
    if (size is None) == (left is None and right is None):
        raise ArgumentError(
            "sliding_window",
            received=f"size={size!r}, left={left!r}, right={right!r}",
            expected="either size, or left and right",
            hint="sliding_window(4) is sliding_window(left=3, right=0): size counts the query's own key.",
        )
    if size is not None:
        counted = whole_numbers(size, "sliding_window", 1)
        return Band(Numbers(counted.array - 1), Numbers(0), align)
    sides = [None if n is None else whole_numbers(n, "sliding_window", 0) for n in (left, right)]
    return Band(sides[0], sides[1], align)


def padding(lengths: Any, side: Literal["left", "right"] = "right") -> Mask:
    """A mask that lets the real keys through and hides the padded ones: kv_idx < length.

    `lengths` is a number or an array of shape (batch,): how many keys are real. With `side="left"` the padding
    comes first: kv_idx ≥ kv_len − length. Queries are not touched: a padded query still has its row.

    >>> padding([2, 3]).to_dense(2, 1, 1, 4).astype(int).reshape(2, 4)
    array([[1, 1, 0, 0],
           [1, 1, 1, 0]])
    >>> padding(2, side="left").to_dense(1, 4).astype(int)
    array([[0, 0, 1, 1]])
    """
    if side not in ("left", "right"):
        raise ArgumentError(
            "padding",
            received=f"side={side!r}",
            expected='"left" or "right"',
            hint="side is where the padding stands.",
        )
    return Keys(whole_numbers(lengths, "padding", 0), side, "padding")


def first(n: Any) -> Mask:
    """A mask that lets the first `n` keys through: kv_idx < n. A number, or an array of shape (batch,).

    >>> (sliding_window(2) | first(1)).to_dense(4, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 0, 1, 1]])
    """
    return Keys(whole_numbers(n, "first", 0), "right", "first")


def prefix(length: Any, align: Align | None = None) -> Mask:
    """A mask for prefix language models: everyone sees the prefix, the rest is causal. `first(length) | causal()`.

    `length` is a number, or an array of shape (batch,). `align` as in `causal`.

    >>> prefix(2).to_dense(4, 4).astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 1]])
    >>> prefix(2, align="lower_right").to_dense(2, 5).astype(int)
    array([[1, 1, 1, 1, 0],
           [1, 1, 1, 1, 1]])
    """
    check_align(align, "prefix")
    return Keys(whole_numbers(length, "prefix", 0), "right", "first") | causal(align)


def document(ids: Any, query_ids: Any = None) -> Mask:
    """A mask that lets a query see the keys of its own document, where several are packed into one sequence.

    `ids` has shape (kv_len,) or (batch, kv_len): the document of each key. `query_ids` is the same for the
    queries, and may be left out where they are the same tokens.

    >>> document([0, 0, 1]).to_dense(3, 3).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    >>> document([0, 0, 1], query_ids=[1, 0]).to_dense(2, 3).astype(int)
    array([[0, 0, 1],
           [1, 1, 0]])
    """
    of_key = whole_numbers(ids, "document", None)
    of_query = of_key if query_ids is None else whole_numbers(query_ids, "document", None)
    if of_key.array.ndim == 0 or of_query.array.ndim == 0:
        raise ArgumentError(
            "document", received=f"{ids!r}", expected="one id for each token", hint="Pass a list of ids."
        )
    return Document(of_key, of_query)


def dense(array: Any, true_means: Literal["attend", "ignore"] = "attend") -> Mask:
    """Make a mask from a boolean array.

    Args:
        array: Booleans that broadcast to (…, q_len, kv_len).
        true_means: What True stands for. The default, "attend", is the library's own convention and that of
            `F.scaled_dot_product_attention`; "ignore" is the convention of `nn.MultiheadAttention`.

    Returns:
        A mask; with `true_means="ignore"` it equals `~dense(array)`.

    Raises:
        ArgumentTypeError: The array does not hold booleans.
        ArgumentError: `true_means` is neither "attend" nor "ignore".

    >>> dense([[True, False], [True, True]]).to_dense(2, 2).astype(int)
    array([[1, 0],
           [1, 1]])
    >>> dense([[False, True]], true_means="ignore").to_dense(2, 2).astype(int)
    array([[1, 0],
           [1, 0]])
    """
    if true_means not in ("attend", "ignore"):
        raise ArgumentError(
            "dense",
            received=f"true_means={true_means!r}",
            expected='"attend" or "ignore"',
            hint='Pass true_means="ignore" for a mask of nn.MultiheadAttention, "attend" for one of SDPA.',
        )
    if not hasattr(array, "dtype"):
        array = as_array(array, "dense", "array")
    if not str(array.dtype).endswith("bool"):
        raise ArgumentTypeError(
            "dense",
            received=describe_argument(array),
            expected="booleans, True = attend",
            hint="For 1 = attend write dense(array != 0); "
            "for an additive tensor of 0 and -inf use score_mod=bias(array); "
            'for True = ignore, as in nn.MultiheadAttention, write dense(array, true_means="ignore").',
        )
    return Dense(array) if true_means == "attend" else ~Dense(array)


set_public_module(globals())
