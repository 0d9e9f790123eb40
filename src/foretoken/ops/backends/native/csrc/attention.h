// Causal attention of ragged queries over paged keys and values.
//
// A query's result is computed key by key in the order of positions, so it does not depend on which
// other queries share the pass. Keys that a query may not see are never multiplied in, so that the
// unused part of a block may hold anything, even NaN.
#pragma once

#include <cstdint>
#include <vector>

namespace foretoken {

// Field for field `ops.AttentionBatch`.
struct AttentionBatch {
  const int64_t* query_start_B1;  // first new token of each request, then the number of tokens
  const int64_t* length_B;        // tokens in the cache, the new ones included
  const int64_t* block_BL;        // [requests, columns] block ids
  int64_t requests, columns, block_size;

  int64_t queries(int64_t b) const { return query_start_B1[b + 1] - query_start_B1[b]; }
  const int64_t* blocks(int64_t b) const { return block_BL + b * columns; }
};

// Layout of the cache within one layer: keys [block][kv head][key_size][block_size], so that one
// vector holds one dimension of several keys; values [block][kv head][block_size][value_size]. Up to
// 15 numbers after the last key are read but not used.
struct AttentionShape {
  int64_t heads, kv_heads, key_size, value_size, block_size;
  float scale;
  int64_t window;  // keys seen, the query's own included; 0: all
};

// A unit of work for one thread: new tokens of a request, and the heads that share one K/V head.
struct TileRange {
  int64_t request, kv_head, first_token, tokens;
};

// A batch divided into tiles, the same for all layers.
struct AttentionPlan {
  std::vector<TileRange> tiles;
  int64_t num_scores;  // upper bound, per head: as if every query saw all keys of its request
};

void plan_attention(const AttentionBatch& batch, int64_t heads, int64_t kv_heads,
                    AttentionPlan* plan);

// query [T, heads, key_size] to out [T, heads, value_size].
void attend(const float* query, const float* keys, const float* values,
            const AttentionBatch& batch, const AttentionPlan& plan, const AttentionShape& shape,
            float* out);

// Store one token's keys [kv_heads, key_size] and values [kv_heads, value_size].
void write_kv(float* keys, float* values, int64_t slot, const float* key, const float* value,
              const AttentionShape& shape);

}  // namespace foretoken
