"""Compare what the modules of a model read and returned in two runs, to name the first module that differs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from regard.capture.module_trace import (
    ModuleEvent,
    ModuleTrace,
    Origin,
    find_token_axis,
    match_events,
    select_rows,
)
from regard.diagnosis.tensor_relation import limit_rounding, row_differences
from regard.engines.torch_precision import widen
from regard.findings import Finding

Tensor = Any  # the types of torch are not followed

# Modules of another order are looked for among this many before the last that matched.
MATCHED_BEFORE = 8
# Rows by which positions may be shifted.
MAX_SHIFT = 8


@dataclass(frozen=True)
class EventPair:
    """One call of a module in two runs.

    Args:
        a: The event of run A.
        b: The event of run B.
        position: Its number among the matched calls.
        input_size: Relative difference of the inputs; NaN if they cannot be compared.
        output_size: Relative difference of the outputs; NaN if they cannot be compared.
        limit: The largest difference that counts as rounding.
    """

    a: ModuleEvent
    b: ModuleEvent
    position: int
    input_size: float = math.nan
    output_size: float = math.nan
    limit: float = 0.0

    @property
    def reads_others(self) -> bool:
        """Whether the inputs differ by more than rounding."""
        return self.input_size > self.limit

    @property
    def returns_others(self) -> bool:
        """Whether the outputs differ by more than rounding."""
        return self.output_size > self.limit

    @property
    def reads_other_ids(self) -> bool:
        """Whether the module was passed no vectors, and other ids."""
        a, b = self.a.ids, self.b.ids
        has_vectors = self.a.input is not None or self.b.input is not None
        return not (has_vectors or a is None or b is None or a.shape != b.shape or torch.equal(a, b.to(a)))

    @property
    def name(self) -> str:
        """The name of the module, of both runs if they differ."""
        return self.a.name if self.a.name == self.b.name else f"{self.a.name} / {self.b.name}"

    @property
    def class_name(self) -> str:
        """The class of the module, of both runs if they differ."""
        a, b = self.a.class_name, self.b.class_name
        return a if a == b else f"{a} in A, {b} in B"


@dataclass(frozen=True)
class ModuleDifference:
    """Where the modules of two runs first differ.

    Args:
        pair: The first call that differs.
        before: The last call that agrees, and ended before; None if there is none.
        is_inside: The module reads the same and returns something else; otherwise the difference is in the code between
            the two.
    """

    pair: EventPair
    before: EventPair | None
    is_inside: bool

    @property
    def module(self) -> str:
        """Name of the module in which it began, in both runs if they differ."""
        names = []
        for run in ("a", "b"):
            before = None if self.before is None else getattr(self.before, run)
            names.append(Origin(getattr(self.pair, run), before, self.is_inside).module)
        return names[0] if names[0] == names[1] else " / ".join(filter(None, names))


class TraceComparison:
    """The modules that ran in two runs, in order, and how far their inputs and outputs agree.

    Args:
        a: The trace of run A.
        b: The trace of run B.
        tokens: (batch, n) by n, True for the tokens to compare; lengths without one are compared in all rows.
        rows: Compare the first rows only; None for all.
        is_causal: Later tokens cannot change earlier ones, so that passes of other lengths can be compared.
    """

    def __init__(
        self, a: ModuleTrace, b: ModuleTrace, tokens: Mapping[int, Tensor], rows: int | None, is_causal: bool
    ) -> None:
        self._tokens, self._rows, self._is_causal = tokens, rows, is_causal
        self._lengths = _find_length(a), _find_length(b)
        events = [*a.events, *b.events]
        self.dtypes = {str(event.output.dtype)[6:] for event in events if event.output is not None}
        self.matched_by = "name"
        self.pairs = list(self._limit(self._match(a.events, b.events)))

    @property
    def length(self) -> int:
        """The number of tokens of the pass of A, as most modules return them."""
        return self._lengths[0]

    @property
    def outputs(self) -> list[EventPair]:
        """The model itself, once for each tensor that it returns; empty if the first cannot be compared."""
        pairs = [pair for pair in self.pairs if not pair.a.name and not pair.b.name]
        return [] if not pairs or math.isnan(pairs[0].output_size) else pairs

    @property
    def differs(self) -> bool:
        """Whether the model returns something else."""
        return any(pair.returns_others for pair in self.outputs)

    def find_first(self, stop: int | None = None) -> ModuleDifference | None:
        """Find the first call that differs, unless the difference ends inside a module that returns the same."""
        before = None
        for pair in self.pairs[: None if stop is None else stop + 1]:
            if (pair.reads_others or pair.returns_others) and not self._ends(pair):
                is_known = not math.isnan(pair.input_size) or (pair.a.input is None and pair.b.input is None)
                return ModuleDifference(pair, before, is_known and not pair.reads_others)
            if not math.isnan(pair.output_size):
                before = pair
        return None

    def _ends(self, pair: EventPair) -> bool:
        """Return whether a module around this one returns the same, as if heads are permuted with their projection."""
        if self.outputs and not self.differs:
            return True
        ended = {""}
        for later in self.pairs[pair.position + 1 :]:
            name = later.a.name
            if pair.a.name.startswith(f"{name}.") and name not in ended:
                if not math.isnan(later.output_size) and not later.returns_others:
                    return True
                ended.add(name)
        return False

    def find_span(self, name: str) -> tuple[int, int] | None:
        """Return the numbers of the first and the last pair of a module of A and its parts; None if none ran."""
        inside = [
            pair.position for pair in self.pairs if pair.a.name == name or pair.a.name.startswith(f"{name}.")
        ]
        return (inside[0], inside[-1]) if inside else None

    def _match(
        self, a: Sequence[ModuleEvent], b: Sequence[ModuleEvent]
    ) -> Iterator[tuple[ModuleEvent, ModuleEvent]]:
        """Match the events: by name if most names are the same, else in order, else by their outputs."""
        names_a, names_b = ({event.name for event in events if event.name} for events in (a, b))
        if 2 * len(names_a & names_b) > min(len(names_a), len(names_b)):
            return match_events(a, b)
        leaves_a, leaves_b = (
            [event for event in events if event.name and not event.num_parts] for events in (a, b)
        )
        roots = [[event for event in events if not event.name] for events in (a, b)]
        ends = list(zip(*roots, strict=False))
        shapes = [[event.output_shape for event in leaves] for leaves in (leaves_a, leaves_b)]
        if shapes[0] == shapes[1]:
            self.matched_by = "order"
            return iter([*zip(leaves_a, leaves_b, strict=True), *ends])
        self.matched_by = "output"
        return iter([*self._match_outputs(leaves_a, leaves_b), *ends])

    def _match_outputs(
        self, a: list[ModuleEvent], b: list[ModuleEvent]
    ) -> Iterator[tuple[ModuleEvent, ModuleEvent]]:
        """Match events whose outputs agree, and the first that reads the same and returns something else."""
        used: set[int] = set()
        last, previous = -1, 0.0

        def measure(first: ModuleEvent, second: ModuleEvent, part: str = "output") -> float:
            size = self._measure(first, second, part)
            return math.inf if math.isnan(size) else size

        for number, event in enumerate(a):
            limit = limit_rounding(self.dtypes, previous)
            start = max(0, last + 1 - MATCHED_BEFORE)
            sizes = {
                j: measure(event, b[j])
                for j in range(start, len(b))
                if j not in used and b[j].output_shape[-1:] == event.output_shape[-1:]
            }
            match = next((j for j, size in sizes.items() if size <= limit), None)
            if match is not None:
                used.add(match)
                last, previous = max(last, match), max(previous, sizes[match])
                yield event, b[match]
                continue
            # The next one of B, unless it is the twin of a later one of A.
            following = last + 1
            if (
                following in sizes
                and measure(event, b[following], "input") <= limit
                and not any(
                    measure(other, b[following]) <= limit
                    for other in a[number + 1 : number + 1 + MATCHED_BEFORE]
                )
            ):
                yield event, b[following]
                return

    def _limit(self, matched: Iterator[tuple[ModuleEvent, ModuleEvent]]) -> Iterator[EventPair]:
        """Measure matched events, each with a limit that grows by the rounding before it."""
        previous = 0.0
        for position, (a, b) in enumerate(matched):
            limit = limit_rounding(self.dtypes, previous)
            pair = EventPair(
                a, b, position, self._measure(a, b, "input"), self._measure(a, b, "output"), limit
            )
            yield pair
            sizes = [size for size in (pair.input_size, pair.output_size) if size <= limit]
            previous = max(previous, *sizes, 0.0)

    def _measure(self, a: ModuleEvent, b: ModuleEvent, part: str) -> float:
        """Return the largest difference of a row of the input or output; NaN if they cannot be compared."""
        tensors = getattr(a, part), getattr(b, part)
        shapes = getattr(a, f"{part}_shape"), getattr(b, f"{part}_shape")
        if tensors[0] is None or tensors[1] is None:
            return math.nan
        rows = [_by_row(tensor, shape) for tensor, shape in zip(tensors, shapes, strict=True)]
        numbers = [select_rows(shape[find_token_axis(shape)]) for shape in shapes]
        lengths = [shape[find_token_axis(shape)] for shape in shapes]
        if rows[0].shape != rows[1].shape or lengths[0] != lengths[1]:
            are_whole = all(
                tensor.numel() == math.prod(shape) for tensor, shape in zip(tensors, shapes, strict=True)
            )
            if are_whole and tensors[0].numel() == tensors[1].numel() and shapes[0][-1] == shapes[1][-1]:
                rows = [tensor.reshape(1, -1, shapes[0][-1]) for tensor in tensors]
                lengths = [rows[0].shape[1]] * 2
                numbers = [torch.arange(lengths[0])] * 2
            elif self._is_causal and tuple(lengths) == self._lengths and len(shapes[0]) == len(shapes[1]):
                common = numbers[0][torch.isin(numbers[0], numbers[1])]
                rows = [
                    x[:, torch.isin(own, common).to(x.device)] for x, own in zip(rows, numbers, strict=True)
                ]
                numbers = [common] * 2
        if rows[0].shape != rows[1].shape:
            return math.nan
        counted = self._count(rows[0].shape[0], max(lengths), numbers[0])
        if not bool(counted.any()) or not rows[0].numel():
            return math.nan
        return _measure_rows(rows[0], rows[1], counted)

    def _count(self, batch: int, length: int, numbers: Tensor) -> Tensor:
        """Return which rows are compared, (batch, rows)."""
        counted = torch.ones(batch, len(numbers), dtype=torch.bool)
        flat = {flags.numel(): flags.reshape(1, -1) for flags in self._tokens.values()}
        known = self._tokens.get(length)
        if known is None and batch == 1:
            known = flat.get(length)
        if known is None and self._rows is None:
            known = next((flags for n, flags in self._tokens.items() if n > length in self._lengths), None)
        if known is not None and len(known) in (1, batch):
            counted &= known[:, numbers]
        if self._rows is not None:
            counted &= numbers < self._rows
        return counted


def _find_length(trace: ModuleTrace) -> int:
    """Return the number of tokens of a pass: the length that most outputs have."""
    lengths = Counter(event.output_shape[1] for event in trace.events if len(event.output_shape) == 3)
    return lengths.most_common(1)[0][0] if lengths else 0


def _by_row(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor as (batch, rows, width)."""
    axis = find_token_axis(shape)
    if tensor.ndim == 2:
        return tensor[None]
    return tensor.movedim(axis, 1).flatten(2)


def _measure_rows(a: Tensor, b: Tensor, counted: Tensor) -> float:
    """Return the largest difference of a row, relative to the norms of the rows."""
    b, counted = b.to(a.device), counted.to(a.device)
    if bool(((a.isfinite() != b.isfinite()).any(-1) & counted).any()):
        return math.inf
    first, second = (widen(x).nan_to_num(0, 0, 0)[:, None] for x in (a, b))
    return float(row_differences(first, second, counted).max())


def describe_relation(a: Tensor, b: Tensor, within: float) -> str:
    """Say how the output of B is related to that of A, if it is a multiple or the same numbers in other places."""
    if a.shape != b.shape or not a.numel():
        return ""
    first, second = widen(a).nan_to_num(0, 0, 0), widen(b.to(a.device)).nan_to_num(0, 0, 0)
    square = float(first.square().sum())
    if not square:
        return ""
    if not second.any():
        return "is 0 in B"
    ratio = float((first * second).sum()) / square
    norm = float(second.square().sum())
    if float((second - ratio * first).square().sum()) <= within**2 * norm and abs(ratio - 1) > within:
        return f"is {ratio:.4g} times as large in B"
    for name, parts in {
        "has the same numbers in B, but at different places in each row": (first, second),
        "has the same numbers in B, but at different places": (first.flatten(1), second.flatten(1)),
    }.items():
        ordered = [part.sort(-1).values for part in parts]
        if float((ordered[0] - ordered[1]).square().sum()) <= within**2 * square:
            return name
    return ""


def find_shift(a: Tensor, b: Tensor, within: float) -> int:
    """Return by how many rows the output of B is shifted against that of A: B[i] is A[i + shift]; 0 if it is not."""
    first, second = (widen(x.reshape(-1, *x.shape[-2:])[:, :16]) for x in (a, b.to(a.device)))
    if first.shape != second.shape or first.shape[1] < MAX_SHIFT + 2:
        return 0
    for shift in (sign * n for n in range(1, MAX_SHIFT + 1) for sign in (-1, 1)):
        here, there = (
            (first[:, shift:], second[:, :-shift]) if shift > 0 else (first[:, :shift], second[:, -shift:])
        )
        if float((here - there).square().sum()) <= within**2 * float(there.square().sum()):
            return shift
    return 0


def build_module_difference(difference: ModuleDifference, weights: str, layer: int, heads: int) -> Finding:
    """Describe where the modules of two runs first differ, as a finding."""
    pair, before = difference.pair, difference.before
    place: dict[str, Any] = {"module": difference.module, "layer": layer}
    evidence = {
        name: size
        for name, size in (("input", pair.input_size), ("output", pair.output_size))
        if not math.isnan(size)
    }
    name = pair.name or "the model"
    if pair.reads_other_ids:
        return _build_other_ids(pair, place, evidence)
    if not difference.is_inside:
        end = f"the input of {name}" if pair.name and pair.reads_others else f"the output of {name}"
        message = f"{end[0].upper()}{end[1:]} differs, and no module before it was recorded."
        if before is not None:
            message = (
                f"The output of {before.name} agrees, but {end} differs. The runs diverge between the two."
            )
        relation = describe_relation(pair.a.input, pair.b.input, pair.limit) if pair.reads_others else ""
        if relation:
            message += f" The input {relation}."
        span = "before it" if before is None else "between them"
        hint = f"Compare the code of {difference.module or 'the model'} {span}."
        if "different places" in relation:
            hint += " Merge heads with x.transpose(1, 2).reshape(batch, n, heads * head_dim)."
        kind = "view or transpose" if relation.endswith("different places") else "module"
        return Finding(kind, "error", message, hint=hint, evidence=evidence, **place)
    shift = find_shift(pair.a.output, pair.b.output, pair.limit)
    if shift and pair.a.input is None:
        rows = f"{abs(shift)} row{'s' * (abs(shift) > 1)} {'later' if shift > 0 else 'earlier'}"
        message = f"{name} ({pair.class_name}) reads its table {rows} in B than in A, for the same tokens."
        hint = "Compare the offset of the position table: OPT reserves its first two rows."
        return Finding(
            "position ids", "error", message, hint=hint, evidence=evidence | {"offset": shift}, **place
        )
    message = f"{name} ({pair.class_name}) has the same input but a different output."
    if pair.a.input is None and pair.b.input is None:
        message = f"{name} ({pair.class_name}) returns a different output for the same ids."
        if pair.a.ids is None or pair.b.ids is None:
            message = f"{name} ({pair.class_name}) returns a different output; its input was not recorded."
    if pair.a.num_parts and pair.b.num_parts and pair.name:
        message += " The modules inside it agree, so the code around them differs."
    relation = describe_relation(pair.a.output, pair.b.output, pair.limit)
    message += f" Its output {relation}." if relation else ""
    if pair.a.class_name != pair.b.class_name:
        hint = "Use the same class in both models."
    elif weights:
        hint = weights
    else:
        has_weights = pair.a.has_weights
        hint = "Compare its weights and settings." if has_weights else "Compare its settings and code."
    order = find_fused_order(pair, heads)
    return Finding("module", "error", message, hint=order or hint, evidence=evidence, **place)


def _build_other_ids(pair: EventPair, place: dict[str, Any], evidence: dict[str, Any]) -> Finding:
    """Describe a table that was read at other ids."""
    assert pair.a.ids is not None and pair.b.ids is not None
    ids, others = torch.atleast_2d(pair.a.ids), torch.atleast_2d(pair.b.ids.to(pair.a.ids.device))
    entry, column = (int(number) for number in (ids != others).nonzero()[0])
    row = int(select_rows(pair.a.output_shape[-2])[column]) if pair.a.output_shape else column
    is_position = any(word in pair.a.name.rpartition(".")[2].lower() for word in ("pos", "wpe"))
    word = "position" if is_position else "token"
    message = (
        f"{pair.name} reads different {word}s: {int(others[entry, column])} instead of {int(ids[entry, column])} "
        f"at token {row} of batch entry {entry}."
    )
    hint = "Run both models on the same tokens."
    if is_position:
        hint = "Pass position_ids that do not count padding, and continue after the cached tokens."
    kind = "position ids" if is_position else "other tokens"
    return Finding(kind, "error", message, hint=hint, evidence=evidence, **place)


def find_fused_order(pair: EventPair, heads: int) -> str:
    """Say how queries, keys and values are ordered in a fused projection, if that is all that differs."""
    a, b = pair.a.output, pair.b.output
    if a is None or b is None or a.shape != b.shape or heads < 2 or a.shape[-1] % (3 * heads):
        return ""
    order = torch.arange(a.shape[-1], device=a.device).view(heads, 3, -1).transpose(0, 1).reshape(-1)
    first, second = widen(a), widen(b.to(a.device))
    within = pair.limit**2 * float(first.square().sum())
    if float((first[..., order] - second).square().sum()) <= within:
        stored = "in blocks (all queries, all keys, all values), but A head by head"
    elif float((first - second[..., order]).square().sum()) <= within:
        stored = "head by head, but A in blocks (all queries, all keys, all values)"
    else:
        return ""
    return f"The fused projection of B stores queries, keys and values {stored}. Reorder the rows of weight and bias."
