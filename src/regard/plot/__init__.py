"""Draw attention with Matplotlib: `heatmap`, `row`, `heads`, `effects`, `overlay` and `cost`.

Each function draws on one Axes and returns it. Pass the Axes as `ax=`; without it each call makes a new figure. Figures
are neither shown nor saved; call `ax.figure.savefig("head.pdf")`. The package may import `learn`, `core` and everything
below them.

>>> import regard
>>> from regard.learn import cat
>>> ax = heatmap(regard.attention(cat.Q, cat.K), tokens=cat.tokens)
>>> [label.get_text() for label in ax.get_xticklabels()]
['The', 'cat', 'sat', 'on', 'mat']
"""

from __future__ import annotations

try:
    import matplotlib as _matplotlib_is_there  # noqa: F401
except ImportError as error:
    raise ImportError("regard.plot: matplotlib is not installed. pip install 'regard[plot]'") from error

from regard._public import set_public_module
from regard.plot.figures import cost, effects, heads, heatmap, overlay, row

__all__ = ["cost", "effects", "heads", "heatmap", "overlay", "row"]

set_public_module(globals())
