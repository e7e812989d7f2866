// finalize_: from the partials to the control block, the window and the scalars of every slot, in one block of threads.
#include "../math.h"
#include "kernels.h"

namespace fusedaccum {
namespace {

constexpr int kFinalizeThreads = static_cast<int>(kLanes);

// Sums over the active chunks: of the accumulator, and of the micro-batches.
struct Sums {
  double acc, micro;
};

// A thread is a lane of the fixed tree over chunks: it adds the chunks congruent to its number, in order. Slots lie in
// chunk order, so the slot of the next one is found by walking on.
__device__ __forceinline__ Sums lane_sums(const FinalizeArgs& args) {
  Sums sums = {};
  int64_t slot = 0;
  for (int64_t chunk = threadIdx.x;; chunk += kLanes) {
    while (slot < args.n_slots && chunk >= args.table[slot].first_chunk + n_chunks(args.table[slot].n_elems)) ++slot;
    if (slot == args.n_slots) return sums;
    if (!args.active[slot]) continue;
    sums.acc += args.partials[chunk];
    if (args.has_micro) sums.micro += args.micro_partials[chunk];
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
  __shared__ Sums lanes[kFinalizeThreads];
  __shared__ double multiplier;
  __shared__ bool skipped;
  const int thread = static_cast<int>(threadIdx.x);
  lanes[thread] = lane_sums(args);
  __syncthreads();
#pragma unroll 1
  for (int stride = kFinalizeThreads / 2; stride > 0; stride /= 2) {
    if (thread < stride) {
      lanes[thread].acc += lanes[thread + stride].acc;
      lanes[thread].micro += lanes[thread + stride].micro;
    }
    __syncthreads();
  }
  if (thread == 0) {  // alone: the others would read a window that has been advanced already
    Sums sums = lanes[0];
    if (args.extra != nullptr) {
      sums.acc += args.extra[0];
      sums.micro += args.extra[1];
    }
    const Boundary b =
        boundary(args.window, sums.acc, sums.micro, args.numerator, args.weight, args.weight_sq, args.max_norm);
    write_control(args.control, b, sums.acc, sums.micro);
    if (args.advance) advance_window(args.window, b, args.weight, args.weight_sq, args.has_micro);
    multiplier = b.grad_multiplier;
    skipped = b.skipped != 0.0;
  }
  __syncthreads();
  if (!args.advance || skipped) return;
  if (args.rule == kAdam) {
    write_scalars<AdamHyper, AdamScalars>(args, multiplier, adam_scalars);
  } else if (args.rule == kSgd) {
    write_scalars<SgdHyper, SgdScalars>(args, multiplier, sgd_scalars);
  }
}

}  // namespace

cudaError_t launch_finalize(const FinalizeArgs& args, cudaStream_t stream) {
  finalize_kernel<<<1, kFinalizeThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace fusedaccum
