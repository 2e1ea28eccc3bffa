"""The family on one example: fifteen kinds of attention, each run on the five tokens of the first chapter.

Every member is a class of the same shape as `ScaledDotProductAttention` and overrides only what it changes, so that
its source is the difference. `show` prints one with every number of row 0, `table` all of them side by side.

>>> from regard.learn import family
>>> family.show("causal").weights[1].round(4)
array([0.8176, 0.1824, 0.    , 0.    , 0.    ])
>>> print(family.show("flash").by_hand[0].steps[0])
1. Compare the query [1, 0, 1, 0] with each key
   The  1·0 + 0·1 + 1·0 + 0·1 = 0
   cat  1·1 + 0·0 + 1·1 + 0·0 = 2
   sat  1·1 + 0·1 + 1·0 + 0·0 = 1
   on   1·0 + 0·0 + 1·1 + 0·1 = 1
   mat  1·1 + 0·0 + 1·0.5 + 0·0.5 = 1.5
"""

from __future__ import annotations

from regard.learn.family.by_hand import ByHand, Step
from regard.learn.family.catalog import MECHANISMS
from regard.learn.family.heads import GroupedQuery, MultiHead, MultiQuery, pooled
from regard.learn.family.masking import BlockSparse, Causal, Cross, Masked, SlidingWindow
from regard.learn.family.mechanism import FamilyTable, Mechanism, Page, Use
from regard.learn.family.scores import (
    ALiBi,
    Biased,
    RelativeBias,
    Rotary,
    Sink,
    SinkAndSoftcap,
    Softcap,
)
from regard.learn.family.streaming import Cached, Flash, Linear, Tile
from regard.learn.family.variant import Variant
from regard.learn.validation import as_choice
from regard.validation import check_count

__all__ = [
    "ALiBi",
    "Biased",
    "BlockSparse",
    "ByHand",
    "Cached",
    "Causal",
    "Cross",
    "FamilyTable",
    "Flash",
    "GroupedQuery",
    "Linear",
    "MECHANISMS",
    "Masked",
    "Mechanism",
    "MultiHead",
    "MultiQuery",
    "Page",
    "RelativeBias",
    "Rotary",
    "Sink",
    "SinkAndSoftcap",
    "SlidingWindow",
    "Softcap",
    "Step",
    "Tile",
    "Use",
    "Variant",
    "pooled",
    "show",
    "table",
]


def show(name: str, row: int | None = None) -> Page:
    """One mechanism with its numbers; `print` it to read it. Row 0 is worked out by hand, or the row asked for.

    >>> page = show("rotary", row=2)
    >>> page.by_hand[0].weights.round(4)
    array([0.2273, 0.2165, 0.3428, 0.1032, 0.1102])
    >>> page.mechanism.used[0].source
    'Su et al. 2021, arXiv 2104.09864'
    """
    names = [mechanism.name for mechanism in MECHANISMS]
    number = names.index(as_choice("family.show", "name", name, names))
    mechanism = MECHANISMS[number]
    rows = mechanism.rows
    if row is not None:
        most = len(mechanism.looking) - 1
        rows = (check_count(row, 0, most, "family.show", "row", "", "It counts the queries from 0."),)
    output, weights = mechanism.run()
    return Page(number + 1, mechanism, tuple(map(mechanism.by_hand, rows)), weights, output)


def table() -> FamilyTable:
    """All fifteen side by side: what each changes, the shape of its weights, and the output of row 0.

    >>> print(str(table()).split(chr(10))[3])
    3   Causal  ...  5×5  [1, 0, 0, 0]
    """
    runs = [mechanism.run() for mechanism in MECHANISMS]
    return FamilyTable(
        tuple(
            (number, mechanism, weights.shape, output[0])
            for number, (mechanism, (output, weights)) in enumerate(
                zip(MECHANISMS, runs, strict=True), start=1
            )
        )
    )
