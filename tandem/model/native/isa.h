/* The kernels for one instruction set: the including file has set VW, NAME and the compiler's target. */
#include "kernels.h"

#ifdef _OPENMP
#include <omp.h>
#define thread_index() omp_get_thread_num()
#else
#define thread_index() 0
#endif

#define JOIN(a, b) a##_##b
#define JOINED(a, b) JOIN(a, b)
#define kernel(what) JOINED(what, NAME)
#define TEXT(a) #a
#define TEXT_OF(a) TEXT(a)

#include "vector.h"
#include "matmul.h"
#include "attention.h"
#include "rows.h"
#include "digest.h"

const struct kernels kernel(kernels) = {
    .name = TEXT_OF(NAME),
    .vector_width = VW,
    .pack = kernel(pack),
    .matmul = kernel(matmul),
    .attend = kernel(attend),
    .rms_norm = kernel(rms_norm),
    .place = kernel(place),
    .move = kernel(move),
};
