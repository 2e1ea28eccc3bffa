"""Engines: the operations that differ between NumPy, torch and other array libraries; all other code is shared.

`find_engine` returns the engine of some arrays, without importing a library that the caller has not imported;
`register` adds an engine. The abstract `Engine` is in `regard.problem`, which this package may import.

Design notes:
- The compiled pass has its own product QKᵀ and starts plain threads. Lanes are rows: the queries are packed once,
  keys are read in place, row sums need no shuffles. No BLAS is called, so no thread count of torch or NumPy is
  touched, reduced matmul precision has no effect, and results do not depend on the number of threads. A tile's GEMM
  by BLAS in worker threads needs `set_num_threads` in each of them, which other threads can see.
- Sums over 16 keys in the dtype of the scores, then float64. Two instructions per 16 keys keep every measure within
  the error rule at any length.
- The Triton kernels read the segments of a mask, with a tile of bits for each partial block. One compiled kernel
  serves every mask, and the host evaluates partial blocks only.
- Sums over rows are 64-bit integers, added by atomics. Integers add up to the same bits in any order; floating point
  atomics do not. The unit depends on the number of rows alone, so nothing overflows. NaN has no integer: matrices
  with NaN or inf in a live score run in the block loop.
- Row sums of a Triton kernel are pairs of float32 numbers. The second collects the rounding errors of the first.
  float64 is slow on most GPUs, MPS has none.
- No multiplication is fused with an addition in the Triton kernels. The flash loop and the measure pass must round a
  score alike; else a row with one key has a weight next to 1.
- Sums over the keys of a row are computed by the flash loop, with rescaling. Entropy, distance and position beside
  the output cost no second launch. Columns, cells and top-k need final weights.
- One table of block sizes for NVIDIA GPUs, and one size for AMD. With them no target spills a register
  (`engines/triton_resources.json`, written by `scripts/docs kernel-resources --write`). Faster ones per target need a
  GPU to be measured.
- On CUDA, `torch._fused_sdp_choice` picks flash or cuDNN; everything else runs the efficient kernel. It is torch's
  own choice, so outputs are those of the public function. The efficient kernel takes every mask, has float32 and a
  backward pass of its own. Flash counts causal masks from the lower right corner, so it gets squares only.
- Grouped heads fold key heads into the batch, and expand them with stride 0. The efficient kernel does not support
  grouped heads, and repeating keys costs memory.
- A bias runs half-precision calls of the efficient kernel in float32. The kernel takes a tile in the dtype of the
  query, and bfloat16 would round a bias of 100 by 0.25. Masks are 0 and −inf, which are exact.
- Contracts of CUDA's operators are tested with doubles, devices with a pretend one. A double of the checks finds
  illegal calls without a GPU, and a `PrivateUse1` tensor finds mixed devices, float64 and synchronisation.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.engines.array_api import ArrayEngine
from regard.engines.registry import find_engine, get_engine, register
from regard.problem import Engine

__all__ = ["ArrayEngine", "Engine", "find_engine", "get_engine", "register"]

set_public_module(globals())
