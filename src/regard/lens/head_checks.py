"""Check what the heads of a layer do: scores too large for their scale, saturated heads, uniform heads."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from regard.findings import Finding
from regard.lens.checked_layer import CheckedLayer, as_batch_heads
from regard.lens.weight_measures import WeightAt
from regard.measures import Entropy

# Heads whose entropy is below or above this share of ln(number of visible keys) are saturated, or uniform.
SATURATED, UNIFORM = 0.01, 1 - 1e-4
# Mean weight on one common key, such as the previous token, above which a saturated head is only a note.
COMMON_KEY_WEIGHT = 0.9
# Standard deviation of the scores above which the softmax leaves little but the largest.
LARGE_DEVIATION = 4.0
# Layers of transformers whose scale is 1 by design: the training absorbs it (T5, GPT-Neo), queries and keys are
# normalised (Gemma 3n, Gemma 4), or the layer multiplies the query before the call (Whisper, OPT, ESM).
UNSCALED_LAYERS = re.compile(
    r"((U?M|Long)?T5|SwitchTransformers|Pop2Piano|Udop|Pix2Struct(Text|Vision)|GPTNeo|Gemma3nText|Gemma4\w*|Whisper|OPT"
    r"|Esm)(Self|Local|TransientGlobal)?Attention"
)
# Rows from which scores are sampled.
SAMPLED_ROWS = 64


def check_heads(layer: CheckedLayer) -> list[Finding]:
    """Check scale and entropy of the heads of a layer with finite query and key."""
    deviation, largest = _sample_scores(layer)
    scale_finding, has_large_scores = _check_scale(layer, layer.usual_scale, deviation, largest)
    findings = [] if scale_finding is None else [scale_finding]
    return findings + _check_entropy(layer, deviation, has_large_scores)


def _sample_scores(layer: CheckedLayer) -> tuple[Any, Any]:
    """Return standard deviation and largest magnitude of each head's scores, (heads,), over some rows."""
    tokens = np.flatnonzero(layer.rows.any(0))
    heads = layer.shape[1]
    if not len(tokens):
        return np.zeros(heads), np.zeros(heads)
    rows = tokens[np.unique(np.linspace(0, len(tokens) - 1, SAMPLED_ROWS).astype(int))]
    scores = layer.call.matrix.scores[..., rows, :].detach().cpu().double().numpy()
    scores = scores.reshape(*layer.shape[:2], -1).swapaxes(0, 1).reshape(heads, -1)
    live = np.isfinite(scores) & (np.abs(scores) < 1e30)
    count = np.maximum(live.sum(1), 1)
    mean = np.where(live, scores, 0).sum(1) / count
    variance = np.where(live, (scores - mean[:, None]) ** 2, 0).sum(1) / count
    return np.sqrt(variance), np.where(live, np.abs(scores), 0).max(1, initial=0.0)


def _check_scale(
    layer: CheckedLayer, usual_scale: float | None, deviation: Any, largest: Any
) -> tuple[Finding | None, Any]:
    """Check the scale; also return the heads whose scores it makes too large, (heads,)."""
    call = layer.call
    if call.weights is not None:  # the layer computed its own softmax, and its scale is not known
        return None, np.zeros(len(deviation), bool)
    is_unscaled = UNSCALED_LAYERS.fullmatch(call.layer_class) is not None
    default, default_name = (
        (1.0, "scale of this class") if is_unscaled else (1 / math.sqrt(call.query.shape[-1]), "1/√head_dim")
    )
    has_large_scores = deviation > LARGE_DEVIATION
    is_unusual = usual_scale is not None and not math.isclose(call.scale, usual_scale, rel_tol=1e-3)
    if not (call.scale > 1.5 * default and has_large_scores.any()) and not is_unusual:
        return None, np.zeros_like(has_large_scores)
    evidence: dict[str, Any] = {"scale": call.scale, default_name: default}
    if is_unusual:
        evidence["scale of the other layers"] = usual_scale
    evidence |= {
        "deviation of the scores": float(deviation.max()),
        "largest score": float(largest.max()),
    }
    message = f"Scores are too large: the scale is not {1 if is_unscaled else '1/√head_dim'}."
    if call.scale <= 1.5 * default:
        message = "The scale differs from that of the other layers."
    expected = usual_scale if is_unusual else default
    scales = f"scale={expected:.4g}" if is_unscaled else f"scale=None, or {expected:.4g}"
    hint = f"Pass {scales}; scale only once, before or in the call."
    where = has_large_scores if has_large_scores.any() else ~has_large_scores
    finding = layer.build_finding("scale", "warning", message, _locate_heads(layer, where), evidence, hint)
    return finding, has_large_scores


def _check_entropy(layer: CheckedLayer, deviation: Any, has_large_scores: Any) -> list[Finding]:
    """Check for heads whose rows put all weight on one key, or equal weight on all."""
    common_keys = _find_common_keys(layer)
    measures = {name: WeightAt(keys) for name, keys in common_keys.items()}
    results = layer.call.matrix.measure(entropy=Entropy(), **measures)
    entropy = layer.flatten_batch(results.entropy)
    maximum = np.log(np.maximum(np.broadcast_to(_count_visible_keys(layer), entropy.shape), 1))
    counted = layer.rows[:, None] & (maximum >= math.log(4))
    if not counted.any(axis=(0, 2)).all():
        return []
    findings = []
    factor = np.where(counted, 1.0, 0.0)
    total = factor.sum((0, 2))
    share = np.where(counted, entropy / np.maximum(maximum, 1e-9), 0.0).sum((0, 2)) / total
    mean = (entropy * factor).sum((0, 2)) / total
    saturated = (share < SATURATED) & ~has_large_scores
    for name, keys in common_keys.items():
        # Average over rows that have such a key: the first token has no previous one, which matters in a short text.
        has_key = factor * (keys >= 0).reshape(layer.shape[0], 1, -1)
        weight = layer.flatten_batch(getattr(results, name))
        weight_on_key = (weight * has_key).sum((0, 2)) / np.maximum(has_key.sum((0, 2)), 1)
        if (saturated & (weight_on_key > COMMON_KEY_WEIGHT)).any():
            heads = saturated & (weight_on_key > COMMON_KEY_WEIGHT)
            findings.append(_build_saturated(layer, heads, mean, deviation, name, weight_on_key))
        saturated &= weight_on_key <= COMMON_KEY_WEIGHT
    if saturated.any():
        findings.append(_build_saturated(layer, saturated, mean, deviation))
    uniform = share > UNIFORM
    if uniform.any():
        evidence = {"entropy / ln(keys)": float(share[uniform].min())}
        evidence["deviation of the scores"] = float(deviation[uniform].max())
        message = "All keys have equal weights: the head does not distinguish them."
        hint = "Expected before training. After it, check for a query or key of zeros, or a scale that is too small."
        findings.append(
            layer.build_finding(
                "uniform heads", "note", message, _locate_heads(layer, uniform), evidence, hint
            )
        )
    return findings


def _find_common_keys(layer: CheckedLayer) -> dict[str, Any]:
    """Return the keys that heads of healthy models often attend to exclusively, by name; −1 for rows without one."""
    token_rows = layer.token_rows
    keys = {"first": token_rows.first_key}
    if token_rows.query_offset is not None:
        own = token_rows.own_keys
        following = np.where(own + 1 < layer.shape[3], own + 1, -1)
        keys |= {"previous": own - 1, "own": own, "next": following}
    return {name: np.where(token_rows.rows, positions, -1) for name, positions in keys.items()}


def _build_saturated(
    layer: CheckedLayer, heads: Any, mean: Any, deviation: Any, token: str = "", weight_on_key: Any = None
) -> Finding:
    where = _locate_heads(layer, heads)
    evidence = {
        "mean entropy": float(mean[heads].max()),
        "deviation of the scores": float(deviation[heads].max()),
    }
    if token:
        evidence[f"weight on the {token} token"] = float(weight_on_key[heads].min())
        message = f"The heads attend only to the {token} token."
        hint = "Common in trained models, and not a fault by itself."
        return layer.build_finding("saturated heads", "note", message, where, evidence, hint)
    message = "Nearly every row puts all its weight on one key."
    hint = "A row with one key passes no gradient. Normalise queries and keys, or lower their learning rate."
    return layer.build_finding("saturated heads", "warning", message, where, evidence, hint)


def _locate_heads(layer: CheckedLayer, heads: Any) -> Any:
    """Return the location of a finding about some heads, (batch, heads, 1)."""
    return np.broadcast_to(heads[None, :, None], (layer.shape[0], len(heads), 1))


def _count_visible_keys(layer: CheckedLayer) -> Any:
    """Count the keys that each row attends to: (batch or 1, heads or 1, q_len)."""
    mask = layer.call.compact_mask
    if mask.dense_mask is not None:
        visible = mask.dense_mask.expand(*mask.dense_mask.shape[:-1], layer.shape[3])
        return as_batch_heads(visible.sum(-1).cpu().numpy())
    if mask.visible_counts is not None:
        return as_batch_heads(mask.visible_counts)
    start, stop = layer.intervals
    if mask.visible_keys is None:
        return stop - start
    before = np.cumsum(as_batch_heads(mask.visible_keys), -1)
    before = np.concatenate([np.zeros_like(before[..., :1]), before], -1)
    batch = layer.shape[0]
    start, stop, before = (
        np.broadcast_to(array, (batch, *array.shape[1:])) for array in (start, stop, before)
    )
    lead = np.broadcast_shapes(start.shape[:2], before.shape[:2])
    start, stop, before = (np.broadcast_to(array, (*lead, array.shape[2])) for array in (start, stop, before))
    return np.take_along_axis(before, stop, -1) - np.take_along_axis(before, start, -1)
