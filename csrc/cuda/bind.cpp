// Registers the CUDA ops with torch's dispatcher: checks, plans, launches on the caller's stream. Nothing waits for the
// device. The schemas are defined in Python (fusedaccum/ops.py), which loads this library with torch.ops.load_library.
//
// Unlike on the CPU, `table` is device memory that the host cannot read: that its rows fit the buffers is the caller's
// word (Arena's), and only what the host sees of the tensors is checked.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "../checks.h"
#include "kernels.h"

namespace fusedaccum {
namespace {

void check_launch(const char* op, cudaError_t error) {
  FA_CHECK(error == cudaSuccess, op, ": the launch failed: ", cudaGetErrorString(error), " (", cudaGetErrorName(error),
           "). If the device is newer or older than the build, rebuild with TORCH_CUDA_ARCH_LIST naming it; "
           "`python -m fusedaccum doctor` shows what was built");
}

// All that is asked of torch's CUDA library. It is not linked to, so that this library loads beside a torch without
// CUDA; and it is no weak symbol, because Python loads torch with RTLD_LOCAL, where a weak symbol stays null.
using CurrentStream = AOTITorchError (*)(int32_t device_index, void** stream);

CurrentStream find_current_stream() {
  void* const torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<CurrentStream>(
      dlsym(torch_cuda != nullptr ? torch_cuda : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
}

cudaStream_t current_stream(const char* op, const Tensor& on) {
  static const CurrentStream current = find_current_stream();
  void* stream = nullptr;
  FA_CHECK(current != nullptr, op, ": this torch was built without CUDA");
  STABLE_TORCH_ERROR_CODE_CHECK(current(on.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

void check_device(const OpArgument& arg, const Tensor& tensor, const Tensor& acc) {
  FA_CHECK(tensor.is_cuda() && tensor.get_device_index() == acc.get_device_index(), arg, " is on ",
           tensor.is_cuda() ? "cuda:" : "another kind of device", tensor.is_cuda() ? tensor.get_device_index() : 0,
           "; accepted: cuda:", acc.get_device_index(), ", as the first argument");
}

void check_device(const OpArgument& arg, const std::optional<Tensor>& tensor, const Tensor& acc) {
  if (tensor.has_value()) check_device(arg, *tensor, acc);
}

void check_table(const char* op, const Tensor& table, const Tensor& acc) {
  check_rows({op, "table"}, table, ScalarType::Long, kSlotColumns);
  check_device({op, "table"}, table, acc);
}

PlannedTensor planned(const char* op, const char* list, size_t i, const Tensor& tensor, int64_t slot, bool first,
                      const Tensor& table, const Tensor& acc, OnceEach& once) {
  FA_CHECK(slot >= 0 && slot < table.size(0), op, ": slots[", i, "] is ", slot, "; accepted: 0 to ", table.size(0) - 1);
  once.check(slot, i);
  const Dtype dtype = stored_dtype(op, list, i, tensor);
  FA_CHECK(tensor.is_cuda() && tensor.get_device_index() == acc.get_device_index(), op, ": ", list, "[", i,
           "] is on another device; accepted: cuda:", acc.get_device_index(), ", the device of acc");
  FA_CHECK(is_dense(tensor), op, ": ", list, "[", i,
           "] has gaps or overlaps in memory; accepted: dense, in the order of its slot");
  return {tensor.const_data_ptr(), tensor.numel(), slot, dtype, first};
}

AccumulateArgs accumulate_args(const char* op, const Tensor& acc, const Tensor& partials,
                               const std::optional<Tensor>& micro_partials, const Tensor& table, double scale,
                               const std::optional<Tensor>& factor) {
  check_flat({op, "acc"}, acc, ScalarType::Float, 0);
  check_flat({op, "partials"}, partials, ScalarType::Double, 0);
  check_accumulate(op, partials, micro_partials, factor);
  check_device({op, "partials"}, partials, acc);
  check_device({op, "micro_partials"}, micro_partials, acc);
  check_device({op, "factor"}, factor, acc);
  check_table(op, table, acc);
  return {static_cast<float*>(acc.mutable_data_ptr()),
          static_cast<double*>(partials.mutable_data_ptr()),
          optional_mutable_doubles(micro_partials),
          static_cast<const Slot*>(table.const_data_ptr()),
          optional_doubles(factor),
          scale,
          0};
}

template <typename Args, typename LaunchOne>
void launch_all(const char* op, const Tensor& acc, const Args& args, const std::vector<PlannedTensor>& tensors,
                const LaunchOne& launch_one) {
  const torch::stable::accelerator::DeviceGuard guard(acc.get_device_index());
  const cudaStream_t stream = current_stream(op, acc);
  for (const Launch& launch : plan(tensors)) check_launch(op, launch_one(args, launch, stream));
}

}  // namespace

void accumulate_cuda(Tensor acc, Tensor partials, std::optional<Tensor> micro_partials, Tensor table,
                     std::vector<Tensor> grads, std::vector<int64_t> slots, std::vector<int64_t> first, double scale,
                     std::optional<Tensor> factor) {
  const char* op = "accumulate_";
  const AccumulateArgs args = accumulate_args(op, acc, partials, micro_partials, table, scale, factor);
  check_same_length(op, "grads", grads.size(), "slots", slots.size());
  check_same_length(op, "grads", grads.size(), "first", first.size());
  std::vector<PlannedTensor> tensors;
  OnceEach once(op, table.size(0));
  tensors.reserve(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    tensors.push_back(planned(op, "grads", i, grads[i], slots[i], first[i] != 0, table, acc, once));
  }
  launch_all(op, acc, args, tensors, launch_accumulate);
}

void measure_cuda(Tensor partials, Tensor acc, Tensor table, std::vector<int64_t> slots, std::vector<int64_t> n_elems) {
  const char* op = "measure_";
  const AccumulateArgs args = accumulate_args(op, acc, partials, std::nullopt, table, 1.0, std::nullopt);
  check_same_length(op, "slots", slots.size(), "n_elems", n_elems.size());
  std::vector<PlannedTensor> tensors;
  OnceEach once(op, table.size(0));
  for (size_t i = 0; i < slots.size(); ++i) {
    FA_CHECK(slots[i] >= 0 && slots[i] < table.size(0), op, ": slots[", i, "] is ", slots[i], "; accepted: 0 to ",
             table.size(0) - 1);
    once.check(slots[i], i);
    tensors.push_back({nullptr, n_elems[i], slots[i], kNoGrad, false});
  }
  launch_all(op, acc, args, tensors, launch_accumulate);
}

void finalize_cuda(Tensor control, Tensor scalars, Tensor steps, Tensor window, Tensor partials,
                   std::optional<Tensor> micro_partials, Tensor table, Tensor hyper, Tensor active, int64_t rule,
                   double numerator, double weight, double weight_sq, double max_norm, std::optional<Tensor> extra,
                   bool advance) {
  const char* op = "finalize_";
  check_finalize(op, control, scalars, steps, window, partials, micro_partials, table, hyper, active, rule, extra);
  check_device({op, "scalars"}, scalars, control);
  check_device({op, "steps"}, steps, control);
  check_device({op, "window"}, window, control);
  check_device({op, "partials"}, partials, control);
  check_device({op, "micro_partials"}, micro_partials, control);
  check_device({op, "table"}, table, control);
  check_device({op, "hyper"}, hyper, control);
  check_device({op, "active"}, active, control);
  check_device({op, "extra"}, extra, control);
  FinalizeArgs args;
  args.control = static_cast<double*>(control.mutable_data_ptr());
  args.scalars = scalars.mutable_data_ptr();
  args.steps = static_cast<float*>(steps.mutable_data_ptr());
  args.window = static_cast<double*>(window.mutable_data_ptr());
  args.partials = static_cast<const double*>(partials.const_data_ptr());
  args.micro_partials = optional_doubles(micro_partials);
  args.table = static_cast<const Slot*>(table.const_data_ptr());
  args.hyper = hyper.const_data_ptr();
  args.active = static_cast<const uint8_t*>(active.const_data_ptr());
  args.extra = optional_doubles(extra);
  args.n_slots = table.size(0);
  args.n_groups = hyper.size(0);
  args.numerator = numerator;
  args.weight = weight;
  args.weight_sq = weight_sq;
  args.max_norm = max_norm;
  args.rule = rule;
  args.advance = advance;
  args.has_micro = micro_partials.has_value();
  const torch::stable::accelerator::DeviceGuard guard(control.get_device_index());
  check_launch(op, launch_finalize(args, current_stream(op, control)));
}

namespace {

template <typename LaunchOne>
void step_cuda(const char* op, const std::vector<Tensor>& params, StepArgs args, const Tensor& acc, const Tensor& table,
               const Tensor& scalars, const Tensor& control, const std::optional<Tensor>& master,
               const char* extra_name, const std::optional<Tensor>& extra, const std::vector<int64_t>& slots,
               const LaunchOne& launch_one) {
  check_same_length(op, "params", params.size(), "slots", slots.size());
  check_flat({op, "acc"}, acc, ScalarType::Float, 0);
  check_table(op, table, acc);
  check_rows({op, "scalars"}, scalars, ScalarType::Float, kScalarColumns);
  check_flat({op, "control"}, control, ScalarType::Double, kControl);
  FA_CHECK(scalars.size(0) >= table.size(0), op, ": scalars has ", scalars.size(0), " rows; accepted: at least ",
           table.size(0));
  check_device({op, "scalars"}, scalars, acc);
  check_device({op, "control"}, control, acc);
  check_device({op, "master"}, master, acc);
  check_device({op, extra_name}, extra, acc);
  args.extra = optional_buffer(op, extra_name, extra);
  args.master = optional_buffer(op, "master", master);
  args.acc = static_cast<const float*>(acc.const_data_ptr());
  args.table = static_cast<const Slot*>(table.const_data_ptr());
  args.scalars = scalars.const_data_ptr();
  args.control = static_cast<const double*>(control.const_data_ptr());
  std::vector<PlannedTensor> tensors;
  OnceEach once(op, table.size(0));
  tensors.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    tensors.push_back(planned(op, "params", i, params[i], slots[i], false, table, acc, once));
  }
  launch_all(op, acc, args, tensors, launch_one);
}

}  // namespace

void adam_step_cuda(std::vector<Tensor> params, Tensor exp_avg, Tensor exp_avg_sq, std::optional<Tensor> max_exp_avg_sq,
                    std::optional<Tensor> master, Tensor acc, Tensor table, Tensor scalars, Tensor control,
                    std::vector<int64_t> slots) {
  const char* op = "adam_step_";
  check_flat({op, "exp_avg"}, exp_avg, ScalarType::Float, acc.numel());
  check_flat({op, "exp_avg_sq"}, exp_avg_sq, ScalarType::Float, acc.numel());
  check_device({op, "exp_avg"}, exp_avg, acc);
  check_device({op, "exp_avg_sq"}, exp_avg_sq, acc);
  StepArgs args = {};
  args.exp_avg = static_cast<float*>(exp_avg.mutable_data_ptr());
  args.exp_avg_sq = static_cast<float*>(exp_avg_sq.mutable_data_ptr());
  step_cuda(op, params, args, acc, table, scalars, control, master, "max_exp_avg_sq", max_exp_avg_sq, slots,
            launch_adam);
}

void sgd_step_cuda(std::vector<Tensor> params, std::optional<Tensor> momentum_buffer, std::optional<Tensor> master,
                   Tensor acc, Tensor table, Tensor scalars, Tensor control, std::vector<int64_t> slots) {
  step_cuda("sgd_step_", params, StepArgs{}, acc, table, scalars, control, master, "momentum_buffer", momentum_buffer,
            slots, launch_sgd);
}

}  // namespace fusedaccum

STABLE_TORCH_LIBRARY_IMPL(fusedaccum, CUDA, m) {
  m.impl("accumulate_", TORCH_BOX(&fusedaccum::accumulate_cuda));
  m.impl("measure_", TORCH_BOX(&fusedaccum::measure_cuda));
  m.impl("finalize_", TORCH_BOX(&fusedaccum::finalize_cuda));
  m.impl("adam_step_", TORCH_BOX(&fusedaccum::adam_step_cuda));
  m.impl("sgd_step_", TORCH_BOX(&fusedaccum::sgd_step_cuda));
}

// Whether a torch with CUDA was loaded before this library: what the tests see of a mistake that only a GPU would show.
extern "C" __attribute__((visibility("default"))) int fusedaccum_cuda_finds_stream() {
  return fusedaccum::find_current_stream() != nullptr;
}
