#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#define FA_ISA_NAME "baseline"
#define FA_ISA_VECTOR_BYTES 16
#define FA_ISA_KERNELS kernels_baseline
#include "loops.h"
