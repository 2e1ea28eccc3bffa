/* The pass for float32 and for float64 numbers, with the vectors of one instruction set. */

#define TYPE f32
#define REAL float
#define SINT int32_t
#define LANES (VECTOR_BYTES / 4)
#define exp_coefficients exp_coefficients_f32
#define EXP_TERMS 5
#define REAL_LOG2E 0x1.715476p+0f
#define ROUNDER 0x1.8p23f
#define LN2_HIGH 0x1.63p-1f
#define LN2_LOW -0x1.bd0106p-13f
#define MANTISSA 23
#define POWER_BIAS ((127 + 64) << 23)
#define POWER_REST 0x1p-64f
#define LOWEST -105.0f /* its exponential is 0 */
#define SIGN_OFF 0x7fffffff
#if VECTOR_BYTES == 64
#define EVEN_LANES EVEN_16
#define ODD_LANES ODD_16
#elif VECTOR_BYTES == 32
#define EVEN_LANES EVEN_8
#define ODD_LANES ODD_8
#else
#define EVEN_LANES EVEN_4
#define ODD_LANES ODD_4
#endif
#if VECTOR_BYTES == 64
#define LANE_BITS(bits) ((unsigned)_mm512_movepi32_mask((__m512i)(bits)))
#elif VECTOR_BYTES == 32
#define LANE_BITS(bits) ((unsigned)_mm256_movemask_ps((__m256)(bits)))
#elif defined(X86)
#define LANE_BITS(bits) ((unsigned)_mm_movemask_ps((__m128)(bits)))
#else
#define LANE_BITS(bits) NAME(lane_bits)(bits)
#endif
#include "measures_pass.h"
#undef LANE_BITS
#undef TYPE
#undef REAL
#undef SINT
#undef LANES
#undef exp_coefficients
#undef EXP_TERMS
#undef REAL_LOG2E
#undef ROUNDER
#undef LN2_HIGH
#undef LN2_LOW
#undef MANTISSA
#undef POWER_BIAS
#undef POWER_REST
#undef LOWEST
#undef SIGN_OFF
#undef EVEN_LANES
#undef ODD_LANES

#define TYPE f64
#define REAL double
#define SINT int64_t
#define LANES (VECTOR_BYTES / 8)
#define exp_coefficients exp_coefficients_f64
#define EXP_TERMS 12
#define REAL_LOG2E 0x1.71547652b82fep+0
#define ROUNDER 0x1.8p52
#define LN2_HIGH 0x1.62e42fefa38p-1
#define LN2_LOW 0x1.ef35793c7673p-45
#define MANTISSA 52
#define POWER_BIAS ((int64_t)(1023 + 512) << 52)
#define POWER_REST 0x1p-512
#define LOWEST -746.0 /* its exponential is 0 */
#define SIGN_OFF 0x7fffffffffffffff
#if VECTOR_BYTES == 64
#define EVEN_LANES EVEN_8
#define ODD_LANES ODD_8
#elif VECTOR_BYTES == 32
#define EVEN_LANES EVEN_4
#define ODD_LANES ODD_4
#else
#define EVEN_LANES EVEN_2
#define ODD_LANES ODD_2
#endif
#if VECTOR_BYTES == 64
#define LANE_BITS(bits) ((unsigned)_mm512_movepi64_mask((__m512i)(bits)))
#elif VECTOR_BYTES == 32
#define LANE_BITS(bits) ((unsigned)_mm256_movemask_pd((__m256d)(bits)))
#elif defined(X86)
#define LANE_BITS(bits) ((unsigned)_mm_movemask_pd((__m128d)(bits)))
#else
#define LANE_BITS(bits) NAME(lane_bits)(bits)
#endif
#include "measures_pass.h"
#undef LANE_BITS
#undef TYPE
#undef REAL
#undef SINT
#undef LANES
#undef exp_coefficients
#undef EXP_TERMS
#undef REAL_LOG2E
#undef ROUNDER
#undef LN2_HIGH
#undef LN2_LOW
#undef MANTISSA
#undef POWER_BIAS
#undef POWER_REST
#undef LOWEST
#undef SIGN_OFF
#undef EVEN_LANES
#undef ODD_LANES
