// accumulate_ and measure_: gradients into the accumulator, and the sums of squares of its chunks.
#include <algorithm>

#include "../checks.h"
#include "../math.h"
#include "kernels.h"
#include "ops.h"
#include "parallel.h"

namespace fusedaccum {
namespace {

struct AccumulateTask {
  float* acc;
  double* partials;
  double* micro_partials;  // null: not kept
  const char* grad;
  int64_t grad_bytes;
  bool first;
  double (*kernel)(float*, const void*, int64_t, float, double*);
};

Add kind_of_add(bool is_first, bool has_micro) {
  if (is_first) return kAddFirst;
  return has_micro ? kAddLaterWithMicro : kAddLater;
}

void add_chunk(const AccumulateTask& task, int64_t begin, int64_t n, float scale) {
  const int64_t chunk = begin / kChunk;
  double micro = 0.0;
  const double sum = task.kernel(task.acc + begin, task.grad + begin * task.grad_bytes, n, scale, &micro);
  task.partials[chunk] = sum;
  if (task.micro_partials == nullptr) return;
  task.micro_partials[chunk] = task.first ? sum : task.micro_partials[chunk] + micro;
}

// A scale of zero: see effective_scale.
void add_nothing(const AccumulateTask& task, int64_t begin, int64_t n) {
  if (!task.first) return;
  std::fill_n(task.acc + begin, n, 0.0f);
  task.partials[begin / kChunk] = 0.0;
  if (task.micro_partials != nullptr) task.micro_partials[begin / kChunk] = 0.0;
}

}  // namespace

void accumulate_cpu(Tensor acc, Tensor partials, std::optional<Tensor> micro_partials, Tensor table,
                    std::vector<Tensor> grads, std::vector<int64_t> slots, std::vector<int64_t> first, double scale,
                    std::optional<Tensor> factor) {
  const char* op = "accumulate_";
  const Kernels& isa = kernels();
  check_flat({op, "partials"}, partials, ScalarType::Double, 0);
  check_flat({op, "acc"}, acc, ScalarType::Float, 0);
  check_accumulate(op, partials, micro_partials, factor);
  const SlotTable slot_table(op, table, acc.numel(), partials.numel());
  check_same_length(op, "grads", grads.size(), "slots", slots.size());
  check_same_length(op, "grads", grads.size(), "first", first.size());
  float* const acc_data = static_cast<float*>(acc.mutable_data_ptr());
  double* const partials_data = static_cast<double*>(partials.mutable_data_ptr());
  double* const micro_data = optional_mutable_doubles(micro_partials);
  std::vector<AccumulateTask> tasks;
  std::vector<int64_t> n_elems;
  OnceEach once(op, slot_table.size());
  tasks.reserve(grads.size());
  n_elems.reserve(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    const Dtype dtype = stored_dtype(op, "grads", i, grads[i]);
    const Slot& slot = slot_table.at(slots[i], "grads", i);
    once.check(slots[i], i);
    slot_table.check_tensor(grads[i], slot, "grads", i);
    const bool is_first = first[i] != 0;
    float* const slot_acc = acc_data + slot.offset_elems;
    const Place place = place_of(acc.numel(), slot_acc);
    tasks.push_back({slot_acc, partials_data + slot.first_chunk,
                     micro_data != nullptr ? micro_data + slot.first_chunk : nullptr,
                     static_cast<const char*>(grads[i].const_data_ptr()), dtype == kFloat32 ? 4 : 2, is_first,
                     isa.accumulate[dtype][kind_of_add(is_first, micro_data != nullptr)][place]});
    n_elems.push_back(slot.n_elems);
  }
  const float scale32 = effective_scale(scale, optional_doubles(factor));
  if (scale32 == 0.0f) {
    for_each_chunk(n_elems, [&](size_t i, int64_t begin, int64_t n) { add_nothing(tasks[i], begin, n); });
  } else {
    for_each_chunk(n_elems, [&](size_t i, int64_t begin, int64_t n) { add_chunk(tasks[i], begin, n, scale32); });
  }
}

void measure_cpu(Tensor partials, Tensor acc, Tensor table, std::vector<int64_t> slots, std::vector<int64_t> n_elems) {
  const char* op = "measure_";
  const Kernels& isa = kernels();
  check_flat({op, "partials"}, partials, ScalarType::Double, 0);
  check_flat({op, "acc"}, acc, ScalarType::Float, 0);
  const SlotTable slot_table(op, table, acc.numel(), partials.numel());
  const float* const acc_data = static_cast<const float*>(acc.const_data_ptr());
  double* const partials_data = static_cast<double*>(partials.mutable_data_ptr());
  check_same_length(op, "slots", slots.size(), "n_elems", n_elems.size());
  OnceEach once(op, slot_table.size());
  std::vector<const Slot*> rows;
  for (size_t i = 0; i < slots.size(); ++i) {
    rows.push_back(&slot_table.at(slots[i], "slots", i));
    once.check(slots[i], i);
    FA_CHECK(n_elems[i] == rows[i]->n_elems, op, ": n_elems[", i, "] is ", n_elems[i], "; accepted: the ",
             rows[i]->n_elems, " of its slot");
  }
  for_each_chunk(n_elems, [&](size_t i, int64_t begin, int64_t n) {
    partials_data[rows[i]->first_chunk + begin / kChunk] = isa.sum_sq(acc_data + rows[i]->offset_elems + begin, n);
  });
}

}  // namespace fusedaccum
