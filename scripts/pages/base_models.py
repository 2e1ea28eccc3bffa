"""The loop of the pages about models: build every base model of transformers tiny, check it, and list the results."""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers as hf

from tests.helpers.base_models import VARIANTS, build_model, list_models

from .page import add_write_option, format_table

Result = tuple[str, str]  # a word, and a remark
Row = tuple[str, str, str]  # the name of a model class, and its result


def add_model_options(parser: argparse.ArgumentParser, page: str) -> None:
    """Add the options that both pages have."""
    add_write_option(parser, page)
    parser.add_argument("only", nargs="*", help="model types; default: all, which takes long")


def describe_error(error: Exception, length: int) -> str:
    """Return the type of an error and the beginning of its first line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:length] if str(error) else ''}"


# Check a variant: its name, and the model, configuration, inputs and plain output that were built. Returns the result,
# and whether it is final; if not, the next variant is tried.
Check = Callable[[str, tuple[Any, ...]], tuple[Result, bool]]


def check_model(model_class: type, config_class: Any, check: Check) -> Result:
    """Check one model in the first variant of its sizes and inputs that can be built and has a final result."""
    result: Result | None = None
    for variant in VARIANTS:
        try:
            built = build_model(model_class, config_class, variant)
        except Exception as error:
            message = describe_error(error, 80)
            result = result or ("not built", message)
            if isinstance(error, ImportError | NotImplementedError) or "required positional" in message:
                break
            continue
        result, is_final = check(variant, built)
        if is_final:
            break
    assert result
    return result


def check_models(only: list[str], check: Check) -> tuple[list[Row], Counter[str]]:
    """Check every model class once, or those of some types; print and return the results, and count them."""
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    rows: dict[str, Result] = {}
    for model_type, model_class, config_class in list_models():
        name = model_class.__name__
        if (only and model_type not in only) or name in rows:
            continue
        rows[name] = result, remark = check_model(model_class, config_class, check)
        print(f"{result:17} {name:40} {remark}", flush=True)
    counts = Counter(result for result, _ in rows.values())
    print(dict(counts))
    return [(name, *row) for name, row in rows.items()], counts


def format_rows(rows: Iterable[Row], remark: str = "remark") -> str:
    """Format the table of models, results and remarks."""
    return format_table(
        ("model", "result", remark), [[cell.replace("|", " ") for cell in row] for row in rows]
    )
