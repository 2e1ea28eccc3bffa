/* Measures of attention weights in one read of each tile: scores, mask, softmax and every sum, for float32 and float64.

   measures_pass.h is compiled once for each instruction set and number type, with the compiler's vector extensions; the
   caller names the set. Nothing here starts a thread, keeps a state or touches Python: a job covers some blocks of rows of
   one (batch, head) pair, and callers run jobs in as many threads as they like. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) || defined(_M_X64)
#define X86 1
#include <cpuid.h>
#include <immintrin.h> /* to turn a vector of booleans into bits, and for nothing else */
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum {
    BLOCK_ROWS = 256, /* rows of a block; library.py knows it, too */
    BLOCK_KEYS = 64,  /* keys of a mask tile; library.py knows it, too */
    SUB_ROWS = 64,    /* rows whose packed queries stay in the first cache */
    SUBS = BLOCK_ROWS / SUB_ROWS,
    STRIP_KEYS = 16,  /* keys whose scores stay in the first cache; sums over them are added to float64 */
    CHUNK_KEYS = 256, /* keys that stay in the second cache while the sub-blocks read them */
    /* Strips whose exponentials are kept between the two passes over a sub-block; library.py knows it, too. */
    KEPT_STRIPS = 1024,
    MAX_INSERTED = 32, /* largest weights of a row that are kept sorted; more are collected, and selected now and then */
    PART_STRIPS = 16, /* strips whose products are added up before they are added to the output */
};

typedef struct {
    int64_t rows, columns, first_row, is_max; /* cells of the whole grid; first row of cells that `cells` holds */
    double *cells;
} Grid;

typedef struct {
    int64_t least, most;                     /* kv_idx − q_idx of the keys that count */
    const int32_t *row_labels, *key_labels;  /* NULL, or a key counts only for rows with its label */
    double *sums;                            /* of each row */
} Band;

/* `library.py` mirrors these structures. Arrays of rows cover all rows of the pair. NULL outputs are not wanted. */
typedef struct {
    const void *query, *key; /* rows of `dim` numbers, `query_stride` and `key_stride` numbers apart */
    int64_t query_stride, key_stride, rows, kv_len, dim;
    double scale;
    const int64_t *positions;           /* of each row */
    const int64_t *offsets, *segments;  /* regard.masks.segments */
    const uint64_t *tiles;              /* packed along the rows */
    int64_t first_block, last_block;    /* blocks of rows of this job */
    int64_t is_known, is_lse, has_sink; /* max and sum are given; max is an lse, and there is no sum */
    int64_t keeps;                      /* exponentials may be kept, so that each score is computed once */
    double sink;
    void *max;
    double *sum;
    int64_t has_measures;
    double *one, *surprisal, *position, *max_score;
    double *moments; /* sum of the weights, mean key, and sum of squared deviations from it: (rows, 3) */
    int64_t num_distances;
    const int64_t *distance_offsets;
    double *const *distances;
    int64_t num_shares;
    const int64_t *share_starts, *intervals;
    double *const *shares;
    int64_t num_bands;
    const Band *bands;
    double *columns, *diagonals; /* (kv_len), (rows + kv_len − 1) */
    int64_t num_grids;
    const Grid *grids;
    int64_t top_k;
    double *top_values;
    int64_t *top_indices;
    const void *value; /* rows of `value_dim` numbers, `value_stride` numbers apart; NULL for no output */
    int64_t value_stride, value_dim;
    void *output; /* (rows, value_dim) */
} Job;

#if !defined(TYPES_ONLY) /* a program that loads the library needs no more */

#define JOIN_(name, set, type) name##_##set##_##type
#define JOIN(name, set, type) JOIN_(name, set, type)
#define NAME(name) JOIN(name, SET, TYPE)

/* (e^r − 1 − r) / r² for |r| ≤ ln 2 / 2: interpolated at Chebyshev nodes in float32, Taylor's series in float64. */
static const float exp_coefficients_f32[] = {
    0x1p-1f, 0x1.5554dcp-3f, 0x1.55551ap-5f, 0x1.120b6ep-7f, 0x1.6d110ap-10f,
};
static const double exp_coefficients_f64[] = {
    1.0 / 2,       1.0 / 6,        1.0 / 24,        1.0 / 120,        1.0 / 720,         1.0 / 5040,
    1.0 / 40320,   1.0 / 362880,   1.0 / 3628800,   1.0 / 39916800,   1.0 / 479001600,   1.0 / 6227020800.0,
};

#define EVEN_2(a, b) __builtin_shufflevector(a, b, 0, 2)
#define ODD_2(a, b) __builtin_shufflevector(a, b, 1, 3)
#define EVEN_4(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6)
#define ODD_4(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7)
#define EVEN_8(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD_8(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#define EVEN_16(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD_16(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)

#if defined(X86)
#define SET avx512
#define VECTOR_BYTES 64
#define TILE_VECTORS 4
#define TILE_KEYS 4
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#endif
#include "measures_types.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef SET
#undef VECTOR_BYTES
#undef TILE_VECTORS
#undef TILE_KEYS

#define SET avx2
#define VECTOR_BYTES 32
#define TILE_VECTORS 2
#define TILE_KEYS 4
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#include "measures_types.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef SET
#undef VECTOR_BYTES
#undef TILE_VECTORS
#undef TILE_KEYS
#endif

/* Every processor of the target has these: SSE2 on x86-64, NEON on aarch64, else whatever the compiler makes of it. */
#define SET baseline
#define VECTOR_BYTES 16
#define TILE_VECTORS 2
#define TILE_KEYS 4
#include "measures_types.h"

typedef int (*Run)(const Job *);
typedef void (*Exponentials32)(const float *, float *, int64_t);
typedef void (*Exponentials64)(const double *, double *, int64_t);

enum { SET_BASELINE, SET_AVX2, SET_AVX512, NUM_SETS };

#if defined(X86)
/* Whether the processor has the instructions, and the system saves their registers; needs no library of a compiler. */
static int has_vectors(int is_avx512) {
    unsigned a, b, c, d, saved, leaf_7, fma_xsave_avx = 1u << 12 | 1u << 27 | 1u << 28;
    unsigned avx2 = 1u << 5, f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & fma_xsave_avx) != fma_xsave_avx) return 0;
    if (!__get_cpuid_count(7, 0, &a, &leaf_7, &c, &d)) return 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
#if defined(__APPLE__)
    saved |= (saved & 6) == 6 ? 0xe0 : 0; /* macOS saves the registers of AVX-512 from their first use on */
#endif
    if (!is_avx512) return (saved & 6) == 6 && (leaf_7 & avx2) == avx2;
    return (saved & 0xe6) == 0xe6 && (leaf_7 & f_dq_bw_vl) == f_dq_bw_vl;
}
#endif

/* Whether this processor, and this build, has an instruction set. */
EXPORT int regard_has_set(int set) {
#if defined(X86)
    if (set == SET_AVX512 || set == SET_AVX2) return has_vectors(set == SET_AVX512);
#endif
    return set == SET_BASELINE;
}

/* A hash of the sources: the caller's structures belong to one version of them. */
EXPORT const char *regard_source_hash(void) { return SOURCE_HASH; }
EXPORT int regard_job_bytes(void) { return (int)sizeof(Job); }

/* Run a job; 0 if it is done, 1 if there is no memory, 2 if the instruction set is missing. */
EXPORT int regard_run(int set, int is_double, const Job *job) {
    if (!regard_has_set(set)) return 2;
#if defined(X86)
    if (set == SET_AVX512) return is_double ? run_avx512_f64(job) : run_avx512_f32(job);
    if (set == SET_AVX2) return is_double ? run_avx2_f64(job) : run_avx2_f32(job);
#endif
    return is_double ? run_baseline_f64(job) : run_baseline_f32(job);
}

/* Whether n numbers are finite and no lse of the rows is 0, which the kernel of torch returns for an empty row. */
EXPORT int regard_is_sound(int is_double, const void *x, int64_t n, const void *lse, int64_t rows) {
    const uint32_t *floats = x, *lse_floats = lse;
    const uint64_t *doubles = x, *lse_doubles = lse;
    int found = 0;
    if (is_double) {
        for (int64_t i = 0; i < n; i++) found |= (doubles[i] & 0x7ff0000000000000) == 0x7ff0000000000000;
        for (int64_t i = 0; i < rows; i++) found |= lse_doubles[i] << 1 == 0;
    } else {
        for (int64_t i = 0; i < n; i++) found |= (floats[i] & 0x7f800000) == 0x7f800000;
        for (int64_t i = 0; i < rows; i++) found |= lse_floats[i] << 1 == 0;
    }
    return !found;
}

/* Whether matrices have the same bytes: `count` of them, of `size` bytes each, `a_step` and `b_step` bytes apart. */
EXPORT int regard_have_same_bytes(
    const char *a, int64_t a_step, const char *b, int64_t b_step, int64_t size, int64_t count
) {
    for (int64_t i = 0; i < count; i++)
        if (memcmp(a + i * a_step, b + i * b_step, (size_t)size) != 0) return 0;
    return 1;
}

/* exp of n numbers ≤ 0, for tests. */
EXPORT int regard_exp(int set, int is_double, const void *x, void *y, int64_t n) {
    if (!regard_has_set(set)) return 2;
#if defined(X86)
    if (set == SET_AVX512) {
        is_double ? exponentials_avx512_f64(x, y, n) : exponentials_avx512_f32(x, y, n);
        return 0;
    }
    if (set == SET_AVX2) {
        is_double ? exponentials_avx2_f64(x, y, n) : exponentials_avx2_f32(x, y, n);
        return 0;
    }
#endif
    is_double ? exponentials_baseline_f64(x, y, n) : exponentials_baseline_f32(x, y, n);
    return 0;
}

#endif
