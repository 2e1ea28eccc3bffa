"""Interactive pages: `pipeline`, `weights`, `geometry`, `scaling`, `cost`, `memory`, `code`, `model` and `training`.

Each function returns a `Page`, a self-contained HTML file with the caller's numbers. The package may import `learn`,
`pages`, `core` and everything below them.

Design notes:
- The model in the page reuses the rows and layers that a change does not affect. Typing at the end costs one row
  instead of all; switching off a head costs the layers after it. Plain JavaScript performs about 0.7 · 10⁹
  multiplications per second, so a whole text of 26 tokens takes about 0.2 seconds, and a typed word a few hundredths.
  WebAssembly would be faster, but needs `wasm-unsafe-eval` in the content security policy.
- The model of the page is trained on children's stories. A model small enough for a page writes readable
  sentences only about a small world. Its tokens are words and pieces of words, so that the map of a head can be read;
  the longest piece that fits is taken, which is a few lines in each language. The weights are in the package (4 MB,
  int8), but the text is not, because its licence would have to be distributed with it.
- The effect of a weight on the guess is shown as the change of logits that its share of the head's output causes if the
  last norm and the unembedding read it directly, with the norm's factor of this text. Later layers may change it.
- The listings of `explore.code()` are text files, run and traced when the page is made. The note on a line is above it
  in the file, so the two cannot drift apart. The NumPy listing is the class of `learn`, tested to be the same text; the
  listing in PyTorch has the same name and cannot be imported.
- Explorers show the library's numbers until the reader changes one, then compute in the page. Nothing on the first
  screen can differ from Python. The page's own steps are compared with `attention` in tests, for switches, changed
  numbers and typed sentences.
"""

from regard._public import set_public_module
from regard.explore.code_explorer import code
from regard.explore.explorers import cost, geometry, memory, model, pipeline, scaling, training, weights
from regard.pages.html import Page

__all__ = [
    "Page",
    "code",
    "cost",
    "geometry",
    "memory",
    "model",
    "pipeline",
    "scaling",
    "training",
    "weights",
]

set_public_module(globals())
