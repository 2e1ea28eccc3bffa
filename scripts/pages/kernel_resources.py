"""Compile every Triton kernel for every target, and print registers, spills and matrix instructions.

Needs Triton, and no GPU. Exits 1 if a kernel spills, has no matrix instruction, or needs too much memory.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
import triton

from regard.engines.triton_check import RESOURCES_FILE, list_variants
from regard.engines.triton_compile import SHARED_LIMITS, TARGETS, measure_resources


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: {' '.join(TARGETS)}")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare with the file, if its Triton is the same")
    mode.add_argument("--write", action="store_true", help=f"write {RESOURCES_FILE.name} from all targets")


def run(options: argparse.Namespace) -> None:
    if options.write and options.targets:
        sys.exit("scripts/docs kernel-resources: --write needs all targets")
    recorded = json.loads(RESOURCES_FILE.read_text("utf-8")) if options.check else {}
    kernels: dict[str, dict[str, dict[str, int]]] = {}
    wrong = 0
    for target in options.targets or TARGETS:
        kernels[target] = {}
        for head_dim in (64, 128):
            for variant in list_variants(torch.bfloat16, head_dim):
                found = kernels[target][variant.name] = measure_resources(variant, target)
                is_wrong = found["spills"] or not found["mma"] or found["shared"] > SHARED_LIMITS[target]
                if recorded.get("triton") == triton.__version__:
                    is_wrong = is_wrong or found != recorded["kernels"][target][variant.name]
                wrong += bool(is_wrong)
                print(f"{target} {variant.name}: {found}{'  WRONG' if is_wrong else ''}", flush=True)
    if options.write:
        written = {"triton": triton.__version__, "kernels": kernels}
        RESOURCES_FILE.write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    if wrong:
        sys.exit(f"{wrong} kernels to change")
