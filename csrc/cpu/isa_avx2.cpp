#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#ifdef FA_X86_CLONES
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

#define FA_ISA_NAME "avx2"
#define FA_ISA_VECTOR_BYTES 32
#define FA_ISA_KERNELS kernels_avx2
#include "loops.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // FA_X86_CLONES
