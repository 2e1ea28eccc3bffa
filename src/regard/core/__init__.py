"""The lazy attention matrix: constructors, the matrix class, the planner of its measures and the block loop.

Entry points: `attention` and `linear_attention` in `attention.py` return an `AttentionMatrix` (`matrix.py`).
May import errors, types, tiling, frame, validation, accumulators, masks, score_mods, problem, render, engines,
feature_maps, measures, pages.

Design notes:
- The pass does one GEMM, one subtraction and one exponential per tile, in reused buffers. Fresh memory costs as much
  as the arithmetic. `where` with a mask is not vectorised, and `exp` of an underflowing argument is 30 to 90 times
  slower, so scores are clamped and masked weights multiplied by 0.
- Tiles are not compiled with `torch.compile`. It gains a quarter and costs 18 s cold, longer than most passes.
- `Received` and `A.mT @ x` use the pass. As a fused call with swapped roles they take 1.2–1.3× a bare call, in the
  pass 0.6–0.9×.
- Entries next to 1 are computed from their whole row. A single score is rounded differently from the statistics of
  its row, so a row with one live key would get 1 − 1e-6. All other entries come from the statistics in O(1).
"""
