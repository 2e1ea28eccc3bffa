"""`doctor`: run a model on its inputs and on changed ones, and report what is wrong with its attention."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from regard.capture.module_trace import ModuleTrace, Origin, is_around
from regard.diagnosis.experiments import AXES, EXPERIMENTS, Examination, explain_not_finite, format_error
from regard.diagnosis.subject import CachedForward, Forward, Subject
from regard.errors import ArgumentTypeError, NotCapturedError, describe_argument
from regard.findings import Check, CheckRun, Finding, Findings, run_check
from regard.lens.diagnose import NOTHING_RECORDED
from regard.lens.recording import EmptyRecordingWarning, Recording
from regard.lens.watch import find_native_parts, watch

Tensor = Any  # the types of torch are not followed

# Findings about outputs that change from run to run.
UNSTABLE = ("dropout", "not deterministic", "state kept between calls")
# A buffer that takes more bytes is not copied to be restored.
MAX_BUFFER_BYTES = 1 << 26
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
        "fully masked", "inverted", "own key", "state kept", "window", "NaN or inf",
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
    """Diagnose the attention of a model by experiment: run it on modified inputs and compare the outputs.

    A run of the model on the inputs is recorded, and `Recording.diagnose` checks the recording. If a value is NaN or
    inf, only the module where this began is reported. Otherwise the model runs at most 60 more times on short sequences
    of the same tokens: unchanged, with a different last token, with two tokens swapped, padded on either side, with
    shifted positions, in pieces with a cache, padded and with a cache, in float32, and with the same token at every
    position to measure rotary embeddings. Queries, keys and outputs are compared with the linear layers around them. If
    outputs that should be equal differ, the first module that differs is named. No reference model is needed, because
    every correct model passes these checks.

    The result lists the experiments that ran, and gives a reason for each experiment that did not run. An experiment
    runs if `forward` of the model has the parameters it needs: `attention_mask`, `position_ids`, `past_key_values` and
    `use_cache`, as in transformers. Wrappers such as DDP and peft are supported. For other models, pass `forward` and
    `cached`.

    Args:
        model: The model. It runs in eval mode without gradients; its state is restored afterwards.
        inputs: Token ids, (batch, n), or a mapping with the keyword arguments of the model, such as the output of a
            tokenizer.
        causal: True if no token may attend to later tokens, False if any may. By default, this is inferred from the
            masks of most layers, or from the cache if the model returns one, and `scope` of the findings says so.
        forward: A function of token ids and attention mask, (batch, n) each, that returns the outputs of all tokens,
            (batch, n, …). Needed if `model(input_ids=…, attention_mask=…)` does not return them.
        cached: A function of token ids, (batch, n), and the sizes of pieces. The function runs the pieces one after
            another with a cache, and returns the outputs of all tokens, (batch, n, …).
        tokens: The tokens as strings, for `Recording.diagnose`; "[PAD]" marks padding if there is no attention mask.
        recording: An existing recording of the model on these inputs.

    Returns:
        Findings with severity, location, evidence and hint, and lists of the checks and experiments that ran or were
        skipped.

    Raises:
        ArgumentTypeError: If `model` is not a module, or `inputs` is neither a tensor nor a mapping.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True, dropout=0.0)
    >>> regard.doctor(layer, torch.randn(2, 5, 8))
    No problems found in 1 layer, 2 heads with 4 forward passes; bidirectional (inferred).
    ...
    not run  future token: the inputs have no token ids
    ...
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            "doctor",
            received=describe_argument(model),
            expected="a torch.nn.Module",
            hint="Pass the model itself. If it is called in another way, pass that function as forward=.",
        )
    subject = Subject(model, inputs, forward, cached)
    with _in_eval_mode(model), torch.no_grad():
        return _examine(Examination(subject, causal), tokens, recording)


def _examine(exam: Examination, tokens: Any, recording: Recording | None) -> Findings:
    """Run the inputs, the checks of their recording, and all experiments; `tokens` are texts, or None."""
    subject = exam.subject
    origin = _record(exam, recording)
    attention_mask = subject.inputs.get("attention_mask") if recording is None else None
    diagnosed = exam.diagnose(exam.recording, tokens, attention_mask)
    if origin is not None:
        found = [explain_not_finite(exam, origin, diagnosed)]
        reason = "the output is not finite"
        checks = [CheckRun("NaN or inf"), *(CheckRun(check.name, reason) for check in EXPERIMENTS)]
        return Findings(found, f"{diagnosed.scope} with {_count_passes(subject)}", checks)
    has_causal_layer = any(layer.causal for layer in exam.recording._checked_layers(exam.stated_causal))
    exam.causal, how = _infer_causal(exam, has_causal_layer)
    if exam.stated_causal is None and exam.causal != has_causal_layer:
        diagnosed = exam.diagnose(exam.recording, tokens, attention_mask, exam.causal)
    exam.findings += diagnosed
    exam.run_probe()
    checks = [*diagnosed.checks, *(_run_experiment(check, exam) for check in EXPERIMENTS)]
    word = "causal" if exam.causal else "bidirectional"
    return Findings(_merge(exam), f"{diagnosed.scope} with {_count_passes(subject)}; {word} ({how})", checks)


def _record(exam: Examination, recording: Recording | None) -> Origin | None:
    """Record a run on the inputs, unless there is a recording; return where NaN and inf in the output began."""
    model, trace = exam.subject.model, ModuleTrace(max_rows=0)
    handles = list(trace.attach(model, find_native_parts(model)))
    exam.recording = Recording() if recording is None else recording
    watched = nullcontext(recording) if recording is not None else watch(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmptyRecordingWarning)  # `diagnose` reports it
            with watched as exam.recording:
                exam.user_output = exam.subject.run_inputs()
    except NotCapturedError:
        pass  # `diagnose` reports it
    finally:
        for handle in handles:
            handle.remove()
    return None if bool(exam.user_output.isfinite().all()) else trace.find_not_finite()


def _infer_causal(exam: Examination, has_causal_layer: bool) -> tuple[bool, str]:
    """Decide whether the model should be causal, and say how."""
    if exam.stated_causal is not None:
        return exam.stated_causal, "as stated"
    if has_causal_layer:
        return True, "inferred"
    if exam.subject.declares_bidirectional:
        return False, "as configured"
    return (True, "inferred from the cache") if exam.subject.returns_cache else (False, "inferred")


def _count_passes(subject: Subject) -> str:
    return f"{subject.num_passes} forward pass{'es' * (subject.num_passes != 1)}"


def _run_experiment(check: Check[Examination], exam: Examination) -> CheckRun:
    """Run an experiment and keep its findings; a model that does not support it is no finding."""
    changing = next((kind for kind in UNSTABLE if exam.has_errors(kind)), None)
    if changing is not None:
        return CheckRun(check.name, f"outputs cannot be compared: {changing}")
    try:
        found, run = run_check(check, exam)
    except Exception as error:  # whatever the model raises on inputs that are not its user's
        return CheckRun(check.name, f"the model raised {format_error(error)}")
    exam.findings += found
    return run


def _merge(exam: Examination) -> list[Finding]:
    """Return each finding once, without symptoms that a cause in the same place explains."""
    layers = {name: number for number, name in enumerate(exam.recording)}
    errors = [x for x in exam.findings if x.severity == "error" and x.kind != NOTHING_RECORDED]
    wrong_axes = {finding.module for finding in exam.findings if finding.kind in AXES}
    merged: dict[tuple[Any, ...], Finding] = {}
    for finding in exam.findings:
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
