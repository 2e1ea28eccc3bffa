"""Find the heads that attend from one token to another, and roll attention out: `Recording.find` and `rollout`.

What the analyses of a recording share is here as well: functions that select layers and batch entries, look up tokens,
and compute the norms of values and outputs.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from regard.capture.call import Call, LayerCall
from regard.capture.module_names import find_place, is_selected, list_patterns
from regard.capture.output_projections import OutputProjection, OutputProjections
from regard.core.matrix import AttentionMatrix
from regard.engines.torch_precision import widen
from regard.errors import ArgumentError, ArgumentTypeError, IndexOutOfRangeError, describe_argument
from regard.lens.table import Table
from regard.lens.token_rows import TokenRows, as_token_lists, fit_tokens, token_count_error
from regard.types import Array, IntArray

Tensor = Any  # the types of torch are not followed


def compute_value_norms(call: Call, projections: OutputProjections, operation: str) -> Tensor:
    """Compute ‖v_j W_O‖ of each key and head.

    Returns:
        (…, heads, kv_len), float64.
    """
    fault = ""
    if call.value is None:
        fault = "its value was not recorded"
    elif call.name not in projections:
        fault = f"its output projection was not found: {projections.find_fault(call.name)}"
    elif call.value.shape[-1] != projections[call.name].weight.shape[-2]:
        fault = "its output projection and its values have different widths"
    if fault:
        raise ArgumentError(
            operation,
            received=f"{call.name!r}: {fault}",
            expected="layers with recorded values and an output projection",
            hint="Record them: regard.watch(model, values=True). Saved recordings do not contain them.",
        )
    return _compute_norms(call.value, projections[call.name])


def compute_output_norms(call: Call, projections: OutputProjections) -> Tensor | None:
    """Compute ‖o_i W_O‖, the length of what each head adds to the stream at each query.

    Returns:
        (…, heads, q_len), float64 if the device has it; None if the output was not recorded, or the projection is
        unknown.
    """
    if call.output is None or call.name not in projections:
        return None
    return _compute_norms(call.output, projections[call.name])


def _compute_norms(vectors: Tensor, projection: OutputProjection) -> Tensor:
    """Compute norms after the projection from the Gram matrix W_O W_Oᵀ of each head, which is as small as the head."""
    weight = widen(projection.weight.to(vectors.device))  # (heads, value_dim, width)
    gram = weight @ weight.mT
    vectors = widen(vectors.detach())
    if vectors.ndim > 2:
        vectors = vectors.repeat_interleave(len(gram) // vectors.shape[-3], -3)
    return ((vectors @ gram) * vectors).sum(-1).clamp(min=0.0).sqrt()


# Marks that tokenizers put before a token that starts a word.
_WORD_MARKS = ("Ġ", "▁", " ")


def find_heads(
    layer_calls: Sequence[LayerCall],
    query: Any,
    key: Any,
    tokens: Any,
    query_tokens: Any,
    batch: int,
    by: str,
    projections: OutputProjections,
) -> Table:
    """Build the table of `Recording.find`.

    Returns:
        One row for each call and head, sorted by weight or contribution.
    """
    operation = "recording.find"
    if by not in ("weight", "contribution"):
        raise ArgumentError(
            operation,
            received=f"by={by!r}",
            expected='"weight" or "contribution"',
            hint='"contribution" ranks by ‖w v W_O‖, the size of the vector that a weight adds to the output.',
        )
    table = Table()
    misfits: list[tuple[list[list[Any]], str, int]] = []  # tokens whose number does not fit a layer
    out_of_range: IndexOutOfRangeError | None = None
    key_lists = None if tokens is None else as_token_lists(tokens, operation)
    query_lists = key_lists if query_tokens is None else as_token_lists(query_tokens, operation)
    for layer, module, index, call in layer_calls:
        require_weights(call, operation)
        query_offset = TokenRows.from_call(call).query_offset
        *lead, q_len, kv_len = call.shape
        is_cross_attention = query_offset is None
        if is_cross_attention != (query_tokens is not None) and query_lists is not None:
            continue  # the tokens belong to layers of the other kind
        batch_size = math.prod(lead[:-1])
        own_len = q_len if is_cross_attention else kv_len
        of_query = entry_tokens(query_lists, batch_size, own_len, batch, operation)
        of_key = entry_tokens(key_lists, batch_size, kv_len, batch, operation)
        if query_lists is not None and of_query is None:
            misfits.append((query_lists, "query" if is_cross_attention else "key", own_len))
            continue
        if key_lists is not None and of_key is None:
            misfits.append((key_lists, "key", kv_len))
            continue
        offset = query_offset or 0
        try:
            rows = find_positions(query, of_query, offset + q_len, "query", operation) - offset
            columns = find_positions(key, of_key, kv_len, "key", operation)
        except IndexOutOfRangeError as error:
            out_of_range = out_of_range or error  # a layer with a longer sequence may have the position
            continue
        rows = rows[rows >= 0]
        if not len(rows):
            continue
        matrix = select_batch_entry(call, batch, operation).lazy[..., rows, :]
        weights = as_numpy(matrix[..., columns]).reshape(-1, len(rows), len(columns))
        ranked = weights
        if by == "contribution":
            norms = compute_value_norms(call, projections, operation)
            norms = np.broadcast_to(as_numpy(norms), (*lead, kv_len)).reshape(batch_size, -1, 1, kv_len)
            ranked = weights * norms[batch][..., columns]
        for head, pairs in enumerate(ranked):
            row, column = np.unravel_index(np.argmax(np.nan_to_num(pairs, nan=-1.0)), pairs.shape)
            found = {
                "module": module,
                "layer": layer,
                "call": index,
                "head": head,
                "query": int(rows[row]) + offset,
                "key": int(columns[column]),
                "weight": float(weights[head, row, column]),
            }
            table.append(found if by == "weight" else found | {by: float(pairs[row, column])})
    if not table and layer_calls:
        if out_of_range is not None:
            raise out_of_range
        if misfits:
            lists, role, _ = misfits[0]
            raise token_count_error(
                operation, lists, {entry[2] for entry in misfits if entry[1] == role}, role
            )
        raise ArgumentError(
            operation,
            received="tokens that match none of the recorded layers",
            expected="tokens of the sequence that a layer reads",
            hint="For cross-attention pass both: tokens= of the encoder, query_tokens= of the decoder.",
        )
    return table.sort(by)


def entry_tokens(
    token_lists: list[list[Any]] | None, batch_size: int, length: int, batch: int, operation: str
) -> list[Any] | None:
    """Return the tokens of one batch entry, or None if there are none or their number does not fit."""
    fitted = None if token_lists is None else fit_tokens(token_lists, batch_size, length)
    return None if fitted is None else fitted[check_batch(batch, batch_size, operation)]


def find_positions(
    token: Any, tokens: list[Any] | None, length: int, parameter: str, operation: str
) -> IntArray:
    """Find the positions of a token: all occurrences of a text, or the position itself.

    If no token has the text, tokens that differ from it in capitals match.
    """
    if hasattr(token, "__index__") and not isinstance(token, bool):
        position = int(token)
        if not -length <= position < length:
            raise IndexOutOfRangeError(
                operation,
                received=f"{parameter}={position}",
                expected=f"a position from 0 to {length - 1}, or from −{length} to −1 from the end",
                hint="Positions count all tokens, including special tokens and padding.",
            )
        return np.array([position % length])
    if not isinstance(token, str):
        raise ArgumentTypeError(
            operation,
            received=f"{parameter} as {describe_argument(token)}",
            expected="the text of a token, or its position",
            hint='For example query="it", or query=8.',
        )
    if tokens is None:
        raise ArgumentError(
            operation,
            received=f"{parameter}={token!r} and no tokens",
            expected="tokens, to look up the text",
            hint="Add tokens=tokenizer.convert_ids_to_tokens(input_ids[0]), or pass positions.",
        )
    texts = [strip_word_mark(text) for text in tokens]
    wanted = strip_word_mark(token)
    positions = [i for i, text in enumerate(texts) if text == wanted]
    # The tokens of an uncased model have no capitals, but the text that the user knows may.
    positions = positions or [i for i, text in enumerate(texts) if text.lower() == wanted.lower()]
    if not positions:
        near = difflib.get_close_matches(token, [text for text in texts if text], n=3, cutoff=0.5)
        raise ArgumentError(
            operation,
            received=f"{parameter}={token!r}",
            expected="one of the tokens" + (f", such as {', '.join(map(repr, near))}" if near else ""),
            hint="A word may be split into several tokens, e.g. word pieces (##…). Pass its position instead.",
        )
    return np.array(positions)


def strip_word_mark(token: Any) -> str:
    """Return the text of a token without the mark that it starts a word; a token that is only a mark stays."""
    text = str(token)
    return text.lstrip("".join(_WORD_MARKS)) or text


def require_weights(
    call: Call,
    operation: str,
    hint: str = "Measures do not contain individual weights: call regard.watch without measures.",
) -> None:
    """Check that a call has query and key."""
    if call.query is None:
        raise ArgumentError(
            operation,
            received=f"{call.name!r}, which was recorded with measures only",
            expected="a recording of queries and keys",
            hint=hint,
        )


def select_batch_entry(call: Call, batch: int, operation: str) -> AttentionMatrix:
    """Return the matrix of one batch entry, (heads, q_len, kv_len), lazy."""
    matrix, lead = call.matrix, call.shape[:-2]
    batch = check_batch(batch, math.prod(lead[:-1]), operation)
    return matrix if len(lead) < 2 else matrix.lazy[tuple(map(int, np.unravel_index(batch, lead[:-1])))]


def check_batch(batch: int, size: int, operation: str) -> int:
    """Return the number of a batch entry, from 0; refuse one that does not exist."""
    if not -size <= batch < size:
        raise IndexOutOfRangeError(
            operation,
            received=f"batch={batch}",
            expected=f"one of {size} batch entries" if size > 1 else "batch=0: there is one batch entry",
            hint="Batch entries are counted from 0.",
        )
    return batch % size


def select_layers(
    layer_calls: Sequence[LayerCall], layers: str | Sequence[str] | None, operation: str
) -> list[LayerCall]:
    """Select the calls of modules that match a name or pattern, or are inside one that does; all by default."""
    patterns = list_patterns(layers, operation)
    selected = [
        entry for entry in layer_calls if any(is_selected(entry.module, pattern) for pattern in patterns)
    ]
    for entry in selected:
        require_weights(entry.call, operation)
    return selected


def as_numpy(array: Any) -> Any:
    """Convert a tensor to a float64 NumPy array."""
    return array.detach().cpu().double().numpy()


ROLLOUT = "recording.rollout"


def compute_rollout(
    layer_calls: Sequence[LayerCall], query: Any, tokens: Any, batch: int, layers: str | Sequence[str] | None
) -> Array:
    """Compute the result of `Recording.rollout`.

    Returns:
        The share of each input token, (n,).
    """
    calls = _select_stack(layer_calls, layers)
    length = calls[0].shape[-1]
    texts = None
    if tokens is not None:
        token_lists = as_token_lists(tokens, ROLLOUT)
        texts = entry_tokens(token_lists, math.prod(calls[0].shape[:-3]), length, batch, ROLLOUT)
        if texts is None:
            raise token_count_error(ROLLOUT, token_lists, {length})
    positions = find_positions(query, texts, length, "query", ROLLOUT)
    if len(positions) > 1:
        raise ArgumentError(
            ROLLOUT,
            received=f"query={query!r}, which is at {', '.join(map(str, positions))}",
            expected="one token",
            hint=f"Pass its position: recording.rollout({positions[-1]}).",
        )
    share = np.zeros(length)
    share[positions] = 1.0
    for call in reversed(calls):
        rows = np.flatnonzero(share)
        # Rows with a share of 0 add nothing to the product; under a causal mask they are most of the rows.
        part = select_batch_entry(call, batch, ROLLOUT).lazy[..., rows[0] : rows[-1] + 1, :]
        vector = torch.as_tensor(share[rows[0] : rows[-1] + 1], dtype=part.dtype, device=call.key.device)
        flow = as_numpy(part.mT @ vector)
        share = 0.5 * share + 0.5 * flow.reshape(-1, length).mean(0)
    return share


def _select_stack(layer_calls: Sequence[LayerCall], layers: str | Sequence[str] | None) -> list[Call]:
    """Select the calls of one stack of self-attention, from the first layer to the last."""
    selected = [entry.call for entry in select_layers(layer_calls, layers, ROLLOUT)]
    calls = [call for call in selected if TokenRows.from_call(call).query_offset == 0]
    passes: dict[str, list[int]] = {}
    for call in calls:
        passes.setdefault(call.name, []).append(call.forward_pass)
    for name, own in passes.items():
        # A layer that several depths share runs several times in one pass.
        if len(own) > 1 and (len(set(own)) > 1 or not own[0]):
            raise ArgumentError(
                ROLLOUT,
                received=f"{len(own)} calls of {name!r} from several passes",
                expected="one forward pass of the model",
                hint="Watch one pass at a time: with regard.watch(model) as recording: model(…).",
            )
    stacks = {(find_place(call.name).stack, call.shape[-1]) for call in calls}
    if len(stacks) == 1:
        return calls
    received = ", ".join(f"{stack or 'layers'} of {length} tokens" for stack, length in sorted(stacks))
    if not received:
        received = f"no self-attention among {len(layer_calls)} layers" + (
            f" named {layers!r}" if layers else ""
        )
    raise ArgumentError(
        ROLLOUT,
        received=received,
        expected="the layers of one stack, over one whole sequence",
        hint='Select it: recording.rollout(query, layers="encoder.*"). list(recording) lists the names.',
    )
