// What a decoder layer does to each token by itself: norm, linear, activation.
//
// Called by every thread of a parallel region, which share the work and wait for each other at the end of each function.
#pragma once
#include "vec.h"

#include <algorithm>

namespace {

constexpr int64_t LINEAR_ROWS = 48;  // rows of a linear's task

#ifdef __AVX512BF16__
template <class T> struct MathOf { typedef Floats type; };
template <> struct MathOf<bf16> { typedef Pairs type; };
#else
template <class T> struct MathOf { typedef Floats type; };
#endif

template <class T> void normalize(const T* x, const T* weight, float eps, int64_t n, T* out) {
  f32x16 squares = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) squares += read16(x + i) * read16(x + i);
  float total = sum16(squares);
  for (int64_t j = i; j < n; j++) total += read1(x + j) * read1(x + j);
  float inverse = 1.0f / __builtin_sqrtf(total / n + eps);
  for (i = 0; i + 16 <= n; i += 16) write16(out + i, read16(x + i) * inverse * read16(weight + i));
  for (; i < n; i++) write1(out + i, read1(x + i) * inverse * read1(weight + i));
}

template <class T> void rms_norm(const T* x, const T* weight, float eps, int64_t rows, int64_t n, T* out) {
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; r++) normalize(x + r * n, weight, eps, n, out + r * n);
}

// [rows, 2 n] -> [rows, n]: silu(first half) * second half.
template <class T> void silu_mul(const T* x, int64_t rows, int64_t n, T* out) {
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    const T *gate = x + 2 * r * n, *up = gate + n;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
      f32x16 g = read16(gate + i);
      write16(out + r * n + i, g / (1.0f + exp16(-g)) * read16(up + i));
    }
    for (; i < n; i++) {
      float g = read1(gate + i);
      write1(out + r * n + i, g / (1.0f + exp16(splat(-g))[0]) * read1(up + i));
    }
  }
}

// out[rows][n] = x[rows][words] * packed + bias + residual, the latter two where not null. packed[n / 64][words][64], zeros past n.
// Each sum runs over the words in order.
template <class T>
void linear(const T* x, const uint32_t* packed, const T* bias, const T* residual, int64_t rows, int64_t words, int64_t n, T* out) {
  typedef typename MathOf<T>::type M;
  int64_t panels = (n + 63) / 64, chunks = (rows + LINEAR_ROWS - 1) / LINEAR_ROWS;
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < panels * chunks; i++) {
    int64_t first = i % chunks * LINEAR_ROWS, count = std::min(LINEAR_ROWS, rows - first), column = i / chunks * 64;
    float sums[LINEAR_ROWS * 64];
    rows_times<M, 4, 24>((const uint32_t*)x + first * words, words, count, packed + column * words, 64, words, sums, 64, false);
    for (int64_t r = 0; r < count; r++)
      for (int64_t c = column, end = std::min(n, column + 64); c < end; c += 16) {
        f32x16 sum = load<f32x16>(sums + r * 64 + c - column);
        int64_t at = (first + r) * n + c;
        if (c + 16 <= end) {
          if (bias) sum += read16(bias + c);
          if (residual) sum += read16(residual + at);
          write16(out + at, sum);
          continue;
        }
        for (int64_t j = 0; c + j < end; j++)
          write1(out + at + j, sum[j] + (bias ? read1(bias + c + j) : 0) + (residual ? read1(residual + at + j) : 0));
      }
  }
}

}  // namespace
