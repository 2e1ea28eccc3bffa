"""`watch`: a model runs as it always does, and what its attention layers computed with is kept."""

from __future__ import annotations

import fnmatch
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from regard.core.attention import attention, layer_matrix
from regard.errors import ArgumentError, ArgumentTypeError, NotCapturedError, describe_argument
from regard.lens.call import Call
from regard.lens.capture import wrappers as capture
from regard.lens.capture.patching import opaque, unwrap, wrap
from regard.lens.capture.record import Keep, call_of
from regard.lens.capture.regard_layers import wrap_attention
from regard.lens.recording import Recording
from regard.masks import first
from regard.measures import Distance, Entropy, Mass, Measure
from regard.score_mods import ScoreMod, relative_bias

__all__ = ["watch"]

# Layers of torch whose fast paths look for hooks: nothing is hung on them, what they call is wrapped instead.
_NATIVE = (nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
           nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # fmt: skip


class watch:  # noqa: N801 - used as a function
    """A context in which a model's attention is kept: `with regard.watch(model) as recording: model(**inputs)`.

    The model runs the kernels it always ran, and its outputs are bit for bit what they were. `seen` maps the names of
    its attention layers to their matrices; see `regard.lens.Recording`. Watches may be nested, and threads share them. An
    attention layer that ran and gave nothing raises `NotCapturedError` when the block ends, and says what to do. Where somebody
    compiles a function around the model, the graph breaks at each attention, and outputs agree up to rounding.

    `layers` are names of modules, or patterns with `*`, whose attention is kept; all of it by default. `keep="qk"`
    keeps references to queries and keys; `device` and `dtype` move them, `copy=True` copies them, `values=True` keeps
    values and outputs too. `keep="measures"` keeps the results of `measures`, by name, made as each layer runs;
    `measures` may also be a function that is given each `Call` and returns what is to be kept, by name.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with regard.watch(layer) as recording:
    ...     output = layer(torch.ones(1, 3, 8))
    >>> recording["self_attn"].entropy().shape
    torch.Size([1, 2, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: str | Iterable[str] | None = None,
        keep: Literal["qk", "measures"] = "qk",
        measures: Mapping[str, Measure] | Callable[[Call], dict[str, Any]] | None = None,
        device: Any = None,
        dtype: Any = None,
        copy: bool = False,
        values: bool = False,
    ) -> None:
        _check_model(model)
        if keep not in ("qk", "measures") or (measures is not None and keep == "qk"):
            raise ArgumentError(
                "watch",
                received=f"keep={keep!r}" + (" with measures" if measures is not None else ""),
                expected='keep="qk", or keep="measures" with or without measures',
                hint='With keep="qk" any measure can be asked for afterwards: recording[name].measure(…).',
            )
        self._model = model
        self._selected = _selected(model, layers)
        if keep == "measures" and measures is None:
            measures = {"entropy": Entropy(), "first": Mass(first(1)), "distance": Distance()}
        self._keep = Keep(device=device, dtype=dtype, copy=copy, values=values, measures=measures)
        self._biases = list(_biases(model))
        self._seen = Recording()
        self._places: list[Any] = []
        self._hooks: list[Any] = []
        self._owned: list[int] = []
        self._began: dict[tuple[int, int], int] = {}
        self._trying: dict[int, str] = {}

    def __enter__(self) -> Recording:
        if self._owned:
            raise ArgumentError(
                "watch",
                received="a watch that is entered already",
                expected="one with block at a time",
                hint="Call regard.watch(model) for each; they may be nested.",
            )
        try:
            for name, module in self._model.named_modules():
                chosen = name if name in self._selected else None
                capture.owners.setdefault(id(module), []).append((self, chosen))
                self._owned.append(id(module))
            self._hang_hooks()
            self._hooks.extend(self._seen._hints.watch(self._model))
            for names, name, make in _places(self._model):
                self._places.append(wrap(names, name, make))
        except BaseException:
            self._leave()
            raise
        return self._seen

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._leave()
        missed = self._seen._missed
        if kind is None and missed:
            name, (why, hint) = next(iter(missed.items()))
            more = "" if len(missed) < 2 else f" (and {len(missed) - 1} more)"
            raise NotCapturedError(
                "watch",
                received=f"a run in which {name!r}{more} gave nothing: {why}",
                expected="attention that the lens can read",
                hint=f"{hint} Or leave it out: layers= names those to watch.",
            )

    def _leave(self) -> None:
        while self._places:
            unwrap(self._places.pop())
        while self._hooks:
            self._hooks.pop().remove()
        for key in self._owned:
            left = [each for each in capture.owners[key] if each[0] is not self]
            if left:
                capture.owners[key] = left
            else:
                del capture.owners[key]
        self._owned.clear()
        self._began.clear()
        self._trying.clear()

    # What the wrappers tell

    def record(self, module: nn.Module, name: str, passed: capture.Passed) -> None:
        """A call went through a module."""
        found = call_of(module, name, passed, self._keep, self._biases)
        if isinstance(found, Call):
            found.trying = self._trying.get(capture.thread(), "")
            self._seen._add(found)
        else:
            self.miss(name, *found)

    def miss(self, name: str, why: str, hint: str) -> None:
        """A call that cannot be told went through."""
        self._seen._missed.setdefault(name, (why, hint))

    # Layers that should have given something

    def _hang_hooks(self) -> None:
        """Hooks that notice an attention layer, or a whole model, that ran and gave nothing."""
        apart = {id(part) for m in self._model.modules() if isinstance(m, _NATIVE) for part in m.modules()}
        for name, module in self._model.named_modules():
            known = "attention" in type(module).__name__.lower() or "attn" in type(module).__name__.lower()
            known = known and name in self._selected and any(True for _ in module.parameters())
            if id(module) not in apart and (known or module is self._model):
                self._hooks.append(module.register_forward_pre_hook(opaque(self._begin)))
                self._hooks.append(module.register_forward_hook(opaque(self._end(name))))

    def _begin(self, module: nn.Module, _: Any) -> None:
        thread = capture.thread()
        self._began[thread, id(module)] = capture.captured()
        if module is self._model:
            self._trying[thread] = capture.trying()

    def _end(self, name: str) -> Callable[..., None]:
        def end(module: nn.Module, *_: Any) -> None:
            if self._began.pop((capture.thread(), id(module)), None) == capture.captured():
                kind, whole = type(module).__name__, module is self._model
                if whole and len(self._selected) < len(list(self._model.modules())):
                    return  # what was not asked for may have run
                why = f"{kind} computes its weights by itself, past every name that is watched"
                if whole:
                    why = f"no attention of {kind} went through any name that is watched"
                hint = "If it is a transformers model, load it with attn_implementation='sdpa' where it has that; "
                hint += "in your own layer call F.scaled_dot_product_attention, and nothing else changes."
                self.miss(name, why, hint)

        return end


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            "watch",
            received=describe_argument(model),
            expected="a torch.nn.Module",
            hint="Give the model itself; a pipeline has it as pipeline.model.",
        )
    for name, module in model.named_modules():
        where = f" at {name!r}" if name else ""
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            hint = "Watch what was compiled, which shares its weights: regard.watch(model._orig_mod)."
            if not hasattr(module, "_orig_mod"):
                hint = "Watch before model.compile(), or build the model again and load_state_dict(model.state_dict())."
            raise ArgumentError(
                "watch",
                received=f"a model that torch.compile has compiled{where}",
                expected="a model that runs in Python",
                hint=hint,
            )
        if isinstance(module, torch.jit.ScriptModule) or (
            isinstance(module, nn.DataParallel) and len(module.device_ids) > 1
        ):
            raise ArgumentError(
                "watch",
                received=f"a {type(module).__name__}{where}",
                expected="a model that runs in Python, in one piece",
                hint="Watch the model it was made from (of a DataParallel, model.module).",
            )


def _selected(model: nn.Module, layers: str | Iterable[str] | None) -> set[str]:
    """The names of the modules that were asked for, with what is within them."""
    names = [name for name, _ in model.named_modules()]
    if layers is None:
        return set(names)
    chosen: set[str] = set()
    for pattern in [layers] if isinstance(layers, str) else layers:
        found = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
        if not found:
            raise ArgumentError(
                "watch",
                received=f"layers with {pattern!r}",
                expected="names of modules of the model, or patterns that match some",
                hint=f"It has {', '.join(map(repr, names[1:4]))}, …: [name for name, _ in model.named_modules()].",
            )
        chosen |= {
            name for name in names if name in found or any(name.startswith(f"{f}.") for f in found if f)
        }
        if "" in found:
            return set(names)
    return chosen


def _biases(model: nn.Module) -> Iterator[ScoreMod]:
    """The relative position biases that a model of T5's kind adds to its scores."""
    for module in model.modules():
        table = getattr(module, "relative_attention_bias", None)
        if isinstance(table, nn.Embedding):
            try:
                yield relative_bias(
                    table.weight.detach(),
                    bidirectional=not getattr(module, "is_decoder", False),
                    max_distance=getattr(module, "relative_attention_max_distance", 128),
                    align="lower_right",
                )
            except ArgumentError:  # a table of another kind; the bias is then kept as it is
                continue


def _places(model: nn.Module) -> Iterator[tuple[MutableMapping[str, Any], str, Callable[..., Any]]]:
    """Every name to wrap: of torch, of transformers' registry, and those that the model's own files hold."""
    functional = vars(F)
    sdpa = _original(functional["scaled_dot_product_attention"])
    multi_head = _original(functional["multi_head_attention_forward"])
    yield functional, "scaled_dot_product_attention", capture.wrap_sdpa
    yield functional, "multi_head_attention_forward", capture.wrap_multi_head
    yield vars(torch), "_native_multi_head_attention", capture.wrap_native_multi_head
    yield vars(torch), "_transformer_encoder_layer_fwd", capture.wrap_encoder_layer
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    if interface is not None:
        for name, function in tuple(interface._global_mapping.items()):
            if _original(function) is getattr(modeling, "sdpa_attention_forward", None):
                continue  # it ends in the function above
            yield interface._global_mapping, name, capture.wrap_function
    for names in _namespaces(model):
        for name, thing in tuple(names.items()):
            original = _original(thing)
            if original is sdpa:
                yield names, name, capture.wrap_sdpa
            elif original is multi_head:
                yield names, name, capture.wrap_multi_head
            elif original in (attention, layer_matrix):
                yield names, name, wrap_attention
            elif _is_attention_function(original):
                yield names, name, capture.wrap_function
            elif interface is not None and isinstance(thing, interface):
                for key in tuple(thing._local_mapping):
                    yield thing._local_mapping, key, capture.wrap_function


def _namespaces(model: nn.Module) -> Iterator[MutableMapping[str, Any]]:
    """Yield the globals of the files that define the model's classes, except those of torch.

    A public class may have the `__module__` of its package, so the modules of its methods count, too.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    methods = [item for kind in kinds for item in vars(kind).values() if isinstance(item, types.FunctionType)]
    for file in sorted({item.__module__ for item in (*kinds, *methods) if item.__module__}):
        if not file.startswith("torch.") and file != "builtins" and file in sys.modules:
            yield vars(sys.modules[file])


def _original(function: Any) -> Any:
    return getattr(function, "_regard_original", function) if callable(function) else function


def _is_attention_function(thing: Any) -> bool:
    """Whether it takes what transformers' attention functions take."""
    if not isinstance(thing, types.FunctionType):
        return False
    return thing.__code__.co_varnames[:4] == ("module", "query", "key", "value")
