"""Capture attention calls while a model runs: wrap the functions that models call, and record their arguments.

The lens, diagnosis, interventions, the monitor and `regard.transformers` all capture by this package. One file for each
concept, in the order of a call:

- `patching`: replace a name of another module by a wrapper, and restore it; find where functions are imported and held.
- `wrappers`: the wrapper of each attention function, and which functions are patched for a model.
- `own_softmax`: layers without such a function; their softmax is followed to the product with the value.
- `watchers`: the blocks that are entered, the running module, and the notification of its watchers.
- `call`: the captured arguments, and `Call`, the record of one call.
- `compact_mask`: its mask and bias in O(n) memory, recognised from a tensor, a `BlockMask` or weights.
- `record`: build a `Call` from captured arguments, and verify it with what the function returned.
- `cache_store`: decide which calls share a key-value cache, store their keys once, and join their rows.
- `module_hints`: what a model states about itself: causal layers, windows, positions, images.
- `module_trace`: what each module read and returned in one pass.
- `output_projections`: the linear layer after each attention layer, W_O.

The package imports `regard.core` and below.
"""
