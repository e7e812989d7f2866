// Registers the CPU ops with torch's dispatcher, and answers which instruction set is in use. The schemas are
// defined in Python (fusedaccum/ops.py), which loads this library with torch.ops.load_library.
#include <torch/csrc/stable/library.h>

#include "kernels.h"
#include "ops.h"

STABLE_TORCH_LIBRARY_IMPL(fusedaccum, CPU, m) {
  m.impl("accumulate_", TORCH_BOX(&fusedaccum::accumulate_cpu));
  m.impl("measure_", TORCH_BOX(&fusedaccum::measure_cpu));
  m.impl("finalize_", TORCH_BOX(&fusedaccum::finalize_cpu));
  m.impl("adam_step_", TORCH_BOX(&fusedaccum::adam_step_cpu));
  m.impl("sgd_step_", TORCH_BOX(&fusedaccum::sgd_step_cpu));
}

// Called through ctypes by backends.py. Returns null where FUSEDACCUM_ISA names a set that does not run here.
extern "C" __attribute__((visibility("default"))) const char* fusedaccum_cpu_isa() {
  try {
    return fusedaccum::kernels().isa;
  } catch (...) {
    return nullptr;
  }
}
