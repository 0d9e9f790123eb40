// The distribution of a row, from raw logits, edits and parameters.
#pragma once
#include <cmath>
#include <vector>
#include "rows.h"

namespace foretoken {
// Parameters of a row with T > 0. A filter keeps every logit at or above a threshold.
struct Filters {
  float temperature;
  int64_t top_k;
  double top_p, min_p;

  bool by_rank(int64_t size) const { return top_k > 0 && top_k < size; }
  bool keep_all(int64_t size) const { return !by_rank(size) && top_p >= 1 && min_p <= 0; }
};

struct Token {
  float logit;  // raw
  int32_t id;
};

// softmax(x / T) over the tokens with a raw logit x of at least `threshold`; filled by `measure`.
struct Distribution {
  Row row{};
  float temperature = 1, inverse = 1;  // T, 1 / T
  float threshold = kMinusInfinity;    // in raw units; -inf if nothing is dropped
  float top = 0;                       // the largest logit, raw
  double lse = 0;       // log sum exp of x / T over kept tokens; finite iff the row is
  bool listed = false;  // whether `kept` holds all kept tokens, block by block
  std::vector<Token> kept;
  // Of each block, if not listed: the largest logit, raw; and the log-mass, the log sum exp of
  // (x - top) / T over its kept tokens, -inf without any. Padded to a multiple of 64 with -inf.
  std::vector<float> peak_J, mass_J;
  std::vector<float> column;  // of each block and lane: the maxima of every 16 numbers in that lane

  bool finite() const { return std::isfinite(lse); }
  // log p(id) of an id >= 0; -inf if p(id) = 0.
  double log_of(int64_t id) const;
  // Write (x - top) / T of block j to `out`, -inf for dropped tokens; returns the padded length.
  int64_t scaled_block(int64_t j, float* out) const;
};

// log softmax at a raw logit: one function for p and q, so that p / q = 1 for equal rows.
inline double log_of(double x, double temperature, double lse) { return x / temperature - lse; }

// Prepare `d` for a row: nothing is measured or dropped yet.
void reset(const Row& row, float temperature, Distribution& d);
void measure(const Row& row, const Filters& filters, Distribution& d);

// Maxima: `peak_J`, `column` and `top`. Returns false if there is a NaN or `top` is not finite.
bool measure_peaks(Distribution& d);
// `peak_J`, `top`, `mass_J` and the LSE, with nothing dropped.
void measure_masses(Distribution& d);
// `mass_J` and the LSE of logits at or above `d.threshold`, after `measure_peaks`.
void measure_kept(Distribution& d);

// After `measure_peaks`, if the peak of block j is not -inf: the log-mass of block j, with nothing
// dropped, bitwise as in `measure_masses`; and an upper bound with a sixteenth of the exponentials.
float mass_of(const Distribution& d, int64_t j);
float mass_bound(const Distribution& d, int64_t j);

// Fill `d.kept` with the tokens with finite logits at or above `lower`, after `measure_peaks`.
void list_tokens(Distribution& d, float lower);
// A lower bound of the k-th largest logit, near it, after `measure_peaks`.
float kth_bound(const Distribution& d, int64_t k);

// The lowest id of a row's largest logit, and whether the row is finite.
struct Largest {
  int64_t id;
  bool finite;
};
Largest largest(const Row& row);
}  // namespace foretoken
