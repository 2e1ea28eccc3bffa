"""Interactive pages for teaching: `pipeline`, `heatmap`, `geometry`, `scaling`, `cost`, `code` and `model`.

Each function returns a `Page`, a self-contained HTML file with the caller's numbers. The package may import `learn`,
`pages`, `core` and everything below them.
"""

from regard._public import set_public_module
from regard.explore.code_explorer import code
from regard.explore.cost_explorer import cost
from regard.explore.geometry_explorer import geometry
from regard.explore.heatmap_explorer import heatmap
from regard.explore.model_explorer import model
from regard.explore.pipeline_explorer import pipeline
from regard.explore.scaling_explorer import scaling
from regard.pages.html import Page

__all__ = ["Page", "code", "cost", "geometry", "heatmap", "model", "pipeline", "scaling"]

set_public_module(globals())
