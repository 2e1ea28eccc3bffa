"""Feature maps of linear attention: functions from queries and keys to features that are never negative.

A feature map is any function of one array (…, length, head_dim) that returns one (…, length, features) of the same
library. The maps "elu" and "relu" can be passed by name:

>>> import regard
>>> regard.linear_attention([[1.0, -1.0]], [[0.0, 2.0]], feature_map="relu").to_dense()
array([[0.]])

This module may import engines and the modules below it.
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

# A function from vectors (…, length, head_dim) to features (…, length, features), none of them below 0.
FeatureMap = Callable[[Array], Array]


def elu(x: Array) -> Array:
    """Compute x + 1 above 0 and exp(x) below, that is elu plus 1, never 0 (Katharopoulos et al., 2006.16236).

    Args:
        x: Array of any shape.

    Returns:
        The features, of the same shape.

    >>> elu(np.array([-1.0, 0.0, 2.0])).round(4)
    array([0.3679, 1.    , 3.    ])
    """
    xp = find_engine("elu", x=x).xp
    zero = xp.asarray(0.0, dtype=x.dtype)
    return xp.maximum(x, zero) + xp.exp(xp.minimum(x, zero))  # at 0 each term has half the gradient


def relu(x: Array) -> Array:
    """Compute max(x, 0). If a query and a key have no feature in common, the key is masked for that query.

    Args:
        x: Array of any shape.

    Returns:
        The features, of the same shape.

    >>> relu(np.array([-1.0, 0.0, 2.0]))
    array([0., 0., 2.])
    """
    return find_engine("relu", x=x).xp.clip(x, 0.0, None)


@dataclass(frozen=True)
class RandomFeatures:
    """Positive random features of softmax attention; `random_features` makes them.

    Args:
        count: Number of features.
        seed: Seed of the random directions.

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
        """Compute the features (…, length, count) of vectors (…, length, head_dim)."""
        xp = find_engine("random_features", x=x).xp
        x = x / float(x.shape[-1]) ** 0.25
        directions = xp.asarray(_draw_directions(x.shape[-1], self.count, self.seed), dtype=x.dtype)
        half_norm = xp.sum(x * x, axis=-1)[..., None] / 2
        return xp.exp(x @ directions - half_norm - math.log(self.count) / 2)

    def __repr__(self) -> str:
        return f"random_features({self.count}, seed={self.seed})"


def random_features(count: int = 256, seed: int = 0) -> RandomFeatures:
    """Make random features whose expected product is exp(query · key / √head_dim), which estimates softmax attention.

    The features are exp(ω · x − |x|² / 2) / √count for `count` random directions ω, where x is divided by the fourth
    root of head_dim. Directions are orthogonal in groups of head_dim (Choromanski et al., 2009.14794).

    Args:
        count: Number of features; the error falls with its square root.
        seed: Seed of the directions; equal seeds give equal features.

    Returns:
        The feature map.

    Raises:
        ArgumentError: If `count` or `seed` is not an integer in its range.

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
    check_count(count, 1, 1 << 20, "random_features", "count", "", "256 features are a good start.")
    check_count(seed, 0, (1 << 63) - 1, "random_features", "seed", "", "For example seed=0.")
    return RandomFeatures(int(count), int(seed))


@lru_cache(maxsize=64)
def _draw_directions(width: int, count: int, seed: int) -> Array:
    """Draw directions (width, count) with the norms of normal vectors, orthogonal in groups of `width`."""
    rng = np.random.default_rng(seed)
    if not width:
        return np.zeros((0, count))
    groups = [np.linalg.qr(rng.normal(size=(width, width))) for _ in range(-(-count // width))]
    # Without the signs of R, the signs of Q would be those of the algorithm, not random.
    directions = np.concatenate([group.Q * np.sign(np.diag(group.R)) for group in groups], axis=1)[:, :count]
    return directions * np.linalg.norm(rng.normal(size=(width, count)), axis=0)


FEATURE_MAPS: dict[str, FeatureMap] = {"elu": elu, "relu": relu}


def resolve_feature_map(feature_map: str | FeatureMap) -> tuple[FeatureMap, str]:
    """Return the function and the name of a feature map that was passed as a function or by name."""
    if isinstance(feature_map, str) and feature_map in FEATURE_MAPS:
        return FEATURE_MAPS[feature_map], feature_map
    if isinstance(feature_map, str) or not callable(feature_map) or isinstance(feature_map, type):
        raise (ArgumentError if isinstance(feature_map, str) else ArgumentTypeError)(
            "linear_attention",
            received=f"feature_map={feature_map!r}"
            if isinstance(feature_map, str)
            else describe_argument(feature_map),
            expected=" or ".join(f'"{name}"' for name in FEATURE_MAPS)
            + ", or a function of one array (…, length, head_dim)",
            hint="To estimate softmax attention, use regard.feature_maps.random_features().",
        )
    if feature_map is random_features:
        raise ArgumentTypeError(
            "linear_attention",
            received=describe_argument(feature_map),
            expected="a feature map",
            hint="Call it: random_features().",
        )
    name: str = getattr(feature_map, "__name__", None) or repr(feature_map)
    # The repr of a torch module has many lines.
    return feature_map, type(feature_map).__name__ if "\n" in name else name


def compute_features(
    array: Array, feature_map: FeatureMap, map_name: str, engine: Engine, name: str
) -> Array:
    """Compute the features (…, length, features) of a query or a key, and validate their shape and sign."""
    with engine.suppress_warnings():
        features: Any = feature_map(array)
        owner = find_engine("linear_attention", **{f"the features of {name}": features})
        features = owner.as_float(features, "linear_attention", f"the features of {name}")
        if owner.name != engine.name or tuple(features.shape[:-1]) != tuple(array.shape[:-1]):
            raise ArgumentError(
                "linear_attention",
                received=f"{map_name} of {name} {tuple(array.shape)} as {describe_argument(features)}",
                expected=f"features of shape (…, length, features), {tuple(array.shape[:-1])} plus one axis, "
                f"of {engine.name}",
                hint="A feature map changes only the last axis.",
            )
        if bool(engine.xp.any(features < 0)):
            raise ArgumentError(
                "linear_attention",
                received=f"{map_name} of {name} with features down to {engine.to_numpy(features).min():g}",
                expected="non-negative features, so that the weights of a row sum to 1",
                hint='Apply max(0, ·) or the exponential, or use "elu".',
            )
        return features
