"""Edits: values that say which heads of which layers are changed, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from operator import index
from typing import Any, Literal

from regard.capture.module_names import is_selected
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.lens.recording import Recording
from regard.masks import Mask
from regard.score_mods import ScoreMod

Layers = int | str | Sequence[int | str] | None
Heads = int | Sequence[int] | slice | None
Positions = int | str | slice | Sequence[int | str] | None

_POSITIONS = "positions: an integer, a slice, the text of a token, or a list of these"
# What each parameter of an edit accepts, and a hint.
_SELECTIONS = {
    "layers": (
        "numbers of layers, names of modules, or patterns with *",
        "list(recording) lists the attention layers of a run in order.",
    ),
    "heads": ("an integer, a list of integers, or a slice", "Omit heads for all."),
    "batch": ("an integer, a list of integers, or a slice", "Omit batch for all."),
    "queries": (_POSITIONS, "For example queries=[0, 1], or queries=slice(8, None)."),
    "keys": (_POSITIONS, "For example keys=[0, 1], or keys=slice(8, None)."),
}


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Edit:
    """An edit of some heads in some layers; `knockout` and the other functions of the package return it.

    Args:
        layers: Numbers of attention layers in the order in which they run, names of modules, or patterns with `*`; None
            for all.
        heads: The query heads; None for all.
        batch: The batch entries; None for all.
    """

    layers: Layers = None
    heads: Heads = None
    batch: Heads = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name in _SELECTIONS:
                chosen = as_selection(getattr(self, field.name), self.name, field.name)
                object.__setattr__(self, field.name, chosen)

    @property
    def name(self) -> str:
        """Name of the function that returns this kind of edit."""
        return type(self).__name__.removesuffix("Edit").lower()

    def selects(self, name: str, number: int | None) -> bool:
        """Return whether the edit selects a layer.

        Args:
            name: Name of the layer's module.
            number: Number of the layer in the order in which layers run, from 0; None if it is not known.
        """
        return self.layers is None or any(
            matches_layer(entry, name, number) for entry in list_entries(self.layers)
        )

    def __repr__(self) -> str:
        given = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Recording):
                given.append(
                    f"{field.name}=<recording of {len(value)} layer{'' if len(value) == 1 else 's'}>"
                )
            elif value is not None:
                given.append(f"{field.name}={value!r}")
        return f"{self.name}({', '.join(given)})"


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class KnockoutEdit(Edit):
    """Edges that are masked."""

    queries: Positions = None
    keys: Positions = None


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class RestrictEdit(Edit):
    """Heads that a mask restricts."""

    mask: Mask


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class RescoreEdit(Edit):
    """Heads whose scores are modified."""

    score_mod: ScoreMod


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class AblateEdit(Edit):
    """Heads whose output is replaced or scaled."""

    baseline: Literal["zero", "mean"] | Recording | HeadMeans | float = "zero"
    queries: Positions = None


class HeadMeans(dict[str, list[Any]]):
    """The mean output of each head in one run: for each call of a layer, by its name, (heads, value_dim)."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PatchEdit(Edit):
    """Heads that take their pattern, output, query, key or value from another run."""

    source: Recording
    what: Literal["pattern", "output", "query", "key", "value"] = "pattern"
    queries: Positions = None


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class InputEdit(Edit):
    """Heads whose query, key or value is computed from a changed input of their block."""

    change: Callable[[Any], Any]
    what: Literal["query", "key", "value"] = "query"

    @property
    def name(self) -> str:
        """Name of the function that returns this kind of edit."""
        return "patch_input"


def knockout(
    layers: Layers = None,
    *,
    heads: Heads = None,
    queries: Positions = None,
    keys: Positions = None,
    batch: Heads = None,
) -> Edit:
    """Mask the edges between some queries and some keys; the other weights of these rows are renormalised.

    Positions refer to the whole sequence, so an edit also applies in the cached steps of `generate()`. Negative
    positions count from the end of what the model has read so far. A row that loses all its keys becomes zeros.

    Args:
        layers: Numbers of attention layers in the order in which they run, names of modules, or patterns with `*`.
            Default: all.
        heads: Query heads. Other heads that share keys and values with these are not changed. Default: all.
        queries: Attending tokens: a position, a slice, a text that occurs in `intervene(tokens=…)`, or a list of
            positions and texts. Default: all.
        keys: Tokens attended to, in the same forms.
        batch: Batch entries. Default: all.

    Returns:
        The edit.

    Raises:
        ArgumentTypeError: If an argument has the wrong type.

    >>> knockout(3, heads=[1, 2], queries=-1, keys="cat")
    knockout(layers=3, heads=[1, 2], queries=-1, keys='cat')
    """
    return KnockoutEdit(layers=layers, heads=heads, batch=batch, queries=queries, keys=keys)


def restrict(layers: Layers = None, *, mask: Mask, heads: Heads = None, batch: Heads = None) -> Edit:
    """Restrict heads to the keys that a mask allows, in addition to the mask of the model.

    Args:
        layers: Layers, as in `knockout`.
        mask: The mask, in positions of the whole sequence: `sliding_window(64)` needs no `align`, even in cached steps.
        heads: Query heads. Default: all.
        batch: Batch entries. Default: all.

    Returns:
        The edit.

    Raises:
        ArgumentTypeError: If an argument has the wrong type.

    >>> import regard
    >>> restrict("*.layers.0.*", heads=2, mask=regard.sliding_window(64))
    restrict(layers='*.layers.0.*', heads=2, mask=sliding_window(64))
    """
    expected = "a mask such as regard.sliding_window(64)"
    hint = "Wrap a boolean array, True = attend, as regard.masks.dense(array)."
    _check_type(mask, Mask, "restrict", "mask", expected, hint)
    return RestrictEdit(layers=layers, heads=heads, batch=batch, mask=mask)


def rescore(layers: Layers = None, *, score_mod: ScoreMod, heads: Heads = None, batch: Heads = None) -> Edit:
    """Modify the scores of heads, after the modifications of the model itself.

    Args:
        layers: Layers, as in `knockout`.
        score_mod: The modification, in positions of the whole sequence, such as `regard.alibi()`.
        heads: Query heads. Default: all.
        batch: Batch entries. Default: all.

    Returns:
        The edit.

    Raises:
        ArgumentTypeError: If an argument has the wrong type.

    >>> import regard
    >>> rescore(0, score_mod=regard.softcap(5.0))
    rescore(layers=0, score_mod=softcap(5.0))
    """
    expected = "a score modification such as regard.softcap(5.0)"
    hint = "Wrap an array of numbers to add as regard.score_mods.bias(array)."
    _check_type(score_mod, ScoreMod, "rescore", "score_mod", expected, hint)
    return RescoreEdit(layers=layers, heads=heads, batch=batch, score_mod=score_mod)


def ablate(
    layers: Layers = None,
    *,
    heads: Heads = None,
    baseline: Literal["zero", "mean"] | Recording | float = "zero",
    queries: Positions = None,
    batch: Heads = None,
) -> Edit:
    """Replace the output of heads before the output projection.

    Args:
        layers: Layers, as in `knockout`.
        heads: Query heads. Default: all.
        baseline: Replacement for the output: "zero"; "mean", the mean of the head's output over the tokens of this run,
            without padding; or a recording made with `watch(values=True)`, for the mean over its tokens. A number
            multiplies the output.
        queries: Tokens at which the output is replaced, as in `knockout`. Default: all.
        batch: Batch entries. Default: all.

    Returns:
        The edit.

    Raises:
        ArgumentError: If `baseline` is not one of the listed values.
        ArgumentTypeError: If another argument has the wrong type.

    >>> ablate(0, heads=1, baseline="mean"), ablate(baseline=0.5)
    (ablate(layers=0, heads=1, baseline='mean'), ablate(baseline=0.5))
    """
    if getattr(baseline, "ndim", None) == 0 and not getattr(baseline, "requires_grad", False):
        baseline = baseline.item()  # type: ignore[union-attr] # a scalar of NumPy or torch
    is_number = isinstance(baseline, Real) and not isinstance(baseline, bool)
    is_name = isinstance(baseline, str) and baseline in ("zero", "mean")
    if not (is_number or is_name or isinstance(baseline, Recording)):
        raise ArgumentError(
            "ablate",
            received=f"baseline={baseline!r}"
            if isinstance(baseline, str)
            else f"baseline as {describe_argument(baseline)}",
            expected='"zero", "mean", a recording, or a number to multiply by',
            hint="To use the output of another run at the same positions, call patch(source=recording, what='output').",
        )
    return AblateEdit(layers=layers, heads=heads, batch=batch, baseline=baseline, queries=queries)


def patch(
    layers: Layers = None,
    *,
    source: Recording,
    what: Literal["pattern", "output", "query", "key", "value"] = "pattern",
    heads: Heads = None,
    queries: Positions = None,
    batch: Heads = None,
) -> Edit:
    """Take the pattern, the output, the query, the key or the value of heads from another run of the model.

    Args:
        layers: Layers, as in `knockout`.
        source: Recording of the other run. For "output" and "value", a recording made with `watch(values=True)`.
        what: "pattern" applies the weights of the other run to this run's values; in the rows that exist in the other
            run, it replaces other edits of these weights. "output" takes the output before the output projection.
            "value" applies this run's weights to the values of the other run. "query" and "key" compute the weights
            anew, from the queries or keys that the other run passed to the kernel.
        heads: Query heads; another head that shares its key and value is not changed. Default: all.
        queries: Tokens whose row is patched, as in `knockout`. Default: all rows of the other run. Not allowed for a
            key or value, which every row reads.
        batch: Batch entries. Default: all. A source with fewer batch entries is repeated.

    Returns:
        The edit.

    Raises:
        ArgumentError: If `what` is not one of the listed values, or `queries` is passed for a key or value.
        ArgumentTypeError: If another argument has the wrong type.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with regard.watch(layer) as recording:
    ...     _ = layer(torch.ones(1, 3, 8))
    >>> patch(0, heads=1, source=recording)
    patch(layers=0, heads=1, source=<recording of 1 layer>, what='pattern')
    """
    hint = "with regard.watch(model, values=True) as source: model(**other_inputs)"
    _check_type(source, Recording, "patch", "source", "a recording of another run", hint)
    if what not in ("pattern", "output", "query", "key", "value"):
        raise ArgumentError(
            "patch",
            received=f"what={what!r}",
            expected='"pattern", "output", "query", "key" or "value"',
            hint="For example patch(source=recording, what='output').",
        )
    if what in ("key", "value") and queries is not None:
        raise ArgumentError(
            "patch",
            received=f"what={what!r} and queries",
            expected=f"no queries: a {what} is read by every row that attends to it",
            hint="Omit queries, or patch the output of these rows: what='output'.",
        )
    return PatchEdit(layers=layers, heads=heads, batch=batch, source=source, what=what, queries=queries)


def patch_input(
    layers: Layers = None,
    *,
    change: Callable[[Any], Any],
    what: Literal["query", "key", "value"] = "query",
    heads: Heads = None,
    batch: Heads = None,
) -> Edit:
    """Compute the query, the key or the value of heads from a changed residual stream, as in path patching.

    Only these heads read the changed stream: other heads, the other two inputs of these heads and the residual
    connection keep it as it is. For the path from an earlier head to a later one, add the difference that the earlier
    head makes between two runs to the query, key or value input of the later one.

    The block around the layer runs twice, up to its attention: with its own input, and with the changed one. The norm
    before the attention, biases and rotary positions apply to both.

    Args:
        layers: Layers, as in `knockout`.
        change: A function that is passed the vectors that the block reads, before its norm, (batch, n, d_model), and
            returns vectors of the same shape. It must not change them in place.
        what: The input of the heads to compute again.
        heads: Query heads; another head that shares its key and value is not changed. Default: all.
        batch: Batch entries. Default: all.

    Returns:
        The edit.

    Raises:
        ArgumentError: If `what` is not one of the listed values. During the run, if the layer is not the first
            attention of its block, or for a cached step, since earlier keys and values are not computed again.
        ArgumentTypeError: If an argument has the wrong type.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> x = torch.randn(1, 3, 8)
    >>> with torch.no_grad(), regard.intervene(layer, patch_input(0, heads=1, change=torch.zeros_like)):
    ...     edited = layer(x)
    >>> torch.equal(edited, layer(x))
    False
    """
    if not callable(change):
        raise ArgumentTypeError(
            "patch_input",
            received=f"change as {describe_argument(change)}",
            expected="a function of the vectors that the block reads, (batch, n, d_model)",
            hint="For example change=lambda stream: stream + difference.",
        )
    if what not in ("query", "key", "value"):
        raise ArgumentError(
            "patch_input",
            received=f"what={what!r}",
            expected='"query", "key" or "value"',
            hint="For all three, pass one edit for each.",
        )
    return InputEdit(layers=layers, heads=heads, batch=batch, change=change, what=what)


def as_edits(edits: Any, operation: str) -> tuple[Edit, ...]:
    """Return one or several edits as a tuple."""
    listed = (edits,) if isinstance(edits, Edit) else edits
    if isinstance(listed, str) or not hasattr(listed, "__iter__"):
        listed = [edits]
    listed = tuple(listed)
    for edit in listed:
        if not isinstance(edit, Edit):
            raise ArgumentTypeError(
                operation,
                received=f"edits with {describe_argument(edit)}",
                expected="an edit, or a list of edits",
                hint="For example regard.interventions.ablate(0, heads=1).",
            )
    return listed


def list_entries(chosen: Any) -> list[Any]:
    """List the entries of a selection: one or several; none if it is None."""
    if chosen is None:
        return []
    return list(chosen) if isinstance(chosen, list | tuple) else [chosen]


def matches_layer(entry: int | str, name: str, number: int | None) -> bool:
    """Return whether an entry of `layers` is the number of a layer, or matches it or a module around it."""
    return entry == number if isinstance(entry, int) else is_selected(name, entry)


def as_selection(chosen: Any, operation: str, parameter: str) -> Any:
    """Return a selection with Python's integers: one entry, a list of entries, a slice, or None for all."""
    if chosen is None or (isinstance(chosen, slice) and parameter != "layers"):
        return chosen
    expected, hint = _SELECTIONS[parameter]
    # Arrays without axes have `__iter__` and do not iterate.
    is_single = isinstance(chosen, str) or not hasattr(chosen, "__iter__") or getattr(chosen, "ndim", 1) == 0
    entries: list[Any] = []
    for entry in [chosen] if is_single else chosen:
        is_bool = isinstance(entry, bool) or str(getattr(entry, "dtype", "")).endswith("bool")
        number: Any = None if is_bool else entry
        try:
            is_text = isinstance(entry, str) and parameter not in ("heads", "batch")
            entries.append(entry if is_text else index(number))
        except TypeError:
            received = f"{parameter} with {describe_argument(entry)}"
            raise ArgumentTypeError(operation, received=received, expected=expected, hint=hint) from None
        if parameter == "layers" and not is_text and entries[-1] < 0:
            raise ArgumentError(
                operation,
                received=f"layers with {entries[-1]}",
                expected="numbers from 0: layers are numbered in the order they run, and their total is not "
                "known in advance",
                hint="Pass the name of the layer: list(recording) of a regard.watch(model) block lists all names.",
            )
    return entries[0] if is_single else entries


def _check_type(value: Any, kind: type, operation: str, parameter: str, expected: str, hint: str) -> None:
    """Raise an `ArgumentTypeError` if a parameter of an edit has another type."""
    if not isinstance(value, kind):
        received = f"{parameter} as {describe_argument(value)}"
        raise ArgumentTypeError(operation, received=received, expected=expected, hint=hint)
