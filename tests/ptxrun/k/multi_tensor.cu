// Kernels like those of a multi-tensor optimizer, and broken ones that the interpreter has to catch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

// ---- apex-like multi-tensor metadata, passed BY VALUE as a kernel parameter
#define MAXT 24
#define MAXB 80
struct Meta {
  void* a[MAXT];        // fp32 accumulators
  const void* g[MAXT];  // grads
  int64_t n[MAXT];      // elements
  uint8_t block_t[MAXB];
  int32_t block_c[MAXB];
};

template <typename T>
__device__ __forceinline__ float tof(T x);
template <>
__device__ __forceinline__ float tof<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ float tof<__half>(__half x) {
  return __half2float(x);
}
template <>
__device__ __forceinline__ float tof<__nv_bfloat16>(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <typename T>
struct alignas(sizeof(T) * 4) V4 {
  T v[4];
};

// (i) acc += scale*g
template <typename T>
__device__ void acc_body(const Meta& m, int64_t chunk, float scale) {
  int t = m.block_t[blockIdx.x];
  int64_t off = (int64_t)m.block_c[blockIdx.x] * chunk;
  int64_t n = m.n[t] - off;
  if (n > chunk) n = chunk;
  float* a = (float*)m.a[t] + off;
  const T* g = (const T*)m.g[t] + off;
  bool al = (((uintptr_t)a) % 16 == 0) && (((uintptr_t)g) % (4 * sizeof(T)) == 0);
  if (al) {
    int64_t nv = n / 4;
    for (int64_t i = threadIdx.x; i < nv; i += blockDim.x) {
      float4 x = ((float4*)a)[i];
      V4<T> y = ((const V4<T>*)g)[i];
      x.x = fmaf(scale, tof(y.v[0]), x.x);
      x.y = fmaf(scale, tof(y.v[1]), x.y);
      x.z = fmaf(scale, tof(y.v[2]), x.z);
      x.w = fmaf(scale, tof(y.v[3]), x.w);
      ((float4*)a)[i] = x;
    }
    int64_t i = nv * 4 + threadIdx.x;
    if (i < n) a[i] = fmaf(scale, tof(g[i]), a[i]);
  } else {
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) a[i] = fmaf(scale, tof(g[i]), a[i]);
  }
}
extern "C" __global__ void __launch_bounds__(512) acc_f32(const __grid_constant__ Meta m, int64_t chunk, float s) {
  acc_body<float>(m, chunk, s);
}
extern "C" __global__ void __launch_bounds__(512) acc_f16(const __grid_constant__ Meta m, int64_t chunk, float s) {
  acc_body<__half>(m, chunk, s);
}
extern "C" __global__ void __launch_bounds__(512) acc_bf16(const __grid_constant__ Meta m, int64_t chunk, float s) {
  acc_body<__nv_bfloat16>(m, chunk, s);
}
extern "C" __global__ void __launch_bounds__(512) acc_bf16_byval(Meta m, int64_t chunk, float s) {
  acc_body<__nv_bfloat16>(m, chunk, s);
}

// (ii) fused with a sum of squares + nonfinite flag
template <typename T, bool ATOM>
__device__ void accnorm_body(const Meta& m, int64_t chunk, float scale, float* out, int* flag) {
  int t = m.block_t[blockIdx.x];
  int64_t off = (int64_t)m.block_c[blockIdx.x] * chunk;
  int64_t n = m.n[t] - off;
  if (n > chunk) n = chunk;
  float* a = (float*)m.a[t] + off;
  const T* g = (const T*)m.g[t] + off;
  float ss = 0.f;
  bool bad = false;
  for (int64_t base = 0; base < n; base += blockDim.x * 4) {
    float x[4], y[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      int64_t i = base + threadIdx.x + k * blockDim.x;
      x[k] = 0.f;
      y[k] = 0.f;
      if (i < n) {
        x[k] = a[i];
        y[k] = tof(g[i]);
      }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      int64_t i = base + threadIdx.x + k * blockDim.x;
      if (i < n) {
        float r = fmaf(scale, y[k], x[k]);
        a[i] = r;
        ss = fmaf(r, r, ss);
        bad |= !isfinite(r);
      }
    }
  }
  if (__syncthreads_or(bad)) {
    if (threadIdx.x == 0) *flag = 1;
  }
  __shared__ float sm[32];
#pragma unroll
  for (int o = 16; o; o >>= 1) ss += __shfl_xor_sync(0xffffffffu, ss, o);
  int lane = threadIdx.x & 31, w = threadIdx.x >> 5;
  if (lane == 0) sm[w] = ss;
  __syncthreads();
  if (w == 0) {
    ss = lane < (blockDim.x + 31) / 32 ? sm[lane] : 0.f;
#pragma unroll
    for (int o = 16; o; o >>= 1) ss += __shfl_down_sync(0xffffffffu, ss, o);
    if (lane == 0) {
      if (ATOM)
        atomicAdd(out, ss);
      else
        out[blockIdx.x] = ss;
    }
  }
}
extern "C" __global__ void __launch_bounds__(512)
    accnorm_bf16(const __grid_constant__ Meta m, int64_t chunk, float s, float* out, int* flag) {
  accnorm_body<__nv_bfloat16, false>(m, chunk, s, out, flag);
}
extern "C" __global__ void __launch_bounds__(512)
    accnorm_f16_atomic(const __grid_constant__ Meta m, int64_t chunk, float s, float* out, int* flag) {
  accnorm_body<__half, true>(m, chunk, s, out, flag);
}

// (iii) AdamW with device-side scale / found_inf, fp32 master + bf16 copy-out
struct Hyper {
  float lr, b1, b2, eps, wd, bc1, bc2;
};
extern "C" __global__ void __launch_bounds__(256)
    adamw(float* __restrict__ p, float* __restrict__ m, float* __restrict__ v, const __nv_bfloat16* __restrict__ g,
          __nv_bfloat16* __restrict__ pb, const float* inv_scale, const float* found_inf, Hyper h, int n) {
  if (*found_inf != 0.f) return;
  float is = *inv_scale;
  int nv = n >> 2;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < nv; i += gridDim.x * blockDim.x) {
    float4 P = ((float4*)p)[i], M = ((float4*)m)[i], V = ((float4*)v)[i];
    uint2 G = ((const uint2*)g)[i];
    float gg[4];
    __nv_bfloat162 g0 = *(__nv_bfloat162*)&G.x, g1 = *(__nv_bfloat162*)&G.y;
    gg[0] = __low2float(g0);
    gg[1] = __high2float(g0);
    gg[2] = __low2float(g1);
    gg[3] = __high2float(g1);
    float pp[4] = {P.x, P.y, P.z, P.w}, mm[4] = {M.x, M.y, M.z, M.w}, vv[4] = {V.x, V.y, V.z, V.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float x = gg[k] * is;
      pp[k] = __fmul_rn(pp[k], 1.f - h.lr * h.wd);
      mm[k] = __fadd_rn(__fmul_rn(h.b1, mm[k]), __fmul_rn(1.f - h.b1, x));
      vv[k] = __fadd_rn(__fmul_rn(h.b2, vv[k]), __fmul_rn(__fmul_rn(1.f - h.b2, x), x));
      float d = __fadd_rn(__fdiv_rn(__fsqrt_rn(vv[k]), h.bc2), h.eps);
      pp[k] = __fsub_rn(pp[k], __fmul_rn(h.lr / h.bc1, __fdiv_rn(mm[k], d)));
    }
    ((float4*)p)[i] = make_float4(pp[0], pp[1], pp[2], pp[3]);
    ((float4*)m)[i] = make_float4(mm[0], mm[1], mm[2], mm[3]);
    ((float4*)v)[i] = make_float4(vv[0], vv[1], vv[2], vv[3]);
    __nv_bfloat162 o0 = __floats2bfloat162_rn(pp[0], pp[1]), o1 = __floats2bfloat162_rn(pp[2], pp[3]);
    ((uint2*)pb)[i] = make_uint2(*(uint32_t*)&o0, *(uint32_t*)&o1);
  }
  if (blockIdx.x == 0)
    for (int i = nv * 4 + threadIdx.x; i < n; i += blockDim.x) {
      float x = __bfloat162float(g[i]) * is;
      float P = __fmul_rn(p[i], 1.f - h.lr * h.wd);
      float M = __fadd_rn(__fmul_rn(h.b1, m[i]), __fmul_rn(1.f - h.b1, x));
      float V = __fadd_rn(__fmul_rn(h.b2, v[i]), __fmul_rn(__fmul_rn(1.f - h.b2, x), x));
      float d = __fadd_rn(__fdiv_rn(__fsqrt_rn(V), h.bc2), h.eps);
      P = __fsub_rn(P, __fmul_rn(h.lr / h.bc1, __fdiv_rn(M, d)));
      p[i] = P;
      m[i] = M;
      v[i] = V;
      pb[i] = __float2bfloat16_rn(P);
    }
}

// (iv) stochastic rounding fp32 -> bf16 with a counter-based hash RNG
__device__ __forceinline__ uint32_t hash32(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  x ^= x >> 16;
  return x;
}
extern "C" __global__ void sr_bf16(const float* __restrict__ x, uint16_t* __restrict__ y, int n, uint64_t seed) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uint32_t r = hash32((uint32_t)i ^ (uint32_t)seed) + (uint32_t)(seed >> 32);
  r = hash32(r);
  uint32_t u = __float_as_uint(x[i]);
  if ((u & 0x7f800000u) == 0x7f800000u) {
    y[i] = (u & 0x7fffffu) ? 0x7fff : (uint16_t)(u >> 16);
    return;
  }
  y[i] = (uint16_t)((u + (r & 0xffffu)) >> 16);
}

// extra: half2/bf162 arithmetic, double, int ops, local memory, atomics
extern "C" __global__ void misc_half2(const __half2* a, const __half2* b, __half2* o, const __nv_bfloat162* c,
                                      const __nv_bfloat162* d, __nv_bfloat162* p, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  __half2 x = a[i], y = b[i];
  o[4 * i] = __hadd2(x, y);
  o[4 * i + 1] = __hmul2(x, y);
  o[4 * i + 2] = __hfma2(x, y, x);
  o[4 * i + 3] = __hmax2(x, y);
  __nv_bfloat162 u = c[i], v = d[i];
  p[4 * i] = __hadd2(u, v);
  p[4 * i + 1] = __hmul2(u, v);
  p[4 * i + 2] = __hfma2(u, v, u);
  p[4 * i + 3] = __hmin2(u, v);
}
extern "C" __global__ void misc_math(const float* a, const double* b, float* o, double* q, int* z, long long* zz,
                                     int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float x = a[i];
  double y = b[i];
  o[8 * i] = sqrtf(x);
  o[8 * i + 1] = rsqrtf(x);
  o[8 * i + 2] = 1.f / x;
  o[8 * i + 3] = __fdividef(x, 3.f);
  o[8 * i + 4] = expf(-x);
  o[8 * i + 5] = fabsf(x) - fmaxf(x, 0.5f);
  o[8 * i + 6] = floorf(x * 7.f);
  o[8 * i + 7] = (float)y;
  q[2 * i] = sqrt(y);
  q[2 * i + 1] = y / 3.0 + fma(y, y, 1.0);
  z[4 * i] = i / 7;
  z[4 * i + 1] = i % 13;
  z[4 * i + 2] = (int)(x * 100.f);
  z[4 * i + 3] = __popc(i) + __clz(i) + __ffs(i) + __brev(i);
  zz[i] = (long long)i * 0x123456789LL / 1000 + __umul64hi(0x9E3779B97F4A7C15ULL, (unsigned long long)i << 40);
}
extern "C" __global__ void hist(const int* x, int* h, unsigned long long* tot, int n) {
  __shared__ int s[16];
  if (threadIdx.x < 16) s[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    atomicAdd(&s[x[i] & 15], 1);
    atomicAdd(tot, (unsigned long long)x[i]);
  }
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(&h[threadIdx.x], s[threadIdx.x]);
}
// last-block-done pattern
__device__ unsigned int g_count = 0;
extern "C" __global__ void two_phase(const float* x, float* part, float* out, int n) {
  extern __shared__ float dyn[];
  __shared__ bool last;
  float s = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) s += x[i];
  dyn[threadIdx.x] = s;
  __syncthreads();
  for (int o = blockDim.x / 2; o; o >>= 1) {
    if (threadIdx.x < o) dyn[threadIdx.x] += dyn[threadIdx.x + o];
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    part[blockIdx.x] = dyn[0];
    __threadfence();
    last = atomicInc(&g_count, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    float t = 0;
    for (int b = 0; b < gridDim.x; b++) t += ((volatile float*)part)[b];
    *out = t;
  }
}
// ---- broken kernels, which the tool has to catch
extern "C" __global__ void bad_oob(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) x[i] += 1.f;
}
extern "C" __global__ void bad_misaligned(float* x, float* y) {
  ((float4*)(y))[threadIdx.x] = *(float4*)(x + 1 + threadIdx.x * 4);
}
extern "C" __global__ void bad_uninit(float* x, float* y) {
  __shared__ float s[64];
  if (threadIdx.x < 32) s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void bad_barrier(float* x) {
  if (threadIdx.x < 16) {
    x[threadIdx.x] = 1.f;
    __syncthreads();
  }
  x[threadIdx.x + 64] = 2.f;
}
extern "C" __global__ void bad_race(float* x) {
  __shared__ float s[128];
  s[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = s[127 - threadIdx.x];
}
extern "C" __global__ void bad_shfl(float* x) {
  float v = x[threadIdx.x];
  if (threadIdx.x < 8) v += __shfl_xor_sync(0xffffffffu, v, 1);
  x[threadIdx.x] = v;
}
