"""`doctor`: run a model on its inputs and on changed ones, and report what is wrong with its attention."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from regard.capture.module_trace import ModuleTrace, is_around
from regard.diagnosis import behaviour
from regard.diagnosis.cached_run import check_cached_calls, choose_sizes
from regard.diagnosis.call_log import CallLog, LoggedCall, log_calls
from regard.diagnosis.number_range import check_dtype, explain_not_finite, why_no_float32
from regard.diagnosis.projections import check_encoder_states, check_projections
from regard.diagnosis.rotary import NUM_TOKENS, check_rotary
from regard.diagnosis.subject import (
    CachedForward,
    Forward,
    Subject,
    relative_difference,
    tolerance_of,
)
from regard.diagnosis.weight_use import (
    check_position_tables,
    check_silent_norms,
    find_long_tables,
    find_silent_norms,
)
from regard.errors import ArgumentTypeError, NotCapturedError, RegardError, describe_argument
from regard.findings import Check, CheckRun, Finding, Findings, Severity, run_check
from regard.lens.diagnose import NOTHING_RECORDED
from regard.lens.recording import EmptyRecordingWarning, Recording
from regard.lens.token_rows import TokenRows
from regard.lens.watch import find_native_parts, watch

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

    The model runs on the inputs under the lens, and `Recording.diagnose` checks what was captured. If there is NaN or
    inf, the module in which it began is reported, and nothing else. Then the model runs at most 60 times on short
    sequences of the same tokens: again, with another last token, with two tokens swapped, padded on either side and
    alone, with shifted positions, in pieces with a cache, padded and with a cache, in float32, with one token
    everywhere to measure how rotary positions turn queries and keys. Queries, keys and outputs are compared with the
    linear layers around them, and where outputs differ that should not, the module in which it begins is named. No
    reference is needed: what is checked holds for every model.

    The result lists the experiments that were run, and the others with the reason. The parameters of the model decide:
    `attention_mask`, `position_ids`, `past_key_values` and `use_cache`, as in transformers; wrappers such as DDP, peft
    and modules that pass their arguments on are looked through. For other models, `forward` and `cached` say how to
    call them.

    Args:
        model: The model. It runs in eval mode, without gradients, and is left as it was.
        inputs: Token ids, (batch, n), or a mapping with the keyword arguments of the model, such as a tokenizer
            returns.
        causal: True if no token may attend to later ones, False if any may. By default it is inferred: from the masks
            of most layers, or because the model returns a cache. The findings' `scope` says so.
        forward: A function of token ids and attention mask, (batch, n) each, that returns the outputs of all tokens,
            (batch, n, …), if `model(input_ids=…, attention_mask=…)` does not.
        cached: A function of token ids, (batch, n), and the sizes of pieces. It runs them one after another with a
            cache, and returns the outputs of all tokens, (batch, n, …).
        tokens: The tokens as texts, for diagnose; "[PAD]" marks padding if there is no attention mask.
        recording: A recording of the model on these inputs, if there already is one.

    Returns:
        Findings with severity, location, evidence and hint, and the checks and experiments that were run or not.

    Raises:
        ArgumentTypeError: If `model` is not a module, or `inputs` neither a tensor nor a mapping.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True, dropout=0.0)
    >>> regard.doctor(layer, torch.randn(2, 5, 8))
    Nothing found in 1 layer, 2 heads by 4 forward passes; bidirectional (inferred).
    ...
    not run  future token: the inputs have no token ids
    ...
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
        self.checks: list[CheckRun] = []
        self.recording = Recording()
        self.first: Tensor = None  # the output of the user's inputs
        # Of the first probe alone: its tokens, output and calls; `no_probe` says why there are none.
        self.tokens: Tensor = None
        self.base: Tensor = None
        self.calls: list[LoggedCall] = []
        self.no_probe = "the inputs have no token ids"
        self.with_positions = False

    def run(self, tokens: Any, recording: Recording | None) -> Findings:
        """Run all experiments.

        Args:
            tokens: The tokens as texts, or None.
            recording: A recording of the model on the inputs, or None.

        Returns:
            The findings.
        """
        trace = self._record(recording)
        attention_mask = self.subject.inputs.get("attention_mask") if recording is None else None
        diagnosed = self._diagnose(self.recording, tokens, attention_mask)
        origin = None if bool(self.first.isfinite().all()) else trace.find_not_finite()
        if origin is not None:
            found = explain_not_finite(self.subject, origin, self.recording, diagnosed)
            self.checks = [CheckRun("NaN or inf")]
            self.checks += [CheckRun(check.name, "the output is not finite") for check in EXPERIMENTS]
            return Findings([found], f"{diagnosed.scope} by {self._count_passes()}", self.checks)
        self.causal, how = self._infer_causal()
        if self.stated is None and self.causal != self._has_causal_layer():
            diagnosed = self._diagnose(self.recording, tokens, attention_mask, self.causal)
        self.findings += diagnosed
        self.checks += diagnosed.checks
        self._run_probe()
        for check in EXPERIMENTS:
            self._try(check)
        word = "causal" if self.causal else "bidirectional"
        scope = f"{diagnosed.scope} by {self._count_passes()}; {word} ({how})"
        return Findings(self._merge(), scope, self.checks)

    def _count_passes(self) -> str:
        count = self.subject.num_passes
        return f"{count} forward pass{'es' * (count != 1)}"

    def has_errors(self, *kinds: str) -> bool:
        """Return whether an error of one of these kinds was found."""
        return any(finding.severity == "error" and finding.kind in kinds for finding in self.findings)

    def _record(self, recording: Recording | None) -> ModuleTrace:
        """Run the inputs under the lens, unless there is a recording, and trace which numbers are finite."""
        trace = ModuleTrace(max_rows=0)
        handles = list(trace.attach(self.subject.model, find_native_parts(self.subject.model)))
        self.recording = Recording() if recording is None else recording
        watched = nullcontext(recording) if recording is not None else watch(self.subject.model)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EmptyRecordingWarning)  # `diagnose` reports it
                with watched as self.recording:
                    self.first = self.subject.run_inputs()
        except NotCapturedError:
            pass  # `diagnose` reports it
        finally:
            for handle in handles:
                handle.remove()
        return trace

    def _diagnose(
        self, recording: Recording, tokens: Any, attention_mask: Any, causal: bool | None = None
    ) -> Findings:
        causal = self.stated if causal is None else causal
        try:
            return recording.diagnose(tokens, attention_mask, causal)
        except RegardError:  # the mask is that of another part of the model, or the tokens are
            return recording.diagnose(causal=causal)

    def _infer_causal(self) -> tuple[bool, str]:
        """Decide whether the model should be causal, and say how."""
        if self.stated is not None:
            return self.stated, "as stated"
        if self._has_causal_layer():
            return True, "inferred"
        if self.subject.declares_bidirectional:
            return False, "as configured"
        if self.subject.returns_cache:
            return True, "inferred from the cache"
        return False, "inferred"

    def _has_causal_layer(self) -> bool:
        return any(layer.causal for layer in self.recording._checked_layers(self.stated))

    def _run_probe(self) -> None:
        """Run the first of two short sequences of the user's tokens, for the experiments to compare with."""
        subject = self.subject
        if subject.tokens_name is None:
            return
        for keeps_inputs, keeps_length in ((False, False), (True, False), (True, True)):
            subject.keeps_inputs, subject.keeps_length = keeps_inputs, keeps_length
            self.tokens = subject.probe_tokens()
            try:
                self.base, self.calls = self._run_base(self.tokens[:1])
                self.no_probe = ""
                break
            except Exception as error:  # the model does not run on text alone, or on texts of this length
                self.no_probe = f"the model does not run on other tokens: {_format_error(error)}"
        if self.no_probe:
            return
        if self.has_token_outputs:
            self.with_positions = behaviour.accepts_positions(subject, self.tokens[:1], self.base)

    @property
    def has_token_outputs(self) -> bool:
        """Whether the output has a vector for each token."""
        return bool(self.base.ndim > 2 and self.base.shape[1] == self.tokens.shape[1])

    @property
    def has_table(self) -> bool:
        """Whether positions are looked up in a table."""
        return any(lookup.is_table for lookup in self.recording._module_hints.lookups)

    def _try(self, check: Check[Examination]) -> None:
        """Run an experiment and keep its findings; a model that does not support it is no finding."""
        changing = next((kind for kind in UNSTABLE if self.has_errors(kind)), None)
        if changing is not None:
            self.checks.append(CheckRun(check.name, f"outputs cannot be compared: {changing}"))
            return
        try:
            found, run = run_check(check, self)
        except Exception as error:  # whatever the model raises on inputs that are not its user's
            found, run = [], CheckRun(check.name, f"the model raised {_format_error(error)}")
        self.findings += found
        self.checks.append(run)

    # Experiments

    def check_state(self) -> list[Finding]:
        """Run the inputs again; if the output changes, find out whether keys were left behind."""
        with log_calls(self.subject.model, linears=False) as log:
            found = behaviour.check_repeated(self.subject, self.first)
        if not found:
            return []
        for logged in log.calls:
            before = (
                [call.shape[-1] for call in self.recording.calls(logged.module)]
                if logged.module in self.recording
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
        return found

    def check_encoder(self) -> list[Finding]:
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

    def check_cross_states(self) -> list[Finding]:
        """Change a token of the source, and compare queries and keys."""

        def log_run(source: Tensor) -> list[LoggedCall]:
            with log_calls(self.subject.model, linears=False) as log:
                self.subject.run_source(source)
            return log.calls

        return behaviour.check_cross_states(self.subject, log_run)

    def _run_base(self, tokens: Tensor) -> tuple[Tensor, list[LoggedCall]]:
        """Run tokens, and return the output and the calls."""
        with log_calls(self.subject.model) as log:
            base = self.subject.run(tokens)
        return base, log.calls

    def check_projections(self) -> list[Finding]:
        """Compare queries, keys and outputs of the probe with the linear layers around them."""
        return check_projections(self.calls, self.tokens.shape[1], self.subject.find_width())

    def check_padded(self, side: str) -> list[Finding]:
        """Run a padded batch; the checks of what was captured come first, since they name the cause."""
        subject = self.subject
        shifts = any(finding.kind == "positions are not relative" for finding in self.findings)
        is_relative = not self.has_table and not shifts
        found = behaviour.check_padded(subject, self.tokens, side, self.with_positions, is_relative)
        if not found or found[0].kind == "positions of padded tokens" or subject.is_encoder_decoder:
            return found
        padded, mask = behaviour.make_padded(subject, self.tokens, side)
        with log_calls(subject.model, linears=False) as log:
            subject.run(padded, mask)
        recording = Recording()
        for logged in log.calls:
            recording._add(logged.call)
        recording._module_hints.causal = log.recording._module_hints.causal
        causal = self.stated if self.stated is not None else self.causal or None
        causes = self._diagnose(recording, None, mask, causal).by_severity("error") if len(recording) else []
        return list(causes) or found

    def check_cached(self, chunks: bool) -> list[Finding]:
        """Run the probe in pieces with a cache: single steps, or chunks."""
        sizes = choose_sizes(self.tokens.shape[1])[chunks]
        return self._check_cached(self.tokens[:1], self.base, self.calls, sizes)

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

    def check_rotary(self) -> list[Finding]:
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
        return [] if self.has_errors(*AXES) else check_rotary(calls, self.subject.config)

    # Findings

    def _merge(self) -> list[Finding]:
        """Return each finding once, without symptoms that a cause in the same place explains."""
        layers = {name: number for number, name in enumerate(self.recording)}
        errors = [
            finding
            for finding in self.findings
            if finding.severity == "error" and finding.kind != NOTHING_RECORDED
        ]
        wrong_axes = {finding.module for finding in self.findings if finding.kind in AXES}
        merged: dict[tuple[Any, ...], Finding] = {}
        for finding in self.findings:
            if finding.kind in SYMPTOMS and any(_explains(error, finding) for error in errors):
                continue
            if finding.module in wrong_axes and finding.kind not in AXES:
                continue  # its rows are not tokens
            if finding.layer < 0 and finding.module:
                around = (name for name in layers if is_around(name, finding.module))
                finding = replace(finding, layer=layers.get(next(around, ""), -1))
            merged.setdefault((finding.kind, finding.module), finding)
        return list(merged.values())


def _explains(cause: Finding, symptom: Finding) -> bool:
    """Return whether a cause explains a symptom: it is in the same place, or of a kind that does."""
    if cause.kind.startswith(SYMPTOMS[symptom.kind]) and cause.kind != symptom.kind:
        return True
    return cause.kind not in SYMPTOMS and bool(symptom.module) and is_around(cause.module, symptom.module)


# The table of experiments


def _lacks_probe(examination: Examination) -> str:
    return examination.no_probe


def _lacks_silent_norms(examination: Examination) -> str:
    has_some = not examination.no_probe and find_silent_norms(examination.calls)
    return examination.no_probe or (
        "" if has_some else "the attention layers call all norms that can be changed"
    )


def _lacks_long_tables(examination: Examination) -> str:
    has_some = not examination.no_probe and find_long_tables(examination.subject)
    return examination.no_probe or ("" if has_some else "no position table has more rows than positions")


def _lacks_outputs(examination: Examination) -> str:
    if examination.no_probe or examination.has_token_outputs:
        return examination.no_probe
    return f"the output has the shape {tuple(examination.base.shape)}, and no vector for each token"


def _lacks_batch(examination: Examination) -> str:
    inputs = [value for value in examination.subject.inputs.values() if isinstance(value, torch.Tensor)]
    if examination.tokens is not None:
        return examination.no_probe or _lacks_entries(examination.base, 1)
    if not inputs or not inputs[0].ndim:
        return "the inputs have no tensor with an axis for the batch"
    modules = examination.subject.model.modules()
    if inputs[0].ndim < 4 and any(getattr(module, "batch_first", True) is False for module in modules):
        return "batch_first is False, so it is not known which axis of the inputs is the batch"
    return _lacks_entries(examination.first, len(inputs[0]))


def _lacks_entries(output: Tensor, batch: int) -> str:
    """Say that the first axis of an output is not the batch; empty if it is."""
    shape = tuple(output.shape)
    return (
        ""
        if shape[:1] == (batch,)
        else f"the output has the shape {shape}, whose first axis is not the batch"
    )


def _is_bidirectional(examination: Examination) -> str:
    return _lacks_outputs(examination) or ("" if examination.causal else "the model is not causal")


def _lacks_positions(examination: Examination) -> str:
    if _lacks_outputs(examination) or examination.with_positions:
        return _lacks_outputs(examination)
    takes = examination.subject.takes_positions
    return "its own positions are not 0, 1, 2, …" if takes else "the model takes no position_ids"


def _lacks_mask(examination: Examination) -> str:
    if _lacks_outputs(examination):
        return _lacks_outputs(examination)
    if examination.tokens.shape[1] <= behaviour.PADDING:
        return f"the model runs on {examination.tokens.shape[1]} tokens only, too few to pad"
    return "" if examination.subject.takes_mask else "the model takes no attention_mask"


def _lacks_cache(examination: Examination) -> str:
    subject = examination.subject
    if _is_bidirectional(examination) or not subject.takes_cache:
        return _is_bidirectional(examination) or "the model takes no past_key_values"
    return "the model returns no past_key_values" if subject.returns_cache is False else ""


def _lacks_mask_or_cache(examination: Examination) -> str:
    subject = examination.subject
    if subject.user_forward is not None or subject.user_cached is not None:
        return "forward= and cached= take no mask together with a cache"
    if subject.is_encoder_decoder:
        return "the padding of an encoder-decoder model is not in its cache of tokens"
    return _lacks_mask(examination) or _lacks_cache(examination)


def _lacks_encoder(examination: Examination) -> str:
    if not examination.subject.is_encoder_decoder:
        return "it is no encoder-decoder model"
    return "" if examination.subject.find_encoder() is not None else "no encoder was found"


def _lacks_source(examination: Examination) -> str:
    subject = examination.subject
    if not subject.is_encoder_decoder:
        return "it is no encoder-decoder model"
    return "" if "input_ids" in subject.inputs else "the source is not token ids"


def _check_future(examination: Examination) -> list[Finding]:
    one, is_inferred = examination.tokens[:1], examination.stated is None
    return behaviour.check_future_token(examination.subject, one, examination.base, is_inferred)


EXPERIMENTS: tuple[Check[Examination], ...] = (
    Check("repeated run", Examination.check_state),
    Check("encoder states", Examination.check_encoder, _lacks_encoder),
    Check("cross-attention states", Examination.check_cross_states, _lacks_source),
    Check("batch entries", lambda e: behaviour.check_batch(e.subject, e.tokens), _lacks_batch),
    Check("projections", Examination.check_projections, _lacks_probe),
    Check("rotary positions", Examination.check_rotary, _lacks_probe),
    Check(
        "norms without effect",
        lambda e: check_silent_norms(e.subject, e.tokens[:1], e.base, e.calls),
        _lacks_silent_norms,
    ),
    Check("position tables", lambda e: check_position_tables(e.subject, e.tokens[:1]), _lacks_long_tables),
    Check("future token", _check_future, _is_bidirectional),
    Check(
        "previous token",
        lambda e: behaviour.check_previous_token(e.subject, e.tokens[:1], e.base),
        _lacks_outputs,
    ),
    Check(
        "swapped tokens",
        lambda e: behaviour.check_swapped_tokens(e.subject, e.tokens[:1], e.base),
        _lacks_outputs,
    ),
    Check(
        "shifted positions",
        lambda e: behaviour.check_shifted_positions(e.subject, e.tokens[:1], e.base, e.has_table),
        _lacks_positions,
    ),
    Check("padding on the right", lambda e: e.check_padded("right"), _lacks_mask),
    Check("padding on the left", lambda e: e.check_padded("left"), _lacks_mask),
    Check("cache, single steps", lambda e: e.check_cached(chunks=False), _lacks_cache),
    Check("cache, chunks of three", lambda e: e.check_cached(chunks=True), _lacks_cache),
    Check(
        "padding with a cache",
        lambda e: behaviour.check_padded_cache(e.subject, e.tokens),
        _lacks_mask_or_cache,
    ),
    Check(
        "dtype against float32",
        lambda e: check_dtype(e.subject, e.tokens[:1]),
        lambda e: _lacks_probe(e) or why_no_float32(e.subject),
    ),
)

# Findings about outputs that change from run to run.
UNSTABLE = ("dropout", "not deterministic", "state kept between calls")
# A buffer that takes more bytes is not copied to be restored.
MAX_BUFFER_BYTES = 1 << 26
# Findings about layers whose rows are not tokens.
AXES = ("heads and tokens swapped", "heads split by view")
# Findings about outputs, and the beginnings of the kinds of error that explain each wherever they are. So does any
# cause in the place where the outputs begin to differ.
# fmt: off
SYMPTOMS: dict[str, tuple[str, ...]] = {
    "future leaks": (),
    "batch entries mixed": (),
    "not deterministic": (),
    "padding changes the output": (
        "weight on padding", "cross-attention", "inverted", "mask of 0", "padding mask", "padding masked", "positions",
        "rotary", "fully masked", "batch entries mixed",
    ),
    "positions of padded tokens": ("rotary",),
    "cached steps differ": (
        "cache:", "positions", "rotary", "heads", "causal alignment", "weight on the future", "future leaks", "padding",
        "fully masked", "inverted", "own key", "state kept", "window",
    ),
    "cache: mask": ("weight on the future", "window"),
    "fully masked rows": ("inverted",),
    "left padding shifts positions": ("positions", "rotary", "cross-attention", "weight on padding", "batch"),
    "positions are not relative": ("positions", "rotary", "heads"),
    "position ids ignored": ("positions", "rotary", "heads"),
    "tokens do not reach each other": (
        "heads", "inverted", "own key", "softmax", "fully masked", "causal alignment", "batch entries mixed",
    ),
}
# fmt: on


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to eval mode; restore the mode, the buffers and the state of each module, and random numbers."""
    modules = list(model.modules())
    modes = [(module, module.training) for module in modules]
    deltas = [(module, module.rope_deltas) for module in modules if hasattr(module, "rope_deltas")]
    buffers = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items()]
    copies = [_copy_buffer(buffer) for _, _, buffer in buffers]
    devices = {weight.device for weight in model.parameters() if weight.is_cuda}
    model.eval()
    try:
        with torch.random.fork_rng(list(devices)):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for module, rope_deltas in deltas:
            module.rope_deltas = rope_deltas
        for (module, name, buffer), copied in zip(buffers, copies, strict=True):
            module._buffers[name] = buffer
            if copied is not None and buffer._version != copied[0]:
                buffer.copy_(copied[1])


def _copy_buffer(buffer: Tensor | None) -> tuple[int, Tensor] | None:
    """Return the version and a copy of a buffer; None for those that are too large, which are packed weights."""
    if buffer is None or buffer.is_meta or buffer.nbytes > MAX_BUFFER_BYTES:
        return None
    return buffer._version, buffer.clone()
