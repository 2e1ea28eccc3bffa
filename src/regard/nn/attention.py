"""Multi-head attention as a layer: four projections around one attention matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from regard.core.attention import as_score_mods, check_mask_and_score_mods, layer_matrix
from regard.core.matrix import AttentionMatrix
from regard.errors import ArgumentError, ArgumentTypeError, RegardError, describe_argument, format_shape
from regard.masks import Mask, dense
from regard.nn.cache import KVCache
from regard.nn.positional_masks import Places
from regard.nn.rope import Rope
from regard.score_mods import ScoreMod

Tensor = Any  # the types of torch are not followed


class MultiheadAttention(nn.Module):  # type: ignore[misc]
    """Attention of several heads between projections: (batch, n, embed_dim) in and out, or (n, embed_dim).

    - `num_kv_heads` below `num_heads` is grouped-query attention, 1 is multi-query; `head_dim` is embed_dim / num_heads
      unless given; `kdim` and `vdim` are the widths of key and value where they are not embed_dim.
    - `bias` is that of the projections of query, key and value, `out_bias` that of the output, the same unless given.
    - `scale` is 1/√head_dim unless given.
    - `rope` turns queries and keys by their positions: `"half"`, `"interleaved"` (see `regard.rope`), or a `Rope`.
    - `sink` takes a share of every row and gives it to no key: `"learned"` is a score for each head, a number is fixed.
    - `qk_norm` makes a norm of width head_dim for queries and one for keys, as `torch.nn.RMSNorm` does.
    - `bias_kv` is one more key and value, learnt, that everybody sees (`add_bias_kv` of torch).
    - `dropout` drops weights while training. No fused kernel on the CPU does that, so the weights are then stored.

    >>> layer = MultiheadAttention(64, num_heads=8, num_kv_heads=2, rope="half")
    >>> layer(torch.ones(2, 5, 64)).shape
    torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        rope: Literal["half", "interleaved"] | Rope | None = None,
        sink: Literal["learned"] | float | None = None,
        qk_norm: Callable[[int], Any] | None = None,
        bias_kv: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_sizes(embed_dim, num_heads, num_kv_heads, head_dim, dropout, sink)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.dropout, self.scale = dropout, scale
        made = {"device": device, "dtype": dtype}
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = nn.Linear(embed_dim, width, bias, **made)
        self.k_proj = nn.Linear(embed_dim if kdim is None else kdim, kv_width, bias, **made)
        self.v_proj = nn.Linear(embed_dim if vdim is None else vdim, kv_width, bias, **made)
        self.out_proj = nn.Linear(width, embed_dim, bias if out_bias is None else out_bias, **made)
        self.rope = Rope(head_dim, layout=rope) if isinstance(rope, str) else rope
        if self.rope is not None and self.rope.head_dim != head_dim:
            raise ArgumentError(
                "MultiheadAttention",
                received=f"rope of head_dim {self.rope.head_dim}",
                expected=f"head_dim {head_dim}, the layer's",
                hint=f"Make it for the layer: Rope({head_dim}, layout={self.rope.layout!r}).",
            )
        self.q_norm: Any = None if qk_norm is None else qk_norm(head_dim).to(**made)
        self.k_norm: Any = None if qk_norm is None else qk_norm(head_dim).to(**made)
        self.bias_k = self.bias_v = None
        if bias_kv:
            self.bias_k, self.bias_v = (nn.Parameter(torch.empty(kv_width, **made)) for _ in range(2))
        self.sink: Any = nn.Parameter(torch.empty(num_heads, **made)) if sink == "learned" else sink
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights by Xavier's rule, biases and learned sinks 0."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.normal_(extra, std=self.head_dim**-0.5)
        if isinstance(self.sink, nn.Parameter):
            nn.init.zeros_(self.sink)

    def forward(
        self,
        query: Tensor,
        key: Tensor = None,
        value: Tensor = None,
        *,
        mask: Mask | None = None,
        score_mod: ScoreMod | Sequence[ScoreMod] | None = None,
        padding: Any = None,
        positions: Any = None,
        cache: KVCache | None = None,
        need_matrix: bool = False,
    ) -> Any:
        """The output, (batch, q_len, embed_dim); with `need_matrix=True` (output, AttentionMatrix).

        `key` left out is the query, `value` left out is the key; a key may be what `project_kv` returned. `mask` and
        `score_mod` are those of `regard.attention`. `padding` says which of the keys given are real:
        `regard.padding(lengths)`, or booleans (batch, kv_len), True = real. `positions`, for `rope`, are those of the
        query, (n,) or (batch, n); left out, real tokens are counted from 0.

        With a `cache` the tokens come after those it holds, and mask and score modifications are those of the whole
        sequence: `causal()` needs no `align`. Padding is not kept, so each batch entry counts its own tokens.

        The matrix, (batch, heads, q_len, kv_len), is the one whose product the output is; nothing is computed for it.
        Where weights are dropped it is the matrix before that.
        """
        self._check_inputs(query, key, value, padding, positions, cache)
        check_mask_and_score_mods(mask, as_score_mods(score_mod))
        batched, alone = query.ndim == 3, key is None or key is query
        if not batched:
            query, key, value = (x[None] if isinstance(x, torch.Tensor) else x for x in (query, key, value))
        q = self._split(self.q_proj(query), self.q_norm)  # (batch, heads, q_len, head_dim)
        k, v = self._project(query if key is None else key, value)  # (batch, kv_heads, kv_len, head_dim)
        held = key if isinstance(key, KVCache) else cache
        arguments = (self, q, k, v, mask, as_score_mods(score_mod), padding, positions, held, alone)
        if torch.compiler.is_compiling():
            # Masks and matrices are not traced: the graph ends here, and goes on after it.
            from regard.nn.compile import attend

            output, matrix = attend(*arguments)
        else:
            output, matrix = MultiheadAttention._attend(*arguments)
        output = self.out_proj(output.transpose(1, 2).flatten(2))  # (batch, q_len, embed_dim)
        output = output if batched else output[0]
        if not need_matrix:
            return output
        if held is not None:
            held.lend()
        return output, matrix if batched else matrix.lazy[0]

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        score_mods: tuple[ScoreMod, ...],
        padding: Any,
        positions: Any,
        cache: KVCache | None,
        alone: bool,
    ) -> tuple[Tensor, AttentionMatrix]:
        """The output of all heads, (batch, heads, q_len, head_dim), and the matrix it is the product of."""
        real = _booleans(padding, k)
        q_len, places = q.shape[2], None  # where rows and columns are, if not where they are counted
        if cache is None:
            counted = _counted(real)
            own = counted if positions is None and alone else positions
            q, k = self._turn(q, own), self._turn(k, own if alone else counted)
            if real is not None:
                mask = _both(mask, padding if isinstance(padding, Mask) else dense(real[:, None, None]))
        elif alone:
            at, before = cache.upcoming(q_len, real), cache.lengths
            # Where all entries go on from one place, a slice of the tables is enough.
            start = int(at[0, 0]) if real is None and at.shape[0] == 1 and q_len else at
            q, k = self._turn(q, start), self._turn(k, start)
            k, v = cache.append(k, v, real)
            mask, places = _both(mask, cache.mask), cache.places(at)
        else:
            q = self._turn(q, positions)
            places = cache.places(np.arange(q_len)[None], q_len)
        if self.bias_k is not None:
            places = places or Places(np.arange(q_len)[None], None, (q_len, k.shape[2]))
            k, v, places = self._one_more(k, self.bias_k), self._one_more(v, self.bias_v), places.one_more()
        if places is not None:
            mask, score_mods = places.mask(mask), tuple(map(places.score_mod, score_mods))
        options = {"scale": self.scale, "sink": self.sink, "enable_gqa": self.grouped}
        try:
            matrix = layer_matrix(q, k, v, mask=mask, score_mod=score_mods, **options)
        except RegardError:
            if cache is not None and alone:
                cache.crop(before)  # so that the call can be made again
            raise
        if not (self.training and self.dropout):
            return matrix @ v, matrix
        weights = F.dropout(matrix.to_dense(), self.dropout).to(v.dtype)
        return weights @ v.repeat_interleave(self.num_heads // self.num_kv_heads, 1), matrix

    def project_kv(self, key: Tensor, value: Tensor = None, *, padding: Any = None) -> KVCache:
        """The keys and values of what is attended to again and again, projected once: `layer(query, cached)`.

        >>> layer = MultiheadAttention(8, num_heads=2)
        >>> memory = layer.project_kv(torch.ones(1, 100, 8))
        >>> [layer(token, memory).shape for token in torch.ones(2, 1, 1, 8)]
        [torch.Size([1, 1, 8]), torch.Size([1, 1, 8])]
        """
        if key.ndim == 2:
            key, value = key[None], None if value is None else value[None]
        k, v = self._project(key, value)
        cache, real = KVCache(), _booleans(padding, k)
        cache.append(self._turn(k, _counted(real)), v, real)
        return cache

    @staticmethod
    def from_torch(module: Any) -> MultiheadAttention:
        """A layer with the weights of a `torch.nn.MultiheadAttention`, copied; batch-first, whatever the module was.

        `regard.nn.torch_masks` turns the masks that go with it. A row that sees nothing gives zeros here, NaN there.

        >>> theirs = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.ones(1, 3, 8)
        >>> torch.allclose(MultiheadAttention.from_torch(theirs)(x), theirs(x, x, x)[0], atol=1e-6)
        True
        """
        from regard.nn.convert_torch import from_torch

        return from_torch(module)

    def to_torch(self, *, batch_first: bool = True) -> Any:
        """A `torch.nn.MultiheadAttention` with the layer's weights, copied; what torch has no place for is refused."""
        from regard.nn.convert_torch import to_torch

        return to_torch(self, batch_first=batch_first)

    @property
    def grouped(self) -> bool:
        """Whether several heads share a key head."""
        return self.num_kv_heads != self.num_heads

    def _project(self, key: Any, value: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(key, KVCache):
            return key.key, key.value
        value = key if value is None else value
        return self._split(self.k_proj(key), self.k_norm), self._split(self.v_proj(value))

    def _split(self, x: Tensor, norm: Any = None) -> Tensor:
        """(batch, n, heads · head_dim) as (batch, heads, n, head_dim)."""
        x = x.unflatten(-1, (-1, self.head_dim))
        return (x if norm is None else norm(x)).transpose(1, 2)

    def _turn(self, x: Tensor, at: Any) -> Tensor:
        return x if self.rope is None else self.rope(x, at)

    def _one_more(self, x: Tensor, extra: Tensor) -> Tensor:
        """x with one more token, the same for every batch entry, after the last."""
        token = extra.to(x.dtype).reshape(1, -1, 1, self.head_dim).expand(len(x), -1, -1, -1)
        return torch.cat([x, token], -2)

    def _check_inputs(
        self, query: Tensor, key: Any, value: Any, padding: Any, positions: Any, cache: KVCache | None
    ) -> None:
        """Refuse, in words, what a projection would refuse in numbers."""
        ndim = getattr(query, "ndim", 0)
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x is None or (name == "key" and isinstance(x, KVCache)):
                continue
            projection = getattr(self, f"{name[0]}_proj")
            if (
                not isinstance(x, torch.Tensor)
                or x.ndim != ndim
                or ndim not in (2, 3)
                or x.shape[-1] != projection.in_features
            ):
                raise ArgumentError(
                    "MultiheadAttention",
                    received=f"{name} as {describe_argument(x)}",
                    expected=f"a tensor (batch, n, {projection.in_features}), or all of them without the batch",
                    hint="kdim and vdim are the widths of key and value where they are not embed_dim.",
                )
        if value is not None and not isinstance(key, torch.Tensor):
            received, hint = "a value and no key", "Give the key too, or leave both out for self-attention."
        elif padding is not None and isinstance(key, KVCache):
            received, hint = "cached keys and padding", "Say it once: layer.project_kv(key, padding=…)."
        elif cache is not None and key is not None and key is not query:
            received, hint = (
                "a cache and a key",
                "For cross-attention, pass layer.project_kv(key) as the key.",
            )
        elif cache is not None and positions is not None:
            received, hint = "a cache and positions", "The cache counts positions; leave them out."
        else:
            return
        raise ArgumentError("MultiheadAttention", received=received, expected="one or the other", hint=hint)

    def extra_repr(self) -> str:
        kv = f", num_kv_heads={self.num_kv_heads}" if self.grouped else ""
        sink = ", sink" if self.sink is not None else ""
        drop = f", dropout={self.dropout}" if self.dropout else ""
        return f"{self.embed_dim}, {self.num_heads}{kv}, head_dim={self.head_dim}{sink}{drop}"


def _booleans(padding: Any, k: Tensor) -> Any:
    """Which keys are real: NumPy (batch, kv_len), from a mask by key or from booleans."""
    if padding is None:
        return None
    batch, _, length, _ = k.shape
    if isinstance(padding, Mask) and padding.by_key:
        return padding.to_dense(batch, 1, 1, length).reshape(batch, length)
    real = np.asarray(padding.cpu() if isinstance(padding, torch.Tensor) else padding)
    if isinstance(padding, Mask) or real.dtype != bool or real.shape not in ((length,), (batch, length)):
        raise ArgumentTypeError(
            "MultiheadAttention",
            received=f"padding as {padding if isinstance(padding, Mask) else describe_argument(padding)}",
            expected=f"regard.padding(lengths), or booleans of shape {format_shape(batch=batch, kv_len=length)}",
            hint="True = a real token; for 1 and 0 write padding != 0. What depends on the query is a mask.",
        )
    return np.broadcast_to(real, (batch, length))


def _both(mask: Mask | None, other: Mask | None) -> Mask | None:
    return other if mask is None else mask if other is None else mask & other


def _counted(real: Any) -> Any:
    """The position of each token where padding is not counted: (batch, n)."""
    return None if real is None else np.maximum(np.cumsum(real, 1) - 1, 0)


def _check_sizes(
    embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None, dropout: float, sink: Any
) -> None:
    received = (
        f"embed_dim {embed_dim}, num_heads {num_heads}, num_kv_heads {num_kv_heads}, head_dim {head_dim}"
    )
    sizes = (embed_dim, num_heads, num_kv_heads, 1 if head_dim is None else head_dim)
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in sizes):
        expected, hint = "whole numbers above 0", "They are sizes."
    elif head_dim is None and embed_dim % num_heads:
        expected = "an embed_dim that num_heads divides"
        hint = f"Choose num_heads among the divisors of {embed_dim}, or say head_dim."
    elif num_heads % num_kv_heads:
        expected = "heads that are a multiple of kv_heads"
        hint = "Each key head serves num_heads / num_kv_heads query heads in a row."
    elif not 0 <= dropout < 1:
        received, expected = f"dropout={dropout!r}", "a share from 0 up to but not 1"
        hint = "It is the chance that a weight is dropped while training; 0.0 leaves all."
    elif sink not in (None, "learned") and (isinstance(sink, bool) or not isinstance(sink, int | float)):
        received, expected = f"sink={sink!r}", '"learned", a number or None'
        hint = '"learned" is a score for each head, a number is fixed for all.'
    else:
        return
    raise ArgumentError("MultiheadAttention", received=received, expected=expected, hint=hint)
