// Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
//
// y = x w^T + b for the few rows of x that a verify has: w is read from memory once, at the speed of memory.
//
// A thread takes three rows of w at a time, and up to four rows of x, so that what is loaded is used several times from
// registers. Further rows of x find the three rows of w in the cache; meanwhile the next three are fetched, each part of
// x seeing to its share. A sum is formed in the same order however many rows x has: no row's result depends on the others.

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

namespace {

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

// a * b + c. Compilers fuse the two where they think fit, and not alike in every loop: here always, where it can be.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

struct bfloat16 {
  uint16_t bits;  // the upper half of a float
};

inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Floats load(const bfloat16* from) {
  Halves bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

inline float value(float x) { return x; }

inline float value(bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void store(float* to, float x) { *to = x; }

inline void store(bfloat16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  // To the nearest, and to the even one of two; what is not a number stays so.
  to->bits = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40;
}

constexpr int ROWS = 4, COLUMNS = 3;  // of y in a tile: twelve sums, which with their operands fill sixteen registers

template <typename T, int M, int N>
void tile(const float* x, const T* w, const T* b, T* y, int64_t n, int64_t k, int64_t part, int64_t parts) {
  Floats sums[N][M] = {};
  int64_t j = 0;
  for (; j + LANES <= k; j += LANES) {
    Floats rows[M];
    for (int m = 0; m < M; ++m) rows[m] = load(x + m * k + j);
    for (int i = 0; i < N; ++i) {
      if (i % parts == part) __builtin_prefetch(w + (N + i) * k + j);
      const Floats column = load(w + i * k + j);
      for (int m = 0; m < M; ++m) sums[i][m] = fused(column, rows[m], sums[i][m]);
    }
  }
  for (int i = 0; i < N; ++i)
    for (int m = 0; m < M; ++m) {
      float sum = 0;
      for (int lane = 0; lane < LANES; ++lane) sum += sums[i][m][lane];
      for (int64_t rest = j; rest < k; ++rest) sum += x[m * k + rest] * value(w[i * k + rest]);
      store(y + m * n + i, b ? sum + value(b[i]) : sum);
    }
}

template <typename T, int N>
void tiles(const float* x, const T* w, const T* b, T* y, int64_t m, int64_t n, int64_t k) {
  const int64_t parts = (m + ROWS - 1) / ROWS;
  for (int64_t part = 0, row = 0; part < parts; ++part) {
    const int64_t rows = (m - row + parts - part - 1) / (parts - part);  // as even as can be: 5 is 3 and 2
    const float* from = x + row * k;
    T* to = y + row * n;
    switch (rows) {
      case 1: tile<T, 1, N>(from, w, b, to, n, k, part, parts); break;
      case 2: tile<T, 2, N>(from, w, b, to, n, k, part, parts); break;
      case 3: tile<T, 3, N>(from, w, b, to, n, k, part, parts); break;
      default: tile<T, 4, N>(from, w, b, to, n, k, part, parts);
    }
    row += rows;
  }
}

template <typename T>
void product(const float* x, const T* w, const T* b, T* y, int64_t m, int64_t n, int64_t k, int threads) {
  const int64_t whole = n / COLUMNS;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t t = 0; t < whole + n % COLUMNS; ++t) {
    const int64_t i = t < whole ? t * COLUMNS : n - n % COLUMNS + t - whole;
    if (t < whole)
      tiles<T, COLUMNS>(x, w + i * k, b ? b + i : b, y + i, m, n, k);
    else
      tiles<T, 1>(x, w + i * k, b ? b + i : b, y + i, m, n, k);
  }
}

}  // namespace

// x `[m, k]`, w `[n, k]`, b `[n]` or null, y `[m, n]`, all contiguous.
extern "C" void product_float32(
    const float* x, const float* w, const float* b, float* y, int64_t m, int64_t n, int64_t k, int threads) {
  product(x, w, b, y, m, n, k, threads);
}

extern "C" void product_bfloat16(
    const bfloat16* x, const bfloat16* w, const bfloat16* b, bfloat16* y, int64_t m, int64_t n, int64_t k, int threads) {
  std::vector<float> wide(m * k);
  for (int64_t i = 0; i < m * k; ++i) wide[i] = value(x[i]);
  product(wide.data(), w, b, y, m, n, k, threads);
}
