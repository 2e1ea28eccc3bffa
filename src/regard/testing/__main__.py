"""`python -m regard.testing module:function`: the report of the conformance kit on one function."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from regard._errors import ArgumentError, RegardError
from regard.testing._conformance import SIZES, conformance
from regard.testing._ready import READY


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


def load(path: str) -> Callable[..., Any]:
    """The function that `module:function` names; a module beside the caller is found too.

    >>> load("regard:attention").__name__
    'attention'
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ArgumentError(
            "load", received=repr(path), expected="module:function, as in my_package.attention:forward",
            cure="Write the module as it is imported, a colon, and the name of the function in it.",
        )  # fmt: skip
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ArgumentError(
            "load", received=f"{path!r} ({error})", expected="a module that can be imported",
            cure="Start in the directory it lies in, write it without .py, and install what it imports.",
        ) from error  # fmt: skip
    try:
        return functools.reduce(getattr, name.split("."), module)  # type: ignore[no-any-return]
    except AttributeError:
        public = ", ".join(
            sorted(x for x, value in vars(module).items() if callable(value) and x[0] != "_")[:12]
        )
        raise ArgumentError(
            "load", received=repr(path), expected=f"a function of {module_name}, which has {public or 'none'}",
            cure="Check the name after the colon.",
        ) from None  # fmt: skip


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
