/* One token's attention: bound by memory, so blocks are read once and in the order in which they lie, all heads together,
   and the next ones are fetched while these are used. */

#define TOKEN_PIECE 64 /* context positions between two corrections of the running sums; a multiple of VW */

static size_t token_floats(const struct attention *call) {
    return call->num_heads * (2 * call->head_dim + TOKEN_PIECE + 2);
}

/* Lanes of a and b that stand at even and at odd places within each 16 bytes, those of a first. */
#if VW == 4
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#elif VW == 8
#define EVEN 0, 2, 8, 10, 4, 6, 12, 14
#define ODD 1, 3, 9, 11, 5, 7, 13, 15
#else
#define EVEN 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define ODD 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#endif
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

INLINE vf pairs(vf a, vf b) { return SHUFFLE(a, b, EVEN) + SHUFFLE(a, b, ODD); }

/* `to` [4]: the sum of each vector's lanes. */
INLINE void store_sums(float *to, vf a, vf b, vf c, vf d) {
    float lanes[VW] __attribute__((aligned(64)));
    store(lanes, pairs(pairs(a, b), pairs(c, d)));
    for (int i = 0; i < 4; i++) {
        float total = lanes[i];
        for (int part = 4; part < VW; part += 4) total += lanes[part + i];
        to[i] = total;
    }
}

INLINE void fetch(const char *from, long num_bytes) {
    for (long at = 0; at < num_bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

/* Scores of four neighbouring positions for `heads` query rows; scores of a row are TOKEN_PIECE apart. */
INLINE void score_four(const int heads, const float *query, const void *keys, long size, float *scores,
                       const int bf16) {
    vf acc[3][4] = {{{0}}};
    for (long d = 0; d < size; d += VW) {
        vf key[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) key[r] = load_as(keys, r * size + d, bf16);
#pragma GCC unroll 3
        for (int g = 0; g < heads; g++) {
            vf q = load(query + g * size + d);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) acc[g][r] += q * key[r];
        }
    }
#pragma GCC unroll 3
    for (int g = 0; g < heads; g++) store_sums(scores + g * TOKEN_PIECE, acc[g][0], acc[g][1], acc[g][2], acc[g][3]);
}

INLINE void score_one(const int heads, const float *query, const void *key, long size, float *scores, const int bf16) {
    for (int g = 0; g < heads; g++) {
        vf acc = {0};
        for (long d = 0; d < size; d += VW) acc += load(query + g * size + d) * load_as(key, d, bf16);
        scores[g * TOKEN_PIECE] = sum(acc);
    }
}

/* Scores of `count` positions of one block; fetches as much from `ahead` on. */
INLINE void score_heads(const int heads, const float *query, const void *keys, long count, long size, float *scores,
                        const int bf16, const char *ahead) {
    long at = 0, step_bytes = 4 * size * (bf16 ? 2 : 4);
    for (; at + 4 <= count; at += 4) {
        if (ahead) fetch(ahead + at / 4 * step_bytes, step_bytes);
        score_four(heads, query, advance(keys, at * size, bf16), size, scores + at, bf16);
    }
    for (; at < count; at++) score_one(heads, query, advance(keys, at * size, bf16), size, scores + at, bf16);
}

/* `sums` [heads, head_dim] += weights [heads, count] times `vectors` columns of values. */
INLINE void weigh_columns(const int heads, const int vectors, const float *weights, const void *values, long count,
                          long size, float *sums, const int bf16) {
    vf acc[3][4];
#pragma GCC unroll 3
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) acc[g][j] = load(sums + g * size + j * VW);
    for (long i = 0; i < count; i++) {
        vf value[4];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) value[j] = load_as(values, i * size + j * VW, bf16);
#pragma GCC unroll 3
        for (int g = 0; g < heads; g++) {
            float weight = weights[g * TOKEN_PIECE + i];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) acc[g][j] += weight * value[j];
        }
    }
#pragma GCC unroll 3
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) store(sums + g * size + j * VW, acc[g][j]);
}

INLINE void weigh_heads(const int heads, const float *weights, const void *values, long count, long size, float *sums,
                        const int bf16, const char *ahead) {
    long d = 0, element = bf16 ? 2 : 4, share = (count * size * element * 4 * VW / size + 63) / 64 * 64;
    for (; d + 4 * VW <= size; d += 4 * VW) {
        if (ahead) fetch(ahead, share), ahead += share;
        weigh_columns(heads, 4, weights, advance(values, d, bf16), count, size, sums + d, bf16);
    }
    for (; d < size; d += VW)
        weigh_columns(heads, 1, weights, advance(values, d, bf16), count, size, sums + d, bf16);
}

/* A group's rows three at a time: as many as keep sums and operands in sixteen registers. */
#define BY_THREES(group, CALL) \
    for (long g = 0; g < group; g += 3) { \
        switch (group - g) { \
            case 1: CALL(1); break; \
            case 2: CALL(2); break; \
            default: CALL(3); \
        } \
    }

INLINE void score_block(const struct span *span, const float *query, const void *keys, long count, float *scores,
                        const int bf16, const char *ahead) {
    long size = span->call->head_dim;
#define SCORE(heads) \
    score_heads(heads, query + g * size, keys, count, size, scores + g * TOKEN_PIECE, bf16, g ? NULL : ahead)
    BY_THREES(span->group, SCORE)
}

INLINE void weigh_block(const struct span *span, const float *weights, const void *values, long count, float *sums,
                        const int bf16, const char *ahead) {
    long size = span->call->head_dim;
#define WEIGH(heads) \
    weigh_heads(heads, weights + g * TOKEN_PIECE, values, count, size, sums + g * size, bf16, g ? NULL : ahead)
    BY_THREES(span->group, WEIGH)
}

INLINE void cap_row(const struct attention *call, float *scores, long count) {
    for (long i = 0; i < count; i += VW) store(scores + i, capped(call, load(scores + i)));
}

/* Scores become weights relative to the largest so far; what was summed before is brought to the same scale. */
INLINE void soften_row(const struct attention *call, float *scores, long count, float *most, float *total,
                       float *sums) {
    long padded = (count + VW - 1) / VW * VW; /* within TOKEN_PIECE, a multiple of VW */
    if (call->softcap > 0) cap_row(call, scores, padded);
    for (long i = count; i < padded; i++) scores[i] = -INFINITY;
    vf top = splat(*most);
    for (long i = 0; i < padded; i += VW) top = larger(top, load(scores + i));
    float new_most = largest(top);
    vf added = {0};
    for (long i = 0; i < padded; i += VW) {
        vf weight = exponential(load(scores + i) - new_most);
        store(scores + i, weight);
        added += weight;
    }
    float kept = exponential(splat(*most - new_most))[0];
    *total = *total * kept + sum(added);
    *most = new_most;
    for (long d = 0; d < call->head_dim; d += VW) store(sums + d, load(sums + d) * kept);
}

/* A piece of context block by block: where its first head's keys lie, and how many positions they are. */
struct blocks {
    long num;
    const void *keys[TOKEN_PIECE];
    int counts[TOKEN_PIECE];
};

/* The piece from `start` on; its end. */
static long find_blocks(const struct span *span, long start, struct blocks *blocks) {
    const struct attention *call = span->call;
    long end = start + TOKEN_PIECE < span->length ? start + TOKEN_PIECE : span->length;
    long at = start, block = start / call->block_size, offset = start % call->block_size;
    long plane = call->block_size * call->head_dim;
    blocks->num = 0;
    while (at < end) {
        long count = call->block_size - offset < end - at ? call->block_size - offset : end - at;
        long first = (span->table[block] * 2 * call->num_kv_heads + span->head) * plane + offset * call->head_dim;
        blocks->keys[blocks->num] = advance(call->cache, first, call->bf16);
        blocks->counts[blocks->num++] = (int)count;
        at += count;
        block++;
        offset = 0;
    }
    return end;
}

/* What is known of each query row: one row after another, a KV head's group together. */
struct token_rows {
    float *query, *sums, *scores, *most, *total;
};

INLINE struct token_rows load_token(const struct span *span, float *memory, const int bf16) {
    const struct attention *call = span->call;
    long num = span->num_heads * span->group, count = num * call->head_dim;
    struct token_rows rows = {.query = memory,
                              .sums = memory + count,
                              .scores = memory + 2 * count,
                              .most = memory + 2 * count + num * TOKEN_PIECE,
                              .total = memory + 2 * count + num * (TOKEN_PIECE + 1)};
    long first = span->first_token * call->query_stride + span->head * span->group * call->head_dim;
    const void *from = advance(call->query, first, bf16);
    for (long i = 0; i < count; i += VW) {
        store(rows.query + i, load_as(from, i, bf16) * call->scale);
        store(rows.sums + i, (vf){0});
    }
    for (long row = 0; row < num; row++) rows.most[row] = -INFINITY, rows.total[row] = 0;
    return rows;
}

INLINE void store_token(const struct span *span, const struct token_rows *rows, const int bf16) {
    const struct attention *call = span->call;
    long size = call->head_dim, to = (span->first_token * call->num_heads + span->head * span->group) * size;
    for (long row = 0; row < span->num_heads * span->group; row++)
        for (long d = 0; d < size; d++) {
            float value = rows->sums[row * size + d] / rows->total[row];
            if (bf16)
                ((uint16_t *)call->output)[to + row * size + d] = to_bf16(value);
            else
                ((float *)call->output)[to + row * size + d] = value;
        }
}

INLINE void score_piece_rows(const struct span *span, const struct token_rows *rows, const struct blocks *piece,
                             const struct blocks *next, const int bf16) {
    long size = span->call->head_dim, plane = span->call->block_size * size, group = span->group, at = 0;
    for (long i = 0; i < piece->num; at += piece->counts[i++])
        for (long head = 0; head < span->num_heads; head++)
            score_block(span, rows->query + head * group * size, advance(piece->keys[i], head * plane, bf16),
                        piece->counts[i], rows->scores + head * group * TOKEN_PIECE + at, bf16,
                        i < next->num ? advance(next->keys[i], head * plane, bf16) : NULL);
}

INLINE void weigh_piece_rows(const struct span *span, const struct token_rows *rows, const struct blocks *piece,
                             const struct blocks *next, const int bf16) {
    long size = span->call->head_dim, plane = span->call->block_size * size, group = span->group, at = 0;
    for (long i = 0; i < piece->num; at += piece->counts[i++])
        for (long head = 0; head < span->num_heads; head++) {
            long values = (span->call->num_kv_heads + head) * plane;
            weigh_block(span, rows->scores + head * group * TOKEN_PIECE + at, advance(piece->keys[i], values, bf16),
                        piece->counts[i], rows->sums + head * group * size, bf16,
                        i < next->num ? advance(next->keys[i], values, bf16) : NULL);
        }
}

/* `following` is what this thread does next, if that is a token too: the end of one fetches the beginning of the other. */
INLINE void attend_token(const struct span *span, const struct span *following, float *memory, const int bf16) {
    const struct attention *call = span->call;
    struct token_rows rows = load_token(span, memory, bf16);
    struct blocks pieces[2], *piece = pieces, *next = pieces + 1;
    long start = window_start(call, span->length - 1), end = find_blocks(span, start, piece), after;
    do {
        next->num = 0;
        after = end;
        if (end < span->length)
            after = find_blocks(span, end, next);
        else if (following)
            find_blocks(following, window_start(call, following->length - 1), next);
        score_piece_rows(span, &rows, piece, next, bf16);
        for (long row = 0; row < span->num_heads * span->group; row++)
            soften_row(call, rows.scores + row * TOKEN_PIECE, end - start, rows.most + row, rows.total + row,
                       rows.sums + row * call->head_dim);
        weigh_piece_rows(span, &rows, piece, next, bf16);
        start = end;
        end = after;
        struct blocks *used = piece;
        piece = next;
        next = used;
    } while (start < span->length);
    store_token(span, &rows, bf16);
}
