// Memory layout shared by every backend: what one row of each table means.
// fusedaccum/layout.py holds the same numbers for Python; tests/test_layout.py compares the two.
#pragma once

#include <cstdint>

namespace fusedaccum {

// A chunk is the unit of work and of the norm: up to kChunk consecutive elements of one slot.
// 32768 fp32 elements are 128 KiB, so that a second look at a chunk (an overflowed sum) hits L2, and the
// partials are 1/16384 of the buffer.
constexpr int64_t kChunk = 32768;

// Sums of squares run over this many lanes (element index modulo kLanes), then over a fixed tree. 1024 is what
// a block of 128 threads reads in one round of 16-byte bf16 loads, and 4 KiB of fp32, which stays in L1.
constexpr int64_t kLanes = 1024;

// One row of `table`: (n_slots, kSlotColumns) int64.
struct Slot {
  int64_t offset_elems;  // first element in acc and in the full-size state buffers
  int64_t n_elems;
  int64_t first_chunk;          // first entry in partials
  int64_t group;                // row of `hyper`
  int64_t master_offset_elems;  // first element in master, -1: no master
  int64_t extra_offset_elems;   // first element in max_exp_avg_sq or momentum_buffer, -1: none
};
constexpr int64_t kSlotColumns = 6;
static_assert(sizeof(Slot) == kSlotColumns * sizeof(int64_t), "Slot must mirror a row of the table");

// One row of `hyper`: (n_groups, kHyperColumns) float64, written by the host when a param_group changes.
struct AdamHyper {
  double lr, beta1, beta2, eps, weight_decay, decoupled, sign, amsgrad;
};
struct SgdHyper {
  double lr, momentum, dampening, nesterov, weight_decay, unused0, sign, unused1;
};
constexpr int64_t kHyperColumns = 8;
static_assert(sizeof(AdamHyper) == kHyperColumns * sizeof(double), "AdamHyper must mirror a row of hyper");
static_assert(sizeof(SgdHyper) == kHyperColumns * sizeof(double), "SgdHyper must mirror a row of hyper");

// `control`: (kControl,) float64, written by finalize_, read by the step ops and by the user.
enum Control : int64_t {
  kNorm = 0,
  kFoundInf,
  kClipCoef,
  kGradMultiplier,
  kSumSq,
  kSkipped,     // found_inf, or a window without weight: the step ops do nothing
  kMicroNorm,   // root mean square of the micro-batches' own norms, 0 without statistics
  kMicroSumSq,  // the sum it comes from, raw
  kControl
};

// `window`: (kWindow,) float64. What a device knows of the open window and of those before it; read and written by
// finalize_, so that no host has to wait.
enum Window : int64_t {
  kWeight = 0,    // weights of the open window that only the device knows: their sum,
  kWeightSq,      // and the sum of their squares; finalize_ starts both afresh
  kLossScale,     // 1 without loss scaling
  kInvLossScale,  // what gradients are multiplied by as they are added
  kGrowthTracker,
  kGrowthFactor,   // 1, and
  kBackoffFactor,  // 1, where the scale is fixed
  kGrowthInterval,
  kWindows,  // boundaries so far, the skipped ones among them
  kSkippedWindows,
  kClippedWindows,
  kDecay,        // of the two averages
  kGradSq,       // average of the unbiased estimate of the squared norm of the true gradient
  kNoise,        // average of the estimate of the trace of the gradient's covariance, at a weight of 1
  kMeanWeight,   // sum of the decaying weights in the two averages: divide by it
  kMicroWeight,  // weight of one micro-batch in the last window
  kWindow
};

// One row of `scalars`: (n_slots, kScalarColumns) float32, written by finalize_, read by the step ops.
struct AdamScalars {
  float grad_multiplier, step_size, inv_bias_correction2_sqrt, decay;
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float eps, coupled_weight_decay, amsgrad, unused;
};
struct SgdScalars {
  float grad_multiplier, lr, momentum, one_minus_dampening;
  float weight_decay, nesterov, first, unused[5];
};
constexpr int64_t kScalarColumns = 12;
static_assert(sizeof(AdamScalars) == kScalarColumns * sizeof(float), "AdamScalars must mirror a row of scalars");
static_assert(sizeof(SgdScalars) == kScalarColumns * sizeof(float), "SgdScalars must mirror a row of scalars");

// How gradients and parameters may be stored.
enum Dtype : uint32_t { kFloat32 = 0, kBFloat16, kFloat16, kDtypes };
// A parameter in fp32; in 16 bits beside an fp32 master; in 16 bits alone.
enum ParamKind : uint32_t {
  kParamFloat32 = 0,
  kParamBFloat16Master,
  kParamFloat16Master,
  kParamBFloat16,
  kParamFloat16,
  kParamKinds
};

// kNoRule: another optimizer's own step makes the update; finalize_ writes no scalars.
enum Rule : int64_t { kAdam = 0, kSgd = 1, kNoRule = 2 };

#if defined(__CUDACC__)
__host__ __device__
#endif
    constexpr int64_t n_chunks(int64_t n_elems) {
  return (n_elems + kChunk - 1) / kChunk;
}

#if defined(__CUDACC__)
__host__ __device__
#endif
    constexpr ParamKind param_kind(uint32_t dtype, bool has_master) {
  return static_cast<ParamKind>(dtype == kFloat32 || has_master ? dtype : dtype + 2);
}

}  // namespace fusedaccum
