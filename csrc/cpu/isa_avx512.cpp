#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#ifdef FA_X86_CLONES
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#define FA_ISA_NAME "avx512"
#define FA_ISA_VECTOR_BYTES 64
#define FA_ISA_KERNELS kernels_avx512
#include "loops.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // FA_X86_CLONES
