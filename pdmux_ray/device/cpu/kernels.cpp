// Kernels of a decoder, one by one and as whole layers. extern "C", called through ctypes; native.py mirrors the structs.
#include "attention.h"

struct Linear {
  const uint32_t* weight;  // packed
  const void* bias;        // null: none
  int64_t words, outputs;
};

struct DecoderLayer {
  const Layer* attention;
  const void* input_norm;
  const void* post_norm;
  Linear qkv, o, gate_up, down;
};

// Room for what a layer computes on its way; of one lane. qkv and attended: every token; the others: BLOCK_ROWS tokens.
struct Buffers {
  void *qkv, *attended, *normed, *gate_up, *inner;
};

namespace {

// Tokens that go through a layer's row-wise parts together: what they read and write stays in the cache from one to the next.
constexpr int64_t BLOCK_ROWS = 512;
constexpr int64_t SMALL = 16384;  // elements below which a second thread costs more than it brings

template <class T> void apply(const Linear& l, const T* x, const T* residual, int64_t rows, T* out) {
  linear(x, l.weight, (const T*)l.bias, residual, rows, l.words, l.outputs, out);
}

// Calls f(first, count) for blocks of rows.
template <class F> void by_blocks(int64_t rows, F f) {
  for (int64_t first = 0; first < rows; first += BLOCK_ROWS) f(first, std::min(BLOCK_ROWS, rows - first));
}

// hidden[tokens][width] through one layer, in place. Called by every thread of a parallel region.
template <class T>
void run_layer(const Step& step, const std::vector<Task>& tasks, const DecoderLayer& l, float eps, int64_t width, T* hidden, const Buffers& b) {
  T *qkv = (T*)b.qkv, *attended = (T*)b.attended, *normed = (T*)b.normed, *gate_up = (T*)b.gate_up, *inner = (T*)b.inner;
  int64_t attended_width = l.attention->heads * l.attention->head_dim;
  by_blocks(step.tokens, [&](int64_t first, int64_t rows) {
    rms_norm(hidden + first * width, (const T*)l.input_norm, eps, rows, width, normed);
    apply<T>(l.qkv, normed, nullptr, rows, qkv + first * l.qkv.outputs);
  });
  attention(step, *l.attention, tasks, qkv, attended);
  by_blocks(step.tokens, [&](int64_t first, int64_t rows) {
    T* x = hidden + first * width;
    apply<T>(l.o, attended + first * attended_width, x, rows, x);
    rms_norm(x, (const T*)l.post_norm, eps, rows, width, normed);
    apply<T>(l.gate_up, normed, nullptr, rows, gate_up);
    silu_mul(gate_up, rows, l.gate_up.outputs / 2, inner);
    apply<T>(l.down, inner, x, rows, x);
  });
}

}  // namespace

extern "C" int64_t block_rows() { return BLOCK_ROWS; }

// Whether `linear` beats a general library for the type: it is written for registers of sixteen words.
#ifdef __AVX512F__
extern "C" int linear_is_fast_f32() { return 1; }
#else
extern "C" int linear_is_fast_f32() { return 0; }
#endif
#ifdef __AVX512BF16__
extern "C" int linear_is_fast_bf16() { return 1; }
#else
extern "C" int linear_is_fast_bf16() { return 0; }
#endif

#define KERNELS(T, name)                                                                                                        \
  extern "C" void attention_##name(const Step* step, const Layer* layer, void* qkv, void* out) {                                \
    std::vector<Task> tasks = cut_into_tasks(*step, layer->heads / layer->kv_heads);                                            \
    _Pragma("omp parallel") attention(*step, *layer, tasks, (T*)qkv, (T*)out);                                                  \
  }                                                                                                                             \
  extern "C" void linear_##name(const void* x, const void* packed, const void* bias, const void* residual, int64_t rows,        \
                                int64_t words, int64_t n, void* out) {                                                          \
    _Pragma("omp parallel")                                                                                                     \
        linear((const T*)x, (const uint32_t*)packed, (const T*)bias, (const T*)residual, rows, words, n, (T*)out);              \
  }                                                                                                                             \
  extern "C" void rms_norm_##name(const void* x, const void* weight, float eps, int64_t rows, int64_t n, void* out) {           \
    _Pragma("omp parallel if (rows * n > SMALL)") rms_norm((const T*)x, (const T*)weight, eps, rows, n, (T*)out);               \
  }                                                                                                                             \
  extern "C" void silu_mul_##name(const void* x, int64_t rows, int64_t n, void* out) {                                          \
    _Pragma("omp parallel if (rows * n > SMALL)") silu_mul((const T*)x, rows, n, (T*)out);                                      \
  }                                                                                                                             \
  extern "C" void run_layers_##name(const Step* step, const DecoderLayer* layers, int64_t count, float eps, int64_t width,      \
                                    void* hidden, const Buffers* buffers) {                                                     \
    std::vector<Task> tasks = cut_into_tasks(*step, layers->attention->heads / layers->attention->kv_heads);                    \
    _Pragma("omp parallel") for (int64_t i = 0; i < count; i++)                                                                 \
        run_layer(*step, tasks, layers[i], eps, width, (T*)hidden, *buffers);                                                   \
  }

KERNELS(float, f32)
KERNELS(bf16, bf16)
