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

double fp32_sum(const float* lanes, int64_t used) {
  alignas(64) double wide[kLanes];
  for (int64_t i = 0; i < used; ++i) wide[i] = static_cast<double>(lanes[i]);
  return lane_tree(wide, used);
}

// fp32 squares overflow from 1.8e19 on though the gradients are finite; those chunks are summed again in fp64.
double chunk_sum(const float* lanes, int64_t used, const float* acc, int64_t n) {
  const double sum = fp32_sum(lanes, used);
  return sum - sum == 0.0 ? sum : sum_sq_fp64(acc, n);
}

// A row written past the caches: a plain store reads its line from memory first, which is 4 of the 10 bytes that a
// first add would move. `to` is aligned to kStreamAlignment.
inline void stream_row(float* __restrict to, const float* __restrict row) {
#if defined(__AVX512F__)
  for (int64_t i = 0; i < kLanes; i += 16) _mm512_stream_ps(to + i, _mm512_load_ps(row + i));
#elif defined(__AVX__)
  for (int64_t i = 0; i < kLanes; i += 8) _mm256_stream_ps(to + i, _mm256_load_ps(row + i));
#elif defined(__SSE2__)
  for (int64_t i = 0; i < kLanes; i += 4) _mm_stream_ps(to + i, _mm_load_ps(row + i));
#else
  std::memcpy(to, row, kLanes * sizeof(float));
#endif
}

// Streamed stores are not ordered with those by which threads tell each other that they are done.
inline void end_of_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <typename Grad>
double first_chunk_streaming(float* __restrict acc, const void* grad_bytes, int64_t n, float scale, double*) {
  const Grad* __restrict grad = static_cast<const Grad*>(grad_bytes);
  alignas(64) float lanes[kLanes];
  alignas(64) float row[kLanes];
  const int64_t used = n < kLanes ? n : kLanes;
  for (int64_t i = 0; i < used; ++i) lanes[i] = 0.0f;
  for (int64_t base = 0; base < n; base += kLanes) {
    const int64_t left = n - base < kLanes ? n - base : kLanes;
    for (int64_t i = 0; i < left; ++i) {
      row[i] = scaled(to_float(grad[base + i]), scale);
      lanes[i] += row[i] * row[i];
    }
    if (left == kLanes) {
      stream_row(acc + base, row);
    } else {
      for (int64_t i = 0; i < left; ++i) acc[base + i] = row[i];
    }
  }
  end_of_stream();
  return chunk_sum(lanes, used, acc, n);
}

// The squares of one element: of the accumulator, and of what was added to it.
struct Squares {
  float acc, micro;
};

template <typename Grad, Add kAdd>
inline __attribute__((always_inline)) Squares accumulate_element(float* __restrict acc, const Grad* __restrict grad,
                                                                 int64_t i, float scale) {
  const float value = to_float(grad[i]);
  const float added = scaled(value, scale);
  const float result = kAdd == kAddFirst ? added : accumulated(acc[i], value, scale);
  acc[i] = result;
  return {result * result, added * added};
}

template <typename Grad, Add kAdd>
double accumulate_chunk(float* __restrict acc, const void* grad_bytes, int64_t n, float scale,
                        [[maybe_unused]] double* micro) {
  constexpr bool kMicro = kAdd == kAddLaterWithMicro;
  const Grad* __restrict grad = static_cast<const Grad*>(grad_bytes);
  alignas(64) float lanes[kLanes];
  alignas(64) float micro_lanes[kMicro ? kLanes : 1];
  const int64_t used = n < kLanes ? n : kLanes;
  for (int64_t i = 0; i < used; ++i) {
    const Squares squares = accumulate_element<Grad, kAdd>(acc, grad, i, scale);
    lanes[i] = squares.acc;
    if (kMicro) micro_lanes[i] = squares.micro;
  }
  // A row at a time: two in one pass spare every second load and store of the lanes, and are slower from DRAM all the
  // same. With micro squares, over autograd (bench/window_cost.py): 1.21 to 1.42 of an add without them, where a row at
  // a time takes 1.05 to 1.12 (a virtual AMD EPYC with AVX-512, 2 threads, gcc 12, 2026-12-01).
  for (int64_t base = kLanes; base < n; base += kLanes) {
    const int64_t left = n - base < kLanes ? n - base : kLanes;
    float* __restrict acc_row = acc + base;
    const Grad* __restrict grad_row = grad + base;
    for (int64_t i = 0; i < left; ++i) {
      const Squares squares = accumulate_element<Grad, kAdd>(acc_row, grad_row, i, scale);
      lanes[i] += squares.acc;
      if (kMicro) micro_lanes[i] += squares.micro;
    }
  }
  if (kMicro) *micro = fp32_sum(micro_lanes, used);
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
      {{accumulate_chunk<float, kAddLater>, accumulate_chunk<float, kAddFirst>, first_chunk_streaming<float>,
        accumulate_chunk<float, kAddLaterWithMicro>},
       {accumulate_chunk<bf16, kAddLater>, accumulate_chunk<bf16, kAddFirst>, first_chunk_streaming<bf16>,
        accumulate_chunk<bf16, kAddLaterWithMicro>},
       {accumulate_chunk<fp16, kAddLater>, accumulate_chunk<fp16, kAddFirst>, first_chunk_streaming<fp16>,
        accumulate_chunk<fp16, kAddLaterWithMicro>}},
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
