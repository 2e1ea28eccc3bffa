/* What one strip of weights adds to each accumulator; measures_pass.h includes this file. */

static NOINLINE void NAME(find_largest_scores)(Block *block, const Strip *strip) {
    for (int v = 0; v < VECTORS; v++) {
        REAL *own = block->largest + strip->sub * SUB_ROWS + v * LANES;
        Vec largest = NAME(load)(own);
        for (int j = 0; j < strip->count; j++) {
            Vec score = NAME(load)(block->target + j * SUB_ROWS + v * LANES);
            Bits larger = (score > largest) | (score != score); /* NaN stays */
            if (strip->is_masked) larger &= NAME(lane_mask)(strip->words[j], v);
            largest = NAME(select)(larger, score, largest);
        }
        NAME(store)(own, largest);
    }
}

static NOINLINE void NAME(add_distance)(
    const REAL *weights, const int64_t *positions, int64_t offset, int rows, const Strip *strip, double *sums) {
    REAL ahead[SUB_ROWS], part[SUB_ROWS];
    for (int r = 0; r < SUB_ROWS; r++)
        ahead[r] = r < rows ? (REAL)(positions[r] + offset - strip->first_key) : 0;
    for (int v = 0; v < VECTORS; v++) {
        Vec from = NAME(load)(ahead + v * LANES), sum = {};
        for (int j = 0; j < strip->count; j++) {
            Vec steps = from - (REAL)j;
            steps = (Vec)((Bits)steps & SIGN_OFF);
            sum += NAME(load)(weights + j * SUB_ROWS + v * LANES) * steps;
        }
        NAME(store)(part + v * LANES, sum);
    }
    for (int r = 0; r < SUB_ROWS; r++) sums[r] += part[r];
}

static NOINLINE void NAME(add_position)(
    const REAL *weights, const REAL *row_sums, const Strip *strip, double *sums) {
    REAL part[SUB_ROWS];
    for (int v = 0; v < VECTORS; v++) {
        Vec sum = {};
        for (int j = 1; j < strip->count; j++)
            sum += NAME(load)(weights + j * SUB_ROWS + v * LANES) * (REAL)j;
        NAME(store)(part + v * LANES, sum);
    }
    double first = (double)strip->first_key;
    for (int r = 0; r < SUB_ROWS; r++) sums[r] += first * row_sums[r] + part[r];
}

/* Merge the moments of a strip with those of the strips before, without subtracting large numbers. */
static NOINLINE void NAME(add_moments)(Block *block, const Strip *strip, const REAL *row_sums) {
    REAL means[SUB_ROWS], parts[SUB_ROWS];
    for (int v = 0; v < VECTORS; v++) {
        const REAL *weights = block->scores + v * LANES;
        Vec sum = {}, weight = NAME(load)(row_sums + v * LANES), deviations = {};
        for (int j = 1; j < strip->count; j++) sum += NAME(load)(weights + j * SUB_ROWS) * (REAL)j;
        Vec mean = sum / NAME(select)(weight == 0, NAME(splat)(1), weight);
        for (int j = 0; j < strip->count; j++) {
            Vec ahead = (REAL)j - mean;
            deviations += NAME(load)(weights + j * SUB_ROWS) * (ahead * ahead);
        }
        NAME(store)(means + v * LANES, mean);
        NAME(store)(parts + v * LANES, deviations);
    }
    double *weight = block->weight + strip->sub * SUB_ROWS, *mean = block->mean + strip->sub * SUB_ROWS;
    double *deviations = block->deviations + strip->sub * SUB_ROWS, first = (double)strip->first_key;
    for (int r = 0; r < SUB_ROWS; r++) {
        double before = weight[r], total = before + row_sums[r];
        double share = row_sums[r] / (total == 0 ? 1 : total), ahead = first + means[r] - mean[r];
        weight[r] = total;
        mean[r] += ahead * share;
        deviations[r] += parts[r] + ahead * ahead * before * share;
    }
}

/* Sum the weights of some keys of a strip, row by row. */
static NOINLINE void NAME(add_keys)(const REAL *weights, int start, int stop, double *sums) {
    REAL part[SUB_ROWS];
    for (int v = 0; v < VECTORS; v++) {
        Vec sum = {};
        for (int j = start; j < stop; j++) sum += NAME(load)(weights + j * SUB_ROWS + v * LANES);
        NAME(store)(part + v * LANES, sum);
    }
    for (int r = 0; r < SUB_ROWS; r++) sums[r] += part[r];
}

/* Add the weights of some keys of a strip to each row: those from `from` to before `to`, if the row's edges are given, and
   those with the label of the row, if labels are given. */
static ALWAYS_INLINE void NAME(add_selected)(
    const REAL *weights, const Strip *strip, const SINT *from, const SINT *to, const SINT *labels,
    const int32_t *key_labels, double *sums) {
    REAL part[SUB_ROWS];
    for (int v = 0; v < VECTORS; v++) {
        Vec sum = {};
        for (int j = 0; j < strip->count; j++) {
            Bits selected = (Bits)NAME(load)(weights + j * SUB_ROWS + v * LANES);
            if (from)
                selected &= (NAME(load_bits)(from + v * LANES) <= (SINT)j) & (NAME(load_bits)(to + v * LANES) > (SINT)j);
            if (labels) selected &= NAME(load_bits)(labels + v * LANES) == (SINT)key_labels[j];
            sum += (Vec)selected;
        }
        NAME(store)(part + v * LANES, sum);
    }
    for (int r = 0; r < SUB_ROWS; r++) sums[r] += part[r];
}

static NOINLINE void NAME(add_band)(
    Block *block, const Strip *strip, const Band *band, const REAL *row_sums, int rows, double *sums) {
    int64_t lowest = strip->first_key - block->highest[strip->sub];
    int64_t highest = strip->first_key + strip->count - 1 - block->lowest[strip->sub];
    if (highest < band->least || lowest > band->most) return;
    int is_inside = lowest >= band->least && highest <= band->most;
    if (is_inside && !band->row_labels) {
        for (int r = 0; r < SUB_ROWS; r++) sums[r] += row_sums[r];
        return;
    }
    SINT from[SUB_ROWS] = {0}, to[SUB_ROWS] = {0}, labels[SUB_ROWS] = {0};
    int64_t first = block->first_row + strip->sub * SUB_ROWS;
    for (int r = 0; r < rows && !is_inside; r++) {
        int64_t start = block->job->positions[first + r] + band->least - strip->first_key;
        int64_t stop = block->job->positions[first + r] + band->most + 1 - strip->first_key;
        from[r] = (SINT)(start < 0 ? 0 : start > STRIP_KEYS ? STRIP_KEYS : start);
        to[r] = (SINT)(stop < 0 ? 0 : stop > STRIP_KEYS ? STRIP_KEYS : stop);
    }
    if (!band->row_labels) {
        NAME(add_selected)(block->scores, strip, from, to, 0, 0, sums);
        return;
    }
    const int32_t *key_labels = band->key_labels + strip->first_key;
    for (int r = 0; r < rows; r++) labels[r] = band->row_labels[first + r];
    if (is_inside)
        NAME(add_selected)(block->scores, strip, 0, 0, labels, key_labels, sums);
    else
        NAME(add_selected)(block->scores, strip, from, to, labels, key_labels, sums);
}

/* Add the weights of a strip to the sums of the diagonals: key − row + (rows of the matrix) − 1. */
static NOINLINE void NAME(add_diagonals)(Block *block, const Strip *strip, int rows) {
    /* The weights at row − key = d of the strip; whole vectors of them lie inside the strip for all its keys. */
    const REAL *weights = block->scores;
    double *diagonals = block->job->diagonals + block->job->rows - 1 + strip->first_key -
                        (block->first_row + strip->sub * SUB_ROWS);
    int d = 0;
    for (; d + LANES - 1 + strip->count - 1 < rows; d += LANES) {
        REAL part[LANES];
        Vec sum = {};
        for (int j = 0; j < strip->count; j++) sum += NAME(load)(weights + j * SUB_ROWS + d + j);
        NAME(store)(part, sum);
        for (int i = 0; i < LANES; i++) diagonals[-(d + i)] += part[i];
    }
    for (; d < rows; d++) {
        REAL sum = 0;
        for (int j = 0; j < strip->count && d + j < rows; j++) sum += weights[j * SUB_ROWS + d + j];
        diagonals[-d] += sum;
    }
    for (d = 1; d < strip->count; d++) {
        REAL sum = 0;
        for (int j = d; j < strip->count && j - d < rows; j++) sum += weights[j * SUB_ROWS + j - d];
        diagonals[d] += sum;
    }
}

static NOINLINE void NAME(find_largest_weights)(const REAL *weights, int start, int stop, double *largest) {
    for (int v = 0; v < VECTORS; v++) {
        Vec most = {};
        for (int j = start; j < stop; j++) {
            Vec weight = NAME(load)(weights + j * SUB_ROWS + v * LANES);
            most = NAME(select)((weight > most) | (weight != weight), weight, most); /* NaN stays */
        }
        for (int i = 0; i < LANES; i++) {
            double *own = largest + v * LANES + i;
            if (most[i] > *own || most[i] != most[i]) *own = most[i];
        }
    }
}

/* Add the sums of the columns of a strip. A step of the tree adds neighbouring lanes of two vectors. */
static NOINLINE void NAME(add_columns)(const REAL *weights, const Strip *strip, double *columns) {
    for (int first = 0; first < strip->count; first += LANES) {
        Vec sums[LANES];
        for (int j = 0; j < LANES; j++) {
            Vec sum = {};
            if (first + j < strip->count)
                for (int v = 0; v < VECTORS; v++)
                    sum += NAME(load)(weights + (first + j) * SUB_ROWS + v * LANES);
            sums[j] = sum;
        }
        UNROLL for (int width = LANES; width > 1; width /= 2)
            UNROLL for (int j = 0; j < width / 2; j++)
                sums[j] = EVEN_LANES(sums[2 * j], sums[2 * j + 1]) + ODD_LANES(sums[2 * j], sums[2 * j + 1]);
        for (int j = 0; j < LANES && first + j < strip->count; j++)
            columns[strip->first_key + first + j] += sums[0][j];
    }
}

static ALWAYS_INLINE void NAME(insert)(double *values, int64_t *indices, int64_t k, REAL weight, int64_t index) {
    int64_t at = k - 1;
    for (; at > 0 && (values[at - 1] < weight || (weight != weight && values[at - 1] == values[at - 1])); at--) {
        values[at] = values[at - 1];
        indices[at] = indices[at - 1];
    }
    values[at] = weight;
    indices[at] = index;
}

/* Insert the weights of a strip that are larger than the k-th of their row; of equal weights the first stays ahead. */
static NOINLINE void NAME(insert_largest)(Block *block, const Strip *strip, int rows) {
    const Job *job = block->job;
    int64_t k = job->top_k;
    for (int v = 0; v < VECTORS && v * LANES < rows; v++) {
        REAL *threshold = block->threshold + strip->sub * SUB_ROWS + v * LANES;
        const REAL *weights = block->scores + v * LANES;
        int64_t row = block->first_row + strip->sub * SUB_ROWS + v * LANES;
        Vec least = NAME(load)(threshold);
        Bits hit = {};
        for (int j = 0; j < strip->count; j++)
            hit |= ~(NAME(load)(weights + j * SUB_ROWS) <= least); /* larger, or NaN */
        if (!LANE_BITS(hit)) continue;
        for (int j = 0; j < strip->count; j++) {
            unsigned lanes = LANE_BITS(~(NAME(load)(weights + j * SUB_ROWS) <= NAME(load)(threshold)));
            for (; lanes; lanes &= lanes - 1) {
                int i = __builtin_ctz(lanes);
                if (v * LANES + i >= rows || threshold[i] != threshold[i]) continue; /* k NaNs were found before */
                double *values = job->top_values + (row + i) * k;
                NAME(insert)(values, job->top_indices + (row + i) * k, k, weights[j * SUB_ROWS + i], strip->first_key + j);
                threshold[i] = (REAL)values[k - 1];
            }
        }
    }
}

static ALWAYS_INLINE int NAME(ranks_before)(Candidate a, Candidate b) {
    return a.value > b.value || (a.value == b.value && a.key < b.key);
}

/* Split candidates first … last around one of them; return the last of the left part, and the first of the right part. */
static ALWAYS_INLINE void NAME(partition)(Candidate *c, int64_t first, int64_t last, int64_t *left, int64_t *right) {
    Candidate a = c[first], b = c[first + (last - first) / 2], d = c[last];
    Candidate most = NAME(ranks_before)(a, b) ? a : b, least = NAME(ranks_before)(a, b) ? b : a;
    Candidate pivot = NAME(ranks_before)(d, most) ? most : NAME(ranks_before)(least, d) ? least : d;
    while (first <= last) {
        while (NAME(ranks_before)(c[first], pivot)) first++;
        while (NAME(ranks_before)(pivot, c[last])) last--;
        if (first <= last) {
            Candidate kept = c[first];
            c[first++] = c[last];
            c[last--] = kept;
        }
    }
    *left = last;
    *right = first;
}

/* Move the k first of n candidates, in any order, to the front. */
static void NAME(select_first)(Candidate *c, int64_t n, int64_t k) {
    for (int64_t first = 0, last = n - 1; first < last;) {
        int64_t left, right;
        NAME(partition)(c, first, last, &left, &right);
        if (k - 1 <= left)
            last = left;
        else if (k - 1 >= right)
            first = right;
        else
            return;
    }
}

static void NAME(sort)(Candidate *c, int64_t first, int64_t last) {
    while (first < last) {
        int64_t left, right;
        NAME(partition)(c, first, last, &left, &right);
        if (left - first < last - right) { /* the smaller part by recursion: its depth is at most log2 of the length */
            NAME(sort)(c, first, left);
            first = right;
        } else {
            NAME(sort)(c, right, last);
            last = left;
        }
    }
}

/* Collect the weights of a strip that are larger than the k-th of their row. When a row has twice as many candidates as
   wanted, half of them are dropped; of equal weights the first keys stay. */
static NOINLINE void NAME(collect_largest)(Block *block, const Strip *strip, int rows) {
    int64_t k = block->job->top_k;
    for (int v = 0; v < VECTORS && v * LANES < rows; v++) {
        REAL *threshold = block->threshold + strip->sub * SUB_ROWS + v * LANES;
        const REAL *weights = block->scores + v * LANES;
        for (int j = 0; j < strip->count; j++) {
            unsigned lanes = LANE_BITS(~(NAME(load)(weights + j * SUB_ROWS) <= NAME(load)(threshold)));
            for (; lanes; lanes &= lanes - 1) {
                int i = __builtin_ctz(lanes), row = v * LANES + i;
                REAL weight = weights[j * SUB_ROWS + i];
                weight = weight != weight ? (REAL)INFINITY : weight;
                if (row >= rows || !(weight > threshold[i])) continue;
                Candidate *own = block->candidates + row * block->max_candidates;
                own[block->num_candidates[row]++] = (Candidate){weight, (int32_t)(strip->first_key + j)};
                if (block->num_candidates[row] < block->max_candidates) continue;
                NAME(select_first)(own, block->max_candidates, k);
                block->num_candidates[row] = k;
                REAL least = own[0].value;
                for (int64_t c = 1; c < k; c++) least = own[c].value < least ? own[c].value : least;
                threshold[i] = least;
            }
        }
    }
}

static NOINLINE void NAME(write_largest)(Block *block, int sub) {
    const Job *job = block->job;
    for (int64_t r = 0; r < SUB_ROWS && sub * SUB_ROWS + r < block->rows; r++) {
        Candidate *own = block->candidates + r * block->max_candidates;
        int64_t count = block->num_candidates[r], at = (block->first_row + sub * SUB_ROWS + r) * job->top_k;
        if (count > job->top_k) NAME(select_first)(own, count, job->top_k);
        count = count < job->top_k ? count : job->top_k;
        NAME(sort)(own, 0, count - 1);
        for (int64_t c = 0; c < count; c++) {
            job->top_values[at + c] = own[c].value == (REAL)INFINITY ? NAN : own[c].value;
            job->top_indices[at + c] = own[c].key;
        }
    }
}

/* Add what the cells of one column of the grid collected for a sub-block to the grid. */
static NOINLINE void NAME(flush_cells)(Block *block, int grid_number, int sub) {
    const Grid *grid = block->job->grids + grid_number;
    int64_t column = block->cell_columns[grid_number * SUBS + sub];
    if (column < 0) return;
    double *collected = block->cells + grid_number * BLOCK_ROWS + sub * SUB_ROWS;
    const int64_t *cell_rows = block->cell_rows + grid_number * BLOCK_ROWS + sub * SUB_ROWS;
    int64_t rows = block->rows - sub * SUB_ROWS < SUB_ROWS ? block->rows - sub * SUB_ROWS : SUB_ROWS;
    for (int64_t r = 0; r < rows;) {
        double *cell = grid->cells + (cell_rows[r] - grid->first_row) * grid->columns + column;
        int64_t owner = cell_rows[r], stop = r + 1;
        while (stop < rows && cell_rows[stop] == owner) stop++;
        if (grid->is_max) {
            for (; r < stop; r++)
                if (collected[r] > *cell || collected[r] != collected[r]) *cell = collected[r];
        } else { /* eight sums at once: faster, and with less rounding error than one */
            double sums[8] = {0};
            for (; r + 8 <= stop; r += 8)
                for (int i = 0; i < 8; i++) sums[i] += collected[r + i];
            for (int i = 0; r < stop; r++, i++) sums[i] += collected[r];
            *cell += ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        }
    }
    for (int r = 0; r < SUB_ROWS; r++) collected[r] = 0;
}

static NOINLINE void NAME(add_cells)(Block *block, const Strip *strip, const REAL *row_sums) {
    const Job *job = block->job;
    for (int g = 0; g < job->num_grids; g++) {
        const Grid *grid = job->grids + g;
        double *collected = block->cells + g * BLOCK_ROWS + strip->sub * SUB_ROWS;
        int64_t *column = block->cell_columns + g * SUBS + strip->sub;
        for (int start = 0; start < strip->count;) {
            int64_t cell = (strip->first_key + start) * grid->columns / job->kv_len;
            int64_t edge = ((cell + 1) * job->kv_len + grid->columns - 1) / grid->columns - strip->first_key;
            int stop = edge < strip->count ? (int)edge : strip->count;
            if (*column != cell) {
                NAME(flush_cells)(block, g, strip->sub);
                *column = cell;
            }
            if (grid->is_max)
                NAME(find_largest_weights)(block->scores, start, stop, collected);
            else if (start == 0 && stop == strip->count)
                for (int r = 0; r < SUB_ROWS; r++) collected[r] += row_sums[r];
            else
                NAME(add_keys)(block->scores, start, stop, collected);
            start = stop;
        }
    }
}

/* Add the output of the last strips to the output of those before. */
static NOINLINE void NAME(flush_part)(Block *block) {
    for (int64_t i = 0; i < block->job->value_dim * SUB_ROWS; i += LANES) {
        NAME(store)(block->product + i, NAME(load)(block->product + i) + NAME(load)(block->part + i));
        NAME(store)(block->part + i, (Vec){});
    }
    block->num_parts = 0;
}

static void NAME(clear_product)(Block *block) {
    for (int64_t i = 0; i < block->job->value_dim * SUB_ROWS; i++) block->product[i] = block->part[i] = 0;
    block->num_parts = 0;
}

static void NAME(write_product)(Block *block, int sub) {
    const Job *job = block->job;
    NAME(flush_part)(block);
    for (int64_t r = 0; r < SUB_ROWS && sub * SUB_ROWS + r < block->rows; r++) {
        REAL *own = (REAL *)job->output + (block->first_row + sub * SUB_ROWS + r) * job->value_dim;
        for (int64_t d = 0; d < job->value_dim; d++) own[d] = block->product[d * SUB_ROWS + r];
    }
}

/* Add the product of the weights of a strip with its values to the output. It is summed up in two levels, so that rounding
   errors grow with the square root of the number of keys at most. */
static NOINLINE void NAME(add_product)(Block *block, const Strip *strip) {
    int64_t dim = block->job->value_dim, stride = block->job->value_stride;
    const REAL *value = (const REAL *)block->job->value + strip->first_key * stride;
    for (int row = 0; row < SUB_ROWS; row += TILE_VECTORS * LANES) {
        const REAL *weights = block->scores + row;
        REAL *part = block->part + row;
        int64_t d = 0;
        for (; d + TILE_KEYS <= dim; d += TILE_KEYS) {
            Vec sums[TILE_KEYS][TILE_VECTORS] = {};
            for (int j = 0; j < strip->count; j++) {
                Vec w[TILE_VECTORS];
                UNROLL for (int v = 0; v < TILE_VECTORS; v++) w[v] = NAME(load)(weights + j * SUB_ROWS + v * LANES);
                UNROLL for (int k = 0; k < TILE_KEYS; k++) {
                    REAL factor = value[j * stride + d + k];
                    UNROLL for (int v = 0; v < TILE_VECTORS; v++) sums[k][v] += w[v] * factor;
                }
            }
            UNROLL for (int k = 0; k < TILE_KEYS; k++)
                UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
                    REAL *own = part + (d + k) * SUB_ROWS + v * LANES;
                    NAME(store)(own, NAME(load)(own) + sums[k][v]);
                }
        }
        for (; d < dim; d++)
            for (int v = 0; v < TILE_VECTORS; v++) {
                REAL *own = part + d * SUB_ROWS + v * LANES;
                Vec sum = {};
                for (int j = 0; j < strip->count; j++)
                    sum += NAME(load)(weights + j * SUB_ROWS + v * LANES) * value[j * stride + d];
                NAME(store)(own, NAME(load)(own) + sum);
            }
    }
    if (++block->num_parts == PART_STRIPS) NAME(flush_part)(block);
}
