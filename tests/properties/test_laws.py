"""The algebra of attention on generated matrices: all masks, heads, score modifications and sinks."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard import reference
from regard.engines.native import use_instruction_set
from regard.masks.kinds import DenseMask, DocumentMask, KeyRangeMask, WindowMask
from regard.measures import MaxWeight, Sum
from regard.testing import Case, build_inputs
from regard.testing.cases import FACTORS, MASK_ATOMS, build_mask
from regard.testing.tolerance import epsilon
from regard.tiling import TileSizes, use_tile_sizes

# Every run draws the same examples; a failure prints a line that reproduces it.
settings.register_profile("laws", max_examples=80, deadline=None, derandomize=True, print_blob=True)
LAWS = settings.get_profile("laws")

HEAD_DIM, VALUE_DIM = 5, 19
SEEDS = st.integers(0, 2**31 - 1)
CHANGES = ("none", "softcap", "alibi", "bias", "relative_bias", "sink", "scale -1")
MOVABLE = ("none", "softcap", "sink")  # independent of the positions of rows and columns

close = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11)
equal = np.testing.assert_array_equal


def cases(**choices: Any) -> st.SearchStrategy[Case]:
    """Draw cases of the case matrix with the given factors; lengths are different primes, or equal."""
    usual: dict[str, Any] = FACTORS | dict(
        dtype=["float64"], q_len=[1, 11, 17, 0], kv_len=[17, 13, 29, 1, 0], head_dim=[HEAD_DIM],
        value_dim=[VALUE_DIM], layout=["contiguous"], values=["normal"], change=CHANGES,
    )  # fmt: skip
    choices = usual | choices
    return st.builds(Case, **{name: st.sampled_from(list(c)) for name, c in choices.items()}, seed=SEEDS)


def filled(case: Case) -> tuple[Any, regard.AttentionMatrix]:
    inputs = build_inputs(case, tile=0)
    assert inputs is not None
    return inputs, regard.attention(inputs.query, inputs.key, **inputs.arguments)


def definition(inputs: Any) -> reference.Definition:
    return reference.attention(inputs.query, inputs.key, inputs.value, **inputs.definition)


def moved(inputs: Any, shape: tuple[int, ...], index: Any) -> dict[str, Any]:
    """Return the arguments of a case with a dense mask whose rows or columns are permuted."""
    allowed = np.broadcast_to(inputs.definition.get("mask", True), shape)
    return {**inputs.arguments, "mask": regard.masks.dense(allowed[index])}


def parts_of(*results: Any) -> Any:
    """Pair the arrays of results; tuples of values and indices are split."""
    return zip(*(x if isinstance(x, tuple) else (x,) for x in results), strict=True)


def tiles(rows: int, columns: int, entries: int, cached_scores: int) -> AbstractContextManager[TileSizes]:
    """Use other tile sizes; a fixture would not be undone between two examples."""
    return use_tile_sizes(rows=rows, columns=columns, entries=entries, cached_scores=cached_scores)


SIDES = st.sampled_from([3, 4, 7, 8, 16, 31])
TILES = st.tuples(SIDES, SIDES, st.sampled_from([200, 1 << 19]), st.sampled_from([0, 1 << 22]))


@LAWS
@given(cases(change=(*CHANGES, "sink")), TILES)
def test_rows_sum_to_one_less_the_share_of_the_sink(case: Case, sizes: Any) -> None:
    inputs, A = filled(case)
    exact = definition(inputs)
    expected = (exact.scores != -np.inf).any(-1).astype(float)
    if "sink" in inputs.arguments:
        expected = 1 - np.exp(inputs.arguments["sink"][..., None] - exact.lse)
    with tiles(*sizes):
        close(A.sum(-1), expected)
        close(A.to_dense().sum(-1), expected)
        close(A.lse, exact.lse)


@LAWS
@given(cases(), TILES, SEEDS)
def test_the_transpose_is_the_adjoint(case: Case, sizes: Any, seed: int) -> None:
    inputs, A = filled(case)
    u = np.random.default_rng(seed).normal(size=(*A.shape[:-1], VALUE_DIM))
    v = reference.repeat_heads(inputs.value, inputs.query)
    with tiles(*sizes):
        forward, backward = A @ inputs.value, A.mT @ u
        close((forward * u).sum(), (v * backward).sum(), atol=1e-9)
        close(u.swapaxes(-1, -2) @ A, backward.swapaxes(-1, -2))
    close(backward, definition(inputs).weights.swapaxes(-1, -2) @ u)


@LAWS
@given(cases(change=["none", "softcap"]), st.lists(st.integers(0, 29), max_size=5), SEEDS)
def test_shards_of_the_keys_merge_to_the_whole_in_any_order(case: Case, cuts: Any, seed: int) -> None:
    inputs, A = filled(case)
    keys = np.random.default_rng(seed).permutation(A.shape[-1])
    parts = []
    for shard in np.split(keys, sorted(min(cut, A.shape[-1]) for cut in cuts)):
        arguments = moved(inputs, A.shape, (..., shard))
        B = regard.attention(inputs.query, inputs.key[..., shard, :], **arguments)
        parts.append((B @ inputs.value[..., shard, :], B.lse))
    halves = [regard.merge_states(part) for part in (parts[2:], parts[:2]) if part]
    whole = definition(inputs)
    for output, lse in (
        regard.merge_states(parts),
        regard.merge_states(parts[::-1]),
        regard.merge_states(halves),
    ):
        close(output, whole.output)
        close(lse, whole.lse)


@st.composite
def indices(draw: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Draw integers, slices of any step, an ellipsis, new axes, and at most one integer array or list."""
    entries: list[Any] = []
    array_at = draw(st.integers(-2, len(shape) - 1))
    for axis, n in enumerate(shape):
        bound = st.none() | st.integers(-n - 3, n + 3)
        kinds = [st.builds(slice, bound, bound, st.sampled_from([None, 1, 2, 5, -1, -3]))]
        kinds += [st.integers(-n, n - 1)] if n else []
        if axis == array_at and n:
            extents = draw(st.lists(st.integers(0, 3), max_size=3))
            array = np.random.default_rng(draw(SEEDS)).integers(-n, n, size=extents)
            entries.append(array.tolist() if array.ndim == 1 and draw(st.booleans()) else array)
        else:
            entries.append(draw(st.one_of(kinds)))
    start = draw(st.integers(0, len(entries)))
    if draw(st.booleans()):
        entries[start : draw(st.integers(start, len(entries)))] = [Ellipsis]
    else:
        del entries[start:]
    for _ in range(draw(st.integers(0, 2))):
        entries.insert(draw(st.integers(0, len(entries))), None)
    return tuple(entries)


@settings(LAWS, max_examples=150)
@given(cases(), st.data(), TILES)
def test_indexing_commutes_with_to_dense(case: Case, data: st.DataObject, sizes: Any) -> None:
    inputs, A = filled(case)
    exact = definition(inputs)
    index = data.draw(indices(A.shape))
    with tiles(*sizes):
        if data.draw(st.booleans(), label="lse known"):
            assert A.lse.shape == A.shape[:-1]
        close(A.to_dense(), exact.weights)
        for found, expected in ((A[index], exact.weights[index]), (A.scores[index], exact.scores[index])):
            assert found.shape == expected.shape and found.dtype == expected.dtype
            close(found, expected)
        if len(index) == 1:
            close(A[index[0]], exact.weights[index[0]])


def everything(A: regard.AttentionMatrix, value: Any) -> dict[str, Any]:
    """Compute every result of a matrix."""
    q_len, kv_len = A.shape[-2:]
    measures: dict[str, Any] = dict(
        entropy=regard.Entropy(), received=regard.Received(), rows=Sum(), largest=MaxWeight(), highest=MaxWeight(-2),
        distance=regard.Distance("lower_right"), spread=regard.Spread("upper_left"),
        mass=regard.Mass(regard.sliding_window(left=2, right=3, align="upper_left")),
    )  # fmt: skip
    measures |= {"top": regard.TopK(min(7, kv_len))} if kv_len else {}
    for reduce in ("mean", "max", "sum") if q_len and kv_len else ():
        measures[reduce] = regard.Coarse(min(3, q_len, kv_len), reduce)
    some = {
        "output": A @ value,
        "back": A.mT @ np.ones(q_len),
        "lse": A.lse,
        "dense": A.to_dense(),
        "some": A[..., :2],
    }
    return A.measure(**measures)._asdict() | some


@LAWS
@given(cases(), TILES)
def test_block_size_never_matters(case: Case, sizes: Any) -> None:
    inputs, A = filled(case)
    expected = everything(A, inputs.value)
    with tiles(*sizes):
        found = everything(filled(case)[1], inputs.value)
    for name, result in found.items():
        for x, y in parts_of(result, expected[name]):
            # A spread of zero is the root of a difference that cancels.
            close(x, y, err_msg=name, atol=1e-6 if name == "spread" else 1e-11)


@LAWS
@given(cases(change=MOVABLE), SEEDS)
def test_permuting_keys_and_values_together_changes_nothing(case: Case, seed: int) -> None:
    inputs, A = filled(case)
    order = np.random.default_rng(seed).permutation(A.shape[-1])
    arguments = moved(inputs, A.shape, (..., order))
    B = regard.attention(inputs.query, inputs.key[..., order, :], **arguments)
    close(B @ inputs.value[..., order, :], A @ inputs.value)
    close(B.to_dense(), A.to_dense()[..., order])
    close(B.entropy(), A.entropy())
    close(B.sum(-2), A.sum(-2)[..., order])


@LAWS
@given(cases(change=MOVABLE), SEEDS)
def test_permuting_queries_permutes_rows(case: Case, seed: int) -> None:
    inputs, A = filled(case)
    order = np.random.default_rng(seed).permutation(A.shape[-2])
    arguments = moved(inputs, A.shape, (..., order, slice(None)))
    B = regard.attention(inputs.query[..., order, :], inputs.key, **arguments)
    close(B @ inputs.value, (A @ inputs.value)[..., order, :])
    close(B.to_dense(), A.to_dense()[..., order, :])
    close(B.lse, A.lse[..., order])
    close(B.sum(-2), A.sum(-2))


@LAWS
@given(cases(change=["none", "softcap", "alibi", "bias"]), SEEDS)
def test_a_constant_added_to_a_row_moves_its_lse_and_nothing_else(case: Case, seed: int) -> None:
    inputs, A = filled(case)
    constant = np.random.default_rng(seed).normal(size=(A.shape[-2], 1)) * 10
    mods = [inputs.arguments["score_mod"]] if "score_mod" in inputs.arguments else []
    arguments = {**inputs.arguments, "score_mod": [*mods, regard.score_mods.bias(constant)]}
    B = regard.attention(inputs.query, inputs.key, **arguments)
    close(B.to_dense(), A.to_dense())
    close(B @ inputs.value, A @ inputs.value)
    close(B.lse, A.lse + constant[:, 0])


@LAWS
@given(cases(change=MOVABLE), st.sampled_from([0.0, 0.25, -3.0, 7.0]))
def test_scaling_the_query_equals_scaling_the_scale(case: Case, factor: float) -> None:
    inputs, A = filled(case)
    scaled = regard.attention(inputs.query * factor, inputs.key, **inputs.arguments)
    other = regard.attention(inputs.query, inputs.key, **inputs.arguments, scale=A.scale * factor)
    close(other.to_dense(), scaled.to_dense())
    close(other.lse, scaled.lse)


@LAWS
@given(cases(change=[c for c in CHANGES if c != "sink"]), TILES)
def test_outputs_lie_in_the_convex_hull_of_the_live_values(case: Case, sizes: Any) -> None:
    inputs, A = filled(case)
    live = (definition(inputs).scores != -np.inf)[..., None]
    value = reference.repeat_heads(inputs.value, inputs.query)[..., None, :, :]
    low = np.min(np.where(live, value, np.inf), axis=-2, initial=np.inf)
    high = np.max(np.where(live, value, -np.inf), axis=-2, initial=-np.inf)
    with tiles(*sizes):
        output = A @ inputs.value
    live = low <= high
    assert (output[live] >= low[live] - 1e-12).all() and (output[live] <= high[live] + 1e-12).all()
    equal(output[~live], 0.0)


# Masks

LEADS, LENGTHS = st.sampled_from([(), (3,), (2, 3)]), st.tuples(*[st.sampled_from([11, 13, 17, 1])] * 2)


@LAWS
@given(LEADS, LENGTHS, st.lists(st.sampled_from([*MASK_ATOMS, "triple"]), min_size=3, max_size=3), SEEDS)
def test_masks_are_a_boolean_algebra(lead: Any, lengths: Any, specs: Any, seed: int) -> None:
    rng, shape = np.random.default_rng(seed), (*lead, *lengths)
    (a, x), (b, y), (c, z) = (build_mask(spec, shape, rng) for spec in specs)
    assert a is not None and b is not None and c is not None
    for mask, allowed in (
        (a, x), (~a, ~x), (a & b, x & y), (a | b, x | y), (a & ~a, x & ~x),
        (~(a & b), ~x | ~y), (~(a | b), ~x & ~y), (~a | ~b, ~(x & y)), (~a & ~b, ~(x | y)),
        (a & (b | c), (x & y) | (x & z)), (a | (b & c), (x | y) & (x | z)),
    ):  # fmt: skip
        equal(mask.to_dense(*shape), allowed)
    for one, other in (
        (~~a, a), (a & b, b & a), (a | b, b | a), (a & a, a), (a | a, a), (a & b & a, b & a),
        ((a & b) & c, a & (b & c)), ((a | b) | c, c | (b | a)), (~(a & b), ~(b & a)),
    ):  # fmt: skip
        assert one == other and hash(one) == hash(other)
        equal(one.to_dense(*shape), other.to_dense(*shape))
    if a != b:
        assert (a & b) != (a | b) and ~a != ~b


@settings(LAWS, max_examples=300)
@given(LEADS, LENGTHS, st.sampled_from(FACTORS["mask"][1:]), st.booleans(), SEEDS)
def test_a_block_is_never_wrongly_classified_as_empty_or_full(lead, lengths, spec, inverted, seed) -> None:
    rng, shape = np.random.default_rng(seed), (*lead, *lengths)
    mask, allowed = build_mask(spec, shape, rng)
    (top, bottom), (left, right) = (sorted(rng.choice(n + 1, 2, replace=False)) for n in lengths)
    held = allowed[..., top:bottom, left:right] ^ inverted
    truth = "full" if held.all() else "partial" if held.any() else "empty"
    state = (~mask if inverted else mask).classify(range(top, bottom), range(left, right), shape=shape)
    assert state in (truth, "partial")
    one_document = isinstance(mask, DocumentMask) and truth == ("empty" if inverted else "full")
    if isinstance(mask, WindowMask | KeyRangeMask | DenseMask) or one_document:
        assert state == truth


# Measures


def tied(case: Case) -> regard.AttentionMatrix:
    """Return a matrix of the case with small integers as query and key, so that many weights tie."""
    inputs, _ = filled(case)
    return regard.attention(inputs.query.round(), inputs.key.round(), **inputs.arguments)


@settings(LAWS, max_examples=60)
@given(cases(q_len=[11, 1], kv_len=[13, 7]), st.integers(2, 9), SEEDS)
def test_merged_measures_equal_the_whole_in_any_order(case: Case, block: int, seed: int) -> None:
    A = tied(case)
    rng, shape = np.random.default_rng(seed), A.problem.shape
    weights, scores = A.to_dense().reshape(shape), A.scores[...].reshape(shape)
    rows, columns = (np.split(np.arange(n), range(block, n, block)) for n in shape[1:])
    blocks = rng.permutation(len(rows) * len(columns))
    coarse = [regard.Coarse(min(3, shape[1]), reduce) for reduce in ("mean", "max", "sum")]
    for measure in (
        regard.Entropy(), regard.Received(), Sum(), MaxWeight(), MaxWeight(-2), regard.TopK(5), *coarse,
        regard.Distance("lower_right"), regard.Spread("lower_right"), regard.Mass(regard.masks.first(5)),
    ):  # fmt: skip
        bound = measure.bind(A.problem)

        def step_block(state: Any, number: int, bound: Any = bound) -> Any:
            q, k = rows[number // len(columns)], columns[number % len(columns)]
            return bound.step(state, weights[:, q][..., k], scores[:, q][..., k], q, k, np)

        states = [step_block(bound.init(shape, np), number) for number in blocks]
        last_to_first = functools.reduce(lambda later, earlier: bound.merge(earlier, later), states[::-1])
        first_to_last = functools.reduce(bound.merge, states)
        one_by_one = functools.reduce(step_block, blocks, bound.init(shape, np))
        (whole,) = A.measure(measure)
        for state in (first_to_last, last_to_first, one_by_one):
            for found, expected in parts_of(bound.finish(state), whole):
                room = 1e-6 if isinstance(measure, regard.Spread) else 1e-12
                close(found.reshape(expected.shape), expected, err_msg=repr(measure), atol=room)


@settings(LAWS, max_examples=60)
@given(cases(q_len=[11, 1], kv_len=[13, 1]), TILES, st.integers(1, 13))
@use_instruction_set(None)  # of the block loop: the compiled pass rounds weights differently
def test_reductions_equal_the_dense_ones_and_ties_go_to_the_lowest_index(
    case: Case, sizes: Any, k: int
) -> None:
    A = tied(case)
    with tiles(*sizes):
        W = A.to_dense()
        for axis in (-1, -2, None):
            close(A.sum(axis), W.sum(axis))
            close(A.mean(axis), W.mean(axis))
            equal(A.max(axis), W.max(axis))
            equal(A.argmax(axis), W.argmax(axis))
        values, indices = A.topk(k := min(k, W.shape[-1]))
    order = np.argsort(-W, axis=-1, kind="stable")[..., :k]
    equal(indices, order)
    equal(values, np.take_along_axis(W, order, -1))


@LAWS
@given(cases(q_len=[11, 1], kv_len=[13, 1]), st.data(), TILES)
def test_a_measure_of_some_rows_is_some_rows_of_the_measure(case: Case, data: Any, sizes: Any) -> None:
    A = filled(case)[1]
    kinds = [st.integers(-n, n - 1) | st.sampled_from([slice(None), slice(1, None), slice(None, None, -1)])
             for n in A.shape[:-2]]  # fmt: skip
    heads = data.draw(st.tuples(*kinds))
    rows = data.draw(st.lists(st.integers(0, A.shape[-2] - 1), min_size=1, max_size=7))
    if data.draw(st.booleans(), label="lse known"):
        assert A.lse.shape == A.shape[:-1]
    mass = regard.Mass(regard.sliding_window(left=2, right=3, align="lower_right"))
    measures = (regard.Entropy(), mass, Sum(), MaxWeight(), regard.Distance("lower_right"))
    with tiles(*sizes):
        B = A.lazy[(*heads, rows)]
        for part, whole in zip(B.measure(*measures), A.measure(*measures), strict=True):
            for x, y in parts_of(part, whole):
                close(x, y[heads][..., rows])
        close(B.lse, A.lse[heads][..., rows])
        close(B.to_dense(), A.to_dense()[heads][..., rows, :])


@LAWS
@given(cases(layout=FACTORS["layout"], dtype=FACTORS["dtype"], change=["none", "bias", "sink"]), TILES)
def test_neither_layout_nor_a_cast_changes_a_value(case: Case, sizes: Any) -> None:
    inputs, A = filled(case)
    wide = np.float64 if case.dtype == "float64" else np.float32
    arrays = inputs.query, inputs.key, inputs.value
    query, key, value = (np.ascontiguousarray(x.astype(wide)) for x in arrays)
    B = regard.attention(query, key, **inputs.arguments)
    room = 4 * epsilon(case.dtype)
    with tiles(*sizes):
        assert A.dtype == B.dtype == wide
        close(A.to_dense(), B.to_dense(), rtol=32 * epsilon(wide))
        output = (B @ value).astype(inputs.value.dtype)
        close((A @ inputs.value).astype(float), output.astype(float), rtol=room, atol=room)
    whole, same = (
        regard.attention(query.round().astype(kind), key.round().astype(kind), **inputs.arguments)
        for kind in (int, float)
    )
    equal(whole.to_dense(), same.to_dense())
