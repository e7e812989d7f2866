// The loop bodies, compiled once for each instruction set. The including file defines FA_ISA_NAME (a string) and
// FA_ISA_KERNELS (the name of the function that returns the table) and FA_ISA_VECTOR_BYTES (of its registers, as far as
// intrinsics are wanted: g++ 12 does not define __AVX512F__ and its like after a pragma), and requests the instruction
// set before including this file and after including every standard header: an inline function of the standard
// library compiled for AVX-512 could otherwise be the copy that the linker keeps.
//
// Everything here has internal linkage for the same reason.

#include "../math.h"

namespace fusedaccum {
namespace {

// The fixed tree over lanes, in fp64, so that a sum of 1024 fp32 lanes cannot overflow: lane i takes lane i + stride,
// for strides of 512 down to 1. Lanes that a short chunk never used are zero, and adding zero changes nothing, so the
// tree may start at the first power of two >= used.
double lane_tree(double* lanes, int64_t used) {
  int64_t width = 1;
  while (width < used) width *= 2;
  for (int64_t i = used; i < width; ++i) lanes[i] = 0.0;
  for (int64_t stride = width / 2; stride > 0; stride /= 2) {
    for (int64_t i = 0; i < stride; ++i) lanes[i] += lanes[i + stride];
  }
  return lanes[0];
}

// Vector types of GCC and clang: as many registers as the instruction set needs for them.
typedef float Float8 __attribute__((vector_size(32)));
typedef double Double8 __attribute__((vector_size(64)));

inline __attribute__((always_inline)) void widen(const float* lanes, Double8& wide) {
#if FA_ISA_VECTOR_BYTES == 64
  wide = _mm512_cvtps_pd(_mm256_load_ps(lanes));  // GCC 12 converts a vector of eight in two halves
#else
  wide = __builtin_convertvector(*reinterpret_cast<const Float8*>(lanes), Double8);
#endif
}

// The same tree over 1024 fp32 lanes, aligned to 64 bytes: strides of 512 down to 64 in eight columns of sixteen
// vectors, 32 down to 8 between the columns. In registers; through memory it took a third of an add's time (AMD EPYC,
// AVX-512, one thread).
double full_lane_tree(const float* lanes) {
  Double8 columns[8];
  for (int column = 0; column < 8; ++column) {
    Double8 wide[16];
    for (int i = 0; i < 16; ++i) widen(lanes + 64 * i + 8 * column, wide[i]);
    for (int stride = 8; stride > 0; stride /= 2) {
      for (int i = 0; i < stride; ++i) wide[i] += wide[i + stride];
    }
    columns[column] = wide[0];
  }
  for (int stride = 4; stride > 0; stride /= 2) {
    for (int i = 0; i < stride; ++i) columns[i] += columns[i + stride];
  }
  const Double8 last = columns[0];
  return ((last[0] + last[4]) + (last[2] + last[6])) + ((last[1] + last[5]) + (last[3] + last[7]));
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

// Lanes from `used` on are overwritten.
double fp32_sum(float* lanes, int64_t used) {
  if (used <= 64) {
    double wide[64];
    for (int64_t i = 0; i < used; ++i) wide[i] = static_cast<double>(lanes[i]);
    return lane_tree(wide, used);
  }
  for (int64_t i = used; i < kLanes; ++i) lanes[i] = 0.0f;
  return full_lane_tree(lanes);
}

// fp32 squares overflow from 1.8e19 on though the gradients are finite; those chunks are summed again in fp64.
double chunk_sum(float* lanes, int64_t used, const float* acc, int64_t n) {
  const double sum = fp32_sum(lanes, used);
  return sum - sum == 0.0 ? sum : sum_sq_fp64(acc, n);
}

// A cache line written past the caches: a plain store reads its line from memory first, which is 4 of the 10 bytes an
// element that a first add would move, and 2 of a step's 32. `to` is aligned to a line.
constexpr int kLine = 64;

inline void stream_line(void* to, const void* line) {
#if FA_ISA_VECTOR_BYTES == 64
  _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(line));
#elif FA_ISA_VECTOR_BYTES == 32
  for (int i = 0; i < 2; ++i) {
    _mm256_stream_si256(static_cast<__m256i*>(to) + i, _mm256_loadu_si256(static_cast<const __m256i*>(line) + i));
  }
#elif defined(__SSE2__)
  for (int i = 0; i < 4; ++i) {
    _mm_stream_si128(static_cast<__m128i*>(to) + i, _mm_loadu_si128(static_cast<const __m128i*>(line) + i));
  }
#else
  std::memcpy(to, line, kLine);
#endif
}

// Streamed stores are not ordered with those by which threads tell each other that they are done.
inline void end_of_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
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

// Row by row, which the processor's own prefetcher follows.
template <typename Grad, Add kAdd>
double accumulate_near(float* __restrict acc, const void* grad_bytes, int64_t n, float scale,
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

// Asks for some cache lines, into the second-level cache.
template <int kLines>
inline __attribute__((always_inline)) void ask_for(const void* lines) {
  for (int k = 0; k < kLines; ++k) __builtin_prefetch(static_cast<const char*>(lines) + k * kLine, 0, 2);
}

// Elements of one cache line of fp32.
constexpr int kBlock = kLine / sizeof(float);

template <typename Grad>
inline __attribute__((always_inline)) void widen_line(const Grad* grad, float* value) {
  for (int j = 0; j < kBlock; ++j) value[j] = to_float(grad[j]);
}

#if FA_ISA_VECTOR_BYTES == 64
// One instruction for a dozen: a streamed first add of fp16 takes 0.67 of the time with two threads, 0.73 with one (as
// above). The same values: it is exact, and flushes no subnormals whatever the mode.
template <>
inline __attribute__((always_inline)) void widen_line(const fp16* grad, float* value) {
  _mm512_storeu_ps(value, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(grad))));
}
#endif

// A whole chunk, kRows rows in one pass, so that a lane is loaded and stored once for all of them. Such a walk, in
// eight places at a time, is more than a processor's own prefetcher follows; so the rows after these are asked for line
// by line, into the second-level cache. (What lies behind the last chunk may be anybody's: a prefetch cannot fault.)
// 2^26 elements from memory, two threads, against row by row (AMD EPYC, AVX-512, gcc 12, 2026-12-01; within one run):
// 0.95 of the time, with micro squares the same (0.83 with one thread), a streamed first add 0.75. From a cache it
// takes 1.2 to 1.3 times as long.
template <typename Grad, Add kAdd>
double accumulate_far(float* __restrict acc, const void* grad_bytes, int64_t n, float scale, double* micro) {
  constexpr bool kMicro = kAdd == kAddLaterWithMicro;
  constexpr bool kFirst = kAdd == kAddFirst;
  constexpr int kRows = 4;
  constexpr int kAccLines = kRows * static_cast<int>(sizeof(float)) * kBlock / kLine;
  constexpr int kGradLines = kRows * static_cast<int>(sizeof(Grad)) * kBlock / kLine;
  static_assert(kChunk % (kRows * kLanes) == 0, "a chunk is a whole number of passes");
  if (n != kChunk) return accumulate_near<Grad, kAdd>(acc, grad_bytes, n, scale, micro);
  const Grad* __restrict grad = static_cast<const Grad*>(grad_bytes);
  alignas(64) float lanes[kLanes] = {};
  alignas(64) float micro_lanes[kMicro ? kLanes : 1] = {};
  for (int64_t base = 0; base < kChunk; base += kRows * kLanes) {
    float* const acc_rows = acc + base;
    const Grad* const grad_rows = grad + base;
    const char* const next_acc = reinterpret_cast<const char*>(acc_rows + kRows * kLanes);
    const char* const next_grad = reinterpret_cast<const char*>(grad_rows + kRows * kLanes);
    for (int64_t i = 0; i < kLanes; i += kBlock) {
      const int64_t block = i / kBlock;
      if (!kFirst) ask_for<kAccLines>(next_acc + kAccLines * block * kLine);
      ask_for<kGradLines>(next_grad + kGradLines * block * kLine);
      float result[kRows][kBlock];
      [[maybe_unused]] float added[kMicro ? kRows : 1][kBlock];
      for (int row = 0; row < kRows; ++row) {
        const int64_t at = row * kLanes + i;
        float value[kBlock];
        widen_line(grad_rows + at, value);
        for (int j = 0; j < kBlock; ++j) {
          result[row][j] = kFirst ? scaled(value[j], scale) : accumulated(acc_rows[at + j], value[j], scale);
          if (kMicro) added[row][j] = scaled(value[j], scale);
        }
      }
      // After all reads: rows are 4 KiB apart, and a load waits for an earlier store to an address with the same last
      // 12 bits.
      for (int row = 0; row < kRows; ++row) {
        float* const to = acc_rows + row * kLanes + i;
        if (kFirst) {
          stream_line(to, result[row]);
        } else {
          for (int j = 0; j < kBlock; ++j) to[j] = result[row][j];
        }
      }
      for (int row = 0; row < kRows; ++row) {
        for (int j = 0; j < kBlock; ++j) lanes[i + j] += result[row][j] * result[row][j];
      }
      for (int row = 0; kMicro && row < kRows; ++row) {
        for (int j = 0; j < kBlock; ++j) micro_lanes[i + j] += added[row][j] * added[row][j];
      }
    }
  }
  if (kFirst) end_of_stream();
  if (kMicro) *micro = fp32_sum(micro_lanes, kLanes);
  return chunk_sum(lanes, kLanes, acc, kChunk);
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

// What a step reads of a float buffer 1,024 elements from now, into the second-level cache: with four or five such
// walks at a time the processor's own prefetcher is behind. With the parameter streamed too, AdamW on 2^25 elements
// takes 0.80 of the time with two threads, 0.70 with one (AMD EPYC, AVX-512, gcc 12, 2026-12-01; within one run).
template <int kElems>
inline __attribute__((always_inline)) void ask_ahead(const float* buffer, int64_t i) {
  ask_for<kElems * sizeof(float) / kLine>(buffer + i + 1024);
}

template <bool kAmsgrad>
inline __attribute__((always_inline)) float adam_element(float param, float* __restrict exp_avg,
                                                         float* __restrict exp_avg_sq, float* __restrict max_exp_avg_sq,
                                                         const float* __restrict acc, int64_t i, const AdamScalars& c) {
  AdamState s;
  s.param = param;
  s.exp_avg = exp_avg[i];
  s.exp_avg_sq = exp_avg_sq[i];
  s.max_exp_avg_sq = kAmsgrad ? max_exp_avg_sq[i] : 0.0f;
  s = adam_update<kAmsgrad>(s, acc[i], c);
  exp_avg[i] = s.exp_avg;
  exp_avg_sq[i] = s.exp_avg_sq;
  if (kAmsgrad) max_exp_avg_sq[i] = s.max_exp_avg_sq;
  return s.param;
}

template <typename Param, bool kMaster, bool kAmsgrad, Place kPlace>
void adam_chunk(const AdamChunk& chunk, int64_t n, const AdamScalars& scalars) {
  const AdamScalars c = scalars;  // a copy cannot alias the stores below
  Param* __restrict param = static_cast<Param*>(chunk.param);
  float* __restrict master = chunk.master;
  float* __restrict exp_avg = chunk.exp_avg;
  float* __restrict exp_avg_sq = chunk.exp_avg_sq;
  float* __restrict max_exp_avg_sq = chunk.max_exp_avg_sq;
  const float* __restrict acc = chunk.acc;
  constexpr int kElems = kLine / sizeof(Param);
  int64_t i = 0;
  for (; kPlace == kFar && i + kElems <= n; i += kElems) {
    ask_ahead<kElems>(acc, i);
    ask_ahead<kElems>(exp_avg, i);
    ask_ahead<kElems>(exp_avg_sq, i);
    if (kAmsgrad) ask_ahead<kElems>(max_exp_avg_sq, i);
    if (kMaster) ask_ahead<kElems>(master, i);
    alignas(kLine) Param line[kElems];
    for (int j = 0; j < kElems; ++j) {
      const float before = kMaster ? master[i + j] : to_float(param[i + j]);
      const float after = adam_element<kAmsgrad>(before, exp_avg, exp_avg_sq, max_exp_avg_sq, acc, i + j, c);
      if (kMaster) master[i + j] = after;
      round_to(kMaster ? line[j] : param[i + j], after);
    }
    if (kMaster) stream_line(param + i, line);
  }
  if (kPlace == kFar && kMaster) end_of_stream();
  for (; i < n; ++i) {
    const float before = kMaster ? master[i] : to_float(param[i]);
    const float after = adam_element<kAmsgrad>(before, exp_avg, exp_avg_sq, max_exp_avg_sq, acc, i, c);
    if (kMaster) master[i] = after;
    round_to(param[i], after);
  }
}

template <bool kMomentum>
inline __attribute__((always_inline)) float sgd_element(float param, float* __restrict momentum_buffer,
                                                        const float* __restrict acc, int64_t i, const SgdScalars& c) {
  SgdState s;
  s.param = param;
  s.momentum_buffer = kMomentum ? momentum_buffer[i] : 0.0f;
  s = sgd_update<kMomentum>(s, acc[i], c);
  if (kMomentum) momentum_buffer[i] = s.momentum_buffer;
  return s.param;
}

template <typename Param, bool kMaster, bool kMomentum, Place kPlace>
void sgd_chunk(const SgdChunk& chunk, int64_t n, const SgdScalars& scalars) {
  const SgdScalars c = scalars;
  Param* __restrict param = static_cast<Param*>(chunk.param);
  float* __restrict master = chunk.master;
  float* __restrict momentum_buffer = chunk.momentum_buffer;
  const float* __restrict acc = chunk.acc;
  constexpr int kElems = kLine / sizeof(Param);
  int64_t i = 0;
  for (; kPlace == kFar && i + kElems <= n; i += kElems) {
    ask_ahead<kElems>(acc, i);
    if (kMomentum) ask_ahead<kElems>(momentum_buffer, i);
    if (kMaster) ask_ahead<kElems>(master, i);
    alignas(kLine) Param line[kElems];
    for (int j = 0; j < kElems; ++j) {
      const float before = kMaster ? master[i + j] : to_float(param[i + j]);
      const float after = sgd_element<kMomentum>(before, momentum_buffer, acc, i + j, c);
      if (kMaster) master[i + j] = after;
      round_to(kMaster ? line[j] : param[i + j], after);
    }
    if (kMaster) stream_line(param + i, line);
  }
  if (kPlace == kFar && kMaster) end_of_stream();
  for (; i < n; ++i) {
    const float before = kMaster ? master[i] : to_float(param[i]);
    const float after = sgd_element<kMomentum>(before, momentum_buffer, acc, i, c);
    if (kMaster) master[i] = after;
    round_to(param[i], after);
  }
}

}  // namespace

const Kernels& FA_ISA_KERNELS() {
  static const Kernels table = {
      FA_ISA_NAME,
      {{{accumulate_near<float, kAddLater>, accumulate_far<float, kAddLater>},
        {accumulate_near<float, kAddFirst>, accumulate_far<float, kAddFirst>},
        {accumulate_near<float, kAddLaterWithMicro>, accumulate_far<float, kAddLaterWithMicro>}},
       {{accumulate_near<bf16, kAddLater>, accumulate_far<bf16, kAddLater>},
        {accumulate_near<bf16, kAddFirst>, accumulate_far<bf16, kAddFirst>},
        {accumulate_near<bf16, kAddLaterWithMicro>, accumulate_far<bf16, kAddLaterWithMicro>}},
       {{accumulate_near<fp16, kAddLater>, accumulate_far<fp16, kAddLater>},
        {accumulate_near<fp16, kAddFirst>, accumulate_far<fp16, kAddFirst>},
        {accumulate_near<fp16, kAddLaterWithMicro>, accumulate_far<fp16, kAddLaterWithMicro>}}},
      sum_sq_chunk,
      {{{adam_chunk<float, false, false, kNear>, adam_chunk<float, false, false, kFar>},
        {adam_chunk<float, false, true, kNear>, adam_chunk<float, false, true, kFar>}},
       {{adam_chunk<bf16, true, false, kNear>, adam_chunk<bf16, true, false, kFar>},
        {adam_chunk<bf16, true, true, kNear>, adam_chunk<bf16, true, true, kFar>}},
       {{adam_chunk<fp16, true, false, kNear>, adam_chunk<fp16, true, false, kFar>},
        {adam_chunk<fp16, true, true, kNear>, adam_chunk<fp16, true, true, kFar>}},
       {{adam_chunk<bf16, false, false, kNear>, adam_chunk<bf16, false, false, kFar>},
        {adam_chunk<bf16, false, true, kNear>, adam_chunk<bf16, false, true, kFar>}},
       {{adam_chunk<fp16, false, false, kNear>, adam_chunk<fp16, false, false, kFar>},
        {adam_chunk<fp16, false, true, kNear>, adam_chunk<fp16, false, true, kFar>}}},
      {{{sgd_chunk<float, false, false, kNear>, sgd_chunk<float, false, false, kFar>},
        {sgd_chunk<float, false, true, kNear>, sgd_chunk<float, false, true, kFar>}},
       {{sgd_chunk<bf16, true, false, kNear>, sgd_chunk<bf16, true, false, kFar>},
        {sgd_chunk<bf16, true, true, kNear>, sgd_chunk<bf16, true, true, kFar>}},
       {{sgd_chunk<fp16, true, false, kNear>, sgd_chunk<fp16, true, false, kFar>},
        {sgd_chunk<fp16, true, true, kNear>, sgd_chunk<fp16, true, true, kFar>}},
       {{sgd_chunk<bf16, false, false, kNear>, sgd_chunk<bf16, false, false, kFar>},
        {sgd_chunk<bf16, false, true, kNear>, sgd_chunk<bf16, false, true, kFar>}},
       {{sgd_chunk<fp16, false, false, kNear>, sgd_chunk<fp16, false, false, kFar>},
        {sgd_chunk<fp16, false, true, kNear>, sgd_chunk<fp16, false, true, kFar>}}},
  };
  return table;
}

}  // namespace fusedaccum
