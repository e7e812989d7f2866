// csrc/cuda/plan.h as production uses it: lists of tensors in, grids and parameter blocks out. No CUDA needed.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "cuda/plan.h"

namespace py = pybind11;
using namespace fusedaccum;

namespace {

// (address, elements, slot, dtype, first)
using Tensor = std::tuple<uint64_t, int64_t, int64_t, uint32_t, bool>;

std::vector<Launch> planned(const std::vector<Tensor>& tensors, int64_t capacity) {
  std::vector<PlannedTensor> list;
  for (const auto& [address, n_elems, slot, dtype, first] : tensors) {
    list.push_back({reinterpret_cast<const void*>(address), n_elems, slot, dtype, first});
  }
  return plan(list, capacity);
}

template <typename T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// [(blocks, entries the parameter block has room for, its bytes)]
template <typename Args>
py::list launches(const Args& args, const std::vector<Tensor>& tensors) {
  py::list result;
  for (const Launch& launch : planned(tensors, kLarge)) {
    result.append(with_block(args, launch, [&](const auto& block) {
      const auto capacity = sizeof(block.entries) / sizeof(Entry);
      return py::make_tuple(launch.n_blocks, capacity, py::bytes(reinterpret_cast<const char*>(&block), sizeof block));
    }));
  }
  return result;
}

}  // namespace

PYBIND11_MODULE(plan_module, m) {
  m.attr("SMALL") = kSmall;
  m.attr("LARGE") = kLarge;
  m.attr("THREADS") = kThreads;
  m.attr("NO_GRAD") = kNoGrad;
  m.def("accumulate", [](uint64_t acc, uint64_t partials, uint64_t micro_partials, uint64_t table, uint64_t factor,
                         double scale, const std::vector<Tensor>& tensors) {
    return launches(AccumulateArgs{pointer<float>(acc), pointer<double>(partials), pointer<double>(micro_partials),
                                   pointer<const Slot>(table), pointer<const double>(factor), scale, 0},
                    tensors);
  });
  m.def("step", [](uint64_t exp_avg, uint64_t exp_avg_sq, uint64_t extra, uint64_t master, uint64_t acc, uint64_t table,
                   uint64_t scalars, uint64_t control, const std::vector<Tensor>& tensors) {
    return launches(StepArgs{pointer<float>(exp_avg), pointer<float>(exp_avg_sq), pointer<float>(extra),
                             pointer<float>(master), pointer<const float>(acc), pointer<const Slot>(table),
                             pointer<const void>(scalars), pointer<const double>(control), 0},
                    tensors);
  });
  m.def("entries", [](const std::vector<Tensor>& tensors, int64_t capacity) {
    std::vector<std::pair<uint32_t, std::vector<std::tuple<uint64_t, uint32_t, uint32_t, uint32_t, bool>>>> result;
    for (const Launch& launch : planned(tensors, capacity)) {
      result.push_back({launch.n_blocks, {}});
      for (const Entry& e : launch.entries) {
        result.back().second.push_back({e.data, uint32_t{e.end}, uint32_t{e.slot}, uint32_t{e.dtype}, e.first != 0});
      }
    }
    return result;
  });
}
