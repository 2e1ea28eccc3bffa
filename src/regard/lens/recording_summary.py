"""Summarise a recording: the bytes of its masks, and its layers as a table for a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from regard.capture.cache_joining import JoinedCalls
from regard.lens.recording_errors import format_shapes
from regard.render import notebook


def count_mask_bytes(joined_calls: Mapping[str, list[JoinedCalls]]) -> int:
    """Count the bytes of masks and biases stored as arrays; those that layers share count once."""
    sizes = {
        array.data_ptr(): int(array.nbytes)
        for calls in joined_calls.values()
        for joined in calls
        for array in joined.last.compact_mask.stored_arrays
    }
    return sum(sizes.values())


def render_layers(
    summary: str, joined_calls: Mapping[str, list[JoinedCalls]], uncaptured: Sequence[str]
) -> str:
    """Render a table of layers as HTML.

    Args:
        summary: The line above the table.
        joined_calls: The calls of each layer by name.
        uncaptured: Names of layers that were not captured.

    Returns:
        The HTML.
    """
    shown = list(joined_calls.items())[: notebook.MAX_ROWS]
    rows = [
        [
            str(number),
            name,
            format_shapes(groups),
            groups[-1].last.kernel,
            f"{sum(joined.nbytes for joined in groups):,}",
        ]
        for number, (name, groups) in enumerate(shown)
    ]
    more = len(joined_calls) - len(shown)
    closing = f"… and {more:,} more layers. " if more else ""
    if uncaptured:
        closing += f"Not captured: {', '.join(uncaptured[:8])}{' …' if len(uncaptured) > 8 else ''}."
    columns = ["layer", "module", "shape", "kernel", "bytes"]
    return notebook.render_table(summary, columns, rows, [False, True, True, True, False], closing)
