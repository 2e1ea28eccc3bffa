"""One attention call: the arguments that the wrappers captured, and `Call`, from which the lens computes everything."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from regard.capture.compact_mask import CompactMask
from regard.core.attention import attention, attention_from_weights
from regard.core.matrix import AttentionMatrix
from regard.errors import ArgumentError, format_named_shape
from regard.masks import Mask
from regard.score_mods import ScoreMod

Tensor = Any  # the types of torch are not followed


class DenseAttention(NamedTuple):
    """The weights of a layer that computed its own softmax, and the other parts of its product.

    Args:
        weights: (…, heads, q_len, kv_len), without dropout.
        value: (…, kv_heads, kv_len, value_dim); None if its axes are not known.
        output: (…, heads, q_len, value_dim); None if its axes are not known.
        dropout_p: Probability of the dropout that the product includes.
        score_rows: (…, heads, q_len, 3): lse, first key and end of each row before the softmax, NaN where they are not
            known; None if nothing is known.
        is_slice: Whether the layer computes its heads in several calls, each with some entries of batch · heads, which
            are batch entries with one head here.
    """

    weights: Tensor
    value: Tensor | None
    output: Tensor | None
    dropout_p: float
    score_rows: Tensor | None = None
    is_slice: bool = False


class CapturedArgs(NamedTuple):
    """The arguments of one attention call, in the order and with the names of `F.scaled_dot_product_attention`.

    A layer that computes its own softmax has no query and key (None), and its weights in `dense`.
    """

    query: Tensor
    key: Tensor
    value: Tensor  # None if the layer multiplies the matrix of `regard.attention` by its value itself
    attn_mask: Any = None  # a tensor, a `BlockMask` or a `Mask`
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    # Arguments and results of other attention functions.
    softcap: float | None = None
    sink: Tensor | None = None
    position_bias: Tensor | None = None
    score_mod: Callable[..., Tensor] | None = None
    lse: Tensor | None = None
    output: Tensor | None = None
    weights: Tensor | None = None  # as the function returned them, to verify the recorded matrix
    kernel: str = ""
    # Read from the function's own softmax, in case its arguments do not explain it.
    dense: DenseAttention | None = None
    has_run: bool = True  # False if the function was left out, because an edit computes the output without it
    # What an intervention changed; `output` and `weights` stay those of the function.
    edits: CallEdits | None = None
    edited_output: Tensor | None = None
    edited_weights: Tensor | None = None

    @property
    def resolved_scale(self) -> float:
        """The scale that was passed, or 1/√head_dim."""
        return 1.0 / math.sqrt(self.query.shape[-1]) if self.scale is None else float(self.scale)

    def expand_query(self) -> CapturedArgs:
        """Return the arguments with the query expanded to the leading axes of key and value, as kernels read it."""
        if self.query is None or self.query.is_nested:
            return self
        stop = -3 if self.enable_gqa else -2
        leads = [part.shape[:stop] for part in self[:3] if part is not None]
        if all(lead == leads[0] for lead in leads):
            return self
        try:
            lead = torch.broadcast_shapes(*leads)
        except RuntimeError:  # a function of a model, whose axes are others
            return self
        return self._replace(query=self.query.expand(*lead, *self.query.shape[stop:]))


class CallEdits(Protocol):
    """What `regard.intervene` changed about a call; `regard.interventions` defines it."""

    def edit_mask(self, mask: Mask | None) -> Mask | None:
        """Return the mask after the edits."""

    def edit_score_mods(self, score_mods: tuple[ScoreMod, ...]) -> tuple[ScoreMod, ...]:
        """Return the score modifications after the edits."""

    def edit_call(self, call: Call) -> Call:
        """Return the record of a call whose weights are replaced."""

    def extends(self, other: Any) -> bool:
        """Return whether calls with these and with other edits may be joined."""

    def join(self, first: Any, shape: tuple[int, ...]) -> CallEdits:
        """Return the edits of a matrix that joins several calls."""


@dataclass(repr=False)
class Call:
    """One call of an attention layer, or the consecutive calls that share one key-value cache.

    Query and key are detached references to the model's own tensors, unless `watch` copies or moves them. A
    key that the model repeated for each head of a group is stored once. If the layer computed its own softmax,
    `weights` are the weights of the layer, and query and key have a head_dim of 0. With `watch(measures=…)`, query and
    key are None, and `measures` has the results.

    Args:
        name: Name of the module in the model.
        layer_class: Name of the module's class.
        query: (…, heads, q_len, head_dim).
        key: (…, kv_heads, kv_len, head_dim).
        compact_mask: Mask and bias in recognised form; read them as `mask` and `score_mods`.
        scale: Factor of the scores.
        kernel: The kernel that ran.
        lse: (…, heads, q_len), from the kernel that ran; None if it does not return one. If the layer computed its own
            softmax, the lse of its scores, NaN where they are unknown.
        value: (…, kv_heads, kv_len, value_dim) with `watch(values=True)`, else None.
        output: Output of the kernel with `watch(values=True)`, else None.
        weights: (…, heads, q_len, kv_len), as a layer with its own softmax computed them, without dropout; else None.
        softcap: Soft cap of the scores, or None.
        sink: Learned sink, one score for each head, (…, heads), or None.
        dropout_p: Dropout probability that was passed.
        is_causal: Whether `is_causal` was passed in any of the calls.
        is_broadcast: Whether key or value was broadcast to the batch or the heads of the query.
        training: Whether the module was in training mode.
        query_offset: Position of the first query among the keys.
        steps: Number of calls that were joined.
        prompt_len: Number of prompt rows, which precede the first step of one row; 0 if no call was joined.
        measures: Results by name with `watch(measures=…)`, else None.
        stored_shape: Shape of the matrix if query and key are None.
        versions: Tensors that are held by reference, each with its version.
        speculative_mode: How `generate()` proposed tokens that it may have discarded, such as "beam search"; else "".
        num_missing_values: How many of the call's own values the cache does not hold: they are absent or all 0.
        forward_pass: Number of the forward pass of the model that contains the call, from 1; 0 if `forward` of the
            model did not run.
        source_key: Weak reference to the key that was passed, and its version.
        source_cache: Weak reference to the cache passed to the model, or None.
        cached: The value of a layer with its own softmax: later calls extend it if they share a cache.
        edits: Changes by `regard.intervene`, or None. Mask, score modifications and matrix describe the state after the
            edits.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with regard.watch(layer) as recording:
    ...     output = layer(torch.ones(1, 3, 8))
    >>> (call,) = recording.calls("self_attn")
    >>> call
    Call('self_attn', MultiheadAttention, (batch 1, heads 2, q_len 3, kv_len 3), torch: flash on CPU;
         query float32 (1, 2, 3, 4), key float32 (1, 2, 3, 4), lse float32 (1, 2, 3))
    """

    name: str
    layer_class: str
    query: Tensor
    key: Tensor
    compact_mask: CompactMask
    scale: float
    kernel: str
    lse: Tensor | None = None
    value: Tensor | None = None
    output: Tensor | None = None
    weights: Tensor | None = None
    softcap: ScoreMod | None = None
    sink: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    is_broadcast: bool = False
    training: bool = False
    query_offset: int = 0
    steps: int = 1
    prompt_len: int = 0
    measures: dict[str, Any] | None = None
    stored_shape: tuple[int, ...] = ()
    versions: tuple[tuple[Tensor, int], ...] = ()
    speculative_mode: str = ""
    num_missing_values: int = 0
    forward_pass: int = 0
    source_key: Any = None
    source_cache: Any = None
    cached: Tensor | None = None
    edits: CallEdits | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, (…, heads, q_len, kv_len)."""
        if self.stored_shape:
            return self.stored_shape
        return (*self.query.shape[:-1], self.key.shape[-2])

    def __repr__(self) -> str:
        steps = f", {self.steps} steps" if self.steps > 1 else ""
        shape = format_named_shape(self.shape, "q_len", "kv_len")
        names = ("query", "key", "lse", "weights", "value", "output")
        tensors = {name: getattr(self, name) for name in names} | (self.measures or {})
        held = [
            f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            if isinstance(tensor, torch.Tensor)
            else f"{name} {type(tensor).__name__}"
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        head = f"Call({self.name!r}, {self.layer_class}, {shape}{steps}, {self.kernel};"
        return f"{head}\n     {', '.join(held)})"

    @property
    def groups(self) -> int:
        """Number of heads that share a key."""
        return int(self.query.shape[-3] // self.key.shape[-3]) if self.query.ndim > 2 < self.key.ndim else 1

    @cached_property
    def mask(self) -> Mask | None:
        """The mask as a named mask, such as `causal()`; None if nothing is masked."""
        mask = self.compact_mask.mask(self.query.shape[-2], self.key.shape[-2])
        return mask if self.edits is None else self.edits.edit_mask(mask)

    @property
    def score_mods(self) -> tuple[ScoreMod, ...]:
        """The modifications of the scaled scores, in order."""
        softcap = () if self.softcap is None else (self.softcap,)
        score_mods = softcap + self.compact_mask.score_mods()
        return score_mods if self.edits is None else self.edits.edit_score_mods(score_mods)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are held."""
        tensors = (self.query, self.key, self.lse, self.value, self.output, self.weights)
        held = sum(int(tensor.nbytes) for tensor in tensors if tensor is not None)
        return held + self.compact_mask.nbytes

    @property
    def matrix(self) -> AttentionMatrix:
        """The lazy attention matrix. With `watch(grad=True)`, gradients flow through it wherever they are enabled.

        Raises:
            ArgumentError: If the call was recorded with `measures`, or the model has overwritten its tensors.
        """
        has_graph = self.query is not None and (self.query.requires_grad or self.key.requires_grad)
        return self._graph_matrix if has_graph and torch.is_grad_enabled() else self._matrix

    @cached_property
    def _graph_matrix(self) -> AttentionMatrix:
        return self._build_matrix()

    @cached_property
    def _matrix(self) -> AttentionMatrix:
        # A matrix keeps results of its query and key, so one that was used without gradients has none afterwards.
        with torch.no_grad():
            matrix = self._build_matrix()
            has_scores = self.weights is None  # the scores of given weights are their logarithms
            if has_scores and self.lse is not None and self.lse.dtype == self.key.dtype:  # it has no gradient
                matrix._keep_lse(self._correct_lse(self.lse))
            return matrix

    def _build_matrix(self) -> AttentionMatrix:
        if self.measures is not None:
            raise ArgumentError(
                f"recording[{self.name!r}]",
                received="a recording with measures only: " + ", ".join(self.measures),
                expected="a recording of queries and keys",
                hint=f"The results are recording.calls({self.name!r})[0].measures. For the matrix, call regard.watch "
                "without measures.",
            )
        self._check_unchanged()
        if self.weights is not None:
            return attention_from_weights(
                self.weights, self.query, self.key, mask=self.mask, enable_gqa=self.groups > 1
            )
        return attention(
            self.query,
            self.key,
            mask=self.mask,
            score_mod=self.score_mods,
            scale=self.scale,
            sink=self.sink,
            enable_gqa=self.groups > 1,
        )

    def _correct_lse(self, lse: Tensor) -> Tensor:
        """Correct the kernel's lse in fully masked rows, which it sets to 0 or absorbs into the lowest number."""
        empty, uniform_keys = self.compact_mask.empty_rows, self.compact_mask.uniform_keys
        if empty is not None:
            lse = lse.masked_fill(torch.tensor(empty, device=lse.device), -torch.inf)
        if uniform_keys is not None:
            keys = torch.tensor(uniform_keys, device=lse.device).clamp(max=self.key.shape[-2])
            lse = torch.where(keys > 0, keys.log().to(lse.dtype), lse)
        return lse

    def _check_unchanged(self) -> None:
        for tensor, version in self.versions:
            if tensor._version != version:
                raise ArgumentError(
                    f"recording[{self.name!r}]",
                    received="a tensor that the model overwrote after the call",
                    expected="the tensors that the layer used",
                    hint="Record a copy: regard.watch(model, copy=True).",
                )


class LayerCall(NamedTuple):
    """A call with its place in a recording.

    Args:
        layer: Number of the layer, from 0, in the order in which the layers ran.
        module: Name of the module.
        call_index: Which call of the layer it is, from 0.
        call: The call.
    """

    layer: int
    module: str
    call_index: int
    call: Call
