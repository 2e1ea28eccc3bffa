"""`intervene`: change the attention of a model while it runs, through the wrappers with which `watch` records."""

from __future__ import annotations

import types
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from regard.capture.call import Call, CapturedArgs
from regard.capture.module_names import is_selected
from regard.capture.record import CaptureOptions, Uncaptured, build_call
from regard.capture.watchers import find_arguments, join_names, list_watchers, run_to_attention, watched
from regard.errors import ArgumentError, NotCapturedError, describe_argument
from regard.interventions.edited_rows import compute_rows
from regard.interventions.edits import (
    AblateEdit,
    Edit,
    InputEdit,
    KnockoutEdit,
    PatchEdit,
    RescoreEdit,
    RestrictEdit,
    as_edits,
    as_selection,
    list_entries,
    matches_layer,
)
from regard.interventions.layer_edits import BoundEdit, LayerEdits, flatten_value
from regard.interventions.placement import SequencePositions
from regard.lens.recording import Recording
from regard.lens.table import Table
from regard.lens.token_rows import as_token_lists
from regard.lens.watch import ATTENDS_OVER_CHANNELS, Watch, check_model

__all__ = ["intervene"]

Tensor = Any  # the types of torch are not followed

# Edits that a warning describes, and layers that it lists by name.
MAX_WARNED, MAX_LISTED = 4, 6


def intervene(
    model: nn.Module,
    edits: Edit | Iterable[Edit],
    *,
    tokens: Any = None,
    query_tokens: Any = None,
    record: bool = False,
    values: bool = False,
) -> Intervention:
    """Change the attention of a model: `with regard.intervene(model, edits): model(**inputs)`.

    The model keeps its kernels. Only the heads and rows that an edit touches are computed differently, and everything
    else is bit-identical. Edits apply in `forward` and `generate()`, positions count over the whole sequence, and
    gradients flow through the edits. Interventions can be nested, including with `regard.watch`, which then records the
    attention after the edits.

    Edits apply in the thread or asyncio task that enters the block, and in tasks that it starts there. Other threads
    run the model without edits. If activations are checkpointed (`torch.utils.checkpoint`), edits also apply when a
    backward pass reruns part of the model, inside the block or after it.

    Within a layer, queries and keys are patched first, then masks and score modifications are applied, then patterns
    and values are patched, then outputs.

    Args:
        model: The model, as in `regard.watch`.
        edits: One or several edits from `regard.interventions`: `knockout`, `restrict`, `rescore`, `ablate`, `patch`,
            `patch_input`.
        tokens: Tokens of the keys, (n,) or (batch, n), for edits that name tokens by text; also used for the queries if
            both are the same sequence. For an encoder-decoder model, the tokens that the encoder reads.
        query_tokens: Tokens of the queries of cross-attention, which the decoder reads.
        record: Record the attention after the edits, as `regard.watch` does: `run.recording`.
        values: Also record value and output.

    Returns:
        A context manager; `with` binds the `Intervention`. If an edit names layers that do not run in the block, or
        positions that no sequence has, a warning is issued when the block ends.

    Raises:
        ArgumentTypeError: If an argument has the wrong type.
        ArgumentError: If the model is compiled or scripted, or a pattern of an edit matches no module. Also raised
            during the run if an edit cannot be applied, because dropout is active or the source recording lacks the
            tensor to patch.
        IndexOutOfRangeError: During the run, if a layer has no such head or batch entry.
        NotCapturedError: If an edited layer computes its attention in a way that cannot be changed. The message says
            why.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> x = torch.randn(1, 3, 8)
    >>> with regard.intervene(layer, regard.interventions.ablate(heads=[0, 1])) as run:
    ...     without = layer(x)
    >>> torch.equal(without, layer(x))
    False
    >>> run.applied
    module     edit                   calls  path
    self_attn  ablate(heads=[0, 1], baseline='zero')  1  output replaced
    """
    model = check_model(model, "intervene")
    listed = as_edits(edits, "intervene")
    texts, query_texts = (
        None if given is None else as_token_lists(given, "intervene") for given in (tokens, query_tokens)
    )
    names = [name for name, _ in model.named_modules()]
    for edit in listed:
        for pattern in list_entries(edit.layers):
            if isinstance(pattern, str) and not any(is_selected(name, pattern) for name in names):
                raise ArgumentError(
                    edit.name,
                    received=f"layers with {pattern!r}",
                    expected="module names, patterns that match module names, or layer numbers",
                    hint=f"The model has {', '.join(map(repr, names[1:4]))}, …; model.named_modules() lists all names.",
                )
    bound = [BoundEdit(edit, texts, query_texts) for edit in listed]
    return Intervention(model, bound, CaptureOptions(values=values) if record or values else None)


class _EditReach:
    """What the edits of a block select, and the calls of the block have not had so far."""

    def __init__(self, edits: Sequence[Edit]) -> None:
        # By number of the edit and parameter: the entries that no call has had.
        self._missing = {
            (i, parameter): entries
            for i, edit in enumerate(edits)
            for parameter in ("layers", "queries", "keys", "heads", "batch")
            if (entries := list_entries(getattr(edit, parameter, None)))
        }
        self._length = 0
        self._has_run: set[int] = set()
        self._count = len(edits)

    def note(self, i: int, number: int, place: int, edits: LayerEdits) -> None:
        """Note that edit `i`, at a place among the edits of a call, applies to a layer with a number."""
        self._has_run.add(i)
        self._length = max(self._length, edits.placement.num_queries, edits.placement.num_keys)
        for (owner, parameter), missing in self._missing.items():
            if owner != i:
                continue
            self._missing[i, parameter] = [
                entry
                for entry in missing
                if not (
                    matches_layer(entry, edits.name, number)
                    if parameter == "layers"
                    else edits.reaches(place, parameter, entry)
                )
            ]

    def describe(self, numbers: Mapping[str, int], where: str) -> dict[int, str]:
        """Describe what was not found of each edit that did not apply as a whole, by its number."""
        if not numbers:
            return dict.fromkeys(range(self._count), f"no attention layer of the model ran{where}")
        ran = [f"{number} {name!r}" for name, number in numbers.items()]
        if len(ran) > MAX_LISTED:
            ran = [*ran[: MAX_LISTED - 1], "…", ran[-1]]
        found: dict[int, list[str]] = {}
        for (i, parameter), missing in self._missing.items():
            if not missing or (parameter != "layers" and i not in self._has_run):
                continue
            listed = ", ".join(map(repr, missing))
            if parameter == "layers":
                text = f"layer{'s' * (len(missing) > 1)} {listed} did not run; {len(numbers)} ran: {', '.join(ran)}"
            elif parameter in ("heads", "batch"):
                text = f"{parameter} {listed} not found in the layers that ran"
            else:
                text = f"{parameter} {listed} are outside the sequence of {self._length} tokens"
            found.setdefault(i, []).append(text)
        return {i: "; ".join(texts) for i, texts in found.items()}


class Intervention(Watch):
    """The context manager that `regard.intervene` returns; `with` binds the intervention itself.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with regard.intervene(layer, regard.interventions.ablate(heads=0), record=True) as run:
    ...     output = layer(torch.ones(1, 3, 8))
    >>> run.recording
    Recording(1 layer, 192 bytes held)
      self_attn: (batch 1, heads 2, q_len 3, kv_len 3)
    """

    binds_context = True
    _operation = "intervene"
    _use_recording = (
        "Use run.recording: with regard.intervene(model, edits, record=True) as run: model(**inputs)."
    )

    def __init__(self, model: nn.Module, bound: Sequence[BoundEdit], options: CaptureOptions | None) -> None:
        super().__init__(model, {name for name, _ in model.named_modules()}, options or CaptureOptions())
        self._is_recording = options is not None
        self._bound = bound
        self._numbers: dict[str, int] = {}
        self._positions = SequencePositions()
        self._plain_options, self._grad_options = CaptureOptions(), CaptureOptions(grad=True)
        self._paths: dict[tuple[str, int], dict[str, int]] = {}
        self._reach = _EditReach(())
        self._ran: dict[str, int] = {}  # numbers of the layers that ran in the present block
        self.warns_of_unapplied = True

    def __enter__(self) -> Intervention:  # type: ignore[override]
        """Patch the attention functions; edits apply from now on."""
        super().__enter__()
        self._positions = SequencePositions()
        self._reach, self._ran = _EditReach([entry.edit for entry in self._bound]), {}
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Restore everything that was patched; warn of edits that did not apply."""
        self._positions = SequencePositions()  # it holds keys
        try:
            super().__exit__(error_type, error, traceback)
        except NotCapturedError:
            for name, fault in self._recording._uncaptured.items():
                if self._may_edit(name):
                    raise _build_refusal(name, fault.reason, fault.hint) from None
        unapplied = self.describe_unapplied() if error_type is None and self.warns_of_unapplied else {}
        if unapplied:
            listed = [f"{self._bound[i].edit!r}: {text}." for i, text in unapplied.items()]
            more = [f"And {len(listed) - MAX_WARNED} more."] if len(listed) > MAX_WARNED else []
            warnings.warn(
                f"intervene: {len(listed)} of {len(self._bound)} edits did not fully apply. "
                + " ".join(listed[:MAX_WARNED] + more),
                stacklevel=2,
            )

    def describe_unapplied(self) -> dict[int, str]:
        """Describe, by number of the edit, the layers and positions that no call of the last block had."""
        where = " in this thread; edits do not apply to other threads" if self._ran_elsewhere else ""
        return self._reach.describe(self._ran, where)

    @property
    def recording(self) -> Recording:
        """The attention of the layers that ran, after the edits.

        Raises:
            ArgumentError: If nothing was recorded.
        """
        if not self._is_recording:
            raise ArgumentError(
                "intervention.recording",
                received="an intervention without a recording",
                expected="one that records",
                hint="Pass record=True: regard.intervene(model, edits, record=True).",
            )
        return self._recording

    @property
    def applied(self) -> Table:
        """Which edits were applied to which layers, in how many calls, and how the output was computed."""
        return Table(
            {
                "module": module,
                "edit": repr(self._bound[i].edit),
                "calls": sum(paths.values()),
                "path": "; ".join(paths),
            }
            for (module, i), paths in self._paths.items()
        )

    @property
    def keeps_grad(self) -> bool:
        """Whether calls are passed on with their graph: always, since edits change what gradients flow through."""
        return True

    def record(self, module: nn.Module, name: str, args: CapturedArgs) -> None:
        """Record a call after the edits; the wrappers call it."""
        if self._is_recording:
            super().record(module, name, args)

    def report_uncaptured(self, name: str, reason: str, hint: str) -> None:
        """Raise an error if an edit selects a layer that cannot be captured; the wrappers call it."""
        if self._watched_ids and self._may_edit(name):
            raise _build_refusal(name, reason, hint)
        super().report_uncaptured(name, reason, hint)

    def drop_channels(self, name: str) -> None:
        """Raise an error if an edit changed a layer whose rows are channels; the wrappers call it."""
        if any(module == name for module, _ in self._paths):
            raise _build_refusal(
                name, ATTENDS_OVER_CHANNELS.reason, "Select other layers by their names: layers=…."
            )
        self._numbers.pop(name, None)  # it has no number in a recording
        self._ran.pop(name, None)
        super().drop_channels(name)

    def replaces_output(self, name: str, args: CapturedArgs) -> bool:
        """Return whether a call is edited only by masks of whole heads, so that each head is computed once."""
        edits = [self._bound[i].edit for i in self._number_and_select(name)]
        return (
            bool(edits)
            and all(isinstance(edit, RestrictEdit) and edit.batch is None for edit in edits)
            and args.query.ndim == 4
            and not self._is_recording
            and not args.dropout_p
            and not _tracks_gradients(args)
        )

    def _number_and_select(self, name: str) -> list[int]:
        """Number a layer that runs, and return the numbers of the edits that select it."""
        number = self._ran[name] = self._numbers.setdefault(name, len(self._numbers))
        return [i for i, entry in enumerate(self._bound) if entry.edit.selects(name, number)]

    def edit(self, module: nn.Module, name: str, args: CapturedArgs) -> CapturedArgs:
        """Apply the edits to a call; the wrappers call it."""
        chosen = self._number_and_select(name)
        if not chosen:
            self._positions.preceding = lambda: self._build(module, name, args, self._plain_options)
            return args
        tracks = _tracks_gradients(args)
        call = self._build(module, name, args, self._grad_options if tracks else self._plain_options)
        if not isinstance(call, Call) and tracks and args.dense is not None:
            call = self._build(module, name, args, self._plain_options)
        if not isinstance(call, Call):
            raise _build_refusal(name, call.reason, call.hint)
        bound = tuple(self._bound[i] for i in chosen)
        _check_dropout(call, module, bound)
        if args.dense is not None and args.dense.is_slice and any(map(_names_heads, bound)):
            raise _build_refusal(
                name,
                "it computes its heads in slices, and a call does not say which heads it has",
                "Turn slicing off, for diffusers with set_attention_slice(None). Fused kernels need no slices.",
            )
        bound = tuple(
            entry._replace(source=self._compute_inputs(entry.edit, name, call, tracks))
            if isinstance(entry.edit, InputEdit)
            else entry
            for entry in bound
        )
        placement = self._positions.locate(call)
        outer = () if args.edits is None else args.edits.bound  # type: ignore[attr-defined]
        call_index = sum(self._paths.get((name, chosen[0]), {}).values())
        edits = LayerEdits(name, (*outer, *bound), placement, call_index)
        if args.value is not None or args.dense is not None:
            output, path = edits.apply(call, args, find_output(call, args) if args.has_run else None)
        elif all(isinstance(entry.edit, KnockoutEdit | RestrictEdit | RescoreEdit) for entry in edits.bound):
            output, path = None, "matrix replaced"
        else:
            raise _build_refusal(
                name,
                "the layer itself multiplies the matrix of regard.attention by its value",
                "Edit its mask or scores instead (knockout, restrict, rescore), or use regard.nn.MultiheadAttention.",
            )
        for i in chosen:
            self._reach.note(i, self._numbers[name], len(outer) + chosen.index(i), edits)
            paths = self._paths.setdefault((name, i), {})
            label = path or (
                "output replaced" if output is not None and args.has_run else "nothing to change"
            )
            paths[label] = paths.get(label, 0) + 1
        weights = None
        if output is not None and args.weights is not None:
            weights = _compute_weights(call, edits, args.weights)
        kernel = "; ".join(filter(None, (args.kernel, path)))
        return args._replace(edits=edits, edited_output=output, edited_weights=weights, kernel=kernel)

    def _compute_inputs(self, edit: InputEdit, name: str, call: Call, tracks: bool) -> Call:
        """Return the call that a layer would make if its block read the changed input of an edit."""

        def refuse(received: str, expected: str, hint: str) -> NoReturn:
            raise ArgumentError("patch_input", received=f"{name!r}, {received}", expected=expected, hint=hint)

        if call.weights is not None:
            refuse(
                "which computes its own softmax",
                "a layer whose query, key and value are known",
                "Load the model with attn_implementation='sdpa', or edit its output or pattern.",
            )
        parts = name.split(".")
        depth = next((i for i in range(len(parts), 0, -1) if parts[i - 1].isdigit()), 0)
        block = self._model.get_submodule(".".join(parts[:depth]))
        arguments = find_arguments(block)
        args, kwargs = ([], {}) if arguments is None else (list(arguments[0]), dict(arguments[1]))
        places: list[tuple[Any, Any]] = [(args, i) for i in range(len(args))] + [
            (kwargs, key) for key in kwargs
        ]
        streams = [(held, key) for held, key in places if _is_stream(held[key])]
        if not streams:
            refuse(
                f"whose block {'.'.join(parts[:depth]) or 'is the model and'!r} reads no vectors (batch, n, d_model)",
                "a layer in a list of blocks, such as model.layers, which pass on a residual stream",
                "Patch the query, key or value of another run: patch(what='query', source=recording).",
            )
        held, key = streams[0]
        changed = edit.change(held[key])
        if not isinstance(changed, torch.Tensor) or changed.shape != held[key].shape:
            refuse(
                f"whose input was changed to {describe_argument(changed)}",
                f"a tensor of shape {tuple(held[key].shape)}",
                "Return the changed vectors: change=lambda stream: stream + difference.",
            )
        held[key] = changed
        for held, key in places:
            if hasattr(held[key], "get_seq_length"):  # a cache, which the block would extend twice
                held[key] = None
        found = run_to_attention(lambda: block.forward(*args, **kwargs))
        if found is None or not any(
            watcher is self and join_names(own, found[2]) == name for watcher, own in list_watchers(found[0])
        ):
            refuse(
                "which is not the first attention of its block",
                "a layer that reads the input of its block",
                "Patch the query, key or value of another run: patch(what='query', source=recording).",
            )
        options = CaptureOptions(values=True, grad=tracks)
        probed = self._build(found[0], name, found[1], options)
        if not isinstance(probed, Call):
            raise _build_refusal(name, probed.reason, probed.hint)
        if probed.shape != call.shape:
            refuse(
                "in a step with a cache, whose earlier keys are not computed again",
                "a run over the whole sequence",
                "Run the model once on all tokens, with use_cache=False if its cache has a fixed size.",
            )
        return probed

    def _build(
        self, module: nn.Module, name: str, args: CapturedArgs, options: CaptureOptions
    ) -> Call | Uncaptured:
        """Return the record of a call without edits, or why it cannot be recorded."""
        return build_call(module, name, args._replace(edits=None, edited_output=None), options, self._biases)

    @property
    def _captured_names(self) -> Collection[str]:
        return self._numbers  # also if nothing is recorded

    def _may_edit(self, name: str) -> bool:
        """Return whether an edit selects a layer by name, or by a number that it might have."""
        number = self._numbers.get(name)
        return any(
            entry.edit.selects(name, number)
            or (number is None and any(isinstance(layer, int) for layer in list_entries(entry.edit.layers)))
            for entry in self._bound
        )


def is_edited(model: nn.Module) -> bool:
    """Return whether an intervention edits a model in the running thread."""
    return any(
        isinstance(watcher, Intervention) and watcher.applies_here
        for module in model.modules()
        for watcher, _ in watched.get(id(module), ())
    )


def find_layers(layers: Any, names: Iterable[str], operation: str) -> list[str]:
    """Return the names of the layers, of all in order, that numbers, names or patterns select; None for all."""
    ordered = list(names)
    edit = Edit(layers=as_selection(layers, operation, "layers"))
    chosen = [name for i, name in enumerate(ordered) if edit.selects(name, i)]
    missing = [
        repr(entry)
        for entry in list_entries(edit.layers)
        if not any(matches_layer(entry, name, i) for i, name in enumerate(ordered))
    ]
    if missing or not chosen:
        raise ArgumentError(
            operation,
            received=f"layers with {', '.join(missing) or 'nothing'}, which matches none of {len(ordered)} attention "
            "layers",
            expected=f"numbers from 0 to {len(ordered) - 1}, or names such as {ordered[0]!r}"
            if ordered
            else "a model with attention",
            hint="list(recording) lists the attention layers of a run in order.",
        )
    return chosen


def _is_stream(value: Any) -> bool:
    """Return whether an argument of a block may be its residual stream, (batch, n, d_model)."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim == 3


def _tracks_gradients(args: CapturedArgs) -> bool:
    """Return whether gradients flow through the arguments of a call."""
    tensors = (args.query, args.key, args.value)
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _check_dropout(call: Call, module: nn.Module, bound: Sequence[BoundEdit]) -> None:
    """Refuse to edit weights that dropout has changed."""
    changes_weights = any(
        not isinstance(entry.edit, AblateEdit)
        and not (isinstance(entry.edit, PatchEdit) and entry.edit.what == "output")
        for entry in bound
    )
    if changes_weights and call.dropout_p and module.training:
        raise ArgumentError(
            "intervene",
            received=f"{call.name!r} with dropout {call.dropout_p} in training mode",
            expected="weights without dropout",
            hint="Call model.eval(), or set the dropout of the attention to 0.",
        )


def _names_heads(entry: BoundEdit) -> bool:
    """Return whether an edit does not do the same to every head of every batch entry."""
    edit = entry.edit
    if isinstance(edit, AblateEdit) and edit.baseline != "zero":
        return True
    return edit.heads is not None or edit.batch is not None or isinstance(edit, PatchEdit | InputEdit)


def find_output(call: Call, args: CapturedArgs) -> Tensor:
    """Return the output of the function that ran, (…, heads, q_len, value_dim), computed again if it is not known."""
    output = args.dense.output if call.weights is not None and args.dense is not None else args.output
    if output is not None:
        return output
    value = flatten_value(args, call)
    problem = call.matrix.problem
    computed = compute_rows(problem, np.arange(len(problem.pair_ids)), None, value)
    return computed.reshape(*call.shape[:-1], computed.shape[-1])


def _compute_weights(call: Call, edits: LayerEdits, weights: Tensor) -> Tensor | None:
    """Return the weights after the edits in the form in which the function returned them; None if it has another."""
    edited = edits.edit_call(replace(call, edits=edits, lse=None)).matrix.to_dense()
    if edited.ndim == weights.ndim + 1 or (
        edited.ndim == weights.ndim and weights.shape[0] != edited.shape[0]
    ):
        edited = edited.mean(-3)
    edited = edited.to(weights.dtype)
    return edited.reshape(weights.shape) if edited.numel() == weights.numel() else None


def _build_refusal(name: str, reason: str, hint: str) -> NotCapturedError:
    return NotCapturedError(
        "intervene",
        received=f"an edit of {name!r}, which cannot be changed: {reason}",
        expected="a layer that calls F.scaled_dot_product_attention, or an attention function of transformers",
        hint=hint
        or "Name other layers in the edit, or load the model with attn_implementation='sdpa' if it supports that.",
    )
