/* For x86-64 processors with AVX-512. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,fma")
#endif
#define VW 16
#define NAME avx512
#include "isa.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
