"""Published variants by name, each as the mechanism that it belongs to, run on the example of the book."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from regard.core.attention import attention, linear_attention
from regard.core.products import merge
from regard.feature_maps import random_features
from regard.learn.examples import cat
from regard.learn.family.catalog import MECHANISMS
from regard.learn.validation import Floats
from regard.masks import Mask, between, causal, dense, document, first, sliding_window
from regard.render.table import format_table


@dataclass(frozen=True, eq=False)
class NamedVariant:
    """A published variant of attention.

    Attributes:
        name: The name it is known by.
        year: The year of the first version of the paper.
        source: The authors and the paper.
        mechanism: The name of the mechanism in `MECHANISMS` that it belongs to.
        compute_weights: A function that returns its weights on the example, over the five tokens.

    >>> from regard.learn import family
    >>> longformer = family.NAMED_VARIANTS["Longformer"]
    >>> longformer.mechanism, longformer.compute_weights().shape
    ('block_sparse', (5, 5))
    """

    name: str
    year: int
    source: str
    mechanism: str
    compute_weights: Callable[[], Floats]


def _masked(mask: Mask) -> Callable[[], Floats]:
    return lambda: np.asarray(attention(cat.Q, cat.K, mask=mask).to_dense())


def _run(name: str) -> Callable[[], Floats]:
    """Return a function that runs a mechanism and averages the weights over its heads."""
    (mechanism,) = (it for it in MECHANISMS if it.name == name)
    return lambda: np.atleast_3d(mechanism.run()[1].T).mean(axis=-1).T


def _linformer() -> Floats:
    """Attend to two pooled keys instead of five; spread each weight over the tokens that were pooled."""
    pool = np.array([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]]) / np.array([[2], [3]])
    return np.asarray(attention(cat.Q, pool @ cat.K).to_dense() @ pool)


def _performer() -> Floats:
    return np.asarray(linear_attention(cat.Q, cat.K, feature_map=random_features(4096)).to_dense())


def _reformer() -> Floats:
    """Attend within buckets of tokens that a random direction hashes alike."""
    bucket = (cat.K @ np.random.default_rng(0).normal(size=4) > 0).astype(int)
    return np.asarray(attention(cat.Q, cat.K, mask=document(bucket)).to_dense())


def _ring() -> Floats:
    """Attend to the keys shard by shard, and merge by the lse; one-hot rows as values make the output the weights."""
    shards = [attention(cat.Q, cat.K[part]) for part in (slice(0, 3), slice(3, 5))]
    values = [np.eye(5)[:3], np.eye(5)[3:]]
    parts = [(A @ value, A.lse) for A, value in zip(shards, values, strict=True)]
    return np.asarray(merge(parts)[0])


_NEIGHBOURS = sliding_window(left=1, right=1)
_RANDOM_PAIRS = dense(np.random.default_rng(59).random((5, 5)) < 0.15)
_STRIDED = causal() & (document([0, 0, 1, 1, 2]) | between(keys=[1, 3]))
_VARIANTS = (
    NamedVariant(
        "Local attention", 2015, "Luong et al., arXiv 1508.04025", "sliding_window", _masked(_NEIGHBOURS)
    ),
    NamedVariant("Transformer-XL", 2019, "Dai et al., arXiv 1901.02860", "kv_cache", _run("kv_cache")),
    NamedVariant(
        "Sparse Transformer", 2019, "Child et al., arXiv 1904.10509", "block_sparse", _masked(_STRIDED)
    ),
    NamedVariant("Multi-query", 2019, "Shazeer, arXiv 1911.02150", "multi_query", _run("multi_query")),
    NamedVariant("Reformer", 2020, "Kitaev et al., arXiv 2001.04451", "block_sparse", _reformer),
    NamedVariant(
        "Longformer",
        2020,
        "Beltagy et al., arXiv 2004.05150",
        "block_sparse",
        _masked(_NEIGHBOURS | first(1) | between(queries=[0])),
    ),
    NamedVariant("Linformer", 2020, "Wang et al., arXiv 2006.04768", "cross", _linformer),
    NamedVariant(
        "Linear Transformer", 2020, "Katharopoulos et al., arXiv 2006.16236", "linear", _run("linear")
    ),
    NamedVariant(
        "BigBird",
        2020,
        "Zaheer et al., arXiv 2007.14062",
        "block_sparse",
        _masked(_NEIGHBOURS | first(1) | between(queries=[0]) | _RANDOM_PAIRS),
    ),
    NamedVariant("Performer", 2020, "Choromanski et al., arXiv 2009.14794", "linear", _performer),
    NamedVariant("FlashAttention", 2022, "Dao et al., arXiv 2205.14135", "flash", _run("flash")),
    NamedVariant(
        "Grouped-query", 2023, "Ainslie et al., arXiv 2305.13245", "grouped_query", _run("grouped_query")
    ),
    NamedVariant("PagedAttention", 2023, "Kwon et al., arXiv 2309.06180", "kv_cache", _run("kv_cache")),
    NamedVariant(
        "StreamingLLM",
        2023,
        "Xiao et al., arXiv 2309.17453",
        "sliding_window",
        _masked(sliding_window(2) | (first(1) & causal())),
    ),
    NamedVariant("Ring Attention", 2023, "Liu et al., arXiv 2310.01889", "flash", _ring),
)
# The variants by name, in the order of their papers.
NAMED_VARIANTS: dict[str, NamedVariant] = {variant.name: variant for variant in _VARIANTS}


@dataclass(frozen=True, eq=False, repr=False)
class NamedTable:
    """The named variants with the section of each, how much weight it moves, and the row of "mat"; prints as a table.

    The column "moved" is the share of the weight, in the mean of the rows, that is on another token than in plain
    attention.

    >>> from regard.learn import family
    >>> len(family.tabulate_named_variants().rows)
    15
    """

    rows: tuple[tuple[NamedVariant, Floats], ...]

    def __str__(self) -> str:
        plain = attention(cat.Q, cat.K).to_dense()
        numbers = {mechanism.name: number for number, mechanism in enumerate(MECHANISMS, start=1)}
        cells = [
            [
                variant.name,
                f"{variant.year}",
                f"{numbers[variant.mechanism]}",
                f"{np.abs(weights - plain).sum() / 2 / len(plain):.2f}",
                *(f"{weight:.2f}" for weight in weights[-1]),
            ]
            for variant, weights in self.rows
        ]
        align = ["left", "right", "right", "right"] + ["right"] * len(cat.tokens)
        headings = ["name", "year", "section", "moved", *cat.tokens]
        return format_table(cells, headings, align=align)  # type: ignore[arg-type]

    __repr__ = __str__


def tabulate_named_variants() -> NamedTable:
    """Run the named variants on the example, and tabulate the weights that "mat" gives to each token.

    Returns:
        The table; `print` it to read it.

    >>> print(str(tabulate_named_variants()).splitlines()[10])
    Performer  ...
    """
    return NamedTable(tuple((variant, variant.compute_weights()) for variant in _VARIANTS))
