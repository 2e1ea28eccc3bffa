"""The loop of the checks of models: build every base model of transformers tiny, check it, and keep the result."""

from __future__ import annotations

import argparse
import datetime
import json
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers.models.auto import modeling_auto as auto

from tests.helpers.base_models import VARIANTS, build_model, list_models

from .page import DOCS

RESULTS = DOCS / "supported-models.json"
Result = tuple[str, str]  # a word, and a remark


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all checks of models have."""
    parser.add_argument("--write", action="store_true", help=f"keep the results in docs/{RESULTS.name}")
    parser.add_argument("only", nargs="*", help="model types; default: all, which takes long")


def find_kind(model_class: Any, config_class: Any) -> str:
    """Return the kind of model, by which the page groups: what it reads, and what it is for."""
    parts = getattr(config_class, "sub_configs", {})
    try:
        main = getattr(model_class, "main_input_name", "input_ids")
    except ImportError:  # it stands in for a class whose library is not installed
        main = "input_ids"
    if "text_config" in parts and len(parts) > 1:
        return "images or sound with text"
    if main == "pixel_values" or "vision" in config_class.model_type:
        return "images and video"
    if main in ("input_features", "input_values"):
        return "sound"
    if config_class in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return "text to text"
    if config_class in auto.MODEL_FOR_MASKED_LM_MAPPING:
        return "text encoders"
    return "text generation" if config_class in auto.MODEL_FOR_CAUSAL_LM_MAPPING else "other models"


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


def check_models(column: str, options: argparse.Namespace, check: Check) -> int:
    """Check every model class once, or those of some types, and print the results; return 1 if any failed.

    Args:
        column: Key of the results in docs/supported-models.json: watch, intervene or implementation.
        options: With `write`, the file gets the results; results of models that were not checked stay.
        check: Checks one variant of a model.
    """
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    kinds: dict[str, str] = {}
    rows: dict[str, Result] = {}
    for model_type, model_class, config_class in list_models():
        name = model_class.__name__
        if (options.only and model_type not in options.only) or name in rows:
            continue
        rows[name] = result, remark = check_model(model_class, config_class, check)
        kinds[name] = find_kind(model_class, config_class)
        print(f"{result:17} {name:40} {remark}", flush=True)
    counts = Counter(result for result, _ in rows.values())
    print(dict(counts))
    if options.write:
        found = json.loads(RESULTS.read_text("utf-8"))
        for name, row in rows.items():
            model = found["models"].setdefault(name, {})
            model |= {"kind": kinds[name], column: row}
        found["transformers"][column] = hf.__version__
        found["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
        found["listed"] = len({model_class for _, model_class, _ in list_models()})
        write_results(found)
    return int(counts["failed"] > 0)


def write_results(found: dict[str, Any]) -> None:
    """Write the results, one line for each model."""
    models = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(found["models"].items())
    )
    head = json.dumps({key: found[key] for key in ("transformers", "date", "listed")})
    RESULTS.write_text(f'{head[:-1]}, "models": {{\n{models}\n}}}}\n', "utf-8")
