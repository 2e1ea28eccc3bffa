"""Score modifications: the published T5 buckets, recomputed by a plain loop, and their effect on scores."""

from __future__ import annotations

import math

import numpy as np
import pytest

from regard import attention, relative_bias
from regard.score_mods import relative_buckets


def compute_bucket(ahead: int, buckets: int, max_distance: int, bidirectional: bool) -> int:
    """Return the bucket of one relative position, key minus query, as in Raffel et al. (1910.10683)."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if ahead > 0 else 0
        distance = abs(ahead)
    else:
        distance = -ahead if ahead < 0 else 0
    exact = buckets // 2
    if distance < exact:
        return first + distance
    grown = math.log(distance / exact) / math.log(max_distance / exact) * (buckets - exact)
    return first + min(exact + int(grown), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (8, 20), (10, 64)])
def test_buckets_equal_the_published_ones(bidirectional, buckets, max_distance):
    ahead = np.arange(-300, 301)
    found = relative_buckets(ahead, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    assert found.tolist() == [compute_bucket(int(a), buckets, max_distance, bidirectional) for a in ahead]
    assert found.min() == 0 and found.max() == buckets - 1


def test_a_decoder_has_one_bucket_for_the_future_and_all_others_for_the_past():
    ahead = np.array([7, 1, 0, -1, -15, -16, -20, -127, -500])
    found = relative_buckets(ahead, buckets=32, max_distance=128, bidirectional=False)
    assert found.tolist() == [0, 0, 0, 1, 15, 16, 17, 31, 31]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("align", ["upper_left", "lower_right"])
def test_relative_bias_adds_the_entry_of_each_head(bidirectional, align):
    rng = np.random.default_rng(0)
    query, key, table = rng.normal(size=(3, 5, 4)), rng.normal(size=(3, 11, 4)), rng.normal(size=(8, 3))
    plain = attention(query, key)
    A = attention(
        query,
        key,
        score_mod=relative_bias(table, bidirectional=bidirectional, max_distance=20, align=align),
    )
    offset = 6 if align == "lower_right" else 0
    for head in range(3):
        for i in range(5):
            for j in range(11):
                bucket = compute_bucket(j - i - offset, 8, 20, bidirectional)
                added = A.scores[head, i, j] - plain.scores[head, i, j]
                assert added == pytest.approx(table[bucket, head], abs=1e-12)
