"""The page of attention over images: pictures, and the weights of the layers that read them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from regard.capture.call import LayerCall
from regard.capture.module_hints import ImagePass, ImagePasses, find_passes
from regard.core.matrix_page import (
    FittedPayload,
    combine_errors,
    count_characters,
    estimate_size,
)
from regard.errors import (
    ArgumentError,
    ArgumentTypeError,
    NotCapturedError,
    RegardError,
    describe_argument,
)
from regard.images.grid_reading import Grids
from regard.images.patch_grid import PatchGrid
from regard.images.pixels import load_pixels, shrink
from regard.lens.find import check_batch, select_batch_entry
from regard.lens.model_page import (
    OPERATION,
    ShownCall,
    check_shown,
    choose_heads,
    fit_to_call,
    select_calls,
    stack_names,
)
from regard.lens.token_rows import TokenRows, as_token_lists
from regard.pages.encoding import LEVEL_DECADES, encode_array, encode_levels
from regard.pages.html import Page, build_page
from regard.render.text import escape_unprintable
from regard.types import Array


class LayerImages(NamedTuple):
    """A call of a layer whose keys include patches.

    Args:
        layer_call: The call.
        entry: Batch entry of the call.
        grids: Images by their number in the batch entry of the model, each with its grid among the keys.
        is_vision: The layer belongs to a vision model, whose tokens all attend at once.
    """

    layer_call: LayerCall
    entry: int
    grids: dict[int, PatchGrid]
    is_vision: bool = False


def find_layer_images(
    calls: Sequence[LayerCall], passes: ImagePasses, batch: int, operation: str
) -> list[LayerImages]:
    """Find the images among the keys of a layer."""
    module = calls[0].module
    found = find_passes(passes, module)
    if not found:
        raise NotCapturedError(
            operation,
            received=f"{module!r}, which is not part of a model whose patch grid is known",
            expected="a layer of a vision model, or of a language model that reads images",
            hint="Pass the grid: page(image=…, grid=regard.images.PatchGrid(rows, columns, before=…)).",
        )
    if len(found) > 1:
        raise ArgumentError(
            operation,
            received=f"{len(found)} passes of {module!r} with images",
            expected="one pass",
            hint="Record each pass separately: with regard.watch(model) as recording: model(**inputs).",
        )
    [image_pass] = found
    if image_pass.fault:
        raise ArgumentError(
            operation,
            received=f"{module!r}, whose patch grid is unknown: {image_pass.fault}",
            expected="a model whose grid can be read",
            hint="Pass the grid: page(image=…, grid=regard.images.PatchGrid(rows, columns, before=…)).",
        )
    if image_pass.is_text:
        _check_calls(calls, 1, operation)
        length = calls[0].call.shape[-1]
        grids = _entry_of(image_pass.grids, batch, operation)
        return [LayerImages(calls[0], batch, {i: grid.extend(length) for i, grid in enumerate(grids)})]
    _check_calls(calls, len(image_pass.grids) if image_pass.is_split else 1, operation)
    images = []
    for image, sequence in enumerate(_find_sequences(image_pass, passes, module, batch, operation)):
        layer_call = calls[sequence if image_pass.is_split else 0]
        [grid] = image_pass.grids[sequence]
        grid.check_length(layer_call.call.shape[-1], operation, f"keys of {module!r}")
        entry = 0 if image_pass.is_split else sequence
        images.append(LayerImages(layer_call, entry, {image: grid}, is_vision=True))
    return images


def _entry_of(grids: Grids, batch: int, operation: str) -> list[PatchGrid]:
    return grids[check_batch(batch, len(grids), operation)]


def _find_sequences(
    image_pass: ImagePass, passes: ImagePasses, module: str, batch: int, operation: str
) -> Sequence[int]:
    """Return which sequences of a vision model are the images of a batch entry of the model around it."""
    for name, around in passes.items():
        if len(around) == 1 and around[0].is_text and (not name or module.startswith(f"{name}.")):
            counts = [len(entry) for entry in around[0].grids]
            if sum(counts) == len(image_pass.grids):
                _entry_of(around[0].grids, batch, operation)
                first = sum(counts[: batch % len(counts)])
                return range(first, first + counts[batch])
    _entry_of(image_pass.grids, batch, operation)
    return [batch % len(image_pass.grids)]


def _check_calls(calls: Sequence[LayerCall], expected: int, operation: str) -> None:
    if len(calls) != expected:
        raise ArgumentError(
            operation,
            received=f"{len(calls)} calls of {calls[0].module!r} for {expected} read with images",
            expected="calls that belong to the images",
            hint="Record one pass only: with regard.watch(model) as recording: model(**inputs).",
        )


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
class PictureLayer(ShownCall):
    """One attention call on the page; it has tokens of the queries only if they are another sequence than the keys.

    Attributes:
        grids: Images by number, each with its grid among the keys.
        is_split: Other images are read by other entries of this list.
    """

    grids: Mapping[int, PatchGrid]
    is_split: bool

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


def build_image_page(
    layer_calls: Sequence[LayerCall],
    passes: ImagePasses,
    *,
    image: Any,
    grid: PatchGrid | Sequence[PatchGrid] | None,
    tokens: Any,
    query_tokens: Any,
    batch: int,
    layers: str | Sequence[str] | None,
    heads: Sequence[int] | None,
    title: str | None,
    max_bytes: int | None,
) -> Page:
    """Build the page of `Recording.page` for an image; the arguments are those of the method."""
    pictures = _load_pictures(image)
    selected = select_calls(layer_calls, layers)
    notes: list[str] = []
    if grid is None:
        found = _find_recorded(selected, passes, batch, notes)
    else:
        found = _apply_grids(selected, [grid] if isinstance(grid, PatchGrid) else list(grid), batch)
    count = 1 + max(number for images in found for number in images.grids)
    if count != len(pictures):
        raise ArgumentError(
            OPERATION,
            received=f"{len(pictures)} image{'s' * (len(pictures) != 1)} for batch entry {batch}, which has {count}",
            expected=f"{count}, in the order you passed them to the processor",
            hint="Pass a list, image=[first, second], or choose another batch entry with batch=.",
        )
    shown = _build_layers(found, tokens, query_tokens, heads)
    max_bytes = MAX_BYTES if max_bytes is None else max_bytes
    name = escape_unprintable(title or "Attention over an image")
    lists: dict[tuple[tuple[int, str], ...], int] = {}
    records = [_layer_record(layer, lists) for layer in shown]
    stacks = stack_names([layer.module for layer in shown])
    for layer, layer_record in zip(shown, records, strict=True):
        layer_record["stack"] = stacks[layer.module]
    record: dict[str, Any] = {
        "title": name,
        "lead": _describe_sizes(shown),
        "images": [_encode_picture(picture) for picture in pictures],
        "tokens": list(lists),
        "layers": records,
        "notes": notes,
        "error": None,
    }
    room = max_bytes - len(build_page(name, "picturePage", record).html.encode()) - NOTES_SIZE
    payloads = _fit_all(shown, room)
    rows: list[dict[str, Any] | None] = [None] * len(shown)
    if payloads is None:
        rows, payloads = _fit_some(shown, room, max_bytes)
        notes += _describe_storage(shown, rows, payloads)
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


def _fit_all(layers: Sequence[PictureLayer], room: int) -> list[FittedPayload | None] | None:
    """Return the payload of every head; None if they do not fit, or a page cannot compute them."""
    least = sum(estimate_size(layer.heads, *layer.shape, layer.groups, layer.head_dim) for layer in layers)
    if least > room:
        return None
    payloads: list[FittedPayload | None] = []
    for layer in layers:
        payload = _fit_layer(layer, room)
        if payload is None or payload.record["heads"] != layer.heads:
            return None
        payloads.append(payload)
        room -= payload.size
    return payloads


def _fit_layer(layer: PictureLayer, room: int) -> FittedPayload | None:
    try:
        return layer.fit_payload(room)
    except RegardError:  # a mask or a score modification that a page cannot compute: rows are stored
        return None


def _fit_some(
    layers: Sequence[PictureLayer], room: int, max_bytes: int
) -> tuple[list[dict[str, Any] | None], list[FittedPayload | None]]:
    """Return maps of some queries for every head, and the payloads of as many heads as fit, the last layers first."""
    levels = sum(len(layer.heads) * layer.shape[1] for layer in layers)
    count = int(ROW_SHARE * room / (CHARACTERS_PER_LEVEL * levels))
    if count < 1:
        needed = max_bytes - room + round(CHARACTERS_PER_LEVEL * levels / ROW_SHARE)
        raise ArgumentError(
            OPERATION,
            received=f"max_bytes={max_bytes:,} for {sum(len(layer.heads) for layer in layers)} heads",
            expected=f"room for the pictures and one map of each head, {needed:,} bytes",
            hint="Increase max_bytes, or select fewer with layers= or heads=.",
        )
    rows: list[dict[str, Any] | None] = [_encode_rows(layer, count) for layer in layers]
    sizes = [count_characters(record) for record in rows]
    room -= sum(sizes)
    payloads: list[FittedPayload | None] = [None] * len(layers)
    for i in reversed(range(len(layers))):
        payload = payloads[i] = _fit_layer(layers[i], room)
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
        f"{number} queries, rounded by at most {100 * ROUNDING:.1f} %. Dots mark the patches with a stored map."
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


MAX_BYTES = 10_000_000  # of a page, by default


def _load_pictures(image: Any) -> list[Picture]:
    images = list(image) if isinstance(image, list | tuple) else [image]
    if not images:
        raise ArgumentError(
            OPERATION,
            received="an empty list of images",
            expected="the images of the batch entry",
            hint="Pass image=path, or image=[first, second].",
        )
    pictures = []
    for number, given in enumerate(images):
        is_path = isinstance(given, str | os.PathLike)
        name = (
            os.path.basename(os.fspath(given))
            if is_path
            else f"image {number}"
            if len(images) > 1
            else "image"
        )
        pictures.append(Picture(os.fsdecode(name), load_pixels(given, OPERATION)))
    return pictures


def _find_recorded(
    selected: Sequence[LayerCall], passes: ImagePasses, batch: int, notes: list[str]
) -> list[LayerImages]:
    """Return the layers whose grids were recorded; those of models without images are omitted, and a note says so."""
    by_module: dict[str, list[LayerCall]] = {}
    for entry in selected:
        by_module.setdefault(entry.module, []).append(entry)
    found: list[LayerImages] = []
    refused: list[RegardError] = []
    for calls in by_module.values():
        try:
            found += find_layer_images(calls, passes, batch, OPERATION)
        except (ArgumentError, KeyError) as error:
            refused.append(error)  # type: ignore[arg-type]  # NotCapturedError is a KeyError
    found = [images for images in found if images.grids]
    if not found:
        if refused:
            raise refused[0]
        raise ArgumentError(
            OPERATION,
            received=f"an image for batch entry {batch}, which has none",
            expected="a batch entry with an image",
            hint="Choose another one with batch=.",
        )
    if refused:
        names = {error.received.split(",")[0] for error in refused}
        notes.append(
            f"{len(names)} layers are not shown: they do not read an image, or their patch grid is unknown."
        )
    return found


def _apply_grids(selected: Sequence[LayerCall], grids: list[PatchGrid], batch: int) -> list[LayerImages]:
    """Return the layers that have as many keys as the grids that the caller stated."""
    wrong = [grid for grid in grids if not isinstance(grid, PatchGrid)]
    if wrong or not grids:
        raise ArgumentTypeError(
            OPERATION,
            received=f"grid as {describe_argument(wrong[0]) if wrong else 'an empty list'}",
            expected="a regard.images.PatchGrid, or one for each image",
            hint="regard.images.read_grids(model.config, inputs)[batch] lists the grids of a batch entry.",
        )
    fitting = [entry for entry in selected if all(entry.call.shape[-1] == grid.length for grid in grids)]
    if not fitting:
        keys = sorted({entry.call.shape[-1] for entry in selected})
        raise ArgumentError(
            OPERATION,
            received=f"a grid of {grids[0].length} tokens ({grids[0]}) "
            f"for layers of {' or '.join(map(str, keys))} keys",
            expected="a layer with one key for each token of the grid",
            hint="Count the class token, registers, text and padding as before= or after=.",
        )
    return [LayerImages(entry, batch, dict(enumerate(grids))) for entry in fitting]


def _build_layers(
    found: Sequence[LayerImages], tokens: Any, query_tokens: Any, heads: Sequence[int] | None
) -> list[PictureLayer]:
    token_lists, query_lists = (
        None if given is None else as_token_lists(given, OPERATION) for given in (tokens, query_tokens)
    )
    shown: list[PictureLayer] = []
    for (layer, module, _, call), entry, grids, is_vision in found:
        matrix = select_batch_entry(call, entry, OPERATION)
        q_len, kv_len = call.shape[-2:]
        chosen = choose_heads(call, heads)
        if not chosen:
            continue
        first = TokenRows.from_call(call).query_offset
        if is_vision and q_len != kv_len:  # a pooling head, whose query looks like the last token of a text
            first = None
        of_query, of_key = fit_to_call(call, token_lists, query_lists, is_cross_attention=first is None)
        shown.append(
            PictureLayer(
                module=module,
                layer=layer,
                shape=(q_len, kv_len),
                heads=chosen,
                first=first,
                grids=grids,
                is_split=len(grids) == 1 and sum(other.layer_call.module == module for other in found) > 1,
                query_tokens=None if of_query is None else of_query[entry],
                key_tokens=None if of_key is None else of_key[entry],
                matrix=matrix,
                head_dim=int(call.query.shape[-1]),
                groups=call.groups,
            )
        )
    check_shown(shown, [images.layer_call for images in found], heads, token_lists or query_lists)
    return shown
