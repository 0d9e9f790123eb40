// Weights as stored in files: plain numbers, or blocks that share scales (GGUF, compressed-tensors).
//
// A block format stores integers ("codes") and, per 32 inputs of an output, their scale and minimum:
// number = scale * (code - offset) - minimum, where scale and minimum may be products of a block's
// float and a small integer.
#pragma once

#include <cstdint>
#include <vector>

namespace foretoken {

// Numbered as in `ops/backends/native/stack.py: KINDS`.
enum Kind : int64_t {
  kF32, kBF16, kF16, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K, kInt8, kInt4
};

constexpr int64_t kGroup = 32;  // inputs that share a scale of the activations, and of most formats

// Rows of a matrix as stored in a file. `order`: the stored row of each output; null: in order.
// `scales`, for kInt8 and kInt4 only: float32 [count, inputs / group].
struct Part {
  int64_t kind;
  const uint8_t* data;
  const float* scales;
  const int64_t* order;
  int64_t count, stride, group;  // rows, bytes from one to the next, inputs per scale
};

struct FileRow {
  Kind kind;
  const uint8_t* data;
  const float* scales;
};

// A matrix: parts one below the other.
struct Matrix {
  const Part* const* parts;
  int64_t count;
};

int64_t rows_of(const Matrix& matrix);
FileRow row_of(const Part& part, int64_t row);
FileRow row_of(const Matrix& matrix, int64_t row);

// The numbers of a row, as float32.
void decode_row(const FileRow& row, int64_t inputs, float* out);

// 32 inputs of a row, from input 32 * step on: unsigned codes; and, in formats with small integers for
// scale and minimum, these integers (kQ6_K: the scales of both halves).
struct Codes {
  uint8_t code[kGroup];
  uint8_t scale, minimum;
};
void read_codes(const FileRow& row, int64_t step, Codes* out);

// Half-precision bits of the block that contains `step`: its scale, and its minimum if it has one.
struct BlockScales {
  uint16_t scale, minimum;
};
BlockScales read_scales(const FileRow& row, int64_t step);

float half_to_float(uint16_t bits);

}  // namespace foretoken
