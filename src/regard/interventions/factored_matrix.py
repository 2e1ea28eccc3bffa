"""`FactoredMatrix`: a matrix of low rank as the product of two, which is not multiplied out."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument

Tensor = Any  # the types of torch are not followed


class FactoredMatrix:
    """The product A @ B of two matrices with a small inner axis, such as the QK circuit of a head.

    Products with matrices stay factored, on both sides; products with a vector are vectors. Norm, singular values and
    eigenvalues are computed from matrices of size rank × rank, so the work for a matrix of vocabulary × vocabulary
    grows with the vocabulary and not with its square.

    Args:
        A: Left factor, (…, rows, rank).
        B: Right factor, (…, rank, columns). Leading axes are broadcast.

    Raises:
        ArgumentTypeError: If a factor is not a floating-point tensor with two or more axes.
        ArgumentError: If the shapes do not fit.

    >>> import torch
    >>> from regard.interventions import FactoredMatrix
    >>> matrix = FactoredMatrix(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0]]))
    >>> matrix
    FactoredMatrix(2 × 2, rank 1)
    >>> matrix.to_dense()
    tensor([[3., 4.],
            [6., 8.]])
    >>> matrix.norm(), matrix.eigenvalues(), matrix[1, :]
    (tensor(11.1803), tensor([11.+0.j]), tensor([6., 8.]))
    >>> torch.tensor([1.0, 1.0]) @ matrix, matrix @ matrix
    (tensor([ 9., 12.]), FactoredMatrix(2 × 2, rank 1))
    """

    def __init__(self, A: Tensor, B: Tensor) -> None:
        for name, factor in (("A", A), ("B", B)):
            if not isinstance(factor, torch.Tensor) or not factor.is_floating_point() or factor.ndim < 2:
                raise ArgumentTypeError(
                    "FactoredMatrix",
                    received=f"{name} as {describe_argument(factor)}",
                    expected="two floating-point tensors with two or more axes",
                    hint="Pass a vector x as the matrix x[None].",
                )
        try:
            lead = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        except RuntimeError:
            _refuse_shapes(A, B)
        if A.shape[-1] != B.shape[-2]:
            _refuse_shapes(A, B)
        self.A: Tensor = A.expand(*lead, *A.shape[-2:])
        self.B: Tensor = B.expand(*lead, *B.shape[-2:])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the product, (…, rows, columns)."""
        return (*self.A.shape[:-1], self.B.shape[-1])

    @property
    def ndim(self) -> int:
        """Number of axes of the product."""
        return int(self.A.ndim)

    @property
    def rank(self) -> int:
        """Size of the inner axis; the rank of the product is at most this."""
        return int(self.A.shape[-1])

    @property
    def T(self) -> FactoredMatrix:  # noqa: N802 - torch's name for it
        """The transpose of the last two axes."""
        return FactoredMatrix(self.B.mT, self.A.mT)

    def to_dense(self) -> Tensor:
        """Return the product as a tensor, (…, rows, columns)."""
        return self.A @ self.B

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, FactoredMatrix):
            if self.shape[-1] != other.shape[-2]:
                _refuse_shapes(self, other)
            inner = self.B @ other.A  # (…, rank, rank)
            if self.rank <= other.rank:
                return FactoredMatrix(self.A, inner @ other.B)
            return FactoredMatrix(self.A @ inner, other.B)
        if not isinstance(other, torch.Tensor) or not other.ndim:
            return NotImplemented
        if other.shape[max(other.ndim - 2, 0)] != self.shape[-1]:
            _refuse_shapes(self, other)
        if other.ndim == 1:
            return (self.A @ (self.B @ other)[..., None])[..., 0]
        return FactoredMatrix(self.A, self.B @ other)

    def __rmatmul__(self, other: Any) -> Any:
        if not isinstance(other, torch.Tensor) or not other.ndim:
            return NotImplemented
        if other.shape[-1] != self.shape[-2]:
            _refuse_shapes(other, self)
        if other.ndim == 1:
            return ((other @ self.A)[..., None, :] @ self.B)[..., 0, :]
        return FactoredMatrix(other @ self.A, self.B)

    def __getitem__(self, index: Any) -> Any:
        """Index the product; row and column are the last two axes.

        Leading axes, slices and lists of rows and columns give a factored matrix, and a list selects rows and columns
        independently of each other. A number as row or column gives a tensor.
        """
        entries = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in [entry for entry in entries if not isinstance(entry, torch.Tensor)]:
            position = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
            entries[position : position + 1] = [slice(None)] * (self.ndim - len(entries) + 1)
        entries += [slice(None)] * (self.ndim - len(entries))
        if len(entries) > self.ndim:
            raise ArgumentError(
                "FactoredMatrix",
                received=f"{len(entries)} indices",
                expected=f"at most {self.ndim}, one for each axis",
                hint="Rows and columns are the last two axes.",
            )
        *lead, rows, columns = entries
        A, B = self.A[tuple(lead)], self.B[tuple(lead)]
        if isinstance(rows, int) and isinstance(columns, int):
            return (A[..., rows, :] * B[..., columns]).sum(-1)
        if isinstance(rows, int):
            return (A[..., rows, None, :] @ B[..., columns])[..., 0, :]
        if isinstance(columns, int):
            return (A[..., rows, :] @ B[..., columns, None])[..., 0]
        return FactoredMatrix(A[..., rows, :], B[..., columns])

    def norm(self) -> Tensor:
        """Return the Frobenius norm of the product, (…)."""
        return torch.linalg.matrix_norm(_reduce(self.A) @ _reduce(self.B.mT).mT)

    def reduce_columns(self) -> Tensor:
        """Return a matrix with `rank` columns, (…, rows, rank), that has the norm and left singular vectors of this.

        Products from the left also have the same norms: ‖M @ self‖ = ‖M @ self.reduce_columns()‖.
        """
        return _raise_precision(self.A) @ _reduce(self.B.mT).mT

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues of a square product that may be other than 0, (…, rank), complex.

        They are the eigenvalues of B @ A. The product has further ones, all 0.

        Raises:
            ArgumentError: If the product is not square.
        """
        if self.shape[-1] != self.shape[-2]:
            raise ArgumentError(
                "FactoredMatrix.eigenvalues",
                received=f"a matrix of {self.shape[-2]} × {self.shape[-1]}",
                expected="a square matrix",
                hint="For other matrices, call svd().",
            )
        return torch.linalg.eigvals(_raise_precision(self.B @ self.A))

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the singular value decomposition U, S, Vh, with product = U @ diag(S) @ Vh.

        Returns:
            U (…, rows, rank), S (…, rank), largest first, and Vh (…, rank, columns). The rank is at most the number of
            rows or columns here.
        """
        rows, left = torch.linalg.qr(_raise_precision(self.A))
        columns, right = torch.linalg.qr(_raise_precision(self.B.mT))
        U, S, Vh = torch.linalg.svd(left @ right.mT, full_matrices=False)
        return rows @ U, S, Vh @ columns.mT

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.shape))
        return f"FactoredMatrix({shape}, rank {self.rank})"


def _raise_precision(x: Tensor) -> Tensor:
    """Return a tensor in float32 or float64: torch decomposes no narrower ones."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _reduce(x: Tensor) -> Tensor:
    """Return the triangular factor of a matrix, (…, rank, rank), which has its norm and its products with itself."""
    return torch.linalg.qr(_raise_precision(x), mode="r").R


def _refuse_shapes(left: Any, right: Any) -> NoReturn:
    raise ArgumentError(
        "FactoredMatrix",
        received=f"a product of {tuple(left.shape)} and {tuple(right.shape)}",
        expected="as many columns on the left as rows on the right, and leading axes that can be broadcast",
        hint="Vectors of tokens are rows, (n, d_model): x @ circuit.",
    )
