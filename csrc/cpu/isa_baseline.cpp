#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

#define FA_ISA_NAME "baseline"
#define FA_ISA_KERNELS kernels_baseline
#include "loops.h"
