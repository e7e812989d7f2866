// The launchers: what bind.cpp calls and the .cu files define.
//
// Seven kernels an architecture: accumulate, adam and sgd in two sizes of parameter block, and finalize. Dtypes,
// masters, AMSGrad, momentum and alignment are branches inside, which all threads of a block take together.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

namespace fusedaccum {

struct FinalizeArgs {
  double* control;
  void* scalars;
  float* steps;
  const double* partials;
  const Slot* table;
  const void* hyper;
  const uint8_t* active;
  const double* extra_sum_sq;  // may be null
  int64_t n_slots;
  int64_t n_groups;
  double divisor_correction;
  double max_norm;
  int64_t rule;
  int64_t advance;
};

cudaError_t launch_accumulate(const AccumulateArgs& args, const Launch& launch, cudaStream_t stream);
cudaError_t launch_finalize(const FinalizeArgs& args, cudaStream_t stream);
cudaError_t launch_adam(const StepArgs& args, const Launch& launch, cudaStream_t stream);
cudaError_t launch_sgd(const StepArgs& args, const Launch& launch, cudaStream_t stream);

}  // namespace fusedaccum
