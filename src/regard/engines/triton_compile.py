"""Compile the Triton kernels for GPUs that are not at hand, and read what their machine code needs.

The wheel of Triton carries the assembler and the disassembler. Nothing here runs a kernel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from regard.engines.triton_launch import BLOCK_KEYS, KernelVariant, choose_options

# Architecture of each target: the backend of Triton, its name there, and the threads of a warp.
TARGETS = {
    "sm80": ("cuda", 80, 32),
    "sm86": ("cuda", 86, 32),
    "sm89": ("cuda", 89, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "sm120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
}
# Bytes of shared memory that a block may have: CUDA C++ Programming Guide, compute capabilities; AMD CDNA 3 ISA.
SHARED_LIMITS = {
    "sm80": 163 << 10, "sm86": 99 << 10, "sm89": 99 << 10, "sm90": 227 << 10, "sm100": 227 << 10,
    "sm120": 99 << 10, "gfx942": 64 << 10,
}  # fmt: skip

_MMA = r"\b(?:HMMA|HGMMA|UTCHMMA|WGMMA)"
_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_INTEGERS = ("rows", "kv_len", "num_blocks", "offset", "num_intervals", "cell_rows", "cell_columns")
_INT32 = (
    *("QUERY_PAIR", "KEY_PAIR", "VALUE_PAIR", "ROW_POSITION", "FIRST_BLOCK", "OFFSETS", "SEGMENTS", "TILES"),
    *("INTERVALS", "ROW_CELL", "COLUMN_CELL", "TOP_KEYS"),
)
_FLOAT32 = ("SINK", "MAX", "SHIFT", "FACTOR", "LOG", "TOP_VALUES")
_FLOAT64 = ("SUM", "ONE", "SURPRISAL", "DISTANCE", "POSITION", "MAX_SCORE")


def measure_resources(variant: KernelVariant, target: str) -> dict[str, int]:
    """Compile a variant for a target and read its machine code.

    Returns:
        "registers" of a thread, "spills" (bytes of registers that were moved to memory), "shared" bytes, "mma" (number
        of matrix instructions), the rows of a block and its warps; on NVIDIA targets "loop", the instructions that a
        warp issues for one block of keys at most.
    """
    compiled = compile_variant(variant, target)
    options = choose_options(variant, target)
    read = _read_cubin if TARGETS[target][0] == "cuda" else _read_amdgcn
    return {
        **read(compiled.asm),
        "shared": int(compiled.metadata.shared),
        "block_rows": options.block_rows,
        "num_warps": options.num_warps,
    }


def compile_variant(variant: KernelVariant, target: str) -> Any:
    """Compile a variant for a target; return Triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from regard.engines import triton_kernels

    kernel = getattr(triton_kernels, f"run_{variant.kernel}_pass")
    options = choose_options(variant, target)
    constants = {**variant.list_constants(), "BLOCK_M": options.block_rows, "BLOCK_N": BLOCK_KEYS}
    signature, values, attributes = {}, {}, {}
    for n, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(n,)] = "constexpr", constants[name]
            continue
        signature[name] = _find_type(name, variant)
        # A launch with ordinary tensors finds pointers and strides that are multiples of 16.
        if signature[name].startswith("*") or name.endswith("stride"):
            attributes[(n,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    settings = {
        "num_warps": options.num_warps, "num_stages": options.num_stages, "enable_fp_fusion": False,
    }  # fmt: skip
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=settings)


def _find_type(name: str, variant: KernelVariant) -> str:
    """Return the type of an argument, as `Launcher` passes it."""
    if name in ("QUERY", "KEY", "VALUE", "OUTPUT"):
        return "*" + _TYPES[str(variant.dtype).removeprefix("torch.")]
    if name == "CELLS":
        return "*i32" if variant.cells == "max" else "*i64"
    if name in ("SHARES", "COLUMNS"):
        return "*i64"
    for names, kind in (
        (_INT32, "*i32"),
        (_FLOAT32, "*fp32"),
        (_FLOAT64, "*fp64"),
        (("scale", "units"), "fp32"),
    ):
        if name in names:
            return kind
    if name in _INTEGERS or name.endswith("stride"):
        return "i32"
    raise AssertionError(f"no type for the argument {name}")


def _read_cubin(asm: Any) -> dict[str, int]:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([program, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    local = _find_number(r"STACK:(\d+)", usage) + _find_number(r"LOCAL:(\d+)", usage)
    moves = len(re.findall(r"\b(?:STL|LDL)\b", code))
    return {
        "registers": _find_number(r"REG:(\d+)", usage),
        "spills": local if moves else 0,
        "mma": len(re.findall(_MMA, code)),
        "loop": _count_loop(code),
    }


def _count_loop(code: str) -> int:
    """Count the instructions of the smallest loop with a matrix instruction, branches for partial blocks included."""
    pattern = r"^\s*/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);"
    lines = [(int(match[1], 16), match[2], match[3]) for match in re.finditer(pattern, code, re.MULTILINE)]
    numbers = {address: n for n, (address, _, _) in enumerate(lines)}
    loops = []
    for n, (address, operation, rest) in enumerate(lines):
        to = re.search(r"0x([0-9a-f]+)", rest)
        start = numbers.get(int(to[1], 16)) if to and operation.startswith("BRA") else None
        if start is not None and lines[start][0] <= address:
            loops.append(lines[start : n + 1])
    with_products = [loop for loop in loops if any(re.match(_MMA, line[1]) for line in loop)]
    return min(map(len, with_products), default=0)


def _read_amdgcn(asm: Any) -> dict[str, int]:
    code = asm["amdgcn"]
    spilled = _find_number(r"\.vgpr_spill_count:\s+(\d+)", code)
    return {
        "registers": _find_number(r"\.vgpr_count:\s+(\d+)", code),
        "spills": max(4 * spilled, _find_number(r"\.private_segment_fixed_size:\s+(\d+)", code)),
        "mma": len(re.findall(r"\bv_mfma", code)),
    }


def _find_number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"no {pattern} in what the disassembler printed"
    return int(found[1])
