"""`effects`: how much a metric changes with each of many edits."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from regard.capture.call import Call, CapturedArgs
from regard.capture.module_names import find_place
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
from regard.interventions.layer_edits import compute_mean_output
from regard.interventions.model_runs import (
    LogitDifference,
    Metric,
    check_metric,
    copy_cache,
    find_tolerance,
    record_run,
)
from regard.interventions.placement import select_entries
from regard.lens.recording import Recording
from regard.lens.table import Table
from regard.lens.token_rows import as_token_lists
from regard.lens.watch import Watch, check_model
from regard.models.loaded_model import call_model
from regard.pages.html import Page, build_page
from regard.render.text import escape_unprintable
from regard.validation import check_count

Tensor = Any  # the types of torch are not followed

# Edits that run as one batch.
BATCH_SIZE = 16


def effects(
    model: nn.Module,
    inputs: Any,
    metric: Metric,
    edits: Literal["heads"] | Iterable[Edit | Sequence[Edit]] = "heads",
    *,
    baseline: Literal["zero", "mean"] | Recording | float = "zero",
    queries: Positions = None,
    keys: Positions = None,
    layers: Any = None,
    tokens: Any = None,
    batch_size: int = BATCH_SIZE,
    progress: Callable[[], None] | None = None,
) -> EffectTable:
    """Measure how much each edit changes a metric; return a table with one row per edit, in the order given.

    By default, each head is ablated separately. The edits run in batches, and layers before the edited layer are not
    recomputed, so a sweep over n heads costs about n / 2 forward passes.

    Edits run one by one, whatever `batch_size` is, if the metric of an entry depends on the rest of the batch, if a
    layer attends across batch entries (such as windows of an image), or if `intervene` already edits the model.

    Args:
        model: The model, in eval mode.
        inputs: Inputs of the model: a tensor (batch, …), or a mapping of keyword arguments.
        metric: Function from the model's output to one number for each batch entry, (batch,), such as
            `logit_difference(…)`. If it returns a single number, the edits run one by one.
        edits: "heads" to edit each head separately, or a list whose entries are edits or lists of edits that apply
            together.
        baseline: With "heads", the replacement for the output of a head, as in `ablate`. "mean", here and in edits, is
            the mean of the run without edits, even if several edits apply together. A recording made with
            `watch(values=True)` replaces the output of each head with its output in that run, as `patch(what="output")`
            does.
        queries: With "heads", the tokens at which heads are edited.
        keys: With "heads", knock out these keys instead of ablating the heads.
        layers: With "heads", the layers: numbers, names or patterns. Default: all.
        tokens: Tokens of the text, if edits name tokens by text, as in `intervene`.
        batch_size: Number of edits that run at once. A larger number needs more memory.
        progress: Called after each edit.

    Returns:
        A table. With "heads": `module`, `layer`, `head`, `metric` and `effect`, the metric minus the metric of the
        unedited model. With edits: `edit`, `metric` and `effect`. Values are means over the batch entries.
        `table.page()` and `regard.plot.effects(table)` draw the table.

    Raises:
        ArgumentTypeError: If an argument has the wrong type.
        ArgumentError: If the metric returns the wrong shape, there is no such layer, or `batch_size` is not a positive
            integer.

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
    model = check_model(model, "effects")
    check_metric(metric, "effects")
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
            rows, single, description = _list_heads(layers, sweep.layers, baseline, queries, keys)
            listed: list[tuple[Edit, ...]] = [(edit,) for edit in single]
        else:
            if isinstance(edits, Edit) or not hasattr(edits, "__iter__"):
                raise ArgumentTypeError(
                    "effects",
                    received=f"edits as {describe_argument(edits)}",
                    expected='"heads", or a list of edits',
                    hint="To measure one edit, pass a list: [edit].",
                )
            listed, description = [as_edits(entry, "effects") for entry in edits], ""
            rows = [{"edit": repr(entry[0]) if len(entry) == 1 else repr(list(entry))} for entry in listed]
        results = sweep.run_edits(listed, batch_size, progress)
    table = EffectTable(
        row | {"metric": result, "effect": result - clean} for row, result in zip(rows, results, strict=True)
    )
    table.clean, table.edit = clean, description
    table.metric = repr(metric) if isinstance(metric, LogitDifference) else "the metric"
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

    def page(self, title: str = "Effect of each head") -> Page:
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
        modules = {row["layer"]: row["module"] for row in self}
        record = {
            "title": escape_unprintable(title),
            "metric": escape_unprintable(self.metric),
            "edit": escape_unprintable(self.edit),
            "clean": self.clean,
            "modules": [escape_unprintable(modules.get(layer, "")) for layer in range(max(modules) + 1)],
            "layers": self.column("layer"),
            "heads": self.column("head"),
            "metrics": self.column("metric"),
            "effects": self.column("effect"),
        }
        return build_page(escape_unprintable(title), "effectsPage", record)


def _list_heads(
    layers: Any, heads: Mapping[str, int], baseline: Any, queries: Positions, keys: Positions
) -> tuple[list[dict[str, Any]], list[Edit], str]:
    """Return the row and the edit of each head, given the number of heads by layer, and what is done to each."""
    edit_head: Callable[..., Edit]
    if keys is not None:
        edit_head, text = partial(knockout, keys=keys), f"its edges to keys {keys!r} were knocked out"
    elif isinstance(baseline, Recording):
        edit_head, text = (
            partial(patch, source=baseline, what="output"),
            "its output was taken from another run",
        )
    else:
        edit_head, text = partial(ablate, baseline=baseline), f"its output was multiplied by {baseline}"
        if isinstance(baseline, str):
            text = (
                "its output was set to 0" if baseline == "zero" else "its output was replaced with its mean"
            )
    names = find_layers(layers, heads, "effects")
    rows = [
        {"module": name, "layer": list(heads).index(name), "head": head}
        for name in names
        for head in range(heads[name])
    ]
    edits = [edit_head(row["module"], heads=row["head"], queries=queries) for row in rows]
    return rows, edits, text if queries is None else f"{text} at queries {queries!r}"


def _takes_mean(edit: Edit) -> bool:
    return isinstance(edit, AblateEdit) and isinstance(edit.baseline, str) and edit.baseline == "mean"


class _MeanWatch(Watch):
    """A watch that keeps the mean output of each head."""

    binds_context = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, {name for name, _ in model.named_modules()}, CaptureOptions())
        self.means = HeadMeans()

    def record(self, module: nn.Module, name: str, args: CapturedArgs) -> None:
        """Keep the means of a call; the wrappers call it."""
        call = build_call(module, name, args, self._options, self._biases)
        assert isinstance(call, Call), "effects has captured it before"
        output = find_output(call, args) if args.edited_output is None else args.edited_output
        self.means.setdefault(name, []).append(compute_mean_output(replace(call, output=output)))


class _Sweep:
    """Runs a model with many edits on the same inputs."""

    def __init__(self, model: nn.Module, inputs: Any, metric: Metric, tokens: Any) -> None:
        self._model, self._metric, self._tokens = model, metric, tokens
        if isinstance(inputs, Mapping):
            self._args, self._kwargs = [], dict(inputs)
        else:
            self._args, self._kwargs = list(inputs) if isinstance(inputs, tuple | list) else [inputs], {}
        values = (*self._args, *self._kwargs.values())
        batches = [len(value) for value in values if isinstance(value, torch.Tensor) and value.ndim]
        if not batches:
            raise ArgumentTypeError(
                "effects",
                received=f"inputs as {describe_argument(inputs)}",
                expected="a tensor (batch, …), or a mapping of keyword arguments that contains one",
                hint="For example tokenizer(text, return_tensors='pt').",
            )
        parameters = inspect.signature(model.forward).parameters
        if "use_cache" in parameters:
            self._kwargs.setdefault("use_cache", False)
        num_logits = getattr(metric, "num_logits", None)
        if "logits_to_keep" in parameters and num_logits is not None:
            self._kwargs.setdefault("logits_to_keep", num_logits)
        self._batch = batches[0]
        self._can_batch = True
        self.layers: dict[str, int] = {}  # number of heads by name, in the order in which they run
        self._unbatched: set[str] = set()  # layers whose entries are not those of the batch

    def run_clean(self) -> float:
        """Run the model without edits; return the metric."""
        values, recording = record_run(
            self._model, lambda: self._check(self._run()), measures=lambda call: {}
        )
        calls = {name: recording.calls(name) for name in recording}
        self.layers = {name: own[0].shape[-3] for name, own in calls.items()}
        self._unbatched = {
            name
            for name, own in calls.items()
            if any(math.prod(call.shape[:-3]) != self._batch or len(call.shape) < 4 for call in own)
        }
        self._can_batch = values.ndim == 1 and not is_edited(self._model) and self._are_independent(values)
        blocks = [block for name in self.layers if (block := _find_block(name)) is not None]
        self._outputs = _BlockOutputs(self._model, blocks, self._batch)
        with self._outputs.record():
            self._check_reuse(self._run())
        return float(values.double().mean())

    def _run(self, copies: int = 1) -> Tensor:
        """Run the model on copies of the inputs; return the metric."""
        args = [_repeat_batch(value, self._batch, copies) for value in self._args]
        kwargs = {
            name: _repeat_batch(value, self._batch, copies)
            for name, value in copy_cache(self._kwargs, "effects").items()
        }
        return self._metric(call_model(self._model, "effects", args, kwargs))

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
        # Names instead of numbers, which would count the layers that run.
        named = [
            [replace(edit, layers=find_layers(edit.layers, self.layers, edit.name)) for edit in entry]
            for entry in edits
        ]
        if any(_takes_mean(edit) for entry in named for edit in entry):
            # A mean over a batch of copies would include those that other edits change.
            watching = _MeanWatch(self._model)
            with watching:
                self._run()
            means: Any = {"baseline": watching.means}
            named = [
                [replace(edit, **means) if _takes_mean(edit) else edit for edit in entry] for entry in named
            ]
        results = [0.0] * len(named)
        for members, reused in self._group(named, batch_size if self._can_batch else 1):
            copies, tokens = len(members), self._tokens
            placed = [
                self._place_batch(edit, copy, copies) for copy, i in enumerate(members) for edit in named[i]
            ]
            if tokens is not None:
                tokens = as_token_lists(tokens, "effects")
                tokens = tokens * copies if len(tokens) > 1 else tokens
            run = intervene(self._model, placed, tokens=tokens)
            run.warns_of_unapplied = False
            with run, self._outputs.reuse(reused, copies):
                values = self._check(self._run(copies))
            for text in run.describe_unapplied().values():
                raise ArgumentError(
                    "effects",
                    received=f"edits that do not fully apply: {text}",
                    expected="layers and positions that occur in the run",
                    hint="Positions count from 0, including padding; negative positions count from the end.",
                )
            means_of_copies = values.double().reshape(copies, -1).mean(1).tolist()
            for i, value in zip(members, means_of_copies, strict=True):
                results[i] = value
                if progress is not None:
                    progress()
        return results

    def _group(
        self, edits: Sequence[Sequence[Edit]], batch_size: int
    ) -> Iterator[tuple[list[int], list[str]]]:
        """Yield the edits that run as one batch: their numbers, and the blocks that need not run."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, entry in enumerate(edits):
            names: list[Any] = [name for edit in entry for name in edit.layers or ()]  # type: ignore[union-attr]
            blocks = [_find_block(name) for name in names]
            reused = self._outputs.list_before(blocks) if self._reuses else []
            size = 1 if self._unbatched.intersection(names) else batch_size
            groups.setdefault((size, *reused), []).append(i)
        for (size, *reused), members in groups.items():
            for start in range(0, len(members), size):
                yield members[start : start + size], reused

    def _check_reuse(self, clean: Tensor) -> None:
        """Reuse blocks only if a run that reuses as many as possible gives the same metric."""
        blocks = [_find_block(name) for name in self.layers]
        copies = 2 if self._can_batch else 1
        with self._outputs.reuse(self._outputs.list_before(blocks[-1:]), copies):
            self._reuses = self._agrees(clean, copies, num_compared=copies)

    def _place_batch(self, edit: Edit, copy: int, copies: int) -> Edit:
        """Return an edit that applies to one of several copies of the batch."""
        if copies == 1:
            return edit
        entries = select_entries(edit.batch, self._batch, "batch", edit.name)
        return replace(edit, batch=[copy * self._batch + int(entry) for entry in entries])

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


_lock = threading.RLock()


def _find_block(name: str) -> str | None:
    """Return the name of the block that contains a module: up to the first number in it; None if there is none.

    >>> _find_block("model.layers.3.self_attn"), _find_block("attention")
    ('model.layers.3', None)
    """
    stack, number = find_place(name)
    return None if number is None else f"{stack}.{number}".removeprefix(".")


def _repeat_batch(value: Any, batch: int, copies: int) -> Any:
    """Repeat the batch of a tensor; a value without one is returned as it is."""
    is_batched = isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == batch
    return value.repeat(copies, *(1,) * (value.ndim - 1)) if is_batched else value


class _BlockOutputs:
    """The outputs of the blocks of a model in one run with a number of batch entries, returned instead of computed.

    A block is a module of a list, such as `model.layers.3`, that contains attention. An edit of one block cannot change
    the blocks that finished before it began.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str], batch: int) -> None:
        self._modules = {name: model.get_submodule(name) for name in dict.fromkeys(blocks)}
        self._batch = batch
        self._outputs: dict[str, list[Any]] = {name: [] for name in self._modules}
        self._before: dict[str, tuple[str, ...]] = {}  # blocks that had finished when each one began

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep the output of every block that runs inside."""

        def wrap(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self._before.setdefault(name, tuple(block for block, kept in self._outputs.items() if kept))
                output = forward(*args, **kwargs)
                self._outputs[name].append(output)
                return output

            return run

        with _replace_forward({module: partial(wrap, name) for name, module in self._modules.items()}):
            yield

    def list_before(self, blocks: Iterable[str | None]) -> list[str]:
        """List the blocks that ran once, and had finished before any of some blocks, or None outside of them, began."""
        finished = [set(self._before.get(name, ())) if name is not None else set() for name in blocks]
        shared = set.intersection(*finished) if finished else set()
        return [name for name in self._outputs if name in shared and len(self._outputs[name]) == 1]

    @contextmanager
    def reuse(self, blocks: Iterable[str], copies: int) -> Iterator[None]:
        """Return the kept output of some blocks instead of running them, in a run of some copies of the batch."""

        def wrap(name: str, _: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._repeat(self._outputs[name][0], copies)

        with _replace_forward({self._modules[name]: partial(wrap, name) for name in blocks}):
            yield

    def _repeat(self, output: Any, copies: int) -> Any:
        """Repeat the batch of every tensor of an output; copies, since models may write to them in place."""
        if isinstance(output, tuple) and not hasattr(output, "_fields"):
            return tuple(self._repeat(entry, copies) for entry in output)
        if isinstance(output, list):
            return [self._repeat(entry, copies) for entry in output]
        if isinstance(output, dict):
            return type(output)((name, self._repeat(entry, copies)) for name, entry in output.items())
        return _repeat_batch(output, self._batch, copies)


@contextmanager
def _replace_forward(
    make_forwards: dict[nn.Module, Callable[[Callable[..., Any]], Callable[..., Any]]],
) -> Iterator[None]:
    """Replace the `forward` of modules in this thread, without hooks: they would disable fast paths of torch's layers.

    Threads take turns, since each restores what it found. `make_forwards` maps `forward` of each module to a new one.
    """
    owner = threading.get_ident()

    def choose(own: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (own if threading.get_ident() == owner else original)(*args, **kwargs)

    with _lock:
        saved = {module: vars(module).get("forward") for module in make_forwards}
        try:
            for module, make_forward in make_forwards.items():
                module.forward = choose(make_forward(module.forward), module.forward)
            yield
        finally:
            for module, forward in saved.items():
                if forward is not None:
                    module.forward = forward
                else:
                    vars(module).pop("forward", None)
