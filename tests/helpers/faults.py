"""Domain faults: mistakes that attention code really makes, put in by patching a function by its name.

`scripts/faults` runs the fast tests once per fault, with this module as pytest plugin (`-p tests.helpers.faults
--fault NAME`), and fails if no test notices. `origin` names the failure mode or the guarantee that the fault breaks.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

Function = Callable[..., Any]


class Fault(NamedTuple):
    """A fault: what it is called, what it breaks, which function it replaces, and how."""

    name: str
    origin: str
    target: str  # "module:function" or "module:Class.method"
    make: Callable[[Function], Function]


FAULTS: list[Fault] = []


def fault(name: str, origin: str, target: str) -> Callable[[Function], Function]:
    """Register a function that turns the original into the faulty one."""

    def register(make: Function) -> Function:
        FAULTS.append(Fault(name, origin, target, make))
        return make

    return register


def resolve(target: str) -> tuple[Any, str, Any]:
    """Return the owner (a module or a class), the attribute and the object that a target names."""
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, attribute = path.split(".")
    for name in outer:
        owner = getattr(owner, name)
    return owner, attribute, inspect.getattr_static(owner, attribute)  # which may be inherited


def apply(chosen: Fault) -> None:
    """Put a fault in, also where other modules imported the function by its name."""
    owner, attribute, original = resolve(chosen.target)
    is_property = isinstance(original, property | functools.cached_property)
    function = (
        (original.fget if isinstance(original, property) else original.func) if is_property else original
    )
    faulty: Any = chosen.make(function)
    functools.update_wrapper(faulty, function)
    if is_property:
        faulty = property(faulty)
    setattr(owner, attribute, faulty)
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "regard"]:
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, faulty)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault", help="name of a domain fault to put in")


def pytest_configure(config: pytest.Config) -> None:
    import regard.lens.watch
    import regard.nn
    import regard.testing  # noqa: F401 - so that every module that imported a patched name is loaded

    (chosen,) = (one for one in FAULTS if one.name == config.getoption("--fault"))
    apply(chosen)


# -- Masks ------------------------------------------------------------------------------------------------


@fault("mask-polarity-flipped", "row 8", "regard.masks.kinds:DenseMask.allows")
def _(allows: Function) -> Function:
    return lambda self, *args: ~allows(self, *args)


@fault("ignore-means-attend", "row 8", "regard.masks.kinds:dense")
def _(dense: Function) -> Function:
    return lambda array, true_means="attend": dense(array)


@fault("not-does-nothing", "row 8", "regard.masks.base:NotMask.allows")
def _(allows: Function) -> Function:
    return lambda self, *args: ~allows(self, *args)


@fault("and-is-or", "guarantee 9", "regard.masks.base:AndMask.allows")
def _(allows: Function) -> Function:
    from regard.masks.base import OrMask

    return lambda self, *args: OrMask(self.parts).allows(*args)


@fault("causal-sees-one-ahead", "row 10", "regard.masks.kinds:causal")
def _(causal: Function) -> Function:
    from regard.masks import sliding_window

    return lambda align=None: sliding_window(left=None, right=1, align=align)


@fault("causal-misses-itself", "row 10", "regard.masks.kinds:WindowMask.allows")
def _(allows: Function) -> Function:
    return lambda self, frame, q_idx, kv_idx, xp: allows(self, frame, q_idx - 1, kv_idx, xp)


@fault("window-one-too-wide", "row 18", "regard.masks.kinds:sliding_window")
def _(sliding_window: Function) -> Function:
    return lambda size=None, **options: sliding_window(
        None if size is None else np.asarray(size) + 1, **options
    )


@fault("padding-side-swapped", "guarantee 9", "regard.masks.kinds:padding")
def _(padding: Function) -> Function:
    return lambda lengths, side="right": padding(lengths, {"left": "right", "right": "left"}.get(side, side))


@fault("document-attends-to-earlier-ones", "guarantee 9", "regard.masks.kinds:DocumentMask.allows")
def _(allows: Function) -> Function:
    def earlier(self: Any, frame: Any, q_idx: Any, kv_idx: Any, xp: Any) -> Any:
        return allows(self, frame, q_idx, kv_idx, xp) | xp.asarray(kv_idx[None, :] < q_idx[:, None])[None]

    return earlier


@fault("partial-block-taken-for-full", "guarantee 9", "regard.masks.kinds:WindowMask.classify_blocks")
def _(classify: Function) -> Function:
    def full(self: Any, *args: Any) -> Any:
        may, _ = classify(self, *args)
        return type(classify(self, *args))(may, may)

    return full


@fault("align-swapped", "row 9", "regard.frame:Frame.offset")
def _(offset: Function) -> Function:
    return lambda self, align, operation: -offset(self, align, operation)


@fault("align-guessed", "row 9", "regard.frame:Frame.offset")
def _(offset: Function) -> Function:
    return lambda self, align, operation: offset(self, align or "lower_right", operation)


# -- Scores -----------------------------------------------------------------------------------------------


@fault("masked-score-is-minus-1e9", "row 2", "regard.problem:Problem.scores")
def _(scores: Function) -> Function:
    def finite(self: Any, *args: Any, **options: Any) -> Any:
        tile = scores(self, *args, **options)
        return self.engine.xp.where(tile == -self.engine.xp.inf, -1e9, tile)

    return finite


@fault("scale-dropped", "row 13", "regard.problem:resolve_scale")
def _(resolve_scale: Function) -> Function:
    return lambda scale, head_dim: 1.0 if scale is None else resolve_scale(scale, head_dim)


@fault("scale-without-root", "guarantee 1", "regard.problem:resolve_scale")
def _(resolve_scale: Function) -> Function:
    return lambda scale, head_dim: 1 / head_dim if scale is None else resolve_scale(scale, head_dim)


@fault("scale-0-taken-for-default", "row 13", "regard.problem:resolve_scale")
def _(resolve_scale: Function) -> Function:
    return lambda scale, head_dim: resolve_scale(scale or None, head_dim)


@fault("scale-twice", "row 13", "regard.engines.numpy:NumpyEngine.compute_scores")
def _(compute_scores: Function) -> Function:
    return lambda self, query, key, scale: compute_scores(self, query, key, scale * scale)


@fault("score-mods-reversed", "guarantee 1", "regard.problem:Problem.scores")
def _(scores: Function) -> Function:
    def backwards(self: Any, *args: Any, **options: Any) -> Any:
        return scores(replace(self, score_mods=self.score_mods[::-1]), *args, **options)

    return backwards


@fault("softcap-missing", "row 22", "regard.score_mods:SoftcapMod.apply")
def _(_apply: Function) -> Function:
    return lambda self, scores, *args: scores


@fault("alibi-rewards-distance", "row 20", "regard.score_mods:AlibiMod.additive_bias")
def _(added: Function) -> Function:
    return lambda self, *args: -added(self, *args)


@fault("alibi-slopes-sorted", "row 20", "regard.score_mods:alibi_slopes")
def _(alibi_slopes: Function) -> Function:
    return lambda heads: np.sort(alibi_slopes(heads))[::-1]


@fault("t5-always-bidirectional", "guarantee 1", "regard.score_mods:relative_buckets")
def _(relative_buckets: Function) -> Function:
    return lambda *args, **options: relative_buckets(*args, **{**options, "bidirectional": True})


@fault("half-not-upcast", "row 12", "regard.engines.array_api:ArrayEngine.working_dtype")
def _(_working_dtype: Function) -> Function:
    return lambda self, *arrays: arrays[0].dtype


@fault("grouped-heads-tiled", "row 16", "regard.problem:broadcast_index")
def _(broadcast_index: Function) -> Function:
    def tiled(array: Any, leading_shape: Any, groups: int, *names: str) -> Any:
        index = broadcast_index(array, leading_shape, groups, *names)
        if groups == 1:
            return index
        heads = leading_shape[-1]
        return index.reshape(-1, heads // groups, groups).swapaxes(1, 2).reshape(-1)

    return tiled


# -- Softmax ----------------------------------------------------------------------------------------------


@fault("softmax-without-max", "row 6", "regard.core.block_loop:make_finite")
def _(_make_finite: Function) -> Function:
    return lambda largest, xp: xp.where(largest == largest, 0.0, largest)


@fault("online-softmax-without-rescaling", "row 23", "regard.core.block_loop:update_online_softmax")
def _(update: Function) -> Function:
    def unscaled(stats: Any, scores: Any, engine: Any) -> Any:
        new = update(stats._replace(sum=stats.sum * 0), scores, engine)
        return new._replace(sum=stats.sum + new.sum)

    return unscaled


@fault("inf-minus-inf", "row 7", "regard.core.block_loop:make_finite")
def _(_make_finite: Function) -> Function:
    return lambda largest, xp: largest


@fault("empty-row-is-nan", "row 1", "regard.core.block_loop:normalise")
def _(normalise: Function) -> Function:
    def nan(scores: Any, stats: Any, engine: Any) -> Any:
        weights = normalise(scores, stats, engine)
        return engine.xp.where((stats.max == -engine.xp.inf)[..., None], engine.xp.nan, weights)

    return nan


@fault("empty-row-is-uniform", "row 1", "regard.core.block_loop:normalise")
def _(normalise: Function) -> Function:
    def uniform(scores: Any, stats: Any, engine: Any) -> Any:
        weights = normalise(scores, stats, engine)
        return engine.xp.where((stats.max == -engine.xp.inf)[..., None], 1 / scores.shape[-1], weights)

    return uniform


@fault("live-nan-becomes-zero", "row 3", "regard.core.block_loop:normalise")
def _(normalise: Function) -> Function:
    def clean(scores: Any, stats: Any, engine: Any) -> Any:
        weights = normalise(scores, stats, engine)
        return engine.xp.where(engine.xp.isnan(weights), 0.0, weights)

    return clean


@fault("lse-in-base-2", "row 25", "regard.core.block_loop:SoftmaxStats.lse")
def _(lse: Function) -> Function:
    return lambda self, xp: lse(self, xp) / math.log(2)


@fault("empty-row-lse-is-0", "row 25", "regard.core.block_loop:SoftmaxStats.lse")
def _(lse: Function) -> Function:
    def zero(self: Any, xp: Any) -> Any:
        found = lse(self, xp)
        return xp.where(found == -xp.inf, 0.0, found)

    return zero


@fault("sink-left-out", "row 21", "regard.core.block_loop:init_online_softmax")
def _(init: Function) -> Function:
    return lambda problem, rows: init(replace(problem, sink=None), rows)


# -- Products and parts -----------------------------------------------------------------------------------


@fault("masked-nan-leaks", "row 4", "regard.core.products:Product.step")
def _(step: Function) -> Function:
    from regard.measures.base import copy_with

    return lambda self, *args: step(copy_with(self, finite=True), *args)


@fault("merge-without-shares", "row 23", "regard.core.products:merge_states")
def _(merge: Function) -> Function:
    return lambda parts: (sum(output for output, _ in parts) / len(parts), merge(parts)[1])


@fault("selected-rows-lose-their-positions", "guarantee 3", "regard.problem:Problem.select_rows")
def _(select_rows: Function) -> Function:
    return lambda self, which: replace(select_rows(self, which), positions=np.arange(len(which)))


@fault("selected-heads-keep-the-first", "guarantee 3", "regard.problem:Problem.select_pairs")
def _(select_pairs: Function) -> Function:
    return lambda self, which: select_pairs(self, which * 0)


@fault("fused-lse-of-another-base", "row 25", "regard.engines.torch_fused:run_fused_product")
def _(run_fused_product: Function) -> Function:
    def scaled(*args: Any) -> Any:
        made = run_fused_product(*args)
        return made if made is None else (made[0], made[1] / math.log(2), *made[2:])

    return scaled


@fault("fused-pieces-not-rescaled", "row 23", "regard.engines.torch_bands:compute_share")
def _(compute_share: Function) -> Function:
    import torch

    return lambda *args: torch.full_like(compute_share(*args), 0.5)


@fault("needs-exact-rows-never", "guarantee 10", "regard.problem:may_have_large_scores")
def _(_may_have_large_scores: Function) -> Function:
    return lambda *args: False


# -- Measures ---------------------------------------------------------------------------------------------


@fault("entropy-in-bits", "guarantee 4", "regard.measures.sums:Entropy.step")
def _(step: Function) -> Function:
    def bits(self: Any, state: Any, *args: Any) -> Any:
        before = state + 0.0
        after = step(self, state, *args)
        return before + (after - before) / math.log(2)

    return bits


@fault("received-over-the-keys", "guarantee 4", "regard.measures.sums:Received.__init__")
def _(_init: Function) -> Function:
    return lambda self, *args, **options: object.__setattr__(self, "axis", -1)


@fault("distance-with-its-sign", "guarantee 4", "regard.measures.sums:Distance.step")
def _(step: Function) -> Function:
    def signed(self: Any, state: Any, weights: Any, scores: Any, q_idx: Any, kv_idx: Any, xp: Any) -> Any:
        return step(
            self,
            state,
            xp.where((kv_idx > q_idx[:, None])[None], -weights, weights),
            scores,
            q_idx,
            kv_idx,
            xp,
        )

    return signed


@fault("coarse-max-merged-by-sum", "guarantee 4", "regard.measures.sums:Coarse.merge")
def _(_merge: Function) -> Function:
    return lambda self, a, b: a + b


@fault("ties-go-to-the-last", "guarantee 4", "regard.engines.numpy:NumpyEngine.topk")
def _(topk: Function) -> Function:
    def last(self: Any, weights: Any, k: int) -> Any:
        values, columns = topk(self, weights[..., ::-1], k)
        return values, weights.shape[-1] - 1 - columns

    return last


# -- Positions and layers ---------------------------------------------------------------------------------


@fault("rope-layout-swapped", "row 19", "regard.positions:rotate")
def _(rotate: Function) -> Function:
    other = {"half": "interleaved", "interleaved": "half"}
    return lambda x, cos, sin, layout: rotate(x, cos, sin, other[layout])


@fault("rope-rotates-backwards", "row 19", "regard.positions:rotate")
def _(rotate: Function) -> Function:
    return lambda x, cos, sin, layout: rotate(x, cos, -sin, layout)


@fault("rope-rotates-the-keys-only", "row 19", "regard.nn.attention:MultiheadAttention._rotate")
def _(rotate: Function) -> Function:
    def keys_only(self: Any, query: Any, key: Any, *args: Any) -> Any:
        return query, rotate(self, query, key, *args)[1]

    return keys_only


@fault("cache-positions-off-by-one", "row 18", "regard.nn.cache:KVCache.next_positions")
def _(next_positions: Function) -> Function:
    return lambda self, *args: next_positions(self, *args) + 1


@fault("padding-mask-ignored", "row 8", "regard.nn.attention:_combine_masks")
def _(_combine_masks: Function) -> Function:
    return lambda first, *others: first


@fault("layer-scale-is-the-default", "guarantee 1", "regard.core.attention:layer_attention")
def _(layer_attention: Function) -> Function:
    return lambda query, key, value, **options: layer_attention(
        query, key, value, **{**options, "scale": None}
    )


# -- The course -------------------------------------------------------------------------------------------


@fault("learn-softmax-over-the-queries", "guarantee 1", "regard.learn.softmax_alternatives:softmax")
def _(softmax: Function) -> Function:
    return lambda scores, *args, **options: softmax(scores.swapaxes(-1, -2), *args, **options).swapaxes(
        -1, -2
    )
