// The passes over a row: maxima, and sums of exponentials, block by block.
#include <algorithm>
#include "distribution.h"

namespace foretoken {
namespace {
constexpr int64_t kColumn = 16;                 // numbers of a column: one lane of 16 vectors
constexpr int64_t kColumns = kBlock / kColumn;  // columns of a block
constexpr int64_t kSegment = kColumn * kWidth;  // numbers between columns of the same lane
constexpr int kPlaces = 4;                      // places of a row that are read in turn

float peak_of(const float* x, int64_t padded) {
  Vec best[4] = {splat(kMinusInfinity), splat(kMinusInfinity), splat(kMinusInfinity),
                 splat(kMinusInfinity)};
  for (int64_t i = 0; i < padded; i += 4 * kWidth)
    for (int k = 0; k < 4; k++) best[k] = max(load(x + i + k * kWidth), best[k]);
  return max_lane(max(max(best[0], best[1]), max(best[2], best[3])));
}

bool has_nan(const float* x, int64_t padded) {
  IntVec is_nan = {};
  for (int64_t i = 0; i < padded; i += kWidth) is_nan |= load(x + i) != load(x + i);
  return any(is_nan);
}

// Sum of exp((x - peak) / T) over block j, only of x >= threshold if `drops`; else a NaN gives NaN. The
// peak is not -inf. 2^t = 2^n 2^f with |f| <= 1/2; the error of 2^f is 9e-8 before rounding, 0 at f = 0.
// Several vectors take each step together: one by one they would wait some 40 cycles for their results.
template <bool drops>
float sum_of(const Distribution& d, int64_t j, const float* x) {
  constexpr int kSteps = kWidth == 8 ? 2 : 4;  // as many as fit in 16 registers, or 32
  const Vec peak = splat(d.peak_J[j]), least = splat(d.threshold);
  const float scale = d.inverse * kLog2e;
  const int64_t padded = d.row.padded(j);
  Vec sum[kSteps] = {};
  for (int64_t i = 0; i < padded; i += kSteps * kWidth) {
    d.row.prefetch(j + 1, i, kSteps * kWidth);
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
      sum[k] += p[k] * (Vec)(drops ? factor & (v[k] >= least) : factor);
    }
  }
  for (int k = 1; k < kSteps; k++) sum[0] += sum[k];
  return sum_lanes(sum[0]);
}

// Measure peaks and columns of S blocks, `step` apart, which are whole unless S is 1; report NaNs.
template <int S>
void measure_blocks(Distribution& d, int64_t first, int64_t step, IntVec* has_nan) {
  alignas(64) float buffer[S][kBlock];
  const float* x[S];
  Vec top[S];
  for (int s = 0; s < S; s++) {
    x[s] = d.row.block(first + s * step, buffer[s]);
    top[s] = splat(kMinusInfinity);
  }
  float* column = d.column.data() + first * kColumns;
  const int64_t padded = d.row.padded(first + (S - 1) * step);
  IntVec is_nan = {};
  for (int64_t i = 0; i < padded; i += kSegment) {
    Vec a[S], b[S];
    for (int s = 0; s < S; s++) a[s] = b[s] = splat(kMinusInfinity);
    for (int64_t k = i; k < i + kSegment; k += 2 * kWidth) {
      for (int s = 0; s < S; s++) {
        const Vec v = load(x[s] + k), w = load(x[s] + k + kWidth);
        is_nan |= (v != v) | (w != w);
        a[s] = max(v, a[s]);
        b[s] = max(w, b[s]);
      }
    }
    for (int s = 0; s < S; s++) {
      const Vec best = max(a[s], b[s]);
      store(column + s * step * kColumns + i / kColumn, best);
      top[s] = max(best, top[s]);
    }
  }
  *has_nan |= is_nan;
  std::fill(column + padded / kColumn, column + kColumns, kMinusInfinity);
  for (int s = 0; s < S; s++) d.peak_J[first + s * step] = max_lane(top[s]);
}

int64_t padded_blocks(const Row& row) { return (row.blocks() + 63) / 64 * 64; }

// Log-masses, from sums relative to each block's peak. Not inlined: compilers would fuse operations in
// some places only, and `mass_of` differ from `measure_masses` in the last bit, which decides ties.
__attribute__((noinline)) Vec log_mass(const Distribution& d, Vec sum, Vec peak) {
  return sum == Vec{} ? splat(kMinusInfinity) : log(sum) + (peak - d.top) * d.inverse;
}

// Convert the sums in `mass_J` to log-masses, and compute the LSE.
void finish_masses(Distribution& d) {
  double total = 0;
  for (size_t j = 0; j < d.mass_J.size(); j += kWidth) {
    const Vec sum = load(&d.mass_J[j]), peak = load(&d.peak_J[j]);
    store(&d.mass_J[j], log_mass(d, sum, peak));
    const Vec shift = (peak - d.top) * d.inverse;
    const Vec part = sum == Vec{} ? Vec{} : sum * exp2_of(shift * kLog2e);
    for (int i = 0; i < kWidth; i++) total += part[i];
  }
  d.lse = static_cast<double>(d.top) / d.temperature + std::log(total);
}
}  // namespace

double Distribution::log_of(int64_t id) const {
  if (id >= row.size) return kLogZero;
  const float x = row.value(id);
  const double log_p = x >= threshold ? foretoken::log_of(x, temperature, lse) : kLogZero;
  return std::isfinite(log_p) ? log_p : kLogZero;
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

bool measure_peaks(Distribution& d) {
  // A processor does not prefetch the next page, which is the next block in FP32, and waits for it. If
  // blocks are read in turn at four places of the row, it waits for four at a time (decision 011).
  const int64_t whole = d.row.dtype == kFloat32 ? d.row.size / kBlock : 0, step = whole / kPlaces;
  d.peak_J.assign(padded_blocks(d.row), kMinusInfinity);
  d.column.resize(d.row.blocks() * kColumns);
  IntVec has_nan = {};
  for (int64_t j = 0; j < step; j++) measure_blocks<kPlaces>(d, j, step, &has_nan);
  for (int64_t j = step * kPlaces; j < d.row.blocks(); j++) measure_blocks<1>(d, j, 0, &has_nan);
  d.top = *std::max_element(d.peak_J.begin(), d.peak_J.end());
  return std::isfinite(d.top) && !any(has_nan);
}

void measure_masses(Distribution& d) {
  d.peak_J.assign(padded_blocks(d.row), kMinusInfinity);
  d.mass_J.assign(padded_blocks(d.row), 0);
  alignas(64) float buffer[kBlock];
  bool nan_in_empty = false;  // in a block that has no mass; in any other a NaN makes the mass NaN
  for (int64_t j = 0; j < d.row.blocks(); j++) {
    const float* x = d.row.block(j, buffer);
    d.peak_J[j] = peak_of(x, d.row.padded(j));
    if (d.peak_J[j] > kMinusInfinity) {
      d.mass_J[j] = sum_of<false>(d, j, x);
    } else {
      nan_in_empty |= has_nan(x, d.row.padded(j));
    }
  }
  d.top = *std::max_element(d.peak_J.begin(), d.peak_J.end());
  if (d.top == kMinusInfinity || nan_in_empty) {
    d.lse = std::numeric_limits<double>::quiet_NaN();
  } else {
    finish_masses(d);
  }
}

void measure_kept(Distribution& d) {
  alignas(64) float buffer[kBlock];
  d.mass_J.assign(d.peak_J.size(), 0);
  for (int64_t j = 0; j < d.row.blocks(); j++)
    if (d.peak_J[j] > kMinusInfinity && d.peak_J[j] >= d.threshold)
      d.mass_J[j] = sum_of<true>(d, j, d.row.block(j, buffer));
  finish_masses(d);
}

float mass_bound(const Distribution& d, int64_t j) {
  Vec sum = {};
  for (int64_t c = j * kColumns; c < (j + 1) * kColumns; c += kWidth)
    sum += exp2_of((load(&d.column[c]) - d.peak_J[j]) * (d.inverse * kLog2e));
  return log_mass(d, splat(sum_lanes(sum) * kColumn), splat(d.peak_J[j]))[0];
}

float mass_of(const Distribution& d, int64_t j) {
  alignas(64) float buffer[kBlock];
  const float sum = sum_of<false>(d, j, d.row.block(j, buffer));
  return log_mass(d, splat(sum), splat(d.peak_J[j]))[0];
}

float kth_bound(const Distribution& d, int64_t k) {
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
    const float* column = d.column.data() + j * kColumns;
    for (int64_t i = 0; i < kColumns; i++)
      if (column[i] >= bound) best.push_back(column[i]);
  }
  return k <= static_cast<int64_t>(best.size()) ? kth() : kMinusInfinity;
}

void list_tokens(Distribution& d, float lower) {
  d.kept.clear();
  lower = std::max(lower, -std::numeric_limits<float>::max());
  alignas(64) float buffer[kBlock];
  for (int64_t j = 0; j < d.row.blocks(); j++) {
    if (!(d.peak_J[j] >= lower)) continue;
    const float* x = d.row.block(j, buffer);
    const float* column = d.column.data() + j * kColumns;
    for (int64_t c = 0; c < d.row.padded(j) / kColumn; c++) {
      if (!(column[c] >= lower)) continue;
      const int64_t first = c / kWidth * kSegment + c % kWidth;
      for (int64_t i = first; i < first + kSegment; i += kWidth)
        if (x[i] >= lower) d.kept.push_back({x[i], static_cast<int32_t>(j * kBlock + i)});
    }
  }
}

Largest largest(const Row& row) {
  thread_local Distribution d;
  reset(row, 1, d);
  Largest best{0, measure_peaks(d)};
  if (d.top == kMinusInfinity) return best;
  const int64_t j = std::find(d.peak_J.begin(), d.peak_J.end(), d.top) - d.peak_J.begin();
  alignas(64) float buffer[kBlock];
  const float* x = row.block(j, buffer);
  best.id = j * kBlock + (std::find(x, x + kBlock, d.top) - x);
  return best;
}
}  // namespace foretoken
