// What the language offers beyond plain arithmetic: local arrays, generic pointers, warps, tiles, atomics, conversions.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <stdint.h>
namespace cg = cooperative_groups;
__constant__ float ctab[8] = {1.f, 2.f, 4.f, 8.f, 16.f, 32.f, 64.f, 128.f};
__device__ int gtab[4] = {10, 20, 30, 40};
extern "C" __global__ void local_mem(const int* x, int* y, int n) {  // dynamically indexed local array
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int a[16];
  for (int k = 0; k < 16; k++) a[(k * 7 + x[i]) & 15] = k;
  int s = 0;
  for (int k = 0; k < 16; k++) s = s * 3 + a[(k + x[i]) & 15];
  y[i] = s;
}
extern "C" __global__ void tables(const int* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = ctab[x[i] & 7] + gtab[x[i] & 3];
}
__device__ __noinline__ float deref(const float* p, int k) { return p[k]; }
extern "C" __global__ void generic(const float* x, float* y, int pick) {
  __shared__ float s[128];
  s[threadIdx.x] = x[threadIdx.x] * 2;
  __syncthreads();
  const float* p = pick ? (const float*)s : x;
  y[threadIdx.x] = *(volatile const float*)(p + (threadIdx.x ^ 1));
}
extern "C" __global__ void cpasync(const float4* x, float4* y) {
  __shared__ float4 s[128];
  __pipeline_memcpy_async(&s[threadIdx.x], &x[blockIdx.x * 128 + threadIdx.x], 16);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();
  y[blockIdx.x * 128 + threadIdx.x] = s[127 - threadIdx.x];
}
extern "C" __global__ void warps(const int* x, int* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, v = x[i];
  unsigned m = __ballot_sync(~0u, v & 1);
  int r = __popc(m) + 100 * __any_sync(~0u, v > 990) + 1000 * __all_sync(~0u, v >= 0);
  if (v & 1) {
    unsigned a = __activemask();
    r += 7 * __popc(__match_any_sync(m, v % 5)) + (a == m ? 100000 : 0);
    r += __shfl_sync(m, v, __ffs(m) - 1);
  }
  __syncwarp();
#if __CUDA_ARCH__ >= 800
  r += __reduce_max_sync(~0u, v);
#endif
  y[i] = r;
}
extern "C" __global__ void tiles(const float* x, float* y) {
  auto t = cg::tiled_partition<8>(cg::this_thread_block());
  float s = cg::reduce(t, x[blockIdx.x * blockDim.x + threadIdx.x], cg::plus<float>());
  if (t.thread_rank() == 0) y[(blockIdx.x * blockDim.x + threadIdx.x) / 8] = s;
}
extern "C" __global__ void flow(const int* x, int* y, int n) {  // breaks, continue, switch, nested divergence
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int s = 0, v = x[i];
  for (int k = 0; k < 50; k++) {
    if (k % 7 == v % 7) continue;
    if (k > (v & 31)) break;
    switch ((k + v) % 6) {
      case 0: s += 1; break;
      case 1: s += k;
      case 2: s ^= 5; break;
      case 3: s *= 3; break;
      case 4: s -= v; break;
      default: s += 1000;
    }
    int w = v;
    while (w > 1) {
      s += w & 1;
      w = (w & 1) ? 3 * w + 1 : w / 2;
      if (s > 1000000) break;
    }
  }
  y[i] = s;
}
extern "C" __global__ void grid2d(float* y, int w, int h) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y * blockDim.y + threadIdx.y;
  if (x < w && r < h) y[r * w + x] = 1000 * r + x + 0.5f * blockIdx.z;
}
extern "C" __global__ void atomics(const float* x, double* d, __half2* h, int* mx, unsigned* cas, float* ex, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  atomicAdd(d, (double)x[i]);
  atomicAdd(h, __floats2half2_rn(1.f, 2.f));
  atomicMax(mx, (int)(x[i] * 1000));
  unsigned old = *cas, seen;
  do {
    seen = old;
    old = atomicCAS(cas, seen, seen + 3);
  } while (old != seen);
  atomicExch(ex, x[i]);
}
extern "C" __global__ void divergent_exit(float* y, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  __shared__ float s[256];
  s[i] = i;
  __syncthreads();
  y[i] = s[n - 1 - i];
}
extern "C" __global__ void fast(const float* x, float* y, int n) {
  int i = threadIdx.x;
  if (i < n) y[i] = __expf(x[i]) + sinf(x[i]) * rsqrtf(x[i]) / x[i] + __logf(x[i]) + __saturatef(x[i]);
}
extern "C" __global__ void shuffle_loop(const float* x, float* y,
                                        int n) {  // grid-stride loop with uneven warps, warp sum inside
  float tot = 0;
  for (int base = blockIdx.x * blockDim.x; base < n; base += gridDim.x * blockDim.x) {
    int i = base + threadIdx.x;
    float v = i < n ? x[i] : 0.f;
    for (int o = 16; o; o >>= 1) v += __shfl_down_sync(~0u, v, o);
    tot += v;
  }
  if (threadIdx.x % 32 == 0) atomicAdd(y, tot);
}
extern "C" __global__ void vec64(const double2* x, double2* y, const uint4* u, uint4* v) {
  y[threadIdx.x] = make_double2(x[threadIdx.x].y, x[threadIdx.x].x);
  uint4 t = u[threadIdx.x];
  v[threadIdx.x] = make_uint4(t.w, t.z, t.y, t.x);
}
extern "C" __global__ void callee(const float* x, float* y) { y[threadIdx.x] = deref(x, threadIdx.x); }
extern "C" __global__ void cvts(const float* x, __half* h, __nv_bfloat16* b, float* o, signed char* c,
                                unsigned short* us, long long* ll) {
  int i = threadIdx.x;
  float f = x[i];
  h[i] = __float2half_rz(f);
  b[i] = __float2bfloat16_rz(f);
  c[i] = (signed char)(int)f;
  us[i] = (unsigned short)fabsf(f);
  ll[i] = (long long)(f * 1e6f);
  o[4 * i] = __half2float(__float2half_rn(f));
  o[4 * i + 1] = (float)(double)f + __int2float_rz(123456789 + i);
  o[4 * i + 2] = rintf(f);
  o[4 * i + 3] = __double2float_ru((double)f / 3);
}
