"""Run the models of other packages that tests/third_party lists, and keep the results for the page of supported models.

Needs the environment of `scripts/setup --third-party`. A model is *captured* if its outputs are bit-identical under
`watch`, and each recorded matrix equals the weights of its package's dense path or of torch's math kernel. Edits are
checked as for the models of transformers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import warnings
from typing import Any

import torch

from tests.third_party.checks import build, check_watch
from tests.third_party.models import MODELS
from tests.third_party.packages import find_version

from .base_models import RESULTS, describe_error, write_results
from .lens_coverage import run_edited


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help=f"keep the results in docs/{RESULTS.name}")
    parser.add_argument("only", nargs="*", help="parts of names; default: all")


def check_model(name: str) -> dict[str, Any]:
    """Return the row of one model."""
    case = MODELS[name]
    row: dict[str, Any] = {"kind": case.kind, "package": case.package, "version": find_version(case.package)}
    row["watch"], row["compared"] = check_watch(name)
    model, inputs = build(name)
    with torch.no_grad():
        torch.manual_seed(1)
        plain = model(**inputs)
        row["intervene"] = run_edited(model, inputs, plain)
    row["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    return row


def run(options: argparse.Namespace) -> int:
    """Check the models and print the results; return 1 if any failed."""
    warnings.simplefilter("ignore")
    found = json.loads(RESULTS.read_text("utf-8"))
    failed = 0
    for name in MODELS:
        if options.only and not any(part in name for part in options.only):
            continue
        try:
            row = check_model(name)
        except Exception as error:
            print(f"{'not run':10} {name:45} {describe_error(error, 300)}", flush=True)
            failed += 1
            continue
        (watch, remark), (edits, how) = row["watch"], row["intervene"]
        failed += "failed" in (watch, edits)
        print(f"{watch:10} {name:45} {remark}; {row['compared']}; {edits}: {how}", flush=True)
        found["models"][name] = row
    if options.write:
        write_results(found)
    return int(failed > 0)
