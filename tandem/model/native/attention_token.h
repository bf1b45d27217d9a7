/* One token's attention: bound by memory, so every position is read once, and from four runs of positions in turns: one
   core reads four streams faster than one, and faster than anything it is told to fetch ahead. */

#define RUN 16 /* positions that lie one after another */
#define RUNS 4 /* read in turns */
#define TOKEN_PIECE (RUNS * RUN) /* context positions between two corrections of the running sums; a multiple of VW */

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

/* Scores of one position of each run for `heads` query rows: at `scores`, `count` apart; those of a row TOKEN_PIECE. */
INLINE void score_turn(const int heads, const float *query, const void *const keys[RUNS], long at, long count,
                       long size, float *scores, const int bf16) {
    vf acc[3][RUNS] = {{{0}}};
    for (long d = 0; d < size; d += VW) {
        vf q[3];
#pragma GCC unroll 3
        for (int g = 0; g < heads; g++) q[g] = load(query + g * size + d);
#pragma GCC unroll 4
        for (int r = 0; r < RUNS; r++) {
            vf key = load_as(keys[r], at + d, bf16);
#pragma GCC unroll 3
            for (int g = 0; g < heads; g++) acc[g][r] += q[g] * key;
        }
    }
#pragma GCC unroll 3
    for (int g = 0; g < heads; g++) {
        float sums[RUNS];
        store_sums(sums, acc[g][0], acc[g][1], acc[g][2], acc[g][3]);
        for (int r = 0; r < RUNS; r++) scores[g * TOKEN_PIECE + r * count] = sums[r];
    }
}

INLINE void score_one(const int heads, const float *query, const void *key, long size, float *scores, const int bf16) {
    for (int g = 0; g < heads; g++) {
        vf acc = {0};
        for (long d = 0; d < size; d += VW) acc += load(query + g * size + d) * load_as(key, d, bf16);
        scores[g * TOKEN_PIECE] = sum(acc);
    }
}

/* `sums` [heads, head_dim] += weights times `vectors` columns of one position of each run. */
INLINE void weigh_turn(const int heads, const int vectors, const float *weights, const void *const values[RUNS],
                       const int runs, long at, long count, long size, float *sums, const int bf16) {
    vf acc[3][4];
#pragma GCC unroll 3
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) acc[g][j] = load(sums + g * size + j * VW);
#pragma GCC unroll 4
    for (int r = 0; r < runs; r++) {
        float weight[3];
#pragma GCC unroll 3
        for (int g = 0; g < heads; g++) weight[g] = weights[g * TOKEN_PIECE + r * count];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            vf value = load_as(values[r], at + j * VW, bf16);
#pragma GCC unroll 3
            for (int g = 0; g < heads; g++) acc[g][j] += weight[g] * value;
        }
    }
#pragma GCC unroll 3
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) store(sums + g * size + j * VW, acc[g][j]);
}

INLINE void weigh_position(const int heads, const float *weights, const void *const values[RUNS], const int runs,
                           long at, long count, long size, float *sums, const int bf16) {
    long d = 0;
    for (; d + 4 * VW <= size; d += 4 * VW)
        weigh_turn(heads, 4, weights, values, runs, at + d, count, size, sums + d, bf16);
    for (; d < size; d += VW) weigh_turn(heads, 1, weights, values, runs, at + d, count, size, sums + d, bf16);
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

/* `count` positions of each of `runs` runs, RUNS or one, for all rows of one KV head's group. */
INLINE void score_runs(const struct span *span, const float *query, const void *const keys[RUNS], const int runs,
                       long count, float *scores, const int bf16) {
    long size = span->call->head_dim;
#define SCORE(heads) \
    if (runs == RUNS) \
        for (long i = 0; i < count; i++) \
            score_turn(heads, query + g * size, keys, i * size, count, size, scores + g * TOKEN_PIECE + i, bf16); \
    else \
        for (long i = 0; i < count; i++) \
            score_one(heads, query + g * size, advance(keys[0], i * size, bf16), size, scores + g * TOKEN_PIECE + i, bf16)
    BY_THREES(span->group, SCORE)
}

INLINE void weigh_runs(const struct span *span, const float *weights, const void *const values[RUNS], const int runs,
                       long count, float *sums, const int bf16) {
    long size = span->call->head_dim;
#define WEIGH(heads) \
    for (long i = 0; i < count; i++) \
        weigh_position(heads, weights + g * TOKEN_PIECE + i, values, runs, i * size, count, size, sums + g * size, bf16)
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

/* A piece of context as runs: where the first head's keys of each lie, and how many positions they are. */
struct runs {
    long num;
    const void *keys[TOKEN_PIECE];
    int counts[TOKEN_PIECE];
};

/* The piece from `start` on; its end. A run begins at a multiple of RUN, so that what is summed together follows from
   the context alone; none reaches from one block into another. */
static long find_runs(const struct span *span, long start, struct runs *runs) {
    const struct attention *call = span->call;
    long end = (start / TOKEN_PIECE + 1) * TOKEN_PIECE, plane = call->block_size * call->head_dim;
    if (end > span->length) end = span->length;
    runs->num = 0;
    for (long at = start; at < end;) {
        long block = at / call->block_size, offset = at % call->block_size, count = RUN - at % RUN;
        if (count > call->block_size - offset) count = call->block_size - offset;
        if (count > end - at) count = end - at;
        long first = (span->table[block] * 2 * call->num_kv_heads + span->head) * plane + offset * call->head_dim;
        runs->keys[runs->num] = advance(call->cache, first, call->bf16);
        runs->counts[runs->num++] = (int)count;
        at += count;
    }
    return end;
}

/* How many runs from `i` on are read in turns: RUNS of one length, or one. */
INLINE int in_turns(const struct runs *runs, long i) {
    if (i + RUNS > runs->num) return 1;
    for (int r = 1; r < RUNS; r++)
        if (runs->counts[i + r] != runs->counts[i]) return 1;
    return RUNS;
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

/* Keys of the piece, or with `are_values` values, for all heads. */
INLINE void read_piece(const struct span *span, const struct token_rows *rows, const struct runs *piece,
                       const int are_values, const int bf16) {
    long size = span->call->head_dim, plane = span->call->block_size * size, group = span->group, at = 0;
    int turns;
    for (long i = 0; i < piece->num; at += turns * piece->counts[i], i += turns) {
        turns = in_turns(piece, i);
        for (long head = 0; head < span->num_heads; head++) {
            const void *from[RUNS] = {NULL};
            long skipped = (head + (are_values ? span->call->num_kv_heads : 0)) * plane;
            for (int r = 0; r < turns; r++) from[r] = advance(piece->keys[i + r], skipped, bf16);
            float *scores = rows->scores + head * group * TOKEN_PIECE + at, *sums = rows->sums + head * group * size;
            const float *query = rows->query + head * group * size;
            if (are_values)
                turns == RUNS ? weigh_runs(span, scores, from, RUNS, piece->counts[i], sums, bf16)
                              : weigh_runs(span, scores, from, 1, piece->counts[i], sums, bf16);
            else
                turns == RUNS ? score_runs(span, query, from, RUNS, piece->counts[i], scores, bf16)
                              : score_runs(span, query, from, 1, piece->counts[i], scores, bf16);
        }
    }
}

INLINE void attend_token(const struct span *span, float *memory, const int bf16) {
    const struct attention *call = span->call;
    struct token_rows rows = load_token(span, memory, bf16);
    struct runs piece;
    for (long start = window_start(call, span->length - 1), end; start < span->length; start = end) {
        end = find_runs(span, start, &piece);
        read_piece(span, &rows, &piece, 0, bf16);
        for (long row = 0; row < span->num_heads * span->group; row++)
            soften_row(call, rows.scores + row * TOKEN_PIECE, end - start, rows.most + row, rows.total + row,
                       rows.sums + row * call->head_dim);
        read_piece(span, &rows, &piece, 1, bf16);
    }
    store_token(span, &rows, bf16);
}
