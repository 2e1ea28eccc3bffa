"""`watch`: record the attention of a model while it runs, without changing its outputs."""

from __future__ import annotations

import re
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from regard.capture.call import Call, CapturedArgs
from regard.capture.module_names import (
    is_selected,
    list_patterns,
    read_attribute,
    walk_modules,
    walk_once,
)
from regard.capture.own_softmax import SoftmaxTrace, close_traces
from regard.capture.patching import exclude_from_compile
from regard.capture.record import (
    MAX_DENSE_BYTES,
    CaptureOptions,
    Uncaptured,
    build_call,
    find_position_biases,
)
from regard.capture.watchers import (
    Watcher,
    is_recomputing,
    row_steps,
    speculative_mode,
    thread_state,
    watched,
)
from regard.capture.wrappers import find_patch_targets
from regard.errors import ArgumentError, ArgumentTypeError, NotCapturedError, describe_argument
from regard.lens.recording import EmptyRecordingWarning, Recording
from regard.lens.sharded_recording import ShardedRecording
from regard.lens.spans import SpanRanges, parse_spans
from regard.masks import first
from regard.measures import Distance, Entropy, Mass, Measure

__all__ = ["Watch", "watch"]

# Layers of torch whose fast paths check for hooks. The functions they call are wrapped, and they get no hooks.
_NATIVE_LAYERS = (
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)

# Classes that are named attention, and have no weights by design.
_WITHOUT_WEIGHTS = re.compile("linear|delta|lightning|recurrent", re.IGNORECASE)

_OWN_SOFTMAX_HINT = (
    "If it is a transformers model, load it with attn_implementation='sdpa' if it supports that; "
    "in your own layer call F.scaled_dot_product_attention, and nothing else changes."
)

ATTENDS_OVER_CHANNELS = Uncaptured(
    "its weights are between channels and not between tokens, as in cross-covariance attention",
    "There is nothing to fix; measures of tokens do not apply to it.",
    is_intended=True,
)

Measures = Mapping[str, Measure] | Callable[[Call], dict[str, Any]] | Literal["default"]


def watch(
    model: nn.Module,
    *,
    layers: str | Iterable[str] | None = None,
    measures: Measures | None = None,
    spans: SpanRanges | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    copy: bool = False,
    values: bool = False,
    max_dense_bytes: int = MAX_DENSE_BYTES,
    grad: bool = False,
    group: Any = None,
    layout: Literal["contiguous", "zigzag"] = "contiguous",
) -> Watch:
    """Record the attention of a model: `with regard.watch(model) as recording: model(**inputs)`.

    The model runs its usual kernels, and its outputs are bit-identical. The recording maps the names of the model's
    attention layers to lazy matrices; see `regard.lens.Recording`. Watches can be nested and are shared between
    threads. With activation checkpointing, a layer that `backward()` reruns is recorded once, in its first run.

    If a function around the model is compiled, the graph breaks at each attention call, and outputs agree up to
    rounding.

    Args:
        model: The model. It must run in Python, so it must not be compiled, scripted or split by `nn.DataParallel`.
        layers: Names of modules, or patterns with `*`, to record including their submodules. Default: all.
        measures: Record these measures of each call instead of its query and key, to save memory. A mapping from
            names to measures; "default" for entropy, weight on the first key ("first") and distance; or a function
            that is called with each `regard.lens.Call` and returns results by name. The results are in
            `Call.measures`. By default, query and key are recorded, and any measure can be computed later.
        spans: Named parts of the prompt, for `Recording.span_mass`: a mapping from names to ranges of tokens, (start,
            stop) or slices, or a list with one mapping for each batch entry. `regard.lens.token_spans` finds texts in a
            prompt.
        device: Move recorded tensors to this device.
        dtype: Convert recorded tensors to this dtype.
        copy: Copy query and key, and masks, biases and sinks that are held as arrays. By default, they are referenced,
            except for tensors that the model may overwrite.
        values: Also record value and output, and find the output projection of each layer, which
            `Recording.value_norms` and `find(by="contribution")` need. For the first pass, also record the inputs and
            outputs of each module, for at most 32 tokens; `regard.compare` uses them to name the module that differs.
        max_dense_bytes: Layers that compute their own softmax are recorded as dense weights, (q_len, kv_len). Once the
            total exceeds this limit, remaining layers are reported as not captured. Default: 1 GiB.
        grad: Record the tensors with their graph, so that gradients flow from the matrices to the weights of the model,
            for example if a loss contains the entropy of a head. By default, recorded tensors are detached. Analyses
            such as `Recording.heads`, and saved files, have no gradients.
        group: Process group of `torch.distributed` whose ranks hold parts of the sequence. All ranks must watch, and
            each matrix covers all ranks: a `regard.distributed.DistributedMatrix`. Layers must use
            `regard.distributed.attention`, or gather the keys of all ranks in order before they call an attention
            function. By default, each rank records its own calls.
        layout: Which part of the sequence each rank holds, as in `regard.distributed.attention`.

    Returns:
        A context manager whose value is the `Recording`.

    Raises:
        ArgumentTypeError: If `model` or `measures` has the wrong type.
        ArgumentError: If the model is compiled or scripted, `layers` matches no module, `spans` are empty or overlap,
            or `grad`, `values` or `spans` is combined with `measures`. With `grad`, also if a layer runs where
            gradients are disabled.
        NotCapturedError: At the end of the block, if an attention layer ran but was not captured. The message says why,
            and what to do.

    Warns:
        EmptyRecordingWarning: If nothing was captured in the block.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with regard.watch(layer) as recording:
    ...     output = layer(torch.ones(1, 3, 8))
    >>> recording["self_attn"].entropy().shape
    torch.Size([1, 2, 3])
    >>> with regard.watch(layer, measures={"entropy": regard.Entropy()}) as recording:
    ...     output = layer(torch.ones(1, 3, 8))
    >>> recording.calls("self_attn")[0].measures["entropy"].shape
    torch.Size([1, 2, 3])
    """
    _check_storage(device, dtype, max_dense_bytes)
    options = CaptureOptions(
        device=device,
        dtype=dtype,
        copy=copy,
        values=values,
        measures=_resolve_measures(measures),
        max_dense_bytes=max_dense_bytes,
        grad=grad,
    )
    excluded = {
        "grad=True": (grad, "measures are computed during the run, without gradients"),
        "values=True": (values, "measures are recorded instead of the tensors of a call"),
        "spans": (spans is not None, "the shares of spans are computed from queries and keys"),
    }
    for name, (is_passed, reason) in excluded.items():
        if is_passed and measures is not None:
            raise ArgumentError(
                "watch",
                received=f"{name} and measures",
                expected=f"one of them: {reason}",
                hint="Omit measures, and compute them from the recording: recording[name].measure(…).",
            )
    parsed = None if spans is None else parse_spans(spans, "watch")
    recording = None
    if group is not None:
        if grad or values or measures is not None or spans is not None:
            raise ArgumentError(
                "watch",
                received="group with grad, values, measures or spans",
                expected="group alone",
                hint="Compute measures from the recording, on all ranks: recording[name].measure(…).",
            )
        recording = ShardedRecording(group, layout)
    with walk_once():
        model = check_model(model, "watch")
        selected = _select_modules(model, layers)
        return Watch(model, selected, options, Recording(parsed) if recording is None else recording)


class Watch(Watcher):
    """The context manager that `regard.watch` returns; `with` binds the `Recording`.

    A watch may be entered again after its block has ended; its recording then continues.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> watching = regard.watch(layer)
    >>> with watching as recording:
    ...     output = layer(torch.ones(1, 3, 8))
    >>> list(recording)
    ['self_attn']
    """

    _traces_modules = True  # with the values, for `compare`
    follows_compiled = False  # whether calls inside the graphs of torch.compile are recorded
    _operation = "watch"
    _use_recording = (  # hint of an error
        "Run the model in the block, then use the recording: with regard.watch(model) as recording: model(**inputs)."
    )

    def __init__(
        self,
        model: nn.Module,
        selected: set[str],
        options: CaptureOptions,
        recording: Recording | None = None,
    ) -> None:
        super().__init__(model, selected)
        self._options = options
        self._biases = list(find_position_biases(model))
        self._recording = Recording() if recording is None else recording
        self._hooks: list[Any] = []
        # Captures of each thread before each running module, by (thread, id of the module).
        self._captures_before: dict[tuple[int, int], int] = {}
        # Of the pass that each thread is in: how `generate()` proposes tokens, the cache that the model was given, and
        # the number of the pass.
        self._passes: dict[int, tuple[str, Any, int]] = {}
        self._num_passes = 0
        # Class of each module that computed a softmax, and one that was not read if there is any, by name.
        self._softmaxes: dict[str, tuple[str, SoftmaxTrace]] = {}
        # Modules that are named attention and ran without a capture, by name.
        self._without_capture: dict[str, str] = {}
        self._has_run = False  # the model itself, in this block
        # Takes the matrix of a layer whose tokens are on several ranks, by name.
        self._add_matrix: Callable[[str, Any], object] | None = getattr(self._recording, "_add_matrix", None)
        self._warns_if_empty = recording is not None  # other classes of watches make their own recording
        self._ran_elsewhere = False  # whether the model ran in a context that the block does not concern

    def __getattr__(self, name: str) -> Any:
        hint = self._use_recording
        if hasattr(Recording, name):
            hint += f" recording.{name} is available after the run."
        raise AttributeError(
            f"{self._operation}: {name!r} is not an attribute of {type(self).__name__}. {hint}"
        )

    def _refuse_access(self, *_: Any) -> NoReturn:
        """Raise an error, because a watch was used as if it were its recording."""
        raise ArgumentTypeError(
            self._operation,
            received=f"{type(self).__name__} used as a recording",
            expected="the recording itself",
            hint=self._use_recording,
        )

    # Without these, Python would raise an error that does not name the recording.
    __getitem__ = __iter__ = __contains__ = __len__ = _refuse_access

    def __bool__(self) -> bool:  # which would call __len__
        return True

    def __enter__(self) -> Recording:
        """Patch the attention functions and start recording."""
        self._enter()
        return self._recording

    def _enter(self) -> None:
        with walk_once():
            self._patch_and_hook()

    def _patch_and_hook(self) -> None:
        if self._targets:
            raise ArgumentError(
                "watch",
                received="a watch that has already been entered",
                expected="one with block for each watch",
                hint="Call regard.watch(model) once for each block; blocks may be nested.",
            )
        self._has_run = self._ran_elsewhere = False
        try:
            native = find_native_parts(self._model)
            if not self.follows_compiled:  # the compiler would guard the hooks
                self._register_hooks(native)
            if not callable(self._options.measures):  # a function reads calls, and nothing of the recording
                self._hooks.extend(self._recording._module_hints.attach(self._model, self._guard))
            if self._options.values:
                self._hooks.extend(self._recording._projections.attach(self._model, native))
                if self._traces_modules:
                    self._hooks.extend(self._recording._trace.attach(self._model, native))
            targets = find_patch_targets(self._model)
            if self.follows_compiled:
                from regard.capture.compiled_calls import follow_compiled  # loads the compiler

                targets = follow_compiled(targets)
            self._targets = list(targets)
            if self.binds_context:
                self.bind_context()
            self.resume()
        except BaseException:
            self._restore()
            raise

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Restore everything that was patched.

        Raises:
            NotCapturedError: If the block raised nothing, and an attention layer ran and was not captured.
        """
        self._restore()
        self._report_missed_layers()
        failures = self._recording._uncaptured.items()
        uncaptured = {name: failure for name, failure in failures if not failure.is_intended}
        if error_type is None and uncaptured:
            name, first_failure = next(iter(uncaptured.items()))
            more = "" if len(uncaptured) < 2 else f" (and {len(uncaptured) - 1} more)"
            raise NotCapturedError(
                "watch",
                received=f"a run in which {name!r}{more} was not captured: {first_failure.reason}",
                expected="attention that the lens can capture",
                hint=f"{first_failure.hint} Or watch other layers only, with layers=.",
            )
        if error_type is None and self._warns_if_empty and not len(self._recording):
            warnings.warn(self._describe_empty(), EmptyRecordingWarning, stacklevel=2)

    def _describe_empty(self) -> str:
        """Say why the recording may be empty, and what to do."""
        name = type(self._model).__name__
        if self._recording._uncaptured:
            layer, failure = next(iter(self._recording._uncaptured.items()))
            found, hint = f"{layer!r} was left out: {failure.reason}", failure.hint
        elif not self._has_run:
            found = f"the forward pass of {name} did not run inside the block"
            hint = (
                "Call the model inside the block. If something else runs it, such as a compiled function, a copy or "
                "another process, watch the model that runs there. What only backward() runs again is not recorded."
            )
        else:
            found = f"{name} ran, and no module of the {len(self._selected):,} in layers= computed attention"
            hint = "Omit layers=; list(recording) then has the names of all attention layers."
        return f"watch: nothing was recorded: {found}. {hint}"

    def suspend(self) -> None:
        """Restore every function that was patched, until `resume`; hooks on the model remain, but do nothing."""
        super().suspend()
        # Another thread may follow a softmax for its own block.
        close_traces(all_threads=not watched)

    def _restore(self) -> None:
        self.suspend()
        if self._key is not None:
            self.release_context()
        while self._hooks:
            self._hooks.pop().remove()
        self._targets.clear()
        self._captures_before.clear()
        self._passes.clear()
        self._recording._projections.close()

    def record(self, module: nn.Module, name: str, args: CapturedArgs) -> None:
        """Record a call, unless activation checkpointing runs the layer again; the wrappers call it."""
        if is_recomputing():
            return
        if self._options.grad and not torch.is_grad_enabled():
            raise ArgumentError(
                "watch",
                received=f"grad=True, and a call of {name!r} where gradients are disabled",
                expected="a run without torch.no_grad, torch.inference_mode or generate(), which disable gradients",
                hint="Enable gradients, or omit grad=True. For generated text, run one pass over it: model(tokens).",
            )
        mode, source_cache, forward_pass = self._passes.get(threading.get_ident(), ("", None, 0))
        row_steps.pop(id(module), None)
        call = build_call(module, name, args, self._options, self._biases)
        if isinstance(call, Call):
            call = self._recording._count_weights(call, self._options.max_dense_bytes) or call
        if isinstance(call, Call):
            call.speculative_mode, call.source_cache, call.forward_pass = mode, source_cache, forward_pass
            joined = self._recording._add(call)
            # The next steps have a fast path, unless another watch needs them in full.
            if (
                joined is not None
                and self._options.is_default
                and not mode
                and not self.binds_context  # an intervention needs to see every call
                and len(watched.get(id(module), ())) == 1
            ):
                rows = self._recording._follow_rows(joined, call, args, self._passes)
                if rows is not None:
                    row_steps[id(module)] = rows
            if self._options.values:
                output = getattr(args.dense, "output", None) if args.output is None else args.output
                heads = call.shape[-3] if len(call.shape) > 2 else 1
                self._recording._projections.expect(module, name, heads, output)
        else:
            self.report_uncaptured(name, call.reason, call.hint)

    def record_matrix(self, name: str, matrix: Any) -> None:
        """Record the matrix of a layer whose tokens are on several ranks; the wrappers call it."""
        if is_recomputing():
            return
        if self._add_matrix is None:
            reason = "its tokens are on the ranks of a process group"
            self.report_uncaptured(name, reason, "Pass the group: regard.watch(model, group=group).")
        else:
            self._add_matrix(name, matrix.detach())

    @property
    def keeps_grad(self) -> bool:
        """Whether calls are recorded with their graph."""
        return self._options.grad

    def report_uncaptured(self, name: str, reason: str, hint: str) -> None:
        """Report a call that cannot be recorded; the wrappers call it."""
        self._recording._uncaptured.setdefault(name, Uncaptured(reason, hint))

    def notice_softmax(self, name: str, module: nn.Module, trace: SoftmaxTrace) -> None:
        """Notice a softmax that may be attention; the wrappers call it."""
        if name not in self._softmaxes or self._softmaxes[name][1].is_read:
            self._softmaxes[name] = (type(module).__name__, trace)

    def drop_channels(self, name: str) -> None:
        """Drop the calls of a layer whose rows are channels; the wrappers call it."""
        self._recording._drop(name, ATTENDS_OVER_CHANNELS)

    @property
    def _captured_names(self) -> Collection[str]:
        """Names of the modules of which a call was captured."""
        return self._recording

    def _report_missed_layers(self) -> None:
        """Report softmaxes of the shape of attention, and modules named attention, of which nothing was captured."""
        captured = self._captured_names
        if self.follows_compiled:
            from regard.capture.compiled_calls import unobserved

            for name, module in self._model.named_modules():
                if module in unobserved and name not in captured:
                    self.report_uncaptured(name, unobserved[module], _OWN_SOFTMAX_HINT)
        for name, (class_name, trace) in self._softmaxes.items():
            if name not in captured and not trace.is_read and not _WITHOUT_WEIGHTS.search(class_name):
                reason = f"{class_name} computes a softmax of shape {trace.shape} that {trace.fault}"
                self.report_uncaptured(name, reason, _OWN_SOFTMAX_HINT)
        for name, reason in self._without_capture.items():
            # The projections of an attention layer may also be named attention.
            if not any(name.startswith(f"{layer}.") for layer in captured):
                self.report_uncaptured(name, reason, _OWN_SOFTMAX_HINT)
        self._softmaxes.clear()
        self._without_capture.clear()

    def _register_hooks(self, native: set[int]) -> None:
        """Register hooks that notice an attention layer, or the whole model, that ran and was not captured."""
        for name, module in walk_modules(self._model):
            class_name = type(module).__name__.lower()
            is_attention = ("attention" in class_name or "attn" in class_name) and name in self._selected
            if is_attention:
                # A layer of diffusers leaves the computation to its processor.
                names = f"{class_name} {type(read_attribute(module, 'processor')).__name__}"
                has_weights = not _WITHOUT_WEIGHTS.search(names)
                is_attention = has_weights and next(module.parameters(), None) is not None
            if id(module) not in native and (is_attention or module is self._model):
                before = _ModuleHook(self._before_forward)
                after = _ModuleHook(self._make_after_forward(name))
                self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(after, with_kwargs=True))

    def _guard(self, hook: Callable[..., Any], num_args: int) -> Callable[..., Any]:
        """Return a hook that does nothing in a context that the block does not concern.

        Nor does it if torch calls it without keyword arguments, because another thread adds or removes it just then.
        """

        def call(*args: Any) -> Any:
            if not self.applies_here:
                self._ran_elsewhere = True
            elif len(args) == num_args:
                return hook(*args)
            return None

        return call

    def _before_forward(self, module: nn.Module, *call: Any) -> None:
        if not self.applies_here:
            self._ran_elsewhere = True
            return
        if not self._watched_ids or len(call) != 2:
            return  # suspended, or another thread adds or removes the hook just then
        thread = threading.get_ident()
        self._captures_before[thread, id(module)] = thread_state.captures
        if module is self._model:
            self._has_run = True
            self._num_passes += 1
            cache = _refer_to(call[1].get("past_key_values"))
            self._passes[thread] = speculative_mode(), cache, self._num_passes

    def _make_after_forward(self, name: str) -> Callable[..., None]:
        def after_forward(module: nn.Module, *call: Any) -> None:
            if len(call) != 3 or not self.applies_here:
                return
            before = self._captures_before.pop((threading.get_ident(), id(module)), None)
            if module is self._model:
                self._passes.pop(threading.get_ident(), None)
                close_traces()  # outputs must not have the class of followed tensors
            if before != thread_state.captures:
                return
            args, kwargs, output = call
            class_name, is_model = type(module).__name__, module is self._model
            if any(output is argument for argument in (*args, *kwargs.values())):
                return  # it had nothing to attend to
            if is_model and len(self._selected) < len(list(self._model.modules())):
                return  # modules that are not selected may have run
            reason = f"{class_name} computes its weights without calling a watched function"
            if is_model:
                reason = f"{class_name} called no watched attention function"
            self._without_capture.setdefault(name, reason)

        return after_forward


class _ModuleHook:
    """A hook of a watch; copies of its module, and files of it, have a hook that does nothing instead.

    Args:
        hook: The hook.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = exclude_from_compile(hook)

    def __call__(self, *args: Any) -> Any:
        return self._hook(*args)

    def __reduce__(self) -> Any:
        return getattr, (
            nullcontext(),
            "__exit__",
        )  # takes any arguments, and a file needs no regard to be read


def _refer_to(cache: Any) -> Any:
    """Return the weak reference to a cache, which is one object for each cache; None if Python has none for it."""
    try:
        return None if isinstance(cache, tuple) else weakref.ref(cache)
    except TypeError:  # None, a list or a dict
        return None


def find_native_parts(model: nn.Module) -> set[int]:
    """Return the ids of torch's own attention layers and of the modules inside them."""
    return {
        id(part)
        for _, module in walk_modules(model)
        if isinstance(module, _NATIVE_LAYERS)
        for part in module.modules()
    }


def _resolve_measures(measures: Any) -> Any:
    if isinstance(measures, str) and measures == "default":
        return {"entropy": Entropy(), "first": Mass(first(1)), "distance": Distance()}
    is_mapping = isinstance(measures, Mapping) and all(
        isinstance(name, str) and isinstance(measure, Measure) for name, measure in measures.items()
    )
    if measures is None or is_mapping or callable(measures):
        return measures
    raise ArgumentTypeError(
        "watch",
        received=f"measures as {describe_argument(measures)}",
        expected='a mapping from names to measures, "default", or a function of a call',
        hint='For example measures={"entropy": regard.Entropy()}. Without measures, query and key are recorded.',
    )


def _check_storage(device: Any, dtype: Any, max_dense_bytes: Any) -> None:
    """Refuse what recorded tensors cannot be moved or converted to, and a limit that is no number."""
    try:
        problem = None if device is None or torch.device(device) else "device"
    except (RuntimeError, TypeError):
        problem = f"device={device!r}"
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        problem = f"dtype={dtype!r}"
    if isinstance(max_dense_bytes, bool) or not isinstance(max_dense_bytes, int | float):
        problem = f"max_dense_bytes={max_dense_bytes!r}"
    if problem is not None:
        raise ArgumentTypeError(
            "watch",
            received=problem,
            expected="a torch device, a floating-point torch dtype, and a number of bytes",
            hint='For example device="cpu", dtype=torch.float32, max_dense_bytes=2**30.',
        )


def check_model(model: Any, operation: str, allows_compiled: bool = False) -> nn.Module:
    """Return the module to watch, which a model of nnsight wraps; refuse one whose functions cannot be patched."""
    if type(model).__module__.partition(".")[0] == "nnsight":
        model = model._module
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            operation,
            received=describe_argument(model),
            expected="a torch.nn.Module",
            hint="Pass the model itself: loaded.model of regard.models.load, or pipeline.model of a pipeline.",
        )
    for name, module in walk_modules(model):
        where = f" at {name!r}" if name else ""
        if is_compiled(module) and not allows_compiled:
            hint = "Watch the original, which shares its weights: regard.watch(model._orig_mod)."
            if not hasattr(module, "_orig_mod"):
                hint = "Watch before model.compile(), or build the model again and load_state_dict(model.state_dict())."
            raise ArgumentError(
                operation,
                received=f"a model that torch.compile has compiled{where}",
                expected="a model that runs in Python",
                hint=hint,
            )
        if isinstance(module, torch.jit.ScriptModule) or (
            isinstance(module, nn.DataParallel) and len(module.device_ids) > 1
        ):
            raise ArgumentError(
                operation,
                received=f"a {type(module).__name__}{where}",
                expected="a model that runs in Python and is not replicated by DataParallel",
                hint="Watch the original model (for DataParallel, model.module).",
            )
    return model


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is what `torch.compile(module)` returned, or `module.compile()` was called."""
    if read_attribute(module, "_orig_mod") is not None:
        return True
    return getattr(module, "_compiled_call_impl", None) is not None


def watch_step(
    model: nn.Module,
    layers: str | Iterable[str] | None,
    measure: Callable[[Call], dict[str, Any]],
    add_matrix: Callable[[str, Any], object],
    follows_compiled: bool,
) -> Watch:
    """Return the watch of a monitored step: every call is measured, and nothing is recorded.

    Args:
        model: The model, which may be compiled.
        layers: Names of modules, or patterns with `*`.
        measure: Function of a call.
        add_matrix: Function of a layer's name and its matrix, if the tokens of the layer are on several ranks.
        follows_compiled: Whether to watch inside the graphs of `torch.compile`.
    """
    watching = Watch(model, _select_modules(model, layers), CaptureOptions(measures=measure), Recording())
    watching.follows_compiled = follows_compiled
    watching._add_matrix = add_matrix
    watching._warns_if_empty = False  # a step may have no forward pass
    return watching


def strip_compiled(name: str) -> str:
    """Return the name of a module as it is if nothing is compiled."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")


def _select_modules(model: nn.Module, layers: str | Iterable[str] | None) -> set[str]:
    """Return the names of the modules that match, and of the modules inside them."""
    names = [name for name, _ in walk_modules(model)]
    if layers is None:
        return set(names)
    selected: set[str] = set()
    for pattern in list_patterns(layers, "watch"):
        matches = {name for name in names if is_selected(strip_compiled(name), pattern)}
        if not matches:
            raise ArgumentError(
                "watch",
                received=f"layers with {pattern!r}",
                expected="module names, or patterns that match module names",
                hint=f"The model has {', '.join(map(repr, names[1:4]))}, …; "
                "[name for name, _ in model.named_modules()] lists all names.",
            )
        selected |= matches
    return selected
