"""Command line of the conformance kit: `python -m regard.testing module:function` prints the report of a function."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from regard.errors import RegardError
from regard.models.loading import import_function
from regard.testing.conformance.presets import PRESETS
from regard.testing.conformance.runner import SIZES, check_conformance


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of a function."""
    parsed = _build_parser().parse_args(arguments)
    options = {"function", "json", "size", "convention"}
    fields = {
        name: value for name, value in vars(parsed).items() if value is not None and name not in options
    }
    try:
        report = check_conformance(
            import_function(parsed.function), parsed.convention, size=parsed.size, **fields
        )
    except RegardError as error:
        print(f"regard.testing: {error}", file=sys.stderr)
        return 2
    print(report.to_json() if parsed.json else report)
    return 0 if report.ok else 1


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m regard.testing",
        description="Run every call of the conformance kit on an attention function fn(query, key, value, …), and "
        "report what it supports and what is wrong with it. Options that are not set are read from the function.",
    )
    parser.add_argument(
        "function", help="module:function, e.g. torch.nn.functional:scaled_dot_product_attention"
    )
    parser.add_argument("--convention", choices=PRESETS, help="name of a preset")
    parser.add_argument("--layout", help='axes in order, e.g. "b h n d", "n b h d", "b n (h d)", "n d"')
    parser.add_argument(
        "--mask", choices=("keep", "drop", "additive"), help="meaning of True in a mask, or 0 and −inf"
    )
    parser.add_argument(
        "--causal", choices=("upper_left", "lower_right"), help="alignment of its causal mask"
    )
    parser.add_argument("--library", choices=("numpy", "torch", "jax"), help="library of its arrays")
    parser.add_argument("--device", help="device of torch tensors, e.g. cuda:0")
    for name, option in (
        ("mask", "mask"),
        ("causal", "causal flag"),
        ("scale", "scale"),
        ("heads", "number of heads"),
    ):
        parser.add_argument(f"--{name}-argument", help=f"name of its argument for the {option}")
    parser.add_argument(
        "--grouped",
        action="store_true",
        default=None,
        help="the function accepts fewer key heads than query heads",
    )
    parser.add_argument(
        "--returns",
        choices=("output, weights", "weights, output"),
        metavar="ORDER",
        help='order of the pair it returns: "output, weights" or "weights, output"',
    )
    parser.add_argument(
        "--unsupported",
        nargs="+",
        metavar="CAPABILITY",
        help="rows of the report that the function does not support",
    )
    parser.add_argument("--size", choices=SIZES, default="quick", help="number of calls (default: quick)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
