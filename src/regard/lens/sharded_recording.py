"""The recording of a model whose ranks hold parts of the sequence: one matrix for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from regard.capture.call import Call
from regard.errors import ArgumentError, NotCapturedError
from regard.lens.recording import Recording
from regard.render import notebook

if TYPE_CHECKING:
    from regard.distributed.matrix import DistributedMatrix


class ShardedRecording(Recording):
    """The matrices of a model's layers by module name, each over the tokens of all ranks of a process group.

    `regard.watch(model, group=…)` returns it. All ranks must watch, and must call the methods of the matrices in the
    same order; see `regard.distributed.DistributedMatrix`.

    Args:
        group: Process group whose ranks hold parts of the sequence.
        layout: Which part each rank holds, as in `regard.distributed.attention`.
    """

    def __init__(self, group: Any, layout: str) -> None:
        super().__init__()
        self._group, self._layout = group, layout
        self._matrices: dict[str, list[DistributedMatrix]] = {}

    def _add(self, call: Call) -> None:
        from regard.distributed.constructor import join_rows

        if call.weights is not None:
            raise ArgumentError(
                "watch",
                received=f"group=…, and {call.name!r}, which computes its own softmax",
                expected="layers that call an attention function",
                hint="Omit group: each rank then records its own rows.",
            )
        matrix = join_rows(call.matrix._spec, self._group, self._layout)
        self._add_matrix(call.name, matrix)

    def _add_matrix(self, name: str, matrix: DistributedMatrix) -> None:
        """Add the matrix of a call."""
        with self._lock:
            self._matrices.setdefault(name, []).append(matrix)

    def __getitem__(self, name: str) -> DistributedMatrix:
        """Return the matrix of a layer over the tokens of all ranks.

        Raises:
            NotCapturedError: If no layer of this name was captured.
            ArgumentError: If the layer was called several times.
        """
        matrices = self.matrices(name)
        if len(matrices) > 1:
            raise ArgumentError(
                f"recording[{name!r}]",
                received=f"a layer with {len(matrices)} calls",
                expected="a layer with one call",
                hint=f"Choose one: recording.matrices({name!r})[0].",
            )
        return matrices[0]

    def matrices(self, name: str) -> list[DistributedMatrix]:
        """Return the matrix of each call of a layer, in the order of the calls.

        Args:
            name: Name of the layer.

        Raises:
            NotCapturedError: If no layer of this name was captured.
        """
        if name not in self._matrices:
            raise NotCapturedError(
                f"recording[{name!r}]",
                received="a name that no attention layer has",
                expected=f"one of {', '.join(map(repr, self._matrices))}"
                if self._matrices
                else "a recording that is not empty",
                hint="Use a name from model.named_modules().",
            )
        return list(self._matrices[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._matrices)

    def __len__(self) -> int:
        return len(self._matrices)

    def __contains__(self, name: object) -> bool:
        return name in self._matrices

    @property
    def nbytes(self) -> int:
        """Bytes of the queries and keys that this rank holds."""
        specs = [matrix._spec for matrices in self._matrices.values() for matrix in matrices]
        return sum(int(spec.query.nbytes + spec.key.nbytes) for spec in specs)

    def _repr_html_(self) -> str:
        rows = [
            [str(number), name, ", ".join(str(matrix.shape) for matrix in matrices)]
            for number, (name, matrices) in enumerate(self._matrices.items())
        ]
        return notebook.render_table(repr(self), ["layer", "module", "shape"], rows, [False, True, True], "")

    def __repr__(self) -> str:
        return f"<recording of {len(self)} layers over the ranks of a group, {self._layout}>"

    def calls(self, name: str) -> NoReturn:
        """Raise an `ArgumentError`: analyses of a recording need the keys of all ranks in one process.

        Args:
            name: Name of a layer.
        """
        raise ArgumentError(
            "recording",
            received="a recording over the ranks of a group",
            expected="a recording of one process",
            hint="Measure the matrix of a layer on all ranks, recording[name].measure(…), or watch one process.",
        )
