"""Experiments on the outputs: change a token, swap two, pad, shift positions, repeat; compare the outputs."""

from __future__ import annotations

from typing import Any

import torch

from regard.findings import Finding
from regard.lens.experiments.subject import Subject, relative_difference, tolerance_of

Tensor = Any  # the types of torch are not followed

# Number of padding tokens, and by how much positions are shifted.
PADDING, SHIFT = 4, 3


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
    return [_build("not deterministic", "error", message, evidence, hint)]


def check_future_token(subject: Subject, tokens: Tensor, base: Tensor, is_inferred: bool) -> list[Finding]:
    """Change the last token of a causal model: no output before it may change."""
    changed = subject.run(subject.replace_token(tokens, -1))
    difference = relative_difference(changed, base)[:, :-1]
    if difference.numel() == 0 or not float(difference.amax()) > tolerance_of(base):
        return []
    affected = (difference > tolerance_of(base)).any(0).nonzero().flatten().tolist()
    message = "Changing the last token changes outputs before it, so the future leaks into the past."
    if is_inferred:
        message += " The model was taken for causal; if it is not, say so with causal=False."
    evidence = {"largest relative change": float(difference.amax()), "tokens": tokens.shape[1]}
    hint = "If no layer attends to later tokens, look at what mixes tokens outside the attention: a reshape without "
    hint += "transpose, a norm or convolution over tokens."
    return [_build("future leaks", "error", message, evidence, hint, rows=tuple(affected))]


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
    if tokens is not None:
        before, after = subject.run(tokens), subject.run(torch.stack([tokens[0], tokens[1].flip(0)]))
    else:
        before, after = (subject.run_values(change) for change in (False, True))
    difference = relative_difference(after[:1], before[:1])
    if not float(difference.amax()) > tolerance_of(before):
        return []
    message = "Changing one entry of the batch changes the output of another."
    evidence = {"largest relative change of the other entry": float(difference.amax())}
    hint = "Check which axis is the batch: nn.MultiheadAttention takes (n, batch, width) unless batch_first=True. Then "
    hint += "look for reshapes without transpose, and norms over the batch."
    return [_build("batch entries mixed", "error", message, evidence, hint)]


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


def check_padded(subject: Subject, tokens: Tensor, side: str, with_positions: bool) -> list[Finding]:
    """Run a padded text in a batch and alone: the outputs of its tokens must be the same."""
    padded, mask = make_padded(subject, tokens, side)
    text = tokens[1:, :-PADDING]
    if subject.is_encoder_decoder:
        alone, batch = subject.run_source(text), subject.run_source(padded, mask)
        difference = relative_difference(batch[1:], alone)
    else:
        positions = [(part.cumsum(-1) - 1).clamp(min=0) for part in (torch.ones_like(text), mask)]
        given = positions if with_positions else [None, None]
        alone = subject.run(text, torch.ones_like(text), given[0])
        batch = subject.run(padded, mask, given[1])
        rows = batch[1:, mask[1] == 1] if batch.ndim > 2 and batch.shape[1] == mask.shape[1] else batch[1:]
        difference = relative_difference(rows, alone)
    if not float(difference.amax()) > tolerance_of(alone):
        return []
    evidence = {
        "largest relative difference": float(difference.amax()),
        "padding": f"{PADDING} tokens on the {side}",
    }
    message = f"A text padded on the {side} has another output than alone, although its padding is masked."
    if side == "left" and (subject.is_encoder_decoder or not with_positions):
        hint = "Expected if positions are counted from the first token, padding included: pad on the right, or add a "
        hint += "position_ids argument."
        return [_build("left padding shifts positions", "warning", message, evidence, hint)]
    hint = "Mask padding in every layer, do not count it in the positions, and let no other layer mix tokens."
    return [_build("padding changes the output", "error", message, evidence, hint)]


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
    kind: str, severity: Any, message: str, evidence: dict[str, Any], hint: str, rows: tuple[int, ...] = ()
) -> Finding:
    return Finding(kind, severity, message, "", -1, rows=rows, evidence=evidence, hint=hint)
