"""The attention matrix of a sequence that is spread over many ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch

from regard.core.arguments import (
    Axis,
    ResolvedIndex,
    check_not_empty,
    check_result_size,
    name_measures,
    resolve_reduction,
)
from regard.core.block_loop import SoftmaxStats
from regard.core.matrix import AttentionMatrix, PartSource
from regard.core.products import DenseWeights, Product, SelectedScores, SelectedWeights
from regard.distributed.measuring import (
    can_compile,
    run_measure_pass,
    run_stats_pass,
)
from regard.distributed.peer_group import describe_argument_content
from regard.distributed.product import multiply
from regard.distributed.ring import RingProblem, Travel
from regard.errors import ArgumentError, RegardError
from regard.measures import MaxWeight, Measure, Output, Sum
from regard.problem import Problem, Spec, may_have_large_scores
from regard.types import Array, IntArray

Tensor = Any  # torch's types are not checked


class DistributedMatrix(AttentionMatrix):
    """The rows of this rank of an attention matrix whose queries and keys are spread over the ranks of a group.

    `regard.distributed.attention` returns it. Its methods are those of `regard.AttentionMatrix`, and all ranks of the
    group must call them in the same order. Its shape is (…, heads, own queries, keys of all ranks), and indices of keys
    count the whole sequence. Results for each query are those of this rank's queries; results for each key, such as the
    weight that it received, are those of this rank's keys; results for the whole matrix are equal on all ranks.

    Gradients flow through `A @ value`; measures have none.
    """

    def __init__(
        self, spec: Spec, ring: RingProblem, lse_stats: SoftmaxStats | None = None,
        exact_stats: dict[bool, SoftmaxStats] | None = None, source: PartSource | None = None,
    ) -> None:  # fmt: skip
        super().__init__(spec, ring.problem, source=source)
        self._ring = ring
        self._lse_stats = lse_stats
        self._exact_stats = exact_stats or {}

    def _prepare_fast_product(self) -> Any:
        return False  # the keys of this rank are not all keys

    def _forget_if_changed(self) -> None:
        changes = self._changes
        super()._forget_if_changed()
        if (
            changes != self._changes
        ):  # before an operation, ranks ask what each has, so all compute them again
            self._lse_stats, self._exact_stats = None, {}

    def _make_problem(self) -> Problem:
        problem, own = super()._make_problem(), self._ring.problem
        if self._source is None:
            problem = replace(problem, frame=own.frame, positions=own.positions)
        self._ring = replace(self._ring, problem=problem)
        return problem

    @property
    def positions(self) -> Array:
        """Positions of this rank's queries in the whole sequence: (own queries,), NumPy."""
        return self.problem.positions.copy()

    def detach(self) -> DistributedMatrix:
        """Return the matrix without gradients; nothing is communicated."""
        spec = replace(self._spec, key=self._spec.key.detach())
        if spec.query is not None:
            spec = replace(spec, query=spec.query.detach())
        problem = self.problem
        sink = None if problem.sink is None else problem.sink.detach()
        problem = replace(problem, query=problem.query.detach(), key=problem.key.detach(), sink=sink)
        ring = replace(self._ring, problem=problem)
        return DistributedMatrix(spec, ring, self._lse_stats, dict(self._exact_stats))

    @property
    def kernel(self) -> str:
        """Name of the kernel that `A @ value` ran last for a block, or would run."""
        ring = self._ring
        name = self._kernel_used or self.problem.engine.kernel_name(self.problem)
        return f"ring of {ring.peers.size} ranks, {ring.layout_name}; {name}"

    @property
    def lse(self) -> Array:
        """The natural-log logsumexp of each of this rank's rows over all keys: (…, heads, own queries)."""
        self._forget_if_changed()
        if self._lse_stats is None and not self._exact_stats:
            self._refuse_gradients("A.lse")
            self._run_operation("A.lse", {})
        stats = self._lse_stats or next(iter(self._exact_stats.values()))
        lse = stats.lse(self.problem.engine.xp)
        return self._restore_leading_axes(lse.to(self.problem.dtype))

    def to_dense(self) -> Array:
        """Compute and store this rank's rows of the whole matrix: (…, heads, own queries, keys of all ranks)."""
        self._refuse_gradients("A.to_dense()")
        return self._restore_leading_axes(
            self._run_operation("A.to_dense()", {"dense": DenseWeights()})["dense"]
        )

    def plan(self, *measures: Measure, **named: Measure) -> str:
        """Describe how `measure` would compute these measures, without computing them.

        Args:
            *measures: Measures, named as in the result of `measure`.
            **named: Measures by the name of their choice.
        """
        chosen = name_measures(measures, named)
        ring = self._ring
        rest = {name: measure for name, measure in chosen.items() if not isinstance(measure, Output)}
        is_known = self._lse_stats is not None
        if self._exact_stats or self.problem.has_large_scores:
            is_known = can_compile(ring, list(rest.values())) in self._exact_stats
        passes = "one pass of the keys" if is_known else "two passes of the keys (lse, then weights)"
        lines = [f"{self.kernel}, one pass of keys and values: {name}" for name in chosen if name not in rest]
        if rest or not lines:
            lines.append(
                f"ring of {ring.peers.size} ranks, {ring.layout_name}, {passes}: {', '.join(rest) or 'lse'}"
            )
        return "\n".join(lines)

    # Reductions over everything

    def sum(self, axis: Axis = None, *, dim: Axis = None, **keywords: object) -> Array:
        """Sum the weights.

        Args:
            axis: −1 over the keys, −2 over the queries of all ranks, None over everything on all ranks.
            dim: The same as `axis`, in torch's spelling.
            **keywords: `keepdim`, as in `regard.AttentionMatrix.sum`.
        """
        resolved, keep = resolve_reduction(self.shape, "sum", axis, dim, keywords)
        if resolved is None:
            total = self.measure(Sum(-1)).sum.sum().reshape(1)
            return self._keep_axes(torch.stack(self._exchange("A.sum()", total)).sum(), None, keep)
        return self._keep_axes(self.measure(Sum(resolved)).sum, resolved, keep)

    def mean(self, axis: Axis = None, *, dim: Axis = None, **keywords: object) -> Array:
        """Average the weights.

        Args:
            axis: −1 over the keys, −2 over the queries of all ranks, None over everything on all ranks.
            dim: The same as `axis`, in torch's spelling.
            **keywords: `keepdim`, as in `regard.AttentionMatrix.sum`.
        """
        resolved, keep = resolve_reduction(self.shape, "mean", axis, dim, keywords)
        counts = {-1: self.shape[-1], None: math.prod(self.shape), -2: self.shape[-2]}
        count: Any = torch.tensor([float(counts[resolved])], dtype=torch.float64)
        if resolved != -1:
            count = torch.stack(self._exchange("A.mean()", count.to(self.problem.query.device))).sum()
        return self._keep_axes(self.sum(resolved) / count, resolved, keep)

    def max(self, axis: Axis = None, *, dim: Axis = None, **keywords: object) -> Array:
        """Find the largest weights.

        Args:
            axis: −1 of each row, −2 of each column over all ranks, None of the whole matrix.
            dim: The same as `axis`, in torch's spelling.
            **keywords: `keepdim`, as in `regard.AttentionMatrix.sum`.
        """
        resolved, keep = resolve_reduction(self.shape, "max", axis, dim, keywords)
        if resolved is None:
            return self._keep_axes(self._find_largest("A.max()")[0], None, keep)
        return self._keep_axes(self.measure(top=MaxWeight(resolved)).top.values, resolved, keep)

    def argmax(self, axis: Axis = None, *, dim: Axis = None, **keywords: object) -> Array:
        """Find the indices of the largest weights in the whole sequence; ties go to the lowest index.

        Args:
            axis: −1 gives keys, −2 queries, None an index into the flattened matrix of all ranks.
            dim: The same as `axis`, in torch's spelling.
            **keywords: `keepdim`, as in `regard.AttentionMatrix.sum`.
        """
        resolved, keep = resolve_reduction(self.shape, "argmax", axis, dim, keywords)
        if resolved is None:
            return self._keep_axes(self._find_largest("A.argmax()")[1], None, keep)
        return self._keep_axes(self.measure(top=MaxWeight(resolved)).top.indices, resolved, keep)

    def _find_largest(self, operation: str) -> tuple[Tensor, Tensor]:
        """Find the largest weight of the matrix of all ranks, and its index in the flattened matrix."""
        problem = self.problem
        check_not_empty((*self.shape[:-2], problem.frame.q_len, problem.frame.kv_len), operation)
        values, keys = (x.reshape(problem.shape[:2]) for x in self.measure(top=MaxWeight(-1)).top)
        rows = torch.as_tensor(problem.positions, device=keys.device)
        pairs = torch.arange(len(values), device=keys.device)[:, None]
        flat = (pairs * problem.frame.q_len + rows) * problem.frame.kv_len + keys
        own = torch.full((2,), -1.0, dtype=torch.float64, device=keys.device)
        if values.numel():
            largest = values.max()
            is_largest = values.isnan() if largest.isnan() else values == largest
            # An index of a matrix of 2⁵³ entries is exact in float64.
            own = torch.stack([largest.double(), flat[is_largest].min().double()])
        found = torch.stack(self._exchange(operation, own))
        largest = found[:, 0].max()
        is_largest = found[:, 0].isnan() if largest.isnan() else found[:, 0] == largest
        return largest, found[is_largest, 1].min().long()

    def _exchange(self, operation: str, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, of equal shape."""
        with self._ring.operate(operation):
            return [tensors[0] for tensors in self._ring.peers.exchange_all([tensor])]

    def __repr__(self) -> str:
        return f"{self._describe()}, rows of rank {self._ring.peers.rank} of {self._ring.peers.size}"

    def _repr_html_(self) -> str:
        from regard.render import notebook

        return notebook.render_matrix(repr(self), None, "Its keys are on several ranks: A[row] reads a row.")

    def _require_all_keys(self, method: str) -> NoReturn:
        raise ArgumentError(
            f"A.{method}",
            received="a matrix whose keys are on several ranks",
            expected="a matrix of one process",
            hint="Gather the tensors first: whole = regard.distributed.gather(key, layout=…), then "
            f"regard.attention(gather(query), whole).{method}.",
        )

    # Private: what the methods of `AttentionMatrix` call

    def _take_part(self, spec: Spec, pairs: IntArray, rows: IntArray) -> AttentionMatrix:
        problem, chosen = self.problem.take_part(pairs, rows), (pairs[:, None], rows)
        return DistributedMatrix(
            spec,
            replace(self._ring, problem=problem),
            None if self._lse_stats is None else self._lse_stats.select(chosen),
            {kind: stats.select(chosen) for kind, stats in self._exact_stats.items()},
            PartSource(self, pairs, rows),
        )

    def _get_stats(self) -> None:
        return None  # the ranks must agree on which statistics they use: `_agree_on_stats`

    def _compute_block(self, resolved: ResolvedIndex, operation: str, *, weights: bool) -> Array:
        self._refuse_gradients(operation)
        block_shape = tuple(map(len, resolved.positions))
        check_result_size(
            math.prod(block_shape) * int(self.dtype.itemsize),
            operation,
            f"an index with a result of shape {block_shape}",
            "Take fewer rows at a time, or A.coarsen(512) for a heat map.",
        )
        part, columns = self._select(resolved), resolved.positions[-1]
        assert isinstance(part, DistributedMatrix)
        measure = SelectedWeights(columns) if weights else SelectedScores(columns)
        block = part._run_operation(operation, {"entries": measure})["entries"]
        self._adopt_stats(part)
        return block.reshape(block_shape)

    def _adopt_stats(self, part: DistributedMatrix) -> None:
        """Keep statistics that a part computed, if it has all rows."""
        if part.problem.shape == self.problem.shape and np.array_equal(
            part.problem.positions, self.problem.positions
        ):
            self._lse_stats, self._exact_stats = part._lse_stats, part._exact_stats

    def _product(self, array: Any, operation: str, *, transposed: bool) -> Array:
        array = as_local(array)
        measure = Product.from_operand(array, self._spec, operation, transposed=transposed)
        array, engine = measure.array, self.problem.engine
        if transposed:
            self._refuse_gradients(operation, array)
            content = f"{tuple(array.shape[2:])}"
            product = self._run_operation(operation, {"product": measure}, content)["product"]
        else:
            needs_grad = engine.requires_grad(self.problem, array)
            product, lse, self._kernel_used = multiply(self._ring, array, measure.pair_index, needs_grad)
            if self._lse_stats is None:
                self._lse_stats = SoftmaxStats(lse.detach(), None)
        return self._restore_product(engine.cast(product, array.dtype), measure)

    def _run_measures(self, chosen: dict[str, Measure]) -> dict[str, Any]:
        self._refuse_gradients("A.measure(…)")
        results: dict[str, Any] = {
            name: self @ measure.value for name, measure in chosen.items() if isinstance(measure, Output)
        }
        rest = {name: measure for name, measure in chosen.items() if name not in results}
        if rest or not results:
            computed = self._run_operation("A.measure(…)", rest)
            results |= {name: self._restore_leading_axes(result) for name, result in computed.items()}
        return results

    def _run_operation(self, operation: str, chosen: dict[str, Measure], content: str = "") -> dict[str, Any]:
        """Compute measures together with the other ranks; results begin with the axis of pairs."""
        engine = self.problem.engine  # first: if an array was changed in place, this renews the ring
        ring, measures = self._ring, list(chosen.values())
        # Entries of each rank are its own choice.
        is_own_choice = any(isinstance(measure, SelectedWeights) for measure in measures)
        texts = [
            type(m).__name__ if is_own_choice or content else describe_argument_content(m) for m in measures
        ]
        same = {"measures": "; ".join(texts) + content}
        compiled, error = False, None
        try:
            compiled = can_compile(ring, measures)
        except RegardError as found:
            error = found
        own = {
            "norms": self.problem.largest_norms,
            "has_lse": self._lse_stats is not None,
            "is_small": self._lse_stats is not None and self._lse_stats.is_small(engine.xp),
            "has_exact": compiled in self._exact_stats,
        }
        with torch.no_grad(), ring.operate(operation, same, own, error=error) as (travel, replies):
            known = self._agree_on_stats(travel, replies, compiled)
            results = run_measure_pass(ring, travel, measures, known) if measures else []
        return dict(zip(chosen, results, strict=True))

    def _agree_on_stats(self, travel: Travel, replies: list[Any], compiled: bool) -> SoftmaxStats:
        """Return the statistics that all ranks use: of a kernel's lse, or exact ones; computed if a rank lacks them."""
        query_norm, key_norm = np.max([reply["norms"] for reply in replies], axis=0)
        is_exact = may_have_large_scores(query_norm, key_norm, self.problem.scale)
        if self.problem.score_mods and all(reply["has_lse"] for reply in replies):
            is_exact = is_exact or not all(reply["is_small"] for reply in replies)
        if is_exact:
            if not all(reply["has_exact"] for reply in replies):
                self._exact_stats[compiled] = run_stats_pass(self._ring, travel, compiled=compiled)
            return self._exact_stats[compiled]
        if not all(reply["has_lse"] for reply in replies):
            stats = run_stats_pass(self._ring, travel, compiled=True)
            lse = stats.lse(self.problem.engine.xp).to(self.problem.dtype)
            self._lse_stats = SoftmaxStats(lse, None)
        assert self._lse_stats is not None
        return self._lse_stats

    def _refuse_gradients(self, operation: str, *arrays: Tensor) -> None:
        if self.problem.engine.requires_grad(self.problem, *arrays):
            raise ArgumentError(
                operation,
                received="query or key that require a gradient",
                expected="torch.no_grad(), or detached tensors: with several ranks, only A @ value supports gradients",
                hint="Compute measures inside `with torch.no_grad():`.",
            )


def as_local(array: Any) -> Any:
    """Return the part of a `DTensor` that this rank holds; other arrays unchanged."""
    return array.to_local() if hasattr(array, "to_local") else array
