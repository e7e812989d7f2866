// accumulate_ and measure_: gradients into the accumulator, and the sums of squares of its chunks.
//
// One block of threads works on one chunk, 1024 elements (a row) at a time, 8 a thread. Bytes an element: the gradient
// read, the accumulator read and written; a first add does not read it. Statistics (kMicro) move none more, but 16
// bytes a chunk; a first add has nothing to compute for them either.
#include "../math.h"
#include "kernels.h"
#include "launch.cuh"
#include "vec.cuh"

namespace fusedaccum {
namespace {

// Squares of what a thread has seen, one sum for each of its lanes; and of what it added, where kMicro.
struct Lanes {
  float sums[kPerThread];
  float micro[kPerThread];
};

// sums[i % 8] += value, without an index into registers, which would move them to local memory: the other lanes add
// zero, which changes nothing.
template <typename Real>
__device__ __forceinline__ void add_to_lane(Real (&sums)[kPerThread], int i, Real value) {
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) sums[j] += i % kPerThread == j ? value : Real(0);
}

template <typename Grad, bool kFirst, bool kMicro, bool kAligned>
__device__ __forceinline__ void accumulate_row(float* acc, const Grad* grad, float scale, Lanes& lanes) {
  float values[8];
  load8<kAligned>(values, grad);
#pragma unroll
  for (int half = 0; half < 8; half += 4) {
    float result[4];
    if (!kFirst) load4<kAligned>(result, acc + half);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float value = values[half + j];
      result[j] = kFirst ? scaled(value, scale) : accumulated(result[j], value, scale);
      lanes.sums[half + j] += result[j] * result[j];
      if (kMicro && !kFirst) lanes.micro[half + j] += scaled(value, scale) * scaled(value, scale);
    }
    store4<kAligned>(acc + half, result);
  }
}

template <typename Grad, bool kFirst, bool kMicro, bool kAligned>
__device__ __forceinline__ void accumulate_chunk(float* acc, const Grad* grad, int n, float scale, Lanes& lanes) {
  const int first_lane = static_cast<int>(threadIdx.x) * kPerThread;
  const int full = n / kLanes * kLanes;
  // Not unrolled: two rows do not fit into 40 registers, and 48 bytes in flight for each of a full multiprocessor's
  // 1,536 threads should do (an estimate: 4.8 TB/s over the 132 of an H200 at 700 ns are 25 KB each; these are 74).
#pragma unroll 1
  for (int row = 0; row < full; row += kLanes) {
    accumulate_row<Grad, kFirst, kMicro, kAligned>(acc + row + first_lane, grad + row + first_lane, scale, lanes);
  }
  const int end = n < full + first_lane + kPerThread ? n : full + first_lane + kPerThread;
#pragma unroll 1
  for (int i = full + first_lane; i < end; ++i) {
    const float value = to_float(grad[i]);
    const float result = kFirst ? scaled(value, scale) : accumulated(acc[i], value, scale);
    acc[i] = result;
    add_to_lane(lanes.sums, i, result * result);
    if (kMicro && !kFirst) add_to_lane(lanes.micro, i, scaled(value, scale) * scaled(value, scale));
  }
}

template <typename Grad, bool kMicro>
__device__ __forceinline__ void accumulate_any(float* acc, const void* data, int64_t begin, int n, float scale,
                                               bool first, Lanes& lanes) {
  const Grad* grad = static_cast<const Grad*>(data) + begin;
  const bool aligned = is_aligned(acc) && is_aligned(grad);
  if (first && aligned) {
    accumulate_chunk<Grad, true, kMicro, true>(acc, grad, n, scale, lanes);
  } else if (first) {
    accumulate_chunk<Grad, true, kMicro, false>(acc, grad, n, scale, lanes);
  } else if (aligned) {
    accumulate_chunk<Grad, false, kMicro, true>(acc, grad, n, scale, lanes);
  } else {
    accumulate_chunk<Grad, false, kMicro, false>(acc, grad, n, scale, lanes);
  }
}

// Squares of the accumulator as it is, in fp32 for measure_ and in fp64 for a chunk whose fp32 sum overflowed. A thread
// reads only elements that it wrote itself, so the second reading needs no barrier.
template <typename Real>
__device__ __forceinline__ void square_chunk(const float* acc, int n, Real (&sums)[kPerThread]) {
  const int first_lane = static_cast<int>(threadIdx.x) * kPerThread;
#pragma unroll 1
  for (int row = first_lane; row < n; row += kLanes) {
    const int end = n < row + kPerThread ? n : row + kPerThread;
#pragma unroll 1
    for (int i = row; i < end; ++i) {
      add_to_lane(sums, i, static_cast<Real>(acc[i]) * static_cast<Real>(acc[i]));
    }
  }
}

// Rare, so in narrow accesses: an empty micro-batch is a window's first.
__device__ __forceinline__ void zero_chunk(float* acc, int n) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) acc[i] = 0.0f;
}

__device__ __forceinline__ double sum_of_lanes(const float (&lanes)[kPerThread], double (*shared)[kThreads / 2]) {
  double wide[kPerThread];
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) wide[j] = static_cast<double>(lanes[j]);
  return lane_tree(wide, shared);
}

// What is needed after the row loop. It lies in shared memory for that time: registers are short there.
struct Place {
  int64_t partial;
  int64_t offset_elems;
  int n;
};

// 12 blocks of 128 threads fill 75% of an sm_90 multiprocessor: at most 40 registers a thread.
// With statistics a thread has 8 sums more: 10 blocks, 62.5%, and at most 48 registers.
template <int kCapacity, bool kMicro>
__global__ void __launch_bounds__(kThreads, kMicro ? 10 : 12)
    accumulate_kernel(const __grid_constant__ Block<AccumulateArgs, kCapacity> block) {
  __shared__ double shared[kPerThread][kThreads / 2];
  __shared__ double total;
  __shared__ Place place;
  const Chunk chunk = find_chunk(block);
  const Slot* const slot = block.args.table + chunk.entry.slot;
  const int64_t left = slot->n_elems - chunk.begin;
  const int n = static_cast<int>(left < kChunk ? left : kChunk);
  const int64_t offset_elems = slot->offset_elems + chunk.begin;
  float* const acc = block.args.acc + offset_elems;
  const void* const data = reinterpret_cast<const void*>(chunk.entry.data);
  const bool first = chunk.entry.first != 0;
  const float scale = effective_scale(block.args.scale, block.args.factor);
  if (scale == 0.0f && !first) return;
  if (threadIdx.x == 0) place = {slot->first_chunk + chunk.index, offset_elems, n};

  Lanes lanes = {};
  if (scale == 0.0f) {
    zero_chunk(acc, n);
  } else {
    switch (chunk.entry.dtype) {
      case kFloat32: accumulate_any<float, kMicro>(acc, data, chunk.begin, n, scale, first, lanes); break;
      case kBFloat16: accumulate_any<bf16, kMicro>(acc, data, chunk.begin, n, scale, first, lanes); break;
      case kFloat16: accumulate_any<fp16, kMicro>(acc, data, chunk.begin, n, scale, first, lanes); break;
      default: square_chunk(acc, n, lanes.sums); break;
    }
  }
  if (kMicro && !first) {
    const double micro = sum_of_lanes(lanes.micro, shared);
    if (threadIdx.x == 0) block.args.micro_partials[place.partial] += micro;
  }
  double sum = sum_of_lanes(lanes.sums, shared);
  if (threadIdx.x == 0) total = sum;
  __syncthreads();
  if (total - total != 0.0) {  // overflowed in fp32, or not finite at all
    double wide[kPerThread] = {};
    square_chunk(block.args.acc + place.offset_elems, place.n, wide);
    sum = lane_tree(wide, shared);
  }
  if (threadIdx.x == 0) {
    block.args.partials[place.partial] = sum;
    if (kMicro && first) block.args.micro_partials[place.partial] = sum;
  }
}

template <bool kMicro, int kCapacity>
void launch_kernel(const Block<AccumulateArgs, kCapacity>& block, const Launch& launch, cudaStream_t stream) {
  accumulate_kernel<kCapacity, kMicro><<<launch.n_blocks, kThreads, 0, stream>>>(block);
}

}  // namespace

cudaError_t launch_accumulate(const AccumulateArgs& args, const Launch& launch, cudaStream_t stream) {
  return with_block(args, launch, [&](const auto& block) {
    if (args.micro_partials == nullptr) {
      launch_kernel<false>(block, launch, stream);
    } else {
      launch_kernel<true>(block, launch, stream);
    }
    return cudaGetLastError();
  });
}

}  // namespace fusedaccum
