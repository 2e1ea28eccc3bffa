"""One layer held against what attention should do: each check gives a finding, or None."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from regard.lens.analysis.finding import Finding, Severity
from regard.lens.analysis.measures import At, Bands
from regard.lens.analysis.token_rows import Place, visible
from regard.lens.call import Call
from regard.masks import dense
from regard.measures import Entropy, Mass

# A share of a row that is more than rounding, one that matters, and the rows that scores are sampled from.
ROUNDING, MATTERS, SAMPLED = 1e-6, 1e-3, 64
# Heads whose entropy is below or above these shares of ln(keys they see) are saturated, or uniform.
SATURATED, UNIFORM = 0.01, 1 - 1e-4
# How far scores spread, in standard deviations, where the softmax leaves little but the largest.
SPREAD = 4.0


@dataclass(eq=False)
class Layer:
    """A call and what is expected of it: `real` (batch, kv_len) are its tokens that are no padding, where known."""

    number: int
    name: str
    which: int
    call: Call
    causal: bool
    real: Any = None

    @cached_property
    def place(self) -> Place:
        """Where its rows and keys stand."""
        return Place.of(self.call)

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, q_len, kv_len)"""
        *lead, q_len, kv_len = self.call.shape
        return math.prod(lead[:-1]), lead[-1] if lead else 1, q_len, kv_len

    @cached_property
    def rows(self) -> Any:
        """Rows of tokens, (batch, q_len): not of padding, as far as is known."""
        batch, _, q_len, _ = self.shape
        own = self.place.first
        if self.real is not None and own is not None:
            return self.real[:, own : own + q_len]
        if own is not None:
            return self.keys[:, own : own + q_len]
        return np.ones((batch, q_len), bool)

    @cached_property
    def keys(self) -> Any:
        """Keys that somebody sees, (batch, kv_len)."""
        return self.place.keys.reshape(self.shape[0], -1)

    @cached_property
    def sees(self) -> Any:
        """Rows that see something, by head: (batch, heads or 1, q_len)."""
        batch, _, q_len, kv_len = self.shape
        rows, _ = visible(self.call.rules, q_len, kv_len)
        return np.broadcast_to(_four(rows), (batch, *np.broadcast_shapes(_four(rows).shape[1:], (1, 1))))

    def spread_out(self, array: Any) -> Any:
        """A result (…, heads, n) as (batch, heads, n), NumPy."""
        batch, heads, *_ = self.shape
        return array.detach().double().cpu().numpy().reshape(batch, heads, -1)

    def finding(
        self, kind: str, severity: Severity, what: str, where: Any, evidence: dict[str, Any], hint: str
    ) -> Finding:
        """A finding at `where`, booleans (batch, heads or 1, q_len or 1); an axis that is whole is not named."""
        lists: list[tuple[int, ...]] = []
        for axis in (1, 2, 0):
            over = tuple(each for each in range(3) if each != axis)
            hit = where.any(over)
            lists.append(() if hit.all() else tuple(int(i) for i in np.flatnonzero(hit)))
        heads, rows, batch = lists
        return Finding(kind, severity, what, self.name, self.number, heads, rows, batch, evidence, hint)


def _four(array: Any) -> Any:
    """(…, heads, n) or (n,) as (batch, heads, n)."""
    array = np.asarray(array)
    while array.ndim < 3:
        array = array[None]
    return array.reshape(-1, *array.shape[-2:])


# What the layer was given


def inverted(layer: Layer) -> Finding | None:
    """A mask of the opposite polarity: it shows what it should hide, and hides what it should show."""
    where, what, evidence = None, "", {}
    if layer.real is not None:
        allowed, real = layer.keys, layer.real
        padded = ~real.all(1)
        wrong = padded & (allowed == ~real).all(1)
        if wrong.any():
            where = np.broadcast_to(wrong[:, None, None], (len(wrong), 1, 1))
            what = "The mask shows the padding and hides the tokens."
            evidence = {"padding keys seen": int(allowed[wrong].sum()), "tokens seen": 0}
    rules, own = layer.call.rules, layer.place.first
    if where is None and own is not None and rules.kept is None and layer.shape[2] > 2:
        low, high = (_four(each) for each in np.broadcast_arrays(rules.low, rules.high))
        ahead = (low > layer.place.own) & (low < high)
        if ahead.mean() > 0.5 and not ((low <= layer.place.own) & (low < high)).any():
            where = np.broadcast_to(ahead, (layer.shape[0], *ahead.shape[1:]))
            what = "Every token sees only what comes after it."
            evidence = {"rows that see only later keys": int(ahead.sum()), "rows that see their own key": 0}
    if where is None:
        return None
    hint = (
        "True = attend in F.scaled_dot_product_attention, True = ignore in nn.MultiheadAttention: pass ~mask."
    )
    return layer.finding("inverted mask", "error", what, where, evidence, hint)


def alignment(layer: Layer) -> Finding | None:
    """`is_causal` where there are more keys than queries: torch lets the first query see one key."""
    batch, _, q_len, kv_len = layer.shape
    if not layer.call.is_causal:
        return None
    hint = "Pass is_causal=False for one new token, attn_mask=causal_lower_right(q_len, kv_len) for several."
    if layer.call.steps > 1:
        return _cached_alignment(layer, hint)
    unseen = int((~layer.keys.any(0)).sum())
    if q_len >= kv_len or unseen == 0:
        return None
    what = f"is_causal with {q_len} queries and {kv_len} keys: query 0 stands at key 0, not at the end of the keys."
    evidence = {"keys that nobody sees": unseen, "q_len": q_len, "kv_len": kv_len}
    return layer.finding("causal alignment", "error", what, np.ones((batch, 1, 1), bool), evidence, hint)


def _cached_alignment(layer: Layer, hint: str) -> Finding | None:
    """The same among calls that a cache joins: rows that see keys, and not their own."""
    rules, batch = layer.call.rules, layer.shape[0]
    if layer.place.first is None or rules.kept is not None:
        return None
    low, high = (_four(each) for each in np.broadcast_arrays(rules.low, rules.high))
    short = (low < high) & (high <= layer.place.own)
    if not short.any():
        return None
    rows = np.flatnonzero(short.any((0, 1)))
    what = "is_causal with keys from a cache: the new queries stand at key 0, not at the end of the keys."
    allowed = int(high[..., rows[0]].max())
    evidence = {"rows that do not see their own key": len(rows), f"keys that row {rows[0]} sees": allowed}
    where = np.broadcast_to(short, (batch, *short.shape[1:]))
    return layer.finding("causal alignment", "error", what, where, evidence, hint)


def future(layer: Layer) -> Finding | None:
    """Weight on later tokens where the layer should be causal."""
    rules, place = layer.call.rules, layer.place
    if not layer.causal or place.first is None or layer.shape[2] < 2:
        return None
    unknown = rules.kept is not None or getattr(rules.added, "array", None) is not None
    if not unknown and not (rules.high > place.own + 1).any():
        return None
    share = layer.spread_out(layer.call.matrix.measure(Bands([(1, math.inf)], place.first)).bands[..., 1])
    share = np.where(layer.rows[:, None] & np.broadcast_to(layer.sees, share.shape), share, 0.0)
    if not share.max() > ROUNDING:
        return None
    what, prefix = "Tokens see what comes after them.", not unknown and _is_prefix(layer)
    if prefix:
        what = "Tokens of a prefix see each other, later ones too, and the rest is causal: a prefix model, if meant."
    return layer.finding(
        "weight on the future",
        "error" if share.max() > MATTERS and not prefix else "warning",
        what,
        share > ROUNDING,
        _shares(share),
        "Pass is_causal=True or a causal mask to this layer. If later tokens may be seen: diagnose(causal=False).",
    )


def _is_prefix(layer: Layer) -> bool:
    """Whether all that is seen of the future lies in a prefix that all of its own tokens see, short of everything."""
    own, high = layer.place.own, _four(layer.call.rules.high)
    ends = np.where(high > own + 1, high, 0).max(-1, keepdims=True)
    inside = np.where(own < ends, high == ends, high <= own + 1)
    return bool((ends < layer.shape[3]).all() and inside.all())


def padded(layer: Layer) -> Finding | None:
    """Weight of tokens on padding."""
    if layer.real is None or layer.real.all() or not (layer.keys & ~layer.real).any():
        return None
    pad = ~layer.real.reshape((*layer.place.keys.shape[:-1], -1))
    mask = dense(torch.as_tensor(pad[..., None, :]))
    share = layer.spread_out(layer.call.matrix.measure(Mass(mask)).mass)
    share = np.where(layer.rows[:, None], share, 0.0)
    if not share.max() > ROUNDING:
        return None
    return layer.finding(
        "weight on padding",
        "error" if share.max() > MATTERS else "warning",
        "Tokens attend to padding.",
        share > ROUNDING,
        _shares(share) | {"padding keys": int(pad.sum())},
        "Pass attention_mask to the model, and on to this layer (key_padding_mask in nn.MultiheadAttention).",
    )


def _shares(share: Any) -> dict[str, Any]:
    hit = share > ROUNDING
    batch, head, row = np.unravel_index(share.argmax(), share.shape)
    at = f"{share.max():.3g} (batch {batch}, head {head}, row {row})"
    return {"mean share": float(share[hit].mean()), "largest": at}


def empty_rows(layer: Layer) -> Finding | None:
    """Tokens that see nothing at all."""
    none = ~layer.sees & layer.rows[:, None]
    if not none.any():
        return None
    flat = layer.call.rules.flat is not None
    what = "These tokens see no key: " + (
        "every score is the lowest number, so all keys weigh alike, padding and later ones too."
        if flat
        else "their output is zero or NaN, as the kernel pleases."
    )
    evidence = {"rows": f"{int(none.any(1).sum())} of {layer.rows.size}"}
    hint = "Let each token see at least its own key; give padding a row too, and drop it after the model."
    return layer.finding("rows that see nothing", "error", what, none, evidence, hint)


def dropout(layer: Layer) -> Finding | None:
    """Dropout while evaluating."""
    call = layer.call
    if not call.dropout_p or call.training:
        return None
    return layer.finding(
        "dropout",
        "error",
        "Dropout is on although the layer evaluates.",
        np.ones((layer.shape[0], 1, 1), bool),
        {"dropout_p": call.dropout_p, "training": False},
        "Pass dropout_p=self.p if self.training else 0.0: F.scaled_dot_product_attention always applies it.",
    )


def kernel(layer: Layer) -> Finding | None:
    """The kernel that stores the whole matrix, taken by a function that has faster ones."""
    batch, heads, q_len, kv_len = layer.shape
    if layer.call.kernel != "torch: math" or q_len == 1:
        return None
    size = 4 if layer.call.query is None else layer.call.query.element_size()
    stored = batch * heads * q_len * kv_len * size
    if layer.call.dropout_p:
        hint = "Dropout forces it on CPU. Train with dropout_p=0.0, or on a GPU, whose kernels have it."
    elif len(layer.call.shape) != 4:
        hint = f"A query of {len(layer.call.shape)} axes forces it. Give (batch, heads, n, head_dim)."
    else:
        hint = "A mask that wants a gradient forces it, value_dim ≠ head_dim, or a sdpa_kernel(…) context."
    return layer.finding(
        "slow kernel",
        "warning",
        "F.scaled_dot_product_attention took the kernel that stores the whole matrix.",
        np.ones((batch, 1, 1), bool),
        {"kernel": "math", "bytes stored": f"{stored:,}"},
        hint,
    )


# What the heads do


def _spread(layer: Layer) -> tuple[Any, Any]:
    """The standard deviation and the largest size of each head's scores, (heads,), over some rows."""
    where = np.flatnonzero(layer.rows.any(0))
    rows = where[np.unique(np.linspace(0, len(where) - 1, SAMPLED).astype(int))] if len(where) else where
    if not len(rows):
        return np.zeros(layer.shape[1]), np.zeros(layer.shape[1])
    scores = layer.call.matrix.scores[..., rows, :].detach().double().cpu().numpy()
    scores = scores.reshape(*layer.shape[:2], -1).swapaxes(0, 1).reshape(layer.shape[1], -1)
    allowed = np.isfinite(scores) & (np.abs(scores) < 1e30)
    count = np.maximum(allowed.sum(1), 1)
    mean = np.where(allowed, scores, 0).sum(1) / count
    variance = np.where(allowed, (scores - mean[:, None]) ** 2, 0).sum(1) / count
    return np.sqrt(variance), np.where(allowed, np.abs(scores), 0).max(1, initial=0.0)


def heads(layer: Layer, usual: float | None) -> list[Finding]:
    """Scores too large for their scale, saturated heads, uniform heads; `usual` is the scale of the other layers."""
    batch, count, *_ = layer.shape
    call, found = layer.call, []
    deviation, largest = _spread(layer)
    proper = 1 / math.sqrt(call.query.shape[-1])
    hot = deviation > SPREAD
    unlike = usual is not None and not math.isclose(call.scale, usual, rel_tol=1e-3)
    if (call.scale > 1.5 * proper and hot.any()) or unlike:
        where = np.broadcast_to((hot if hot.any() else ~hot)[None, :, None], (batch, count, 1))
        others = {} if not unlike else {"scale of the other layers": usual}
        evidence = {"scale": call.scale, "1/√head_dim": proper, **others}
        evidence |= {"scores spread by": float(deviation.max()), "largest score": float(largest.max())}
        what = "Scores are too large: the scale is not 1/√head_dim."
        if call.scale <= 1.5 * proper:
            what = "The scale of the scores is not that of the other layers."
        hint = (
            f"Pass scale=None, or {usual if unlike else proper:.4g}; scale once only, before or in the call."
        )
        found.append(layer.finding("scale", "warning", what, where, evidence, hint))
    resting = _resting(layer)
    made = call.matrix.measure(entropy=Entropy(), **{word: At(keys) for word, keys in resting.items()})
    entropy = layer.spread_out(made.entropy)
    most = np.log(np.maximum(np.broadcast_to(_seen_keys(layer), entropy.shape), 1))
    counts = layer.rows[:, None] & (most >= math.log(4))
    if counts.any(axis=(0, 2)).all():
        over = np.where(counts, 1.0, 0.0)
        total = over.sum((0, 2))
        share = (np.where(counts, entropy / np.maximum(most, 1e-9), 0.0)).sum((0, 2)) / total
        mean = (entropy * over).sum((0, 2)) / total
        collapsed = (share < SATURATED) & ~(hot if found else np.zeros_like(hot))
        for word, keys in resting.items():
            # Of the rows that have such a key: the first token has none before it, which tells in a short text.
            theirs = over * (keys >= 0).reshape(batch, 1, -1)
            rest = (layer.spread_out(getattr(made, word)) * theirs).sum((0, 2)) / np.maximum(
                theirs.sum((0, 2)), 1
            )
            if (collapsed & (rest > 0.9)).any():
                found.append(_saturated(layer, collapsed & (rest > 0.9), mean, deviation, word, rest))
            collapsed &= rest <= 0.9
        if collapsed.any():
            found.append(_saturated(layer, collapsed, mean, deviation))
        if (share > UNIFORM).any():
            where = np.broadcast_to((share > UNIFORM)[None, :, None], (batch, count, 1))
            numbers = {"entropy / ln(keys)": float(share[share > UNIFORM].min())}
            numbers["scores spread by"] = float(deviation[share > UNIFORM].max())
            hint = "Expected before training. After it: look for q or k that are zero, or a scale that is too small."
            text = "All keys weigh alike: the head tells none from another."
            found.append(layer.finding("uniform heads", "note", text, where, numbers, hint))
    return found


def _resting(layer: Layer) -> dict[str, Any]:
    """The keys that heads of healthy models may rest on altogether, by what they are; −1 where a row has none."""
    place = layer.place
    keys = {"first": place.keys.argmax(-1)[..., None]}
    if place.first is not None:
        own = place.own
        keys |= {"previous": own - 1, "own": own, "next": np.where(own + 1 < layer.shape[3], own + 1, -1)}
    return {word: np.where(place.rows, key, -1) for word, key in keys.items()}


def _saturated(
    layer: Layer, chosen: Any, mean: Any, deviation: Any, word: str = "", rest: Any = None
) -> Finding:
    where = np.broadcast_to(chosen[None, :, None], (layer.shape[0], len(chosen), 1))
    evidence = {"mean entropy": float(mean[chosen].max()), "scores spread by": float(deviation[chosen].max())}
    if word:
        evidence[f"share of the {word} token"] = float(rest[chosen].min())
        text, hint = (
            f"The heads rest on the {word} token.",
            "Common in trained models, and no fault by itself.",
        )
        return layer.finding("saturated heads", "note", text, where, evidence, hint)
    hint = "No gradient flows through a row of one key. Normalise queries and keys, or lower their learning rate."
    text = "Nearly every row puts all its weight on one key."
    return layer.finding("saturated heads", "warning", text, where, evidence, hint)


def _seen_keys(layer: Layer) -> Any:
    """How many keys each row sees: (batch or 1, heads or 1, q_len)."""
    rules = layer.call.rules
    if rules.kept is not None:
        return _four(rules.kept.expand(*rules.kept.shape[:-1], layer.shape[3]).sum(-1).cpu().numpy())
    low, high = (_four(each) for each in np.broadcast_arrays(rules.low, rules.high))
    if rules.keys is None:
        return high - low
    before = np.cumsum(_four(rules.keys), -1)
    before = np.concatenate([np.zeros_like(before[..., :1]), before], -1)
    low, high, before = (
        np.broadcast_to(each, (layer.shape[0], *each.shape[1:])) for each in (low, high, before)
    )
    shape = np.broadcast_shapes(low.shape[:2], before.shape[:2])
    low, high, before = (np.broadcast_to(each, (*shape, each.shape[2])) for each in (low, high, before))
    return np.take_along_axis(before, high, -1) - np.take_along_axis(before, low, -1)


MASKS: tuple[Callable[[Layer], Finding | None], ...] = (alignment, future, padded, empty_rows)
REST: tuple[Callable[[Layer], Finding | None], ...] = (dropout, kernel)
