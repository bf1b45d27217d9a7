/* Attention over the paged cache with a running softmax (Milakov and Gimelshein, arXiv:1805.02867): a slice of one
   token reads keys and values where they lie, once; a longer one copies a piece of them and meets it with panels of
   query rows, the heads of a group among them. Nothing is read past a slice's context. */

#define PIECE 256 /* context positions between two corrections of the running sums */
#define QUERY_ROWS 384 /* rows of one piece of work */

struct span { /* one slice seen from some of the KV heads, `num_heads` from `head` on */
    const struct attention *call;
    const int64_t *table;
    long head, num_heads, first_token, num_tokens, length, group;
};

INLINE const void *entry(const struct span *span, long position, const int is_value) {
    const struct attention *call = span->call;
    long block = span->table[position / call->block_size], plane = is_value * call->num_kv_heads + span->head;
    long row = (block * 2 * call->num_kv_heads + plane) * call->block_size + position % call->block_size;
    return advance(call->cache, row * call->head_dim, call->bf16);
}

INLINE vf capped(const struct attention *call, vf score) {
    return call->softcap > 0 ? call->softcap * hyperbolic_tangent(score * (1.0f / call->softcap)) : score;
}

INLINE long window_start(const struct attention *call, long position) {
    return call->window && position - call->window + 1 > 0 ? position - call->window + 1 : 0;
}

#include "attention_token.h"
#include "attention_chunk.h"

static size_t attention_floats(const struct attention *call) {
    size_t token = token_floats(call), chunk = chunk_floats(call);
    return token > chunk ? token : chunk;
}

INLINE int is_token(const struct attention *call, const int64_t *slice) {
    return slice[1] == 1 && call->head_dim % VW == 0;
}

/* KV heads that a token's piece of work takes: all of them, unless threads would have nothing to do. */
INLINE long token_heads(const struct attention *call) {
    return call->num_threads > 1 && call->num_slices < 4 * call->num_threads ? 1 : call->num_kv_heads;
}

/* Pieces of work of one slice. */
INLINE long parts_of(const struct attention *call, const int64_t *slice) {
    if (is_token(call, slice)) return call->num_kv_heads / token_heads(call);
    long tokens = query_tokens(call);
    return (slice[1] + tokens - 1) / tokens * call->num_kv_heads;
}

static struct span span_of(const struct attention *call, const int64_t *slice, long head, long num_heads) {
    return (struct span){.call = call,
                         .table = call->tables + slice[3],
                         .head = head,
                         .num_heads = num_heads,
                         .first_token = slice[0],
                         .num_tokens = slice[1],
                         .length = slice[2],
                         .group = call->num_heads / call->num_kv_heads};
}

static void run_part(const struct attention *call, const int64_t *slice, long part, float *memory) {
    long heads = call->num_kv_heads;
    if (!is_token(call, slice)) {
        struct span span = span_of(call, slice, part % heads, 1);
        long most = query_tokens(call), from = part / heads * most;
        attend_chunk(&span, from, from + most < span.num_tokens ? from + most : span.num_tokens, memory);
        return;
    }
    long num = token_heads(call);
    struct span span = span_of(call, slice, part * num, num);
    call->bf16 ? attend_token(&span, memory, 1) : attend_token(&span, memory, 0);
}

static int kernel(attend)(const struct attention *call) {
    long work = 0;
    for (long i = 0; i < call->num_slices; i++) work += parts_of(call, call->slices + 4 * i);
    int threads = call->num_threads > 1 && work > 1 ? call->num_threads : 1;
    size_t floats = (attention_floats(call) + 15) / 16 * 16;
    float *memory = scratch(threads * floats * sizeof(float));
    if (!memory) return -1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        long before = 0, at = 0; /* `at` is the slice that holds work `before ..`; a thread only moves on */
#pragma omp for schedule(dynamic, 1)
        for (long item = 0; item < work; item++) {
            long here;
            while (item >= before + (here = parts_of(call, call->slices + 4 * at))) {
                before += here;
                at++;
            }
            run_part(call, call->slices + 4 * at, item - before, memory + thread_index() * floats);
        }
    }
    free(memory);
    return 0;
}
