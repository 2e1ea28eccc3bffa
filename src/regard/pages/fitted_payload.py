"""The payload of as many heads of a layer as fit into a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.pages.encoding import EncodedArray
from regard.pages.html import encode_record
from regard.pages.payload import ErrorEstimate, MatrixPayload, build_payload

if TYPE_CHECKING:
    from regard.core.matrix import AttentionMatrix

ELEMENT_OVERHEAD = 64  # characters around each array in the page


class FittedPayload(NamedTuple):
    """The payload of some heads of a layer.

    Attributes:
        record: The data for the page, with the numbers of the heads as `heads`.
        error: The error of its weights.
        size: Its characters in the page.
    """

    record: dict[str, Any]
    error: ErrorEstimate
    size: int


def fit_payload(
    matrix: AttentionMatrix,
    heads: Sequence[int],
    *,
    groups: int,
    head_dim: int,
    room: int,
    operation: str,
    add: Callable[[dict[str, Any], MatrixPayload], None] | None = None,
) -> FittedPayload | None:
    """Build the payload of as many heads as fit into `room` characters.

    Args:
        matrix: Attention of one batch entry, (all heads, q_len, kv_len), or (q_len, kv_len) without a head axis.
        heads: The heads to store; the last ones are omitted first.
        groups: How many heads share a key.
        head_dim: Width of a query.
        room: Largest number of characters.
        operation: Name of the calling function, for error messages.
        add: Called with each record and its payload, to extend the record.

    Returns:
        The payload, or None if not even one head fits.

    Raises:
        ArgumentError: If the weights cannot be computed in a page.
        TooLargeError: If the mask or a bias is too large for a page.
    """
    heads = list(heads)
    q_len, kv_len = matrix.shape[-2:]
    while heads:
        if estimate_size(heads, q_len, kv_len, groups, head_dim) <= room:
            payload = build_payload(matrix.lazy[heads] if len(matrix.shape) > 2 else matrix, operation)
            record = {"heads": heads, **payload.record}
            if add is not None:
                add(record, payload)
            size = count_characters(record)
            if size <= room:
                return FittedPayload(record, payload.error, size)
        heads = heads[:-1]
    return None


def estimate_size(heads: Sequence[int], q_len: int, kv_len: int, groups: int, head_dim: int) -> float:
    """Estimate the characters that heads take at least: halves of query and key, and each lse."""
    kv_heads = len({head // groups for head in heads})
    return (1.7 * head_dim * (len(heads) * q_len + kv_heads * kv_len) + 3 * len(heads) * q_len) * 4 / 3


def count_characters(record: Any) -> int:
    """Return the characters that a record takes in a page, with its arrays."""
    arrays: list[EncodedArray] = []
    text = encode_record(record, arrays)
    return len(text) + sum(ELEMENT_OVERHEAD + len(array.text) for array in arrays)


def combine_errors(errors: Sequence[ErrorEstimate]) -> dict[str, Any] | None:
    """Return the largest error of all layers, and the number of all weights that were compared; None without errors."""
    if not errors:
        return None
    worst = {name: max(getattr(error, name) for error in errors) for name in ErrorEstimate._fields}
    return worst | {
        "compared": sum(error.compared for error in errors),
        "exact": all(error.exact for error in errors),
    }
