/* One compiled pass; measures.c includes this file once for each instruction set and number type.

   Set before: REAL and its integer UINT of the same size, LANES of a vector, and TILE_VECTORS × TILE_KEYS, the
   accumulators that the score product keeps in registers.

   Lanes are rows: a strip of scores is (keys, rows), so sums over the keys of a row need no horizontal operation, the
   queries are packed once per block of rows, and the keys are read where they are. */

typedef REAL NAME(Vec) __attribute__((vector_size(LANES * sizeof(REAL)), may_alias));
typedef REAL NAME(LooseVec) __attribute__((vector_size(LANES * sizeof(REAL)), may_alias, aligned(sizeof(REAL))));
typedef SINT NAME(Bits) __attribute__((vector_size(LANES * sizeof(REAL)), may_alias));
typedef SINT NAME(LooseBits) __attribute__((vector_size(LANES * sizeof(REAL)), may_alias, aligned(sizeof(REAL))));
#define Vec NAME(Vec)
#define Bits NAME(Bits)
#define VECTORS (SUB_ROWS / LANES)

static ALWAYS_INLINE Vec NAME(load)(const REAL *from) { return *(const NAME(LooseVec) *)from; }
static ALWAYS_INLINE void NAME(store)(REAL *to, Vec v) { *(NAME(LooseVec) *)to = v; }
static ALWAYS_INLINE Bits NAME(load_bits)(const SINT *from) { return *(const NAME(LooseBits) *)from; }
static ALWAYS_INLINE Vec NAME(splat)(REAL x) { return x - (Vec){}; }

static ALWAYS_INLINE Vec NAME(select)(Bits mask, Vec a, Vec b) {
    return (Vec)((mask & (Bits)a) | (~mask & (Bits)b));
}

/* Compilers turn these loops into one instruction. If a is NaN it stays; b is never NaN. */
static ALWAYS_INLINE Vec NAME(at_least)(Vec a, Vec b) {
    Vec r;
    for (int i = 0; i < LANES; i++) r[i] = a[i] < b[i] ? b[i] : a[i];
    return r;
}
static ALWAYS_INLINE Vec NAME(at_most)(Vec a, Vec b) {
    Vec r;
    for (int i = 0; i < LANES; i++) r[i] = a[i] > b[i] ? b[i] : a[i];
    return r;
}

/* exp(x) for x between LOWEST and 0; NaN stays NaN. x = n ln 2 + r; the power of two is applied in two steps, so that
   results below the smallest normal number are rounded as they should be. */
static ALWAYS_INLINE Vec NAME(exponential)(Vec x) {
    Vec shifted = x * REAL_LOG2E + ROUNDER;
    Vec n = shifted - ROUNDER;
    Vec r = x - n * LN2_HIGH;
    r = r - n * LN2_LOW;
    Vec p = NAME(splat)(exp_coefficients[EXP_TERMS - 1]);
    for (int i = EXP_TERMS - 2; i >= 0; i--) p = p * r + exp_coefficients[i];
    p = (r * r) * p + r;
    p = p + (REAL)1;
    Vec power = (Vec)((((Bits)shifted) << MANTISSA) + POWER_BIAS);
    return (p * power) * POWER_REST;
}

static NOINLINE void NAME(exponentials)(const REAL *x, REAL *y, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        REAL part[LANES] = {0};
        int64_t m = n - i < LANES ? n - i : LANES;
        for (int64_t j = 0; j < m; j++) part[j] = x[i + j];
        NAME(store)(part, NAME(exponential)(NAME(at_least)(NAME(load)(part), NAME(splat)(LOWEST))));
        for (int64_t j = 0; j < m; j++) y[i + j] = part[j];
    }
}

/* Lanes of a vector that a word of row bits allows. */
static ALWAYS_INLINE Bits NAME(lane_mask)(uint64_t word, int vector) {
    Bits lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = (SINT)1 << i;
    SINT part = (SINT)((word >> (vector * LANES)) & ((((uint64_t)1 << (LANES - 1)) << 1) - 1));
    return ((part - (Bits){}) & lanes) != 0;
}

#if !defined(X86)
/* The highest bit of each lane, as one number. */
static ALWAYS_INLINE unsigned NAME(lane_bits)(Bits bits) {
    unsigned found = 0;
    for (int i = 0; i < LANES; i++) found |= (bits[i] < 0 ? 1u : 0u) << i;
    return found;
}
#endif

/* scores[key][row] = scale · query · key for SUB_ROWS rows and STRIP_KEYS keys. Not inlined: the product with the scale is
   rounded here, in both passes alike, and never contracted with a later subtraction. */
static NOINLINE void NAME(score_strip)(
    const REAL *query, const REAL *const *keys, int64_t dim, REAL scale, REAL *scores) {
    for (int row = 0; row < SUB_ROWS; row += TILE_VECTORS * LANES)
        for (int key = 0; key < STRIP_KEYS; key += TILE_KEYS) {
            Vec sums[TILE_KEYS][TILE_VECTORS] = {};
            const REAL *const *own = keys + key;
            for (int64_t d = 0; d < dim; d++) {
                Vec q[TILE_VECTORS];
                UNROLL for (int v = 0; v < TILE_VECTORS; v++)
                    q[v] = NAME(load)(query + d * SUB_ROWS + row + v * LANES);
                UNROLL for (int k = 0; k < TILE_KEYS; k++) {
                    REAL factor = own[k][d];
                    UNROLL for (int v = 0; v < TILE_VECTORS; v++) sums[k][v] += q[v] * factor;
                }
            }
            UNROLL for (int k = 0; k < TILE_KEYS; k++)
                UNROLL for (int v = 0; v < TILE_VECTORS; v++)
                    NAME(store)(scores + (key + k) * SUB_ROWS + row + v * LANES, sums[k][v] * scale);
        }
}

/* A large weight of a row; NaN, which ranks highest, is stored as infinity. */
typedef struct {
    REAL value;
    int32_t key;
} NAME(Candidate);
#define Candidate NAME(Candidate)

/* The state of one block of rows. */
typedef struct {
    REAL *query;                /* sub-blocks of (dim, SUB_ROWS) */
    REAL *scores;               /* (STRIP_KEYS, SUB_ROWS), replaced by the weights */
    REAL *target;               /* where the scores of the next strip go: `scores`, or a place in `kept` */
    REAL *kept, *kept_shifts;   /* of each strip of a sub-block: exponentials like `scores`, and their shift of each row */
    REAL *part, *product;       /* output of a sub-block, (value_dim, SUB_ROWS): of the last strips, of those before */
    REAL *shift, *factor, *log; /* weight = exp(score − shift) · factor, ln weight = score − shift − log */
    REAL *largest, *threshold;
    double *total, *one, *surprisal, *position, *distances, *shares, *bands, *cells;
    double *weight, *mean, *deviations; /* moments of each row */
    Candidate *candidates;      /* of each row of a sub-block; among them are the largest weights so far */
    int64_t num_candidates[SUB_ROWS], max_candidates;
    struct NAME(Strip) *strips; /* whose exponentials are kept */
    int64_t num_strips, num_parts; /* strips kept; strips in `part` */
    int64_t *cell_rows, *cell_columns;
    const Job *job;
    int64_t first_row, rows;
    int64_t lowest[SUBS], highest[SUBS]; /* positions of the rows of each sub-block */
} NAME(Block);
#define Block NAME(Block)

/* One strip of keys for one sub-block. */
typedef struct NAME(Strip) {
    int sub, count, is_masked;
    int64_t first_key;
    const uint64_t *words; /* for each key, the rows of the sub-block that may attend to it */
} NAME(Strip);
#define Strip NAME(Strip)

/* Softmax statistics: the largest score and Σ exp(score − largest) of each row, strip by strip. */
static ALWAYS_INLINE void NAME(add_statistics)(Block *block, const Strip *strip, const int is_masked) {
    REAL sums[SUB_ROWS], rescale[SUB_ROWS];
    double *total = block->total + strip->sub * SUB_ROWS;
    for (int v = 0; v < VECTORS; v++) {
        REAL *own_largest = block->largest + strip->sub * SUB_ROWS + v * LANES;
        const REAL *scores = block->scores + v * LANES;
        Vec before = NAME(load)(own_largest), largest = before, sum = {};
        for (int j = 0; j < strip->count; j++) {
            Vec score = NAME(load)(scores + j * SUB_ROWS);
            Bits larger = score > largest;
            if (is_masked) larger &= NAME(lane_mask)(strip->words[j], v);
            largest = NAME(select)(larger, score, largest);
        }
        Vec shift = (Vec)(~(largest == -(REAL)INFINITY) & (Bits)largest); /* (−inf) − (−inf) would be NaN */
        for (int j = 0; j < strip->count; j++) {
            Vec x = NAME(load)(scores + j * SUB_ROWS) - shift;
            Vec e = NAME(exponential)(NAME(at_least)(x, NAME(splat)(LOWEST)));
            if (is_masked) e = (Vec)((Bits)e & NAME(lane_mask)(strip->words[j], v));
            sum += e;
        }
        NAME(store)(own_largest, largest);
        NAME(store)(sums + v * LANES, sum);
        NAME(store)(rescale + v * LANES,
                    NAME(exponential)(NAME(at_least)(before - shift, NAME(splat)(LOWEST))));
    }
    for (int r = 0; r < SUB_ROWS; r++) total[r] = total[r] * rescale[r] + sums[r];
}

/* Replace the scores of a strip by weights; add up each row and its surprisal. */
static ALWAYS_INLINE void NAME(weigh)(
    Block *block, const Strip *strip, const int is_masked, const int is_exact, REAL *sums, REAL *surprisals) {
    int first = strip->sub * SUB_ROWS;
    for (int v = 0; v < VECTORS; v++) {
        REAL *scores = block->scores + v * LANES;
        int row = first + v * LANES;
        Vec shift = NAME(load)(block->shift + row), sum = {}, surprisal = {};
        Vec factor = NAME(load)(block->factor + row), log = NAME(load)(block->log + row);
        for (int j = 0; j < strip->count; j++) {
            Vec score = NAME(load)(scores + j * SUB_ROWS), x = score - shift;
            /* A rounded weight must not exceed 1, and 0 · (−inf) is NaN. */
            x = NAME(at_least)(NAME(at_most)(x, (Vec){}), NAME(splat)(LOWEST));
            Vec weight = NAME(exponential)(x);
            if (is_exact) {
                /* A score of −inf has weight 0 in a NaN row, too. */
                Bits live = score != -(REAL)INFINITY;
                weight = (Vec)((Bits)(weight * factor) & live);
                x = (Vec)((Bits)(x - log) & live);
            }
            if (is_masked) {
                Bits mask = NAME(lane_mask)(strip->words[j], v);
                weight = (Vec)((Bits)weight & mask);
                x = (Vec)((Bits)x & mask);
            }
            NAME(store)(scores + j * SUB_ROWS, weight);
            sum += weight;
            surprisal -= weight * x;
        }
        NAME(store)(sums + v * LANES, sum);
        NAME(store)(surprisals + v * LANES, surprisal);
    }
}

static NOINLINE void NAME(weigh_strip)(Block *block, const Strip *strip, REAL *sums, REAL *surprisals) {
    if (block->job->is_lse) {
        if (strip->is_masked)
            NAME(weigh)(block, strip, 1, 0, sums, surprisals);
        else
            NAME(weigh)(block, strip, 0, 0, sums, surprisals);
    } else if (strip->is_masked)
        NAME(weigh)(block, strip, 1, 1, sums, surprisals);
    else
        NAME(weigh)(block, strip, 0, 1, sums, surprisals);
}

/* One pass over the scores instead of two: keep exp(score − shift) of a strip, where the shift is the largest score of the
   row so far, and update the largest score, Σ exp(score − largest) and Σ exp(score − largest) · (largest − score). */
static ALWAYS_INLINE void NAME(keep)(
    Block *block, const Strip *strip, REAL *scores, REAL *shifts, const int is_masked) {
    REAL sums[SUB_ROWS], moments[SUB_ROWS];
    int first = strip->sub * SUB_ROWS;
    double *total = block->total + first, *moment = block->surprisal + first;
    for (int v = 0; v < VECTORS; v++) {
        REAL *own_peak = block->shift + first + v * LANES, *own = scores + v * LANES;
        Vec before = NAME(load)(own_peak), peak = before, sum = {}, added = {};
        for (int j = 0; j < strip->count; j++) {
            Vec score = NAME(load)(own + j * SUB_ROWS);
            Bits larger = score > peak;
            if (is_masked) larger &= NAME(lane_mask)(strip->words[j], v);
            peak = NAME(select)(larger, score, peak);
        }
        Vec shift = (Vec)(~(peak == -(REAL)INFINITY) & (Bits)peak);
        for (int j = 0; j < strip->count; j++) {
            Vec x = NAME(at_least)(NAME(load)(own + j * SUB_ROWS) - shift, NAME(splat)(LOWEST));
            Vec e = NAME(exponential)(x);
            if (is_masked) {
                Bits mask = NAME(lane_mask)(strip->words[j], v);
                e = (Vec)((Bits)e & mask);
                x = (Vec)((Bits)x & mask);
            }
            NAME(store)(own + j * SUB_ROWS, e);
            sum += e;
            added -= e * x;
        }
        NAME(store)(sums + v * LANES, sum);
        NAME(store)(moments + v * LANES, added);
        NAME(store)(shifts + v * LANES, peak);
        if (LANE_BITS(before != peak)) { /* rare after the first strips */
            REAL ahead[LANES], rescale[LANES];
            Vec step = NAME(at_least)(before - shift, NAME(splat)(LOWEST));
            NAME(store)(ahead, step);
            NAME(store)(rescale, NAME(exponential)(step));
            for (int i = 0; i < LANES; i++) {
                int r = v * LANES + i;
                moment[r] = (moment[r] - total[r] * ahead[i]) * rescale[i];
                total[r] *= rescale[i];
            }
            NAME(store)(own_peak, peak);
        }
    }
    for (int r = 0; r < SUB_ROWS; r++) total[r] += sums[r];
    for (int r = 0; r < SUB_ROWS; r++) moment[r] += moments[r];
}

#include "measures_sums.h"

static NOINLINE void NAME(keep_strip)(Block *block, const Strip *strip) {
    REAL *shifts = block->kept_shifts + block->num_strips * SUB_ROWS;
    if (block->job->max_score) NAME(find_largest_scores)(block, strip);
    if (strip->is_masked)
        NAME(keep)(block, strip, block->target, shifts, 1);
    else
        NAME(keep)(block, strip, block->target, shifts, 0);
    block->strips[block->num_strips++] = *strip;
    block->target += STRIP_KEYS * SUB_ROWS;
}

/* Turn the exponentials of a strip into weights, and add up each row. */
static NOINLINE void NAME(weigh_kept)(Block *block, int sub, const REAL *kept, const REAL *shifts, int count, REAL *sums) {
    for (int v = 0; v < VECTORS; v++) {
        int row = sub * SUB_ROWS + v * LANES;
        Vec factor = NAME(load)(block->factor + row), sum = {};
        Vec shift = NAME(load)(shifts + v * LANES), last = NAME(load)(block->shift + row);
        if (LANE_BITS(shift != last)) {
            Vec x = NAME(at_least)(NAME(at_most)(shift - last, (Vec){}), NAME(splat)(LOWEST));
            factor *= NAME(exponential)(x);
        }
        for (int j = 0; j < count; j++) {
            Vec weight = NAME(load)(kept + j * SUB_ROWS + v * LANES) * factor;
            NAME(store)(block->scores + j * SUB_ROWS + v * LANES, weight);
            sum += weight;
        }
        NAME(store)(sums + v * LANES, sum);
    }
}

/* Add the weights of a strip, and the sum of each row of them, to every accumulator. */
static NOINLINE void NAME(add_weights)(Block *block, const Strip *strip, const REAL *sums) {
    const Job *job = block->job;
    int first = strip->sub * SUB_ROWS;
    int rows = block->rows - first < SUB_ROWS ? (int)(block->rows - first) : SUB_ROWS;
    const REAL *weights = block->scores;
    if (job->position) NAME(add_position)(weights, sums, strip, block->position + first);
    if (job->moments) NAME(add_moments)(block, strip, sums);
    for (int i = 0; i < job->num_distances; i++)
        NAME(add_distance)(weights, job->positions + block->first_row + first, job->distance_offsets[i], rows, strip,
                           block->distances + i * BLOCK_ROWS + first);
    for (int i = 0; i < job->num_shares; i++)
        for (int64_t s = job->share_starts[i]; s < job->share_starts[i + 1]; s++) {
            int64_t start = job->intervals[2 * s] - strip->first_key, stop = job->intervals[2 * s + 1] - strip->first_key;
            start = start > 0 ? start : 0;
            stop = stop < strip->count ? stop : strip->count;
            if (start < stop) NAME(add_keys)(weights, (int)start, (int)stop, block->shares + i * BLOCK_ROWS + first);
        }
    for (int i = 0; i < job->num_bands; i++)
        NAME(add_band)(block, strip, job->bands + i, sums, rows, block->bands + i * BLOCK_ROWS + first);
    if (job->diagonals) NAME(add_diagonals)(block, strip, rows);
    if (job->columns) NAME(add_columns)(weights, strip, job->columns);
    if (job->num_grids) NAME(add_cells)(block, strip, sums);
    if (block->candidates)
        NAME(collect_largest)(block, strip, rows);
    else if (job->top_k)
        NAME(insert_largest)(block, strip, rows);
    if (job->value) NAME(add_product)(block, strip);
}

static NOINLINE void NAME(measure_strip)(Block *block, const Strip *strip) {
    const Job *job = block->job;
    REAL sums[SUB_ROWS], surprisals[SUB_ROWS];
    int first = strip->sub * SUB_ROWS;
    if (job->max_score) NAME(find_largest_scores)(block, strip);
    NAME(weigh_strip)(block, strip, sums, surprisals);
    if (job->one)
        for (int r = 0; r < SUB_ROWS; r++) block->one[first + r] += sums[r];
    if (job->surprisal)
        for (int r = 0; r < SUB_ROWS; r++) block->surprisal[first + r] += surprisals[r];
    NAME(add_weights)(block, strip, sums);
}

static NOINLINE void NAME(statistics_strip)(Block *block, const Strip *strip) {
    if (strip->is_masked)
        NAME(add_statistics)(block, strip, 1);
    else
        NAME(add_statistics)(block, strip, 0);
}

/* Visit every strip of the live segments of some sub-blocks of a block of rows. */
static void NAME(visit)(
    Block *block, int64_t number, int first_sub, int last_sub, void (*visit_strip)(Block *, const Strip *)) {
    const Job *job = block->job;
    const REAL *key = job->key;
    for (int64_t s = job->offsets[number]; s < job->offsets[number + 1]; s++) {
        const int64_t *segment = job->segments + 3 * s;
        const uint64_t *tile = segment[2] < 0 ? 0 : job->tiles + segment[2] * BLOCK_KEYS * SUBS;
        for (int64_t chunk = segment[0]; chunk < segment[1]; chunk += CHUNK_KEYS) {
            int64_t stop = segment[1] - chunk < CHUNK_KEYS ? segment[1] : chunk + CHUNK_KEYS;
            for (int sub = first_sub; sub < last_sub; sub++) {
                int64_t rows = block->rows - sub * SUB_ROWS;
                uint64_t valid = rows < SUB_ROWS ? ((uint64_t)1 << rows) - 1 : ~(uint64_t)0;
                for (int64_t first = chunk; first < stop; first += STRIP_KEYS) {
                    uint64_t words[STRIP_KEYS], any = 0, all = ~(uint64_t)0;
                    const REAL *keys[STRIP_KEYS];
                    int count = stop - first < STRIP_KEYS ? (int)(stop - first) : STRIP_KEYS;
                    for (int j = 0; j < STRIP_KEYS; j++) {
                        int64_t own = first + (j < count ? j : count - 1);
                        keys[j] = key + own * job->key_stride;
                        words[j] = tile ? tile[(own - segment[0]) * SUBS + sub] : valid;
                        any |= words[j];
                        all &= words[j];
                    }
                    if (!any) continue;
                    NAME(score_strip)(block->query + sub * SUB_ROWS * job->dim, keys, job->dim, (REAL)job->scale, block->target);
                    Strip strip = {sub, count, all != ~(uint64_t)0, first, words};
                    visit_strip(block, &strip);
                }
            }
        }
    }
}

static void NAME(pack_queries)(Block *block) {
    const Job *job = block->job;
    const REAL *query = (const REAL *)job->query + block->first_row * job->query_stride;
    for (int64_t sub = 0; sub * SUB_ROWS < block->rows; sub++)
        for (int64_t r = 0; r < SUB_ROWS; r++) {
            int64_t row = sub * SUB_ROWS + r;
            REAL *to = block->query + sub * SUB_ROWS * job->dim + r;
            for (int64_t d = 0; d < job->dim; d++)
                to[d * SUB_ROWS] = row < block->rows ? query[row * job->query_stride + d] : 0;
        }
}

/* Store the statistics of a row; `live` is Σ exp(score − max) over its keys. Return the sum with the share of the sink. */
static double NAME(store_statistics)(const Job *job, int64_t row, REAL max, double live) {
    if (live != live) max = (REAL)NAN;
    double sum = live;
    if (job->has_sink && max != -(REAL)INFINITY) sum += exp((double)(REAL)job->sink - (double)max);
    if (row < job->rows) {
        ((REAL *)job->max)[row] = max;
        job->sum[row] = sum;
    }
    return sum;
}

static void NAME(compute_statistics)(Block *block, int64_t number, int first_sub, int last_sub) {
    const Job *job = block->job;
    for (int r = first_sub * SUB_ROWS; r < last_sub * SUB_ROWS; r++) {
        block->largest[r] = job->has_sink ? (REAL)job->sink : -(REAL)INFINITY;
        block->total[r] = 0;
    }
    NAME(visit)(block, number, first_sub, last_sub, NAME(statistics_strip));
    for (int64_t r = first_sub * SUB_ROWS; r < last_sub * SUB_ROWS; r++)
        NAME(store_statistics)(job, block->first_row + r, block->largest[r], block->total[r]);
}

static void NAME(load_statistics)(Block *block, int first_sub, int last_sub) {
    const Job *job = block->job;
    const REAL *max = (const REAL *)job->max + block->first_row;
    for (int64_t r = first_sub * SUB_ROWS; r < last_sub * SUB_ROWS; r++) {
        int is_valid = r < block->rows;
        double sum = is_valid && !job->is_lse ? job->sum[block->first_row + r] : 1;
        sum = sum == 0 ? 1 : sum;
        block->shift[r] = is_valid && max[r] != -(REAL)INFINITY ? max[r] : 0;
        block->factor[r] = (REAL)(1 / sum);
        block->log[r] = (REAL)log(sum);
        block->largest[r] = -(REAL)INFINITY;
        block->one[r] = block->surprisal[r] = 0;
    }
}

static void NAME(copy_rows)(double *to, const double *from, const Block *block) {
    for (int64_t r = 0; r < block->rows; r++) to[block->first_row + r] = from[r];
}

/* Compute the statistics of a sub-block and keep its exponentials; 0 if a row is NaN, for which the two passes decide which
   of its weights are. */
static int NAME(keep_sub)(Block *block, int64_t number, int sub) {
    const Job *job = block->job;
    int first = sub * SUB_ROWS;
    for (int r = first; r < first + SUB_ROWS; r++) {
        block->shift[r] = job->has_sink ? (REAL)job->sink : -(REAL)INFINITY;
        block->largest[r] = -(REAL)INFINITY;
        block->total[r] = block->surprisal[r] = 0;
    }
    block->num_strips = 0;
    block->target = block->kept;
    NAME(visit)(block, number, sub, sub + 1, NAME(keep_strip));
    block->target = block->scores;
    for (int r = first; r < first + SUB_ROWS; r++)
        if (block->total[r] != block->total[r]) return 0;
    for (int r = first; r < first + SUB_ROWS; r++) {
        int is_empty = block->shift[r] == -(REAL)INFINITY;
        double live = block->total[r], sum = NAME(store_statistics)(job, block->first_row + r, block->shift[r], live);
        sum = sum == 0 ? 1 : sum;
        if (is_empty) block->shift[r] = 0;
        block->factor[r] = (REAL)(1 / sum);
        block->one[r] = live / sum;
        block->surprisal[r] = (block->surprisal[r] + live * log(sum)) / sum;
    }
    return 1;
}

static void NAME(measure_kept)(Block *block) {
    REAL sums[SUB_ROWS];
    for (int64_t i = 0; i < block->num_strips; i++) {
        const Strip *strip = block->strips + i;
        NAME(weigh_kept)(block, strip->sub, block->kept + i * STRIP_KEYS * SUB_ROWS, block->kept_shifts + i * SUB_ROWS,
                         strip->count, sums);
        NAME(add_weights)(block, strip, sums);
    }
}

/* Strips of the live segments of a block of rows. */
static int64_t NAME(count_strips)(const Job *job, int64_t number) {
    int64_t strips = 0;
    for (int64_t s = job->offsets[number]; s < job->offsets[number + 1]; s++)
        strips += (job->segments[3 * s + 1] - job->segments[3 * s] + STRIP_KEYS - 1) / STRIP_KEYS;
    return strips;
}

static void NAME(measure_block)(Block *block, int64_t number) {
    const Job *job = block->job;
    int subs = (int)((block->rows + SUB_ROWS - 1) / SUB_ROWS);
    int keeps = job->keeps && NAME(count_strips)(job, number) <= KEPT_STRIPS;
    for (int r = 0; r < BLOCK_ROWS; r++) block->position[r] = block->threshold[r] = 0;
    for (int r = 0; r < BLOCK_ROWS; r++) block->weight[r] = block->mean[r] = block->deviations[r] = 0;
    for (int64_t r = 0; r < job->num_distances * BLOCK_ROWS; r++) block->distances[r] = 0;
    for (int64_t r = 0; r < job->num_shares * BLOCK_ROWS; r++) block->shares[r] = 0;
    for (int64_t r = 0; r < job->num_bands * BLOCK_ROWS; r++) block->bands[r] = 0;
    for (int64_t r = 0; r < block->rows; r++) {
        int64_t position = job->positions[block->first_row + r], sub = r / SUB_ROWS;
        if (r % SUB_ROWS == 0 || position < block->lowest[sub]) block->lowest[sub] = position;
        if (r % SUB_ROWS == 0 || position > block->highest[sub]) block->highest[sub] = position;
    }
    for (int64_t g = 0; g < job->num_grids; g++) {
        for (int sub = 0; sub < SUBS; sub++) block->cell_columns[g * SUBS + sub] = -1;
        for (int r = 0; r < BLOCK_ROWS; r++) {
            block->cells[g * BLOCK_ROWS + r] = 0;
            block->cell_rows[g * BLOCK_ROWS + r] = (block->first_row + r) * job->grids[g].rows / job->rows;
        }
    }
    /* Sub by sub: one output, and the exponentials of one sub-block, are in memory at a time. */
    int step = keeps || job->value || block->candidates ? 1 : subs;
    for (int sub = 0; sub < subs; sub += step) {
        if (job->value) NAME(clear_product)(block);
        for (int r = 0; r < SUB_ROWS; r++) block->num_candidates[r] = 0;
        if (keeps && NAME(keep_sub)(block, number, sub))
            NAME(measure_kept)(block);
        else {
            if (!job->is_known) NAME(compute_statistics)(block, number, sub, sub + step);
            NAME(load_statistics)(block, sub, sub + step);
            NAME(visit)(block, number, sub, sub + step, NAME(measure_strip));
        }
        if (job->value) NAME(write_product)(block, sub);
        if (block->candidates) NAME(write_largest)(block, sub);
    }
    for (int g = 0; g < job->num_grids; g++)
        for (int sub = 0; sub < SUBS; sub++) NAME(flush_cells)(block, g, sub);
    if (job->one) NAME(copy_rows)(job->one, block->one, block);
    if (job->surprisal) NAME(copy_rows)(job->surprisal, block->surprisal, block);
    if (job->position) NAME(copy_rows)(job->position, block->position, block);
    for (int64_t r = 0; r < block->rows && job->moments; r++) {
        double *own = job->moments + 3 * (block->first_row + r);
        own[0] = block->weight[r], own[1] = block->mean[r], own[2] = block->deviations[r];
    }
    for (int i = 0; i < job->num_distances; i++)
        NAME(copy_rows)(job->distances[i], block->distances + i * BLOCK_ROWS, block);
    for (int i = 0; i < job->num_shares; i++)
        NAME(copy_rows)(job->shares[i], block->shares + i * BLOCK_ROWS, block);
    for (int i = 0; i < job->num_bands; i++)
        NAME(copy_rows)(job->bands[i].sums, block->bands + i * BLOCK_ROWS, block);
    if (job->max_score)
        for (int64_t r = 0; r < block->rows; r++) job->max_score[block->first_row + r] = block->largest[r];
}

static int NAME(run)(const Job *job) {
    int64_t strips = 0;
    for (int64_t number = job->first_block; job->keeps && number < job->last_block; number++) {
        int64_t own = NAME(count_strips)(job, number);
        if (own <= KEPT_STRIPS && own > strips) strips = own;
    }
    int64_t reals = BLOCK_ROWS * (job->dim + 5) + STRIP_KEYS * SUB_ROWS + SUB_ROWS * 2 * job->value_dim;
    reals += strips * (STRIP_KEYS + 1) * SUB_ROWS;
    int64_t doubles = BLOCK_ROWS * (7 + job->num_distances + job->num_shares + job->num_bands + job->num_grids);
    int64_t integers = (BLOCK_ROWS + SUBS) * job->num_grids;
    int64_t max_candidates = job->top_k > MAX_INSERTED ? 2 * job->top_k : 0;
    char *memory = malloc(reals * sizeof(REAL) + (doubles + integers) * 8 + strips * sizeof(Strip) +
                          SUB_ROWS * max_candidates * sizeof(Candidate) + 64);
    if (!memory) return 1;
    Block block = {.job = job};
    block.query = (REAL *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    block.scores = block.target = block.query + BLOCK_ROWS * job->dim;
    block.shift = block.scores + STRIP_KEYS * SUB_ROWS;
    block.factor = block.shift + BLOCK_ROWS;
    block.log = block.factor + BLOCK_ROWS;
    block.largest = block.log + BLOCK_ROWS;
    block.threshold = block.largest + BLOCK_ROWS;
    block.part = block.threshold + BLOCK_ROWS;
    block.product = block.part + SUB_ROWS * job->value_dim;
    block.kept = block.product + SUB_ROWS * job->value_dim;
    block.kept_shifts = block.kept + strips * STRIP_KEYS * SUB_ROWS;
    block.total = (double *)(block.kept_shifts + strips * SUB_ROWS);
    block.one = block.total + BLOCK_ROWS;
    block.surprisal = block.one + BLOCK_ROWS;
    block.position = block.surprisal + BLOCK_ROWS;
    block.weight = block.position + BLOCK_ROWS;
    block.mean = block.weight + BLOCK_ROWS;
    block.deviations = block.mean + BLOCK_ROWS;
    block.distances = block.deviations + BLOCK_ROWS;
    block.shares = block.distances + BLOCK_ROWS * job->num_distances;
    block.bands = block.shares + BLOCK_ROWS * job->num_shares;
    block.cells = block.bands + BLOCK_ROWS * job->num_bands;
    block.cell_rows = (int64_t *)(block.cells + BLOCK_ROWS * job->num_grids);
    block.cell_columns = block.cell_rows + BLOCK_ROWS * job->num_grids;
    block.strips = (Strip *)(block.cell_columns + SUBS * job->num_grids);
    block.candidates = max_candidates ? (Candidate *)(block.strips + strips) : 0;
    block.max_candidates = max_candidates;
    for (int64_t number = job->first_block; number < job->last_block; number++) {
        block.first_row = number * BLOCK_ROWS;
        block.rows = job->rows - block.first_row < BLOCK_ROWS ? job->rows - block.first_row : BLOCK_ROWS;
        NAME(pack_queries)(&block);
        if (job->has_measures)
            NAME(measure_block)(&block, number);
        else
            NAME(compute_statistics)(&block, number, 0, (int)((block.rows + SUB_ROWS - 1) / SUB_ROWS));
    }
    free(memory);
    return 0;
}

#undef Vec
#undef Bits
#undef Block
#undef Candidate
#undef Strip
#undef VECTORS
