// The CPU kernels of one instruction set, as a table of functions on single chunks.
#pragma once

#include <cstdint>

#include "../layout.h"

namespace fusedaccum {

struct AdamChunk {
  void* param;
  float* master;  // null where the parameter kind has none
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // null without amsgrad
  const float* acc;
};

struct SgdChunk {
  void* param;
  float* master;
  float* momentum_buffer;  // null without momentum
  const float* acc;
};

// What an add does beside adding. A first add keeps its micro-batch's sum of squares for nothing: it is the chunk's
// own.
enum Add { kAddLater = 0, kAddFirst, kAddLaterWithMicro, kAdds };

// Where the accumulator is when an add comes to it: in some cache, or in memory only. A first add to memory is streamed
// there past the caches, and takes an accumulator that is aligned to kStreamAlignment bytes.
enum Place { kNear = 0, kFar, kPlaces };
constexpr uintptr_t kStreamAlignment = 64;

// 39 loops an instruction set: 18 to accumulate, 1 to measure, 10 for each rule.
struct Kernels {
  const char* isa;
  // (acc, grad, n, scale, micro) -> sum of squares of the resulting acc. `micro`: where kAddLaterWithMicro stores that
  // of what was added; not looked at by the others.
  double (*accumulate[kDtypes][kAdds][kPlaces])(float*, const void*, int64_t, float, double*);  // [grad dtype]
  double (*sum_sq)(const float*, int64_t);
  void (*adam[kParamKinds][2])(const AdamChunk&, int64_t, const AdamScalars&);  // [param kind][amsgrad]
  void (*sgd[kParamKinds][2])(const SgdChunk&, int64_t, const SgdScalars&);     // [param kind][momentum]
};

// Instruction set extensions are requested per file, by pragma, so that one set of compiler flags builds all
// files. Other compilers and processors get the baseline, which is NEON on aarch64.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(FUSEDACCUM_BASELINE_ONLY)
#define FA_X86_CLONES 1
#endif

const Kernels& kernels_baseline();
#ifdef FA_X86_CLONES
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#endif

// The kernels of this process: chosen at first use from the processor and FUSEDACCUM_ISA
// (baseline, avx2, avx512). Throws if the variable names a set that the processor or the build lacks.
const Kernels& kernels();

}  // namespace fusedaccum
