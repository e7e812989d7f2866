// From lists of tensors to kernel launches: grids and the parameter blocks that travel with them. Pure host code, no
// CUDA calls: the tests feed the very bytes that a launch would carry to an interpreter.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "../layout.h"

namespace fusedaccum {

// Threads of a block. Each owns 8 of a row's 1024 lanes: 16 bytes of bf16, twice 16 of fp32.
constexpr int kThreads = 128;
constexpr int kPerThread = static_cast<int>(kLanes) / kThreads;

// One tensor of a launch. 16 bytes, so that a launch carries as many as it can.
struct Entry {
  uint64_t data;       // the gradient's or parameter's first element
  uint32_t end;        // chunks of this launch up to and including this tensor's
  uint32_t slot : 28;  // bit fields from the lowest bit up, on every compiler that CUDA accepts
  uint32_t dtype : 2;  // Dtype, or kNoGrad
  uint32_t first : 1;  // accumulate_: the accumulator is stored to, not added to
};
static_assert(sizeof(Entry) == 16, "an entry is what a launch has room for 2,000 of");
constexpr int64_t kMaxSlots = int64_t{1} << 28;

constexpr uint32_t kNoGrad = kDtypes;  // measure_: only the sums of squares

// What the kernels need beside the entries. All pointers are device memory.
struct AccumulateArgs {
  float* acc;
  double* partials;
  double* micro_partials;  // may be null
  const Slot* table;
  const double* factor;  // may be null
  double scale;
  uint64_t n_entries;
};
struct StepArgs {
  float* exp_avg;     // Adam only
  float* exp_avg_sq;  // Adam only
  float* extra;       // max_exp_avg_sq or momentum_buffer, may be null
  float* master;      // may be null
  const float* acc;
  const Slot* table;
  const void* scalars;
  const double* control;
  uint64_t n_entries;
};

// The parameter block of a kernel, passed by value. CUDA takes 32,764 bytes from 12.1 on (sm_70 and newer), 4,096
// before. The launch copies all of it, used or not, so few tensors travel in a small one.
template <typename Args, int kCapacity>
struct Block {
  Args args;
  Entry entries[kCapacity];
};
constexpr int kSmall = 120;
#if !defined(CUDART_VERSION) || CUDART_VERSION >= 12010
constexpr int kLarge = 2040;
#else
constexpr int kLarge = 240;
#endif
static_assert(sizeof(Block<StepArgs, kLarge>) <= 32764, "more than a kernel's parameters may take");
static_assert(sizeof(Block<StepArgs, kSmall>) <= 4096, "more than a kernel's parameters may take before CUDA 12.1");

// One launch: the grid and its entries. One block of threads for each chunk.
struct Launch {
  uint32_t n_blocks;
  std::vector<Entry> entries;
};

struct PlannedTensor {
  const void* data;
  int64_t n_elems;
  int64_t slot;
  uint32_t dtype;
  bool first;
};

// Empty tensors are left out. A launch ends where its block is full, or where its grid would exceed what a grid's first
// dimension holds; a tensor of more chunks than that (2^46 elements) does not exist.
inline std::vector<Launch> plan(const std::vector<PlannedTensor>& tensors, int64_t capacity = kLarge) {
  constexpr int64_t kMaxBlocks = 0x7fffffff;
  std::vector<Launch> launches;
  for (const PlannedTensor& tensor : tensors) {
    const int64_t chunks = n_chunks(tensor.n_elems);
    if (chunks == 0) continue;
    if (chunks > kMaxBlocks) throw std::runtime_error("a tensor of more than 2^46 elements");
    if (tensor.slot >= kMaxSlots) throw std::runtime_error("more than 2^28 slots");
    const bool full = launches.empty() || static_cast<int64_t>(launches.back().entries.size()) == capacity ||
                      launches.back().n_blocks + chunks > kMaxBlocks;
    if (full) launches.push_back({0, {}});
    Launch& launch = launches.back();
    launch.n_blocks += static_cast<uint32_t>(chunks);
    launch.entries.push_back({reinterpret_cast<uint64_t>(tensor.data), launch.n_blocks,
                              static_cast<uint32_t>(tensor.slot), tensor.dtype, tensor.first ? 1u : 0u});
  }
  return launches;
}

// The bytes that a launch carries.
template <typename Args, int kCapacity>
Block<Args, kCapacity> block_of(Args args, const Launch& launch) {
  Block<Args, kCapacity> block;
  args.n_entries = static_cast<decltype(args.n_entries)>(launch.entries.size());
  block.args = args;
  std::memcpy(block.entries, launch.entries.data(), launch.entries.size() * sizeof(Entry));
  std::memset(static_cast<void*>(block.entries + launch.entries.size()), 0,
              (kCapacity - launch.entries.size()) * sizeof(Entry));
  return block;
}

// Calls go(block) with the smaller of the two blocks that holds the launch.
template <typename Args, typename Go>
auto with_block(const Args& args, const Launch& launch, const Go& go) {
  if (launch.entries.size() <= kSmall) return go(block_of<Args, kSmall>(args, launch));
  return go(block_of<Args, kLarge>(args, launch));
}

}  // namespace fusedaccum
