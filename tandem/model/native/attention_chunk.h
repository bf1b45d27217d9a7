/* A chunk's attention: bound by arithmetic. Query rows (token by token, the heads of the group together) stand in the
   lanes of panels, so that the softmax runs down the positions without looking sideways. */

/* Tokens whose rows one piece of work takes. */
INLINE long query_tokens(const struct attention *call) {
    long tokens = QUERY_ROWS / (call->num_heads / call->num_kv_heads);
    return tokens > 0 ? tokens : 1;
}

INLINE long most_panels(const struct attention *call) {
    return (query_tokens(call) * (call->num_heads / call->num_kv_heads) + PANEL - 1) / PANEL;
}

static size_t chunk_floats(const struct attention *call) {
    size_t panel = (2 * call->head_dim + 3) * PANEL;
    return most_panels(call) * panel + PIECE * (2 * call->head_dim + PANEL);
}

struct panel { /* PANEL query rows and what they have seen so far */
    float *query, *sums; /* [head_dim, PANEL] */
    float *most, *total, *positions; /* [PANEL] */
    long first_position, last_position;
};

struct piece { /* `count` positions of context from `start` on, copied */
    long start, count;
    float *keys, *values, *scores; /* [count, head_dim] twice, [count, PANEL] */
};

static struct panel panel_at(const struct attention *call, float *memory, long index) {
    long size = call->head_dim * PANEL;
    float *here = memory + index * (2 * size + 3 * PANEL);
    return (struct panel){.query = here,
                          .sums = here + size,
                          .most = here + 2 * size,
                          .total = here + 2 * size + PANEL,
                          .positions = here + 2 * size + 2 * PANEL};
}

/* Fills panel `index` with rows of tokens `from ..` of the slice; lanes past `rows` repeat the last row. */
static struct panel load_panel(const struct span *span, float *memory, long index, long from, long rows) {
    const struct attention *call = span->call;
    struct panel panel = panel_at(call, memory, index);
    long size = call->head_dim;
    for (long lane = 0; lane < PANEL; lane++) {
        long row = index * PANEL + lane < rows ? index * PANEL + lane : rows - 1;
        long token = from + row / span->group, head = span->head * span->group + row % span->group;
        long at = (span->first_token + token) * call->query_stride + head * size;
        for (long d = 0; d < size; d++)
            panel.query[d * PANEL + lane] = number_at(call->query, at + d, call->bf16) * call->scale;
        long position = span->length - span->num_tokens + token;
        panel.most[lane] = -INFINITY;
        panel.total[lane] = 0;
        panel.positions[lane] = (float)position;
        if (lane == 0) panel.first_position = position;
        panel.last_position = position;
    }
    memset(panel.sums, 0, size * PANEL * sizeof(float));
    return panel;
}

static void load_piece(const struct span *span, struct piece *piece) {
    long size = span->call->head_dim;
    for (long i = 0; i < piece->count; i++) {
        const void *key = entry(span, piece->start + i, 0), *value = entry(span, piece->start + i, 1);
        if (!span->call->bf16) {
            memcpy(piece->keys + i * size, key, size * sizeof(float));
            memcpy(piece->values + i * size, value, size * sizeof(float));
            continue;
        }
        for (long d = 0; d < size; d++) {
            piece->keys[i * size + d] = from_bf16(((const uint16_t *)key)[d]);
            piece->values[i * size + d] = from_bf16(((const uint16_t *)value)[d]);
        }
    }
}

/* Positions are compared as floats: exact below 2^24, which no context reaches. */
INLINE vf masked(const struct attention *call, vf score, vf positions, float at) {
    vi seen = splat(at) <= positions;
    if (call->window) seen &= splat(at) > positions - (float)call->window;
    return (vf)(((vi)score & seen) | ((vi)splat(-INFINITY) & ~seen));
}

static void score_piece(const struct attention *call, const struct panel *panel, const struct piece *piece,
                        long count) {
    long size = call->head_dim, tiles = tiles_of(count);
    for (long t = 0; t < tiles; t++) {
        long start = tile_start(count, tiles, t), rows = tile_start(count, tiles, t + 1) - start;
        vf acc[ROWS][2] = {{{0}}};
        multiply_across(rows, piece->keys + start * size, size, panel->query, size, acc);
        for (long r = 0; r < rows; r++) {
            store(piece->scores + (start + r) * PANEL, capped(call, acc[r][0]));
            store(piece->scores + (start + r) * PANEL + VW, capped(call, acc[r][1]));
        }
    }
}

/* As `soften_row`, for VW lanes. Leaves in `kept` what earlier sums are to be multiplied by. */
INLINE vf soften_lanes(const struct attention *call, const struct panel *panel, const struct piece *piece, long count,
                       long side) {
    vf positions = load(panel->positions + side), before = load(panel->most + side), most = before;
    int is_masked = piece->start + count - 1 > panel->first_position ||
                    (call->window && piece->start <= panel->last_position - call->window);
    for (long i = 0; i < count; i++) {
        float *at = piece->scores + i * PANEL + side;
        vf score = load(at);
        if (is_masked) store(at, score = masked(call, score, positions, (float)(piece->start + i)));
        most = larger(most, score);
    }
    vi any = most > splat(-INFINITY);
    vf base = (vf)((vi)most & any);
    vf total = {0};
    for (long i = 0; i < count; i++) {
        float *at = piece->scores + i * PANEL + side;
        vf weight = exponential(load(at) - base);
        store(at, weight);
        total += weight;
    }
    vf kept = exponential(before - base);
    store(panel->most + side, most);
    store(panel->total + side, load(panel->total + side) * kept + total);
    return kept;
}

static void weigh_piece(const struct attention *call, const struct panel *panel, const struct piece *piece, long count,
                        const vf kept[2]) {
    long size = call->head_dim, tiles = tiles_of(size);
    for (long t = 0; t < tiles; t++) {
        long start = tile_start(size, tiles, t), rows = tile_start(size, tiles, t + 1) - start;
        vf acc[ROWS][2];
        float *sums = panel->sums + start * PANEL;
        for (long r = 0; r < rows; r++)
            for (int side = 0; side < 2; side++) acc[r][side] = load(sums + r * PANEL + side * VW) * kept[side];
        multiply(rows, piece->values + start, size, piece->scores, count, acc, (const char *)sums, 0);
        for (long r = 0; r < rows; r++)
            for (int side = 0; side < 2; side++) store(sums + r * PANEL + side * VW, acc[r][side]);
    }
}

static void meet(const struct attention *call, const struct panel *panel, const struct piece *piece) {
    if (piece->start > panel->last_position) return;
    if (call->window && piece->start + piece->count - 1 <= panel->first_position - call->window) return;
    long seen = panel->last_position + 1 - piece->start, count = piece->count < seen ? piece->count : seen;
    score_piece(call, panel, piece, count);
    vf kept[2] = {soften_lanes(call, panel, piece, count, 0), soften_lanes(call, panel, piece, count, VW)};
    weigh_piece(call, panel, piece, count, kept);
}

static void store_panel(const struct span *span, const struct panel *panel, long index, long from, long rows) {
    const struct attention *call = span->call;
    long size = call->head_dim;
    for (long lane = 0; lane < PANEL && index * PANEL + lane < rows; lane++) {
        long row = index * PANEL + lane;
        long token = span->first_token + from + row / span->group, head = span->head * span->group + row % span->group;
        long to = (token * call->num_heads + head) * size;
        float share = 1.0f / panel->total[lane];
        for (long d = 0; d < size; d++) {
            float value = panel->sums[d * PANEL + lane] * share;
            if (call->bf16)
                ((uint16_t *)call->output)[to + d] = to_bf16(value);
            else
                ((float *)call->output)[to + d] = value;
        }
    }
}

/* Tokens `from .. to` of the slice. */
static void attend_chunk(const struct span *span, long from, long to, float *memory) {
    const struct attention *call = span->call;
    long rows = (to - from) * span->group, panels = (rows + PANEL - 1) / PANEL, size = call->head_dim;
    struct panel panel[panels];
    float *rest = memory + most_panels(call) * (2 * size + 3) * PANEL;
    struct piece piece = {.keys = rest, .values = rest + PIECE * size, .scores = rest + 2 * PIECE * size};
    for (long i = 0; i < panels; i++) panel[i] = load_panel(span, memory, i, from, rows);
    long computed = span->length - span->num_tokens, end = computed + to;
    for (piece.start = window_start(call, computed + from); piece.start < end; piece.start += PIECE) {
        piece.count = end - piece.start < PIECE ? end - piece.start : PIECE;
        load_piece(span, &piece);
        for (long i = 0; i < panels; i++) meet(call, panel + i, &piece);
    }
    for (long i = 0; i < panels; i++) store_panel(span, panel + i, i, from, rows);
}
