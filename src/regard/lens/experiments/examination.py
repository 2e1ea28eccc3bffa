"""`doctor`: run a model on its inputs and on changed ones, and report what is wrong with its attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from regard.errors import ArgumentTypeError, NotCapturedError, RegardError, describe_argument
from regard.findings import Finding, Findings, Severity
from regard.lens.analysis.diagnose import NOTHING_RECORDED
from regard.lens.analysis.token_rows import TokenRows
from regard.lens.experiments import behaviour
from regard.lens.experiments.cached_run import check_cached_calls, choose_sizes
from regard.lens.experiments.call_log import CallLog, LoggedCall, log_calls
from regard.lens.experiments.projections import check_encoder_states, check_projections
from regard.lens.experiments.rotary import NUM_TOKENS, check_rotary
from regard.lens.experiments.subject import (
    CachedForward,
    Forward,
    Subject,
    relative_difference,
    tolerance_of,
)
from regard.lens.experiments.weight_use import check_position_tables, check_silent_norms
from regard.lens.recording import Recording
from regard.lens.watch import watch

Tensor = Any  # the types of torch are not followed


def doctor(
    model: nn.Module,
    inputs: Any,
    *,
    causal: bool | None = None,
    forward: Forward | None = None,
    cached: CachedForward | None = None,
    tokens: Any = None,
    recording: Recording | None = None,
) -> Findings:
    """Diagnose the attention of a model by experiment: run it on changed inputs, and compare.

    The model runs on the inputs under the lens, and `Recording.diagnose` checks what was captured. Then it runs about
    twenty times on short sequences of the same tokens: again, with another last token, with two tokens swapped, padded
    on either side and alone, with shifted positions, in pieces with a cache, with one token everywhere to measure how
    rotary positions turn queries and keys. Queries, keys and outputs are compared with the linear layers around them.
    No reference is needed: what is checked holds for every model.

    An experiment that the model does not support is skipped. Its parameters decide: `attention_mask`, `position_ids`,
    `past_key_values` and `use_cache`, as in transformers. For other models, `forward` and `cached` say how to call
    them.

    Args:
        model: The model. It runs in eval mode, without gradients, and is left as it was.
        inputs: Token ids, (batch, n), or a mapping with the keyword arguments of the model, such as a tokenizer
            returns.
        causal: True if no token may attend to later ones, False if any may. By default it is inferred: from the masks
            of most layers, or because there is a cache. The findings' `scope` says so.
        forward: A function of token ids and attention mask, (batch, n) each, that returns the outputs of all tokens,
            (batch, n, …), if `model(input_ids=…, attention_mask=…)` does not.
        cached: A function of token ids, (batch, n), and the sizes of pieces. It runs them one after another with a
            cache, and returns the outputs of all tokens, (batch, n, …).
        tokens: The tokens as texts, for diagnose; "[PAD]" marks padding if there is no attention mask.
        recording: A recording of the model on these inputs, if there already is one.

    Returns:
        Findings with severity, location, evidence and hint. Layer −1 stands for the whole model.

    Raises:
        ArgumentTypeError: If `model` is not a module, or `inputs` neither a tensor nor a mapping.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True, dropout=0.0)
    >>> regard.lens.doctor(layer, torch.randn(2, 5, 8))
    Nothing found in 1 layer, 2 heads by 4 forward passes; bidirectional (inferred).
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            "doctor",
            received=describe_argument(model),
            expected="a torch.nn.Module",
            hint="Pass the model itself, and forward= for how to call it.",
        )
    subject = Subject(model, inputs, forward, cached)
    with _in_eval_mode(model), torch.no_grad():
        return Examination(subject, causal).run(tokens, recording)


class Examination:
    """One run of `doctor`.

    Args:
        subject: The model.
        causal: What the user stated, or None.
    """

    def __init__(self, subject: Subject, causal: bool | None) -> None:
        self.subject, self.stated = subject, causal
        self.causal = bool(causal)
        self.findings: list[Finding] = []
        self.skipped: dict[str, str] = {}
        self.has_compared_outputs = True

    def run(self, tokens: Any, recording: Recording | None) -> Findings:
        """Run all experiments.

        Args:
            tokens: The tokens as texts, or None.
            recording: A recording of the model on the inputs, or None.

        Returns:
            The findings.
        """
        subject = self.subject
        given = recording
        first, recording = self._record(recording)
        attention_mask = subject.inputs.get("attention_mask") if given is None else None
        diagnosed = self._diagnose(recording, tokens, attention_mask)
        self.causal, how = self._infer_causal(recording)
        if self.stated is None and self.causal != self._has_causal_layer(recording):
            diagnosed = self._diagnose(recording, tokens, attention_mask, self.causal)
        self.findings += diagnosed
        self._try("repeated run", lambda: self._check_state(first, recording))
        if not self._has_errors("dropout", "not deterministic", "state kept between calls", "NaN or inf"):
            if subject.is_encoder_decoder:
                self._try("encoder states", self._check_encoder)
            if subject.tokens_name is not None:
                self._run_on_tokens(recording)
            else:
                self._try("batch", lambda: behaviour.check_batch(subject, None))
        word = "causal" if self.causal else "bidirectional"
        scope = f"{diagnosed.scope} by {subject.num_passes} forward passes; {word} ({how})"
        return Findings(self._merge(), scope)

    def _has_errors(self, *kinds: str) -> bool:
        """Return whether an error of the model was found: of these kinds, or of any if none is passed."""
        errors = [
            finding
            for finding in self.findings
            if finding.severity == "error" and finding.kind != NOTHING_RECORDED
        ]
        return any(not kinds or finding.kind in kinds for finding in errors)

    def _record(self, recording: Recording | None) -> tuple[Tensor, Recording]:
        """Run the inputs under the lens, unless there is a recording."""
        if recording is not None:
            return self.subject.run_inputs(), recording
        watched = watch(self.subject.model)
        try:
            with watched as recording:
                output = self.subject.run_inputs()
        except NotCapturedError:
            pass  # `diagnose` reports it
        return output, recording  # type: ignore[return-value]

    def _diagnose(
        self, recording: Recording, tokens: Any, attention_mask: Any, causal: bool | None = None
    ) -> Findings:
        causal = self.stated if causal is None else causal
        try:
            return recording.diagnose(tokens, attention_mask, causal)
        except RegardError:  # the mask is that of another part of the model, or the tokens are
            return recording.diagnose(causal=causal)

    def _infer_causal(self, recording: Recording) -> tuple[bool, str]:
        """Decide whether the model should be causal, and say how."""
        if self.stated is not None:
            return self.stated, "as stated"
        if self._has_causal_layer(recording):
            return True, "inferred"
        if self.subject.user_cached is not None:
            return True, "inferred from the cache"
        return False, "inferred"

    def _has_causal_layer(self, recording: Recording) -> bool:
        return any(layer.causal for layer in recording._checked_layers(self.stated))

    def _try(self, name: str, experiment: Callable[[], list[Finding]]) -> list[Finding]:
        """Run an experiment and keep its findings; a model that does not support it is no finding."""
        try:
            found = experiment()
        except Exception as error:  # whatever the model raises on inputs that are not its user's
            self.skipped[name] = _format_error(error)
            return []
        self.findings += found
        return found

    # Experiments

    def _check_state(self, first: Tensor, recording: Recording) -> list[Finding]:
        """Run the inputs again; if the output changes, find out whether keys were left behind."""
        with log_calls(self.subject.model, linears=False) as log:
            found = behaviour.check_repeated(self.subject, first)
        if not found:
            return []
        for logged in log.calls:
            before = (
                [call.shape[-1] for call in recording.calls(logged.module)]
                if logged.module in recording
                else []
            )
            now = logged.key.shape[-2]
            if before and now > max(before):
                return [
                    Finding(
                        "state kept between calls",
                        "error",
                        "A second call on the same inputs attends to the keys of the first: its cache was kept.",
                        logged.module,
                        logged.layer,
                        evidence={"keys of the first call": max(before), "keys of the second": now},
                        hint="Create the cache in each call, or clear it before a new sequence.",
                    )
                ]
        return [] if self._has_errors("dropout") else found

    def _check_encoder(self) -> list[Finding]:
        """Compare the states that cross-attention reads with the output of the encoder."""
        encoder, encoded = self.subject.find_encoder(), []
        if encoder is None:
            return []
        handle = encoder.register_forward_hook(lambda module, args, output: encoded.append(output))
        try:
            with log_calls(self.subject.model) as log:
                self.subject.run_inputs()
        finally:
            handle.remove()
        if not encoded:
            return []
        output = encoded[-1]
        states = output if isinstance(output, torch.Tensor) else output[0]
        return check_encoder_states(log.calls, states)

    def _run_on_tokens(self, recording: Recording) -> None:
        """Run the experiments on short sequences of the user's tokens."""
        subject = self.subject
        tokens = subject.probe_tokens()
        try:
            base, calls = self._run_base(tokens[:1])
        except Exception:  # the model does not run on text alone
            subject.keeps_inputs = True
            try:
                base, calls = self._run_base(tokens[:1])
            except Exception as error:
                self.skipped["other tokens"] = _format_error(error)
                return
        self._try("batch", lambda: behaviour.check_batch(subject, tokens))
        width = subject.find_width()
        self._try("projections", lambda: check_projections(calls, tokens.shape[1], width))
        self._try("rotary positions", self._check_rotary)
        self._try("norms without effect", lambda: check_silent_norms(subject, tokens[:1], base, calls))
        self._try("position tables", lambda: check_position_tables(subject, tokens[:1]))
        if base.ndim < 3 or base.shape[1] != tokens.shape[1]:
            self.skipped["outputs of tokens"] = f"the output has the shape {tuple(base.shape)}"
        elif self._has_errors():
            self.has_compared_outputs = False
        else:
            self._run_on_outputs(tokens, base, calls, recording)

    def _run_base(self, tokens: Tensor) -> tuple[Tensor, list[LoggedCall]]:
        """Run tokens, and return the output and the calls."""
        with log_calls(self.subject.model) as log:
            base = self.subject.run(tokens)
        return base, log.calls

    def _run_on_outputs(
        self, tokens: Tensor, base: Tensor, calls: list[LoggedCall], recording: Recording
    ) -> None:
        """Run the experiments that compare the outputs of tokens."""
        subject, one = self.subject, tokens[:1]
        if self.causal:
            is_inferred = self.stated is None
            self._try("future token", lambda: behaviour.check_future_token(subject, one, base, is_inferred))
        self._try("previous token", lambda: behaviour.check_previous_token(subject, one, base))
        self._try("swapped tokens", lambda: behaviour.check_swapped_tokens(subject, one, base))
        with_positions = behaviour.accepts_positions(subject, one, base)
        if with_positions:
            has_table = any(lookup.is_table for lookup in recording._module_hints.lookups)
            self._try(
                "shifted positions",
                lambda: behaviour.check_shifted_positions(subject, one, base, has_table),
            )
        if subject.takes_mask:
            for side in ("right", "left"):
                self._try(
                    f"padding on the {side}",
                    partial(self._check_padded, tokens, side, with_positions),
                )
        if subject.takes_cache and self.causal:
            for sizes in choose_sizes(one.shape[1]):
                name = f"cache, pieces of {sizes[1]}"
                if self._try(name, partial(self._check_cached, one, base, calls, sizes)):
                    break

    def _check_padded(self, tokens: Tensor, side: str, with_positions: bool) -> list[Finding]:
        """Run a padded batch; the checks of what was captured come first, since they name the cause."""
        subject = self.subject
        _, mask = behaviour.make_padded(subject, tokens, side)
        with log_calls(subject.model, linears=False) as log:
            found = behaviour.check_padded(subject, tokens, side, with_positions)
        if not found:
            return []
        recording = Recording()
        for logged in log.calls:
            if logged.call.shape[0] == len(tokens):
                recording._add(logged.call)
        recording._module_hints.causal = log.recording._module_hints.causal
        causes = (
            self._diagnose(recording, None, mask, self.stated).by_severity("error") if len(recording) else []
        )
        return list(causes) or found

    def _check_cached(
        self, tokens: Tensor, base: Tensor, whole: list[LoggedCall], sizes: tuple[int, ...]
    ) -> list[Finding]:
        """Run the tokens in pieces with a cache; if the outputs differ, find out which calls do."""
        error = None
        with log_calls(self.subject.model, linears=False) as log:
            try:
                output = self.subject.run_cached(tokens, sizes)
            except Exception as raised:  # a wrong cache may not fit its mask
                error = raised
        if error is None and output.shape == base.shape:
            difference = relative_difference(output, base)[0]
            if not float(difference.amax()) > tolerance_of(base):
                return []
        causes = self._explain_cached(log, whole, sizes)
        if error is not None and not causes:
            raise error
        if causes or output.shape != base.shape:
            return causes
        token = int((difference > tolerance_of(base)).nonzero()[0])
        message = "Tokens that run with a cache have other outputs than in the whole sequence."
        evidence = {"first token": token, "largest relative difference": float(difference.amax())}
        evidence["prefill"] = sizes[0]
        hint = "Compare positions, masks and cached keys of the first step that differs."
        severity: Severity = "error" if max(sizes[1:]) == 1 else "warning"
        return [Finding("cached steps differ", severity, message, "", -1, evidence=evidence, hint=hint)]

    def _explain_cached(self, log: CallLog, whole: list[LoggedCall], sizes: tuple[int, ...]) -> list[Finding]:
        """Find out what is wrong with a cached run, by its calls and by the checks of its recording."""
        by_calls = check_cached_calls(whole, log.calls, sizes)
        diagnosed = (
            self._diagnose(log.recording, None, None).by_severity("error") if len(log.recording) else []
        )
        # The recording knows why a mask or a key is wrong, unless the layers share a cache.
        if by_calls and not (diagnosed and by_calls[0].kind in ("cache: mask", "cache: keys do not grow")):
            return by_calls
        return list(diagnosed)

    def _check_rotary(self) -> list[Finding]:
        """Run one token everywhere, and measure how queries and keys turn."""
        length = self.subject.find_max_positions(NUM_TOKENS)
        token = self.subject.ordinary_ids()[:1]
        with log_calls(self.subject.model) as log:
            self.subject.run(token.expand(1, length).contiguous())
        calls = [
            logged
            for logged in log.calls
            if logged.call.query.ndim == 4
            and logged.call.shape[-2:] == (length, length)
            and TokenRows.from_call(logged.call).query_offset is not None
        ]
        return [] if self._has_errors(*_AXES) else check_rotary(calls, self.subject.config)

    # Findings

    def _merge(self) -> list[Finding]:
        """Return each finding once, without symptoms whose cause was found, and a note on what was skipped."""
        causes = {
            finding.kind for finding in self.findings if finding.layer >= 0 and finding.severity == "error"
        }
        wrong_axes = {finding.module for finding in self.findings if finding.kind in _AXES}
        merged: dict[tuple[Any, ...], Finding] = {}
        for finding in self.findings:
            if finding.layer < 0 and finding.kind in _SYMPTOMS and causes:
                continue
            if finding.module in wrong_axes and finding.kind not in _AXES:
                continue  # its rows are not tokens
            merged.setdefault((finding.kind, finding.module), finding)
        if self.skipped:
            message = "Some experiments were skipped."
            hint = (
                "If the model does not run on their inputs, pass forward= or cached= to say how it is called."
            )
            merged["skipped", ""] = Finding(
                "experiments skipped", "note", message, "", -1, evidence=self.skipped, hint=hint
            )
        if not self.has_compared_outputs:
            message = "The outputs of changed inputs were not compared, since the errors above change them."
            hint = "Fix the errors, and run doctor again."
            merged["outputs", ""] = Finding("experiments left out", "note", message, "", -1, hint=hint)
        return list(merged.values())


# Findings about layers whose rows are not tokens.
_AXES = ("heads and tokens swapped", "heads split by view")
# Findings about outputs. If a finding names a layer and a cause, these add nothing.
_SYMPTOMS = {
    "future leaks",
    "tokens do not reach each other",
    "padding changes the output",
    "left padding shifts positions",
    "cached steps differ",
    "not deterministic",
    "positions are not relative",
    "position ids ignored",
}


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to eval mode, and restore the mode and the state of each module."""
    modes = [(module, module.training) for module in model.modules()]
    deltas = [(module, module.rope_deltas) for module in model.modules() if hasattr(module, "rope_deltas")]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for module, rope_deltas in deltas:
            module.rope_deltas = rope_deltas
