"""The model that `doctor` examines: how to call it on other tokens, padded or with a cache, and log what it calls."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from regard.capture.call import Call, CapturedArgs
from regard.capture.module_trace import ModuleEvent, ModuleTrace
from regard.capture.record import CaptureOptions, build_call
from regard.engines.torch_precision import widen
from regard.errors import ArgumentError, ArgumentTypeError, NotCapturedError, describe_argument
from regard.findings import Finding, Severity
from regard.lens.watch import Watch
from regard.models.loaded_model import find_token_embedding, list_position_limits

Tensor = Any  # the types of torch are not followed


# Calls `forward(input_ids, attention_mask)` and `cached(input_ids, sizes)` of the user.
Forward = Callable[[Tensor, Tensor], Any]
CachedForward = Callable[[Tensor, Sequence[int]], Any]

# Number of tokens of an experiment: the user's, within these limits.
MIN_TOKENS, MAX_TOKENS = 12, 32
# Outputs of models, the ones with a vector for each token first.
OUTPUT_NAMES = (
    "logits", "last_hidden_state", "prediction_logits", "text_embeds", "image_embeds", "pooler_output",
)  # fmt: skip
# Arguments with one number for each token that stay as they are: the kind of each token.
TYPE_NAMES = ("token_type_ids", "mm_token_type_ids")
NAMED_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# Relative difference of outputs above which it is not rounding, by the bytes of a number.
TOLERANCES = {8: 1e-3, 4: 1e-3, 2: 0.1}


class Subject:
    """A model, its inputs, and the ways to call it.

    `model` is the module inside wrappers such as DDP and peft, whose modules are named and watched; `called` is the
    outermost one, which is called.

    Args:
        model: The model, in eval mode.
        inputs: Token ids, (batch, n), or the keyword arguments of the model.
        forward: Called with ids and attention mask, instead of the model; or None.
        cached: Called with ids and the sizes of the pieces, to run them with a cache; or None.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        forward: Forward | None = None,
        cached: CachedForward | None = None,
    ) -> None:
        self.called, self.user_forward, self.user_cached = model, forward, cached
        self.model, self.parameters = unwrap(model)
        self.config = getattr(self.model, "config", None)
        self.inputs = self._resolve_inputs(inputs)
        self.num_passes = 0
        self.keeps_inputs = False
        self.keeps_length = False
        reads_two = "decoder_input_ids" in self.inputs
        self.is_encoder_decoder = reads_two or bool(getattr(self.config, "is_encoder_decoder", False))
        if self.is_encoder_decoder and "input_ids" in self.inputs and "decoder_input_ids" not in self.inputs:
            self.inputs["decoder_input_ids"] = self._make_decoder_ids(self.inputs["input_ids"])
        self.tokens_name = self._find_tokens_name()
        prefix = "decoder_" if self.tokens_name == "decoder_input_ids" else ""
        self.mask_name = f"{prefix}attention_mask"
        self.positions_name = f"{prefix}position_ids"

    def _resolve_inputs(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, torch.Tensor):
            return {self.first_parameter or "input": inputs}
        if isinstance(inputs, Mapping) and inputs and all(isinstance(name, str) for name in inputs):
            return dict(inputs)
        raise ArgumentTypeError(
            "doctor",
            received=f"inputs as {describe_argument(inputs)}",
            expected="token ids (batch, n), or a mapping with the keyword arguments of the model",
            hint='With a tokenizer: doctor(model, tokenizer(texts, padding=True, return_tensors="pt")).',
        )

    def _make_decoder_ids(self, ids: Tensor) -> Tensor:
        """Build tokens for a decoder whose user passed none: the start token, then tokens of the input."""
        start = getattr(self.config, "decoder_start_token_id", None) or 0
        return torch.cat([torch.full_like(ids[:, :1], start), ids[:, : MIN_TOKENS - 1]], 1)

    def _find_tokens_name(self) -> str | None:
        """Return the argument with the tokens whose outputs the model returns; None if it reads none."""
        for name in ("decoder_input_ids", "input_ids", *self.inputs):
            value = self.inputs.get(name)
            is_ids = (
                isinstance(value, torch.Tensor)
                and value.ndim == 2
                and value.dtype in (torch.int64, torch.int32)
            )
            if is_ids and not name.endswith(("_mask", "position_ids", *TYPE_NAMES)):
                return name
        return None

    # Tokens

    @property
    def tokens(self) -> Tensor:
        """The tokens of the user, (batch, n)."""
        assert self.tokens_name is not None
        return self.inputs[self.tokens_name]

    def special_ids(self) -> set[int]:
        """Return the ids of padding, images and the like, which may change more than one token."""
        found = set()
        for config in (self.config, getattr(self.config, "text_config", None)):
            for name, value in vars(config).items() if config is not None else ():
                if name.endswith(("_token_id", "_token_index", "_token_ids")):
                    found |= set(value if isinstance(value, list | tuple) else [value])
        return {value for value in found if isinstance(value, int)}

    def ordinary_ids(self) -> Tensor:
        """Return the user's distinct tokens without special ones, at least two."""
        special = self.special_ids()
        ids = [token for token in self.tokens.unique().tolist() if token not in special]
        candidate = 0
        while len(ids) < 2:
            if candidate not in special and candidate not in ids:
                ids.append(candidate)
            candidate += 1
        return torch.tensor(ids, device=self.tokens.device, dtype=self.tokens.dtype)

    def probe_tokens(self) -> Tensor:
        """Return tokens for experiments, (2, n): the first entry of the user's without special tokens, and another."""
        ids = self.ordinary_ids()
        row = self.tokens[0]
        row = row[torch.isin(row, ids)]
        row = ids if not len(row) else row
        length = self.find_max_positions(min(max(len(row), MIN_TOKENS), MAX_TOKENS))
        length = self.tokens.shape[1] if self.keeps_length else length
        row = row.repeat(-(-length // len(row)))[:length]
        seed = torch.Generator().manual_seed(0)
        other = ids[torch.randint(len(ids), (length,), generator=seed).to(ids.device)]
        return torch.stack([row, other])

    def replace_token(self, tokens: Tensor, column: int) -> Tensor:
        """Return tokens with other ids in a column."""
        ids = self.ordinary_ids()
        changed = tokens.clone()
        for row in changed:
            row[column] = ids[ids != row[column]][0]
        return changed

    # Parts of the model

    def find_encoder(self) -> nn.Module | None:
        """Return the encoder of an encoder-decoder model, or None."""
        try:
            encoder = self.model.get_encoder()
        except (AttributeError, NotImplementedError):
            encoder = getattr(self.model, "encoder", None)
        return encoder if isinstance(encoder, nn.Module) else None

    def find_width(self) -> int | None:
        """Return the width of the token embedding, or None."""
        embedding = find_token_embedding(self.model)
        return None if embedding is None else int(embedding.embedding_dim)

    def find_padding_id(self) -> int:
        """Return the id of the padding token, or of an ordinary token if there is none."""
        embedding = find_token_embedding(self.model)
        pad = getattr(self.config, "pad_token_id", None)
        size = pad if embedding is None else embedding.num_embeddings
        return pad if isinstance(pad, int) and 0 <= pad < (size or 1) else int(self.ordinary_ids()[0])

    def find_max_positions(self, limit: int) -> int:
        """Return the number of positions of the model, by its configuration or its tables; at most `limit`."""
        limits = list_position_limits(self.config)
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Embedding) and ("position" in name or name.rpartition(".")[2] == "wpe"):
                offset = 0 if module.padding_idx is None else module.padding_idx + 1  # as RoBERTa counts
                limits.append(module.num_embeddings - offset)
        used = 1 if self.tokens_name is None else self.tokens.shape[1]  # a smaller table is that of images
        return min([limit, *(found for found in limits if isinstance(found, int) and found >= used)])

    # Calls

    @property
    def first_parameter(self) -> str:
        """Name of the model's first parameter; empty if it takes any."""
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return next(
            (name for name, parameter in self.parameters.items() if parameter.kind not in variable), ""
        )

    def requires(self, name: str) -> bool:
        """Return whether the model cannot be called without an argument of this name."""
        parameter = self.parameters.get(name)
        return (
            parameter is not None and parameter.default is parameter.empty and parameter.kind in NAMED_KINDS
        )

    def accepts(self, name: str) -> bool:
        """Return whether the model has a parameter of this name, or was passed one."""
        return name in self.parameters or name in self.inputs

    @property
    def declares_bidirectional(self) -> bool:
        """Whether the configuration says that tokens attend to later ones."""
        configs = (self.config, getattr(self.config, "text_config", None))
        return any(
            getattr(config, "use_bidirectional_attention", False)
            or getattr(config, "is_causal", None) is False
            for config in configs
        )

    @property
    def takes_mask(self) -> bool:
        """Whether padding can be masked."""
        if self.is_encoder_decoder:
            return "input_ids" in self.inputs and self.accepts("attention_mask")
        return self.user_forward is not None or self.accepts(self.mask_name)

    @property
    def takes_positions(self) -> bool:
        """Whether the model can be passed positions."""
        return self.user_forward is None and self.accepts(self.positions_name)

    @property
    def takes_cache(self) -> bool:
        """Whether the model can run with a cache."""
        if self.user_cached is not None:
            return True
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters.values())
        has_cache = self.accepts("past_key_values") and (self.accepts("use_cache") or takes_any)
        return self.user_forward is None and has_cache

    def run_inputs(self) -> Tensor:
        """Run the model on the user's inputs, and return its output."""
        if self.user_forward is not None and self.tokens_name is not None:
            mask = self.inputs.get("attention_mask")
            return self._call_forward(self.tokens, mask)
        return self._call(self.inputs)

    def run(self, tokens: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Run the model on other tokens.

        Args:
            tokens: (batch, n).
            mask: (batch, n), 1 = token, 0 = padding; None for no padding.
            positions: (batch, n), or None for the model's own.

        Returns:
            The output, (batch, n, …).
        """
        if self.user_forward is not None:
            return self._call_forward(tokens, mask)
        self._reset_positions()
        arguments = self._text_arguments(tokens)
        if mask is not None:
            arguments[self.mask_name] = mask
        if positions is not None:
            arguments[self.positions_name] = positions
        return self._call(arguments)

    def run_source(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run an encoder-decoder model on other tokens of the encoder.

        Args:
            tokens: (batch, n).
            mask: (batch, n), or None for no padding.
        """
        decoded = self.inputs["decoder_input_ids"][:1].expand(len(tokens), -1)
        arguments = {"input_ids": tokens, "decoder_input_ids": decoded}
        return self._call(arguments if mask is None else arguments | {"attention_mask": mask})

    def run_values(self, change: bool) -> Tensor:
        """Run a model of images or the like on its first input twice, as a batch of two.

        Returns:
            The output, (2, …).
        """
        arguments = {}
        for name, value in self.inputs.items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                second = value[:1]
                if change and value.is_floating_point():
                    second = second.flip(-1) * 0.5
                value = torch.cat([value[:1], second])
            arguments[name] = value
        return self._call(arguments)

    @contextmanager
    def trace(self) -> Iterator[ModuleTrace]:
        """Trace what the modules read and return in the pass of a block."""
        trace = ModuleTrace(MAX_TOKENS)
        handles = list(trace.attach(self.model))
        try:
            yield trace
        finally:
            for handle in handles:
                handle.remove()

    @cached_property
    def returns_cache(self) -> bool | None:
        """Whether the model returns a cache if it is asked for one; None if it raises."""
        if self.user_cached is not None or not self.takes_cache or self.tokens_name is None:
            return self.user_cached is not None
        self.num_passes += 1
        try:
            output = self.called(**self._text_arguments(self.probe_tokens()[:1]), use_cache=True)
        except Exception:  # whatever the model raises on inputs that are not its user's
            return None
        return find_cache(output) is not None

    def run_cached(self, tokens: Tensor, sizes: Sequence[int], mask: Tensor | None = None) -> Tensor:
        """Run the model on tokens in pieces, with a cache.

        Args:
            tokens: (batch, n).
            mask: (batch, n), of which each piece is passed the part up to its end; None for no padding.

        Returns:
            The outputs of all pieces, (batch, n, …).
        """
        if self.user_cached is not None:
            self.num_passes += len(sizes)
            return extract_output(self.user_cached(tokens, sizes), len(tokens))
        self._reset_positions()  # once: later pieces continue from the first
        cache, outputs, stop = None, [], 0
        for piece in tokens.split(list(sizes), 1):
            arguments = self._text_arguments(piece.clone(), stop) | {
                "use_cache": True,
                "past_key_values": cache,
            }
            stop += piece.shape[1]
            if mask is not None:
                arguments[self.mask_name] = mask[:, :stop].clone()
            output = self.called(**arguments)
            self.num_passes += 1
            cache = find_cache(output)
            outputs.append(extract_output(output, len(tokens)))
        return torch.cat(outputs, 1)

    def _reset_positions(self) -> None:
        """Forget the offset of positions that Qwen2-VL keeps from its last prompt."""
        for module in self.model.modules():
            if hasattr(module, "rope_deltas"):
                module.rope_deltas = None

    def _text_arguments(self, tokens: Tensor, start: int = 0) -> dict[str, Any]:
        """Return the arguments of the model for tokens from a position on: the encoder's from the user, without images.

        With `keeps_inputs`, all arguments that are not about tokens are the user's.
        """
        assert self.tokens_name is not None
        arguments: dict[str, Any] = {self.tokens_name: tokens}
        batch, stop = len(tokens), start + tokens.shape[1]
        if self.requires(self.mask_name):
            arguments[self.mask_name] = tokens.new_ones(batch, stop)
        if self.requires(self.positions_name):
            arguments[self.positions_name] = torch.arange(start, stop, device=tokens.device).expand_as(tokens)
        for name, value in self.inputs.items():
            if name in TYPE_NAMES:
                arguments[name] = torch.zeros_like(tokens)
                continue
            is_source = self.tokens_name == "decoder_input_ids" and not name.startswith(
                ("decoder_", "labels")
            )
            is_other = name not in (self.tokens_name, self.mask_name, self.positions_name, "labels")
            if is_source or (self.keeps_inputs and is_other):
                is_batch = isinstance(value, torch.Tensor) and len(value) == len(self.tokens)
                arguments[name] = value[:1].expand(len(tokens), *value.shape[1:]) if is_batch else value
        return arguments

    def _call_forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        assert self.user_forward is not None
        self.num_passes += 1
        mask = torch.ones_like(tokens) if mask is None else mask
        return extract_output(self.user_forward(tokens, mask), len(tokens))

    def _call(self, arguments: dict[str, Any]) -> Tensor:
        self.num_passes += 1
        arguments = {name: _copy(value) for name, value in arguments.items()}
        if self.accepts("use_cache"):
            arguments = {"use_cache": False} | arguments
        first = self.first_parameter
        if first in arguments and self.parameters[first].kind is inspect.Parameter.POSITIONAL_ONLY:
            output = self.called(arguments.pop(first), **arguments)
        elif set(arguments) <= {"input"} and "input" not in self.parameters:
            output = self.called(arguments["input"])
        else:
            output = self.called(**arguments)
        tokens = arguments.get(self.tokens_name) if self.tokens_name else next(iter(arguments.values()), None)
        return extract_output(output, len(tokens) if isinstance(tokens, torch.Tensor) else None)


def unwrap(model: nn.Module) -> tuple[nn.Module, dict[str, inspect.Parameter]]:
    """Follow wrappers that pass their keyword arguments on to the one module inside them, as DDP and peft do."""
    parameters = dict(inspect.signature(model.forward).parameters)
    children = list(model.children())
    while len(children) == 1 and _passes_on(model):
        model = children[0]
        parameters |= inspect.signature(model.forward).parameters
        children = list(model.children())
    return model, parameters


def _passes_on(model: nn.Module) -> bool:
    """Return whether a module names no parameter of its own, or is one of peft, and takes any keyword argument."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    named = set(kinds) - {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return inspect.Parameter.VAR_KEYWORD in kinds and (not named or hasattr(model, "get_base_model"))


def _copy(value: Any) -> Any:
    """Copy an argument that a model might change in place: a tensor, or a cache."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # some objects cannot be copied
        return value


def find_cache(output: Any) -> Any:
    """Return the cache in a model's output: by its name, or the last entry of a tuple that is no tensor; or None."""
    if isinstance(output, tuple | list):
        held = [value for value in output if value is not None and not isinstance(value, torch.Tensor)]
        return getattr(output, "past_key_values", held[-1] if held else None)
    return _name_values(output).get("past_key_values")


def _name_values(output: Any) -> dict[str, Any]:
    """Return the values of an output by name: of a mapping, a named tuple or an object; empty for others."""
    if isinstance(output, Mapping):
        return dict(output.items())
    if isinstance(output, tuple | list | torch.Tensor):
        return dict(output._asdict()) if hasattr(output, "_asdict") else {}
    return dict(getattr(output, "__dict__", {}))


def extract_output(output: Any, batch: int | None) -> Tensor:
    """Return the tensor of a model's output to compare: that of each token, if there is one."""
    if isinstance(output, torch.Tensor):
        return output.detach()
    named = _name_values(output)
    values = [named[name] for name in OUTPUT_NAMES if name in named]
    if not named and isinstance(output, tuple | list):
        values += list(output)
    values += [value for name, value in named.items() if not name.startswith("logits_per")]
    for value in values:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1
        if is_float and (batch is None or len(value) == batch):
            return value.detach()
    raise ArgumentError(
        "doctor",
        received=f"a model that returns {describe_argument(output)}",
        expected="a tensor, or a mapping or tuple with one, whose first axis is the batch",
        hint="Pass forward=, a function of input_ids and attention_mask that returns the logits.",
    )


def relative_difference(a: Tensor, b: Tensor) -> Tensor:
    """Return the largest difference of each token, relative to the largest number of `b`.

    Args:
        a: (batch, n, …) or (batch, …).

    Returns:
        (batch, n), or (batch,) for outputs without tokens; float64 if the device has it.
    """
    a, b = widen(a), widen(b)
    # Equal infinities do not differ: some models forbid tokens with logits of −inf.
    difference = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    scale = float(b.abs().nan_to_num(nan=0.0, posinf=0.0).amax()) or 1.0
    axes = difference.shape[:2] if a.ndim > 2 else difference.shape[:1]
    return difference.reshape(*axes, -1).amax(-1) / scale


def tolerance_of(output: Tensor) -> float:
    """Return the relative difference above which two outputs of this dtype differ by more than rounding."""
    return TOLERANCES[min(max(output.element_size(), 2), 8)]


@dataclass
class LoggedCall:
    """One attention call with the linear layers and norms around it.

    Args:
        call: The call, with value and output.
        key: The key that was passed, with every head, (…, heads or kv_heads, kv_len, head_dim).
        value: The value that was passed, with every head.
        owner: The module that made the call.
        layer: Number of the layer, from 0, in the order in which layers first ran.
        around: Name of the module whose linear layers are logged: the call's, or one around it.
        before: Linear layers of the same module that ran before it.
        norms: Norms of the same module that ran before it.
        after: Linear layers and norms of the same module that ran after it.
    """

    call: Call
    key: Tensor
    value: Tensor
    owner: nn.Module
    layer: int
    around: str = ""
    before: list[Any] = field(default_factory=list)
    norms: list[Any] = field(default_factory=list)
    after: list[Any] = field(default_factory=list)

    @property
    def module(self) -> str:
        """Name of the module."""
        return self.call.name

    @property
    def is_configured(self) -> bool:
        """Whether the module is one of transformers, whose configuration decides on scale and window."""
        return type(self.owner).__module__.startswith("transformers.")

    def build_finding(
        self, kind: str, message: str, evidence: dict[str, Any], hint: str, severity: Severity = "error"
    ) -> Finding:
        """Build a finding about this call."""
        return Finding(kind, severity, message, self.module, self.layer, evidence=evidence, hint=hint)


class CallLog(Watch):
    """A watch that also has every call in order, with the modules around it; the recording is made as usual."""

    def __init__(self, model: nn.Module, modules: bool) -> None:
        options = CaptureOptions(copy=True, values=True)
        super().__init__(model, {name for name, _ in model.named_modules()}, options)
        self._traces_modules = modules
        self.recording = self._recording
        self.recording._trace = ModuleTrace(sys.maxsize)  # all rows
        self._layers: dict[str, int] = {}
        self._calls: list[LoggedCall] = []
        self._num_events = 0  # of the trace, up to the last call

    def record(self, module: nn.Module, name: str, args: CapturedArgs) -> None:
        """Log a call and record it."""
        call = build_call(module, name, args, self._options, self._biases)
        if isinstance(call, Call) and call.weights is None:  # of its own softmax, there is no query and key
            layer = self._layers.setdefault(name, len(self._layers))
            value = args.key if args.value is None else args.value
            logged = LoggedCall(replace(call), args.key.detach(), value.detach(), module, layer)
            events, around = self._take_events(), name
            # If the module has no linear layers, they are those of a module around it.
            while around and not any(map(self._is_linear, _select_inside(around, events))):
                around = around.rpartition(".")[0]
            for event in _select_inside(around, events) if around or not name else ():
                (logged.before if self._is_linear(event) else logged.norms).append(event)
            logged.around = around or name
            self._calls.append(logged)
        super().record(module, name, args)

    def _is_linear(self, event: ModuleEvent) -> bool:
        module = self._model.get_submodule(event.name)
        return isinstance(module, nn.Linear) or event.class_name == "Conv1D"

    def _take_events(self) -> list[ModuleEvent]:
        """Return the linear layers and norms since the last call, of which they are the ones that ran after it."""
        new = self.recording._trace.events[self._num_events :]
        self._num_events += len(new)
        modules = dict(self._model.named_modules())
        events = [
            event
            for event in new
            if event.output is not None
            and (self._is_linear(event) or is_norm(event.name, modules[event.name]))
        ]
        if self._calls:
            self._calls[-1].after += _select_inside(self._calls[-1].around, events)
        return events

    @property
    def calls(self) -> list[LoggedCall]:
        """The calls in order, with the linear layers of their modules."""
        self._take_events()
        return self._calls


def is_norm(name: str, module: nn.Module) -> bool:
    """Return whether a module is a norm, such as RMSNorm: by its class or attribute, without modules inside."""
    names = type(module).__name__ + name.rpartition(".")[2]
    return "norm" in names.lower() and not any(True for _ in module.children())


def _select_inside(module: str, events: list[ModuleEvent]) -> list[ModuleEvent]:
    return [event for event in events if not module or event.name.startswith(f"{module}.")]


@contextmanager
def log_calls(model: nn.Module, modules: bool = False) -> Iterator[CallLog]:
    """Log the calls of a block, and with `modules` the linear layers and norms of one pass.

    Layers that cannot be captured are left to the recording's findings.
    """
    log = CallLog(model, modules)
    with suppress(NotCapturedError), log:
        yield log
