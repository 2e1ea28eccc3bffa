"""`python -m regard.testing module:function`: the report of the conformance kit on one function."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from regard.errors import RegardError
from regard.models.function_loading import import_function as load
from regard.testing.conformance.presets import READY
from regard.testing.conformance.runner import SIZES, conformance


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 0 where nothing was found, 1 where something was, 2 where the question was wrong."""
    said = _parser().parse_args(arguments)
    options = {"function", "json", "size", "convention"}
    described = {
        name: value for name, value in vars(said).items() if value is not None and name not in options
    }
    try:
        report = conformance(load(said.function), said.convention, size=said.size, **described)
    except RegardError as error:
        print(f"regard.testing: {error}", file=sys.stderr)
        return 2
    print(report.to_json() if said.json else report)
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m regard.testing",
        description="Ask an attention function fn(query, key, value, …) every question of the conformance kit, and "
        "say what it can do and what is wrong with it. What is not described is read off the function.",
    )
    parser.add_argument(
        "function", help="module:function, as in torch.nn.functional:scaled_dot_product_attention"
    )
    parser.add_argument("--convention", choices=READY, help="a ready description")
    parser.add_argument("--layout", help='axes in order, as in "b h n d", "n b h d", "b n (h d)", "n d"')
    parser.add_argument(
        "--mask", choices=("keep", "drop", "additive"), help="what True, or 0, in a mask does"
    )
    parser.add_argument(
        "--causal", choices=("upper_left", "lower_right"), help="where its causal triangle starts"
    )
    parser.add_argument("--library", choices=("numpy", "torch", "jax"), help="the arrays it takes")
    parser.add_argument("--device", help="where torch puts them")
    for name, what in (
        ("mask", "mask"),
        ("causal", "causal flag"),
        ("scale", "scale"),
        ("heads", "number of heads"),
    ):
        parser.add_argument(f"--{name}-argument", help=f"the name of its argument for the {what}")
    parser.add_argument(
        "--grouped", action="store_true", default=None, help="it takes fewer key heads than heads"
    )
    parser.add_argument(
        "--returns", choices=("output, weights", "weights, output"), help="where it returns two"
    )
    parser.add_argument(
        "--without", nargs="+", metavar="CAPABILITY", help="rows of the table it does not claim"
    )
    parser.add_argument("--size", choices=SIZES, default="quick")
    parser.add_argument("--json", action="store_true", help="the report for scripts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
