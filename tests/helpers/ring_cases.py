"""What ranks compute in the tests of `regard.distributed`; every function gets the process group first."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from regard import distributed
from regard.distributed import peer_group, product, ring
from regard.distributed.layouts import build_layout
from regard.errors import RegardError
from regard.masks import first
from regard.measures import Coarse, Distance, Entropy, Mass, MaxScore, Measure, Received
from regard.testing import Case, build_inputs
from regard.testing.cases import from_engine, to_engine
from regard.tiling import use_tile_sizes

TILE = 16
# Tiles so small that the tokens of a rank are split into several.
SMALL_TILES = {"rows": 16, "columns": 32, "mask_rows": 16, "mask_tile_rows": 24, "joined_columns": 48}


class Split(NamedTuple):
    """How a sequence is split over ranks: the layout, and the number of queries and keys of each rank."""

    layout: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]

    def positions(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of the queries and keys of a rank."""
        return tuple(build_layout(self.layout, own).positions(rank) for own in (self.queries, self.keys))


def take(array: Any, positions: np.ndarray) -> Any:
    """Return the tokens of a rank: (…, tokens, width)."""
    return array[..., positions, :]


def list_measures(cells: int | None) -> list[Measure]:
    measures: list[Measure] = [Entropy(), Received(), Distance("lower_right"), Mass(first(3)), MaxScore()]
    return measures if cells is None else [*measures, Coarse(cells, "mean")]


def compute_cases(group: Any, cases: list[tuple[Case, Split, int | None]]) -> list[Any]:
    """Compute the results of cases; an error of a case is returned instead of its results."""
    return [compute_case(group, *case) for case in cases]


def compute_case(group: Any, case: Case, split: Split, cells: int | None) -> dict[str, Any]:
    """Compute output, lse, weights and measures of the rows of this rank."""
    inputs = build_inputs(case, TILE)
    assert inputs is not None
    queries, keys = split.positions(dist.get_rank(group))
    query, key, value = (to_engine(x, "torch fused") for x in (inputs.query, inputs.key, inputs.value))
    with use_tile_sizes(**SMALL_TILES):
        A = distributed.attention(
            take(query, queries), take(key, keys), group=group, layout=split.layout, **inputs.arguments
        )
        results = {"weights": A.to_dense()} if case.seed % 2 else {}  # half of the cases before the product
        results["output"] = A @ take(value, keys)
        results["lse"] = A.lse
        results["weights"] = A.to_dense() if not case.seed % 2 else results["weights"]
        results |= A.measure(*list_measures(cells))._asdict()
    return {name: from_engine(result) for name, result in results.items()}


def join_results(results: list[dict[str, Any]], split: Split) -> dict[str, Any]:
    """Join the results of the ranks to those of the whole matrix."""
    joined = {}
    for name, example in results[0].items():
        if name == "coarse":
            for other in results[1:]:
                np.testing.assert_array_equal(other[name], example)
            joined[name] = example
            continue
        axis = -2 if name in ("output", "weights") else -1
        of_keys = name == "received"
        length = sum(split.keys if of_keys else split.queries)
        shape = list(example.shape)
        shape[axis] = length
        joined[name] = np.full(shape, 1e300 if example.dtype == np.float64 else 1e30, example.dtype)
        for rank, result in enumerate(results):
            positions = split.positions(rank)[of_keys]
            index = (..., positions) if axis == -1 else (..., positions, slice(None))
            joined[name][index] = result[name]
    return joined


def differentiate(group: Any, arrays: list[Any], grad: Any, split: Split, arguments: dict) -> Any:
    """Compute the gradients of this rank's query, key, value and sink for a gradient of the output."""
    query, key, value, *sink = arrays
    queries, keys = split.positions(dist.get_rank(group))
    leaves = [take(query, queries), take(key, keys), take(value, keys), *sink]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    if sink:
        arguments = {**arguments, "sink": leaves[3]}
    with use_tile_sizes(**SMALL_TILES):
        A = distributed.attention(leaves[0], leaves[1], group=group, layout=split.layout, **arguments)
        output = A @ leaves[2]
        output.backward(take(grad, queries))
    return [leaf.grad for leaf in leaves]


def count_received_tensors(group: Any) -> list[int]:
    """Count the tensors from other ranks that are alive when each block is computed, and when the product is done."""
    received: list[weakref.ref[Any]] = []
    allocate, multiply = ring.RingPass._allocate, product._BlockKernel.multiply

    def count() -> int:
        return sum(reference() is not None for reference in received)

    def track(self: Any, shapes: Any) -> list[Any]:
        tensors = allocate(self, shapes)
        received.extend(map(weakref.ref, tensors))
        return tensors

    def multiply_and_count(*args: Any) -> Any:
        counts.append(count())
        return multiply(*args)

    counts: list[int] = []
    query, key, value = torch.ones(3, 2, 6, 4).unbind()
    A = distributed.attention(query, key, group=group)
    try:
        ring.RingPass._allocate, product._BlockKernel.multiply = track, multiply_and_count
        A @ value
    finally:
        ring.RingPass._allocate, product._BlockKernel.multiply = allocate, multiply
    return [*counts, count()]


def count_questions_about_the_store(group: Any) -> int:
    """Count how often three operations of a new matrix ask whether this process runs the store."""
    calls: list[bool] = []
    ask = peer_group.PeerGroup._serves_store

    def ask_and_count(self: Any) -> bool:
        calls.append(ask(self))
        return calls[-1]

    query, key = torch.ones(2, 2, 6, 4).unbind()
    try:
        peer_group.PeerGroup._serves_store = ask_and_count
        A = distributed.attention(query, key, group=group)
        A.measure(Entropy())
        A @ key
    finally:
        peer_group.PeerGroup._serves_store = ask
    return len(calls)


def measure_changed_tensors(group: Any) -> list[float]:
    """Return how far results are from those of a new matrix, after every rank or the first one changed its tensors."""
    rank = dist.get_rank(group)
    query, key, value = torch.randn(3, 2, 9, 4, generator=torch.Generator().manual_seed(rank)).unbind()
    A = distributed.attention(query, key, group=group)
    part = A[1]
    differences = []
    for own in ([query, key], [key], [query] if rank == 0 else []):
        for matrix in (A, part):  # statistics of the old values
            assert (matrix.lse.isfinite()).all() and (matrix.measure(Entropy()).entropy >= 0).all()
        for tensor in own:
            tensor.mul_(2.0).add_(0.3)
        new = distributed.attention(query, key, group=group)
        for old_matrix, new_matrix in ((A, new), (part, new[1])):
            pairs = [(x.measure(Entropy(), Received()), x.to_dense()) for x in (old_matrix, new_matrix)]
            pairs = [(*measures, dense) for measures, dense in pairs]
            differences += [float((x - y).abs().max()) for x, y in zip(*pairs, strict=True)]
        differences.append(float(((A @ value) - (new @ value)).abs().max()))
    return differences


# Indices of heads and rows of a matrix of shape (2, 3, 2, rows, keys); the library moves the axis of some arrays.
PARTS: list[Any] = [
    (0,),
    (0, slice(None), [1, 0]),
    (slice(None), 1, [1, 0, 1]),
    ([1, 0], slice(None), 1),
    (0, slice(None), [1, 0], slice(1, 3)),
    (..., [1, 0], slice(None)),
]


def _build_both(group: Any, factor: float = 1.0) -> tuple[Any, distributed.DistributedMatrix]:
    """Return the weights of this rank's rows, three for each rank, by the formula, and the matrix of the group."""
    rng, length = torch.Generator().manual_seed(5), 3 * dist.get_world_size(group)
    query, key = factor * torch.randn(2, 2, 3, 2, length, 4, generator=rng)
    own = [distributed.shard(x, group=group) for x in (query, key)]
    return torch.softmax(own[0] @ key.mT / 2, -1), distributed.attention(*own, group=group)


def compare_parts(group: Any) -> list[float]:
    """Return how far weights, products and entropies of parts are from the formula."""
    weights, A = _build_both(group)
    value = torch.randn(weights.shape[-1], 3, generator=torch.Generator().manual_seed(6))
    own_value = distributed.shard(value, group=group)
    differences = []
    for index in PARTS:
        expected, part = weights[index], A.lazy[index]
        assert part.shape == expected.shape, (index, part.shape)
        for found, wanted in (
            (part.to_dense(), expected),
            (part @ own_value, expected @ value),
            (part.entropy(), -(expected * expected.log()).sum(-1)),
        ):
            differences.append(float((found - wanted).abs().max()))
    return differences


def list_refusals(group: Any) -> list[str]:
    """Return the errors of copying and of measuring by an object that is no measure."""
    _, A = _build_both(group)
    messages = []
    for call in (A.copy, lambda: copy.deepcopy(A), lambda: pickle.dumps(A), lambda: A.measure(object())):
        try:
            call()
        except RegardError as error:
            messages.append(str(error))
    return messages


def list_plans(group: Any, factor: float) -> list[str]:
    """Return the plan of a matrix: fresh, after a product, and after a measure."""
    _, A = _build_both(group, factor)
    plans = [A.plan(Entropy())]
    _ = A @ distributed.shard(torch.ones(A.shape[-1], 2), group=group)
    plans.append(A.plan(Entropy()))
    A.measure(Entropy())
    return [*plans, A.plan(Entropy())]
