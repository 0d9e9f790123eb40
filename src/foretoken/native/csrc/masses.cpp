// The streaming passes over a row: maxima, and sums of exponentials, a block at a time.
#include <algorithm>
#include <cmath>

#include "distribution.h"
#include "simd.h"

namespace foretoken {
namespace {

constexpr int64_t kColumn = 16;  // vectors between two maxima that are kept
constexpr int64_t kSegment = kColumn * kWidth;

float peak_of(const float* x, int64_t padded) {
  Vec best[4] = {splat(kMinusInfinity), splat(kMinusInfinity), splat(kMinusInfinity),
                 splat(kMinusInfinity)};
  for (int64_t i = 0; i < padded; i += 4 * kWidth)
    for (int k = 0; k < 4; k++) best[k] = max(load(x + i + k * kWidth), best[k]);
  return max_lane(max(max(best[0], best[1]), max(best[2], best[3])));
}

bool has_nan(const float* x, int64_t padded) {
  IntVec broken = {};
  for (int64_t i = 0; i < padded; i += kWidth) broken |= load(x + i) != load(x + i);
  return any(broken);
}

// Sum of exp((x - peak) / T) over x >= threshold in block j; `scale` is log2(e) / T. If nothing is
// dropped, NaN of a NaN. 2^t = 2^n 2^f with |f| <= 1/2, 2^f to 9e-8 before rounding, 1 at f = 0.
//
// Each step is taken for several vectors at a time: one chain of these operations takes some 40
// cycles, and a processor does not look far enough ahead to find the next.
template <bool cuts>
float sum_of(const Distribution& d, int64_t j, const float* x, float scale) {
  constexpr int kSteps = kWidth == 8 ? 2 : 4;  // what 16 registers hold, or 32
  const Vec peak = splat(d.peak_J[j]), least = splat(d.threshold);
  const int64_t padded = d.row.padded(j);
  Vec sum[kSteps] = {};
  for (int64_t i = 0; i < padded; i += kSteps * kWidth) {
    d.row.fetch(j + 1, i, kSteps * kWidth);
    Vec v[kSteps], t[kSteps], power[kSteps], p[kSteps];
    for (int k = 0; k < kSteps; k++) v[k] = load(x + i + k * kWidth);
    for (int k = 0; k < kSteps; k++) t[k] = max(splat(-126.0f), (v[k] - peak) * scale);
    for (int k = 0; k < kSteps; k++) power[k] = t[k] + kRounding;
    for (int k = 0; k < kSteps; k++) t[k] -= power[k] - kRounding;
    for (int k = 0; k < kSteps; k++) p[k] = t[k] * 1.326472721773109e-3f + 9.671512639579197e-3f;
    for (int k = 0; k < kSteps; k++) p[k] = p[k] * t[k] + 5.550733743189216e-2f;
    for (int k = 0; k < kSteps; k++) p[k] = p[k] * t[k] + 2.4022242085377907e-1f;
    for (int k = 0; k < kSteps; k++) p[k] = p[k] * t[k] + 6.931469775991951e-1f;
    for (int k = 0; k < kSteps; k++) p[k] = p[k] * t[k] + 1.0f;
    for (int k = 0; k < kSteps; k++) {
      const IntVec factor = (IntVec)power[k] << 23;
      sum[k] += p[k] * (Vec)(cuts ? factor & (v[k] >= least) : factor);
    }
  }
  for (int k = 1; k < kSteps; k++) sum[0] += sum[k];
  return sum_lanes(sum[0]);
}

// Column maxima of one block; `broken` gets whether there was a NaN.
float columns_of(const float* x, int64_t padded, float* column, IntVec* broken) {
  Vec top = splat(kMinusInfinity);
  for (int64_t i = 0; i < padded; i += kSegment, column += kWidth) {
    Vec a = splat(kMinusInfinity), b = a;
    IntVec bad = {};
    for (int64_t k = 0; k < kSegment; k += 2 * kWidth) {
      const Vec v = load(x + i + k), w = load(x + i + k + kWidth);
      bad |= (v != v) | (w != w);
      a = max(v, a);
      b = max(w, b);
    }
    *broken |= bad;
    store(column, max(a, b));
    top = max(max(a, b), top);
  }
  return max_lane(top);
}

// sum_J, peak_J -> mass_J and the LSE.
void finish(Distribution& d, const std::vector<float>& sum_J) {
  const Vec scale = splat(d.inverse);
  double total = 0;
  for (size_t j = 0; j < sum_J.size(); j += kWidth) {
    const Vec sum = load(&sum_J[j]), shift = (load(&d.peak_J[j]) - d.top) * scale;
    const Vec mass = sum == Vec{} ? splat(kMinusInfinity) : log(sum) + shift;
    store(&d.mass_J[j], mass);
    const Vec part = sum == Vec{} ? Vec{} : sum * exp2_of(shift * kLog2e);
    for (int i = 0; i < kWidth; i++) total += part[i];
  }
  d.lse = static_cast<double>(d.top) / d.temperature + std::log(total);
}

int64_t padded_blocks(const Row& row) { return (row.blocks() + 63) / 64 * 64; }

template <bool cuts>
void measure_masses_of(Distribution& d) {
  const int64_t blocks = d.row.blocks();
  thread_local std::vector<float> sum_J;
  sum_J.assign(padded_blocks(d.row), 0);
  d.mass_J.resize(padded_blocks(d.row));
  if (!cuts) d.peak_J.assign(padded_blocks(d.row), kMinusInfinity);
  const float scale = d.inverse * kLog2e;
  alignas(64) float buffer[kBlock];
  bool broken = false;
  for (int64_t j = 0; j < blocks; j++) {
    if (cuts && !(d.peak_J[j] >= d.threshold)) continue;
    const float* x = d.row.block(j, buffer);
    const int64_t padded = d.row.padded(j);
    if (!cuts) d.peak_J[j] = peak_of(x, padded);
    if (d.peak_J[j] > kMinusInfinity) {
      sum_J[j] = sum_of<cuts>(d, j, x, scale);
    } else {
      broken |= has_nan(x, padded);
    }
  }
  if (!cuts) d.top = *std::max_element(d.peak_J.begin(), d.peak_J.end());
  if (d.top == kMinusInfinity || broken) {
    d.lse = broken ? std::numeric_limits<double>::quiet_NaN() : kNothing;
    return;
  }
  finish(d, sum_J);
}

}  // namespace

double Distribution::log_of(int64_t id) const {
  if (id >= row.size) return kNothing;
  const float x = row.value(id);
  const double log_p = x >= threshold ? foretoken::log_of(x, temperature, lse) : kNothing;
  return std::isfinite(log_p) ? log_p : kNothing;
}

int64_t Distribution::scaled_block(int64_t j, float* out) const {
  const float* x = row.block(j, out);
  const int64_t padded = row.padded(j);
  for (int64_t i = 0; i < padded; i += kWidth) {
    const Vec v = load(x + i);
    store(out + i, v >= splat(threshold) ? (v - top) * inverse : splat(kMinusInfinity));
  }
  return padded;
}

void measure_masses(Distribution& d) {
  if (d.threshold == kMinusInfinity) {
    measure_masses_of<false>(d);
  } else {
    measure_masses_of<true>(d);
  }
}

bool measure_peaks(Distribution& d) {
  const int64_t blocks = d.row.blocks();
  d.peak_J.assign(padded_blocks(d.row), kMinusInfinity);
  d.column.resize(blocks * (kBlock / kColumn));
  alignas(64) float buffer[kBlock];
  IntVec broken = {};
  for (int64_t j = 0; j < blocks; j++) {
    float* column = d.column.data() + j * (kBlock / kColumn);
    const int64_t padded = d.row.padded(j);
    for (int64_t i = padded / kColumn; i < kBlock / kColumn; i++) column[i] = kMinusInfinity;
    d.peak_J[j] = columns_of(d.row.block(j, buffer), padded, column, &broken);
  }
  d.top = *std::max_element(d.peak_J.begin(), d.peak_J.end());
  return std::isfinite(d.top) && !any(broken);
}

float rank_bound(const Distribution& d, int64_t k) {
  thread_local std::vector<float> best;
  const auto kth = [&] {
    std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), std::greater<>());
    return best[k - 1];
  };
  const int64_t blocks = d.row.blocks();
  float bound = kMinusInfinity;
  if (k <= blocks) {
    best.assign(d.peak_J.begin(), d.peak_J.begin() + blocks);
    bound = kth();
  }
  best.clear();
  for (int64_t j = 0; j < blocks; j++) {
    if (d.peak_J[j] < bound) continue;
    const float* column = d.column.data() + j * (kBlock / kColumn);
    for (int64_t i = 0; i < kBlock / kColumn; i++)
      if (column[i] >= bound) best.push_back(column[i]);
  }
  return k <= static_cast<int64_t>(best.size()) ? kth() : kMinusInfinity;
}

void gather(Distribution& d, float lower) {
  d.kept.clear();
  lower = std::max(lower, -std::numeric_limits<float>::max());
  alignas(64) float buffer[kBlock];
  for (int64_t j = 0; j < d.row.blocks(); j++) {
    if (!(d.peak_J[j] >= lower)) continue;
    const float* x = d.row.block(j, buffer);
    const float* column = d.column.data() + j * (kBlock / kColumn);
    for (int64_t c = 0; c < d.row.padded(j) / kColumn; c++) {
      if (!(column[c] >= lower)) continue;
      const int64_t first = c / kWidth * kSegment + c % kWidth;
      for (int64_t i = first; i < first + kSegment; i += kWidth)
        if (x[i] >= lower) d.kept.push_back({x[i], static_cast<int32_t>(j * kBlock + i)});
    }
  }
}

Largest largest(const Row& row) {
  alignas(64) float buffer[kBlock];
  Largest best{0, kMinusInfinity, true};
  IntVec broken = {};
  int64_t found = -1;
  for (int64_t j = 0; j < row.blocks(); j++) {
    const float* x = row.block(j, buffer);
    const int64_t padded = row.padded(j);
    Vec a = splat(kMinusInfinity), b = a;
    for (int64_t i = 0; i < padded; i += 2 * kWidth) {
      const Vec v = load(x + i), w = load(x + i + kWidth);
      broken |= (v != v) | (w != w);
      a = max(v, a);
      b = max(w, b);
    }
    const float peak = max_lane(max(a, b));
    if (peak > best.logit) best.logit = peak, found = j;
  }
  best.finite = std::isfinite(best.logit) && !any(broken);
  if (found < 0) return best;
  const float* x = row.block(found, buffer);
  while (x[best.id] != best.logit) best.id++;
  best.id += found * kBlock;
  return best;
}

}  // namespace foretoken
