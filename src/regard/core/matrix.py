"""The lazy attention matrix.

The public methods check and resolve their arguments once; everything below them gets canonical arguments.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections import namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple

import numpy as np

from regard.core.arguments import (
    Axis,
    ResolvedIndex,
    check_not_empty,
    check_one_head,
    check_result_size,
    is_row_or_entry,
    name_measures,
    resolve_index,
    resolve_reduction,
    resolve_row,
)
from regard.core.block_loop import (
    SoftmaxStats,
    compute_entries,
    compute_whole,
    measure_whole,
    run_block_loop,
    run_measures,
)
from regard.core.lazy_operand import LazyOperand
from regard.core.planner import (
    compute_measured_product,
    compute_measures,
    find_measured_product,
    make_plan,
    need_own_product,
)
from regard.core.products import (
    DenseWeights,
    Diagonal,
    LogSumExp,
    MinWeight,
    Product,
    SelectedScores,
    SelectedWeights,
)
from regard.engines import find_engine
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument, format_named_shape
from regard.frame import as_index, is_contiguous
from regard.masks import Mask
from regard.measures import (
    Coarse,
    Distance,
    Entropy,
    Mass,
    MaxWeight,
    Measure,
    Output,
    Received,
    Sum,
    TopK,
    TopKResult,
)
from regard.problem import LARGE_SCORE, Problem, Spec, convert_arrays, detach, find_arrays
from regard.render import text
from regard.types import Align, Array, ArrayT, IntArray

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

    from regard.core.explanation import Explanation
    from regard.pages.html import Page
    from regard.render.notebook import WeightSample

# Up to this many tokens a notebook shows every weight.
SMALL = 16
# Rows and columns that a notebook shows of a larger matrix.
SIDE = 12
# Maximum number of weights and multiply-adds to compute for a notebook; rows are left out to stay below it.
ENTRIES, MULTIPLY_ADDS = 1 << 21, 1 << 28

__all__ = ["AttentionMatrix"]

# A matrix of one head with at most this many queries and keys prints all its weights.
MAX_PRINTED = 8


class PartSource(NamedTuple):
    """Where a part of a matrix comes from: the whole matrix, and the pairs and rows of it."""

    whole: AttentionMatrix
    pairs: IntArray
    rows: IntArray


class AttentionMatrix(LazyOperand, Generic[ArrayT]):
    """A lazy attention matrix that can be multiplied, sliced, measured and explained.

    `regard.attention` and `regard.linear_attention` return an `AttentionMatrix`. Only `to_dense()` stores anything of
    size q_len × kv_len. Weights and lse (the logsumexp of each row) have the dtype `A.dtype`, float32 or wider.
    Measures accumulate and return float64, or float32 on a device without float64. `A @ value` has the dtype of the
    value.

    An `AttentionMatrix` is not an array. Array operations that a lazy matrix does not support raise an error that shows
    the call to make. The type parameter is the type of its arrays: `AttentionMatrix[torch.Tensor]`.

    `copy.deepcopy`, `pickle` and `torch.save` keep the values of a matrix but not their autograd graph;
    `torch.load(file, weights_only=False)` reads it, and `map_location` moves it to another device.

    >>> import regard
    >>> from regard.learn import cat
    >>> A = regard.attention(cat.Q, cat.K)
    >>> A.shape
    (5, 5)
    >>> A[2].round(4)
    array([0.1519, 0.2505, 0.2505, 0.1519, 0.1951])
    >>> (A @ cat.V)[2].round(4)
    array([0.2495, 0.3481, 0.3481, 0.2495])
    >>> A.entropy().round(4)
    array([1.5598, 1.459 , 1.585 , 1.5601, 1.6039])
    """

    def __init__(
        self, spec: Spec, problem: Problem | None = None, stats: SoftmaxStats | None = None,
        source: PartSource | None = None,
    ) -> None:  # fmt: skip
        self._spec, self._stats, self._kernel_used, self._fused_lse = spec, stats, "", None
        self._cached_problem, self._source = problem, source
        self._tracked: list[Any] | None = None if source is None else source.whole._tracked
        self._changes: list[int] | None = None
        self._fast_product: Any = None

    def _forget_if_changed(self) -> None:
        """Drop what was computed from arrays that were changed in place since; called before anything is cached."""
        if self._tracked is None:
            # A copy of a part has arrays of its own, and no whole matrix to take them from again.
            self._tracked = [] if self._spec.query is None else self._spec.list_arrays()
        changes = self._spec.engine.count_changes(self._tracked)
        if changes != self._changes:
            if self._changes is not None:
                self._stats, self._fused_lse, self._cached_problem = None, None, None
            self._changes = changes

    def _keep_lse(self, lse: Array) -> None:
        """Cache the lse of a fused kernel, (…, heads, q_len), that was computed from the arrays as they are."""
        self._forget_if_changed()
        if self._stats is None:
            self._fused_lse = lse

    @property
    def problem(self) -> Problem:
        """The matrix in canonical form, with one axis of (batch, head) pairs, as engines, plots and pages read it."""
        self._forget_if_changed()  # resolved on first use: a plain product does not need it
        if self._cached_problem is None:
            # The views are kept: made under `torch.no_grad()`, they would cut gradients off later uses of the matrix.
            with self._spec.engine.enable_grad():
                self._cached_problem = self._make_problem()
        return self._cached_problem

    def _make_problem(self) -> Problem:
        """Convert the arrays to canonical form, which may copy them."""
        if self._source is None:
            return self._spec.to_problem()
        return self._source.whole.problem.take_part(self._source.pairs, self._source.rows)

    def _prepare_fast_product(self) -> Any:
        """Return the product in one call of the engine, or False."""
        spec = self._spec
        if spec.query is None or spec.sink is not None or spec.score_mods:
            return False
        return spec.engine.prepare_fast_product(spec.query, spec.key, spec.mask, spec.scale) or False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, (…, heads, q_len, kv_len)."""
        return self._spec.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of weights, lse and scores: float32 or wider."""
        return self.problem.dtype

    @property
    def device(self) -> Any:
        """The device of the arrays."""
        return self._spec.key.device

    @property
    def requires_grad(self) -> bool:
        """Whether the weights depend on a tensor that requires a gradient."""
        problem = self.problem
        arrays = (problem.query, problem.key, *find_arrays(problem.sink, problem.mask, problem.score_mods))
        return any(getattr(array, "requires_grad", False) for array in arrays)

    @property
    def nbytes(self) -> int:
        """Number of bytes that `to_dense()` would store."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def mask(self) -> Mask | None:
        """The mask: which keys each query may attend to; None for all."""
        return self._spec.mask

    @property
    def scale(self) -> float:
        """Factor that multiplies the products of query and key."""
        return self._spec.scale

    @property
    def kernel(self) -> str:
        """Name of the kernel that `A @ value` ran last, or would run.

        >>> import regard
        >>> regard.attention([[1.0]], [[1.0]]).kernel
        'numpy: block loop'
        """
        return self._kernel_used or self.problem.kernel

    # Copies

    def copy(self) -> AttentionMatrix[ArrayT]:
        """Return a matrix with copies of all its arrays, so that later in-place changes do not affect it.

        Gradients do not flow to the original arrays.

        >>> import numpy as np, regard
        >>> x = np.eye(3)
        >>> A = regard.attention(x, x).copy()
        >>> x *= 100
        >>> A[0].round(3)
        array([0.471, 0.264, 0.264])
        """
        return copy.deepcopy(self)

    def detach(self) -> AttentionMatrix[ArrayT]:
        """Return a matrix without the autograd graph; it shares its arrays with this one."""
        return self._convert(detach, keep_stats=True)

    def to(self, *args: Any, **kwargs: Any) -> AttentionMatrix[ArrayT]:
        """Move the matrix to a device, or convert it to a dtype; gradients flow to the original tensors.

        Args:
            *args: Arguments of `torch.Tensor.to`, such as `"cuda"` or `torch.float64`. A dtype is applied to
                floating-point tensors only.
            **kwargs: Keywords of `torch.Tensor.to`.

        Raises:
            ArgumentTypeError: If the matrix was made from arrays other than tensors.
        """
        if not hasattr(self._spec.key, "is_floating_point"):
            raise ArgumentTypeError(
                "A.to",
                received="a matrix of NumPy arrays",
                expected="a matrix of torch tensors",
                hint="Convert the inputs: regard.attention(torch.as_tensor(query), torch.as_tensor(key)).",
            )

        def convert(array: Any) -> Any:
            moved = array.to(*args, **kwargs) if hasattr(array, "is_floating_point") else array
            is_whole = moved is not array and not array.is_floating_point()
            return moved.to(array.dtype) if is_whole else moved

        target = self._spec.key[..., :0].to(*args, **kwargs).dtype
        if not target.is_floating_point or target.itemsize < 2:
            raise ArgumentTypeError(
                "A.to",
                received=f"{target}",
                expected="a device, or a floating-point dtype of at least 16 bits",
                hint="To round or convert the weights, use A.to_dense().to(dtype).",
            )
        return self._convert(convert)

    def cpu(self) -> AttentionMatrix[ArrayT]:
        """Move the matrix to the CPU; a matrix of NumPy arrays is returned unchanged."""
        return self.to("cpu") if hasattr(self._spec.key, "is_floating_point") else self

    def _convert(self, convert: Any, *, keep_stats: bool = False) -> AttentionMatrix[ArrayT]:
        """Return a matrix whose arrays were converted by a function."""
        self._require_all_keys("to(…)")
        if self._source is not None:  # a part notices changes of the arrays of its whole matrix
            whole, spec = self._source.whole._convert(convert, keep_stats=keep_stats), self._spec
            spec = replace(spec, engine=whole._spec.engine, key=convert(spec.key))
            return whole._take_part(spec, self._source.pairs, self._source.rows)
        spec = convert_arrays(self._spec, convert)
        engine = find_engine("attention", key=spec.key)
        problem, stats = None, self._get_stats() if keep_stats else None
        if self._spec.query is None:  # a copy of a part
            problem = convert_arrays(self.problem, convert)
            dtype = engine.working_dtype(problem.query, problem.key)
            problem = replace(problem, engine=engine, dtype=dtype)
        stats = None if stats is None else SoftmaxStats(*map(convert, stats))
        converted: AttentionMatrix[ArrayT] = AttentionMatrix(replace(spec, engine=engine), problem, stats)
        converted._forget_if_changed()  # from now on
        return converted

    def __copy__(self) -> AttentionMatrix:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return what deep copies and files keep: detached arrays and statistics, and nothing that is derived."""
        self._require_all_keys("copy()")
        problem = None if self._spec.query is not None else convert_arrays(self.problem, detach)
        self._forget_if_changed()
        state = vars(self) | {"_fast_product": None}
        state |= {"_spec": convert_arrays(self._spec, detach), "_fused_lse": detach(self._fused_lse)}
        if self._stats is not None:
            state["_stats"] = SoftmaxStats(*map(detach, self._stats))
        return state | {"_cached_problem": problem, "_source": None, "_tracked": None, "_changes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        engine = find_engine("attention", key=self._spec.key)  # the arrays may be on another device now
        self._spec = replace(self._spec, engine=engine)
        if self._cached_problem is not None:
            self._cached_problem = replace(self._cached_problem, engine=engine)

    # Entries

    def __getitem__(self, index: Any) -> Any:
        """Return weights, equal to `to_dense()[index]`.

        Args:
            index: Integers, slices, an ellipsis and at most one integer array, as in NumPy.

        Returns:
            The weights at the index. If the index omits both token axes or writes them as `:`, as in `A[0]` or
            `A[:, 3]`, the result is a lazy `AttentionMatrix` of those heads, the same as `A.lazy[index]`.

        Raises:
            IndexOutOfRangeError: If the index is past the end of an axis, or has too many entries.
            ArgumentTypeError: If the index has several arrays, or entries that are not integers.
            TooLargeError: If the result would take more than 256 MiB.
        """
        shape = self.shape
        if is_row_or_entry(index, shape) and (whole := compute_whole(self.problem)) is not None:
            return whole[1].reshape(shape)[index]
        resolved = resolve_index(index, shape, "A[index]")
        if resolved.keeps_tokens:
            return self._view(resolved)
        return self._entries(resolved, "A[index]", weights=True)

    @property
    def scores(self) -> ScoresView[ArrayT]:
        """The scores before the softmax, indexed like the matrix; masked scores are −inf.

        >>> import regard
        >>> regard.attention([[1.0]], [[2.0], [3.0]], scale=1.0).scores[0]
        array([2., 3.])
        """
        return ScoresView(self)

    @property
    def lazy(self) -> LazyIndexer[ArrayT]:
        """An indexer that returns lazy parts: `A.lazy[0, 3]` is one head, `A.lazy[..., rows, :]` some rows.

        >>> import numpy as np, regard
        >>> regard.attention(np.ones((2, 8, 5, 4)), np.ones((2, 8, 5, 4))).lazy[0, 3, 1:3].shape
        (2, 5)
        """
        return LazyIndexer(self)

    def to_dense(self) -> ArrayT:
        """Compute and store the whole matrix: (…, heads, q_len, kv_len), `nbytes` of memory."""
        return self._restore_leading_axes(_compute_dense(self.problem))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Convert to a NumPy array of at most 256 MiB."""
        if copy is False:
            raise ArgumentError(
                "numpy.asarray(A)",
                received="copy=False",
                expected="copy=None or copy=True",
                hint="The matrix is lazy, so a conversion computes new weights. Omit copy=False.",
            )
        dense = self._convert_to_dense("numpy.asarray(A)")
        return np.asarray(self.problem.engine.to_numpy(dense), dtype=dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """Convert to a DLPack capsule of at most 256 MiB, so that `torch.as_tensor(A)` works.

        Args:
            **options: Those of the array's own `__dlpack__`.

        Raises:
            ArgumentError: If the matrix requires a gradient, which a capsule cannot carry.
            TooLargeError: If the matrix takes more bytes.
        """
        if self.problem.engine.requires_grad(self.problem):
            raise ArgumentError(
                "torch.as_tensor(A)",
                received="a matrix that requires a gradient",
                expected="a matrix without gradients",
                hint="Call A.to_dense() to keep the gradient, or convert under torch.no_grad() to drop it.",
            )
        return self._convert_to_dense("torch.as_tensor(A)").__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return type and number of the device, as DLPack counts them."""
        device: tuple[int, int] = self._spec.key.__dlpack_device__()
        return device

    def _convert_to_dense(self, operation: str) -> Array:
        """Store the whole matrix for a conversion; refuse a large one, which may not be intended."""
        hint = "Call A.to_dense() to store it all, A[rows] for some rows, or A.coarsen(512) for a heat map."
        check_result_size(self.nbytes, operation, f"a matrix of shape {self.shape}", hint)
        return self.to_dense()

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    # Products

    def __matmul__(self, value: Array) -> ArrayT:
        """Multiply the matrix by a value.

        Args:
            value: (…, kv_heads, kv_len, value_dim), or a vector (kv_len,).

        Returns:
            The output in the dtype of the value: (…, heads, q_len, value_dim), or (…, heads, q_len) for a vector. As in
            NumPy, the byte order is this machine's.

        Raises:
            ArgumentError: If the shape of the value does not fit the matrix.
            ArgumentTypeError: If the value does not hold real numbers.
        """
        if self._fast_product is None:
            self._fast_product = self._prepare_fast_product()
        if self._fast_product:
            fused = self._fast_product(value, self._stats is None and self._fused_lse is None)
            if fused is not None:
                output, lse, self._kernel_used = fused
                if lse is not None:
                    self._keep_lse(lse)
                return output
        return self._product(value, "A @ value", transposed=False)

    def __rmatmul__(self, x: Array) -> ArrayT:
        """Multiply (…, heads, width, q_len) or (q_len,) by the matrix; see `mT`."""
        x = self.problem.engine.as_float(x, "x @ A", "x")
        return self.mT @ x if x.ndim == 1 else (self.mT @ x.swapaxes(-1, -2)).swapaxes(-1, -2)

    @property
    def T(self) -> TransposedMatrix[ArrayT]:  # noqa: N802 - NumPy's name for it
        """The lazy transpose of a matrix of one head, the same as `A.mT`.

        Raises:
            ArgumentError: If the matrix has more than two axes, because NumPy's `T` would reverse all of them.
        """
        if self.ndim != 2:
            raise ArgumentError(
                "A.T",
                received=f"a matrix of {self.ndim} axes",
                expected="(q_len, kv_len)",
                hint="A.mT transposes the last two axes; A[0, 3].T is the transpose of one head.",
            )
        return self.mT

    @property
    def mT(self) -> TransposedMatrix[ArrayT]:  # noqa: N802 - NumPy's name for it
        """The transpose, for `A.mT @ x`.

        >>> import regard
        >>> (regard.attention([[0.0], [0.0]], [[1.0], [1.0]]).mT @ [2.0, 4.0])
        array([3., 3.])
        """
        return TransposedMatrix(self)

    # Measures

    @property
    def lse(self) -> ArrayT:
        """The natural-log logsumexp of each row's scores, including the score of the sink: (…, heads, q_len).

        It is −inf for a row with no key to attend to. Each weight is exp(score − lse).
        """
        engine = self.problem.engine
        if engine.requires_grad(self.problem):
            return self._restore_leading_axes(engine.cast(self._differentiable_lse(), self.problem.dtype))
        if self._fused_lse is not None:
            return self._fused_lse.reshape(self.shape[:-1])
        with engine.suppress_warnings():
            lse = self._require_stats().lse(engine.xp)
            return self._restore_leading_axes(engine.cast(lse, self.problem.dtype))

    def measure(self, *measures: Measure, **named: Measure) -> Any:
        """Compute several measures in one pass.

        Args:
            *measures: Measures; each result is named after its class: `Entropy()` gives `.entropy`.
            **named: Measures whose results are named after the keywords.

        Returns:
            A named tuple with the result of each measure.

        Raises:
            ArgumentTypeError: If an argument is not a measure.
            ArgumentError: If two results have the same name.

        >>> from regard import Entropy, TopK, attention
        >>> A = attention([[0.0]], [[1.0], [2.0]])
        >>> A.measure(Entropy(), top=TopK(1)).top.indices
        array([[0]])
        """
        results = self._run_measures(chosen := name_measures(measures, named))
        return _make_result_class(tuple(chosen))(*(results[name] for name in chosen))

    def plan(self, *measures: Measure, **named: Measure) -> str:
        """Describe how `measure` would compute these measures, without computing them.

        Args:
            *measures: Measures, as in `measure`.
            **named: Measures, as in `measure`.

        Returns:
            One line for each product, compiled pass and run of the block loop, with the kernel, the reason and the
            results.

        >>> from regard import Entropy, Received, attention
        >>> print(attention([[0.0]], [[1.0], [2.0]]).plan(Entropy(), Received()))
        numpy: ..., two passes (lse, then weights): entropy, received
        """
        problem = self.problem
        products, rest = self._split_outputs(chosen := name_measures(measures, named))
        if kernel := find_measured_product(problem, products, rest)[0]:
            return f"{problem.engine.name}: {kernel}, one pass: {', '.join([*products, *rest, 'lse'])}"
        if not need_own_product(problem, products.values()):
            products, rest = {}, chosen | products
        lines = [f"{problem.kernel}, one product: {name}" for name in products]
        if rest and problem.engine.requires_grad(problem):
            lines.append(f"{problem.engine.name}: block loop, with gradients: {', '.join(rest)}")
        elif rest or not lines:
            stats = self._get_stats()
            lines.append(make_plan(problem, rest, stats is not None).describe(problem, stats))
        return "\n".join(lines)

    def entropy(self, *, include_sink: bool = False) -> ArrayT:
        """Compute the entropy of each row in nats: (…, heads, q_len).

        Args:
            include_sink: Whether the sink counts as one more key. By default, the weights of the keys are divided by
                their sum, so the sink has no effect.
        """
        return self.measure(Entropy(include_sink=include_sink)).entropy

    def distance(self, align: Align | None = None) -> ArrayT:
        """Compute the mean distance of each row to its keys, Σ w · |q_idx − kv_idx| / Σ w: (…, heads, q_len).

        Args:
            align: Position of query 0 if q_len and kv_len differ, as in `causal`.

        Raises:
            ArgumentError: If the lengths differ and `align` is missing, or `align` is unknown.
        """
        return self.measure(Distance(align)).distance

    def mass(self, mask: Mask) -> ArrayT:
        """Compute the share of each row's weight on the keys that a mask allows: (…, heads, q_len).

        Args:
            mask: The keys to count, such as `regard.masks.first(4)`.

        Raises:
            ArgumentTypeError: If `mask` is not a mask.
            ArgumentError: If the mask does not fit the matrix.
        """
        return self.measure(Mass(mask)).mass

    def received(self) -> ArrayT:
        """Sum the weight that each key receives from all queries, the same as `A.sum(-2)`: (…, heads, kv_len)."""
        return self.measure(Received()).received

    def diagonal(self, offset: int = 0) -> ArrayT:
        """Compute the weight of each query on the key at its own index plus `offset`: (…, heads, entries).

        The diagonal runs over the last two axes.

        Args:
            offset: Distance of the key from the query: −1 for the previous token.

        >>> import regard
        >>> from regard.learn import cat
        >>> regard.attention(cat.Q, cat.K).diagonal(-1).round(4)
        array([0.3125, 0.2505, 0.1915, 0.1539])
        """
        self._require_all_keys("diagonal(…)")
        if isinstance(offset, bool) or not hasattr(offset, "__index__"):
            raise ArgumentTypeError(
                "diagonal",
                received=describe_argument(offset),
                expected="an integer",
                hint="The diagonal is that of queries and keys; A.diagonal(-1) is that of the previous token.",
            )
        q_len, kv_len = self.shape[-2:]
        within = min(max(int(offset), -q_len), kv_len)
        return self.measure(diagonal=Diagonal(within)).diagonal

    def topk(self, k: int) -> TopKResult[ArrayT]:
        """Find the k largest weights of each row and their keys, largest first; ties go to the lowest index.

        Args:
            k: Number of keys, from 1 to kv_len.

        Returns:
            A named tuple of `values` and `indices`, each (…, heads, q_len, k).

        Raises:
            ArgumentError: If `k` is not an integer from 1 to kv_len.
        """
        top: TopKResult[ArrayT] = self.measure(top=TopK(k)).top
        return top

    def coarsen(self, cells: int | tuple[int, int], reduce: Literal["mean", "max", "sum"] = "max") -> ArrayT:
        """Reduce the matrix to a grid of cells: (…, heads, cells, cells).

        Args:
            cells: Number of cells along each axis, or (rows, columns).
            reduce: Reduction of the weights in a cell, as in `plot.heatmap`.

        Raises:
            ArgumentError: If there are more cells than rows or columns, or `reduce` is unknown.
        """
        return self.measure(Coarse(cells, reduce)).coarse

    def sum(self, axis: Axis = None, *, dim: Axis = None, **keywords: object) -> ArrayT:
        """Sum the weights.

        Args:
            axis: −1 sums over the keys, −2 over the queries (the weight that each key receives), None over everything.
            dim: Synonym of `axis`.
            **keywords: `keepdim` (or `keepdims`) keeps the axis with size 1; `out` and `dtype` accept only their
                defaults.

        Returns:
            (…, heads, q_len) for −1, (…, heads, kv_len) for −2, a scalar for None.

        Raises:
            ArgumentError: If the axis is not −1, −2 or None, or both `axis` and `dim` are given.
        """
        resolved, keep = resolve_reduction(self.shape, "sum", axis, dim, keywords)
        if resolved is None:
            return self._keep_axes(self.measure(Sum(-1)).sum.sum(), None, keep)
        return self._keep_axes(self.measure(Sum(resolved)).sum, resolved, keep)

    def mean(self, axis: Axis = None, *, dim: Axis = None, **keywords: object) -> ArrayT:
        """Average the weights.

        Args:
            axis: −1 averages over the keys, −2 over the queries, None over everything.
            dim: Synonym of `axis`.
            **keywords: As in `sum`.

        Returns:
            (…, heads, q_len) for −1, (…, heads, kv_len) for −2, a scalar for None.

        Raises:
            ArgumentError: If the axis is not −1, −2 or None, or both `axis` and `dim` are given.
        """
        resolved, keep = resolve_reduction(self.shape, "mean", axis, dim, keywords)
        count = math.prod(self.shape) if resolved is None else self.shape[resolved]
        with np.errstate(all="ignore"):  # the mean of no entries is NaN, without a warning
            total: Any = self.sum(resolved)
            return self._keep_axes(total / np.float64(count), resolved, keep)

    def max(self, axis: Axis = None, *, dim: Axis = None, **keywords: object) -> ArrayT:
        """Find the largest weights.

        Args:
            axis: −1 searches each row, −2 each column, None the whole matrix.
            dim: Synonym of `axis`.
            **keywords: As in `sum`.

        Returns:
            (…, heads, q_len) for −1, (…, heads, kv_len) for −2, a scalar for None.

        Raises:
            ArgumentError: If the axis is not −1, −2 or None, both `axis` and `dim` are given, or the matrix is empty.
        """
        check_not_empty(self.shape, "max")
        resolved, keep = resolve_reduction(self.shape, "max", axis, dim, keywords)
        if resolved is None:
            return self._keep_axes(self.measure(top=MaxWeight(-1)).top.values.max(), None, keep)
        return self._keep_axes(self.measure(top=MaxWeight(resolved)).top.values, resolved, keep)

    def min(self, axis: Axis = None, *, dim: Axis = None, **keywords: object) -> ArrayT:
        """Find the smallest weights; a masked key has the weight 0.

        Args:
            axis: −1 searches each row, −2 each column, None the whole matrix.
            dim: Synonym of `axis`.
            **keywords: As in `sum`.

        Returns:
            (…, heads, q_len) for −1, (…, heads, kv_len) for −2, a scalar for None.

        Raises:
            ArgumentError: If the axis is not −1, −2 or None, both `axis` and `dim` are given, or the matrix is empty.
        """
        self._require_all_keys("min(…)")
        check_not_empty(self.shape, "min")
        resolved, keep = resolve_reduction(self.shape, "min", axis, dim, keywords)
        smallest = self.measure(smallest=MinWeight(axis=-1 if resolved is None else resolved)).smallest
        return self._keep_axes(smallest.min() if resolved is None else smallest, resolved, keep)

    def _keep_axes(self, result: Any, axis: int | None, keep: bool) -> ArrayT:
        """Give the result of a reduction the axes that it reduced, with size 1, if they are kept."""
        if not keep:
            return result
        ones = tuple(1 if axis in (None, n - self.ndim) else size for n, size in enumerate(self.shape))
        return result.reshape(ones)

    def argmax(self, axis: Axis = None, *, dim: Axis = None, **keywords: object) -> ArrayT:
        """Find the indices of the largest weights; ties go to the lowest index.

        Args:
            axis: −1 searches each row, −2 each column, None the whole matrix.
            dim: Synonym of `axis`.
            **keywords: As in `sum`.

        Returns:
            Keys (…, heads, q_len) for −1, queries (…, heads, kv_len) for −2, an index into the flattened matrix for
            None.

        Raises:
            ArgumentError: If the axis is not −1, −2 or None, both `axis` and `dim` are given, or the matrix is empty.
        """
        check_not_empty(self.shape, "argmax")
        resolved, keep = resolve_reduction(self.shape, "argmax", axis, dim, keywords)
        if resolved is None:
            values, indices = self.measure(top=MaxWeight(-1)).top
            row = int(values.argmax())
            return self._keep_axes(row * self.shape[-1] + indices.ravel()[row], None, keep)
        return self._keep_axes(self.measure(top=MaxWeight(resolved)).top.indices, resolved, keep)

    # Other libraries

    def numpy(self) -> Any:
        """Compute the weights as a NumPy array of at most 256 MiB, the same as `np.asarray(A)`."""
        return np.asarray(self)

    def as_linear_operator(self) -> LinearOperator:
        """Return the matrix of one head as a SciPy `LinearOperator`, for SciPy's iterative solvers.

        Products with the operator or its transpose never store the matrix.

        Returns:
            An operator of shape (q_len, kv_len) and dtype `A.dtype`.

        Raises:
            ArgumentError: If the matrix has several heads.
            ImportError: If SciPy is not installed.

        >>> import numpy as np, regard
        >>> from scipy.sparse.linalg import svds
        >>> query, key = np.random.default_rng(0).normal(size=(2, 500, 64))
        >>> A = regard.attention(query, key)
        >>> singular_values = svds(A.as_linear_operator(), k=3, return_singular_vectors=False, rng=0)
        >>> np.allclose(np.sort(singular_values)[::-1], np.linalg.svd(A.to_dense())[1][:3])
        True
        """
        self._require_all_keys("as_linear_operator()")
        check_one_head(self.shape, "as_linear_operator", "A[{}].as_linear_operator()")
        try:
            from scipy.sparse.linalg import LinearOperator
        except ImportError as error:
            raise ImportError("as_linear_operator: scipy is not installed. pip install scipy") from error
        matrix = self[(0,) * (self.ndim - 2)] if self.ndim > 2 else self
        engine = self._spec.engine
        dtype = engine.to_numpy(engine.xp.zeros(0, dtype=self.dtype)).dtype

        def multiply(factor: Any) -> Any:
            def product(array: Any) -> Any:
                if np.iscomplexobj(array):
                    return product(array.real) + 1j * product(array.imag)
                operand = engine.xp.asarray(np.ascontiguousarray(array, dtype))
                with engine.no_grad():
                    return engine.to_numpy(factor @ operand)

            return product

        forward, backward = multiply(matrix), multiply(matrix.mT)
        return LinearOperator(
            matrix.shape, forward, rmatvec=backward, matmat=forward, rmatmat=backward, dtype=dtype
        )

    # Explanation and display

    def plot(self, tokens: Sequence[str] | None = None, **options: Any) -> Any:
        """Draw the weights of one head with Matplotlib; see `regard.plot.heatmap`.

        Args:
            tokens: Labels of the keys: kv_len strings. They also label the queries if both are the same sequence.
            **options: Other arguments of `regard.plot.heatmap`, such as `ax=`.

        Returns:
            The Axes.
        """
        self._require_all_keys("plot(…)")
        check_one_head(self.shape, "plot", "A[{}].plot(tokens)")
        heatmap = importlib.import_module("regard.plot").heatmap  # above this package
        return heatmap(self, tokens, **options)

    def explain(
        self, query: int, value: Array | None = None, tokens: Sequence[str] | None = None
    ) -> Explanation:
        """Explain the four steps of attention for one query, with every number; `print` shows the result.

        The matrix must have one head. Select a head by index: `A[0, 3].explain(7)`.

        Args:
            query: Position of the query. Negative positions count from the end.
            value: Value of this head, for the fourth step: (kv_len, value_dim).
            tokens: Labels of the keys, kv_len strings.

        Raises:
            ArgumentError: If the matrix has several heads, or value or tokens do not have kv_len entries.
            ArgumentTypeError: If `query` is not an integer.
            IndexOutOfRangeError: If there is no such query.

        >>> import regard
        >>> print(regard.attention([[1, 0]], [[1, 0], [0, 1]], scale=1.0).explain(0, tokens=["a", "b"]))
        How query 0 attends: 2 keys, head_dim 2
        <BLANKLINE>
        1. Compare: query [1, 0] · key
           a  1·1 + 0·0 = 1
           b  1·0 + 0·1 = 0
        2. Scale: × 1
           a  1 × 1 = 1
           b  0 × 1 = 0
        3. Normalise: exp(score − shift 1), divided by their sum 1.3679
           a  1       0.7311  █████████████████████████████
           b  0.3679  0.2689  ██████████
        """
        self._require_all_keys("explain(…)")
        check_one_head(self.shape, "explain", f"A[{{}}].explain({query})")
        from regard.core.explanation import explain_row

        return explain_row(self.problem, resolve_row(self.shape, "explain", query), value, tokens)

    def page(
        self,
        tokens: Sequence[str] | None = None,
        *,
        query_tokens: Sequence[str] | None = None,
        title: str = "Attention map",
    ) -> Page:
        """Build a self-contained HTML page with a zoomable map of one head, down to each weight and its two tokens.

        The page needs no network. It contains query and key in half precision and computes the weights from them. It
        states the error of the weights, and whether a point is a maximum, a mean or a sample. A search finds the
        largest weights between two tokens, and the running text is coloured by what a token attends to. The URL stores
        the view. Building the page takes two passes over the matrix, in O(n) memory.

        The matrix must have one head. Select a head by index: `A[0, 3].page(tokens)`.

        Args:
            tokens: Labels of the keys: kv_len strings. They also label the queries if both are the same sequence.
            query_tokens: Labels of the queries, q_len strings, if the queries are a different sequence.
            title: Title of the page.

        Raises:
            ArgumentError: If the matrix has several heads or is empty, the number of tokens is wrong, or the page
                cannot compute a score modification.
            TooLargeError: If the page would have to store a bias that is too large.

        >>> import numpy as np
        >>> import regard
        >>> A = regard.attention(np.eye(3), np.eye(3), mask=regard.causal())
        >>> A.page(["the", "cat", "sat"])
        <page "Attention map", ... kB: save(path) writes it>
        """
        from regard.core.matrix_page import build_head_map

        self._require_all_keys("page(…)")
        check_one_head(self.shape, "page", "A[{}].page(tokens)")
        return build_head_map(self.problem, tokens, query_tokens, title)

    def __getattr__(self, name: str) -> Any:
        message = f"'AttentionMatrix' object has no attribute {name!r}"
        if name in ("cuda", "float", "double", "half", "bfloat16"):
            message += "; A.to(device or dtype) moves or converts the matrix"
        elif not name.startswith("_") and hasattr(type(self._spec.key), name):
            message += f"; A.to_dense().{name} works on the stored weights"
        raise AttributeError(message)

    def __repr__(self) -> str:
        small = self.ndim == 2 and 0 < math.prod(self.shape) and max(self.shape) <= MAX_PRINTED
        if not small:
            return self._describe()
        return f"{self._describe()}\n{text.format_matrix(self.problem.engine.to_numpy(self.to_dense()))}"

    def _describe(self) -> str:
        """Describe shape, dtype and scores in one line."""
        name = f"AttentionMatrix{format_named_shape(self.shape, 'q_len', 'kv_len')} {self.dtype}"
        parts = [name, *self.problem.describe()]
        parts += [f"mask {self.mask}"] if self.mask is not None else []
        parts += ["sink"] if self.problem.sink is not None else []
        return ", ".join(parts)

    def _repr_html_(self) -> str:
        """Render for a notebook: all weights of a small matrix, a bounded sample of a large one."""
        from regard.render import notebook

        closing = ""
        if (heads := math.prod(self.shape[:-2])) > 1:
            first = f"A[{', '.join('0' * (self.ndim - 2))}]"
            closing = f"This is {first}, the first of {heads:,} heads."
        is_empty = 0 in self.shape
        sample = None if is_empty else _sample_weights(self)
        if sample is None and not is_empty:
            closing = "Its rows are too long to show here: A[row] reads one, A.coarsen(512) makes a picture."
        return notebook.render_matrix(self._describe(), sample, closing)

    # Private: parts

    def _require_all_keys(self, method: str) -> None:
        """Raise an error if the keys are not all in this process; a matrix of several ranks overrides it."""

    def _select(self, resolved: ResolvedIndex) -> AttentionMatrix:
        """Return the lazy matrix of some heads and rows; leading axes that the index drops are dropped."""
        *leading, rows = resolved.positions[:-1]
        kept = resolved.kept[:-2]
        spec, shape = self._spec, self._spec.leading_shape
        if all([len(chosen) == 1 for chosen in leading]):  # one head, without the numbers of all of them
            pairs = np.array(
                [np.ravel_multi_index([int(chosen[0]) for chosen in leading], shape) if shape else 0]
            )
        else:
            pairs = np.arange(math.prod(shape)).reshape(shape)[np.ix_(*leading)].ravel()
        has_heads = bool(leading) and kept[-1]
        all_heads = has_heads and np.array_equal(leading[-1], np.arange(shape[-1]))
        # Some heads of a grouped matrix: the heads of a value could be key heads or query heads, so 0 allows neither.
        groups = spec.groups if all_heads or spec.groups == 1 else int(not has_heads)
        part_shape = tuple(len(chosen) for chosen, keep in zip(leading, kept, strict=True) if keep)
        part = replace(spec, query=None, leading_shape=part_shape, groups=groups, q_len=len(rows))
        return self._take_part(part, pairs, rows)

    def _take_part(self, spec: Spec, pairs: IntArray, rows: IntArray) -> AttentionMatrix:
        """Return the lazy matrix of some pairs and rows, with the statistics that are known."""
        source = PartSource(self, pairs, rows)
        stats = self._get_stats()
        if stats is not None:
            stats = None if self.problem.has_large_scores else stats.select((pairs[:, None], rows))
        part = AttentionMatrix(spec, None, stats, source)
        part._changes = self._changes
        return part

    def _view(self, resolved: ResolvedIndex) -> AttentionMatrix:
        """Return `_select(resolved)` with its leading axes in the order that the array library gives them."""
        part, spec = self._select(resolved), self._spec
        *leading, _ = resolved.positions[:-1]
        if not any(isinstance(entry, np.ndarray) for entry in resolved.leading_local):
            return part
        # NumPy moves the axis of an array to the front if the index separates it from an integer.
        numbers = np.arange(len(part.problem.pair_ids)).reshape([len(chosen) for chosen in leading])
        moved = spec.engine.to_numpy(spec.engine.xp.asarray(numbers)[resolved.leading_local])
        if np.array_equal(moved.ravel(), numbers.ravel()):
            return part
        moved_spec = replace(part._spec, leading_shape=moved.shape, groups=int(spec.groups == 1))
        return part._take_part(moved_spec, moved.ravel(), np.arange(part.shape[-2]))

    def _entries(self, resolved: ResolvedIndex, operation: str, *, weights: bool) -> Array:
        """Compute the weights or scores at an index."""
        return self._compute_block(resolved, operation, weights=weights)[resolved.local]

    def _compute_block(self, resolved: ResolvedIndex, operation: str, *, weights: bool) -> Array:
        """Compute the weights or scores at the positions of an index, an axis for each axis of the matrix."""
        positions = resolved.positions
        block_shape = tuple(len(chosen) for chosen in positions)
        check_result_size(
            math.prod(block_shape) * int(self.dtype.itemsize),
            operation,
            f"an index with a result of shape {block_shape}",
            "Select fewer rows, or call A.lazy[index] for a lazy part of the matrix, A.coarsen(512) for a heat map, or "
            "A.to_dense() to store the whole matrix.",
        )
        if weights and (whole := compute_whole(self.problem)) is not None:
            return _take_positions(whole[1].reshape(self.shape), positions)
        part = self._select(resolved)
        problem, columns = part.problem, positions[-1]
        all_columns = len(columns) == self.shape[-1] and is_contiguous(columns)
        if weights and all_columns:
            # Whole rows are divided by their own sum: at scores of 1e4 a cached lse would cost three digits.
            block = _compute_dense(problem)
        elif weights and (
            problem.engine.requires_grad(problem)
            or self.problem.has_large_scores
            or not part._require_stats().is_small(problem.engine.xp)
        ):
            # One entry computed on its own is rounded differently from the sum of its row.
            (block,), _ = run_block_loop(problem, [SelectedWeights(columns)])
        elif (
            weights
            and (given := problem.take_given_weights(np.arange(len(positions[-2])), columns)) is not None
        ):
            block = given
        elif weights:
            block = self._entries_from_stats(part, columns)
        elif problem.engine.requires_grad(problem):
            # Masked keys, which may be NaN, must not reach the gradient.
            (block,), _ = run_block_loop(problem, [SelectedScores(columns)])
        else:
            block = compute_entries(problem, columns, None)
        return block.reshape(block_shape)

    def _entries_from_stats(self, part: AttentionMatrix, columns: IntArray) -> Array:
        """Compute weights at some columns from the statistics of their rows; weights next to 1, from their whole rows.

        A score computed on its own is rounded differently from its row's statistics. A row with one live key must
        still have a weight of exactly 1.
        """
        problem, xp = part.problem, part.problem.engine.xp
        block = compute_entries(problem, columns, part._require_stats())
        margin = 4 * LARGE_SCORE * float(xp.finfo(problem.dtype).eps)
        rows = np.flatnonzero(problem.engine.to_numpy(xp.any(xp.any(block > 1 - margin, axis=-1), axis=0)))
        if len(rows):
            (exact,), _ = run_block_loop(problem.select_rows(rows), [SelectedWeights(columns)])
            block[:, as_index(rows)] = exact
        return block

    def _restore_leading_axes(self, result: Any) -> Any:
        """Split the axis of pairs into the leading axes (…, heads)."""
        if isinstance(result, tuple):
            return type(result)(*map(self._restore_leading_axes, result))
        return result.reshape((*self._spec.leading_shape, *result.shape[1:]))

    # Private: products and measures

    def _product(self, array: Any, operation: str, *, transposed: bool) -> Array:
        """Compute A @ array, or A.mT @ array if `transposed`."""
        if isinstance(array, AttentionMatrix):
            array = array._convert_to_dense(operation)  # with its gradient
        elif isinstance(array, TransposedMatrix):
            array = array.mT._convert_to_dense(operation).swapaxes(-1, -2)
        problem = self.problem
        measure = Product.from_operand(array, self._spec, operation, transposed=transposed)
        fused = None if transposed else problem.product(measure.array, measure.pair_index)
        if fused is not None:
            product, lse, self._kernel_used = fused
            if lse is not None and lse.dtype == problem.dtype:  # a wider value makes it wider
                self._keep_lse(lse)
        else:
            if not transposed:
                self._kernel_used = problem.fallback_kernel
            (product,), self._stats = run_measures(problem, [measure], self._get_stats())
        return self._restore_product(problem.engine.cast(product, measure.array.dtype), measure)

    def _restore_product(self, result: Any, measure: Measure) -> Any:
        """Split the axis of pairs of a result; the product of a vector has no last axis."""
        restored = self._restore_leading_axes(result)
        return restored[..., 0] if isinstance(measure, Product) and measure.is_vector else restored

    def _split_outputs(self, chosen: dict[str, Measure]) -> tuple[dict[str, Product], dict[str, Measure]]:
        """Split measures into outputs, as products, and the rest."""
        products = {
            name: Product.from_operand(measure.value, self._spec, "Output(value)")
            for name, measure in chosen.items()
            if isinstance(measure, Output)
        }
        return products, {name: measure for name, measure in chosen.items() if name not in products}

    def _run_measures(self, chosen: dict[str, Measure]) -> dict[str, Any]:
        """Compute the results of measures by name, with their leading axes."""
        problem = self.problem
        products, shared = self._split_outputs(chosen)
        results: dict[str, Any] = {}
        if not products and (whole := measure_whole(problem, list(shared.values()))) is not None:
            return dict(zip(shared, map(self._restore_leading_axes, whole), strict=True))
        done = compute_measured_product(problem, products, shared)
        if done is not None:
            self._kernel_used = done.kernel
        else:
            if not need_own_product(problem, products.values()):  # they share a pass or a product
                products, shared = {}, chosen | products
            for name in products:
                output = chosen[name]
                assert isinstance(output, Output)
                results[name] = self @ output.value
            stats = self._get_stats()
            if problem.engine.requires_grad(problem):
                computed, _ = run_block_loop(problem, list(shared.values()), stats)
                return results | dict(zip(shared, map(self._restore_leading_axes, computed), strict=True))
            done = compute_measures(problem, shared, stats)
            if done.lse is not None:
                self._fused_lse = done.lse
            if any(isinstance(measure, Product) for measure in shared.values()):
                self._kernel_used = done.kernel or problem.fallback_kernel
        self._stats = done.stats
        for name, result in done.results.items():
            results[name] = self._restore_product(result, products.get(name) or shared[name])
        return results

    def _differentiable_lse(self) -> Array:
        """Compute the lse of each row with its gradient, (pairs, rows): first over the keys, then with the sink."""
        problem, xp = self.problem, self.problem.engine.xp
        (lse,), _ = run_block_loop(replace(problem, sink=None), [LogSumExp()])
        if problem.sink is None:
            return lse
        sink = problem.engine.cast(problem.frame.per_head(problem.sink, "sink"), lse.dtype)[:, None]
        is_empty = (lse == -xp.inf) & (sink == -xp.inf)  # logaddexp has no gradient there
        return xp.where(is_empty, -xp.inf, xp.logaddexp(xp.where(is_empty, 0.0, lse), sink))

    def _require_stats(self) -> SoftmaxStats:
        """Return the softmax statistics of each row, computing them if they are not cached."""
        stats = self._get_stats()
        compiled = bool(self.problem.engine.name_compiled_pass(self.problem))
        if stats is None or not stats.fits(compiled=compiled):
            # The compiled pass rounds scores differently from a product; the lse must not depend on earlier calls.
            self._stats = None
            self._run_measures({})
        assert self._stats is not None
        return self._stats

    def _get_stats(self) -> SoftmaxStats | None:
        """Return the cached softmax statistics, or those that a fused kernel's lse gives; None if there are none."""
        problem = self.problem
        if self._stats is None and (given := problem.given_lse) is not None:
            self._stats = SoftmaxStats(given, None)
        if self._stats is None and self._fused_lse is not None and not self.problem.has_large_scores:
            with problem.engine.no_grad():
                stats = SoftmaxStats(self._fused_lse.reshape(problem.shape[:2]), None)
                if not problem.score_mods or stats.is_small(problem.engine.xp):
                    self._stats = stats
        return self._stats


# Views that compute nothing by themselves


class ScoresView(Generic[ArrayT]):
    """The scores of a matrix, indexed like the matrix."""

    def __init__(self, matrix: AttentionMatrix[ArrayT]) -> None:
        self._matrix = matrix

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, (…, heads, q_len, kv_len)."""
        return self._matrix.shape

    def __getitem__(self, index: Any) -> ArrayT:
        """Compute the scores at an index; see `AttentionMatrix.__getitem__`."""
        resolved = resolve_index(index, self.shape, "A.scores[index]")
        return self._matrix._entries(resolved, "A.scores[index]", weights=False)

    def __repr__(self) -> str:
        return f"<scores of {repr(self._matrix).splitlines()[0]}>"


class LazyIndexer(Generic[ArrayT]):
    """An indexer that returns some heads and rows of a matrix as a lazy matrix.

    Integers drop a leading axis. Rows always remain an axis, even a single one.
    """

    def __init__(self, matrix: AttentionMatrix[ArrayT]) -> None:
        self._matrix = matrix

    def __getitem__(self, index: Any) -> AttentionMatrix[ArrayT]:
        """Return the lazy matrix of some heads and rows."""
        shape = self._matrix.shape
        resolved = resolve_index(index, shape, "A.lazy[index]")
        columns = resolved.positions[-1]
        if resolved.adds_axes or len(columns) != shape[-1] or (np.diff(columns) != 1).any():
            raise ArgumentError(
                "A.lazy[index]",
                received=f"{index!r}",
                expected="an index of heads and rows that keeps all columns",
                hint="A row's weights depend on all its keys. To select columns, use A[index].",
            )
        return self._matrix._view(resolved)


class TransposedMatrix(LazyOperand, Generic[ArrayT]):
    """The transpose of a matrix; its products sum over the queries."""

    def __init__(self, matrix: AttentionMatrix[ArrayT]) -> None:
        self.mT = matrix

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, (…, heads, kv_len, q_len)."""
        *leading, q_len, kv_len = self.mT.shape
        return (*leading, kv_len, q_len)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.mT.ndim

    @property
    def dtype(self) -> Any:
        """The dtype of the weights."""
        return self.mT.dtype

    @property
    def T(self) -> AttentionMatrix[ArrayT]:  # noqa: N802 - NumPy's name for it
        """The matrix itself, if it has one head."""
        self.mT.T  # noqa: B018 - raises if it has several
        return self.mT

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Convert to a NumPy array of at most 256 MiB."""
        return self.mT.__array__(dtype, copy).swapaxes(-1, -2)

    def __matmul__(self, x: Array) -> ArrayT:
        """Multiply by x of shape (…, heads, q_len, width) or (q_len,): (…, heads, kv_len, width) or (…, kv_len)."""
        return self.mT._product(x, "A.mT @ x", transposed=True)

    def __rmatmul__(self, x: Array) -> ArrayT:
        """Multiply (…, heads, width, kv_len) or (kv_len,) by the transpose."""
        x = self.mT.problem.engine.as_float(x, "x @ A.mT", "x")
        return self.mT @ x if x.ndim == 1 else (self.mT @ x.swapaxes(-1, -2)).swapaxes(-1, -2)

    def __getitem__(self, index: Any) -> Any:
        """Return weights, equal to `A.mT.to_dense()[index]`; see `AttentionMatrix.__getitem__`."""
        resolved = resolve_index(index, self.shape, "A.mT[index]")
        if resolved.keeps_tokens:
            return self.mT[index].mT
        *leading, keys, queries = resolved.positions
        swapped = resolved._replace(positions=[*leading, queries, keys])
        return self.mT._compute_block(swapped, "A.mT[index]", weights=True).swapaxes(-1, -2)[resolved.local]

    def to_dense(self) -> ArrayT:
        """Compute and store the whole transpose: (…, heads, kv_len, q_len)."""
        return self.mT.to_dense().swapaxes(-1, -2)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<transpose of {repr(self.mT).splitlines()[0]}>"


@lru_cache(maxsize=256)
def _make_result_class(names: tuple[str, ...]) -> Any:
    """Return the class of the results of measures; making one takes longer than measuring a small matrix."""
    return namedtuple("Measures", names)


def _compute_dense(problem: Problem) -> Array:
    """Compute every weight: (pairs, rows, kv_len)."""
    whole = compute_whole(problem)
    if whole is not None:
        return whole[1]
    (weights,), _ = run_block_loop(problem, [DenseWeights()])
    return weights


def _take_positions(array: Array, positions: Sequence[IntArray]) -> Array:
    """Take some positions along each axis."""
    taken = [as_index(chosen) for chosen in positions]
    array = array[tuple(index if isinstance(index, slice) else slice(None) for index in taken)]
    for axis, index in enumerate(taken):
        if not isinstance(index, slice):
            array = array[(*[slice(None)] * axis, index)]
    return array


def _sample_weights(matrix: AttentionMatrix) -> WeightSample | None:
    """Sample the first head of a non-empty matrix.

    A small matrix is shown whole. Of a large one some rows are computed, each summed over runs of keys.
    """
    from regard.render.notebook import WeightSample

    q_len, kv_len = matrix.shape[-2:]
    head_dim = max(1, matrix.problem.query.shape[-1])
    small = max(q_len, kv_len) <= SMALL
    max_rows = q_len if small else min(SIDE, q_len, ENTRIES // kv_len, MULTIPLY_ADDS // (kv_len * head_dim))
    if not max_rows:
        return None
    rows = np.linspace(0, q_len - 1, max_rows).round().astype(int)
    engine = matrix.problem.engine
    with engine.no_grad():
        part = matrix.lazy[(*[0] * (matrix.ndim - 2), rows)]
        weights, scores = (engine.to_numpy(x) for x in (part.to_dense(), part.scores[...]))
    columns = kv_len if small else min(SIDE, kv_len)
    starts = np.arange(columns) * kv_len // columns
    caption = "All weights, queries down and keys across."
    if not small:
        sampled = "Every row" if max_rows == q_len else f"{max_rows} of {q_len:,} rows, the others not read"
        caption = (
            f"{sampled}. Each number is the share of its row's weight on the keys from its column's up to the next "
            "column's."
        )
    masked = np.logical_and.reduceat(scores == -np.inf, starts, axis=-1)
    caption += " – marks masked keys." if masked.any() else ""
    numbers = np.add.reduceat(weights.astype(np.float64), starts, axis=-1)
    return WeightSample(part.problem.positions.tolist(), starts.tolist(), numbers, masked, caption)
