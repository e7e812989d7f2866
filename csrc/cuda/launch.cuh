// What all kernels share: which chunk a block works on, and the fixed tree over the lanes of a chunk.
#pragma once

#include <cstdint>

#include "plan.h"

namespace fusedaccum {

// A block's chunk: its tensor, and where in the tensor it lies.
struct Chunk {
  Entry entry;
  int64_t begin;   // elements before the chunk, in its tensor
  uint32_t index;  // chunks before it, in its tensor
};

// The first entry whose `end` lies behind this block. All threads take the same turns.
template <typename TheBlock>
__device__ __forceinline__ Chunk find_chunk(const TheBlock& block) {
  const uint32_t at = blockIdx.x;
  uint32_t low = 0, high = static_cast<uint32_t>(block.args.n_entries) - 1;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (block.entries[middle].end <= at) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  Chunk chunk;
  chunk.entry = block.entries[low];
  chunk.index = at - (low == 0 ? 0u : block.entries[low - 1].end);
  chunk.begin = static_cast<int64_t>(chunk.index) * kChunk;
  return chunk;
}

// Sum over the 1024 lanes of a chunk, 8 a thread, in the order of csrc/cpu/loops.h: lane i takes lane i + stride, for
// strides 512, 256, ... 1. Lane 8t + j lives in lanes[j] of thread t, so strides from 8 on pair threads. Valid in
// thread 0; all threads must call it, and may call it again at once.
__device__ __forceinline__ double lane_tree(double (&lanes)[kPerThread], double (*shared)[kThreads / 2]) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int stride = kThreads / 2; stride >= 32; stride /= 2) {
    if (thread >= stride && thread < 2 * stride) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) shared[j][thread - stride] = lanes[j];
    }
    __syncthreads();
    if (thread < stride) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) lanes[j] += shared[j][thread];
    }
    __syncthreads();
  }
  if (thread < 32) {
#pragma unroll
    for (int stride = 16; stride > 0; stride /= 2) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) lanes[j] += __shfl_down_sync(0xffffffffu, lanes[j], stride);
    }
  }
#pragma unroll
  for (int stride = kPerThread / 2; stride > 0; stride /= 2) {
#pragma unroll
    for (int j = 0; j < stride; ++j) lanes[j] += lanes[j + stride];
  }
  return lanes[0];
}

}  // namespace fusedaccum
