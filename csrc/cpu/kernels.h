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

// Where the accumulator is when an op comes to it: in some cache, or in memory only. There, what is only written (the
// accumulator by a first add, a 16-bit parameter that has a master by a step) is streamed past the caches.
enum Place { kNear = 0, kFar, kPlaces };

// `written`: what may be streamed to. An accumulator of 32 MiB is out of any cache by the time of the next op.
inline Place place_of(int64_t acc_elems, const void* written) {
  constexpr int64_t kFarElems = int64_t{8} << 20;
  return acc_elems >= kFarElems && reinterpret_cast<uintptr_t>(written) % 64 == 0 ? kFar : kNear;
}

// 59 loops an instruction set: 18 to accumulate, 1 to measure, 20 for each rule.
struct Kernels {
  const char* isa;
  // (acc, grad, n, scale, micro) -> sum of squares of the resulting acc. `micro`: where kAddLaterWithMicro stores that
  // of what was added; not looked at by the others.
  double (*accumulate[kDtypes][kAdds][kPlaces])(float*, const void*, int64_t, float, double*);  // [grad dtype]
  double (*sum_sq)(const float*, int64_t);
  void (*adam[kParamKinds][2][kPlaces])(const AdamChunk&, int64_t, const AdamScalars&);  // [param kind][amsgrad]
  void (*sgd[kParamKinds][2][kPlaces])(const SgdChunk&, int64_t, const SgdScalars&);     // [param kind][momentum]
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
