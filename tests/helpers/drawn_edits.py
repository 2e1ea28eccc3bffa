"""Edits drawn at random, each as `regard.interventions` builds it and as it is defined on plain tensors."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

import regard
from regard.interventions import ablate, knockout, patch, rescore, restrict
from tests.helpers.eager_history import EagerRun, Positions, is_cross_attention, is_encoder

PATCHES = ("pattern", "output", "value")


@dataclass(frozen=True)
class DrawnEdit:
    """An edit.

    Args:
        kind: Name of the function of `regard.interventions`.
        layer: Name of the layer.
        number: Number of the layer, if it is passed instead of the name.
        heads: Heads.
        batch: Batch entries; None for all.
        queries: Positions as the function takes them.
        keys: Positions likewise.
        parameter: Window (left, right), cap or slopes, what the output is replaced by, or what is patched.
        real: Which tokens are not padding, (batch, q_len); None: all.
        source: For patches: the eager run that they are taken from.
    """

    kind: str
    layer: str
    number: int | None
    heads: tuple[int, ...]
    batch: tuple[int, ...] | None = None
    queries: Any = None
    keys: Any = None
    parameter: Any = None
    real: torch.Tensor | None = field(default=None, repr=False)
    source: EagerRun | None = field(default=None, repr=False)

    def build(self, source: Any = None) -> Any:
        """Build the edit of `regard.interventions`, with the recording that it patches from."""
        layer = self.layer if self.number is None else self.number
        where: dict[str, Any] = {"heads": list(self.heads)}
        if self.batch is not None:
            where["batch"] = list(self.batch)
        if self.kind == "knockout":
            return knockout(layer, **where, queries=self.queries, keys=self.keys)
        if self.kind == "restrict":
            left, right = self.parameter
            return restrict(
                layer, **where, mask=regard.sliding_window(left=left, right=right, align="upper_left")
            )
        if self.kind == "rescore":
            is_cap = isinstance(self.parameter, float)
            score_mod = (
                regard.softcap(self.parameter) if is_cap else regard.alibi(self.parameter, align="upper_left")
            )
            return rescore(layer, **where, score_mod=score_mod)
        if self.kind == "ablate":
            return ablate(layer, **where, baseline=self.parameter, queries=self.queries)
        return patch(layer, **where, source=source, what=self.parameter, queries=self.queries)

    # -- By definition

    def _select(self, layer: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return which batch entries and heads are changed, (batch, heads, 1, 1); None if the layer is another."""
        if layer != self.layer:
            return None
        chosen = torch.zeros(*tensor.shape[:2], 1, 1, dtype=torch.bool)
        batch = range(tensor.shape[0]) if self.batch is None else self.batch
        for b in batch:
            chosen[b, list(self.heads)] = True
        return chosen

    def edit_scores(self, layer: str, scores: torch.Tensor, at: Positions) -> torch.Tensor:
        chosen = self._select(layer, scores)
        if chosen is None or self.kind not in ("knockout", "restrict", "rescore"):
            return scores
        if self.kind == "rescore":
            if isinstance(self.parameter, float):
                changed = torch.tanh(scores / self.parameter) * self.parameter
            else:
                slopes = torch.tensor(self.parameter, dtype=scores.dtype)[:, None, None]
                changed = scores - slopes * (at.rows[:, None] - at.keys).abs()
            return torch.where(chosen & (scores != -torch.inf), changed, scores)
        if self.kind == "knockout":
            rows = torch.isin(at.rows, resolve(self.queries, at.num_rows))
            keys = torch.isin(at.keys, resolve(self.keys, at.num_keys))
            masked = rows[:, None] & keys
        else:
            left, right = self.parameter
            distance = at.rows[:, None] - at.keys
            masked = (distance > left) | (-distance > right)
        return scores.masked_fill(chosen & masked, -torch.inf)

    def edit_weights(self, layer: str, weights: torch.Tensor, at: Positions) -> torch.Tensor:
        return self._patch("pattern", layer, weights, at)

    def edit_value(self, layer: str, value: torch.Tensor, at: Positions) -> torch.Tensor:
        return self._patch("value", layer, value, at)

    def edit_output(self, layer: str, output: torch.Tensor, at: Positions) -> torch.Tensor:
        chosen = self._select(layer, output)
        if chosen is None or self.kind != "ablate":
            return self._patch("output", layer, output, at)
        rows = torch.isin(at.rows, resolve(self.queries, at.num_rows))[:, None]
        if self.parameter == "mean":
            real = torch.ones(len(output), len(at.rows)) if self.real is None else self.real
            real = real[:, None, :, None].to(output.dtype)
            replaced = ((output * real).sum((0, 2), keepdim=True) / real.sum()).expand_as(output)
        else:
            replaced = output * (0.0 if self.parameter == "zero" else self.parameter)
        return torch.where(chosen & rows, replaced, output)

    def _patch(self, what: str, layer: str, tensor: torch.Tensor, at: Positions) -> torch.Tensor:
        chosen = self._select(layer, tensor)
        if chosen is None or self.kind != "patch" or self.parameter != what:
            return tensor
        assert self.source is not None
        encoder_calls = self.source.encoder_calls.get(layer)
        call = encoder_calls[0] if encoder_calls else self.source.calls[0].layers[layer]
        other = {"pattern": call.weights, "value": call.value, "output": call.output}[what]
        positions = at.keys if what == "value" else at.rows
        wanted = positions < other.shape[2]
        patched = tensor.clone()
        taken = other[:, :, positions[wanted]].to(tensor.dtype)
        if what == "pattern":  # keys that the other run does not have get no weight
            room = max(0, int(at.keys[-1]) + 1 - taken.shape[-1])
            taken = torch.nn.functional.pad(taken, (0, room))[..., at.keys]
        patched[:, :, wanted] = taken
        return torch.where(chosen, patched, tensor)


def resolve(positions: Any, length: int) -> torch.Tensor:
    """Return positions of a sequence of which `length` tokens were read so far; negative ones count from its end."""
    if positions is None or isinstance(positions, slice):
        return torch.arange(length)[positions or slice(None)]
    listed = [positions] if isinstance(positions, int) else list(positions)
    return torch.tensor([p + length if p < 0 else p for p in listed])


def draw_edits(
    rng: random.Random, layers: list[str], heads: int, rows: int, keys: int, batch: int, *, own_softmax: bool,
    patches: bool, real: torch.Tensor | None, has_mean: bool,
) -> list[DrawnEdit]:  # fmt: skip
    """Draw one to three edits.

    Args:
        rng: Source of chance.
        layers: Names of the layers that may be edited, in the order in which they run.
        heads: Number of heads.
        rows: Length of the sequence of the queries, generated tokens included.
        keys: Length of the sequence of the keys of cross-attention.
        batch: Number of batch entries; 0 if it changes, so that all are edited.
        own_softmax: Whether the layers compute their own softmax: of their scores, a mask and an addition are known.
        patches: Whether patches may be drawn.
        real: Which tokens of the encoder, or of a model without one, are not padding; None: all.
        has_mean: Whether outputs may be replaced by their mean, which is that of one call.
    """
    kinds = ["knockout", "knockout", "restrict", "rescore"]
    kinds += [] if own_softmax else ["ablate", "ablate"]
    kinds += ["patch"] if patches else []
    edits = []
    for _ in range(rng.randint(1, 3)):
        # Cross-attention is rare among the layers, and its rows are the hardest to place.
        number = rng.choice(
            [n for n, name in enumerate(layers) for _ in range(3 if is_cross_attention(name) else 1)]
        )
        kind, layer = rng.choice(kinds), layers[number]
        slopes = tuple(rng.choice((0.25, 0.5, 1.5)) for _ in range(heads))
        parameters = {
            "knockout": [None],
            "restrict": [(rng.randint(0, 3), rng.randint(0, 3))],
            "rescore": [slopes] if own_softmax else [slopes, 0.5, 1.5],
            "ablate": ["zero", 0.5, -1.25, *(["mean"] if has_mean else [])],
            "patch": list(PATCHES),
        }
        is_decoder = is_cross_attention(layer) or (len(layers) > 4 and not is_encoder(layer))
        edits.append(
            DrawnEdit(
                kind=kind,
                layer=layer,
                number=number if rng.random() < 0.5 else None,
                heads=draw_some(rng, heads),
                batch=draw_some(rng, batch) if batch and rng.random() < 0.3 else None,
                queries=draw_positions(rng, rows) if kind in ("knockout", "ablate") else None,
                keys=draw_positions(rng, keys if is_cross_attention(layer) else rows)
                if kind == "knockout"
                else None,
                parameter=rng.choice(parameters[kind]),
                real=None if is_decoder else real,
            )
        )
    return edits


def draw_some(rng: random.Random, count: int) -> tuple[int, ...]:
    """Draw some of the numbers below `count`, at least one."""
    return tuple(sorted(rng.sample(range(count), rng.randint(1, count))))


def draw_positions(rng: random.Random, length: int) -> Any:
    """Draw positions: one, several, a slice, the last one, or all."""
    first = rng.randrange(length)
    return rng.choice(
        (
            None,
            -1,
            first,
            sorted(rng.sample(range(length), min(length, 3))),
            slice(first, None),
            slice(length // 2, None),
            slice(1, first + 2),
        )
    )
