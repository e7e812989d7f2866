// accumulate_ and measure_: gradients into the accumulator, and the sums of squares of its chunks.
#include "../checks.h"
#include "kernels.h"
#include "ops.h"
#include "parallel.h"

namespace fusedaccum {
namespace {

struct AccumulateTask {
  float* acc;
  double* partials;
  const char* grad;
  int64_t grad_bytes;
  double (*kernel)(float*, const void*, int64_t, float);
};

}  // namespace

void accumulate_cpu(Tensor acc, Tensor partials, Tensor table, std::vector<Tensor> grads, std::vector<int64_t> slots,
                    std::vector<int64_t> first, double scale) {
  const char* op = "accumulate_";
  const Kernels& isa = kernels();
  check_flat({op, "partials"}, partials, ScalarType::Double, 0);
  check_flat({op, "acc"}, acc, ScalarType::Float, 0);
  const SlotTable slot_table(op, table, acc.numel(), partials.numel());
  check_same_length(op, "grads", grads.size(), "slots", slots.size());
  check_same_length(op, "grads", grads.size(), "first", first.size());
  float* const acc_data = static_cast<float*>(acc.mutable_data_ptr());
  double* const partials_data = static_cast<double*>(partials.mutable_data_ptr());
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
    tasks.push_back({acc_data + slot.offset_elems, partials_data + slot.first_chunk,
                     static_cast<const char*>(grads[i].const_data_ptr()), dtype == kFloat32 ? 4 : 2,
                     isa.accumulate[dtype][first[i] != 0]});
    n_elems.push_back(slot.n_elems);
  }
  const float scale32 = static_cast<float>(scale);
  for_each_chunk(n_elems, [&](size_t i, int64_t begin, int64_t n) {
    const AccumulateTask& task = tasks[i];
    task.partials[begin / kChunk] = task.kernel(task.acc + begin, task.grad + begin * task.grad_bytes, n, scale32);
  });
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
