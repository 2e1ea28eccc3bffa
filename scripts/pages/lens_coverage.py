"""Count the model classes of the installed transformers that `regard.watch` captures.

Every base model that can be built tiny from its configuration runs twice, plain and watched. Sizes and inputs are tried
in several variants until one runs. A model is *captured* if the outputs are bit-identical, every layer gave a matrix,
and the matrices equal those of `output_attentions=True` as far as the model returns them; *rejected* if the lens raised
NotCapturedError with a hint; *without attention* if none of its modules is named attention; *failed* otherwise.

With `--edits`, each captured model runs with its last attention layer edited by a knockout and by an ablation. It is
*edited* if the recording shows the weights without the edges, the output of the ablated head is 0, the other heads of
the layer keep their output, edits that select no head leave the output bit-identical, and the model is as before.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from typing import Any

import torch

import regard
from regard import NotCapturedError, RegardError
from regard.interventions import ablate, knockout
from tests.helpers.base_models import flatten_tensors, list_attentions

from .base_models import Result, add_model_options, check_models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    parser.add_argument("--edits", action="store_true", help="check regard.intervene instead of regard.watch")


def run(options: argparse.Namespace) -> int:
    """Check the models and print the results; return 1 if any failed."""
    column = "intervene" if options.edits else "watch"
    return check_models(column, options, partial(check_variant, edits=options.edits))


def check_variant(variant: str, built: tuple[Any, ...], edits: bool) -> tuple[Result, bool]:
    """Check one variant of a model; one that calls no attention is not the last to try."""
    model, config, inputs, plain = built
    result = run_edited(model, inputs, plain) if edits else run_watched(model, config, inputs, plain)
    return result, "called no watched attention function" not in result[1]


def run_watched(model: Any, config: Any, inputs: dict[str, Any], plain: Any) -> Result:
    """Run a model that runs plain; return the result and a remark."""
    try:
        with regard.watch(model) as recording:
            torch.manual_seed(1)
            watched = model(**inputs)
    except NotCapturedError as error:
        reason = error.received.split("was not captured: ")[-1]
        if "called no watched attention function" in reason and not names_attention(model):
            return "without attention", reason
        return "rejected", reason
    except Exception as error:
        return "failed", f"{type(error).__name__}: {str(error)[:200]}"
    pairs = list(zip(flatten_tensors(plain), flatten_tensors(watched), strict=True))
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
        return "failed", "outputs changed"
    return compare_with_eager(model, config, inputs, recording)


def names_attention(model: Any) -> bool:
    """Return whether the class of a module is named attention."""
    names = {type(module).__name__.lower() for module in model.modules()}
    return any("attention" in name or "attn" in name for name in names)


def run_edited(model: Any, inputs: dict[str, Any], plain: Any) -> Result:
    """Edit the last attention layer of a model that runs plain; return the result and a remark."""

    def run(*edits: Any, record: bool = False) -> tuple[Any, Any]:
        torch.manual_seed(1)
        with regard.intervene(model, edits, record=record, values=record) as intervention:
            return model(**inputs), intervention

    refusal = ""
    try:
        with regard.watch(model, values=True) as recording:
            torch.manual_seed(1)
            model(**inputs)
    except NotCapturedError as error:
        refusal = error.received.split("was not captured: ")[-1]
    if not recording:
        return "refused" if names_attention(model) else "without attention", refusal
    wide = [layer for layer in recording if recording.calls(layer)[0].shape[-1] > 1]
    name = (wide or list(recording))[-1]
    before = recording.calls(name)[0]
    try:
        untouched, _ = run(ablate(name, heads=[]))
        _, knocked = run(knockout(name, heads=0, keys=0), record=True)
        _, ablated = run(ablate(name, heads=0), record=True)
    except RegardError as error:
        return "refused", str(error).split("cannot be changed: ")[-1].split(". ")[0][:160]
    except Exception as error:
        return "failed", f"{type(error).__name__}: {str(error)[:160]}"
    torch.manual_seed(1)
    for label, output in (("an empty edit", untouched), ("a run after the edits", model(**inputs))):
        pairs = zip(flatten_tensors(plain), flatten_tensors(output), strict=True)
        if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
            return "failed", f"{label} changed the output"
    weights = knocked.recording.calls(name)[0].matrix.to_dense().nan_to_num()
    if weights[..., 0, :, 0].any():
        return "failed", "the knocked out edges have weights"
    after = ablated.recording.calls(name)[0].output
    if after is None or before.output is None:
        return "edited", f"{name}; its output was not recorded"
    if after[..., 0, :, :].any() or not torch.equal(
        after[..., 1:, :, :].nan_to_num(), before.output[..., 1:, :, :].nan_to_num()
    ):
        return "failed", "the ablated head is not 0, or another one changed"
    return "edited", f"{name}: {knocked.applied[0]['path']}"


def compare_with_eager(model: Any, config: Any, inputs: dict[str, Any], recording: Any) -> Result:
    """Check that the weights of eager attention are among the captured ones."""
    calls = [call for layer in recording for call in recording.calls(layer)]
    remark = "1 call" if len(calls) == 1 else f"{len(calls)} calls"
    try:
        torch.manual_seed(0)
        eager = type(model)._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
        eager.load_state_dict(model.state_dict())
        torch.manual_seed(1)
        output = eager(**inputs, output_attentions=True)
    except Exception as error:
        return "captured", f"{remark}; eager attention does not run ({type(error).__name__})"
    expected = list_attentions(output)
    torch.manual_seed(1)
    if not all(
        a.shape == b.shape and torch.allclose(a, b, atol=1e-3, equal_nan=True)
        for a, b in zip(flatten_tensors(model(**inputs)[0]), flatten_tensors(output[0]), strict=False)
    ):
        return "captured", f"{remark}; with eager attention the model computes a different output"
    captured = [call.matrix.to_dense() for call in calls]
    # Some models return the mean over heads, or weights without the sink.
    captured += [
        weights.mean(1, keepdim=True).expand_as(weights) for weights in captured if weights.ndim == 4
    ]
    captured += [weights / weights.sum(-1, keepdim=True) for weights in captured]
    shapes = {tuple(weights.shape) for weights in captured}
    comparable = [weights for weights in expected if tuple(weights.shape) in shapes]
    # Some return the scores instead.
    comparable = [
        weights.softmax(-1) if bool((weights < 0).any()) else weights.float() for weights in comparable
    ]
    equal = sum(
        any(a.shape == b.shape and torch.allclose(a, b, atol=1e-4) for a in captured) for b in comparable
    )
    if equal < len(comparable):
        return "failed", f"{equal} of {len(comparable)} matrices of eager attention were captured"
    if equal:
        remark += f"; {equal} compared with eager attention, all equal"
    if equal < len(expected):
        remark += f"; {len(expected) - equal} returned by eager attention in other shapes"
    return "captured", remark
