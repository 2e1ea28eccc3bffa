"""Eager attention of transformers with edits written out by hand, to compare `regard.intervene` with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "edited_by_hand"


@dataclass
class HandEdit:
    """What happens to one layer: functions of plain tensors, each with an axis of heads."""

    layer: int
    heads: list[int]
    keep: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None  # of positions (q, 1) and (1, k)
    rescore: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    output: Callable[[torch.Tensor], torch.Tensor] | None = None
    source: HandRun | None = None
    what: str = ""


@dataclass
class HandRun:
    """Weights, values and outputs of each layer of a run, and the edits that it makes."""

    edits: list[HandEdit] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)

    def attend(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        layer, groups = len(self.weights), query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if kwargs.get("softcap") is not None:
            scores = torch.tanh(scores / kwargs["softcap"]) * kwargs["softcap"]
        if kwargs.get("position_bias") is not None:
            scores = scores + kwargs["position_bias"]
        if attention_mask is not None:
            lowest = torch.finfo(attention_mask.dtype).min
            masked = attention_mask[..., : key.shape[-2]] <= lowest / 2
            scores = (scores + attention_mask[..., : key.shape[-2]]).masked_fill(masked, -torch.inf)
        q_idx, k_idx = torch.arange(scores.shape[-2])[:, None], torch.arange(scores.shape[-1])[None]
        own = [edit for edit in self.edits if edit.layer == layer]
        for edit in own:
            for head in edit.heads:
                if edit.rescore is not None:
                    scores[:, head] = edit.rescore(scores[:, head].clone(), q_idx, k_idx)
                if edit.keep is not None:
                    scores[:, head] = scores[:, head].masked_fill(~edit.keep(q_idx, k_idx), -torch.inf)
        sinks = getattr(module, "sinks", None)
        if sinks is not None:
            column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
            weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1).nan_to_num(0.0)
        for edit in own:
            if edit.what == "pattern":
                weights[:, edit.heads] = edit.source.weights[layer][:, edit.heads].to(weights.dtype)
            if edit.what == "value":
                value[:, edit.heads] = edit.source.values[layer][:, edit.heads].to(value.dtype)
        output = weights @ value
        for edit in own:
            if edit.what == "output":
                output[:, edit.heads] = edit.source.outputs[layer][:, edit.heads].to(output.dtype)
            if edit.output is not None:
                output[:, edit.heads] = edit.output(output[:, edit.heads])
        self.weights.append(weights)
        self.values.append(value)
        self.outputs.append(output)
        return output.transpose(1, 2).contiguous(), weights


@contextmanager
def attend_by_hand(edits: list[HandEdit]) -> Iterator[HandRun]:
    """Make models with the implementation `NAME` compute eager attention with edits, and keep what they compute."""
    run = HandRun(edits)
    hf.AttentionInterface.register(NAME, run.attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    try:
        yield run
    finally:
        del hf.AttentionInterface._global_mapping[NAME]
        del AttentionMaskInterface._global_mapping[NAME]
