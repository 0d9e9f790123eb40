// What Python calls, on arrays: `ops.Backend`'s functions except attention. See `ops/__init__.py`.
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
  bool coupled(int64_t slot) const { return rule_S[slot] == kCoupled; }
};

// What identifies a draw, except its streams. Which noise a row uses follows from its parameters.
struct Place {
  int64_t slot, position, draft_index, vocabulary;
  bool fp64;
  Noise noise(const Params& params, int token_stream, int block_stream) const;
};

// `ops.DraftCache`: [S, drafts, vocabulary].
struct Cache {
  void* logits_SKV;
  float* threshold_SK;
  double* lse_SK;
  int64_t dtype, drafts, vocabulary;

  char* row(int64_t slot, int64_t i) const {
    return static_cast<char*>(logits_SKV) + (slot * drafts + i) * vocabulary * bytes_of(dtype);
  }
};

// Memory of this thread for the row that it is at.
Distribution& scratch();

// Whether a loop over so many logits is worth waking the other threads: that costs some 10 us.
inline bool worth_waking(int64_t rows, int64_t vocabulary) { return rows * vocabulary > 100000; }

// Rows and the slots whose parameters they have; `slot_N` may be null in `logprobs`.
struct Rows {
  Logits logits;
  const Edits* edits;
  const int64_t* slot_N;
  int64_t count;
};

void process(const Params& params, const Rows& rows, float* out_NV);

struct Places {
  const int64_t *position_N, *draft_index_N;
  int64_t token_stream, block_stream, fp64_noise;
};

void sample(const Params& params, const Rows& rows, const Places& places, int64_t* token_N);

// One draft of a row of raw draft logits; kept in `cache`, if there is one, at [slot, draft index].
int64_t draft_row(const Params& params, const Row& row, const Place& place, const Cache* cache);

// The streams of `places` do not count.
void draft(const Params& params, const Rows& rows, const Places& places, const Cache* cache,
           int64_t* token_B);

struct TopLogprobs {
  float* logprob_N;
  int64_t* rank_N;
  float* top_logprob_NT;
  int64_t* top_token_NT;
  int64_t top;
};

// Of raw logits if `params` is null.
void logprobs(const Params* params, const Rows& rows, const int64_t* token_N,
              const TopLogprobs& out);

}  // namespace foretoken
