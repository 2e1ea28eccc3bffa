"""Images: which token is which patch, and the pixels below a map.

`PatchGrid` says where the patches of an image are among the tokens of a sequence. `read_grids` reads the grids of a
model from its configuration and its inputs. The package imports `errors`, `families`, `types` and `validation`, and
NumPy; Pillow opens image files.

Design notes:
- A `PatchGrid` is read from the configuration and the inputs of a model, by a table of model types. A square root of
  the number of tokens would be wrong for registers, padding and images that are not square, and no error would show
  it. A grid with another number of tokens is refused, and a model outside the table needs a grid from the caller.
  Tests change a pixel and look for the token that changes.
- Pillow is imported if an image is a path, and is in no extra. Matplotlib and the image processors of transformers
  bring it; arrays need none.

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
