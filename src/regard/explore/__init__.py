"""Pages a reader works: each explorer returns a page that stands by itself, with the reader's own numbers in it."""

from regard.explore._code import code
from regard.explore._cost import cost
from regard.explore._geometry import geometry
from regard.explore._heatmap import heatmap
from regard.explore._pipeline import pipeline
from regard.explore._scaling import scaling
from regard.view.html import Page

__all__ = ["Page", "code", "cost", "geometry", "heatmap", "pipeline", "scaling"]
