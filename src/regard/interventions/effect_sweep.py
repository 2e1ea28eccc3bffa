"""`effects`: how much a metric changes with each of many edits."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from regard.capture.call import Call, CapturedArgs
from regard.capture.record import CaptureOptions, build_call
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.interventions.edits import (
    AblateEdit,
    Edit,
    HeadMeans,
    Positions,
    ablate,
    as_edits,
    knockout,
    patch,
)
from regard.interventions.intervene import find_layers, find_output, intervene, is_edited
from regard.interventions.metrics import LogitDifference, Metric
from regard.interventions.model_inputs import copy_cache, find_tolerance
from regard.interventions.placement import select_entries
from regard.interventions.reused_blocks import BlockOutputs, find_block
from regard.interventions.sources import compute_mean_output
from regard.lens.recording import Recording
from regard.lens.table import Table
from regard.lens.watch import Watch, watch
from regard.validation import check_count

if TYPE_CHECKING:
    from regard.pages.html import Page

Tensor = Any  # the types of torch are not followed

# Edits that run as one batch.
BATCH_SIZE = 16


def effects(
    model: nn.Module,
    inputs: Any,
    metric: Metric,
    edits: Literal["heads"] | Iterable[Edit | Sequence[Edit]] = "heads",
    *,
    to: Literal["zero", "mean"] | Recording | float = "zero",
    queries: Positions = None,
    keys: Positions = None,
    layers: Any = None,
    tokens: Any = None,
    batch_size: int = BATCH_SIZE,
    progress: Callable[[], None] | None = None,
) -> EffectTable:
    """Measure how much a metric changes with each edit: a table with one row for each, in the order given.

    By default each head is ablated by itself. The edits run in batches, and the layers before the edited one are not
    computed again, so the heads of a model cost about half of as many forward passes.

    The edits run one by one, whatever `batch_size` is, if the metric of an entry depends on the rest of the batch. This
    also holds for layers that attend over other entries than those of the batch, such as windows of an image, and for a
    model that `intervene` already edits.

    Args:
        model: The model, in eval mode.
        inputs: What the model is called with: a tensor (batch, …), or a mapping of keyword arguments.
        metric: Function from the model's output to one number for each batch entry, (batch,), such as
            `logit_difference(…)`. One that returns a single number works, too: then the edits run one by one.
        edits: "heads" for each head of each layer by itself; or edits, each an edit or a list of edits that apply at
            once.
        to: With "heads", what heads are ablated to, as in `ablate`. "mean", here and in edits, is the mean of the run
            without edits, also if several edits apply at once. A recording, made with `watch(values=True)`, resamples
            heads: each takes its output in that run, as `patch(what="output")` does.
        queries: With "heads", the tokens at which heads are edited.
        keys: With "heads", knock out these keys instead of ablating the heads.
        layers: With "heads", the layers: numbers, names or patterns. Default: all.
        tokens: Tokens in which texts are looked up, as in `intervene`.
        batch_size: Number of edits that run at once. More need more memory.
        progress: Called after each edit.

    Returns:
        A table. With "heads": `module`, `layer`, `head`, `metric` and `effect`, the metric minus that of the unchanged
        model. With edits: `edit`, `metric` and `effect`. Means over the batch entries. `table.page()` and
        `regard.plot.effects(table)` draw it.

    Raises:
        ArgumentTypeError: If an argument has the wrong type.
        ArgumentError: If the metric returns something else, there is no such layer, or `batch_size` is not a whole
            number from 1.

    >>> import regard, torch
    >>> from regard.interventions import effects
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> table = effects(layer, torch.ones(1, 3, 8), lambda output: output[:, -1].norm(dim=-1))
    >>> table.columns, len(table)
    (['module', 'layer', 'head', 'metric', 'effect'], 2)
    """
    check_count(
        batch_size, 1, None, "effects", "batch_size", "", "It is the number of edits that run at once."
    )
    sweep = _Sweep(model, inputs, metric, tokens)
    with torch.no_grad():
        clean = sweep.run_clean()
        if isinstance(edits, str):
            if edits != "heads":
                raise ArgumentError(
                    "effects",
                    received=f"edits={edits!r}",
                    expected='"heads", or a list of edits',
                    hint="For example [ablate(0, heads=1), ablate(1, heads=2)].",
                )
            chosen = find_layers(layers, sweep.layers, "effects")
            rows: list[dict[str, Any]] = [
                {"module": name, "layer": list(sweep.layers).index(name), "head": head}
                for name in chosen
                for head in range(sweep.layers[name])
            ]
            listed: list[tuple[Edit, ...]] = [(_edit_head(row, to, queries, keys),) for row in rows]
        else:
            listed = [as_edits(entry, "effects") for entry in _list_edits(edits)]
            rows = [{"edit": repr(entry[0]) if len(entry) == 1 else repr(list(entry))} for entry in listed]
        results = sweep.run_edits(listed, batch_size, progress)
    table = EffectTable(
        row | {"metric": result, "effect": result - clean} for row, result in zip(rows, results, strict=True)
    )
    table.clean, table.metric = clean, repr(metric) if isinstance(metric, LogitDifference) else "the metric"
    if isinstance(edits, str):
        table.edit = _describe_edit(to, queries, keys)
    return table


class EffectTable(Table):
    """The table that `effects` returns.

    Attributes:
        clean: The metric without an edit.
        metric: Name of the metric.
        edit: Description of what was done to each head; "" if the edits were given.
    """

    clean: float = math.nan
    metric: str = ""
    edit: str = ""

    def page(self, title: str = "What each head is worth") -> Page:
        """Build a page with the effects as a grid of layers × heads: one file that needs neither server nor network.

        Args:
            title: Title of the page.

        Returns:
            The page: `page.save(path)` writes it, and a notebook shows it.

        Raises:
            ArgumentError: If the rows are not heads.
        """
        if not self or "head" not in self[0]:
            raise ArgumentError(
                "effects(…).page",
                received="a table without heads",
                expected='the table of effects(…, edits="heads")',
                hint="Omit edits to measure every head.",
            )
        from regard.pages.effects_page import build_effects_page

        return build_effects_page(self, title=title, metric=self.metric, edit=self.edit, clean=self.clean)


def _describe_edit(to: Any, queries: Positions, keys: Positions) -> str:
    if keys is not None:
        description = f"its edges to keys {keys!r} were knocked out"
    elif isinstance(to, Recording):
        description = "its output was taken from another run"
    elif isinstance(to, str):
        description = "its output was set to 0" if to == "zero" else "its output was replaced by its mean"
    else:
        description = f"its output was multiplied by {to}"
    return description if queries is None else f"{description} at queries {queries!r}"


def _edit_head(row: dict[str, Any], to: Any, queries: Positions, keys: Positions) -> Edit:
    layer, head = row["module"], row["head"]
    if keys is not None:
        return knockout(layer, heads=head, queries=queries, keys=keys)
    if isinstance(to, Recording):
        return patch(layer, heads=head, source=to, what="output", queries=queries)
    return ablate(layer, heads=head, to=to, queries=queries)


def _list_edits(edits: Any) -> list[Any]:
    if isinstance(edits, Edit) or not hasattr(edits, "__iter__"):
        raise ArgumentTypeError(
            "effects",
            received=f"edits as {describe_argument(edits)}",
            expected='"heads", or a list of edits',
            hint="For one edit pass a list of one: [edit].",
        )
    return list(edits)


def _takes_mean(edit: Edit) -> bool:
    return isinstance(edit, AblateEdit) and isinstance(edit.to, str) and edit.to == "mean"


class _MeanWatch(Watch):
    """A watch that keeps the mean output of each head."""

    binds_context = True

    def __init__(self, model: nn.Module) -> None:
        self._plain = CaptureOptions(device=None, dtype=None, copy=False, values=False, measures=None)
        super().__init__(model, {name for name, _ in model.named_modules()}, self._plain)
        self.means = HeadMeans()

    def __enter__(self) -> _MeanWatch:  # type: ignore[override]
        super().__enter__()
        return self

    def record(self, module: nn.Module, name: str, args: CapturedArgs) -> None:
        """Keep the means of a call; the wrappers call it."""
        call = build_call(module, name, args, self._plain, self._biases)
        assert isinstance(call, Call), "effects has captured it before"
        output = find_output(call, args) if args.edited_output is None else args.edited_output
        self.means.setdefault(name, []).append(compute_mean_output(replace(call, output=output)))


@dataclass(frozen=True)
class _Group:
    """Edits that run as one batch: their numbers, and the blocks that need not run."""

    members: list[int]
    reused: list[str]


class _Sweep:
    """Runs a model with many edits on the same inputs."""

    def __init__(self, model: nn.Module, inputs: Any, metric: Metric, tokens: Any) -> None:
        self._model, self._metric, self._tokens = model, metric, tokens
        self._args, self._kwargs = _split_inputs(inputs)
        parameters = inspect.signature(model.forward).parameters
        if "use_cache" in parameters:
            self._kwargs.setdefault("use_cache", False)
        num_logits = getattr(metric, "num_logits", None)
        if "logits_to_keep" in parameters and num_logits is not None:
            self._kwargs.setdefault("logits_to_keep", num_logits)
        tensors = [
            value for value in (*self._args, *self._kwargs.values()) if isinstance(value, torch.Tensor)
        ]
        self._batch = int(tensors[0].shape[0])
        self._can_batch = True
        self.layers: dict[str, int] = {}  # number of heads by name, in the order in which they run
        self._unbatched: set[str] = set()  # layers whose entries are not those of the batch

    def run_clean(self) -> float:
        """Run the model without edits; return the metric."""
        watching = watch(self._model, measures=lambda call: {})
        watching.binds_context = True
        with watching as recording:
            values = self._check(self._run())
        calls = {name: recording.calls(name) for name in recording}
        self.layers = {name: own[0].shape[-3] for name, own in calls.items()}
        self._unbatched = {
            name
            for name, own in calls.items()
            if any(math.prod(call.shape[:-3]) != self._batch or len(call.shape) < 4 for call in own)
        }
        self._can_batch = values.ndim == 1 and not is_edited(self._model) and self._are_independent(values)
        blocks = [block for name in self.layers if (block := find_block(name)) is not None]
        self._outputs = BlockOutputs(self._model, blocks, self._batch)
        with self._outputs.record():
            self._check_reuse(self._run())
        return float(values.double().mean())

    def _run(self, copies: int = 1) -> Tensor:
        """Run the model on copies of the inputs; return the metric."""
        args, kwargs = self._repeat_inputs(copies)
        return self._metric(self._model(*args, **kwargs))

    def _are_independent(self, clean: Tensor) -> bool:
        """Return whether the metric of a copy of the inputs stays if another copy is ablated."""
        batched = [name for name in self.layers if name not in self._unbatched]
        run = intervene(self._model, self._place_batch(ablate(batched), 1, 2))
        run.warns_of_unapplied = False
        with run:
            return self._agrees(clean, 2, num_compared=1)

    def _agrees(self, clean: Tensor, copies: int, num_compared: int) -> bool:
        """Return whether a run on copies of the inputs gives the metric of the first of them."""
        expected, tolerance = clean.repeat(copies) if clean.ndim else clean, find_tolerance(self._model)
        try:
            again = self._run(copies)
        except Exception:  # whatever a model raises if it lacks what it expects
            return False
        if again.shape != expected.shape:
            return False
        again, expected = (values.reshape(copies, -1)[:num_compared] for values in (again, expected))
        return bool(torch.allclose(again, expected, rtol=tolerance, atol=tolerance))

    def run_edits(
        self, edits: Sequence[Sequence[Edit]], batch_size: int, progress: Callable[[], None] | None
    ) -> list[float]:
        """Run the model with each of several edits; return the metric of each."""
        named = [[self._name_layers(edit) for edit in entry] for entry in edits]
        if any(_takes_mean(edit) for entry in named for edit in entry):
            # A mean over a batch of copies would include those that other edits change.
            means: Any = {"to": self._measure_means()}
            named = [
                [replace(edit, **means) if _takes_mean(edit) else edit for edit in entry] for entry in named
            ]
        results = [0.0] * len(named)
        for group in self._group(named, batch_size if self._can_batch else 1):
            copies = len(group.members)
            placed = [
                self._place_batch(edit, copy, copies)
                for copy, i in enumerate(group.members)
                for edit in named[i]
            ]
            run = intervene(self._model, placed, tokens=self._repeat_tokens(copies))
            run.warns_of_unapplied = False
            with (
                run,
                self._outputs.reuse(group.reused, copies),
            ):
                values = self._check(self._run(copies))
            for text in run.describe_unapplied().values():
                raise ArgumentError(
                    "effects",
                    received=f"edits of which a part does not apply: {text}",
                    expected="layers and positions that the run has",
                    hint="Positions count from 0, padding included; negative ones from the end.",
                )
            for i, value in zip(
                group.members, values.double().reshape(copies, -1).mean(1).tolist(), strict=True
            ):
                results[i] = value
                if progress is not None:
                    progress()
        return results

    def _measure_means(self) -> HeadMeans:
        """Run the model without edits; return the mean outputs of its heads."""
        with _MeanWatch(self._model) as watching:
            self._run()
        return watching.means

    def _group(self, edits: Sequence[Sequence[Edit]], batch_size: int) -> list[_Group]:
        """Group edits that can reuse the same blocks."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, entry in enumerate(edits):
            names: list[Any] = [name for edit in entry for name in edit.layers or ()]  # type: ignore[union-attr]
            blocks = [find_block(name) for name in names]
            reused = self._outputs.list_before(blocks) if self._reuses else []
            size = 1 if self._unbatched.intersection(names) else batch_size
            groups.setdefault((size, *reused), []).append(i)
        return [
            _Group(members[start : start + size], reused)
            for (size, *reused), members in groups.items()
            for start in range(0, len(members), size)
        ]

    def _check_reuse(self, clean: Tensor) -> None:
        """Reuse blocks only if a run that reuses as many as possible gives the same metric."""
        blocks = [find_block(name) for name in self.layers]
        copies = 2 if self._can_batch else 1
        with self._outputs.reuse(self._outputs.list_before(blocks[-1:]), copies):
            self._reuses = self._agrees(clean, copies, num_compared=copies)

    def _name_layers(self, edit: Edit) -> Edit:
        """Return an edit with the names of its layers: numbers would count those that run."""
        return replace(edit, layers=find_layers(edit.layers, self.layers, edit.name))

    def _place_batch(self, edit: Edit, copy: int, copies: int) -> Edit:
        """Return an edit that applies to one of several copies of the batch."""
        if copies == 1:
            return edit
        entries = select_entries(edit.batch, self._batch, "batch", edit.name)
        return replace(edit, batch=[copy * self._batch + int(entry) for entry in entries])

    def _repeat_inputs(self, copies: int) -> tuple[list[Any], dict[str, Any]]:
        def repeat(value: Any) -> Any:
            is_batched = isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == self._batch
            return value.repeat(copies, *(1,) * (value.ndim - 1)) if is_batched else value

        return [repeat(value) for value in self._args], {
            name: repeat(value) for name, value in copy_cache(self._kwargs, "effects").items()
        }

    def _repeat_tokens(self, copies: int) -> Any:
        from regard.lens.token_rows import as_token_lists

        if self._tokens is None:
            return None
        lists = as_token_lists(self._tokens, "effects")
        return lists * copies if len(lists) > 1 else lists

    def _check(self, values: Any) -> Tensor:
        is_single = isinstance(values, torch.Tensor) and values.ndim == 0
        is_batch = isinstance(values, torch.Tensor) and values.ndim == 1 and len(values) > 0
        is_batch = is_batch and len(values) % self._batch == 0
        if not is_single and not is_batch:
            shape = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else None
            raise ArgumentError(
                "effects",
                received=f"a metric that returns {shape or describe_argument(values)}",
                expected="one number for each batch entry, (batch,), or a single number",
                hint="For example metric=lambda output: output.logits[:, -1, answer].",
            )
        return values


def _split_inputs(inputs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments of a model."""
    if isinstance(inputs, Mapping):
        args, kwargs = [], dict(inputs)
    else:
        args, kwargs = list(inputs) if isinstance(inputs, tuple | list) else [inputs], {}
    if not any(isinstance(value, torch.Tensor) and value.ndim for value in (*args, *kwargs.values())):
        raise ArgumentTypeError(
            "effects",
            received=f"inputs as {describe_argument(inputs)}",
            expected="a tensor (batch, …), or a mapping of keyword arguments with one",
            hint="For example tokenizer(text, return_tensors='pt').",
        )
    return args, kwargs
