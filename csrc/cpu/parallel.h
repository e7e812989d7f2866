// Work over the chunks of a list of tensors, in torch's own thread pool.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../layout.h"

namespace fusedaccum {

// Below this many elements a thread costs more than it saves; torch's own at::internal::GRAIN_SIZE.
constexpr int64_t kGrainElems = 32768;

// Calls work(tensor, begin, n) once for each chunk, begin counted from the tensor's first element. Threads get
// ranges of *elements*, and a chunk goes to the thread whose range holds its first one, so that a list of many tiny
// tensors and few large ones is shared evenly. Which thread does a chunk never changes its result.
template <typename Work>
void for_each_chunk(const std::vector<int64_t>& n_elems, const Work& work) {
  std::vector<int64_t> ends(n_elems.size());
  int64_t total = 0;
  for (size_t i = 0; i < n_elems.size(); ++i) ends[i] = total += n_elems[i];
  torch::stable::parallel_for(0, total, kGrainElems, [&](int64_t begin, int64_t end) {
    size_t tensor = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (; tensor < ends.size(); ++tensor) {
      const int64_t first = ends[tensor] - n_elems[tensor];
      if (first >= end) break;
      const int64_t skipped = begin > first ? (begin - first + kChunk - 1) / kChunk * kChunk : 0;
      for (int64_t at = skipped; at < n_elems[tensor] && first + at < end; at += kChunk) {
        work(tensor, at, std::min(kChunk, n_elems[tensor] - at));
      }
    }
  });
}

}  // namespace fusedaccum
