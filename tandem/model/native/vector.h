/* Vectors of VW floats in the compiler's own terms, so that one source serves every instruction set. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef float vf_unaligned __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef uint16_t vh_unaligned __attribute__((vector_size(VW * 2), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define PANEL (2 * VW)

INLINE vf load(const float *p) { return *(const vf_unaligned *)p; }
INLINE void store(float *p, vf v) { *(vf_unaligned *)p = v; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf larger(vf a, vf b) {
    vi take = a > b;
    return (vf)(((vi)a & take) | ((vi)b & ~take));
}
INLINE vf smaller(vf a, vf b) {
    vi take = a < b;
    return (vf)(((vi)a & take) | ((vi)b & ~take));
}

INLINE float sum(vf v) {
    float total = 0;
    for (int i = 0; i < VW; i++) total += v[i];
    return total;
}

INLINE float largest(vf v) {
    float most = v[0];
    for (int i = 1; i < VW; i++) most = v[i] > most ? v[i] : most;
    return most;
}

INLINE float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* Rounds to nearest even; not-a-number stays one. */
INLINE uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* VW numbers of either type, widened. */
INLINE vf load_as(const void *p, long at, const int bf16) {
    if (!bf16) return load((const float *)p + at);
    return (vf)(__builtin_convertvector(*(const vh_unaligned *)((const uint16_t *)p + at), vi) << 16);
}

INLINE float number_at(const void *p, long at, const int bf16) {
    return bf16 ? from_bf16(((const uint16_t *)p)[at]) : ((const float *)p)[at];
}

INLINE const void *advance(const void *p, long count, const int bf16) {
    return (const char *)p + count * (bf16 ? 2 : 4);
}

/* e^x to about one unit in the last place; exactly 0 where x is below the normal range, -inf among that.
   Reduction by multiples of ln 2 and a polynomial (Moshier, Cephes mathematical library, expf). */
INLINE vf exponential(vf x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vi is_normal = x > splat(-87.3f);
    x = smaller(larger(x, splat(-87.3f)), splat(88.3f));
    vf turned = x * 1.44269504088896341f + shift;
    vf n = turned - shift;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vi power = (((vi)turned - 0x4b400000) + 127) << 23;
    return (vf)((vi)(p * (vf)power) & is_normal);
}

INLINE vf hyperbolic_tangent(vf x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

INLINE vf activate(vf x, const int activation) {
    if (activation == ACTIVATION_SILU) return x / (1.0f + exponential(-x));
    return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

INLINE void *scratch(size_t num_bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, num_bytes) ? NULL : memory;
}
