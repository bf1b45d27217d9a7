/* Copies and XXH3-64 (seed 0, default secret, inputs of more than 240 bytes) in one pass over the bytes, so that memory
   is read once for both. A large message's stores go around the caches: its lines would push others out, and need not
   be read before they are overwritten. Algorithm and constants are those of the XXH3 specification. */
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define STRIPE 64
#define LANES (STRIPE / 8)
#define STRIPES_IN_BLOCK 16
#define UNCACHED_BYTES (1 << 20)

static const uint8_t secret[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#define PRIME32_1 0x9E3779B1ULL
#define PRIME32_2 0x85EBCA77ULL
#define PRIME32_3 0xC2B2AE3DULL
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL

typedef uint64_t vl __attribute__((vector_size(VW * 4)));
typedef uint64_t vl_unaligned __attribute__((vector_size(VW * 4), aligned(1), may_alias));
#define VECTOR_LANES (VW / 2)
#define VECTORS (LANES / VECTOR_LANES)

struct digest {
    vl sums[VECTORS];
    long num_bytes;      /* of all input so far */
    int stripes;         /* of the current block */
    int num_pending;     /* bytes of `pending`; after the first input never 0: the last stripe has a rule of its own */
    uint8_t last[STRIPE], pending[STRIPE]; /* side by side: the input's last 64 bytes may begin in `last` */
};

INLINE vl load_lanes(const void *p) { return *(const vl_unaligned *)p; }

/* The product of each lane's two halves. */
INLINE vl times_halves(vl x) {
#if defined(__x86_64__) && VW == 16
    return (vl)_mm512_mul_epu32((__m512i)x, (__m512i)(x >> 32));
#elif defined(__x86_64__) && VW == 8
    return (vl)_mm256_mul_epu32((__m256i)x, (__m256i)(x >> 32));
#elif defined(__x86_64__)
    return (vl)_mm_mul_epu32((__m128i)x, (__m128i)(x >> 32));
#else
    return (x & 0xffffffff) * (x >> 32);
#endif
}

/* Neighbouring lanes change places. */
INLINE vl crossed(vl x) {
#if defined(__x86_64__) && VW == 16
    return (vl)_mm512_shuffle_epi32((__m512i)x, 0x4e);
#elif defined(__x86_64__) && VW == 8
    return (vl)_mm256_shuffle_epi32((__m256i)x, 0x4e);
#elif defined(__x86_64__)
    return (vl)_mm_shuffle_epi32((__m128i)x, 0x4e);
#else
    return (vl){x[1], x[0]};
#endif
}

INLINE void store_uncached(void *p, vl x) {
#if defined(__x86_64__) && VW == 16
    _mm512_stream_si512((void *)p, (__m512i)x);
#elif defined(__x86_64__) && VW == 8
    _mm256_stream_si256((void *)p, (__m256i)x);
#elif defined(__x86_64__)
    _mm_stream_si128((void *)p, (__m128i)x);
#else
    *(vl_unaligned *)p = x;
#endif
}

INLINE void uncached_done(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

enum copying { COPY_NONE, COPY_CACHED, COPY_UNCACHED };

/* One stripe, copied and added to `sums` with the key that begins at `key`. */
INLINE void take_stripe(vl *sums, uint8_t *target, const uint8_t *source, const uint8_t *key, const enum copying copying,
                        const int digesting) {
    for (int i = 0; i < VECTORS; i++) {
        vl x = load_lanes(source + i * VW * 4);
        if (copying == COPY_UNCACHED) store_uncached(target + i * VW * 4, x);
        if (copying == COPY_CACHED) *(vl_unaligned *)(target + i * VW * 4) = x;
        if (digesting) sums[i] += times_halves(x ^ load_lanes(key + i * VW * 4)) + crossed(x);
    }
}

INLINE void scramble(vl *sums) {
    for (int i = 0; i < VECTORS; i++) {
        vl x = sums[i] ^ (sums[i] >> 47) ^ load_lanes(secret + 128 + i * VW * 4);
        sums[i] = x * PRIME32_1;
    }
}

/* `count` whole stripes. */
INLINE void take_stripes(struct digest *digest, uint8_t *target, const uint8_t *source, long count,
                         const enum copying copying, const int digesting) {
    vl sums[VECTORS];
    memcpy(sums, digest->sums, sizeof sums);
    int at = digest->stripes;
    while (count > 0) {
        int now = STRIPES_IN_BLOCK - at < count ? STRIPES_IN_BLOCK - at : (int)count;
        for (int n = 0; n < now; n++)
            take_stripe(sums, target + n * STRIPE, source + n * STRIPE, secret + 8 * (at + n), copying, digesting);
        target += now * STRIPE;
        source += now * STRIPE;
        count -= now;
        at += now;
        if (at == STRIPES_IN_BLOCK) {
            if (digesting) scramble(sums);
            at = 0;
        }
    }
    digest->stripes = at;
    memcpy(digest->sums, sums, sizeof sums);
}

/* Whole stripes that more input follows; `uncached` is for those that are whole lines of the target. */
static void take_bulk(struct digest *digest, uint8_t *target, const uint8_t *source, long count, int uncached) {
    if (!target) take_stripes(digest, NULL, source, count, COPY_NONE, 1);
    else if (!uncached || (uintptr_t)target % STRIPE) take_stripes(digest, target, source, count, COPY_CACHED, 1);
    else take_stripes(digest, target, source, count, COPY_UNCACHED, 1);
}

/* The next `num_bytes` bytes of input, digested and copied to `target` if there is one. */
static void take_piece(struct digest *digest, uint8_t *target, const uint8_t *source, long num_bytes, int uncached) {
    digest->num_bytes += num_bytes;
    while (num_bytes > 0) {
        if (digest->num_pending == STRIPE) {
            take_stripes(digest, NULL, digest->pending, 1, COPY_NONE, 1);
            memcpy(digest->last, digest->pending, STRIPE);
            digest->num_pending = 0;
        }
        long bulk = digest->num_pending ? 0 : (num_bytes - 1) / STRIPE;
        long taken = bulk * STRIPE;
        if (bulk) {
            take_bulk(digest, target, source, bulk, uncached);
            memcpy(digest->last, source + taken - STRIPE, STRIPE);
        } else {
            taken = STRIPE - digest->num_pending < num_bytes ? STRIPE - digest->num_pending : num_bytes;
            memcpy(digest->pending + digest->num_pending, source, (size_t)taken);
            if (target) memcpy(target, source, (size_t)taken);
            digest->num_pending += (int)taken;
        }
        source += taken;
        if (target) target += taken;
        num_bytes -= taken;
    }
}

INLINE uint64_t folded(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t digest_end(struct digest *digest) {
    uint64_t sums[LANES], keys[LANES];
    vl vectors[VECTORS];
    memcpy(vectors, digest->sums, sizeof vectors);
    take_stripe(vectors, NULL, digest->last + digest->num_pending, secret + 121, COPY_NONE, 1);
    memcpy(sums, vectors, sizeof sums);
    memcpy(keys, secret + 11, sizeof keys);
    uint64_t result = (uint64_t)digest->num_bytes * PRIME64_1;
    for (int i = 0; i < LANES; i += 2) result += folded(sums[i] ^ keys[i], sums[i + 1] ^ keys[i + 1]);
    result ^= result >> 37;
    result *= 0x165667919E3779F9ULL;
    return result ^ result >> 32;
}

/* Without a digest. */
static void copy_piece(uint8_t *target, const uint8_t *source, long num_bytes, int uncached) {
    struct digest unused = {.stripes = 0};
    long bulk = uncached && (uintptr_t)target % STRIPE == 0 ? num_bytes / STRIPE : 0;
    if (bulk) take_stripes(&unused, target, source, bulk, COPY_UNCACHED, 0);
    memcpy(target + bulk * STRIPE, source + bulk * STRIPE, (size_t)(num_bytes - bulk * STRIPE));
}

static uint64_t kernel(move)(const int64_t *pieces, long count, int digesting) {
    static const uint64_t start[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                          PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    struct digest digest = {.num_bytes = 0};
    memcpy(digest.sums, start, sizeof start);
    long total = 0;
    for (long i = 0; i < count; i++) total += (long)pieces[3 * i + 2];
    for (long i = 0; i < count; i++) {
        uint8_t *target = (uint8_t *)(intptr_t)pieces[3 * i];
        const uint8_t *source = (const uint8_t *)(intptr_t)pieces[3 * i + 1];
        if (digesting) take_piece(&digest, target, source, (long)pieces[3 * i + 2], total >= UNCACHED_BYTES);
        else copy_piece(target, source, (long)pieces[3 * i + 2], total >= UNCACHED_BYTES);
    }
    uncached_done();
    return digesting ? digest_end(&digest) : 0;
}
