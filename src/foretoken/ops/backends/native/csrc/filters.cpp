// Thresholds of min-p, top-k and top-p in raw logits: exact, ties kept. The k-th largest of many maxima
// is a lower bound of the k-th largest logit: one pass leaves few candidates for top-k and top-p.
// The row is read again only if top-p is the only filter and keeps many tokens.
#include <algorithm>
#include "distribution.h"

namespace foretoken {
namespace {
constexpr size_t kMostListed = 256;  // most kept tokens for which a list is faster than the row
constexpr int64_t kFirstRank = 64;   // top-p alone is first searched above the 64th largest maximum
constexpr int kBuckets = 4096;       // intervals of logits, for nuclei too large for a list
constexpr float kPerUnit = 100.0f;   // buckets per unit of x / T: the last holds weights below e^-41

double weight(const Distribution& d, float x) {
  return std::exp((static_cast<double>(x) - d.top) / d.temperature);
}

// The largest value such that `values` at or above it weigh at least `least`; if there is none, the
// smallest value. Each round halves the candidates, so that the time is linear.
float nucleus_end(const Distribution& d, std::vector<float>& values, double least) {
  float *first = values.data(), *last = first + values.size();
  while (last - first > 64) {
    float* middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, std::greater<>());
    double upper = 0;
    for (float* v = first; v < middle; v++) upper += weight(d, *v);
    if (upper >= least) {
      last = middle;
    } else {
      least -= upper;
      first = middle;
    }
  }
  std::sort(first, last, std::greater<>());
  double sum = 0;
  for (float* v = first; v < last; v++)
    if ((sum += weight(d, *v)) >= least) return *v;
  return last[-1];
}

double weight_of(const Distribution& d, float threshold) {
  double sum = 0;
  for (const Token& token : d.kept)
    if (token.logit >= threshold) sum += weight(d, token.logit);
  return sum;
}

std::vector<float>& values_of(const Distribution& d, float threshold) {
  thread_local std::vector<float> values;
  values.clear();
  for (const Token& token : d.kept)
    if (token.logit >= threshold) values.push_back(token.logit);
  return values;
}

// The buckets of logits; bucket 0 holds the largest.
IntVec buckets_of(const Distribution& d, Vec x) {
  const Vec place = (splat(d.top) - x) * (d.inverse * kPerUnit);
  return __builtin_convertvector(min(place, splat(kBuckets - 1)), IntVec);
}

// `nucleus_end` of a nucleus too large for a list: finds its last bucket, then searches in it. Tokens
// below (1 - p) / V of `total`, the mass of the row, are not read: together they have less than 1 - p.
float wide_nucleus_end(const Distribution& d, double top_p, double total) {
  std::vector<double> bucket(kBuckets);
  const double least = std::log((1 - top_p) * total / static_cast<double>(d.row.size)) - 1e-3;
  const auto lower = static_cast<float>(d.top + d.temperature * least);
  alignas(64) float buffer[kBlock];
  for (int64_t j = 0; j < d.row.blocks(); j++) {
    const float* x = d.row.block(j, buffer);
    for (int64_t i = 0; i < d.row.padded(j); i += kWidth) {
      const Vec v = load(x + i);
      if (!any(v >= splat(lower))) continue;
      const IntVec b = buckets_of(d, v);
      Vec w = exp2_of((v - d.top) * (d.inverse * kLog2e));
      w = v > splat(kMinusInfinity) ? w : Vec{};
      for (int k = 0; k < kWidth; k++) bucket[b[k]] += w[k];
    }
  }
  double left = top_p * total;
  int last = 0;
  while (last < kBuckets - 1 && bucket[last] < left) left -= bucket[last++];
  std::vector<float> values;
  for (int64_t j = 0; j < d.row.blocks(); j++) {
    const float* x = d.row.block(j, buffer);
    for (int64_t i = 0; i < d.row.padded(j); i += kWidth) {
      const Vec v = load(x + i);
      const IntVec inside = buckets_of(d, v) == last - IntVec{};
      if (!any(inside)) continue;
      for (int k = 0; k < kWidth; k++)
        if (inside[k] && v[k] > kMinusInfinity) values.push_back(v[k]);
    }
  }
  return values.empty() ? kMinusInfinity : nucleus_end(d, values, left);
}

// List the kept tokens if they are few, else measure blocks. `complete`: whether `d.kept` has them all.
void list_or_measure(Distribution& d, bool complete) {
  if (complete) {
    const auto end = std::remove_if(d.kept.begin(), d.kept.end(), [&](const Token& token) {
      return !(token.logit >= d.threshold);
    });
    d.kept.erase(end, d.kept.end());
    d.listed = d.kept.size() <= kMostListed;
  }
  if (!d.listed) return measure_kept(d);
  d.lse = static_cast<double>(d.top) / d.temperature + std::log(weight_of(d, kMinusInfinity));
}
}  // namespace

void reset(const Row& row, float temperature, Distribution& d) {
  d.row = row;
  d.temperature = temperature;
  d.inverse = 1.0f / temperature;
  d.threshold = kMinusInfinity;
  d.listed = false;
}

void measure(const Row& row, const Filters& f, Distribution& d) {
  reset(row, f.temperature, d);
  const bool by_rank = f.by_rank(row.size), by_mass = f.top_p < 1;
  if (f.keep_all(row.size)) return measure_masses(d);
  if (!measure_peaks(d)) {
    d.lse = std::numeric_limits<double>::quiet_NaN();
    return;
  }
  if (f.min_p > 0)
    d.threshold = static_cast<float>(d.top + static_cast<double>(f.temperature) * std::log(f.min_p));
  float lower = d.threshold;
  if (by_rank) {
    lower = std::max(lower, kth_bound(d, f.top_k));
  } else if (f.min_p <= 0) {
    measure_kept(d);
    lower = kth_bound(d, kFirstRank);
  }
  list_tokens(d, lower);
  if (by_rank && f.top_k <= static_cast<int64_t>(d.kept.size())) {
    std::vector<float>& values = values_of(d, lower);
    const auto kth = values.begin() + (f.top_k - 1);
    std::nth_element(values.begin(), kth, values.end(), std::greater<>());
    d.threshold = std::max(d.threshold, *kth);
  }
  bool complete = true;
  if (by_mass) {
    const double listed = weight_of(d, d.threshold);
    const bool only_top_p = !by_rank && f.min_p <= 0;
    const double total =
        only_top_p ? std::exp(d.lse - static_cast<double>(d.top) / d.temperature) : listed;
    complete = listed >= f.top_p * total;
    d.threshold = complete ? nucleus_end(d, values_of(d, d.threshold), f.top_p * total)
                           : wide_nucleus_end(d, f.top_p, total);
  }
  list_or_measure(d, complete);
}
}  // namespace foretoken
