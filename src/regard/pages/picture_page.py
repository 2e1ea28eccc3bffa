"""The page of attention over images: pictures, and the weights of the layers that read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard.errors import ArgumentError, RegardError
from regard.images.patch_grid import PatchGrid
from regard.images.pixels import shrink
from regard.pages.encoding import LEVEL_DECADES, encode_array, encode_levels
from regard.pages.fitted_payload import (
    FittedPayload,
    combine_errors,
    count_characters,
    estimate_size,
    fit_payload,
)
from regard.pages.html import Page, build_page
from regard.pages.stack_names import stack_names
from regard.render.text import escape_unprintable
from regard.types import Array

if TYPE_CHECKING:
    from regard.core.matrix import AttentionMatrix

MAX_EDGE = 640  # pixels of a picture
ROW_SHARE = 0.5  # of the room, for maps of heads that are not stored as a whole
NOTES_SIZE = 1000  # characters of what the page says about its weights, at most
CHARACTERS_PER_LEVEL = 4 / 3  # of base64; levels compress a little
ROUNDING = 10 ** (LEVEL_DECADES / 253 / 2) - 1  # of a weight that is stored as a level


class Picture(NamedTuple):
    """An image on the page.

    Attributes:
        name: Its name: a file name, or "image 0".
        pixels: (height, width, 3), uint8.
    """

    name: str
    pixels: Array


@dataclass
class PictureLayer:
    """One attention call on the page.

    Attributes:
        module: Name of the module.
        layer: Number of the layer, from 0.
        shape: (q_len, kv_len).
        heads: The heads that are shown.
        first: Position of query 0 among the keys, None if queries and keys are different sequences.
        grids: Images by number, each with its grid among the keys.
        is_split: Other images are read by other entries of this list.
        key_tokens: Tokens of the keys, or None.
        query_tokens: Tokens of the queries if they are another sequence, or None.
        matrix: Attention of one batch entry, (all heads, q_len, kv_len), or (q_len, kv_len) without a head axis.
        head_dim: Width of a query.
        groups: How many heads share a key.
    """

    module: str
    layer: int
    shape: tuple[int, int]
    heads: list[int]
    first: int | None
    grids: Mapping[int, PatchGrid]
    is_split: bool
    key_tokens: list[Any] | None
    query_tokens: list[Any] | None
    matrix: AttentionMatrix
    head_dim: int
    groups: int

    @property
    def patch_keys(self) -> Array:
        """All keys that are patches."""
        return np.concatenate([grid.positions.ravel() for grid in self.grids.values()])

    def list_others(self) -> list[tuple[int, str]]:
        """List the keys that are no patches, with their names."""
        others = np.setdiff1d(np.arange(self.shape[1]), self.patch_keys).tolist()
        names = next(iter(self.grids.values())).names
        return [(key, _token_name(key, self.key_tokens, names)) for key in others]

    def list_queries(self) -> list[tuple[int, str]] | None:
        """List the queries with their names if they are another sequence than the keys; else None."""
        if self.first is not None:
            return None
        return [(query, _token_name(query, self.query_tokens, (), "query")) for query in range(self.shape[0])]

    def rank_queries(self) -> list[int]:
        """List queries, those whose maps are most wanted first: named tokens, the last tokens, then patches."""
        q_len, first = self.shape[0], self.first
        if first is None:
            return list(range(q_len))[::-1]
        names = next(iter(self.grids.values())).names
        others = [key for key, _ in self.list_others()]
        named, rest = others[: len(names)], others[len(names) :]
        lattice = [key for grid in self.grids.values() for key in _spread(grid)]
        # Half of the places are for patches.
        tokens = [key - first for key in [*named, *rest[::-1]] if 0 <= key - first < q_len]
        patches = [key - first for key in lattice if 0 <= key - first < q_len]
        mixed = [query for pair in zip(tokens, patches, strict=False) for query in pair]
        return [*mixed, *tokens[len(patches) :], *patches[len(tokens) :]]


def _token_name(position: int, tokens: list[Any] | None, names: Sequence[str], noun: str = "token") -> str:
    if tokens is not None:
        return escape_unprintable(str(tokens[position]))
    return names[position] if position < len(names) else f"{noun} {position}"


def _spread(grid: PatchGrid) -> list[int]:
    """List the patches of a grid so that any number of the first ones is spread over the whole image.

    >>> _spread(PatchGrid(2, 2))
    [3, 0, 1, 2]
    """
    positions, listed = grid.positions, dict[int, None]()
    halvings = [(edge - 1).bit_length() for edge in (grid.rows, grid.columns)]
    for level in range(max(halvings) + 1):
        steps = [1 << max(0, own - level) for own in halvings]
        rows, columns = (np.arange(s // 2, edge, s) for s, edge in zip(steps, positions.shape, strict=True))
        listed |= dict.fromkeys(positions[np.ix_(rows, columns)].ravel().tolist())
    return list(listed)


def build_picture_page(
    layers: Sequence[PictureLayer],
    pictures: Sequence[Picture],
    *,
    title: str,
    notes: Sequence[str],
    max_bytes: int,
    operation: str,
) -> Page:
    """Build the page of `Recording.page` with an image.

    Args:
        layers: The calls to show, in order.
        pictures: The images, by number.
        title: Title of the page.
        notes: Sentences for the foot of the page.
        max_bytes: Largest size of the page. If not all weights fit, some heads have maps of some queries only.
        operation: Name of the calling function, for error messages.

    Returns:
        The page.

    Raises:
        ArgumentError: If not even one map of each head fits.
    """
    name = escape_unprintable(title)
    lists: dict[tuple[tuple[int, str], ...], int] = {}
    records = [_layer_record(layer, lists) for layer in layers]
    stacks = stack_names([layer.module for layer in layers])
    for layer, layer_record in zip(layers, records, strict=True):
        layer_record["stack"] = stacks[layer.module]
    record: dict[str, Any] = {
        "title": name,
        "lead": _describe_sizes(layers),
        "images": [_encode_picture(picture) for picture in pictures],
        "tokens": list(lists),
        "layers": records,
        "notes": list(notes),
        "error": None,
    }
    room = max_bytes - len(build_page(name, "picturePage", record).html.encode()) - NOTES_SIZE
    payloads = _fit_all(layers, room, operation)
    rows: list[dict[str, Any] | None] = [None] * len(layers)
    if payloads is None:
        rows, payloads = _fit_some(layers, room, max_bytes, operation)
        record["notes"] += _describe_storage(layers, rows, payloads)
    for layer_record, own_rows, payload in zip(records, rows, payloads, strict=True):
        layer_record["rows"] = own_rows
        layer_record["payload"] = None if payload is None else payload.record
    record["error"] = combine_errors([payload.error for payload in payloads if payload is not None])
    return build_page(name, "picturePage", record)


def _layer_record(layer: PictureLayer, lists: dict[tuple[tuple[int, str], ...], int]) -> dict[str, Any]:
    def share(tokens: list[tuple[int, str]] | None) -> int | None:
        return None if tokens is None else lists.setdefault(tuple(tokens), len(lists))

    return {
        "module": layer.module,
        "layer": layer.layer,
        "image": next(iter(layer.grids)) if layer.is_split else None,
        "shape": layer.shape,
        "first": layer.first,
        "heads": layer.heads,
        "images": [{"image": image, **grid.to_record()} for image, grid in layer.grids.items()],
        "others": share(layer.list_others()),
        "queries": share(layer.list_queries()),
        "start": layer.rank_queries()[0],
        "payload": None,
        "rows": None,
    }


def _encode_picture(picture: Picture) -> dict[str, Any]:
    """Encode an image as differences from the pixel to the left, plane by plane, which compress well."""
    planes = np.moveaxis(shrink(picture.pixels, MAX_EDGE), -1, 0)
    differences = planes.copy()
    differences[:, :, 1:] -= planes[:, :, :-1]  # modulo 256
    return {
        "name": escape_unprintable(picture.name),
        "size": planes.shape[1:],
        "pixels": encode_array(differences, early=True),
    }


# Weights


def _fit_all(layers: Sequence[PictureLayer], room: int, operation: str) -> list[FittedPayload | None] | None:
    """Return the payload of every head; None if they do not fit, or a page cannot compute them."""
    least = sum(estimate_size(layer.heads, *layer.shape, layer.groups, layer.head_dim) for layer in layers)
    if least > room:
        return None
    payloads: list[FittedPayload | None] = []
    for layer in layers:
        payload = _fit_layer(layer, room, operation)
        if payload is None or payload.record["heads"] != layer.heads:
            return None
        payloads.append(payload)
        room -= payload.size
    return payloads


def _fit_layer(layer: PictureLayer, room: int, operation: str) -> FittedPayload | None:
    try:
        return fit_payload(
            layer.matrix,
            layer.heads,
            groups=layer.groups,
            head_dim=layer.head_dim,
            room=room,
            operation=operation,
        )
    except RegardError:  # a mask or a score modification that a page cannot compute: rows are stored
        return None


def _fit_some(
    layers: Sequence[PictureLayer], room: int, max_bytes: int, operation: str
) -> tuple[list[dict[str, Any] | None], list[FittedPayload | None]]:
    """Return maps of some queries for every head, and the payloads of as many heads as fit, the last layers first."""
    levels = sum(len(layer.heads) * layer.shape[1] for layer in layers)
    count = int(ROW_SHARE * room / (CHARACTERS_PER_LEVEL * levels))
    if count < 1:
        needed = max_bytes - room + round(CHARACTERS_PER_LEVEL * levels / ROW_SHARE)
        raise ArgumentError(
            operation,
            received=f"max_bytes={max_bytes:,} for {sum(len(layer.heads) for layer in layers)} heads",
            expected=f"room for the pictures and one map of each head, {needed:,} bytes",
            hint="Raise max_bytes, or choose layers= or heads=.",
        )
    rows: list[dict[str, Any] | None] = [_encode_rows(layer, count) for layer in layers]
    sizes = [count_characters(record) for record in rows]
    room -= sum(sizes)
    payloads: list[FittedPayload | None] = [None] * len(layers)
    for i in reversed(range(len(layers))):
        payload = payloads[i] = _fit_layer(layers[i], room, operation)
        if payload is not None:
            room -= payload.size
            if payload.record["heads"] == layers[i].heads:  # all its maps can be computed
                rows[i] = None
                room += sizes[i]
    return rows, payloads


def _encode_rows(layer: PictureLayer, count: int) -> dict[str, Any]:
    """Encode the rows of `count` queries, (heads, queries, keys)."""
    queries = sorted(layer.rank_queries()[:count])
    selected = layer.matrix.lazy[layer.heads] if len(layer.matrix.shape) > 2 else layer.matrix
    weights = layer.matrix.problem.engine.to_numpy(selected.lazy[..., queries, :].to_dense())
    weights = weights.reshape(len(layer.heads), len(queries), layer.shape[1])
    return {"queries": queries, **encode_levels(weights, weights > 0, early=False)}


def _describe_storage(
    layers: Sequence[PictureLayer],
    rows: Sequence[dict[str, Any] | None],
    payloads: Sequence[FittedPayload | None],
) -> list[str]:
    """Say which weights the page stores, if not all."""
    whole = sum(0 if payload is None else len(payload.record["heads"]) for payload in payloads)
    heads = sum(len(layer.heads) for layer in layers)
    counts = [len(record["queries"]) for record in rows if record is not None]
    if not counts:
        return []
    number = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return [
        f"Not all weights fit into this page: {whole} of {heads} heads have maps of every query, the others maps of "
        f"{number} queries, rounded by at most {100 * ROUNDING:.1f} %. Dots mark the patches of which a map is stored."
    ]


def _describe_sizes(layers: Sequence[PictureLayer]) -> str:
    """Return the number of layers, heads and patches in one line."""
    heads = sum(Counter({layer.module: len(layer.heads) for layer in layers}).values())
    modules = len({layer.module for layer in layers})
    sizes = sorted({(grid.rows, grid.columns) for layer in layers for grid in layer.grids.values()})
    *grids, last = (f"{rows} × {columns}" for rows, columns in sizes)
    patches = f"{', '.join(grids)} and {last}" if grids else last
    others = {len(layer.list_others()) for layer in layers}
    tokens = f"up to {max(others)}" if len(others) > 1 else str(max(others))
    return (
        f"{modules} layer{'s' * (modules != 1)}, {heads} head{'s' * (heads != 1)}; {patches} patches, "
        f"{tokens} other token{'s' * (max(others) != 1)}. Choose a patch or a token as query: the maps show the keys "
        "that it attends to. Rows, columns, layers and heads are counted from 0."
    )
