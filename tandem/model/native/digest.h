/* Copies and payload digests in one pass over the bytes, so that memory is read once for both. A digest is XXH3-64 (seed
   0, default secret); from LANED_BYTES on, that of the XXH3-64s of the input's four quarters, which are taken by turns,
   because a core reads four streams much faster than one. A large message's stores go around the caches: its lines would
   push others out, and need not be read before they are overwritten. Algorithm and constants are those of the XXH3
   specification; `tandem/kv/payload_digest.py` has the same in Python. */
#include <limits.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define STRIPE 64
#define LANES (STRIPE / 8)
#define STRIPES_IN_BLOCK 16
#define UNCACHED_BYTES (1 << 20)
#define LANED_BYTES (64 << 10)
#define INPUT_LANES 4

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

/* A run of the input with a digest of its own, and how far it has been taken. */
struct run {
    vl sums[VECTORS];
    const int64_t *piece; /* the one that comes next: target or 0, source, bytes */
    long offset;          /* in that piece */
    long num_bytes, left; /* of all of the run, and of what is still to come */
    int stripes;          /* of the current block */
    int num_pending;      /* bytes of `pending`; in the end never 0: the last stripe has a rule of its own */
    uint8_t last[STRIPE], pending[STRIPE]; /* side by side: the run's last 64 bytes may begin in `last` */
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

/* `count` whole stripes, which do not go beyond the current block. */
INLINE void take_stripes(struct run *run, uint8_t *target, const uint8_t *source, long count, const enum copying copying,
                         const int digesting) {
    vl sums[VECTORS];
    memcpy(sums, run->sums, sizeof sums);
    const uint8_t *key = secret + 8 * run->stripes;
    for (long n = 0; n < count; n++)
        take_stripe(sums, target + n * STRIPE, source + n * STRIPE, key + 8 * n, copying, digesting);
    run->stripes += (int)count;
    if (run->stripes == STRIPES_IN_BLOCK) {
        if (digesting) scramble(sums);
        run->stripes = 0;
    }
    memcpy(run->sums, sums, sizeof sums);
}

/* `uncached` is for what is whole lines of the target. */
static void take_bulk(struct run *run, uint8_t *target, const uint8_t *source, long count, int uncached,
                      int digesting) {
    uncached = uncached && (uintptr_t)target % STRIPE == 0;
    if (!digesting && uncached) take_stripes(run, target, source, count, COPY_UNCACHED, 0);
    else if (!digesting) memcpy(target, source, (size_t)count * STRIPE);
    else if (!target) take_stripes(run, NULL, source, count, COPY_NONE, 1);
    else if (uncached) take_stripes(run, target, source, count, COPY_UNCACHED, 1);
    else take_stripes(run, target, source, count, COPY_CACHED, 1);
}

/* A few bytes that are no stripe where they lie. */
static void take_bytes(struct run *run, uint8_t *target, const uint8_t *source, int count, int is_end) {
    memcpy(run->pending + run->num_pending, source, (size_t)count);
    if (target) memcpy(target, source, (size_t)count);
    run->num_pending += count;
    if (run->num_pending < STRIPE || is_end) return;
    take_stripes(run, NULL, run->pending, 1, COPY_NONE, 1);
    memcpy(run->last, run->pending, STRIPE);
    run->num_pending = 0;
}

INLINE long least(long a, long b) { return a < b ? a : b; }

/* What comes next of the run, at most to the end of a block. */
static void take_turn(struct run *run, int uncached, int digesting) {
    while (run->offset == run->piece[2]) {
        run->piece += 3;
        run->offset = 0;
    }
    uint8_t *target = run->piece[0] ? (uint8_t *)(intptr_t)run->piece[0] + run->offset : NULL;
    const uint8_t *source = (const uint8_t *)(intptr_t)run->piece[1] + run->offset;
    long there = least(run->piece[2] - run->offset, run->left);
    long stripes = run->num_pending ? 0 : least(there, run->left - 1) / STRIPE, taken;
    if (stripes) {
        stripes = least(stripes, STRIPES_IN_BLOCK - run->stripes);
        taken = stripes * STRIPE;
        take_bulk(run, target, source, stripes, uncached, digesting);
        if (run->left - taken <= STRIPE) memcpy(run->last, source + taken - STRIPE, STRIPE);
    } else {
        taken = least(there, STRIPE - run->num_pending);
        take_bytes(run, target, source, (int)taken, taken == run->left);
    }
    run->offset += taken;
    run->left -= taken;
}

/* Whole blocks of all runs side by side, as far as none of them is interrupted: most of a digest without a copy. */
static void digest_together(struct run *runs) {
    long count = LONG_MAX;
    for (int i = 0; i < INPUT_LANES; i++) {
        long there = least(runs[i].piece[2] - runs[i].offset, runs[i].left - 1) / (STRIPE * STRIPES_IN_BLOCK);
        count = runs[i].stripes || runs[i].num_pending || runs[i].piece[0] ? 0 : least(count, there);
    }
    if (!count) return;
    vl sums[INPUT_LANES][VECTORS];
    const uint8_t *sources[INPUT_LANES];
    for (int i = 0; i < INPUT_LANES; i++) {
        memcpy(sums[i], runs[i].sums, sizeof sums[i]);
        sources[i] = (const uint8_t *)(intptr_t)runs[i].piece[1] + runs[i].offset;
    }
    for (long block = 0; block < count; block++) {
        for (long n = 0; n < STRIPES_IN_BLOCK; n++)
            for (int i = 0; i < INPUT_LANES; i++) {
                take_stripe(sums[i], NULL, sources[i], secret + 8 * n, COPY_NONE, 1);
                sources[i] += STRIPE;
            }
        for (int i = 0; i < INPUT_LANES; i++) scramble(sums[i]);
    }
    for (int i = 0; i < INPUT_LANES; i++) {
        memcpy(runs[i].sums, sums[i], sizeof sums[i]);
        memcpy(runs[i].last, sources[i] - STRIPE, STRIPE);
        runs[i].offset += count * STRIPE * STRIPES_IN_BLOCK;
        runs[i].left -= count * STRIPE * STRIPES_IN_BLOCK;
    }
}

static struct run run_at(const int64_t *pieces, long start, long num_bytes) {
    static const uint64_t sums[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                         PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    struct run run = {.piece = pieces, .offset = start, .num_bytes = num_bytes, .left = num_bytes};
    memcpy(run.sums, sums, sizeof sums);
    for (; run.left && run.offset >= run.piece[2]; run.piece += 3) run.offset -= (long)run.piece[2];
    return run;
}

INLINE uint64_t folded(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* The digest of `num_bytes` bytes, of which `count` sums are left. */
static uint64_t mixed(const uint64_t *sums, int count, const uint8_t *key, long num_bytes) {
    uint64_t keys[LANES], result = (uint64_t)num_bytes * PRIME64_1;
    memcpy(keys, key, (size_t)count * 8);
    for (int i = 0; i < count; i += 2) result += folded(sums[i] ^ keys[i], sums[i + 1] ^ keys[i + 1]);
    result ^= result >> 37;
    result *= 0x165667919E3779F9ULL;
    return result ^ result >> 32;
}

static uint64_t digest_of(const struct run *run) {
    uint64_t sums[LANES];
    vl vectors[VECTORS];
    memcpy(vectors, run->sums, sizeof vectors);
    take_stripe(vectors, NULL, run->last + run->num_pending, secret + 121, COPY_NONE, 1);
    memcpy(sums, vectors, sizeof sums);
    return mixed(sums, LANES, secret + 11, run->num_bytes);
}

static uint64_t kernel(move)(const int64_t *pieces, long count, int digesting) {
    struct run runs[INPUT_LANES];
    uint64_t digests[INPUT_LANES];
    long total = 0;
    for (long i = 0; i < count; i++) total += (long)pieces[3 * i + 2];
    int num_runs = total < LANED_BYTES ? 1 : INPUT_LANES, is_over = 0;
    long each = total / num_runs / STRIPE * STRIPE;
    for (int i = 0; i < num_runs; i++)
        runs[i] = run_at(pieces, i * each, i == num_runs - 1 ? total - i * each : each);
    while (!is_over) {
        is_over = 1;
        if (num_runs == INPUT_LANES && digesting) digest_together(runs);
        for (int i = 0; i < num_runs; i++)
            if (runs[i].left) {
                take_turn(&runs[i], total >= UNCACHED_BYTES, digesting);
                is_over = 0;
            }
    }
    uncached_done();
    if (!digesting) return 0;
    for (int i = 0; i < num_runs; i++) digests[i] = digest_of(&runs[i]);
    return num_runs == 1 ? digests[0] : mixed(digests, INPUT_LANES, secret, sizeof digests);
}
