// Element arithmetic: the only definition of each formula in C++. CPU and CUDA kernels are loops around these.
//
// Every operation is one IEEE operation, rounded once: compile with -ffp-contract=off (gcc, clang) or --fmad=false
// (nvcc), never with fast-math. Then the same inputs give the same bits on every target. Selects are written as
// `condition ? a : b` with both sides free of side effects, so that compilers turn them into blends.
//
// The functions have internal linkage on purpose: csrc/cpu compiles this header once per instruction set, and with
// external linkage the linker could keep the AVX-512 copy for a processor that has none.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "layout.h"

#if defined(__CUDACC__)
#define FA_INLINE static __host__ __device__ __forceinline__
#elif defined(_MSC_VER)
#define FA_INLINE static __forceinline
#else
#define FA_INLINE static inline __attribute__((always_inline, unused))
#endif

namespace fusedaccum {

// 16-bit values are carried as their bits: torch's and CUDA's own types convert with functions that differ by
// target (and flush or round NaN payloads differently).
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

FA_INLINE uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

FA_INLINE float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

FA_INLINE float to_float(float value) { return value; }

FA_INLINE float to_float(bf16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

// binary16 -> binary32, exact. A subnormal is built as a normal number minus its implicit one, never as an fp32
// subnormal, so that torch.set_flush_denormal does not zero it.
FA_INLINE float to_float(fp16 value) {
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t normal = magnitude + ((127u - 15u) << 23);
  const uint32_t special = magnitude | 0x7f800000u;
  const float subnormal = float_of(magnitude + (113u << 23)) - float_of(113u << 23);
  const uint32_t finite = magnitude < (1u << 23) ? bits_of(subnormal) : normal;
  return float_of((magnitude >= (31u << 23) ? special : finite) | sign);
}

FA_INLINE void round_to(float& out, float value) { out = value; }

// Round to nearest, ties to even. A NaN becomes the quiet NaN of its sign: adding the rounding bias to a NaN with
// a full mantissa would carry into the sign.
FA_INLINE void round_to(bf16& out, float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = ((bits >> 16) & 0x8000u) | 0x7fc0u;
  out.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

// Round to nearest, ties to even; overflow to infinity; subnormals kept. The subnormal branch lets the fp32 adder
// do the rounding: 0.5f has an ulp of 2^-24, which is the spacing of binary16's subnormals.
FA_INLINE void round_to(fp16& out, float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  out.bits = static_cast<uint16_t>(sign | (magnitude >= (143u << 23) ? special : finite));
}

// What a gradient is multiplied by as it is added: the host's part and the device's (a weight, the inverse loss scale).
// 0 adds nothing, not even 0 * NaN: the mean loss of a micro-batch without a valid token is NaN, and its weight 0.
FA_INLINE float effective_scale(double scale, const double* factor) {
  return static_cast<float>(factor == nullptr ? scale : scale * *factor);
}

// acc' = acc + scale * grad, each operation rounded. The first add of a window stores scale * grad.
FA_INLINE float scaled(float grad, float scale) { return grad * scale; }
FA_INLINE float accumulated(float acc, float grad, float scale) { return acc + grad * scale; }

struct AdamState {
  float param, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

// Adam (Kingma and Ba 2015, algorithm 1), with AMSGrad (Reddi et al. 2018) and decoupled weight decay (Loshchilov
// and Hutter 2019), in the form of torch.optim.Adam: eps is added after the bias correction of the root.
template <bool kAmsgrad>
FA_INLINE AdamState adam_update(AdamState s, float acc, const AdamScalars& c) {
  s.param = s.param * c.decay;
  // The weight decay of 0 multiplies too: a select would cost as much, and the parameter is finite.
  const float grad = acc * c.grad_multiplier + c.coupled_weight_decay * s.param;
  s.exp_avg = c.beta1 * s.exp_avg + c.one_minus_beta1 * grad;
  s.exp_avg_sq = c.beta2 * s.exp_avg_sq + c.one_minus_beta2 * (grad * grad);
  float second = s.exp_avg_sq;
  if (kAmsgrad) {
    // NaN wins, as in torch.maximum.
    const bool keep = s.max_exp_avg_sq != s.max_exp_avg_sq || s.exp_avg_sq <= s.max_exp_avg_sq;
    s.max_exp_avg_sq = keep ? s.max_exp_avg_sq : s.exp_avg_sq;
    second = s.max_exp_avg_sq;
  }
  const float denominator = sqrtf(second) * c.inv_bias_correction2_sqrt + c.eps;
  s.param = s.param - c.step_size * (s.exp_avg / denominator);
  return s;
}

struct SgdState {
  float param, momentum_buffer;
};

// SGD with momentum, in the form of torch.optim.SGD: the first buffer is the gradient itself, without dampening.
template <bool kMomentum>
FA_INLINE SgdState sgd_update(SgdState s, float acc, const SgdScalars& c) {
  float direction = acc * c.grad_multiplier + c.weight_decay * s.param;
  if (kMomentum) {
    const float later = c.momentum * s.momentum_buffer + c.one_minus_dampening * direction;
    s.momentum_buffer = c.first != 0.0f ? direction : later;
    const float lookahead = direction + c.momentum * s.momentum_buffer;
    direction = c.nesterov != 0.0f ? lookahead : s.momentum_buffer;
  }
  s.param = s.param - c.lr * direction;
  return s;
}

// base^exponent by squaring: pow() differs between libm and CUDA, a fixed chain of products does not.
FA_INLINE double integer_power(double base, int64_t exponent) {
  double result = 1.0;
  while (exponent > 0) {
    if (exponent & 1) result = result * base;
    base = base * base;
    exponent >>= 1;
  }
  return result;
}

// grad_multiplier: clip coefficient times the correction of the divisor; step: the count after this update.
FA_INLINE AdamScalars adam_scalars(const AdamHyper& h, double grad_multiplier, double step) {
  const double bias_correction1 = 1.0 - integer_power(h.beta1, static_cast<int64_t>(step));
  const double bias_correction2 = 1.0 - integer_power(h.beta2, static_cast<int64_t>(step));
  AdamScalars c;
  c.grad_multiplier = static_cast<float>(grad_multiplier * h.sign);
  c.step_size = static_cast<float>(h.lr / bias_correction1);
  c.inv_bias_correction2_sqrt = static_cast<float>(1.0 / sqrt(bias_correction2));
  c.decay = static_cast<float>(h.decoupled != 0.0 ? 1.0 - h.lr * h.weight_decay : 1.0);
  c.beta1 = static_cast<float>(h.beta1);
  c.one_minus_beta1 = static_cast<float>(1.0 - h.beta1);
  c.beta2 = static_cast<float>(h.beta2);
  c.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
  c.eps = static_cast<float>(h.eps);
  c.coupled_weight_decay = static_cast<float>(h.decoupled != 0.0 ? 0.0 : h.weight_decay);
  c.amsgrad = static_cast<float>(h.amsgrad);
  c.unused = 0.0f;
  return c;
}

FA_INLINE SgdScalars sgd_scalars(const SgdHyper& h, double grad_multiplier, double step) {
  SgdScalars c;
  c.grad_multiplier = static_cast<float>(grad_multiplier * h.sign);
  c.lr = static_cast<float>(h.lr);
  c.momentum = static_cast<float>(h.momentum);
  c.one_minus_dampening = static_cast<float>(1.0 - h.dampening);
  c.weight_decay = static_cast<float>(h.weight_decay);
  c.nesterov = static_cast<float>(h.nesterov);
  c.first = step == 1.0 ? 1.0f : 0.0f;
  for (float& unused : c.unused) unused = 0.0f;
  return c;
}

// torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1. A max_norm of infinity means no clip.
FA_INLINE double clip_coefficient(double norm, double max_norm) {
  const double ratio = max_norm / (norm + 1e-6);
  return ratio < 1.0 ? ratio : 1.0;
}

// What a boundary comes to, from the sums of squares over everything that takes part.
struct Boundary {
  double norm, found_inf, clip_coef, grad_multiplier, skipped, micro_norm;
};

// `numerator` over the window's weight is the factor from the accumulator to the gradient of the one large batch. A
// window without weight (all micro-batches empty) is no step, and neither is one whose weight is not a number.
FA_INLINE Boundary boundary(const double* window, double sum_sq, double micro_sum_sq, double numerator, double weight,
                            double weight_sq, double max_norm) {
  const double total = weight + window[kWeight];
  const double total_sq = weight_sq + window[kWeightSq];
  const double correction = total > 0.0 ? numerator / total : 0.0;
  Boundary b;
  b.norm = sqrt(sum_sq) * correction;
  b.found_inf = sum_sq - sum_sq == 0.0 ? 0.0 : 1.0;
  b.clip_coef = clip_coefficient(b.norm, max_norm);
  b.grad_multiplier = b.clip_coef * correction;
  b.skipped = b.found_inf == 0.0 && total > 0.0 ? 0.0 : 1.0;
  // Sum of squares of the contributions w g / W, over that of the weights w / W.
  const double squared = micro_sum_sq * (correction * correction);
  b.micro_norm = total > 0.0 && total_sq > 0.0 ? sqrt(squared / (total_sq / (total * total))) : 0.0;
  return b;
}

FA_INLINE void write_control(double* control, const Boundary& b, double sum_sq, double micro_sum_sq) {
  control[kNorm] = b.norm;
  control[kFoundInf] = b.found_inf;
  control[kClipCoef] = b.clip_coef;
  control[kGradMultiplier] = b.grad_multiplier;
  control[kSumSq] = sum_sq;
  control[kSkipped] = b.skipped;
  control[kMicroNorm] = b.micro_norm;
  control[kMicroSumSq] = micro_sum_sq;
}

// The loss scale after a window, as torch.amp.GradScaler has it (at::_amp_update_scale_): growth only where the result
// is finite in fp32.
FA_INLINE void update_loss_scale(double* window, bool found_inf) {
  if (found_inf) {
    window[kLossScale] = window[kLossScale] * window[kBackoffFactor];
    window[kGrowthTracker] = 0.0;
  } else {
    const double successful = window[kGrowthTracker] + 1.0;
    const bool is_due = successful == window[kGrowthInterval];
    const double grown = window[kLossScale] * window[kGrowthFactor];
    if (is_due && grown <= 3.4028234663852886e38) window[kLossScale] = grown;
    window[kGrowthTracker] = is_due ? 0.0 : successful;
  }
  window[kInvLossScale] = 1.0 / window[kLossScale];
}

// The gradient noise scale (McCandlish et al. 2018, appendix A.1), for weights: with contributions c_i = w_i g_i / W
// and rho = sum(w_i^2) / W^2, E|G|^2 = |g|^2 + tr/W and E sum|c_i|^2 = rho |g|^2 + tr/W. Equal weights give their B_big
// = K and B_small = 1. Both estimates are averaged, and their ratio is taken by whoever reads them.
FA_INLINE void update_noise(double* window, double norm, double micro_norm, double weight, double weight_sq) {
  const double total = weight + window[kWeight];
  const double rho = (weight_sq + window[kWeightSq]) / (total * total);
  const double big = norm * norm;
  const double small = (micro_norm * micro_norm) * rho;
  const double grad_sq = (big - small) / (1.0 - rho);
  const double noise = ((small - rho * big) / (1.0 - rho)) * total;
  if (!(rho < 1.0) || grad_sq - grad_sq != 0.0 || noise - noise != 0.0) return;
  const double fresh = 1.0 - window[kDecay];
  window[kGradSq] = window[kDecay] * window[kGradSq] + fresh * grad_sq;
  window[kNoise] = window[kDecay] * window[kNoise] + fresh * noise;
  window[kMeanWeight] = window[kDecay] * window[kMeanWeight] + fresh;
}

// The window after its boundary. `has_micro`: the micro-batches' own sums of squares were kept.
FA_INLINE void advance_window(double* window, const Boundary& b, double weight, double weight_sq, bool has_micro) {
  const double total = weight + window[kWeight];
  window[kWindows] = window[kWindows] + 1.0;
  if (b.skipped != 0.0) window[kSkippedWindows] = window[kSkippedWindows] + 1.0;
  if (b.skipped == 0.0 && b.clip_coef < 1.0) window[kClippedWindows] = window[kClippedWindows] + 1.0;
  if (b.found_inf != 0.0 || b.skipped == 0.0) update_loss_scale(window, b.found_inf != 0.0);
  if (b.skipped == 0.0) {
    window[kMicroWeight] = (weight_sq + window[kWeightSq]) / total;
    if (has_micro) update_noise(window, b.norm, b.micro_norm, weight, weight_sq);
  }
  window[kWeight] = 0.0;
  window[kWeightSq] = 0.0;
}

}  // namespace fusedaccum
