// Products of a few rows with packed weights.
//
// Every output is one chain of fused multiply-adds over k = 0, 1, ..., K-1, whatever the number of
// rows, threads or tiles: the same row gives the same bits in any batch.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace foretoken {

constexpr int kRows = 6;                          // rows of a register tile
constexpr int kVecs = kWidth == 16 ? 4 : 2;       // vectors of a register tile
constexpr int kPanel = kVecs * kWidth;            // columns of a register tile

// Memory of a decoder's weights, in one piece, so that matrices of some 100 KB lie in huge pages, too
// (decision 013).
class Arena {
 public:
  explicit Arena(int64_t floats);
  float* take(int64_t floats);  // aligned to a cache line, zero
  static int64_t padded(int64_t floats) { return (floats + 15) / 16 * 16; }

 private:
  struct Free {
    void operator()(float* memory) const;
  };
  std::unique_ptr<float, Free> memory_;
  int64_t taken_ = 0;
};

// How a weight is stored; either way its value is the same float.
// kHalf: the upper 16 bits, all that a bfloat16 checkpoint has. A word holds the same lane of two
// adjacent vectors, the first in its low half: one shift and one mask make floats of both.
enum class Store { kFloat, kHalf };

// A weight [N, K] as panels of kPanel outputs, each stored k by k: [panels][K][kPanel]. Unused
// columns of the last panel are zero.
class Packed {
 public:
  Packed() = default;
  Packed(int64_t outputs, int64_t inputs, Store store, Arena& arena);
  // Outputs first..first+count-1 from row-major `weight` [count, K]; `bias` may be null.
  void fill(int64_t first, const float* weight, const float* bias, int64_t count);

  static int64_t size(int64_t outputs, int64_t inputs, Store store) {  // floats of an arena
    return (outputs + kPanel - 1) / kPanel * row(store) * inputs;
  }
  int64_t bytes() const { return outputs * inputs * (store == Store::kHalf ? 2 : 4); }
  int64_t outputs = 0, inputs = 0, panels = 0;
  Store store = Store::kFloat;
  std::vector<float> bias;
  const float* panel(int64_t index) const { return weights_ + index * inputs * row(store); }

 private:
  static int64_t row(Store store) { return store == Store::kHalf ? kPanel / 2 : kPanel; }
  float* weights_ = nullptr;
};

// Whether the processor is told what weights to fetch ahead of their use; results do not depend on it.
enum class Fetch : int64_t { kNoHint, kHint };
constexpr int kFetches = 2;

// What was measured to be fastest for one row, and for up to kRows that share each read.
struct Fetches {
  Fetch one = Fetch::kHint, few = Fetch::kHint;
};

// One register tile: `rows` rows of x (stride `inputs`) times panel `p`, into out[rows][kPanel].
void multiply(const float* x, int rows, const Packed& w, int64_t p, float* out, Fetch fetch);

// One row times a panel and the next, into out[2][kPanel], without hints: processors that fetch on
// their own do so for both at once (one row of 59 MB: 0.93 ms instead of 1.20, on Zen 5).
void multiply_pair(const float* x, const Packed& w, int64_t p, float* out);

// Whether a product is large enough to be shared among threads (a hand-over costs about 1 us).
inline bool worth_sharing(int64_t rows, const Packed& w) {
  return w.inputs * w.outputs * (rows + 3) > 200000;
}

// For each tile of x [rows, K] times w: epilogue(row, first output, count, values of that row).
template <typename Epilogue>
void product(const float* x, int64_t rows, const Packed& w, Fetches fetches,
             const Epilogue& epilogue) {
  const auto finish = [&](int64_t row, int64_t p, float* out) {
    const int64_t first = p * kPanel;
    const int64_t count = w.outputs - first < kPanel ? w.outputs - first : kPanel;
    if (!w.bias.empty())
      for (int64_t j = 0; j < count; j++) out[j] += w.bias[first + j];
    epilogue(row, first, count, out);
  };
  if (rows == 1 && fetches.one == Fetch::kNoHint && w.panels > 1) {
    parallel_for((w.panels + 1) / 2, worth_sharing(rows, w), [&](int64_t pair) {
      const int64_t p = pair * 2 + 1 < w.panels ? pair * 2 : w.panels - 2;  // odd: one twice
      float out[2][kPanel];
      multiply_pair(x, w, p, out[0]);
      for (int64_t i = pair * 2 - p; i < 2; i++) finish(0, p + i, out[i]);
    });
    return;
  }
  // Several tiles read a panel several times: it must stay cached.
  const Fetch fetch = rows == 1 ? fetches.one : rows <= kRows ? fetches.few : Fetch::kHint;
  // Few rows: a tile is one panel. Many: rows are cut too, so that tiles outnumber threads.
  const int64_t chunk = 16 * kRows, chunks = (rows + chunk - 1) / chunk;
  parallel_for(w.panels * chunks, worth_sharing(rows, w), [&](int64_t tile) {
    const int64_t p = tile / chunks, begin = tile % chunks * chunk;
    const int64_t end = rows < begin + chunk ? rows : begin + chunk;
    float out[kRows][kPanel];
    for (int64_t r = begin; r < end; r += kRows) {
      const int n = static_cast<int>(end - r < kRows ? end - r : kRows);
      multiply(x + r * w.inputs, n, w, p, out[0], fetch);
      for (int i = 0; i < n; i++) finish(r + i, p, out[i]);
    }
  });
}

// The fastest fetches, and the best seconds of a pass over the weights by each, for one row and for
// kRows: either may take 1.3 times as long as the other, by processor, size of the weights and rows
// (decision 013). Takes up to 40 passes over `weights`, or over their first 256 MiB, fewer where these
// take long; with the threads now in force.
Fetches measure_fetches(const std::vector<const Packed*>& weights, double seconds[2][kFetches]);

}  // namespace foretoken
