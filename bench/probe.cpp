// Moves the bytes of the kernels and computes nothing: what this machine's memory allows.
#include <cstdint>
#include <thread>
#include <vector>

namespace {

// Equal shares of [0, n), cut at whole cache lines; the caller's thread takes the first.
template <typename Work>
void share(int64_t n, int n_threads, Work work) {
  const int64_t part = (n / n_threads + 63) / 64 * 64;
  std::vector<std::thread> threads;
  for (int t = 1; t < n_threads; ++t) {
    const int64_t begin = t * part < n ? t * part : n;
    const int64_t end = begin + part < n && t + 1 < n_threads ? begin + part : n;
    threads.emplace_back([=] { work(begin, end); });
  }
  work(0, n_threads > 1 && part < n ? part : n);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

// The xor stands for the arithmetic: it keeps the compiler from dropping a read and costs one integer instruction.
extern "C" void probe_accumulate(uint32_t* __restrict acc, const uint16_t* __restrict grad, int64_t n, int n_threads) {
  share(n, n_threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) acc[i] ^= grad[i];
  });
}

extern "C" void probe_first(uint32_t* __restrict acc, const uint16_t* __restrict grad, int64_t n, int n_threads) {
  share(n, n_threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) acc[i] = grad[i];
  });
}

extern "C" void probe_boundary(uint16_t* __restrict param, uint32_t* __restrict master, uint32_t* __restrict exp_avg,
                               uint32_t* __restrict exp_avg_sq, const uint32_t* __restrict acc, int64_t n,
                               int n_threads) {
  share(n, n_threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      exp_avg[i] ^= acc[i];
      exp_avg_sq[i] ^= acc[i];
      master[i] ^= acc[i];
      param[i] = static_cast<uint16_t>(master[i] >> 16);
    }
  });
}
