// The launchers: what bind.cpp calls and the .cu files define.
//
// Nine kernels an architecture: accumulate without and with statistics, adam and sgd in two sizes of parameter block,
// and finalize. Dtypes, masters, AMSGrad, momentum and alignment are branches inside, which all threads of a block take
// together.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

namespace fusedaccum {

struct FinalizeArgs {
  double* control;
  void* scalars;
  float* steps;
  double* window;
  const double* partials;
  const double* micro_partials;
  const Slot* table;
  const void* hyper;
  const uint8_t* active;
  const double* extra;  // may be null
  int64_t n_slots;
  int64_t n_groups;
  double numerator;
  double weight;
  double weight_sq;
  double max_norm;
  int64_t rule;
  int64_t advance;
  int64_t has_micro;  // not told by the pointer: an empty tensor's is null
};

cudaError_t launch_accumulate(const AccumulateArgs& args, const Launch& launch, cudaStream_t stream);
cudaError_t launch_finalize(const FinalizeArgs& args, cudaStream_t stream);
cudaError_t launch_adam(const StepArgs& args, const Launch& launch, cudaStream_t stream);
cudaError_t launch_sgd(const StepArgs& args, const Launch& launch, cudaStream_t stream);

}  // namespace fusedaccum
