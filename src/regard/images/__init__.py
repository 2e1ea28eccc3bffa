"""Images: which token is which patch, and the pixels below a map.

`PatchGrid` says where the patches of an image are among the tokens of a sequence. `read_grids` reads the grids of a
model from its configuration and its inputs. The package imports `errors`, `types` and `validation`, and NumPy; Pillow
opens image files.

>>> from regard.images import PatchGrid
>>> grid = PatchGrid(2, 3, before=1, names=("class",))
>>> grid.positions
array([[1, 2, 3],
       [4, 5, 6]])
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.images.grid_reading import read_grids
from regard.images.patch_grid import PatchGrid
from regard.images.pixels import load_pixels, undo_normalisation

__all__ = ["PatchGrid", "load_pixels", "read_grids", "undo_normalisation"]

set_public_module(globals())
