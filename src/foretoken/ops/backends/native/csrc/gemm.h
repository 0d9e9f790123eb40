// Products of a few rows with packed weights.
//
// Every output is one chain of fused multiply-adds over k = 0, 1, ..., K-1, or over groups of 32 inputs
// (`quantised.h`), for any number of rows, threads and tiles: a row gives the same bits in any batch.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "call.h"
#include "formats.h"
#include "pool.h"
#include "quantised.h"
#include "simd.h"

namespace foretoken {

constexpr int kRows = 6;                          // rows of a register tile
constexpr int kVecs = kWidth == 16 ? 4 : 2;       // vectors of a register tile
constexpr int kPanel = kVecs * kWidth;            // columns of a register tile

// Memory of a decoder's weights, in one piece, so that even matrices of some 100 KB lie in huge pages
// (decision 013).
class Arena {
 public:
  Arena() = default;
  explicit Arena(int64_t bytes);
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  ~Arena();
  uint8_t* take(int64_t bytes);  // aligned to a cache line, zero
  static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  static constexpr int64_t kHuge = int64_t{2} << 20;
  uint8_t* mapped_ = nullptr;
  int64_t size_ = 0, taken_ = 0;
};

// A weight [N, K] as panels of kPanel outputs: [panels][K][kPanel] for plain numbers, else as in
// `quantised.h`. Unused columns of a panel are zero.
//
// With kBF16, the upper 16 bits of a float, a word holds the same lane of two adjacent vectors, the
// first in its low half: one shift and one mask turn both into floats.
class Packed {
 public:
  Packed() = default;
  // group: inputs per scale, for kInt8 and kInt4.
  Packed(int64_t outputs, int64_t inputs, Kind kind, int64_t group, Arena& arena);
  // `row_at(output)`: its row in `matrix`, -1 for none. `matrix_bias` may be null. Throws `NotFinite`.
  template <typename RowAt>
  void fill(const Matrix& matrix, const float* matrix_bias, const RowAt& row_at) {
    if (matrix_bias) bias.assign(outputs, 0.0f);
    std::atomic<bool> finite{true};
    parallel_for(panels, true, [&](int64_t p) {
      FileRow rows[kPanel] = {};
      for (int64_t c = 0; c < kPanel && p * kPanel + c < outputs; c++) {
        const int64_t row = row_at(p * kPanel + c);
        if (row < 0) continue;
        rows[c] = row_of(matrix, row);
        if (matrix_bias) bias[p * kPanel + c] = matrix_bias[row];
      }
      if (!fill_panel(p, rows)) finite = false;
    });
    if (!finite) throw NotFinite("a scale is not finite");
  }

  static int64_t size(int64_t outputs, int64_t inputs, Kind kind, int64_t group) {  // of an arena
    return (outputs + kPanel - 1) / kPanel * panel_size(inputs, kind, group);
  }
  int64_t bytes() const { return panels * panel_size(inputs, kind, group); }
  bool is_plain() const { return kind <= kF16; }
  int64_t outputs = 0, inputs = 0, panels = 0, group = 0;
  Kind kind = kF32;
  std::vector<float> bias;
  const uint8_t* panel(int64_t index) const {
    return weights_ + index * panel_size(inputs, kind, group);
  }

 private:
  static int64_t panel_size(int64_t inputs, Kind kind, int64_t group) {
    if (kind > kF16) return panel_bytes(kind, inputs, group, kPanel);
    return kPanel * inputs * (kind == kF32 ? 4 : 2);
  }
  bool fill_panel(int64_t p, const FileRow* rows);
  uint8_t* weights_ = nullptr;
};

// Whether weights are prefetched; results do not depend on it.
enum class Fetch : int64_t { kNoHint, kHint };
constexpr int kFetches = 2;

// The fastest, as measured, for one row and for up to kRows rows that share each read.
struct Fetches {
  Fetch one = Fetch::kHint, few = Fetch::kHint;
};

// One register tile: `rows` rows of x (stride `inputs`) times panel `p`, into out[rows][kPanel].
void multiply(const float* x, int rows, const Packed& w, int64_t p, float* out, Fetch fetch);

// One row times two adjacent panels, into out[2][kPanel], without hints: processors that prefetch by
// themselves do so for both at once (one row of 59 MB: 0.93 ms instead of 1.20, on Zen 5).
void multiply_pair(const float* x, const Packed& w, int64_t p, float* out);

// Whether a product is large enough to be shared among threads (a hand-over costs about 1 us).
inline bool worth_sharing(int64_t rows, const Packed& w) {
  return w.inputs * w.outputs * (rows + 3) > 200000;
}

// The rows of x, rounded for block formats; valid until the next call on this thread.
Activations& rounded(const float* x, int64_t rows, int64_t inputs);

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
  const bool is_plain = w.is_plain();
  if (is_plain && rows == 1 && fetches.one == Fetch::kNoHint && w.panels > 1) {
    parallel_for((w.panels + 1) / 2, worth_sharing(rows, w), [&](int64_t pair) {
      // With an odd number of panels, the last but one is multiplied twice.
      const int64_t p = pair * 2 + 1 < w.panels ? pair * 2 : w.panels - 2;
      float out[2][kPanel];
      multiply_pair(x, w, p, out[0]);
      for (int64_t i = pair * 2 - p; i < 2; i++) finish(0, p + i, out[i]);
    });
    return;
  }
  const Activations* codes = is_plain ? nullptr : &rounded(x, rows, w.inputs);
  // Several tiles read a panel several times: it must stay cached.
  const Fetch fetch = rows == 1 ? fetches.one : rows <= kRows ? fetches.few : Fetch::kHint;
  // With few rows a tile is one panel. Many rows are split, too, so that tiles outnumber threads.
  const int64_t chunk = 16 * kRows, chunks = (rows + chunk - 1) / chunk;
  parallel_for(w.panels * chunks, worth_sharing(rows, w), [&](int64_t tile) {
    const int64_t p = tile / chunks, begin = tile % chunks * chunk;
    const int64_t end = rows < begin + chunk ? rows : begin + chunk;
    float out[kRows][kPanel];
    for (int64_t r = begin; r < end; r += kRows) {
      const int n = static_cast<int>(end - r < kRows ? end - r : kRows);
      if (is_plain) {
        multiply(x + r * w.inputs, n, w, p, out[0], fetch);
      } else {
        const bool hints = r == begin && (rows == 1 ? fetches.one : fetches.few) == Fetch::kHint;
        multiply_panel(*codes, r, n, {w.kind, w.panel(p), w.inputs, w.group, hints}, out[0]);
      }
      for (int i = 0; i < n; i++) finish(r + i, p, out[i]);
    }
  });
}

// The fastest fetches, and the best seconds of a pass over the weights with each, for one row and for
// kRows: either may take 1.3 times as long as the other, depending on processor, size of the weights
// and rows (decision 013). Takes up to 40 passes over `weights`, or over their first 256 MiB, fewer if
// these take long; with the current number of threads.
Fetches measure_fetches(const std::vector<const Packed*>& weights, double seconds[2][kFetches]);

}  // namespace foretoken
