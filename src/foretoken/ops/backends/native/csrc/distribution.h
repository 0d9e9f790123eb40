// What a row of raw logits, its edits and its parameters say: which tokens are kept, and how
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

// softmax(x / T) over the tokens whose raw logit x is at least `threshold`. Filled by `measure`,
// used again for row after row: its arrays grow to the largest row and stay.
struct Distribution {
  Row row{};
  float temperature = 1, inverse = 1;  // T, 1 / T
  float threshold = kMinusInfinity;    // in raw units; -inf where nothing is dropped
  float top = 0;                       // the largest logit, raw
  double lse = 0;                      // log sum exp of x / T over what is kept; not finite of a row
                                       // that is not
  bool listed = false;                 // `kept` holds all kept tokens, block by block
  std::vector<Token> kept;
  // By block, if not listed: the largest logit (raw) and log sum exp of (x - top) / T over what is
  // kept there, -inf if nothing is; padded to a multiple of 64 with -inf.
  std::vector<float> peak_J, mass_J;
  std::vector<float> column;  // maxima of every 16 numbers that one vector lane meets

  bool finite() const { return std::isfinite(lse); }
  // log p(id); `id` may be any number >= 0; -inf where there is no mass.
  double log_of(int64_t id) const;
  // (x - top) / T of block j, dropped tokens at -inf, into `out`: returns how many numbers.
  int64_t scaled_block(int64_t j, float* out) const;
};

// log softmax at one raw logit; the same arithmetic for p and q, so that equal rows cancel.
inline double log_of(double x, double temperature, double lse) { return x / temperature - lse; }

// A row of which nothing is known or dropped yet.
void begin(const Row& row, float temperature, Distribution& d);

void measure(const Row& row, const Filters& filters, Distribution& d);

// Maxima, `peak_J`, `column` and `top`; false if there is a NaN or the largest is not finite.
bool measure_peaks(Distribution& d);

// Maxima, blocks' masses and the LSE, nothing dropped.
void measure_masses(Distribution& d);

// Blocks' masses of what is at or above `d.threshold`, and the LSE, of a row whose maxima are known.
void measure_kept(Distribution& d);

// The log-mass of block j, nothing dropped, as `measure_masses` has it, and an upper bound of it from
// `d.column` alone: a sixteenth of the exponentials. The block's maximum is known and not -inf.
float mass_of(const Distribution& d, int64_t j);
float bound_of(const Distribution& d, int64_t j);

// Fill `d.kept` with the tokens at or above `lower` (-inf is never one). Needs `d.column`.
void gather(Distribution& d, float lower);

// A lower bound of the k-th largest logit that few tokens reach. Needs `d.column`.
float rank_bound(const Distribution& d, int64_t k);

// Lowest id of the largest logit of a row and whether the row is finite.
struct Largest {
  int64_t id;
  bool finite;
};
Largest largest(const Row& row);

}  // namespace foretoken
