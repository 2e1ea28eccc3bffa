"""The attention matrix, kept lazy: the public object.

What is asked of it is checked here once; what is below gets canonical arguments and does not check again.
"""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from regard.core._looking import Looking
from regard.core._reductions import Reductions
from regard.core.block_loop import SoftmaxStats, compute_entries, run_block_loop
from regard.core.broadcasting import broadcast_index, num_pairs
from regard.core.indexing import resolve_index
from regard.core.planner import Plan, execute, make_plan, upcast
from regard.core.problem import Problem, Spec
from regard.core.products import DenseWeights, LogSumExp, Product
from regard.core.views import Lazy, Scores, Transposed
from regard.errors import (
    ArgumentError,
    ArgumentTypeError,
    TooLargeError,
    describe_argument,
    format_named_shape,
)
from regard.masks import Mask
from regard.measures import Measure, Output, name_of
from regard.types import Array, IntArray

__all__ = ["AttentionMatrix"]

# np.asarray(A) stores the whole matrix without having been asked in so many words; more than this it refuses.
CONVERSION_LIMIT = 1 << 28


class AttentionMatrix(Reductions, Looking):
    """The attention matrix: it can be multiplied, sliced, measured and explained.

    `regard.attention` and `regard.linear_attention` make it. Nothing of size q_len × kv_len is stored, except by
    `to_dense()`. Weights, lse and measures come in float32 at least; `A @ value` comes in the dtype of the value.

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

    # NumPy hands `array @ A` over to this class, and refuses ufuncs instead of storing the matrix.
    __array_ufunc__ = None

    def __init__(self, spec: Spec, problem: Problem | None = None, rows: SoftmaxStats | None = None) -> None:
        self._spec, self._rows, self._ran, self._fused_lse = spec, rows, "", None
        if problem is not None:  # a part: its problem is that of the whole, cut down
            self._problem = problem

    @cached_property
    def _problem(self) -> Problem:
        """The matrix in canonical form, settled when first needed: a plain product does without."""
        return self._spec.to_problem()

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, q_len, kv_len)"""
        return self._spec.shape

    @property
    def ndim(self) -> int:
        """How many axes there are."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of weights, lse and scores: float32 at least."""
        return self._problem.dtype

    @property
    def nbytes(self) -> int:
        """The bytes that `to_dense()` would store."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def mask(self) -> Mask | None:
        """Which keys each query may see."""
        return self._spec.mask

    @property
    def scale(self) -> float:
        """What the products of query and key are multiplied by."""
        return self._spec.scale

    @property
    def kernel(self) -> str:
        """What ran for `A @ value`, or will run.

        >>> import regard
        >>> regard.attention([[1.0]], [[1.0]]).kernel
        'numpy: streaming tiles'
        """
        return self._ran or self._problem.kernel

    # Entries

    def __getitem__(self, index: Any) -> Array:
        """Weights, equal to `to_dense()[index]`: integers, slices, an ellipsis and at most one integer array."""
        return self._entries(index, "A[index]", weights=True)

    @property
    def scores(self) -> Scores[AttentionMatrix]:
        """The scores before the softmax, to be indexed like the matrix; hidden ones are −inf.

        >>> import regard
        >>> regard.attention([[1.0]], [[2.0], [3.0]], scale=1.0).scores[0]
        array([2., 3.])
        """
        return Scores(self)

    @property
    def lazy(self) -> Lazy[AttentionMatrix]:
        """The matrix of some heads or rows, still lazy: `A.lazy[0, 3]` one head, `A.lazy[..., rows, :]` some rows.

        >>> import numpy as np
        >>> import regard
        >>> regard.attention(np.ones((2, 8, 5, 4)), np.ones((2, 8, 5, 4))).lazy[0, 3, 1:3].shape
        (2, 5)
        """
        return Lazy(self)

    def to_dense(self) -> Array:
        """The whole matrix, stored: `nbytes` of memory."""
        return self[...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ArgumentError(
                "numpy.asarray(A)",
                received="copy=False",
                expected="a conversion that may compute",
                hint="The matrix is lazy; its numbers are made when they are asked for.",
            )
        if self.nbytes > CONVERSION_LIMIT:
            raise TooLargeError(
                "numpy.asarray(A)",
                received=f"a matrix of shape {self.shape} that would take {self.nbytes:,} bytes",
                expected=f"at most {CONVERSION_LIMIT:,} bytes",
                hint="Call A.to_dense() if that is what you want, "
                "A[rows] for some rows, or A.coarsen(512) for a picture.",
            )
        return np.asarray(self._problem.engine.to_numpy(self.to_dense()), dtype=dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def _entries(self, index: Any, operation: str, *, weights: bool) -> Array:
        positions, local, kept = resolve_index(index, self.shape, operation)
        part = self._part(positions[:-1], kept[:-1])
        whole = np.array_equal(positions[-1], np.arange(self.shape[-1]))
        if weights and (whole or self._problem.engine.requires_grad(self._problem)):
            # Whole rows are divided by their own sum: at scores of 1e4 a kept lse would cost three digits.
            (block,), _ = run_block_loop(part._problem, [DenseWeights()])
            block = block if whole else block[..., positions[-1]]
        else:
            block = compute_entries(part._problem, positions[-1], part._known() if weights else None)
        return block.reshape([len(chosen) for chosen in positions])[local]

    def _weights_from_lse(self, rows: IntArray, lse: Any) -> Array:
        """Compute whole rows as exp(score − lse) for a given lse (pairs, rows): (pairs, rows, kv_len)."""
        problem = self._problem.select_rows(rows)
        stats = SoftmaxStats(problem.engine.xp.asarray(lse, dtype=problem.dtype), None)
        return compute_entries(problem, np.arange(self.shape[-1]), stats)

    def _part(self, positions: list[IntArray], kept: list[bool]) -> AttentionMatrix:
        """The matrix of some entries of each leading axis and some rows; leading axes that are not kept are dropped."""
        *leads, rows = positions
        pairs = (
            np.arange(len(self._problem.pair_ids)).reshape(self._spec.leading_shape)[np.ix_(*leads)].ravel()
        )
        problem = replace(self._problem.select_pairs(pairs).select_rows(rows), pair_ids=np.arange(len(pairs)))
        known = self._if_known()
        if known is not None and not self._rough:
            known = known.select((pairs[:, None], rows))
        else:
            known = None
        lead = tuple(len(chosen) for chosen, keep in zip(leads, kept, strict=False) if keep)
        all_heads = (
            bool(leads) and kept[-2] and np.array_equal(leads[-1], np.arange(self._spec.leading_shape[-1]))
        )
        # Some heads of a grouped matrix: a value with heads could mean either kind, so none is taken (0).
        groups = self._spec.groups if all_heads or self._spec.groups == 1 else int(not (leads and kept[-2]))
        spec = replace(self._spec, query=None, leading_shape=lead, groups=groups, q_len=len(rows))
        return AttentionMatrix(spec, problem, known)

    # Products

    def __matmul__(self, value: Any) -> Array:
        """The output, (…, heads, q_len, value_dim), for a value (…, kv_heads, kv_len, value_dim) or (kv_len,)."""
        spec = self._spec
        if spec.query is not None and spec.sink is None and not spec.score_mods:
            plain = spec.engine.try_fast_product(spec.query, spec.key, value, spec.mask, spec.scale)
            if plain is not None:
                return self._keep(*plain)
        return self._product(value, "A @ value", transposed=False)

    def _keep(self, output: Array, lse: Array, ran: str) -> Array:
        """The output of a fused kernel; its lse and name are kept."""
        self._ran = ran
        if self._rows is None and lse.dtype == self._spec.key.dtype:
            # At half precision the kernel's lse is no better than that, and the loop finds a better one.
            self._fused_lse = lse
        return output

    def __rmatmul__(self, x: Any) -> Array:
        x = self._problem.engine.as_float(x, "x @ A", "x")
        return self.mT @ x if x.ndim == 1 else (self.mT @ x.swapaxes(-1, -2)).swapaxes(-1, -2)

    @property
    def mT(self) -> Transposed[AttentionMatrix]:  # noqa: N802 - NumPy's name for it
        """The transpose, for `A.mT @ x`.

        >>> import regard
        >>> (regard.attention([[0.0], [0.0]], [[1.0], [1.0]]).mT @ [2.0, 4.0])
        array([3., 3.])
        """
        return Transposed(self)

    def _canonical(self, array: Any, operation: str, *, transposed: bool) -> tuple[Array, IntArray, bool]:
        """An array as (own pairs, length, width), which of its pairs serves each pair, and whether it is a vector."""
        name = "x" if transposed else "value"
        array = self._problem.engine.as_float(array, operation, name)
        as_vector = array.ndim == 1
        if as_vector:
            array = array[:, None]
        length = self.shape[-2 if transposed else -1]
        axis = "q_len" if transposed else "kv_len"
        if array.ndim < 2 or array.shape[-2] != length:
            raise ArgumentError(
                operation,
                received=f"{name} of shape {array.shape[:-1] if as_vector else array.shape}",
                expected=f"(…, {axis} {length}, width) for a matrix of {format_named_shape(self.shape, 'q_len', 'kv_len')}",
                hint=f"The axis before the last counts the {'queries' if transposed else 'keys'}.",
            )
        if not transposed and self._spec.groups == 0 and array.ndim > 2 and array.shape[-3] > 1:
            raise ArgumentError(
                operation,
                received=f"value of shape {tuple(array.shape)} for some heads of a matrix with grouped heads",
                expected="a value without heads, or the product of the whole matrix",
                hint="Take (A @ value)[:, heads], or one head at a time: A.lazy[0, 3] @ value[0, 1].",
            )
        of = broadcast_index(
            array, self._spec.leading_shape, 1 if transposed else self._spec.groups or 1, operation, name
        )
        return array.reshape((num_pairs(array), *array.shape[-2:])), of, as_vector

    def _product(self, array: Any, operation: str, *, transposed: bool) -> Array:
        engine, problem = self._problem.engine, self._problem
        array, of, as_vector = self._canonical(array, operation, transposed=transposed)
        fused = None if transposed else problem.product(array, of)
        if fused is not None:
            product = self._lead_first(self._keep(*fused))
            product = engine.cast(product, array.dtype)
            return product[..., 0] if as_vector else product
        if not transposed:
            self._ran = problem.fallback_kernel
        finite = bool(engine.xp.all(engine.xp.isfinite(array)))
        dtype = engine.working_dtype(problem.query, problem.key, array)
        measure = Product(array, of, transposed, finite, dtype)
        (product,), self._rows = run_block_loop(problem, [measure], self._if_known())
        product = engine.cast(self._lead_first(product), array.dtype)
        return product[..., 0] if as_vector else product

    # Measures

    @property
    def lse(self) -> Array:
        """The natural-log logsumexp of each row's scores, the sink's included: (…, heads, q_len).

        −inf for a row that sees nothing. Any weight is exp(score − lse).
        """
        engine = self._problem.engine
        if engine.requires_grad(self._problem):
            return engine.cast(self.measure(lse=LogSumExp()).lse, self._problem.dtype)
        if self._fused_lse is not None:
            return self._fused_lse.reshape(self.shape[:-1])
        with engine.suppress_warnings():
            return self._lead_first(engine.cast(self._known().lse(engine.xp), self._problem.dtype))

    def measure(self, *measures: Measure, **named: Measure) -> Any:
        """The results of several measures from one pass: a named tuple.

        >>> from regard import Entropy, TopK, attention
        >>> A = attention([[0.0]], [[1.0], [2.0]])
        >>> A.measure(Entropy(), top=TopK(1)).top.indices
        array([[0]])
        """
        for each in (*measures, *named.values()):
            parts = all(hasattr(each, part) for part in ("init", "step", "merge", "finish"))
            if not parts or isinstance(each, type):
                raise ArgumentTypeError(
                    "measure",
                    received=describe_argument(each),
                    expected="measures such as Entropy() or TopK(8)",
                    hint="A measure of your own subclasses regard.measures.Measure: init and step, about ten lines.",
                )
        names = [*map(name_of, measures), *named]
        if len(set(names)) != len(names):
            raise ArgumentError(
                "measure",
                received=f"results named {', '.join(names)}",
                expected="a name for each result",
                hint="Name one by a keyword: A.measure(Mass(first(1)), near=Mass(sliding_window(64))).",
            )
        results = self._measured(dict(zip(names, (*measures, *named.values()), strict=True)))
        return namedtuple("Measures", names)(*(results[name] for name in names))

    def plan(self, *measures: Measure, **named: Measure) -> str:
        """How `measure` would make these, in a line or two: by a fused call, by a pass over the tiles, or by both.

        >>> from regard import Entropy, Received, attention
        >>> print(attention([[0.0]], [[1.0], [2.0]]).plan(Entropy(), Received()))
        one pass over tiles of 512 × 512, each band read twice, for its lse and its weights: entropy, received
        """
        names = [*map(name_of, measures), *named]
        chosen = dict(zip(names, (*measures, *named.values()), strict=True))
        known = self._if_known() is not None
        apart, together = self._apart(chosen)
        lines = [f"one product ({self._problem.kernel}): {name}" for name in apart]
        return "\n".join([*lines, self._plan(together, known).text(self._problem, known)])

    def _apart(self, chosen: dict[str, Measure]) -> tuple[dict[str, Output], dict[str, Measure]]:
        """Outputs that are products of their own, since they have a gradient or are at half precision; the rest."""
        engine, problem = self._problem.engine, self._problem
        outputs = {name: each for name, each in chosen.items() if isinstance(each, Output)}
        learning = engine.requires_grad(problem, *(each.value for each in outputs.values()))
        if not learning and engine.working_dtype(problem.query) == problem.query.dtype:
            outputs = {}
        return outputs, {name: each for name, each in chosen.items() if name not in outputs}

    def _plan(self, chosen: dict[str, Measure], known: bool) -> Plan:
        fused = self._problem.can_fuse and not self._rough
        return make_plan(upcast(self._problem), chosen, known, fused)

    def _measured(self, chosen: dict[str, Measure]) -> dict[str, Any]:
        """The results of measures by name, with their leading axes."""
        engine, problem = self._problem.engine, self._problem
        apart, chosen = self._apart(chosen)
        results = {name: self @ each.value for name, each in apart.items()}
        if engine.requires_grad(problem):
            found, _ = run_block_loop(problem, list(chosen.values()), self._if_known())
            return results | dict(zip(chosen, map(self._lead_first, found), strict=True))
        known = self._if_known()
        plan = self._plan(chosen, known is not None)
        made = execute(plan, upcast(problem), known, self._canonical_value) if plan.calls else None
        if made is None:
            made = execute(Plan(False, {}, chosen), problem, known, self._canonical_value)
            assert made is not None
        if made.lse is not None:
            self._fused_lse = made.lse
        if any(isinstance(each, Output) for each in chosen.values()):
            self._ran = made.ran or problem.fallback_kernel
        self._rows = made.rows
        results |= {name: self._lead_first(each) for name, each in made.results.items()}
        outputs = {name: each for name, each in chosen.items() if isinstance(each, Output)}
        return results | {
            name: results[name][..., 0] for name in outputs if np.ndim(outputs[name].value) == 1
        }

    def _canonical_value(self, value: Any) -> tuple[Array, IntArray]:
        return self._canonical(value, "Output(value)", transposed=False)[:2]

    # Within

    def _known(self) -> SoftmaxStats:
        """What turns scores into weights, worked out where it is not known yet."""
        if self._if_known() is None:
            self._measured({})
        assert self._rows is not None
        return self._rows

    def _if_known(self) -> SoftmaxStats | None:
        if self._rows is None and self._fused_lse is not None and not self._rough:
            with self._problem.engine.no_grad():
                self._rows = SoftmaxStats(self._fused_lse.reshape(self._problem.shape[:2]), None)
        return self._rows

    @cached_property
    def _rough(self) -> bool:
        return self._problem.needs_exact_rows

    def _lead_first(self, result: Any) -> Any:
        """The axis of pairs as (…, heads) again."""
        if isinstance(result, tuple):
            return type(result)(*map(self._lead_first, result))
        return result.reshape((*self._spec.leading_shape, *result.shape[1:]))
