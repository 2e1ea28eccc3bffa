"""Capture attention calls while a model runs: wrap the functions that models call, and record their arguments.

The lens, diagnosis, interventions, the monitor and `regard.transformers` all capture by this package. One file for each
concept, in the order of a call:

- `patching`: replace a name of another module by a wrapper, and restore it; find where functions are imported and held.
- `wrappers`: the wrapper of each attention function, and which functions are patched for a model.
- `own_softmax`: layers without such a function; their softmax is followed to the product with the value.
- `watchers`: the blocks that are entered, the running module, and the notification of its watchers.
- `call`: the captured arguments, and `Call`, the record of one call.
- `compact_mask`: its mask and bias in O(n) memory, recognised from a tensor, a `BlockMask`, a `Mask` or weights.
- `record`: build a `Call` from captured arguments, and verify it with what the function returned.
- `cache_store`: decide which calls share a key-value cache, store their keys once, and join their rows.
- `module_names`: which modules a pattern selects, and the number of a layer in its stack.
- `module_hints`: what a model states about itself: causal layers, windows, positions, images.
- `module_trace`: what each module read and returned in one pass.
- `output_projections`: the linear layer after each attention layer, W_O.

The package imports `regard.core` and below.

Design notes:
- The model runs its own kernels. If the CPU flash kernel would run, the operator is called directly, for its lse.
- A mask is read as the interval of keys of each row, so the rows of several calls are joined by their intervals.
- A `BlockMask`, or a mask of regard, is read tile by tile. It says which tiles are empty and full, so it is evaluated
  in the others only; rows of intervals join across the steps of a cache, other masks stay functions.
- Recorded arguments are compared with what the function returned; a call that does not agree is refused.
- Steps belong to one cache if the old keys are found among the new ones. Only the newest keys are held.
- `regard.attention` is patched as an attribute of the package and wherever it was imported, but not in regard itself:
  its own matrices are not calls of a layer.
- Steps of `generate()` have a fast path. A step of one unmasked row differs from the last in query, key, value and
  lse only. Building its record in full took two thirds of the cost of `watch`. Its rows wait in a list, and are
  joined when the recording is read.
- The model's keys are compared by NumPy. `torch.equal` compares one number at a time, and took a sixth of that cost.
- The rows of cross-attention are placed by the self-attention before it. The keys of an encoder are the same in every
  step and for every beam, so they say neither which row comes next nor which beam it belongs to.
- A cache that was cut back begins another call, except inside `generate()`. Cropping a cache and reusing a prefix
  look the same to the layers. Rows that ran are never dropped from a recording unless `generate()` itself discarded
  their tokens.
- `watch` reads the grids in hooks on the vision model and the model around it. `generate()` runs the vision model
  first and passes on its outputs, so no single call has the image sizes and the text.
"""
