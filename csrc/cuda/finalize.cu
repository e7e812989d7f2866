// finalize_: from the partials to the control block and the scalars of every slot, in one block of threads.
#include "../math.h"
#include "kernels.h"

namespace fusedaccum {
namespace {

constexpr int kFinalizeThreads = static_cast<int>(kLanes);

// A thread is a lane of the fixed tree over chunks: it adds the chunks congruent to its number, in order. Slots lie in
// chunk order, so the slot of the next one is found by walking on.
__device__ __forceinline__ double lane_sum(const FinalizeArgs& args) {
  double sum = 0.0;
  int64_t slot = 0;
  for (int64_t chunk = threadIdx.x;; chunk += kLanes) {
    while (slot < args.n_slots && chunk >= args.table[slot].first_chunk + n_chunks(args.table[slot].n_elems)) ++slot;
    if (slot == args.n_slots) return sum;
    if (args.active[slot]) sum += args.partials[chunk];
  }
}

template <typename Hyper, typename Scalars>
__device__ __forceinline__ void write_scalars(const FinalizeArgs& args, double grad_multiplier,
                                              Scalars (*formula)(const Hyper&, double, double)) {
  const Hyper* const groups = static_cast<const Hyper*>(args.hyper);
  Scalars* const rows = static_cast<Scalars*>(args.scalars);
  for (int64_t slot = threadIdx.x; slot < args.n_slots; slot += kFinalizeThreads) {
    const int64_t group = args.table[slot].group;
    if (!args.active[slot] || group < 0 || group >= args.n_groups) continue;
    const float step = args.steps[slot] + 1.0f;
    args.steps[slot] = step;
    rows[slot] = formula(groups[group], grad_multiplier, static_cast<double>(step));
  }
}

__global__ void __launch_bounds__(kFinalizeThreads) finalize_kernel(const __grid_constant__ FinalizeArgs args) {
  __shared__ double lanes[kFinalizeThreads];
  const int thread = static_cast<int>(threadIdx.x);
  lanes[thread] = lane_sum(args);
  __syncthreads();
#pragma unroll 1
  for (int stride = kFinalizeThreads / 2; stride > 0; stride /= 2) {
    if (thread < stride) lanes[thread] += lanes[thread + stride];
    __syncthreads();
  }
  // Every thread computes the few values for itself: the same operations on the same sum.
  double sum_sq = lanes[0];
  if (args.extra_sum_sq != nullptr) sum_sq += *args.extra_sum_sq;
  const double norm = sqrt(sum_sq) * args.divisor_correction;
  const double clip = clip_coefficient(norm, args.max_norm);
  const double multiplier = clip * args.divisor_correction;
  const bool finite = sum_sq - sum_sq == 0.0;
  if (thread == 0) {
    args.control[kSumSq] = sum_sq;
    args.control[kNorm] = norm;
    args.control[kFoundInf] = finite ? 0.0 : 1.0;
    args.control[kClipCoef] = clip;
    args.control[kGradMultiplier] = multiplier;
  }
  if (!args.advance || !finite) return;
  if (args.rule == kAdam) {
    write_scalars<AdamHyper, AdamScalars>(args, multiplier, adam_scalars);
  } else {
    write_scalars<SgdHyper, SgdScalars>(args, multiplier, sgd_scalars);
  }
}

}  // namespace

cudaError_t launch_finalize(const FinalizeArgs& args, cudaStream_t stream) {
  finalize_kernel<<<1, kFinalizeThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace fusedaccum
