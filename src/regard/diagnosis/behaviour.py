"""Experiments on the outputs: change a token, swap two, pad, shift positions, repeat; compare the outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from regard.diagnosis.call_log import LoggedCall
from regard.diagnosis.subject import Subject, relative_difference, tolerance_of
from regard.findings import Finding, Severity

Tensor = Any  # the types of torch are not followed

# Number of padding tokens, and by how much positions are shifted.
PADDING, SHIFT = 4, 3
# Steps of a padded batch with a cache.
CACHED_STEPS = 3
# Forward passes of an examination, at most; beyond it, changes are not located any more.
MAX_PASSES = 60


def locate_change(
    subject: Subject, run: Callable[[], Any], run_changed: Callable[[], Any], rows: Tensor, batch: int = 1
) -> tuple[str, dict[str, Any]]:
    """Run two inputs again with a trace of all modules, and find where some tokens first differ.

    Args:
        subject: The model.
        run: Runs the first inputs.
        run_changed: Runs the second, of the same shape.
        rows: (n,), True for the tokens that should not differ.
        batch: Number of batch entries to compare.

    Returns:
        The name of the module in which it begins, and evidence that says where; empty if it cannot be found.
    """
    if subject.num_passes > MAX_PASSES - 4:
        return "", {}
    traces = []
    for each in (run, run_changed):
        with subject.trace() as trace:
            output = each()
        traces.append(trace)
    origin = traces[0].find_change(traces[1], batch, rows, tolerance_of(output))
    return ("", {}) if origin is None else (origin.module, {"begins": origin.describe()})


def check_repeated(subject: Subject, first: Tensor) -> list[Finding]:
    """Run the same inputs again: the output must be the same."""
    again = subject.run_inputs()
    if first.shape == again.shape:
        difference = float(relative_difference(again, first).amax())
        both_nan = torch.equal(first.isnan(), again.isnan()) and bool(first.isnan().any())
        if difference <= tolerance_of(first) or both_nan:
            return []
        evidence: dict[str, Any] = {"largest relative difference": difference}
    else:
        evidence = {"first output": str(tuple(first.shape)), "second output": str(tuple(again.shape))}
    message = "The same inputs give another output the second time, in eval mode."
    hint = "Look for dropout that ignores eval mode, random numbers in forward, and state that calls leave behind."
    module, where = "", dict[str, Any]()
    if first.shape == again.shape and first.ndim > 2:
        rows = torch.ones(first.shape[1], dtype=torch.bool, device=first.device)
        module, where = locate_change(subject, subject.run_inputs, subject.run_inputs, rows, len(first))
    return [_build("not deterministic", "error", message, evidence | where, hint, module)]


def check_future_token(subject: Subject, tokens: Tensor, base: Tensor, is_inferred: bool) -> list[Finding]:
    """Change the last token of a causal model: no output before it may change."""
    replaced = subject.replace_token(tokens, -1)
    difference = relative_difference(subject.run(replaced), base)[:, :-1]
    if difference.numel() == 0 or not float(difference.amax()) > tolerance_of(base):
        return []
    affected = (difference > tolerance_of(base)).any(0).nonzero().flatten().tolist()
    message = "Changing the last token changes outputs before it, so the future leaks into the past."
    if is_inferred:
        message += " The model was taken for causal; if it is not, say so with causal=False."
    evidence = {"largest relative change": float(difference.amax()), "tokens": tokens.shape[1]}
    hint = "If no layer attends to later tokens, look at what mixes tokens outside the attention: a reshape without "
    hint += "transpose, a norm, mean or convolution over tokens."
    rows = torch.arange(tokens.shape[1], device=tokens.device) < tokens.shape[1] - 1
    module, where = locate_change(subject, lambda: subject.run(tokens), lambda: subject.run(replaced), rows)
    return [_build("future leaks", "error", message, evidence | where, hint, module, tuple(affected))]


def check_previous_token(subject: Subject, tokens: Tensor, base: Tensor) -> list[Finding]:
    """Change the token before the last: the last output must change."""
    changed = subject.run(subject.replace_token(tokens, -2))
    difference = relative_difference(changed, base)
    if float(difference[:, -1].amax()) > 1e-6:
        return []
    message = "Changing the previous token does not change the output of the last: tokens do not attend to each other."
    evidence = {"relative change": float(difference[:, -1].amax())}
    hint = "Check the mask, and that the call gets (batch, heads, n, head_dim)."
    return [_build("tokens do not reach each other", "error", message, evidence, hint)]


def check_swapped_tokens(subject: Subject, tokens: Tensor, base: Tensor) -> list[Finding]:
    """Swap two earlier tokens: the last output must change, or positions have no effect."""
    row = tokens[0]
    columns = next(((i, i + 1) for i in range(len(row) - 3, 0, -1) if row[i] != row[i + 1]), None)
    if columns is None:
        return []
    swapped = tokens.clone()
    swapped[:, list(columns)] = tokens[:, [columns[1], columns[0]]]
    difference = relative_difference(subject.run(swapped), base)[0, -1]
    if float(difference) > 1e-6:
        return []
    message = "Swapping two earlier tokens does not change the last output: their order has no effect."
    evidence = {"relative change": float(difference), "swapped": f"tokens {columns[0]} and {columns[1]}"}
    hint = "Add position embeddings, apply rotary positions, or add a position bias; ignore this for sets."
    return [_build("positions have no effect", "warning", message, evidence, hint)]


def check_batch(subject: Subject, tokens: Tensor | None) -> list[Finding]:
    """Change the second entry of a batch: the output of the first must not change.

    Args:
        subject: The model.
        tokens: (2, n), or None for a model that reads no tokens.

    Returns:
        The findings.
    """

    def run(change: bool) -> Tensor:
        if tokens is None:
            return subject.run_values(change)
        return subject.run(torch.stack([tokens[0], tokens[1].flip(0)]) if change else tokens)

    before, after = run(False), run(True)
    difference = relative_difference(after[:1], before[:1])
    if not float(difference.amax()) > tolerance_of(before):
        return []
    message = "Changing one entry of the batch changes the output of another."
    evidence = {"largest relative change of the other entry": float(difference.amax())}
    hint = "Check which axis is the batch: nn.MultiheadAttention takes (n, batch, width) unless batch_first=True. Then "
    hint += "look for reshapes without transpose, and norms over the batch."
    module, where = "", dict[str, Any]()
    if tokens is not None:
        rows = torch.ones(tokens.shape[1], dtype=torch.bool, device=tokens.device)
        module, where = locate_change(subject, lambda: run(False), lambda: run(True), rows)
    return [_build("batch entries mixed", "error", message, evidence | where, hint, module)]


def make_padded(subject: Subject, tokens: Tensor, side: str) -> tuple[Tensor, Tensor]:
    """Pad the second of two sequences.

    Args:
        subject: The model.
        tokens: (2, n).
        side: "left" or "right".

    Returns:
        Tokens and attention mask, (2, n).
    """
    mask = torch.ones_like(tokens)
    mask[1, slice(PADDING) if side == "left" else slice(-PADDING, None)] = 0
    pad = subject.find_padding_id()
    # The second entry keeps its first tokens, on whichever side.
    text = tokens[1, :-PADDING]
    padded = torch.where(mask == 1, tokens, torch.full_like(tokens, pad))
    padded[1, mask[1] == 1] = text
    return padded, mask


def _replace_padding(subject: Subject, padded: Tensor, mask: Tensor) -> Tensor:
    """Return padded tokens with another id as padding."""
    ids = subject.ordinary_ids()
    return torch.where(mask == 1, padded, ids[ids != subject.find_padding_id()][0])


def check_padded(
    subject: Subject, tokens: Tensor, side: str, with_positions: bool, is_relative: bool
) -> list[Finding]:
    """Run a padded text in a batch and alone: the outputs of its tokens must be the same.

    Args:
        subject: The model.
        tokens: (2, n).
        side: "left" or "right".
        with_positions: The model can be passed positions, so that its own are checked apart from its masks.
        is_relative: Shifting all positions changes nothing, as padding on the left does to positions that count it.

    Returns:
        The findings.
    """
    padded, mask = make_padded(subject, tokens, side)
    text, is_token = tokens[1:, :-PADDING], mask[1] == 1

    def compare(own_positions: bool) -> tuple[float, float]:
        """Return the largest relative difference, and the tolerance."""
        if subject.is_encoder_decoder:
            alone, batch = subject.run_source(text), subject.run_source(padded, mask)
            return float(relative_difference(batch[1:], alone).amax()), tolerance_of(alone)
        positions = [(part.cumsum(-1) - 1).clamp(min=0) for part in (torch.ones_like(text), mask)]
        given = [None, None] if own_positions else positions
        alone = subject.run(text, torch.ones_like(text), given[0])
        batch = subject.run(padded, mask, given[1])
        rows = batch[1:, is_token] if batch.ndim > 2 and batch.shape[1] == mask.shape[1] else batch[1:]
        return float(relative_difference(rows, alone).amax()), tolerance_of(alone)

    difference, tolerance = compare(own_positions=not with_positions)
    evidence: dict[str, Any] = {"padding": f"{PADDING} tokens on the {side}"}
    message = f"A text padded on the {side} has another output than alone, although its padding is masked."
    if not difference > tolerance:
        has_own = with_positions and not subject.requires(subject.positions_name)
        if not has_own or subject.is_encoder_decoder or (side == "left" and not is_relative):
            return []
        difference, tolerance = compare(own_positions=True)
        if not difference > tolerance:
            return []
        evidence |= {"largest relative difference": difference, "with position_ids passed": "the same output"}
        message = (
            f"A text padded on the {side} has another output than alone, unless it is passed position_ids."
        )
        hint = "Compute the positions of a padded batch as attention_mask.cumsum(-1) - 1, per batch entry."
        return [_build("positions of padded tokens", "error", message, evidence, hint)]
    evidence |= {"largest relative difference": difference}
    if side == "left" and (subject.is_encoder_decoder or not with_positions):
        hint = "Expected if positions are counted from the first token, padding included: pad on the right, or add a "
        hint += "position_ids argument."
        return [_build("left padding shifts positions", "warning", message, evidence, hint)]
    hint = "Mask padding in every layer, do not count it in the positions, and let no other layer mix tokens. Ignore "
    hint += "this for convolutions and recurrent layers that were trained so."
    module, where = "", dict[str, Any]()
    if not subject.is_encoder_decoder:
        other = _replace_padding(subject, padded, mask)
        runs = [partial(subject.run, ids.flip(0), mask.flip(0)) for ids in (padded, other)]
        module, where = locate_change(subject, runs[0], runs[1], is_token)
        if not where:
            where = {"other padding tokens": "the same output, so they are masked"}
            hint = (
                "The padding is masked, so look at positions, and at what depends on the length of the batch."
            )
    # Attention to padding was reported before. Convolutions and recurrent layers of some models read it by design.
    severity: Severity = "warning" if "begins" in where else "error"
    return [_build("padding changes the output", severity, message, evidence | where, hint, module)]


def check_padded_cache(subject: Subject, tokens: Tensor) -> list[Finding]:
    """Run a batch padded on the left in pieces with a cache: tokens must have the outputs of the whole batch."""
    padded, mask = make_padded(subject, tokens, "left")
    prefill = tokens.shape[1] - CACHED_STEPS
    sizes = (prefill, *(1,) * CACHED_STEPS)
    whole, cached = subject.run(padded, mask), subject.run_cached(padded, sizes, mask)
    if cached.shape != whole.shape:
        return []
    difference = torch.where(mask == 1, relative_difference(cached, whole), 0.0)
    if not float(difference.amax()) > tolerance_of(whole):
        return []
    steps = int((difference[1, prefill:] > tolerance_of(whole)).sum())
    evidence: dict[str, Any] = {"largest relative difference": float(difference.amax()), "prefill": prefill}
    evidence |= {
        "padding": f"{PADDING} tokens on the left",
        "steps that differ": f"{steps} of {CACHED_STEPS}",
    }
    # Other ids of the padding: if they change the steps, and not the whole batch, the steps attend to it.
    other = _replace_padding(subject, padded, mask)
    changes = [
        float(relative_difference(subject.run_cached(other, sizes, mask), cached)[1, prefill:].amax()),
        float(relative_difference(subject.run(other, mask), whole)[1, prefill:].amax()),
    ]
    if changes[0] > tolerance_of(whole) >= changes[1]:
        message = "Steps with a cache attend to the padding of the prompt; the whole batch does not."
        hint = (
            "Pass the attention_mask of all keys, cached ones included, in every step: (batch, cached + new)."
        )
        evidence["change by other padding tokens"] = changes[0]
        return [_build("cache: padding not masked", "error", message, evidence, hint)]
    message = "Tokens of a padded batch have other outputs with a cache than in the whole batch."
    hint = "Compare mask and positions of the first step: cached tokens without padding, then + 1."
    return [_build("cached steps differ", "error", message, evidence, hint)]


def check_cross_states(subject: Subject, log_run: Callable[[Any], list[LoggedCall]]) -> list[Finding]:
    """Change a token of the source: no call may have other queries and the same keys.

    Args:
        subject: An encoder-decoder model that reads token ids.
        log_run: Runs the model on the ids of the source, and returns its calls.

    Returns:
        The findings.
    """
    source = subject.inputs["input_ids"][:1]
    before, after = log_run(source), log_run(subject.replace_token(source, -1))
    for first, second in zip(before, after, strict=False):
        pairs = [(first.call.query, second.call.query), (first.key, second.key)]
        if any(a.shape != b.shape for a, b in pairs) or first.module != second.module:
            continue
        query, key = (float((b - a).abs().amax()) / (float(a.abs().amax()) or 1.0) for a, b in pairs)
        tolerance = tolerance_of(first.key)
        if query > tolerance and key <= tolerance / 10:
            message = "Queries are computed from the source, and keys from the decoder's tokens: the two are swapped."
            hint = (
                "Cross-attention takes its queries from the decoder, its keys and values from the encoder: "
            )
            hint += "attention(query=decoder_states, key=encoder_states, value=encoder_states)."
            evidence = {"change of the query by another source token": query, "change of the key": key}
            kind = "cross-attention states swapped"
            return [Finding(kind, "error", message, first.module, first.layer, evidence=evidence, hint=hint)]
    return []


def accepts_positions(subject: Subject, tokens: Tensor, base: Tensor) -> bool:
    """Return whether positions 0, 1, 2, … are those that the model uses if it is passed none."""
    if not subject.takes_positions:
        return False
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    try:
        output = subject.run(tokens, positions=positions)
    except Exception:  # the model takes positions of another shape
        return False
    return float(relative_difference(output, base).amax()) <= tolerance_of(base)


def check_shifted_positions(subject: Subject, tokens: Tensor, base: Tensor, has_table: bool) -> list[Finding]:
    """Shift all positions, which changes nothing if they are relative; stretch them, which must change something."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    stretched = relative_difference(subject.run(tokens, positions=positions * 2), base)
    if not float(stretched.amax()) > 1e-6:
        message = "Stretched position_ids do not change the output: the model ignores them."
        hint = "Pass position_ids on to the attention layers, or omit the argument if positions are a bias."
        evidence = {"relative change": float(stretched.amax())}
        return [_build("position ids ignored", "warning", message, evidence, hint)]
    shifted = relative_difference(subject.run(tokens, positions=positions + SHIFT), base)
    if has_table or not float(shifted.amax()) > 10 * tolerance_of(base):
        return []
    message = (
        f"Shifting all positions by {SHIFT} changes the output, and the model has no table of positions."
    )
    hint = "Rotary positions and position biases depend on differences only. Ignore this for sinusoidal embeddings."
    evidence = {"largest relative change": float(shifted.amax())}
    return [_build("positions are not relative", "warning", message, evidence, hint)]


def _build(
    kind: str,
    severity: Severity,
    message: str,
    evidence: dict[str, Any],
    hint: str,
    module: str = "",
    rows: tuple[int, ...] = (),
) -> Finding:
    return Finding(kind, severity, message, module, rows=rows, evidence=evidence, hint=hint)
