// Products of rows with weights in block formats, on integers.
//
// A row of activations is rounded to eight bits, 32 numbers at a time with a scale of their own: what
// engines of these formats do, and what makes them fast. A product then is exact integer sums over 32
// inputs, turned to floats and added in the order of the inputs: the same bits in any batch, and but
// for the rounding of scales on any processor.
#pragma once

#include <vector>

#include "formats.h"
#include "simd.h"

namespace foretoken {

// Of one row and 32 inputs: x is about scale * code. `sum`: of the codes of each half; `total`: scale
// times both.
struct Activation {
  float scale, total;
  int32_t sum[2];
};

// Rows of activations, rounded. NaN and infinities make the scale of their group so.
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

// Bytes of a panel: its outputs' codes and scales, interleaved, so that a vector holds the same four
// inputs of one output in each lane.
int64_t panel_bytes(Kind kind, int64_t inputs, int64_t group, int64_t outputs);

// Write a zeroed panel from rows of a file, one for each output, or none (no data). False: a scale is
// not finite.
bool fill_panel(Kind kind, const FileRow* rows, int64_t inputs, int64_t group, uint8_t* panel);

// A panel, and whether the processor is told what to fetch ahead (`Fetch`, gemm.h).
struct Panel {
  Kind kind;
  const uint8_t* data;
  int64_t inputs, group;
  bool hints;
};

// `count` rows (1 to kRows), from `first` on, times a panel, into out[count][outputs of a panel].
void multiply_panel(const Activations& x, int64_t first, int64_t count, const Panel& panel,
                    float* out);

}  // namespace foretoken
