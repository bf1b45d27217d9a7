/* For x86-64 processors with AVX2 and FMA. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define VW 8
#define NAME avx2
#include "isa.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
