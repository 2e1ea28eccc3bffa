"""Wrap the attention functions that models call: each runs the original, and notifies the watchers of the arguments.

The running module is read from the Python stack: the nearest caller whose first argument is a module of a watched
model (`iter_running_modules`). Hooks would disable the fast paths of `nn.TransformerEncoderLayer`, and so change its
output.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias

from regard.capture.cache_joining import RowSteps
from regard.capture.captured_args import CapturedArgs
from regard.capture.dense_attention import hold_products
from regard.capture.followed_tensor import SoftmaxTrace
from regard.capture.patching import unwrap_original
from regard.core.matrix import AttentionMatrix
from regard.engines import torch_kernels as kernels

Tensor = Any  # the types of torch are not followed


class Watcher(Protocol):
    """What is notified of the calls of a module."""

    @property
    def applies_here(self) -> bool:
        """Whether it is notified of the calls of the running thread or task."""

    @property
    def keeps_grad(self) -> bool:
        """Whether calls are recorded with their graph."""

    def record(self, module: nn.Module, name: str, args: CapturedArgs) -> None:
        """Record a call."""

    def report_uncaptured(self, name: str, reason: str, hint: str) -> None:
        """Report a call that cannot be recorded."""

    def notice_softmax(self, name: str, module: nn.Module, trace: SoftmaxTrace) -> None:
        """Notice a softmax that may be attention."""

    def drop_channels(self, name: str) -> None:
        """Drop the calls of a layer whose rows are channels and not tokens."""

    def replaces_output(self, name: str, args: CapturedArgs) -> bool:
        """Return whether `edit` computes the output of a call without the function that the model called."""

    def edit(self, module: nn.Module, name: str, args: CapturedArgs) -> CapturedArgs:
        """Return the arguments of a call with what this watcher changes about it."""


# For the id of each module of a watched model: its watchers, and its name there, None if it is not selected.
watchers: dict[int, list[tuple[Watcher, str | None]]] = {}
watchers_lock = threading.RLock()  # held by those who change it
# For the id of a module with one watcher: what collects steps of `generate()` on the fast path.
row_steps: dict[int, RowSteps] = {}
_thread = threading.local()

# Functions of transformers that propose tokens and may discard them.
_SPECULATIVE = {"_beam_search": "beam search", "_assisted_decoding": "speculative decoding"}


def count_captures() -> int:
    """Return how many calls this thread has captured, so that an outer wrapper knows whether an inner one did."""
    return getattr(_thread, "captures", 0)


def speculative_mode() -> str:
    """Return how the caller proposes tokens that it may discard, such as "beam search"; "" if it does not."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _SPECULATIVE:
            return _SPECULATIVE[frame.f_code.co_name]
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def is_recomputing() -> bool:
    """Return whether this thread is inside `backward()`, where activation checkpointing runs layers again."""
    return bool(torch._C._current_graph_task_id() != -1)


def find_running_module() -> nn.Module | None:
    """Return the module of a watched model that is nearest on the stack, if it is selected."""
    module = next(iter_running_modules(), None)
    return module if module is not None and is_selected(module) else None


def iter_running_modules() -> Iterator[nn.Module]:
    """Yield the modules of watched models that are running, the innermost first.

    What another module computes belongs to the watched module in whose forward pass it runs. If a method of a watched
    model calls it outside of a forward pass, as `generate()` calls an assistant model, it belongs to none.
    """
    frame, in_other = sys._getframe(1), False
    while frame is not None:
        module = _get_first_argument(frame)
        if issubclass(type(module), nn.Module):
            if not is_watched(module):
                in_other = True
            elif in_other and not _is_in_forward(module, frame):
                return
            else:
                in_other = False
                yield module
        frame = frame.f_back  # type: ignore[assignment]


def _get_first_argument(frame: types.FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _is_in_forward(module: nn.Module, frame: types.FrameType | None) -> bool:
    """Return whether a frame of a module, or one that called it, is the module's forward pass."""
    while frame is not None:
        if frame.f_code.co_name in ("forward", "_call_impl") and _get_first_argument(frame) is module:
            return True
        frame = frame.f_back
    return False


def follow_rows(module: nn.Module, rows: RowSteps | None) -> None:
    """Record the next steps of a module on the fast path, if no other watch needs them in full."""
    if rows is not None and len(watchers.get(id(module), ())) == 1:
        row_steps[id(module)] = rows


def is_watched(module: nn.Module) -> bool:
    """Return whether any watch of the running thread has a module in its model."""
    return any(watcher.applies_here for watcher, _ in watchers.get(id(module), ()))


def is_selected(module: nn.Module) -> bool:
    """Return whether any watch of the running thread selects a module."""
    return bool(list_watchers(module))


def list_watchers(module: nn.Module) -> list[tuple[Watcher, str]]:
    """List the watchers that select a module in the running thread, each with the name of the module."""
    entries = watchers.get(id(module), ())
    return [(watcher, name) for watcher, name in entries if name is not None and watcher.applies_here]


def _has_numbers() -> bool:
    """Return whether a call runs outside of traces, transforms of torch.func and probes."""
    return not (
        torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or getattr(_thread, "probing", False)
    )


def find_obstacle(*tensors: Any) -> tuple[str, str] | None:
    """Find out why a call has no numbers that could be recorded.

    Args:
        *tensors: Arguments of the call.

    Returns:
        Reason and hint, or None if the call can be recorded.
    """
    if torch.jit.is_tracing():
        return "it ran inside torch.jit.trace", "Trace the model outside the watch."
    if torch._C._functorch.peek_interpreter_stack() is not None:
        hint = "Run the model without torch.func inside the watch, on a batch or in a loop over samples."
        return "it ran inside a transform of torch.func, such as vmap or grad", hint
    for tensor in tensors:
        if tensor is None or (type(tensor) is torch.Tensor and not tensor.is_meta):
            continue
        if isinstance(tensor, torch.Tensor) and (
            tensor.is_meta
            or isinstance(tensor, FakeTensor | FunctionalTensor)
            or torch._is_functional_tensor(tensor)
        ):
            hint = "Watch the model with its weights loaded, and export it outside the watch."
            return "it ran on meta or fake tensors, which have no numbers", hint
        if hasattr(tensor, "device_mesh"):
            hint = "Let the projections return local tensors: ColwiseParallel(use_local_output=True), the default."
            return "its tensors are distributed (DTensor)", hint
    return None


def notify(module: nn.Module, args: CapturedArgs, submodule: str = "") -> CapturedArgs:
    """Pass a call to the watchers of a module.

    Args:
        module: The module that ran.
        args: What it was called with.
        submodule: Name of the module inside it whose call was fused into this one.

    Returns:
        The arguments, with `edited_output` if an intervention changes the output.
    """
    obstacle = find_obstacle(*args[:4])
    if obstacle is not None:
        report_uncaptured(module, *obstacle, submodule)
        return args
    return _record(module, args, submodule)


def _record(module: nn.Module, args: CapturedArgs, submodule: str = "") -> CapturedArgs:
    _thread.captures = count_captures() + 1
    entries = [(watcher, _join_names(name, submodule)) for watcher, name in list_watchers(module)]
    for watcher, name in entries:
        args = watcher.edit(module, name, args)
    for watcher, name in entries:
        watcher.record(module, name, args)
    return args


def notify_matrix(module: nn.Module, matrix: AttentionMatrix) -> None:
    """Pass the matrix of a layer whose tokens are on several ranks to the watchers that record such matrices."""
    _thread.captures = count_captures() + 1
    for watcher, name in list_watchers(module):
        record_matrix = getattr(watcher, "record_matrix", None)
        if record_matrix is not None:
            record_matrix(name, matrix)


def report_uncaptured(module: nn.Module, reason: str, hint: str, submodule: str = "") -> None:
    """Report a call that cannot be recorded to the watchers of a module."""
    _thread.captures = count_captures() + 1
    for watcher, name in list_watchers(module):
        watcher.report_uncaptured(_join_names(name, submodule), reason, hint)


def report_channels(module: nn.Module) -> None:
    """Tell the watchers of a module that the rows of its last call are channels and not tokens."""
    for watcher, name in list_watchers(module):
        watcher.drop_channels(name)


def _join_names(name: str, submodule: str) -> str:
    return f"{name}.{submodule}" if name and submodule else name or submodule


def wrap_sdpa(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `F.scaled_dot_product_attention`; if the CPU's flash kernel would run, call it directly for its lse."""

    @wraps(original)
    def sdpa(*args: Any, **kwargs: Any) -> Tensor:
        bias: Any = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        if _is_causal_bias(bias):
            # It looks up this function by its present name, and calls it again with ordinary arguments.
            return type(bias).__torch_function__(F.scaled_dot_product_attention, (), args, kwargs)
        module = find_running_module()
        if module is None:
            return original(*args, **kwargs)
        rows = row_steps.get(id(module))
        if (
            rows is not None
            and bias is None
            and original is kernels.SDPA
            and _has_numbers()
            and rows.matches(module, args, kwargs)
        ):
            query, key, value = args[:3]
            step = kernels.run_flash_with_lse(query, key, value, None, *rows.options)
            if step is not None and step[1] is not None:
                rows.append(query, key, step[1])
                _thread.captures = count_captures() + 1
                return step[0]
        obstacle = find_obstacle(*args[:4], *kwargs.values())
        if obstacle is not None:
            report_uncaptured(module, *obstacle)
            return original(*args, **kwargs)
        captured = CapturedArgs(*args, **kwargs)
        if getattr(_thread, "probing", False):
            _thread.probe = captured
            return captured.query.new_zeros((*captured.query.shape[:-1], captured.value.shape[-1]))
        if original is kernels.SDPA and _is_replaced(module, captured):
            return _record(module, captured._replace(has_run=False)).edited_output
        # If the user replaced torch's function, theirs has to run.
        result = kernels.run_flash_with_lse(*captured.sdpa_args) if original is kernels.SDPA else None
        if result is None:
            output, lse = original(*args, **kwargs), None
            kernel = f"torch: {kernels.find_sdpa_backend(*captured.sdpa_args)}"
        else:
            (output, lse), kernel = result, "torch: flash on CPU"
        captured = _record(module, captured._replace(lse=lse, output=output, kernel=kernel))
        return output if captured.edited_output is None else captured.edited_output

    return sdpa


def _is_replaced(module: nn.Module, args: CapturedArgs) -> bool:
    """Return whether the only watcher of a module computes the output itself."""
    entries = list_watchers(module)
    return len(entries) == 1 and entries[0][0].replaces_output(entries[0][1], args)


def wrap_causal_bias(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `CausalBias.__torch_function__`, which compares the function with what `torch.nn.functional` holds now.

    Code that imported the function by name calls the original, which the comparison must recognise.
    """

    @wraps(original)
    def torch_function(cls: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is unwrap_original(F.scaled_dot_product_attention):
            function = F.scaled_dot_product_attention
        return original(cls, function, types, args, kwargs)

    return torch_function


def _is_causal_bias(mask: Any) -> bool:
    """Return whether a mask is torch's `causal_lower_right(…)` or `causal_upper_left(…)`, a tensor without data."""
    return isinstance(mask, CausalBias)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def wrap_attention_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an attention function of transformers: `(module, query, key, value, attention_mask, …)`.

    If it calls `F.scaled_dot_product_attention`, the call has been captured there. Otherwise the arguments are
    captured, and `record.build_call` verifies them with the weights or the output that the function returned.
    """

    @wraps(original)
    def attention_function(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_selected(module):
            return original(module, *args, **kwargs)
        before = count_captures()
        with hold_products() as held:
            result = original(module, *args, **kwargs)
        if count_captures() == before:
            bound = _signature(original).bind(module, *args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            for parameter in _signature(original).parameters.values():
                if parameter.kind is parameter.VAR_KEYWORD:
                    arguments |= arguments.pop(parameter.name, {})
            name = getattr(original, "__name__", "a function")
            captured = _convert_arguments(module, arguments, result, name)
            captured = notify(module, captured._replace(dense=held[-1] if held else None))
            if captured.edited_output is not None:
                return _replace_result(result, captured)
            if captured.output is not None and _keeps_grad(module):
                return _return_through(captured.output, result)
        return result

    return attention_function


def _convert_arguments(module: nn.Module, arguments: dict[str, Any], result: Any, name: str) -> CapturedArgs:
    """Convert the arguments and the result of an attention function of transformers."""
    query, key = arguments["query"], arguments["key"]
    output, weights = result if isinstance(result, tuple) else (result, None)
    sink = arguments.get("s_aux")
    return CapturedArgs(
        query,
        key,
        arguments["value"],
        attn_mask=arguments.get("attention_mask"),
        dropout_p=arguments.get("dropout") or 0.0,
        scale=arguments.get("scaling"),
        enable_gqa=key.shape[-3] != query.shape[-3],
        softcap=arguments.get("softcap"),
        sink=getattr(module, "sinks", None) if sink is None else sink,
        position_bias=arguments.get("position_bias"),
        output=_move_heads_first(output, query),
        weights=None if name == "flex_attention_forward" else weights,  # it returns the lse
        kernel=f"transformers: {name}",
    )


def _move_heads_first(output: Any, query: Tensor) -> Tensor | None:
    """Return the output of an attention function of transformers, (…, q_len, heads, value_dim), as SDPA orders it.

    Args:
        output: (…, q_len, heads, value_dim), or with the last two axes as one.
        query: (…, heads, q_len, head_dim).

    Returns:
        (…, heads, q_len, value_dim), or None if the output has another shape.
    """
    heads, q_len = query.shape[-3:-1]
    if not isinstance(output, torch.Tensor):
        return None
    if output.ndim == query.ndim - 1 and output.shape[-1] % heads == 0:
        output = output.unflatten(-1, (heads, -1))
    if output.ndim != query.ndim:
        return None
    if output.shape[-3:-1] == (q_len, heads):
        return output.transpose(-2, -3)
    return output if output.shape[-3:-1] == (heads, q_len) else None


def _replace_result(result: Any, captured: CapturedArgs) -> Any:
    """Return the result of an attention function of transformers with an edited output, and edited weights if any."""
    old, rest = (result[0], result[1:]) if isinstance(result, tuple) else (result, None)
    output = captured.edited_output
    assert output is not None
    heads, q_len = captured.query.shape[-3:-1]
    if old.ndim == captured.query.ndim - 1:
        output = output.transpose(-2, -3).flatten(-2)
    elif old.shape[-3:-1] == (q_len, heads):
        output = output.transpose(-2, -3).contiguous()
    if rest is None:
        return output
    return (output, *((captured.edited_weights, *rest[1:]) if captured.edited_weights is not None else rest))


def project(attended: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply the output projection to (batch, heads, q_len, head_dim): (batch, q_len, width)."""
    return F.linear(attended.transpose(1, 2).flatten(2).to(weight.dtype), weight, bias)


def _return_through(moved: Tensor, result: Any) -> Any:
    """Return a function's result with an output that is a view of the recorded one, which has gradients then.

    Args:
        moved: What `_move_heads_first` returned for the output.
        result: The output, or a tuple that begins with it.
    """
    output = result[0] if isinstance(result, tuple) else result
    if moved is output:
        return result
    through = moved.transpose(-2, -3).view(output.shape)
    return (through, *result[1:]) if isinstance(result, tuple) else through


def _keeps_grad(module: nn.Module) -> bool:
    """Return whether a watcher of a module records its calls with their graph."""
    return torch.is_grad_enabled() and any(watcher.keeps_grad for watcher, _ in list_watchers(module))


def probe(module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> CapturedArgs | None:
    """Call a function and return what it passes to `F.scaled_dot_product_attention`, which does not run."""
    _thread.probing, _thread.probe = True, None
    try:
        with torch.set_grad_enabled(_keeps_grad(module)):
            function(*args, **kwargs)
    finally:
        _thread.probing = False
    captured: CapturedArgs | None = _thread.probe
    _thread.probe = None
    return captured


def wrap_multi_head_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `F.multi_head_attention_forward`, which computes its own softmax with `need_weights=True`."""

    @wraps(original)
    def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
        module = find_running_module()
        if module is None:
            return original(*args, **kwargs)
        before = count_captures()
        with hold_products() as held:
            output, weights = original(*args, **kwargs)
        if count_captures() == before:
            obstacle = find_obstacle(*args, *kwargs.values())
            if obstacle is not None:
                report_uncaptured(module, *obstacle)
                return output, weights
            arguments = _signature(original).bind(*args, **kwargs).arguments | {"need_weights": False}
            captured = probe(module, original, **arguments)
            if captured is not None:
                captured = captured._replace(weights=weights, kernel="torch: softmax (need_weights)")
                captured = notify(module, captured._replace(dense=held[-1] if held else None))
                if captured.edited_output is not None:
                    projected = project(
                        captured.edited_output, arguments["out_proj_weight"], arguments["out_proj_bias"]
                    )
                    output = projected.transpose(0, 1).reshape(output.shape)
                    weights = weights if captured.edited_weights is None else captured.edited_weights
        return output, weights

    return multi_head_attention_forward
