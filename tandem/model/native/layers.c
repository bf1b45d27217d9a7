/* Whole layers in one call: nothing of an iteration that grows with the layers is left to the interpreter, and what lies
   between two kernels keeps its place in memory. */
#include "kernels.h"

static long width_of_heads(const struct step *step) {
    return (step->num_heads + 2 * step->num_kv_heads) * step->head_dim;
}

static long attended_width(const struct step *step) { return step->num_heads * step->head_dim; }

/* Numbers of a row that norm, attention and MLP use in turn. */
static long shared_width(const struct step *step) {
    long width = step->hidden;
    if (width < attended_width(step)) width = attended_width(step);
    return width < step->intermediate ? step->intermediate : width;
}

long step_floats(const struct step *step) {
    return step->num_tokens * (step->hidden + width_of_heads(step) + shared_width(step));
}

struct rooms { /* of the step's work, each [num_tokens, ...] */
    float *normed, *heads, *shared;
};

static struct rooms rooms_of(const struct step *step) {
    float *heads = step->work + step->num_tokens * step->hidden;
    return (struct rooms){.normed = step->work, .heads = heads, .shared = heads + step->num_tokens * width_of_heads(step)};
}

static int multiply(const struct kernels *kernels, const struct step *step, const float *x, const float *packed,
                    const float *bias, float *out, long k, long n, int64_t activation, int adds) {
    struct matmul call = {.x = x,
                          .x_stride = k,
                          .packed = packed,
                          .bias = bias,
                          .residual = adds ? out : 0,
                          .out = out,
                          .m = step->num_tokens,
                          .k = k,
                          .n = n,
                          .activation = (int)activation,
                          .num_threads = step->num_threads};
    return kernels->matmul(&call);
}

static int write_half(const struct kernels *kernels, const struct step *step, const struct layer *layer) {
    struct rooms rooms = rooms_of(step);
    kernels->rms_norm(step->x, layer->norm, rooms.normed, step->num_tokens, step->hidden, step->eps, step->num_threads);
    if (multiply(kernels, step, rooms.normed, layer->qkv, layer->qkv_bias, rooms.heads, step->hidden,
                 width_of_heads(step), ACTIVATION_NONE, 0))
        return -1;
    const int64_t *tables = layer->rotary < 0 ? 0 : step->rotary + 2 * layer->rotary;
    struct place call = {.heads = rooms.heads,
                         .cosine = tables ? (const float *)(intptr_t)tables[0] : 0,
                         .sine = tables ? (const float *)(intptr_t)tables[1] : 0,
                         .q_norm = layer->q_norm,
                         .k_norm = layer->k_norm,
                         .cache = layer->cache,
                         .rows = step->rows,
                         .num_tokens = step->num_tokens,
                         .num_heads = step->num_heads,
                         .num_kv_heads = step->num_kv_heads,
                         .head_dim = step->head_dim,
                         .eps = step->eps,
                         .num_threads = step->num_threads};
    kernels->place(&call);
    return 0;
}

static int attend_half(const struct kernels *kernels, const struct step *step, const struct layer *layer) {
    struct rooms rooms = rooms_of(step);
    struct attention call = {.query = rooms.heads,
                             .cache = layer->cache,
                             .output = rooms.shared,
                             .slices = step->slices,
                             .tables = step->tables,
                             .num_slices = step->num_slices,
                             .query_stride = width_of_heads(step),
                             .num_heads = step->num_heads,
                             .num_kv_heads = step->num_kv_heads,
                             .head_dim = step->head_dim,
                             .block_size = step->block_size,
                             .scale = (float)layer->scale,
                             .softcap = (float)layer->softcap,
                             .window = layer->window,
                             .num_threads = step->num_threads};
    if (kernels->attend(&call)) return -1;
    if (multiply(kernels, step, rooms.shared, layer->output, 0, step->x, attended_width(step), step->hidden,
                 ACTIVATION_NONE, 1))
        return -1;
    kernels->rms_norm(step->x, layer->mlp_norm, rooms.normed, step->num_tokens, step->hidden, step->eps,
                      step->num_threads);
    if (multiply(kernels, step, rooms.normed, layer->gate_up, 0, rooms.shared, step->hidden, 2 * step->intermediate,
                 layer->activation, 0))
        return -1;
    return multiply(kernels, step, rooms.shared, layer->down, 0, step->x, step->intermediate, step->hidden,
                    ACTIVATION_NONE, 1);
}

int run_layers(const struct kernels *kernels, const struct step *step, const struct layer *layers, long count,
               int halves) {
    for (long i = 0; i < count; i++) {
        if (halves & HALF_WRITE && write_half(kernels, step, layers + i)) return -1;
        if (halves & HALF_ATTEND && attend_half(kernels, step, layers + i)) return -1;
    }
    return 0;
}
