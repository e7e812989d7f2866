// Struct parameters by value, up to the 32,764 bytes that CUDA allows, and 64-bit indices.
#include <cstdint>

struct Row {
  float* acc;
  const float* grad;
  int64_t n_elems;
  float scale;
  int32_t pad;
};

template <int kRows>
struct Table {
  int32_t n_rows;
  Row rows[kRows];
};

constexpr int kManyRows = 1000;  // 32,008 bytes

template <typename AnyTable>
__device__ void add_row(const AnyTable& table) {
  const int64_t r = blockIdx.x;
  if (r >= table.n_rows) return;
  const Row& row = table.rows[r];
  for (int64_t i = threadIdx.x; i < row.n_elems; i += blockDim.x) row.acc[i] += row.grad[i] * row.scale;
}

__global__ void add_rows(const __grid_constant__ Table<4> table, int64_t step) { add_row(table); }
__global__ void add_many_rows(const __grid_constant__ Table<kManyRows> table) { add_row(table); }

// Without __grid_constant__ the compiler may copy the struct to the stack of every thread. Writing to it forces that.
__global__ void add_copied_rows(Table<kManyRows> table, int64_t which) {
  table.rows[which].scale = 2.0f;
  add_row(table);
}

template <typename T>
__global__ void fill(T* out, int64_t n, T value) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = value;
}
template __global__ void fill<float>(float*, int64_t, float);
template __global__ void fill<double>(double*, int64_t, double);

__device__ int n_launches = 0;
__global__ void count_launches(int* out) { *out = ++n_launches; }
