/* Compare the compiled pass with a plain computation in double, without Python: for processors that are emulated, and for
   other systems. It checks the sources compiled into it or, with TYPES_ONLY, the library whose path is its argument. */

#include <stdio.h>
#include <string.h>

#define SOURCE_HASH ""
#include "measures.c"

#if defined(TYPES_ONLY)
#if defined(_WIN32)
#include <windows.h>
#define OPEN(path) (void *)LoadLibraryA(path)
#define FIND(library, name) (void *)GetProcAddress((HMODULE)library, name)
#else
#include <dlfcn.h>
#define OPEN(path) dlopen(path, RTLD_NOW)
#define FIND(library, name) dlsym(library, name)
#endif

static int (*regard_has_set)(int);
static int (*regard_run)(int, int, const Job *);
static int (*regard_exp)(int, int, const void *, void *, int64_t);

static int load(const char *path) {
    void *library = OPEN(path);
    if (!library) return printf("%s does not load\n", path), 0;
    const char *(*hash)(void) = FIND(library, "regard_source_hash");
    int (*job_bytes)(void) = FIND(library, "regard_job_bytes");
    regard_has_set = FIND(library, "regard_has_set"), regard_run = FIND(library, "regard_run");
    regard_exp = FIND(library, "regard_exp");
    if (!hash || !job_bytes || !regard_has_set || !regard_run || !regard_exp) return printf("a function is missing\n"), 0;
    printf("library of the sources %s\n", hash());
    return job_bytes() == (int)sizeof(Job);
}
#else
static int load(const char *path) { return printf("compiled without TYPES_ONLY, which loads %s\n", path), 0; }
#endif

enum { NUM_INSTRUCTION_SETS = 3 };
enum { ROWS = 300, KEYS = 200, DIM = 7, K = 5, BLOCKS = 2, KEY_BLOCKS = 4, CELLS = 9 };

static double query[ROWS][DIM], key[KEYS][DIM], weights[ROWS][KEYS], scores[ROWS][KEYS];
static float query32[ROWS][DIM], key32[KEYS][DIM], max32[ROWS];
static double max64[ROWS], sum[ROWS], one[ROWS], surprisal[ROWS], position[ROWS], max_score[ROWS], distance[ROWS];
static double share[ROWS], columns[KEYS], cells[CELLS * CELLS], top_values[ROWS * K];
static int64_t top_indices[ROWS * K], positions[ROWS], offsets[BLOCKS + 1], segments[BLOCKS * KEY_BLOCKS][3];
static uint64_t tiles[BLOCKS * KEY_BLOCKS][BLOCK_KEYS][SUBS];

static int is_allowed(int row, int k) { return k <= row && k + 90 > row && k != 50; }

static double draw(void) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (double)(state >> 11) / (1ull << 53) * 4 - 2;
}

static double tolerance;
static int failures, checks;
static void compare(const char *what, int at, double found, double expected) {
    checks++;
    if (found == expected || fabs(found - expected) <= tolerance * (1 + fabs(expected))) return;
    if (failures++ < 5) printf("%s[%d]: %.17g, expected %.17g\n", what, at, found, expected);
}

static void run_and_compare(int set, int is_double) {
    int64_t distance_offset = 3, share_starts[] = {0, 1}, intervals[] = {10, 77};
    double *distances[] = {distance}, *shares[] = {share};
    Grid grid = {CELLS, CELLS, 0, 0, cells};
    Job job = {
        .query = is_double ? (void *)query : query32, .key = is_double ? (void *)key : key32,
        .query_stride = DIM, .key_stride = DIM, .rows = ROWS, .kv_len = KEYS, .dim = DIM, .scale = 0.5,
        .positions = positions, .offsets = offsets, .segments = segments[0], .tiles = tiles[0][0], .last_block = BLOCKS,
        .max = is_double ? (void *)max64 : max32, .sum = sum, .has_measures = 1, .one = one, .surprisal = surprisal,
        .position = position, .max_score = max_score, .num_distances = 1, .distance_offsets = &distance_offset,
        .distances = distances, .num_shares = 1, .share_starts = share_starts, .intervals = intervals, .shares = shares,
        .columns = columns, .num_grids = 1, .grids = &grid, .top_k = K, .top_values = top_values, .top_indices = top_indices,
    };
    memset(columns, 0, sizeof columns), memset(cells, 0, sizeof cells), memset(top_values, 0, sizeof top_values);
    tolerance = is_double ? 1e-12 : 1e-5;
    compare("status", set, regard_run(set, is_double, &job), 0);
    double right_columns[KEYS] = {0}, right_cells[CELLS * CELLS] = {0};
    for (int r = 0; r < ROWS; r++) {
        double e = 0, d = 0, p = 0, s = 0, total = 0, most = -INFINITY;
        for (int k = 0; k < KEYS; k++) {
            double w = weights[r][k];
            total += w, e -= w > 0 ? w * log(w) : 0, d += w * fabs(r + 3.0 - k), p += w * k, s += k >= 10 && k < 77 ? w : 0;
            right_columns[k] += w, right_cells[r * CELLS / ROWS * CELLS + k * CELLS / KEYS] += w;
            if (is_allowed(r, k) && scores[r][k] > most) most = scores[r][k];
        }
        compare("one", r, one[r], total), compare("surprisal", r, surprisal[r], e), compare("distance", r, distance[r], d);
        compare("position", r, position[r], p), compare("share", r, share[r], s), compare("max_score", r, max_score[r], most);
        double left[KEYS];
        memcpy(left, weights[r], sizeof left);
        for (int i = 0; i < K; i++) {
            int best = 0;
            for (int k = 1; k < KEYS; k++) best = left[k] > left[best] ? k : best;
            compare("top value", r, top_values[r * K + i], left[best]);
            if (left[best] > 0) compare("top index", r, weights[r][top_indices[r * K + i]], left[best]);
            left[best] = 0;
        }
    }
    for (int k = 0; k < KEYS; k++) compare("columns", k, columns[k], right_columns[k]);
    for (int i = 0; i < CELLS * CELLS; i++) compare("cells", i, cells[i], right_cells[i]);
}

static void check_exponentials(int set) {
    double worst = 0;
    for (int i = 0; i < 20000; i++) {
        float x = -(float)i / 20000 * 104, y;
        regard_exp(set, 0, &x, &y, 1);
        float right = (float)exp((double)x);
        double ulp = nextafterf(right > 1e-45f ? right : 1e-45f, INFINITY) - (right > 1e-45f ? right : 1e-45f);
        double error = fabs(y - exp((double)x)) / ulp;
        worst = error > worst ? error : worst;
    }
    printf("set %d: exp within %.2f ulp\n", set, worst);
    checks++, failures += worst > 2;
}

int main(int argc, char **argv) {
    if (argc > 1 && !load(argv[1])) return 2;
    for (int r = 0; r < ROWS; r++)
        for (int d = 0; d < DIM; d++) query[r][d] = query32[r][d] = (float)draw();
    for (int k = 0; k < KEYS; k++)
        for (int d = 0; d < DIM; d++) key[k][d] = key32[k][d] = (float)draw();
    for (int r = 0; r < ROWS; r++) {
        double total = 0;
        positions[r] = r;
        for (int k = 0; k < KEYS; k++) {
            for (int d = 0; d < DIM; d++) scores[r][k] += query[r][d] * key[k][d] * 0.5;
            weights[r][k] = is_allowed(r, k) ? exp(scores[r][k]) : 0;
            total += weights[r][k];
            if (is_allowed(r, k))
                tiles[r / BLOCK_ROWS * KEY_BLOCKS + k / BLOCK_KEYS][k % BLOCK_KEYS][r % BLOCK_ROWS / 64] |= (uint64_t)1 << r % 64;
        }
        for (int k = 0; k < KEYS; k++) weights[r][k] /= total > 0 ? total : 1;
    }
    for (int block = 0; block < BLOCKS; block++) {
        offsets[block + 1] = (block + 1) * KEY_BLOCKS;
        for (int k = 0; k < KEY_BLOCKS; k++) {
            int64_t *segment = segments[block * KEY_BLOCKS + k];
            segment[0] = k * BLOCK_KEYS, segment[1] = k < KEY_BLOCKS - 1 ? (k + 1) * BLOCK_KEYS : KEYS;
            segment[2] = block * KEY_BLOCKS + k;
        }
    }
    for (int set = 0; set < NUM_INSTRUCTION_SETS; set++) {
        if (!regard_has_set(set)) continue;
        run_and_compare(set, 0), run_and_compare(set, 1), check_exponentials(set);
    }
    printf("%d checks, %d failures\n", checks, failures);
    return failures > 0 || checks < 10000;
}
