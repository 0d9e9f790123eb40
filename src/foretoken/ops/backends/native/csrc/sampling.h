// Draws from rows, and what they depend on by slot: parameters, noise, the q of drafts.
#pragma once
#include <optional>
#include "distribution.h"
#include "noise.h"

namespace foretoken {
// The noise of one draw, flat over tokens, or over blocks and then the tokens of one block.
struct Noise {
  StreamName token, block;
  bool flat, fp64;
};

// A draw from `d`; some id if `d` is not finite.
int64_t draw(const Distribution& d, const Noise& noise);
// The same draw, or 0 if the row is not finite; measures only what it needs, so `scratch` is incomplete.
int64_t draw(const Row& row, const Filters& filters, const Noise& noise, Distribution& scratch);

// q of a draft row in the cache: softmax of x / T over x >= threshold.
struct Draft {
  Row row;
  float threshold;
  double lse;
  double log_of(int64_t id, float temperature) const;
};

// max(w p - q, 0) over the vocabulary; p is finite. Without a `q`, q is one-hot at `token`.
class Residual {
 public:
  // p and q have the same temperature. Without a `q`, w p(token) <= 1.
  Residual(const Distribution& p, const std::optional<Draft>& q, int64_t token, double log_w)
      : p_(p), q_(q), token_(token), log_w_(log_w), shift_(q ? q->lse - p.lse + log_w : 0) {}
  double mass() const;
  int64_t draw(const Noise& noise) const;  // -1 if the mass is 0

 private:
  template <bool logs>
  float sum_block(int64_t j, float* out) const;
  int64_t log_block(int64_t j, float* out) const;
  void sum_blocks() const;
  void fill_list() const;

  const Distribution& p_;
  const std::optional<Draft> q_;
  const int64_t token_;
  const double log_w_, shift_;
};

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

// Everything that names the noise of a draw except the streams.
struct NoiseName {
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

// Whether a loop over these logits takes longer than waking the other threads, some 10 us.
inline bool worth_waking(int64_t rows, int64_t vocabulary) { return rows * vocabulary > 100000; }

// A draft from a row of raw draft logits; writes its q to the cache, unless `cache` is null.
int64_t draft_row(const Params& params, const Row& row, const NoiseName& name, const Cache* cache);
}  // namespace foretoken
