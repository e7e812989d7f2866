// The CPU ops, as bind.cpp registers them. fusedaccum/ops.py holds their schemas and says what they mean.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

namespace fusedaccum {

using torch::stable::Tensor;

void accumulate_cpu(Tensor acc, Tensor partials, std::optional<Tensor> micro_partials, Tensor table,
                    std::vector<Tensor> grads, std::vector<int64_t> slots, std::vector<int64_t> first, double scale,
                    std::optional<Tensor> factor);
void measure_cpu(Tensor partials, Tensor acc, Tensor table, std::vector<int64_t> slots, std::vector<int64_t> n_elems);
void finalize_cpu(Tensor control, Tensor scalars, Tensor steps, Tensor window, Tensor partials,
                  std::optional<Tensor> micro_partials, Tensor table, Tensor hyper, Tensor active, int64_t rule,
                  double numerator, double weight, double weight_sq, double max_norm, std::optional<Tensor> extra,
                  bool advance);
void adam_step_cpu(std::vector<Tensor> params, Tensor exp_avg, Tensor exp_avg_sq, std::optional<Tensor> max_exp_avg_sq,
                   std::optional<Tensor> master, Tensor acc, Tensor table, Tensor scalars, Tensor control,
                   std::vector<int64_t> slots);
void sgd_step_cpu(std::vector<Tensor> params, std::optional<Tensor> momentum_buffer, std::optional<Tensor> master,
                  Tensor acc, Tensor table, Tensor scalars, Tensor control, std::vector<int64_t> slots);

}  // namespace fusedaccum
