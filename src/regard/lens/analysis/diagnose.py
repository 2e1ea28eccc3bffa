"""`recording.diagnose`: what is wrong with the attention that was seen, where, and what to do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from regard.errors import ArgumentError, describe_argument
from regard.lens.analysis import checks
from regard.lens.analysis.checks import Layer
from regard.lens.analysis.find import _stem
from regard.lens.analysis.finding import Finding, Findings
from regard.lens.analysis.token_rows import fitting, listed
from regard.lens.call import Call
from regard.lens.capture.module_hints import Hints

# Texts that stand for padding in the vocabularies in use.
_PADS = ("[PAD]", "<pad>", "<|pad|>", "<PAD>")


def diagnose(
    each: list[tuple[int, str, int, Call]],
    hints: Hints,
    runs: dict[str, list[Any]],
    missed: dict[str, tuple[str, str]],
    tokens: Any = None,
    attention_mask: Any = None,
    causal: bool | None = None,
) -> Findings:
    """What `Recording.diagnose` returns."""
    found: list[Finding] = []
    real = _real(tokens, attention_mask)
    layers = [Layer(number, name, which, call, False) for number, name, which, call in each]
    whole = [layer for layer in layers if layer.call.query is not None and min(layer.shape)]
    for layer in whole:
        layer.causal = _is_causal(layer, whole, hints, causal)
        layer.real = _fit(real, layer, whole)
    broken, finite = _not_finite(whole)
    found += broken
    usual = _usual_scales(whole)
    for layer in layers:
        found += _all(checks.REST, layer)
        if layer not in whole:
            continue
        wrong = checks.inverted(layer)
        if wrong is not None:
            found.append(wrong)
        elif layer in finite:
            found += _all(checks.MASKS, layer)
        if layer in finite:
            found += checks.heads(layer, usual.get(_kind(layer)))
    found += _positions(runs, hints)
    for number, (name, (why, hint)) in enumerate(missed.items(), len(layers)):
        found.append(
            Finding("not captured", "warning", f"The layer gave nothing: {why}.", name, number, hint=hint)
        )
    heads = sum(layer.shape[1] for layer in layers)
    return Findings(found, f"{_count(len(layers), 'layer')}, {_count(heads, 'head')}")


def _all(several: Any, layer: Layer) -> list[Finding]:
    return [finding for check in several if (finding := check(layer)) is not None]


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


# What is expected


def _real(tokens: Any, attention_mask: Any) -> Any:
    """Which tokens are no padding, (batch, n), from the mask the model was given or from the tokens' texts."""
    if attention_mask is not None:
        mask = np.asarray(attention_mask.cpu() if hasattr(attention_mask, "cpu") else attention_mask)
        if mask.ndim not in (1, 2) or not np.isin(mask, (0, 1)).all():
            raise ArgumentError(
                "recording.diagnose",
                received=f"attention_mask as {describe_argument(mask)}",
                expected="(batch, n), 1 for a token and 0 for padding",
                hint="It is what the tokenizer returns beside input_ids.",
            )
        return np.atleast_2d(mask != 0)
    if tokens is None:
        return None
    lists = listed(tokens, "recording.diagnose")
    if len({len(row) for row in lists}) > 1:
        return None
    real = np.array([[token not in _PADS for token in row] for row in lists])
    return None if real.all() else real


def _fit(real: Any, layer: Layer, layers: list[Layer]) -> Any:
    """The same for the keys of one layer; None where it reads another sequence. What was generated is no padding."""
    batch, _, _, kv_len = layer.shape
    if real is None or len(real) not in (1, batch):
        return None
    both = any("encoder" in each.name for each in layers) and "decoder" in layer.name
    if both and layer.place.first is not None:
        return None
    if real.shape[1] < kv_len and layer.call.steps > 1 and layer.place.first is not None:
        real = np.concatenate([real, np.ones((len(real), kv_len - real.shape[1]), bool)], 1)
    fits = fitting(real.tolist(), batch, kv_len)
    return None if fits is None else np.array(fits, bool).reshape(batch, kv_len)


def _is_causal(layer: Layer, layers: list[Layer], hints: Hints, causal: bool | None) -> bool:
    """Whether a layer should be: as it was said, as its module says, or as most layers of its stack are."""
    if layer.place.first is None:
        return False
    if causal is not None:
        return causal
    if hints.causal.get(layer.name):
        return True
    stack = [
        each for each in layers if _stem(each.name) == _stem(layer.name) and each.place.first is not None
    ]
    return sum(map(_looks_causal, stack)) > len(stack) / 2


def _looks_causal(layer: Layer) -> bool:
    rules = layer.call.rules
    return rules.kept is None and layer.shape[2] > 1 and not (rules.high > layer.place.own + 1).any()


def _kind(layer: Layer) -> tuple[Any, ...]:
    """Layers that should share a scale."""
    return _stem(layer.name), layer.call.query.shape[-1], layer.place.first is None


def _usual_scales(layers: list[Layer]) -> dict[Any, float]:
    """The scale of most layers of a kind, where at least three agree."""
    scales: dict[Any, list[float]] = {}
    for layer in layers:
        scales.setdefault(_kind(layer), []).append(float(f"{layer.call.scale:.6g}"))
    common = {kind: Counter(each).most_common(1)[0] for kind, each in scales.items()}
    return {kind: scale for kind, (scale, count) in common.items() if count >= 3}


# What goes through several layers


def _not_finite(layers: list[Layer]) -> tuple[list[Finding], list[Layer]]:
    """Where NaN and inf began, as one finding, and the layers that have none."""
    bad = [(layer, where) for layer in layers if (where := _bad(layer)) is not None]
    finite = [layer for layer in layers if all(layer is not each for each, _ in bad)]
    if not bad:
        return [], finite
    layer, (where, parts, kinds) = bad[0]
    heads = where.any((0, 2))
    position = next(i for i, each in enumerate(layers) if each is layer)
    evidence: dict[str, Any] = {name: f"{count:,} numbers" for name, count in kinds.items()} | {
        "in": " and ".join(parts)
    }
    evidence["layers after it that have some"] = len(bad) - 1
    if heads.all() and position:
        what = f"They came in with the layer's input: they began after {layers[position - 1].name}."
        hint = "Look at what lies between the two: feed-forward, norm, residual; torch.autograd.detect_anomaly()."
    elif heads.all():
        what = "They are there in the first layer that was seen."
        hint = "Look at the inputs, the embeddings and this layer's projections: isnan(weight).any()."
    else:
        what = "They began in this layer's projections, since other heads have none."
        hint = f"Look at the weights of {' and '.join(parts)} of these heads, and for overflow in half precision."
    words = "NaN or inf"
    return [layer.finding(words, "error", what, where, evidence, hint)], finite


def _bad(layer: Layer) -> tuple[Any, list[str], dict[str, int]] | None:
    """Where query, key or added scores are not finite, (batch, heads, rows); in which of them; and how many."""
    batch, heads, q_len, _ = layer.shape
    where, parts, kinds = np.zeros((batch, heads, q_len), bool), [], {"NaN": 0, "inf": 0}
    for name, tensor in (("query", layer.call.query), ("key", layer.call.key)):
        finite = tensor.isfinite()
        if bool(finite.all()):
            continue
        parts.append(name)
        kinds["NaN"] += int(tensor.isnan().sum())
        kinds["inf"] += int(tensor.isinf().sum())
        hit = (~finite.all(-1)).cpu().numpy().reshape(batch, -1, tensor.shape[-2])
        hit = hit.repeat(heads // hit.shape[1], 1)
        own = layer.place.first
        if name == "key":  # which rows are hit depends on the mask: those of its own token at least
            hit = hit[:, :, own : own + q_len] if own is not None else hit.any(-1, keepdims=True)
        where = where | hit
    added = getattr(layer.call.rules.added, "array", None)
    if added is not None and bool((added.isnan() | (added == torch.inf)).any()):
        parts.append("mask")
        kinds["NaN"] += int(added.isnan().sum())
        kinds["inf"] += int((added == torch.inf).sum())
        where |= True
    return (where, parts, {name: count for name, count in kinds.items() if count}) if parts else None


def _positions(runs: dict[str, list[Any]], hints: Hints) -> list[Finding]:
    """Positions that do not go on where the last call of a cache ended."""
    for number, (name, several) in enumerate(runs.items()):
        for run in several:
            lengths = [step.query.shape[-2] for step in getattr(run, "steps", ())]
            if len(lengths) < 2 or run.crossing or run.trying:
                continue
            by_module: dict[str, list[Any]] = {}
            for read in hints.reads:
                by_module.setdefault(read.module, []).append(read.positions.cpu().numpy())
            for module, reads in by_module.items():
                if [read.shape[1] for read in reads] != lengths:
                    continue
                wrong = _breaks(reads, lengths)
                if wrong is not None:
                    return [_disagreeing(number, name, module, *wrong)]
    return []


def _breaks(reads: list[Any], lengths: list[int]) -> tuple[int, int, int, int] | None:
    """The first call whose positions do not go on: (row, position read, position expected, how many such calls)."""
    wrong = []
    row = lengths[0]
    for before, here, length in zip(reads, reads[1:], lengths[1:], strict=False):
        expected = before[:, -1:] + 1 + np.arange(length)
        if (here != expected).any():
            wrong.append((row, int(here.flat[0]), int(np.broadcast_to(expected, here.shape).flat[0])))
        row += length
    return None if not wrong else (*wrong[0], len(wrong))


def _disagreeing(
    number: int, name: str, module: str, row: int, here: int, expected: int, count: int
) -> Finding:
    return Finding(
        "positions",
        "error",
        "A cached step reads positions that do not go on where the keys before it ended.",
        name,
        number,
        rows=(row,),
        evidence={"position read": here, "expected": expected, "calls with a jump": count, "read by": module},
        hint="Leave position_ids out, or pass cache length + arange(new tokens), padding not counted.",
    )
