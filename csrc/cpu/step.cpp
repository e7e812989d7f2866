// adam_step_ and sgd_step_: one pass over accumulator, states, masters and parameters.
#include "../checks.h"
#include "kernels.h"
#include "ops.h"
#include "parallel.h"

namespace fusedaccum {
namespace {

struct StepTask {
  const Slot* slot;
  char* param;
  int64_t param_bytes;
  ParamKind kind;
  Place place;
  float* master;  // at the slot's first element, or null
  float* extra;   // max_exp_avg_sq or momentum_buffer, likewise
};

// Checks what both rules share, before anything is written.
std::vector<StepTask> step_tasks(const char* op, const std::vector<Tensor>& params, const std::vector<int64_t>& slots,
                                 const SlotTable& table, const Tensor& acc, const Tensor& scalars,
                                 const Tensor& control, const std::optional<Tensor>& master, const char* extra_name,
                                 const std::optional<Tensor>& extra, std::vector<int64_t>& n_elems) {
  check_same_length(op, "params", params.size(), "slots", slots.size());
  check_rows({op, "scalars"}, scalars, ScalarType::Float, kScalarColumns);
  check_flat({op, "control"}, control, ScalarType::Double, kControl);
  FA_CHECK(scalars.size(0) >= table.size(), op, ": scalars has ", scalars.size(0), " rows; accepted: at least ",
           table.size());
  float* const master_data = optional_buffer(op, "master", master);
  float* const extra_data = optional_buffer(op, extra_name, extra);
  std::vector<StepTask> tasks;
  OnceEach once(op, table.size());
  tasks.reserve(params.size());
  n_elems.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const Slot& slot = table.at(slots[i], "params", i);
    once.check(slots[i], i);
    table.check_tensor(params[i], slot, "params", i);
    const bool has_master = slot.master_offset_elems >= 0;
    const bool has_extra = slot.extra_offset_elems >= 0;
    const Dtype dtype = stored_dtype(op, "params", i, params[i]);
    FA_CHECK(dtype != kFloat32 || !has_master, op, ": params[", i,
             "] has dtype float32 and a master; accepted: no master");
    if (has_master) check_within(op, "master", master, slot.master_offset_elems, slot.n_elems, i);
    if (has_extra) check_within(op, extra_name, extra, slot.extra_offset_elems, slot.n_elems, i);
    char* const param = static_cast<char*>(params[i].mutable_data_ptr());
    tasks.push_back({&slot, param, dtype == kFloat32 ? 4 : 2, param_kind(dtype, has_master),
                     place_of(acc.numel(), param), has_master ? master_data + slot.master_offset_elems : nullptr,
                     has_extra ? extra_data + slot.extra_offset_elems : nullptr});
    n_elems.push_back(slot.n_elems);
  }
  return tasks;
}

bool is_skipped(const Tensor& control) { return static_cast<const double*>(control.const_data_ptr())[kSkipped] != 0.0; }

}  // namespace

void adam_step_cpu(std::vector<Tensor> params, Tensor exp_avg, Tensor exp_avg_sq, std::optional<Tensor> max_exp_avg_sq,
                   std::optional<Tensor> master, Tensor acc, Tensor table, Tensor scalars, Tensor control,
                   std::vector<int64_t> slots) {
  const char* op = "adam_step_";
  const Kernels& isa = kernels();
  check_flat({op, "acc"}, acc, ScalarType::Float, 0);
  const SlotTable slot_table(op, table, acc.numel(), -1);
  check_flat({op, "exp_avg"}, exp_avg, ScalarType::Float, acc.numel());
  check_flat({op, "exp_avg_sq"}, exp_avg_sq, ScalarType::Float, acc.numel());
  std::vector<int64_t> n_elems;
  const std::vector<StepTask> tasks = step_tasks(op, params, slots, slot_table, acc, scalars, control, master,
                                                 "max_exp_avg_sq", max_exp_avg_sq, n_elems);
  if (is_skipped(control)) return;
  const float* const acc_data = static_cast<const float*>(acc.const_data_ptr());
  float* const exp_avg_data = static_cast<float*>(exp_avg.mutable_data_ptr());
  float* const exp_avg_sq_data = static_cast<float*>(exp_avg_sq.mutable_data_ptr());
  const AdamScalars* const rows = static_cast<const AdamScalars*>(scalars.const_data_ptr());
  for_each_chunk(n_elems, [&](size_t i, int64_t begin, int64_t n) {
    const StepTask& task = tasks[i];
    const AdamScalars& scalar_row = rows[slots[i]];
    const bool amsgrad = scalar_row.amsgrad != 0.0f && task.extra != nullptr;
    const int64_t at = task.slot->offset_elems + begin;
    isa.adam[task.kind][amsgrad][task.place](
        {task.param + begin * task.param_bytes, task.master ? task.master + begin : nullptr, exp_avg_data + at,
         exp_avg_sq_data + at, amsgrad ? task.extra + begin : nullptr, acc_data + at},
        n, scalar_row);
  });
}

void sgd_step_cpu(std::vector<Tensor> params, std::optional<Tensor> momentum_buffer, std::optional<Tensor> master,
                  Tensor acc, Tensor table, Tensor scalars, Tensor control, std::vector<int64_t> slots) {
  const char* op = "sgd_step_";
  const Kernels& isa = kernels();
  check_flat({op, "acc"}, acc, ScalarType::Float, 0);
  const SlotTable slot_table(op, table, acc.numel(), -1);
  std::vector<int64_t> n_elems;
  const std::vector<StepTask> tasks = step_tasks(op, params, slots, slot_table, acc, scalars, control, master,
                                                 "momentum_buffer", momentum_buffer, n_elems);
  if (is_skipped(control)) return;
  const float* const acc_data = static_cast<const float*>(acc.const_data_ptr());
  const SgdScalars* const rows = static_cast<const SgdScalars*>(scalars.const_data_ptr());
  for_each_chunk(n_elems, [&](size_t i, int64_t begin, int64_t n) {
    const StepTask& task = tasks[i];
    const SgdScalars& scalar_row = rows[slots[i]];
    const bool momentum = scalar_row.momentum != 0.0f && task.extra != nullptr;
    isa.sgd[task.kind][momentum][task.place](
        {task.param + begin * task.param_bytes, task.master ? task.master + begin : nullptr,
         momentum ? task.extra + begin : nullptr, acc_data + task.slot->offset_elems + begin},
        n, scalar_row);
  });
}

}  // namespace fusedaccum
