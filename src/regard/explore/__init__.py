"""Interactive pages for teaching: `pipeline`, `heatmap`, `geometry`, `scaling`, `cost`, `code` and `model`.

Each function returns a `Page`, a self-contained HTML file with the caller's numbers. The package may import `learn`,
`pages`, `core` and everything below them.
"""

from regard._public import set_public_module
from regard.explore.code_explorer import code
from regard.explore.explorers import cost, geometry, heatmap, model, pipeline, scaling
from regard.pages.html import Page

__all__ = ["Page", "code", "cost", "geometry", "heatmap", "model", "pipeline", "scaling"]

set_public_module(globals())
