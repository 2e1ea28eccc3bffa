"""Score modifications: the published T5 buckets, recomputed by a plain loop, and their effect on scores."""

from __future__ import annotations

import math

import numpy as np
import pytest

from regard import ScoreMod, alibi, attention, relative_bias
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


# Where a user's modification may keep a tensor: how the tensor of each distance is read from what it holds.
HOLDERS = {
    "attribute": (lambda tensor: tensor, lambda held: held),
    "list": (lambda tensor: [None, tensor], lambda held: held[1]),
    "dictionary": (lambda tensor: {"of": {"keys": tensor}}, lambda held: held["of"]["keys"]),
    "module": (lambda tensor: make_embedding(tensor), lambda held: held.weight[:, 0]),
    "modification": (lambda tensor: Held([tensor], lambda held: held[0]), lambda held: held.held[0]),
}


class Held(ScoreMod):
    """A bias of each distance, from a tensor that is held somewhere inside the modification."""

    def __init__(self, held, read) -> None:
        self.held, self.read = held, read

    def additive_bias(self, frame, q_idx, kv_idx, xp, dtype):
        return self.read(self.held)[np.abs(q_idx[:, None] - kv_idx[None])][None]


def make_embedding(tensor):
    torch = pytest.importorskip("torch")
    module = torch.nn.Embedding(len(tensor), 1, dtype=tensor.dtype)
    module.weight = torch.nn.Parameter(tensor.detach()[:, None])
    return module


@pytest.mark.parametrize("with_query", [False, True])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_tensor_gets_its_gradient_wherever_a_modification_holds_it(holder, with_query):
    torch = pytest.importorskip("torch")
    hold, read = HOLDERS[holder]
    rng = torch.Generator().manual_seed(0)
    query, key, value, weight = torch.randn(4, 2, 7, 5, dtype=torch.float64, generator=rng).unbind(0)
    table = torch.randn(7, dtype=torch.float64, generator=rng).requires_grad_()
    query.requires_grad_(with_query)
    held = hold(table)
    learned = next(held.parameters()) if holder == "module" else table
    A = attention(query, key, score_mod=Held(held, read))
    distance = (torch.arange(7)[:, None] - torch.arange(7)).abs()
    scores = query @ key.mT * 5**-0.5 + table[distance]
    eager = torch.softmax(scores, -1)
    of_rows = weight[..., 0]
    for found, expected in (
        ((A @ value * weight).sum(), (eager @ value * weight).sum()),
        ((A.entropy() * of_rows).sum(), (-(eager * eager.log()).sum(-1) * of_rows).sum()),
        ((A.lse * of_rows).sum(), (scores.logsumexp(-1) * of_rows).sum()),
    ):
        (gradient,) = torch.autograd.grad(found, learned, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected, table, retain_graph=True)
        torch.testing.assert_close(gradient.reshape(-1), wanted)


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_copy_and_a_change_in_place_reach_a_tensor_wherever_a_modification_holds_it(holder):
    torch = pytest.importorskip("torch")
    hold, read = HOLDERS[holder]
    query = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(1))
    table = torch.linspace(0.0, 2.0, 7).requires_grad_() * 1.0  # not a leaf, which torch does not copy
    held = hold(table)
    A = attention(query, query, score_mod=Held(held, read))
    before, _ = A.to_dense().detach(), A.lse
    copied = A.copy()
    with torch.no_grad():
        read(held).mul_(-3.0)
    distance = (torch.arange(7)[:, None] - torch.arange(7)).abs()
    eager = torch.softmax(query @ query.mT * 5**-0.5 + read(held)[distance], -1)
    with torch.no_grad():
        torch.testing.assert_close(A.to_dense(), eager)
        torch.testing.assert_close(A[1, 2, 3], eager[1, 2, 3])
    torch.testing.assert_close(copied.to_dense(), before)
    assert not copied.entropy().requires_grad


@pytest.mark.parametrize("heads", [1, 3, 6, 12])
def test_default_slopes_are_the_published_ones_in_their_order(heads):
    # Press et al., 2108.12409: a geometric series for a power of two; other numbers add every other slope of the next.
    def series(count):
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    power = 2 ** math.floor(math.log2(heads))
    slopes = series(power) + series(2 * power)[0::2][: heads - power]
    query = np.zeros((heads, 5, 2))
    distances = np.abs(np.subtract.outer(np.arange(5), np.arange(5)))
    np.testing.assert_allclose(
        attention(query, query, score_mod=alibi()).scores[...],
        -np.array(slopes)[:, None, None] * distances,
        rtol=1e-14,
    )
