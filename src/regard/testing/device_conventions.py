"""Find out the conventions of a device's private attention operators: corners, groups, empty rows, what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Tensor = Any  # torch is imported when it is used


@dataclass(frozen=True)
class Operator:
    """A private operator, and the conventions that regard relies on.

    Args:
        name: Name of the operator in `torch.ops.aten`.
        run: Function of query, key, value (batch, heads, length, dim), is_causal and a bias or None that returns
            output and lse.
        dtype: Name of the dtype to run it in.
        corner: Corner that a causal mask starts from; None if regard makes square causal calls only.
        takes_bias: Whether it takes a bias.
    """

    name: str
    run: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], tuple[Tensor, Tensor]]
    dtype: str
    corner: str | None
    takes_bias: bool


def list_operators(device_type: str) -> list[Operator]:
    """List the operators that regard calls on a device type; empty if it calls none.

    Args:
        device_type: "cpu", "cuda", …
    """
    from regard.engines import torch_cuda, torch_kernels

    def cpu_flash(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return torch_kernels.CPU_FLASH.forward(q, k, v, causal, bias, 1.0)

    def efficient(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        run = torch_cuda.aten._scaled_dot_product_efficient_attention
        output, lse, *_ = run(q, k, v, bias, True, 0.0, causal, scale=1.0)
        return output, lse[..., : q.shape[2]]

    def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        run = torch_cuda.aten._scaled_dot_product_flash_attention
        output, lse, *_ = run(q, k, v, 0.0, causal, False, scale=1.0)
        return output, lse

    def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        run = torch_cuda.aten._scaled_dot_product_cudnn_attention
        output, lse, *_ = run(q, k, v, bias, True, 0.0, causal, False, scale=1.0)
        return output, lse.reshape(q.shape[:3])

    found = {
        "cpu": [
            Operator(
                "_scaled_dot_product_flash_attention_for_cpu",
                cpu_flash,
                "float32",
                "upper_left",
                takes_bias=True,
            )
        ],
        "cuda": [
            Operator(
                "_scaled_dot_product_efficient_attention", efficient, "float32", "upper_left", takes_bias=True
            ),
            Operator("_scaled_dot_product_flash_attention", flash, "bfloat16", None, takes_bias=False),
            Operator("_scaled_dot_product_cudnn_attention", cudnn, "bfloat16", None, takes_bias=False),
        ],
    }
    return found.get(device_type, [])


def describe_conventions(device_type: str) -> list[dict[str, Any]]:
    """Describe what the operators of a device type do with calls whose meaning their schemas leave open.

    Args:
        device_type: "cpu", "cuda", …

    Returns:
        For each operator: "operator"; "causal_corner" of a call with more keys than queries, "lse" ("natural
        logarithm", its dtype), "empty_row", "grouped_heads", "float64" and "head_dim_3", which are "refused" if it
        raises; and "problems", the conventions that regard relies on and that do not hold.

    >>> [entry["causal_corner"] for entry in describe_conventions("cpu")]
    ['upper_left']
    """
    return [dict(_describe(operator, device_type)) for operator in list_operators(device_type)]


def _describe(operator: Operator, device_type: str) -> Iterator[tuple[str, Any]]:
    import torch

    dtype = getattr(torch, operator.dtype)
    tolerance = 1e-5 if operator.dtype == "float32" else 3e-2
    problems: list[str] = []

    def draw(heads: int, length: int, dim: int = 8, wide: Any = None) -> Tensor:
        numbers = torch.arange(heads * length * dim, dtype=torch.float32)
        tensor = (numbers * 0.7 + length).sin().reshape(1, heads, length, dim).to(wide or dtype)
        return tensor.to(device_type)

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None = None) -> Any:
        try:
            output, lse = operator.run(q, k, v, causal, bias)
            return output.cpu().double(), lse.cpu().double(), lse.dtype
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            return str(error).splitlines()[0][:120] if str(error) else type(error).__name__

    def define(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (x.cpu().double() for x in (q, k, v))
        scores = (q @ k.mT).masked_fill(hidden, -math.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    yield "operator", operator.name
    yield "dtype", operator.dtype
    q, k, v = draw(2, 3), draw(2, 5), draw(2, 5)
    plain = run(q, k, v, False)
    if isinstance(plain, str):
        yield "refused", plain
        yield "problems", []  # an operator that does not run is not used
        return
    everything = torch.zeros((3, 5), dtype=torch.bool)
    exact_output, exact_lse = define(q, k, v, everything)
    is_natural = torch.allclose(plain[1], exact_lse, atol=1e-4)
    yield (
        "lse",
        f"natural logarithm, {str(plain[2]).removeprefix('torch.')}" if is_natural else "another quantity",
    )
    if not is_natural or not torch.allclose(plain[0], exact_output, atol=tolerance):
        problems.append("output or lse of a plain call is wrong")
    corners = {
        "upper_left": everything.logical_not().triu(1),
        "lower_right": everything.logical_not().triu(3),
    }
    causal = run(q, k, v, True)
    corner = "refused" if isinstance(causal, str) else "neither"
    for name, hidden in corners.items():
        if not isinstance(causal, str) and torch.allclose(
            causal[0], define(q, k, v, hidden)[0], atol=tolerance
        ):
            corner = name
    yield "causal_corner", corner
    if operator.corner is not None and corner != operator.corner:
        problems.append(f"a causal mask starts from {corner}, not from {operator.corner}")
    if operator.takes_bias:
        bias = torch.zeros((1, 2, 3, 8), dtype=dtype).to(device_type)[..., :5]  # aligned rows
        bias[:, :, 1] = -math.inf
        masked = run(q, k, v, False, bias)
        yield "empty_row", masked if isinstance(masked, str) else _describe_row(masked)
        if isinstance(masked, str) or float(masked[1][0, 0, 1]) not in (0.0, -math.inf):
            problems.append("a row without live keys has neither an lse of 0 nor of −inf")
    many = draw(4, 5)
    grouped = run(many, k, v, False)
    if not isinstance(grouped, str):
        wide_k, wide_v = (x.repeat_interleave(2, 1) for x in (k, v))
        expected, _ = define(many, wide_k, wide_v, torch.zeros((5, 5), dtype=torch.bool))
        grouped = "taken" if torch.allclose(grouped[0], expected, atol=tolerance) else "wrong"
    yield "grouped_heads", grouped if grouped in ("taken", "wrong") else "refused"
    for what, dim, wide in (("float64", 8, torch.float64), ("head_dim_3", 3, dtype)):
        try:
            q, k, v = (draw(2, length, dim, wide) for length in (3, 5, 5))
            found = run(q, k, v, False)
        except (RuntimeError, TypeError) as error:  # the device has no such dtype
            found = str(error)
        yield what, "refused" if isinstance(found, str) else "taken"
    yield "problems", problems


def _describe_row(result: Any) -> str:
    output, lse, _ = result
    return f"output {float(output[0, 0, 1, 0]):g}, lse {float(lse[0, 0, 1]):g}"
