// Sixteen-lane vectors and the matrix micro-kernel that every kernel here is made of.
//
// Plain GCC vector extensions: one source for AVX-512 (native), AVX2 and NEON (the compiler splits them). Every float operation is
// written out in order, so a row's result does not depend on how many rows are computed with it.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

static inline f32x16 splat(float x) { return x - f32x16{}; }
template <class V> static inline V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V> static inline void store(void* p, V v) { memcpy(p, &v, sizeof v); }

static inline f32x16 read16(const float* p) { return load<f32x16>(p); }
static inline f32x16 read16(const bf16* p) { return (f32x16)(__builtin_convertvector(load<u16x16>(p), u32x16) << 16); }
static inline u16x16 to_bf16(f32x16 x) {  // round to nearest even; NaN stays NaN
  u32x16 bits = (u32x16)x;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector((x == x) ? rounded : (bits >> 16) | 0x40, u16x16);
}
static inline void write16(float* p, f32x16 x) { store(p, x); }
static inline void write16(bf16* p, f32x16 x) { store(p, to_bf16(x)); }

static inline float read1(const float* p) { return *p; }
static inline float read1(const bf16* p) {
  uint32_t bits = (uint32_t)p->bits << 16;
  return load<float>(&bits);
}
static inline void write1(float* p, float x) { *p = x; }
static inline void write1(bf16* p, float x) { p->bits = to_bf16(splat(x))[0]; }

static inline f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }
template <int N> static inline f32x16 rotated(f32x16 x) {
  i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return __builtin_shuffle(x, (lane + N) & 15);
}
static inline float sum16(f32x16 x) {
  x += rotated<8>(x);
  x += rotated<4>(x);
  x += rotated<2>(x);
  x += rotated<1>(x);
  return x[0];
}
static inline float top16(f32x16 x) {
  x = max16(x, rotated<8>(x));
  x = max16(x, rotated<4>(x));
  x = max16(x, rotated<2>(x));
  x = max16(x, rotated<1>(x));
  return x[0];
}

// e^x to about 2 ulp; exactly 0 below -87 (also for -inf), e^88 from 88 on.
static inline f32x16 exp16(f32x16 x) {
  f32x16 in = max16(x, splat(-87.0f));
  in = in > 88.0f ? splat(88.0f) : in;
  f32x16 whole = in * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the nearest integer lands in the low bits
  i32x16 n = (i32x16)whole - 0x4b400000;
  whole -= 12582912.0f;
  f32x16 r = in - whole * 0.693359375f + whole * 2.12194440e-4f;
  f32x16 p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r + 1.6666665459e-1f) * r + 0.5f;
  p = p * r * r + r + 1.0f;
  f32x16 scaled = (f32x16)((i32x16)p + (n << 23));
  return x < -87.0f ? f32x16{} : scaled;
}

// Matrix elements are 32-bit words: one float, or two neighbouring bfloat16 along the summed dimension.
struct Floats {
  static constexpr int per_word = 1;
  static inline f32x16 madd(f32x16 acc, uint32_t a, u32x16 b) { return acc + load<float>(&a) * (f32x16)b; }
};
#ifdef __AVX512BF16__
struct Pairs {
  static constexpr int per_word = 2;
  static inline f32x16 madd(f32x16 acc, uint32_t a, u32x16 b) {
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
  }
};
#endif

// out[R][16 C] (+)= a[R][depth] * b[depth][16 C]; ld* are row strides in elements. AHEAD: rows of b to ask memory for in advance, 0
// where b is in the cache.
template <class M, int R, int C, int AHEAD>
static inline void tile(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int depth, float* out, int64_t ldo, bool add) {
  f32x16 acc[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = add ? load<f32x16>(out + r * ldo + 16 * c) : f32x16{};
  for (int k = 0; k < depth; k++) {
    u32x16 row[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      row[c] = load<u32x16>(b + k * ldb + 16 * c);
      if (AHEAD) __builtin_prefetch(b + (k + AHEAD) * ldb + 16 * c);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c] = M::madd(acc[r][c], a[r * lda + k], row[c]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(out + r * ldo + 16 * c, acc[r][c]);
}

template <class M, int C, int AHEAD = 0>
static void rows_times(const uint32_t* a, int64_t lda, int rows, const uint32_t* b, int64_t ldb, int depth, float* out, int64_t ldo, bool add) {
  for (; rows >= 6; rows -= 6, a += 6 * lda, out += 6 * ldo) tile<M, 6, C, AHEAD>(a, lda, b, ldb, depth, out, ldo, add);
  switch (rows) {
    case 1: return tile<M, 1, C, AHEAD>(a, lda, b, ldb, depth, out, ldo, add);
    case 2: return tile<M, 2, C, AHEAD>(a, lda, b, ldb, depth, out, ldo, add);
    case 3: return tile<M, 3, C, AHEAD>(a, lda, b, ldb, depth, out, ldo, add);
    case 4: return tile<M, 4, C, AHEAD>(a, lda, b, ldb, depth, out, ldo, add);
    case 5: return tile<M, 5, C, AHEAD>(a, lda, b, ldb, depth, out, ldo, add);
  }
}

// 16x16 words, in place: v[i][j] <-> v[j][i].
template <int S> static inline void swap_blocks(u32x16* v) {
  u32x16 low, high;
  for (int j = 0; j < 16; j++) {
    low[j] = j & S ? 16 + j - S : j;
    high[j] = j & S ? 16 + j : j + S;
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++)
    if (!(i & S)) {
      u32x16 a = v[i], b = v[i + S];
      v[i] = __builtin_shuffle(a, b, low);
      v[i + S] = __builtin_shuffle(a, b, high);
    }
}
static inline void transpose16(u32x16* v) {
  swap_blocks<8>(v);
  swap_blocks<4>(v);
  swap_blocks<2>(v);
  swap_blocks<1>(v);
}
