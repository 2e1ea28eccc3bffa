"""`PLANTED_BUGS`: faults that engineers make in attention, each as a model with it and a clean twin.

The faults were chosen before the checks of `regard.doctor` were written. `kinds` has the kinds of finding that
name the cause; `difference` is the kind of difference to the clean twin. A fault that no check can know without a
reference has `needs_reference`.

>>> bug = PLANTED_BUGS["dropout in eval"]
>>> faulty, clean = bug.build(), bug.build_clean()
>>> bug.run(faulty).shape == bug.run(clean).shape
True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.helpers import planted_transformers as twins
from tests.helpers.planted_models import (
    VOCAB,
    WINDOW,
    HandWrittenEncoder,
    PlantedGPT,
    SequenceFirstEncoder,
)
from tests.helpers.tiny_models import TINY

Inputs = dict[str, torch.Tensor]
TOKENS = 11
SIZES = (5, 1, 1, 2, 2)  # pieces of a cached run: prefill, steps, and chunks


def make_inputs(side: str = "none") -> Inputs:
    """Build two sequences of TOKENS tokens, the second padded on a side."""
    ids = torch.randint(1, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(7))
    if side == "none":
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[1, slice(4) if side == "left" else slice(-4, None)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def make_packed_inputs() -> Inputs:
    """Build one sequence of two documents, whose positions restart."""
    positions = torch.cat([torch.arange(5), torch.arange(TOKENS - 5)])[None]
    return {"input_ids": make_inputs()["input_ids"][:1], "position_ids": positions}


@dataclass(frozen=True)
class PlantedBug:
    """A fault.

    Args:
        name: What is wrong, in a few words.
        build: Builds the faulty model, in eval mode.
        build_clean: Builds the same model without the fault; its parameters are equal.
        kinds: Kinds of finding that name the cause.
        difference: Kind of difference to the clean twin, one of `regard.compare`.
        layer: The first attention layer that differs from the clean twin's, in the order in which they run.
        inputs: Builds the arguments of the model.
        clean_inputs: Builds the right arguments, if the caller makes the mistake; default: `inputs`.
        causal: What the user of doctor states: True, False, or None to say nothing.
        cached: The fault shows in a run with a cache: `model.decode(input_ids, sizes)`.
        calls: Number of passes of a run; the fault shows in the last.
        faulty_layer: The layer that has the fault, if it differs from `layer`.
        consequences: Kinds of other findings that the fault justifies.
        clean_key: Equal for faults whose clean twins are the same model.
        needs_reference: Without a clean twin, the model is as good as any other.
        same_as: Name of the fault of which this is another form, which is not counted again.
        changes_weights: The fault is in the weights.
        harmless: The fault changes no output of a token, so that there is nothing to find.
        requires: Package that the fault needs, "" for none.
    """

    name: str
    build: Callable[[], Any]
    build_clean: Callable[[], Any]
    kinds: tuple[str, ...]
    difference: str
    layer: int = 0
    inputs: Callable[[], Inputs] = make_inputs
    clean_inputs: Callable[[], Inputs] | None = None
    causal: bool | None = None
    cached: bool = False
    calls: int = 1
    faulty_layer: int | None = None
    consequences: tuple[str, ...] = ()
    clean_key: str = ""
    needs_reference: bool = field(default=False, kw_only=True)
    same_as: str = field(default="", kw_only=True)
    changes_weights: bool = field(default=False, kw_only=True)
    harmless: bool = field(default=False, kw_only=True)
    requires: str = field(default="", kw_only=True)

    @property
    def doctor_layer(self) -> int:
        """The layer that doctor should name."""
        return self.layer if self.faulty_layer is None else self.faulty_layer

    def run(self, model: Any, clean: bool = False) -> Any:
        """Run the model as its user does: once, or with a cache; `clean` passes the right arguments."""
        inputs = (self.clean_inputs or self.inputs)() if clean else self.inputs()
        with torch.no_grad():
            if self.cached:
                return model.decode(inputs["input_ids"], SIZES, *list(inputs.values())[1:])
            for _ in range(self.calls):
                output = model(**inputs)
        return output if isinstance(output, torch.Tensor) else output[0]


def _gpt(
    name: str, *kinds: str, difference: str, model: dict[str, Any] | None = None, **options: Any
) -> PlantedBug:
    """A fault of PlantedGPT; `model` has its other options, and `only` chooses layers."""
    settings = dict(model or {})
    only = settings.pop("only", None)
    fault = settings.pop("fault", name)

    def build() -> Any:
        return PlantedGPT(fault, only=only, **settings).eval()

    def build_clean() -> Any:
        return PlantedGPT(**settings).eval()

    layer = 0 if only is None else only[0]
    options = {"layer": layer, "clean_key": f"PlantedGPT {settings}"} | options
    return PlantedBug(name, build, build_clean, kinds, difference, **options)


def build_twin(
    name: str,
    model: str,
    plant: Callable[[Any], None] | None,
    *kinds: str,
    difference: str,
    side: str = "none",
    **options: Any,
) -> PlantedBug:
    """A fault of a tiny model of transformers."""
    return PlantedBug(
        name,
        lambda: twins.build(model, plant),
        lambda: twins.build(model),
        kinds,
        difference,
        inputs=options.pop("inputs", lambda: twins.MODELS[model].inputs(side)),
        clean_key=model,
        **options,
    )


def _overflow() -> Any:
    model = PlantedGPT().eval()
    model.blocks[2].attn.q_proj.weight.data *= 1e5
    return model.half()


def _left_padded() -> Inputs:
    return TINY["GPT-2"].inputs("left")


def _left_padded_with_positions() -> Inputs:
    inputs = _left_padded()
    return inputs | {"position_ids": twins.positions_without_padding(inputs["attention_mask"])}


ENCODER = {"causal": False}
_ROTARY = "rotary: query and key differ"

_BUGS = (
    # Causal masks
    _gpt(
        "causal mask missing in one layer", "weight on the future", difference="mask",
        model={"fault": "causal mask missing", "only": (1,)}, consequences=("weight on padding",),
    ),
    _gpt("causal mask missing", "weight on the future", difference="mask", causal=True,
         consequences=("weight on padding",)),
    _gpt("causal mask inverted", "inverted mask", difference="mask", consequences=("fully masked rows",)),
    _gpt("own key masked", "own key masked", difference="mask", consequences=("fully masked rows",)),
    _gpt("causal mask of 0 and 1 added", "mask of 0 and 1", difference="mask"),
    _gpt("causal aligned to the first key", "causal alignment", difference="mask", cached=True,
         consequences=("weight on padding",)),
    _gpt(
        "window one shorter in cached steps", "cache: mask", difference="mask", model={"window": WINDOW}, cached=True
    ),
    # Padding
    _gpt(
        "padding ignored", "weight on padding", difference="mask", model=ENCODER, causal=False,
        inputs=lambda: make_inputs("right"),
    ),
    _gpt(
        "padding ignored on the left", "weight on padding", difference="mask", model={"fault": "padding ignored"},
        inputs=lambda: make_inputs("left"),
    ),
    _gpt(
        "padding mask inverted", "inverted mask", difference="mask", model=ENCODER, causal=False,
        inputs=lambda: make_inputs("right"),
    ),
    _gpt(
        "padding mask of another batch entry", "padding mask of another batch entry", difference="mask", model=ENCODER,
        causal=False, inputs=lambda: make_inputs("right"),
    ),
    _gpt(
        "padding mask of 0 and 1 added", "mask of 0 and 1", difference="mask", model=ENCODER, causal=False,
        inputs=lambda: make_inputs("right"),
    ),
    _gpt(
        "padding mask too weak", "weight on padding", difference="mask", model=ENCODER, causal=False,
        inputs=lambda: make_inputs("right"),
    ),
    # Positions
    _gpt("rope twice", "rotary: applied twice", difference="rotary positions"),
    _gpt(
        "rope twice in one layer", "rotary: applied twice", difference="rotary positions",
        model={"fault": "rope twice", "only": (1,)},
    ),
    _gpt("rope on the axis of the heads", "rotary: wrong axis", difference="rotary positions"),
    _gpt("rope on the query only", _ROTARY, difference="rotary positions"),
    _gpt("rope backwards on the key", _ROTARY, difference="rotary positions"),
    _gpt("rope pairs of query and key differ", _ROTARY, difference="rotary positions"),
    _gpt("rope positions in bfloat16", "rotary: positions rounded", difference="rotary positions"),
    _gpt("rope missing in one layer", "rotary: missing in some layers", difference="rotary positions",
         model={"only": (2,)}),
    _gpt("rope base of another model", difference="rotary positions", needs_reference=True),
    _gpt("rope pairs of another layout", difference="rotary positions", needs_reference=True),
    _gpt(
        "alibi with the wrong sign", "bias grows with distance", difference="bias", model={"positions": "alibi"}
    ),
    # Scale
    _gpt("scale missing", "scale", difference="scale"),
    _gpt("scale missing in one layer", "scale", difference="scale", model={"fault": "scale missing", "only": (1,)}),
    _gpt("scale twice", "scale", difference="scale"),
    _gpt("scale of the model width", "scale", difference="scale"),
    # Caches
    _gpt("cache overwrites its last key", "cache: keys do not grow", difference="cache", cached=True),
    _gpt("cache loses a key at every step", "cache: keys do not grow", difference="cache", cached=True),
    _gpt("cache appends the last value again", "cache: values missing", difference="cache", cached=True),
    _gpt("one cache for all layers", "cache: shared by layers", difference="cache", cached=True,
         faulty_layer=1),
    _gpt("position one too low in cached steps", "positions", difference="rotary positions", cached=True),
    _gpt("position 0 in every cached step", "positions", difference="rotary positions", cached=True),
    _gpt("positions restart in every chunk", "positions", difference="rotary positions", cached=True),
    _gpt("cache kept between calls", "state kept between calls", difference="cache", calls=2),
    # Heads and axes
    _gpt("key heads tiled", "key heads tiled", difference="kv heads reordered"),
    _gpt("value heads in another order than key heads", "key and value heads differ", difference="kv heads reordered"),
    _gpt("heads and tokens not transposed", "heads and tokens swapped", difference="view or transpose"),
    _gpt("heads split by view", "heads split by view", difference="view or transpose"),
    _gpt("output heads merged by view", "heads merged by view", difference="view or transpose", layer=1,
         faulty_layer=0),
    _gpt("values projected like keys", difference="projection", needs_reference=True),
    # Other faults
    _gpt("dropout in eval", "dropout", difference="dropout"),
    PlantedBug(
        "half precision overflows", _overflow, lambda: PlantedGPT().eval().half(), ("NaN or inf",), "NaN or inf", 2,
        changes_weights=True,
    ),
    _gpt(
        "packed documents without a mask", "documents attend to each other", difference="mask",
        inputs=make_packed_inputs,
    ),
    PlantedBug(
        "batch_first forgotten", lambda: SequenceFirstEncoder("batch_first forgotten").eval(),
        lambda: SequenceFirstEncoder().eval(), ("batch entries mixed",), "view or transpose",
        clean_key="SequenceFirstEncoder",
    ),
    PlantedBug(
        "key_padding_mask inverted", lambda: SequenceFirstEncoder("key_padding_mask inverted").eval(),
        lambda: SequenceFirstEncoder().eval(), ("inverted mask",), "mask", inputs=lambda: make_inputs("right"),
        consequences=("NaN or inf",), clean_key="SequenceFirstEncoder",
    ),
    PlantedBug(
        "softmax over the queries", lambda: HandWrittenEncoder(-2).eval(), lambda: HandWrittenEncoder().eval(),
        ("softmax axis",), "softmax",
    ),
    # Models of transformers
    PlantedBug(
        "GPT-2 padded on the left without position ids", lambda: twins.build("GPT-2"), lambda: twins.build("GPT-2"),
        ("positions count padding",), "position ids", inputs=_left_padded, clean_inputs=_left_padded_with_positions,
    ),
    build_twin("GPT-OSS without its sinks", "GPT-OSS", twins.drop_sinks, "sinks not used", difference="sinks"),
    build_twin(
        "encoder states of T5 in another batch order", "T5", twins.change_encoder_states(lambda x: x.flip(0)),
        "cross-attention keys", difference="encoder states", layer=3, side="right",
    ),
    build_twin(
        "encoder states of BART shuffled", "BART", twins.change_encoder_states(lambda x: x.roll(1, 1)),
        "cross-attention keys", difference="encoder states", layer=3, side="right",
    ),
    build_twin(
        "padding of the encoder ignored by BART's decoder", "BART", twins.drop_encoder_mask, "weight on padding",
        difference="mask", layer=3, side="right",
    ),
    build_twin("Llama without causality", "Llama", twins.forget_causality, "weight on the future", difference="mask",
          consequences=("weight on padding",)),
    build_twin("Gemma 2 without soft cap in one layer", "Gemma 2", twins.drop_softcap, "softcap missing",
          difference="softcap", layer=1),
    build_twin("Llama with another rotary base", "Llama", twins.change_frequencies, "rotary: not as configured",
          difference="rotary positions"),
    build_twin("Mistral with a window of one key more", "Mistral", twins.widen_window, "window not as configured",
          difference="mask", consequences=("weight on padding",)),
    build_twin("Llama with a NaN in a feed-forward weight", "Llama", twins.break_weight, "NaN or inf",
          difference="NaN or inf", layer=1, changes_weights=True),
)  # fmt: skip

PLANTED_BUGS: dict[str, PlantedBug] = {bug.name: bug for bug in _BUGS}
