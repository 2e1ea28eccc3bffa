"""Fifteen kinds of attention on one example, so that every difference comes from the mechanism.

Each is a subclass of `CheckedAttention` that overrides only what it changes. `show` prints one mechanism with
every number of a row, `table` and `gallery` show all side by side, `tabulate_named_variants` the published variants.
Imports from `regard.learn` and below.

>>> from regard.learn import family
>>> family.show("causal").weights[1].round(4)
array([0.8176, 0.1824, 0.    , 0.    , 0.    ])
>>> print(family.show("flash").worked_rows[0].steps[0])
1. Compare the query [1, 0, 1, 0] with each key
   The  1·0 + 0·1 + 1·0 + 0·1 = 0
   cat  1·1 + 0·0 + 1·1 + 0·0 = 2
   sat  1·1 + 0·1 + 1·0 + 0·0 = 1
   on   1·0 + 0·0 + 1·1 + 0·1 = 1
   mat  1·1 + 0·0 + 1·0.5 + 0·0.5 = 1.5
"""

from __future__ import annotations

from regard.learn.by_hand import WorkedRow, WorkedStep
from regard.learn.family import worked_variants as _worked_variants  # noqa: F401 - registers the steps by hand
from regard.learn.family.catalog import (
    MECHANISMS,
    NAMED_VARIANTS,
    FamilyTable,
    Gallery,
    Mechanism,
    MechanismPage,
    NamedTable,
    NamedVariant,
    PublishedUse,
    format_source,
    tabulate_named_variants,
)
from regard.learn.family.variants import (
    ALiBi,
    Biased,
    BlockSparse,
    Cached,
    Causal,
    Cross,
    Flash,
    GroupedQuery,
    Linear,
    Masked,
    MultiHead,
    MultiQuery,
    RelativeBias,
    Rotary,
    Sink,
    SinkAndSoftcap,
    SlidingWindow,
    Softcap,
    TileState,
    mean_pool_heads,
)
from regard.learn.validation import as_choice
from regard.validation import check_count

__all__ = [
    "ALiBi",
    "Biased",
    "BlockSparse",
    "Cached",
    "Causal",
    "Cross",
    "FamilyTable",
    "Flash",
    "Gallery",
    "GroupedQuery",
    "Linear",
    "MECHANISMS",
    "Masked",
    "Mechanism",
    "MechanismPage",
    "MultiHead",
    "MultiQuery",
    "NAMED_VARIANTS",
    "NamedTable",
    "NamedVariant",
    "PublishedUse",
    "RelativeBias",
    "Rotary",
    "Sink",
    "SinkAndSoftcap",
    "SlidingWindow",
    "Softcap",
    "TileState",
    "WorkedRow",
    "WorkedStep",
    "format_source",
    "gallery",
    "mean_pool_heads",
    "show",
    "table",
    "tabulate_named_variants",
]


def show(name: str, query: int | None = None) -> MechanismPage:
    """Show one mechanism with its numbers.

    Args:
        name: The name of the mechanism, such as "causal"; the `name` of each entry of `MECHANISMS`.
        query: The query to work out by hand, counted from 0. The default is query 0, and another one where query 0
            shows too little.

    Returns:
        A page with the description, the worked rows, the output and the weights; `print` it to read it.

    Raises:
        ArgumentError: If there is no such mechanism or no such query.

    >>> page = show("rotary", query=2)
    >>> page.worked_rows[0].weights.round(4)
    array([0.2273, 0.2165, 0.3428, 0.1032, 0.1102])
    >>> page.mechanism.uses[0].source
    'Su et al. 2021, arXiv 2104.09864'
    """
    named = {mechanism.name: mechanism for mechanism in MECHANISMS}
    mechanism = named[as_choice("family.show", "name", name, named)]
    rows = mechanism.worked_rows
    if query is not None:
        last = len(mechanism.query_tokens) - 1
        rows = (check_count(query, 0, last, "family.show", "query", "", "It counts the queries from 0."),)
    return MechanismPage(mechanism, tuple(map(mechanism.explain, rows)), *mechanism.run())


def table() -> FamilyTable:
    """Tabulate all fifteen mechanisms: what each changes, the shape of its weights, and the output of row 0.

    Returns:
        A table that prints itself.

    >>> print(str(table()).split(chr(10))[3])
    3   Causal  ...  5×5  [1, 0, 0, 0]
    """
    return FamilyTable(tuple((mechanism, *mechanism.run()) for mechanism in MECHANISMS))


def gallery() -> Gallery:
    """Run all fifteen mechanisms on the example, and show their weights as heatmaps side by side.

    Returns:
        The heatmaps; a notebook shows them.

    >>> len(gallery().tiles)
    15
    """
    return Gallery(tuple((mechanism, *mechanism.run()) for mechanism in MECHANISMS))
