"""Wrap the attention functions that models call, and find where they are called from: the functions to patch.

Each wrapper runs the original, and notifies the watchers of the running module of the arguments.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.bias import CausalBias

from regard.capture.call import CapturedArgs
from regard.capture.context_parallel import find_token_shards, notify_shards
from regard.capture.module_names import walk_modules
from regard.capture.own_softmax import hold_products, wrap_exp, wrap_softmax
from regard.capture.patching import (
    Function,
    KnownNames,
    Target,
    class_namespace,
    find_held_functions,
    find_imported,
    holds_compiled,
    is_installed,
    list_attributes,
    unwrap_original,
)
from regard.capture.watchers import (
    find_obstacle,
    find_running_module,
    is_recomputing,
    list_watchers,
    notify,
    notify_matrix,
    report_uncaptured,
    row_steps,
    thread_state,
)
from regard.core.attention import layer_attention
from regard.engines import torch_kernels as kernels
from regard.masks import causal
from regard.score_mods import SoftcapMod

Tensor = Any  # the types of torch are not followed

_ATTENTION_PARAMETERS = ("module", "query", "key", "value")  # the first ones, in transformers


def wrap_sdpa(original: Function) -> Function:
    """Wrap `F.scaled_dot_product_attention`; if the CPU's flash kernel would run, call it directly for its lse."""

    @wraps(original)
    def sdpa(*args: Any, **kwargs: Any) -> Tensor:
        bias: Any = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        if isinstance(bias, CausalBias):  # torch's `causal_lower_right(…)`, a tensor without data
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
            and not torch.jit.is_tracing()
            and torch._C._functorch.peek_interpreter_stack() is None
            and not thread_state.is_probing
            and rows.matches(module, args, kwargs)
        ):
            query, key, value = args[:3]
            step = kernels.rerun_flash_with_lse(query, key, value, None, *rows.options)
            if step is not None and step[1] is not None and rows.append(query, key, value, step[1]):
                thread_state.captures += 1
                return step[0]
        shards = None if thread_state.is_probing else find_token_shards(original, args, kwargs)
        if shards is not None:
            output = original(*args, **kwargs)
            if is_recomputing():  # the call was recorded in its first run
                thread_state.captures += 1
            else:
                notify_shards(module, shards, CapturedArgs(*args, **kwargs))
            return output
        obstacle = find_obstacle(*args[:4], *kwargs.values())
        if obstacle is not None:
            report_uncaptured(module, *obstacle)
            return original(*args, **kwargs)
        captured = CapturedArgs(*args, **kwargs)
        if thread_state.is_probing:
            thread_state.probe = captured
            return captured.query.new_zeros((*captured.query.shape[:-1], captured.value.shape[-1]))
        is_kernel = original is kernels.SDPA  # if the user replaced torch's function, theirs has to run
        entries = list_watchers(module)
        if is_kernel and len(entries) == 1 and entries[0][0].replaces_output(entries[0][1], captured):
            return notify(module, captured._replace(has_run=False)).edited_output
        result = kernels.run_flash_with_lse(*captured[:8]) if is_kernel else None
        if result is None:
            output, lse = original(*args, **kwargs), None
            kernel = f"torch: {kernels.find_sdpa_backend(*captured[:8])}"
        else:
            (output, lse), kernel = result, "torch: flash on CPU"
        captured = notify(module, captured._replace(lse=lse, output=output, kernel=kernel))
        return output if captured.edited_output is None else captured.edited_output

    return sdpa


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


@cache
def _signature(function: Function) -> inspect.Signature:
    return inspect.signature(function)


def _run(
    module: nn.Module,
    original: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    read: Callable[[Any], CapturedArgs | None],
) -> tuple[Any, CapturedArgs | None]:
    """Run a function, and notify the watchers of a module unless the function called one that was captured.

    `read` returns the captured arguments, given the result. Returns the result, and the arguments after all
    interventions; None if nothing was captured here.
    """
    before = thread_state.captures
    with hold_products() as held:
        result = original(*args, **kwargs)
    captured = read(result) if thread_state.captures == before else None
    if captured is None:
        return result, None
    return result, notify(module, captured._replace(dense=held[-1] if held else None))


def wrap_attention_function(original: Function) -> Function:
    """Wrap an attention function of transformers: `(module, query, key, value, attention_mask, …)`.

    If it calls `F.scaled_dot_product_attention`, the call has been captured there. Otherwise the arguments are
    captured, and `record.build_call` verifies them with the weights or the output that the function returned.
    """

    @wraps(original)
    def attention_function(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not list_watchers(module):
            return original(module, *args, **kwargs)

        def read(result: Any) -> CapturedArgs:
            bound = _signature(original).bind(module, *args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            for parameter in _signature(original).parameters.values():
                if parameter.kind is parameter.VAR_KEYWORD:
                    arguments |= arguments.pop(parameter.name, {})
            name = getattr(original, "__name__", "a function")
            return _convert_arguments(module, arguments, result, name)

        result, captured = _run(module, original, (module, *args), kwargs, read)
        if captured is not None and captured.edited_output is not None:
            return _replace_result(result, captured)
        if captured is not None and captured.output is not None and _keeps_grad(module):
            return _return_through(captured.output, result)
        return result

    return attention_function


def _convert_arguments(module: nn.Module, arguments: dict[str, Any], result: Any, name: str) -> CapturedArgs:
    """Convert the arguments and the result of an attention function of transformers."""
    query, key = arguments["query"], arguments["key"]
    output, weights = result if isinstance(result, tuple) else (result, None)
    sink = arguments.get("s_aux")
    sink = getattr(module, "sinks", None) if sink is None else sink
    return CapturedArgs(
        query,
        key,
        arguments["value"],
        attn_mask=arguments.get("attention_mask"),
        dropout_p=arguments.get("dropout") or 0.0,
        scale=arguments.get("scaling"),
        enable_gqa=key.shape[-3] != query.shape[-3],
        softcap=arguments.get("softcap"),
        sink=None if sink is None else sink.reshape(-1),
        position_bias=arguments.get("position_bias"),
        output=move_heads_first(output, query),
        weights=None if name == "flex_attention_forward" else weights,  # it returns the lse
        kernel=f"transformers: {name}",
    )


def move_heads_first(output: Any, query: Tensor) -> Tensor | None:
    """Return an output, (…, q_len, heads, value_dim) or with the last two axes as one, as SDPA orders it: heads first.

    Returns None if it has another shape.
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


def _project(attended: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply the output projection to (batch, heads, q_len, head_dim): (batch, q_len, width)."""
    return F.linear(attended.transpose(1, 2).flatten(2).to(weight.dtype), weight, bias)


def _return_through(moved: Tensor, result: Any) -> Any:
    """Return a function's result with an output that is a view of the recorded one, which has gradients then."""
    output = result[0] if isinstance(result, tuple) else result
    if moved is output:
        return result
    through = moved.transpose(-2, -3).view(output.shape)
    return (through, *result[1:]) if isinstance(result, tuple) else through


def _keeps_grad(module: nn.Module) -> bool:
    """Return whether a watcher of a module records its calls with their graph."""
    return torch.is_grad_enabled() and any(watcher.keeps_grad for watcher, _ in list_watchers(module))


def _probe(module: nn.Module, function: Function, *args: Any, **kwargs: Any) -> CapturedArgs | None:
    """Call a function and return what it passes to `F.scaled_dot_product_attention`, which does not run."""
    thread_state.is_probing, thread_state.probe = True, None
    try:
        with torch.set_grad_enabled(_keeps_grad(module)):
            function(*args, **kwargs)
    finally:
        thread_state.is_probing = False
    captured, thread_state.probe = thread_state.probe, None
    return captured


def wrap_multi_head_attention(original: Function) -> Function:
    """Wrap `F.multi_head_attention_forward`, which computes its own softmax with `need_weights=True`."""

    @wraps(original)
    def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
        module = find_running_module()
        if module is None:
            return original(*args, **kwargs)
        arguments: dict[str, Any] = {}

        def read(result: Any) -> CapturedArgs | None:
            obstacle = find_obstacle(*args, *kwargs.values())
            if obstacle is not None:
                report_uncaptured(module, *obstacle)
                return None
            arguments.update(_signature(original).bind(*args, **kwargs).arguments, need_weights=False)
            captured = _probe(module, original, **arguments)
            kernel = "torch: softmax (need_weights)"
            return None if captured is None else captured._replace(weights=result[1], kernel=kernel)

        (output, weights), captured = _run(module, original, args, kwargs, read)
        if captured is not None and captured.edited_output is not None:
            out_weight, out_bias = arguments["out_proj_weight"], arguments["out_proj_bias"]
            projected = _project(captured.edited_output, out_weight, out_bias)
            output = projected.transpose(0, 1).reshape(output.shape)
            weights = weights if captured.edited_weights is None else captured.edited_weights
        return output, weights

    return multi_head_attention_forward


def wrap_native_multi_head_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch._native_multi_head_attention`, the fast path of `nn.MultiheadAttention`."""

    @wraps(original)
    def native_multi_head_attention(*args: Any) -> Any:
        result = original(*args)
        module = find_running_module()
        if module is not None:
            x, mask, mask_type = args[0], args[9], args[12] if len(args) > 12 else None
            weights = result[1] if result[1] is not None and result[1].numel() else None
            captured = _notify_fast_path(module, "", x, args[3:9], mask, mask_type, weights)
            if captured is not None and captured.edited_output is not None:
                weights = result[1] if captured.edited_weights is None else captured.edited_weights
                return _project(captured.edited_output, *args[7:9]), weights
        return result

    return native_multi_head_attention


def wrap_encoder_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch._transformer_encoder_layer_fwd`, the fast path of `nn.TransformerEncoderLayer`."""

    @wraps(original)
    def encoder_layer(*args: Any) -> Any:
        result = original(*args)
        module = find_running_module()
        if module is not None:
            x, mask, mask_type = args[0], args[18], args[19]
            if args[8] and not x.is_nested:  # norm_first
                x = F.layer_norm(x, x.shape[-1:], args[10], args[11], args[9])
            captured = _notify_fast_path(module, "self_attn", x, args[1:7], mask, mask_type)
            if captured is not None and captured.edited_output is not None:
                return _finish_encoder_layer(captured.edited_output, args)
        return result

    return encoder_layer


def _finish_encoder_layer(attended: Tensor, args: Any) -> Tensor:
    """Compute a `nn.TransformerEncoderLayer` from the edited output of its attention and the fused call's arguments."""
    x, out_weight, out_bias, use_gelu, norm_first, eps = (args[i] for i in (0, 5, 6, 7, 8, 9))
    linear1, linear2 = args[14:16], args[16:18]

    def normalise(x: Tensor, first: int) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], args[first], args[first + 1], eps)

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, *linear1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), *linear2)

    x = x + _project(attended, out_weight, out_bias)
    if norm_first:
        return x + feed_forward(normalise(x, 12))
    x = normalise(x, 10)
    return normalise(x + feed_forward(x), 12)


def _notify_fast_path(
    module: nn.Module,
    submodule: str,
    x: Tensor,
    projections: Any,
    mask: Any,
    mask_type: Any,
    weights: Tensor = None,
) -> CapturedArgs | None:
    """Compute the projections of a fused layer again, and notify the watchers of its query, key and mask."""
    obstacle = find_obstacle(x)
    if obstacle is not None:
        report_uncaptured(module, *obstacle, submodule)
        return None
    if x.is_nested:
        report_uncaptured(
            module,
            "nn.TransformerEncoder converted the padded batch to nested tensors",
            "Build it with nn.TransformerEncoder(…, enable_nested_tensor=False).",
            submodule,
        )
        return None
    width, heads, in_weight, in_bias, out_weight, out_bias = projections
    key_padding_mask, attn_mask = (mask, None) if mask_type == 1 else (None, mask)
    if attn_mask is not None and attn_mask.ndim == 4:
        attn_mask = attn_mask.expand(x.shape[0], heads, -1, -1).flatten(0, 1)
    sequence_first = x.transpose(0, 1)
    captured = _probe(
        module, unwrap_original(F.multi_head_attention_forward), sequence_first, sequence_first, sequence_first, width,
        heads,
        in_weight, in_bias, None, None, False, 0.0, out_weight, out_bias, training=False,
        key_padding_mask=key_padding_mask, need_weights=False, attn_mask=attn_mask,
    )  # fmt: skip
    if captured is None:
        return None
    captured = captured._replace(kernel="torch: fused encoder layer (fast path)", weights=weights)
    return notify(module, captured, submodule)


def wrap_flex_attention(original: Function) -> Function:
    """Wrap `flex_attention`, or a function that `torch.compile` made of it."""
    flex_attention = unwrap_original(flex.flex_attention)
    is_compiled = holds_compiled([original], flex_attention)
    kernel = "torch: flex_attention" + (", compiled" if is_compiled else "")

    @wraps(flex_attention)
    def attend(*args: Any, **kwargs: Any) -> Any:
        module = find_running_module()
        if module is None:
            return original(*args, **kwargs)

        def read(result: Any) -> CapturedArgs:
            arguments = _signature(flex_attention).bind(*args, **kwargs).arguments
            return CapturedArgs(
                arguments["query"],
                arguments["key"],
                arguments["value"],
                attn_mask=arguments.get("block_mask"),
                scale=arguments.get("scale"),
                enable_gqa=arguments.get("enable_gqa", False),
                score_mod=arguments.get("score_mod"),
                output=result[0] if isinstance(result, tuple) else result,
                kernel=kernel,
            )

        result, captured = _run(module, original, args, kwargs, read)
        if captured is None or captured.edited_output is None:
            return result
        return (captured.edited_output, *result[1:]) if isinstance(result, tuple) else captured.edited_output

    return attend


def wrap_compile(original: Function) -> Function:
    """Wrap `torch.compile`: `flex_attention` is compiled without its wrapper, and the result is wrapped.

    Layers compile it at their first call and keep the result, which must not become slower after the watch.
    """

    @wraps(original)
    def compile_function(*args: Any, **kwargs: Any) -> Any:
        if args and args[0] is flex.flex_attention:
            return wrap_flex_attention(original(unwrap_original(args[0]), *args[1:], **kwargs))
        return original(*args, **kwargs)

    return compile_function


def wrap_regard_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `attention`, or `layer_attention`, which is also passed the value and returns the output."""

    @wraps(original)
    def attention(query: Any, key: Any, *value: Any, **options: Any) -> Any:
        result = original(query, key, *value, **options)
        output, matrix = result if value else (None, result)
        module, spec = find_running_module(), matrix._spec
        if module is None or not isinstance(spec.query, torch.Tensor):
            return result
        mask, mods = spec.mask, spec.score_mods
        if any(not isinstance(mod, SoftcapMod) for mod in mods) or len(mods) > 1:
            report_uncaptured(
                module,
                f"its scores are modified by {list(mods)}",
                "Use the layer's own matrix: need_matrix=True.",
            )
            return result
        is_causal = mask is not None and query.shape[-2] == key.shape[-2] and mask == causal()
        args = CapturedArgs(
            spec.query,
            spec.key,
            value[0] if value else None,
            attn_mask=None if is_causal else mask,
            is_causal=is_causal,
            scale=spec.scale,
            enable_gqa=spec.groups > 1,
            softcap=mods[0].cap if mods else None,
            sink=spec.sink,
            output=output,
            kernel="regard: attention",
        )
        edited = notify(module, args)
        if edited.edits is None:
            return result
        changed = {"mask": edited.edits.edit_mask(mask), "score_mod": edited.edits.edit_score_mods(mods)}
        if not value:
            return original(query, key, **options | changed)
        _, matrix = original(query, key, *value, **options | changed | {"multiply": False})
        if not options.get("multiply", True):
            return None, matrix
        return (matrix @ value[0] if edited.edited_output is None else edited.edited_output), matrix

    return attention


def wrap_distributed_attention(original: Function) -> Function:
    """Wrap `regard.distributed.attention`: its matrix is recorded as it is, without gradients."""

    @wraps(original)
    def distributed_attention(*args: Any, **options: Any) -> Any:
        matrix = original(*args, **options)
        module = find_running_module()
        if module is not None:
            notify_matrix(module, matrix)
        return matrix

    return distributed_attention


# The names to patch in the files of a model, and the modules in which the methods of its classes are defined.
_known_files, _known_classes = KnownNames(), KnownNames()


def find_patch_targets(model: nn.Module) -> Iterator[Target]:
    """Yield namespace, name and wrapper of every function to patch.

    They are functions of torch, `regard.attention`, functions of the registry of transformers, and those that the files
    of the model have imported.
    """
    own_softmax = {"softmax": wrap_softmax, "exp": wrap_exp, "exp_": wrap_exp}
    named: list[Target] = [
        (vars(F), "scaled_dot_product_attention", wrap_sdpa),
        (vars(F), "multi_head_attention_forward", wrap_multi_head_attention),
        (vars(flex), "flex_attention", wrap_flex_attention),
        (vars(sys.modules["regard"]), "attention", wrap_regard_attention),
        *((vars(torch), name, make_wrapper) for name, make_wrapper in own_softmax.items()),
    ]
    yield from named
    yield from ((class_namespace(torch.Tensor), name, make) for name, make in own_softmax.items())
    yield vars(torch.special), "softmax", wrap_softmax
    yield vars(torch), "_native_multi_head_attention", wrap_native_multi_head_attention
    yield vars(torch), "_transformer_encoder_layer_fwd", wrap_encoder_layer
    yield vars(torch), "compile", wrap_compile
    yield class_namespace(CausalBias), "__torch_function__", wrap_causal_bias
    # What these functions are imported as, in any file, and held as by functions and attributes of the model.
    makers = {id(unwrap_original(namespace[name])): make for namespace, name, make in named}
    function_ids = frozenset(makers)
    parts = [module for _, module in walk_modules(model)]
    classes = {base for kind in set(map(type, parts)) for base in kind.__mro__}
    files = _find_files(classes)
    file_ids = {id(file) for file in files}
    imported = find_imported(function_ids, unwrap_original(flex.flex_attention))
    for namespace in imported:
        if id(namespace) not in file_ids:
            yield from _find_names_of_file(namespace, makers)[0]
    attributes = list_attributes(parts)
    for namespace, name, value in attributes:
        if type(value) is types.FunctionType or id(value) in makers:
            yield from _find_names(namespace, makers, [(name, value)])
    held_by_parts = [value for _, _, value in attributes]
    for namespace, name, held in find_held_functions(held_by_parts, classes, files, function_ids):
        yield namespace, name, makers[id(held)]
    # What the files of the model call besides.
    makers[id(layer_attention)] = wrap_regard_attention
    distributed = sys.modules.get("regard.distributed")
    if distributed is not None:
        makers[id(unwrap_original(vars(distributed)["attention"]))] = wrap_distributed_attention
        yield vars(distributed), "attention", wrap_distributed_attention
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    registries = [] if interface is None else [interface._global_mapping]
    for file in files:
        found, interfaces = _find_names_of_file(file, makers, interface or ())
        yield from found
        registries += [own._local_mapping for own in interfaces]
    for registry in registries:
        for name, function in tuple(registry.items()):
            # The function `sdpa` calls F.scaled_dot_product_attention.
            if unwrap_original(function) is not getattr(modeling, "sdpa_attention_forward", None):
                yield registry, name, wrap_attention_function


def _find_files(classes: set[type]) -> list[MutableMapping[str, Any]]:
    """List the globals of the files that define the model's classes, except those of torch.

    A public class may have the `__module__` of its package, so the modules of its methods count as well.
    """
    names = sorted({name for base in classes for name in _list_modules(base) if name})
    return [
        vars(sys.modules[name])
        for name in names
        if not name.startswith("torch.") and name != "builtins" and name in sys.modules
    ]


def _list_modules(base: type) -> list[str]:
    """List the modules that define a class and its methods."""
    names = vars(base)

    def search() -> list[str]:
        methods = [item for item in names.values() if isinstance(item, types.FunctionType)]
        return [item.__module__ for item in (base, *methods)]

    file = getattr(sys.modules.get(base.__module__), "__dict__", {})
    return _known_classes.find(base, names, None, search) if is_installed(file) else search()


def _find_names_of_file(
    file: MutableMapping[str, Any], makers: dict[int, Any], interface: Any = None
) -> tuple[list[Target], list[Any]]:
    """List the names of a file to patch.

    With `interface`, also the functions with the parameters of transformers' attention functions, and the instances of
    this class.
    """

    def search() -> tuple[list[Target], list[Any]]:
        is_of_model = interface is not None
        instances = [value for value in file.values() if is_of_model and isinstance(value, interface)]
        return _find_names(file, makers, finds_attention=is_of_model), instances

    sought = frozenset(makers), interface
    return _known_files.find(file, file, sought, search) if is_installed(file) else search()


def _find_names(
    namespace: MutableMapping[str, Any],
    makers: dict[int, Any],
    items: Iterable[tuple[str, Any]] | None = None,
    *,
    finds_attention: bool = False,
) -> list[Target]:
    """List the names of a namespace to patch: functions by `id`, and what `torch.compile` made of `flex_attention`.

    `items` are its names to look at, each with its value; by default, all. `finds_attention` adds every function with
    the parameters of transformers' attention functions.
    """
    found: list[Target] = []
    # Without calls of functions: a model's files have thousands of names, and every watch reads them.
    for name, value in tuple(namespace.items()) if items is None else items:
        is_function = type(value) is types.FunctionType
        original = value.__dict__.get("_regard_original", value) if is_function else value
        is_function = type(original) is types.FunctionType
        if id(original) in makers:
            found.append((namespace, name, makers[id(original)]))
        elif is_function and "_torchdynamo_orig_callable" in original.__dict__:
            if holds_compiled([original], unwrap_original(flex.flex_attention)):
                found.append((namespace, name, wrap_flex_attention))
        elif is_function and finds_attention and original.__code__.co_varnames[:4] == _ATTENTION_PARAMETERS:
            found.append((namespace, name, wrap_attention_function))
    return found
