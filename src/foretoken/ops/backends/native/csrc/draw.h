// Gumbel-max draws: flat over tokens, or hierarchical over blocks and then the tokens of one.
#pragma once

#include "distribution.h"
#include "noise.h"

namespace foretoken {

// The noise of one draw.
struct Noise {
  Address token, block;
  bool flat, fp64;
};

// argmax(z + G_id), the lowest id of equals, over what is offered.
class Race {
 public:
  Race(const Address& a, bool fp64) : address_(a), fp64_(fp64) {}
  void offer(float z, int64_t id);
  // 64 ids from `first`, a multiple of 4.
  void offer64(const float* z, int64_t first);
  // `count` ids, a multiple of 64.
  void offer(const float* z, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; i += 64) offer64(z + i, first + i);
  }
  // Whether no id with this z can win any more, whatever its noise.
  bool beats(float z) const { return z + (fp64_ ? 38.0f : 23.0f) < score_; }
  double score() const { return score_; }
  int64_t id() const { return id_; }
  bool some() const { return score_ > kNothing; }  // whether there was anything but -inf

 private:
  void enter(double score, int64_t id) {
    if (score > score_ || (score == score_ && id < id_)) score_ = score, id_ = id;
  }
  Address address_;
  bool fp64_;
  double score_ = kNothing;
  int64_t id_ = 0;
};

// A draw from `d`; some id if it is not finite.
int64_t draw(const Distribution& d, const Noise& noise);

// The same token, 0 if the row is not finite, where nothing else is wanted: it leaves in `scratch` what
// it came upon, not a distribution.
int64_t draw(const Row& row, const Filters& filters, const Noise& noise, Distribution& scratch);

// q of a draft row, stated again from what is cached: softmax of x / T over x >= threshold.
struct Draft {
  Row row;
  float threshold;
  double lse;
  double log_of(int64_t id, float temperature) const;
};

// max(w p - q, 0) over the vocabulary; p is finite.
class Residual {
 public:
  // q real; p and q have one temperature.
  Residual(const Distribution& p, const Draft& q, double log_w)
      : p_(p), q_(&q), shift_(q.lse - p.lse + log_w), log_w_(log_w) {}
  // q all on one token, where w p does not exceed it.
  Residual(const Distribution& p, int64_t token) : p_(p), token_(token) {}
  // Its mass, for a real q.
  double mass() const;
  // A token of it; -1 if it has no mass.
  int64_t draw(const Noise& noise) const;

 private:
  template <bool logs>
  float weigh_block(int64_t j, float* out) const;
  int64_t log_block(int64_t j, float* out) const;
  void weigh_blocks() const;
  void fill_list() const;

  const Distribution& p_;
  const Draft* q_ = nullptr;
  int64_t token_ = -1;
  double shift_ = 0, log_w_ = 0;
};

}  // namespace foretoken
