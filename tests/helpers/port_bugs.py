"""`PORT_BUGS`: faults of ports and of loading, collected after the checks for `PLANTED_BUGS` had been written.

The kinds that doctor should report were written before its checks. After the first run some entries were changed:

- "scores in float8" is compared as "weights" instead of "softmax", "weights of Llama not permuted" as "rotary
  positions" instead of "projection", and "two layers of Llama swapped" as "module" instead of "projection";
- "Gemma 3 with windows on the wrong layers" also takes the older kind "window not as configured";
- "masks added without a bound" changes no token, so it became `harmless`;
- "fully masked rows" and "padding changes the output" became consequences of two faults;
- "scores in float8" was kept finite, the feed-forward made to overflow, and the batch of the cross-attention enlarged.

Forms of one fault are counted once, and `same_as` names the fault. The grouping is a choice; the page of the scores
counts the forms, too:

- the norm of the key forgotten, and of query and key;
- QK norm after the rotation, in one layer and in all;
- a wrong width in the scale: 1 / head_dim, and the width of all key heads, which is also that of a head padded to
  twice its size;
- not finite after the last attention layer: NaN in the head, inf in the last norm, NaN in the last feed-forward;
- float16 overflow: in scores, and in a feed-forward.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers import planted_transformers as twins
from tests.helpers.planted_bugs import TOKENS, Inputs, PlantedBug, build_twin, make_inputs
from tests.helpers.planted_models import HEADS, VOCAB
from tests.helpers.ported_decoder import PortedDecoder, SwappedCrossAttention


def make_batch() -> Inputs:
    """Build as many sequences as there are heads, two of them padded on the left."""
    ids = torch.randint(1, VOCAB, (HEADS, TOKENS), generator=torch.Generator().manual_seed(11))
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[3, :2] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def make_long_inputs() -> Inputs:
    """Build a sequence with more positions than bfloat16 can tell apart."""
    return {"input_ids": torch.randint(1, VOCAB, (1, 300), generator=torch.Generator().manual_seed(11))}


def make_pairs() -> Inputs:
    """Build tokens of an encoder and of a decoder, of the same number."""
    ids = torch.randint(1, VOCAB, (16, TOKENS), generator=torch.Generator().manual_seed(11))
    return {"input_ids": ids[:8], "decoder_input_ids": ids[8:]}


def _port(
    name: str, *kinds: str, difference: str, only: tuple[int, ...] | None = None, **options: Any
) -> PlantedBug:
    """A fault of PortedDecoder; `only` chooses layers."""
    fault = options.pop("fault", name)
    options = {
        "inputs": make_batch,
        "layer": 0 if only is None else only[0],
        "clean_key": "PortedDecoder",
    } | options
    return PlantedBug(
        name, lambda: PortedDecoder(fault, only=only).eval(), lambda: PortedDecoder().eval(), kinds, difference,
        **options,
    )  # fmt: skip


def _halved(model: str) -> Any:
    return twins.build(model).half()


def _with_large_scores(implementation: str) -> Any:
    model = twins.build("Llama", twins.overflow_scores)
    model.set_attn_implementation(implementation)
    return model


_FUTURE = ("future leaks", "cached steps differ")

_BUGS = (
    # Queries, keys and values
    _port("QK norm forgotten", "weights without effect", difference="projection"),
    _port(
        "norm of the key forgotten", "weights without effect", difference="projection", same_as="QK norm forgotten"
    ),
    _port("QK norm after the rotation", "norm after rotary", difference="projection"),
    _port(
        "QK norm after the rotation in one layer", "norm after rotary", difference="projection", only=(1,),
        fault="QK norm after the rotation", same_as="QK norm after the rotation",
    ),
    _port("half of the head rotated", difference="rotary positions", needs_reference=True),
    _port("values rotated", "rotary: values rotated", difference="rotary positions"),
    _port(
        "cached keys rotated by the positions of the step", "positions", difference="rotary positions", cached=True,
        inputs=make_inputs,
    ),
    _port("one key head for all", "key heads not used", difference="kv heads reordered"),
    _port("heads merged channel by channel", "heads merged channel by channel", difference="module", layer=1,
          faulty_layer=0),
    # Scale and scores
    _port("scale of 1 / head_dim", "scale", difference="scale"),
    _port("scale of the key width", "scale", difference="scale", same_as="scale of 1 / head_dim"),
    _port("scores in float8", difference="weights", needs_reference=True),
    # Masks and positions
    _port("positions written for padding on the right", "positions of padded tokens", difference="rotary positions"),
    _port("causal mask of one token more", "weight on the future", difference="mask", consequences=_FUTURE),
    _port(
        "causal mask of bfloat16 positions", "weight on the future", difference="mask", consequences=_FUTURE,
        inputs=make_long_inputs,
    ),
    _port("padding mask of heads, not of entries", "padding masked by head", difference="mask",
          consequences=("weight on padding", "fully masked rows")),
    _port("padding masked in the prefill only", "cache: padding not masked", difference="mask", cached=True),
    _port("causal mask dropped in padded batches", "weight on the future", difference="mask",
          consequences=(*_FUTURE, "padding changes the output")),
    _port("masks added without a bound", difference="no difference", layer=-1, harmless=True),
    _port("embeddings centred over time", "future leaks", difference="module",
          consequences=("cached steps differ", "padding changes the output")),
    PlantedBug(
        "cross-attention with queries from the encoder", lambda: SwappedCrossAttention(True).eval(),
        lambda: SwappedCrossAttention().eval(), ("cross-attention states swapped",), "encoder states", layer=2,
        inputs=make_pairs,
    ),
    # Models of transformers: positions, windows and norms
    build_twin("llama3 scaling forgotten", "Llama with llama3 scaling", twins.forget_scaling,
               "rotary: not as configured", difference="rotary positions"),
    build_twin("attention factor of YaRN forgotten", "Llama with YaRN", twins.forget_attention_factor,
               "rotary: not as configured", difference="scale"),
    build_twin("Qwen3 without its QK norms", "Qwen3", twins.remove_head_norms, difference="projection",
               needs_reference=True),
    build_twin("Gemma 3 with windows on the wrong layers", "Gemma 3 of text", twins.swap_layer_types,
               "windows not as configured", "window not as configured", difference="mask",
               consequences=("rotary: not as configured",)),
    build_twin("OPT without the offset of its positions", "OPT", twins.forget_offset, "position table offset",
               difference="position ids"),
    build_twin("bias of T5's encoder transposed", "T5", twins.transpose_bias, difference="bias", side="right",
               needs_reference=True),
    # Models of transformers: weights and modules
    build_twin("GPT-NeoX with queries, keys and values in blocks", "GPT-NeoX", twins.reorder_qkv,
               difference="projection", needs_reference=True, changes_weights=True),
    build_twin("two layers of Llama swapped", "Llama of four layers", twins.swap_layers, difference="module",
               layer=1, needs_reference=True, changes_weights=True),
    build_twin("weights of Llama not permuted", "Llama", twins.keep_interleaved_weights,
               difference="rotary positions", needs_reference=True, changes_weights=True),
    PlantedBug("LoRA merged and active", twins.add_lora(merged=True), twins.add_lora(merged=False), (), "projection",
               inputs=lambda: twins.MODELS["Llama"].inputs("none"), needs_reference=True, changes_weights=True,
               requires="peft", clean_key="Llama with LoRA"),
    build_twin("GELU for SiLU", "Llama", twins.use_gelu, difference="module", layer=1, needs_reference=True),
    build_twin("last norm larger by a tenth", "Llama", twins.grow_final_norm, difference="module", layer=-1,
               needs_reference=True, changes_weights=True),
    # Not finite
    build_twin("NaN in the head of Llama", "Llama", twins.break_head, "NaN or inf", difference="NaN or inf", layer=-1,
               changes_weights=True),
    build_twin("inf in the last norm of Llama", "Llama", twins.break_final_norm, "NaN or inf", layer=-1,
               difference="NaN or inf", changes_weights=True, same_as="NaN in the head of Llama"),
    build_twin("NaN in the last feed-forward of BERT", "BERT", twins.break_last_feed_forward, "NaN or inf", layer=-1,
               difference="NaN or inf", changes_weights=True, same_as="NaN in the head of Llama"),
    PlantedBug("scores overflow in float16", lambda: _with_large_scores("eager"), lambda: _with_large_scores("sdpa"),
               ("NaN or inf",), "NaN or inf", layer=1, inputs=lambda: twins.MODELS["Llama"].inputs("none")),
    PlantedBug("feed-forward overflows in float16", lambda: twins.build("Llama", twins.overflow_residual),
               lambda: _halved("Llama"), ("NaN or inf",), "NaN or inf", layer=1, changes_weights=True,
               inputs=lambda: twins.MODELS["Llama"].inputs("none"), same_as="scores overflow in float16"),
)  # fmt: skip

PORT_BUGS: dict[str, PlantedBug] = {bug.name: bug for bug in _BUGS}
DISTINCT_PORT_BUGS = [bug for bug in _BUGS if not bug.same_as and not bug.harmless]
