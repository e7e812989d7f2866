// Which instruction set this process uses.
#include <cstdlib>
#include <cstring>
#include <string>

#include "../checks.h"
#include "kernels.h"

namespace fusedaccum {
namespace {

const Kernels& best_kernels() {
#ifdef FA_X86_CLONES
  // The clones use no fused multiply-add, so AVX2 alone is what the middle one needs.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return kernels_avx512();
  }
  if (__builtin_cpu_supports("avx2")) return kernels_avx2();
#endif
  return kernels_baseline();
}

const Kernels& chosen_kernels() {
  const Kernels& best = best_kernels();
  const char* forced = std::getenv("FUSEDACCUM_ISA");
  if (forced == nullptr || *forced == '\0') return best;
  std::string accepted;
  // From the widest that this processor runs down to the baseline: each implies those below it.
#ifdef FA_X86_CLONES
  const Kernels* const all[] = {&kernels_avx512(), &kernels_avx2(), &kernels_baseline()};
#else
  const Kernels* const all[] = {&kernels_baseline()};
#endif
  bool runs = false;
  for (const Kernels* candidate : all) {
    runs = runs || candidate == &best;
    if (!runs) continue;
    if (std::strcmp(forced, candidate->isa) == 0) return *candidate;
    accepted += accepted.empty() ? candidate->isa : std::string(", ") + candidate->isa;
  }
  FA_CHECK(false, "FUSEDACCUM_ISA is '", forced, "'; accepted by this processor and build: ", accepted);
  return best;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = chosen_kernels();
  return chosen;
}

}  // namespace fusedaccum
