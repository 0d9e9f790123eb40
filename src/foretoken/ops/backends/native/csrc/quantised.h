// Products of rows with weights in block formats, on integers.
//
// A row of activations is rounded to eight bits, with a scale per 32 numbers, as in other engines for
// these formats: that makes them fast. A product is then exact integer sums over 32 inputs, converted
// to floats and added in the order of the inputs: the same bits in any batch, and, except for the
// rounding of scales, on any processor.
#pragma once

#include <vector>

#include "formats.h"
#include "simd.h"

namespace foretoken {

// 32 inputs of one row: x is about scale * code. `sum`: of the codes in each half; `total`: scale
// times both sums.
struct Activation {
  float scale, total;
  int32_t sum[2];
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

// Bytes of a panel: its outputs' codes and scales, interleaved so that each lane of a vector holds the
// same four inputs of its own output.
int64_t panel_bytes(Kind kind, int64_t inputs, int64_t group, int64_t outputs);

// Fill a zeroed panel from a file's rows, one for each output; a row without data is left zero.
// False: a scale is not finite.
bool fill_panel(Kind kind, const FileRow* rows, int64_t inputs, int64_t group, uint8_t* panel);

// A panel, and whether to prefetch (`Fetch`, gemm.h).
struct Panel {
  Kind kind;
  const uint8_t* data;
  int64_t inputs, group;
  bool hints;
};

// `count` rows (1 to kRows), starting with `first`, times a panel, into out[count][panel's outputs].
void multiply_panel(const Activations& x, int64_t first, int64_t count, const Panel& panel,
                    float* out);

}  // namespace foretoken
