// Causal attention of ragged queries over paged keys and values. A query reads its keys in the order of
// positions, whatever other queries share the pass. It multiplies no value of a key that it may not see,
// so that the unused part of a block may hold anything, even NaN.
#include <algorithm>
#include <type_traits>
#include "stack.h"

namespace foretoken {
namespace {
constexpr int kMostRows = 24;  // rows of a tile, which share each read of K and V
constexpr int kRowBlock = 6;   // rows that are in registers at the same time

// The rows of one tile: each is a query of one of the heads that share a K/V head.
struct QueryTile {
  const AttentionShape& shape;
  const int64_t* blocks;
  const float* keys;
  const float* values;
  int rows = 0;
  const float* query[kMostRows] = {};
  float* out[kMostRows] = {};
  int64_t begin[kMostRows] = {}, end[kMostRows] = {};  // keys that each row sees
  int64_t first_block = 0, last_block = 0;             // blocks with keys that any row sees
  float* score = nullptr;  // [rows][stride], beginning with the first key of first_block
  int64_t stride = 0;

  float* scores_of(int r) const { return score + r * stride; }
  int64_t origin() const { return first_block * shape.block_size; }
};

const float* key_block(const QueryTile& t, int64_t b) {
  const AttentionShape& s = t.shape;
  return t.keys + t.blocks[b] * s.kv_heads * s.key_size * s.block_size;
}

// Scores of blocks b, ..., b + C - 1 for R rows. Blocks lie apart, so the next ones are prefetched. If a
// block ends within a vector, the rest of the vector is garbage, which the next block overwrites, since
// the last vectors are stored first; or it is masked.
template <int R, int C>
void score_blocks(const QueryTile& t, int first_row, int64_t b) {
  const int64_t size = t.shape.key_size, width = t.shape.block_size;
  for (int64_t c = (width - 1) / kWidth * kWidth; c >= 0; c -= kWidth) {
    const float *keys[C], *next[C];
    for (int j = 0; j < C; j++) {
      keys[j] = key_block(t, b + j) + c;
      next[j] = key_block(t, b + j + C <= t.last_block ? b + j + C : b + j) + c;
    }
    Vec sum[R][C] = {};
    for (int64_t d = 0; d < size; d++) {
      for (int j = 0; j < C; j++) {
        const Vec k = load(keys[j] + d * width);
        __builtin_prefetch(next[j] + d * width);
        for (int r = 0; r < R; r++) sum[r][j] += t.query[first_row + r][d] * k;
      }
    }
    for (int r = 0; r < R; r++)
      for (int j = 0; j < C; j++) {
        const int64_t column = (b + j - t.first_block) * width + c;
        store(t.scores_of(first_row + r) + column, sum[r][j] * t.shape.scale);
      }
  }
}

template <int R>
void score_rows(const QueryTile& t, int first_row) {
  constexpr int C = kWidth == 16 || R <= 3 ? 4 : 2;  // so that the sums fit in registers
  int64_t b = t.first_block;
  for (; b + C - 1 <= t.last_block; b += C) score_blocks<R, C>(t, first_row, b);
  for (; b <= t.last_block; b++) score_blocks<R, 1>(t, first_row, b);
}

// work(R) with the compile-time constant R = min(rows, kRowBlock).
template <typename Work>
void by_rows(int rows, const Work& work) {
  switch (rows) {
    case 1: return work(std::integral_constant<int, 1>());
    case 2: return work(std::integral_constant<int, 2>());
    case 3: return work(std::integral_constant<int, 3>());
    case 4: return work(std::integral_constant<int, 4>());
    case 5: return work(std::integral_constant<int, 5>());
    default: return work(std::integral_constant<int, 6>());
  }
}

// Turn the scores of a row into weights, in place; the weight of keys outside [begin, end) is 0.
void softmax(float* score, int64_t size, int64_t begin, int64_t end) {
  for (int64_t i = 0; i < begin; i++) score[i] = kMinusInfinity;
  for (int64_t i = end; i < size; i++) score[i] = kMinusInfinity;
  Vec peak = splat(kMinusInfinity);
  for (int64_t i = 0; i < size; i += kWidth) peak = max(peak, load(score + i));
  const float top = max_lane(peak);
  Vec total = {};
  for (int64_t i = 0; i < size; i += kWidth) {
    const Vec weight = exp(load(score + i) - top);
    store(score + i, weight);
    total += weight;
  }
  const float scale = 1.0f / sum_lanes(total);
  for (int64_t i = 0; i < size; i += kWidth) store(score + i, load(score + i) * scale);
}

// Add weight * value of keys [begin, end) to V vectors of the outputs of R rows, from column v on.
template <int R, int V>
void mix_columns(const QueryTile& t, int first_row, int64_t begin, int64_t end, int64_t v) {
  const AttentionShape& s = t.shape;
  const int64_t size = s.value_size, per_block = s.kv_heads * s.block_size * size;
  Vec sum[R][V];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < V; j++) sum[r][j] = load(t.out[first_row + r] + v + j * kWidth);
  for (int64_t key = begin; key < end;) {
    const int64_t b = key / s.block_size, offset = key % s.block_size;
    const int64_t run = std::min(end - key, s.block_size - offset);
    const float* value = t.values + t.blocks[b] * per_block + offset * size + v;
    const float* next = t.values + t.blocks[b < t.last_block ? b + 1 : b] * per_block + v;
    for (int64_t i = 0; i < run; i++, value += size, next += size) {
      for (int j = 0; j < V; j++) {
        __builtin_prefetch(next + j * kWidth);
        const Vec x = load(value + j * kWidth);
        for (int r = 0; r < R; r++) sum[r][j] += t.scores_of(first_row + r)[key + i - t.origin()] * x;
      }
    }
    key += run;
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < V; j++) store(t.out[first_row + r] + v + j * kWidth, sum[r][j]);
}

template <int R>
void mix_values(const QueryTile& t, int first_row, int64_t begin, int64_t end) {
  constexpr int V = kWidth == 16 ? 4 : 2;
  int64_t v = 0;
  for (; v + V * kWidth <= t.shape.value_size; v += V * kWidth)
    mix_columns<R, V>(t, first_row, begin, end, v);
  for (; v < t.shape.value_size; v += kWidth) mix_columns<R, 1>(t, first_row, begin, end, v);
}

// The outputs of all rows. Keys that kRowBlock rows see are read once for all, other keys row by row.
void mix(const QueryTile& t) {
  for (int first = 0; first < t.rows; first += kRowBlock) {
    const int rows = std::min(t.rows - first, kRowBlock);
    int64_t begin = t.begin[first], end = t.end[first];
    for (int r = first; r < first + rows; r++) {
      std::memset(t.out[r], 0, t.shape.value_size * sizeof(float));
      begin = std::max(begin, t.begin[r]);
      end = std::min(end, t.end[r]);
    }
    if (begin >= end) begin = end = t.end[first];  // no key is in the windows of all rows
    for (int r = first; r < first + rows; r++)
      if (t.begin[r] < begin) mix_values<1>(t, r, t.begin[r], std::min(begin, t.end[r]));
    if (begin < end) by_rows(rows, [&](auto R) { mix_values<R>(t, first, begin, end); });
    for (int r = first; r < first + rows; r++)
      if (t.end[r] > end) mix_values<1>(t, r, std::max(end, t.begin[r]), t.end[r]);
  }
}

// This thread's memory for scores.
float* score_memory(int64_t size) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
  return memory.data();
}
}  // namespace

void plan_attention(const AttentionBatch& batch, int64_t heads, int64_t kv_heads, AttentionPlan* plan) {
  const int64_t most = std::max(kMostRows / (heads / kv_heads), int64_t{1});  // tokens of a tile
  plan->tiles.clear();
  plan->num_scores = 0;
  for (int64_t b = 0; b < batch.requests; b++) {
    const int64_t end = batch.query_start_B1[b + 1];
    plan->num_scores += batch.length_B[b] * batch.queries(b);
    for (int64_t head = 0; head < kv_heads; head++)
      for (int64_t t = batch.query_start_B1[b]; t < end; t += most)
        plan->tiles.push_back({b, head, t, std::min(end - t, most)});
  }
}

void attend(const float* query, const float* keys, const float* values,
            const AttentionBatch& batch, const AttentionPlan& plan, const AttentionShape& s,
            float* out) {
  const int64_t per_kv = s.heads / s.kv_heads;
  parallel_for(
      plan.tiles.size(), plan.num_scores * s.heads * s.key_size > 60000, [&](int64_t index) {
        const TileRange& tile = plan.tiles[index];
        const int64_t b = tile.request, head = tile.kv_head;
        const int64_t offset = batch.length_B[b] - batch.query_start_B1[b + 1];  // position - token
        for (int64_t h0 = 0; h0 < per_kv; h0 += kMostRows) {  // heads that share a K/V head
          const int64_t h1 = std::min(per_kv, h0 + kMostRows);
          QueryTile t{s, batch.blocks(b), keys + head * s.key_size * s.block_size,
                      values + head * s.value_size * s.block_size};
          for (int64_t token = tile.first_token; token < tile.first_token + tile.tokens; token++) {
            for (int64_t h = h0; h < h1; h++) {
              const int r = t.rows++;
              const int64_t row = token * s.heads + head * per_kv + h;
              t.query[r] = query + row * s.key_size;
              t.out[r] = out + row * s.value_size;
              t.end[r] = offset + token + 1;
              t.begin[r] = s.window && t.end[r] > s.window ? t.end[r] - s.window : 0;
            }
          }
          t.first_block = t.begin[0] / s.block_size;
          t.last_block = (t.end[t.rows - 1] - 1) / s.block_size;
          // Whole vectors, and one more, since the last block may end within a vector.
          t.stride = (t.last_block - t.first_block + 1) * s.block_size / kWidth * kWidth + 2 * kWidth;
          t.score = score_memory(t.rows * t.stride);
          for (int r = 0; r < t.rows; r += kRowBlock)
            by_rows(t.rows - r, [&](auto R) { score_rows<R>(t, r); });
          for (int r = 0; r < t.rows; r++)
            softmax(t.scores_of(r), t.stride, t.begin[r] - t.origin(), t.end[r] - t.origin());
          mix(t);
        }
      });
}

void write_kv(float* keys, float* values, int64_t slot, const float* key, const float* value,
              const AttentionShape& s) {
  const int64_t block = slot / s.block_size, offset = slot % s.block_size;
  float* k = keys + block * s.kv_heads * s.key_size * s.block_size + offset;
  for (int64_t i = 0; i < s.kv_heads * s.key_size; i++) k[i * s.block_size] = key[i];
  for (int64_t h = 0; h < s.kv_heads; h++)
    std::memcpy(values + ((block * s.kv_heads + h) * s.block_size + offset) * s.value_size,
                value + h * s.value_size, s.value_size * sizeof(float));
}
}  // namespace foretoken
