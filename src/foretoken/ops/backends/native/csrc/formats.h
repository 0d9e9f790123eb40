// Weights as stored in files: plain numbers, or blocks that share scales (GGUF, compressed-tensors). A
// block format stores integers, the codes; and for 32 inputs of an output a scale and a minimum, perhaps
// as products of a float of the block and a small integer: weight = scale * (code - offset) - minimum.
#pragma once
#include <cstdint>

namespace foretoken {
// Numbered as in `ops/backends/native/stack.py: KINDS`.
enum Kind : int64_t {
  kF32, kBF16, kF16, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K, kInt8, kInt4
};

constexpr int64_t kGroup = 32;  // inputs that share a scale of the activations, and of most formats

// Rows of a matrix as stored in a file.
struct Part {
  int64_t kind;
  const uint8_t* data;
  const float* scales;           // for kInt8 and kInt4: [count, inputs / group]
  const int64_t* order;          // the stored row of each output; null: output i is row i
  int64_t count, stride, group;  // number of rows, bytes of a row, inputs per scale
};

struct FileRow {
  Kind kind;
  const uint8_t* data;
  const float* scales;
};

// The rows of several parts, one part after the other.
struct Matrix {
  const Part* const* parts;
  int64_t count;
};

int64_t rows_of(const Matrix& matrix);
FileRow row_of(const Part& part, int64_t row);
FileRow row_of(const Matrix& matrix, int64_t row);
void decode_row(const FileRow& row, int64_t inputs, float* out);

// A step of a row: inputs 32 * step, ..., 32 * step + 31.
struct Codes {
  uint8_t code[kGroup];
  uint8_t scale, minimum;  // the small integers, if the format has these; kQ6_K: scales of both halves
};
void read_codes(const FileRow& row, int64_t step, Codes* out);

// The floats of the block that contains `step`, as FP16 bits; minimum: 0 if the format has none.
struct BlockScales {
  uint16_t scale, minimum;
};
BlockScales read_scales(const FileRow& row, int64_t step);
float half_to_float(uint16_t bits);
}  // namespace foretoken
