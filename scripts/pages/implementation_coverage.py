"""Compare `attn_implementation="regard"` with `sdpa` and `eager` over the base models of the installed transformers.

Every base model that can be built tiny from its configuration runs with `sdpa`, with `regard`, and with `regard` and
`output_attentions=True`. If a class of its type generates text, that generates 8 tokens with each implementation:
greedily with padding on the left, by sampling, and greedily in a static cache. Sliding windows have 5 keys there, so
that their caches slide.

A model is *bit-equal* if every output and logit equals that of `sdpa` in every bit; *equal to eager* if the model does
not support `sdpa`, and its output is that of `eager` under the error rule. For both, the weights must equal those that
`eager` returns, in number, shape and value. A model is *refused* if regard raises an error with a hint; it is *outside*
if its layers do not call the function of the implementation.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import transformers as hf
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from regard import RegardError
from regard.testing import assert_matches
from regard.transformers import AttentionWeights
from regard.transformers.attention_function import attention_forward
from tests.helpers.base_models import build_model, flatten_tensors

from .base_models import Result, add_model_options, check_models, describe_error

WINDOW = 5
ATTENTIONS = ("encoder_attentions", "decoder_attentions", "cross_attentions", "attentions")
GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampling": {**GREEDY, "do_sample": True},
    "static cache": {**GREEDY, "cache_implementation": "static"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Check the models and print the results; return 1 if any failed."""
    return check_models("implementation", options, check_variant)


class OutsideError(Exception):
    """The layers of a model do not call the function of the implementation."""


class DifferenceError(Exception):
    """Outputs or weights differ."""


def run_model(model: Any, implementation: str, inputs: dict[str, Any], **options: Any) -> Any:
    """Run a model with an implementation."""
    model.set_attn_implementation(implementation)
    torch.manual_seed(1)
    return model(**inputs, **options)


def count_calls(model: Any, inputs: dict[str, Any]) -> tuple[Any, int]:
    """Run a model with regard; return its output and the number of calls of the attention function."""
    with mock.patch.dict(hf.AttentionInterface._global_mapping) as functions:
        counter = mock.Mock(side_effect=attention_forward)
        functions["regard"] = counter
        return run_model(model, "regard", inputs), counter.call_count


def check_forward(model: Any, inputs: dict[str, Any]) -> tuple[str, str]:
    """Compare the outputs and the weights of one model."""
    try:
        reference, result = run_model(model, "sdpa", inputs), "bit-equal"
        if not model._supports_sdpa:
            raise ValueError
    except ValueError:
        reference, result = run_model(model, "eager", inputs), "equal to eager"
    try:
        output, calls = count_calls(model, inputs)
    except RegardError:
        raise
    except Exception as error:
        raise OutsideError(describe_error(error, 80)) from error
    if not calls:
        raise OutsideError("its layers do not call the function of the implementation")
    compare_outputs(model, inputs, reference, output, result)
    recorded = run_model(model, "regard", inputs, output_attentions=True)
    compare_outputs(model, inputs, reference, recorded, result)
    return result, f"{calls} calls; {compare_weights(model, inputs, reference)}"


def list_outputs(output: Any) -> list[Any]:
    """List the tensors of an output without the weights, which some models always return."""
    return list(
        flatten_tensors({name: value for name, value in output.items() if not name.endswith("attentions")})
    )


def compare_outputs(model: Any, inputs: dict[str, Any], reference: Any, output: Any, result: str) -> None:
    """Check that outputs are equal in every bit, or under the error rule if the reference is eager attention."""
    pairs = list(zip(list_outputs(reference), list_outputs(output), strict=True))
    if result == "bit-equal":
        if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
            raise DifferenceError("outputs differ from sdpa")
        return
    exact = run_double(model, inputs)
    for (naive, ours), wide in zip(pairs, list_outputs(exact), strict=True):
        if naive.is_floating_point():
            finite = (
                naive.isfinite()
            )  # the random weights of some models overflow float32, whatever the attention
            if not torch.equal(finite, ours.isfinite()):
                raise DifferenceError("not finite where eager attention is")
            naive, ours, wide = (torch.where(finite, part, 0) for part in (naive, ours, wide))
            try:
                assert_matches(ours, wide, naive, dtype="float32", magnitude=wide.abs().amax())
            except AssertionError as error:
                raise DifferenceError(str(error)) from error


def run_double(model: Any, inputs: dict[str, Any]) -> Any:
    """Run a model in float64 with eager attention, the softmax included."""
    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("eager")  # the grouped product does not support float64
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    softmax = torch.nn.functional.softmax
    with mock.patch.object(
        torch.nn.functional, "softmax", lambda x, dim=None, dtype=None, **_: softmax(x, dim)
    ):
        return run_model(wide, "eager", inputs)


def list_weights(output: Any) -> Iterator[Any]:
    """List the weights of an output, by layer and, of generated text, by step."""
    for name in ATTENTIONS:
        for entry in getattr(output, name, None) or ():
            yield from entry if isinstance(entry, tuple) else (entry,)


def compare_weights(model: Any, inputs: dict[str, Any], reference: Any) -> str:
    """Check that the weights are those of eager attention; return how many were compared."""
    try:
        eager = run_model(model, "eager", inputs, output_attentions=True)
    except Exception as error:
        return f"eager attention does not return weights ({type(error).__name__})"
    ours = list(list_weights(run_model(model, "regard", inputs, output_attentions=True)))
    try:
        return compare_lists(ours, [weights for weights in list_weights(eager) if weights is not None])
    except DifferenceError:
        pairs = zip(list_outputs(reference), list_outputs(run_model(model, "eager", inputs)), strict=True)
        if all(torch.allclose(a, b, rtol=1e-2, atol=1e-2, equal_nan=True) for a, b in pairs):
            raise
        return "weights differ from eager attention, whose outputs differ from those of sdpa"


def compare_lists(ours: list[Any], theirs: list[Any]) -> str:
    """Check that lazy weights equal tensors in number, shape and value."""
    if len(ours) != len(theirs):
        raise DifferenceError(f"{len(ours)} matrices, eager attention returns {len(theirs)}")
    count = 0
    for lazy, weights in zip(ours, theirs, strict=True):
        if not isinstance(lazy, AttentionWeights):
            continue  # of a layer that does not call the function
        if lazy.shape != weights.shape:
            raise DifferenceError(
                f"weights of shape {tuple(lazy.shape)}, eager attention has {tuple(weights.shape)}"
            )
        dense = lazy.to_dense()
        live = dense.sum(-1) > 0  # a row that attends to nothing is zero here, and uniform there
        if lazy.matrix.problem.sink is not None and torch.allclose(weights[live].sum(-1), torch.ones(())):
            dense = dense / dense.sum(-1, keepdim=True)  # eager attention applies the sink to the output
        if not torch.allclose(dense[live], weights[live], atol=1e-4):
            raise DifferenceError(f"weights differ by {(dense - weights)[live].abs().max():.1e}")
        count += 1
    return f"{count} matrices equal those of eager attention" if count else "no weights are returned"


def check_generate(config_class: Any, variant: str) -> str:
    """Compare the generated tokens, logits and weights; return the modes that ran."""
    mapping = next(
        (
            m
            for m in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
            if config_class in m
        ),
        None,
    )
    if mapping is None:
        return ""
    found = mapping[config_class]
    model_class = found[0] if isinstance(found, tuple) else found
    try:
        model = build_model(model_class, config_class, variant, WINDOW)[0]
    except Exception:
        return ""
    for config in (
        model.config,
        getattr(model.config, "text_config", None),
        getattr(model.config, "decoder", None),
    ):
        if config is not None and hasattr(config, "use_cache"):
            config.use_cache = True
    model.generation_config.update(eos_token_id=None, pad_token_id=0, bos_token_id=1)
    modes = [mode for mode, options in MODES.items() if generates_equally(model, options)]
    return f"; generate: {', '.join(modes)}" if modes else ""


def generates_equally(model: Any, options: dict[str, Any]) -> bool:
    """Compare what a model generates; return False if it does not generate with `sdpa` and these options."""
    tokens = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    given = {**options, "attention_mask": mask, "return_dict_in_generate": True, "output_logits": True}

    def generate(implementation: str, **more: Any) -> Any:
        model.set_attn_implementation(implementation)
        torch.manual_seed(1)
        return model.generate(tokens, **given, **more)

    try:
        reference = generate("sdpa")
        if not model._supports_sdpa:
            raise ValueError
        is_exact = True
    except ValueError:
        try:
            reference, is_exact = generate("eager"), False
        except Exception:
            return False
    except Exception:
        return False
    for more in ({}, {"output_attentions": True}):
        ours = generate("regard", **more)
        if not torch.equal(ours.sequences, reference.sequences):
            raise DifferenceError(f"generate() with {options}: other tokens")
        if is_exact and not all(map(torch.equal, ours.logits, reference.logits)):
            raise DifferenceError(f"generate() with {options}: other logits")
    try:
        eager = generate("eager", output_attentions=True)
    except Exception:
        return True
    if torch.equal(eager.sequences, ours.sequences):
        compare_lists(list(list_weights(ours)), list(list_weights(eager)))
    return True


def check_variant(variant: str, built: tuple[Any, ...]) -> tuple[Result, bool]:
    """Check one model; the first variant that can be built is the last."""
    model, _, inputs, _ = built
    if not any("attention" in type(module).__name__.lower() for module in model.modules()):
        return ("without attention", ""), True
    try:
        result, remark = check_forward(model, inputs)
        remark += check_generate(type(model.config), variant)
    except OutsideError as error:
        result, remark = "outside", str(error)
    except RegardError as error:
        result, remark = "refused", str(error.received)
    except DifferenceError as error:
        result, remark = "failed", str(error).splitlines()[0][:160]
    except Exception as error:
        result, remark = "failed", describe_error(error, 160)
    return (result, remark), True
