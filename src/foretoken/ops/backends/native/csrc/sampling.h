// The per-slot data of rows: parameters, noise, the q of drafts.
#pragma once

#include <cstdint>

#include "draw.h"

namespace foretoken {

// As `ops/types.py: Rule`.
enum Rule { kStandard, kBlockRule, kCoupled, kSynthetic };

// `ops.SlotParams`.
struct Params {
  const int64_t* key_S;
  const float* temperature_S;
  const int64_t* top_k_S;
  const float *top_p_S, *min_p_S;
  const int64_t* rule_S;

  Filters filters(int64_t slot) const {
    return {temperature_S[slot], top_k_S[slot], top_p_S[slot], min_p_S[slot]};
  }
  bool greedy(int64_t slot) const { return temperature_S[slot] == 0; }
  bool coupled(int64_t slot) const { return rule_S[slot] == kCoupled; }
};

// The name of a draw's noise, without the streams. The slot's parameters decide whether it is flat.
struct Place {
  int64_t slot, position, draft_index, vocabulary, fp64;
  Noise noise(const Params& params, int64_t token_stream, int64_t block_stream) const;
};

// `ops.DraftCache`: [S, drafts, vocabulary].
struct Cache {
  char* logits_SKV;
  float* threshold_SK;
  double* lse_SK;
  int64_t dtype, drafts, vocabulary;

  char* row(int64_t slot, int64_t i) const {
    return logits_SKV + (slot * drafts + i) * vocabulary * bytes_of(dtype);
  }
};

// This thread's memory for its current row.
Distribution& scratch();

// Whether a loop over so many logits is worth waking the other threads, which costs some 10 us.
inline bool worth_waking(int64_t rows, int64_t vocabulary) { return rows * vocabulary > 100000; }

// One draft from a row of raw draft logits; its q goes to `cache` at [slot, draft index], unless null.
int64_t draft_row(const Params& params, const Row& row, const Place& place, const Cache* cache);

}  // namespace foretoken
