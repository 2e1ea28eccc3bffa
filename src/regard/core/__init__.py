"""The lazy attention matrix: constructors, the matrix class, its canonical form and the block loop.

Entry points: `attention` and `linear_attention` in `attention.py` return an `AttentionMatrix` (`matrix.py`).
May import errors, types, tiling, frame, validation, masks, score_mods, render, engines, feature_maps, measures, pages.
"""
