"""The compiled pass under sanitizers: random shapes, masks and threads, and faults that each sanitizer must see."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from regard.engines.native.build import FLAGS, LIBRARY_NAME, SOURCE_FOLDER, hash_sources

ROOT = Path(__file__).parents[3]
# The runtime library of each sanitizer, which must be loaded before Python's own.
SANITIZERS = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
REPORT = re.compile(r"(?:ERROR|WARNING): \w+Sanitizer|runtime error:")

# Draws of every instruction set against the dense definition: `python -c CODE LIBRARY DRAWS`.
DRAWS = """
import sys
from pathlib import Path

import numpy as np

from regard.engines.native import library
library.LIBRARY_FILE = Path(sys.argv[1])
from regard import attention, causal, masks, padding, sliding_window
from regard.engines.native import list_instruction_sets, use_instruction_set
from tests.unit.engines.test_native import TOLERANCE, check

assert list_instruction_sets()
for seed in range(int(sys.argv[2])):
    rng = np.random.default_rng(seed)
    rows, kv_len, dim, pairs = (int(rng.integers(1, most)) for most in (330, 150, 20, 3))
    dtype = (np.float32, np.float64)[seed % 2]
    query, key = (rng.normal(size=(pairs, n, dim)).astype(dtype) for n in (rows, kv_len))
    mask = [
        None,
        causal("lower_right"),
        sliding_window(int(rng.integers(1, 90)), align="lower_right"),
        padding(int(rng.integers(0, kv_len + 1))),
        masks.dense(rng.random((pairs, rows, kv_len)) < rng.random()),
        masks.document(rng.integers(0, 3, kv_len), query_ids=rng.integers(0, 3, rows)),
    ][seed % 6]
    known = ("", "lse", "max and sum")[seed // 6 % 3]
    for name in list_instruction_sets():
        with use_instruction_set(name):
            check(attention(query, key, mask=mask), known=known, threads=1 + seed % 4, **TOLERANCE[dtype])
print(seed + 1, "draws on", *list_instruction_sets())
"""

# A wrong call of the library, which the sanitizer must report.
BEGIN = "import ctypes, sys, threading; import numpy as np; library = ctypes.CDLL(sys.argv[1]); x = np.ones(4096); "
SOUND = "library.regard_is_sound(1, ctypes.c_void_p(x.ctypes.data + {}), ctypes.c_int64({}), None, ctypes.c_int64(0))"
EXP = "library.regard_exp(0, 1, ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(4096))"
FAULTS = {
    "address": BEGIN + SOUND.format(0, 4097),
    "undefined": BEGIN + SOUND.format(1, 4000),
    "thread": BEGIN + f"run = lambda: [{EXP} for _ in range(50)]; "
    "threads = [threading.Thread(target=run) for _ in range(2)]; "
    "[t.start() for t in threads]; [t.join() for t in threads]",
}

pytestmark = [pytest.mark.nightly, pytest.mark.slow]


@pytest.fixture(scope="module", params=SANITIZERS)
def sanitized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, str]]:
    """The name of a sanitizer, the library compiled with it, and the environment that loads its runtime."""
    gcc = shutil.which("gcc")
    if gcc is None or sys.platform != "linux":
        pytest.skip("needs Linux and apt-get install gcc")
    library = tmp_path_factory.mktemp(request.param) / LIBRARY_NAME
    options = [f"-fsanitize={request.param}", "-fno-sanitize-recover=all", "-O1", "-g", "-fPIC"]
    flags = [flag for flag in FLAGS if flag != "-O3"]
    command = [gcc, *flags, *options, f'-DSOURCE_HASH="{hash_sources()}"', "-o", library, "measures.c", "-lm"]
    subprocess.run(command, cwd=SOURCE_FOLDER, check=True)
    find = [gcc, f"-print-file-name={SANITIZERS[request.param]}"]
    runtime = subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip()
    environ = os.environ | {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python frees nothing at its end
        "TSAN_OPTIONS": "halt_on_error=1",
        "PYTHONMALLOC": "malloc",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    return request.param, library, environ


def run_code(code: str, environ: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)


def test_random_shapes_and_masks_are_clean(sanitized: tuple[str, Path, dict[str, str]]) -> None:
    _, library, environ = sanitized
    done = run_code(DRAWS, environ, library, 24)
    assert done.returncode == 0 and not REPORT.search(done.stderr), done.stderr[-4000:]
    assert done.stdout.startswith("24 draws on baseline")


def test_a_fault_is_reported(sanitized: tuple[str, Path, dict[str, str]]) -> None:
    name, library, environ = sanitized
    done = run_code(FAULTS[name], environ, library)
    assert done.returncode != 0 and REPORT.search(done.stderr), done.stderr[-4000:]
