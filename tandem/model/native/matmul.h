/* Matrix product over packed weights. A panel, two vectors of columns over all of k, meets tiles of up to ROWS rows;
   sums run along k in one order whatever the batch, so a row's result does not depend on the rows beside it. */

#define ROWS (VW == 16 ? 12 : 6)
#define X_BLOCK_BYTES (256 << 10)

/* `acc` [rows][2] += x times b. Row r of x at step i is x[r + i * x_stride] or, `across`, x[r * x_stride + i]; b has two
   vectors for each step, `b_stride` apart. Fetches from `ahead` on, `stride` bytes for each step. */
INLINE void multiply_rows(const int rows, const int across, const float *x, long x_stride, const float *b,
                          long b_stride, long k, vf acc[][2], const char *ahead, long stride) {
    vf sums[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) sums[r][0] = acc[r][0], sums[r][1] = acc[r][1];
    for (long i = 0; i < k; i++) {
        vf left = load(b), right = load(b + VW);
        __builtin_prefetch(ahead);
        ahead += stride;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            float factor = across ? x[r * x_stride] : x[r];
            sums[r][0] += factor * left;
            sums[r][1] += factor * right;
        }
        x += across ? 1 : x_stride;
        b += b_stride;
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc[r][0] = sums[r][0], acc[r][1] = sums[r][1];
}

#define ROWS_CASE(R) \
    case R: multiply_rows(R, across, x, x_stride, b, b_stride, k, acc, ahead, stride); break;

INLINE void multiply_any(const int across, long rows, const float *x, long x_stride, const float *b, long b_stride,
                         long k, vf acc[][2], const char *ahead, long stride) {
    switch (rows) {
        ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6)
#if VW == 16
        ROWS_CASE(7) ROWS_CASE(8) ROWS_CASE(9) ROWS_CASE(10) ROWS_CASE(11) ROWS_CASE(12)
#endif
    }
}

static __attribute__((noinline)) void multiply(long rows, const float *x, long x_stride, const float *b, long k,
                                               vf acc[][2], const char *ahead, long stride) {
    multiply_any(0, rows, x, x_stride, b, PANEL, k, acc, ahead, stride);
}

static __attribute__((noinline)) void multiply_across(long rows, const float *x, long x_stride, const float *b, long k,
                                                      vf acc[][2]) {
    multiply_any(1, rows, x, x_stride, b, PANEL, k, acc, (const char *)b, 0);
}

/* Rows in tiles of nearly equal height: tile `t` of `tiles` begins at row `tile_start`. */
INLINE long tile_start(long rows, long tiles, long t) { return rows * t / tiles; }
INLINE long tiles_of(long rows) { return (rows + ROWS - 1) / ROWS; }

/* Tiles of x one after another, each [k][rows of the tile]. */
static void pack_rows(const float *x, long x_stride, long m, long k, float *packed) {
    long tiles = tiles_of(m);
    for (long t = 0; t < tiles; t++) {
        long first = tile_start(m, tiles, t), rows = tile_start(m, tiles, t + 1) - first;
        for (long r = 0; r < rows; r++) {
            const float *from = x + (first + r) * x_stride;
            float *to = packed + first * k + r;
            for (long i = 0; i < k; i++) to[i * rows] = from[i];
        }
    }
}

static void kernel(pack)(const void *weight, long row_stride, long column_stride, void *packed, long k, long n,
                         int bf16, int gated) {
    long half = n / 2, panels = gated ? (half + VW - 1) / VW : (n + PANEL - 1) / PANEL;
    for (long p = 0; p < panels; p++) {
        for (long i = 0; i < k; i++) {
            for (long c = 0; c < PANEL; c++) {
                long within = p * VW + c % VW;
                long column = gated ? (c < VW ? 0 : half) + within : p * PANEL + c;
                int is_there = gated ? within < half : column < n;
                long from = i * row_stride + column * column_stride, to = (p * k + i) * PANEL + c;
                if (bf16)
                    ((uint16_t *)packed)[to] = is_there ? ((const uint16_t *)weight)[from] : 0;
                else
                    ((float *)packed)[to] = is_there ? ((const float *)weight)[from] : 0;
            }
        }
    }
}

INLINE void store_part(float *to, vf value, long count) {
    if (count >= VW) {
        store(to, value);
    } else {
        for (long i = 0; i < count; i++) to[i] = value[i];
    }
}

INLINE vf load_part(const float *from, long count) {
    if (count >= VW) return load(from);
    vf value = {0};
    for (long i = 0; i < count; i++) value[i] = from[i];
    return value;
}

INLINE void finish_tile(const struct matmul *call, long row, long rows, long panel, vf acc[][2]) {
    if (call->activation != ACTIVATION_NONE) {
        long half = call->n / 2, column = panel * VW, count = half - column;
        for (long r = 0; r < rows; r++) {
            float *to = call->out + (row + r) * half + column;
            vf gate = acc[r][0];
            gate = call->activation == ACTIVATION_SILU ? activate(gate, ACTIVATION_SILU)
                                                       : activate(gate, ACTIVATION_GELU_TANH);
            store_part(to, gate * acc[r][1], count);
        }
        return;
    }
    for (int side = 0; side < 2; side++) {
        long column = panel * PANEL + side * VW, count = call->n - column;
        if (count <= 0) return;
        vf bias = call->bias ? load_part(call->bias + column, count) : (vf){0};
        for (long r = 0; r < rows; r++) {
            long at = (row + r) * call->n + column;
            vf value = acc[r][side] + bias;
            if (call->residual) value += load_part(call->residual + at, count);
            store_part(call->out + at, value, count);
        }
    }
}

/* One panel against the packed rows `first .. first + m` of x. */
static void run_panel(const struct matmul *call, const float *x, long first, long m, long panel, float *widened) {
    long k = call->k, panel_bytes = k * PANEL * (call->bf16 ? 2 : 4), tiles = tiles_of(m);
    const char *here = (const char *)call->packed + panel * panel_bytes;
    const float *b = (const float *)here;
    if (call->bf16) {
        for (long i = 0; i < k * PANEL; i += VW) store(widened + i, load_as(here, i, 1));
        b = widened;
    }
    /* One tile alone is bound by memory, which the processor itself fetches ahead in order. */
    long share = tiles > 1 ? panel_bytes / tiles : 0, stride = share / k;
    const char *ahead = tiles > 1 ? here + panel_bytes : here;
    for (long t = 0; t < tiles; t++) {
        long start = tile_start(m, tiles, t), rows = tile_start(m, tiles, t + 1) - start;
        vf acc[ROWS][2] = {{{0}}};
        multiply(rows, x + start * k, rows, b, k, acc, ahead + t * share, stride);
        finish_tile(call, first + start, rows, panel, acc);
    }
}

#define SIDE 4 /* panels that few rows meet side by side */
#define FEW_ROWS (3 * ROWS)
#define FEW_STEPS 64
#define STEP_BYTES (PANEL * (long)sizeof(float))

/* As multiply(), over some steps of one panel. Fetches as many steps of `fetched` panels, `apart` bytes from each other,
   in turns: one core reads four streams faster than one. */
INLINE void multiply_few(const int rows, const int fetched, const float *x, const float *b, long k, vf acc[][2],
                         const char *ahead, long apart) {
    vf sums[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) sums[r][0] = acc[r][0], sums[r][1] = acc[r][1];
    for (long i = 0; i < k; i += SIDE) {
#pragma GCC unroll 4
        for (int step = 0; step < SIDE; step++) {
            vf left = load(b), right = load(b + VW);
            if (step < fetched)
                for (long line = 0; line < STEP_BYTES; line += 64)
                    __builtin_prefetch(ahead + step * apart + line, 0, 2);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                float factor = x[r];
                sums[r][0] += factor * left;
                sums[r][1] += factor * right;
            }
            x += rows;
            b += PANEL;
        }
        ahead += STEP_BYTES;
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc[r][0] = sums[r][0], acc[r][1] = sums[r][1];
}

#define FEW_CASE(R) \
    case R: multiply_few(R, fetched, x, b, k, acc, ahead, apart); break;

INLINE void multiply_tile(long rows, const int fetched, const float *x, const float *b, long k, vf acc[][2],
                          const char *ahead, long apart) {
    switch (rows) {
        FEW_CASE(1) FEW_CASE(2) FEW_CASE(3) FEW_CASE(4) FEW_CASE(5) FEW_CASE(6)
#if VW == 16
        FEW_CASE(7) FEW_CASE(8) FEW_CASE(9) FEW_CASE(10) FEW_CASE(11) FEW_CASE(12)
#endif
    }
}

static __attribute__((noinline)) void multiply_fetching(long fetched, long rows, const float *x, const float *b, long k,
                                                        vf acc[][2], const char *ahead, long apart) {
    switch (fetched) {
        case 0: multiply_tile(rows, 0, x, b, k, acc, ahead, apart); break;
        case 1: multiply_tile(rows, 1, x, b, k, acc, ahead, apart); break;
        case 2: multiply_tile(rows, 2, x, b, k, acc, ahead, apart); break;
        case 4: multiply_tile(rows, 4, x, b, k, acc, ahead, apart); break;
    }
}

/* Up to FEW_ROWS rows, fp32: bound by memory, or nearly. `count` panels in turns, some steps of each. */
static void run_few(const struct matmul *call, const float *x, long panel, long count) {
    long m = call->m, k = call->k, size = k * PANEL, tiles = tiles_of(m);
    const float *b = (const float *)call->packed + panel * size;
    vf acc[SIDE][FEW_ROWS][2];
    memset(acc, 0, sizeof acc);
    for (long i = 0; i < k; i += FEW_STEPS) {
        long steps = k - i < FEW_STEPS ? k - i : FEW_STEPS, next = i + FEW_STEPS;
        const float *ahead = b + (next < k ? next * PANEL : SIDE * size);
        for (long p = 0; p < count; p++)
            for (long t = 0; t < tiles; t++) {
                long start = tile_start(m, tiles, t), rows = tile_start(m, tiles, t + 1) - start;
                /* The tiles share the SIDE panels that come next. */
                long from = (SIDE * t + tiles - 1) / tiles, fetched = (SIDE * (t + 1) + tiles - 1) / tiles - from;
                multiply_fetching(fetched, rows, x + start * k + i * rows, b + p * size + i * PANEL, steps,
                                  acc[p] + start, (const char *)ahead + p * (steps / SIDE) * STEP_BYTES + from * 4 * size, 4 * size);
            }
    }
    for (long p = 0; p < count; p++) finish_tile(call, 0, m, panel + p, acc[p]);
}

#define ROW_PANELS 4

/* One row against ROW_PANELS panels side by side: more sums at once than one panel has, and more of memory under way. */
static void run_row(const struct matmul *call, const float *x, long panel) {
    long k = call->k, size = k * PANEL;
    const float *b = (const float *)call->packed + panel * size;
    vf acc[ROW_PANELS][2] = {{{0}}};
    for (long i = 0; i < k; i++) {
#pragma GCC unroll 4
        for (int p = 0; p < ROW_PANELS; p++) {
            acc[p][0] += x[i] * load(b + p * size);
            acc[p][1] += x[i] * load(b + p * size + VW);
        }
        b += PANEL;
    }
    for (int p = 0; p < ROW_PANELS; p++) finish_tile(call, 0, 1, panel + p, acc + p);
}

static int kernel(matmul)(const struct matmul *call) {
    long columns = call->activation != ACTIVATION_NONE ? call->n / 2 : call->n;
    long width = call->activation != ACTIVATION_NONE ? VW : PANEL;
    long panels = (columns + width - 1) / width;
    long most = X_BLOCK_BYTES / (4 * call->k) / ROWS * ROWS;
    if (most < ROWS) most = ROWS;
    if (most > call->m) most = call->m;
    int threads = call->num_threads > 1 && panels > 1 ? call->num_threads : 1;
    float *x = scratch(4 * most * call->k);
    float *widened = call->bf16 ? scratch((size_t)threads * call->k * PANEL * 4) : NULL;
    if (!x || (call->bf16 && !widened)) {
        free(x);
        free(widened);
        return -1;
    }
    for (long first = 0; first < call->m; first += most) {
        long m = call->m - first < most ? call->m - first : most;
        pack_rows(call->x + first * call->x_stride, call->x_stride, m, call->k, x);
        long by_row = call->m == 1 && !call->bf16 ? panels / ROW_PANELS * ROW_PANELS : 0;
        int are_few = call->m > 1 && call->m <= FEW_ROWS && !call->bf16 && call->k % SIDE == 0 && m == call->m;
        long by_side = are_few ? panels : by_row;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
        for (long panel = 0; panel < by_row; panel += ROW_PANELS) run_row(call, x, panel);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
        for (long panel = by_row; panel < by_side; panel += SIDE)
            run_few(call, x, panel, panels - panel < SIDE ? panels - panel : SIDE);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
        for (long panel = by_side; panel < panels; panel++)
            run_panel(call, x, first, m, panel, call->bf16 ? widened + thread_index() * call->k * PANEL : NULL);
    }
    free(x);
    free(widened);
    return 0;
}
