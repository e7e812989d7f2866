// Eight elements at a time: a thread's share of a row of 1024.
#pragma once

#include <cstdint>

#include "../math.h"

namespace fusedaccum {

__device__ __forceinline__ bool is_aligned(const void* pointer) {
  return (reinterpret_cast<uint64_t>(pointer) & 15) == 0;
}

// 16 bytes. kGlobal: the pointer was kept in shared memory, from where the compiler cannot tell that it is global and
// would take generic accesses, so the access is written out. (__isGlobal would tell it, and makes adam_kernel spill on
// sm_90 with CUDA 13.0.) Elsewhere the compiler's own access leaves it more freedom.
template <bool kGlobal>
__device__ __forceinline__ uint4 load16(const void* from) {
  if (!kGlobal) return *static_cast<const uint4*>(from);
  uint4 words;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from)
               : "memory");
  return words;
}

template <bool kGlobal>
__device__ __forceinline__ void store16(void* to, uint4 words) {
  if (!kGlobal) {
    *static_cast<uint4*>(to) = words;
  } else {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
  }
}

// Loads and stores of 4 fp32 or 8 16-bit values in a row, 16 bytes an access where `kAligned` says that the address
// allows it.
template <bool kAligned, bool kGlobal = false>
__device__ __forceinline__ void load4(float* out, const float* from) {
  if (kAligned) {
    const uint4 words = load16<kGlobal>(from);
    out[0] = float_of(words.x), out[1] = float_of(words.y), out[2] = float_of(words.z), out[3] = float_of(words.w);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = from[i];
  }
}

template <bool kAligned, bool kGlobal = false>
__device__ __forceinline__ void store4(float* to, const float* values) {
  if (kAligned) {
    store16<kGlobal>(to, make_uint4(bits_of(values[0]), bits_of(values[1]), bits_of(values[2]), bits_of(values[3])));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = values[i];
  }
}

template <bool kAligned, bool kGlobal = false>
__device__ __forceinline__ void load8(float* out, const float* from) {
  load4<kAligned, kGlobal>(out, from);
  load4<kAligned, kGlobal>(out + 4, from + 4);
}

template <bool kAligned, bool kGlobal = false, typename Half>  // Half: bf16 or fp16, carried as bits
__device__ __forceinline__ void load8(float* out, const Half* from) {
  if (kAligned) {
    const uint4 words = load16<kGlobal>(from);
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = to_float(Half{static_cast<uint16_t>(pairs[i] & 0xffffu)});
      out[2 * i + 1] = to_float(Half{static_cast<uint16_t>(pairs[i] >> 16)});
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = to_float(from[i]);
  }
}

template <bool kAligned, bool kGlobal = false>
__device__ __forceinline__ void store8(float* to, const float* values) {
  store4<kAligned, kGlobal>(to, values);
  store4<kAligned, kGlobal>(to + 4, values + 4);
}

template <bool kAligned, bool kGlobal = false, typename Half>
__device__ __forceinline__ void store8(Half* to, const float* values) {
  if (kAligned) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Half low, high;
      round_to(low, values[2 * i]);
      round_to(high, values[2 * i + 1]);
      pairs[i] = static_cast<uint32_t>(low.bits) | (static_cast<uint32_t>(high.bits) << 16);
    }
    store16<kGlobal>(to, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) round_to(to[i], values[i]);
  }
}

}  // namespace fusedaccum
