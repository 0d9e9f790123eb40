// The distribution of a row, from raw logits, edits and parameters: which tokens are kept, and how
// likely they are.
#pragma once

#include <cmath>
#include <vector>

#include "rows.h"

namespace foretoken {

// Parameters of a row, T > 0. Filters keep every logit at or above a threshold.
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

// softmax(x / T) over the tokens with a raw logit x of at least `threshold`. Filled by `measure` and
// reused row after row: its arrays grow to the largest row.
struct Distribution {
  Row row{};
  float temperature = 1, inverse = 1;  // T, 1 / T
  float threshold = kMinusInfinity;    // in raw units; -inf if nothing is dropped
  float top = 0;                       // the largest logit, raw
  double lse = 0;                      // log sum exp of x / T over kept tokens; finite iff the row is
  bool listed = false;                 // `kept` holds all kept tokens, block by block
  std::vector<Token> kept;
  // By block, if not listed: the largest logit (raw) and log sum exp of (x - top) / T over its kept
  // tokens, -inf without any; padded to a multiple of 64 with -inf.
  std::vector<float> peak_J, mass_J;
  std::vector<float> column;  // maxima of every 16 numbers that pass through one vector lane

  bool finite() const { return std::isfinite(lse); }
  // log p(id) of any id >= 0; -inf without mass.
  double log_of(int64_t id) const;
  // (x - top) / T of block j, dropped tokens at -inf, into `out`; returns their number.
  int64_t scaled_block(int64_t j, float* out) const;
};

// log softmax at one raw logit; the same arithmetic for p and q, so that equal rows cancel.
inline double log_of(double x, double temperature, double lse) { return x / temperature - lse; }

// Start with a new row: nothing is measured or dropped yet.
void begin(const Row& row, float temperature, Distribution& d);

void measure(const Row& row, const Filters& filters, Distribution& d);

// Maxima, `peak_J`, `column` and `top`; false if there is a NaN or the largest is not finite.
bool measure_peaks(Distribution& d);

// Maxima, blocks' masses and the LSE, with nothing dropped.
void measure_masses(Distribution& d);

// Blocks' masses of logits at or above `d.threshold`, and the LSE. Needs the maxima.
void measure_kept(Distribution& d);

// The log-mass of block j, with nothing dropped, bitwise as in `measure_masses`; and an upper bound of
// it from `d.column` alone, for a sixteenth of the exponentials. Need the block's maximum, not -inf.
float mass_of(const Distribution& d, int64_t j);
float bound_of(const Distribution& d, int64_t j);

// Fill `d.kept` with the tokens at or above `lower` (-inf is never one). Needs `d.column`.
void gather(Distribution& d, float lower);

// A lower bound of the k-th largest logit, which few tokens reach. Needs `d.column`.
float rank_bound(const Distribution& d, int64_t k);

// The lowest id of a row's largest logit, and whether the row is finite.
struct Largest {
  int64_t id;
  bool finite;
};
Largest largest(const Row& row);

}  // namespace foretoken
