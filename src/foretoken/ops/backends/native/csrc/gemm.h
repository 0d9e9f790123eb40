// Products of a few rows with packed weights. Every output is one chain of fused multiply-adds over the
// inputs 0, 1, ..., K - 1, or over groups of 32 inputs: a row gives the same bits in any batch.
//
// For block formats a row is rounded to eight bits, with a scale per 32 numbers, as in other engines.
// Sums over 32 inputs are exact integers, which are converted to floats and added in order.
#pragma once
#include <atomic>
#include <vector>
#include "call.h"
#include "formats.h"
#include "pool.h"
#include "simd.h"

namespace foretoken {
constexpr int kRows = 6;                          // rows of a register tile
constexpr int kVecs = kWidth == 16 ? 4 : 2;       // vectors of a register tile
constexpr int kPanel = kVecs * kWidth;            // columns of a register tile

// 32 inputs of one row: x is about scale * code.
struct Activation {
  float scale, total;  // total: scale * (sum[0] + sum[1])
  int32_t sum[2];      // of the codes in each half
};

// Rows of rounded activations. NaN and infinities make the scale of their group NaN.
class Activations {
 public:
  void round(const float* x, int64_t rows, int64_t inputs);
  const int8_t* codes(int64_t row) const { return codes_.data() + row * inputs_; }
  const Activation* groups(int64_t row) const { return groups_.data() + row * inputs_ / kGroup; }

 private:
  void round_group(const float* x, int64_t group);
  int64_t inputs_ = 0;
  std::vector<int8_t> codes_;
  std::vector<Activation> groups_;
};

// A panel of a block format. Each lane of its vectors of codes holds four inputs of one output.
struct Panel {
  Kind kind;
  const uint8_t* data;
  int64_t inputs, group;
  bool hints;  // whether to prefetch
};
int64_t panel_bytes(Kind kind, int64_t inputs, int64_t group, int64_t outputs);

// Fill a zeroed panel from a file's rows that have data; returns false if a scale is not finite.
bool fill_panel(Kind kind, const FileRow* rows, int64_t inputs, int64_t group, uint8_t* panel);

// `count` rows (1 to kRows), starting with `first`, times a panel, into out[count][kPanel].
void multiply_panel(const Activations& x, int64_t first, int64_t count, const Panel& panel, float* out);

// Memory for the weights of a stack in one piece, for huge pages even of small matrices (decision 013).
class Arena {
 public:
  Arena() = default;
  explicit Arena(int64_t bytes);
  Arena& operator=(Arena&& other) noexcept;
  ~Arena();
  uint8_t* take(int64_t bytes);  // aligned to a cache line, zero
  static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  static constexpr int64_t kHuge = int64_t{2} << 20;
  uint8_t* mapped_ = nullptr;
  int64_t size_ = 0, taken_ = 0;
};

// A weight [N, K] as panels of kPanel outputs: [panels][K][kPanel] for plain numbers, else `Panel`s;
// unused columns are 0. A word of kBF16 holds one lane of two adjacent vectors, the first in the low half.
class Packed {
 public:
  Packed() = default;
  Packed(int64_t outputs, int64_t inputs, Kind kind, int64_t group, Arena& arena);
  // row_at(output): the row of `matrix` for this output, -1 for none. `matrix_bias` may be null.
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
    if (!finite) throw NotFinite();
  }

  static int64_t size(int64_t outputs, int64_t inputs, Kind kind, int64_t group) {  // in bytes
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

// Whether weights are prefetched by hints; results do not depend on it.
enum class Fetch : int64_t { kNoHint, kHint };
constexpr int kFetches = 2;

struct Fetches {
  Fetch one = Fetch::kHint, few = Fetch::kHint;  // for one row, for 2 to kRows rows
};

// A register tile: `rows` rows of x times panel `p`, into out[rows][kPanel].
void multiply(const float* x, int rows, const Packed& w, int64_t p, float* out, Fetch fetch);

// One row times panels `p` and p + 1, into out[2][kPanel], without hints: a processor that prefetches by
// itself does so for both (one row times 59 MB on Zen 5: 0.93 ms instead of 1.20).
void multiply_pair(const float* x, const Packed& w, int64_t p, float* out);

// Whether a product takes longer than handing parts of it to other threads, about 1 us.
inline bool worth_sharing(int64_t rows, const Packed& w) {
  return w.inputs * w.outputs * (rows + 3) > 200000;
}

// The rows of x, rounded for block formats, until the next call on this thread.
Activations& rounded(const float* x, int64_t rows, int64_t inputs);

// x [rows, K] times w: calls epilogue(row, first, count, values) with `count` outputs, from `first` on.
template <typename Epilogue>
void product(const float* x, int64_t rows, const Packed& w, Fetches fetches, const Epilogue& epilogue) {
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
  // With more than kRows rows a panel is read several times, and should stay in the cache.
  const Fetch fetch = rows == 1 ? fetches.one : rows <= kRows ? fetches.few : Fetch::kHint;
  // A tile of the pool is a panel times up to 16 register tiles, so that tiles outnumber threads.
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

// Measure the seconds of a pass over the first 256 MiB of weights with each `Fetch`, for one row and for
// kRows rows, and return the fastest: a pass with the other may take 1.3 times as long (decision 013).
Fetches measure_fetches(const std::vector<const Packed*>& weights, double seconds[2][kFetches]);
}  // namespace foretoken
