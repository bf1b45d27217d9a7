/* Work on rows: the root-mean-square norm, and heads on their way into the cache. */

static void norm_row(const float *x, const float *weight, float *out, long size, float eps) {
    vf squares = {0};
    long i = 0;
    for (; i + VW <= size; i += VW) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    float scale = 1.0f / sqrtf(total / (float)size + eps);
    for (i = 0; i + VW <= size; i += VW) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < size; i++) out[i] = x[i] * scale * weight[i];
}

static void kernel(rms_norm)(const float *x, const float *weight, float *out, long rows, long size, float eps,
                             int num_threads) {
    int threads = num_threads > 1 && rows > 8 ? num_threads : 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (long row = 0; row < rows; row++) norm_row(x + row * size, weight, out + row * size, size, eps);
}

/* Rotate-half form; `sine` carries the sign of the rotated half. */
static void rotate_head(float *head, const float *cosine, const float *sine, long size) {
    long half = size / 2, i = 0;
    for (; i + VW <= half; i += VW) {
        vf low = load(head + i), high = load(head + half + i);
        store(head + i, low * load(cosine + i) + high * load(sine + i));
        store(head + half + i, high * load(cosine + half + i) + low * load(sine + half + i));
    }
    for (; i < half; i++) {
        float low = head[i], high = head[half + i];
        head[i] = low * cosine[i] + high * sine[i];
        head[half + i] = high * cosine[half + i] + low * sine[half + i];
    }
}

static void place_token(const struct place *call, long token) {
    long size = call->head_dim, rotated = call->num_heads + call->num_kv_heads;
    float *heads = call->heads + token * (rotated + call->num_kv_heads) * size;
    for (long head = 0; head < rotated; head++) {
        const float *norm = head < call->num_heads ? call->q_norm : call->k_norm;
        if (norm) norm_row(heads + head * size, norm, heads + head * size, size, call->eps);
        if (call->cosine)
            rotate_head(heads + head * size, call->cosine + token * size, call->sine + token * size, size);
    }
    const int64_t *rows = call->rows + token * 2 * call->num_kv_heads;
    const float *new = heads + call->num_heads * size;
    for (long head = 0; head < 2 * call->num_kv_heads; head++)
        memcpy(call->cache + rows[head] * size, new + head * size, size * sizeof(float));
}

static void kernel(place)(const struct place *call) {
    int threads = call->num_threads > 1 && call->num_tokens > 8 ? call->num_threads : 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (long token = 0; token < call->num_tokens; token++) place_token(call, token);
}
