"""Multi-head attention as a torch layer: four projections around one attention matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from regard.core.attention import as_score_mods, check_mask_and_score_mods, layer_attention
from regard.core.matrix import AttentionMatrix
from regard.errors import ArgumentError, ArgumentTypeError, RegardError, describe_argument, format_shape
from regard.masks import Mask, dense
from regard.nn.cache import KVCache
from regard.nn.positional_masks import TokenPositions
from regard.nn.rope import Rope
from regard.score_mods import ScoreMod, bias

Tensor = Any  # mypy does not follow torch's types


class MultiheadAttention(nn.Module):  # type: ignore[misc]
    """Multi-head attention between linear projections: (batch, n, embed_dim) in and out, or (n, embed_dim).

    Args:
        embed_dim: The width of the input and of the output.
        num_heads: The number of query heads.
        num_kv_heads: The number of key heads. Fewer than `num_heads` is grouped-query attention, 1 is multi-query
            attention. Default: `num_heads`.
        head_dim: The width of one head. Default: embed_dim / num_heads.
        kdim: The width of the key input. Default: `embed_dim`.
        vdim: The width of the value input. Default: `embed_dim`.
        bias: Whether the projections of query, key and value have a bias. Default True.
        out_bias: Whether the output projection has a bias. Default: `bias`.
        dropout: The probability that a weight is dropped while training. No fused CPU kernel supports dropout, so
            the weights are then stored.
        scale: The factor of the scores. Default: 1/√head_dim.
        rope: How queries and keys are rotated by their positions: `"half"` or `"interleaved"` (see `regard.rope`),
            or a `Rope`. Default: no rotation.
        sink: An extra score without a key in the softmax of every row: `"learned"` for one learned score per head, or
            a fixed number. Default: none.
        qk_norm: Builds a norm of width head_dim, once for queries and once for keys, as `torch.nn.RMSNorm` does.
        bias_kv: Whether to add one learned key and value that every query sees (`add_bias_kv` of torch).
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Raises:
        ArgumentError: If the sizes are incompatible, or `dropout`, `sink` or `rope` is not an accepted value.

    >>> import torch
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
        factory = {"device": device, "dtype": dtype}
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = nn.Linear(embed_dim, width, bias, **factory)
        self.k_proj = nn.Linear(embed_dim if kdim is None else kdim, kv_width, bias, **factory)
        self.v_proj = nn.Linear(embed_dim if vdim is None else vdim, kv_width, bias, **factory)
        self.out_proj = nn.Linear(width, embed_dim, bias if out_bias is None else out_bias, **factory)
        self.rope = Rope(head_dim, layout=rope) if isinstance(rope, str) else rope
        if self.rope is not None and self.rope.head_dim != head_dim:
            raise ArgumentError(
                "MultiheadAttention",
                received=f"rope of head_dim {self.rope.head_dim}",
                expected=f"head_dim {head_dim}, as in the layer",
                hint=f"Build it for the layer: Rope({head_dim}, layout={self.rope.layout!r}).",
            )
        self.q_norm: Any = None if qk_norm is None else qk_norm(head_dim).to(**factory)
        self.k_norm: Any = None if qk_norm is None else qk_norm(head_dim).to(**factory)
        self.bias_k = self.bias_v = None
        if bias_kv:
            self.bias_k, self.bias_v = (nn.Parameter(torch.empty(kv_width, **factory)) for _ in range(2))
        self.sink: Any = nn.Parameter(torch.empty(num_heads, **factory)) if sink == "learned" else sink
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights by Xavier's rule, biases and learned sinks with 0."""
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
        """Attend from `query` to `key` and mix `value`.

        With a `cache`, the tokens follow the cached ones, and mask and score modifications refer to the whole sequence:
        `causal()` needs no `align`. Padding is not cached, so each batch entry counts its own tokens.

        Args:
            query: (batch, q_len, embed_dim), or (q_len, embed_dim).
            key: (batch, kv_len, kdim), or a result of `project_kv`. Default: `query`.
            value: (batch, kv_len, vdim). Default: `key`.
            mask: As in `regard.attention`.
            score_mod: One or several, as in `regard.attention`.
            padding: Which keys are real: `regard.padding(lengths)`, or booleans (batch, kv_len), True = real.
            positions: Positions of the query for `rope`, (q_len,) or (batch, q_len). Default: real tokens count from 0.
            cache: The keys and values of past tokens, for self-attention. The new tokens are appended to it.
            need_matrix: Whether to also return the matrix.

        Returns:
            The output (batch, q_len, embed_dim), or (q_len, embed_dim). With `need_matrix=True`, the pair
            (output, matrix): the `AttentionMatrix` (batch, heads, q_len, kv_len) that computed the output, at no extra
            cost. During training with dropout, it is the matrix before dropout.

        Raises:
            ArgumentError: If shapes do not match the layer, or two arguments exclude each other.
            ArgumentTypeError: If `mask`, `score_mod` or `padding` has the wrong type.
        """
        self._check_inputs(query, key, value, padding, positions, cache)
        check_mask_and_score_mods(mask, as_score_mods(score_mod))
        is_batched, is_self = query.ndim == 3, key is None or key is query
        if not is_batched:
            query, key, value = (x[None] if isinstance(x, torch.Tensor) else x for x in (query, key, value))
        q = self._split(self.q_proj(query), self.q_norm)  # (batch, heads, q_len, head_dim)
        k, v = self._project(query if key is None else key, value)  # (batch, kv_heads, kv_len, head_dim)
        kv_cache = key if isinstance(key, KVCache) else cache
        arguments = (self, q, k, v, mask, as_score_mods(score_mod), padding, positions, kv_cache, is_self)
        if torch.compiler.is_compiling():
            # Masks and matrices cannot be traced, so the graph breaks here.
            from regard.nn.compile import attend

            output, matrix = attend(*arguments)
        else:
            output, matrix = MultiheadAttention._attend(*arguments)
        output = self.out_proj(output.transpose(1, 2).flatten(2))  # (batch, q_len, embed_dim)
        output = output if is_batched else output[0]
        if not need_matrix:
            return output
        if kv_cache is not None:
            kv_cache.mark_shared()
        return output, matrix if is_batched else matrix.lazy[0]

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
        is_self: bool,
    ) -> tuple[Tensor, AttentionMatrix]:
        """Return the output of all heads, (batch, heads, q_len, head_dim), and the matrix it is the product of."""
        real = _resolve_padding(padding, k)
        q_len = q.shape[2]
        token_positions = None  # None: row i is query i, column j is key j
        if cache is None:
            counted = _count_tokens(real)
            own = counted if positions is None and is_self else positions
            q, k = self._rotate(q, own), self._rotate(k, own if is_self else counted)
            if real is not None:
                mask = _combine_masks(
                    mask, padding if isinstance(padding, Mask) else dense(real[:, None, None])
                )
        elif is_self:
            at, lengths_before = cache.next_positions(q_len, real), cache.lengths
            # If all entries continue from one position, a slice of the tables is enough.
            start = int(at[0, 0]) if real is None and at.shape[0] == 1 and q_len else at
            q, k = self._rotate(q, start), self._rotate(k, start)
            k, v = cache.append(k, v, real)
            mask, token_positions = _combine_masks(mask, cache.mask), cache.token_positions(at)
        else:
            q = self._rotate(q, positions)
            token_positions = cache.token_positions(np.arange(q_len)[None], q_len)
        if self.bias_k is not None:
            token_positions = token_positions or TokenPositions(
                np.arange(q_len)[None], None, (q_len, k.shape[2])
            )
            k, v = self._append_token(k, self.bias_k), self._append_token(v, self.bias_v)
            token_positions = token_positions.append_visible_key()
        if token_positions is not None:
            mask = token_positions.restrict_mask(mask)
            score_mods = tuple(map(token_positions.restrict_score_mod, score_mods))
        drops = bool(self.training and self.dropout)
        options = {"scale": self.scale, "sink": self.sink, "enable_gqa": self.grouped, "multiply": not drops}
        try:
            output, matrix = layer_attention(q, k, v, mask=mask, score_mod=score_mods, **options)
        except RegardError:
            if cache is not None and is_self:
                cache.crop(lengths_before)  # so that the call can be repeated
            raise
        if not drops:
            return output, matrix
        weights = F.dropout(matrix.to_dense(), self.dropout).to(v.dtype)
        return weights @ v.repeat_interleave(self.num_heads // self.num_kv_heads, 1), matrix

    def project_kv(self, key: Tensor, value: Tensor = None, *, padding: Any = None) -> KVCache:
        """Project keys and values once, for repeated cross-attention: `layer(query, cached)`.

        Args:
            key: (batch, kv_len, kdim), or (kv_len, kdim).
            value: (batch, kv_len, vdim). Default: `key`.
            padding: Which keys are real, as in `forward`.

        Returns:
            A `KVCache` to pass as the key.

        >>> import torch
        >>> layer = MultiheadAttention(8, num_heads=2)
        >>> memory = layer.project_kv(torch.ones(1, 100, 8))
        >>> [layer(token, memory).shape for token in torch.ones(2, 1, 1, 8)]
        [torch.Size([1, 1, 8]), torch.Size([1, 1, 8])]
        """
        if key.ndim == 2:
            key, value = key[None], None if value is None else value[None]
        k, v = self._project(key, value)
        cache, real = KVCache(), _resolve_padding(padding, k)
        cache.append(self._rotate(k, _count_tokens(real)), v, real)
        return cache

    @classmethod
    def from_torch(cls, module: Any) -> MultiheadAttention:
        """Return a layer with the weights of a `torch.nn.MultiheadAttention`, copied.

        The layer is batch-first even if the module is not. `regard.nn.torch_masks` converts the masks of its calls.
        For a row without visible keys, the layer returns zeros; torch returns NaN.

        Args:
            module: The `torch.nn.MultiheadAttention`.

        Raises:
            ArgumentTypeError: If `module` has another type.

        >>> import torch
        >>> theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.ones(1, 3, 8)
        >>> torch.allclose(MultiheadAttention.from_torch(theirs)(x), theirs(x, x, x)[0], atol=1e-6)
        True
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise ArgumentTypeError(
                "from_torch",
                received=describe_argument(module),
                expected="a torch.nn.MultiheadAttention",
                hint="To convert another module, copy its weights into q_proj, k_proj, v_proj and out_proj of a new "
                "layer.",
            )
        like = module.out_proj.weight
        layer = cls(
            module.embed_dim,
            module.num_heads,
            kdim=module.kdim,
            vdim=module.vdim,
            bias=module.in_proj_bias is not None,
            dropout=module.dropout,
            sink=0.0 if module.add_zero_attn else None,  # a key of zeros scores 0, its value adds nothing
            bias_kv=module.bias_k is not None,
            device=like.device,
            dtype=like.dtype,
        )
        with torch.no_grad():
            for ours, theirs in layer._pair_parameters(module):
                ours.copy_(theirs.reshape(ours.shape))
        layer.train(module.training)
        return layer

    def to_torch(self, *, batch_first: bool = True) -> Any:
        """Return a `torch.nn.MultiheadAttention` with the weights of the layer, copied.

        Args:
            batch_first: Whether the module takes (batch, n, embed_dim). Default True.

        Raises:
            ArgumentError: If the layer has parts that the module does not support, such as grouped heads or `rope`.
        """
        has_zero_sink = isinstance(self.sink, int | float) and self.sink == 0
        biases = {x.bias is not None for x in (self.q_proj, self.k_proj, self.v_proj, self.out_proj)}
        unsupported = {
            "grouped heads": self.grouped,
            "a head_dim that is not embed_dim / num_heads": self.head_dim * self.num_heads != self.embed_dim,
            "rope": self.rope is not None,
            "norms of queries and keys": self.q_norm is not None,
            "a custom scale": self.scale not in (None, self.head_dim**-0.5),
            "a sink that is not fixed at 0": self.sink is not None and not has_zero_sink,
            "a bias for some projections only": len(biases) > 1,
        }
        if any(unsupported.values()):
            raise ArgumentError(
                "to_torch",
                received="a layer with "
                + ", ".join(name for name, present in unsupported.items() if present),
                expected="only what torch.nn.MultiheadAttention supports: equal heads, the default scale, no positions",
                hint="Keep the layer, or build it without these features.",
            )
        module = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            dropout=self.dropout,
            bias=biases == {True},
            add_bias_kv=self.bias_k is not None,
            add_zero_attn=has_zero_sink,
            kdim=self.k_proj.in_features,
            vdim=self.v_proj.in_features,
            batch_first=batch_first,
            device=self.out_proj.weight.device,
            dtype=self.out_proj.weight.dtype,
        )
        with torch.no_grad():
            for ours, theirs in self._pair_parameters(module):
                theirs.copy_(ours.reshape(theirs.shape))
        return module.train(self.training)

    def _pair_parameters(self, module: Any) -> list[tuple[Tensor, Tensor]]:
        """Pair the parameters of the layer with those of a torch module; parts of a packed one are views."""
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        projections = (self.q_proj, self.k_proj, self.v_proj, self.out_proj)
        ours = [x.weight for x in projections] + [x.bias for x in projections] + [self.bias_k, self.bias_v]
        out = module.out_proj
        theirs = [*weights, out.weight, *biases, out.bias, module.bias_k, module.bias_v]
        return [pair for pair in zip(ours, theirs, strict=True) if pair[0] is not None]

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key head."""
        return self.num_kv_heads != self.num_heads

    def _project(self, key: Any, value: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(key, KVCache):
            return key.key, key.value
        value = key if value is None else value
        return self._split(self.k_proj(key), self.k_norm), self._split(self.v_proj(value))

    def _split(self, x: Tensor, norm: Any = None) -> Tensor:
        """Reshape (batch, n, heads · head_dim) to (batch, heads, n, head_dim)."""
        x = x.unflatten(-1, (-1, self.head_dim))
        return (x if norm is None else norm(x)).transpose(1, 2)

    def _rotate(self, x: Tensor, positions: Any) -> Tensor:
        return x if self.rope is None else self.rope(x, positions)

    def _append_token(self, x: Tensor, extra: Tensor) -> Tensor:
        """Append one token to x, equal for every batch entry."""
        token = extra.to(x.dtype).reshape(1, -1, 1, self.head_dim).expand(len(x), -1, -1, -1)
        return torch.cat([x, token], -2)

    def _check_inputs(
        self, query: Tensor, key: Any, value: Any, padding: Any, positions: Any, cache: KVCache | None
    ) -> None:
        """Raise an error that names the argument, before a projection fails with shapes only."""
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
                    expected=f"a tensor (batch, n, {projection.in_features}), or all inputs without the batch axis",
                    hint="If key or value has a different width than embed_dim, set kdim or vdim.",
                )
        if value is not None and not isinstance(key, torch.Tensor):
            received, hint = "a value and no key", "Pass the key too, or omit both for self-attention."
        elif padding is not None and isinstance(key, KVCache):
            received, hint = (
                "cached keys and padding",
                "Pass the padding once: layer.project_kv(key, padding=…).",
            )
        elif cache is not None and key is not None and key is not query:
            received, hint = (
                "a cache and a key",
                "For cross-attention, pass layer.project_kv(key) as the key.",
            )
        elif cache is not None and positions is not None:
            received, hint = "a cache and positions", "The cache counts positions; omit them."
        else:
            return
        raise ArgumentError("MultiheadAttention", received=received, expected="one of the two", hint=hint)

    def extra_repr(self) -> str:
        kv = f", num_kv_heads={self.num_kv_heads}" if self.grouped else ""
        sink = ", sink" if self.sink is not None else ""
        drop = f", dropout={self.dropout}" if self.dropout else ""
        return f"{self.embed_dim}, {self.num_heads}{kv}, head_dim={self.head_dim}{sink}{drop}"


def _resolve_padding(padding: Any, k: Tensor) -> Any:
    """Return which keys are real, NumPy booleans (batch, kv_len), from a mask of keys or from booleans."""
    if padding is None:
        return None
    batch, _, length, _ = k.shape
    if isinstance(padding, Mask) and padding.is_key_only:
        return padding.to_dense(batch, 1, 1, length).reshape(batch, length)
    real = np.asarray(padding.cpu() if isinstance(padding, torch.Tensor) else padding)
    if isinstance(padding, Mask) or real.dtype != bool or real.shape not in ((length,), (batch, length)):
        raise ArgumentTypeError(
            "MultiheadAttention",
            received=f"padding as {padding if isinstance(padding, Mask) else describe_argument(padding)}",
            expected=f"regard.padding(lengths), or booleans of shape {format_shape(batch=batch, kv_len=length)}",
            hint="True = a real token; for 1 and 0 write padding != 0. If it depends on the query, pass it as mask.",
        )
    return np.broadcast_to(real, (batch, length))


def _combine_masks(mask: Mask | None, other: Mask | None) -> Mask | None:
    return other if mask is None else mask if other is None else mask & other


def _count_tokens(real: Any) -> Any:
    """Return the position of each token, padding not counted: (batch, n)."""
    return None if real is None else np.maximum(np.cumsum(real, 1) - 1, 0)


def _check_sizes(
    embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None, dropout: float, sink: Any
) -> None:
    received = (
        f"embed_dim {embed_dim}, num_heads {num_heads}, num_kv_heads {num_kv_heads}, head_dim {head_dim}"
    )
    sizes = (embed_dim, num_heads, num_kv_heads, 1 if head_dim is None else head_dim)
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in sizes):
        expected, hint = "integers above 0", "Pass positive integers."
    elif head_dim is None and embed_dim % num_heads:
        expected = "an embed_dim that num_heads divides"
        hint = f"Choose num_heads among the divisors of {embed_dim}, or pass head_dim."
    elif num_heads % num_kv_heads:
        expected = "a num_heads that is a multiple of num_kv_heads"
        hint = "Each key head serves num_heads / num_kv_heads query heads in a row."
    elif not 0 <= dropout < 1:
        received, expected = f"dropout={dropout!r}", "a probability of at least 0 and below 1"
        hint = "It is the probability that a weight is dropped while training; 0.0 drops none."
    elif sink not in (None, "learned") and (isinstance(sink, bool) or not isinstance(sink, int | float)):
        received, expected = f"sink={sink!r}", '"learned", a number or None'
        hint = '"learned" is one score for each head, a number is fixed for all heads.'
    else:
        return
    raise ArgumentError("MultiheadAttention", received=received, expected=expected, hint=hint)


def torch_masks(
    num_heads: int, *, attn_mask: Tensor = None, key_padding_mask: Tensor = None
) -> dict[str, Mask | list[ScoreMod] | None]:
    """Convert the masks of `torch.nn.MultiheadAttention`: `layer(x, **torch_masks(8, attn_mask=…))`.

    In torch, True means ignore, and numbers are added to the scores.

    Args:
        num_heads: The number of heads of the layer.
        attn_mask: Booleans or numbers, (q_len, kv_len) or (batch · num_heads, q_len, kv_len).
        key_padding_mask: Booleans or numbers, (batch, kv_len) or (kv_len,).

    Returns:
        The arguments `mask` and `score_mod` of a call of the layer.

    >>> import torch
    >>> torch_masks(2, attn_mask=torch.tensor([[False, True], [False, False]]))["mask"]
    ~dense([[False, True], [False, False]])
    """
    mask: Mask | None = None
    score_mods: list[ScoreMod] = []
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, (-1, num_heads))  # (batch, heads, q_len, kv_len)
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask[..., None, None, :]  # (batch, heads 1, q_len 1, kv_len)
    for torch_mask in (attn_mask, key_padding_mask):
        if torch_mask is None:
            continue
        if torch_mask.dtype == torch.bool:
            mask = _combine_masks(mask, dense(torch_mask, true_means="ignore"))
        else:
            score_mods.append(bias(torch_mask))
    return {"mask": mask, "score_mod": score_mods}
