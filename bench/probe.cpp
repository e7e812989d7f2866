// Moves the bytes of the kernels and computes nothing: what this machine's memory allows.
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

// A cache line written past the caches, so that it need not be read first. `to` is aligned to 64 bytes.
void stream_line(void* to, const void* line) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(line));
#elif defined(__AVX__)
  for (int i = 0; i < 2; ++i)
    _mm256_stream_si256(static_cast<__m256i*>(to) + i, _mm256_loadu_si256(static_cast<const __m256i*>(line) + i));
#elif defined(__x86_64__)
  for (int i = 0; i < 4; ++i)
    _mm_stream_si128(static_cast<__m128i*>(to) + i, _mm_loadu_si128(static_cast<const __m128i*>(line) + i));
#else
  __builtin_memcpy(to, line, 64);
#endif
}

void end_of_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// out[i] = value(i) for [begin, end), begin a multiple of 64 elements.
template <typename Out, typename Value>
void write(Out* __restrict out, int64_t begin, int64_t end, bool streaming, Value value) {
  int64_t i = begin;
  if (streaming) {
    constexpr int kLine = 64 / sizeof(Out);
    for (; i + kLine <= end; i += kLine) {
      alignas(64) Out line[kLine];
      for (int j = 0; j < kLine; ++j) line[j] = value(i + j);
      stream_line(out + i, line);
    }
    end_of_stream();
  }
  for (; i < end; ++i) out[i] = value(i);
}

// The xor stands for the arithmetic: it keeps the compiler from dropping a read and costs one integer instruction.
template <typename Acc, typename Grad>
void add(void* acc_, const void* grad_, int64_t n, int n_threads) {
  share(n, n_threads, [=](int64_t begin, int64_t end) {
    Acc* __restrict acc = static_cast<Acc*>(acc_);
    const Grad* __restrict grad = static_cast<const Grad*>(grad_);
    for (int64_t i = begin; i < end; ++i) acc[i] ^= grad[i];
  });
}

template <typename Grad>
void store(void* acc_, const void* grad_, int64_t n, bool streaming, int n_threads) {
  share(n, n_threads, [=](int64_t begin, int64_t end) {
    const Grad* __restrict grad = static_cast<const Grad*>(grad_);
    write(static_cast<uint32_t*>(acc_), begin, end, streaming,
          [=](int64_t i) { return static_cast<uint32_t>(grad[i]); });
  });
}

template <int kStates, bool kParam16>
void update(void* param_, uint32_t* const* buffers, const uint32_t* acc_, int64_t n, bool streaming, int n_threads) {
  share(n, n_threads, [=](int64_t begin, int64_t end) {
    const uint32_t* __restrict acc = acc_;
    uint32_t* __restrict master = buffers[0];
    uint32_t* __restrict first = kStates > 0 ? buffers[1] : nullptr;
    uint32_t* __restrict second = kStates > 1 ? buffers[2] : nullptr;
    const auto value = [=](int64_t i) {
      if (kStates > 0) first[i] ^= acc[i];
      if (kStates > 1) second[i] ^= acc[i];
      return static_cast<uint16_t>((master[i] ^= acc[i]) >> 16);
    };
    if (kParam16) {
      write(static_cast<uint16_t*>(param_), begin, end, streaming, value);
    } else {
      for (int64_t i = begin; i < end; ++i) value(i);
    }
  });
}

template <int kStates>
void update(void* param, uint32_t* const* buffers, const uint32_t* acc, int64_t n, bool streaming, int n_threads) {
  if (param == nullptr) {
    update<kStates, false>(param, buffers, acc, n, streaming, n_threads);
  } else {
    update<kStates, true>(param, buffers, acc, n, streaming, n_threads);
  }
}

}  // namespace

// Reads and writes `acc`, reads `grad`.
extern "C" void probe_add(void* acc, const void* grad, int acc_bytes, int grad_bytes, int64_t n, int n_threads) {
  if (acc_bytes == 2) {
    add<uint16_t, uint16_t>(acc, grad, n, n_threads);
  } else if (grad_bytes == 2) {
    add<uint32_t, uint16_t>(acc, grad, n, n_threads);
  } else {
    add<uint32_t, uint32_t>(acc, grad, n, n_threads);
  }
}

// Reads `grad`, writes `acc`, of 4 bytes an element.
extern "C" void probe_store(void* acc, const void* grad, int grad_bytes, int64_t n, int streaming, int n_threads) {
  if (grad_bytes == 2) {
    store<uint16_t>(acc, grad, n, streaming != 0, n_threads);
  } else {
    store<uint32_t>(acc, grad, n, streaming != 0, n_threads);
  }
}

// Reads `acc`, reads and writes the master and `n_states` states of `buffers`, writes the 16-bit `param` unless null.
extern "C" void probe_update(void* param, uint32_t* const* buffers, int n_states, const uint32_t* acc, int64_t n,
                             int streaming, int n_threads) {
  if (n_states == 2) {
    update<2>(param, buffers, acc, n, streaming != 0, n_threads);
  } else {
    update<1>(param, buffers, acc, n, streaming != 0, n_threads);
  }
}
