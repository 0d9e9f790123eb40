// Gumbel-max draws: flat over tokens, or hierarchical over blocks and then the tokens of one.
#pragma once

#include <optional>

#include "distribution.h"
#include "noise.h"

namespace foretoken {

// The noise of one draw.
struct Noise {
  Address token, block;
  bool flat, fp64;
};

// A draw from `d`; an arbitrary id if it is not finite.
int64_t draw(const Distribution& d, const Noise& noise);

// The same token, 0 if the row is not finite, measuring no more of the row than needed. `scratch` then
// holds no distribution.
int64_t draw(const Row& row, const Filters& filters, const Noise& noise, Distribution& scratch);

// q of a draft row, recomputed from the cache: softmax of x / T over x >= threshold.
struct Draft {
  Row row;
  float threshold;
  double lse;
  double log_of(int64_t id, float temperature) const;
};

// max(w p - q, 0) over the vocabulary; p is finite. Without a q, q is one-hot at `token`.
class Residual {
 public:
  // p and q have the same temperature. Without a q, w p(token) <= 1.
  Residual(const Distribution& p, const std::optional<Draft>& q, int64_t token, double log_w)
      : p_(p), q_(q), token_(token), log_w_(log_w), shift_(q ? q->lse - p.lse + log_w : 0) {}
  double mass() const;
  // A draw from it; -1 if it has no mass.
  int64_t draw(const Noise& noise) const;

 private:
  template <bool logs>
  float weigh_block(int64_t j, float* out) const;
  int64_t log_block(int64_t j, float* out) const;
  void weigh_blocks() const;
  void fill_list() const;

  const Distribution& p_;
  const std::optional<Draft> q_;
  const int64_t token_;
  const double log_w_, shift_;
};

}  // namespace foretoken
