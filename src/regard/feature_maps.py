"""Feature maps of linear attention: what turns a query or a key into features that are never negative.

A feature map is any function of one array (…, length, head_dim) that returns one (…, length, features) of the same
kind. Those that have a name here may be given by it:

>>> import regard
>>> regard.linear_attention([[1.0, -1.0]], [[0.0, 2.0]], feature_map="relu").to_dense()
array([[0.]])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from regard.engines import Engine, find_engine
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.types import Array
from regard.validation import check_count

__all__ = ["FeatureMap", "RandomFeatures", "elu", "random_features", "relu"]

# A function from vectors (…, n, head_dim) to features (…, n, features), none of them below 0.
FeatureMap = Callable[[Any], Any]


def elu(x: Array) -> Array:
    """x + 1 above 0 and exp(x) below, that is elu + 1, never 0 (Katharopoulos et al., 2006.16236).

    >>> elu(np.array([-1.0, 0.0, 2.0])).round(4)
    array([0.3679, 1.    , 3.    ])
    """
    xp = find_engine("elu", x=x).xp
    zero = xp.asarray(0.0, dtype=x.dtype)
    return xp.maximum(x, zero) + xp.exp(xp.minimum(x, zero))  # at 0 each half has half the gradient


def relu(x: Array) -> Array:
    """What x has above 0. Where a query and a key have no feature in common, the key is hidden from it.

    >>> relu(np.array([-1.0, 0.0, 2.0]))
    array([0., 0., 2.])
    """
    return find_engine("relu", x=x).xp.clip(x, 0.0, None)


@dataclass(frozen=True)
class RandomFeatures:
    """Positive random features of softmax attention; see `random_features`.

    >>> import numpy as np
    >>> from regard.feature_maps import random_features
    >>> random_features(count=8)
    random_features(8, seed=0)
    >>> random_features(count=8)(np.ones((3, 4))).shape
    (3, 8)
    """

    count: int
    seed: int

    def __call__(self, x: Array) -> Array:
        xp = find_engine("random_features", x=x).xp
        x = x / float(x.shape[-1]) ** 0.25
        directions = xp.asarray(_directions(x.shape[-1], self.count, self.seed), dtype=x.dtype)
        half = xp.sum(x * x, axis=-1)[..., None] / 2
        return xp.exp(x @ directions - half - math.log(self.count) / 2)

    def __repr__(self) -> str:
        return f"random_features({self.count}, seed={self.seed})"


def random_features(count: int = 256, seed: int = 0) -> RandomFeatures:
    """Features whose product is exp(query · key / √head_dim) on the average: softmax attention, estimated.

    exp(ω · x − |x|² / 2) / √count for `count` random directions ω, orthogonal where there is room, and x divided by
    the fourth root of head_dim (Choromanski et al., 2009.14794). The same seed gives the same directions.

    >>> rng = np.random.default_rng(0)
    >>> query, key = rng.normal(size=(2, 64, 16)) / 2
    >>> import regard
    >>> exact = regard.attention(query, key).to_dense()
    >>> for count in (64, 256, 1024, 4096):
    ...     near = regard.linear_attention(query, key, feature_map=random_features(count)).to_dense()
    ...     print(f"{count:4} features: {abs(near - exact).sum(-1).mean() / 2:.3f} of a row misplaced")
      64 features: 0.086 of a row misplaced
     256 features: 0.045 of a row misplaced
    1024 features: 0.025 of a row misplaced
    4096 features: 0.013 of a row misplaced
    """
    check_count(count, 1, 1 << 20, "random_features", "count", "", "256 features are a good beginning.")
    check_count(seed, 0, (1 << 63) - 1, "random_features", "seed", "", "Any whole number will do: 0.")
    return RandomFeatures(int(count), int(seed))


@lru_cache(maxsize=64)
def _directions(width: int, count: int, seed: int) -> Array:
    """Random directions (width, count), as long as those of a normal distribution, orthogonal in runs of `width`."""
    rng = np.random.default_rng(seed)
    if not width:
        return np.zeros((0, count))
    runs = [np.linalg.qr(rng.normal(size=(width, width))) for _ in range(-(-count // width))]
    # Signs are the factorisation's choice, the same every time, unless they are taken from the other factor.
    directions = np.concatenate([run.Q * np.sign(np.diag(run.R)) for run in runs], axis=1)[:, :count]
    return directions * np.linalg.norm(rng.normal(size=(width, count)), axis=0)


NAMED: dict[str, FeatureMap] = {"elu": elu, "relu": relu}


def resolve_feature_map(feature_map: Any) -> tuple[FeatureMap, str]:
    """A feature map that was given, or named, and how it is called."""
    if isinstance(feature_map, str) and feature_map in NAMED:
        return NAMED[feature_map], feature_map
    if isinstance(feature_map, str) or not callable(feature_map) or isinstance(feature_map, type):
        raise (ArgumentError if isinstance(feature_map, str) else ArgumentTypeError)(
            "linear_attention",
            received=f"feature_map={feature_map!r}"
            if isinstance(feature_map, str)
            else describe_argument(feature_map),
            expected=" or ".join(f'"{name}"' for name in NAMED)
            + ", or a function of one array (…, length, head_dim)",
            hint="For an estimate of softmax attention take regard.feature_maps.random_features().",
        )
    if feature_map is random_features:
        raise ArgumentTypeError(
            "linear_attention",
            received=describe_argument(feature_map),
            expected="a feature map",
            hint="Call it: random_features().",
        )
    called = getattr(feature_map, "__name__", None) or repr(feature_map)
    return feature_map, type(
        feature_map
    ).__name__ if "\n" in called else called  # modules print over many lines


def compute_features(array: Array, feature_map: FeatureMap, called: str, engine: Engine, name: str) -> Array:
    """The features (…, length, features) of a query or a key, checked: as many as there are tokens, none negative."""
    with engine.suppress_warnings():
        made = feature_map(array)
        owner = find_engine("linear_attention", **{f"the features of {name}": made})
        made = owner.as_float(made, "linear_attention", f"the features of {name}")
        if owner.name != engine.name or tuple(made.shape[:-1]) != tuple(array.shape[:-1]):
            raise ArgumentError(
                "linear_attention",
                received=f"{called} of {name} {tuple(array.shape)} as {describe_argument(made)}",
                expected=f"features of shape (…, length, features), {tuple(array.shape[:-1])} and one axis more, "
                f"of {engine.name}",
                hint="A feature map works on the last axis and leaves the others as they are.",
            )
        if bool(engine.xp.any(made < 0)):
            raise ArgumentError(
                "linear_attention",
                received=f"{called} of {name} with features down to {engine.to_numpy(made).min():g}",
                expected="features that are never negative, so that weights are shares",
                hint='Take what it has above 0, its exponential, or "elu".',
            )
        return made
