"""Gradients of `A @ value` over many ranks equal those of the dense computation under the error rule."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from regard import causal, padding, sliding_window, softcap  # noqa: E402
from regard.testing import assert_matches  # noqa: E402
from tests.helpers.ring_cases import Split, differentiate  # noqa: E402

N = 53
CASES = {
    "no mask": ({}, False, torch.float32, Split("contiguous", (20, 10, 23), (20, 10, 23))),
    "causal zigzag": ({"mask": causal()}, False, torch.float32, Split("zigzag", (18, 17, 18), (18, 17, 18))),
    "window, uneven": (
        {"mask": sliding_window(9)},
        False,
        torch.float32,
        Split("zigzag", (5, 30, 18), (5, 30, 18)),
    ),
    "padding and sink": (
        {"mask": padding([50, 20])},
        True,
        torch.float32,
        Split("contiguous", (27, 26), (26, 27)),
    ),
    "softcap": (
        {"mask": causal(), "score_mod": softcap(2.0)},
        True,
        torch.float32,
        Split("zigzag", (27, 26), (27, 26)),
    ),
    "bfloat16": ({"mask": causal()}, False, torch.bfloat16, Split("zigzag", (18, 17, 18), (18, 17, 18))),
    "four ranks": (
        {"mask": causal()},
        True,
        torch.float32,
        Split("zigzag", (13, 15, 12, 13), (13, 15, 12, 13)),
    ),
    "an empty rank": ({"mask": causal()}, False, torch.float64, Split("contiguous", (53, 0, 0), (0, 53, 0))),
}


def differentiate_dense(arrays, grad, mask, cap, dtype) -> list:
    """Compute the gradients of eager attention at a dtype."""
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in arrays]
    query, key, value, *sink = leaves
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores.masked_fill(~torch.tensor(mask.to_dense(*scores.shape)), -torch.inf)
    if sink:
        column = sink[0][None, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1).nan_to_num()
    (weights @ value).backward(grad.to(dtype))
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly) if name == "four ranks" else name for name in CASES],
)
def test_gradients_equal_those_of_one_process(ranks, name) -> None:
    arguments, has_sink, dtype, split = CASES[name]
    rng = np.random.default_rng(0)
    shapes = ((2, 4, N, 8), (2, 2, N, 8), (2, 2, N, 5), *(((4,),) if has_sink else ()), (2, 4, N, 5))
    *arrays, grad = (torch.tensor(rng.normal(size=shape)).to(dtype) for shape in shapes)
    size = len(split.queries)
    results = ranks.run(
        differentiate, arrays, grad, split, {**arguments, "enable_gqa": True}, ranks=range(size)
    )
    cap = 2.0 if "score_mod" in arguments else None
    exact, naive = (
        differentiate_dense([x.double() for x in arrays], grad.double(), arguments.get("mask"), cap, wide)
        for wide in (torch.float64, dtype)
    )
    for i, what in enumerate(["query", "key", "value", "sink"][: len(arrays)]):
        if what == "sink":  # each rank has the part of its own rows
            found = sum(result[i].double() for result in results)
        else:
            found = torch.full_like(exact[i], torch.nan)
            for rank, result in enumerate(results):
                found[..., split.positions(rank)[what != "query"], :] = result[i].double()
        assert_matches(
            found.numpy(), exact[i].numpy(), naive[i].double().numpy(), dtype=dtype, factor=3.0, what=what,
            magnitude=exact[i].abs().amax().numpy(),
        )  # fmt: skip
