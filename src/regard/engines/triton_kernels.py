# mypy: ignore-errors
"""Two Triton kernels: a flash loop with row sums, and a pass that measures final weights.

A program covers one block of rows of one (batch, head) pair and visits the segments of the mask: runs of full blocks of
keys, or one partial block with a tile of bits (`regard.masks.segments`). So every mask runs in one compiled kernel.
Sums over rows of several programs are integers: their order does not matter, so every run gives the same bits.

`triton_launch` documents the arguments. Only this file needs Triton to be imported, and it is imported where a kernel
is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1000.0)  # its power of 2 is 0, and unlike −inf it may be multiplied by 0
SHARE_UNITS = tl.constexpr(1152921504606846976.0)  # 2⁶⁰ units of the integers that shares are added up in
# Arguments that change from call to call: no kernel is compiled for a value of theirs.
_SIZES = ["rows", "kv_len", "offset", "num_intervals", "cell_rows", "cell_columns", "num_blocks"]


@triton.jit
def _add(high, low, x):
    """Add x to high + low; `low` collects what the rounding of `high` loses."""
    total = high + x
    added = total - high
    return total, low + ((high - (total - added)) + (x - added))


@triton.jit
def _multiply(a, b, UPCAST: tl.constexpr):
    """Multiply two blocks; the interpreter cannot multiply bfloat16, whose products float32 holds exactly."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def _load_query(QUERY, own_pair, i, live, pair_stride, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    at = QUERY + own_pair * pair_stride + i[:, None].to(tl.int64) * stride + d[None, :]
    return tl.load(at, mask=live[:, None] & (d[None, :] < D), other=0.0)


@triton.jit
def _compute_scores(
    query, KEY, own_pair, j, kv_len, pair_stride, stride, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute the scores of a block: (BLOCK_M, BLOCK_N)."""
    d = tl.arange(0, BLOCK_D)
    at = KEY + own_pair * pair_stride + j[None, :].to(tl.int64) * stride + d[:, None]
    if D == BLOCK_D:
        key = tl.load(at, mask=j[None, :] < kv_len, other=0.0)
    else:
        key = tl.load(at, mask=(d[:, None] < D) & (j[None, :] < kv_len), other=0.0)
    return _multiply(query, key, UPCAST) * scale


@triton.jit
def _apply_mask(scores, TILES, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Set scores to −inf where the bits of a tile are 0; a row of the tile is BLOCK_N / 32 words."""
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)[None, :]
    at = TILES + tile.to(tl.int64) * (BLOCK_M * (BLOCK_N // 32)) + rows * (BLOCK_N // 32)
    words = tl.load(at)[:, None]
    for n in tl.static_range(1, BLOCK_N // 32):
        words = tl.where(columns >= 32 * n, tl.load(at + n)[:, None], words)
    return tl.where(((words >> (columns % 32)) & 1) != 0, scores, float("-inf"))


@triton.jit
def _sum_distances(weights, positions, lowest, highest, first, BLOCK_N: tl.constexpr):
    """Compute Σ weight · |position − key| of a block: to its nearest key, and from there to each; nothing cancels."""
    steps = tl.arange(0, BLOCK_N)
    last = first + BLOCK_N - 1
    if lowest >= last:
        sums = (positions - last).to(tl.float32) * tl.sum(weights, 1)
        sums += tl.sum(weights * (BLOCK_N - 1 - steps)[None, :].to(tl.float32), 1)
    elif highest <= first:
        sums = (first - positions).to(tl.float32) * tl.sum(weights, 1)
        sums += tl.sum(weights * steps[None, :].to(tl.float32), 1)
    else:
        away = tl.abs(positions[:, None] - (first + steps)[None, :])
        sums = tl.sum(weights * away.to(tl.float32), 1)
    return sums


@triton.jit
def _sum_positions(weights, first, BLOCK_N: tl.constexpr):
    """Compute Σ weight · key of a block."""
    keys = first + tl.arange(0, BLOCK_N)
    return tl.sum(weights * keys[None, :].to(tl.float32), 1)


@triton.jit
def _insert_largest(
    weights, first, values, keys, BLOCK_N: tl.constexpr, TOP_K: tl.constexpr
):  # fmt: skip
    """Insert the weights of a block into the largest ones of each row, in no order; of equal ones the first stay."""
    slots, columns = tl.arange(0, TOP_K)[None, :], tl.arange(0, BLOCK_N)[None, :]
    smallest = tl.min(values, 1)
    best, at = tl.max(weights, 1, return_indices=True)
    remaining = tl.max((best > smallest).to(tl.int32), 0)
    while remaining > 0:
        takes = (best > smallest)[:, None]
        # Of several slots with the smallest weight, the one with the last key is overwritten.
        slot = tl.argmax(tl.where(values == smallest[:, None], keys, -2), 1)[:, None]
        here = takes & (slots == slot)
        values = tl.where(here, best[:, None], values)
        keys = tl.where(here, (first + at)[:, None], keys)
        weights = tl.where(takes & (columns == at[:, None]), 0.0, weights)
        smallest = tl.min(values, 1)
        best, at = tl.max(weights, 1, return_indices=True)
        remaining = tl.max((best > smallest).to(tl.int32), 0)
    return values, keys


@triton.jit(do_not_specialize=_SIZES)
def run_softmax_pass(
    QUERY, KEY, VALUE, QUERY_PAIR, KEY_PAIR, VALUE_PAIR, ROW_POSITION, FIRST_BLOCK, OFFSETS, SEGMENTS, TILES, SINK,
    MAX, SUM, OUTPUT, ONE, SURPRISAL, DISTANCE, POSITION, MAX_SCORE,
    rows, kv_len, num_blocks, offset, scale,
    query_pair_stride, query_stride, key_pair_stride, key_stride, value_pair_stride, value_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_OUTPUT: tl.constexpr, HAS_ONE: tl.constexpr,
    HAS_SURPRISAL: tl.constexpr, HAS_DISTANCE: tl.constexpr, HAS_POSITION: tl.constexpr,
    HAS_MAX_SCORE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of each row by online softmax, and its output and row sums beside."""
    program = tl.program_id(0)
    pair = program // num_blocks
    block = num_blocks - 1 - program % num_blocks  # under a causal mask the last blocks take longest
    pair_of = pair.to(tl.int64)
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    live = i < rows
    own_key = tl.load(KEY_PAIR + pair).to(tl.int64)
    query = _load_query(
        QUERY, tl.load(QUERY_PAIR + pair).to(tl.int64), i, live, query_pair_stride, query_stride, D, BLOCK_D
    )
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total, total_low = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    # Σ e^x · x for x = score − largest ≤ 0: all terms have one sign.
    logs, logs_low = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    distance, distance_low = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    position, position_low = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if HAS_DISTANCE:
        other = tl.load(ROW_POSITION + block * BLOCK_M)
        positions = tl.load(ROW_POSITION + i, mask=live, other=other) + offset
        lowest, highest = tl.min(positions, 0), tl.max(positions, 0)
    if HAS_OUTPUT:
        output = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        own_value = tl.load(VALUE_PAIR + pair).to(tl.int64)
        v = tl.arange(0, BLOCK_V)
    at = OFFSETS + tl.load(FIRST_BLOCK + pair) + block
    for segment in range(tl.load(at), tl.load(at + 1)):
        start, stop = tl.load(SEGMENTS + segment * 3), tl.load(SEGMENTS + segment * 3 + 1)
        tile = tl.load(SEGMENTS + segment * 3 + 2)
        for first in range(start, stop, BLOCK_N):
            j = first + tl.arange(0, BLOCK_N)
            scores = _compute_scores(
                query, KEY, own_key, j, kv_len, key_pair_stride, key_stride, scale, D, BLOCK_D, UPCAST
            )
            if tile >= 0:
                scores = _apply_mask(scores, TILES, tile, BLOCK_M, BLOCK_N)
            now = tl.maximum(largest, tl.max(scores, 1))
            shift = tl.where(now == float("-inf"), 0.0, now)  # (−inf) − (−inf) would be NaN
            x = (scores - shift[:, None]) * LOG2E
            weights = tl.exp2(x)
            drop = (largest - shift) * LOG2E
            shrink = tl.exp2(drop)
            if HAS_SURPRISAL:
                drop = tl.where(largest == float("-inf"), 0.0, drop)
                logs, logs_low = shrink * (logs + drop * total), shrink * (logs_low + drop * total_low)
                logs, logs_low = _add(logs, logs_low, tl.sum(weights * tl.maximum(x, LOWEST), 1))
            if HAS_DISTANCE:
                sums = _sum_distances(weights, positions, lowest, highest, first, BLOCK_N)
                distance, distance_low = _add(distance * shrink, distance_low * shrink, sums)
            if HAS_POSITION:
                sums = _sum_positions(weights, first, BLOCK_N)
                position, position_low = _add(position * shrink, position_low * shrink, sums)
            total, total_low = _add(total * shrink, total_low * shrink, tl.sum(weights, 1))
            if HAS_OUTPUT:
                value_at = VALUE + own_value * value_pair_stride + j[:, None].to(tl.int64) * value_stride
                if VALUE_D == BLOCK_V:
                    value = tl.load(value_at + v[None, :], mask=j[:, None] < kv_len, other=0.0)
                else:
                    inside = (j[:, None] < kv_len) & (v[None, :] < VALUE_D)
                    value = tl.load(value_at + v[None, :], mask=inside, other=0.0)
                output = output * shrink[:, None]
                output += _multiply(weights.to(value.dtype), value, UPCAST)
            largest = now
    out = pair_of * rows + i
    if HAS_MAX_SCORE:
        tl.store(MAX_SCORE + out, largest.to(tl.float64), mask=live)
    # The sink takes part in the softmax, and in nothing else.
    sink = tl.load(SINK + pair)
    now = tl.maximum(largest, sink)
    shift = tl.where(now == float("-inf"), 0.0, now)
    drop = tl.where(largest == float("-inf"), 0.0, (largest - shift) * LOG2E)
    shrink = tl.exp2((largest - shift) * LOG2E).to(tl.float64)
    keys_total = (total.to(tl.float64) + total_low) * shrink
    all_total = keys_total + tl.exp2((sink - shift) * LOG2E)
    divisor = tl.where(all_total == 0, 1.0, all_total)
    tl.store(MAX + out, now, mask=live)
    tl.store(SUM + out, all_total, mask=live)
    if HAS_ONE:
        tl.store(ONE + out, keys_total / divisor, mask=live)
    if HAS_SURPRISAL:
        keys_logs = (logs.to(tl.float64) + logs_low) * shrink + drop * keys_total
        log = tl.log2(divisor.to(tl.float32))
        tl.store(SURPRISAL + out, (keys_total * log - keys_logs) / divisor * LN2, mask=live)
    if HAS_DISTANCE:
        tl.store(DISTANCE + out, (distance.to(tl.float64) + distance_low) * shrink / divisor, mask=live)
    if HAS_POSITION:
        tl.store(POSITION + out, (position.to(tl.float64) + position_low) * shrink / divisor, mask=live)
    if HAS_OUTPUT:
        output = output * (shrink / divisor).to(tl.float32)[:, None]
        inside = live[:, None] & (v[None, :] < VALUE_D)
        tl.store(
            OUTPUT + out[:, None] * VALUE_D + v[None, :], output.to(OUTPUT.dtype.element_ty), mask=inside
        )


@triton.jit(do_not_specialize=_SIZES)
def run_measure_pass(
    QUERY, KEY, QUERY_PAIR, KEY_PAIR, ROW_POSITION, FIRST_BLOCK, OFFSETS, SEGMENTS, TILES,
    SHIFT, FACTOR, LOG, ONE, SURPRISAL, DISTANCE, POSITION, MAX_SCORE, SHARES, INTERVALS, COLUMNS,
    CELLS, ROW_CELL, COLUMN_CELL, TOP_VALUES, TOP_KEYS,
    rows, kv_len, num_blocks, offset, num_intervals, cell_rows, cell_columns, scale, units,
    query_pair_stride, query_stride, key_pair_stride, key_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_ONE: tl.constexpr, HAS_SURPRISAL: tl.constexpr, HAS_DISTANCE: tl.constexpr, HAS_POSITION: tl.constexpr,
    HAS_MAX_SCORE: tl.constexpr, HAS_SHARES: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    CELL_SUM: tl.constexpr, CELL_MAX: tl.constexpr, TOP_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute the final weights of each block from the statistics of its rows, and every measure of them."""
    program = tl.program_id(0)
    pair = program // num_blocks
    block = num_blocks - 1 - program % num_blocks
    pair_of = pair.to(tl.int64)
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    live = i < rows
    out = pair_of * rows + i
    own_key = tl.load(KEY_PAIR + pair).to(tl.int64)
    query = _load_query(
        QUERY, tl.load(QUERY_PAIR + pair).to(tl.int64), i, live, query_pair_stride, query_stride, D, BLOCK_D
    )
    # The shift of a row past the end, or without live keys, is +inf: its weights are 0.
    shift = tl.load(SHIFT + out, mask=live, other=float("inf"))
    factor = tl.load(FACTOR + out, mask=live, other=0.0)
    if HAS_SURPRISAL:
        log = tl.load(LOG + out, mask=live, other=0.0)
    one, one_low = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    surprisal, surprisal_low = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    distance, distance_low = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    position, position_low = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    max_score = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_DISTANCE:
        other = tl.load(ROW_POSITION + block * BLOCK_M)
        positions = tl.load(ROW_POSITION + i, mask=live, other=other) + offset
        lowest, highest = tl.min(positions, 0), tl.max(positions, 0)
    if CELL_SUM or CELL_MAX:
        first_cell = tl.load(ROW_CELL + block * BLOCK_M)
        row_cell = tl.load(ROW_CELL + i, mask=live, other=-1)
        last_cell = tl.max(row_cell, 0)
    if TOP_K > 0:
        values = tl.zeros([BLOCK_M, TOP_K], tl.float32)
        keys = tl.full([BLOCK_M, TOP_K], -1, tl.int32)
    at = OFFSETS + tl.load(FIRST_BLOCK + pair) + block
    for segment in range(tl.load(at), tl.load(at + 1)):
        start, stop = tl.load(SEGMENTS + segment * 3), tl.load(SEGMENTS + segment * 3 + 1)
        tile = tl.load(SEGMENTS + segment * 3 + 2)
        for first in range(start, stop, BLOCK_N):
            j = first + tl.arange(0, BLOCK_N)
            scores = _compute_scores(
                query, KEY, own_key, j, kv_len, key_pair_stride, key_stride, scale, D, BLOCK_D, UPCAST
            )
            if tile >= 0:
                scores = _apply_mask(scores, TILES, tile, BLOCK_M, BLOCK_N)
            if HAS_MAX_SCORE:
                max_score = tl.maximum(max_score, tl.max(scores, 1))
            x = tl.minimum(scores - shift[:, None], 0.0) * LOG2E  # a rounded weight must not exceed 1
            weights = tl.exp2(x) * factor[:, None]
            if HAS_ONE:
                one, one_low = _add(one, one_low, tl.sum(weights, 1))
            if HAS_SURPRISAL:
                sums = tl.sum(weights * (log[:, None] - tl.maximum(x, LOWEST)), 1)
                surprisal, surprisal_low = _add(surprisal, surprisal_low, sums)
            if HAS_DISTANCE:
                sums = _sum_distances(weights, positions, lowest, highest, first, BLOCK_N)
                distance, distance_low = _add(distance, distance_low, sums)
            if HAS_POSITION:
                position, position_low = _add(position, position_low, _sum_positions(weights, first, BLOCK_N))
            if HAS_SHARES:
                for n in range(0, num_intervals):
                    begin, end = tl.load(INTERVALS + n * 3), tl.load(INTERVALS + n * 3 + 1)
                    if (begin < first + BLOCK_N) & (end > first):
                        counted = (j >= begin) & (j < end)
                        sums = tl.sum(tl.where(counted[None, :], weights, 0.0), 1)
                        # The rows of each share follow those of the share before.
                        share = tl.load(INTERVALS + n * 3 + 2).to(tl.int64) * (
                            tl.num_programs(0) // num_blocks
                        )
                        shares_at = SHARES + (share + pair) * rows + i
                        tl.atomic_add(shares_at, (sums * SHARE_UNITS).to(tl.int64), mask=live, sem="relaxed")
            if HAS_COLUMNS or CELL_SUM:
                column_sums = tl.sum(weights, 0)
                units_of = (column_sums * units).to(tl.int64)
                used = (j < kv_len) & (column_sums > 0)
            if HAS_COLUMNS:
                tl.atomic_add(COLUMNS + pair_of * kv_len + j, units_of, mask=used, sem="relaxed")
            if CELL_SUM or CELL_MAX:
                inside = j < kv_len
                column_cell = tl.load(COLUMN_CELL + j, mask=inside, other=0)
                cells_of_pair = CELLS + pair_of * cell_rows * cell_columns + column_cell
            if CELL_SUM:
                if first_cell == last_cell:
                    tl.atomic_add(
                        cells_of_pair + first_cell * cell_columns, units_of, mask=used, sem="relaxed"
                    )
                else:
                    for cell in range(first_cell, last_cell + 1):
                        own = tl.sum(tl.where((row_cell == cell)[:, None], weights, 0.0), 0)
                        cell_at = cells_of_pair + cell * cell_columns
                        tl.atomic_add(
                            cell_at, (own * units).to(tl.int64), mask=inside & (own > 0), sem="relaxed"
                        )
            if CELL_MAX:
                for cell in range(first_cell, last_cell + 1):
                    own = tl.max(tl.where((row_cell == cell)[:, None], weights, 0.0), 0)
                    # Floating point numbers above 0 are ordered as the integers of their bits are.
                    bits = own.to(tl.int32, bitcast=True)
                    tl.atomic_max(
                        cells_of_pair + cell * cell_columns, bits, mask=inside & (own > 0), sem="relaxed"
                    )
            if TOP_K > 0:
                values, keys = _insert_largest(weights, first, values, keys, BLOCK_N, TOP_K)
    if HAS_ONE:
        tl.store(ONE + out, one.to(tl.float64) + one_low, mask=live)
    if HAS_SURPRISAL:
        tl.store(SURPRISAL + out, (surprisal.to(tl.float64) + surprisal_low) * LN2, mask=live)
    if HAS_DISTANCE:
        tl.store(DISTANCE + out, distance.to(tl.float64) + distance_low, mask=live)
    if HAS_POSITION:
        tl.store(POSITION + out, position.to(tl.float64) + position_low, mask=live)
    if HAS_MAX_SCORE:
        tl.store(MAX_SCORE + out, max_score.to(tl.float64), mask=live)
    if TOP_K > 0:
        slots = tl.arange(0, TOP_K)[None, :]
        tl.store(TOP_VALUES + out[:, None] * TOP_K + slots, values, mask=live[:, None])
        tl.store(TOP_KEYS + out[:, None] * TOP_K + slots, keys, mask=live[:, None])
