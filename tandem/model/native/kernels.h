/* What every instruction set's build of the kernels offers; `module.c` picks one table when it is loaded.
   Sizes are in elements unless a name says bytes; rows lie one after another unless a stride is given. */
#ifndef TANDEM_KERNELS_H
#define TANDEM_KERNELS_H

#include <stdint.h>

enum activation { ACTIVATION_NONE = 0, ACTIVATION_SILU = 1, ACTIVATION_GELU_TANH = 2 };

struct matmul {
    const float *x; /* [m, k], rows `x_stride` apart */
    long x_stride;
    const void *packed; /* [panels, k, panel width] as pack() left it */
    const float *bias; /* [n] or NULL */
    const float *residual; /* [m, n] or NULL; may be `out` */
    float *out; /* [m, n]; with an activation [m, n / 2] */
    long m, k, n;
    int bf16; /* type of `packed` */
    int activation; /* none, or that of the first half of the columns, which the second half is multiplied by */
    int num_threads;
};

struct attention {
    const void *query; /* [tokens, num_heads, head_dim], tokens `query_stride` apart */
    const void *cache; /* [blocks, 2, num_kv_heads, block_size, head_dim] */
    void *output; /* [tokens, num_heads, head_dim] */
    const int64_t *slices; /* [num_slices, 4]: first token, tokens, context length, start in `tables` */
    const int64_t *tables; /* block ids of all slices */
    long num_slices, query_stride, num_heads, num_kv_heads, head_dim, block_size;
    float scale;
    float softcap; /* 0: none */
    long window; /* 0: none */
    int bf16; /* type of query, cache and output */
    int num_threads;
};

struct place {
    float *heads; /* [tokens, num_heads + 2 num_kv_heads, head_dim]; normed and rotated in place */
    const float *cosine, *sine; /* [tokens, head_dim] or NULL */
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    float *cache; /* one layer, as rows of head_dim */
    const int64_t *rows; /* [tokens, 2 num_kv_heads]: where each K, then each V goes */
    long num_tokens, num_heads, num_kv_heads, head_dim;
    float eps;
    int num_threads;
};

/* One layer of a decoder with a dense MLP, all of it here, in fp32. Eight bytes a field: Python packs it. */
struct layer {
    const float *norm; /* [hidden] */
    const float *qkv; /* packed [hidden, (num_heads + 2 num_kv_heads) * head_dim] */
    const float *qkv_bias; /* of those columns, or NULL */
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    float *cache; /* [blocks, 2, num_kv_heads, block_size, head_dim] */
    const float *output; /* packed [num_heads * head_dim, hidden] */
    const float *mlp_norm; /* [hidden] */
    const float *gate_up; /* packed and gated [hidden, 2 intermediate] */
    const float *down; /* packed [intermediate, hidden] */
    int64_t rotary; /* which of the step's tables; -1: none */
    int64_t activation;
    int64_t window; /* as in struct attention */
    double scale, softcap;
};

/* What layers have in common in one iteration. */
struct step {
    float *x; /* [num_tokens, hidden], in and out */
    float *work; /* step_floats() numbers */
    const int64_t *rotary; /* addresses of cosine and sine, [num_tokens, head_dim], of each kind of positions */
    const int64_t *rows; /* as in struct place */
    const int64_t *slices, *tables; /* as in struct attention */
    long num_slices, num_tokens, hidden, intermediate, num_heads, num_kv_heads, head_dim, block_size;
    float eps;
    int num_threads;
};

/* Which half of a layer: until its keys and values are in the cache, and from there on. */
enum half { HALF_WRITE = 1, HALF_ATTEND = 2 };

struct kernels {
    const char *name;
    long vector_width; /* a panel is two vectors wide */
    /* weight [k, n] with strides to panels; with `gated` a panel is a vector of the first half beside its other half */
    void (*pack)(const void *weight, long row_stride, long column_stride, void *packed, long k, long n, int bf16,
                 int gated);
    int (*matmul)(const struct matmul *call); /* 0, or -1 when there is no memory */
    int (*attend)(const struct attention *call);
    void (*rms_norm)(const float *x, const float *weight, float *out, long rows, long size, float eps, int num_threads);
    void (*place)(const struct place *call);
    /* pieces [count, 3]: target or 0, source, bytes; not overlapping. With `digesting` the digest (see digest.h) of all
       sources as one input, which must have more than 240 bytes; 0 without. */
    uint64_t (*move)(const int64_t *pieces, long count, int digesting);
};

long step_floats(const struct step *step);
int run_layers(const struct kernels *kernels, const struct step *step, const struct layer *layers, long count,
               int halves); /* 0, or -1 when there is no memory */

extern const struct kernels kernels_base;
#if defined(__x86_64__)
extern const struct kernels kernels_avx2;
extern const struct kernels kernels_avx512;
#endif

#endif
