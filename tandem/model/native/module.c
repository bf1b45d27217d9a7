/* The kernels as a Python module. Addresses are `data_ptr()`s: whoever calls has checked types, shapes and strides.
   The interpreter's lock is free while a kernel runs. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "kernels.h"

static const struct kernels *chosen = &kernels_base;

/* $TANDEM_KERNELS=base has them as on a processor of which nothing is known, avx2 as on one without AVX-512. */
static const struct kernels *best(void) {
    const char *wanted = getenv("TANDEM_KERNELS");
    if (wanted && strcmp(wanted, "base") == 0) return &kernels_base;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int is_narrow = wanted && strcmp(wanted, "avx2") == 0;
    if (!is_narrow && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma"))
        return &kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kernels_avx2;
#endif
    return &kernels_base;
}

/* Integers of a call, in order; the first failed conversion leaves a Python error and zeros after it. */
struct numbers {
    PyObject *const *items;
    int failed;
};

static long long next(struct numbers *numbers) {
    if (numbers->failed) return 0;
    long long value = PyLong_AsLongLong(*numbers->items++);
    numbers->failed = value == -1 && PyErr_Occurred() != NULL;
    return value;
}

static double next_real(struct numbers *numbers) {
    if (numbers->failed) return 0;
    double value = PyFloat_AsDouble(*numbers->items++);
    numbers->failed = value == -1.0 && PyErr_Occurred() != NULL;
    return value;
}

#define POINTER(numbers) ((void *)(intptr_t)next(numbers))

static int begin(struct numbers *numbers, PyObject *const *items, Py_ssize_t given, Py_ssize_t wanted) {
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, given);
        return -1;
    }
    *numbers = (struct numbers){.items = items, .failed = 0};
    return 0;
}

static PyObject *done(int status) {
    if (status) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *py_pack(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    struct numbers n;
    if (begin(&n, items, count, 8)) return NULL;
    const void *weight = POINTER(&n);
    long row_stride = next(&n), column_stride = next(&n);
    void *packed = POINTER(&n);
    long k = next(&n), columns = next(&n);
    int bf16 = (int)next(&n), gated = (int)next(&n);
    if (n.failed) return NULL;
    Py_BEGIN_ALLOW_THREADS chosen->pack(weight, row_stride, column_stride, packed, k, columns, bf16, gated);
    Py_END_ALLOW_THREADS return done(0);
}

static PyObject *py_matmul(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    struct numbers n;
    int status;
    if (begin(&n, items, count, 12)) return NULL;
    struct matmul call = {.x = POINTER(&n)};
    call.x_stride = next(&n);
    call.packed = POINTER(&n);
    call.bias = POINTER(&n);
    call.residual = POINTER(&n);
    call.out = POINTER(&n);
    call.m = next(&n);
    call.k = next(&n);
    call.n = next(&n);
    call.bf16 = (int)next(&n);
    call.activation = (int)next(&n);
    call.num_threads = (int)next(&n);
    if (n.failed) return NULL;
    Py_BEGIN_ALLOW_THREADS status = chosen->matmul(&call);
    Py_END_ALLOW_THREADS return done(status);
}

static PyObject *py_attend(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    struct numbers n;
    int status;
    if (begin(&n, items, count, 16)) return NULL;
    struct attention call = {.query = POINTER(&n)};
    call.query_stride = next(&n);
    call.cache = POINTER(&n);
    call.output = POINTER(&n);
    call.slices = POINTER(&n);
    call.tables = POINTER(&n);
    call.num_slices = next(&n);
    call.num_heads = next(&n);
    call.num_kv_heads = next(&n);
    call.head_dim = next(&n);
    call.block_size = next(&n);
    call.scale = (float)next_real(&n);
    call.softcap = (float)next_real(&n);
    call.window = next(&n);
    call.bf16 = (int)next(&n);
    call.num_threads = (int)next(&n);
    if (n.failed) return NULL;
    Py_BEGIN_ALLOW_THREADS status = chosen->attend(&call);
    Py_END_ALLOW_THREADS return done(status);
}

static PyObject *py_rms_norm(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    struct numbers n;
    if (begin(&n, items, count, 7)) return NULL;
    const float *x = POINTER(&n), *weight = POINTER(&n);
    float *out = POINTER(&n);
    long rows = next(&n), size = next(&n);
    float eps = (float)next_real(&n);
    int num_threads = (int)next(&n);
    if (n.failed) return NULL;
    Py_BEGIN_ALLOW_THREADS chosen->rms_norm(x, weight, out, rows, size, eps, num_threads);
    Py_END_ALLOW_THREADS return done(0);
}

static PyObject *py_place(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    struct numbers n;
    if (begin(&n, items, count, 13)) return NULL;
    struct place call = {.heads = POINTER(&n)};
    call.cosine = POINTER(&n);
    call.sine = POINTER(&n);
    call.q_norm = POINTER(&n);
    call.k_norm = POINTER(&n);
    call.cache = POINTER(&n);
    call.rows = POINTER(&n);
    call.num_tokens = next(&n);
    call.num_heads = next(&n);
    call.num_kv_heads = next(&n);
    call.head_dim = next(&n);
    call.eps = (float)next_real(&n);
    call.num_threads = (int)next(&n);
    if (n.failed) return NULL;
    Py_BEGIN_ALLOW_THREADS chosen->place(&call);
    Py_END_ALLOW_THREADS return done(0);
}

static struct step next_step(struct numbers *n) {
    struct step step = {.x = POINTER(n)};
    step.work = POINTER(n);
    step.rotary = POINTER(n);
    step.rows = POINTER(n);
    step.slices = POINTER(n);
    step.tables = POINTER(n);
    step.num_slices = next(n);
    step.num_tokens = next(n);
    step.hidden = next(n);
    step.intermediate = next(n);
    step.num_heads = next(n);
    step.num_kv_heads = next(n);
    step.head_dim = next(n);
    step.block_size = next(n);
    step.eps = (float)next_real(n);
    step.num_threads = (int)next(n);
    return step;
}

static PyObject *py_run_layers(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    struct numbers n;
    int status;
    if (begin(&n, items, count, 20)) return NULL;
    struct step step = next_step(&n);
    const struct layer *layers = POINTER(&n);
    long first = next(&n), end = next(&n);
    int halves = (int)next(&n);
    if (n.failed) return NULL;
    Py_BEGIN_ALLOW_THREADS status = run_layers(chosen, &step, layers + first, end - first, halves);
    Py_END_ALLOW_THREADS return done(status);
}

static PyObject *py_step_floats(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    struct numbers n;
    if (begin(&n, items, count, 16)) return NULL;
    struct step step = next_step(&n);
    return n.failed ? NULL : PyLong_FromLong(step_floats(&step));
}

static PyObject *py_move(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    struct numbers n;
    uint64_t digest;
    if (begin(&n, items, count, 3)) return NULL;
    const int64_t *pieces = POINTER(&n);
    long num_pieces = next(&n);
    int digesting = (int)next(&n);
    if (n.failed) return NULL;
    Py_BEGIN_ALLOW_THREADS digest = chosen->move(pieces, num_pieces, digesting);
    Py_END_ALLOW_THREADS return PyLong_FromUnsignedLongLong(digest);
}

#define FAST(function) ((PyCFunction)(void (*)(void))function)

static PyMethodDef methods[] = {
    {"pack", FAST(py_pack), METH_FASTCALL, "weight, row stride, column stride, packed, k, n, bf16, gated"},
    {"matmul", FAST(py_matmul), METH_FASTCALL,
     "x, x stride, packed, bias, residual, out, m, k, n, bf16, activation, threads"},
    {"attend", FAST(py_attend), METH_FASTCALL,
     "query, query stride, cache, output, slices, tables, slices' number, heads, KV heads, head size, block size, "
     "scale, softcap, window, bf16, threads"},
    {"rms_norm", FAST(py_rms_norm), METH_FASTCALL, "x, weight, out, rows, size, eps, threads"},
    {"place", FAST(py_place), METH_FASTCALL,
     "heads, cosine, sine, q norm, k norm, cache, rows, tokens, heads' number, KV heads, head size, eps, threads"},
    {"run_layers", FAST(py_run_layers), METH_FASTCALL, "the step, its layers, first, end, halves"},
    {"step_floats", FAST(py_step_floats), METH_FASTCALL,
     "x, work, tables of positions, rows, slices, tables, slices' number, tokens, hidden, intermediate, heads, KV heads, "
     "head size, block size, eps, threads"},
    {"move", FAST(py_move), METH_FASTCALL, "pieces, their number, digesting; returns the digest"},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module) {
    chosen = best();
    return PyModule_AddStringConstant(module, "ISA", chosen->name) ||
           PyModule_AddIntConstant(module, "VECTOR_WIDTH", chosen->vector_width) ||
           PyModule_AddIntConstant(module, "LAYER_BYTES", sizeof(struct layer));
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_kernels", .m_size = 0, .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&definition); }
