"""Eager attention that keeps the weights of every call, and knows which token each row of a cache came from.

A run of a model calls it several times, and a cache joins the calls: beams are reordered, proposed tokens removed,
prefixes copied. `EagerRun` follows the cache by its methods alone, never by comparing keys, so that it is an
independent reference for everything in `regard` that finds out by the keys which calls belong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch
import transformers as hf
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "eager_with_history"


class Token(NamedTuple):
    """A token that a model read: the forward call, its batch entry, and its place among the tokens of the call."""

    call: int
    entry: int
    place: int


History = list[list[Token]]  # of each batch entry, the tokens whose keys a cache holds or has evicted


class Positions(NamedTuple):
    """Where a call of a layer is in the sequence: positions of its rows (q_len,) and of its keys (kv_len,)."""

    rows: torch.Tensor
    keys: torch.Tensor
    num_rows: int  # read so far
    num_keys: int


class Edit(Protocol):
    """An edit by its definition; every method returns a new tensor, with axes (batch, heads, q_len, …)."""

    def edit_scores(self, layer: str, scores: Any, at: Positions) -> Any: ...
    def edit_weights(self, layer: str, weights: Any, at: Positions) -> Any: ...
    def edit_value(self, layer: str, value: Any, at: Positions) -> Any: ...
    def edit_output(self, layer: str, output: Any, at: Positions) -> Any: ...


@dataclass
class LayerCall:
    """One call of a layer.

    Args:
        weights: (batch, heads, q_len, kv_len), the columns from `key_offset` on; rows that attend to nothing are 0.
        largest_score: (batch, heads, q_len), the largest |score| of each row that is not masked.
        key_offset: Position of the first column.
        value: (batch, heads, kv_len, dim), after the edits; None if the layer computes its own softmax.
        output: (batch, heads, q_len, dim), likewise.
    """

    weights: torch.Tensor
    largest_score: torch.Tensor
    key_offset: int
    value: torch.Tensor | None = None
    output: torch.Tensor | None = None


@dataclass
class ForwardCall:
    """One call of the model: what its cache held at the end, and the calls of its layers."""

    history: History
    q_len: int
    is_cached: bool = False
    layers: dict[str, LayerCall] = field(default_factory=dict)


class ExpectedState(NamedTuple):
    """The matrix of a layer that a cache has at the end of a call.

    Args:
        weights: (batch, heads, rows, keys), one row for each token of the history.
        largest_score: (batch, heads, rows).
        tokens: The tokens of the rows of each batch entry.
    """

    weights: torch.Tensor
    largest_score: torch.Tensor
    tokens: History


class DoublePrecision(TorchFunctionMode):
    """Compute in float64 what a model computes in float32 whatever its dtype: norms, rotations, softmaxes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        widen = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        return func(*map(widen, args), **{name: widen(value) for name, value in (kwargs or {}).items()})


class EagerRun:
    """The calls of a model that runs with the attention implementation `NAME`.

    Args:
        model: The model.
        edits: What is changed, in order.
        own_softmax: Names of the classes of layers that compute their own softmax.
    """

    def __init__(self, model: Any, edits: Sequence[Edit] = (), own_softmax: Sequence[str] = ()) -> None:
        self.model, self.edits, self.own_softmax = model, edits, own_softmax
        self.names = {id(module): name for name, module in model.named_modules()}
        self.calls: list[ForwardCall] = []
        self.encoder_calls: dict[str, list[LayerCall]] = {}
        self.caches: list[Any] = []  # held, so that no other object takes their place
        self.layers: list[str] = []  # in the order in which they ran
        self._running = False
        self._inside: list[str] = []  # layers with their own softmax
        self._modes: list[DoublePrecision] = []
        self._is_double = next(model.parameters()).dtype == torch.float64

    # -- What the model is doing

    @contextmanager
    def follow(self) -> Iterator[EagerRun]:
        """Follow the model, and the caches that it is passed."""
        hf.AttentionInterface.register(NAME, self.attend)
        AttentionMaskInterface.register(NAME, eager_mask)
        softmax = torch.nn.functional.softmax
        hooked = [self.model]
        if self.model.config.is_encoder_decoder:
            hooked.append(self.model.get_encoder())
        with ExitStack() as stack:
            stack.callback(AttentionMaskInterface._global_mapping.pop, NAME)
            stack.callback(hf.AttentionInterface._global_mapping.pop, NAME)
            if not self.own_softmax:
                self.model.set_attn_implementation(NAME)
            for module in hooked:
                for hook in (
                    module.register_forward_pre_hook(self._begin, with_kwargs=True),
                    module.register_forward_hook(self._end, with_kwargs=True, always_call=True),
                ):
                    stack.callback(hook.remove)
            for module in self.model.modules():
                if type(module).__name__ in self.own_softmax:
                    name = self.names[id(module)]
                    for hook in (
                        module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name)),
                        module.register_forward_hook(lambda *_: self._inside.pop() and None),
                    ):
                        stack.callback(hook.remove)
            if self.own_softmax:
                intercept = lambda x, dim=None, dtype=None, **_: (  # noqa: E731
                    self._softmax(x) if self._inside else softmax(x, dim, dtype=dtype)
                )
                stack.enter_context(mock.patch.object(torch.nn.functional, "softmax", intercept))
            for name, change in HISTORY_CHANGES.items():
                for owner in (Cache, EncoderDecoderCache):
                    stack.enter_context(mock.patch.object(owner, name, _follow(getattr(owner, name), change)))
            yield self

    def _begin(self, module: Any, args: Any, kwargs: Any) -> None:
        if self._is_double:
            self._modes.append(DoublePrecision())
            self._modes[-1].__enter__()
        if module is not self.model:
            return
        names = ("decoder_input_ids", "input_ids", "pixel_values", "input_features", "inputs_embeds")
        given = next(
            (kwargs[name] for name in names if kwargs.get(name) is not None), args[0] if args else None
        )
        batch, q_len = len(given), given.shape[1] if given.ndim == 2 else 0
        old = getattr(kwargs.get("past_key_values"), "_history", None) or [[] for _ in range(batch)]
        number = len(self.calls)
        new = [[*old[b], *(Token(number, b, i) for i in range(q_len))] for b in range(batch)]
        self.calls.append(ForwardCall(new, q_len))

    def _end(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self._is_double:
            self._modes.pop().__exit__(None, None, None)
        if module is not self.model or output is None:
            return
        cache = kwargs.get("past_key_values")
        cache = getattr(output, "past_key_values", None) if cache is None else cache
        if cache is not None and kwargs.get("use_cache") is not False:
            cache._history, self.calls[-1].is_cached = self.calls[-1].history, True
            if not any(cache is held for held in self.caches):
                self.caches.append(cache)

    # -- Attention

    def attend(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None,
        softcap: Any = None, position_bias: Any = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute attention as `AttentionInterface` asks, with the edits."""
        name, groups = self.names[id(module)], query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if position_bias is not None:
            scores = scores + position_bias[..., : key.shape[-2]]
        if attention_mask is not None:
            mask = attention_mask[..., : key.shape[-2]]
            scores = (scores + mask).masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
        call, at = self._attend(name, scores, getattr(module, "sinks", None))
        for edit in self.edits:
            value = edit.edit_value(name, value, at)
        output = call.weights @ value
        for edit in self.edits:
            output = edit.edit_output(name, output, at)
        call.value, call.output = value, output
        return output.transpose(1, 2).contiguous(), call.weights

    def _softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """Compute the softmax of the innermost layer that computes its own."""
        lowest = torch.finfo(scores.dtype).min
        return self._attend(self._inside[-1], scores.masked_fill(scores <= lowest / 2, -torch.inf), None)[
            0
        ].weights

    def _attend(self, name: str, scores: torch.Tensor, sinks: Any) -> tuple[LayerCall, Positions]:
        """Compute the weights of a call from its scores, with -inf where it is masked, and keep them."""
        at = self._locate(name, *scores.shape[-2:])
        for edit in self.edits:
            scores = edit.edit_scores(name, scores, at)
        column = scores.new_full((1,) * 4, -torch.inf) if sinks is None else sinks.reshape(1, -1, 1, 1)
        scores_and_sink = torch.cat([scores, column.expand(*scores.shape[:3], 1).to(scores.dtype)], -1)
        weights = scores_and_sink.softmax(-1)[..., :-1].nan_to_num(0.0)
        for edit in self.edits:
            weights = edit.edit_weights(name, weights, at)
        largest = scores.abs().masked_fill(scores == -torch.inf, 0.0).amax(-1)
        call = LayerCall(weights, largest, int(at.keys[0]) if len(at.keys) else 0)
        if name not in self.layers:
            self.layers.append(name)
        if is_encoder(name):
            self.encoder_calls.setdefault(name, []).append(call)
        else:
            assert name not in self.calls[-1].layers, f"{name} ran twice in one call of the model"
            self.calls[-1].layers[name] = call
        return call, at

    def _locate(self, name: str, q_len: int, kv_len: int) -> Positions:
        """Return the positions of a call: a cache that rolls holds the last keys, and a static one has room."""
        total = len(self.calls[-1].history[0]) if self.calls and not is_encoder(name) else 0
        total = total or q_len  # of images and sounds, whose tokens are not counted before
        rows = torch.arange(total - q_len, total)
        if is_cross_attention(name) or is_encoder(name):
            return Positions(rows, torch.arange(kv_len), total, kv_len)
        start = max(0, total - kv_len)
        return Positions(rows, torch.arange(start, start + kv_len), total, total)

    # -- What is expected

    def list_tokens(self, name: str) -> set[Token]:
        """List the tokens that a layer read and no cache removed: those that a recording must have."""
        if is_encoder(name):
            histories = [self._get_history(name, number) for number in range(len(self.encoder_calls[name]))]
        else:
            histories = [
                history for cache in self.caches for history in (cache._history, *getattr(cache, "_past", ()))
            ]
            uncached = [number for number, call in enumerate(self.calls) if not call.is_cached]
            histories += [self._get_history(name, number) for number in uncached]
        return {token for history in histories for tokens in history for token in tokens}

    def list_states(self, name: str) -> list[tuple[int, tuple[int, ...]]]:
        """List the calls that ran a layer, each with the shape of the matrix at its end."""
        listed = []
        for number, call in enumerate(self._list_layer_calls(name)):
            if call is not None:
                rows = len(self._get_history(name, number)[0])
                is_square = not is_encoder(name) and not is_cross_attention(name)
                listed.append(
                    (number, (*call.weights.shape[:2], rows, rows if is_square else call.weights.shape[-1]))
                )
        return listed

    def _list_layer_calls(self, name: str) -> list[LayerCall | None]:
        """List the call of a layer in each call of the model, or of the encoder."""
        return (
            self.encoder_calls[name] if is_encoder(name) else [call.layers.get(name) for call in self.calls]
        )

    def _get_history(self, name: str, number: int) -> History:
        """Return the tokens of the rows of a layer at the end of a call."""
        if not is_encoder(name) and self.calls[number].history[0]:
            return self.calls[number].history
        call = self._list_layer_calls(name)[number]  # of an encoder, or of an image
        return (
            []
            if call is None
            else [
                [Token(number, b, i) for i in range(call.weights.shape[2])] for b in range(len(call.weights))
            ]
        )

    def build_state(self, name: str, number: int) -> ExpectedState:
        """Build the matrix of a layer at the end of a call."""
        calls, history = self._list_layer_calls(name), self._get_history(name, number)
        shape = dict(self.list_states(name))[number]
        weights = calls[number].weights.new_zeros(shape)
        largest = calls[number].weights.new_zeros(shape[:3])
        for b, tokens in enumerate(history):
            first = 0
            while first < len(tokens):  # the tokens that follow each other in one call
                source, entry, place = tokens[first]
                count = 1
                while tokens[first + count : first + count + 1] == [(source, entry, place + count)]:
                    count += 1
                call, rows, own = calls[source], slice(place, place + count), slice(first, first + count)
                width = min(call.weights.shape[-1], shape[-1] - call.key_offset)
                weights[b, :, own, call.key_offset : call.key_offset + width] = call.weights[
                    entry, :, rows, :width
                ]
                largest[b, :, own] = call.largest_score[entry, :, rows]
                first += count
        return ExpectedState(weights, largest, history)


def is_encoder(name: str) -> bool:
    """Return whether a layer belongs to the encoder of an encoder-decoder model."""
    return name.startswith(("encoder.", "model.encoder."))


def is_cross_attention(name: str) -> bool:
    """Return whether a layer attends to another sequence."""
    return name.endswith(("encoder_attn", "EncDecAttention"))


def _crop(history: History, tokens_to_remove: int) -> History:
    return [tokens[: len(tokens) - abs(tokens_to_remove)] for tokens in history]


HISTORY_CHANGES = {
    "reorder_cache": lambda history, beams: [history[b] for b in beams.tolist()],
    "crop": _crop,
    "batch_repeat_interleave": lambda history, repeats: [
        tokens for tokens in history for _ in range(repeats)
    ],
    "batch_select_indices": lambda history, indices: [history[b] for b in indices.tolist()],
    "reset": lambda history: [[] for _ in history],
}


def _follow(method: Any, change: Any) -> Any:
    """Wrap a method of a cache so that it changes the cache's history as well."""

    def changed(cache: Any, *args: Any, **kwargs: Any) -> Any:
        history = getattr(cache, "_history", None)
        if history is not None:
            cache._history = change(history, *args, **kwargs)
            if method.__name__ == "reset":
                cache._past = [*getattr(cache, "_past", ()), history]
        return method(cache, *args, **kwargs)

    return changed
