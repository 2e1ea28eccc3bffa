"""The experiments of `doctor`: change tokens, padding, positions, pieces, dtype or weights, and compare the outputs.

Each experiment is a function of an `Examination`, and an entry of `EXPERIMENTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from regard.capture.module_hints import is_position_table
from regard.capture.module_trace import Origin, is_around, match_events
from regard.diagnosis.projections import check_encoder_states, check_projections
from regard.diagnosis.rotary import check_rotary
from regard.diagnosis.subject import (
    LoggedCall,
    Subject,
    is_norm,
    log_calls,
    relative_difference,
    tolerance_of,
)
from regard.engines.torch_precision import widen
from regard.errors import RegardError
from regard.findings import Check, Finding, Findings, Severity
from regard.lens.recording import Recording
from regard.lens.token_rows import TokenRows

Tensor = Any  # the types of torch are not followed

# Number of padding tokens, and by how much positions are shifted.
PADDING, SHIFT = 4, 3
# Steps of a padded batch with a cache, and tokens after the prefill of a text without padding, at most.
PADDED_STEPS, MAX_STEPS = 3, 8
# Forward passes of an examination, at most; beyond it, changes are not located any more.
MAX_PASSES = 60
# Tokens of the run that measures rotary positions: bfloat16 rounds the positions from 257 on.
ROTARY_TOKENS = 264
# A copy in float32 that takes more bytes is not made.
MAX_COPY_BYTES = 4 << 30
# Share of a tensor's norm above which the model's dtype differs from float32 by more than rounding.
BEYOND_ROUNDING = 0.5
# Rows of a table of positions beyond the largest position: 2 in OPT and BART, for ids that are no positions.
MAX_EXTRA_ROWS = 4
# Kinds of findings about a call that explain why its output is not finite.
EXPLAINS_NAN = ("fully masked rows", "inverted mask", "padding mask of another batch entry", "own key masked")
# Findings about layers whose rows are not tokens.
AXES = ("heads and tokens swapped", "heads split by view")


class Examination:
    """The state of one run of `doctor`: the model, what was found, and a short run to compare with.

    Args:
        subject: The model.
        causal: What the user stated, or None.
    """

    def __init__(self, subject: Subject, causal: bool | None) -> None:
        self.subject, self.stated_causal = subject, causal
        self.causal = bool(causal)
        self.findings: list[Finding] = []
        self.recording = Recording()
        self.user_output: Tensor = None  # the output of the user's inputs
        # Two short sequences, (2, n); output and calls of the first. `no_probe` says why there are none.
        self.probe_tokens: Tensor = None
        self.probe_output: Tensor = None
        self.calls: list[LoggedCall] = []
        self.no_probe = "the inputs have no token ids"
        self.with_positions = False

    def diagnose(
        self, recording: Recording, tokens: Any = None, attention_mask: Any = None, causal: bool | None = None
    ) -> Findings:
        """Run `Recording.diagnose`, without tokens and mask if they do not fit."""
        causal = self.stated_causal if causal is None else causal
        try:
            return recording.diagnose(tokens, attention_mask, causal)
        except RegardError:  # the mask is that of another part of the model, or the tokens are
            return recording.diagnose(causal=causal)

    def run_probe(self) -> None:
        """Run the first of two short sequences of the user's tokens, for the experiments to compare with."""
        subject = self.subject
        if subject.tokens_name is None:
            return
        for keeps_inputs, keeps_length in ((False, False), (True, False), (True, True)):
            subject.keeps_inputs, subject.keeps_length = keeps_inputs, keeps_length
            self.probe_tokens = subject.probe_tokens()
            try:
                with log_calls(subject.model, modules=True) as log:
                    self.probe_output = subject.run(self.tokens)
                self.calls, self.no_probe = log.calls, ""
                break
            except Exception as error:  # the model does not run on text alone, or on texts of this length
                self.no_probe = f"the model does not run on other tokens: {format_error(error)}"
        if not self.no_probe and self.has_token_outputs and subject.takes_positions:
            try:
                own = self.compare(positions=self.positions)
            except Exception:  # the model takes positions of another shape
                return
            self.with_positions = float(own.amax()) <= self.tolerance

    @property
    def tokens(self) -> Tensor:
        """The tokens of the probe, (1, n)."""
        return self.probe_tokens[:1]

    @property
    def positions(self) -> Tensor:
        """Positions 0, 1, 2, …, (1, n)."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)

    @cached_property
    def tolerance(self) -> float:
        """The relative difference from the probe's output that is rounding."""
        return tolerance_of(self.probe_output)

    def compare(self, tokens: Tensor = None, positions: Tensor = None) -> Tensor:
        """Run changed tokens or positions, and return the relative difference of each token, (1, n)."""
        output = self.subject.run(self.tokens if tokens is None else tokens, positions=positions)
        return relative_difference(output, self.probe_output)

    @property
    def has_token_outputs(self) -> bool:
        """Whether the output has a vector for each token."""
        return bool(self.probe_output.ndim > 2 and self.probe_output.shape[1] == self.tokens.shape[1])

    @property
    def has_table(self) -> bool:
        """Whether positions are looked up in a table."""
        return any(lookup.is_table for lookup in self.recording._module_hints.lookups)

    def has_errors(self, *kinds: str) -> bool:
        """Return whether an error of one of these kinds was found."""
        return any(finding.severity == "error" and finding.kind in kinds for finding in self.findings)

    def locate_change(
        self, run: Callable[[], Any], run_changed: Callable[[], Any], rows: Tensor = None, batch: int = 1
    ) -> tuple[str, dict[str, Any]]:
        """Run two inputs again with a trace of all modules, and find where some tokens first differ.

        Args:
            rows: (n,), True for the tokens that should not differ. Default: all of the probe's.
        """
        if self.subject.num_passes > MAX_PASSES - 4:
            return "", {}
        traces = []
        for run_once in (run, run_changed):
            with self.subject.trace() as trace:
                output = run_once()
            traces.append(trace)
        rows = torch.ones_like(self.tokens[0], dtype=torch.bool) if rows is None else rows
        origin = traces[0].find_change(traces[1], batch, rows, tolerance_of(output))
        return ("", {}) if origin is None else (origin.module, {"begins": origin.describe()})


def format_error(error: Exception) -> str:
    """Format an error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]


# The user's inputs


def check_repeated(exam: Examination) -> Finding | None:
    """Run the inputs again: the output must be the same. If it changes, find out whether keys were left behind."""
    subject, first = exam.subject, exam.user_output
    with log_calls(subject.model) as log:
        again = subject.run_inputs()
        module, where = "", dict[str, Any]()
        if first.shape == again.shape:
            difference = float(relative_difference(again, first).amax())
            both_nan = torch.equal(first.isnan(), again.isnan()) and bool(first.isnan().any())
            if difference <= tolerance_of(first) or both_nan:
                return None
            evidence: dict[str, Any] = {"largest relative difference": difference}
            if first.ndim > 2:
                rows = torch.ones(first.shape[1], dtype=torch.bool, device=first.device)
                module, where = exam.locate_change(subject.run_inputs, subject.run_inputs, rows, len(first))
        else:
            evidence = {"first output": str(tuple(first.shape)), "second output": str(tuple(again.shape))}
    for logged in log.calls:
        known = exam.recording.calls(logged.module) if logged.module in exam.recording else ()
        before, now = max((call.shape[-1] for call in known), default=0), logged.key.shape[-2]
        if 0 < before < now:
            return logged.build_finding(
                "state kept between calls",
                "A second call on the same inputs attends to the keys of the first call: the cache was kept.",
                {"keys of the first call": before, "keys of the second call": now},
                "Create the cache in each call, or clear it before a new sequence.",
            )
    message = "In eval mode, a second run on the same inputs gives a different output."
    hint = "Look for dropout that ignores eval mode, random numbers in forward, and state kept between calls."
    return Finding("not deterministic", "error", message, module, evidence=evidence | where, hint=hint)


def check_encoder(exam: Examination) -> list[Finding]:
    """Compare the states that cross-attention reads with the output of the encoder."""
    encoder, encoded = exam.subject.find_encoder(), []
    assert encoder is not None
    handle = encoder.register_forward_hook(lambda module, args, output: encoded.append(output))
    try:
        with log_calls(exam.subject.model, modules=True) as log:
            exam.subject.run_inputs()
    finally:
        handle.remove()
    if not encoded:
        return []
    states = encoded[-1] if isinstance(encoded[-1], torch.Tensor) else encoded[-1][0]
    return check_encoder_states(log.calls, states)


def check_cross_states(exam: Examination) -> Finding | None:
    """Change a token of the source: no call may have other queries and the same keys."""
    source, runs = exam.subject.inputs["input_ids"][:1], []
    for ids in (source, exam.subject.replace_token(source, -1)):
        with log_calls(exam.subject.model) as log:
            exam.subject.run_source(ids)
        runs.append(log.calls)
    for first, second in zip(runs[0], runs[1], strict=False):
        pairs = [(first.call.query, second.call.query), (first.key, second.key)]
        if any(a.shape != b.shape for a, b in pairs) or first.module != second.module:
            continue
        query, key = (float((b - a).abs().amax()) / (float(a.abs().amax()) or 1.0) for a, b in pairs)
        tolerance = tolerance_of(first.key)
        if query > tolerance and key <= tolerance / 10:
            return first.build_finding(
                "cross-attention states swapped",
                "The inputs are swapped: queries are computed from the source, keys from the decoder's tokens.",
                {"change of the query if a source token changes": query, "change of the key": key},
                "Compute queries from the decoder, keys and values from the encoder: "
                "attention(query=decoder_states, key=encoder_states, value=encoder_states).",
            )
    return None


def check_batch(exam: Examination) -> Finding | None:
    """Change the second entry of a batch: the output of the first must not change."""
    subject, both = exam.subject, exam.probe_tokens

    def run(change: bool) -> Tensor:
        if both is None:
            return subject.run_values(change)
        return subject.run(torch.stack([both[0], both[1].flip(0)]) if change else both)

    before, after = run(False), run(True)
    difference = float(relative_difference(after[:1], before[:1]).amax())
    if not difference > tolerance_of(before):
        return None
    message = "Changing one batch entry changes the output of another."
    evidence = {"largest relative change of the other entry": difference}
    hint = "Check which axis is the batch: nn.MultiheadAttention takes (n, batch, width) unless batch_first=True. Then "
    hint += "look for reshapes without transpose, and norms over the batch."
    module, where = "", dict[str, Any]()
    if both is not None:
        module, where = exam.locate_change(partial(run, False), partial(run, True))
    return Finding("batch entries mixed", "error", message, module, evidence=evidence | where, hint=hint)


# Other tokens and positions


def check_future_token(exam: Examination) -> Finding | None:
    """Change the last token of a causal model: no output before it may change."""
    subject, tokens = exam.subject, exam.tokens
    replaced = subject.replace_token(tokens, -1)
    difference = exam.compare(replaced)[:, :-1]
    if difference.numel() == 0 or not float(difference.amax()) > exam.tolerance:
        return None
    affected = (difference > exam.tolerance).any(0).nonzero().flatten().tolist()
    message = "Changing the last token changes outputs before it, so the future leaks into the past."
    if exam.stated_causal is None:
        message += " The model was inferred to be causal; if it is not, pass causal=False."
    evidence = {"largest relative change": float(difference.amax()), "tokens": tokens.shape[1]}
    hint = "If no layer attends to later tokens, look for code outside the attention that mixes tokens: a reshape "
    hint += "without transpose, or a norm, mean or convolution over tokens."
    rows = exam.positions[0] < tokens.shape[1] - 1
    module, where = exam.locate_change(partial(subject.run, tokens), partial(subject.run, replaced), rows)
    return Finding(
        "future leaks", "error", message, module, rows=tuple(affected), evidence=evidence | where, hint=hint
    )


def check_previous_token(exam: Examination) -> Finding | None:
    """Change the token before the last: the last output must change."""
    change = float(exam.compare(exam.subject.replace_token(exam.tokens, -2))[:, -1].amax())
    if change > 1e-6:
        return None
    message = (
        "Changing the previous token does not change the last output: tokens do not attend to each other."
    )
    hint = "Check the mask, and that the call receives (batch, heads, n, head_dim)."
    kind = "tokens do not reach each other"
    return Finding(kind, "error", message, evidence={"relative change": change}, hint=hint)


def check_swapped_tokens(exam: Examination) -> Finding | None:
    """Swap two earlier tokens: the last output must change, or positions have no effect."""
    row = exam.tokens[0]
    column = next((i for i in range(len(row) - 3, 0, -1) if row[i] != row[i + 1]), None)
    if column is None:
        return None
    swapped = exam.tokens.clone()
    swapped[:, [column, column + 1]] = exam.tokens[:, [column + 1, column]]
    change = float(exam.compare(swapped)[0, -1])
    if change > 1e-6:
        return None
    message = "Swapping two earlier tokens does not change the last output: their order has no effect."
    evidence = {"relative change": change, "swapped": f"tokens {column} and {column + 1}"}
    hint = "Add position embeddings, apply rotary positions, or add a position bias. Ignore this for sets."
    return Finding("positions have no effect", "warning", message, evidence=evidence, hint=hint)


def check_shifted_positions(exam: Examination) -> Finding | None:
    """Shift all positions, which changes nothing if they are relative; stretch them, which must change something."""
    stretched = float(exam.compare(positions=exam.positions * 2).amax())
    if not stretched > 1e-6:
        message = "Doubling position_ids does not change the output: the model ignores them."
        hint = "Pass position_ids on to the attention layers, or omit the argument if positions are a bias."
        evidence = {"relative change": stretched}
        return Finding("position ids ignored", "warning", message, evidence=evidence, hint=hint)
    shifted = float(exam.compare(positions=exam.positions + SHIFT).amax())
    if exam.has_table or not shifted > 10 * exam.tolerance:
        return None
    message = (
        f"Shifting all positions by {SHIFT} changes the output, although the model has no position table."
    )
    hint = "Rotary positions and position biases depend only on distances. Ignore this for sinusoidal embeddings."
    evidence = {"largest relative change": shifted}
    return Finding("positions are not relative", "warning", message, evidence=evidence, hint=hint)


def check_turns(exam: Examination) -> list[Finding]:
    """Run one token everywhere, and measure how rotary positions turn queries and keys."""
    subject = exam.subject
    length = subject.find_max_positions(ROTARY_TOKENS)
    with log_calls(subject.model, modules=True) as log:
        subject.run(subject.ordinary_ids()[:1].expand(1, length).contiguous())
    calls = [
        logged
        for logged in log.calls
        if logged.call.query.ndim == 4
        and logged.call.shape[-2:] == (length, length)
        and TokenRows.from_call(logged.call).query_offset is not None
    ]
    return [] if exam.has_errors(*AXES) else check_rotary(calls, subject.config)


# Padding


def _make_padded(exam: Examination, side: str) -> tuple[Tensor, Tensor]:
    """Pad the second of the two sequences; return tokens and attention mask, (2, n)."""
    mask = torch.ones_like(exam.probe_tokens)
    mask[1, slice(PADDING) if side == "left" else slice(-PADDING, None)] = 0
    padded = torch.where(mask == 1, exam.probe_tokens, exam.subject.find_padding_id())
    padded[1, mask[1] == 1] = exam.probe_tokens[1, :-PADDING]  # it keeps its first tokens, on whichever side
    return padded, mask


def _replace_padding(subject: Subject, padded: Tensor, mask: Tensor) -> Tensor:
    """Return padded tokens with another id as padding."""
    ids = subject.ordinary_ids()
    return torch.where(mask == 1, padded, ids[ids != subject.find_padding_id()][0])


def check_padded(exam: Examination, side: str) -> list[Finding]:
    """Run a padded text in a batch and alone; the checks of what was captured come first, since they name the cause."""
    subject = exam.subject
    found = _compare_padded(exam, side)
    if found is None:
        return []
    if found.kind == "positions of padded tokens" or subject.is_encoder_decoder:
        return [found]
    padded, mask = _make_padded(exam, side)
    with log_calls(subject.model) as log:
        subject.run(padded, mask)
    recording = Recording()  # without lookups of positions, which may count padding on purpose
    for logged in log.calls:
        recording._add(logged.call)
    recording._module_hints.causal = log.recording._module_hints.causal
    causal = exam.stated_causal if exam.stated_causal is not None else exam.causal or None
    causes = exam.diagnose(recording, None, mask, causal).by_severity("error") if len(recording) else []
    return list(causes) or [found]


def _compare_padded(exam: Examination, side: str) -> Finding | None:
    """Run a padded text in a batch and alone: the outputs of its tokens must be the same."""
    subject, with_positions = exam.subject, exam.with_positions
    padded, mask = _make_padded(exam, side)
    text, is_token = exam.probe_tokens[1:, :-PADDING], mask[1] == 1
    # Shifting all positions changes nothing, as padding on the left does to positions that count it.
    shifts = any(finding.kind == "positions are not relative" for finding in exam.findings)
    is_relative = not exam.has_table and not shifts

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
    message = (
        f"A text padded on the {side} has a different output than alone, although its padding is masked."
    )
    if not difference > tolerance:
        # The model can be passed positions, so its own are checked separately from its masks.
        has_own = with_positions and not subject.requires(subject.positions_name)
        if not has_own or subject.is_encoder_decoder or (side == "left" and not is_relative):
            return None
        difference, tolerance = compare(own_positions=True)
        if not difference > tolerance:
            return None
        evidence |= {"largest relative difference": difference, "with position_ids passed": "same output"}
        message = (
            f"A text padded on the {side} has a different output than alone, unless position_ids are passed."
        )
        hint = "Compute the positions of a padded batch as attention_mask.cumsum(-1) - 1, per batch entry."
        return Finding("positions of padded tokens", "error", message, evidence=evidence, hint=hint)
    if math.isinf(difference):
        with subject.trace() as trace:
            (subject.run_source if subject.is_encoder_decoder else subject.run)(padded, mask)
        origin = trace.find_not_finite()
        message = f"The output of a text padded on the {side} has NaN or inf; without padding it is finite."
        evidence |= {} if origin is None else {"begins": origin.describe()}
        hint = "Padding rows may have no visible key, so mask with a number that is finite in the softmax's dtype; "
        hint += "the minimum of float64 is −inf in float32. Or use F.scaled_dot_product_attention."
        module = "" if origin is None else origin.module
        return Finding("NaN or inf", "error", message, module, evidence=evidence, hint=hint)
    evidence |= {"largest relative difference": difference}
    if side == "left" and (subject.is_encoder_decoder or not with_positions):
        hint = "Expected if positions count padding. Pad on the right, or add a "
        hint += "position_ids argument."
        return Finding("left padding shifts positions", "warning", message, evidence=evidence, hint=hint)
    hint = "Mask padding in every layer, do not count it in the positions, and do not mix tokens in other layers. "
    hint += "Ignore this for convolutions and recurrent layers that were trained with padding."
    module, where = "", dict[str, Any]()
    if not subject.is_encoder_decoder:
        other = _replace_padding(subject, padded, mask)
        runs = [partial(subject.run, ids.flip(0), mask.flip(0)) for ids in (padded, other)]
        module, where = exam.locate_change(runs[0], runs[1], is_token)
        if not where:
            where = {"with other padding tokens": "same output, so padding is masked"}
            hint = (
                "The padding is masked, so check the positions and what depends on the length of the batch."
            )
    # Attention to padding was reported before. Convolutions and recurrent layers of some models read it by design.
    severity: Severity = "warning" if "begins" in where else "error"
    kind = "padding changes the output"
    return Finding(kind, severity, message, module, evidence=evidence | where, hint=hint)


# A cache


def choose_sizes(num_tokens: int) -> list[tuple[int, ...]]:
    """Return sizes of the pieces of two runs: a prefill and single steps, and a prefill and chunks of three tokens."""
    prefill = max(1, num_tokens // 2, num_tokens - MAX_STEPS)
    rest = num_tokens - prefill
    steps = (prefill, *(1,) * rest)
    chunks = (prefill, *(3,) * (rest // 3), *([rest % 3] if rest % 3 else []))
    return [steps, chunks]


def check_cached(exam: Examination, chunks: bool) -> list[Finding]:
    """Run the probe in pieces with a cache; if the outputs differ, find out which calls do."""
    sizes = choose_sizes(exam.tokens.shape[1])[chunks]
    error, base = None, exam.probe_output
    with log_calls(exam.subject.model) as log:
        try:
            output = exam.subject.run_cached(exam.tokens, sizes)
        except Exception as raised:  # a wrong cache may not fit its mask
            error = raised
    if error is None and output.shape == base.shape:
        difference = relative_difference(output, base)[0]
        if not float(difference.amax()) > exam.tolerance:
            return []
    causes = _check_calls(exam.calls, log.calls, sizes)
    diagnosed = exam.diagnose(log.recording).by_severity("error") if len(log.recording) else []
    # The recording knows why a mask or a key is wrong, unless the layers share a cache.
    if not causes or (diagnosed and causes[0].kind in ("cache: mask", "cache: keys do not grow")):
        causes = list(diagnosed)
    if error is not None and not causes:
        raise error
    if causes or output.shape != base.shape:
        return causes
    token = int((difference > exam.tolerance).nonzero()[0])
    message = "Tokens have different outputs with a cache than in one pass over the whole sequence."
    evidence = {"first token": token, "largest relative difference": float(difference.amax())}
    hint = "Compare positions, masks and cached keys of the first step that differs."
    severity: Severity = "error" if max(sizes[1:]) == 1 else "warning"
    evidence["prefill"] = sizes[0]
    return [Finding("cached steps differ", severity, message, evidence=evidence, hint=hint)]


def check_padded_cache(exam: Examination) -> Finding | None:
    """Run a batch padded on the left in pieces with a cache: tokens must have the outputs of the whole batch."""
    subject = exam.subject
    padded, mask = _make_padded(exam, "left")
    prefill = exam.tokens.shape[1] - PADDED_STEPS
    sizes = (prefill, *(1,) * PADDED_STEPS)
    whole, cached = subject.run(padded, mask), subject.run_cached(padded, sizes, mask)
    if cached.shape != whole.shape:
        return None
    difference, tolerance = (
        torch.where(mask == 1, relative_difference(cached, whole), 0.0),
        tolerance_of(whole),
    )
    if not float(difference.amax()) > tolerance:
        return None
    steps = int((difference[1, prefill:] > tolerance).sum())
    evidence: dict[str, Any] = {"largest relative difference": float(difference.amax()), "prefill": prefill}
    evidence["padding"] = f"{PADDING} tokens on the left"
    evidence["steps that differ"] = f"{steps} of {PADDED_STEPS}"
    # Other ids of the padding: if they change the steps, and not the whole batch, the steps attend to it.
    other = _replace_padding(subject, padded, mask)
    changes = [
        float(relative_difference(subject.run_cached(other, sizes, mask), cached)[1, prefill:].amax()),
        float(relative_difference(subject.run(other, mask), whole)[1, prefill:].amax()),
    ]
    if changes[0] > tolerance >= changes[1]:
        message = "With a cache, steps attend to the padding of the prompt; without it they do not."
        hint = "In every step, pass the attention_mask of all keys, including cached ones: (batch, cached + new)."
        evidence["change if padding tokens change"] = changes[0]
        return Finding("cache: padding not masked", "error", message, evidence=evidence, hint=hint)
    message = "Tokens of a padded batch have different outputs with a cache than in one pass."
    hint = "Check the mask and positions of the first step: positions continue after the tokens, without padding."
    return Finding("cached steps differ", "error", message, evidence=evidence, hint=hint)


def _check_calls(
    whole: Sequence[LoggedCall], cached: Sequence[LoggedCall], sizes: Sequence[int]
) -> list[Finding]:
    """Find the first layer and piece of a cached run whose call differs from that of the whole sequence."""
    for first in whole:
        pieces = [logged for logged in cached if logged.module == first.module]
        is_once = sum(logged.module == first.module for logged in whole) == 1
        is_self = TokenRows.from_call(first.call).query_offset is not None
        if not is_once or len(pieces) > len(sizes) or not is_self or first.key.shape[-2] != sum(sizes):
            continue
        finding, start = _check_shared(cached), 0
        for number, (piece, size) in enumerate(zip(pieces, sizes, strict=False)):
            finding = finding or _check_piece(first, piece, start, size, number)
            start += size
        if finding is not None:
            # Some layers with a state support single steps only, so a difference of chunks may be no fault.
            is_weak = finding.kind == "cached steps differ" and max(sizes[1:]) > 1
            return [replace(finding, severity="warning") if is_weak else finding]
    return []


def _check_shared(cached: Sequence[LoggedCall]) -> Finding | None:
    """Check for a call whose keys begin with the keys of the previous layer in the same piece."""
    for before, after in pairwise(cached):
        n = before.key.shape[-2]
        if (
            before.module != after.module
            and before.key.shape[:-2] == after.key.shape[:-2]
            and after.key.shape[-2] > n
            and torch.equal(after.key[..., :n, :], before.key)
        ):
            return after.build_finding(
                "cache: shared by layers",
                "The keys of this layer begin with the keys of the previous layer: both append to the same cache.",
                {"keys of the previous layer": n, "keys of this layer": after.key.shape[-2]},
                "Create one cache for each layer: [Cache() for _ in layers], not [Cache()] * len(layers).",
            )
    return None


def _check_piece(whole: LoggedCall, piece: LoggedCall, start: int, size: int, number: int) -> Finding | None:
    """Compare one call of a cached run with the rows and keys of the whole sequence."""
    stop = start + size
    first_key, last_key = _find_visible_range(whole, start, stop)
    tolerance = 1e-3 if whole.key.element_size() >= 4 else 5e-2
    expected, expected_value = (widen(x)[..., first_key:last_key, :] for x in (whole.key, whole.value))
    keys, values = widen(piece.key), widen(piece.value)
    needed, count = expected.shape[-2], keys.shape[-2]
    evidence: dict[str, Any] = {"piece": number, "tokens": f"{start}–{stop - 1}", "keys": count}
    if keys.shape[:-2] != expected.shape[:-2]:
        return None
    offsets = range(count - needed, -1, -1)
    found = next(
        (i for i in offsets if not _rows_differ(keys[..., i : i + needed, :], expected, tolerance).any()),
        None,
    )
    if found is None and number == 0:
        message = "Keys of the prefill differ from the keys of the whole sequence: they depend on later tokens, or on "
        message += "the length of the sequence."
        hint = "Look for code outside the attention that mixes tokens, and for positions that depend on the length."
        return piece.build_finding("cached steps differ", message, evidence, hint)
    if found is None:
        if count >= needed:
            last = keys[..., count - needed :, :]
            differs = _rows_differ(last, expected, tolerance)
            lengths = [x.norm(dim=-1, keepdim=True) for x in (last, expected)]
            if not _rows_differ(lengths[0], lengths[1], tolerance).any():
                message = "Cached keys are rotated differently than in one pass: their positions differ."
                hint = "Pass positions that continue: cache length + arange(new tokens), and do not rotate cached "
                hint += "keys again."
                evidence["keys rotated differently"] = int(differs.sum())
                return piece.build_finding("positions", message, evidence, hint)
            if needed >= size and piece.layer == 0 and not differs[: needed - size].any():
                message = "In the first layer, new tokens of a cached step have different keys than in one pass: their "
                message += "position embeddings differ."
                hint = "Look up positions that continue: cache length + arange(new tokens)."
                evidence["keys that differ"] = int(differs.sum())
                return piece.build_finding("positions", message, evidence, hint)
        lost = _count_lost(keys, expected, tolerance)
        evidence |= {"keys needed": needed, "not in the cache": lost}
        if lost and count < needed:
            message = (
                "The cache does not grow in this step: keys that its tokens attend to are lost or replaced."
            )
            hint = "Append each key once, and evict only keys outside every window."
            return piece.build_finding("cache: keys do not grow", message, evidence, hint)
        message = (
            "Cached keys differ from the keys of the whole sequence, and the cause is before this layer."
        )
        hint = "Check the earlier layers. If a layer keeps state, such as a recurrent layer, the cache must hold it."
        return piece.build_finding("cached steps differ", message, evidence, hint)
    if values.shape[-2] == count:
        differs = _rows_differ(values[..., found : found + needed, :], expected_value, tolerance)
        if differs.any():
            message = "Cached values do not match their tokens: the values of this step were not appended."
            evidence["values that differ"] = int(differs.sum())
            hint = "Append new values in the same way as new keys."
            return piece.build_finding("cache: values missing", message, evidence, hint)
    return _check_mask(whole, piece, start, stop, first_key - found, evidence)


def _check_mask(
    whole: LoggedCall, piece: LoggedCall, start: int, stop: int, shift: int, evidence: dict[str, Any]
) -> Finding | None:
    """Compare the number of keys that each row attends to; `shift` is the position of the piece's key 0."""
    if whole.call.compact_mask.stored_arrays or piece.call.compact_mask.stored_arrays:
        return None
    expected = tuple(edge[..., start:stop] for edge in _intervals(whole))
    actual = tuple(edge + shift for edge in _intervals(piece))
    for row in range(stop - start):
        if all((a[..., row] == b[..., row]).all() for a, b in zip(expected, actual, strict=True)):
            continue
        counts = [int((edges[1][..., row] - edges[0][..., row]).max()) for edges in (expected, actual)]
        message = "A row of a cached step attends to different keys than in one pass over the whole sequence."
        evidence |= {
            "token": start + row,
            "keys it attends to": counts[1],
            "in the whole sequence": counts[0],
        }
        hint = (
            "Build the mask of a step from the positions of its tokens, aligned to the last key; count the "
        )
        hint += "token itself in a window."
        return piece.build_finding("cache: mask", message, evidence, hint)
    return None


def _intervals(logged: LoggedCall) -> tuple[Any, ...]:
    mask = logged.call.compact_mask
    return tuple(np.broadcast_arrays(mask.start, mask.stop))


def _find_visible_range(whole: LoggedCall, start: int, stop: int) -> tuple[int, int]:
    """Return the first key and the end of the keys that some rows of the whole sequence attend to."""
    if whole.call.compact_mask.stored_arrays:
        return 0, stop
    first, end = (edge[..., start:stop] for edge in _intervals(whole))
    return int(first.min(initial=0 if not first.size else first.max())), int(min(end.max(initial=0), stop))


def _rows_differ(a: Tensor, b: Tensor, tolerance: float) -> Any:
    """Return the tokens whose vectors differ, (n,)."""
    size = float(b.abs().amax()) or 1.0
    return ((a - b).abs().amax(-1).flatten(0, -2).amax(0) > tolerance * size).cpu().numpy()


def _count_lost(keys: Tensor, expected: Tensor, tolerance: float) -> int:
    """Count the expected keys that are not among the keys."""
    size = float(expected.abs().amax()) or 1.0
    difference = (expected[..., :, None, :] - keys[..., None, :, :]).abs().amax(-1)
    return int((difference.flatten(0, -3).amax(0) > tolerance * size).all(-1).sum())


# Where numbers leave the range of their dtype


def explain_not_finite(exam: Examination, origin: Origin, diagnosed: Findings) -> Finding:
    """Report the module in which NaN or inf began, and why, as far as it is known."""
    subject, names = exam.subject, list(exam.recording)
    inside = [name for name in names if not origin.module or is_around(name, origin.module)]
    for finding in diagnosed:
        if finding.kind in EXPLAINS_NAN and finding.module in inside:
            return finding
    inside = [] if origin.is_inside else inside
    layer = names.index(inside[0]) if inside else -1
    module = dict(subject.model.named_modules())[origin.module]
    evidence: dict[str, Any] = {"input" if origin.is_inside else "modules before": "finite"}
    message = f"They first appear {origin.describe()}"
    broken = {
        name: int((~weight.isfinite()).sum()) for name, weight in module.named_parameters(recurse=False)
    }
    if origin.is_inside and any(broken.values()):
        name = max(broken, key=broken.__getitem__)
        message += f", whose {name} has NaN or inf."
        evidence[f"in {name}"] = f"{broken[name]:,} of {getattr(module, name).numel():,}"
        hint = "Load the weights again, or look for the training step that broke them."
        return Finding("NaN or inf", "error", message, origin.module, layer, evidence=evidence, hint=hint)
    message += ", whose input is finite." if origin.is_inside else "; everything before it is finite."
    hint = "Check this step for a division by zero, a logarithm of zero, an overflow, or a row without keys."
    dtype = next((weight.dtype for weight in subject.model.parameters()), torch.float32)
    if dtype.itemsize == 2 and not why_no_float32(subject):
        is_finite = bool(_make_float32(subject).run_inputs().isfinite().all())
        subject.num_passes += 1
        evidence["same run in float32"] = "finite" if is_finite else "not finite"
        if is_finite:
            what = "The scores, or the softmax, overflow" if inside else "It overflows"
            message += f" {what} {str(dtype).removeprefix('torch.')}, since float32 gives finite numbers."
            hint = f"The largest number of this dtype is {torch.finfo(dtype).max:.3g}. Use bfloat16, or compute this "
            hint += "step in float32."
            if inside:
                hint += " F.scaled_dot_product_attention computes it in float32. Or scale the query before the product."
    if inside and any(exam.recording.calls(name)[0].weights is not None for name in inside):
        evidence["unknown"] = "query and key, since the layer computes its own softmax"
    return Finding("NaN or inf", "error", message, origin.module, layer, evidence=evidence, hint=hint)


def why_no_float32(subject: Subject) -> str:
    """Say why the model cannot be run in float32; empty if it can."""
    weights = list(subject.model.parameters())
    if all(weight.dtype.itemsize >= 4 for weight in weights if weight.is_floating_point()):
        return "the model is in float32 or wider"
    if subject.user_forward is not None:
        return "forward= calls the model itself, not a copy"
    if any(hasattr(weight, "device_mesh") for weight in weights):
        return "the weights are split over ranks"
    nbytes = 4 * sum(weight.numel() for weight in weights)
    return f"a copy in float32 would need {nbytes / 2**30:.0f} GiB" if nbytes > MAX_COPY_BYTES else ""


def _make_float32(subject: Subject) -> Subject:
    """Return a copy of the model in float32, with the same inputs."""
    inputs = {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in subject.inputs.items()
    }
    wide = Subject(deepcopy(subject.model).float(), inputs)
    wide.keeps_inputs = subject.keeps_inputs
    return wide


def check_dtype(exam: Examination) -> Finding | None:
    """Run tokens in float32 as well: find the first module that half precision changes by more than rounding."""
    traces = []
    for subject in (exam.subject, _make_float32(exam.subject)):
        with subject.trace() as trace:
            subject.run(exam.tokens)
        traces.append(trace)
    exam.subject.num_passes += 1
    for event, wide in match_events(traces[0].events, traces[1].events):
        sizes = [_relative_norm(a, b) for a, b in ((event.input, wide.input), (event.output, wide.output))]
        if sizes[1] > BEYOND_ROUNDING and sizes[0] < BEYOND_ROUNDING / 10:
            dtype = str(next(exam.subject.model.parameters()).dtype).removeprefix("torch.")
            message = (
                f"The output of {event.name} ({event.class_name}) differs between {dtype} and float32 by "
            )
            message += "more than rounding, but its input does not."
            evidence = {"input": sizes[0], "output": sizes[1]}
            hint = "Compute positions, norms, scores and sums of this module in float32, and cast the result."
            return Finding("dtype", "warning", message, event.name, evidence=evidence, hint=hint)
    return None


def _relative_norm(a: Tensor | None, b: Tensor | None) -> float:
    """Return the norm of a difference relative to that of `b`; 0 if they cannot be compared."""
    if a is None or b is None or a.shape != b.shape:
        return 0.0
    a, b = widen(a), widen(b)
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


# How the model uses its weights


def find_silent_norms(calls: Sequence[LoggedCall]) -> dict[str, nn.Module]:
    """Return the norms inside attention layers that were not called while their layer ran, by name.

    Norms whose weights cannot be changed for an experiment, sharded ones and those without data, are left out.
    """
    called = {event.name for logged in calls for event in (*logged.norms, *logged.after)}
    found = {}
    for logged in calls:
        # Modules deeper inside, such as the compressors of DeepSeek V4, may need a longer text.
        for attribute, module in logged.owner.named_children():
            name = f"{logged.module}.{attribute}".lstrip(".")
            weights = list(module.parameters(recurse=False))
            if weights and name not in called and is_norm(name, module) and all(map(_is_changeable, weights)):
                found[name] = module
    return found


def _is_changeable(weight: Tensor) -> bool:
    """Return whether a weight is an ordinary tensor of floating-point numbers, which a DTensor is not."""
    has_data = not weight.is_meta and weight.numel() > 0
    return type(weight) is nn.Parameter and weight.is_floating_point() and has_data


def check_silent_norms(exam: Examination) -> list[Finding]:
    """Change the weights of norms that were not called, run again, and compare the outputs bit for bit."""
    silent = find_silent_norms(exam.calls)
    with _changed(list(silent.values())):
        if not torch.equal(exam.subject.run(exam.tokens), exam.probe_output):
            return []  # the model reads some of them without calling the module
    findings = []
    for logged in {logged.module: logged for logged in exam.calls}.values():
        prefix = f"{logged.module}." if logged.module else ""
        names = [name for name in silent if name.startswith(prefix)]
        if names:
            message = f"The layer does not call {' and '.join(names)}, and changing its weights does not change the "
            message += "output."
            hint = "Call it where the reference does: q_norm and k_norm on each head, before rotary positions. If "
            hint += "another mode of the model uses it, ignore this."
            evidence = {"norms": ", ".join(names), "largest change of the output": 0.0}
            kind = "weights without effect"
            findings.append(logged.build_finding(kind, message, evidence, hint, "warning"))
    return findings


@contextmanager
def _changed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Add 1 to the weights of modules, and restore them."""
    weights = {
        weight: weight.detach().clone() for module in modules for weight in module.parameters(recurse=False)
    }
    try:
        for weight in weights:
            weight.add_(1.0)
        yield
    finally:
        for weight, original in weights.items():
            weight.copy_(original)


def find_long_tables(subject: Subject) -> dict[str, nn.Embedding]:
    """Return the position tables that have a few more rows than the configuration has positions, by name."""
    modules = dict(subject.model.named_modules())
    found = {}
    for name, module in modules.items():
        if is_position_table(name, module):
            parts = name.split(".")
            around = [modules[".".join(parts[:depth])] for depth in range(len(parts) - 1, -1, -1)]
            configs = [getattr(outer, "config", None) for outer in around]
            limits = [getattr(config, "max_position_embeddings", None) for config in configs]
            limit = next((limit for limit in limits if isinstance(limit, int)), 0)
            if limit and 0 < module.num_embeddings - limit <= MAX_EXTRA_ROWS:
                found[name] = module
    return found


def check_position_tables(exam: Examination) -> Iterator[Finding]:
    """Check that a position table with rows for an offset, as in OPT and BART, is not read from its first row."""
    tables, rows = find_long_tables(exam.subject), dict[str, list[int]]()

    def log_rows(name: str) -> Any:
        def find_rows(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.shape[-1] == module.embedding_dim:
                first = output.detach().reshape(-1, module.embedding_dim)[:2]
                equal = (first[:, None] == module.weight.detach()).all(-1)
                # A row that occurs twice, such as zeros, does not tell its position.
                rows[name] = equal.int().argmax(1).tolist() if bool((equal.sum(1) == 1).all()) else []

        return find_rows

    handles = [module.register_forward_hook(log_rows(name)) for name, module in tables.items()]
    try:
        exam.subject.run(exam.tokens)
    finally:
        for handle in handles:
            handle.remove()
    for name, found in rows.items():
        if found == [0, 1]:
            count = tables[name].num_embeddings
            message = f"The first token reads row 0 of a table that has {count} rows: the offset of the positions is "
            message += "missing."
            evidence = {"rows": count, "rows read by the first tokens": "0, 1"}
            hint = "Add the offset to the positions (2 in OPT and BART); the rows before it are reserved."
            yield Finding("position table offset", "error", message, name, evidence=evidence, hint=hint)


# The table of experiments, and why each cannot be run


def _lacks_probe(exam: Examination) -> str:
    return exam.no_probe


def _lacks_silent_norms(exam: Examination) -> str:
    has_some = not exam.no_probe and find_silent_norms(exam.calls)
    return exam.no_probe or ("" if has_some else "the attention layers call all their norms")


def _lacks_long_tables(exam: Examination) -> str:
    has_some = not exam.no_probe and find_long_tables(exam.subject)
    return exam.no_probe or ("" if has_some else "no position table has more rows than positions")


def _lacks_outputs(exam: Examination) -> str:
    if exam.no_probe or exam.has_token_outputs:
        return exam.no_probe
    return f"the output has the shape {tuple(exam.probe_output.shape)}, not one vector per token"


def _lacks_batch(exam: Examination) -> str:
    inputs = [value for value in exam.subject.inputs.values() if isinstance(value, torch.Tensor)]
    output, batch = exam.probe_output, 1
    if exam.probe_tokens is None:
        if not inputs or not inputs[0].ndim:
            return "the inputs have no tensor with a batch axis"
        modules = exam.subject.model.modules()
        if inputs[0].ndim < 4 and any(getattr(module, "batch_first", True) is False for module in modules):
            return "batch_first is False, so the batch axis of the inputs is unknown"
        output, batch = exam.user_output, len(inputs[0])
    elif exam.no_probe:
        return exam.no_probe
    shape = tuple(output.shape)
    has_batch = shape[:1] == (batch,)
    return "" if has_batch else f"the output has the shape {shape}, whose first axis is not the batch"


def _lacks_causality(exam: Examination) -> str:
    return _lacks_outputs(exam) or ("" if exam.causal else "the model is not causal")


def _lacks_positions(exam: Examination) -> str:
    if _lacks_outputs(exam) or exam.with_positions:
        return _lacks_outputs(exam)
    takes = exam.subject.takes_positions
    return "the default positions are not 0, 1, 2, …" if takes else "the model does not accept position_ids"


def _lacks_mask(exam: Examination) -> str:
    if _lacks_outputs(exam):
        return _lacks_outputs(exam)
    if exam.tokens.shape[1] <= PADDING:
        return f"the model runs on only {exam.tokens.shape[1]} tokens, too few to pad"
    return "" if exam.subject.takes_mask else "the model does not accept attention_mask"


def _lacks_cache(exam: Examination) -> str:
    if _lacks_causality(exam) or not exam.subject.takes_cache:
        return _lacks_causality(exam) or "the model does not accept past_key_values"
    return "the model does not return past_key_values" if exam.subject.returns_cache is False else ""


def _lacks_mask_or_cache(exam: Examination) -> str:
    subject = exam.subject
    if subject.user_forward is not None or subject.user_cached is not None:
        return "forward= and cached= do not accept a mask together with a cache"
    if subject.is_encoder_decoder:
        return "the cache of an encoder-decoder model does not hold the padded source"
    return _lacks_mask(exam) or _lacks_cache(exam)


def _lacks_encoder(exam: Examination) -> str:
    if not exam.subject.is_encoder_decoder:
        return "not an encoder-decoder model"
    return "" if exam.subject.find_encoder() is not None else "no encoder was found"


def _lacks_source(exam: Examination) -> str:
    if not exam.subject.is_encoder_decoder:
        return "not an encoder-decoder model"
    return "" if "input_ids" in exam.subject.inputs else "the source does not consist of token ids"


EXPERIMENTS: tuple[Check[Examination], ...] = (
    Check("repeated run", check_repeated),
    Check("encoder states", check_encoder, _lacks_encoder),
    Check("cross-attention states", check_cross_states, _lacks_source),
    Check("batch entries", check_batch, _lacks_batch),
    Check(
        "projections",
        lambda exam: check_projections(exam.calls, exam.tokens.shape[1], exam.subject.find_width()),
        _lacks_probe,
    ),
    Check("rotary positions", check_turns, _lacks_probe),
    Check("norms without effect", check_silent_norms, _lacks_silent_norms),
    Check("position tables", check_position_tables, _lacks_long_tables),
    Check("future token", check_future_token, _lacks_causality),
    Check("previous token", check_previous_token, _lacks_outputs),
    Check("swapped tokens", check_swapped_tokens, _lacks_outputs),
    Check("shifted positions", check_shifted_positions, _lacks_positions),
    Check("padding on the right", partial(check_padded, side="right"), _lacks_mask),
    Check("padding on the left", partial(check_padded, side="left"), _lacks_mask),
    Check("cache, single steps", partial(check_cached, chunks=False), _lacks_cache),
    Check("cache, chunks of three", partial(check_cached, chunks=True), _lacks_cache),
    Check("padding with a cache", check_padded_cache, _lacks_mask_or_cache),
    Check("dtype against float32", check_dtype, lambda exam: exam.no_probe or why_no_float32(exam.subject)),
)
