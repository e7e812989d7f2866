// adam_step_ and sgd_step_: one pass over accumulator, states, masters and parameters, 8 elements a thread and row.
#include "../math.h"
#include "kernels.h"
#include "launch.cuh"
#include "vec.cuh"

namespace fusedaccum {
namespace {

// One block's chunk: where its arrays begin (null where there is none) and how long it is. It lies in shared memory, as
// do the rule's scalars: in registers they would be spilled, since a division and a square root are calls.
struct StepChunk {
  void* param;
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  float* extra;
  const float* acc;
  int n;
  ParamKind kind;
  bool aligned;
};

__device__ __forceinline__ StepChunk place(const StepArgs& args, const Chunk& chunk) {
  const Slot& slot = args.table[chunk.entry.slot];
  const int64_t left = slot.n_elems - chunk.begin;
  const int64_t at = slot.offset_elems + chunk.begin;
  StepChunk here;
  here.param = reinterpret_cast<char*>(chunk.entry.data) + chunk.begin * (chunk.entry.dtype == kFloat32 ? 4 : 2);
  const bool has_master = slot.master_offset_elems >= 0;
  here.kind = param_kind(chunk.entry.dtype, has_master);
  here.master = has_master ? args.master + slot.master_offset_elems + chunk.begin : nullptr;
  here.exp_avg = args.exp_avg != nullptr ? args.exp_avg + at : nullptr;
  here.exp_avg_sq = args.exp_avg_sq != nullptr ? args.exp_avg_sq + at : nullptr;
  here.extra = slot.extra_offset_elems >= 0 ? args.extra + slot.extra_offset_elems + chunk.begin : nullptr;
  here.acc = args.acc + at;
  here.n = static_cast<int>(left < kChunk ? left : kChunk);
  // Offsets are multiples of 64 elements, so a misaligned base is the exception, and a parameter that is a view.
  here.aligned = is_aligned(here.param) && is_aligned(here.master) && is_aligned(here.exp_avg) &&
                 is_aligned(here.exp_avg_sq) && is_aligned(here.extra) && is_aligned(here.acc);
  return here;
}

// A rule does `row`, 8 elements of one thread, and `one`. The fp32 arrays come in two halves of 16 bytes, so that no
// more of them than one half is in registers; the 16-bit parameter is one access of 16 bytes for both.
template <typename Param, bool kMaster, bool kAmsgrad>
struct AdamStep {
  const AdamScalars& c;
  const StepChunk& at;

  template <bool kAligned>
  __device__ __forceinline__ void row(int i) const {
    Param* const param = static_cast<Param*>(at.param);
    float value[8];
    if (!kMaster) load8<kAligned, true>(value, param + i);
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
      float grad[4], first[4], second[4], largest[4];
      load4<kAligned, true>(grad, at.acc + i + half);
      load4<kAligned, true>(first, at.exp_avg + i + half);
      load4<kAligned, true>(second, at.exp_avg_sq + i + half);
      if (kAmsgrad) load4<kAligned, true>(largest, at.extra + i + half);
      if (kMaster) load4<kAligned, true>(value + half, at.master + i + half);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        AdamState s = {value[half + j], first[j], second[j], kAmsgrad ? largest[j] : 0.0f};
        s = adam_update<kAmsgrad>(s, grad[j], c);
        value[half + j] = s.param, first[j] = s.exp_avg, second[j] = s.exp_avg_sq;
        if (kAmsgrad) largest[j] = s.max_exp_avg_sq;
      }
      store4<kAligned, true>(at.exp_avg + i + half, first);
      store4<kAligned, true>(at.exp_avg_sq + i + half, second);
      if (kAmsgrad) store4<kAligned, true>(at.extra + i + half, largest);
      if (kMaster) store4<kAligned, true>(at.master + i + half, value + half);
    }
    store8<kAligned, true>(param + i, value);
  }

  __device__ __forceinline__ void one(int i) const {
    Param* const param = static_cast<Param*>(at.param);
    AdamState s = {kMaster ? at.master[i] : to_float(param[i]), at.exp_avg[i], at.exp_avg_sq[i],
                   kAmsgrad ? at.extra[i] : 0.0f};
    s = adam_update<kAmsgrad>(s, at.acc[i], c);
    at.exp_avg[i] = s.exp_avg;
    at.exp_avg_sq[i] = s.exp_avg_sq;
    if (kAmsgrad) at.extra[i] = s.max_exp_avg_sq;
    if (kMaster) at.master[i] = s.param;
    round_to(param[i], s.param);
  }
};

template <typename Param, bool kMaster, bool kMomentum>
struct SgdStep {
  const SgdScalars& c;
  const StepChunk& at;

  template <bool kAligned>
  __device__ __forceinline__ void row(int i) const {
    Param* const param = static_cast<Param*>(at.param);
    float value[8];
    if (!kMaster) load8<kAligned, true>(value, param + i);
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
      float grad[4], buffer[4];
      load4<kAligned, true>(grad, at.acc + i + half);
      if (kMomentum) load4<kAligned, true>(buffer, at.extra + i + half);
      if (kMaster) load4<kAligned, true>(value + half, at.master + i + half);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        SgdState s = {value[half + j], kMomentum ? buffer[j] : 0.0f};
        s = sgd_update<kMomentum>(s, grad[j], c);
        value[half + j] = s.param;
        if (kMomentum) buffer[j] = s.momentum_buffer;
      }
      if (kMomentum) store4<kAligned, true>(at.extra + i + half, buffer);
      if (kMaster) store4<kAligned, true>(at.master + i + half, value + half);
    }
    store8<kAligned, true>(param + i, value);
  }

  __device__ __forceinline__ void one(int i) const {
    Param* const param = static_cast<Param*>(at.param);
    SgdState s = {kMaster ? at.master[i] : to_float(param[i]), kMomentum ? at.extra[i] : 0.0f};
    s = sgd_update<kMomentum>(s, at.acc[i], c);
    if (kMomentum) at.extra[i] = s.momentum_buffer;
    if (kMaster) at.master[i] = s.param;
    round_to(param[i], s.param);
  }
};

template <bool kAligned, typename Rule>
__device__ __forceinline__ void step_rows(const Rule& rule) {
  const int first = static_cast<int>(threadIdx.x) * kPerThread;
  const int full = rule.at.n / kLanes * kLanes;
#pragma unroll 1
  for (int row = 0; row < full; row += kLanes) rule.template row<kAligned>(row + first);
#pragma unroll 1
  for (int j = 0; j < kPerThread; ++j) {
    if (full + first + j < rule.at.n) rule.one(full + first + j);
  }
}

template <typename Rule>
__device__ __forceinline__ void step_chunk(const Rule& rule) {
  if (rule.at.aligned) {
    step_rows<true>(rule);
  } else {
    step_rows<false>(rule);
  }
}

template <template <typename, bool, bool> class Rule, bool kExtra, typename Scalars>
__device__ __forceinline__ void step_kind(const Scalars& c, const StepChunk& at) {
  switch (at.kind) {
    case kParamFloat32: step_chunk(Rule<float, false, kExtra>{c, at}); break;
    case kParamBFloat16Master: step_chunk(Rule<bf16, true, kExtra>{c, at}); break;
    case kParamFloat16Master: step_chunk(Rule<fp16, true, kExtra>{c, at}); break;
    case kParamBFloat16: step_chunk(Rule<bf16, false, kExtra>{c, at}); break;
    default: step_chunk(Rule<fp16, false, kExtra>{c, at}); break;
  }
}

// Fills the shared chunk and scalars.
template <typename TheBlock, typename Scalars>
__device__ __forceinline__ void start(const TheBlock& block, Scalars& c, StepChunk& at) {
  const Chunk chunk = find_chunk(block);
  if (threadIdx.x == 0) {
    at = place(block.args, chunk);
    c = static_cast<const Scalars*>(block.args.scalars)[chunk.entry.slot];
  }
  __syncthreads();
}

// 8 blocks of 128 threads fill half of an sm_90 multiprocessor: at most 64 registers a thread.
template <int kCapacity>
__global__ void __launch_bounds__(kThreads, 8) adam_kernel(const __grid_constant__ Block<StepArgs, kCapacity> block) {
  __shared__ AdamScalars c;
  __shared__ StepChunk at;
  if (block.args.control[kSkipped] != 0.0) return;
  start(block, c, at);
  if (at.extra != nullptr && c.amsgrad != 0.0f) {
    step_kind<AdamStep, true>(c, at);
  } else {
    step_kind<AdamStep, false>(c, at);
  }
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads, 8) sgd_kernel(const __grid_constant__ Block<StepArgs, kCapacity> block) {
  __shared__ SgdScalars c;
  __shared__ StepChunk at;
  if (block.args.control[kSkipped] != 0.0) return;
  start(block, c, at);
  if (at.extra != nullptr && c.momentum != 0.0f) {
    step_kind<SgdStep, true>(c, at);
  } else {
    step_kind<SgdStep, false>(c, at);
  }
}

}  // namespace

cudaError_t launch_adam(const StepArgs& args, const Launch& launch, cudaStream_t stream) {
  return with_block(args, launch, [&](const auto& block) {
    adam_kernel<<<launch.n_blocks, kThreads, 0, stream>>>(block);
    return cudaGetLastError();
  });
}

cudaError_t launch_sgd(const StepArgs& args, const Launch& launch, cudaStream_t stream) {
  return with_block(args, launch, [&](const auto& block) {
    sgd_kernel<<<launch.n_blocks, kThreads, 0, stream>>>(block);
    return cudaGetLastError();
  });
}

}  // namespace fusedaccum
