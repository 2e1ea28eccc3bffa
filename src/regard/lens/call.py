"""The record of one call of an attention layer: what everything the lens tells is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from regard.core.attention import attention
from regard.core.matrix import AttentionMatrix
from regard.errors import ArgumentError
from regard.lens.capture.mask_recognition import Rules
from regard.masks import Mask
from regard.score_mods import ScoreMod

Tensor = Any  # the types of torch are not followed


@dataclass
class Call:
    """One call of an attention layer, or the calls that one cache joined: their rows are tokens in order.

    `name` is the module's name in the model, `layer` its class. `query` (…, heads, q_len, head_dim) and `key`
    (…, kv_heads, kv_len, head_dim) are detached references to what the model computed, unless `watch` was asked to
    move them; a key that the model had repeated for a group of heads is held once. `lse` (…, heads, q_len) came from
    the kernel that ran, or is None. `value` and `output` are held only if asked for (`watch(…, values=True)`).
    `rules` are mask and bias as they were recognised; `mask` and `score_mods` are their names. `kernel` is what ran,
    `dropout_p` the dropout in force, `is_causal` the flag that was passed (to any of them), `training` the module's.
    `first` is the position of row 0 among the keys, `steps` how many calls were joined. With `keep="measures"`, `query`
    and `key` are None and `measured` has the results by name.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with regard.watch(layer) as recording:
    ...     output = layer(torch.ones(1, 3, 8))
    >>> (call,) = recording.calls("self_attn")
    >>> call.layer, call.shape, call.kernel
    ('MultiheadAttention', (1, 2, 3, 3), 'torch: flash on CPU')
    """

    name: str
    layer: str
    query: Tensor
    key: Tensor
    rules: Rules
    scale: float
    kernel: str
    lse: Tensor | None = None
    value: Tensor | None = None
    output: Tensor | None = None
    softcap: ScoreMod | None = None
    sink: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    training: bool = False
    first: int = 0
    steps: int = 1
    measured: dict[str, Any] | None = None
    extent: tuple[int, ...] = ()  # the shape of the matrix, where query and key are gone
    versions: tuple[tuple[Tensor, int], ...] = field(default=(), repr=False)
    trying: str = ""  # how generate() tried tokens out that it may have taken back
    origin: Any = field(
        default=None, repr=False
    )  # the key that was passed, as a weak reference, and its version

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, q_len, kv_len)"""
        if self.extent:
            return self.extent
        return (*self.query.shape[:-1], self.key.shape[-2])

    @property
    def groups(self) -> int:
        """How many heads share a key."""
        return int(self.query.shape[-3] // self.key.shape[-3]) if self.query.ndim > 2 < self.key.ndim else 1

    @cached_property
    def mask(self) -> Mask | None:
        """Which keys each query may see."""
        return self.rules.mask(self.query.shape[-2], self.key.shape[-2])

    @property
    def score_mods(self) -> tuple[ScoreMod, ...]:
        """What is done to the scaled scores, in order."""
        capped = () if self.softcap is None else (self.softcap,)
        return capped + self.rules.score_mods()

    @property
    def nbytes(self) -> int:
        """The bytes of what is held."""
        held = (self.query, self.key, self.lse, self.value, self.output)
        return sum(int(each.nbytes) for each in held if each is not None) + self.rules.nbytes

    @cached_property
    def matrix(self) -> AttentionMatrix:
        """The attention matrix, lazy."""
        if self.measured is not None:
            raise ArgumentError(
                f"recording[{self.name!r}]",
                received='keep="measures", which kept ' + ", ".join(self.measured),
                expected='keep="qk" for a matrix',
                hint=f"The results are recording.calls({self.name!r})[0].measured; for the matrix watch again with "
                'keep="qk".',
            )
        self._check_unchanged()
        matrix = attention(
            self.query,
            self.key,
            mask=self.mask,
            score_mod=self.score_mods,
            scale=self.scale,
            sink=self.sink,
            enable_gqa=self.groups > 1,
        )
        if self.lse is not None and self.lse.dtype == self.key.dtype:
            matrix._fused_lse = self._settled(self.lse)
        return matrix

    def _settled(self, lse: Tensor) -> Tensor:
        """The kernel's lse, with what it gives rows that see nothing: 0, or one that a lowest number swallowed."""
        empty, flat = self.rules.empty, self.rules.flat
        if empty is not None:
            lse = lse.masked_fill(torch.tensor(empty, device=lse.device), -torch.inf)
        if flat is not None:
            keys = torch.tensor(flat, device=lse.device).clamp(max=self.key.shape[-2])
            lse = torch.where(keys > 0, keys.log().to(lse.dtype), lse)
        return lse

    def _check_unchanged(self) -> None:
        for tensor, version in self.versions:
            if tensor._version != version:
                raise ArgumentError(
                    f"recording[{self.name!r}]",
                    received="a query or key that the model wrote over after it was seen",
                    expected="what the layer computed with",
                    hint="Let the lens keep a copy: regard.watch(model, copy=True).",
                )
