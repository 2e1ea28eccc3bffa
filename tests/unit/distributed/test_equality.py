"""Output, lse, weights and measures of many ranks equal the definition under the error rule of one process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from regard.testing import Case, build_inputs, draw_cases
from regard.testing.cases import compute_bounds
from tests.helpers.ring_cases import (
    TILE,
    Split,
    compare_parts,
    compute_cases,
    count_questions_about_the_store,
    count_received_tensors,
    join_results,
    list_plans,
    list_refusals,
    measure_changed_tensors,
)


def draw_split(rng: np.random.Generator, size: int, q_len: int, kv_len: int) -> Split:
    """Split two lengths at random positions; a part may be empty."""

    def cut(length: int) -> tuple[int, ...]:
        edges = np.sort(rng.integers(0, length + 1, size - 1))
        return tuple(np.diff([0, *edges, length]).tolist())

    return Split(str(rng.choice(["contiguous", "zigzag"])), cut(q_len), cut(kv_len))


def check(ranks, cases: list[Case], size: int, seed: int = 0) -> list[str]:
    """Compute cases on `size` ranks, and return what breaks the error rule."""
    rng = np.random.default_rng(seed)
    inputs = [build_inputs(case, TILE) for case in cases]
    splits = [draw_split(rng, size, x.query.shape[-2], x.key.shape[-2]) for x in inputs]
    return check_splits(ranks, cases, inputs, splits, size)


def check_splits(ranks, cases, inputs, splits, size: int) -> list[str]:
    bounds = [compute_bounds(case, x) for case, x in zip(cases, inputs, strict=True)]
    cells = [own.coarse_cells if "coarse" in own.measures else None for own in bounds]
    calls = list(zip(cases, splits, cells, strict=True))
    results = ranks.run(compute_cases, calls, ranks=range(size))
    failures = []
    for i, (case, split, own) in enumerate(zip(cases, splits, bounds, strict=True)):
        joined = join_results([result[i] for result in results], split)
        by_name = {"output": own.output, "lse": own.lse, "weights": own.weights, **own.measures}
        assert joined.keys() == by_name.keys()
        for name, result in joined.items():
            try:
                by_name[name].check(result)
            except AssertionError as error:
                failures.append(f"{split} {case}\n    {name}: {error}")
    return failures


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.nightly)])
def test_cases_of_the_case_matrix(ranks, size, request) -> None:
    count = request.config.getoption("--cases") // 200
    cases = [case for case, possible in draw_cases(count, seed=size, tile=TILE) if possible]
    parts = range(0, len(cases), 25)  # each answers long before the time limit of a call
    failures = [failure for i in parts for failure in check(ranks, cases[i : i + 25], size, seed=i)]
    assert not failures, "\n".join([f"{len(failures)} of {len(cases)} cases", *failures[:5]])


MASKS = (
    "none",
    "causal",
    "window",
    "two_sided",
    "padding",
    "document",
    "causal & padding",
    "window | ~dense",
)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_split_gives_the_same_numbers(ranks, data) -> None:
    size = data.draw(st.integers(2, ranks.size), "ranks")
    layout = data.draw(st.sampled_from(["contiguous", "zigzag"]), "layout")
    lengths = st.tuples(*[st.integers(0, 12)] * size)
    queries, keys = data.draw(lengths, "queries"), data.draw(lengths, "keys")
    heads = data.draw(st.sampled_from(["none", "grouped"]), "heads")
    case = Case(
        dtype=data.draw(st.sampled_from(["float32", "bfloat16"]), "dtype"),
        mask=data.draw(st.sampled_from(MASKS), "mask"),
        q_len=sum(queries), kv_len=sum(keys), head_dim=8, value_dim="head_dim", heads=heads, layout="contiguous",
        values="normal", change="none", seed=data.draw(st.integers(0, 99), "seed"),
    )  # fmt: skip
    failures = check_splits(ranks, [case], [build_inputs(case, TILE)], [Split(layout, queries, keys)], size)
    assert not failures, "\n".join(failures)


def test_tensors_that_were_changed_in_place(ranks) -> None:
    for differences in ranks.run(measure_changed_tensors):
        assert max(differences) < 1e-5


def test_a_rank_holds_two_blocks_of_other_ranks_at_most(ranks) -> None:
    size = ranks.size
    # A block is a key and a value. One travels while the own block is computed, and none during the last one.
    expected = [2, *[4] * (size - 2), 2, 0]
    assert ranks.run(count_received_tensors) == [expected] * size


def test_the_store_is_asked_about_once_for_a_group(ranks) -> None:
    counts = ranks.run(count_questions_about_the_store)  # each may wait for a name server
    assert all(count <= 1 for count in counts), counts
    assert ranks.run(count_questions_about_the_store) == [0] * ranks.size


def test_parts_whose_axes_the_library_moves(ranks) -> None:
    for differences in ranks.run(compare_parts):
        assert max(differences) < 1e-5


def test_copies_and_foreign_measures_are_refused_with_a_hint(ranks) -> None:
    for messages in ranks.run(list_refusals):
        assert len(messages) == 4
        assert all("regard.distributed.gather" in message for message in messages[:3])
        assert "subclass regard.measures.Measure" in messages[3]


@pytest.mark.parametrize(("factor", "expected"), [(1.0, [2, 1, 1]), (100.0, [2, 2, 1])])
def test_a_plan_counts_the_passes_that_measures_need(ranks, factor, expected) -> None:
    words = {1: "one pass of the keys", 2: "two passes of the keys"}
    for plans in ranks.run(list_plans, factor):
        assert len(plans) == len(expected)
        for plan, count in zip(plans, expected, strict=True):
            assert words[count] in plan, plans
