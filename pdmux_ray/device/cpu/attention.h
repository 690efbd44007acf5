// Causal attention over the paged KV pool, with what comes before it: q/k norm, RoPE and the KV write.
//
//   pool[layer][0 = key, 1 = value][page][kv_head][slot in page][head_dim]   (KVLayout)
//   slot number of a token = page * page_size + slot in page
//
// The work is cut into tasks (sequence, tile of queries, kv head). The rows of a tile are its queries times the query heads that
// share the kv head; they meet the keys in blocks of 64 that start at multiples of 64 in the sequence, with an online softmax. A row's
// arithmetic is the same whatever tile, step or batch it is computed in: prefilled, chunked and decoded tokens agree to the bit.
#pragma once
#include "rows.h"

#include <vector>

struct Step {  // model/ops.py: AttentionBatch
  int64_t tokens, sequences, page_size, page_table_stride;
  const int64_t* slots;
  const int32_t* query_starts;
  const int32_t* context_lengths;
  const int32_t* page_table;
  const float* cos;  // row t: cos + cos_rows[t] * head_dim / 2
  const float* sin;
  const int64_t* cos_rows;
};

struct Layer {  // model/ops.py: AttentionSpec, and where the layer's KV lies
  int64_t heads, kv_heads, head_dim, window;  // window 0: all
  float scale, norm_eps;
  const void* q_norm;  // null: none
  const void* k_norm;
  void* keys;
  void* values;
};

namespace {

constexpr int KEYS = 64;       // keys a block
constexpr int TILE_ROWS = 48;  // rows a tile, unless one query alone has more

// Element i of the head turns together with element i + dim / 2. `out` may be `x`.
template <class T> void rotate(const T* x, const float* cos, const float* sin, int64_t dim, T* out) {
  int64_t half = dim / 2, i = 0;
  for (; i + 16 <= half; i += 16) {
    f32x16 a = read16(x + i), b = read16(x + i + half), c = read16(cos + i), s = read16(sin + i);
    write16(out + i, a * c - b * s);
    write16(out + i + half, b * c + a * s);
  }
  for (; i < half; i++) {
    float a = read1(x + i), b = read1(x + i + half);
    write1(out + i, a * cos[i] - b * sin[i]);
    write1(out + i + half, b * cos[i] + a * sin[i]);
  }
}

// One token: norm and RoPE of its queries in place and of its key into the pool; its value into the pool.
template <class T> void place_token(const Step& step, const Layer& layer, int64_t t, T* qkv) {
  int64_t dim = layer.head_dim, slot = step.slots[t], page = slot / step.page_size, offset = slot % step.page_size;
  const float* cos = step.cos + step.cos_rows[t] * (dim / 2);
  const float* sin = step.sin + step.cos_rows[t] * (dim / 2);
  T* head = qkv + t * (layer.heads + 2 * layer.kv_heads) * dim;
  for (int64_t h = 0; h < layer.heads + layer.kv_heads; h++, head += dim) {
    bool query = h < layer.heads;
    const T* norm = (const T*)(query ? layer.q_norm : layer.k_norm);
    if (norm) normalize(head, norm, layer.norm_eps, dim, head);
    T* out = head;
    if (!query) out = (T*)layer.keys + ((page * layer.kv_heads + h - layer.heads) * step.page_size + offset) * dim;
    rotate(head, cos, sin, dim, out);
  }
  for (int64_t h = 0; h < layer.kv_heads; h++, head += dim)
    memcpy((T*)layer.values + ((page * layer.kv_heads + h) * step.page_size + offset) * dim, head, dim * sizeof(T));
}

struct Task {
  int32_t sequence, first, queries;  // queries [first, first + queries) of the sequence's part of the step
};

// Scratch of one thread, for tiles of up to `rows` rows. Words as in vec.h.
struct Scratch {
  std::vector<uint32_t> q, kt, v, p;
  std::vector<float> scores, out, top, mass;
  void fit(int64_t rows, int64_t dim) {
    if ((int64_t)top.size() >= rows && (int64_t)q.size() >= rows * dim && (int64_t)v.size() >= KEYS * dim) return;
    q.resize(rows * dim), kt.resize(KEYS * dim), v.resize(KEYS * dim), p.resize(rows * KEYS);
    scores.resize(rows * KEYS), out.resize(rows * dim), top.resize(rows), mass.resize(rows);
  }
};

// One task. `rows` are ordered query-major: row r is query r / group, head r % group of the kv head.
template <class T> struct TileAttention {
  typedef typename MathOf<T>::type M;
  static constexpr int PW = M::per_word;
  const Step& step;
  const Layer& layer;
  Scratch& s;
  int64_t dim, group, words;  // words: of one head
  const int32_t* pages;
  const T *keys, *values;

  TileAttention(const Step& step, const Layer& layer, Scratch& scratch) : step(step), layer(layer), s(scratch) {
    dim = layer.head_dim, group = layer.heads / layer.kv_heads, words = dim / PW;
  }

  static void to_words(const T* from, int64_t n, uint32_t* to) {
    if (PW * sizeof(T) == 4) {
      memcpy(to, from, n * sizeof(T));
    } else {
      for (int64_t i = 0; i < n; i += 16) write16((float*)to + i, read16(from + i));
    }
  }

  // Element offsets of the keys (and values) [first, first + KEYS) in the layer's half of the pool; -1 from `end` on. Asks for their
  // memory: pages lie anywhere, and this is called one block ahead.
  void locate(int64_t head, int64_t first, int64_t end, int64_t* at) const {
    int64_t page = first / step.page_size, offset = first % step.page_size;
    for (int j = 0; j < KEYS; j++) {
      at[j] = first + j < end ? ((pages[page] * layer.kv_heads + head) * step.page_size + offset) * dim : -1;
      if (++offset == step.page_size) page++, offset = 0;
    }
    for (const T* from : {keys, values})
      for (int j = 0; j < KEYS && at[j] >= 0; j++)
        for (int64_t byte = 0; byte < dim * (int64_t)sizeof(T); byte += 64) __builtin_prefetch((const char*)(from + at[j]) + byte);
  }

  // kt[words][KEYS] and v[KEYS / PW][dim] of one block; keys at -1 read as zeros.
  void gather(const int64_t* at) {
    static const T zeros[256] = {};
    for (int g = 0; g < KEYS; g += 16, at += 16) {
      for (int64_t w = 0; w < words; w += 16) gather_keys(at, w, g);
      for (int j = 0; j < 16; j += PW) {
        const T* a = at[j] < 0 ? zeros : values + at[j];
        const T* b = PW == 1 || at[j + 1] < 0 ? zeros : values + at[j + 1];
        gather_values(a, b, &s.v[(g + j) / PW * dim]);
      }
    }
  }
  void gather_keys(const int64_t* at, int64_t w, int g) {
    u32x16 block[16];
    int64_t count = std::min<int64_t>(16, words - w);
    for (int j = 0; j < 16; j++) {
      block[j] = u32x16{};
      if (at[j] < 0) continue;
      if (count == 16 && PW * sizeof(T) == 4)
        block[j] = load<u32x16>(keys + at[j] + w * PW);
      else
        to_words(keys + at[j] + w * PW, count * PW, (uint32_t*)&block[j]);
    }
    transpose16(block);
    for (int64_t i = 0; i < count; i++) store(&s.kt[(w + i) * KEYS + g], block[i]);
  }
  void gather_values(const T* a, const T* b, uint32_t* to) {
    if (PW == 1) return to_words(a, dim, to);
    for (int64_t d = 0; d < dim; d += 16) {
      u32x16 even = __builtin_convertvector(load<u16x16>(a + d), u32x16), odd = __builtin_convertvector(load<u16x16>(b + d), u32x16);
      store(to + d, even | odd << 16);
    }
  }

  // Scores of one row -> unnormalised probabilities in p; updates the row's top, mass and (rescaled) sum.
  void softmax_row(int64_t r, int64_t first, int64_t position) {
    float* row = &s.scores[r * KEYS];
    int64_t oldest = layer.window ? position - layer.window : -1;  // keys (oldest, position] are seen
    bool whole = first + KEYS - 1 <= position && first > oldest;
    i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 x[KEYS / 16], best = splat(s.top[r]);
#pragma GCC unroll 4
    for (int c = 0; c < KEYS / 16; c++) {
      x[c] = load<f32x16>(row + 16 * c) * layer.scale;
      if (!whole) {
        i32x16 key = lane + (int32_t)(first + 16 * c);
        x[c] = (key <= (int32_t)position) & (key > (int32_t)oldest) ? x[c] : splat(-__builtin_inff());
      }
      best = max16(best, x[c]);
    }
    float top = top16(best), shrink = exp16(splat(s.top[r] - top))[0];
    f32x16 mass = {};
#pragma GCC unroll 4
    for (int c = 0; c < KEYS / 16; c++) {
      f32x16 p = exp16(x[c] - top);
      mass += p;
      if (PW == 1)
        write16((float*)&s.p[r * KEYS] + 16 * c, p);
      else
        write16((bf16*)&s.p[r * KEYS / PW] + 16 * c, p);
    }
    s.mass[r] = s.mass[r] * shrink + sum16(mass);
    if (top == s.top[r]) return;
    s.top[r] = top;
    for (int64_t d = 0; d < dim; d += 16) write16(&s.out[r * dim + d], read16(&s.out[r * dim + d]) * shrink);
  }

  void run(const Task& task, int64_t head, const T* qkv, T* out) {
    int64_t start = step.query_starts[task.sequence] + task.first, rows = task.queries * group;
    int64_t queries = step.query_starts[task.sequence + 1] - step.query_starts[task.sequence];
    int64_t position = step.context_lengths[task.sequence] - queries + task.first;  // of the tile's first query
    pages = step.page_table + task.sequence * step.page_table_stride;
    keys = (const T*)layer.keys, values = (const T*)layer.values;
    s.fit(std::max<int64_t>(rows, TILE_ROWS), dim);
    for (int64_t q = 0; q < task.queries; q++)
      to_words(qkv + ((start + q) * (layer.heads + 2 * layer.kv_heads) + head * group) * dim, group * dim, &s.q[q * group * words]);
    std::fill_n(s.out.begin(), rows * dim, 0.0f);
    std::fill_n(s.mass.begin(), rows, 0.0f);
    std::fill_n(s.top.begin(), rows, -1e30f);
    int64_t oldest = layer.window ? std::max<int64_t>(0, position - layer.window + 1) : 0, end = position + task.queries;
    int64_t first = oldest / KEYS * KEYS, at[2][KEYS];
    locate(head, first, end, at[0]);
    for (int64_t block = 0; first < end; first += KEYS, block++) {
      if (first + KEYS < end) locate(head, first + KEYS, end, at[~block & 1]);
      gather(at[block & 1]);
      rows_times<M, 4>(s.q.data(), words, rows, s.kt.data(), KEYS, words, s.scores.data(), KEYS, false);
      for (int64_t r = 0; r < rows; r++) softmax_row(r, first, position + r / group);
      int64_t d = 0;
      for (; d + 64 <= dim; d += 64)
        rows_times<M, 4>(s.p.data(), KEYS / PW, rows, &s.v[d], dim, KEYS / PW, &s.out[d], dim, true);
      for (; d < dim; d += 16) rows_times<M, 1>(s.p.data(), KEYS / PW, rows, &s.v[d], dim, KEYS / PW, &s.out[d], dim, true);
    }
    for (int64_t r = 0; r < rows; r++) {
      T* to = out + ((start + r / group) * layer.heads + head * group + r % group) * dim;
      float inverse = 1.0f / s.mass[r];
      for (int64_t d = 0; d < dim; d += 16) write16(to + d, read16(&s.out[r * dim + d]) * inverse);
    }
  }
};

std::vector<Task> cut_into_tasks(const Step& step, int64_t group) {
  std::vector<Task> tasks;
  int32_t most = (int32_t)std::max<int64_t>(1, TILE_ROWS / group);
  for (int32_t b = 0; b < step.sequences; b++) {
    int32_t queries = step.query_starts[b + 1] - step.query_starts[b];
    for (int32_t first = (queries - 1) / most * most; first >= 0; first -= most)  // the longest come first
      tasks.push_back({b, first, std::min(most, queries - first)});
  }
  return tasks;
}

// Called by every thread of a parallel region, with the same `tasks` of `cut_into_tasks`.
template <class T> void attention(const Step& step, const Layer& layer, const std::vector<Task>& tasks, T* qkv, T* out) {
  static thread_local Scratch scratch;
  int64_t count = (int64_t)tasks.size() * layer.kv_heads;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < step.tokens; t++) place_token(step, layer, t, qkv);
  TileAttention<T> tile(step, layer, scratch);
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < count; i++) tile.run(tasks[i / layer.kv_heads], i % layer.kv_heads, qkv, out);
}

}  // namespace
