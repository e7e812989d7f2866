// The loop bodies, compiled once for each instruction set. The including file defines FA_ISA_NAME (a string) and
// FA_ISA_KERNELS (the name of the function that returns the table), and requests the instruction set before
// including this file and after including every standard header: an inline function of the standard library
// compiled for AVX-512 could otherwise be the copy that the linker keeps.
//
// Everything here has internal linkage for the same reason.

#include "../math.h"

namespace fusedaccum {
namespace {

// The fixed tree over lanes, in fp64, so that a sum of 1024 fp32 lanes cannot overflow. Lanes that a short chunk
// never used are zero, and adding zero changes nothing, so the tree may start at the first power of two >= n.
double lane_tree(double* lanes, int64_t used) {
  int64_t width = 1;
  while (width < used) width *= 2;
  for (int64_t i = used; i < width; ++i) lanes[i] = 0.0;
  for (int64_t stride = width / 2; stride > 0; stride /= 2) {
    for (int64_t i = 0; i < stride; ++i) lanes[i] += lanes[i + stride];
  }
  return lanes[0];
}

double sum_sq_fp64(const float* acc, int64_t n) {
  alignas(64) double lanes[kLanes];
  const int64_t used = n < kLanes ? n : kLanes;
  for (int64_t i = 0; i < used; ++i) lanes[i] = static_cast<double>(acc[i]) * static_cast<double>(acc[i]);
  for (int64_t base = kLanes; base < n; base += kLanes) {
    const int64_t left = n - base < kLanes ? n - base : kLanes;
    for (int64_t i = 0; i < left; ++i) {
      lanes[i] += static_cast<double>(acc[base + i]) * static_cast<double>(acc[base + i]);
    }
  }
  return lane_tree(lanes, used);
}

// fp32 squares overflow from 1.8e19 on though the gradients are finite; those chunks are summed again in fp64.
double chunk_sum(const float* lanes, int64_t used, const float* acc, int64_t n) {
  alignas(64) double wide[kLanes];
  for (int64_t i = 0; i < used; ++i) wide[i] = static_cast<double>(lanes[i]);
  const double sum = lane_tree(wide, used);
  return sum - sum == 0.0 ? sum : sum_sq_fp64(acc, n);
}

template <typename Grad, bool kFirst>
inline __attribute__((always_inline)) float accumulate_element(float* __restrict acc, const Grad* __restrict grad,
                                                               int64_t i, float scale) {
  const float value = to_float(grad[i]);
  const float result = kFirst ? scaled(value, scale) : accumulated(acc[i], value, scale);
  acc[i] = result;
  return result * result;
}

template <typename Grad, bool kFirst>
double accumulate_chunk(float* __restrict acc, const void* grad_bytes, int64_t n, float scale) {
  const Grad* __restrict grad = static_cast<const Grad*>(grad_bytes);
  alignas(64) float lanes[kLanes];
  const int64_t used = n < kLanes ? n : kLanes;
  for (int64_t i = 0; i < used; ++i) lanes[i] = accumulate_element<Grad, kFirst>(acc, grad, i, scale);
  for (int64_t base = kLanes; base < n; base += kLanes) {
    const int64_t left = n - base < kLanes ? n - base : kLanes;
    float* __restrict acc_row = acc + base;
    const Grad* __restrict grad_row = grad + base;
    for (int64_t i = 0; i < left; ++i) lanes[i] += accumulate_element<Grad, kFirst>(acc_row, grad_row, i, scale);
  }
  return chunk_sum(lanes, used, acc, n);
}

double sum_sq_chunk(const float* __restrict acc, int64_t n) {
  alignas(64) float lanes[kLanes];
  const int64_t used = n < kLanes ? n : kLanes;
  for (int64_t i = 0; i < used; ++i) lanes[i] = acc[i] * acc[i];
  for (int64_t base = kLanes; base < n; base += kLanes) {
    const int64_t left = n - base < kLanes ? n - base : kLanes;
    for (int64_t i = 0; i < left; ++i) lanes[i] += acc[base + i] * acc[base + i];
  }
  return chunk_sum(lanes, used, acc, n);
}

template <typename Param, bool kMaster, bool kAmsgrad>
void adam_chunk(const AdamChunk& chunk, int64_t n, const AdamScalars& scalars) {
  const AdamScalars c = scalars;  // a copy cannot alias the stores below
  Param* __restrict param = static_cast<Param*>(chunk.param);
  float* __restrict master = chunk.master;
  float* __restrict exp_avg = chunk.exp_avg;
  float* __restrict exp_avg_sq = chunk.exp_avg_sq;
  float* __restrict max_exp_avg_sq = chunk.max_exp_avg_sq;
  const float* __restrict acc = chunk.acc;
  for (int64_t i = 0; i < n; ++i) {
    AdamState s;
    s.param = kMaster ? master[i] : to_float(param[i]);
    s.exp_avg = exp_avg[i];
    s.exp_avg_sq = exp_avg_sq[i];
    s.max_exp_avg_sq = kAmsgrad ? max_exp_avg_sq[i] : 0.0f;
    s = adam_update<kAmsgrad>(s, acc[i], c);
    exp_avg[i] = s.exp_avg;
    exp_avg_sq[i] = s.exp_avg_sq;
    if (kAmsgrad) max_exp_avg_sq[i] = s.max_exp_avg_sq;
    if (kMaster) master[i] = s.param;
    round_to(param[i], s.param);
  }
}

template <typename Param, bool kMaster, bool kMomentum>
void sgd_chunk(const SgdChunk& chunk, int64_t n, const SgdScalars& scalars) {
  const SgdScalars c = scalars;
  Param* __restrict param = static_cast<Param*>(chunk.param);
  float* __restrict master = chunk.master;
  float* __restrict momentum_buffer = chunk.momentum_buffer;
  const float* __restrict acc = chunk.acc;
  for (int64_t i = 0; i < n; ++i) {
    SgdState s;
    s.param = kMaster ? master[i] : to_float(param[i]);
    s.momentum_buffer = kMomentum ? momentum_buffer[i] : 0.0f;
    s = sgd_update<kMomentum>(s, acc[i], c);
    if (kMomentum) momentum_buffer[i] = s.momentum_buffer;
    if (kMaster) master[i] = s.param;
    round_to(param[i], s.param);
  }
}

}  // namespace

const Kernels& FA_ISA_KERNELS() {
  static const Kernels table = {
      FA_ISA_NAME,
      {{accumulate_chunk<float, false>, accumulate_chunk<float, true>},
       {accumulate_chunk<bf16, false>, accumulate_chunk<bf16, true>},
       {accumulate_chunk<fp16, false>, accumulate_chunk<fp16, true>}},
      sum_sq_chunk,
      {{adam_chunk<float, false, false>, adam_chunk<float, false, true>},
       {adam_chunk<bf16, true, false>, adam_chunk<bf16, true, true>},
       {adam_chunk<fp16, true, false>, adam_chunk<fp16, true, true>},
       {adam_chunk<bf16, false, false>, adam_chunk<bf16, false, true>},
       {adam_chunk<fp16, false, false>, adam_chunk<fp16, false, true>}},
      {{sgd_chunk<float, false, false>, sgd_chunk<float, false, true>},
       {sgd_chunk<bf16, true, false>, sgd_chunk<bf16, true, true>},
       {sgd_chunk<fp16, true, false>, sgd_chunk<fp16, true, true>},
       {sgd_chunk<bf16, false, false>, sgd_chunk<bf16, false, true>},
       {sgd_chunk<fp16, false, false>, sgd_chunk<fp16, false, true>}},
  };
  return table;
}

}  // namespace fusedaccum
