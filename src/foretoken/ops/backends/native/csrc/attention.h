// Causal attention of ragged queries over paged keys and values.
//
// A query's result is computed key by key in the order of positions, so it does not depend on which
// other queries share the pass. Keys that a query may not see are never multiplied in: whatever
// stands in the unused part of a block cannot poison it.
#pragma once

#include <cstdint>

namespace foretoken {

// Requests of one batch with equally many new tokens. Field for field `ops.AttentionGroup`.
struct Group {
  const int64_t* token_index;  // [requests * queries] packed token numbers, or null: from `first` on
  int64_t first;
  int64_t requests, queries;
  const int64_t* block_bL;  // [requests, columns] block ids
  int64_t columns;
  const int64_t* length_b;  // [requests] tokens in the cache, the new ones included
};

// Layout of the cache within one layer: keys [block][kv head][key_size][block_size], so that one
// vector holds one dimension of several keys; values [block][kv head][block_size][value_size]. Up to
// 15 numbers behind the last key are read, and not used.
struct AttentionShape {
  int64_t heads, kv_heads, key_size, value_size, block_size;
  float scale;
  int64_t window;  // keys seen, the query's own included; 0: all
};

// query [T, heads, key_size] to out [T, heads, value_size].
void attend(const float* query, const float* keys, const float* values, const Group* groups,
            int64_t num_groups, const AttentionShape& shape, float* out);

// Store one token's keys [kv_heads, key_size] and values [kv_heads, value_size].
void write_kv(float* keys, float* values, int64_t slot, const float* key, const float* value,
              const AttentionShape& shape);

}  // namespace foretoken
