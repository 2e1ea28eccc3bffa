"""What people try on a lazy matrix because it looks like an array: it works, or the error names the call to make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from regard.errors import ArgumentTypeError, describe_argument


class LazyOperand:
    """Base class of the matrix and its transpose, which define `@`: all other array operations are refused."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Compute `np.matmul`; for another function of NumPy, raise an error with the call to make."""
        if ufunc is np.matmul and method == "__call__" and not options:
            return _multiply(*inputs)
        self._refuse_function(f"numpy.{ufunc.__name__}", "an array", ufunc.__name__)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute `torch.matmul`; for another function of torch, raise an error with the call to make."""
        name = getattr(function, "__name__", str(function))
        operands = (*args, *(kwargs or {}).values())
        if name in ("matmul", "__matmul__", "mm", "bmm", "mv") and len(operands) == 2:
            return _multiply(*operands)
        if name == "__rmatmul__" and len(operands) == 2:
            return _multiply(*reversed(operands))
        cls._refuse_function(f"torch.{name}", "a tensor", name)

    @classmethod
    def _refuse_function(cls, operation: str, expected: str, name: str) -> NoReturn:
        hint = "Use A @ value for a product, or pass A.to_dense(), which stores all weights."
        if hasattr(cls, name):
            hint = f"The matrix is lazy: use A.{name}(…)."
        raise ArgumentTypeError(operation, received="an attention matrix", expected=expected, hint=hint)

    def __bool__(self) -> bool:
        _refuse(
            "bool(A)",
            "an attention matrix",
            "Compare a number, as in A.max() > 0.5, or test `A is not None`.",
        )

    def __eq__(self, other: object) -> bool:
        return self is other or _refuse_operator("A == other", other)

    def __ne__(self, other: object) -> bool:
        return self is not other and _refuse_operator("A != other", other)

    __hash__ = object.__hash__

    def __contains__(self, item: object) -> bool:
        _refuse("item in A", describe_argument(item), "To search all weights, write item in A.to_dense().")


def _multiply(left: Any, right: Any) -> Any:
    """Multiply two operands, one of which is lazy."""
    return left @ right if isinstance(left, LazyOperand) else right.__rmatmul__(left)


def _refuse(operation: str, received: str, hint: str) -> NoReturn:
    """Raise an error for an operation that a lazy matrix does not have."""
    raise ArgumentTypeError(
        operation, received=received, expected="an operation that a lazy matrix supports", hint=hint
    )


def _refuse_operator(operation: str, other: object) -> NoReturn:
    """Raise an error for an operator that works on every weight."""
    dense = operation.replace("A", "A.to_dense()")
    _refuse(operation, describe_argument(other), f"{dense} compares or combines every weight.")


def _make_refusal(operation: str) -> Callable[..., NoReturn]:
    """Return a method that refuses an operator."""
    return lambda self, other=None: _refuse_operator(operation, self if other is None else other)


_ARITHMETIC = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "and": "&", "or": "|",
}  # fmt: skip
for _name, _sign in _ARITHMETIC.items():
    setattr(LazyOperand, f"__{_name}__", _make_refusal(f"A {_sign} other"))
    setattr(LazyOperand, f"__r{_name}__", _make_refusal(f"other {_sign} A"))
for _name, _sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    setattr(LazyOperand, f"__{_name}__", _make_refusal(f"A {_sign} other"))
for _name, _operation in {"neg": "-A", "abs": "abs(A)", "invert": "~A", "float": "float(A)"}.items():
    setattr(LazyOperand, f"__{_name}__", _make_refusal(_operation))
